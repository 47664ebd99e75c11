"""The fields of a dataset as features of LeRobot: what each is called there, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ...core.errors import SchemaError
from ...core.format.manifest import Dropped
from ...core.format.videos import image_key, reference_keys
from ...core.ted.schema import EPISODE, NEXT, NEXT_REWARD, SINGLETONS, Field, Key, key_name, state_keys
from ..export.columns import ExportColumn, columns_of
from .fields import EPISODE_INDEX, FRAME_INDEX, INDEX, TASK_INDEX, TIMESTAMP
from .info import VIDEO

Kind: TypeAlias = Literal["numbers", "text", "image", "video"]
_OWN = (
    (TIMESTAMP, "float32"),
    (FRAME_INDEX, "int64"),
    (EPISODE_INDEX, "int64"),
    (INDEX, "int64"),
    (TASK_INDEX, "int64"),
)
"""The columns of every dataset, which are made again."""
MADE: frozenset[Key] = frozenset({("frame",), (TIMESTAMP,), (TASK_INDEX,), ("info", INDEX)})
_OBSERVATION, _IMAGES = "observation", ("observation", "image")
_CHANNELS = frozenset({1, 3, 4})


@dataclass(frozen=True, slots=True)
class ExportFeature:
    """A feature with the leaf that it is made of. `channels_first` is about images; those are written otherwise."""

    name: str
    kind: Kind
    column: ExportColumn
    shape: tuple[int, ...]
    channels_first: bool = False

    @property
    def key(self) -> Key:
        """The key of the leaf."""
        return self.column.field.key

    def document(self, fps: float, names: object = None) -> dict[str, Any]:
        """The entry in `info.json`; `names` are those of the numbers of a row, None where they have none."""
        if self.kind == "text":
            return {"dtype": "string", "shape": [1], "names": None}
        if self.kind == "numbers":
            return {"dtype": self.column.field.dtype, "shape": list(self.shape or (1,)), "names": names}
        axes = ["height", "width", "channels"]
        found: dict[str, Any] = {"dtype": self.kind, "shape": list(self.shape), "names": axes}
        if self.kind == VIDEO:
            found["info"] = {"video.fps": fps, "video.is_depth_map": False, "has_audio": False}
        return found


def own_features() -> dict[str, dict[str, Any]]:
    """The entries of the columns that every dataset has."""
    return {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _OWN}


def features_of(fields: tuple[Field, ...]) -> tuple[list[ExportFeature], list[Dropped]]:
    """Lay out fields as features; return also what is left out. SchemaError where two would have one name."""
    states, references = set(state_keys(fields)), set(reference_keys(fields))
    found: list[ExportFeature] = []
    dropped: list[Dropped] = []
    for column in columns_of(fields):
        key = column.field.key
        if key in MADE or key == EPISODE or (key[0] == NEXT and key[1:] in states):
            continue
        if key in SINGLETONS:
            dropped.append(Dropped(column.field.name, "flags and rewards at the root are not those of the step"))
            continue
        if column.field.dtype in ("bfloat16", "complex64", "complex128"):
            raise SchemaError(f"{column.field.name} is {column.field.dtype}, which LeRobot does not have")
        found.append(_feature(column, key, references, states))
    _require_names(found)
    return found, dropped


def _feature(column: ExportColumn, key: Key, references: set[Key], states: set[Key]) -> ExportFeature:
    field = column.field
    if key in references:
        return ExportFeature(_name(image_key(key), is_image=True, is_state=True), "video", column, ())
    if column.length is not None:
        return ExportFeature(_name(key, is_image=False, is_state=key in states), "text", column, ())
    if key in states and field.dtype == "uint8" and len(field.shape) == 3:
        first = field.shape[2] not in _CHANNELS and field.shape[0] in _CHANNELS
        image = (*field.shape[1:], field.shape[0]) if first else field.shape
        if image[2] in _CHANNELS and all(image):
            return ExportFeature(_name(key, is_image=True, is_state=True), "image", column, image, first)
    shape = () if key == NEXT_REWARD or (key[0] == NEXT and field.shape == (1,)) else field.shape
    return ExportFeature(_name(key, is_image=False, is_state=key in states), "numbers", column, shape)


def _name(key: Key, *, is_image: bool, is_state: bool) -> str:
    if key == (_OBSERVATION,):
        return "observation.images.image" if is_image else "observation.state"
    if key[:2] == _IMAGES and is_image:
        return key_name(("observation", "images", *(key[2:] or ("image",))))
    inner = key[1:] if key[0] == _OBSERVATION else key
    if is_image:
        return key_name(("observation", "images", *inner))
    return key_name((_OBSERVATION, *inner)) if is_state else key_name(key)


def _require_names(found: Iterable[ExportFeature]) -> None:
    names: set[str] = {name for name, _ in _OWN}
    for feature in found:
        if feature.name in names or "/" in feature.name:
            raise SchemaError(f"{feature.column.field.name} would be the feature {feature.name!r}, which is taken")
        names.add(feature.name)
