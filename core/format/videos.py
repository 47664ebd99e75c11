"""Videos that are kept in a dataset: files in `.rbtool/videos`, and the fields whose rows refer to their frames.

A file is named after its content, `ID.mp4`; next to it, `ID.index` lists the positions of its frames. A row of the
field `video.observation.image.top` stands for a row of `observation.image.top`. It has two numbers: the id of the file
and the number of the frame. Files with equal ids are equal, so that rows of several datasets can be joined unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import CorruptDataError, UsageError
from ..ted.schema import NEXT, Field, Key
from . import fs
from .contracts import Array, StepReader
from .documents import dump_json, parse_json
from .files import PREFIX, FileRecord, digest_file, open_regular
from .manifest import VIDEOS
from .memmap.tree import leaf_path
from .staging import link_to_read_only
from .syncing import NewFile

VIDEO = "video"
VideoContents: TypeAlias = Mapping[str, Path | bytes]
"""Files of videos and their indexes by name: the path of each, or its bytes."""
UNDECODED = "frames of kept videos were not decoded: rbtool check decodes some of them, --full all"
"""The note on videos that were copied without being decoded."""
VIDEOS_KEPT = "videos are kept, and frames decoded when batches are read"
"""The beginning of the note that names the kept videos of a dataset."""
_PIECE = 1 << 20
_ID_DIGITS = 15
"""Hexadecimal digits of the digest in an id: 60 bits, which int64 holds."""


def video_id(digest: str) -> int:
    """Return the id of a file with that digest; the id 0 stands for no file."""
    return int(digest.removeprefix(PREFIX)[:_ID_DIGITS], 16)


VIDEO_SUFFIX = ".mp4"


def video_name(number: int) -> str:
    """Return the file name of a video, given its id."""
    return f"{number:0{_ID_DIGITS}x}{VIDEO_SUFFIX}"


_INDEX_SUFFIX = ".index"


def index_name(number: int) -> str:
    """Return the file name of the index of a video, which lists the positions of its frames."""
    return f"{number:0{_ID_DIGITS}x}{_INDEX_SUFFIX}"


def is_video(name: str) -> bool:
    """Whether a file with this name is a video or the index of one."""
    return name.endswith((VIDEO_SUFFIX, _INDEX_SUFFIX))


def reference_field(field: Field) -> Field:
    """Return the field that refers to the frames of an image, int64 `[2]`: the id of the file, and the frame."""
    return Field((VIDEO, *field.key), "int64", (2,), "id")


def reference_keys(fields: Iterable[Field]) -> list[Key]:
    """Return the keys of the fields that refer to frames of videos, at the root and under `next`."""
    alike = (field.key for field in fields if _may_refer(field))
    return [key for key in alike if len(key) > 1 + (key[0] == NEXT) and key[key[0] == NEXT] == VIDEO]


def _may_refer(field: Field) -> bool:
    return (field.dtype, field.shape, field.role) == ("int64", (2,), "id")


def image_key(key: Key) -> Key:
    """Return the key of the image that a field refers to, at the root or under `next`."""
    lead = (NEXT,) if key[0] == NEXT else ()
    return (*lead, *key[len(lead) + 1 :])


def stated_fps(reader: StepReader) -> float | None:
    """Return the frames a second that a document of the source states, such as LeRobot's; None if none does."""
    return fps_of(reader.documents())


def fps_of(documents: Mapping[str, bytes]) -> float | None:
    """Return the frames a second that one of these documents states; None if none does."""
    for name, data in sorted(documents.items()):
        document: Any = parse_json(data, name) if name.endswith("info.json") else None
        stated = document.get("fps") if isinstance(document, dict) else None
        if isinstance(stated, int | float) and not isinstance(stated, bool) and 0 < stated <= 1000:
            return float(stated)
    return None


def at_rate(documents: Mapping[str, bytes], fps: float) -> dict[str, bytes]:
    """Return the documents with another rate in those that state one, so that `stated_fps` reads it."""
    found = dict(documents)
    for name, data in documents.items():
        about: Any = parse_json(data, name) if name.endswith("info.json") else None
        if isinstance(about, dict) and about.get("fps", fps) != fps:
            found[name] = dump_json(about | {"fps": fps}).encode()
    return found


def videos_of_episodes(reader: StepReader, rows: Array) -> dict[str, Path | bytes]:
    """Return the files that the episodes in these rows of the episode table refer to, by name."""
    videos = reader.videos()
    return _chosen(videos, ids_of_episodes(reader, rows) if videos else ())


def ids_of_episodes(reader: StepReader, rows: Array) -> set[int]:
    """Return the ids of the videos that the episodes in these rows of the episode table refer to."""
    table, numbers = reader.episodes, set[int]()
    for key in reference_keys(reader.fields):
        for start, length in zip(table.start[rows].tolist(), table.length[rows].tolist(), strict=True):
            numbers.update(np.unique(reader.read(key, start, start + length)[:, 0]).tolist())
    return numbers


def videos_of_leaves(folder: Path, fields: Iterable[Field], videos: VideoContents) -> dict[str, Path | bytes]:
    """Return the videos among `videos` to which rows refer whose leaf files are in a folder.

    Also fields count that look like references but have another name, so that no row loses its file.
    """
    numbers: set[int] = set()
    for field in fields if videos else ():
        if _may_refer(field):
            with os.fdopen(open_regular(folder / leaf_path(field.key)), "rb") as opened:
                while data := opened.read(_PIECE):
                    numbers.update(np.unique(np.frombuffer(data, field.numpy).reshape(-1, 2)[:, 0]).tolist())
    return _chosen(videos, numbers)


def _chosen(videos: VideoContents, numbers: Iterable[int]) -> dict[str, Path | bytes]:
    """Return the files of the videos with these ids, with their indexes."""
    names = {name for number in numbers for name in (video_name(number), index_name(number))}
    return {name: content for name, content in videos.items() if name in names}


def size_of_videos(videos: VideoContents) -> int:
    """Bytes of all files."""
    return sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in videos.values())


def write_videos(folder: Path, videos: VideoContents) -> list[FileRecord]:
    """Put files of videos into the folder of a dataset; CorruptDataError for a file that was changed.

    For a file of another dataset a hard link is made if possible, so that nothing is written.
    """
    found = []
    for name, content in videos.items():
        path = folder / f"{VIDEOS}{name}"
        if isinstance(content, Path) and (record := _linked(content, path)) is not None:
            size, digest = record
        else:
            file = NewFile(path, mode=0o444)  # never changed, so that datasets may share it
            try:
                if isinstance(content, bytes):
                    file.append(memoryview(content))
                else:
                    _copy(content, file)
                file.sync()
            finally:
                file.close()
            size, digest = file.size, file.digest
        if not isinstance(content, bytes) and name.endswith(VIDEO_SUFFIX) and video_name(video_id(digest)) != name:
            raise CorruptDataError(f"{content} was changed while it was read", hint="run it again")
        found.append(FileRecord(f"{VIDEOS}{name}", size, digest))
    return found


def _linked(source: Path, path: Path) -> tuple[int, str] | None:
    """Make a hard link to a kept video, and return its size and digest; None where that is not possible."""
    place = Path(os.path.realpath(source))  # readers return `/proc/self/fd/N`, a link to the open file
    fs.make_folder(path.parent)
    if place.name != path.name or not link_to_read_only(place, path):
        return None
    if not os.path.samestat(source.stat(), path.lstat()):
        fs.remove(path)
        return None
    return path.stat().st_size, digest_file(path)


def _copy(source: Path, file: NewFile) -> None:
    with os.fdopen(open_regular(source), "rb", buffering=0) as opened:
        while data := opened.read(_PIECE):
            file.append(memoryview(data))


def refuse_videos(reader: StepReader, what: str) -> None:
    """Raise UsageError for a dataset whose images are in kept videos, which `what` cannot hold."""
    if reference_keys(reader.fields):
        raise UsageError(
            f"{reader.path} has images in videos that are kept, which {what} cannot hold",
            hint="convert the original with --images decode, or with --images skip",
        )
