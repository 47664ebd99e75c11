"""Where the episodes of a D4RL file end: time limits of a user, an id or a file name, and the mazes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d4rl_files import flat, random_episodes, write

import rbtool
from rbtool.cli.inspect import column_lines
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.errors import FormatError, UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason
from rbtool.core.verbs.inspect import ColumnsResult


@pytest.mark.parametrize("following", [False, True])
def test_without_timeouts_the_horizon_ends_episodes(following: bool, tmp_path: Path) -> None:
    episodes = random_episodes((4, 2, 4, 4, 3), ends=("timeout", "terminal", "both", "timeout", "none"))
    columns = flat(episodes, timeouts=False, following=following)
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out", horizon=4, final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 2, 4, 4, 3]
        reasons = [EndReason.TRUNCATED, EndReason.TERMINATED, EndReason.TERMINATED, EndReason.TRUNCATED]
        assert reader.episodes.end_reason.tolist() == [*reasons, EndReason.END_OF_FILE]
    assert result.notes[0] == "there are no timeouts: episodes end at terminals and at the time limit of 4 steps"
    assert result.request["options"] == {"horizon": 4}


def test_the_name_of_a_published_file_states_its_horizon(tmp_path: Path) -> None:
    episodes = random_episodes((280, 280, 5), ends=("timeout", "timeout", "none"))
    file = tmp_path / "kitchen_microwave_kettle_light_slider-v0.hdf5"
    write(file, flat(episodes, timeouts=False))
    with D4rlReader(file) as reader:
        facts = reader.facts()
        assert (facts.id, list(facts.lengths or ())) == ("kitchen-partial-v0", [279, 279, 4])
        assert any("280 steps of kitchen-partial-v0" in note for note in facts.notes)
    with D4rlReader(file, options={"horizon": 5}, final_step="repeat") as reader:
        assert len(reader.facts().episode_numbers) == 113
    human = tmp_path / "pen-v0_demos_clipped.hdf5"
    write(human, flat(episodes, timeouts=False))
    for name, longest in (("pen-human-v0", 100), ("pen-human-longhorizon-v0", 200)):
        with D4rlReader(human, options={"id": name}, final_step="repeat") as reader:
            assert max(reader.facts().lengths or ()) == longest


def test_a_time_limit_that_the_file_name_alone_states_is_named_as_such(tmp_path: Path) -> None:
    columns = flat(random_episodes((30, 30, 30), ends=("timeout",) * 3), timeouts=False, following=True)
    file = write(tmp_path / "minigrid4rooms.hdf5", columns)
    with D4rlReader(file) as reader:
        notes = reader.facts().notes
    assert any(
        "minigrid-fourrooms-v0, which the file name states (--horizon N states another)" in note for note in notes
    )
    assert any("in 2 steps inside episodes (first: step 29)" in note for note in notes)
    for options in ({"horizon": 30}, {"id": "minigrid-fourrooms-v0"}):
        with D4rlReader(file, options=options) as reader:
            assert not any("file name" in note for note in reader.facts().notes)


def test_ids_of_the_same_file_with_another_time_limit_are_named(tmp_path: Path) -> None:
    columns = flat(random_episodes((300, 250), ends=("timeout", "timeout")), timeouts=False)
    file = write(tmp_path / "door-v0_demos_clipped.hdf5", columns)
    sentence = "door-human-longhorizon-v0 is the same file with a time limit of 300 steps"
    with D4rlReader(file) as reader:
        assert sentence in reader.facts().notes
    with D4rlReader(file, options={"id": "door-human-v0"}) as reader:
        assert sentence not in reader.facts().notes


def d3rlpy_1(columns: dict[str, Any]) -> dict[str, Any]:
    """The layout of d3rlpy 1: `episode_terminals` in place of `timeouts`, of the element types that it writes."""
    ends = columns["terminals"] | columns.pop("timeouts")
    return {
        **columns, "terminals": columns["terminals"].astype("float32"), "episode_terminals": ends.astype("float32"),
        "discrete_action": False, "version": "1.0",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a.hdf5", "hopper_medium-v2.hdf5", "Ant_maze_u-maze_v2.hdf5"])
@pytest.mark.parametrize("following", [False, True])
def test_episode_terminals_are_the_ends_of_files_of_d3rlpy_1(name: str, following: bool, tmp_path: Path) -> None:
    episodes = random_episodes((4, 3, 1, 5, 2), ends=("terminal", "timeout", "terminal", "timeout", "none"))
    file = write(tmp_path / name, d3rlpy_1(flat(episodes, following=following)))
    result = rbtool.convert(file, tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 3, 1, 5, 2]
        reasons = [EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.TERMINATED, EndReason.TRUNCATED]
        assert reader.episodes.end_reason.tolist() == [*reasons, EndReason.END_OF_FILE]
        found = (("observation",), ("next", "observation"), ("next", "terminated"), ("next", "truncated"))
        rows = {key: reader.read(key, 0, 15) for key in found}
        observations = np.concatenate([episode.observations[:-1] for episode in episodes])
        assert np.array_equal(rows[("observation",)], observations)
        after = [episode.observations[1:].copy() for episode in episodes]
        for episode, next_rows in zip(episodes, after, strict=True):
            next_rows[-1] = episode.observations[-1 if following else -2]
        assert np.array_equal(rows[("next", "observation")], np.concatenate(after))
        assert np.flatnonzero(rows[("next", "terminated")]).tolist() == [3, 7]
        assert np.flatnonzero(rows[("next", "truncated")]).tolist() == [6, 12, 14]
    assert result.notes[0].startswith("episodes end at episode_terminals, as d3rlpy 1 writes them")
    with pytest.raises(UsageError, match="has episode_terminals, which mark where episodes end"):
        rbtool.convert(file, tmp_path / "other", horizon=5)


def test_terminals_inside_episodes_of_d3rlpy_1_stay_flags(tmp_path: Path) -> None:
    columns = d3rlpy_1(flat(random_episodes((4, 3))))
    columns["terminals"][1] = 1
    with D4rlReader(write(tmp_path / "a.hdf5", columns), final_step="repeat") as reader:
        facts = reader.facts()
    assert list(facts.lengths or ()) == [4, 3]
    assert "terminals are set in 1 steps inside episodes" in facts.notes


def test_episode_terminals_beside_timeouts_end_no_episode(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3, 5)))
    columns["episode_terminals"] = np.arange(12) % 2
    with D4rlReader(write(tmp_path / "a.hdf5", columns), final_step="repeat") as reader:
        facts = reader.facts()
    assert list(facts.lengths or ()) == [4, 3, 5]
    assert "timeouts are there, and episode_terminals end no episode: they are info.episode_terminals" in facts.notes


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.zeros(6), "different numbers of rows"), (np.full(7, 0.5), "expected 0 or 1"), (np.zeros((7, 2)), "one nu")],
)
def test_episode_terminals_that_are_no_flags_are_refused(values: Any, message: str, tmp_path: Path) -> None:
    columns = {**d3rlpy_1(flat(random_episodes((4, 3)))), "episode_terminals": values}
    with pytest.raises(FormatError, match=message):
        rbtool.inspect(write(tmp_path / "a.hdf5", columns))


def test_without_any_sign_at_all_the_horizon_is_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path / "a.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    with pytest.raises(FormatError, match="neither timeouts nor next_observations") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert "--horizon N" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert rbtool.inspect(file, horizon=4).episodes == 2


@pytest.mark.parametrize("inside", [False, True])
def test_inspect_shows_the_keys_of_a_file_that_needs_the_horizon(inside: bool, tmp_path: Path) -> None:
    file = write(tmp_path / "a.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    for found in (rbtool.inspect(tmp_path if inside else file), rbtool.inspect(file, format="d4rl")):
        assert isinstance(found, ColumnsResult)
        assert {one.name: one.rows for one in found.columns} == dict.fromkeys(
            ("observations", "actions", "rewards", "terminals"), 8
        )
        assert "time limit cannot be determined" in found.doubts[0]
        assert (found.format, dict(found.options)) == ("d4rl", {"horizon": "N"})
        assert found.command.endswith("DEST --from d4rl --horizon N")
    with pytest.raises(FormatError, match="neither timeouts"):
        rbtool.inspect(file, episode=0)
    text = " ".join(str(cell) for line in column_lines(found) for cell in line)
    assert "HDF5 file of format d4rl" in text


def test_what_else_is_in_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.hdf5", flat(random_episodes((4, 4))))
    assert not [note for note in rbtool.inspect(tmp_path).notes if "not read" in note]
    (tmp_path / "README.md").touch()
    (tmp_path / ".hidden").touch()
    assert "another entry of the folder is not read: README.md" in rbtool.inspect(tmp_path).notes
    for number in range(3):
        (tmp_path / f"b{number}").mkdir()
    notes = rbtool.inspect(tmp_path).notes
    assert "4 other entries of the folder are not read: README.md, b0, b1, …" in notes
    assert not [note for note in rbtool.inspect(tmp_path / "a.hdf5").notes if "not read" in note]


def maze_columns(goals: bool = True) -> dict[str, Any]:
    """Two episodes that go on for a while after the goal: `terminals` mark every step near it."""
    columns = flat(random_episodes((8, 6), ends=("timeout", "timeout")))
    columns["terminals"] = np.isin(np.arange(14), (3, 4, 5, 7, 11, 12))
    if goals:
        columns["infos/goal"] = np.zeros((14, 2))
    return columns


@pytest.mark.parametrize(
    ("name", "goals"),
    [("a.hdf5", True), ("Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5", False)],
)
def test_in_antmaze_timeouts_alone_end_episodes_and_terminals_stay_flags(
    name: str, goals: bool, tmp_path: Path
) -> None:
    columns = maze_columns(goals)
    result = rbtool.convert(write(tmp_path / name, columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [8, 6]
        assert reader.read(("next", "terminated"), 0, 14)[:, 0].tolist() == columns["terminals"].tolist()
        assert reader.read(("next", "observation"), 0, 7).tobytes() == columns["observations"][1:8].tobytes()
    assert any("terminals are set in 5 steps inside episodes" in note for note in result.notes)


@pytest.mark.parametrize(("timeouts", "lengths"), [("absent", [700, 30]), ("unset", [730])])
def test_in_antmaze_terminals_end_no_episode_where_timeouts_are_missing(
    timeouts: str, lengths: list[int], tmp_path: Path
) -> None:
    columns = flat(random_episodes((700, 30), ends=("none", "none")), timeouts=timeouts == "unset")
    columns["terminals"][640:650] = True
    file = tmp_path / "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5"
    result = rbtool.convert(write(file, columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == lengths
        assert reader.read(("next", "terminated"), 0, 730)[:, 0].tolist() == columns["terminals"].tolist()
        assert reader.read(("next", "truncated"), 699, 700)[0, 0] == (timeouts == "absent")
    assert any("terminals are set in 10 steps inside episodes" in note for note in result.notes)


def test_repeated_terminals_in_a_maze_of_another_name_without_any_timeout_are_reported(tmp_path: Path) -> None:
    columns = maze_columns()
    columns["timeouts"][:] = False
    with D4rlReader(write(tmp_path / "a.hdf5", columns)) as reader:
        assert any("timeouts are set nowhere" in note for note in reader.facts().notes)


def test_elsewhere_a_step_after_a_terminal_one_begins_an_episode(tmp_path: Path) -> None:
    with D4rlReader(write(tmp_path / "a.hdf5", maze_columns(goals=False)), final_step="repeat") as reader:
        assert list(reader.facts().lengths or ()) == [4, 1, 1, 2, 4, 1, 1]


def test_another_horizon_is_another_dataset(tmp_path: Path) -> None:
    file = write(tmp_path / "a.hdf5", flat(random_episodes((6,)), timeouts=False))
    rbtool.convert(file, tmp_path / "out", horizon=3)
    assert rbtool.convert(file, tmp_path / "out", horizon=3).already_there
    with pytest.raises(UsageError, match="is dataset d4rl:a, horizon 3, not d4rl:a, horizon 2"):
        rbtool.convert(file, tmp_path / "out", horizon=2)


def test_a_horizon_beside_timeouts_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.hdf5", flat(random_episodes((6,))))
    with pytest.raises(UsageError, match="has timeouts"):
        rbtool.convert(file, tmp_path / "out", horizon=3)
    with pytest.raises(UsageError, match="above 0"):
        rbtool.convert(
            write(tmp_path / "b.hdf5", flat(random_episodes((6,)), timeouts=False)), tmp_path / "out", horizon=0
        )
    rbtool.convert(file, tmp_path / "out")
    with pytest.raises(UsageError, match="--horizon is about raw datasets"):
        rbtool.convert(tmp_path / "out", tmp_path / "again", horizon=3)
