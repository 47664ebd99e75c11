"""Transforms of named entries, which also change the same entries under `next`: a base class, and implementations.

They select, rename and join entries, or change values: images, normalisation, text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection
from torch.nn import functional

from ..errors import (
    CorruptDataError,
    MissingKeyError,
    SchemaError,
    UsageError,
    did_you_mean,
    require_choice,
    require_flags,
    require_number,
)
from ..format.contracts import own_attributes, refuse_overrides
from ..format.documents import parse_json
from ..format.language import EVENTS, PERSISTENT, TASK, TASKS, parse_said, said_in_rows
from ..ted.schema import NEXT, as_key
from .base import Transform

Key: TypeAlias = str | tuple[str, ...]
Path: TypeAlias = tuple[str, ...]


def as_keys(keys: Any) -> list[Path]:
    """Convert one key or several keys to a list. A tuple of names is one key; several keys are a list."""
    if isinstance(keys, str) or (isinstance(keys, tuple) and keys and all(isinstance(part, str) for part in keys)):
        return [as_key(keys)]
    if not isinstance(keys, Iterable):
        raise UsageError(f"keys is {keys!r}, expected a sequence of keys")
    return [as_key(key) for key in keys]


def in_next(key: Path) -> Path | None:
    """Return the key of the same entry under `next`; None if the key is under `next` already."""
    return None if key[0] == NEXT else (NEXT, *key)


def under_next(keys: Iterable[Path]) -> frozenset[Path]:
    """Return the keys that are under `next`."""
    return frozenset(key for key in keys if key[0] == NEXT)


def in_double(value: torch.Tensor) -> torch.Tensor:
    """Return values in float64 or complex128, for sums and scales; in float32 on devices that have no float64."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    if value.device.type == "mps":
        wide = torch.complex64 if value.is_complex() else torch.float32
    return value.to(wide)


def require_tensordict(data: Any, transform: Transform) -> TensorDictBase:
    """Return the data; SchemaError (a RuntimeError) unless it is a tensordict."""
    if not is_tensor_collection(data):
        raise SchemaError(f"{type(transform).__name__} needs a tensordict, found a {type(data).__name__}")
    return data  # type: ignore[no-any-return]


_FINAL = {"forward": "change(value, key, data), and check(batch)", "pairs": "change(value, key, data)"}
"""Final methods of `KeyedTransform`, and what to implement instead."""


class KeyedTransform(Transform):
    """Changes named entries of batches: `in_keys[i]` becomes `out_keys[i]`, and likewise under `next`.

    An entry under `next` is changed together with the one at the root, even if only the latter is listed, so that the
    two stay comparable. If another transform of the class in the same `Compose` lists it, it is left to that one. A
    subclass implements `change`, and `check` for conditions on the batch; `forward` is final.

    Args:
        in_keys: the entries to change.
        out_keys: the entries for the results; by default results replace `in_keys`.

    Raises:
        MissingKeyError: (a KeyError) an entry does not exist at the root, and `missing_tolerance` is not set. A missing
            entry under `next` is skipped.
    """

    follows_next = True
    missing_tolerance = False
    """Whether missing entries are skipped."""

    def __init__(self, in_keys: Any, out_keys: Any = None) -> None:
        super().__init__()
        self.in_keys = as_keys(in_keys)
        self.out_keys = list(self.in_keys) if out_keys is None else as_keys(out_keys)
        if len(self.in_keys) != len(self.out_keys):
            raise UsageError(
                f"{type(self).__name__} has {len(self.in_keys)} in_keys, but {len(self.out_keys)} out_keys"
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, KeyedTransform), _FINAL)

    def check(self, batch: TensorDictBase) -> None:
        """Raise SchemaError if the transform cannot work on a batch; called before any `change`."""

    @abstractmethod
    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> Any:
        """Return the new value of the entry `key` of a batch; the old value must not be edited."""

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys)

    @final
    def pairs(self, data: TensorDictBase, elsewhere: frozenset[Path] = frozenset()) -> Sequence[tuple[Path, Path]]:
        """Return pairs of an existing entry and the entry for its result, at the root and under `next`.

        Entries in `elsewhere` are left to the transforms that list them.
        """
        found = []
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            if data.get(key, None) is not None:
                found.append((key, out))
            elif not self.missing_tolerance:
                raise not_there(key, data)
            following, out_following = in_next(key), in_next(out)
            if following is None or out_following is None or following in self.in_keys or following in elsewhere:
                continue
            if data.get(following, None) is not None:
                found.append((following, out_following))
        return found

    # Made final by `_FINAL`: nn.Module declares `forward` as an attribute, which mypy lets no final method override.
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


def require_named(data: TensorDictBase, keys: Iterable[Path], defaults: Iterable[Path] = ()) -> None:
    """Raise MissingKeyError, with the most similar name, if the batch lacks an entry that the user named.

    Entries that are used by default, `defaults`, may be missing.
    """
    usual = frozenset(defaults)
    for key in keys:
        if key not in usual and data.get(key, None) is None:
            raise not_there(key, data)


def not_there(key: Path, data: TensorDictBase, so: str = "") -> MissingKeyError:
    """Make the error for an entry that a batch lacks; it suggests the most similar name."""
    name, names = ".".join(key), _names(data)
    hint = f"it has {', '.join(names)}" if names else ""
    return MissingKeyError(f"{name} is not in the batch{so}{did_you_mean(name, names)}", hint=hint)


def _names(data: TensorDictBase) -> list[str]:
    return [".".join((key,) if isinstance(key, str) else key) for key in data.keys(True, True)]


# Choosing, renaming and joining entries ------------------------------------------------------------

_REWARDS: tuple[Path, ...] = (("reward",),)
_DONES: tuple[Path, ...] = (("done",), ("terminated",), ("truncated",))


class SelectTransform(Transform):
    """Keeps the named entries, at the root and under `next`, and removes all others; missing ones are ignored.

    TorchRL's transform of this name drops everything under `next` that is not listed; here, an entry that is kept at
    the root is also kept under `next`.

    Args:
        *keys: the entries to keep.
        keep_rewards, keep_dones: whether to keep rewards and end flags as well.

    >>> from tensordict import TensorDict
    >>> step = {"a": torch.zeros(2), "b": torch.ones(2), "next": {"a": torch.zeros(2), "reward": torch.ones(2)}}
    >>> sorted(SelectTransform("a")(TensorDict(step, [2])).keys(True, True), key=str)
    [('next', 'a'), ('next', 'reward'), 'a']
    """

    def __init__(self, *keys: Key, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        require_flags(keep_rewards=keep_rewards, keep_dones=keep_dones)
        super().__init__()
        self.keys = as_keys(list(keys))
        self.keep_rewards = keep_rewards
        self.keep_dones = keep_dones

    def forward(self, data: Any) -> Any:
        kept = [*self.keys, *(_REWARDS if self.keep_rewards else ()), *(_DONES if self.keep_dones else ())]
        kept += [following for key in kept if (following := in_next(key)) is not None]
        return require_tensordict(data, self).select(*kept, strict=False)

    def extra_repr(self) -> str:
        return ", ".join(map(".".join, self.keys))


class ExcludeTransform(Transform):
    """Removes the named entries, at the root and under `next`; missing ones are ignored.

    Args:
        *keys: the entries to remove; a key that begins with `next` is only removed there.
        inverse: whether to remove them on the way in instead of the way out.
    """

    def __init__(self, *keys: Key, inverse: bool = False) -> None:
        require_flags(inverse=inverse)
        super().__init__()
        self.keys = as_keys(list(keys))
        self.inverse = inverse

    def forward(self, data: Any) -> Any:
        return data if self.inverse else self._without(data)

    def inv(self, data: Any) -> Any:
        return self._without(data) if self.inverse else data

    def _without(self, data: Any) -> Any:
        dropped = [*self.keys, *(following for key in self.keys if (following := in_next(key)) is not None)]
        return require_tensordict(data, self).exclude(*dropped)

    def extra_repr(self) -> str:
        return ", ".join(map(".".join, self.keys))


class RenameTransform(Transform):
    """Renames entries: `in_keys` on the way out, and `in_keys_inv` on the way in.

    On the way in, `out_keys_inv[i]` of the data becomes `in_keys_inv[i]` of what is stored. The counterpart under
    `next` is renamed together with an entry, unless another transform of the class in the same `Compose` lists it.

    Args:
        in_keys, out_keys: old and new names on the way out.
        in_keys_inv, out_keys_inv: names in the storage, and names in the data, on the way in.
        create_copy: whether to keep the entry under its old name as well.

    Raises:
        UsageError: (a ValueError) lists differ in length, or a name is both old and new.
        MissingKeyError: (a KeyError) an entry does not exist.
    """

    follows_next = True
    reads_in_keys_only = True
    missing_tolerance = False

    def __init__(
        self, in_keys: Any, out_keys: Any, in_keys_inv: Any = None, out_keys_inv: Any = None, create_copy: bool = False
    ) -> None:
        require_flags(create_copy=create_copy)
        super().__init__()
        self.in_keys, self.out_keys = _renaming(in_keys, out_keys, "in_keys", "out_keys")
        if (in_keys_inv is None) != (out_keys_inv is None):
            raise UsageError("in_keys_inv and out_keys_inv go together: give both or neither")
        self.in_keys_inv, self.out_keys_inv = _renaming(
            in_keys_inv or [], out_keys_inv or [], "in_keys_inv", "out_keys_inv"
        )
        self.create_copy = create_copy

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys)

    def forward(self, data: Any, elsewhere: frozenset[Path] = frozenset()) -> Any:
        return self._renamed(data, self.in_keys, self.out_keys, elsewhere)

    def inv(self, data: Any) -> Any:
        return self._renamed(data, self.out_keys_inv, self.in_keys_inv) if self.in_keys_inv else data

    def _renamed(self, data: Any, old: list[Path], new: list[Path], elsewhere: frozenset[Path] = frozenset()) -> Any:
        batch = require_tensordict(data, self)
        moved: dict[Path, Any] = {}
        gone: list[Path] = []
        for key, name in zip(old, new, strict=True):
            value = batch.get(key, None)
            if value is None and not self.missing_tolerance:
                raise not_there(key, batch, f", so it cannot be renamed to {'.'.join(name)}")
            following = in_next(key)
            pairs = [(key, name), (None if following in old or following in elsewhere else following, in_next(name))]
            for source, target in pairs:
                if source is not None and target is not None and (value := batch.get(source, None)) is not None:
                    moved[target] = value
                    gone.append(source)
        batch = batch.copy() if self.create_copy else batch.exclude(*gone)
        for name, value in moved.items():
            batch.set(name, value)
        return batch


class CatTensors(Transform):
    """Joins entries into one along `dim`, at the root and, if all parts exist there, under `next`.

    Parts are joined in the order of their names. Entries under `next` are left to another transform of the class in the
    same `Compose` that lists one of them.

    Args:
        in_keys: the parts.
        out_key: the joined entry.
        dim: the dimension along which they are joined.
        del_keys: whether to remove the parts.
        unsqueeze_if_oor: whether parts without a dimension `dim` get one.
        sort: False joins in the given order.

    Raises:
        MissingKeyError: (a KeyError) a part does not exist.
        SchemaError: (a RuntimeError) the parts do not fit together.

    >>> from tensordict import TensorDict
    >>> data = TensorDict({"b": torch.zeros(2, 1), "a": torch.ones(2, 2)}, [2])
    >>> CatTensors(["b", "a"], out_key="observation")(data)["observation"].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    """

    follows_next = True
    reads_in_keys_only = True
    missing_tolerance = False

    def __init__(
        self,
        in_keys: Any = None,
        out_key: Key = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ) -> None:
        require_flags(del_keys=del_keys, unsqueeze_if_oor=unsqueeze_if_oor, sort=sort)
        super().__init__()
        if in_keys is None:
            raise UsageError(
                "CatTensors has no in_keys, expected the entries to join",
                hint="TorchRL takes them from the environment, which a buffer does not have",
            )
        keys = as_keys(in_keys)
        self.in_keys = sorted(keys) if sort else keys
        self.out_key = as_keys([out_key])[0]
        self.out_keys = [self.out_key]
        self.dim = dim
        self.del_keys = del_keys
        self.unsqueeze_if_oor = unsqueeze_if_oor

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys)

    def forward(self, data: Any, elsewhere: frozenset[Path] = frozenset()) -> Any:
        batch = require_tensordict(data, self)
        joined = {self.out_key: self._joined([self._part(batch, key) for key in self.in_keys], self.out_key)}
        following = [in_next(key) for key in self.in_keys]
        out_following = None if elsewhere.intersection(following) else in_next(self.out_key)
        parts = [None if key is None else batch.get(key, None) for key in following]
        if out_following is not None and all(part is not None for part in parts):
            joined[out_following] = self._joined(parts, out_following)
        if self.del_keys:
            gone = [*self.in_keys, *(key for key in following if key is not None and out_following in joined)]
            batch = batch.exclude(*gone)
        else:
            batch = batch.copy()
        for key, value in joined.items():
            batch.set(key, value)
        return batch

    @staticmethod
    def _part(batch: Any, key: Path) -> torch.Tensor:
        value = batch.get(key, None)
        if value is None:
            raise not_there(key, batch, ", so it cannot be joined with others")
        return value  # type: ignore[no-any-return]

    def _joined(self, parts: list[Any], out: Path) -> torch.Tensor:
        if self.unsqueeze_if_oor:
            needed = max(max(part.dim() for part in parts), -self.dim if self.dim < 0 else self.dim + 1)
            parts = [part if part.dim() == needed else part.unsqueeze(self.dim) for part in parts]
        try:
            return torch.cat(parts, self.dim)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(
                f"{'.'.join(key)} {list(part.shape)}" for key, part in zip(self.in_keys, parts, strict=True)
            )
            raise SchemaError(f"{'.'.join(out)} cannot be joined along dimension {self.dim} of {shapes}") from error

    def extra_repr(self) -> str:
        return f"{', '.join(map('.'.join, self.in_keys))} -> {'.'.join(self.out_key)}"


def _renaming(old: Any, new: Any, old_name: str, new_name: str) -> tuple[list[Path], list[Path]]:
    before, after = as_keys(old), as_keys(new)
    if len(before) != len(after):
        raise UsageError(f"found {len(before)} {old_name} and {len(after)} {new_name}, expected equally many")
    both = sorted({*before} & {*after})
    if both:
        raise UsageError(f"{'.'.join(both[0])} is in {old_name} and in {new_name}, but it can only be in one of them")
    twice = len(set(after)) < len(after) or len(set(before)) < len(before)
    if twice:
        raise UsageError(
            f"a key is listed twice in {old_name} or {new_name}: {', '.join(map('.'.join, [*before, *after]))}"
        )
    return before, after


_PIXELS = ("pixels",)
_CHANNELS = frozenset({1, 3, 4})
_IMAGE_DIMENSIONS = 3
_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
_SMOOTHED = frozenset({"bilinear", "bicubic"})


class ToTensorImage(KeyedTransform):
    """Converts images `[..., H, W, C]` to `[..., C, H, W]`, and whole numbers from 0 to 255 to fractions.

    Args:
        in_keys, out_keys: the entries, see `KeyedTransform`.
        from_int: whether to divide by 255; None does so for whole numbers. Use True for float images up to 255.
        unsqueeze: whether to give a single image a leading dimension of size 1.
        dtype: the element type of the result; default torch's default type.
        shape_tolerant: whether images whose last dimension is not 1, 3 or 4 are taken to be `[..., C, H, W]` already.

    Raises:
        SchemaError: (a RuntimeError) there are fewer than three dimensions.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"pixels": torch.full((2, 4, 5, 3), 255, dtype=torch.uint8)}, [2])
    >>> image = ToTensorImage()(batch)["pixels"]
    >>> image.shape, image.max()
    (torch.Size([2, 3, 4, 5]), tensor(1.))
    """

    reads_in_keys_only = True

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Any = None,
        out_keys: Any = None,
        shape_tolerant: bool = False,
    ) -> None:
        require_flags(from_int=from_int or False, unsqueeze=unsqueeze, shape_tolerant=shape_tolerant)
        super().__init__(_PIXELS if in_keys is None else in_keys, out_keys)
        self.from_int = from_int
        self.unsqueeze = unsqueeze
        self.dtype = dtype
        self.shape_tolerant = shape_tolerant

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        if value.dim() < 3:
            raise SchemaError(f"expected an image of [..., height, width, channels], found {list(value.shape)}")
        if not self.shape_tolerant or value.shape[-1] in _CHANNELS:
            value = value.movedim(-1, -3)
        whole = not (value.is_floating_point() or value.is_complex())
        dtype = self.dtype or torch.get_default_dtype()
        value = value.to(dtype, memory_format=torch.contiguous_format)
        if whole if self.from_int is None else self.from_int:
            value = value / 255
        return value.unsqueeze(0) if self.unsqueeze and value.dim() == 3 else value.contiguous()


class Resize(KeyedTransform):
    """Scales images `[..., C, A, B]` to `[..., C, w, h]`; the order of the sizes is TorchRL's.

    torchvision is not needed.

    Args:
        w: the first size, or a pair of both.
        h: the second size; default the same as `w`.
        interpolation: `"bilinear"`, `"bicubic"` (both antialiased), `"nearest"`, `"nearest-exact"` or `"area"`. Whole
            numbers are rounded and clamped to the range of their type.
        in_keys, out_keys: the entries, see `KeyedTransform`.

    Raises:
        UsageError: (a ValueError) a size or the interpolation is invalid.
        SchemaError: (a RuntimeError) there are fewer than three dimensions.
    """

    reads_in_keys_only = True

    def __init__(
        self,
        w: int | Sequence[int],
        h: int | None = None,
        interpolation: Any = "bilinear",
        in_keys: Any = None,
        out_keys: Any = None,
    ) -> None:
        super().__init__(_PIXELS if in_keys is None else in_keys, out_keys)
        sizes = (w, w if h is None else h) if isinstance(w, int) else tuple(w)
        if not isinstance(w, int) and (h is not None or len(sizes) not in (1, 2)):
            raise UsageError(f"the size is {w!r} with h={h!r}, expected one number or two")
        sizes = sizes * 2 if len(sizes) == 1 else sizes
        self.w, self.h = (require_number("the size", size, 1, "pixels") for size in sizes)
        self.interpolation = str(getattr(interpolation, "value", interpolation))
        require_choice("interpolation", self.interpolation, _MODES)

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        if value.dim() < 3:
            raise SchemaError(f"expected an image of [..., channels, height, width], found {list(value.shape)}")
        if value.shape[-2:] == (self.w, self.h):
            return value
        images = value.reshape(-1, *value.shape[-3:])
        work = images if images.dtype in (torch.float32, torch.float64) else images.float()
        smooth = {"align_corners": False, "antialias": True} if self.interpolation in _SMOOTHED else {}
        scaled = functional.interpolate(work, (self.w, self.h), mode=self.interpolation, **smooth)
        if not value.is_floating_point():
            limits = torch.iinfo(value.dtype) if value.dtype != torch.bool else None
            low, high = (limits.min, limits.max) if limits is not None else (0, 1)
            scaled = scaled.round().clamp(low, high)
        return scaled.to(value.dtype).reshape(*value.shape[:-2], self.w, self.h)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, w={self.w}, h={self.h}, interpolation={self.interpolation}"


class Normalize(KeyedTransform):
    """Subtracts `loc` from entries and divides them by `scale`, at the root and under `next`.

    Values are computed in float64 and rounded once, as by `rbtool preprocess --normalize`. The element type is kept,
    but whole numbers get torch's default float type. `inverse` restores the original scale of a value, such as an
    action from a policy.

    Args:
        in_keys, out_keys: the entries, see `KeyedTransform`.
        loc, scale: numbers, or tensors that expand to one row of the entry. Dimensions with scale 0, which never
            varied, are shifted but not divided.
        clip: the largest absolute value of results, to which they are clipped; default no limit.

    Raises:
        UsageError: (a ValueError) a scale is negative, or a loc or scale is not finite.
        SchemaError: (a RuntimeError) they do not fit a row of the entry.

    >>> from tensordict import TensorDict
    >>> transform = Normalize("observation", loc=torch.tensor([1.0, 5.0]), scale=torch.tensor([2.0, 0.0]))
    >>> transform(TensorDict({"observation": torch.tensor([[3.0, 5.0]])}, [1]))["observation"]
    tensor([[1., 0.]])
    """

    reads_in_keys_only = True

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
            raise UsageError(f"scale is {float(scale.min())} in one dimension, expected 0 or more")
        if clip is not None and not clip > 0:
            raise UsageError(f"clip is {clip}, expected a number above 0")
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
        wide = in_double(value)
        loc, divisor = (part.to(wide.device, wide.dtype) for part in (self.loc, self._divisor))
        value = ((wide - loc) / divisor).to(dtype)
        return value if self.clip is None else value.clamp(-self.clip, self.clip)

    def inverse(self, value: torch.Tensor) -> torch.Tensor:
        """Restore the original scale of normalised values; clipped values stay clipped."""
        wide = in_double(value)
        loc, divisor = (part.to(wide.device, wide.dtype) for part in (self.loc, self._divisor))
        return (wide * divisor + loc).to(value.dtype if value.is_floating_point() else torch.get_default_dtype())


def channels_first(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch in which images, uint8 or uint16 `[..., height, width, channels]`, have their channels first."""
    dimensions = len(batch.batch_size) + _IMAGE_DIMENSIONS
    for key, value in list(batch.items(True, True)):
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.uint8, torch.uint16):
            continue
        if value.dim() == dimensions and value.shape[-1] in _CHANNELS:
            batch.set(key, value.movedim(-1, -_IMAGE_DIMENSIONS))
    return batch


_LENGTH = "_length"


class DecodeText(Transform):
    """Replaces texts, stored as UTF-8 bytes (uint8 `[..., L]`) with their lengths in bytes (int32 `[...]`), by strings.

    An entry becomes non-tensor data in the batch's shape, and `<key>_length` is removed; likewise under `next`.

    Args:
        in_keys: the entries; default all entries stored in this way.

    Raises:
        MissingKeyError: (a KeyError) an entry does not exist.
        SchemaError: (a RuntimeError) an entry is not stored in this way.
        CorruptDataError: the bytes are not UTF-8.
    """

    follows_next = True

    def __init__(self, in_keys: Any = None) -> None:
        super().__init__()
        self.in_keys = None if in_keys is None else as_keys(in_keys)

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys or ())

    def forward(self, data: Any, elsewhere: frozenset[Path] = frozenset()) -> Any:
        batch = require_tensordict(data, self)
        decoded = {key: self._decoded(batch, key) for key in self._keys(batch) if key not in elsewhere}
        batch = batch.exclude(*(_length_of(key) for key in decoded))
        for key, value in decoded.items():
            batch.set(key, value)
        return batch

    def _keys(self, batch: TensorDictBase) -> list[Path]:
        if self.in_keys is None:
            leaves = [key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)]
            return [key for key in leaves if _length_of(key) in leaves and batch.get(key).dtype == torch.uint8]
        following = [key for key in map(in_next, self.in_keys) if key is not None and batch.get(key, None) is not None]
        return [*self.in_keys, *(key for key in following if key not in self.in_keys)]

    @staticmethod
    def _decoded(batch: TensorDictBase, key: Path) -> Any:
        name, text, length = ".".join(key), batch.get(key, None), batch.get(_length_of(key), None)
        if text is None or length is None:
            raise MissingKeyError(f"{name if text is None else name + _LENGTH} is not in the batch")
        shape = batch.batch_size
        if text.dtype != torch.uint8 or text.shape[:-1] != shape or length.numel() != shape.numel():
            raise SchemaError(
                f"{name} is {text.dtype} {list(text.shape)} with lengths {list(length.shape)}, "
                f"expected text of the batch {list(shape)}"
            )
        rows, counts = text.reshape(-1, text.shape[-1]).numpy(force=True), length.reshape(-1).tolist()
        try:
            strings = [rows[number, :count].tobytes().decode() for number, count in enumerate(counts)]
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{name} is not UTF-8: {error}") from error
        return _stacked(strings, shape)


def _length_of(key: Path) -> Path:
    return (*key[:-1], key[-1] + _LENGTH)


class EpisodeTexts(Transform):
    """Adds the texts of its episode to each step, as non-tensor data in the batch's shape.

    Texts are strings, empty if the episode lacks one. If an episode has several tasks, `language_instruction` is the
    task of the step. LeRobot's language is a list of dicts: `language_persistent` is the same for all steps of an
    episode, `language_events` has the events of the step. Entries that the steps already have are kept.

    Args:
        texts: the texts of each episode, by its number; `{}` for an episode without texts.
        names: the names of the texts that steps get. The names in `texts` are added to this dict, which all datasets of
            a mixture share.

    Raises:
        MissingKeyError: (a KeyError) `episode`, `frame`, `timestamp` or `task_index`, by which texts are found, is not
            in the batch, or not as one number a step.
        SchemaError: (a RuntimeError) the task of a step, or the texts of its episode, are unknown.
    """

    def __init__(self, texts: Mapping[int, Mapping[str, str]], names: dict[str, None] | None = None) -> None:
        super().__init__()
        self._texts = dict(texts)
        self._names = {} if names is None else names
        self._names |= dict.fromkeys(TASK if name == TASKS else name for text in texts.values() for name in text)

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        here = batch.keys()
        names = [name for name in self._names if name not in here]
        episodes = self._numbers(batch, "episode") if names else np.zeros(0)
        found: dict[str, list[Any]] = {name: [None] * len(episodes) for name in names}
        for number in np.unique(episodes).tolist():
            rows = np.flatnonzero(episodes == number)
            if number not in self._texts:
                raise SchemaError(f"the batch has steps of episode {number}, whose texts are unknown")
            for name in names:
                for row, value in zip(rows, self._of_rows(batch, self._texts[number], name, rows), strict=True):
                    found[name][row] = value
        batch = batch.copy()
        for name, values in found.items():
            batch.set(name, _stacked(values, batch.batch_size))
        return batch

    def _of_rows(self, batch: TensorDictBase, text: Mapping[str, str], name: str, rows: Any) -> list[Any]:
        """Return the values of a text for these rows of the batch, which belong to one episode."""
        if name in (PERSISTENT, EVENTS):
            said = parse_said(text.get(name, "[]"), name)
            if None in said:
                return said_in_rows(said, rows, rows)
            frames, times = (self._numbers(batch, key)[rows] for key in ("frame", "timestamp"))
            return said_in_rows(said, frames, times)
        if name != TASK or name in text or TASKS not in text:
            return [text.get(name, "")] * len(rows)
        tasks = parse_json(text[TASKS], TASKS)
        numbers = self._numbers(batch, "task_index")[rows].tolist()
        if not isinstance(tasks, dict) or not {*map(str, numbers)} <= tasks.keys():
            raise SchemaError(
                f"the task of a step is unknown: its episode has the tasks {text[TASKS]}",
                hint="set it: rbtool preprocess DATASET --task EPISODE=TEXT --dest DEST; or convert the source again",
            )
        return [tasks[str(number)] for number in numbers]

    @staticmethod
    def _numbers(batch: TensorDictBase, name: str) -> Any:
        value = batch.get(name, None)
        if value is None or value.numel() != batch.batch_size.numel():
            raise MissingKeyError(
                f"{name} is not in the batch with one number per step, and the texts of steps are found by it"
            )
        return value.reshape(-1).numpy(force=True)


def _stacked(values: list[Any], shape: torch.Size) -> Any:
    """Return a flat list of texts or other objects as non-tensor data in the shape of a batch."""
    if not shape:
        return NonTensorData(values[0])
    width = len(values) // shape[0] if shape[0] else 0
    parts = [_stacked(values[start * width : (start + 1) * width], shape[1:]) for start in range(shape[0])]
    return NonTensorStack(*parts)
