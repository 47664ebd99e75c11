"""The suite of readers fails for every reader that breaks one rule of the contract: one saboteur a rule."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rbtool.core.format.contracts import Piece, SourceFacts
from rbtool.core.format.converter import Reader
from rbtool.core.testing.datasets import WALK_FIELDS, walk_pieces
from rbtool.core.testing.readers import ReaderTests

LENGTHS = [6, 5, 4]
OBSERVATION, ACTION, REWARD = ("observation",), ("action",), ("reward",)


class SoundReader(Reader):
    """Reads walks of the lengths that a JSON file lists."""

    piece_steps = 1 << 20

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".walks"

    def on_open(self) -> None:
        self.lengths = self.load()

    def load(self) -> list[int]:
        found: list[int] = json.loads(self.path.read_bytes())["lengths"]
        return found

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        return SourceFacts("walks", "walks-v0", WALK_FIELDS, range(len(self.lengths)), sum(self.lengths))

    def read_episode(self, number: int) -> Iterator[Piece]:
        episodes: Any = [(length, "terminated") for length in self.lengths]
        return (piece for piece in walk_pieces(episodes, piece_steps=self.piece_steps) if piece.episode == number)

    def files(self) -> list[Path]:
        return [self.path]


def broken(**methods: Any) -> type[Reader]:
    """The sound reader with other methods."""
    return type("Broken", (SoundReader,), methods)


def whole(change: Callable[[SoundReader, list[Piece]], Sequence[Piece]]) -> type[Reader]:
    """A reader that changes the list of an episode's pieces."""
    return broken(read_episode=lambda self, number: iter(change(self, list(SoundReader.read_episode(self, number)))))


def changed(change: Callable[[Piece], Piece]) -> type[Reader]:
    """A reader that changes every piece."""
    return whole(lambda reader, pieces: [change(piece) for piece in pieces])


def column(key: tuple[str, ...], change: Callable[[Any], Any]) -> type[Reader]:
    return changed(lambda piece: replace(piece, columns={**piece.columns, key: change(piece.columns[key])}))


def surveyed(**changes: Any) -> type[Reader]:
    return broken(survey=lambda self, progress: replace(SoundReader.survey(self, progress), **changes))


def outcomes(change: Callable[[Piece], Piece]) -> type[Reader]:
    return broken(read_outcomes=lambda self, number: map(change, self.read_episode(number)))


def empty_piece_before(pieces: list[Piece]) -> list[Piece]:
    first, none = pieces[0], np.zeros(0, bool)
    columns = {key: rows[: 1 if len(rows) > len(first) else 0] for key, rows in first.columns.items()}
    empty = replace(first, columns=columns, terminated=none, truncated=none, last=False)
    return [empty, *(replace(piece, first=False) for piece in pieces)]


def fail(reader: Reader) -> None:
    raise RuntimeError("cannot be closed")


class ChangesBetweenReads(SoundReader):
    """Gives other actions the second time."""

    reads = 0

    def read_episode(self, number: int) -> Iterator[Piece]:
        self.reads += 1
        for piece in super().read_episode(number):
            yield replace(piece, columns={**piece.columns, ACTION: piece.columns[ACTION] + np.float32(self.reads > 3)})


class HidesErrors(SoundReader):
    """Takes a damaged file for one without episodes."""

    def load(self) -> list[int]:
        try:
            return super().load()
        except ValueError:
            return []


class ReusesItsMemory(SoundReader):
    """Yields the same array for every piece."""

    def read_episode(self, number: int) -> Iterator[Piece]:
        memory = np.empty((100, 2), np.float32)
        for piece in super().read_episode(number):
            memory[: len(piece)] = piece.columns[ACTION]
            yield replace(piece, columns={**piece.columns, ACTION: memory[: len(piece)]})


class RaisesForOthers(SoundReader):
    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".walks" and bool(json.loads(path.read_bytes()))

    def load(self) -> list[int]:
        raise KeyError("lengths")


class GivesOtherPieces(SoundReader):
    """Yields other actions where several episodes are asked for at once."""

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[Piece]:
        for number in numbers:
            for piece in self.read_episode(number):
                yield replace(piece, columns={**piece.columns, ACTION: piece.columns[ACTION] + np.float32(1)})


SABOTEURS: dict[str, type[Reader]] = {
    "other rows in blocks": GivesOtherPieces,
    "pieces backwards": whole(lambda reader, pieces: pieces[::-1]),
    "two pieces swapped": whole(
        lambda reader, pieces: [pieces[0], *pieces[1:-1][::-1], pieces[-1]] if len(pieces) > 3 else pieces[::-1]
    ),
    "a piece left out": whole(lambda reader, pieces: pieces[:1] + pieces[2:] if len(pieces) > 2 else pieces),
    "a piece twice": whole(lambda reader, pieces: [pieces[0], *pieces]),
    "no end": whole(lambda reader, pieces: [replace(piece, last=False) for piece in pieces]),
    "each piece an end": changed(lambda piece: replace(piece, last=True)),
    "each piece a start": changed(lambda piece: replace(piece, first=True)),
    "an empty piece": whole(lambda reader, pieces: empty_piece_before(pieces)),
    "another episode": changed(lambda piece: replace(piece, episode=piece.episode + 1)),
    "an action too few": column(ACTION, lambda rows: rows[:-1]),
    "an action too many": column(ACTION, lambda rows: np.concatenate((rows, rows[-1:]))),
    "a forgotten last observation": column(OBSERVATION, lambda rows: rows[:-1]),
    "another element type": column(REWARD, lambda rows: rows.astype(np.float32)),
    "another shape": column(ACTION, lambda rows: rows[:, :1]),
    "a list for an array of flags": changed(lambda piece: replace(piece, truncated=piece.truncated.astype(np.uint8))),
    "flags with a dimension of one": changed(lambda piece: replace(piece, terminated=piece.terminated[:, None])),
    "a field too few": changed(
        lambda piece: replace(piece, columns={key: rows for key, rows in piece.columns.items() if key != ACTION})
    ),
    "a field too many": changed(lambda piece: replace(piece, columns={**piece.columns, ("extra",): piece.terminated})),
    "observations that do not go on": whole(
        lambda reader, pieces: [
            replace(piece, columns={**piece.columns, OBSERVATION: piece.columns[OBSERVATION] + number})
            for number, piece in enumerate(pieces)
        ]
    ),
    "columns that depend on the cut": changed(
        lambda piece: replace(piece, columns={**piece.columns, ACTION: piece.columns[ACTION] * np.float32(len(piece))})
    ),
    "next rows of no state": changed(lambda piece: replace(piece, next={ACTION: piece.columns[ACTION]})),
    "too many steps": surveyed(steps=16),
    "an episode that is not there": surveyed(episode_numbers=range(4)),
    "numbers in another order": surveyed(episode_numbers=[2, 1, 0], lengths=[6, 5, 4]),
    "other lengths": surveyed(lengths=[5, 5, 5]),
    "other fields": surveyed(fields=WALK_FIELDS[1:]),
    "other rewards in the table": outcomes(lambda piece: replace(piece, columns={REWARD: piece.columns[REWARD] + 1})),
    "other ends in the table": outcomes(
        lambda piece: replace(piece, terminated=piece.truncated, truncated=piece.terminated)
    ),
    "no seed in the table": outcomes(lambda piece: replace(piece, seed=None)),
    "other actions at the second read": ChangesBetweenReads,
    "an error hidden": HidesErrors,
    "one memory for all pieces": ReusesItsMemory,
    "every path recognised": broken(recognises=classmethod(lambda cls, path: True)),
    "no path recognised": broken(recognises=classmethod(lambda cls, path: False)),
    "an error for other files": RaisesForOthers,
    "no files": broken(files=lambda reader: []),
    "an episode forgotten": surveyed(episode_numbers=range(2)),
    "an error when closed": broken(on_close=fail),
}


def failures(kind: type[Reader], folder: Path) -> list[str]:
    """Names of the tests of the suite that fail for a reader."""

    class Suite(ReaderTests):
        def source(self) -> Path:
            return folder / "some.walks"

        def reader(self) -> type[Reader]:
            return kind

        def with_small_pieces(self) -> Reader:
            return type("Small", (kind,), {"piece_steps": 1})(self.source())

    (folder / "some.walks").write_text(json.dumps({"lengths": LENGTHS}))
    failed = []
    for name, test in inspect.getmembers(Suite, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        given = {"tmp_path": folder / name} if "tmp_path" in inspect.signature(test).parameters else {}
        (folder / name).mkdir()
        try:
            test(Suite(), **given)
        except Exception:
            failed.append(name)
    return failed


def test_a_sound_reader_passes(tmp_path: Path) -> None:
    assert failures(SoundReader, tmp_path) == []


@pytest.mark.parametrize("rule", SABOTEURS)
def test_a_saboteur_fails(rule: str, tmp_path: Path) -> None:
    assert failures(SABOTEURS[rule], tmp_path)


def test_the_public_methods_are_final() -> None:
    for name in ("facts", "pieces", "blocks", "episode_table", "digests", "size", "close", "__init__"):
        with pytest.raises(TypeError, match=rf"Broken overrides {name}\(\), which does the book-keeping"):
            broken(**{name: lambda self: None})
