"""The first pass over groups that hold an episode each: which columns all have, and which groups do not fit the others.

Some columns are required: they must have the same form in every episode. Most episodes decide; the others have a
problem, which counts once one of them is asked for. Any other column is kept where all episodes have it alike, with a
row a step. Columns of states may have a row more than steps, in all episodes or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ..errors import FormatError, RbtoolError
from ..format.manifest import Dropped
from .stored_columns import ColumnForm, ColumnPath, StoredColumn, column_name

_DEEPEST_KEY = 32
_Signature: TypeAlias = tuple[tuple[ColumnPath, ColumnForm, int], ...]
"""Columns with their forms and how many rows more than steps they have: 0, 1, or `_NO_ROWS` for any other number."""
_NO_ROWS = -1


class OtherColumn(NamedTuple):
    """A column that is not required: its form, how many episodes have it, and why it cannot be kept."""

    form: ColumnForm
    found: int
    why: str


@dataclass(slots=True)
class _Alike:
    """Episodes whose required columns have the same forms."""

    names: list[str] = field(default_factory=list)
    others: dict[ColumnPath, OtherColumn] = field(default_factory=dict)


class GroupSurvey:
    """Takes the columns of episode after episode; the rest is known once all were added.

    `required` states whether a column is required. `strict` columns must have a row a step, and so must columns of
    numbers for which `most_more` gives how many more rows there may be: 0 or 1. Any other required column that has no
    row a step in any episode is left out.
    """

    def __init__(
        self, required: Callable[[ColumnPath], bool], strict: Sequence[ColumnPath],
        most_more: Callable[[ColumnPath], int | None] = lambda path: None,
    ) -> None:  # fmt: skip
        self._required = required
        self._strict = tuple(strict)
        self._most_more = most_more
        self._steps_of_longer: dict[str, int] = {}
        self._alike: dict[_Signature, _Alike] = {}
        self._of: dict[str, _Signature] = {}
        self.problems: dict[str, RbtoolError] = {}
        """What is wrong with an episode, by its name."""

    def add(self, name: str, columns: Mapping[ColumnPath, StoredColumn], steps: int) -> None:
        """Take an episode of so many steps; FormatError where a column must have another number of rows."""
        for path in self._strict:
            if path in columns:
                self._require_rows(name, path, columns[path], steps)
        more = {path: self._more(name, path, column, steps) for path, column in columns.items()}
        if 1 in more.values():
            self._steps_of_longer[name] = steps
        signature = tuple((path, columns[path].form, more[path]) for path in sorted(columns) if self._required(path))
        alike = self._alike.setdefault(signature, _Alike())
        alike.names.append(name)
        self._of[name] = signature
        for path, column in columns.items():
            if not self._required(path):
                _merge(alike.others, path, name, column, steps)

    def _more(self, name: str, path: ColumnPath, column: StoredColumn, steps: int) -> int:
        """How many rows more than steps a column has."""
        most = self._most_more(path) if column.form.kind == "array" else None
        if column.rows == steps or (most == 1 and column.rows == steps + 1):
            return column.rows - steps
        if most is not None:
            raise _other_rows(name, path, column.rows, steps)
        return _NO_ROWS

    def _require_rows(self, name: str, path: ColumnPath, column: StoredColumn, steps: int) -> None:
        if column.form.kind != "array":
            why = column.form.why or "its values are no numbers"
            raise FormatError(f"{name}: {column_name(path)!r} cannot be read as rows: {why}")
        if column.rows != steps:
            raise _other_rows(name, path, column.rows, steps)

    def finish(self) -> SurveyedColumns:
        """Decide what the episodes have in common, and note what is wrong with the others in `problems`."""
        longer = self._refuse_longer()
        fitting = [signature for signature in self._alike if signature not in longer]
        if not fitting:
            return SurveyedColumns({}, {}, ())
        common = max(fitting, key=lambda signature: len(self._alike[signature].names))
        first = self._alike[common].names[0]
        for name, signature in self._of.items():
            if signature != common and signature not in longer:
                self.problems[name] = FormatError(f"{name} {_difference(signature, common, first)}")
        kept, dropped = {}, []
        for path, form, more in common:
            if form.kind == "array" and more != _NO_ROWS:
                kept[path] = form
            else:
                why = form.why or ("it has not a row a step" if form.kind == "array" else "its values are no numbers")
                dropped.append(Dropped(column_name(path), why))
        alike = self._alike[common]
        others = {}
        for path, other in sorted(alike.others.items()):
            missing = len(alike.names) - other.found
            why = other.why or (f"{missing:,} of {len(alike.names):,} episodes do not have it" if missing else "")
            if not why:
                others[path] = other.form
            else:
                dropped.append(Dropped(column_name(path), why))
        return SurveyedColumns(kept, others, tuple(dropped), frozenset(path for path, _, more in common if more == 1))

    def _refuse_longer(self) -> set[_Signature]:
        """Note a problem of episodes with a row more than steps in a column that has a row a step in others."""
        exact = {path for signature in self._alike for path, _, more in signature if not more}
        odd = {
            signature: path for signature in self._alike for path, _, more in signature if more == 1 and path in exact
        }
        for name, signature in self._of.items():
            if signature in odd:
                steps = self._steps_of_longer[name]
                self.problems[name] = _other_rows(name, odd[signature], steps + 1, steps)
        return set(odd)


class SurveyedColumns(NamedTuple):
    """The columns that sound episodes have in common, with a row a step each, and those that cannot be kept.

    Those `longer` have a row more than steps.
    """

    required: Mapping[ColumnPath, ColumnForm]
    others: Mapping[ColumnPath, ColumnForm]
    dropped: tuple[Dropped, ...]
    longer: frozenset[ColumnPath] = frozenset()


def _other_rows(name: str, path: ColumnPath, rows: int, steps: int) -> FormatError:
    return FormatError(f"{name}: {column_name(path)!r} has {rows:,} rows, and the episode has {steps:,} steps")


def _merge(
    others: dict[ColumnPath, OtherColumn], path: ColumnPath, name: str, column: StoredColumn, steps: int
) -> None:
    before = others.get(path)
    why = before.why if before is not None else ""
    if not why and column.form.kind != "array":
        why = column.form.why or "its values are no numbers"
    if not why and column.rows != steps:
        why = f"it has {column.rows:,} rows in {name}, which has {steps:,} steps"
    if not why and len(path) > _DEEPEST_KEY:
        why = "it is nested too deep"
    if not why and before is not None and before.form != column.form:
        why = f"it is {_looks(column.form)} in {name}, and {_looks(before.form)} in others"
    others[path] = OtherColumn(column.form, (before.found if before is not None else 0) + 1, why)


def _difference(odd: _Signature, common: _Signature, first: str) -> str:
    """State the first difference between the required columns of an episode and those of `first`."""
    here, there = ({path: (form, more) for path, form, more in one} for one in (odd, common))
    for path in sorted(here.keys() | there.keys()):
        name = column_name(path)
        if path not in here:
            return f"has no {name!r}, which {first} and others have"
        if path not in there:
            return f"has {name!r}, which {first} and others do not have"
        if here[path] != there[path]:
            (form, more), (other, _) = here[path], there[path]
            if form == other:
                rows = "a row a step" if not more else "another number of rows than steps"
                return f"has {name!r} with {rows}, which {first} and others have not"
            return f"has {name!r} as {_looks(form)}, and {first} and others as {_looks(other)}"
    return f"differs from {first}"


def _looks(form: ColumnForm) -> str:
    return f"{form.dtype} {list(form.shape)}" if form.kind == "array" else form.kind
