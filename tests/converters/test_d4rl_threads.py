"""A test for each report of wrong episodes in D4RL's files, or in what others made of them, named after its thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from d4rl_files import after_final_step, flat, plain_rows, random_episodes, write

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason

DATA = Path(__file__).parents[1] / "data" / "d4rl"


def rows(path: Path, key: str) -> np.ndarray:
    with TedReader(path) as reader:
        return reader.read(tuple(key.split(".")), 0, reader.manifest.steps)


def test_d4rl_77_antmaze_v0_is_reported_as_broken_and_v2_is_named(tmp_path: Path) -> None:
    columns = flat(random_episodes((6, 6), ends=("timeout", "timeout")))
    name = "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse"
    old = rbtool.convert(write(tmp_path / f"{name}.hdf5", columns), tmp_path / "old")
    new = rbtool.convert(write(tmp_path / f"{name}_fixed.hdf5", columns), tmp_path / "new")
    assert any("the v2 file has them repaired" in note for note in old.notes)
    assert not any("repaired" in note for note in new.notes)


def test_d4rl_145_the_next_observation_of_a_terminal_step_is_not_that_of_the_next_episode(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 5, 3), ends=("terminal", "terminal", "terminal")))
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    after = rows(result.path, "next.observation")
    for end in (3, 8):
        assert after[end].tobytes() == columns["observations"][end].tobytes()
        assert after[end].tobytes() != columns["observations"][end + 1].tobytes()
    assert result.steps == 12  # and the last row of the file is not dropped


def test_d4rl_162_timeouts_that_are_not_marked_are_reported(tmp_path: Path) -> None:
    columns = flat(random_episodes((1000, 1000, 7), ends=("timeout", "timeout", "terminal")), following=True)
    columns["timeouts"][999] = False
    result = rbtool.convert(write(tmp_path / "hopper_medium_replay-v2.hdf5", columns), tmp_path / "out")
    assert any("1 episode has more than the 1,000 steps" in note for note in result.notes)
    assert result.boundary["explicit_next"] == 1  # the jump inside is kept as it is, and marked
    assert rows(result.path, "next.observation").tobytes() == columns["next_observations"].tobytes()


def test_d4rl_86_every_step_of_the_file_is_counted_once(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 1, 4, 1, 5), ends=("terminal",) * 4 + ("none",)), following=True)
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert (result.steps, result.episodes) == (14, 5)
    assert rows(result.path, "action").tobytes() == columns["actions"].tobytes()


def test_d4rl_137_adroit_timeouts_are_where_the_file_has_them(tmp_path: Path) -> None:
    columns = flat(random_episodes((200, 100, 30), ends=("timeout", "timeout", "timeout")))
    result = rbtool.convert(write(tmp_path / "door-human-v1.hdf5", columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [200, 100, 30]
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * 3


@pytest.mark.parametrize("following", [False, True])
def test_d4rl_34_and_31_next_observations_are_those_of_the_same_episode(following: bool, tmp_path: Path) -> None:
    columns = flat(random_episodes((5, 4, 6), ends=("timeout", "terminal", "timeout")), following=following)
    expected = after_final_step(plain_rows(columns, [4, 8, 14]))
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    found = rows(result.path, "next.observation")
    assert [row.tobytes() for row in found] == [row["next"].tobytes() for row in expected]


def test_d4rl_85_one_step_episodes_of_maze2d_are_named_where_they_vanish(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 1, 1, 5), ends=("timeout",) * 4))
    file = write(tmp_path / "a.hdf5", columns)
    result = rbtool.convert(file, tmp_path / "out")
    assert any("2 episodes (1, 2) are left out: one step" in note for note in result.notes)
    assert rbtool.convert(file, tmp_path / "all", final_step="repeat").episodes == 4


def test_d4rl_176_a_self_made_file_without_timeouts_says_what_is_missing(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    with pytest.raises(FormatError, match="neither timeouts nor next_observations"):
        rbtool.convert(file, tmp_path / "out")


def test_d4rl_199_terminals_near_the_goal_do_not_end_episodes(tmp_path: Path) -> None:
    columns = dict(flat(random_episodes((10,), ends=("timeout",))), **{"infos/goal": np.ones((10, 2))})
    columns["terminals"][4:9] = True
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat")
    assert result.episodes == 1
    assert rows(result.path, "next.terminated")[:, 0].tolist() == columns["terminals"].tolist()
    assert [finding.rule for finding in rbtool.check(result.path).findings] == ["TED006"]  # a warning


def test_d4rl_210_a_file_that_was_cut_names_sizes_and_the_command(tmp_path: Path) -> None:
    file = write(tmp_path / "halfcheetah_medium-v2.hdf5", flat(random_episodes((100, 100))))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 3])
    with pytest.raises(CorruptDataError, match=f"{size // 3:,} bytes, and its header states {size:,}") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert caught.value.hint == "fetch it again: rbtool download d4rl halfcheetah-medium-v2"


def test_corl_43_the_last_unterminated_episode_is_kept(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 6), ends=("terminal", "none")))
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 5]  # its last step has no observation after it
        assert reader.episodes.truncated.tolist() == [False, True]
    assert rbtool.convert(tmp_path / "a.hdf5", tmp_path / "all", final_step="repeat").steps == 10


def test_diffusion_policies_6_timeouts_end_episodes_too(tmp_path: Path) -> None:
    columns = flat(random_episodes((50,) * 20, ends=("timeout",) * 19 + ("terminal",)))
    columns["rewards"][:] = 1
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.max() == 50
        assert reader.episodes.total_reward.max() == 50


def test_minari_74_and_187_a_reward_is_that_of_the_action_in_its_row(tmp_path: Path) -> None:
    columns = flat(random_episodes((6,), ends=("terminal",)))
    columns["rewards"] = columns["actions"][:, 0].copy()
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert rows(result.path, "next.reward")[:, 0].tobytes() == rows(result.path, "action")[:, 0].tobytes()


def test_minari_199_observations_of_another_length_are_refused(tmp_path: Path) -> None:
    columns = flat(random_episodes((6,), ends=("terminal",)))
    columns["observations"] = np.concatenate((columns["observations"], columns["observations"][-1:]))
    with pytest.raises(FormatError, match=r"observations 7, actions 6"):
        rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")


def test_minari_286_the_time_limit_in_the_report_is_that_of_the_id(tmp_path: Path) -> None:
    columns = flat(random_episodes((50, 50), ends=("timeout", "timeout")), timeouts=False)
    result = rbtool.convert(write(tmp_path / "minigrid4rooms.hdf5", columns), tmp_path / "out", final_step="repeat")
    assert any("the time limit of 50 steps of minigrid-fourrooms-v0" in note for note in result.notes)
    assert result.episodes == 2


def test_tfds_the_end_of_an_episode_does_not_take_the_last_row_of_the_whole_file(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 4, 2), ends=("timeout", "timeout", "timeout")), following=True)
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    after = rows(result.path, "next.observation")
    for end in (2, 6, 8):
        assert after[end].tobytes() == columns["next_observations"][end].tobytes()


@pytest.mark.parametrize(
    ("name", "options", "episodes", "steps", "ends"),
    [
        ("door_demos", {"horizon": 40}, 3, 117, {"truncated": 3, "final_dropped": 3}),
        ("hopper_random-v2", {}, 20, 466, {"terminated": 18, "truncated": 1, "end_of_file": 1}),
        ("hopper_random_v0", {"horizon": 1000}, 8, 171, {"terminated": 8, "final_repeated": 8}),
        ("kitchen_like_no_timeouts", {"horizon": 30}, 5, 145, {"truncated": 5, "final_dropped": 5}),
        ("antmaze_like_goal", {}, 5, 113, {"terminated": 5, "final_repeated": 5}),
    ],
)
def test_real_and_generated_files_equal_a_plain_reading(
    name: str, options: dict[str, int], episodes: int, steps: int, ends: dict[str, int], tmp_path: Path
) -> None:
    import h5py

    with h5py.File(DATA / f"{name}.hdf5") as file:
        names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
        columns = {one: file[one][()] for one in names if one in file}
    result = rbtool.convert(DATA / f"{name}.hdf5", tmp_path / "out", **options)
    assert (result.episodes, result.steps) == (episodes, steps)
    assert {key: count for key, count in result.boundary.items() if count} == ends
    last = columns["terminals"] | columns.get("timeouts", np.zeros(len(columns["rewards"]), bool))
    length = options.get("horizon", len(last) + 1)
    since = 0
    for row in range(len(last)):
        since += 1
        last[row] |= since == length
        since = 0 if last[row] else since
    expected = after_final_step(plain_rows(columns, np.flatnonzero(last).tolist()))
    for key, own in (("observation", "observation"), ("next.observation", "next"), ("action", "action")):
        assert rows(result.path, key).tobytes() == b"".join(row[own].tobytes() for row in expected)
    assert rows(result.path, "next.reward").tobytes() == b"".join(row["reward"].tobytes() for row in expected)
    assert rows(result.path, "episode").tolist() == [row["episode"] for row in expected]
    assert rbtool.check(result.path).errors == 0
