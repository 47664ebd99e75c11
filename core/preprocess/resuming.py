"""What an earlier run of the same work left behind, to be gone on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..errors import RbtoolError, UsageError
from ..format import PositionedTree, plain
from ..ted import Field
from .job import Finished, Task
from .journal import read_journal
from .places import PartFile, journal_path, part_path, placed_folder, rows_digest, take_back

__all__ = ["Unfinished", "same_run"]


class Unfinished(NamedTuple):
    """The fields of the result and the tasks that are finished."""

    fields: tuple[Field, ...]
    finished: Mapping[int, Finished]

    @classmethod
    def at(cls, folder: Path, steps: int) -> Self | None:
        """Read what a run of `steps` steps left and prepare to resume it; None if it left nothing."""
        found = read_journal(journal_path(folder))
        if found is None:
            return None
        _, fields, finished = found
        take_back(folder, fields, steps)
        return cls(fields, finished)

    def sound(self, folder: Path, tasks: list[Task], steps: int) -> dict[int, Finished]:
        """The finished tasks whose rows are on the disk as they were written, byte for byte.

        Rows changed since, by a crash or by hand, count as not done.
        """
        found = {}
        with PositionedTree(placed_folder(folder), self.fields, steps, anew=False) as tree:
            for index, finished in self.finished.items():
                try:
                    task = tasks[index]
                    part = PartFile(part_path(folder, index), self.fields, finished.rows)
                    rows: Any = tree if finished.placed else part
                    start = task.start if finished.placed else 0
                    stop = start + finished.rows
                    if rows_digest(rows.read(field.key, start, stop) for field in self.fields) == finished.digest:
                        found[index] = finished
                except (OSError, IndexError, ValueError, RbtoolError):
                    continue
        return found


def same_run(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Tell whether an unfinished run of this identity lies in a folder; UsageError if another one does."""
    found = read_journal(journal_path(folder))
    if found is None:
        return False
    there = found[0]
    different = [name for name in identity if there.get(name) != plain(identity[name])]
    if different:
        raise UsageError(
            f"the unfinished run at {folder} is another one: {', '.join(different)} differ",
            hint="leave --resume out to start over",
        )
    return True
