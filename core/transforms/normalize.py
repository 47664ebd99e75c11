"""Brings values to a common scale."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from ..errors import SchemaError, UsageError
from .keyed import KeyedTransform, Path

__all__ = ["Normalize"]


class Normalize(KeyedTransform):
    """Takes `loc` off entries and divides them by `scale`: to mean 0 and deviation 1, if that is what these are.

    `loc` and `scale` are numbers, or tensors that expand to one row of the entry. Dimensions whose scale is 0, which
    never varied, are moved and not divided. The same goes for `next`. `clip` then keeps values within so much of 0.
    The type stays; entries of whole numbers become torch's default type of floats. `inverse` undoes it for a value,
    such as an action that a policy gave.

    UsageError (a ValueError) for a scale that is negative, or a loc or scale that is not finite; SchemaError (a
    RuntimeError) for a row that they do not fit.

    >>> from tensordict import TensorDict
    >>> transform = Normalize("observation", loc=torch.tensor([1.0, 5.0]), scale=torch.tensor([2.0, 0.0]))
    >>> transform(TensorDict({"observation": torch.tensor([[3.0, 5.0]])}, [1]))["observation"]
    tensor([[1., 0.]])
    """

    loc: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, in_keys: Any, out_keys: Any = None, *, loc: Any = 0.0, scale: Any = 1.0, clip: float | None = None
    ) -> None:
        super().__init__(in_keys, out_keys)
        loc, scale = (torch.as_tensor(value, dtype=torch.float64) for value in (loc, scale))
        for name, value in (("loc", loc), ("scale", scale)):
            if not bool(value.isfinite().all()):
                raise UsageError(
                    f"{name} is not finite in {int((~value.isfinite()).sum())} of {value.numel()} dimensions"
                )
        if bool((scale < 0).any()):
            raise UsageError(f"scale is {float(scale.min())} in one dimension, 0 or more is expected")
        if clip is not None and not clip > 0:
            raise UsageError(f"clip is {clip}, a number above 0 is expected")
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)
        self.clip = clip

    @property
    def _divisor(self) -> torch.Tensor:
        return torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        row = value.shape[data.ndim :]
        try:
            fits = torch.broadcast_shapes(self.loc.shape, self.scale.shape, row) == row
        except RuntimeError:
            fits = False
        if not fits:
            raise SchemaError(
                f"{'.'.join(key)} has rows of {list(row)}, which loc {list(self.loc.shape)} and scale "
                f"{list(self.scale.shape)} do not fit"
            )
        loc, divisor = (part.to(value.device, dtype) for part in (self.loc, self._divisor))
        value = (value.to(dtype) - loc) / divisor
        return value if self.clip is None else value.clamp(-self.clip, self.clip)

    def inverse(self, value: torch.Tensor) -> torch.Tensor:
        """Bring normalized values back to their own scale; what was clipped stays so."""
        loc, divisor = (part.to(value.device, value.dtype) for part in (self.loc, self._divisor))
        return value * divisor + loc
