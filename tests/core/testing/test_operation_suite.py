"""The suite of operations on ours and on the example, and an operation that breaks each rule of the suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import scale_reward
from cases import each

from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.format.contracts import FinalMethodError
from rbtool.core.preprocess.operations.base import (
    BoundOperation,
    Columns,
    EpisodeChoice,
    FieldChanges,
    Fields,
    LazyBatch,
    LazyColumn,
    RowOperation,
)
from rbtool.core.preprocess.operations.program import Program, program_of
from rbtool.core.ted.schema import NEXT_DONE, Field
from rbtool.core.testing.operations import OperationTests as Suite

OBSERVATION = ("observation",)
RULES = sorted(name for name in dir(Suite) if name.startswith("test_"))
OURS: list[dict[str, Any]] = [
    {"where": "observation[0] > 0"}, {"rename": "action=control"}, {"cast": "action=float64"},
    {"cat": "both=observation,action"}, {"flatten": True}, {"n-step": 3, "gamma": 0.9}, {"return-to-go": True},
    {"mc-return": True, "gamma": 0.9}, {"clip-reward": "-1:1"}, {"normalize": "observation"},
    {"normalize": "action:quantile"}, {"select": "observation"}, {"exclude": "action"},
]  # fmt: skip


def suite(make: Callable[[], RowOperation]) -> Suite:
    class Case(Suite):
        def operation(self) -> RowOperation:
            return make()

    return Case()


class TestScaleReward(Suite):
    def operation(self) -> RowOperation:
        return scale_reward.ScaleReward(0.5)


@each("rule", RULES)
@each("options", OURS)
def test_our_operations_keep_the_contract(options: dict[str, Any], rule: str) -> None:
    def make() -> RowOperation:
        [operation] = program_of(options).on_rows
        return operation

    getattr(suite(make), rule)()


@dataclass(frozen=True)
class Changed(RowOperation):
    """Changes the observation; subclasses break one rule each."""

    name: ClassVar[str] = "changed"

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, [OBSERVATION], self.declared, self.changed)

    def declared(self, field: Field) -> Field:
        return field

    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers * 2


class MixesEpisodes(Changed):
    whole_episodes = True

    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers - column.numbers.mean(0)


class LooksAtTheBlock(Changed):
    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers + len(column.numbers)


class DeclaresAnotherDtype(Changed):
    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.cast("float64")


class ReturnsFewerRows(Changed):
    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers[:-1]


class IsRandom(Changed):
    _calls = itertools.count()

    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers + next(self._calls)


class EditsItsInput(Changed):
    def changed(self, field: Field, column: LazyColumn) -> Any:
        column.values[:] *= 2
        return column


@dataclass(frozen=True)
class KeepsAnAttribute(Changed):
    """Its result depends on what is not an argument: equal operations differ, and a copy lacks it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", next(IsRandom._calls))

    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers + self.offset  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ForgetsAnArgument(Changed):
    """Two operations with one description."""

    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", (*self.factors, 1.0))


class _Bound(BoundOperation):
    def inputs(self, wanted: frozenset[Any]) -> Iterable[Any]:
        return wanted

    def compute(self, batch: LazyBatch, wanted: frozenset[Any]) -> Columns:
        return {key: batch.columns[key] for key in wanted}


class _BoundDropping(_Bound):
    def kept(self, batch: LazyBatch) -> Any:
        return np.arange(batch.pieces.steps) % 2 == 0


class _BoundKeepingByNumbers(_Bound):
    def kept(self, batch: LazyBatch) -> Any:
        return np.flatnonzero(np.arange(batch.pieces.steps) % 2 == 0)


class _BoundKeepingFew(_Bound):
    def kept(self, batch: LazyBatch) -> Any:
        return np.ones(batch.pieces.steps - 1, bool)


class DropsRows(Changed):
    def plan(self, fields: Fields) -> BoundOperation:
        return _BoundDropping(fields)


class KeepsByNumbers(Changed):
    drops_rows = True

    def plan(self, fields: Fields) -> BoundOperation:
        return _BoundKeepingByNumbers(fields)


class KeepsFew(Changed):
    drops_rows = True

    def plan(self, fields: Fields) -> BoundOperation:
        return _BoundKeepingFew(fields)


@pytest.mark.parametrize("kind", [KeepsByNumbers, KeepsFew])
def test_a_mask_of_another_form_is_refused(kind: type[RowOperation]) -> None:
    with pytest.raises(SchemaError, match=r"expected bool"):
        suite(kind).test_rows_stay_unless_it_drops_rows()


class _BoundFlags(_Bound):
    def compute(self, batch: LazyBatch, wanted: frozenset[Any]) -> Columns:
        return {
            key: np.zeros_like(batch.columns[key].values) if key == NEXT_DONE else batch.columns[key] for key in wanted
        }


class ClearsFlags(Changed):
    def plan(self, fields: Fields) -> BoundOperation:
        return _BoundFlags(fields)


class RemovesFlags(Changed):
    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges(fields.replaced({NEXT_DONE: None}), {})


class _BoundPeeking(_Bound):
    def compute(self, batch: LazyBatch, wanted: frozenset[Any]) -> Columns:
        found: dict[Any, Any] = {key: batch.columns[key] for key in wanted}
        if OBSERVATION in wanted and ("action",) in batch.columns:
            found[OBSERVATION] = batch.columns[OBSERVATION].numbers * 2
        return found


class ReadsMoreThanItsInputs(Changed):
    def plan(self, fields: Fields) -> BoundOperation:
        return _BoundPeeking(fields)


SABOTEURS: dict[type[RowOperation], str] = {
    MixesEpisodes: "test_episodes_do_not_depend_on_each_other",
    LooksAtTheBlock: "test_the_result_does_not_depend_on_blocks",
    DeclaresAnotherDtype: "test_the_result_has_the_declared_fields",
    ReturnsFewerRows: "test_the_result_has_the_declared_fields",
    IsRandom: "test_the_result_is_deterministic",
    EditsItsInput: "test_the_given_rows_are_unchanged",
    KeepsAnAttribute: "test_the_result_is_deterministic",
    ForgetsAnArgument: "test_its_description_makes_an_equal_operation",
    DropsRows: "test_rows_stay_unless_it_drops_rows",
    ClearsFlags: "test_end_flags_mark_where_episodes_end",
    RemovesFlags: "test_end_flags_mark_where_episodes_end",
    ReadsMoreThanItsInputs: "test_each_field_is_computed_from_its_inputs_alone",
}


@pytest.mark.parametrize("rule", RULES)
def test_an_operation_that_breaks_no_rule_passes(rule: str) -> None:
    getattr(suite(Changed), rule)()


@pytest.mark.parametrize(("broken", "rule"), SABOTEURS.items(), ids=lambda part: getattr(part, "__name__", ""))
def test_the_suite_finds_what_is_broken(broken: type[RowOperation], rule: str) -> None:
    with pytest.raises((AssertionError, SchemaError)):
        getattr(suite(broken), rule)()


@pytest.mark.parametrize("name", ["describe", "bind"])
def test_a_final_method_of_an_operation_cannot_be_overridden(name: str) -> None:
    with pytest.raises(FinalMethodError, match=name):
        type("Broken", (Changed,), {name: lambda self: None})


@pytest.mark.parametrize("name", ["needs", "apply"])
def test_a_final_method_of_a_bound_operation_cannot_be_overridden(name: str) -> None:
    with pytest.raises(FinalMethodError, match=name):
        type("Broken", (_Bound,), {name: lambda self: None})


def test_a_final_method_of_a_choice_cannot_be_overridden() -> None:
    with pytest.raises(FinalMethodError, match="choose"):
        type("Broken", (EpisodeChoice,), {"keeps": lambda self, table: None})


def test_the_example_is_part_of_a_program() -> None:
    program = Program((scale_reward.ScaleReward(2.0),))
    assert program.describe() == [{"name": "scale-reward", "factor": 2.0}]
    with pytest.raises(UsageError, match="factor"):
        scale_reward.ScaleReward(0)
