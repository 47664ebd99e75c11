"""Converts between action spaces: rotations, poses and grippers in several representations, absolute or relative.

A group is a range of numbers of an action that belong together, such as a rotation in three Euler angles. A text
describes its representation and the one to convert it to; defaults are left out:

    PLACE=KIND,from=HOW,to=HOW,was=FORM,as=FORM,state=PLACE,state-from=HOW,frame=body|world,binary

All computation is in float64, through rotation matrices. `ChangeActionSpace` is the operation of `preprocess`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..engine.tasks import ResultRefused
from ..errors import UsageError, did_you_mean
from ..format.contracts import StepReader
from ..format.documents import dump_json
from ..preprocess.operations.base import (
    BoundOperation,
    Columns,
    Discount,
    Fields,
    LazyBatch,
    Operation,
    RowOperation,
    in_next,
    texts_of,
)
from ..preprocess.operations.built_in import Rename
from ..ted.schema import NEXT, Field, Key

Array = NDArray[Any]

# Rotations: rows of numbers to matrices `[..., 3, 3]` and back

_AXES = "xyz"


def _axis_angle_matrix(values: Array) -> Array:
    angle = np.linalg.norm(values, axis=-1, keepdims=True)
    scale = 0.5 * np.sinc(angle / (2 * np.pi))  # sin(angle / 2) / angle
    return _quaternion_matrix(np.concatenate([np.cos(angle / 2), scale * values], -1))


def _quaternion_matrix(values: Array) -> Array:
    """Return the matrix of a quaternion (w, x, y, z) of any length but 0."""
    w, x, y, z = np.moveaxis(values / np.linalg.norm(values, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, -1) for row in rows], -2)


def _matrix_quaternion(matrix: Array) -> Array:
    """Return the quaternion (w, x, y, z) with a non-negative w."""
    m = matrix
    xx, yy, zz = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    # Row i is the quaternion times four times its i-th number: the row of the largest number is accurate.
    wx, wy, wz = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]
    xy, xz, yz = m[..., 1, 0] + m[..., 0, 1], m[..., 0, 2] + m[..., 2, 0], m[..., 2, 1] + m[..., 1, 2]
    table = [
        [1 + xx + yy + zz, wx, wy, wz],
        [wx, 1 + xx - yy - zz, xy, xz],
        [wy, xy, 1 - xx + yy - zz, yz],
        [wz, xz, yz, 1 - xx - yy + zz],
    ]
    rows = np.stack([np.stack(row, -1) for row in table], -2)
    largest = np.diagonal(rows, axis1=-2, axis2=-1).argmax(-1)
    found = np.take_along_axis(rows, largest[..., None, None], -2)[..., 0, :]
    found = found / np.linalg.norm(found, axis=-1, keepdims=True)
    signed: Array = np.where(found[..., :1] < 0, -found, found)
    return signed


def _matrix_axis_angle(matrix: Array) -> Array:
    quaternion = _matrix_quaternion(matrix)
    length = np.linalg.norm(quaternion[..., 1:], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(length, quaternion[..., :1])
    return quaternion[..., 1:] * np.where(length > 0, angle / np.where(length > 0, length, 1), 2)


def _six_matrix(values: Array, axis: int) -> Array:
    """Return the matrix with these first two rows (axis -2) or columns (axis -1), made orthonormal by Gram-Schmidt."""
    first, second = values[..., :3], values[..., 3:]
    first = first / np.linalg.norm(first, axis=-1, keepdims=True)
    second = second - (first * second).sum(-1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], axis)


def _euler_matrix(angles: Array, order: str) -> Array:
    """Return the product of the rotations about these axes: intrinsic for `XYZ`, extrinsic for `xyz`."""
    turns = []
    for place, axis in enumerate(order):
        turn, a = np.zeros((*angles.shape[:-1], 3, 3)), _AXES.index(axis.lower())
        b, c = (a + 1) % 3, (a + 2) % 3
        sine, cosine = np.sin(angles[..., place]), np.cos(angles[..., place])
        turn[..., a, a] = 1
        turn[..., b, b] = turn[..., c, c] = cosine
        turn[..., b, c], turn[..., c, b] = -sine, sine
        turns.append(turn)
    first, second, third = turns if order.isupper() else turns[::-1]
    found: Array = first @ second @ third
    return found


def _matrix_euler(matrix: Array, order: str) -> Array:
    """Return the Euler angles; in gimbal lock, where the first and the third axis coincide, the third one is 0."""
    intrinsic = order if order.isupper() else order[::-1].upper()
    i, j, k = (_AXES.index(axis.lower()) for axis in intrinsic)
    sign = 1.0 if (j - i) % 3 == 1 else -1.0
    m = matrix
    cosine = np.hypot(m[..., i, i], m[..., i, j])
    free = cosine > 1e-7
    first = np.where(
        free, np.arctan2(-sign * m[..., j, k], m[..., k, k]), np.arctan2(sign * m[..., k, j], m[..., j, j])
    )
    second = np.arctan2(sign * m[..., i, k], cosine)
    third = np.where(free, np.arctan2(-sign * m[..., i, j], m[..., i, i]), 0.0)
    angles = [first, second, third]
    return np.stack(angles if order.isupper() else angles[::-1], -1)


def _columns(matrix: Array) -> Array:
    return np.concatenate([matrix[..., 0], matrix[..., 1]], -1)


class _Rotation(NamedTuple):
    """A representation of rotations: how many numbers it has, and its conversions to and from matrices."""

    width: int
    matrix: Callable[[Array], Array]
    numbers: Callable[[Array], Array]


_XYZW = [3, 0, 1, 2]
_FIXED = {
    "axis-angle": _Rotation(3, _axis_angle_matrix, _matrix_axis_angle),
    "quat-wxyz": _Rotation(4, _quaternion_matrix, _matrix_quaternion),
    "quat-xyzw": _Rotation(
        4, lambda q: _quaternion_matrix(q[..., _XYZW]), lambda m: _matrix_quaternion(m)[..., [1, 2, 3, 0]]
    ),
    "6d-rows": _Rotation(6, lambda v: _six_matrix(v, -2), lambda m: m[..., :2, :].reshape(*m.shape[:-2], 6)),
    "6d-columns": _Rotation(6, lambda v: _six_matrix(v, -1), _columns),
    "matrix": _Rotation(9, lambda v: v.reshape(*v.shape[:-1], 3, 3), lambda m: m.reshape(*m.shape[:-2], 9)),
}
_EULER = re.compile(r"euler-([xyz]{3}|[XYZ]{3})(-deg)?")


def rotation(how: str) -> _Rotation:
    """Return the representation of rotations with a name; UsageError for an unknown name.

    Euler angles are `euler-xyz` for rotations about fixed axes (extrinsic) in this order, and `euler-XYZ` for rotations
    about axes that move along (intrinsic); both may end in `-deg`.
    """
    if how in _FIXED:
        return _FIXED[how]
    match = _EULER.fullmatch(how)
    if match is None or len(set(match[1])) < 3:
        known = [*_FIXED, "euler-xyz"]
        raise UsageError(
            f"a rotation cannot be {how!r}{did_you_mean(how, known)}",
            hint=f"expected {', '.join(_FIXED)}, or Euler angles like euler-xyz (extrinsic), euler-ZYX (intrinsic), "
            "euler-xyz-deg",
        )
    unit, order = (math.pi / 180 if match[2] else 1.0), match[1]
    return _Rotation(3, lambda v: _euler_matrix(v * unit, order), lambda m: _matrix_euler(m, order) / unit)


def between(how: str, before: Array, after: Array, share: Array) -> Array:
    """Interpolate rotations `[n, width]` on the shortest way, at the share `[n]` of the way from `before` to `after`.

    At a share of 0, the result is exactly `before`. Otherwise, of all numbers that mean the same rotation, such as
    quaternions of either sign, or angles a full turn apart, the result is the nearest to `before`.
    """
    matrix, numbers = rotation(how).matrix, rotation(how).numbers
    start = matrix(before)
    way = _matrix_axis_angle(np.swapaxes(start, -1, -2) @ matrix(after))
    found = numbers(start @ _axis_angle_matrix(share[:, None] * way))
    if how.startswith("quat"):
        found = np.where((found * before).sum(-1, keepdims=True) < 0, -found, found)
    elif how.startswith("euler"):
        turn = 360.0 if how.endswith("-deg") else 2 * np.pi
        # Adding half a turn to all angles, with the second one negated, gives the same rotation.
        same = np.stack([found, found * [1, -1, 1] + turn / 2])
        same += turn * np.round((before - same) / turn)
        found = same[np.abs(same - before).sum(-1).argmin(0), np.arange(len(found))]
    elif how == "axis-angle":
        length = np.linalg.norm(found, axis=-1, keepdims=True)
        known = np.linalg.norm(before, axis=-1, keepdims=True)
        axis = np.where(length > 0, found, before) / np.where(length > 0, length, np.where(known > 0, known, 1))
        found = found + 2 * np.pi * np.round(((before - found) * axis).sum(-1, keepdims=True) / (2 * np.pi)) * axis
    there: Array = np.where(share[:, None] > 0, found, before)
    return there


def is_rotation(values: Array, how: str) -> NDArray[np.bool_]:
    """Return whether rows `[..., width]` are rotations, up to rounding; rows with NaN count as rotations."""
    found: NDArray[np.bool_] = ~(_flaw(values, how) > _FLAW)
    return found


def _flaw(values: Array, how: str) -> Array:
    """Return how far rows of numbers are from a rotation: 0 for an exact one, about 1 for arbitrary numbers."""
    found: Array = np.zeros(values.shape[:-1])
    if how.startswith("quat"):
        found = np.abs(np.linalg.norm(values, axis=-1) - 1)
    if how == "matrix" or how.startswith("6d"):
        parts = values.reshape(*values.shape[:-1], -1, 3)
        found = np.abs(parts @ np.swapaxes(parts, -1, -2) - np.eye(parts.shape[-2])).max((-1, -2))
        if how == "matrix":
            found = np.maximum(found, np.abs(np.linalg.det(parts) - 1))
    return found


_FLAW = 1e-2


# Runs of rows, and values that are relative to others


class Runs(NamedTuple):
    """Runs of consecutive rows in time, such as episodes: int64 `[runs]`, each with at least one row."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: Any) -> Self:
        """Return runs of these lengths, one after the other; empty ones are left out."""
        some = np.asarray(lengths, np.int64)
        some = some[some > 0]
        return cls(np.cumsum(some) - some, some)

    def spread(self, of_runs: Array) -> Array:
        """Repeat the value of each run for all of its rows."""
        return np.repeat(of_runs, self.lengths, 0)

    def continuous(self, quaternions: Array) -> Array:
        """Choose the signs of quaternions so that they do not jump within a run."""
        turned = (quaternions[1:] * quaternions[:-1]).sum(-1) < 0
        flips = np.concatenate([[0], np.cumsum(turned)])
        flips = flips - self.spread(flips[self.starts])
        return np.where((flips % 2 == 1)[:, None], -quaternions, quaternions)


@dataclass(frozen=True, slots=True)
class Value:
    """Decoded rows of a group: additive numbers `[n, m]`, and rotation matrices `[n, 3, 3]` or None."""

    numbers: Array
    turn: Array | None

    def at(self, rows: Any) -> Value:
        """Return some rows."""
        return Value(self.numbers[rows], None if self.turn is None else self.turn[rows])

    def put(self, rows: Any, others: Value) -> None:
        """Replace some rows."""
        self.numbers[rows] = others.numbers
        if self.turn is not None:
            self.turn[rows] = others.turn

    def seen_from(self, other: Value, frame: str) -> Value:
        """Return this value relative to another one: numbers are subtracted, rotations divided.

        With the other rotation R and this one R', the relative rotation is inv(R) R' in the frame `body`, and
        R' inv(R) in `world`. The difference of positions is expressed in the axes of the other pose in `body` (so that
        the whole is inv(T) T'), and in fixed axes in `world`.
        """
        moved = self.numbers - other.numbers
        if self.turn is None or other.turn is None:
            return Value(moved, None)
        back = np.swapaxes(other.turn, -1, -2)
        if frame == "world":
            return Value(moved, self.turn @ back)
        return Value(_turned(back, moved), back @ self.turn)

    def placed_at(self, other: Value, frame: str) -> Value:
        """Return the absolute value of this one, which is relative to another: the inverse of `seen_from`."""
        if self.turn is None or other.turn is None:
            return Value(self.numbers + other.numbers, None)
        if frame == "world":
            return Value(self.numbers + other.numbers, self.turn @ other.turn)
        return Value(_turned(other.turn, self.numbers) + other.numbers, other.turn @ self.turn)


def _turned(turn: Array, numbers: Array) -> Array:
    found: Array = (turn @ numbers[..., None])[..., 0] if numbers.shape[-1] else numbers
    return found


def _accumulated(steps: Value, before: Value, runs: Runs, frame: str) -> Value:
    """Accumulate the relative values `steps` in each run, from the value in `before` (one for each run) on."""
    found = steps.at(np.arange(len(steps.numbers)))  # a copy
    longest_first = np.argsort(-runs.lengths, kind="stable")
    starts, lengths, now = runs.starts[longest_first], runs.lengths[longest_first], before.at(longest_first)
    for step in range(int(lengths.max(initial=0))):
        going = int(np.searchsorted(-lengths, -step))  # the number of runs with more than `step` rows
        now = steps.at(starts[:going] + step).placed_at(now.at(slice(going)), frame)
        found.put(starts[:going] + step, now)
    return found


# Groups: the description of some numbers of an action

States = Callable[["Place"], tuple[Array | None, Array]]

FORMS = ("absolute", "delta", "step", "relative", "chunk-delta")
"""What actions are relative to:

    absolute      nothing
    delta         the action before it; the first one of an episode: the state
    step          the state of its own step
    relative      the state at the start of its chunk
    chunk-delta   the action before it in its chunk; the first one of a chunk: the state
"""
OF_CHUNKS = ("relative", "chunk-delta")
_DELTAS = ("delta", "chunk-delta")
_KINDS = ("numbers", "rotation", "pose", "gripper")
_FRAMES = ("body", "world")
_PLACE = re.compile(r"(?P<key>[^\[\]]*?)(?:\[(?P<range>[^\[\]]+)\])?")
_RANGE = re.compile(r"(\d*):(\d*)|(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """A range of numbers of a field: from `start` up to, but not including, `stop`; None for the end of the field.

    `names` has the names of the first and the last number, if it was given by names, until `resolved` replaces them.
    """

    key: str
    start: int = 0
    stop: int | None = None
    names: tuple[str, str] | None = None

    @classmethod
    def parsed(cls, text: str, key: str = "") -> Self:
        """Parse `0:6`, `6` or `arm..wrist`, which are ranges of the field `key`, or `FIELD` or `FIELD[0:6]`."""
        match = _PLACE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a range of a field", hint="write it like 0:6, or observation.state[0:6]")
        field, within = match["key"], match["range"]
        if within is None and key and (_RANGE.fullmatch(field) or ".." in field):
            field, within = key, field
        if not (field or key):
            raise UsageError(f"{text!r} names no field", hint="write it like observation.state[0:6]")
        field = field or key
        if within is None:
            return cls(field)
        if (found := _RANGE.fullmatch(within)) is None:
            first, _, last = within.partition("..")
            return cls(field, names=(first, last or first))
        low, high, single = found.groups()
        start, stop = (int(single), int(single) + 1) if single else (int(low or 0), int(high) if high else None)
        if stop is not None and stop <= start:
            raise UsageError(f"{text!r} is an empty range: A:B runs from A up to, but not including, B")
        return cls(field, start, stop)

    def resolved(self, width: int, names: Sequence[str] = ()) -> Place:
        """Return the range with numbers for both ends, in a field of `width` numbers; UsageError if it does not fit."""
        start, stop = self.start, width if self.stop is None else self.stop
        if self.names is not None:
            for name in self.names:
                if name not in names:
                    there = f"the names are {', '.join(names)}" if names else "the dataset does not name them"
                    raise UsageError(f"no number of {self.key} is called {name!r}{did_you_mean(name, names)}: {there}")
            start, stop = names.index(self.names[0]), names.index(self.names[1]) + 1
        if not start < stop <= width:
            raise UsageError(f"{replace(self, names=None)} goes beyond the {width} numbers of {self.key}")
        return Place(self.key, start, stop)

    def __str__(self) -> str:
        if self.names is not None:
            return f"{self.key}[{'..'.join(self.names)}]"
        return f"{self.key}[{self.start}:{'' if self.stop is None else self.stop}]"

    @property
    def width(self) -> int:
        """The number of numbers in a resolved range."""
        assert self.stop is not None
        return self.stop - self.start

    def of(self, rows: Array) -> Array:
        """Return these numbers of rows of the field."""
        return rows[..., self.start : self.stop].astype(np.float64)


@dataclass(frozen=True, slots=True)
class Group:
    """A group: some numbers of an action, what they mean, and what they are converted to.

    Attributes:
        place: the numbers of the group.
        kind: numbers, rotation, pose or gripper.
        given, made: the representation of a rotation before and after, or the values of an open and a closed gripper
            (`OPEN:CLOSED`); None changes nothing.
        was, becomes: what the values are relative to before and after, one of `FORMS`.
        state: the numbers of the state that they are relative to.
        state_given: the representation of the rotation in the state; None if it is `given`.
        frame: body or world, see `Value.seen_from`.
        binary: whether a gripper is set to one of its two ends: the nearer one, or, with "next", the end that it
            reaches next (within 5 %).
    """

    place: Place
    kind: str = "numbers"
    given: str | None = None
    made: str | None = None
    was: str = "absolute"
    becomes: str = "absolute"
    state: Place | None = None
    state_given: str | None = None
    frame: str = "body"
    binary: bool | str = False

    @classmethod
    def parsed(cls, text: str, key: str = "action") -> Self:
        """Parse the text of a group; UsageError for an unknown or contradictory description."""
        place, sign, rest = text.partition("=")
        kind, *options = (part.strip() for part in rest.split(","))
        if not sign or kind not in _KINDS:
            raise UsageError(
                f"--action-space {text!r}: {kind!r} is not a kind of group{did_you_mean(kind, _KINDS)}",
                hint="write it like 0:6=pose,from=euler-xyz,to=6d-rows; kinds are numbers, rotation, pose, gripper",
            )
        found: dict[str, Any] = {"place": Place.parsed(place, key), "kind": kind}
        for option in options:
            name, _, value = (part.strip() for part in option.partition("="))
            if name not in _NAMES:
                raise UsageError(
                    f"--action-space {text!r} has an unknown option {name!r}{did_you_mean(name, _NAMES)}",
                    hint=f"options are {', '.join(_NAMES)}",
                )
            if not value if name != "binary" else value not in ("", "next"):
                raise UsageError(
                    f"--action-space {text!r}: {option!r} is not understood",
                    hint="write binary, binary=next, or from=0:1",
                )
            found[_NAMES[name]] = Place.parsed(value) if name == "state" else value or True
        try:
            return cls(**found)
        except UsageError as error:
            raise UsageError(f"--action-space {text!r}: {error.message}", hint=error.hint) from None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("was", self.was, FORMS), ("as", self.becomes, FORMS), ("frame", self.frame, _FRAMES),
        ):  # fmt: skip
            if value not in known:
                raise UsageError(f"{name} is {value!r}, expected one of {', '.join(known)}{did_you_mean(value, known)}")
        turns = self.kind in ("rotation", "pose")
        for how in filter(None, (self.given, self.made, self.state_given)):
            if turns:
                rotation(how)
            elif self.kind == "gripper":
                _bounds(how)
            else:
                raise UsageError(f"numbers have no representation {how!r}: from and to are for other kinds")
        if turns and self.given is None:
            raise UsageError(
                f"from is missing: the representation of the {self.kind}", hint="add from=axis-angle, or the like"
            )
        if self.kind == "gripper" and (self.made is None) != (self.given is None):
            raise UsageError("from and to go together: the values of open and closed, before and after")
        if self.binary and (self.kind != "gripper" or self.made is None):
            raise UsageError("binary is for a gripper with from and to")
        if self.kind == "gripper" and self.needs_state:
            raise UsageError("a gripper cannot become relative")
        if self.needs_state and self.state is None:
            hint = "add state=observation.state[0:6], or the like"
            raise UsageError("state is missing: the numbers of the state that actions are relative to", hint=hint)

    @property
    def needs_state(self) -> bool:
        """Whether the conversion changes what the values are relative to."""
        return self.was != self.becomes

    @property
    def text(self) -> str:
        """The text of the group, which `parsed` reads."""
        start = f"{self.place}={self.kind}"
        shown = {name: getattr(self, field) for name, field in _NAMES.items()}
        default = {name: getattr(_DEFAULT, field) for name, field in _NAMES.items()}
        return ",".join([start, *(
            name if value is True else f"{name}={value}" for name, value in shown.items() if value != default[name]
        )])  # fmt: skip

    @property
    def width(self) -> int:
        """The number of numbers after the conversion."""
        if self.made is None or self.kind == "gripper":
            return self.place.width
        return rotation(self.made).width + (3 if self.kind == "pose" else 0)

    def resolved(self, widths: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> Group:
        """Return the group with resolved ranges, given the widths of fields; UsageError if they do not fit."""
        place = self._found(self.place, widths, names)
        state = None if self.state is None else self._found(self.state, widths, names)
        for found, how in ((place, self.given), (state, self.state_given or self.given)):
            if found is None or self.kind == "gripper":
                continue
            if self.kind == "numbers":
                if found.width != place.width:
                    raise UsageError(f"{found} has {found.width} numbers, but {place} has {place.width}")
                continue
            expected = rotation(str(how)).width + (3 if self.kind == "pose" else 0)
            if found.width != expected:
                raise UsageError(f"{found} has {found.width} numbers, but a {self.kind} in {how} has {expected}")
        return replace(self, place=place, state=state)

    def _found(self, place: Place, widths: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> Place:
        if place.key not in widths:
            known = ", ".join(sorted(widths))
            raise UsageError(
                f"there is no field {place.key!r} of one dimension{did_you_mean(place.key, widths)}",
                hint=f"there are {known}",
            )
        return place.resolved(widths[place.key], names.get(place.key, ()))

    def inverted(self, start: int) -> Group:
        """Return the inverse conversion, with the numbers from `start` on; `binary` cannot be undone."""
        place = Place(self.place.key, start, start + self.width)
        return replace(
            self, place=place, given=self.made or self.given, made=self.made and self.given, was=self.becomes,
            becomes=self.was, state_given=self._state_how(), binary=False,
        )  # fmt: skip

    def of_rows(self) -> Group:
        """Return the part of the conversion for rows, in which values relative to a chunk stay absolute."""
        return replace(self, becomes="absolute") if self.becomes in OF_CHUNKS else self

    def in_batches(self, place: Place) -> Group:
        """Return the rest of the conversion, for chunks in batches; the numbers are at `place` in the rows."""
        given = None if self.kind == "gripper" else self.made or self.given
        becomes = self.becomes if self.becomes in OF_CHUNKS else "absolute"
        return replace(
            self, place=place, given=given, made=None, was="absolute", becomes=becomes, binary=False,
            state_given=self._state_how(),
        )  # fmt: skip

    def representation(self) -> Group:
        """Return the change of representation alone, for absolute values."""
        return replace(self, was="absolute", becomes="absolute")

    def _state_how(self) -> str | None:
        return self.state_given or (self.given if self.state is not None and self.kind != "numbers" else None)

    def decoded(self, numbers: Array, how: str | None) -> Value:
        """Decode rows `[n, width]`, whose rotation has the representation `how`."""
        if self.kind == "numbers" or how is None:
            return Value(numbers, None)
        at = 3 if self.kind == "pose" else 0
        return Value(numbers[:, :at], rotation(how).matrix(numbers[:, at:]))

    def flaw(self, numbers: Array, how: str | None) -> Array:
        """Return which rows `[n]` should have a rotation but do not; rows with NaN are not among them."""
        if how is None or self.kind not in ("rotation", "pose"):
            return np.zeros(len(numbers), bool)
        return ~is_rotation(numbers[:, 3 if self.kind == "pose" else 0 :], how)

    def changed(self, rows: Array, runs: Runs, states: States, before: Array | None = None) -> Array:
        """Convert rows `[n, width]` of the group's numbers; see `Layout.changed`.

        `before` has these numbers of the absolute action before each run.
        """
        if self.kind == "gripper":
            return rows if self.made is None else self._gripped(rows, runs)
        if self.made is None and not self.needs_state:
            return rows
        value, how = self.decoded(rows, self.given), self.made or self.given
        if self.needs_state:
            assert self.state is not None
            every, first = states(self.state)
            how_state = self.state_given or self.given
            of_runs = self.decoded(first, how_state)
            references: dict[str, Value | None] = {"chunk-delta": of_runs, "delta": of_runs}
            if "step" in (self.was, self.becomes):
                references["step"] = None if every is None else self.decoded(every, how_state)
            references["relative"] = of_runs.at(runs.spread(np.arange(len(runs.starts))))
            if before is not None:
                references["delta"] = self.decoded(before, self.given)
            value = self._absolute(value, references.get(self.was), runs)
            value = self._relative(value, references.get(self.becomes), runs)
        if value.turn is None or how is None:
            return value.numbers
        turn = rotation(how).numbers(value.turn)
        return np.concatenate([value.numbers, runs.continuous(turn) if how.startswith("quat") else turn], -1)

    def _absolute(self, value: Value, reference: Value | None, runs: Runs) -> Value:
        if self.was == "absolute":
            return value
        if self.was in _DELTAS:
            return _accumulated(value, _there(reference), runs, self.frame)
        return value.placed_at(_there(reference), self.frame)

    def _relative(self, value: Value, reference: Value | None, runs: Runs) -> Value:
        if self.becomes == "absolute":
            return value
        if self.becomes in _DELTAS:
            before = value.at(np.arange(-1, len(value.numbers) - 1))
            before.put(runs.starts, _there(reference))
            return value.seen_from(before, self.frame)
        return value.seen_from(_there(reference), self.frame)

    def _gripped(self, rows: Array, runs: Runs) -> Array:
        (open_now, closed_now), (open_then, closed_then) = _bounds(str(self.given)), _bounds(str(self.made))
        share = (rows - open_now) / (closed_now - open_now)
        if self.binary == "next":
            # A moving gripper counts as where it arrives, as Octo and OpenVLA prepare Open X-Embodiment.
            arrived = (share < _CLEAR) | (share > 1 - _CLEAR)
            places = np.where(arrived, np.arange(len(rows))[:, None], len(rows))
            following = np.minimum.accumulate(places[::-1], 0)[::-1]
            known = following < runs.spread(runs.starts + runs.lengths)[:, None]
            later = np.take_along_axis(share, np.where(known, following, 0), 0) if len(rows) else share
            share = np.where(known & ~np.isnan(share), later, share)
        if self.binary:
            share = np.where(np.isnan(share), share, share >= 0.5)
        return open_then + share * (closed_then - open_then)


def _there(reference: Value | None) -> Value:
    if reference is None:
        raise UsageError("actions relative to the state of their own step need a state for each step of a chunk")
    return reference


_CLEAR = 0.05


def _bounds(text: str) -> tuple[float, float]:
    """Parse `OPEN:CLOSED`."""
    try:
        left, right = (float(part) for part in text.split(":"))
    except ValueError:
        left = right = math.nan
    if not (math.isfinite(left) and math.isfinite(right) and left != right):
        raise UsageError(f"a gripper is {text!r}, expected OPEN:CLOSED, two numbers like 0:1 or 1:-1")
    return left, right


_NAMES = {
    "from": "given", "to": "made", "was": "was", "as": "becomes", "state": "state", "state-from": "state_given",
    "frame": "frame", "binary": "binary",
}  # fmt: skip
"""The attribute for each option in the text of a group."""
_DEFAULT = Group(Place("action"))


class Layout(NamedTuple):
    """All groups of a field, in the order of their ranges; numbers between them stay as they are."""

    key: str
    width: int
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, key: str, texts: Iterable[str], widths: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> Self:
        """Parse the groups of a field, given the number of numbers of each field; UsageError if they do not fit."""
        groups = [Group.parsed(text, key).resolved(widths, names) for text in texts]
        groups.sort(key=lambda group: group.place.start)
        for before, after in itertools.pairwise(groups):
            if after.place.start < int(before.place.stop or 0):
                raise UsageError(f"{before.place} and {after.place} overlap, expected disjoint groups")
        return cls(key, widths[key], tuple(groups))

    def parts(self) -> list[Group | slice]:
        """Return the groups, and the ranges between them."""
        found: list[Group | slice] = []
        at = 0
        for group in self.groups:
            found += [slice(at, group.place.start)] if at < group.place.start else []
            found.append(group)
            at = int(group.place.stop or 0)
        return found + ([slice(at, self.width)] if at < self.width else [])

    @property
    def made(self) -> int:
        """The number of numbers of the field after the conversion."""
        return sum(part.stop - part.start if isinstance(part, slice) else part.width for part in self.parts())

    def with_groups(self, change: Callable[[Group], Group]) -> Layout:
        """Return the layout with each group changed."""
        return self._replace(groups=tuple(map(change, self.groups)))

    def inverted(self) -> Layout:
        """Return the inverse conversion."""
        at, groups = 0, []
        for part in self.parts():
            if isinstance(part, slice):
                at += part.stop - part.start
            else:
                groups.append(part.inverted(at))
                at += part.width
        return Layout(self.key, self.made, tuple(groups))

    def moved(self, place: Place) -> Place | None:
        """Return the new range of numbers that are in no group; None if any of them is in a group."""
        start, stop, shift = place.start, int(place.stop or 0), 0
        for group in self.groups:
            if int(group.place.stop or 0) <= start:
                shift += group.width - group.place.width
            elif group.place.start < stop:
                return None
        return replace(place, start=start + shift, stop=stop + shift)

    def states(self) -> tuple[Place, ...]:
        """Return the ranges of the states that the conversion needs."""
        return tuple(dict.fromkeys(group.state for group in self.groups if group.needs_state and group.state))

    def changed(self, rows: Array, runs: Runs, states: States, before: Array | None = None) -> Array:
        """Convert rows `[n, width]` in some runs to float64 `[n, made]`.

        `states(place)` returns the states of all rows, or None if they are not known, and the states of the first row
        of each run. `before` has the absolute action before each run, in the representation of the rows.
        """
        found = []
        for part in self.parts():
            if isinstance(part, slice):
                found.append(rows[:, part].astype(np.float64))
                continue
            of_group = None if before is None else part.place.of(before)
            with np.errstate(divide="ignore", invalid="ignore"):  # rows that are not rotations become NaN
                found.append(part.changed(part.place.of(rows), runs, states, of_group))
        return np.concatenate(found, -1)


# The operation of `preprocess`, and the fields after the operations before it


@dataclass(frozen=True)
class ChangeActionSpace(RowOperation):
    """Converts the action space group by group, for example from absolute to relative poses, from Euler angles to six
    numbers, or from a gripper of 0 and 1 to one of -1 and 1.

    `groups` are texts such as `0:6=pose,from=euler-xyz,to=6d-rows,as=delta,state=observation.state[0:6]`. Numbers in no
    group stay as they are. The result is float64 if the action is, else float32. Actions that become relative to the
    start of a chunk (`as=relative`, `as=chunk-delta`) stay absolute in the rows, because a row may be in many chunks:
    the transform of `rbtool.action_space` makes them relative in batches.

    If an earlier operation dropped rows, the row after the gap counts as the first one of an episode.
    """

    name: ClassVar[str] = "action-space"
    whole_episodes: ClassVar[bool] = True
    groups: tuple[str, ...]
    key: str = "action"

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        by_key: dict[str, list[str]] = {}
        for text in texts_of(value, cls.name):
            by_key.setdefault(Group.parsed(text).place.key, []).append(text)
        return [cls(tuple(texts), key) for key, texts in by_key.items()]

    def __post_init__(self) -> None:
        if not self.groups:
            raise UsageError(
                "action-space has no groups, expected at least one, like 0:6=pose,from=euler-xyz,to=6d-rows"
            )
        for text in self.groups:
            if (found := Group.parsed(text, self.key).place.key) != self.key:
                raise UsageError(f"action-space changes {self.key}, but {text!r} is in {found}: use two operations")

    @property
    def rescales(self) -> str:
        return self.key

    @property
    def notes(self) -> Iterable[str]:
        groups = [Group.parsed(text, self.key) for text in self.groups]
        if chunks := [str(group.place) for group in groups if group.becomes in OF_CHUNKS]:
            yield (
                f"action-space: {', '.join(chunks)} stays absolute in the rows; the transform of "
                "rbtool.action_space(DATASET) makes it relative to the start of each chunk in batches"
            )
        if all(group.place.stop is not None for group in groups):
            rows = Layout(self.key, max(int(group.place.stop or 0) for group in groups), tuple(groups))
            undone = rows.with_groups(Group.of_rows).inverted().groups
            yield f"action-space: undone by {' '.join(f'--action-space {group.text}' for group in undone)}"

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> ChangeActionSpace:
        layout = self.layout(fields_after(reader, before), names_of_numbers(reader, before))
        return replace(self, groups=tuple(group.text for group in layout.groups))

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        found = {name: data for name, data in documents.items() if not name.endswith(_OF_OLD_ACTIONS)}
        about = json.loads(found.get(_INFO, b"{}"))
        feature = about.get("features", {}).get(self.key) if isinstance(about, dict) else None
        turned = any(Group.parsed(text, self.key).kind in ("rotation", "pose") for text in self.groups)
        if turned and isinstance(feature, dict) and feature.get("names"):
            feature["names"] = None  # such as roll, pitch and yaw
            found[_INFO] = dump_json(about).encode()
        return found

    def layout(self, fields: Iterable[Field], names: Mapping[str, Sequence[str]]) -> Layout:
        """Return the groups with resolved ranges; UsageError if they do not fit the fields."""
        widths = {
            field.name: field.shape[0]
            for field in fields
            if len(field.shape) == 1 and field.key[0] != NEXT and field.role != "text" and "complex" not in field.dtype
        }
        if self.key not in widths:
            raise UsageError(
                f"action-space changes {self.key!r}, which is not a field with a vector of numbers in each row",
                hint=f"there are {', '.join(sorted(widths))}" if widths else "",
            )
        return Layout.of(self.key, self.groups, widths, names)

    def plan(self, fields: Fields) -> BoundOperation:
        layout = self.layout(fields, {})
        if any(group.was in OF_CHUNKS for group in layout.groups):
            raise UsageError(f"rows of {self.key} are not in chunks, expected was=absolute, delta or step")
        key: Key = tuple(self.key.split("."))
        if in_next(key) in fields:
            raise UsageError(
                f"action-space changes {self.key}, but next.{self.key} would stay unchanged",
                hint=f"leave it out first: --exclude next.{self.key}",
            )
        return _BoundActionSpace(fields, layout.with_groups(Group.of_rows), key)


class _BoundActionSpace(BoundOperation):
    def __init__(self, before: Fields, layout: Layout, key: Key) -> None:
        old = before[key]
        dtype = "float64" if old.dtype == "float64" else "float32"
        shape = (layout.made,)
        super().__init__(before.replaced({key: replace(old, dtype=dtype, shape=shape)}))
        self._key, self._layout = key, layout
        self._states = frozenset(tuple(place.key.split(".")) for place in layout.states())

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        return wanted | self._states if self._key in wanted else wanted

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        found: dict[Key, Any] = {key: batch.columns[key] for key in wanted}
        if self._key in wanted:
            rows, runs = batch.columns[self._key].numbers, Runs.of(batch.pieces.rows)
            self._require_rotations(batch, rows)

            def states(place: Place) -> tuple[Array, Array]:
                every = place.of(batch.columns[tuple(place.key.split("."))].numbers)
                return every, every[runs.starts]

            numbers = self._layout.changed(rows, runs, states)
            found[self._key] = numbers if self.after[self._key].dtype == "float64" else numbers.astype(np.float32)
        return found

    def _require_rotations(self, batch: LazyBatch, rows: Array) -> None:
        """Refuse rows that should have a rotation but do not, because the range or the representation is wrong."""
        for group in self._layout.groups:
            checks = [(group.place, rows, group.given)]
            if group.needs_state and group.state is not None:
                stored = batch.columns[tuple(group.state.key.split("."))].numbers
                checks.append((group.state, stored, group.state_given or group.given))
            for place, values, how in checks:
                if (bad := group.flaw(place.of(values), how)).any():
                    numbers = ", ".join(f"{number:.4g}" for number in place.of(values)[int(bad.argmax())])
                    raise ResultRefused(f"{place} is not a {group.kind} in {how} everywhere: {numbers}")


_INFO = "meta/info.json"
_OF_OLD_ACTIONS = ("stats.json", "stats.jsonl", "modality.json")
"""Suffixes of metadata files that describe the old actions: LeRobot's statistics, and GR00T's groups."""


def fields_after(reader: StepReader, before: Iterable[Operation]) -> Fields:
    """Return the fields of a dataset after some operations, up to one that does not fit and fails when it is bound."""
    fields = Fields.of(reader.fields, reader.path)
    with suppress(UsageError):
        for one in before:
            fields = one.bind(fields).after if isinstance(one, RowOperation) else fields
    return fields


def rotations_after(reader: StepReader, before: Iterable[Operation]) -> dict[str, list[tuple[Place, str]]]:
    """Return the ranges of fields that hold rotations, with their representations, by field.

    They are known from all `--action-space` in the provenance of the dataset, and from the operations `before`.
    """
    past = [one for made in reader.manifest.provenance for one in made.arguments.get("operations") or ()]
    found: dict[str, list[tuple[Place, str]]] = {}
    for document in [*past, *(one.describe() for one in before)]:
        if document["name"] == Rename.name:
            old, new = document["key"], document["to"]
            for key in [key for key in found if f"{key}.".startswith(f"{old}.")]:
                name = new + key[len(old) :]
                found[name] = [(replace(place, key=name), how) for place, how in found.pop(key)]
        if document["name"] == ChangeActionSpace.name:
            key = document.get("key", "action")
            groups = sorted((Group.parsed(text, key) for text in document["groups"]), key=lambda one: one.place.start)
            layout = Layout(key, int(groups[-1].place.stop or 0), tuple(groups))
            kept = [(moved, how) for place, how in found.get(key, ()) if (moved := layout.moved(place)) is not None]
            found[key] = kept + [
                (replace(group.place, start=group.place.start + 3 * (group.kind == "pose")), str(group.given))
                for group in layout.inverted().groups
                if group.kind in ("rotation", "pose")
            ]
    widths = {field.name: field.shape[0] for field in fields_after(reader, before) if len(field.shape) == 1}
    return {
        key: [(place, how) for place, how in places if int(place.stop or 0) <= widths.get(key, 0)]
        for key, places in found.items()
    }


def names_of_numbers(reader: StepReader, before: Iterable[Operation] = ()) -> dict[str, list[str]]:
    """Return the names of the numbers of each field in LeRobot's metadata, by the name of the field.

    A field that an operation in `before` has converted has no names.
    """
    try:
        features = json.loads(reader.documents().get(_INFO, b"{}")).get("features", {})
    except (ValueError, AttributeError):
        return {}
    found = {}
    for name, about in features.items() if isinstance(features, dict) else ():
        names = about.get("names") if isinstance(about, dict) else None
        if isinstance(names, dict) and len(names) == 1:  # such as {"motors": [...]}
            names = next(iter(names.values()))
        if isinstance(names, list) and all(isinstance(one, str) for one in names):
            found[name] = names
    for one in before:
        if isinstance(one, ChangeActionSpace):
            found.pop(one.key, None)
    return found
