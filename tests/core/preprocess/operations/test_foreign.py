"""Operations of other packages, found by their entry points."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scale_reward import ScaleReward

import rbtool
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.preprocess.operations.base import BoundOperation, FieldChanges, Fields, LazyColumn, RowOperation
from rbtool.core.preprocess.operations.program import Program, ProgramProcessor, pipeline_program, program_of
from rbtool.core.preprocess.processor import Context
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.testing.operations import sample_block

PIPELINE = '[[operation]]\nname = "scale-reward"\nfactor = 0.5\n\n[[operation]]\nname = "flatten"\n'


def installed(folder: Path, patch: pytest.MonkeyPatch, entry: str) -> Path:
    """Put a distribution with an entry point on the path, and write a pipeline that uses it."""
    info = folder / "scale_reward-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-reward\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rbtool.operations]\n{entry}\n")
    patch.syspath_prepend(str(folder))
    pipeline = folder / "pipeline.toml"
    pipeline.write_text(PIPELINE)
    return pipeline


def test_a_pipeline_uses_an_operation_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = scale_reward:ScaleReward")
    assert pipeline_program(pipeline).operations[0] == ScaleReward(0.5)


def test_without_the_package_the_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "other = scale_reward:ScaleReward")
    with pytest.raises(UsageError, match="'scale-reward', which is none"):
        pipeline_program(pipeline)


def test_an_entry_point_that_is_no_operation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = pathlib:Path")
    with pytest.raises(UsageError, match="pathlib:Path is not an operation"):
        pipeline_program(pipeline)


def test_a_result_of_code_that_may_change_is_never_taken_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = installed(tmp_path, monkeypatch, "scale-reward = scale_reward:ScaleReward")
    fields, _ = sample_block()
    foreign = ProgramProcessor(pipeline_program(pipeline), fields)
    assert not foreign.is_described()
    assert foreign.fingerprint() == ProgramProcessor(pipeline_program(pipeline), fields).fingerprint() != ""
    built_in = ProgramProcessor(program_of({"flatten": True}), fields)
    assert built_in.is_described()
    assert built_in.fingerprint() == ""


@dataclass(frozen=True)
class Computes(RowOperation):
    """Returns for the observation what a function makes of it."""

    name: ClassVar[str] = "computes"
    of: ClassVar[Callable[[Any], Any]]

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, [("observation",)], self.declared, self.computed)

    def declared(self, field: Field) -> Field:
        return field

    def computed(self, field: Field, column: LazyColumn) -> Any:
        return type(self).of(column.numbers)


def applied(compute: Callable[[Any], Any]) -> Any:
    """The observations before and after an operation that computes them."""
    kind = type("Kind", (Computes,), {"of": staticmethod(compute)})
    fields, block = sample_block()
    processor = ProgramProcessor(Program((kind(),)), fields)
    made = processor.load(Context(fields, None, 0)).apply(block)  # type: ignore[arg-type]
    return block.columns["observation",].values, made.columns["observation",].values


@pytest.mark.parametrize(
    ("compute", "what"),
    [
        (lambda rows: rows.astype(object), "rows of object"),
        (lambda rows: rows.astype(str), "rows of <U32"),
        (lambda rows: rows.astype(bytes), "rows of [|]S32"),
        (lambda rows: rows.astype("datetime64[s]"), "rows of datetime64"),
        (lambda rows: np.ma.masked_less(rows, 0), "rows of masked float32"),
        (lambda rows: rows.tolist(), "an object of type list"),
        (lambda rows: rows.sum(), "an object of type float32"),
        (lambda rows: np.array(rows.sum()), "no rows of float32"),
        (lambda rows: None, "nothing"),
        (lambda rows: LazyColumn.given("observation", "float32", rows.astype(object)), "[|]O"),
        (lambda rows: LazyColumn.given("observation", "float32", rows.astype(">f4")), ">f4"),
        (lambda rows: LazyColumn.given("observation", "float32", rows.astype("f8")), "<f8"),
    ],
)
def test_anything_but_rows_of_numbers_is_refused_by_the_name_of_the_operation(
    compute: Callable[[Any], Any], what: str
) -> None:
    with pytest.raises(SchemaError, match=f"computes computed .*{what}.* for 'observation'"):
        applied(compute)


def test_numbers_of_another_byte_order_stay_what_they_are() -> None:
    given, made = applied(lambda rows: rows.astype(">f4"))
    assert made.tobytes() == given.tobytes()


CACHING = """
import functools
from dataclasses import dataclass
from typing import ClassVar

from rbtool.core.preprocess.operations import FieldChanges, RowOperation


@dataclass(frozen=True)
class Doubles(RowOperation):
    name: ClassVar[str] = "doubles"

    def __post_init__(self):
        self.table  # what cannot be pickled is there before workers start

    @functools.cached_property
    def table(self):
        return lambda rows: rows * 2

    def plan(self, fields):
        keys = [("observation",)]
        return FieldChanges.of(fields, keys, lambda field: field, lambda field, column: self.table(column.numbers))


def local():
    class Local(Doubles):
        pass

    return Local


Local = local()
"""


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a module of operations, and a pipeline file that uses one of its classes."""
    (tmp_path / "caching_operations.py").write_text(CACHING)
    write_walks(tmp_path / "walks", [(40, "terminated"), (7, "truncated")])

    def write(kind: str) -> Path:
        pipeline = installed(tmp_path, monkeypatch, f"doubles = caching_operations:{kind}")
        pipeline.write_text('[[operation]]\nname = "doubles"\n')
        return pipeline

    return write


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_operation_that_caches_functions_is_sent_to_workers(
    tmp_path: Path, pipelines: Callable[[str], Path], method: str
) -> None:
    pipeline = pipelines("Doubles")
    run = functools.partial(rbtool.preprocess, tmp_path / "walks", pipeline=pipeline)
    here = run(dest=tmp_path / "here", num_workers=0)
    there = run(dest=tmp_path / "there", num_workers=2, start_method=method)
    assert there.content_digest == here.content_digest


def test_an_operation_that_workers_cannot_import_is_refused(tmp_path: Path, pipelines: Callable[[str], Path]) -> None:
    pipeline = pipelines("Local")
    with pytest.raises(UsageError, match=r"doubles cannot be sent to worker processes: .*Local"):
        rbtool.preprocess(
            tmp_path / "walks", pipeline=pipeline, dest=tmp_path / "made", num_workers=2, start_method="spawn"
        )
    assert not (tmp_path / "made").exists()
    pipeline.write_text(pipeline.read_text() + '\n[[operation]]\nname = "normalize"\nkey = "observation"\n')
    with pytest.raises(UsageError, match="doubles cannot be sent to worker processes"):
        rbtool.preprocess(tmp_path / "walks", pipeline=pipeline, dest=tmp_path / "made", num_workers=2)
