"""What a user reads who names too little, or gives a damaged table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table_files import WRITERS, flat, named, random_episodes, write_csv, write_h5, write_npz

import rbtool
from rbtool.converters.table import reader
from rbtool.converters.table.reader import TableReader, overview
from rbtool.core.errors import CorruptDataError, FormatError, UsageError


@pytest.mark.parametrize("kind", ["hdf5", "parquet", "npz"])
def test_a_file_that_was_cut_is_stated_so(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path / "a", named(flat(random_episodes((30, 20)))))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CorruptDataError, match="was cut") as raised:
        rbtool.convert(path, tmp_path / "out", format="table", map=["observation=obs"], ends="-")
    assert "OSError" not in str(raised.value)
    assert "Arrow" not in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize("kind", ["hdf5", "parquet", "npz", "npy"])
def test_nan_is_counted_by_column(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = named(flat(random_episodes((30, 20), dtype="float64"), following=True))
    columns["obs"][[7, 7, 31], [0, 1, 0]] = np.nan
    columns["r"][[12, 40]] = np.nan
    path = WRITERS[kind](tmp_path / "a", columns)
    options = {"map": ["observation=obs next.observation=obs_after action=act reward=r"], "ends": "dead,late"}
    made = rbtool.convert(path, tmp_path / "out", format="table", dry_run=True, **options)
    reward = "r is NaN in 2 of 50 rows, first in row 12"
    both = ["obs is NaN in 2 of 50 rows (3 values), first in row 7", reward]
    assert [note for note in made.notes if "NaN" in note] == both
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(TableReader, "piece_bytes", 1000)
    made = rbtool.convert(path, tmp_path / "out", format="table", dry_run=True, **options)
    assert [note for note in made.notes if "NaN" in note] == both


def test_an_episode_key_that_leaves_no_step_is_named(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a", {"obs": np.arange(5.0), "r": np.arange(5.0)})
    for dry_run in (True, False):
        with pytest.raises(FormatError, match="no step is left") as raised:
            rbtool.convert(
                path, tmp_path / "out", format="table", map=["observation=obs"], episode_key="r", dry_run=dry_run
            )
        assert "--episode-key r may name the wrong column" in raised.value.hint
    assert not (tmp_path / "out").exists()
    kept = rbtool.convert(
        path, tmp_path / "out", format="table", map=["observation=obs"], episode_key="r", final_step="repeat"
    )
    assert kept.episodes == 5
    assert "r has another value in every row: each is an episode of one step" in kept.notes


def test_hdf5_after_a_user_block_is_read(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", {"obs": np.arange(5.0)})
    path.write_bytes(bytes(512) + path.read_bytes())
    made = rbtool.convert(path, tmp_path / "out", format="table", map=["observation=obs"], ends="-", dry_run=True)
    assert made.steps == 4


def test_a_map_without_the_name_of_the_format_has_a_hint_to_it(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a", {"obs": np.arange(5.0), "traj": np.zeros(5, int)})
    with pytest.raises(FormatError, match="unknown format") as raised:
        rbtool.convert(path, tmp_path / "out", map=["observation=obs"], ends="-")
    assert raised.value.hint.startswith("add --from table")
    with pytest.raises(FormatError, match="unknown format") as raised:
        rbtool.convert(path, tmp_path / "out", episode_key="traj")
    assert raised.value.hint.startswith("add --from table")
    for look in (rbtool.inspect, rbtool.check):
        with pytest.raises(UsageError, match="in no format") as wrong:
            look(path, map=["observation=obs"], ends="-")
        assert wrong.value.hint == "add --from table"
    with pytest.raises(FormatError, match="unknown format") as raised:
        rbtool.convert(path, tmp_path / "out")
    assert "--map observation=obs" in raised.value.hint


def test_columns_are_listed_as_they_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('Pos X,"Vel,1",plain\n1,2,3\n')
    with pytest.raises(UsageError, match="has no column 'acts'") as raised:
        rbtool.convert(path, tmp_path / "out", format="table", map=["observation=plain action=acts"], ends="-")
    assert raised.value.hint == 'columns are "Pos X", "Vel,1", plain'


def test_next_observations_and_episodes_are_proposed(tmp_path: Path) -> None:
    rows = np.zeros((4, 2))
    for name in ("next_obs", "next_observation", "next_observations", "next.observation"):
        found = overview(write_npz(tmp_path / "a", {"obs": rows, "act": rows, "rew": rows[:, 0], name: rows}))
        assert found is not None
        assert f"next.observation={name}" in found.options["map"]
    for name in ("traj id", "traj_id", "episode_no", "episode_id", "Episode No"):
        columns = {"obs": rows[:, 0], name: rows[:, 0], "is_done": rows[:, 0], "truncated": rows[:, 0]}
        found = overview(write_csv(tmp_path / "a", columns))
        assert found is not None
        assert (found.options["ends"], found.options["episode_key"]) == ("is_done,truncated", name)
    found = overview(write_npz(tmp_path / "a", {"x": rows, "next_obs": rows}))
    assert found is not None
    assert found.options["map"][0] == "observation=COLUMN"
    assert "next.observation=next_obs" in found.options["map"]


@pytest.mark.parametrize(
    ("flags", "rewarded", "ends", "doubt"),
    [
        (("done",), True, "done", "done is taken for termination; for time limits write --ends -,done"),
        (("done",), False, "-,done", "done is taken for time limits; for termination write --ends done"),
        (("timeouts",), True, "-,timeouts", "timeouts is taken for time limits"),
        (("terminals", "timeouts", "done"), True, "terminals,timeouts", ""),
        (("terminated", "done"), True, "terminated,done", ""),
        (("is_terminal", "done"), True, "is_terminal,done", ""),
        (("done", "truncated"), True, "done,truncated", ""),
        (("terminals", "valids"), True, "TERMINATED,TRUNCATED", "valids may qualify ends or steps, too"),
        (("terminals", "masks"), True, "TERMINATED,TRUNCATED", "masks may qualify ends or steps, too"),
        (("is_last", "is_terminal"), True, "TERMINATED,TRUNCATED", "is_last may qualify ends or steps, too"),
    ],
)
def test_proposed_ends_are_what_the_flags_can_only_mean(
    flags: tuple[str, ...], rewarded: bool, ends: str, doubt: str, tmp_path: Path
) -> None:
    rows = np.zeros((4, 2))
    columns = {"obs": rows, "act": rows} | ({"rew": rows[:, 0]} if rewarded else {})
    path = write_npz(tmp_path / "a", columns | dict.fromkeys(flags, rows[:, 0]))
    found = overview(path)
    assert found is not None
    assert found.options["ends"] == ends
    about_ends = [one for one in found.doubts if "no column is called reward" not in one]
    assert len(about_ends) == bool(doubt)
    assert all(doubt in one for one in about_ends)
    with pytest.raises(FormatError, match="unknown format") as raised:
        rbtool.convert(path, tmp_path / "out")
    assert f"--ends {ends}" in raised.value.hint
    assert doubt in raised.value.hint


def test_valids_in_hdf5_are_no_columns_of_d4rl(tmp_path: Path) -> None:
    rows = np.zeros(4)
    names = ("observations", "actions", "rewards", "terminals", "valids")
    path = write_h5(tmp_path / "a", dict.fromkeys(names, rows))
    with pytest.raises(FormatError, match="unknown format") as raised:
        rbtool.convert(path, tmp_path / "out")
    assert "--ends TERMINATED,TRUNCATED" in raised.value.hint
