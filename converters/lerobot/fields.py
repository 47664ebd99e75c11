"""The features of a dataset as fields of TED: keys, types, shapes, and when each is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array
from ...core.format.manifest import Dropped
from ...core.format.videos import reference_field
from ...core.ted.schema import DTYPES, FLAGS, NEXT, REWARD, Field, Key, Role, Timing, key_name, role_of, safe_part
from ..files.images import Images
from .metadata import INFO, VIDEO, DatasetInfo, Feature

EPISODE_INDEX, FRAME_INDEX, TASK_INDEX, TIMESTAMP, INDEX = (
    "episode_index", "frame_index", "task_index", "timestamp", "index",
)  # fmt: skip
NEXT_DONE, NEXT_SUCCESS, NEXT_TERMINATED, NEXT_TRUNCATED = (
    "next.done", "next.success", "next.terminated", "next.truncated",
)  # fmt: skip
NEXT_FLAGS = (NEXT_DONE, NEXT_SUCCESS, NEXT_TERMINATED, NEXT_TRUNCATED)
LANGUAGE = "language_instruction"
_KEYS: dict[str, tuple[Key, Role]] = {
    FRAME_INDEX: (("frame",), "id"), TASK_INDEX: ((TASK_INDEX,), "id"), TIMESTAMP: ((TIMESTAMP,), "info"),
    INDEX: (("info", INDEX), "id"),
}  # fmt: skip
"""Columns that every dataset has, which are single numbers. An `index` at the root would be the sampler's."""
_IMAGES = ("observation", "images")
_TAKEN = frozenset({NEXT, "episode", "reward", *(flag[0] for flag in FLAGS)})
"""Names that TED has at the root; a feature of that name is an info."""


@dataclass(frozen=True, slots=True)
class FeatureColumn:
    """A feature with its field, under its root key; `channels_first` is about images.

    `is_kept` states that rows refer to frames of a video."""

    feature: Feature
    field: Field
    timing: Timing
    channels_first: bool = False
    is_kept: bool = False

    @property
    def name(self) -> str:
        """The name of the feature."""
        return self.feature.name


@dataclass
class FeatureColumns:
    """All features that become fields, those that do not with the reason, and those that are text."""

    columns: list[FeatureColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)

    @property
    def fields(self) -> tuple[tuple[Field, Timing], ...]:
        """The fields, as facts have them."""
        return tuple((one.field, one.timing) for one in self.columns)

    def in_files(self) -> list[FeatureColumn]:
        """Columns of the files of rows that are numbers."""
        return [one for one in self.columns if not one.feature.is_visual]


class RowFlags(NamedTuple):
    """Flags of rows, bool `[rows]`; `ends` states whether an episode that ended there would be terminated."""

    terminated: Array
    truncated: Array
    ends: Array


@dataclass(frozen=True, slots=True)
class EndFlags:
    """What flags mean: `next.terminated` and `next.truncated` are clear, `next.done` is used where there are none.

    `done_terminates` states whether it is a termination. Then, `next.success` in the last row of an episode is one too.
    """

    done_terminates: bool

    def of(self, flags: Mapping[str, Array], rows: int) -> RowFlags:
        """Return the flags of rows from the columns that there are."""
        none = np.zeros(rows, bool)
        if NEXT_TERMINATED in flags or NEXT_TRUNCATED in flags:
            terminated = flags.get(NEXT_TERMINATED, none)
            return RowFlags(terminated, flags.get(NEXT_TRUNCATED, none), terminated)
        done = flags.get(NEXT_DONE, none)
        if not self.done_terminates:
            return RowFlags(none, done, none)
        return RowFlags(done, none, done | flags.get(NEXT_SUCCESS, none))


def columns_of(info: DatasetInfo, stored: Mapping[str, str], images: Images) -> FeatureColumns:
    """Lay out the features.

    `stored` has the element type of each column of the files, by name; `images` is what becomes of images.
    FormatError for features whose keys would contain each other.
    """
    found = FeatureColumns()
    for name, feature in sorted(info.features.items()):
        if name == EPISODE_INDEX:
            continue
        if feature.is_visual and images == "skip":
            found.dropped.append(Dropped(name, "images are left out (--images skip)"))
        elif name in NEXT_FLAGS:
            if name not in stored:
                raise FormatError(
                    f"{info.root}: {INFO} has the feature {name!r}, of which the files of rows have no column"
                )
            found.flags.append(name)
            if name == NEXT_SUCCESS:
                found.columns.append(_column(feature, ("success",), "info", "result", "bool", ()))
        elif feature.is_visual:
            _add_image(found, feature, keep=images == "keep" and feature.dtype == VIDEO)
        elif name not in stored:
            raise FormatError(
                f"{info.root}: {INFO} has the feature {name!r}, of which the files of rows have no column"
            )
        elif stored[name] == "string":
            found.text.append(name)
        else:
            _add_numbers(found, info, feature, stored[name])
    for name in sorted(stored.keys() - info.features.keys()):
        found.dropped.append(Dropped(name, f"{INFO} does not name it"))
    _require_apart(info, found.columns)
    return found


def _add_image(found: FeatureColumns, feature: Feature, *, keep: bool) -> None:
    if feature.is_depth:
        found.dropped.append(Dropped(feature.name, "it is a map of depths, which its video holds as colors"))
        return
    shape = feature.shape
    channels = (3,) if feature.dtype == VIDEO else (1, 3, 4)
    if len(shape) != 3 or not all(shape) or not {shape[0], shape[2]} & set(channels):
        found.dropped.append(Dropped(feature.name, f"{list(shape)} is not the shape of an image with channels"))
        return
    first = feature.names[0] in ("channel", "channels", "c") if feature.names else shape[2] not in channels
    key = _key_of(feature.name)
    _note(found, feature.name, key)
    pixels = Field(key, "uint8", shape, "observation")
    field = reference_field(pixels) if keep else pixels
    found.columns.append(FeatureColumn(feature, field, "state", first, keep))


def _add_numbers(found: FeatureColumns, info: DatasetInfo, feature: Feature, stored: str) -> None:
    name = feature.name
    dtype = feature.dtype if feature.dtype in DTYPES and np.can_cast(stored, feature.dtype) else stored
    if dtype not in DTYPES:
        found.dropped.append(Dropped(name, f"its values are {dtype}, which are no numbers"))
        return
    if name in _KEYS:
        key, role = _KEYS[name]
        _note(found, name, key)
        found.columns.append(_column(feature, key, role, "step", dtype, ()))
        return
    if name == "next.reward":
        if int(np.prod(feature.shape, dtype=np.int64)) != 1:
            raise FormatError(f"{info.root}: {name} has the shape {list(feature.shape)}, expected one number")
        found.columns.append(_column(feature, REWARD, "reward", "result", dtype, ()))
        return
    key = _key_of(name)
    if key[0] == NEXT and (len(key) == 1 or key[1] == "observation"):
        found.dropped.append(Dropped(name, "next observations are those of the following row"))
        return
    timing: Timing = "result" if key[0] == NEXT else "state" if key[0] == "observation" else "step"
    key = key[1:] if key[0] == NEXT else key
    key = ("info", *key) if key[0] in _TAKEN else key
    _note(found, name, (NEXT, *key) if timing == "result" else key)
    found.columns.append(_column(feature, key, role_of(key), timing, dtype, feature.shape))


def _column(
    feature: Feature,
    key: Key,
    role: Role,
    timing: Timing,
    dtype: str,
    shape: tuple[int, ...],
) -> FeatureColumn:
    return FeatureColumn(feature, Field(key, dtype, shape, role), timing)


def as_stated(image: Array, column: FeatureColumn, what: str) -> Array:
    """Bring images `[..., height, width, channels]` to the stated form; FormatError where they have another one."""
    found = np.moveaxis(image, -1, -3) if column.channels_first else image
    if found.shape[-3:] != column.feature.shape:
        raise FormatError(
            f"{what}: images have the shape {list(found.shape[-3:])}, info.json states {list(column.feature.shape)}"
        )
    return found


def _key_of(name: str) -> Key:
    """`observation.images.top` is (observation, image, top); the parts of other names are the parts of their keys."""
    parts = tuple(safe_part(part or "_") for part in name.split("."))
    return ("observation", "image", *parts[2:]) if parts[:2] == _IMAGES and len(parts) > 2 else parts


def _note(found: FeatureColumns, name: str, key: Key) -> None:
    if key_name(key) != name:
        found.renamed[name] = key_name(key)


def _require_apart(info: DatasetInfo, columns: Iterable[FeatureColumn]) -> None:
    names: dict[Key, str] = {}
    for column in columns:
        key = column.field.key
        for other, name in names.items():
            if key[: len(other)] == other or other[: len(key)] == key:
                raise FormatError(
                    f"{info.root}: the features {name!r} and {column.name!r} would be {key_name(other)} and "
                    f"{key_name(key)}, one of which contains the other"
                )
        names[key] = column.name
