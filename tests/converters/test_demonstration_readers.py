"""Readers of imitation, d3rlpy, Stable-Baselines3 and DAPG: the contract; random episodes come back exactly."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demonstration_files import (
    Episode,
    imitation_table,
    random_episodes,
    ring,
    write_d3rlpy,
    write_dapg,
    write_dataset_folder,
    write_flagged_paths,
    write_imitation,
    write_parquet_folder,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rbtool.converters.d3rlpy.reader import D3rlpyReader
from rbtool.converters.dapg.reader import DapgReader
from rbtool.converters.imitation.reader import ImitationReader
from rbtool.converters.rllib.reader import RllibReader
from rbtool.converters.sb3.reader import Sb3Reader
from rbtool.core.format.contracts import Piece
from rbtool.core.format.locate import open_source
from rbtool.core.format.reader import Reader
from rbtool.core.ted.episodes import Final
from rbtool.core.testing.readers import ReaderTests

DATA = Path(__file__).parents[1] / "data"
LENGTHS = (5, 1, 9, 4, 12)
FILES = {
    ImitationReader: ["imitation/cartpole_expert_4.npz"],
    D3rlpyReader: ["d3rlpy/vector.h5", "d3rlpy/tuple.h5"],
    Sb3Reader: [
        "sb3/partial.npz",
        "sb3/full.npz",
        "sb3/memory.npz",
        "sb3/buffer.pkl",
        "sb3/dict_two_envs.pkl",
        "sb3/her_one_env.pkl",
    ],
    DapgReader: ["dapg/door-v0_demos_3.pickle"],
}


def opened(kind: type[Reader], path: Path, piece_bytes: int | None = None, **arguments: Any) -> Reader:
    kind = kind if piece_bytes is None else type("Small", (kind,), {"piece_bytes": piece_bytes})
    if kind.__mro__[-4:] and issubclass(kind, DapgReader):
        arguments["options"] = {"trust_pickle": True, **arguments.get("options", {})}
    return kind(path, **arguments)


class _Contract(ReaderTests):
    kind: type[Reader]

    def write(self, folder: Path) -> Path:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.file = self.write(tmp_path_factory.mktemp("file"))

    def source(self) -> Path:
        return self.file

    def reader(self) -> type[Reader]:
        return self.kind

    def with_small_pieces(self) -> Reader:
        return opened(self.kind, self.file, 100)


class TestImitationReader(_Contract):
    """An npz file."""

    kind = ImitationReader

    def write(self, folder: Path) -> Path:
        return write_imitation(folder / "a.npz", random_episodes(LENGTHS))


class TestImitationReaderOfArrow(_Contract):
    """A folder of the datasets library."""

    kind = ImitationReader

    def write(self, folder: Path) -> Path:
        return write_dataset_folder(folder / "d", imitation_table(random_episodes(LENGTHS)))


class TestImitationReaderOfParquet(_Contract):
    """A folder of Parquet files."""

    kind = ImitationReader

    def write(self, folder: Path) -> Path:
        return write_parquet_folder(folder / "d", imitation_table(random_episodes(LENGTHS)))


class TestD3rlpyReader(_Contract):
    """A file of d3rlpy."""

    kind = D3rlpyReader

    def write(self, folder: Path) -> Path:
        return write_d3rlpy(folder / "a.h5", random_episodes(LENGTHS))


class TestSb3Reader(_Contract):
    """A buffer that came round, with next observations."""

    kind = Sb3Reader
    memory = False

    def write(self, folder: Path) -> Path:
        streams = [random_episodes(LENGTHS, seed=1), random_episodes((8, 8, 8, 8), seed=2)]
        np.savez_compressed(folder / "a.npz", **ring(streams, 20, memory=self.memory))
        return folder / "a.npz"


class TestSb3ReaderWithoutNextObservations(TestSb3Reader):
    """A buffer that saves memory."""

    memory = True


class _TrustedDapgReader(DapgReader):
    """A reader whose files are trusted."""

    def on_open(self) -> None:
        self.options = {"trust_pickle": True, **self.options}
        super().on_open()


class TestDapgReader(_Contract):
    """A pickle of paths."""

    kind = _TrustedDapgReader

    def write(self, folder: Path) -> Path:
        return write_dapg(folder / "a.pickle", random_episodes(LENGTHS))


class TestDapgReaderWithNextObservations(TestDapgReader):
    """A pickle of paths with flags and next observations."""

    def write(self, folder: Path) -> Path:
        return write_flagged_paths(folder / "a.pickle", random_episodes(LENGTHS))


def rows_of(pieces: Sequence[Piece]) -> dict[str, bytes]:
    """The rows before steps, and those after them, as bytes; no `final` may be missing."""
    assert all(piece.final is not Final.MISSING for piece in pieces if piece.last)
    key = ("observation",)
    found = {
        "observation": b"".join(piece.rows_before(key).tobytes() for piece in pieces),
        "next": b"".join(piece.rows_after(key).tobytes() for piece in pieces),
    }
    for name in ("action", "reward"):
        found[name] = b"".join(piece.columns[(name,)].tobytes() for piece in pieces)
    for name in ("terminated", "truncated"):
        found[name] = b"".join(getattr(piece, name).tobytes() for piece in pieces)
    return found


def expected_rows(episodes: Sequence[Episode], *, final: bool, truncates: bool = True) -> dict[str, bytes]:
    """What comes of episodes; without the final observation, by the rule for last steps."""
    parts: dict[str, list[np.ndarray[Any, Any]]] = {
        name: [] for name in ("observation", "next", "action", "reward", "terminated", "truncated")
    }
    for one in episodes:
        steps = len(one) if final or one.terminated else len(one) - 1
        if steps < 1:
            continue
        after = one.observations[1 : steps + 1].copy()
        if not final and one.terminated:
            after[-1] = one.observations[steps - 1]
        flags = np.zeros((2, steps), bool)
        flags[0, -1], flags[1, -1] = one.terminated, not one.terminated and (one.truncated or not final) and truncates
        columns = (one.observations[:steps], after, one.actions[:steps], one.rewards[:steps], *flags)
        for name, column in zip(parts, columns, strict=True):
            parts[name].append(column)
    return {name: b"".join(column.tobytes() for column in columns) for name, columns in parts.items()}


WRITERS: dict[str, tuple[type[Reader], Callable[[Path, Sequence[Episode]], Path], bool]] = {
    "npz": (ImitationReader, lambda folder, episodes: write_imitation(folder / "a.npz", episodes), True),
    "arrow": (
        ImitationReader,
        lambda folder, episodes: write_dataset_folder(folder / "d", imitation_table(episodes, limits=True)),
        True,
    ),
    "parquet": (
        ImitationReader,
        lambda folder, episodes: write_parquet_folder(folder / "d", imitation_table(episodes, limits=True)),
        True,
    ),
    "d3rlpy": (D3rlpyReader, lambda folder, episodes: write_d3rlpy(folder / "a.h5", episodes), False),
    "dapg": (DapgReader, lambda folder, episodes: write_dapg(folder / "a.pickle", episodes), False),
    "flagged": (DapgReader, lambda folder, episodes: write_flagged_paths(folder / "a.pickle", episodes), True),
}


@pytest.mark.parametrize("name", WRITERS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), piece=st.integers(1, 300), seed=st.integers(0, 9))
def test_random_episodes_come_back_exactly(name: str, lengths: list[int], piece: int, seed: int) -> None:
    lengths[0] += 2
    kind, write, final = WRITERS[name]
    ends = ["terminated", "truncated"]
    if name == "npz":
        ends = ["terminated", "none"]
    elif name == "dapg":
        ends = ["truncated"]
    kinds = [ends[(seed + number) % len(ends)] for number in range(len(lengths))]
    episodes = random_episodes(lengths, kinds, seed)
    if name in ("arrow", "parquet"):  # an episode without steps states nothing about its end
        episodes = [one for one in episodes if len(one)]
    with tempfile.TemporaryDirectory() as folder, opened(kind, write(Path(folder), episodes), piece) as reader:
        facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    assert rows_of(pieces) == expected_rows(episodes, final=final)
    kept = [number for number, one in enumerate(episodes) if len(one) > (0 if final or one.terminated else 1)]
    assert list(facts.episode_numbers) == table.episode.tolist() == kept
    assert facts.steps == sum(map(len, pieces)) == table.steps


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6), size=st.integers(2, 40), memory=st.booleans(),
    piece=st.integers(1, 300), stored=st.booleans(),
)  # fmt: skip
def test_a_ring_comes_back_in_the_order_of_time(
    lengths: list[int], size: int, memory: bool, piece: int, stored: bool
) -> None:
    episodes = random_episodes(lengths)
    steps = [(one, at) for one in episodes for at in range(len(one))]
    arrays = ring([episodes], size, memory=memory)
    full = len(steps) >= size
    if not arrays["timeouts"].any():
        return
    kept = steps[len(steps) - size + memory :] if full else steps
    if not kept:
        return
    if not stored and not full:
        arrays = {name: values[: len(steps)] if values.ndim else values for name, values in arrays.items()}
    if not stored and full and len(steps) % size == 0 and not memory:
        arrays = {name: values for name, values in arrays.items() if name not in ("pos", "full")}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "a.npz", **arrays)
        with opened(Sb3Reader, Path(folder) / "a.npz", piece, final_step="repeat") as reader:
            pieces = list(reader.pieces())
    rows = rows_of(pieces)
    assert rows["observation"] == b"".join(one.observations[at].tobytes() for one, at in kept)
    assert rows["action"] == b"".join(one.actions[at].tobytes() for one, at in kept)
    assert rows["reward"] == b"".join(one.rewards[at].tobytes() for one, at in kept)
    ends = [at == len(one) - 1 for one, at in kept]
    assert rows["terminated"] == bytes(end and one.terminated for (one, _), end in zip(kept, ends, strict=True))
    assert rows["truncated"] == bytes(end and one.truncated for (one, _), end in zip(kept, ends, strict=True))
    newest_known = not memory or full or (stored and len(steps) < size)
    after = [one.observations[at + (not (memory and end))] for (one, at), end in zip(kept, ends, strict=True)]
    one, at = kept[-1]
    after[-1] = one.observations[at + newest_known]
    assert rows["next"] == b"".join(row.tobytes() for row in after)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names])
def test_files_are_found_by_their_content_and_by_no_other_reader(kind: type[Reader], name: str) -> None:
    claiming = [one for one in (*FILES, RllibReader) if one.recognises(DATA / name)]
    assert claiming == [kind]
    if not name.endswith((".pkl", ".pickle")):
        with open_source(DATA / name) as reader:
            assert type(reader) is kind


def test_nothing_else_is_claimed() -> None:
    own = set(itertools.chain.from_iterable(FILES.values()))
    others = [path for path in DATA.rglob("*") if path.relative_to(DATA).as_posix() not in own]
    assert len(others) > 50
    for kind in FILES:
        assert [path for path in others if kind.recognises(path)] == []
