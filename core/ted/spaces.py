"""The rule about recorded spaces: observations and actions are inside those that the source states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .findings import Finding, Rows, Rule, Tally
from .schema import NEXT, Field, Key, as_numbers, safe_part

_Array: TypeAlias = np.ndarray[Any, Any]


def bound_array(bound: Any) -> _Array:
    """Read a bound of a space; integers stay exact, the strings of strict JSON become the numbers they stand for."""
    array = np.asarray(bound)
    if array.dtype.kind in "US" or array.dtype == object:
        array = np.vectorize(float, otypes=[np.float64])(np.asarray(bound, dtype=object))
    return array


@dataclasses.dataclass(slots=True)
class _Watched:
    """A field whose values are compared with bounds, and the least and largest value outside them."""

    field: Field
    low: _Array
    high: _Array
    tally: Tally = dataclasses.field(default_factory=Tally)
    least: float = np.inf
    largest: float = -np.inf

    def see(self, rows: Rows) -> None:
        """Compare the next rows."""
        values = as_numbers(rows.columns[self.field.key], self.field.dtype)
        outside: _Array = np.logical_or(values < self.low, values > self.high)
        if outside.any():
            wrong = values[outside]
            self.least, self.largest = min(self.least, float(wrong.min())), max(self.largest, float(wrong.max()))
            self.tally.add(rows, np.atleast_1d(outside.reshape(len(rows), -1).any(1)))

    @property
    def limits(self) -> str:
        low, high = (
            f"{bound.min():g}" if (bound == bound.flat[0]).all() else f"{bound.min():g} … {bound.max():g}"
            for bound in (self.low, self.high)
        )
        return f"{low} to {high}"


class SpaceRule(Rule):
    """Observations and actions are inside the spaces that the source records for them.

    What is outside is still what was recorded, so that is a warning: a policy that clips its actions, or a model that
    scales by the bounds, does not see these values. NaN is left to the rule about it.
    """

    rule_id = "TED015"

    def __init__(self, fields: Sequence[Field], steps: int, *, spaces: Mapping[str, Any] | None = None) -> None:
        super().__init__(fields, steps)
        self._watched = [_Watched(field, low, high) for field, low, high in bounded_fields(fields, spaces or {})]

    def see(self, rows: Rows) -> None:
        for watched in self._watched:
            watched.see(rows)

    def findings(self) -> list[Finding]:
        found = []
        for one in self._watched:
            text = f"{one.field.name} is outside its recorded space, {one.limits}, in {self.share(one.tally)}"
            text += f": values outside it are from {one.least:g} to {one.largest:g}"
            found += self.report_first("warning", text, one.tally)
        return found


def bounded_fields(fields: Sequence[Field], spaces: Mapping[str, Any]) -> Iterator[tuple[Field, _Array, _Array]]:
    """Yield the fields that a recorded space limits, with the least and the largest legal value of each.

    A bound is a number, or an array of the shape of a row.
    """
    leaves = {key: space for name, space in spaces.items() for key, space in _leaves(space, (name,))}
    for field in fields:
        space = leaves.get(field.key[field.key[0] == NEXT :])
        bounds = None if space is None else _bounds(space, field)
        if bounds is not None:
            yield field, *bounds


def _leaves(space: Any, key: Key) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Yield the leaves of a space with the keys that their values have in a row."""
    if not isinstance(space, Mapping):
        return
    children = space.get("subspaces")
    if children is None:
        yield key, space
        return
    named = children.items() if isinstance(children, Mapping) else enumerate(children)
    for name, child in named:
        yield from _leaves(child, (*key, safe_part(str(name))))


def _bounds(space: Mapping[str, Any], field: Field) -> tuple[_Array, _Array] | None:
    """Return the least and the largest legal value of a field, as its type has them; None if there is no such limit."""
    if field.numpy.kind not in "biuf" or field.dtype == "bfloat16" or field.role == "text":
        return None
    low, high = _limits_of(space)
    if low is None or high is None:
        return None
    if field.numpy.kind == "f":  # a bound that the type rounds is the bound of its values
        limit = np.finfo(field.numpy)
        with np.errstate(over="ignore"):  # a bound that the type has not is infinite
            low, high = low.astype(field.numpy), high.astype(field.numpy)
        open_to_all = (low <= limit.min).all() and (high >= limit.max).all()
    elif field.numpy.kind == "b":
        open_to_all = (low <= 0).all() and (high >= 1).all()
    else:
        whole = np.iinfo(field.numpy)
        open_to_all = (low <= whole.min).all() and (high >= whole.max).all()
    if open_to_all:
        return None
    shaped = [_shaped(bound, field.shape) for bound in (low, high)]
    return None if shaped[0] is None or shaped[1] is None else (shaped[0], shaped[1])


def _limits_of(space: Mapping[str, Any]) -> tuple[_Array | None, _Array | None]:
    kind, start = space.get("type"), bound_array(space.get("start") or 0)
    if kind == "Box" and space.get("low") is not None and space.get("high") is not None:
        return bound_array(space["low"]), bound_array(space["high"])
    if kind == "MultiBinary":
        return np.asarray(0), np.asarray(1)
    count = space.get({"Discrete": "n", "MultiDiscrete": "nvec"}.get(str(kind), ""))
    return (None, None) if count is None else (start, start + bound_array(count) - 1)


def _shaped(bound: _Array, shape: tuple[int, ...]) -> _Array | None:
    """Give a bound the shape of a row; None where it has another number of elements."""
    if bound.size == 1:
        return bound.reshape(())
    return bound.reshape(shape) if bound.size == int(np.prod(shape)) else None
