"""`meta/info.json` of a LeRobot dataset: its version, the names of its files, and its features."""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import CorruptDataError, FormatError
from ...core.format.digest import open_regular, read_regular, refuse_pointer
from ...core.format.documents import parse_json
from ...core.format.manifest import is_inside
from ...core.format.read_errors import FETCH_AGAIN

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
IMAGE, VIDEO = "image", "video"
_POINTER = b"version https://git-lfs"
_MOST_DIMENSIONS = 8
_LARGEST = 1 << 28
_FIELDS = frozenset({"episode_chunk", "episode_index", "chunk_index", "file_index", "video_key"})
_FOLDERS = ("videos", "video")
"""The folder of videos, and the name that some recorders give it."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature as `info.json` states it: `names` are those of the dimensions of an image, from the outermost on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    is_depth: bool = False

    @property
    def is_visual(self) -> bool:
        """Whether rows are images, in columns or in videos."""
        return self.dtype in (IMAGE, VIDEO)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What `info.json` states. `episodes` and `frames` are its totals, None where it has none."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Feature]
    data_path: str
    video_path: str | None
    chunk_size: int
    episodes: int | None
    frames: int | None

    @property
    def shares_files(self) -> bool:
        """Whether a file holds many episodes, as in v3."""
        return self.version.startswith("v3")

    def visual(self, dtype: str) -> list[Feature]:
        """The features of images in columns, or of those in videos."""
        return [feature for feature in self.features.values() if feature.dtype == dtype]

    def data_file(self, **numbers: int) -> str:
        """Name the file of rows for numbers such as `episode_index`, relative to the folder of the dataset."""
        return _filled(self.data_path, "data_path", numbers)

    def video_file(self, **values: Any) -> str:
        """Name the file of a video; it is in `video/` in place of `videos/` where only that folder is there."""
        if self.video_path is None:
            raise FormatError(f"{self.root / INFO} has features in videos, and no video_path")
        name = _filled(self.video_path, "video_path", values)
        usual, other = _FOLDERS
        if name.startswith(f"{usual}/") and not (self.root / usual).is_dir() and (self.root / other).is_dir():
            return f"{other}/{name.removeprefix(f'{usual}/')}"
        return name


def looks_like_lerobot(folder: Path) -> bool:
    """Return whether a folder has `meta/info.json` as LeRobot writes it, or an empty one next to LeRobot's files."""
    info = folder / INFO
    if not info.is_file():
        return False
    with os.fdopen(open_regular(info), "rb") as file:
        head = file.read(1 << 20)
    if b'"codebase_version"' in head:
        return True
    # Recorders that were interrupted leave an empty file, and git-lfs a pointer.
    damaged = not head.strip() or head.startswith(_POINTER)
    return damaged and any(
        (folder / "meta" / name).exists() for name in ("episodes.jsonl", "tasks.parquet", "episodes")
    )


def require_content(path: Path, what: str, *, hint: str = FETCH_AGAIN) -> None:
    """Raise CorruptDataError for a file that is missing, is empty, or is a pointer of git-lfs; `what` is its use."""
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing: {what}", hint=hint)
    if not path.stat().st_size:
        raise CorruptDataError(f"{path} is an empty file: {what}", hint=hint)
    refuse_pointer(path)


def read_info(root: Path) -> DatasetInfo:
    """Read `info.json`; raises FormatError for a version that is not known and for entries of another kind."""
    path = root / INFO
    require_content(path, "it states what the dataset has")
    content = parse_json(read_regular(path), str(path))
    if not isinstance(content, dict):
        raise FormatError(f"{path} is {type(content).__name__}, expected an object")
    version = content.get("codebase_version")
    if version not in VERSIONS:
        raise FormatError(
            f"{path} has the version {version!r}, expected one of {', '.join(VERSIONS)}",
            hint="convert it with the lerobot package first" if str(version).startswith("v1") else "",
        )
    features = content.get("features")
    if not isinstance(features, dict) or not features:
        raise FormatError(f"{path} has no features")
    fps = content.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1e6:
        raise FormatError(f"{path}: fps is {fps!r}, expected a number of frames a second")
    return DatasetInfo(
        root=root,
        version=version,
        fps=float(fps),
        features={name: _feature(path, name, entry) for name, entry in features.items()},
        data_path=_template(path, "data_path", content.get("data_path")),
        video_path=None if content.get("video_path") is None else _template(path, "video_path", content["video_path"]),
        chunk_size=_count(path, "chunks_size", content.get("chunks_size")) or 1000,
        episodes=_count(path, "total_episodes", content.get("total_episodes")),
        frames=_count(path, "total_frames", content.get("total_frames")),
    )


def _count(path: Path, name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise FormatError(f"{path}: {name} is {value!r}, expected a number from 0")
    return value


def _feature(path: Path, name: str, entry: Any) -> Feature:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise FormatError(f"{path}: the feature {name!r} has no dtype")
    shape = entry.get("shape", [])
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if any(isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < _LARGEST for size in sizes):
        raise FormatError(f"{path}: the feature {name!r} has the shape {shape!r}, expected a list of sizes")
    if len(sizes) > _MOST_DIMENSIONS:
        raise FormatError(f"{path}: the feature {name!r} has {len(sizes)} dimensions, expected at most 8")
    names = entry.get("names")
    named = tuple(names) if isinstance(names, list) and all(isinstance(one, str) for one in names) else ()
    about = entry.get("info") if isinstance(entry.get("info"), dict) else entry.get("video_info")
    is_depth = isinstance(about, dict) and bool(about.get("video.is_depth_map"))
    return Feature(name, entry["dtype"], tuple(sizes), named, is_depth)


def _template(path: Path, name: str, value: Any) -> str:
    """Check the template of a file's name: what it is filled with are numbers and names, and nothing of these."""
    try:
        parts = list(string.Formatter().parse(value))
    except (TypeError, ValueError):
        raise FormatError(f"{path}: {name} is {value!r}, expected the template of a path") from None
    for _, field, form, conversion in parts:
        if field is not None and (field not in _FIELDS or conversion or not _is_width(form)):
            raise FormatError(f"{path}: {name} has {{{field}}}, which is unknown; known: {', '.join(sorted(_FIELDS))}")
    return str(value)


def _is_width(form: str | None) -> bool:
    digits = (form or "").removesuffix("d")
    return not digits or (digits.isascii() and digits.isdigit() and len(digits) <= 3)


def _filled(template: str, name: str, values: Mapping[str, Any]) -> str:
    try:
        found = template.format(**values)
    except (KeyError, ValueError) as error:
        raise FormatError(f"{INFO}: {name} {template!r} cannot be filled in: {error}") from error
    if not is_inside(found):
        raise FormatError(f"{INFO}: {name} gives {found!r}, which is outside the dataset")
    return found
