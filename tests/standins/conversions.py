"""What tests of converters share: readers of files that a test writes, sources on a server, conversions, refusals."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from static_server import SOUND, Fault, StaticServer

import rbtool
from rbtool.core.errors import AuthorisationError, DatasetNotFoundError, FormatError, NetworkError, RbtoolError
from rbtool.core.format.contracts import Piece, StepReader
from rbtool.core.format.converter import Reader, RemoteDataset, Source
from rbtool.core.format.locate import source_class
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import Final
from rbtool.core.ted.schema import Key
from rbtool.core.testing.readers import ReaderTests
from rbtool.core.testing.sources import SourceTests

Array = np.ndarray[Any, Any]


def with_options(kind: type[Reader], piece_bytes: int | None = None, **options: Any) -> type[Reader]:
    """Derive a reader that has its options and the size of its pieces: the suite opens paths without any."""

    def on_open(self: Any) -> None:
        self.options = {**options, **self.options}
        kind.on_open(self)

    size = {} if piece_bytes is None else {"piece_bytes": piece_bytes}
    return type(f"Small{kind.__name__}" if size else kind.__name__, (kind,), {"on_open": on_open, **size})


class WrittenReaderTests(ReaderTests):
    """The contract of a reader, on a file or folder that `write` makes below a folder."""

    kind: type[Reader]
    options: Mapping[str, Any] = {}
    piece_bytes = 200

    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = self.write(tmp_path_factory.mktemp("made"))

    def write(self, folder: Path) -> Path:
        raise NotImplementedError

    def source(self) -> Path:
        return self.path

    def reader(self) -> type[Reader]:
        return with_options(self.kind, **self.options)

    def with_small_pieces(self) -> Reader:
        return with_options(self.kind, self.piece_bytes, **self.options)(self.source())


def written(cases: Mapping[str, Callable[[Path], Path]]) -> Any:
    """Return a fixture `made` for a `WrittenReaderTests`: its tests run for each of these ways to write a source."""

    @pytest.fixture(autouse=True, params=list(cases))
    def made(self: WrittenReaderTests, request: pytest.FixtureRequest, tmp_path_factory: Any) -> None:
        self.path = cases[request.param](tmp_path_factory.mktemp("made"))

    return made


def converted(source: Path, folder: Path, **options: Any) -> StepReader:
    """Convert, and open the dataset."""
    return open_steps(rbtool.convert(source, folder, **options).path)


def column(reader: StepReader, name: str) -> Array:
    """Read all rows of a field by its dotted name."""
    return reader.read(tuple(name.split(".")), 0, reader.manifest.steps)


def columns_of(reader: StepReader) -> dict[str, Array]:
    """Read all rows of all fields."""
    return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


def texts_of(reader: StepReader, name: str) -> list[str]:
    """Read all rows of a field of text."""
    rows, sizes = column(reader, name), column(reader, f"{name}_length")
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def refused(source: Path, message: str, kind: type[RbtoolError] = FormatError, **options: Any) -> RbtoolError:
    """Convert, and return the error: of this kind, one sentence that matches, if one is given; no file is left."""
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(kind, match=message or None) as caught:
            rbtool.convert(source, Path(folder) / "out", **options)
        assert list(Path(folder).iterdir()) == []
    assert "\n" not in caught.value.message
    return caught.value


def bytes_of(pieces: Iterable[Piece], *more: Key) -> dict[str, bytes]:
    """Return the columns of pieces as bytes: rows before and after each step, actions, rewards, flags, and `more`."""
    pieces = list(pieces)
    assert all(piece.final is not Final.MISSING for piece in pieces if piece.last)
    parts: dict[str, list[Array]] = {
        "observation": [piece.rows_before(("observation",)) for piece in pieces],
        "next": [piece.rows_after(("observation",)) for piece in pieces],
        **{key[-1]: [piece.columns[key] for piece in pieces] for key in (("action",), ("reward",), *more)},
        **{name: [getattr(piece, name) for piece in pieces] for name in ("terminated", "truncated")},
    }
    return {name: b"".join(rows.tobytes() for rows in arrays) for name, arrays in parts.items()}


FAULTS: dict[str, tuple[list[Fault], type[RbtoolError] | None]] = {
    "cut once": ([SOUND, Fault(cut=50), SOUND], None),
    "reset once": ([SOUND, Fault(reset=True), SOUND], None),
    "busy once": ([SOUND, Fault(status=503), SOUND], None),
    "too many requests once": ([SOUND, Fault(status=429, headers={"Retry-After": "0"}), SOUND], None),
    "no ranges": ([Fault(no_range=True)], None),
    "always down": ([Fault(status=503)], NetworkError),
    "refused": ([Fault(status=403)], AuthorisationError),
    "gone": ([Fault(status=404)], DatasetNotFoundError),
}
"""Faults of requests for a file, and the error of a download; None if it succeeds."""


class MirrorSourceTests(SourceTests):
    """The contract of a source of published datasets, one of which the fixture `server` serves."""

    name: str
    id: str
    count: int
    """How many datasets are published."""

    @pytest.fixture(autouse=True)
    def running(self, server: StaticServer) -> None:
        self.server = server

    def source(self) -> Source:
        return source_class(self.name)()

    def first(self, source: Source) -> RemoteDataset:
        return source.describe(self.id)

    def test_all_datasets_are_listed_without_the_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RBTOOL_OFFLINE", "1")
        assert len(rbtool.list_remote(self.name).datasets) == self.count
        assert self.server.asked == []
