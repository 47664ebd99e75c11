"""The test suite for readers. To run it, subclass `ReaderTests` and implement its abstract methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import RbtoolError, UsageError
from ..format import fs
from ..format.contracts import Array, EpisodeBlock, Piece, SourceFacts
from ..format.converter import FINAL_STEPS, Reader
from ..format.manifest import Request
from ..format.memmap.builder import DatasetBuilder, Origin
from ..format.memmap.reader import TedReader
from ..format.memmap.tree import as_array
from ..format.returns import Ingest
from ..ted.episodes import Final
from ..ted.schema import NEXT, REWARD, Key, ted_fields
from .rows import error_of


def joined(pieces: Iterable[Piece], facts: SourceFacts) -> dict[int, dict[Key, Array]]:
    """Join the pieces of each episode to columns, including the flags."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.episode, []).append(piece)
    whole: dict[int, dict[Key, Array]] = {}
    for number, parts in found.items():
        columns: dict[Key, Array] = {
            ("terminations",): np.concatenate([part.terminated for part in parts]),
            ("truncations",): np.concatenate([part.truncated for part in parts]),
        }
        for field, timing in facts.fields:
            arrays = [part.columns[field.key] for part in parts]
            if any(field.key in part.next for part in parts):
                arrays = [part.rows_before(field.key) for part in parts]
                columns[NEXT, *field.key] = np.concatenate([part.rows_after(field.key) for part in parts])
            elif timing == "state":  # the last row of a piece is the first of the next
                arrays = [*(rows[:-1] for rows in arrays[:-1]), arrays[-1]]
            columns[field.key] = np.concatenate(arrays)
        whole[number] = columns
    return whole


def _written(parts: Iterable[EpisodeBlock | Piece], facts: SourceFacts, folder: Path) -> str:
    """Write pieces or blocks as a dataset, and return the digest of its content and episode table."""
    with DatasetBuilder(folder, ted_fields(facts.fields)) as builder:
        ingest = Ingest(builder, facts.fields)
        ingest.run(parts)
        made = builder.finish(ingest.table, Origin(Request(facts.source, facts.id, facts.id)), ingest.text)
    return made.content_digest


class ReaderTests(ABC):
    """The contract of `Reader`, on one dataset with several episodes."""

    has_rewards = True
    """Whether the source has rewards."""

    @abstractmethod
    def source(self) -> Path:
        """Return the path of a dataset in the reader's format, with at least three episodes."""

    @abstractmethod
    def reader(self) -> type[Reader]:
        """Return the class of the reader."""

    @abstractmethod
    def with_small_pieces(self) -> Reader:
        """Open the source so that episodes come in several pieces."""

    def open(self) -> Reader:
        """Open the source."""
        return self.reader()(self.source())

    def test_it_recognises_its_format_by_content(self, tmp_path: Path) -> None:
        fs.write_file(tmp_path / "file", b"\0\xff{")
        fs.make_folder(tmp_path / "data")
        fs.write_file(tmp_path / "data" / "metadata.json", b"{}")
        recognises = self.reader().recognises
        assert recognises(self.source())
        for other in (tmp_path, tmp_path / "file", tmp_path / "nothing", tmp_path / "data" / "metadata.json"):
            assert not recognises(other)

    def test_facts_match_the_pieces(self) -> None:
        with self.open() as reader:
            facts, pieces = reader.facts(), list(reader.pieces())
        assert facts.steps == sum(map(len, pieces))
        assert list(facts.episode_numbers) == list(dict.fromkeys(piece.episode for piece in pieces))
        for piece in pieces:
            found = {key: (array.dtype, array.shape) for key, array in piece.columns.items()}
            rows = {field.key: piece.rows_of(field.key, timing) for field, timing in facts.fields}
            assert found == {field.key: (field.numpy, (rows[field.key], *field.shape)) for field, _ in facts.fields}

    def test_pieces_say_where_episodes_begin_and_end(self) -> None:
        with self.with_small_pieces() as reader:
            pieces = list(reader.pieces())
        numbers = [piece.episode for piece in pieces]
        assert len(pieces) > len(set(numbers))
        assert [piece.first for piece in pieces] == [old != new for old, new in pairwise([None, *numbers])]
        assert [piece.last for piece in pieces] == [old != new for old, new in pairwise([*numbers, None])]
        assert all(len(piece) for piece in pieces)

    def test_the_cuts_between_pieces_do_not_matter(self) -> None:
        with self.open() as whole, self.with_small_pieces() as cut:
            facts = whole.facts()
            one, other = joined(whole.pieces(), facts), joined(cut.pieces(), facts)
        assert one.keys() == other.keys()
        for number, columns in one.items():
            for key, array in columns.items():
                assert array.tobytes() == other[number][key].tobytes()

    def test_only_chosen_episodes_are_read(self) -> None:
        with self.open() as reader:
            numbers = list(reader.facts().episode_numbers)
            chosen = reader.facts([(numbers[1], numbers[1] + 1), (numbers[-1], None)])
            assert list(chosen.episode_numbers) == [numbers[1], numbers[-1]]
            assert chosen.steps == sum(map(len, reader.pieces(chosen.episode_numbers)))
            assert chosen.fields == reader.facts().fields
            every, some = joined(reader.pieces(), chosen), joined(reader.pieces([numbers[-1]]), chosen)
        assert list(some) == [numbers[-1]]
        assert all(every[numbers[-1]][key].tobytes() == array.tobytes() for key, array in some[numbers[-1]].items())

    def test_an_unknown_episode_is_refused(self) -> None:
        with self.open() as reader:
            beyond = max(reader.facts().episode_numbers) + 1
            assert isinstance(error_of(lambda: reader.facts([(beyond, beyond + 1)])), UsageError)

    def test_the_table_matches_a_conversion(self, tmp_path: Path) -> None:
        with self.with_small_pieces() as reader:
            facts, table = reader.facts(), reader.episode_table()
            _written(reader.pieces(), facts, tmp_path / "built")
            converted = TedReader(tmp_path / "built").episodes.columns()
            last = reader.episode_table([facts.episode_numbers[-1]])
        for name, column in table.columns().items():
            assert column.tobytes() == converted[name].tobytes(), name
        assert last.length.tolist() == table.length[-1:].tolist()
        assert bool((table.total_reward != 0).any()) == self.has_rewards
        assert (REWARD in {field.key for field, _ in facts.fields}) == self.has_rewards

    def test_blocks_make_the_same_dataset_as_pieces(self, tmp_path: Path) -> None:
        for name, opened, starts in (("whole", self.open, (0,)), ("cut", self.with_small_pieces, (0, 1))):
            with opened() as reader:
                facts = reader.facts()
                for start in starts:
                    numbers, folder = facts.episode_numbers[start:], tmp_path / f"{name}{start}"
                    pieces = _written(reader.pieces(numbers), facts, folder / "pieces")
                    blocks = _written(reader.blocks(numbers), facts, folder / "blocks")
                    assert pieces == blocks

    def test_every_read_gives_the_same(self) -> None:
        with self.with_small_pieces() as reader, self.with_small_pieces() as other:
            facts = reader.facts()
            found = [joined(pieces, facts) for pieces in (reader.pieces(), reader.pieces(), other.pieces())]
        for again in found[1:]:
            assert again.keys() == found[0].keys()
            for number, columns in found[0].items():
                assert {key: array.tobytes() for key, array in columns.items()} == {
                    key: array.tobytes() for key, array in again[number].items()
                }

    def test_earlier_pieces_are_unchanged_when_more_is_read(self) -> None:
        with self.with_small_pieces() as reader:
            for parts in (reader.pieces(), reader.blocks()):
                held, then = [], []
                for part in parts:
                    arrays = [*part.columns.values(), *part.next.values(), part.terminated, part.truncated]
                    held.append(arrays)
                    then.append([as_array(rows).tobytes() for rows in arrays])
                assert [[as_array(rows).tobytes() for rows in arrays] for arrays in held] == then

    def test_facts_table_and_pieces_agree_on_final_steps(self) -> None:
        for choice in FINAL_STEPS:
            with self.reader()(self.source(), final_step=choice) as reader:
                facts, table = reader.facts(), reader.episode_table()
                last = [piece for piece in reader.pieces() if piece.last]
                steps = sum(map(len, reader.pieces()))
            assert facts.steps == table.steps == steps
            assert list(facts.episode_numbers) == table.episode.tolist() == [piece.episode for piece in last]
            assert table.final.tolist() == [piece.final for piece in last]
            assert Final.MISSING not in table.final

    def test_a_cut_file_raises_an_error(self, tmp_path: Path) -> None:
        """A file cut off in the middle must not be read as if it were complete."""
        given = self.source()
        with self.open() as reader:
            whole, cut = reader.folder, [path for path in reader.files() if path.stat().st_size > 1]
            files = list(reader.files()) if given.is_file() else [path for path in whole.rglob("*") if path.is_file()]
        content = {path.relative_to(whole): path.read_bytes() for path in files}
        for count, name in enumerate(path.relative_to(whole) for path in cut):
            copy = tmp_path / str(count) / whole.name
            for path, data in content.items():
                fs.make_folder((copy / path).parent)
                fs.write_file(copy / path, data[: len(data) // 2] if path == name else data)
            source = copy / given.name if given.is_file() else copy
            assert isinstance(error_of(lambda source=source: self._read_all(source)), RbtoolError), name  # type: ignore[misc]

    def _read_all(self, source: Path) -> None:
        with self.reader()(source) as reader:
            reader.facts()
            for _ in reader.pieces():
                pass

    def test_digests_describe_the_state_of_the_source(self) -> None:
        with self.open() as one, self.open() as other:
            assert one.digests() == other.digests()
            assert one.digests()
            assert not any(Path(name).is_absolute() or ".." in Path(name).parts for name in one.digests())
            assert one.size() > 0

    def test_closing_twice_does_no_harm(self) -> None:
        reader = self.open()
        reader.facts()
        reader.close()
        reader.close()
