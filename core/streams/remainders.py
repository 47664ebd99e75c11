"""What the parts of a stream left of an epoch, so that other parts, more or fewer, can divide it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import SchemaError
from ..samplers.stream import Part, places_left
from ..ted.schema import Numbers

_OF_PART = {"part", "parts", "round", "taken", "drawn", "epoch", "left", "_ran_out"}
"""The entries of a state in which the parts of an epoch differ."""


def remainder_of(states: Sequence[Mapping[str, Any]], shards: int) -> dict[str, Any]:
    """Return the state of a `StreamSampler` that draws all that is left of an epoch.

    A part that has the last batch of the epoch, or has not drawn from the next one yet, has nothing left.

    Args:
        states: the states of all parts of an epoch, in any order, with lists in place of tensors.
        shards: how many shards the stream has.

    Raises:
        SchemaError: (a RuntimeError) parts are missing or come twice, or the states are not of one epoch.
    """
    first = states[0]
    if missing := _OF_PART - set().union(*states) or {name for state in states for name in first.keys() - state.keys()}:
        raise SchemaError(f"{', '.join(sorted(missing))} is missing in the state of a stream")
    common = _common(states)
    _check_parts([Part(int(state["part"]), int(state["parts"])) for state in states])
    for state in states:
        runs = np.array(state["left"] or [], np.int64).reshape(-1, 3)
        sound = (runs[:, 0] >= 0) & (runs[:, 0] < runs[:, 1]) & (runs[:, 1] <= shards) & (runs[:, 2] >= 0)
        drawn = np.array(state["drawn"], np.int64)
        if not sound.all() or len(drawn) != common["window"] or (drawn < 0).any() or int(state["round"]) < 0:
            raise SchemaError(f"the state of part {state['part']} of {state['parts']} contradicts itself")
    epochs = [int(state["epoch"]) - bool(state["_ran_out"]) for state in states]
    epoch = min(epochs)
    active = [state for state, number in zip(states, epochs, strict=True) if number == epoch and not state["_ran_out"]]
    for state, number in zip(states, epochs, strict=True):
        begun = state["_ran_out"] or state["round"] or state["taken"] or state["left"] is not None
        if number > epoch + 1 or (number > epoch and begun):
            raise SchemaError(f"the states are of the epochs {epoch} and {number}, expected one epoch")
    if any(state["left"] != active[0]["left"] for state in active):
        raise SchemaError("the states are of two divisions of an epoch, expected one")
    divided = active[0]["left"] if active else []
    places, drawn = places_left(None if divided is None else np.array(divided, np.int64).reshape(-1, 3), shards)
    found = [_left_of(state, places, drawn) for state in active]
    left = _runs(*np.concatenate([np.empty((2, 0), np.int64), *found], 1))
    return common | {"epoch": epoch, "round": 0, "taken": 0, "drawn": [], "left": left.tolist(), "_ran_out": False}


def _common(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that all states share; one that is None in a state is not known there yet."""
    found: dict[str, Any] = {}
    for name in states[0].keys() - _OF_PART:
        values = {state[name] for state in states} - {None}
        if len(values) > 1:
            said = " and ".join(sorted(f"{name}={value!r}" for value in values))
            raise SchemaError(f"the states are of different streams: they have {said}")
        found[name] = values.pop() if values else None
    return found


def _check_parts(parts: Sequence[Part]) -> None:
    """Raise SchemaError unless every shard is in exactly one part."""
    for part in parts:
        if not 0 <= part.number < part.of:
            raise SchemaError(f"a state is of part {part.number} of {part.of}")
    seen = set[Part]()
    for part in parts:
        if part in seen:
            raise SchemaError(f"two states have the same shards: part {part.number} of {part.of}")
        seen.add(part)
    # Pairs are many where ranks are: 84 s for 4,096 of them.
    for one, other in itertools.combinations(parts, 2) if len({part.of for part in parts}) > 1 else ():
        if (one.number - other.number) % math.gcd(one.of, other.of) == 0:
            raise SchemaError(
                f"two states have the same shards: part {one.number} of {one.of} and part {other.number} of {other.of}"
            )
    if sum(Fraction(1, part.of) for part in parts) != 1:
        given = ", ".join(f"{part.number} of {part.of}" for part in sorted(parts))
        raise SchemaError(
            f"there are states of part {given}, expected all parts", hint="one state of each rank, in a list"
        )


def _left_of(state: Mapping[str, Any], places: Numbers, drawn: Numbers) -> Numbers:
    """Return the places that a part left, and how many elements of each are drawn, int64 `[2, n]`."""
    own = slice(int(state["part"]), None, int(state["parts"]))
    counts = np.array(state["drawn"], np.int64)
    found = np.stack([places[own], drawn[own]])
    first = int(state["round"]) - len(counts) + 1
    known = found[1, max(0, first) : first + len(counts)]
    known += counts[max(0, -first) :][: len(known)]
    return found[:, max(0, first) :]


def _runs(places: Numbers, drawn: Numbers) -> Numbers:
    """Return runs of places that follow each other and have the same number, as `places_left` takes them."""
    order = np.argsort(places)
    places, drawn = places[order], drawn[order]
    starts = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(drawn, prepend=-1) != 0))
    stops = np.append(starts, len(places))[1:]
    return np.stack([places[starts], places[stops - 1] + 1, drawn[starts]], 1)
