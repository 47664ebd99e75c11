"""`RllibReader`: the contract of readers, real files row by row, random episodes, and every rule for episodes."""

from __future__ import annotations

import base64
import json
import pickle
import random
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each
from conversions import WrittenReaderTests, bytes_of, column, columns_of, converted, refused, with_options, written
from demonstration_files import (
    Row,
    as_batch,
    entries,
    extended,
    packed,
    packed_episode,
    plain_lines,
    plain_parquet,
    rows_of_episode,
    tensors,
    without,
    write_extended,
    write_items,
    write_lines,
    write_parquet,
)
from hypothesis import given
from hypothesis import strategies as st

import rbtool
from rbtool.converters.rllib.reader import RllibReader
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.locate import open_source
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data" / "rllib"
FILES = ("cartpole_small.json", "cartpole-v1.jsonl", "cartpole-v1_large")


def four_episodes(**options: Any) -> list[list[Row]]:
    return [
        rows_of_episode(100 + number, length, seed=number, **options) for number, length in enumerate((5, 1, 9, 12))
    ]


def write_transitions(folder: Path) -> Path:
    rows = [row for rows in four_episodes(following=False) for row in rows]
    return write_lines(folder / "a.jsonl", rows)


def write_cut_parquet(folder: Path) -> Path:
    rows = [row for rows in four_episodes(flags="terminateds") for row in rows]
    for number, start in enumerate(range(0, len(rows), 7)):
        write_parquet(folder / "d" / f"{number}.parquet", rows[start : start + 7])
    return folder / "d"


def write_packed_episodes(folder: Path) -> Path:
    """One of the episodes is in two pieces."""
    episodes = four_episodes(flags="terminateds")
    whole = [packed_episode(rows) for rows in episodes[:3]]
    cut = [{**row, "terminateds": False} for row in episodes[3][:5]]
    run = folder / "out" / "env" / "run-000001-00001"
    write_items(run / "0355Pz_ab_000000-0.parquet", [*whole, packed_episode(cut)])
    write_items(run / "0355Pz_ab_000001-0.parquet", [packed_episode(episodes[3][4:], repeats=1, first=5)])
    return folder / "out"


class TestReader(WrittenReaderTests):
    kind, piece_bytes = RllibReader, 700
    made = written(
        {
            "batches": lambda folder: write_lines(folder / "a.json", [as_batch(rows) for rows in four_episodes()]),
            "transitions": write_transitions,
            "Parquet files that cut episodes": write_cut_parquet,
            "packed episodes": write_packed_episodes,
        }
    )


def assert_equal_rows(path: Path, rows: list[Row], folder: Path, dtype: str = "float64", **options: Any) -> TedReader:
    """Convert, and compare row by row with rows in the order of the episodes."""
    reader = converted(path, folder, **options)
    assert reader.manifest.steps == len(rows)
    columns = columns_of(reader)
    for name, source in (("observation", "obs"), ("next.observation", "new_obs")):
        assert columns[name].tobytes() == np.array([row[source] for row in rows], dtype).tobytes()
    assert columns["action"].tolist() == [row["actions"] for row in rows]
    assert columns["next.reward"][:, 0].tolist() == [row["rewards"] for row in rows]
    for name in ("prev_actions", "action_prob"):
        assert columns[f"info.{name}"].tolist() == [row[name] for row in rows]
    ids = [row["eps_id"] for row in rows]
    assert columns["info.eps_id"].tolist() == ids
    assert columns["episode"].tolist() == [list(dict.fromkeys(ids)).index(one) for one in ids]
    return reader


@pytest.mark.parametrize("name", FILES[:2])
def test_every_row_of_real_json_equals_a_plain_reading(name: str, tmp_path: Path) -> None:
    rows = plain_lines(DATA / name)
    with assert_equal_rows(DATA / name, rows, tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [56, 26, 20]
        assert column(reader, "next.terminated")[:, 0].tolist() == [row["dones"] for row in rows]
        assert reader.episodes.explicit_next.tolist() == [False] * 3
        assert any("taken as terminated (--ends truncated" in note for note in reader.manifest.notes)


def test_every_row_of_real_parquet_equals_a_plain_reading_and_files_that_cut_episodes_are_joined(
    tmp_path: Path,
) -> None:
    rows = plain_parquet(sorted((DATA / "cartpole-v1_large").iterdir()))
    with assert_equal_rows(DATA / "cartpole-v1_large", rows, tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [63]
        assert reader.episodes.end_reason.tolist() == [EndReason.END_OF_FILE]


def test_compressed_columns_need_trust_and_are_then_read(tmp_path: Path) -> None:
    source = DATA / "pendulum_expert_sac_3eps.zip"
    assert "--trust-pickle" in refused(source, "compressed columns", UsageError).hint
    with converted(source, tmp_path / "out", trust_pickle=True) as reader:
        assert reader.episodes.length.tolist() == [200] * 3
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * 3
        observation = column(reader, "observation")
        assert (observation.dtype, observation.shape) == (np.float32, (600, 3))
        assert np.allclose((observation[:, :2] ** 2).sum(axis=1), 1, atol=1e-5)  # cosine and sine
        with zipfile.ZipFile(source) as archive, archive.open(archive.namelist()[0]) as lines:
            rewards = [reward for line in lines for reward in json.loads(line)["rewards"]]
        assert column(reader, "next.reward")[:, 0].tolist() == rewards
        assert any("time limits are taken from infos" in note for note in reader.manifest.notes)


def lengths_of(path: Path, final_step: str = "auto") -> list[int]:
    with RllibReader(path, final_step=final_step) as reader:
        facts = reader.facts()
        assert sum(map(len, reader.pieces())) == facts.steps
        return [int(length) for length in reader.episode_table().length]


def test_a_carriage_return_between_values_ends_no_line(tmp_path: Path) -> None:
    """JSON allows it as a blank: the second reading of a block must find the same lines as the first."""
    rows = [
        {
            "obs": [float(t)],
            "actions": t,
            "rewards": 1.0,
            "terminateds": t == 4,
            "truncateds": False,
            "eps_id": 1,
            "t": t,
        }
        for t in range(5)
    ]
    lines = [json.dumps(row).replace(", ", ",\r" if row["t"] == 2 else ", ") for row in rows]
    (tmp_path / "rows.json").write_bytes("".join(f"{line}\r\n" for line in lines).encode())
    with converted(tmp_path / "rows.json", tmp_path / "out", final_step="repeat") as reader:
        assert reader.episodes.length.tolist() == [5]
        assert column(reader, "action").tolist() == [0, 1, 2, 3, 4]


def test_rows_of_environments_that_take_turns_are_put_together(tmp_path: Path) -> None:
    one, other = rows_of_episode(7, 6, seed=1), rows_of_episode(8, 4, seed=2)
    mixed = [as_batch([*one[:2], *other[:3]]), as_batch(one[2:5]), as_batch([*other[3:], *one[5:]])]
    path = write_lines(tmp_path / "a.json", mixed)
    with converted(path, tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [6, 4]
        assert column(reader, "info.action_prob").tolist() == [row["action_prob"] for row in (*one, *other)]


@pytest.mark.parametrize("following", [True, False])
def test_files_are_joined_in_the_order_of_their_numbers(following: bool, tmp_path: Path) -> None:
    rows = rows_of_episode(3, 24, following=following)
    for number in range(12):
        write_lines(tmp_path / "d" / f"out_worker-0_{number}.json", [as_batch(without(rows[2 * number :][:2], "t"))])
    assert lengths_of(tmp_path / "d", final_step="repeat") == ([24] if following else [2] * 12)


def test_files_in_another_order_are_joined_by_their_steps(tmp_path: Path) -> None:
    rows = rows_of_episode(3, 9)
    write_lines(tmp_path / "d" / "b.json", [as_batch(rows[:4])])
    write_lines(tmp_path / "d" / "a.json", [as_batch(rows[4:])])
    with converted(tmp_path / "d", tmp_path / "out") as reader:
        assert column(reader, "info.t").tolist() == list(range(9))


def test_missing_rows_end_an_episode(tmp_path: Path) -> None:
    rows = rows_of_episode(3, 9)
    path = write_lines(tmp_path / "a.json", [as_batch(rows[:3]), as_batch(rows[5:])])
    result = rbtool.convert(path, tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [3, 4]
        assert reader.episodes.end_reason.tolist() == [EndReason.INFERRED, EndReason.TERMINATED]
        assert column(reader, "next.observation")[2].tolist() == rows[2]["new_obs"]
    assert any("rows are missing after 1 episode" in note for note in result.notes)
    assert any("the first rows of 1 episode are not" in note for note in result.notes)


def test_missing_rows_show_without_steps_where_observations_do_not_follow(tmp_path: Path) -> None:
    rows = without(rows_of_episode(3, 9), "t")
    for number, part in enumerate((rows[:3], rows[3:5], rows[7:])):
        write_lines(tmp_path / "d" / f"{number}.json", [as_batch(part)])
    assert lengths_of(tmp_path / "d") == [5, 2]


def test_an_id_that_is_used_again_is_another_episode(tmp_path: Path) -> None:
    parts = [rows_of_episode(1, 4, seed=1), rows_of_episode(1, 3, seed=2, end="none"), rows_of_episode(1, 2, seed=3)]
    assert lengths_of(write_lines(tmp_path / "a.json", [as_batch(part) for part in parts])) == [4, 3, 2]
    again = without([row for part in parts for row in part], "t")
    assert lengths_of(write_lines(tmp_path / "b.json", [as_batch(again)])) == [4, 5]


def test_agents_of_one_id_are_episodes_of_their_own(tmp_path: Path) -> None:
    rows = [
        {**row, "agent_index": agent}
        for pair in zip(rows_of_episode(1, 4, seed=1), rows_of_episode(1, 4, seed=2), strict=True)
        for agent, row in enumerate(pair)
    ]
    assert lengths_of(write_lines(tmp_path / "a.json", [as_batch(rows)])) == [4, 4]


def test_ids_that_are_text_are_text_of_the_episode(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.json", [as_batch(rows_of_episode(name, 3)) for name in ("x1", "ü2")])
    with converted(path, tmp_path / "out") as reader:
        assert reader.episode_text == [{"eps_id": "x1"}, {"eps_id": "ü2"}]


def test_without_ids_flags_end_episodes_and_files_do(tmp_path: Path) -> None:
    rows = [row for number in (1, 2) for row in rows_of_episode(number, 4, seed=number)]
    for number, part in enumerate((rows[:6], rows[6:])):
        write_lines(tmp_path / "d" / f"{number}.json", [as_batch(without(part, "eps_id", "t"))])
    assert lengths_of(tmp_path / "d") == [4, 2, 2]


@each("flags", ["dones", "terminateds"])
@each("ends", [None, "terminated", "truncated"])
def test_dones_are_what_ends_states_and_newer_flags_speak_for_themselves(
    flags: str, ends: str | None, tmp_path: Path
) -> None:
    parts = [rows_of_episode(1, 3, flags=flags), rows_of_episode(2, 2, flags=flags, end="truncated")]
    path = write_lines(tmp_path / "a.json", [as_batch(part) for part in parts])
    if flags == "terminateds" and ends is not None:
        refused(path, "has terminateds", UsageError, ends=ends)
        return
    result = rbtool.convert(path, tmp_path / "out", ends=ends)
    with TedReader(result.path) as reader:
        expected = [True, False] if flags == "terminateds" else [ends != "truncated"] * 2
        assert reader.episodes.terminated.tolist() == expected
        assert reader.episodes.truncated.tolist() == [not one for one in expected]
    assert any("--ends" in note for note in result.notes) == (flags == "dones" and ends is None)


def test_an_unknown_meaning_of_ends_is_refused() -> None:
    refused(DATA / FILES[0], "expected terminated or truncated", UsageError, ends="done")


def test_time_limits_in_infos_are_believed(tmp_path: Path) -> None:
    one, other = rows_of_episode(1, 3), rows_of_episode(2, 4)
    other[-1]["infos"] = {"TimeLimit.truncated": True}
    path = write_lines(tmp_path / "a.json", [as_batch(one), as_batch(other)])
    with converted(path, tmp_path / "out") as reader:
        assert reader.episodes.end_reason.tolist() == [EndReason.TERMINATED, EndReason.TRUNCATED]


def test_without_next_observations_final_steps_are_decided_on(tmp_path: Path) -> None:
    parts = [rows_of_episode(1, 3, following=False), rows_of_episode(2, 2, following=False, end="none")]
    path = write_lines(tmp_path / "a.json", [as_batch(part) for part in parts])
    with converted(path, tmp_path / "out") as reader:
        assert reader.episodes.final.tolist() == [Final.REPEATED, Final.DROPPED]
        after = [*(row["obs"] for row in parts[0][1:]), parts[0][2]["obs"], parts[1][1]["obs"]]
        assert column(reader, "next.observation").tolist() == after


def test_nested_observations_and_numbers_in_infos_are_fields(tmp_path: Path) -> None:
    rows = rows_of_episode(1, 4)
    for step, row in enumerate(rows):
        row["obs"], row["new_obs"] = {"a": row["obs"], "shape": step}, {"a": row["new_obs"], "shape": step + 1}
        row["infos"] = {"goal": [step, 1.5]}
    with converted(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out") as reader:
        found = columns_of(reader)
    assert {"observation.a", "observation.shape_"} <= found.keys()
    assert found["next.info.infos.goal"].tolist() == [[step, 1.5] for step in range(4)]
    assert found["next.observation.shape_"].tolist() == [1, 2, 3, 4]


def test_what_has_no_row_a_step_is_named(tmp_path: Path) -> None:
    rows = rows_of_episode(1, 4)
    batch = as_batch(rows) | {"seq_lens": [4], "note": ["a"] * 4, "state_out_0": [[1.0, 2.0]], "odd": [1, None, 2, 3]}
    batch["ragged"] = [[1], [1, 2], [], [1]]
    result = rbtool.convert(write_lines(tmp_path / "a.json", [batch]), tmp_path / "out")
    assert [one["key"] for one in result.dropped_keys] == ["infos", "note", "odd", "ragged", "seq_lens", "state_out_0"]


def test_whole_numbers_and_floats_of_one_column_are_floats(tmp_path: Path) -> None:
    one, other = [row | {"rewards": 1} for row in rows_of_episode(1, 3)], rows_of_episode(2, 2)
    path = write_lines(tmp_path / "a.json", [as_batch(one), as_batch(other)])
    with converted(path, tmp_path / "out") as reader:
        assert column(reader, "next.reward")[:, 0].tolist() == [1.0, 1.0, 1.0, *(row["rewards"] for row in other)]


@each("form", ["batch", "transitions", "lines"])
@each(
    ("values", "dtype", "line"),
    [
        ([1, 1 << 63, (1 << 64) - 1, 0], "uint64", 0),
        ([-1, (1 << 53) + 1, 2, 3], "int64", 0),
        ([1, 2, (1 << 53) + 1, 1.5], "float64", 3),
        ([1.5, 2, 3, (1 << 53) + 1], "float64", 4),
        ([-1, 1 << 53, 1 << 63, (1 << 63) + 1], "float64", 4),
        ([float("inf"), 1e300, 1.5, 1 << 53], "float64", 0),
    ],
)
def test_whole_numbers_keep_their_digits_or_a_note_names_the_first_that_does_not(
    values: list[Any], dtype: str, line: int, form: str, tmp_path: Path
) -> None:
    rows = [row | {"id": [0, value]} for row, value in zip(rows_of_episode(1, 4), values, strict=True)]
    lines = {"batch": [as_batch(rows)], "transitions": rows, "lines": [as_batch([row]) for row in rows]}[form]
    result = rbtool.convert(write_lines(tmp_path / "a.json", lines), tmp_path / "out")
    with TedReader(result.path) as reader:
        found = column(reader, "info.id")[:, 1]
    assert (found.dtype.name, found.tolist()) == (dtype, [float(one) if dtype == "float64" else one for one in values])
    notes = [one for one in result.notes if one.startswith("id is float64")]
    assert [one.endswith(f"a.json, line {1 if form == 'batch' else line}") for one in notes] == [True] * bool(line)


def test_compressed_rows_and_columns_are_arrays(tmp_path: Path) -> None:
    one, other = rows_of_episode(1, 3), rows_of_episode(2, 2)
    batch = as_batch(one)
    batch["obs"], batch["new_obs"] = packed(batch["obs"]), packed(batch["new_obs"])
    lines = [batch, *({**row, "obs": packed(row["obs"]), "new_obs": packed(row["new_obs"])} for row in other)]
    path = write_lines(tmp_path / "a.json", lines)
    with converted(path, tmp_path / "out", trust_pickle=True) as reader:
        expected = np.array([row["obs"] for row in (*one, *other)], "float32")
        assert column(reader, "observation").tobytes() == expected.tobytes()


ROWS, OTHERS = rows_of_episode(1, 3), rows_of_episode(2, 3)


def batch_with(**changed: Any) -> Row:
    return as_batch([row | changed for row in ROWS])


@each(
    ("documents", "message"),
    [
        (
            [{"type": "MultiAgentBatch", "count": 1, "policy_batches": {"a": {}, "b": {}}}],
            r"batches of 2 policies \(a, b\)",
        ),
        ([{"type": "SampleBatches", **without(ROWS, "x")[0]}], "is of type"),
        ([{"type": "SampleBatch", "obs": [[1.0]], "actions": [1]}], "without a list of rewards"),
        ([as_batch(ROWS) | {"obs": [[1.0]]}], "'obs' cannot be read as rows: it has 1 values"),
        (
            [as_batch(ROWS), batch_with(eps_id=2, obs=[1.0])],
            "'obs' cannot be read as rows: its rows have different sha",
        ),
        ([batch_with(rewards=None)], "'rewards' cannot be read"),
        ([batch_with(dones=2)], "values other than 0 and 1"),
        (
            [as_batch(ROWS), as_batch(without(OTHERS, "new_obs"))],
            "'new_obs' cannot be read as rows: it is not in every",
        ),
        ([as_batch(ROWS), as_batch(without(OTHERS, "t"))], "'t' cannot be read as rows: it is not in every row"),
        ([batch_with(new_obs=[1.0])], "obs and new_obs have different forms"),
    ],
)
def test_contradictions_are_refused(documents: list[Row], message: str, tmp_path: Path) -> None:
    refused(write_lines(tmp_path / "a.json", documents), message)


def test_dones_that_are_set_nowhere_are_not_taken_as_anything(tmp_path: Path) -> None:
    rows = [row | {"dones": False} for row in rows_of_episode(1, 3, flags="dones")]
    notes = rbtool.convert(write_lines(tmp_path / "a.json", [as_batch(rows)]), tmp_path / "out").notes
    assert "dones are never set" in notes
    assert not any("taken as terminated" in note for note in notes)


def test_a_line_that_is_cut_is_named_with_its_number(tmp_path: Path) -> None:
    whole = (DATA / FILES[1]).read_text()
    (tmp_path / "a.jsonl").write_text(whole[:-100])
    error = refused(tmp_path / "a.jsonl", "line 102 is not JSON", CorruptDataError)
    assert "line 1 " not in error.message


def test_a_batch_of_a_single_policy_is_read(tmp_path: Path) -> None:
    batch = as_batch(rows_of_episode(1, 3))
    del batch["type"]
    document = {"type": "MultiAgentBatch", "count": 3, "policy_batches": {"default_policy": batch}}
    assert lengths_of(write_lines(tmp_path / "a.json", [document])) == [3]


def test_other_files_of_a_folder_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "d" / "output-1.json", [as_batch(rows_of_episode(1, 3))])
    (tmp_path / "d" / "params.json").write_text('{"lr": 0.1}')
    result = rbtool.convert(tmp_path / "d", tmp_path / "out")
    assert any("params.json" in note for note in result.notes)


@pytest.mark.parametrize("name", [*FILES, "pendulum_expert_sac_3eps.zip"])
def test_files_are_found_by_their_content(name: str) -> None:
    with open_source(DATA / name) as reader:
        assert type(reader) is RllibReader


def test_nothing_else_is_claimed() -> None:
    data = DATA.parent
    others = [path for path in data.rglob("*") if DATA not in (path, *path.parents)]
    assert len(others) > 50
    assert [path for path in others if RllibReader.recognises(path)] == []


def test_a_file_of_two_gigabytes_would_take_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    """Blocks of lines are dropped as pieces are given out: none but the last few are held."""
    lines = [as_batch(rows_of_episode(number, 300, seed=number)) for number in range(40)]
    path = write_lines(tmp_path / "a.json", lines)
    with RllibReader(path) as reader:
        reader.facts()
        for _ in reader.pieces():
            assert len(reader._held) <= 8


NEW = DATA / "new_stack"


def made_from(path: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], Any]:
    """The columns of a conversion, the lengths and texts of its episodes, and its result."""
    result = rbtool.convert(path, folder, **options)
    with TedReader(result.path) as reader:
        found: dict[str, Any] = columns_of(reader)
        return found | {"length": reader.episodes.length.tolist(), "text": reader.episode_text}, result


def plain_columns(folder: Path) -> list[Row]:
    """Rows of the files of a run in the order of their blocks; compressed values are unpickled."""
    files = sorted(folder.rglob("*.parquet"), key=lambda path: path.name.rpartition("_")[2])
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row in rows:
        for name in ("obs", "new_obs"):
            if isinstance(row[name], str):
                data = pa.CompressedInputStream(pa.py_buffer(base64.b64decode(row[name])), "lz4").read()
                row[name] = pickle.loads(data).tolist()
    return rows


@pytest.mark.parametrize("name", ["columns", "columns_compressed", "columns_file_per_row", "columns_written_twice"])
def test_every_row_of_a_run_of_the_new_stack_equals_a_plain_reading(name: str, tmp_path: Path) -> None:
    source = NEW / name
    if name == "columns_compressed":
        refused(source, "compressed columns, which are pickles", UsageError)
    found, result = made_from(source, tmp_path / "out", trust_pickle=name == "columns_compressed")
    twice = name == "columns_written_twice"
    rows = plain_columns(source / "line" / "run-000001-00002" if twice else source)
    assert [note for note in result.notes if "repeat" in note] == ["5 rows left out that 1 later run repeated"] * twice
    for key, stored in (("observation", "obs"), ("next.observation", "new_obs"), ("action", "actions")):
        assert found[key].dtype.name == ("int64" if isinstance(rows[0][stored], int) else "float32")
        assert found[key].tolist() == [row[stored] for row in rows], key
    assert found["next.reward"][:, 0].tolist() == [row["rewards"] for row in rows]
    assert found["next.terminated"][:, 0].tolist() == [row["terminateds"] for row in rows]
    assert found["next.truncated"][:, 0].tolist() == [row["truncateds"] for row in rows]
    ids = [row["eps_id"] for row in rows]
    assert found["text"] == [{"eps_id": one} for one in dict.fromkeys(ids)]
    assert found["length"] == [ids.count(one) for one in dict.fromkeys(ids)]
    assert [one["key"] for one in result.dropped_keys] == ["module_id"]


def _transitions(number: int, count: int, **arguments: Any) -> list[Row]:
    return without(rows_of_episode(number, count, flags="terminateds", **arguments), "t")


_ONE, _TWO, _STILL = _transitions(1, 4), _transitions(2, 5), _transitions(3, 1) * 3
_MOVES = [*_STILL, *_transitions(3, 2, seed=9)]


@each(
    ("runs", "lengths", "repeated"),
    [
        ({"000001-00001": _ONE, "000001-00002": _ONE + _TWO, "000001-00010": _ONE + _TWO + _MOVES}, [4, 5], 13),
        ({"000001-00001": _ONE + _TWO[:2], "000001-00002": _TWO[2:]}, [4, 5], 0),
        ({"000001-00001": _ONE + _TWO[:2], "000001-00002": _ONE + _TWO}, [4, 5], 6),
        ({"000001-00001": _ONE + _TWO, "000001-00002": _TWO}, [4, 5], 5),
        ({"000001-00001": _ONE, "000002-00001": _TWO, "000002-00002": _TWO + _TWO[:0]}, [4, 5], 5),
    ],
)
def test_rows_that_later_runs_repeat_are_left_out(
    runs: dict[str, list[Row]], lengths: list[int], repeated: int, tmp_path: Path
) -> None:
    for name, rows in runs.items():
        write_lines(tmp_path / "out" / "line" / f"run-{name}" / "a.json", rows)
    found, result = made_from(tmp_path / "out", tmp_path / "ted")
    assert found["length"][:2] == lengths
    plain = [*_ONE, *_TWO, *(_MOVES if len(runs) == 3 and "000001-00010" in runs else [])]
    assert found["observation"].tolist() == [row["obs"] for row in plain]
    assert found["next.observation"].tolist() == [row["new_obs"] for row in plain]
    notes = [note for note in result.notes if "later run" in note]
    assert [int(note.split()[0]) for note in notes] == [repeated] * bool(repeated)


def test_equal_rows_of_one_run_are_kept_and_runs_in_another_order_refused(tmp_path: Path) -> None:
    for name, rows in {"1": _ONE + _TWO, "2": _TWO + _ONE}.items():
        write_lines(tmp_path / "out" / f"run-000001-0000{name}" / "a.json", rows)
    refused(tmp_path / "out", "repeats rows of the runs before it in another order")


def test_pieces_that_later_runs_repeat_are_left_out(tmp_path: Path) -> None:
    rows = rows_of_episode("a", 9, flags="terminateds")
    one, two = packed_episode(rows[:4], first=0), packed_episode(rows[3:], repeats=1, first=4)
    other = packed_episode(rows_of_episode("b", 3, flags="terminateds"))
    for name, items in {"1": [one], "2": [other, one], "3": [two, one]}.items():
        write_items(tmp_path / "out" / f"run-000001-0000{name}" / "a.parquet", items)
    found, result = made_from(tmp_path / "out", tmp_path / "ted")
    assert found["length"] == [9, 3]
    assert "8 rows left out that 2 later runs repeated" in result.notes


def test_every_step_of_packed_episodes_equals_a_plain_reading(tmp_path: Path) -> None:
    found, result = made_from(NEW / "episodes", tmp_path / "out")
    (file,) = (NEW / "episodes").rglob("*.parquet")
    items = pq.read_table(file).column("item").to_pylist()
    episodes = [msgpack.unpackb(one, strict_map_key=False) for one in items]
    states = [[one[b"data"] for one in episode["observations"]["data"]] for episode in episodes]
    assert found["observation"].tobytes() == b"".join(b"".join(one[:-1]) for one in states)
    assert found["next.observation"].tobytes() == b"".join(b"".join(one[1:]) for one in states)
    assert (found["observation"].dtype, found["observation"].shape) == (np.float32, (11, 3))
    actions = [one[b"data"] for episode in episodes for one in episode["actions"]["data"]]
    assert found["action"].tobytes() == b"".join(actions)
    assert found["next.reward"][:, 0].tolist() == [one for each in episodes for one in each["rewards"]["data"]]
    assert found["info.t"].tolist() == [step for each in episodes for step in range(each["t"])]
    assert found["length"] == [4, 1, 6]
    assert found["text"] == [{"eps_id": each["id_"]} for each in episodes]
    assert (result.boundary["terminated"], result.boundary["truncated"]) == (2, 1)


def test_pieces_of_a_packed_episode_are_joined_without_what_they_repeat(tmp_path: Path) -> None:
    rows = rows_of_episode("a", 9, flags="terminateds")
    for row in rows:
        row["obs"], row["new_obs"] = np.float32(row["obs"]), np.float32(row["new_obs"])
    parts = [(rows[:4], 0, 0), (rows[3:6], 1, 4), (rows[4:], 2, 6)]
    items = [packed_episode(part, repeats=repeats, first=first) for part, repeats, first in parts]
    found, result = made_from(write_items(tmp_path / "a.parquet", items), tmp_path / "out")
    assert found["length"] == [9]
    assert found["observation"].tobytes() == np.array([row["obs"] for row in rows]).tobytes()
    assert found["info.action_prob"].tolist() == [row["action_prob"] for row in rows]
    assert (result.boundary["terminated"], result.boundary["inferred"]) == (1, 0)
    gap, result = made_from(write_items(tmp_path / "b.parquet", items[::2]), tmp_path / "gap")
    assert gap["length"] == [4, 3]
    assert result.boundary["inferred"] == 1
    assert any("rows are missing after 1 episode" in note for note in result.notes)


def test_dictionaries_tuples_and_infos_of_packed_episodes_are_fields(tmp_path: Path) -> None:
    rows = rows_of_episode("a", 3, flags="terminateds")
    states = [{"image": np.full((2, 2, 3), at, np.uint8), "pair": [np.float32([at]), np.int64(at)]} for at in range(4)]
    infos = [{"reset": 1.0}, *({"x": float(at), "ok": np.bool_(at == 2)} for at in range(3))]
    item = packed_episode(
        rows, observations=entries(states), infos=entries(infos), custom_data={"a": 1}, agent_id="one",
        actions=entries({"hand": np.zeros((3, 2), np.float32)}) | {"finalized": True},
    )  # fmt: skip
    found, result = made_from(write_items(tmp_path / "a.parquet", [item]), tmp_path / "out")
    assert found["observation.image"].dtype == np.uint8
    assert found["next.observation.image"][:, 1, 1, 2].tolist() == [1, 2, 3]
    assert found["observation.pair.0"].tolist() == [[0], [1], [2]]
    assert found["next.observation.pair.1"].tolist() == [1, 2, 3]
    assert found["action.hand"].shape == (3, 2)
    assert found["next.info.infos.x"].tolist() == [0, 1, 2]
    assert found["next.info.infos.ok"].tolist() == [False, False, True]
    assert found["text"] == [{"eps_id": "a", "agent_id": "one"}]
    assert [one["key"] for one in result.dropped_keys] == ["custom_data", "infos of the reset"]


def test_tuples_of_a_finalized_episode_are_not_taken_for_steps(tmp_path: Path) -> None:
    item = packed_episode(
        rows_of_episode("a", 2, flags="terminateds"),
        observations=entries([np.arange(3), [np.arange(3) + 10, np.zeros((3, 2))]]) | {"finalized": True},
        actions=entries([np.arange(2), np.arange(2) + 5]) | {"finalized": True},
    )
    with converted(write_items(tmp_path / "a.parquet", [item]), tmp_path / "out") as reader:
        assert column(reader, "observation.1.0").tolist() == [10, 11]
        assert column(reader, "next.observation.0").tolist() == [1, 2]
        assert column(reader, "action.0").tolist() == [0, 1]
        assert column(reader, "action.1").tolist() == [5, 6]


@each(
    ("change", "message"),
    [
        (lambda item: item[:-5], "cannot be unpacked"),
        (lambda item: b"\xc1" + item, "cannot be unpacked"),
        (lambda item: item.replace(b"\xa1t\x03", b"\xa1t\x04"), r"4 observations, of which 0 are repeated, .* state 5"),
        (lambda item: item.replace(b"\xadis_terminated\xc3", b"\xadis_terminated\xc0"), "does not state is_terminated"),
        (lambda item: item.replace(b"\xa7rewards", b"\xa7reworks"), "has no rewards"),
    ],
)
def test_damage_of_a_packed_episode_is_named_with_its_row(change: Any, message: str, tmp_path: Path) -> None:
    good, bad = (packed_episode(rows_of_episode(name, 3, flags="terminateds")) for name in "ab")
    path = write_items(tmp_path / "a.parquet", [good, good, change(bad)])
    refused(path, f"row 0 of row group 1.*{message}", CorruptDataError)


@each(
    ("change", "message"),
    [
        ({"observations": entries([np.array([None])] * 4)}, "array of Python objects, which is a pickle"),
        ({"actions": entries([np.complex64(1)] * 3)}, "array of type <c8, expected numbers"),
        ({"agent_episodes": {}}, "an episode of several agents"),
        ({"observations": entries([np.zeros(2), np.zeros(3), np.zeros(2), np.zeros(2)])}, "cannot be read as rows"),
    ],
)
def test_a_packed_episode_of_something_else_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    item = packed_episode(rows_of_episode("a", 3, flags="terminateds"), **change)
    refused(write_items(tmp_path / "a.parquet", [item]), message)


def test_tensors_have_the_shape_that_ray_states_and_pickled_dictionaries_need_trust(tmp_path: Path) -> None:
    images = np.arange(4 * 12, dtype=np.uint8).reshape(4, 2, 2, 3)
    states = [{"vec": np.float32([at, -at]), "image": images[at]} for at in range(4)]
    flags = {"rewards": [1.0, 2.0, 3.0], "terminateds": [False, False, True], "truncateds": [False] * 3}
    one = {"eps_id": ["a"] * 3, "agent_id": pa.nulls(3), "actions": [1, 2, 3]} | flags

    def write(name: str, obs: Any, new_obs: Any, **more: Any) -> Path:
        return write_extended(tmp_path / f"{name}.parquet", one | more | {"obs": obs, "new_obs": new_obs})

    def pickled(rows: list[Any]) -> Any:
        values = pa.array([pickle.dumps(row) for row in rows], pa.large_binary())
        return extended("ray.data.arrow_pickled_object", "", values)

    with converted(
        write("new", tensors(images[:3]), tensors(images[1:]), module_id=["m"] * 3), tmp_path / "1"
    ) as reader:
        assert np.array_equal(column(reader, "observation"), images[:3])
        assert np.array_equal(column(reader, "next.observation"), images[1:])
    odd = write("odd", tensors(images[:3], stated="[2, 2]"), tensors(images[1:]))
    refused(odd, r"'obs' has rows of 12 numbers, not \[2, 2\]", CorruptDataError)
    older = write("older", tensors(images[:3], stated=pickle.dumps((2, 2, 3))), tensors(images[1:]))
    refused(older, "pickles of Python objects", UsageError)
    with converted(older, tmp_path / "2", trust_pickle=True) as reader:
        assert np.array_equal(column(reader, "observation"), images[:3])
    dictionaries = write("pickled", pickled(states[:3]), pickled(states[1:]))
    refused(dictionaries, "pickles of Python objects", UsageError)
    with converted(dictionaries, tmp_path / "3", trust_pickle=True) as reader:
        assert np.array_equal(column(reader, "observation.image"), images[:3])
        assert column(reader, "next.observation.vec").tolist() == [[1, -1], [2, -2], [3, -3]]


def test_agent_id_without_a_value_is_absent_in_json_too(tmp_path: Path) -> None:
    rows = [row | {"agent_id": None, "module_id": None} for row in rows_of_episode("a", 3)]
    result = rbtool.convert(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert result.steps == 3
    assert ("module_id", "it has no values") in [(one["key"], one["why"]) for one in result.dropped_keys]


ENDS = ("terminated", "truncated", "none")


def mixed(episodes: list[list[Row]], chance: random.Random, environments: int) -> list[Row]:
    """Put the rows of episodes one after the other as environments that take turns would."""
    streams: list[list[Row]] = [[] for _ in range(environments)]
    for number, rows in enumerate(episodes):
        streams[number % environments] += rows
    found: list[Row] = []
    while any(streams):
        stream = chance.choice([one for one in streams if one])
        count = chance.randint(1, len(stream))
        found += stream[:count]
        del stream[:count]
    return found


def write_cut(folder: Path, rows: list[Row], form: str, chance: random.Random) -> None:
    """Cut rows into files, and the rows of a file into lines."""
    number = 0
    while rows:
        count = chance.randint(1, len(rows))
        part, rows = rows[:count], rows[count:]
        if form == "parquet":
            write_parquet(folder / f"worker-0_{number}.parquet", part, row_group_size=chance.randint(1, count))
        elif form == "rows":
            write_lines(folder / f"worker-0_{number}.jsonl", part)
        else:
            cuts = sorted({0, *(chance.randint(1, count) for _ in range(3)), count})
            lines = [as_batch(part[start:stop]) for start, stop in pairwise(cuts)]
            write_lines(folder / f"worker-0_{number}.json", lines)
        number += 1


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), form=st.sampled_from(["batches", "rows", "parquet"]),
    flags=st.sampled_from(["dones", "terminateds"]), following=st.booleans(), environments=st.integers(1, 3),
    piece=st.integers(1, 2000), seed=st.integers(0, 1000),
)  # fmt: skip
def test_random_episodes_come_back_exactly(
    lengths: list[int], form: str, flags: str, following: bool, environments: int, piece: int, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = [chance.choice(ENDS) for _ in lengths]
    episodes = [
        rows_of_episode(1000 + number, length, end=kind, seed=number, flags=flags, following=following)
        for number, (length, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]
    rows = mixed(episodes, chance, environments)
    with tempfile.TemporaryDirectory() as folder:
        write_cut(Path(folder), rows, form, chance)
        with with_options(RllibReader, piece)(Path(folder), final_step="repeat") as reader:
            facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    ids = list(dict.fromkeys(row["eps_id"] for row in rows))
    assert facts.steps == len(rows) == table.steps
    assert list(facts.episode_numbers) == list(range(len(ids)))
    for number, eps_id in enumerate(ids):
        expected, end = episodes[eps_id - 1000], kinds[eps_id - 1000]
        end = "terminated" if flags == "dones" and end != "none" else end
        observations = [row["obs"] for row in expected]
        after = [row["new_obs"] for row in expected] if following else [*observations[1:], observations[-1]]
        columns = {"observation": np.array(observations), "next": np.array(after)}
        for name, stored in (("action", "actions"), ("reward", "rewards"), ("t", "t")):
            columns[name] = np.array([row[stored] for row in expected])
        last = np.arange(len(expected)) == len(expected) - 1
        columns |= {name: last & (end == name) for name in ("terminated", "truncated")}
        found = bytes_of((one for one in pieces if one.episode == number), ("info", "t"))
        assert found == {name: rows.tobytes() for name, rows in columns.items()}
