from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from function_blocks import block_of, started, values_of

from rbtool.core.errors import UsageError
from rbtool.core.preprocess.functions import FunctionProcessor, find_function
from rbtool.core.preprocess.processor import Unit


def double(rows: Any) -> Any:
    return rows.set("twice", rows["observation", "x"] * 2)


@pytest.mark.parametrize(
    ("unit", "vmap", "arguments"),
    [
        ("step", None, {"unit": "step"}),
        ("episode", None, {"unit": "episode"}),
        ("row", None, {"unit": "row", "vmap": None}),
        ("row", False, {"unit": "row", "vmap": False}),
    ],
)
def test_what_the_provenance_says(unit: Unit, vmap: bool | None, arguments: dict[str, Any]) -> None:
    work = FunctionProcessor(find_function("math:sqrt"), unit, vmap)
    assert work.arguments() == {"function": "math:sqrt", **arguments}
    assert (work.whole_episodes, work.needs_probing) == (unit == "episode", unit == "row" and vmap is None)


@pytest.mark.parametrize(
    ("unit", "vmap", "message"),
    [
        ("steps", None, "unit 'steps' is unknown; known: step, row, episode"),
        ("step", True, "and the unit is step"),
    ],
)
def test_units_that_make_no_sense(unit: Any, vmap: bool | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FunctionProcessor(find_function("math:sqrt"), unit, vmap)


def test_it_is_settled_once() -> None:
    work = FunctionProcessor(find_function("math:sqrt"), "row").with_probe(True)
    assert (work.arguments()["vmap"], work.needs_probing) == (True, False)


@pytest.mark.parametrize("unit", ["step", "row", "episode"])
def test_a_closure_can_be_sent_and_stays_what_it_is(unit: Unit) -> None:
    offset = 40
    work = FunctionProcessor(
        find_function(lambda rows: rows.set("more", rows["observation", "y"] + offset)), unit, None
    )
    sent = pickle.loads(pickle.dumps(work.portable()))
    assert (sent.label, sent.arguments(), sent.fingerprint()) == (work.label, work.arguments(), work.fingerprint())
    block = started(sent.function.load(), unit).apply(block_of([2, 3]))
    assert block.columns["more",].values.tolist() == [40, 41, 42, 43, 44]


def test_files_differ_by_their_digest(tmp_path: Path) -> None:
    path = tmp_path / "prep.py"
    path.write_text("from beside import f")
    (tmp_path / "beside.py").write_text("def f(rows): return rows")
    work = FunctionProcessor(find_function(f"{path}:f"))
    assert (list(work.inputs()), work.fingerprint(), work.user_modules()) == (["prep.py", "beside.py"], "", {"beside"})


def test_all_units_agree() -> None:
    results = [
        values_of(started(double, unit, vmap).apply(block_of([4, 1, 3])))
        for unit, vmap in (("step", None), ("row", False), ("row", True), ("episode", None))
    ]
    assert all(result == results[0] for result in results)
    assert results[0]["twice",] == ("float32", [[2 * step, 2 * step * step] for step in range(8)])
