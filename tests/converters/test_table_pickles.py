"""Tables with arrays of Python objects, which --trust-pickle reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rbtool
from rbtool.converters.table.reader import TableReader
from rbtool.core.errors import FormatError, UsageError

STEPS, OBS = 5, np.arange(10, dtype=np.float32).reshape(5, 2)


def objects(values: list[Any]) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array


COLUMNS = {
    "act": objects([0.5, 1.5, 2.5, 3.5, 4.5]),
    "end": objects([False, False, True, False, True]),
    "name": objects(["a", "a", "a", "b", "b"]),
    "ragged": objects([np.zeros(1), *[np.zeros(2)] * 4]),
}
COLUMNS["obs"] = np.empty(STEPS, object)
for _row in range(STEPS):
    COLUMNS["obs"][_row] = OBS[_row]
OPTIONS = {"map": ["observation=obs", "action=act"], "ends": "-,end", "episode_key": "name"}


def write_npz(folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", **COLUMNS)
    return folder / "a.npz"


def write_npy(folder: Path) -> Path:
    (folder / "a").mkdir()
    for name, column in COLUMNS.items():
        np.save(folder / "a" / f"{name}.npy", column, allow_pickle=True)
    return folder / "a"


@pytest.fixture(params=[write_npz, write_npy])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write: Callable[[Path], Path] = request.param
    return write(tmp_path)


def test_rows_are_those_that_were_pickled(table: Path) -> None:
    with TableReader(table, options={**OPTIONS, "trust_pickle": True}, final_step="repeat") as reader:
        pieces = list(reader.pieces())
        facts = reader.facts()
    assert [len(piece) for piece in pieces] == [3, 2]
    assert [piece.text for piece in pieces] == [{"name": "a"}, {"name": "b"}]
    observed = np.concatenate([piece.columns["observation",][: len(piece)] for piece in pieces])
    np.testing.assert_array_equal(observed, OBS, strict=True)
    assert np.concatenate([piece.columns["action",] for piece in pieces]).tolist() == COLUMNS["act"].tolist()
    assert [piece.truncated.tolist() for piece in pieces] == [[False, False, True], [False, True]]
    (dropped,) = facts.dropped_keys
    assert dropped.key == "ragged"
    assert dropped.why.startswith(
        "it is not mapped, and it has elements of different types or shapes: float64 [1] first"
    )


@pytest.mark.parametrize("option", [{"map": ["action=act"]}, {"ends": "-,end"}, {"episode_key": "name", "ends": None}])
def test_without_trust_a_pickle_is_refused(table: Path, option: dict[str, Any]) -> None:
    plain = table.parent / "plain"
    given = {"map": ["observation=obs"], "ends": "-", **option}
    with pytest.raises(UsageError, match="is a pickle of Python objects, which can run anything") as caught:
        rbtool.convert(table, plain, format="table", **given)
    assert "add --trust-pickle" in str(caught.value.hint)
    assert not plain.exists()


def test_what_is_no_column_is_refused_with_trust(table: Path) -> None:
    with pytest.raises(FormatError, match="'ragged' cannot be mapped: it has elements of different"):
        TableReader(table, options={**OPTIONS, "map": ["observation=ragged"], "trust_pickle": True}).__enter__()


def test_trust_is_proposed_where_columns_need_it(table: Path) -> None:
    found = rbtool.inspect(table)
    assert found.options["trust_pickle"] is True
    assert found.command.endswith("--trust-pickle")
    (doubt,) = [doubt for doubt in found.doubts if "pickle" in doubt]
    assert doubt.startswith("act, obs are pickles")
    keys = {column.name: column.key for column in found.columns}
    assert (keys["obs"], keys["act"], keys["ragged"]) == ("observation", "action", "")
    options = {**found.options, "ends": "-,end"}
    assert rbtool.convert(table, table.parent / "out", format=found.format, **options).steps == STEPS - 2


def test_no_trust_is_proposed_for_columns_that_are_not_taken(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", obs=OBS, action=np.arange(STEPS), reward=np.ones(STEPS), extra=COLUMNS["name"])
    found = rbtool.inspect(tmp_path / "a.npz")
    assert "trust_pickle" not in found.options
    assert "--trust-pickle" not in found.command
