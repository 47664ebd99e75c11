"""Blocks of whole episodes: what the core makes of them, and blocks that contradict the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.errors import FormatError
from rbtool.core.format.contracts import EpisodeBlock, Piece, SourceFacts
from rbtool.core.format.converter import FINAL_STEPS, Reader
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin, OverlappedBuilder
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.episodes import Final
from rbtool.core.ted.schema import Field, ted_fields
from rbtool.core.testing.rows import error_of

OBSERVATION, ACTION, REWARD = ("observation",), ("action",), ("reward",)
FIELDS = (
    (Field(OBSERVATION, "float32", (2,), "observation"), "state"),
    (Field(ACTION, "int16", (), "action"), "step"),
    (Field(REWARD, "float64", (), "reward"), "result"),
)
ORIGIN = Origin(Request("tables", "tables", "tables"))


class TableReader(Reader):
    """Reads one table of random steps, whose `lengths` are set before it is opened; ends are what `kinds` state.

    A kind is `terminated`, `truncated`, `both`, `open` or `inferred`. `observed` states that next observations are
    stored: those of the episodes in `jumps` do not follow.
    """

    lengths: tuple[int, ...] = (3, 1, 4, 2)
    kinds: tuple[str, ...] = ("terminated", "truncated", "both", "open")
    observed = False
    jumps: tuple[int, ...] = ()
    per_block = 2
    change: Callable[[EpisodeBlock], EpisodeBlock | Piece] = staticmethod(lambda block: block)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    def on_open(self) -> None:
        draw, rows = np.random.default_rng(3), sum(self.lengths)
        self.stops = np.cumsum(self.lengths)
        self.columns = {
            OBSERVATION: draw.normal(size=(rows, 2)).astype(np.float32),
            ACTION: draw.integers(-99, 99, rows).astype(np.int16),
            REWARD: draw.normal(size=rows) * 10.0 ** draw.integers(-9, 9, rows),
        }
        self.after = draw.normal(size=(rows, 2)).astype(np.float32)
        for number, (stop, length) in enumerate(zip(self.stops.tolist(), self.lengths, strict=True)):
            if number not in self.jumps:
                self.after[stop - length : stop - 1] = self.columns[OBSERVATION][stop - length + 1 : stop]
        ends = np.zeros(rows, bool)
        ends[self.stops - 1] = True
        self.terminated, self.truncated = ends.copy(), ends.copy()
        self.terminated[ends] = [kind in ("terminated", "both") for kind in self.kinds]
        self.truncated[ends] = [kind in ("truncated", "both") for kind in self.kinds]

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        numbers = range(10, 10 + len(self.lengths))
        return SourceFacts("tables", "t", FIELDS, numbers, sum(self.lengths), final_missing=not self.observed)

    def files(self) -> list[Path]:
        return [self.path]

    def read_episode(self, number: int) -> Iterator[Piece]:
        at = number - 10
        span = slice(int(self.stops[at]) - self.lengths[at], int(self.stops[at]))
        yield Piece(
            number, {key: rows[span] for key, rows in self.columns.items()}, self.terminated[span],
            self.truncated[span], True, True, next={OBSERVATION: self.after[span]} if self.observed else {},
            final=Final.OBSERVED if self.observed else Final.MISSING, inferred=self.kinds[at] == "inferred",
        )  # fmt: skip

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        for start in range(0, len(numbers), self.per_block):
            yield self.change(self.block(np.array(numbers[start : start + self.per_block])))

    def block(self, numbers: Any) -> EpisodeBlock:
        at = numbers - 10
        lengths = np.array(self.lengths)[at]
        rows = np.concatenate([np.arange(stop - n, stop) for stop, n in zip(self.stops[at], lengths, strict=True)])
        final = Final.OBSERVED if self.observed else Final.MISSING
        return EpisodeBlock(
            numbers, np.cumsum(lengths), {key: column[rows] for key, column in self.columns.items()},
            self.terminated[rows], self.truncated[rows], np.full(len(at), final, np.uint8),
            next={OBSERVATION: self.after[rows]} if self.observed else {},
            inferred=np.array([self.kinds[one] == "inferred" for one in at.tolist()]),
        )  # fmt: skip


def opened(path: Path, final_step: str = "auto", **attributes: Any) -> Reader:
    path.touch()
    return type("Table", (TableReader,), attributes)(path, final_step=final_step)


def written(parts: Any, folder: Path) -> tuple[str, EpisodeTable]:
    with OverlappedBuilder(DatasetBuilder(folder, ted_fields(FIELDS))) as builder:
        ingest = Ingest(builder, FIELDS)
        ingest.run(parts)
        table = ingest.table
        return builder.finish(table, ORIGIN, ingest.text).content_digest, table


KINDS = st.sampled_from(["terminated", "truncated", "both", "open", "inferred"])


@settings(max_examples=60, deadline=None)
@given(
    episodes=st.lists(st.tuples(st.integers(1, 6), KINDS), min_size=1, max_size=7), observed=st.booleans(),
    jumps=st.sets(st.integers(0, 6)), per_block=st.integers(1, 8), choice=st.sampled_from(FINAL_STEPS),
)  # fmt: skip
def test_blocks_make_the_same_dataset_as_pieces(episodes, observed, jumps, per_block, choice, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("both")
    lengths, kinds = zip(*episodes, strict=True)
    made = {"lengths": lengths, "kinds": kinds, "observed": observed, "jumps": tuple(jumps), "per_block": per_block}
    with opened(folder / "source", choice, **made) as reader:
        pieces, expected = written(reader.pieces(), folder / "pieces")
        blocks, table = written(reader.blocks(), folder / "blocks")
        reported = reader.episode_table()
    assert pieces == blocks
    for name, column in expected.columns().items():
        assert table.columns()[name].tobytes() == column.tobytes() == reported.columns()[name].tobytes(), name


def test_pieces_and_blocks_may_come_mixed(tmp_path: Path) -> None:
    class Mixed(TableReader):
        def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
            yield from self.read_episode(numbers[0])
            yield self.block(np.array(numbers[1:3]))
            yield from self.read_episode(numbers[3])

    (tmp_path / "source").touch()
    with Mixed(tmp_path / "source") as reader:
        assert written(reader.pieces(), tmp_path / "one")[0] == written(reader.blocks(), tmp_path / "other")[0]


def with_column(key: tuple[str, ...], rows: Callable[[Any], Any]) -> Callable[[EpisodeBlock], EpisodeBlock]:
    return lambda block: replace(block, columns={**block.columns, key: rows(block.columns[key])})


CONTRADICTIONS: dict[str, tuple[Callable[[EpisodeBlock], Any], str]] = {
    "other episodes": (lambda block: replace(block, episodes=block.episodes + 1), "other episodes, expected those"),
    "a column too short": (with_column(ACTION, lambda rows: rows[:-1]), r"is int16 \[3\], expected int16 \[4\]"),
    "another type": (with_column(REWARD, lambda rows: rows.astype(np.float32)), "'reward' is float32"),
    "another shape": (with_column(OBSERVATION, lambda rows: rows[:, :1]), "'observation' is float32"),
    "no actions": (
        lambda block: replace(block, columns={OBSERVATION: block.columns[OBSERVATION]}), "other fields.*: action, rew",
    ),
    "next rows of no state": (
        lambda block: replace(block, next={ACTION: block.columns[ACTION]}), "other fields.*: action",
    ),
    "stops that fall": (lambda block: replace(block, stops=block.stops[::-1]), "where its episodes end"),
    "stops before the end": (lambda block: replace(block, stops=block.stops - 1), "where its episodes end"),
    "an empty episode": (lambda block: replace(block, stops=block.stops * [0, 1]), "where its episodes end"),
    "flags that are numbers": (lambda block: replace(block, terminated=block.terminated * 1), "terminated is int64"),
    "flags that are neither 0 nor 1": (
        lambda block: replace(block, truncated=(block.truncated * np.uint8(2)).view(bool)), "a truth value of 2",
    ),
    "too few flags": (lambda block: replace(block, truncated=block.truncated[1:]), r"truncated is bool \[3\]"),
    "an unknown final": (lambda block: replace(block, final=block.final - 1), "no observation after a last step"),
    "no last observation": (
        lambda block: replace(block, final=np.uint8([Final.OBSERVED] * 2)), "other fields.*: observation",
    ),
    "a block too many": (lambda block: replace(block, episodes=np.array([], int)), "other episodes"),
}  # fmt: skip


@pytest.mark.parametrize("rule", CONTRADICTIONS)
def test_a_block_that_contradicts_the_facts_is_refused(rule: str, tmp_path: Path) -> None:
    change, message = CONTRADICTIONS[rule]
    reader = opened(tmp_path / "source", change=staticmethod(change))
    with reader, pytest.raises(FormatError, match=message):
        list(reader.blocks())


class Half(TableReader):
    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        yield self.block(np.array(numbers[:2]))


class Twice(TableReader):
    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        for number in (*numbers, numbers[-1]):
            yield from self.read_episode(number)


class Inside(TableReader):
    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        [piece] = self.read_episode(numbers[0])
        yield replace(piece, last=False, final=Final.OBSERVED, next={OBSERVATION: piece.columns[OBSERVATION]})
        yield self.block(np.array(numbers[1:]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Half, "episode 12 has no steps"),
        (Twice, "a piece of episode 13, expected another"),
        (Inside, "a block before its last piece"),
    ],
)
def test_episodes_that_are_missing_repeated_or_cut_by_a_block_are_refused(kind, message: str, tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    with kind(tmp_path / "source") as reader, pytest.raises(FormatError, match=message):
        list(reader.blocks())


class LibraryError(NotImplementedError):
    """As pyarrow's for the type of a column."""


@pytest.mark.parametrize("raised", [KeyError("chunk"), LibraryError("int4")])
def test_errors_of_libraries_are_those_of_damaged_files(raised: Exception, tmp_path: Path) -> None:
    def fail(block: EpisodeBlock) -> EpisodeBlock:
        raise raised

    with opened(tmp_path / "source", change=staticmethod(fail)) as reader:
        error = error_of(lambda: list(reader.blocks()))
    assert isinstance(error, FormatError)
    assert f"cannot be read ({type(raised).__name__}" in str(error)
