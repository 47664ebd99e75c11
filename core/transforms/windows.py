"""Transforms along the time of a batch: random windows, and the successor of each step."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from ..errors import SchemaError, require_flags, warn_caller
from ..ted.schema import NEXT_DONE, TRAJECTORY_KEYS
from .base import Transform
from .keyed import NEXT, Path, as_key, as_keys, not_there, require_count, require_named, require_tensordict

_STEP_COUNT = ("step_count",)


class RandomCropTensorDict(Transform):
    """Cuts a window of `sub_seq_len` steps out of every row of a batch; all starts are equally likely.

    Args:
        sub_seq_len: the steps of a window, up to the length of a row.
        sample_dim: the dimension of time, counted from the end.
        mask_key: a bool entry in the batch's shape that marks the real steps, which come first; windows lie within
            them.

    Raises:
        SchemaError: (a RuntimeError) a row is shorter than the window.
        MissingKeyError: (a KeyError) the mask does not exist.
        UsageError: (a ValueError) the window has no steps.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"step": torch.arange(8).expand(3, 8)}, [3, 8])
    >>> RandomCropTensorDict(8)(batch)["step"].shape
    torch.Size([3, 8])
    """

    draws = True

    def __init__(self, sub_seq_len: int, sample_dim: int = -1, mask_key: Any = None) -> None:
        super().__init__()
        if sample_dim >= 0:
            warn_caller(f"sample_dim is {sample_dim}: counting dimensions from the end works for batches of any shape")
        self.sub_seq_len = require_count("sub_seq_len", sub_seq_len, "steps")
        self.sample_dim = sample_dim
        self.mask_key = None if mask_key is None else as_key(mask_key)

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        shape = batch.batch_size
        if not -len(shape) <= self.sample_dim < len(shape):
            raise SchemaError(f"dimension {self.sample_dim} cannot be cut: the batch has the shape {list(shape)}")
        dim = self.sample_dim % len(shape)
        legal = self._lengths(batch, dim) - self.sub_seq_len + 1
        if legal.numel() and int(legal.min()) < 1:
            shortest = int(legal.min()) + self.sub_seq_len - 1
            raise SchemaError(f"sub_seq_len is {self.sub_seq_len}, expected at most the steps of a row, {shortest}")
        generator, device = self.generator, self.generator.device if self.generator is not None else None
        chances = torch.rand(legal.shape, generator=generator, device=device, dtype=torch.float64).to(legal.device)
        starts = (chances * legal).long().minimum(legal - 1).unsqueeze(dim)
        steps = torch.arange(self.sub_seq_len, device=starts.device).view(-1, *[1] * (len(shape) - dim - 1))
        return batch.gather(dim, starts + steps)

    def _lengths(self, batch: TensorDictBase, dim: int) -> torch.Tensor:
        """Return the number of real steps of every row."""
        others = [size for number, size in enumerate(batch.batch_size) if number != dim]
        if self.mask_key is None:
            return torch.full(others, batch.batch_size[dim], device=batch.device)
        mask = batch.get(self.mask_key, None)
        if mask is None:
            raise not_there(self.mask_key, batch)
        if mask.shape[: batch.ndim] != batch.batch_size or mask.numel() != batch.batch_size.numel():
            raise SchemaError(f"the mask has the shape {list(mask.shape)}, expected {list(batch.batch_size)}")
        real: torch.Tensor = mask.reshape(batch.batch_size)
        return real.sum(dim)

    def extra_repr(self) -> str:
        return f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}"


class FillError(SchemaError, TypeError):
    """A fill value does not fit the type of its entry."""


class NextStateReconstructor(Transform):
    """Sets `("next", key)` of every step to `key` of the following step, for data stored without next entries.

    Steps follow one another along the last dimension of the batch, as in slices. Where a step is not continued, the
    entry is `fill_value`: at the end of the batch, and where ids differ, a done flag is set, or `step_count_key` or the
    stored `"index"` does not increase by one. Default entries that are not in the batch are not compared.

    Args:
        keys: the entries.
        traj_key: the entry with ids; default `("collector", "traj_ids")` or `"episode"`.
        done_key: a flag that ends trajectories.
        step_count_key: an entry that counts steps.
        fill_value: the value where there is no successor.
        strict: False ignores a named `traj_key` that does not exist, and treats a batch without separators as one
            trajectory.

    Raises:
        MissingKeyError: (a KeyError) one of `keys`, or an entry passed by name, does not exist.
        SchemaError: (a RuntimeError) no entry separates trajectories.
        FillError: (also a TypeError) the type of an entry cannot hold `fill_value`, for example NaN in whole numbers.
    """

    def __init__(
        self,
        keys: Any,
        traj_key: Any = None,
        done_key: Any = NEXT_DONE,
        step_count_key: Any = _STEP_COUNT,
        fill_value: float = float("nan"),
        strict: bool = True,
    ) -> None:
        require_flags(strict=strict)
        super().__init__()
        self.strict = strict
        self.keys = as_keys(keys)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.done_key = None if done_key is None else as_key(done_key)
        self.step_count_key = None if step_count_key is None else as_key(step_count_key)
        self.fill_value = fill_value

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        if not batch.ndim:
            raise SchemaError("expected a batch of steps, found a single one")
        follows = self._follows(batch)
        rebuilt = {(NEXT, *key): self._shifted(batch, key, follows) for key in self.keys}
        batch = batch.copy()
        for key, value in rebuilt.items():
            batch.set(key, value)
        return batch

    def _follows(self, batch: TensorDictBase) -> torch.Tensor:
        """Return, for each step but the last, whether the next one continues it; bool `[..., T - 1]`."""
        shape = batch.batch_size
        found = []
        if self.strict:
            require_named(batch, filter(None, (self.done_key, self.step_count_key)), defaults=[NEXT_DONE, _STEP_COUNT])
        trajectory = self._trajectories(batch)
        if trajectory is not None:
            ids = trajectory.reshape(*shape, -1)
            found.append((ids[..., 1:, :] == ids[..., :-1, :]).all(-1))
        done = batch.get(self.done_key, None) if self.done_key is not None else None
        if done is not None:
            found.append(~done.reshape(*shape, -1).any(-1)[..., :-1])
        for key in (self.step_count_key, ("index",)):
            count = batch.get(key, None) if key is not None else None
            if count is not None and count.numel() == shape.numel():
                count = count.reshape(shape)
                found.append(count[..., 1:] == count[..., :-1] + 1)
        if not found and not self.strict:
            return torch.ones(*shape[:-1], max(shape[-1] - 1, 0), dtype=torch.bool, device=batch.device)
        if not found:
            raise SchemaError(
                "the batch has no entry that marks the ends of trajectories",
                hint="name traj_key, done_key or step_count_key",
            )
        return torch.stack(found).all(0)

    def _trajectories(self, batch: TensorDictBase) -> torch.Tensor | None:
        if self.traj_key is not None:
            found = batch.get(self.traj_key, None)
            if found is None and self.strict:
                raise not_there(self.traj_key, batch, ", so trajectories cannot be told apart")
            return found  # type: ignore[no-any-return]
        return next(
            (found for key in TRAJECTORY_KEYS["next states"] if (found := batch.get(key, None)) is not None), None
        )

    def _shifted(self, batch: TensorDictBase, key: Path, follows: torch.Tensor) -> torch.Tensor:
        value = batch.get(key, None)
        if value is None:
            raise not_there(key, batch, ", so its next entry cannot be rebuilt")
        time = batch.ndim - 1
        fill = _filling(value, self.fill_value, key)
        rest = value.narrow(time, 1, value.shape[time] - 1)
        mask = follows.view(*follows.shape, *(1,) * (value.dim() - follows.dim()))
        last = fill.expand(value.narrow(time, 0, 1).shape)
        return torch.cat([torch.where(mask, rest, fill), last], time)


def _filling(value: torch.Tensor, fill_value: float, key: Path) -> torch.Tensor:
    if not (value.is_floating_point() or value.is_complex() or float(fill_value).is_integer()):
        raise FillError(
            f"{'.'.join(key)} is {value.dtype}, which cannot hold {fill_value}", hint="pass another fill_value"
        )
    return torch.as_tensor(fill_value, device=value.device).to(value.dtype)
