"""Programs: operations in their order, bound to the fields of a dataset, and the processor that runs one."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...declarations import OPERATION_OPTIONS
from ...errors import UsageError
from ...format.digest import digest_bytes
from ...format.episodes import EpisodeTable
from ...ted.schema import NEXT, NEXT_REWARD, Field, Key, key_name
from ..failures import error_text
from ..processor import Block, Context, LoadedProcessor, Processor
from .base import BoundOperation, EpisodeChoice, Operation, RowOperation
from .columns import Fields, LazyBatch
from .filters import Episodes
from .values import BoundNormalize, Measured, NormalizeFields


def _built_in(target: str) -> type[Operation]:
    module, _, name = target.partition(":")
    found: type[Operation] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found


OPERATIONS: dict[str, type[Operation]] = {
    option.name: _built_in(option.target) for option in OPERATION_OPTIONS if option.target is not None
}
"""The built-in operations by name, in the order in which their options are applied."""


def find_operation(name: str) -> type[Operation] | None:
    """Return the operation of that name, built-in or of the entry points `rbtool.operations`; None if there is none.

    UsageError for an entry point that is no `Operation` of that name.
    """
    if name in OPERATIONS:
        return OPERATIONS[name]
    from importlib.metadata import entry_points  # takes 10 ms, which built-in operations need not wait for

    for entry in entry_points(group="rbtool.operations", name=name):
        found = entry.load()
        if not (isinstance(found, type) and issubclass(found, Operation) and getattr(found, "name", "") == name):
            raise UsageError(f"{entry.value} is no operation with the name {name!r}")
        return found
    return None


@dataclass(frozen=True)
class Program:
    """Operations, one after the other. Those that choose episodes come first, for they read the table of the source.

    UsageError for another order, and for operations that would have to be measured in more than one pass.
    """

    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        if not self.operations:
            raise UsageError("there is no operation, expected one at least")
        for before, after in zip(self.operations, self.operations[1:], strict=False):
            if isinstance(after, EpisodeChoice) and not isinstance(before, EpisodeChoice):
                raise UsageError(
                    f"{after.name} comes after {before.name}; it chooses by the episodes of the source and comes first"
                )
        unmeasured = [place for place, operation in enumerate(self.operations) if _is_unmeasured(operation)]
        between = self.operations[unmeasured[0] : unmeasured[-1]] if unmeasured else ()
        if other := [operation.name for operation in between if not isinstance(operation, NormalizeFields)]:
            raise UsageError(
                f"normalize comes before and after {other[0]}, but one pass measures the rows that reach the first: "
                "let all normalize follow one another"
            )

    @property
    def choices(self) -> tuple[EpisodeChoice, ...]:
        """Those that choose episodes."""
        return tuple(operation for operation in self.operations if isinstance(operation, EpisodeChoice))

    @property
    def on_rows(self) -> tuple[RowOperation, ...]:
        """Those that work on rows."""
        return tuple(operation for operation in self.operations if isinstance(operation, RowOperation))

    @property
    def unmeasured(self) -> tuple[NormalizeFields, ...]:
        """Those whose constants are still to be measured on the rows that reach them."""
        return tuple(o for o in self.operations if isinstance(o, NormalizeFields) and _is_unmeasured(o))

    def of_episodes(self, episodes: Episodes) -> Program:
        """The same for these episodes, instead of those that it may have named."""
        return replace(self, operations=(episodes, *(o for o in self.operations if not isinstance(o, Episodes))))

    def describe(self) -> list[dict[str, Any]]:
        """Return it as JSON."""
        return [operation.describe() for operation in self.operations]

    def selects(self, table: EpisodeTable) -> Any:
        """Return the rows of the episode table that take part, None for all; UsageError where none is left."""
        if not self.choices:
            return None
        keep = np.ones(len(table), bool)
        for choice in self.choices:
            keep &= choice.keeps(table)
        if not keep.any():
            choices = " and ".join(str(list(choice.describe().values())[-1]) for choice in self.choices)
            raise UsageError(f"none of {len(table):,} episodes is left by {choices}")
        return np.flatnonzero(keep)

    def with_measurements(self, measured: Sequence[Measured]) -> Program:
        """Return the program with the constants of its normalizations."""
        states = iter(measured)
        found = tuple(
            operation.with_measurements(next(states))
            if isinstance(operation, NormalizeFields) and _is_unmeasured(operation)
            else operation
            for operation in self.operations
        )  # fmt: skip
        return replace(self, operations=found)


def _is_unmeasured(operation: Operation) -> bool:
    return isinstance(operation, NormalizeFields) and not operation.constants


class BoundProgram:
    """What a program does to rows of given fields.

    Binding it raises UsageError for whatever makes no sense with them, before a row is read.
    """

    def __init__(self, program: Program, fields: Iterable[Field]) -> None:
        self.source = Fields.of(fields)
        self._steps: list[BoundOperation] = []
        self._seen: set[Key] = set()
        after = self.source
        for place, operation in enumerate(program.on_rows):
            step = _bound(operation, after, program.on_rows[place + 1 :])
            if isinstance(step, BoundNormalize) and not step.measured:
                self._refuse_twice(step)
            self._steps.append(step)
            after = step.after
        self.after = after
        if not after.by_key:
            raise UsageError("no field is left, expected one at least")
        self._wanted = _backwards(self._steps, frozenset(after.by_key))
        self._measuring = [step for step in self._steps if isinstance(step, BoundNormalize) and not step.measured]
        self._first = self._steps.index(self._measuring[0]) if self._measuring else 0
        looked_at = frozenset(key for step in self._measuring for key in step.looks_at)
        self._wanted_to_measure = _backwards(self._steps[: self._first], looked_at)

    def _refuse_twice(self, step: BoundNormalize) -> None:
        if twice := self._seen & step.looks_at:
            first = min(twice, key=lambda key: (key[0] == NEXT, key))
            raise UsageError(f"normalize has {key_name(first)!r} twice, expected once")
        self._seen |= step.looks_at

    @property
    def reads(self) -> frozenset[Key]:
        """The fields of the source that the rows have to have: what is measured if that is still to be done."""
        return self._wanted_to_measure[0] if self._measuring else self._wanted[0]

    def run(self, block: Block) -> Block:
        """Take rows through all steps."""
        batch = self._batch(block, self._wanted[0])
        for step, wanted in zip(self._steps, self._wanted[1:], strict=True):
            step.apply(batch, wanted)
        return batch.block([key for key in self.after.by_key if key in batch.columns])

    def measure(self, block: Block) -> list[Measured]:
        """Take rows to the normalizations that are not measured yet, and their statistics for each."""
        batch = self._batch(block, self._wanted_to_measure[0])
        for step, wanted in zip(self._steps[: self._first], self._wanted_to_measure[1:], strict=True):
            step.apply(batch, wanted)
        return [step.measure(batch) for step in self._measuring]

    def merged(self, measured: Iterable[Sequence[Measured]]) -> list[Measured]:
        """Put the statistics of all rows together, in order."""
        totals = [step.nothing() for step in self._measuring]
        for found in measured:
            for total, part in zip(totals, found, strict=True):
                for name, (moments, sketch) in part.items():
                    total[name][0].merge(moments)
                    known = total[name][1]
                    if known is not None and sketch is not None:
                        known.merge(sketch)
        return totals

    def _batch(self, block: Block, wanted: frozenset[Key]) -> LazyBatch:
        return LazyBatch.of(block, {key: self.source[key].name for key in wanted})


def _bound(operation: RowOperation, fields: Fields, later: Sequence[RowOperation]) -> BoundOperation:
    try:
        return operation.bind(fields)
    except UsageError:
        named = _texts_of(operation)
        maker = next((o for o in later if o.makes in named and not fields.has_name(str(o.makes))), None)
        if maker is None:
            raise
        raise UsageError(
            f"{operation.name} names {maker.makes!r}, which {maker.name} makes only after it",
            hint="write the order that is meant into a file: --show-pipeline begins one, --pipeline does it",
        ) from None


def _texts_of(operation: RowOperation) -> set[str]:
    """The texts among the arguments of an operation, which names of fields are."""
    values = [part for value in asdict(operation).values() for part in (value if isinstance(value, tuple) else [value])]
    return {value for value in values if isinstance(value, str)}


def _backwards(steps: Sequence[BoundOperation], wanted: frozenset[Key]) -> list[frozenset[Key]]:
    """Return the fields needed before each step and after the last, for these fields to leave the last."""
    found = [wanted]
    for step in reversed(steps):
        found.append(step.needs(found[-1]))
    return found[::-1]


class ProgramProcessor(Processor):
    """Applies a program. Its result is the same however the rows are cut into blocks.

    Making it checks the program against the fields of a dataset: UsageError for what makes no sense.
    `remarks` go to the notes of the result; `asked` is the program as it was before constants were measured.

    While `needs_measuring`, `reads` names the fields that `measure` needs; for the processor that `with_measurements`
    returns, those that `apply` needs.
    """

    unit = "step"
    edits_rows = False

    def __init__(
        self, program: Program, fields: Iterable[Field], remarks: tuple[str, ...] = (), asked: Program | None = None
    ) -> None:
        self.program = program
        self._remarks = remarks
        self._asked = program if asked is None else asked
        self._fields = tuple(fields)
        self._bound = BoundProgram(program, self._fields)
        self.whole_episodes = any(operation.whole_episodes for operation in program.on_rows)
        self.needs_measuring = bool(program.unmeasured)

    def __reduce__(self) -> tuple[Any, ...]:
        # what is bound holds functions that cannot be pickled
        return ProgramProcessor, (self.program, self._fields, self._remarks, self._asked)

    def portable(self) -> ProgramProcessor:
        for operation in self.program.operations:
            try:
                pickle.dumps(operation)
            except Exception as error:
                raise UsageError(
                    f"{operation.name} cannot be sent to worker processes: {error_text(error)}",
                    hint="use num_workers=0 to run it in this process, or define its class at the top of a module",
                ) from error
        return self

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(operation.name for operation in self.program.operations))

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the result, roles included; known before a row is read."""
        return tuple(self._bound.after)

    @property
    def rescaled(self) -> frozenset[Key]:
        named = (operation.rescales for operation in self.program.on_rows)
        return frozenset(tuple(name.split(".")) for name in named if name is not None)

    def notes(self, fields: Sequence[Field], result: Sequence[Field]) -> tuple[str, ...]:
        """Notes on the result, other than fields that were left out."""
        known = (operation for operation in self.program.operations if isinstance(operation, NormalizeFields))
        constants = (part for operation in known for part in operation.constants)
        return (*self._remarks, *(note for part in constants for note in part.notes))

    def load(self, context: Context) -> LoadedProcessor:
        return _LoadedProgram(BoundProgram(self.program, context.fields))

    def arguments(self) -> dict[str, Any]:
        """Return the program as it was asked for, and the constants that were measured, if any."""
        measured = [
            [part.describe() for part in known.constants]
            for asked, known in zip(self._asked.operations, self.program.operations, strict=True)
            if isinstance(known, NormalizeFields) and known != asked
        ]
        return {"operations": self._asked.describe(), **({"constants": measured} if measured else {})}

    def is_described(self) -> bool:
        return not self._foreign

    @property
    def _foreign(self) -> list[type[Operation]]:
        """The operations of other packages, whose code may change between two runs."""
        return [kind for o in self.program.operations if (kind := type(o)) is not OPERATIONS.get(o.name)]

    def fingerprint(self) -> str:
        try:
            sources = [inspect.getsource(sys.modules[kind.__module__]) for kind in self._foreign]
        except (OSError, TypeError, KeyError):  # without source, no two runs are known to be equal
            return uuid.uuid4().hex
        return digest_bytes("\n".join(sources).encode()) if sources else ""

    def keeps_rows(self) -> bool:
        return not any(operation.drops_rows for operation in self.program.on_rows)

    def reads(self, fields: Sequence[Field]) -> frozenset[Key]:
        return BoundProgram(self.program, fields).reads

    def selects(self, episodes: EpisodeTable) -> Any:
        if all(field.key != NEXT_REWARD for field in self._fields):
            episodes = replace(episodes, total_reward=np.full(len(episodes), np.nan))  # no return is 0 without rewards
        return self.program.selects(episodes)

    def with_measurements(self, measured: Iterable[Any]) -> Processor:
        known = self.program.with_measurements(self._bound.merged(measured))
        return ProgramProcessor(known, self._fields, self._remarks, self._asked)

    def left_out(self, fields: Sequence[Field], result: Sequence[Field]) -> Mapping[str, Any]:
        """Name the fields whose values are gone; those that were renamed or joined are not."""
        return self._bound.after.lost(fields)


class _LoadedProgram(LoadedProcessor):
    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound

    def apply(self, block: Block) -> Block:
        return self._bound.run(block)

    def measure(self, block: Block) -> Any:
        return self._bound.measure(block)
