"""Episodes in groups, as robomimic and RoboSet write them: random ones come back, and what users reported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from commands import ask, failed
from conversions import column, converted, refused, with_options
from demonstration_files import (
    DOOR,
    LIFT,
    Array,
    Demo,
    after_final_step,
    lay_out_folders,
    plain_episodes,
    robomimic_demo,
    roboset_trial,
    write_demos,
    write_groups,
    write_trials,
)
from hub import Fault, Hub
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import rbtool
from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.converters.roboset.reader import RobosetReader
from rbtool.core.errors import UsageError
from rbtool.core.format.contracts import Piece
from rbtool.core.format.converter import Reader
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.schema import Key

DATA = Path(__file__).parents[2] / "data"
ISAAC = DATA / "robomimic" / "isaac_stack_cube.hdf5"
LOW_DIM = DATA / "robomimic" / "low_dim_v15.hdf5"
SEEDS = DATA / "roboset" / DOOR


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(lay_out_folders(tmp_path / "hub")) as served:
        yield served


@each("source", [ISAAC, LOW_DIM, SEEDS])
@each("choice", ["auto", "drop", "repeat"])
def test_need_1_d4rl_145_no_next_observation_is_that_of_another_episode(
    source: Path, choice: str, tmp_path: Path
) -> None:
    """D4RL issue 145: at an end, the next observation was the first one of the following episode."""
    result = rbtool.convert(source, tmp_path / "out", final_step=choice)
    with TedReader(result.path) as reader:
        starts = reader.episodes.start
        for field in reader.fields:
            if field.key[0] != "observation":
                continue
            before, after = (reader.read(key, 0, reader.manifest.steps) for key in (field.key, ("next", *field.key)))
            if field.shape == (16, 16, 3):  # noise: each image is another one
                continue
            ends = np.append(starts[1:], reader.manifest.steps) - 1
            inside = np.setdiff1d(np.arange(reader.manifest.steps), ends)
            assert after[inside].tobytes() == before[inside + 1].tobytes(), field.name
            assert all(after[end].tobytes() != before[end + 1].tobytes() for end in ends[:-1]), field.name
    assert result.boundary["terminated"] + result.boundary["truncated"] == result.episodes


def test_need_1_corl_43_the_last_unterminated_episode_is_kept(tmp_path: Path) -> None:
    """CORL issue 43: an episode that no flag ends was thrown away."""
    file = write_trials(tmp_path / "a.h5", {0: roboset_trial(4, done=True), 1: roboset_trial(5, seed=1)})
    with converted(file, tmp_path / "out") as reader:
        assert reader.episodes.episode.tolist() == [0, 1]
        assert reader.episodes.truncated.tolist() == [False, True]


def test_need_2_minari_74_a_reward_belongs_to_the_action_of_its_row(tmp_path: Path) -> None:
    """Minari issue 74: which action a reward follows."""
    plain = plain_episodes(LOW_DIM, "data", "demo_")
    with converted(LOW_DIM, tmp_path / "out") as reader:
        actions, rewards = column(reader, "action"), column(reader, "next.reward")
    assert actions.tobytes() == b"".join(episode["actions"].tobytes() for episode in plain.values())
    assert rewards.tobytes() == b"".join(episode["rewards"].tobytes() for episode in plain.values())


def test_need_2_states_of_isaac_lab_are_those_after_the_step_of_their_row(tmp_path: Path) -> None:
    """The recorder writes `obs` before a step and `states` after it, in rows of one number."""
    with converted(ISAAC, tmp_path / "out") as reader, h5py.File(ISAAC) as file:
        stored = file["data/demo_1/states/rigid_object/cube_1/root_pose"][:3]
        key = ("state", "rigid_object", "cube_1", "root_pose")
        assert reader.read(("next", *key), 0, 3).tobytes() == stored.tobytes()
        assert reader.read(key, 1, 3).tobytes() == stored[:2].tobytes()


def test_need_9_totals_lengths_and_splits_that_are_wrong_are_counted_and_named(tmp_path: Path) -> None:
    """LIBERO issue 148: an auditor believed a stale index. The rows count; what contradicts them is named."""
    demos = {number: replace(robomimic_demo(4, seed=number), attributes={"num_samples": 9}) for number in (0, 3)}
    file = write_demos(tmp_path / "a.hdf5", demos, masks={"train": ["demo_0", "demo_1"]})
    with h5py.File(file, "r+") as opened:
        opened["data"].attrs["total"] = 3901
    result = rbtool.convert(file, tmp_path / "out")
    assert (result.steps, result.episodes) == (8, 2)
    for sentence in (
        "the file states 3,901 steps, but its groups have 8",
        "num_samples is not the number of steps in 2 of 2 episodes",
        "the split 'train' names demo_1, which the file does not have",
    ):
        assert sentence in result.notes


def test_need_9_v_d4rl_12_columns_of_other_lengths_are_named(tmp_path: Path) -> None:
    """v-d4rl issue 12: a column with a row more than the others ended in an IndexError."""
    demo = robomimic_demo(4)
    longer = Demo({**demo.columns, "obs/hand": np.zeros((5, 3)), "next_obs/hand": np.zeros((5, 3))})
    file = write_demos(tmp_path / "a.hdf5", {0: demo, 1: robomimic_demo(3, seed=1), 2: longer})
    refused(file, "demo_2: 'next_obs/hand' has 5 rows, and the episode has 4 steps")


def test_need_12_an_interrupted_file_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """LIBERO issue 76: a file that stopped early."""
    data = LOW_DIM.read_bytes()
    for share in (3, 50, 97, 99):
        (tmp_path / "a.hdf5").write_bytes(data[: len(data) * share // 100])
        refused(tmp_path / "a.hdf5", "and its header states")


def test_need_15_another_hub_is_named_by_its_address_and_an_empty_one_is_an_error(hub: Hub, tmp_path: Path) -> None:
    """D4RL issue 244: servers disappear. `HF_ENDPOINT` names a mirror; a listing without datasets is an error."""
    found = ask(hub.environment(tmp_path / "home"), "source:roboset", ["describe", DOOR])[0]
    assert found["files"][0]["addresses"][0].startswith(hub.url)
    for name in ("RoboSet_Sim", "robomimic_datasets"):
        hub.repositories = {key: one for key, one in hub.repositories.items() if name not in key}
    for name in ("roboset", "robomimic"):
        failed(ask(hub.environment(tmp_path / "home"), f"source:{name}", ["ids"])[0], "DatasetNotFoundError")


@each("source", [ISAAC, SEEDS])
def test_need_23_no_simulator_and_no_library_of_the_format_is_needed(source: Path, tmp_path: Path) -> None:
    """D4RL issues 80 and 155: a simulator had to be installed to read arrays."""
    script = (
        "import sys, rbtool\n"
        f"rbtool.convert({str(source)!r}, {str(tmp_path / 'out')!r})\n"
        "print(sorted({'torch', 'robomimic', 'robosuite', 'robohive', 'gym', 'gymnasium', 'mujoco', 'tensorflow'}\n"
        "             & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_need_24_every_released_variant_is_read_directly(tmp_path: Path) -> None:
    """lerobot issue 2858: an older release of the producer was needed to read older files."""
    variants = {
        "raw demo.hdf5": robomimic_demo(5, obs=False, rewards=False), "before 0.2, with next_obs": robomimic_demo(5),
        "since 0.2, without next_obs": robomimic_demo(5, next_obs=False),
    }  # fmt: skip
    for count, demo in enumerate(variants.values()):
        file = write_demos(tmp_path / f"{count}.hdf5", {0: demo})
        assert rbtool.convert(file, tmp_path / f"out{count}", final_step="repeat").steps == 5
    assert rbtool.convert(ISAAC, tmp_path / "isaac").episodes == 3


def test_need_25_one_command_converts_a_file_and_a_folder_of_files(tmp_path: Path) -> None:
    """any4lerobot: everybody wrote a converter of their own."""
    for count, source in enumerate((ISAAC, LOW_DIM, SEEDS)):
        result = rbtool.convert(source, tmp_path / str(count), layout="packed")
        assert rbtool.check(result.path).errors == 0


def test_need_26_a_local_path_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrl issue 3067: files that are there were fetched again, or not accepted."""
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert rbtool.convert(SEEDS, tmp_path / "out").episodes == 15


def test_need_27_lerobot_1235_a_rate_limit_is_waited_for_and_the_listing_is_one_request(
    hub: Hub, tmp_path: Path
) -> None:
    """lerobot issue 1235: a request for each file ran into 429."""
    hub.faults = [Fault("/api/", "status:429", 1, headers={"Retry-After": "0"})]
    environment = hub.environment(tmp_path / "home")
    found = ask(environment, "source:robomimic", ["describe", LIFT])[0]
    assert found["id"] == LIFT
    assert len(hub.paths("/tree/")) == 1
    assert not hub.paths("/resolve/")


def test_rewards_of_zero_are_made_where_asked_for(tmp_path: Path) -> None:
    result = rbtool.convert(ISAAC, tmp_path / "out", reward="zero")
    with TedReader(result.path) as reader:
        rewards = column(reader, "next.reward")
    assert (rewards.dtype, rewards.any()) == (np.float32, False)
    assert "there are no rewards: all are 0, as --reward zero says" in result.notes
    refused(LOW_DIM, "has rewards of its own", UsageError, reward="zero")


PACKINGS = st.sampled_from([{}, {"compression": "gzip", "chunks": True}, {"chunks": True, "shuffle": True}])
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2)])
DTYPES = st.sampled_from(["float32", "float64", ">f4", "int16", "uint8", "bool"])
CHOICES = st.sampled_from(["auto", "drop", "repeat"])
LENGTHS = st.dictionaries(st.integers(0, 130), st.integers(0, 7), min_size=1, max_size=6)


def numbers(length: int, dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2**16, (length, *shape)).astype(dtype)


def joined(pieces: list[Piece], key: Key, when: str) -> bytes:
    """The rows of one episode before steps, after them, or those of a step or a result."""
    rows = {"before": Piece.rows_before, "after": Piece.rows_after, "with": lambda piece, key: piece.columns[key]}[when]
    return b"".join(rows(piece, key).tobytes() for piece in pieces)


def pieces_of(reader: Reader) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in reader.pieces():
        found.setdefault(piece.episode, []).append(piece)
    return found


def native(values: Array) -> bytes:
    return values.astype(values.dtype.newbyteorder("=")).tobytes()


@given(
    lengths=LENGTHS, dtype=DTYPES, shape=SHAPES, rewards=st.booleans(), following=st.booleans(),
    piece=st.integers(1, 400), choice=CHOICES, packing=PACKINGS, wins=st.sets(st.integers(0, 130)),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_demonstrations_of_robomimic(
    lengths: Mapping[int, int], dtype: str, shape: tuple[int, ...], rewards: bool, following: bool, piece: int,
    choice: str, packing: Mapping[str, Any], wins: set[int], seed: int,
) -> None:  # fmt: skip
    demos: dict[int, dict[str, Array]] = {}
    for number, length in lengths.items():
        seen = numbers(length + 1, dtype, shape, seed + number)
        columns = {"obs/a/b": seen[:-1], "actions": numbers(length, "float32", (2,), seed + number + 1)}
        columns |= {"states": numbers(length, "float64", (3,), seed), "extra": numbers(length, dtype, shape, seed)}
        columns |= {"next_obs/a/b": seen[1:]} if following else {}
        if rewards:
            columns |= {"rewards": np.zeros(length), "dones": np.zeros(length, "u1")}
            columns["rewards"][length - 1 :], columns["dones"][length - 1 :] = number in wins, 1
        demos[number] = columns
    there = sorted(number for number, length in lengths.items() if length)
    if not there:
        return
    with tempfile.TemporaryDirectory() as folder:
        groups = {f"data/demo_{number}": Demo(columns) for number, columns in demos.items()}
        file = write_groups(Path(folder) / "a.hdf5", groups, **packing)
        with with_options(RobomimicReader, piece)(file, final_step=choice) as reader:
            facts, found, table = reader.facts(), pieces_of(reader), reader.episode_table()
    expected = {}
    for number in there:
        rows = after_final_step(demos[number], terminated=rewards and number in wins, choice=choice)
        expected[number] = {**demos[number], "next:obs/a/b": demos[number]["next_obs/a/b"]} if following else rows
    expected = {number: rows for number, rows in expected.items() if len(rows["actions"])}
    assert list(facts.episode_numbers) == list(found) == table.episode.tolist() == list(expected)
    assert facts.steps == table.steps == sum(len(rows["actions"]) for rows in expected.values())
    for number, rows in expected.items():
        assert joined(found[number], ("observation", "a", "b"), "before") == native(rows["obs/a/b"])
        assert joined(found[number], ("observation", "a", "b"), "after") == native(rows["next:obs/a/b"])
        assert joined(found[number], ("action",), "with") == native(rows["actions"])
        assert joined(found[number], ("state",), "with") == native(rows["states"])
        assert joined(found[number], ("info", "extra"), "with") == native(rows["extra"])
        ends = np.concatenate([one.terminated for one in found[number]])
        whole = len(rows["actions"]) == lengths[number]
        assert ends.tolist() == [False] * (len(ends) - 1) + [rewards and number in wins and whole]
        if rewards:
            assert joined(found[number], ("reward",), "with") == native(rows["rewards"])


@given(
    files=st.lists(LENGTHS, min_size=1, max_size=3), shape=SHAPES, piece=st.integers(1, 400), choice=CHOICES,
    packing=PACKINGS, ends=st.sampled_from([None, "truncated"]), flags=npst.arrays(bool, (400, 7)),
)  # fmt: skip
def test_trials_of_roboset(
    files: list[Mapping[int, int]], shape: tuple[int, ...], piece: int, choice: str, packing: Mapping[str, Any],
    ends: str | None, flags: Array,
) -> None:  # fmt: skip
    trials: list[tuple[int, dict[str, Array]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, lengths in enumerate(files):
            groups = {}
            for number, length in sorted(lengths.items()):
                columns = {
                    "observations": numbers(length, "float64", shape, seed + number),
                    "actions": numbers(length, "float32", (2,), number), "done": flags[seed * 131 + number, :length],
                    "rewards": numbers(length, "float64", (), seed),
                    "env_infos/x/y": numbers(length, "int32", shape, number),
                }  # fmt: skip
                groups[f"Trial{number}"] = Demo(columns)
                trials += [(number, columns)] if length else []
            write_groups(Path(folder) / f"a_seed{seed}.h5", groups, **packing)
        if not trials:
            return
        options = {"ends": ends} if ends else {}
        with with_options(RobosetReader, piece)(Path(folder), final_step=choice, options=options) as reader:
            facts, found, table = reader.facts(), pieces_of(reader), reader.episode_table()
    expected = {}
    for count, (number, columns) in enumerate(trials):
        last = bool(columns["done"][-1]) and ends is None
        rows = after_final_step(columns, terminated=last, choice=choice)
        if len(rows["actions"]):
            expected[count if len(files) > 1 else number] = rows
    assert list(facts.episode_numbers) == list(found) == table.episode.tolist() == list(expected)
    for number, rows in expected.items():
        for name, key in (("observations", ("observation",)), ("env_infos/x/y", ("info", "x", "y"))):
            assert joined(found[number], key, "before") == native(rows[name])
            assert joined(found[number], key, "after") == native(rows[f"next:{name}"])
        assert joined(found[number], ("action",), "with") == native(rows["actions"])
        assert joined(found[number], ("reward",), "with") == native(rows["rewards"])
        terminated = np.concatenate([one.terminated for one in found[number]])
        truncated = np.concatenate([one.truncated for one in found[number]])
        done = rows["done"]
        assert terminated.tolist() == (done & (ends is None)).tolist()
        assert truncated[:-1].tolist() == (done & (ends is not None))[:-1].tolist()
        assert truncated[-1] or terminated[-1]
