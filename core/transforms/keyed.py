"""What transforms of named entries share: which entry becomes which, at the root and, in step with it, under `next`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, final

import torch
from tensordict import TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from ..format.contracts import own_attributes, refuse_overrides
from .base import Transform

Key: TypeAlias = str | tuple[str, ...]
Path: TypeAlias = tuple[str, ...]

NEXT = "next"


def as_key(key: Any) -> Path:
    """Bring a key into the form of a tuple of names; UsageError (a ValueError) for what is none."""
    path = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, list | tuple) else ()
    if not path or not all(isinstance(part, str) for part in path):
        raise UsageError(f"{key!r} was given for a key, a name or a tuple of names is expected")
    return path


def as_keys(keys: Any) -> list[Path]:
    """Bring one key, or several, into a list; a tuple of names alone is one key, in a list it is one of several."""
    if isinstance(keys, str) or (isinstance(keys, tuple) and keys and all(isinstance(part, str) for part in keys)):
        return [as_key(keys)]
    if not isinstance(keys, Iterable):
        raise UsageError(f"{keys!r} was given for keys, a sequence of them is expected")
    return [as_key(key) for key in keys]


def in_next(key: Path) -> Path | None:
    """Name what an entry is called after the step; None for an entry that is under `next` already."""
    return None if key[0] == NEXT else (NEXT, *key)


def under_next(keys: Iterable[Path]) -> frozenset[Path]:
    """Return the keys under `next`."""
    return frozenset(key for key in keys if key[0] == NEXT)


def require_count(name: str, value: Any, of: str) -> int:
    """Return a whole number from 1; UsageError (a ValueError) for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}, a number of {of} from 1 is expected")
    return value


def in_double(value: torch.Tensor) -> torch.Tensor:
    """Return values in float64, or complex128, in which sums and scales are computed; float32 on devices without."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    if value.device.type == "mps":
        wide = torch.complex64 if value.is_complex() else torch.float32
    return value.to(wide)


def require_discount(gamma: Any) -> float:
    """Return a discount; UsageError (a ValueError) unless it is in (0, 1]."""
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 < gamma <= 1:
        raise UsageError(f"the discount is {gamma!r}, a number above 0 and up to 1 is expected")
    return float(gamma)


def require_tensordict(data: Any, transform: Transform) -> TensorDictBase:
    """Return the data; SchemaError (a RuntimeError) for what has no keys."""
    if not is_tensor_collection(data):
        raise SchemaError(f"{type(transform).__name__} works on tensordicts, found a {type(data).__name__}")
    return data  # type: ignore[no-any-return]


_FINAL = {"forward": "change(value, key, data), and check(batch)", "pairs": "change(value, key, data)"}
"""Methods that find the entries and leave the batch as it is, and what a transform implements instead."""


class KeyedTransform(Transform):
    """Changes named entries on the way out: `in_keys[i]` into `out_keys[i]`, and what `next` holds of them likewise.

    Without `out_keys` values are replaced where they are. An entry under `next` is changed along with that of the
    root, whether it is listed or not, so that the two stay comparable, unless another transform of the class in the
    same `Compose` names it. A subclass implements `change`, and `check` for conditions on the batch; `forward` is
    final. An entry that is missing at the root raises MissingKeyError (a KeyError) unless `missing_tolerance` is set;
    one that is missing under `next` is skipped.
    """

    follows_next = True
    missing_tolerance = False
    """Whether an entry that is not there is passed over."""

    def __init__(self, in_keys: Any, out_keys: Any = None) -> None:
        super().__init__()
        self.in_keys = as_keys(in_keys)
        self.out_keys = list(self.in_keys) if out_keys is None else as_keys(out_keys)
        if len(self.in_keys) != len(self.out_keys):
            raise UsageError(
                f"{type(self).__name__} was given {len(self.in_keys)} in_keys and {len(self.out_keys)} out_keys"
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, KeyedTransform), _FINAL)

    def check(self, batch: TensorDictBase) -> None:
        """Raise SchemaError for a batch that the transform cannot work on; called before any `change`."""

    @abstractmethod
    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> Any:
        """Return what takes the place of one entry, `key`, of a batch; the value itself must not be edited."""

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys)

    @final
    def pairs(self, data: TensorDictBase, elsewhere: frozenset[Path] = frozenset()) -> Sequence[tuple[Path, Path]]:
        """List the entries that are there with what they become: those named, and what belongs to them under `next`.

        What is named `elsewhere` is left to the transform that names it.
        """
        found = []
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            if data.get(key, None) is not None:
                found.append((key, out))
            elif not self.missing_tolerance:
                raise MissingKeyError(f"{'.'.join(key)} is not in the batch, which holds {', '.join(_names(data))}")
            following, out_following = in_next(key), in_next(out)
            if following is None or out_following is None or following in self.in_keys or following in elsewhere:
                continue
            if data.get(following, None) is not None:
                found.append((following, out_following))
        return found

    # Final by _FINAL: nn.Module declares `forward` as an attribute, which mypy does not let a final method override.
    def forward(self, data: Any, elsewhere: frozenset[Path] = frozenset()) -> Any:
        batch = require_tensordict(data, self)
        self.check(batch)
        changed = [(out, self.change(batch.get(key), key, batch)) for key, out in self.pairs(batch, elsewhere)]
        batch = batch.copy()
        for out, value in changed:
            batch.set(out, value)
        return batch

    def extra_repr(self) -> str:
        return ", ".join(
            ".".join(key) if key == out else f"{'.'.join(key)} -> {'.'.join(out)}"
            for key, out in zip(self.in_keys, self.out_keys, strict=True)
        )


def _names(data: TensorDictBase) -> list[str]:
    return [".".join((key,) if isinstance(key, str) else key) for key in data.keys(True, True)]
