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
    """Doubles the observation; the others break one rule each."""

    name: ClassVar[str] = "changed"

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, [OBSERVATION], self.declared, self.changed)

    def declared(self, field: Field) -> Field:
        return field

    def changed(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers * 2


CALLS = itertools.count()


def editing_its_input(self: Any, field: Field, column: LazyColumn) -> Any:
    column.values[:] *= 2
    return column


@dataclass(frozen=True)
class KeepsAnAttribute(Changed):
    """Its result depends on what is not an argument: equal operations differ, and a copy lacks it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", next(CALLS))

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


def bound(**members: Any) -> Callable[[Any, Fields], BoundOperation]:
    """Make a `plan` whose operation has these members."""
    return lambda self, fields: type("Bound", (_Bound,), members)(fields)


def kept(mask: Callable[[int], Any]) -> Callable[[Any, Fields], BoundOperation]:
    """Make a `plan` that keeps rows of a block by their mask, which depends on how many there are."""
    return bound(kept=lambda self, batch: mask(batch.pieces.steps))


def every_other(steps: int) -> Any:
    return np.arange(steps) % 2 == 0


def cleared(self: Any, batch: LazyBatch, wanted: frozenset[Any]) -> Columns:
    columns = batch.columns
    return {key: np.zeros_like(columns[key].values) if key == NEXT_DONE else columns[key] for key in wanted}


def peeking(self: Any, batch: LazyBatch, wanted: frozenset[Any]) -> Columns:
    found: dict[Any, Any] = {key: batch.columns[key] for key in wanted}
    if OBSERVATION in wanted and ("action",) in batch.columns:
        found[OBSERVATION] = batch.columns[OBSERVATION].numbers * 2
    return found


@pytest.mark.parametrize(
    "mask", [lambda steps: np.flatnonzero(every_other(steps)), lambda steps: every_other(steps - 1)]
)
def test_a_mask_of_another_form_is_refused(mask: Callable[[int], Any]) -> None:
    kind = type("Own", (Changed,), {"plan": kept(mask), "drops_rows": True})
    with pytest.raises(SchemaError, match=r"expected bool"):
        suite(kind).test_rows_stay_unless_it_drops_rows()


SABOTEURS: dict[str, tuple[str, type[RowOperation] | dict[str, Any]]] = {
    "mixes episodes": ("test_episodes_do_not_depend_on_each_other", {
        "whole_episodes": True, "changed": lambda self, field, column: column.numbers - column.numbers.mean(0)}),
    "looks at the block": ("test_the_result_does_not_depend_on_blocks", {
        "changed": lambda self, field, column: column.numbers + len(column.numbers)}),
    "returns another dtype": ("test_the_result_has_the_declared_fields", {
        "changed": lambda self, field, column: column.cast("float64")}),
    "returns fewer rows": ("test_the_result_has_the_declared_fields", {
        "changed": lambda self, field, column: column.numbers[:-1]}),
    "is random": ("test_the_result_is_deterministic", {
        "changed": lambda self, field, column: column.numbers + next(CALLS)}),
    "edits its input": ("test_the_given_rows_are_unchanged", {"changed": editing_its_input}),
    "keeps an attribute": ("test_the_result_is_deterministic", KeepsAnAttribute),
    "forgets an argument": ("test_its_description_makes_an_equal_operation", ForgetsAnArgument),
    "drops rows": ("test_rows_stay_unless_it_drops_rows", {"plan": kept(every_other)}),
    "clears flags": ("test_end_flags_mark_where_episodes_end", {"plan": bound(compute=cleared)}),
    "removes flags": ("test_end_flags_mark_where_episodes_end", {
        "plan": lambda self, fields: FieldChanges(fields.replaced({NEXT_DONE: None}), {})}),
    "reads more than its inputs": (
        "test_each_field_is_computed_from_its_inputs_alone", {"plan": bound(compute=peeking)}),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_an_operation_that_breaks_no_rule_passes(rule: str) -> None:
    getattr(suite(Changed), rule)()


@pytest.mark.parametrize("name", SABOTEURS)
def test_an_operation_that_breaks_a_rule_fails(name: str) -> None:
    rule, broken = SABOTEURS[name]
    kind = broken if isinstance(broken, type) else type("Saboteur", (Changed,), broken)
    with pytest.raises((AssertionError, SchemaError)):
        getattr(suite(kind), rule)()


@pytest.mark.parametrize(
    ("parent", "name", "said"),
    [
        (Changed, "describe", "describe"), (Changed, "bind", "bind"), (_Bound, "needs", "needs"),
        (_Bound, "apply", "apply"), (EpisodeChoice, "keeps", "choose"),
    ],
)  # fmt: skip
def test_final_methods_cannot_be_overridden(parent: type, name: str, said: str) -> None:
    with pytest.raises(FinalMethodError, match=said):
        type("Broken", (parent,), {name: lambda self, *given: None})


def test_the_example_is_part_of_a_program() -> None:
    program = Program((scale_reward.ScaleReward(2.0),))
    assert program.describe() == [{"name": "scale-reward", "factor": 2.0}]
    with pytest.raises(UsageError, match="factor"):
        scale_reward.ScaleReward(0)
