"""Operations that change values: element types, sizes of images, scales."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ...errors import SchemaError, UsageError, did_you_mean
from ...format.contracts import Array
from ...stats import Moments, QuantileSketch
from ...ted.schema import DTYPES, EPISODE, NEXT, SINGLETONS, Field, Key, key_name
from .base import (
    KEPT,
    BoundOperation,
    Derivation,
    Discount,
    FieldChanges,
    Fields,
    LazyBatch,
    LazyColumn,
    Operation,
    RowOperation,
    in_next,
    names_of,
    pairs_of,
)


@dataclass(frozen=True)
class Cast(RowOperation):
    """Changes the element type of a field, or of a group of them, and of what `next` holds of it.

    Fractions are rounded to the nearest that the type has; a value that would become something else, such as 300 in
    uint8 or 0.5 in int64, is refused.
    """

    name: ClassVar[str] = "cast"
    key: str
    dtype: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(key, dtype) for key, dtype in pairs_of(value, cls.name, "field=type, like observation=float32")]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(
                f"cast {self.key}: {self.dtype!r} is not an element type{did_you_mean(self.dtype, DTYPES)}",
                hint=f"there are {', '.join(DTYPES)}",
            )

    def plan(self, fields: Fields) -> BoundOperation:
        keys = [key for key in fields.twinned(self.key) if fields[key].dtype != self.dtype]
        for key in keys:
            if key in (EPISODE, *KEPT) or fields[key].role == "text":
                what = "it is text" if fields[key].role == "text" else f"it is {fields[key].dtype} in every dataset"
                raise UsageError(f"cast {key_name(key)}={self.dtype}: {what}")
        return FieldChanges.of(
            fields, keys, lambda field: replace(field, dtype=self.dtype), lambda field, lazy: lazy.cast(self.dtype)
        )


_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_LAYOUTS = ("hwc", "chw")
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class ResizeImages(RowOperation):
    """Scales images to `size`, height x width, and what `next` holds of them: bilinear, smoothed where they shrink.

    Rows are `[H, W]`, `[H, W, C]` or `[C, H, W]`, of floats or whole numbers, which are rounded. Channels
    are a dimension of 1, 3 or 4 at one end; `layout` is `hwc` or `chw` where that is not clear. The
    buffer transform of this name does the work, image by image, so that what is around an image never matters.
    """

    name: ClassVar[str] = "resize"
    key: str
    size: str
    layout: str | None = None

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        for key, text in pairs_of(value, cls.name, "field=HEIGHTxWIDTH, like image=84x84"):
            size, _, layout = str(text).partition(":")
            yield cls(key, size, layout or None)

    @property
    def rescales(self) -> str:
        return self.key

    def __post_init__(self) -> None:
        if not _SIZE.fullmatch(self.size):
            raise UsageError(f"resize {self.key}: {self.size!r} is not a size, expected height x width like 84x84")
        if self.layout is not None and self.layout not in _LAYOUTS:
            raise UsageError(
                f"the layout of {self.key!r} is {self.layout!r}, expected hwc or chw"
                f"{did_you_mean(self.layout, _LAYOUTS)}"
            )

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, fields.twinned(self.key), self._resized, self._scaled)

    @property
    def _height_width(self) -> tuple[int, int]:
        height, width = self.size.split("x")
        return int(height), int(width)

    def _resized(self, field: Field) -> Field:
        height, width = self._height_width
        place = self._channels(field)
        shape = field.shape
        if field.role in ("text", "id", "done") or "complex" in field.dtype or 0 in shape:
            raise UsageError(f"resize {field.name}: no images, but {field.dtype} {list(shape)}")
        return replace(
            field, shape={None: (height, width), 0: (shape[0], height, width), 2: (height, width, shape[-1])}[place]
        )

    def _channels(self, field: Field) -> int | None:
        """Which dimension of a row the channels are."""
        shape = field.shape
        if len(shape) == 2:
            return None
        if len(shape) != 3:
            raise UsageError(
                f"resize {field.name}: its rows are {list(shape)}, expected [H, W], [H, W, C] or [C, H, W]"
            )
        if self.layout is not None:
            return 2 if self.layout == "hwc" else 0
        last, first = shape[2] in _CHANNELS, shape[0] in _CHANNELS
        if last == first:
            raise UsageError(
                f"resize {field.name}: which dimension of {list(shape)} has the channels is unclear",
                hint=f"write {self.key}={self.size}:hwc or {self.key}={self.size}:chw",
            )
        return 2 if last else 0

    def _scaled(self, field: Field, lazy: LazyColumn) -> Any:
        place = self._channels(field)
        numbers = lazy.numbers
        images = numbers[:, None] if place is None else np.moveaxis(numbers, 3, 1) if place == 2 else numbers
        if images.shape[2:] == self._height_width:
            return lazy
        scaled = _resize(np.ascontiguousarray(images), self._height_width)
        if place is None:
            scaled = scaled[:, 0]
        elif place == 2:
            scaled = np.ascontiguousarray(np.moveaxis(scaled, 1, 3))
        return scaled


def _resize(images: Array, size: tuple[int, int]) -> Any:
    import torch  # only who resizes waits for it

    from ...transforms.values import Resize as Transform

    transform = Transform(size)
    out = np.empty((*images.shape[:2], *size), images.dtype)
    empty: Any = {}
    for row in range(len(images)):  # one by one: kernels may be chosen by the number of images
        out[row] = transform.change(torch.from_numpy(images[row : row + 1]), ("image",), empty).numpy()[0]
    return out


METHODS = ("mean-std", "min-max", "quantile")
_QUANTILES = (0.01, 0.99)
_WIDEST = 1024
"""Leaves of more numbers a row, like images, share one pair of constants, as `rbtool stats` describes them as one."""

_BLOCK = 1 << 18
"""Numbers that are computed with at a time: in float64, and several times over, they take room."""

Measured: TypeAlias = dict[str, tuple[Moments, QuantileSketch | None]]
"""Statistics of the values of some fields, by name."""


@dataclass(frozen=True)
class Constants:
    """The shift and scale of one field's values: `value * scale + loc` undoes them.

    There is one number for each dimension, row-major, or one for all. `constant` lists dimensions that are not divided,
    because they never vary; their scale is 1. `nan` and `infinite` count the values that were ignored.
    """

    key: str
    loc: tuple[float, ...]
    scale: tuple[float, ...]
    constant: tuple[int, ...] = ()
    nan: int = 0
    infinite: int = 0

    def __post_init__(self) -> None:
        good = len(self.loc) == len(self.scale) and all(map(math.isfinite, (*self.loc, *self.scale)))
        if not good or not all(scale > 0 for scale in self.scale):
            raise UsageError(
                f"the constants of {self.key!r} have {len(self.loc)} numbers in loc and {len(self.scale)} in scale, "
                "expected as many finite ones, and scales above 0"
            )

    def describe(self) -> dict[str, Any]:
        """Return them as JSON."""
        found = {"key": self.key, "loc": list(self.loc), "scale": list(self.scale)}
        counts = {"constant": list(self.constant), "nan": self.nan, "infinite": self.infinite}
        return found | {name: value for name, value in counts.items() if value}

    @property
    def notes(self) -> list[str]:
        """Notes on the result."""
        found = []
        if self.constant:
            which = ", ".join(map(str, self.constant[:20])) + (", …" if len(self.constant) > 20 else "")
            found.append(f"normalize: {self.key} never varies in dimension {which}, which is moved and not divided")
        if self.nan or self.infinite:
            found.append(
                f"normalize: {self.nan:,} NaN and {self.infinite:,} infinite values of {self.key} did not count"
            )
        return found


@dataclass(frozen=True)
class NormalizeFields(RowOperation):
    """Normalises a field, or each field of a group, and its counterpart under `next` with the same constants.

    `mean-std` gives each dimension mean 0 and deviation 1; `min-max` maps its least and greatest value, `quantile` its
    1st and 99th percentile (accurate to 0.2 %), to -1 and 1. Dimensions that never vary are shifted to 0 and not
    divided. The constants are measured on the rows that reach the operation, with every observation of an episode
    counted once, the final one included. NaN and infinite values do not count. Rows with more than 1,024 numbers, such
    as images, share one pair of constants. The result is float32, or float64 if the field was.

    Given `constants` of an earlier run, nothing is measured, so that other data gets the same scale.
    """

    name: ClassVar[str] = "normalize"
    key: str
    method: str = METHODS[0]
    constants: tuple[Constants, ...] = ()

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, Mapping):
            return [cls(str(key), str(method)) for key, method in value.items()]
        named = (name.partition(":") for name in names_of(value, cls.name))
        return [cls(key, method or METHODS[0]) for key, _, method in named]

    @property
    def rescales(self) -> str:
        return self.key

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(
                f"normalize {self.key}: unknown method {self.method!r}, expected one of {', '.join(METHODS)}"
                f"{did_you_mean(self.method, METHODS)}"
            )

    def plan(self, fields: Fields) -> BoundNormalize:
        keys = fields.twinned(self.key)
        for field in (fields[key] for key in keys):
            if field.role in ("text", "id", "done") or "complex" in field.dtype or 0 in field.shape:
                what = f"{field.role} of {field.dtype} {list(field.shape)}"
                raise UsageError(f"normalize {field.name}: it is {what}")
        groups: dict[Key, list[Key]] = {}
        for key in keys:
            root = key[1:] if key[0] == NEXT and key[1:] in keys and key[1:] not in SINGLETONS else key
            groups.setdefault(root, []).append(key)
        for root, group in groups.items():
            shapes = {fields[key].shape for key in group}
            if len(shapes) > 1:
                raise UsageError(f"{key_name(root)!r} has another shape under next, so one scale does not fit both")
        names = sorted(map(key_name, groups))  # constants are kept by name
        if twice := [name for name in set(names) if names.count(name) > 1]:
            raise UsageError(f"normalize {self.key}: two fields are called {min(twice)!r}, expected names that differ")
        return BoundNormalize(fields, self, groups)

    def with_measurements(self, measured: Measured) -> NormalizeFields:
        """Return the operation with its constants; SchemaError where values are spread beyond float64."""
        found = tuple(_constants(name, self.method, *states) for name, states in sorted(measured.items()))
        return NormalizeFields(self.key, self.method, found)


def _constants(name: str, method: str, moments: Moments, sketch: QuantileSketch | None) -> Constants:
    low, high = moments.min, moments.max
    if sketch is not None:
        low, high = sketch.quantiles(_QUANTILES, moments.min, moments.max)
    with np.errstate(over="ignore", invalid="ignore"):
        if method == METHODS[0]:
            loc, scale = moments.mean, moments.std
        else:
            loc, scale = low + (high - low) / 2, (high - low) / 2
    still = ~(scale > 0) & ~np.isnan(scale) | moments.constant
    loc = np.where(moments.constant, np.where(moments.count > 0, moments.min, 0.0), loc)
    scale = np.where(still, 1.0, scale)
    with np.errstate(over="ignore", invalid="ignore"):
        reach = np.where(moments.count > 0, np.maximum(moments.max - loc, loc - moments.min), 0.0)
    if not (np.isfinite(loc) & np.isfinite(scale) & np.isfinite(reach)).all():
        raise SchemaError(f"the values of {name!r} are spread beyond what float64 can hold: cast or clip them first")
    return Constants(
        name, tuple(loc.tolist()), tuple(scale.tolist()), tuple(np.flatnonzero(still).tolist()),
        int(moments.nan.sum()), int(moments.infinite.sum()),
    )  # fmt: skip


class BoundNormalize(FieldChanges):
    """A normalization of known fields: it measures, or, with constants, normalizes."""

    def __init__(self, before: Fields, asked: NormalizeFields, groups: Mapping[Key, Sequence[Key]]) -> None:
        self._groups = groups
        self._fields = {root: before[root] for root in groups}
        self._quantiles = asked.method == METHODS[2]
        self.measured = bool(asked.constants)
        known = {part.key: part for part in asked.constants}
        changes: dict[Key, Field | None] = {}
        derived = {}
        for root, group in groups.items():
            part = known.get(key_name(root))
            if self.measured and (part is None or len(part.loc) != self._width(root)):
                count = "none" if part is None else len(part.loc)
                raise UsageError(
                    f"normalize has {count} constants for {key_name(root)!r}, expected {self._width(root)}",
                    hint="they were measured on other fields; leave them out to measure again",
                )
            for key in group:
                old = before[key]
                dtype = "float64" if old.dtype == "float64" else "float32"
                changes[key] = field = Field(key, dtype, old.shape, old.role)
                derived[key] = Derivation((key,), _normalizing(field, part))
        super().__init__(before.replaced(changes), derived)

    def _width(self, root: Key) -> int:
        width = math.prod(self._fields[root].shape)
        return 1 if width > _WIDEST else width

    @property
    def looks_at(self) -> frozenset[Key]:
        """The fields that `measure` needs."""
        return frozenset(key for group in self._groups.values() for key in group)

    def nothing(self) -> Measured:
        """Return the statistics of no rows."""
        return {
            key_name(root): (Moments(self._width(root)), QuantileSketch(self._width(root)) if self._quantiles else None)
            for root in self._groups
        }

    def measure(self, batch: LazyBatch) -> Measured:
        """Take the statistics of some rows."""
        pieces = batch.pieces
        last = (pieces.starts + pieces.rows - 1)[pieces.ends & (pieces.rows > 0)]
        found = self.nothing()
        for root, group in self._groups.items():
            moments, sketch = found[key_name(root)]
            width = self._width(root)
            step = max(1, _BLOCK // width)
            lazies = [batch.columns[root], *(batch.columns[in_next(root)].taken(last) for key in group if key != root)]
            for lazy in lazies:
                values = lazy.numbers.reshape(-1, width)
                for start in range(0, len(values), step):
                    moments.merge(Moments.of(values[start : start + step]))
                    if sketch is not None:
                        sketch.update(values[start : start + step])
        return found


def _normalizing(field: Field, constants: Constants | None) -> Any:
    def compute(inputs: Sequence[LazyColumn]) -> Array:
        assert constants is not None, "the rows are measured first"
        return _normalized(inputs[0].numbers, field, constants)

    return compute


def _normalized(numbers: Array, field: Field, constants: Constants) -> Array:
    """Compute in float64 and round once; part by part, to keep temporaries small."""
    shape = field.shape if len(constants.loc) > 1 else ()
    loc, scale = (np.array(part).reshape(shape) for part in (constants.loc, constants.scale))
    out = np.empty(numbers.shape, field.numpy)
    step = max(1, _BLOCK // max(1, math.prod(field.shape)))
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values stay so
        for start in range(0, len(numbers), step):
            part = np.subtract(numbers[start : start + step], loc, dtype=np.float64)
            out[start : start + step] = np.divide(part, scale, out=part)
    return out
