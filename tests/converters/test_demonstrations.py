"""Files of imitation, d3rlpy, SB3, Tianshou and DAPG: the contract of readers, real files row by row, refusals."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, bytes_of, column, converted, refused, texts_of, with_options, written
from demonstration_files import (
    Episode,
    as_batch,
    imitation_table,
    leaves,
    random_episodes,
    ring,
    rows_of_episode,
    write_d3rlpy,
    write_dapg,
    write_dataset_folder,
    write_flagged_paths,
    write_imitation,
    write_lines,
    write_parquet_folder,
    write_tianshou,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rbtool
from rbtool.converters.d3rlpy.reader import D3rlpyReader
from rbtool.converters.dapg.reader import DapgReader
from rbtool.converters.imitation.reader import ImitationReader
from rbtool.converters.rllib.reader import RllibReader
from rbtool.converters.sb3.reader import Sb3Reader
from rbtool.converters.tianshou.reader import TianshouReader
from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.format.converter import Reader
from rbtool.core.format.locate import open_source
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data"
LENGTHS = (5, 1, 9, 4, 12)
FILES = {
    ImitationReader: ["imitation/cartpole_expert_4.npz"],
    D3rlpyReader: ["d3rlpy/vector.h5", "d3rlpy/tuple.h5"],
    Sb3Reader: [
        f"sb3/{name}"
        for name in ("partial.npz", "full.npz", "memory.npz", "buffer.pkl", "dict_two_envs.pkl", "her_one_env.pkl")
    ],
    TianshouReader: [
        f"tianshou/{name}.hdf5"
        for name in ("replay_part_full", "replay_wrapped", "vector_dict_obs", "cached", "last_frames", "objects")
    ],
    DapgReader: ["dapg/door-v0_demos_3.pickle"],
}


def in_file(write: Callable[..., Path], name: str) -> Callable[[Path, Sequence[Episode]], Path]:
    return lambda folder, episodes: write(folder / name, episodes)


def in_table(write: Callable[[Path, Any], Path]) -> Callable[[Path, Sequence[Episode]], Path]:
    return lambda folder, episodes: write(folder / "d", imitation_table(episodes, limits=True))


WRITERS: dict[str, tuple[type[Reader], Callable[[Path, Sequence[Episode]], Path], bool]] = {
    "npz": (ImitationReader, in_file(write_imitation, "a.npz"), True),
    "arrow": (ImitationReader, in_table(write_dataset_folder), True),
    "parquet": (ImitationReader, in_table(write_parquet_folder), True),
    "d3rlpy": (D3rlpyReader, in_file(write_d3rlpy, "a.h5"), False),
    "tianshou": (TianshouReader, lambda folder, episodes: write_tianshou(folder / "a.hdf5", [episodes], 64), True),
    "dapg": (DapgReader, in_file(write_dapg, "a.pickle"), False),
    "flagged": (DapgReader, in_file(write_flagged_paths, "a.pickle"), True),
}
"""The reader of a file, how it is written, and whether the last observation of an episode is in it."""
STREAMS = [random_episodes(LENGTHS, seed=1), random_episodes((8, 8, 8, 8), seed=2)]


def written_by(*names: str) -> dict[str, Callable[[Path], Path]]:
    return {name: lambda folder, name=name: WRITERS[name][1](folder, random_episodes(LENGTHS)) for name in names}


def write_ring(path: Path, episodes: Sequence[Sequence[Episode]], size: int, **how: Any) -> Path:
    np.savez(path, **ring(episodes, size, **how))
    return path


class TestImitationReader(WrittenReaderTests):
    kind = ImitationReader
    made = written(
        written_by("npz", "arrow", "parquet")
        | {"plain": lambda folder: write_dataset_folder(folder / "d", imitation_table(random_episodes(LENGTHS)))}
    )


class TestD3rlpyReader(WrittenReaderTests):
    kind = D3rlpyReader
    made = written(written_by("d3rlpy"))


class TestSb3Reader(WrittenReaderTests):
    """Buffers that came round."""

    kind = Sb3Reader
    made = written(
        {
            "next observations": lambda folder: write_ring(folder / "a.npz", STREAMS, 20),
            "memory saved": lambda folder: write_ring(folder / "a.npz", STREAMS, 20, memory=True),
        }
    )


class TestTianshouReader(WrittenReaderTests):
    """Buffers of two rings, of which both came round."""

    kind = TianshouReader
    made = written(
        {
            "next observations": lambda folder: write_tianshou(folder / "a.hdf5", STREAMS, 20),
            "without": lambda folder: write_tianshou(folder / "a.hdf5", STREAMS, 20, following=False),
        }
    )


class TestDapgReader(WrittenReaderTests):
    kind, options = DapgReader, {"trust_pickle": True}
    made = written(written_by("dapg", "flagged"))


def expected_rows(episodes: Sequence[Episode], *, final: bool) -> dict[str, bytes]:
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
        flags[0, -1], flags[1, -1] = one.terminated, not one.terminated and (one.truncated or not final)
        columns = (one.observations[:steps], after, one.actions[:steps], one.rewards[:steps], *flags)
        for name, rows in zip(parts, columns, strict=True):
            parts[name].append(rows)
    return {name: b"".join(rows.tobytes() for rows in arrays) for name, arrays in parts.items()}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
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
    if name in ("arrow", "parquet", "tianshou"):  # an episode without steps states nothing about its end
        episodes = [one for one in episodes if len(one)]
    trust = {"trust_pickle": True} if kind is DapgReader else {}
    small = with_options(kind, piece, **trust)
    with tempfile.TemporaryDirectory() as folder, small(write(Path(folder), episodes)) as reader:
        facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    assert bytes_of(pieces) == expected_rows(episodes, final=final)
    kept = [number for number, one in enumerate(episodes) if len(one) > (0 if final or one.terminated else 1)]
    assert list(facts.episode_numbers) == table.episode.tolist() == kept
    assert facts.steps == sum(map(len, pieces)) == table.steps


@settings(max_examples=30)
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
        with with_options(Sb3Reader, piece)(Path(folder) / "a.npz", final_step="repeat") as reader:
            rows = bytes_of(reader.pieces())
    for name in ("observation", "action", "reward"):
        assert rows[name] == b"".join(getattr(one, f"{name}s")[at].tobytes() for one, at in kept), name
    ends = [at == len(one) - 1 for one, at in kept]
    assert rows["terminated"] == bytes(end and one.terminated for (one, _), end in zip(kept, ends, strict=True))
    assert rows["truncated"] == bytes(end and one.truncated for (one, _), end in zip(kept, ends, strict=True))
    newest_known = not memory or full or (stored and len(steps) < size)
    after = [one.observations[at + (not (memory and end))] for (one, at), end in zip(kept, ends, strict=True)]
    one, at = kept[-1]
    after[-1] = one.observations[at + newest_known]
    assert rows["next"] == b"".join(row.tobytes() for row in after)


@given(
    streams=st.lists(st.lists(st.integers(1, 8), max_size=5), min_size=1, max_size=4), size=st.integers(1, 20),
    following=st.booleans(), piece=st.integers(1, 300), ends=st.integers(0, 2),
)  # fmt: skip
def test_the_rings_of_tianshou_come_back_in_the_order_of_time(
    streams: list[list[int]], size: int, following: bool, piece: int, ends: int
) -> None:
    kinds = ("terminated", "truncated", "none")
    episodes = [
        random_episodes(lengths, [kinds[(ends + at) % 3] if at == len(lengths) - 1 else kinds[at % 2]
                                  for at in range(len(lengths))], seed)
        for seed, lengths in enumerate(streams)
    ]  # fmt: skip
    if not any(streams):
        return
    episodes[0] = episodes[0] or random_episodes((1,))
    kept = [[(one, at) for one in stream for at in range(len(one))][-size:] for stream in episodes]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tianshou(Path(folder) / "a.hdf5", episodes, size, following=following)
        with with_options(TianshouReader, piece)(path, final_step="repeat") as reader:
            rows, facts = bytes_of(reader.pieces()), reader.facts()
    steps = [step for stream in kept for step in stream]
    for name in ("observation", "action", "reward"):
        assert rows[name] == b"".join(getattr(one, f"{name}s")[at].tobytes() for one, at in steps), name
    last = [at == len(one) - 1 for one, at in steps]
    assert rows["terminated"] == bytes(end and one.terminated for (one, _), end in zip(steps, last, strict=True))
    assert rows["truncated"] == bytes(end and one.truncated for (one, _), end in zip(steps, last, strict=True))
    assert rows["next"] == b"".join(
        one.observations[at + (following or not end)].tobytes() for (one, at), end in zip(steps, last, strict=True)
    )
    lengths = [len(list(group)) for stream in kept for _, group in itertools.groupby(stream, lambda step: id(step[0]))]
    assert list(facts.lengths or ()) == lengths


@each(("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names])
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


IMITATION = DATA / "imitation" / "cartpole_expert_4.npz"
DAPG = DATA / "dapg" / "door-v0_demos_3.pickle"
RANDOM = random_episodes((5, 4, 6))


def test_imitation_every_row_equals_a_plain_reading(tmp_path: Path) -> None:
    with np.load(IMITATION) as file, converted(IMITATION, tmp_path / "out") as reader:
        actions = np.split(file["acts"], file["indices"])
        observations = np.split(file["obs"], file["indices"] + np.arange(1, len(actions)))
        assert column(reader, "observation").tobytes() == b"".join(one[:-1].tobytes() for one in observations)
        assert column(reader, "next.observation").tobytes() == b"".join(one[1:].tobytes() for one in observations)
        assert column(reader, "action").tobytes() == file["acts"].tobytes()
        assert column(reader, "next.reward").tobytes() == file["rews"].tobytes()
        assert reader.episodes.length.tolist() == [len(one) for one in actions]
        assert column(reader, "episode").tolist() == [at for at, one in enumerate(actions) for _ in one]
        assert reader.episodes.final.tolist() == [Final.OBSERVED] * 4


@pytest.mark.parametrize(("ends", "terminated"), [(None, True), ("terminated", True), ("truncated", False)])
def test_imitation_terminal_means_complete(ends: str | None, terminated: bool, tmp_path: Path) -> None:
    result = rbtool.convert(IMITATION, tmp_path / "out", ends=ends)
    with TedReader(result.path) as reader:
        assert reader.episodes.terminated.tolist() == [terminated] * 4
        assert reader.episodes.truncated.tolist() == [not terminated] * 4
    assert any("terminal is set at the end of every complete trajectory" in note for note in result.notes) == (
        ends is None
    )


def test_imitation_infos_need_trust(tmp_path: Path) -> None:
    infos: list[dict[str, Any]] = [
        {"speed": float(at), "TimeLimit.truncated": at == 8, "name": "x", "position": np.array([at, at + 1])}
        | ({"odd": 1} if at else {})
        for at in range(15)
    ]
    path = write_imitation(tmp_path / "a.npz", random_episodes((5, 4, 6), ["terminated"] * 3), infos)
    plain = rbtool.convert(path, tmp_path / "plain")
    assert [(one["key"], "--trust-pickle" in one["why"]) for one in plain.dropped_keys] == [("infos", True)]
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert [one["key"] for one in result.dropped_keys] == ["infos.name", "infos.odd"]
    with TedReader(result.path) as reader:
        assert column(reader, "next.info.speed").tolist() == list(range(15))
        assert column(reader, "next.info.position").tolist() == [[at, at + 1] for at in range(15)]
        reasons = [EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.TERMINATED]
        assert reader.episodes.end_reason.tolist() == reasons


def test_imitation_infos_that_run_code_are_refused(tmp_path: Path) -> None:
    path = write_imitation(tmp_path / "a.npz", RANDOM, [{"path": Path("x")}, *[{}] * 14])
    refused(path, "a pickle of more than data: it has pathlib", trust_pickle=True)


def test_imitation_unfinished_and_without_rewards(tmp_path: Path) -> None:
    path = write_imitation(tmp_path / "a.npz", random_episodes((5, 4), ["none", "terminated"]), rews=None)
    result = rbtool.convert(path, tmp_path / "out")
    assert any("terminal is not set in 1 of 2" in note for note in result.notes)
    assert any("there are no rews" in note for note in result.notes)
    with TedReader(result.path) as reader:
        assert reader.episodes.end_reason.tolist() == [EndReason.END_OF_FILE, EndReason.TERMINATED]
        assert "next.reward" not in {field.name for field in reader.fields}


def test_imitation_time_limits_in_infos_of_datasets_are_believed(tmp_path: Path) -> None:
    folder = write_dataset_folder(tmp_path / "d", imitation_table(RANDOM, limits=True))
    with converted(folder, tmp_path / "out") as reader:
        assert reader.episodes.truncated.tolist() == [one.truncated for one in RANDOM]
    refused(folder, "infos with TimeLimit", UsageError, ends="truncated")


@each(
    ("changed", "message"),
    [
        ({"indices": np.array([5])}, "expected 2 whole numbers"),
        ({"indices": np.array([9, 5])}, "do not ascend"),
        ({"indices": np.array([-1, 5])}, "do not ascend"),
        ({"indices": np.array([5, 90])}, "do not ascend"),
        ({"indices": np.array([5.0, 9.0])}, "whole numbers"),
        ({"terminal": np.array([0, 1, 2])}, "other than 0 and 1"),
        ({"terminal": np.array([True, True])}, "expected 1 whole numbers"),
        ({"obs": np.zeros((15, 3))}, "obs has 15 rows, expected 18"),
        ({"rews": np.zeros(14)}, "rews have shape"),
        ({"rews": np.zeros((15, 2))}, "expected one number"),
        ({"acts": np.array(["a"] * 15)}, "not numbers"),
        ({"obs": np.float32(1)}, "a single value"),
    ],
)  # fmt: skip
def test_imitation_contradictions_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write_imitation(tmp_path / "a.npz", RANDOM, **changed), message)


@pytest.mark.parametrize("name", ["vector", "tuple"])
def test_d3rlpy_every_row_equals_a_plain_reading(name: str, tmp_path: Path) -> None:
    source = DATA / "d3rlpy" / f"{name}.h5"
    parts = {"observation": ""} if name == "vector" else {"observation.0": "_0", "observation.1": "_1"}
    with h5py.File(source) as file, converted(source, tmp_path / "out") as reader:
        ends = [bool(file[f"terminated_{number}"][()]) for number in range(4)]
        kept = [len(file[f"rewards_{number}"]) - (not end) for number, end in enumerate(ends)]
        assert reader.episodes.length.tolist() == kept == [7, 4, 1, 8]
        assert reader.episodes.terminated.tolist() == ends
        assert reader.episodes.truncated.tolist() == [not end for end in ends]
        for key, suffix in parts.items():
            before = [file[f"observations_{number}{suffix}"][:count] for number, count in enumerate(kept)]
            after = [
                np.concatenate((rows[1:], rows[-1:])) if end else file[f"observations_{number}{suffix}"][1:]
                for number, (rows, end) in enumerate(zip(before, ends, strict=True))
            ]
            assert column(reader, key).tobytes() == np.concatenate(before).tobytes()
            assert column(reader, f"next.{key}").tobytes() == np.concatenate(after).tobytes()
        for key, stored in (("action", "actions"), ("next.reward", "rewards")):
            rows = np.concatenate([file[f"{stored}_{number}"][:count] for number, count in enumerate(kept)])
            assert column(reader, key).tobytes() == rows.tobytes()


@each(
    ("changed", "message"),
    [
        ({"version": "2.0"}, "version '2.0'"),
        ({"num_episodes": 4}, "has no rewards_3"),
        ({"num_episodes": 10**9}, "num_episodes is 1000000000, expected 0 to"),
        ({"num_episodes": -1}, "num_episodes is -1"),
        ({"actions_1": np.zeros((3, 2), "f4")}, "actions_1 has 3 rows, but rewards_1 has 4"),
        ({"actions_1": np.zeros((4, 3), "f4")}, "rows of actions_1 are float32 .3."),
        ({"observations_2": None}, "has no observations_2"),
        ({"rewards_0": np.zeros((5, 2))}, "rows of rewards_1 are float32"),
        ({"terminated_0": 2}, "expected one flag"),
        ({"columns": ["observations", "actions"]}, "has no 'rewards' among its columns"),
        ({"observations_0": ["a"] * 5}, "not numbers"),
    ],
)  # fmt: skip
def test_d3rlpy_contradictions_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write_d3rlpy(tmp_path / "a.h5", RANDOM, **changed), message)


def test_d3rlpy_columns_of_a_users_own_are_kept_or_named(tmp_path: Path) -> None:
    names = ["observations", "actions", "rewards", "terminated", "costs", "odd"]
    costs = {f"costs_{number}": np.arange(len(one)) for number, one in enumerate(RANDOM)}
    path = write_d3rlpy(tmp_path / "a.h5", RANDOM, columns=names, odd_0=np.zeros(2), rewards_9=np.zeros(3), **costs)
    result = rbtool.convert(path, tmp_path / "out", final_step="repeat")
    assert [one["key"] for one in result.dropped_keys] == ["odd", "rewards_9"]
    with TedReader(result.path) as reader:
        assert column(reader, "info.costs").tolist() == [at for one in RANDOM for at in range(len(one))]


@pytest.mark.parametrize("name", ["partial", "full", "memory"])
def test_sb3_every_row_equals_a_plain_reading(name: str, tmp_path: Path) -> None:
    source = DATA / "sb3" / f"{name}.npz"
    with np.load(source) as file:
        arrays = {key: file[key] for key in file.files}
    size, position = len(arrays["dones"]), int(arrays["pos"])
    order = [(position + at) % size for at in range(size)] if arrays["full"] else list(range(position))
    order = order[1:] if name == "memory" else order
    with converted(source, tmp_path / "out", final_step="repeat") as reader:
        places = [(row, environment) for environment in range(2) for row in order]
        for key, stored in (("observation", "observations"), ("action", "actions"), ("next.reward", "rewards")):
            rows = [arrays[stored][place] for place in places]
            assert column(reader, key).tobytes() == np.array(rows).tobytes(), key
        dones = [bool(arrays["dones"][place]) for place in places]
        limits = [bool(arrays["timeouts"][place]) for place in places]
        assert column(reader, "next.terminated")[:, 0].tolist() == [
            d and not t for d, t in zip(dones, limits, strict=True)
        ]
        after = [
            arrays["next_observations"][row, environment]
            if name != "memory"
            else arrays["observations"][row if done and row != order[-1] else (row + 1) % size, environment]
            for (row, environment), done in zip(places, dones, strict=True)
        ]
        assert column(reader, "next.observation").tobytes() == np.array(after).tobytes()
        assert {text["environment"] for text in reader.episode_text or []} == {"0", "1"}
        assert len(reader.episodes.length) == sum(dones) + sum(not dones[at] for at in (len(order) - 1, -1))


def test_sb3_without_timeouts_ends_have_to_be_stated_or_are_named(tmp_path: Path) -> None:
    path = write_ring(tmp_path / "a.npz", [random_episodes((5, 4, 6), ["terminated"] * 3)], 15)
    notes = rbtool.convert(path, tmp_path / "out").notes
    assert any(note.startswith("no timeouts are set") and "--ends truncated" in note for note in notes)
    with converted(path, tmp_path / "other", ends="truncated") as reader:
        assert reader.episodes.truncated.tolist() == [True] * 3
    refused(DATA / "sb3" / "full.npz", "has timeouts", UsageError, ends="truncated")


@each(
    ("written", "last"),
    [(name, 30) for name in ("observations", "next_observations", "actions", "rewards", "dones")] + [(None, 14)],
)
def test_sb3_rows_after_the_last_that_was_written_are_left_out(written: str | None, last: int, tmp_path: Path) -> None:
    """Without `pos` and `full`: a row counts as written if a single value in it is not 0."""
    arrays = {name: rows for name, rows in ring([RANDOM], 40).items() if name not in ("pos", "full")}
    if written is not None:
        arrays[written][last].reshape(-1)[-1] = 1
    np.savez(tmp_path / "a.npz", **arrays)
    result = rbtool.convert(tmp_path / "a.npz", tmp_path / "out", final_step="repeat")
    assert result.steps == last + 1
    assert any(f"the last {39 - last} rows, which are 0 in all arrays" in note for note in result.notes)


def test_sb3_2281_the_pickle_of_a_buffer_needs_trust_and_equals_its_arrays(tmp_path: Path) -> None:
    """Stable-Baselines3 issue 2281: loading a pickled buffer runs whatever is in it."""
    source = DATA / "sb3" / "buffer.pkl"
    assert Sb3Reader.recognises(source)
    for verb in (rbtool.inspect, rbtool.check, lambda path: rbtool.convert(path, tmp_path / "out")):
        with pytest.raises(UsageError, match="the pickle of a replay buffer") as raised:
            verb(source)
        assert "--trust-pickle" in raised.value.hint
    found = rbtool.convert(source, tmp_path / "pickled", trust_pickle=True)
    assert found.content_digest == rbtool.convert(DATA / "sb3" / "memory.npz", tmp_path / "npz").content_digest


def tianshou_order(file: h5py.File) -> list[list[int]]:
    """The rows of each ring of a buffer of Tianshou, from the oldest on."""
    if "_lengths" not in file:
        size, written, newest = file.attrs["maxsize"], file.attrs["_size"], file.attrs["_insertion_idx"] - 1
        return [[int(newest - back) % int(size) for back in range(written)][::-1]]
    found = []
    for first, stop, written, newest in zip(
        file["_offset"], file["_extend_offset"][1:], file["_lengths"], file["last_index"], strict=True
    ):
        found.append([int(first + (newest - first - back) % (stop - first)) for back in range(written)][::-1])
    return found


TIANSHOU = {
    "replay_part_full": [12, 1, 9, 5], "replay_wrapped": [9, 8, 3], "vector_dict_obs": [4, 8, 4, 4, 2, 12],
    "cached": None, "last_frames": None, "objects": None,
}  # fmt: skip
KEYS = {
    "obs": "observation",
    "obs_next": "next.observation",
    "act": "action",
    "rew": "next.reward",
    "info": "next.info",
}


@each("name", TIANSHOU)
def test_tianshou_every_row_equals_a_plain_reading(name: str, tmp_path: Path) -> None:
    source = DATA / "tianshou" / f"{name}.hdf5"
    with h5py.File(source) as file, converted(source, tmp_path / "out", final_step="repeat") as reader:
        rings, meta = tianshou_order(file), leaves(file["_meta"])
        order = [row for ring_rows in rings for row in ring_rows]
        flags = {flag: meta.pop(flag)[order] for flag in ("terminated", "truncated", "done")}
        newest = np.zeros(len(order), bool)
        newest[[at - 1 for at in itertools.accumulate(len(one) for one in rings if one)]] = True
        ends = flags["terminated"] | flags["truncated"] | newest
        assert (flags["done"] == (flags["terminated"] | flags["truncated"])).all()
        assert column(reader, "next.terminated")[:, 0].tolist() == flags["terminated"].tolist()
        truncated = flags["truncated"] | (newest & ~flags["terminated"])
        assert column(reader, "next.truncated")[:, 0].tolist() == truncated.tolist()
        stops = np.flatnonzero(ends) + 1
        assert reader.episodes.length.tolist() == np.diff([0, *stops]).tolist()
        for path, rows in meta.items():
            top, *rest = path.split("/")
            key = ".".join([KEYS[top], *rest])
            if file[f"_meta/{path}"].attrs["__data_type__"] == "pickled_ndarray":
                assert key not in {field.name for field in reader.fields}
            elif rows.dtype == object:
                assert [text.encode() for text in texts_of(reader, key)] == rows[order].tolist()
            else:
                found = column(reader, key)
                assert found.dtype == rows.dtype
                assert found.tobytes() == rows[order].tobytes()
        if "obs_next" not in {path.partition("/")[0] for path in meta}:
            rows = meta["obs"][order]
            after = np.where(ends[:, None, None], rows, np.concatenate((rows[1:], rows[-1:])))
            assert column(reader, "next.observation").tobytes() == after.tobytes()
    assert TIANSHOU[name] is None or TIANSHOU[name] == TedReader(tmp_path / "out").episodes.length.tolist()


def test_tianshou_environments_and_metadata_are_kept(tmp_path: Path) -> None:
    with converted(DATA / "tianshou" / "vector_dict_obs.hdf5", tmp_path / "out") as reader:
        found = [text["environment"] for text in reader.episode_text or []]
        assert found == ["0", "0", "1", "1", "1", "2"]
        assert reader.episodes.terminated.tolist()[3]
        assert column(reader, "next.truncated")[11 + 4 + 4, 0]
        assert json.loads(reader.documents()["tianshou.json"])["buffer_num"] == 3
    result = rbtool.convert(DATA / "tianshou" / "last_frames.hdf5", tmp_path / "frames")
    assert any("stack_num is 4" in note for note in result.notes)
    assert any("obs_next is not stored" in note for note in result.notes)
    with converted(DATA / "tianshou" / "cached.hdf5", tmp_path / "cached") as reader:
        found = [text.get("environment") for text in reader.episode_text or []]
        assert set(found[:-3]) == {None}
        assert set(found[-3:]) <= {None, "0", "1", "2"}


def test_tianshou_python_objects_need_trust(tmp_path: Path) -> None:
    source = DATA / "tianshou" / "objects.hdf5"
    plain = rbtool.convert(source, tmp_path / "plain")
    why = "it is a pickle of Python objects: --trust-pickle reads it"
    assert {one["key"]: one["why"] for one in plain.dropped_keys} == dict.fromkeys(
        ("info.num", "info.txt", "info.word"), why
    )
    result = rbtool.convert(source, tmp_path / "out", trust_pickle=True)
    assert not result.dropped_keys
    with h5py.File(source) as file, TedReader(result.path) as reader:
        order = [row for rows in tianshou_order(file) for row in rows]
        numbers = pickle.loads(file["_meta/info/num"][()].tobytes())[order]
        words = pickle.loads(file["_meta/info/word"][()].tobytes())[order]
        assert np.array_equal(column(reader, "next.info.num"), numbers.astype("f8"), equal_nan=True)
        assert texts_of(reader, "next.info.word") == [word or "" for word in words]
    assert {note.partition(":")[0] for note in result.notes if "None in" in note} == {"info.num", "info.word"}


def test_tianshou_texts_that_hdf5_holds_need_no_trust(tmp_path: Path) -> None:
    path = write_tianshou(tmp_path / "a.hdf5", [RANDOM], 12)
    words = ["wörd " * (at % 4) for at in range(12)]
    with h5py.File(path, "r+") as file:
        for name in ("_meta/info/word", "_meta/obs_text", "_meta/policy/h"):
            file[name] = np.array(words, object)
            file[name].attrs["__data_type__"] = "ndarray"
    with converted(path, tmp_path / "out") as reader:
        for key in ("next.info.word", "info.obs_text", "policy.h"):
            assert texts_of(reader, key) == words[3:] + words[:3]


OBJECTS: dict[str, tuple[list[Any], str]] = {
    "flags": ([True, None] + [False] * 13, "None in 1 step of 15, which bool cannot represent"),
    "dictionaries": ([{"a": 1}] * 15, "neither numbers nor texts"),
    "ragged": ([np.zeros(1), np.zeros(2)] + [np.zeros(1)] * 13, "rows of different forms"),
    "nothing": ([None] * 15, "is None in all steps"),
    "code": ([Path("x")] * 15, "a pickle of more than data"),
    "large": ([2**60 + 1, 0.5] + [0.5] * 13, "rows of different types"),
}


@each("name", OBJECTS)
def test_tianshou_objects_that_are_no_data_are_named(name: str, tmp_path: Path) -> None:
    values, why = OBJECTS[name]
    rows = np.empty(15, object)
    rows[:] = values
    path = write_tianshou(tmp_path / "a.hdf5", [RANDOM], 15)
    put_pickle(path, "_meta/info/x", rows)
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert [one["key"] for one in result.dropped_keys] == ["info.x"]
    assert why in result.dropped_keys[0]["why"]


def put_pickle(path: Path, name: str, rows: Any) -> None:
    """Store an array of Python objects as Tianshou does."""
    with h5py.File(path, "r+") as file:
        if name in file:
            del file[name]
        file[name] = np.frombuffer(pickle.dumps(rows), np.int8)
        file[name].attrs["__data_type__"] = "pickled_ndarray"


def test_tianshou_observations_of_python_objects(tmp_path: Path) -> None:
    path, plain = (write_tianshou(tmp_path / name, [RANDOM], 20) for name in ("a.hdf5", "b.hdf5"))
    with h5py.File(path) as file:
        stored = {name: list(file[f"_meta/{name}"][:15]) for name in ("obs", "obs_next")}
    for name, values in stored.items():
        rows = np.empty(20, object)
        rows[:15] = values
        put_pickle(path, f"_meta/{name}", rows)
    refused(path, "obs is the pickle of Python objects", UsageError)
    one, other = (rbtool.convert(source, tmp_path / source.stem, trust_pickle=True) for source in (path, plain))
    assert one.content_digest == other.content_digest


def test_tianshou_rewards_of_several_agents(tmp_path: Path) -> None:
    rewards = np.arange(30.0).reshape(15, 2)
    path = write_tianshou(tmp_path / "a.hdf5", [RANDOM], 15, _meta__rew=rewards)
    with converted(path, tmp_path / "out") as reader:
        assert column(reader, "next.agents.reward").tolist() == rewards.tolist()
        assert "next.reward" not in {field.name for field in reader.fields}


@each(
    ("changed", "options", "ends", "note"),
    [
        ({}, {}, "TTT", "only done is stored"),
        ({}, {"ends": "terminated"}, "TTT", ""),
        ({}, {"ends": "truncated"}, "LLL", ""),
        ({"_meta__info__TimeLimit.truncated": np.arange(15) == 8}, {}, "TLT", ""),
        ({"_maxsize": np.int64(15), "_index": np.int64(0), "maxsize": None, "_insertion_idx": None}, {}, "TTT", "only"),
    ],
)
def test_tianshou_before_0_5_has_done_alone(changed, options, ends: str, note: str, tmp_path: Path) -> None:
    attributes = {name: changed.pop(name) for name in ("_maxsize", "_index") if name in changed}
    path = write_tianshou(tmp_path / "a.hdf5", [RANDOM], 15, _meta__terminated=None, _meta__truncated=None, **changed)
    with h5py.File(path, "r+") as file:
        file.attrs.update(attributes)
    result = rbtool.convert(path, tmp_path / "out", **options)
    assert any(note and note in one for one in result.notes) == bool(note)
    with TedReader(result.path) as reader:
        assert reader.episodes.terminated.tolist() == [end == "T" for end in ends]
        assert reader.episodes.truncated.tolist() == [end == "L" for end in ends]


def test_tianshou_done_that_contradicts_the_flags_is_counted(tmp_path: Path) -> None:
    done = np.arange(15) == 2
    result = rbtool.convert(write_tianshou(tmp_path / "a.hdf5", [RANDOM], 15, _meta__done=done), tmp_path / "out")
    assert [note for note in result.notes if note.startswith("done")] == [
        "done is set in 1 step without another flag: taken as terminated",
        "done is not set in 3 steps with another flag: they end episodes",
    ]
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [3, 2, 4, 6]
    refused(tmp_path / "a.hdf5", "which state how episodes end", UsageError, ends="truncated")


def test_tianshou_buffers_made_of_arrays_start_at_their_first_row(tmp_path: Path) -> None:
    """`from_data` sets neither the newest row nor the next one."""
    path = write_tianshou(tmp_path / "a.hdf5", [RANDOM], 15, last_index=[0])
    plain = write_tianshou(tmp_path / "b.hdf5", [RANDOM], 15)
    one, other = (rbtool.convert(source, tmp_path / source.stem) for source in (path, plain))
    assert one.content_digest == other.content_digest


TWO = [RANDOM, RANDOM]


@each(
    ("streams", "changed", "message"),
    [
        ([RANDOM], {"_meta__obs": None}, "has no 'obs' in _meta"),
        ([RANDOM], {"_meta__obs_next": None, "_meta__obs_next__a": np.zeros(20)}, "have different parts: no part, a"),
        ([RANDOM], {"_meta__act": None}, "has no 'act' in _meta"),
        ([RANDOM], {"_meta__obs": np.zeros((14, 3), "f4")}, "obs has shape .14, 3., expected a row for each of 20"),
        ([RANDOM], {"_meta__obs_next": np.zeros((20, 3))}, "obs and obs_next have rows of different forms"),
        ([RANDOM], {"_meta__terminated": np.zeros((20, 2), bool)}, "expected one flag per row"),
        ([RANDOM], {"_meta__truncated": np.full(20, 2)}, "is 2 in row 0, expected 0 or 1"),
        ([RANDOM], {"_size": 21}, "21 of 20 rows, but row 15 is written next"),
        ([RANDOM], {"_insertion_idx": 14}, "but row 14 is written next"),
        ([RANDOM], {"last_index": [9]}, "its newest row is 9, but row 15"),
        ([RANDOM], {"maxsize": -1}, "maxsize is -1, expected a whole number"),
        ([RANDOM], {"maxsize": 1.5}, "expected a whole number"),
        ([RANDOM], {"_size": 0, "_insertion_idx": 0}, "has no steps"),
        ([RANDOM], {"_size": None}, "has no attribute '_size'"),
        (TWO, {"_lengths": None}, "has several buffers, but no _lengths"),
        (TWO, {"_lengths": [15]}, "_lengths has 1 numbers for 2 buffers"),
        (TWO, {"_lengths": [15, 21]}, "buffer 1 has 21 of 20 rows"),
        (TWO, {"last_index": [14, 3]}, "buffer 1 has 15 of 20 rows, but its newest row is -17"),
        (TWO, {"last_index": [13, 34]}, "buffer 0 has 15 of 20 rows, but its newest row is 13"),
        (TWO, {"_extend_offset": [0, 20, 39]}, "does not fit its 40 places"),
        (TWO, {"_extend_offset": [0, 50, 40]}, "does not fit its 40 places"),
        (TWO, {"_extend_offset": [0.0, 20.0, 40.0]}, "no list of whole numbers '_extend_offset'"),
    ],
)
def test_tianshou_contradictions_are_refused(streams, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write_tianshou(tmp_path / "a.hdf5", streams, 20, **changed), message, format="tianshou")


def test_tianshou_files_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "batch.hdf5", "w") as file:
        file["obs"], file["act"] = np.zeros((3, 2)), np.zeros(3)
    assert "--from table" in refused(tmp_path / "batch.hdf5", "has no group '_meta'", format="tianshou").hint
    (tmp_path / "buffer.pkl").write_bytes(b"\x80\x04\x8c\x1ctianshou.data.buffer.base\x94.")
    assert "save_hdf5" in refused(tmp_path / "buffer.pkl", "is the pickle of a buffer of Tianshou").hint


def pickled(attributes: dict[str, Any]) -> bytes:
    """Pickle a buffer of HER with these attributes, by opcodes: the class is not there."""
    name = b"stable_baselines3.her.her_replay_buffer\nHerReplayBuffer\n"
    return b"\x80\x03c" + name + b")\x81" + pickle.dumps(attributes, 3)[2:-1] + b"b."


class _PlainUnpickler(pickle.Unpickler):
    """Makes an object of an empty class for what is not NumPy's."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy"):
            return super().find_class(module, name)
        return type(name, (), {"__init__": lambda self, *arguments: None})


def _attributes(name: str) -> dict[str, Any]:
    with (DATA / "sb3" / name).open("rb") as file:
        return dict(vars(_PlainUnpickler(file).load()))


@pytest.mark.parametrize("name", ["dict_two_envs.pkl", "her_one_env.pkl"])
def test_sb3_every_row_of_dict_and_her_buffers_equals_a_plain_reading(name: str, tmp_path: Path) -> None:
    stored = _attributes(name)
    result = rbtool.convert(DATA / "sb3" / name, tmp_path / "out", trust_pickle=True)
    rows = [(row, environment) for environment in range(stored["n_envs"]) for row in range(stored["pos"])]
    with TedReader(result.path) as reader:
        for root, attribute in (("observation", "observations"), ("next.observation", "next_observations")):
            for part, values in stored[attribute].items():
                found = column(reader, f"{root}.{part}")
                assert found.dtype == values.dtype
                assert found.tobytes() == b"".join(values[place].tobytes() for place in rows)
        assert column(reader, "action").tobytes() == b"".join(stored["actions"][place].tobytes() for place in rows)
        assert column(reader, "next.reward")[:, 0].tolist() == [stored["rewards"][place] for place in rows]
        lengths, ends = reader.episodes.length.tolist(), reader.episodes.terminated.astype(int).tolist()
    assert (lengths, ends) == (([6, 1, 5, 9, 3], [1, 0, 0, 0, 1]) if "dict" in name else ([10, 7, 4], [0, 1, 0]))
    assert not result.dropped_keys
    assert not any("ep_start" in note for note in result.notes)
    arrays = {key: stored[key] for key in ("actions", "rewards", "dones", "timeouts", "pos", "full")}
    for key in ("observations", "next_observations"):
        arrays |= {f"{key}.{part}": values for part, values in stored[key].items()}
    np.savez(tmp_path / "a.npz", **arrays)
    assert rbtool.convert(tmp_path / "a.npz", tmp_path / "npz").content_digest == result.content_digest


def full_her_buffer() -> dict[str, Any]:
    """Fourteen rows in a ring of 10, in episodes of 6, 5 and 3 steps: of the first, two rows are left."""
    rows, size = 14, 10
    dones = np.zeros(rows)
    dones[[5, 10]] = 1
    columns = {
        "dones": dones, "rewards": np.arange(rows), "ep_start": np.repeat([0, 6, 1], (6, 5, 3)),
        "ep_length": np.repeat([0, 5, 0], (6, 5, 3)),
    }  # fmt: skip
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        arrays[name] = np.zeros((size, 1), "i8" if name.startswith("ep_") else "f4")
        arrays[name][np.arange(rows) % size, 0] = values
    states = {"observation": arrays["rewards"][..., None]}
    return arrays | {
        "timeouts": arrays["dones"], "actions": states["observation"], "observations": states,
        "next_observations": states, "pos": 4, "full": True, "env": None,
    }  # fmt: skip


def test_sb3_a_full_her_buffer_is_compared_with_what_it_states_of_episodes(tmp_path: Path) -> None:
    infos = {"infos": np.array([[{"a": 1}]] * 10, object), "copy_info_dict": True}
    path = tmp_path / "a.pkl"
    path.write_bytes(pickled(full_her_buffer() | infos))
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert [one["key"] for one in result.dropped_keys] == ["infos"]
    assert not any("ep_start" in note for note in result.notes)
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [2, 5, 3]
        assert column(reader, "next.reward")[:, 0].tolist() == list(range(4, 14))
    odd = full_her_buffer()
    odd["ep_start"][6] = 5
    path.write_bytes(pickled(odd))
    result = rbtool.convert(path, tmp_path / "odd", trust_pickle=True)
    assert "ep_start and ep_length contradict dones in 1 episode: dones are used" in result.notes


@each(
    ("changed", "message"),
    [
        ({"_buffer": {"observation": np.zeros((2, 3))}}, "HerReplayBuffer of Stable-Baselines3 1.x"),
        ({"dones": None}, "not a replay buffer of Stable-Baselines3: it has no dones"),
        ({"observations": {"a": {"b": np.zeros((10, 1))}}}, "have a dictionary in 'a'"),
        ({"observations": None}, "has none as observations"),
        ({"next_observations": {"other": np.zeros((10, 1, 1), "f4")}}, "different forms"),
        ({"pos": 99}, "pos is 99"),
    ],
)
def test_sb3_pickles_of_something_else_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickled(full_her_buffer() | changed))
    refused(path, message, trust_pickle=True)


def test_sb3_nothing_that_a_pickled_buffer_names_is_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    path = tmp_path / "a.pkl"
    odd = {"observation_space": Runs(), "device": {"x": Runs()}, "infos": [Runs()]}
    path.write_bytes(pickled(full_her_buffer() | odd))
    assert rbtool.convert(path, tmp_path / "out", trust_pickle=True).steps == 10
    assert not (tmp_path / "ran").exists()


@each(
    ("changed", "message"),
    [
        ({"dones": np.full((15, 1), 0.5)}, "other than 0 and 1"),
        ({"pos": np.array(99)}, "pos is 99"),
        ({"pos": np.array([1, 2])}, "expected one number"),
        ({"timeouts": np.zeros((15, 2))}, "timeouts have shape"),
        ({"next_observations": np.zeros((15, 1, 4), "float32")}, "different forms"),
    ],
)  # fmt: skip
def test_sb3_contradictions_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **(ring([RANDOM], 15) | changed))
    refused(tmp_path / "a.npz", message)


def test_dapg_needs_trust_and_every_row_equals_a_plain_reading(tmp_path: Path) -> None:
    assert "--trust-pickle" in refused(DAPG, "a pickle, which can run anything", UsageError).hint
    paths = pickle.loads(DAPG.read_bytes())
    result = rbtool.convert(DAPG, tmp_path / "out", trust_pickle=True, final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [30] * 3
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * 3
        for key, stored in (("observation", "observations"), ("action", "actions"), ("next.reward", "rewards")):
            assert column(reader, key).tobytes() == np.concatenate([path[stored] for path in paths]).tobytes()
        after = [np.concatenate((path["observations"][1:], path["observations"][-1:])) for path in paths]
        assert column(reader, "next.observation").tobytes() == np.concatenate(after).tobytes()
        states = json.loads(reader.documents()["init_states.json"])
        assert [one["qpos"] for one in states] == [path["init_state_dict"]["qpos"].tolist() for path in paths]
    assert any("taken as truncated (--ends terminated" in note for note in result.notes)


@each("protocol", range(6))
def test_dapg_of_every_protocol_is_found_and_read(protocol: int, tmp_path: Path) -> None:
    path = write_dapg(tmp_path / "a.pickle", RANDOM, protocol)
    with converted(path, tmp_path / "out", trust_pickle=True, ends="terminated") as reader:
        assert reader.episodes.length.tolist() == [5, 4, 6]
        assert reader.episodes.terminated.tolist() == [True] * 3


NO_FLAGS = np.array([0, 1, 2, 3, 0], np.uint8).view(bool)


@each(
    ("extra", "kind", "message"),
    [
        ({"rewards": np.zeros(4)}, FormatError, "'observations' of path 0 has 5 rows, but rewards 4"),
        ({"rewards": np.zeros(5, "c8")}, FormatError, "rewards are complex64, expected real numbers"),
        ({"actions": 1}, FormatError, "'actions' of path 0 is not an array"),
        ({"odd": Path("x")}, FormatError, "a pickle of more than data"),
        ({"flag": NO_FLAGS}, CorruptDataError, "a truth value in it is neither 0 nor 1"),
    ],
)
def test_dapg_contradictions_are_refused(extra: dict[str, Any], kind: Any, message: str, tmp_path: Path) -> None:
    refused(write_dapg(tmp_path / "a.pickle", random_episodes((5, 5)), **extra), message, kind, trust_pickle=True)


def test_dapg_other_arrays_are_kept_or_named(tmp_path: Path) -> None:
    path = write_dapg(tmp_path / "a.pickle", random_episodes((5, 5)), qvel=np.arange(5), name="x", odd=np.zeros(2))
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert [one["key"] for one in result.dropped_keys] == ["name", "odd"]
    with TedReader(result.path) as reader:
        assert column(reader, "info.qvel").tolist() == [0, 1, 2, 3] * 2


def changed_paths(path: Path, change: Callable[[list[dict[str, Any]]], None], episodes: Sequence[Episode]) -> Path:
    write_flagged_paths(path, episodes)
    paths = pickle.loads(path.read_bytes())
    change(paths)
    path.write_bytes(pickle.dumps(paths))
    return path


def without(name: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(paths: list[dict[str, Any]]) -> None:
        for path in paths:
            del path[name]

    return change


def test_paths_with_terminals_and_next_observations_are_exact(tmp_path: Path) -> None:
    """As the Decision Transformer writes them: without timeouts."""
    path = changed_paths(tmp_path / "a.pickle", without("timeouts"), RANDOM)
    paths = pickle.loads(path.read_bytes())
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [len(one["rewards"]) for one in paths]
        assert reader.episodes.terminated.tolist() == [bool(one["terminals"][-1]) for one in paths]
        assert reader.episodes.truncated.tolist() == [not one["terminals"][-1] for one in paths]
        for key in ("observation", "next.observation"):
            stored = key.replace("observation", "observations").replace(".", "_")
            assert column(reader, key).tobytes() == np.concatenate([one[stored] for one in paths]).tobytes()
    assert not result.dropped_keys
    assert any("without terminals: taken as truncated" in note for note in result.notes)
    refused(path, "has terminals, which state how paths end", UsageError, trust_pickle=True, ends="terminated")


def test_timeouts_alone_leave_the_other_paths_to_ends(tmp_path: Path) -> None:
    path = changed_paths(tmp_path / "a.pickle", without("terminals"), random_episodes((5, 4, 6)))
    with converted(path, tmp_path / "out", trust_pickle=True, ends="terminated") as reader:
        assert reader.episodes.terminated.tolist() == [True, False, True]
        assert reader.episodes.truncated.tolist() == [False, True, False]
    result = rbtool.convert(path, tmp_path / "default", trust_pickle=True)
    assert any("a path without timeouts ends: taken as truncated" in note for note in result.notes)


def test_a_terminal_inside_a_path_ends_nothing_and_is_kept(tmp_path: Path) -> None:
    def mark(paths: list[dict[str, Any]]) -> None:
        paths[0]["terminals"][1] = True

    path = changed_paths(tmp_path / "a.pickle", mark, random_episodes((5, 4)))
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert (
        "terminals are set in 1 step inside paths, where they end no episode: next.info.terminals has them"
        in result.notes
    )
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [5, 4]
        assert column(reader, "next.info.terminals").tolist() == [False, True, False, False, True] + [False] * 4


@each("name", ["terminals", "timeouts", "next_observations"])
def test_flags_and_next_observations_of_some_paths_are_refused(name: str, tmp_path: Path) -> None:
    path = changed_paths(tmp_path / "a.pickle", lambda paths: paths[1].pop(name), RANDOM)
    refused(path, f"'{name}' are in 2 of 3 paths, but not in path 1", trust_pickle=True)


@each(
    ("name", "value", "message"),
    [
        ("terminals", np.zeros((5, 2)), "'terminals' of path 0 does not have one flag per row"),
        ("terminals", np.zeros(4), "'terminals' of path 0 has 4 rows, but rewards 5"),
        ("next_observations", np.zeros((5, 2)), "'next_observations' are float64"),
    ],
)
def test_flags_and_next_observations_of_another_form_are_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = changed_paths(tmp_path / "a.pickle", lambda paths: paths[0].update({name: value}), random_episodes((5,)))
    refused(path, message, trust_pickle=True)


def test_a_pickle_that_is_cut_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(DAPG.read_bytes()[:-2000])
    refused(tmp_path / "a.pickle", "a pickle cannot be read", trust_pickle=True)


def test_cleanrl_460_the_observation_after_a_truncation_is_never_that_after_the_reset(tmp_path: Path) -> None:
    """A buffer that saves memory holds the reset observation after the last step of an episode."""
    episodes = random_episodes((4, 4, 4))
    with converted(write_ring(tmp_path / "a.npz", [episodes], 20, memory=True), tmp_path / "out") as reader:
        starts = {one.observations[0].tobytes() for one in episodes}
        assert not starts & {row.tobytes() for row in column(reader, "next.observation")}
        assert reader.episodes.final.tolist() == [Final.REPEATED, Final.DROPPED, Final.OBSERVED]


def test_d4rl_145_last_steps_of_d3rlpy_episodes_have_no_observation_of_the_next(tmp_path: Path) -> None:
    episodes = random_episodes((4, 3, 5), ("terminated", "truncated", "terminated"))
    with converted(write_d3rlpy(tmp_path / "a.h5", episodes), tmp_path / "out") as reader:
        after = column(reader, "next.observation")
        assert after[3].tobytes() == episodes[0].observations[3].tobytes()  # repeated: no target bootstraps from it
        assert after[5].tobytes() == episodes[1].observations[2].tobytes()
        assert reader.episodes.length.tolist() == [4, 2, 5]


def test_corl_43_the_last_unfinished_episode_is_kept(tmp_path: Path) -> None:
    lines = [as_batch(rows_of_episode(1, 5)), as_batch(rows_of_episode(2, 3, end="none"))]
    with converted(write_lines(tmp_path / "a.json", lines), tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [5, 3]
        assert reader.episodes.end_reason.tolist() == [EndReason.TERMINATED, EndReason.END_OF_FILE]


def test_ray_50390_rows_of_a_table_become_episodes(tmp_path: Path) -> None:
    """A transition a line, rows of two episodes in turns, no order but `t`."""
    pairs = zip(rows_of_episode(1, 4, seed=1), rows_of_episode(2, 4, seed=2), strict=True)
    rows = [row for pair in pairs for row in pair]
    with converted(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [4, 4]
        assert column(reader, "info.t").tolist() == [0, 1, 2, 3] * 2
        assert reader.episodes.explicit_next.tolist() == [False, False]


LIBRARIES = ("d3rlpy", "gym", "imitation", "ray", "stable_baselines3", "torch")


def test_d4rl_80_and_rlds_14_no_library_of_the_format_is_imported(tmp_path: Path) -> None:
    code = f"""
import sys, rbtool
for name in ("rllib/cartpole_small.json", "imitation/cartpole_expert_4.npz", "d3rlpy/vector.h5", "sb3/full.npz"):
    rbtool.convert({str(DATA)!r} + "/" + name, {str(tmp_path)!r} + "/" + name.replace("/", "-"))
rbtool.convert({str(DATA)!r} + "/dapg/door-v0_demos_3.pickle", {str(tmp_path / "dapg")!r}, trust_pickle=True)
print(*(name for name in {LIBRARIES!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
