"""Exports to LeRobot v3 with rows and videos in Lance tables.

    frames.lance    one row per frame, in order; dots in names of columns become underscores
    videos.lance    one row per video file: its bytes, and the positions of key frames, by which loaders read parts
    meta.lance      the files of the folder meta, which is written, too

The export to LeRobot is written first; then pylance makes the tables from its files in a separate process, and the
files of rows and videos are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ...core.encodings.video import require_pyav
from ...core.errors import FormatError, SchemaError
from ...core.format import fs
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import read_regular
from ..files.exports import FORMAT
from ..lerobot.export import LerobotExporter
from ..lerobot.metadata import FRAMES_TABLE, INFO, META_TABLE, VIDEOS_TABLE
from .tables import LanceProcess, require_pylance

_HEADER = 16


class LanceExporter(LerobotExporter):
    """Writes a dataset of LeRobot with rows and videos in Lance tables."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether rbtool wrote the folder, by `meta/info.json`, and only tables are beside it."""
        try:
            names = {entry.name for entry in path.iterdir()}
            document = json.loads(read_regular(path / INFO))
            expected = {"meta", FRAMES_TABLE, VIDEOS_TABLE, META_TABLE}
            stated = document.get("exported_by"), document.get("storage_format")
            return names <= expected and stated == (FORMAT, "lance")
        except (OSError, ValueError, AttributeError):
            return False

    def prepare(self) -> None:
        """Choose the features, and refuse names that become equal when dots are replaced."""
        require_pylance()
        super().prepare()
        taken: dict[str, str] = {}
        for name in self.columns:
            other = taken.setdefault(_column(name), name)
            if other != name:
                raise SchemaError(
                    f"{other} and {name} would both be the column {_column(name)}: names in Lance have no dots",
                    hint="rename one of them",
                )

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write an export to LeRobot, and turn it into tables."""
        super().write_rows(target, progress)
        info = parse_json(read_regular(target / INFO), INFO)
        fs.replace_file(target / INFO, (dump_json(info | {"storage_format": "lance"}, indent=4) + "\n").encode())
        with LanceProcess() as process:
            rows = sorted((target / "data").rglob("*.parquet"))
            names = [_column(name) for name in pq.read_schema(rows[0]).names]
            _write(process, target / FRAMES_TABLE, self.chosen.steps, "write_rows", _texts(rows), names)
            videos = sorted((target / "videos").rglob("*.mp4"))
            if videos:
                about = _columns([_about_video(path, target / "videos") for path in videos])
                _write(
                    process, target / VIDEOS_TABLE, len(videos), "write_files", _texts(videos), "video_bytes", True,
                    about,
                )  # fmt: skip
            files = sorted(path for path in (target / "meta").rglob("*") if path.is_file())
            about = {"path": [path.relative_to(target / "meta").as_posix() for path in files]}
            _write(process, target / META_TABLE, len(files), "write_files", _texts(files), "data", False, about)
        for name in ("data", "videos"):
            fs.remove(target / name)


def _column(name: str) -> str:
    return name.replace(".", "_")


def _texts(paths: Sequence[Path]) -> list[str]:
    return [str(path.absolute()) for path in paths]


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _write(process: LanceProcess, path: Path, rows: int, do: str, *arguments: Any) -> None:
    found = process.write(path, do, *arguments)
    if found != rows:
        raise FormatError(f"{path} has {found:,} rows after it was written, expected {rows:,}")


def _about_video(path: Path, folder: Path) -> dict[str, Any]:
    """Return the row of a video without its bytes: key and numbers, and the positions of key frames and `moov` box."""
    key, chunk, file = path.relative_to(folder).parts
    stamps, keys = [], []
    with require_pyav().open(str(path)) as container:
        for packet in container.demux(container.streams.video[0]):
            if packet.pts is not None:
                stamps.append(packet.pts)
                if packet.is_keyframe and packet.pos is not None:
                    keys.append((packet.pts, packet.pos))
    shown = np.sort(np.array(stamps, np.int64))
    keys.sort()
    offset, size = _moov(path)
    return {
        "video_key": key, "chunk_index": int(chunk.removeprefix("chunk-")),
        "file_index": int(file.removeprefix("file-").removesuffix(".mp4")), "file_size": path.stat().st_size,
        "moov_offset": offset, "moov_size": size,
        "kf_indices": np.searchsorted(shown, [stamp for stamp, _ in keys]).tolist(),
        "kf_positions": [place for _, place in keys],
    }  # fmt: skip


def _moov(path: Path) -> tuple[int, int]:
    """Return offset and size of the `moov` box of an MP4 file, which lists its frames."""
    offset, whole = 0, path.stat().st_size
    with path.open("rb") as file:
        while offset < whole:
            file.seek(offset)
            header = file.read(_HEADER)
            size = int.from_bytes(header[:4], "big")
            if size == 1:
                size = int.from_bytes(header[8:16], "big")
            size = size or whole - offset
            if header[4:8] == b"moov":
                return offset, size
            if size < 8:
                break
            offset += size
    raise FormatError(f"{path} has no moov box: it is not an MP4 file")
