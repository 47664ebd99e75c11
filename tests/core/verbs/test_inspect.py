"""`inspect`: of datasets, and of tables in no known format."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from table_files import WRITERS, flat, named, random_episodes, write_csv, write_h5

import rbtool
from rbtool.cli.inspect import summary_lines
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.inspect import ColumnsResult, Spread

EPISODES = [(10, "terminated"), (10, "truncated"), (4, "both"), (1, "open")]


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    folder = tmp_path / "walks" / "test-v0"
    folder.parent.mkdir()
    write_walks(folder, EPISODES)
    return folder


def test_the_summary_is_that_of_the_data(walks: Path, tmp_path: Path) -> None:
    result = rbtool.inspect("walks:test-v0", root=tmp_path)
    assert (result.name, result.type, result.layout) == ("walks:test-v0", "dataset", "ted")
    assert (result.steps, result.episodes) == (25, 4)
    assert result.ends.to_dict() == {
        "terminated": 1, "truncated": 1, "both": 1, "end_of_file": 1, "inferred": 0, "explicit_next": 0,
    }  # fmt: skip
    assert (result.length.min, result.length.mean, result.length.max) == (1, 6.25, 10)
    assert sum(result.length.histogram) == 4
    with TedReader(walks) as reader:
        returns, lengths = reader.episodes.total_reward, reader.episodes.length
    assert (result.length.median, result.returns.median) == (np.median(lengths), pytest.approx(np.median(returns)))
    assert (result.returns.min, result.returns.max) == (returns.min(), returns.max())
    assert result.returns.mean == pytest.approx(returns.mean())
    assert (
        result.bytes
        == sum(path.stat().st_size for path in walks.rglob("*") if path.is_file())
        - (walks / ".rbtool" / "manifest.json").stat().st_size
    )


def test_fields_come_with_bytes_and_ranges(walks: Path) -> None:
    fields = {".".join(field.key): field for field in rbtool.inspect(walks).fields}
    observation = fields["observation"]
    assert (observation.dtype, observation.shape, observation.bytes) == ("float64", (3,), 25 * 24)
    with TedReader(walks) as reader:
        values = reader.read(("observation",), 0, 25)
    assert (observation.min, observation.max) == (values.min(), values.max())
    assert (fields["next.done"].min, fields["next.done"].max) == (None, None)


def test_one_episode_is_shown_row_by_row_and_as_strict_json(walks: Path) -> None:
    view = rbtool.inspect(walks, episode=2, head=2).episode
    assert (view.episode, view.length, view.end) == (2, 4, "both")
    assert [row.step for row in view.rows] == [0, 1, 3]
    with TedReader(walks) as reader:
        for row in view.rows:
            for field in reader.fields:
                expected = reader.read(field.key, 20 + row.step, 21 + row.step)[0]
                np.testing.assert_array_equal(np.asarray(row.values[field.name], expected.dtype), expected)
    document = to_document(rbtool.inspect(walks, episode=0))
    assert document == json.loads(json.dumps(document, allow_nan=False))
    assert (document["schema"], document["kind"]) == (1, "inspect")
    assert document["spaces"]["observation"]["low"] == "-inf"


@pytest.mark.parametrize("head", [None, 10, 99])
def test_without_a_small_head_every_row_is_shown(walks: Path, head: int | None) -> None:
    assert [row.step for row in rbtool.inspect(walks, episode=0, head=head).episode.rows] == list(range(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"episode": 4}, r"episode 4 is not there: there are 4 \(0 to 3\)"),
        ({"episode": -1}, "episode -1 is not there"),
        ({"episode": 0, "head": 0}, "--head is 0, expected 1 or more"),
        ({"head": 3}, "--head needs --episode"),
    ],
)
def test_what_has_no_meaning_is_refused(walks: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.inspect(walks, **arguments)


def test_only_manifest_and_episode_table_are_read(walks: Path) -> None:
    before = rbtool.inspect(walks)
    for path in walks.rglob("*.memmap"):
        if ".rbtool" not in path.parts:
            path.unlink()
    after = rbtool.inspect(walks)
    assert replace(after, problems=()) == before
    assert len(after.problems) == len(before.fields)


def test_an_empty_dataset_has_no_spread(tmp_path: Path) -> None:
    write_walks(tmp_path / "empty", [])
    result = rbtool.inspect(tmp_path / "empty")
    assert (result.steps, result.episodes, result.length, result.returns) == (0, 0, None, None)
    assert rbtool.check(tmp_path / "empty").findings == ()


@pytest.mark.parametrize("size", [1e300, 1.7e308, 1e-300])
def test_returns_of_any_size_are_summarised(size: float) -> None:
    found = Spread.of(np.array([-size, size, size / 2]))
    assert found.mean == pytest.approx(size / 6, rel=1e-14)
    assert found.median == size / 2
    assert (found.min, found.max, found.histogram) == (-size, size, (1, 0, 0, 0, 0, 0, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("numbers", "median"),
    [([2, 9], 5.5), ([1.7e308, 1.7e308], 1.7e308), ([7, 1, 3], 3), ([-np.inf, np.inf], np.nan), ([1, np.nan], np.nan)],
)
def test_the_median_is_between_the_middle_numbers(numbers: list[float], median: float) -> None:
    found = Spread.of(np.array(numbers))
    assert found is not None
    np.testing.assert_equal(found.median, median)


def test_returns_that_differ_in_the_last_digit_have_a_histogram() -> None:
    found = Spread.of(np.array([0.3, 0.1 + 0.2]))
    assert found is not None
    assert sum(found.histogram) == 2


@pytest.mark.parametrize("how", ["cut", "longer", "gone"])
def test_a_file_of_another_size_than_the_manifest_says_is_named(walks: Path, how: str) -> None:
    file = walks / "observation.memmap"
    file.unlink() if how == "gone" else os.truncate(file, 295 if how == "cut" else 900)
    said = "is missing" if how == "gone" else f"has {295 if how == 'cut' else 900} bytes, the manifest states 600"
    (problem,) = rbtool.inspect(walks).problems
    assert problem.startswith(f"{file} {said}")
    shown = "".join(str(cell) for line in summary_lines(rbtool.inspect(walks)) for cell in line)
    assert problem in shown


def test_a_cut_file_names_the_steps_and_episodes_that_are_lost(walks: Path) -> None:
    os.truncate(walks / "observation.memmap", 12 * 24 + 7)
    (finding,) = [finding for finding in rbtool.check(walks).findings if finding.rule == "TED012"]
    assert (finding.steps, finding.episodes) == (((12, 25),), (1, 2, 3))


# `inspect` of a table in no known format: its columns, and a command that converts it.

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


def test_columns_are_proposed_and_doubted(tmp_path: Path) -> None:
    table = {"x": np.arange(4.0), "theta": np.arange(4.0), "action": np.arange(4), "done": np.array([0, 1, 0, 1])}
    result = looked_at(write_csv(tmp_path / "a", table))
    assert options_in(result.command)["map"] == ["observation=x,theta", "action=action"]
    assert any("no column is called observation" in doubt for doubt in result.doubts)
    assert any("done is taken for time limits" in doubt for doubt in result.doubts)
    assert rbtool.convert(result.path, tmp_path / "out", format="table", **options_in(result.command)).episodes == 2
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


def test_damaged_and_foreign_tables_are_errors(tmp_path: Path) -> None:
    path = WRITERS["npz"](tmp_path / "a", named(flat(random_episodes(STEPS))))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptDataError, match="it was cut"):
        rbtool.inspect(path)
    data = Path(__file__).parents[2] / "data" / "minari" / "cartpole" / "scripted-v0" / "data" / "main_data.hdf5"
    with pytest.raises(UsageError, match="is one file of a Minari dataset"):
        rbtool.inspect(data)
    path = write_h5(tmp_path / "a", {"obs": np.ones((2, 2))})
    with h5py.File(path, "a") as file:
        file["act"] = h5py.ExternalLink("/etc/passwd", "/x")
    with pytest.raises(CorruptDataError, match="link to another name"):
        rbtool.inspect(path)


def test_inspect_and_check_read_a_table_by_name(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a", named(flat(random_episodes(STEPS), following=True)))
    options: dict[str, Any] = {"format": "table", "map": ["observation=obs next.observation=obs_after action=act"]}
    assert rbtool.inspect(path, **options, ends="dead,late").episodes == 3
    assert rbtool.check(path, **options, ends="dead,late").steps == sum(STEPS)
