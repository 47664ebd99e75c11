"""The work that a program is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...format import EpisodeTable
from ...ted import Field, Key
from ..block import Block
from ..work import Context, Started, Work
from .images import Resize
from .normalize import Normalize
from .program import BoundProgram, Program
from .rows import Where

__all__ = ["ProgramWork"]


class ProgramWork(Work):
    """Does what a program says. Its result is the same however the rows are cut into blocks.

    Making it checks the program against the fields of a dataset: UsageError for what makes no sense.
    `remarks` go to the notes of the result; `asked` is the program as it was before constants were measured.

    While it `needs_measuring`, `reads` names what `measure` looks at; the work that `informed` returns reads what
    `apply` needs.
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
        return ProgramWork, (self.program, self._fields, self._remarks, self._asked)

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(operation.name for operation in self.program.operations))

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the result, roles included; known before a row is read."""
        return tuple(self._bound.after)

    @property
    def rescaled(self) -> frozenset[Key]:
        named = (part.key for part in self.program.operations if isinstance(part, Normalize | Resize))
        return frozenset(tuple(name.split(".")) for name in named)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know beside what was left out."""
        known = (operation for operation in self.program.operations if isinstance(operation, Normalize))
        constants = (part for operation in known for part in operation.constants)
        return (*self._remarks, *(note for part in constants for note in part.notes))

    def start(self, context: Context) -> Started:
        return _StartedProgram(BoundProgram(self.program, context.fields))

    def arguments(self) -> dict[str, Any]:
        """The program as it was asked for, and beside it, once they are known, the constants that were measured."""
        measured = [
            [part.describe() for part in known.constants]
            for asked, known in zip(self._asked.operations, self.program.operations, strict=True)
            if isinstance(known, Normalize) and known != asked
        ]
        return {"operations": self._asked.describe(), **({"constants": measured} if measured else {})}

    def is_described(self) -> bool:
        return True

    def keeps_rows(self) -> bool:
        return not any(isinstance(operation, Where) for operation in self.program.operations)

    def reads(self, fields: Sequence[Field]) -> frozenset[Key]:
        return BoundProgram(self.program, fields).reads

    def chooses(self, episodes: EpisodeTable) -> Any:
        return self.program.chooses(episodes)

    def informed(self, measured: Iterable[Any]) -> Work:
        known = self.program.informed(self._bound.merged(measured))
        return ProgramWork(known, self._fields, self._remarks, self._asked)

    def left_out(self, fields: Sequence[Field], result: Sequence[Field]) -> Mapping[str, Any]:
        """Name the fields whose values are gone; those that were renamed or joined are not."""
        return self._bound.after.lost(fields)


class _StartedProgram(Started):
    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound

    def apply(self, block: Block) -> Block:
        return self._bound.run(block)

    def measure(self, block: Block) -> Any:
        return self._bound.measure(block)
