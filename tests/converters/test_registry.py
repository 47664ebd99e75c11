import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rbtool
from rbtool import DatasetNotFoundError, FormatError
from rbtool.core.declarations import declared
from rbtool.core.format.contracts import Piece, SourceFacts
from rbtool.core.format.converter import Reader
from rbtool.core.format.locate import open_source, reader_class, reader_names
from rbtool.core.testing.datasets import WALK_FIELDS, walk_pieces

EPISODES = [(3, "terminated"), (2, "open")]


class WalksReader(Reader):
    """A reader that somebody else's package brings."""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".walks"

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        return SourceFacts("walks", "walks/x-v0", WALK_FIELDS, [0, 1], 5)

    def read_episode(self, number: int) -> Iterator[Piece]:
        return (piece for piece in walk_pieces(EPISODES) if piece.episode == number)  # type: ignore[arg-type]

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        raise AssertionError("not needed to convert")

    def files(self) -> list[Path]:
        return [self.path]


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("walks", f"{__name__}:WalksReader", "rbtool.readers")
    clash = importlib.metadata.EntryPoint("minari", "nowhere:Nothing", "rbtool.readers")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [clash, entry] if group == "rbtool.readers" else []
    )


@pytest.mark.usefixtures("plugged")
def test_a_plug_in_reads_its_format_and_cannot_take_ours(tmp_path: Path) -> None:
    (tmp_path / "a.walks").write_text("")
    assert reader_names() == [*(one.name for one in declared() if one.reader is not None), "walks"]
    assert reader_class("minari").__module__ == "rbtool.converters.minari.reader"
    assert isinstance(open_source(tmp_path / "a.walks"), WalksReader)
    assert rbtool.convert(tmp_path / "a.walks", tmp_path / "out").steps == 5
    assert rbtool.check(tmp_path / "out").errors == 0


def test_what_nobody_reads_is_refused_with_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"?")
    with pytest.raises(FormatError, match=r"unknown format; supported: minari, d4rl, .*table"):
        open_source(tmp_path / "x.bin")
    with pytest.raises(DatasetNotFoundError, match="not found"):
        open_source(tmp_path / "y.bin")
    with pytest.raises(FormatError, match="no reader for format 'cobol'"):
        reader_class("cobol")
