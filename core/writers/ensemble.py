"""The writers of an ensemble, which itself cannot be written to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from ..storages.base import Storage
from ..storages.ensemble import checked_members, chosen_members, load_members, refuse_write
from .base import Writer


class WriterEnsemble(Writer):
    """The writers of an ensemble; `len` is their number, and an index returns one writer, or an ensemble of some.

    Writes raise EnsembleWriteError (a RuntimeError and a TypeError), with nothing changed. Names are TorchRL's.

    >>> from rbtool import RoundRobinWriter
    >>> writers = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
    >>> len(writers), writers[0]
    (2, RoundRobinWriter(cursor=0, write_count=0))
    """

    keeps_order: ClassVar[bool] = False

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self.members: tuple[Writer, ...] = checked_members("WriterEnsemble", writers, Writer)

    def place(self, data: Any, count: int, capacity: int) -> NoReturn:
        """Raise EnsembleWriteError."""
        refuse_write(self)

    def _writable(self) -> Storage:
        refuse_write(self)

    def _empty(self, empty_write_count: bool = True) -> None:
        for member in self.members:
            member.empty(empty_write_count)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or an ensemble of some members."""
        chosen = chosen_members(index, len(self))
        if isinstance(chosen, int):
            return self.members[chosen]
        if chosen == list(range(len(self))):
            return self
        return type(self)(*(self.members[member] for member in chosen))

    def save_state(self) -> dict[str, Any]:
        """Return the state of each member under its number, as text."""
        return {str(number): member.state_dict() for number, member in enumerate(self.members)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state. If a member refuses its part, or the number of members differs, nothing is changed."""
        load_members(self.members, state)

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the state of each member to a folder with its number."""
        for number, member in enumerate(self.members):
            member.dumps(folder / str(number))

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote."""
        found = {
            str(number): member.read_state(folder / str(number)) if member.writes else {}
            for number, member in enumerate(self.members)
        }
        return {"_cursor": 0, "_write_count": 0, **found}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(writers=({', '.join(map(repr, self.members))}))"
