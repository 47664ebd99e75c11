"""A pass over the episodes of a source that cannot all be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rbtool import CorruptDataError
from rbtool.core.format import checks
from rbtool.core.format.checks import SourcePass
from rbtool.core.format.contracts import Piece, SourceFacts
from rbtool.core.format.converter import Reader
from rbtool.core.progress import Silent
from rbtool.core.testing.datasets import WALK_FIELDS, walk_pieces


class BreaksOff(Reader):
    """Reads three walks in pieces of two steps; the first one is damaged after its first piece."""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".walks"

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        return SourceFacts("walks", "walks/x-v0", WALK_FIELDS, [0, 1, 2], 18)

    def read_episode(self, number: int) -> Iterator[Piece]:
        for piece in walk_pieces([(6, "terminated")] * 3, piece_steps=2):
            if piece.episode == number:
                yield piece
                if not number:
                    raise CorruptDataError("the second piece is damaged")

    def files(self) -> list[Path]:
        return [self.path]


@pytest.mark.parametrize("rows", [1, 1000])
def test_an_episode_that_breaks_off_is_not_joined_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(checks, "_MOST_ROWS", rows)  # rows are passed on to the rules in small groups, or all at once
    (tmp_path / "a.walks").write_text("")
    with BreaksOff(tmp_path / "a.walks") as reader:
        run = SourcePass(reader, None, Silent())
    assert run.unread == {0: ("the second piece is damaged", "")}
    assert [finding.rule for rule in run.rules for finding in rule.findings() if finding.severity == "error"] == []
