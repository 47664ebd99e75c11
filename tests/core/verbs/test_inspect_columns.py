"""`inspect` of a table in no known format: its columns, and a command that converts it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from d4rl_files import flat, random_episodes
from table_files import WRITERS, named, write_csv, write_h5

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.verbs.inspect import ColumnsResult

STEPS = (4, 3, 5)


def options_in(command: str) -> dict[str, Any]:
    """Parse a proposed command as a shell and the command line do."""
    words = shlex.split(command)
    assert words[:2] == ["rbtool", "convert"]
    assert words[3:6] == ["DEST", "--from", "table"]
    pairs = list(zip(words[6::2], words[7::2], strict=True))
    found: dict[str, Any] = {name[2:].replace("-", "_"): value for name, value in pairs if name != "--map"}
    return found | {"map": [value for name, value in pairs if name == "--map"]}


def looked_at(path: Path) -> ColumnsResult:
    result = rbtool.inspect(path)
    assert isinstance(result, ColumnsResult)
    return result


@pytest.mark.parametrize("kind", WRITERS)
def test_the_proposed_command_converts_the_file(kind: str, tmp_path: Path) -> None:
    columns = flat(random_episodes(STEPS), following=True)
    names = {"observations": "obs", "actions": "action", "rewards": "rew", "terminals": "done", "timeouts": "timeout",
             "next_observations": "next_obs"}  # fmt: skip
    made = {names[name]: values for name, values in columns.items()} | {"traj_id": np.repeat([2, 5, 9], STEPS)}
    result = looked_at(WRITERS[kind](tmp_path / "a", made))
    assert result.doubts == ()
    options = options_in(result.command)
    assert (options["ends"], options["episode_key"]) == ("done,timeout", "traj_id")
    done = rbtool.convert(result.path, tmp_path / "out", format="table", **options)
    assert dict(result.options) == options
    with TedReader(done.path) as reader:
        assert reader.episodes.episode.tolist() == [2, 5, 9]
        rows = {field.name: reader.read(field.key, 0, sum(STEPS)) for field in reader.fields}
    assert np.array_equal(rows["observation"], columns["observations"].astype(rows["observation"].dtype))
    assert np.array_equal(rows["next.observation"], columns["next_observations"].astype(rows["observation"].dtype))
    assert np.array_equal(rows["action"], columns["actions"].astype(rows["action"].dtype))


def test_groups_are_proposed_with_all_that_is_in_them(tmp_path: Path) -> None:
    columns = {"obs/pos": np.ones((3, 2)), "obs/cam": np.ones((3, 4)), "a": np.arange(3), "my end": np.array([0, 0, 1])}
    result = looked_at(write_h5(tmp_path / "a b", columns))
    assert options_in(result.command)["map"] == ["observation=obs.*", "action=a"]
    assert [(one.name, one.key) for one in result.columns if one.key] == [
        ("a", "action"), ("obs/cam", "observation.cam"), ("obs/pos", "observation.pos"),
    ]  # fmt: skip
    assert options_in(result.command)["ends"] == "TERMINATED,TRUNCATED"
    assert any("no column states where episodes end" in doubt for doubt in result.doubts)
    assert any("no column is called reward" in doubt for doubt in result.doubts)


def test_columns_of_other_names_are_proposed_and_doubted(tmp_path: Path) -> None:
    table = {"x": np.arange(4.0), "theta": np.arange(4.0), "action": np.arange(4), "done": np.array([0, 1, 0, 1])}
    result = looked_at(write_csv(tmp_path / "a", table))
    assert options_in(result.command)["map"] == ["observation=x,theta", "action=action"]
    assert any("no column is called observation" in doubt for doubt in result.doubts)
    assert any("done is taken for time limits" in doubt for doubt in result.doubts)
    assert rbtool.convert(result.path, tmp_path / "out", format="table", **options_in(result.command)).episodes == 2


def test_different_lengths_are_doubted(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", {"obs": np.ones((5, 2)), "act": np.ones((4, 1)), "done": np.zeros(4)})
    assert any("different numbers of rows" in doubt for doubt in looked_at(path).doubts)


def test_the_hint_of_convert_proposes_the_same(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", named(flat(random_episodes(STEPS))))
    with pytest.raises(FormatError, match="unknown format; supported: ") as raised:
        rbtool.convert(path, tmp_path / "out")
    shown = looked_at(path)
    assert raised.value.hint == f"its columns can be mapped: {shown.command} ({'; '.join(shown.doubts)})"


@pytest.mark.parametrize("content", [b"", b"hello", b'{"a": 1, "b": 2}\n{"a": 1, "b": 2}\n', bytes(range(256))])
def test_what_is_no_table_is_an_error_as_before(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(RbtoolError) as raised:
        rbtool.inspect(tmp_path / "file")
    assert "table --map" not in raised.value.hint


def test_a_damaged_table_is_an_error(tmp_path: Path) -> None:
    path = WRITERS["npz"](tmp_path / "a", named(flat(random_episodes(STEPS))))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptDataError, match="it was cut"):
        rbtool.inspect(path)


def test_inspect_and_check_read_a_table_by_name(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", named(flat(random_episodes(STEPS), following=True)))
    options: dict[str, Any] = {"format": "table", "map": ["observation=obs next.observation=obs_after action=act"]}
    assert rbtool.inspect(path, **options, ends="dead,late").episodes == 3
    assert rbtool.check(path, **options, ends="dead,late").steps == sum(STEPS)


def test_a_file_of_a_raw_dataset_is_no_table(tmp_path: Path) -> None:
    data = Path(__file__).parents[2] / "data" / "minari" / "cartpole" / "scripted-v0" / "data" / "main_data.hdf5"
    with pytest.raises(UsageError, match="is one file of a Minari dataset"):
        rbtool.inspect(data)


def test_links_of_an_hdf5_file_are_not_followed(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", {"obs": np.ones((2, 2))})
    with h5py.File(path, "a") as file:
        file["act"] = h5py.ExternalLink("/etc/passwd", "/x")
    with pytest.raises(CorruptDataError, match="link to another name"):
        rbtool.inspect(path)
