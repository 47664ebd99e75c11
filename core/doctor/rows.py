"""Rules of behaviour about rows: one pass over all steps measures each episode, then episodes are compared.

The pass keeps a few numbers for each episode and component, such as its range and its largest change in a step.
Afterwards every episode is compared with the median over all episodes, because what is unusual in one dataset is normal
in another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..format.contracts import Array
from ..progress import counted
from ..ted.rules import Rows
from ..ted.schema import (
    ACTION,
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    Field,
    Role,
    as_numbers,
    key_name,
    state_keys,
)
from .rules import BY_ID, Report, Thresholds, of_episodes, robust

_INDEX = ("info", "index")
_RETURN = re.compile(r"(?:.*_)?(?:returns?|rtg|returns?_to_go)")
"""Names of fields that hold returns."""
LAGS = np.arange(-16, 17)
"""The delays, in steps, that are tried between an action and the state that follows it."""
_MOST_WIDE = 512
"""The largest number of components of a field that is compared; pictures have more."""
_MOST_HELD = 1 << 17
"""The largest number of rows of an episode that is measured as a whole; longer ones are measured in parts."""
_POSES, _POSE_WIDTH = 1 << 18, 32
"""The number of rows whose states are kept for comparison with pictures, and the number of their components."""
_AT_ONCE = 1 << 12
"""The approximate number of rows that are measured together, so that they fit into the processor's cache."""
_MOST_ANCHORS, _LEAST_ANCHORS = 1 << 17, 5
"""The number of rows kept to find parts of episodes in others, and how many of them have to be equal."""
_MOST_SUMMED = 1 << 20
"""The number of rows whose rewards and returns are kept for comparison."""
_MOST_PICKED = 1 << 23
"""The number of values kept to find nearly equal episodes."""
_RICH = 64
"""The size of a row in bytes from which equal rows are no coincidence, as they are in worlds with few states."""
_MOST_COPIES = 8
"""The number of copies up to which each gets its own finding."""
_MOST_PLACES = 4
"""The number of components that a finding names."""
KEPT_REST = 3
"""The number of steps of rest that `clean` keeps where it cuts off an idle end."""
_SMOOTHED, _PAUSED = 5, 1.5
"""The number of steps over which speed is averaged to find pauses, and the largest average in a pause, in `slow`."""
_AGREED = 0.9
"""The correlation of actions and states from which no regression is tried."""
_AS_GOOD = 0.1
"""The difference of correlations up to which two of them count as equally good."""


@dataclass
class Signal:
    """All observations, or all actions, joined into one array `[rows, components]`, with the measures of episodes.

    Attributes:
        keys: the key and dtype of each joined field.
        names: the name of each component.
        components: the components of each field, by its name.
        each: by the name of a measure, its arrays `[episodes, components]`, one for each batch of rows.
        samples: some rows of episodes, `[episodes, rows, components]`, from which quantiles are estimated.
        sampled: the number of episodes in `samples`.
        scale: the usual change of each component in a step, in the rows so far.
        spread: the usual range of each component in an episode, in the rows so far.
        bend: the usual change of the change, in the rows so far.
    """

    keys: list[tuple[Any, str]]
    names: list[str]
    components: dict[str, slice]
    each: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    samples: list[Array] = field(default_factory=list)
    sampled: int = 0
    scale: Array = field(default_factory=lambda: np.zeros(0))
    spread: Array = field(default_factory=lambda: np.zeros(0))
    bend: Array = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, fields: Sequence[Field], root: str, named: Mapping[str, Sequence[str]]) -> Signal:
        """Join the floating-point fields whose keys begin with `root`; `named` has the names of components by field."""
        found = cls([], [], {})
        for one in fields:
            width = int(np.prod(one.shape, dtype=np.int64))
            if one.key[0] != root or one.numpy.kind != "f" or not 0 < width <= _MOST_WIDE:
                continue
            start = len(found.names)
            found.keys.append((one.key, one.dtype))
            parts = named.get(one.name, ())
            found.names += list(parts) if len(parts) == width else [f"{one.name}[{at}]" for at in range(width)]
            found.components[one.name] = slice(start, start + width)
        return found

    def take(self, rows: Rows) -> Array:
        """Return the values of rows, float32 `[rows, components]`."""
        parts = [as_numbers(rows.columns[key], dtype).reshape(len(rows), -1) for key, dtype in self.keys]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return joined.astype(np.float32, copy=False)

    def array(self, name: str) -> Array:
        """Return a measure of all episodes, `[episodes, components]`."""
        return np.concatenate(self.each[name])

    @property
    def span(self) -> Array:
        """The range of every component in every episode."""
        return self.array("high") - self.array("low")

    def places(self, which: Any) -> list[str]:
        """Return the field and index of the first components that a mask selects, such as `observation.state[2]`."""
        found = []
        for at in np.flatnonzero(which)[:_MOST_PLACES].tolist():
            name, place = next(
                (name, place) for name, place in self.components.items() if place.start <= at < place.stop
            )
            found.append(name if place.stop - place.start == 1 else f"{name}[{at - place.start}]")
        return found

    def called(self, which: Any) -> str:
        """Return the names of the components that a mask selects, as text: three of them, and how many more."""
        found = [self.names[at] for at in np.flatnonzero(which)]
        return ", ".join(found[:3]) + (f" and {len(found) - 3:,} more" if len(found) > 3 else "")

    def is_gripper(self) -> Array:
        """Whether each component is named like a gripper: grippers rest at their limits and move abruptly."""
        words = ("grip", "finger", "hand", "claw", "jaw", "suction")
        return np.array([any(word in name.lower() for word in words) for name in self.names])


class _Batch:
    """A block of rows that consists of whole episodes, and reductions over each of the episodes.

    Arrays have rows as their last dimension, `[…, rows]`, so that the values of a component are contiguous; reductions
    return `[…, episodes]`.

        rows      0 1 2 3 4 5 6
        first     T . . T . . .
        starts    0     3
        lengths   3     4
        lasts     2     6
    """

    def __init__(self, first: Array) -> None:
        self.starts = np.flatnonzero(first)
        self.rows = len(first)
        self.lengths = np.diff(np.append(self.starts, self.rows))
        self.lasts = self.starts + self.lengths - 1

    def sum(self, values: Array, dtype: Any = None) -> Array:
        return np.add.reduceat(values, self.starts, axis=-1, dtype=dtype)

    def mean(self, values: Array) -> Array:
        return np.asarray(self.sum(values) / self.lengths)

    def largest(self, values: Array) -> Array:
        return np.maximum.reduceat(values, self.starts, axis=-1)

    def least(self, values: Array) -> Array:
        return np.minimum.reduceat(values, self.starts, axis=-1)

    def spread(self, values: Array) -> Array:
        """Repeat one value for each episode over all of its rows."""
        return np.repeat(values, self.lengths, axis=-1)

    def centred(self, values: Array) -> Array:
        """Subtract the mean of each episode."""
        return np.asarray(values - self.spread(self.mean(values).astype(np.float32)))

    def changes(self, values: Array) -> Array:
        """Return the change over the two steps around each row; 0 at the ends of episodes."""
        found = np.zeros_like(values)
        found[..., 1:-1] = values[..., 2:] - values[..., :-2]
        found[..., self.starts] = 0
        found[..., self.lasts] = 0
        return found

    def smooth(self, values: Array, width: int) -> Array:
        """Return the mean of the `width` rows around each row; fewer where the episode begins or ends."""
        half = width // 2
        place = np.arange(self.rows) + half * self.spread(np.arange(len(self.starts)))  # with a gap between episodes
        padded = np.zeros((2, self.rows + half * len(self.starts)))
        padded[0, place], padded[1, place] = values, 1
        total, count = (np.convolve(one, np.ones(width))[half:][place] for one in padded)
        return np.asarray(total / count)

    def share(self, marked: Array, of: Array | None = None) -> Array:
        """Return the share of marked rows in each episode, or only among its rows that the mask `of` selects."""
        total = self.lengths if of is None else np.maximum(self.sum(of.astype(np.int32)), 1)
        return np.asarray(np.add.reduceat(marked.view(np.uint8), self.starts, axis=-1, dtype=np.int32) / total)

    def leading(self, marked: Array) -> tuple[Array, Array]:
        """Return the number of rows before the first marked row of each episode, and after the last one."""
        where = np.flatnonzero(marked)
        stops = self.starts + self.lengths
        after = np.append(where, self.rows)[np.searchsorted(where, self.starts)]
        before = np.append(-1, where)[np.searchsorted(where, stops)]
        return np.minimum(after, stops) - self.starts, stops - 1 - np.maximum(before, self.starts - 1)

    def longest_run(self, marked: Array) -> tuple[Array, Array]:
        """Return the length and the first row of the longest run of marked rows in each episode."""
        before, after = np.append(False, marked[:-1]), np.append(marked[1:], False)
        before[self.starts] = after[self.lasts] = False
        begin, end = np.flatnonzero(marked & ~before), np.flatnonzero(marked & ~after) + 1
        length, place = np.zeros(len(self.starts), np.int64), self.starts.copy()
        which = np.searchsorted(self.starts, begin, side="right") - 1
        order = np.argsort(end - begin, kind="stable")  # of several runs of an episode, the last one assigned stays
        length[which[order]], place[which[order]] = (end - begin)[order], begin[order]
        return length, place


class RowRules:
    """Measures all rows and reports what is unusual about their episodes.

    Args:
        fields: the fields of the rows.
        limits: the thresholds.
        rate: the steps per second that the metadata state.
        names: the names of components in the metadata, by field.
    """

    def __init__(
        self, fields: Sequence[Field], limits: Thresholds, *, rate: float | None, names: Mapping[str, Sequence[str]]
    ) -> None:
        self._limits = limits
        self._rate = rate
        self.states = Signal.of(fields, "observation", names)
        self.actions = Signal.of(fields, ACTION[0], names)
        self._fields = {one.key: one for one in fields}
        known = {*self.states.components, *self.actions.components}
        self._summed = [
            one for one in fields
            if one.name in names.keys() - known and one.numpy.kind in "fiu" and np.prod(one.shape) <= _MOST_WIDE
        ]  # fmt: skip
        named = [one for one in fields if _RETURN.fullmatch(str(one.key[-1])) and np.prod(one.shape) == 1]
        self._stored = [one.key for one in named if one.numpy.kind == "f"][:1]
        self._others: dict[str, tuple[int, Array, Array, Array, Array]] = {}
        self.numbers: list[Array] = []
        self.lengths: list[Array] = []
        self.places: list[Array] = []
        self._each: dict[str, list[Array]] = defaultdict(list)
        self._held: list[tuple[dict[str, Array], Array, Array, int]] = []
        in_signals = {key for _, signal in self._signals() for key, dtype in signal.keys if dtype != "float64"}
        states = state_keys(fields)
        after = {(NEXT, *key) for key in states}
        self._beside = [
            _Beside.of(one, is_last=one.key in after) for one in fields
            if one.role != "id" and one.key != ("timestamp",) and one.key not in in_signals
        ]  # fmt: skip
        self._recognised = bool(self.states.names or self.actions.names) or any(
            one.field.row_bytes >= _RICH for one in self._beside
        )
        self._digests: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._anchors: list[Array] = []
        self._anchored, self._apart = 0, 1
        self._picked = self._fitted = self._summing = 0
        self._equal = True
        self.poses: dict[int, Array] = {}
        self._moves: dict[int, Array] = {}
        self._posed = 0
        self._projection = np.random.default_rng(0).normal(size=(_MOST_WIDE * 8, 2)).astype(np.float32)

    # The pass over rows ----------------------------------------------------------------------------------

    def see(self, rows: Rows) -> None:
        """Measure the episodes that end in these rows; the rows of an unfinished episode are kept until it ends."""
        if not len(rows):
            return
        self._sum(rows)
        found = self._columns(rows)
        stop = int(np.flatnonzero(rows.last)[-1]) + 1 if rows.last.any() else 0
        held = sum(len(first) for _, first, _, _ in self._held)
        if stop:
            self._hold(found, rows, 0, stop)
            self._flush()
        if stop < len(rows):
            self._hold(found, rows, stop, len(rows))
            if held + len(rows) - stop > _MOST_HELD:
                self._flush()

    def _sum(self, rows: Rows) -> None:
        """Update the statistics of fields that are neither observations nor actions, such as rewards."""
        for one in self._summed:
            x = as_numbers(rows.columns[one.key], one.dtype).reshape(len(rows), -1).astype(np.float64)
            x = x[np.isfinite(x).all(1)]
            if not len(x):
                continue
            count, total, square, low, high = self._others.get(one.name, (0, 0.0, 0.0, np.inf, -np.inf))
            self._others[one.name] = (
                count + len(x), total + x.sum(0), square + (x * x).sum(0),
                np.minimum(low, x.min(0)), np.maximum(high, x.max(0)),
            )  # fmt: skip

    def _columns(self, rows: Rows) -> dict[str, Array]:
        found = {name: one.take(rows) for name, one in self._signals()}
        for name, key in (
            ("time", ("timestamp",)), ("reward", NEXT_REWARD), ("success", (NEXT, "success")), ("index", _INDEX),
            *(("stored", key) for key in self._stored),
        ):  # fmt: skip
            if key in rows.columns and rows.columns[key].size == len(rows):
                found[name] = as_numbers(rows.columns[key], self._fields[key].dtype).reshape(-1).astype(np.float64)
        if self._recognised:
            found["beside"] = np.zeros((len(rows), 2), np.uint64)  # codes of pictures, and of all other fields
            for one in self._beside:
                one.add(rows, found["beside"])
        if NEXT_TERMINATED in rows.columns:
            found["terminated"] = np.asarray(rows.columns[NEXT_TERMINATED].reshape(len(rows), -1).any(1))
        return found

    def _signals(self) -> Iterator[tuple[str, Signal]]:
        for name, one in (("state", self.states), ("action", self.actions)):
            if one.names:
                yield name, one

    def _hold(self, found: dict[str, Array], rows: Rows, start: int, stop: int) -> None:
        first = rows.first[start:stop].copy()
        part = {name: array[start:stop] for name, array in found.items()}
        self._held.append((part, first, rows.episode[start:stop].reshape(-1), rows.start + start))

    def finish(self) -> None:
        """Measure the rows that are still kept, as an episode that has ended."""
        self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        parts, self._held = self._held, []
        columns = {name: np.concatenate([part[0][name] for part in parts]) for name in parts[0][0]}
        if len(parts) == 1:
            columns = parts[0][0]
        first = np.concatenate([part[1] for part in parts])
        first[0] = True
        episode = np.concatenate([part[2] for part in parts])
        starts = np.flatnonzero(first)
        cuts = starts[np.append(True, np.diff(starts // _AT_ONCE) > 0)]
        for low, high in pairwise([*cuts.tolist(), len(first)]):
            part = {name: array[low:high] for name, array in columns.items()}
            self._measure_episodes(part, _Batch(first[low:high]), episode[low:high], parts[0][3] + low)

    def _measure_episodes(self, columns: dict[str, Array], batch: _Batch, episode: Array, start: int) -> None:
        """Measure whole episodes, the first of which begins at step `start` of the dataset."""
        self.numbers.append(episode[batch.starts].astype(np.int64))
        self.lengths.append(batch.lengths)
        self.places.append(batch.starts + start)
        moving = None
        for name, signal in self._signals():
            columns[name] = _finite(np.ascontiguousarray(columns[name].T))
            moving = self._measure(signal, columns[name], batch, moving)
        if self.states.names and self.actions.names:
            self._compare(columns["state"], columns["action"], batch)
        if self._recognised:
            self._look_for_copies([columns[name] for name, _ in self._signals()], columns["beside"].T, batch)
        if "time" in columns:
            self._measure_time(columns["time"], batch)
        if "reward" in columns:
            self._measure_rewards(columns, batch)
        if "index" in columns:
            ahead = columns["index"] - np.arange(batch.rows)
            self._keep(
                index=columns["index"][batch.starts].astype(np.int64),
                index_jumps=batch.largest(ahead) - batch.least(ahead),
            )
        for name in ("terminated", "success"):
            if name in columns:
                self._keep(**{name: columns[name][batch.lasts] > 0})
        self._keep_poses(columns, batch)

    def _measure(self, signal: Signal, x: Array, batch: _Batch, before: Array | None) -> Array:
        """Measure the components `x`, `[components, rows]`, of a signal in each episode.

        `before` marks the rows in which the signals measured before this one move. Returns the rows that move in any
        signal so far. The measures of a component in an episode are:

            low, high, mean, variance    of its values
            speed, leap                  the mean and the largest change in a step
            rough, glitch                the mean change of the change, and half of the largest, the height of a spike
            stuck                        the share of the rows with motion in which it stands still
            limits                       the share of the rows with motion in which it equals low or high
            resting                      the share of the other rows with motion in which it is slow
            turns, alternating           the share of rows with a large reversal, and the longest run of such rows
            peak                         the step of the largest spike of all components
        """
        limits = self._limits
        low, high = batch.least(x), batch.largest(x)
        step = np.empty_like(x)
        step[:, 0] = 0
        np.subtract(x[:, 1:], x[:, :-1], out=step[:, 1:])
        step[:, batch.starts] = 0
        turn = np.empty_like(x)
        turn[:, -1] = 0
        np.subtract(step[:, 1:], step[:, :-1], out=turn[:, :-1])
        turn[:, batch.starts] = 0
        turn[:, batch.lasts] = 0
        size = np.abs(step)
        np.abs(turn, out=turn)
        speed = batch.sum(size) / np.maximum(batch.lengths - 1, 1)
        signal.scale = _running(signal.scale, speed.mean(1))
        signal.spread = _running(signal.spread, np.median(high - low, axis=1))
        weight = _inverse(signal.scale)
        pace = (weight / max(1, int((weight > 0).sum()))) @ size
        moves = pace > limits.slow
        others = moves if before is None else before
        still = size <= (limits.still * signal.spread.astype(np.float32))[:, None]
        still[:, batch.starts] = False
        on_limit: Array = x == batch.spread(low)
        on_limit |= x == batch.spread(high)
        inside = others & ~on_limit
        resting = batch.sum(inside & (size < (limits.slow * signal.scale.astype(np.float32))[:, None]), np.int32)
        on_limit &= moves
        far = size > (limits.turn * signal.spread.astype(np.float32))[:, None]
        turns = np.zeros(x.shape, bool)
        np.logical_and(far[:, 1:], far[:, :-1], out=turns[:, 1:])
        turns[:, 1:] &= (step[:, 1:] < 0) != (step[:, :-1] < 0)
        alternating = np.zeros((len(x), len(batch.starts)), np.int32)
        turned = batch.share(turns)
        for one in np.flatnonzero((turned * batch.lengths).max(1) > limits.alternating):
            alternating[one] = batch.longest_run(turns[one])[0]
        mean, middle = batch.mean(x), x.mean(1, keepdims=True)
        near = x - middle
        squares = np.square(near, out=near)
        bend = turn.mean(1)
        signal.bend = _running(signal.bend, bend)
        for name, values in (
            ("low", low), ("high", high), ("mean", mean), ("speed", speed), ("leap", batch.largest(size)),
            ("glitch", batch.largest(turn) / 2), ("rough", batch.mean(turn)),
            ("variance", np.maximum(batch.mean(squares) - (mean - middle) ** 2, 0)),
            ("stuck", batch.share(still & moves, moves)), ("limits", batch.share(on_limit, moves)),
            ("resting", resting / np.maximum(batch.sum(inside, np.int32), 1)),
            ("turns", turned), ("alternating", alternating),
        ):  # fmt: skip
            signal.each[name].append(values.T.astype(np.float32))
        wild = (1 / np.maximum(signal.bend, 1e-6 * signal.spread + 1e-12)).astype(np.float32) @ turn
        signal.each["peak"].append(_first_of(wild == batch.spread(batch.largest(wild)), batch)[:, None])
        self._sample(signal, x, batch)
        if signal is self.states:
            self._frozen: Array = np.asarray(still.all(0))
            self._pace = pace
        return others if before is not None and signal is self.states else moves | others

    def _sample(self, signal: Signal, x: Array, batch: _Batch) -> None:
        """Keep evenly spread rows of the episodes, from which quantiles are estimated."""
        room = min(_MOST_SAMPLED, _MOST_SAMPLES // (_SAMPLED * len(signal.names))) - signal.sampled
        if room > 0:
            signal.sampled += len(batch.starts)
            starts, lengths = batch.starts[:room, None], batch.lengths[:room, None]
            picks = starts + (np.linspace(0, 1, _SAMPLED) * (lengths - 1)).round().astype(np.int64)
            signal.samples.append(np.moveaxis(x[:, picks], 0, -1))  # [episodes, samples, components]

    def _compare(self, state: Array, action: Array, batch: _Batch) -> None:
        """Measure how states follow actions: rest and pauses, the lag between them, and correlations by component."""
        limits = self._limits
        still = self._frozen
        step = np.zeros_like(action)
        np.subtract(action[:, 1:], action[:, :-1], out=step[:, 1:])
        step[:, batch.starts] = 0
        held = still & ~step.any(0)
        held[batch.starts] = False
        weight = _inverse(self.actions.scale)
        pace = (weight / max(1, int((weight > 0).sum()))) @ np.abs(step, out=step)
        repeated, repeated_at = batch.longest_run(held)
        self._keep(repeated=repeated, repeated_at=repeated_at - batch.starts)
        run, place = batch.longest_run(still & (pace > limits.slow))
        self._keep(frozen=run, frozen_at=place - batch.starts)
        lead, tail = batch.leading((pace > limits.slow) | (self._pace > limits.slow))
        self._keep(lead=lead, tail=tail)
        within = np.arange(batch.rows) - batch.spread(batch.starts)
        # Noise in a single step does not end a pause: paces are averaged over neighbouring steps of the same episode.
        rests = np.maximum(*(batch.smooth(one, _SMOOTHED) for one in (pace, self._pace))) <= _PAUSED * limits.slow
        rests &= (within >= batch.spread(lead)) & (within < batch.spread(batch.lengths - tail))
        run, place = batch.longest_run(rests)
        self._keep(pause=run, pause_at=place - batch.starts)
        by_state, by_action = _inverse(self.states.spread), _inverse(self.actions.spread)
        if len(state) == len(action):  # actions are positions that states follow, or velocities of the states
            weights = self._projection[: len(by_state)].T
            one, other = (weights * by_action) @ action, batch.changes((weights * by_state) @ state)
            self._keep(
                lags=lag_correlations(batch.changes(one), other, batch),
                lags_of_speeds=lag_correlations(one, other, batch),
                agree=_correlation(state, action, batch).T,
            )
            self._equal &= bool((state == action).all())
            return
        one, other = by_action @ np.abs(action), by_state @ np.abs(batch.changes(state))
        self._keep(lags=lag_correlations(one[None], other[None], batch))

    def _look_for_copies(self, signals: list[Array], beside: Array, batch: _Batch) -> None:
        """Keep what finds copies: digests of each episode, a few of its rows, and anchors.

        Each row gets a 64-bit code, a hash of its bytes. The digest of an episode combines the codes of its rows in
        order: episodes with equal digests of states and actions are copies, or the same motion with other pictures,
        rewards or further fields, which have digests of their own.
        """
        numbers = self.numbers[-1]
        pictures, rest = (np.ascontiguousarray(one) for one in beside)
        self._keep(beside=np.column_stack((_digests(pictures, batch), _digests(rest, batch))))
        joined = pictures + rest
        self._keep(beside_varies=batch.largest(joined) > batch.least(joined))
        code = np.zeros(batch.rows, np.uint64)
        for at, one in enumerate(signals):
            factors = np.random.default_rng(at).integers(1, 1 << 32, (2, len(one)), np.uint32) | np.uint32(1)
            low, high = (np.einsum("cr,c->r", one.view(np.uint32), few).astype(np.uint64) for few in factors)
            code = code * np.uint64(0x9E3779B97F4A7C15) + (low | high << np.uint64(32))
        code = _mixed(code if signals else joined)
        digests = _digests(code, batch)
        for at, number, length in zip(digests.tolist(), numbers.tolist(), batch.lengths.tolist(), strict=True):
            if length >= self._limits.least:
                self._digests[at, length].append(number)
        if signals and self._picked < _MOST_PICKED:
            picks = (batch.starts[:, None] + (batch.lengths - 1)[:, None] * np.array([0, 0.3, 0.5, 0.8, 1])).astype(int)
            whole = np.concatenate([one.T[picks].reshape(len(picks), -1) for one in signals], axis=1)
            self._picked += whole.size
            self._keep(picks=whole)
        self._keep_anchors(code, batch, numbers)

    def _keep_anchors(self, code: Array, batch: _Batch, numbers: Array) -> None:
        """Keep the codes of some rows with their episode and step, uint64 `[n, 3]`.

        Rows are chosen by their codes: those divisible by `_apart`. So equal rows of two episodes are both chosen or
        both left out, wherever they are. When too many are kept, `_apart` is doubled.
        """
        at = np.flatnonzero(code % np.uint64(self._apart) == 0)
        which = np.searchsorted(batch.starts, at, side="right") - 1
        at, which = at[batch.lengths[which] >= self._limits.least], which[batch.lengths[which] >= self._limits.least]
        places = (numbers[which], at - batch.starts[which])
        self._anchors.append(np.column_stack((code[at], *(one.astype(np.uint64) for one in places))))
        self._anchored += len(at)
        while self._anchored > _MOST_ANCHORS:
            self._apart *= 2
            anchors = np.concatenate(self._anchors)
            self._anchors = [anchors[anchors[:, 0] % np.uint64(self._apart) == 0]]
            self._anchored = len(self._anchors[0])

    def _contained(self) -> Iterator[tuple[int, int, float]]:
        """Yield pairs of episodes with the share of the first one's rows that the second has in the same order.

        Two rows with equal codes in different episodes are a match. The matches of a part that occurs in both
        episodes have the same difference of steps, so the most frequent difference of a pair counts the shared rows:

            episode 3      a b c d e f         matches of 3 and 7: c, d, e
            episode 7          x c d e y       differences of steps: 1 - 2 = -1 three times
        """
        anchors = np.concatenate(self._anchors) if self._anchors else np.zeros((0, 3), np.uint64)
        anchors = anchors[np.argsort(anchors[:, 0], kind="stable")]
        code, number, place = anchors[:, 0], anchors[:, 1].astype(np.int64), anchors[:, 2].astype(np.int64)
        owner = np.maximum.accumulate(
            np.where(np.append(True, code[1:] != code[:-1])[: len(code)], np.arange(len(code)), 0)
        )
        distinct = number[(np.diff(code, prepend=~code[:1]) != 0) | (np.diff(number, prepend=-1) != 0)]
        counts = dict(zip(*(one.tolist() for one in np.unique(distinct, return_counts=True)), strict=True))
        other = number != number[owner]
        shared = np.column_stack((number[owner], number, place - place[owner]))[other]
        most: dict[tuple[int, int], int] = {}
        for (one, another, _), count in zip(
            *(found.tolist() for found in np.unique(shared, axis=0, return_counts=True)), strict=True
        ):
            most[one, another] = max(count, most.get((one, another), 0))
        for (one, another), count in most.items():
            short, long = sorted((one, another), key=lambda number: counts[number])
            share = count / counts[short]
            if count >= _LEAST_ANCHORS and share > self._limits.contained:
                yield short, long, min(share, 1.0)

    def _measure_time(self, time: Array, batch: _Batch) -> None:
        step = np.zeros(len(time))
        step[1:] = np.diff(time)
        inner = np.ones(len(time), bool)
        inner[batch.starts] = False
        usual = float(np.median(step[inner])) if inner.any() else 0.0
        tick = 1 / self._rate if self._rate else usual
        rounding = 4 * np.spacing(np.float32(np.abs(time).max(initial=1)))
        off = np.where(inner, np.abs(step - usual), 0)
        near = off < usual * (self._limits.gap - 1)
        allowed = max(self._limits.jitter * usual, float(rounding), self._limits.tolerance)
        back = inner & (step <= 0)
        gap = inner & (step > usual * self._limits.gap)
        self._keep(
            usual=np.full(len(batch.starts), usual),
            tick=np.full(len(batch.starts), tick),
            time_first=time[batch.starts],
        )
        within = np.arange(len(time)) - batch.spread(batch.starts)
        apart = time - batch.spread(time[batch.starts]) - within * tick
        apart -= batch.spread(batch.sum(apart) / batch.lengths)
        drift = batch.largest(np.abs(apart))
        self._keep(jitter=np.minimum(drift, batch.largest(np.where(near, off, 0))))
        lasting = (time[batch.lasts] - time[batch.starts]) / np.maximum(batch.lengths - 1, 1)
        self._keep(
            lasting=lasting,
            jittered=batch.share(near & (off > allowed)),
            gap=batch.largest(np.where(inner, step, 0)),
            gap_at=_first_of(gap, batch),
            backward=batch.sum(back.astype(np.int64)),
            backward_at=_first_of(back, batch),
        )

    def _measure_rewards(self, columns: dict[str, Array], batch: _Batch) -> None:
        reward = np.nan_to_num(columns["reward"])
        self._keep(returns=batch.sum(reward), reward_low=batch.least(reward), reward_high=batch.largest(reward))
        size = np.abs(reward)
        grows = np.zeros(len(reward), bool)
        grows[1:] = size[1:] >= size[:-1]
        grows[batch.starts] = True
        self._keep(
            growing=batch.share(grows),
            rewarded=batch.sum((size > 0).astype(np.int64)),
            reward_from_end=batch.leading(size > 0)[1],
            reward_first=size[batch.starts],
            reward_last=size[batch.lasts],
        )
        if "stored" in columns and self._summing < _MOST_SUMMED:
            self._summing += batch.rows
            self._keep(
                sums=np.column_stack((np.nan_to_num(columns["stored"]), reward)),
                sums_first=np.isin(np.arange(batch.rows), batch.starts),
            )
        if "state" in columns and "action" in columns:
            self._fit_rewards(columns, reward, batch)

    def _fit_rewards(self, columns: dict[str, Array], reward: Array, batch: _Batch) -> None:
        """Keep rows for a regression on states and actions of the reward of a step, and of the steps around it."""
        if self._fitted > 1 << 14 or len(columns["state"]) > 64:
            return
        inner = np.ones(len(reward), bool)
        for away in (0, 1):
            inner[np.minimum(batch.starts + away, len(reward) - 1)] = False
            inner[np.maximum(batch.lasts - away, 0)] = False
        at = np.flatnonzero(inner)[: 1 << 14]
        if not len(at):
            return
        self._fitted += len(at)
        around = [reward[at - 1], reward[at], reward[at + 1]]
        rows = [columns["state"].T[at], columns["state"].T[at + 1], columns["action"].T[at], *around]
        self._keep(fit_rows=np.column_stack(rows).astype(np.float32))

    def _keep_poses(self, columns: dict[str, Array], batch: _Batch) -> None:
        if "state" not in columns or self._posed > _POSES:
            return
        for at, number in enumerate(self.numbers[-1].tolist()):
            start, stop = batch.starts[at], batch.starts[at] + batch.lengths[at]
            self.poses[number] = columns["state"][:_POSE_WIDTH, start:stop].T.copy()
            if "action" in columns:
                self._moves[number] = columns["action"][:_POSE_WIDTH, start:stop].T.copy()
        self._posed += batch.rows

    def _keep(self, **measures: Array) -> None:
        """Append measures of the episodes of a batch, by name."""
        for name, values in measures.items():
            self._each[name].append(values)

    # Findings ----------------------------------------------------------------------------------------------

    def array(self, name: str) -> Array:
        """Return a measure of all episodes, `[episodes]` or `[episodes, …]`."""
        return np.concatenate(self._each[name])

    def has(self, name: str) -> bool:
        """Whether any episode has this measure."""
        return bool(self._each.get(name))

    def report(self, report: Report, *, robot: bool) -> None:
        """Report unusual episodes; the rules about robots run only if `robot` is true."""
        if not self.numbers:
            return
        self._number, self._length = np.concatenate(self.numbers), np.concatenate(self.lengths)
        self._start = np.concatenate(self.places)
        report.numbers = self._number.tolist()
        self._whole = self._length >= self._limits.least
        # The parts of a very long episode have the same number.
        self._begins = np.append(True, self._number[1:] != self._number[:-1])
        self._report = report
        self._lengths_and_returns(robot=robot)
        self._constant()
        self._rewards()
        if not robot:
            return
        for _, signal in self._signals():
            if self._whole.any():
                self._leaps(signal)
                self._still(signal)
                self._units(signal)
        if self.states.names and self.actions.names and self._whole.any():
            self._pairs()
        if self.has("usual"):
            self._time()

    def _few(self, which: Array) -> bool:
        """Whether a mask selects any episodes, and few enough of them to be outliers."""
        return bool(which.any() and which.mean() < self._limits.few)

    def _spans(self, which: Array, begin: Any, length: Any) -> list[tuple[Any, Any]]:
        """Return ranges of rows: `length` rows from step `begin` on, of each episode that a mask selects."""
        starts, stops = ((self._start + at)[which] for at in (begin, begin + length))
        return list(zip(starts, stops, strict=True))

    def _add(
        self, rule: str, what: str, which: Array, figure: float, threshold: float, steps: Sequence[Any] = (), *,
        parts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Report the episodes that a mask selects; their numbers replace `{}` in `what`."""
        numbers = np.unique(self._number[which])
        self._report.add(
            rule, what.replace("{}", of_episodes(numbers), 1), episodes=numbers.tolist(), figure=figure,
            threshold=threshold, components=parts, steps=steps or self._spans(which, 0, self._length),
        )  # fmt: skip

    def _first(self, states: int, actions: int) -> list[str]:
        """Return the components of states and actions that move most, as examples that a report can draw."""
        found = []
        for signal, count in ((self.states, states), (self.actions, actions)):
            speed = np.median(signal.array("speed"), axis=0) / np.maximum(signal.spread, 1e-12)
            found += [
                place for at in np.argsort(-speed)[:count] for place in signal.places(np.arange(len(speed)) == at)
            ]
        return found

    def _both(self, which: Array) -> list[str]:
        """Return the components of the states that a mask selects, each followed by its component of the actions."""
        pairs = zip(self.states.places(which), self.actions.places(which), strict=True)
        return [one for pair in pairs for one in pair][:_MOST_PLACES]

    def _lengths_and_returns(self, *, robot: bool) -> None:
        limits, starts = self._limits, np.flatnonzero(self._begins)
        length, part_of = np.add.reduceat(self._length, starts), np.cumsum(self._begins) - 1
        middle = float(np.median(length))
        _, deviation = robust(length.astype(float))
        least = least_length(length, limits, robot=robot)
        short = length < least
        if not robot and not limits.length and self.has("terminated"):
            short &= ~np.logical_or.reduceat(self.array("terminated"), starts)  # an agent may fail at once
        if short.any() and (limits.length or short.mean() < limits.few):
            found = int(length[short].min())
            down = "as few as " if short.sum() > 1 else "only "
            text = f"{{}}: {down}{counted(found, 'step')}, while the median is {middle:.0f}"
            self._add("EPI004", text, short[part_of], found, least)
        most = max(limits.long * middle, middle + limits.outlier * max(float(deviation), limits.level * middle))
        if len(length) >= 5 and middle >= 5 and (long := length > most).any():
            found = int(length[long].max())
            up = "up to " * (int(long.sum()) > 1)
            text = f"{{}}: {up}{found:,} steps, while the median is {middle:.0f}"
            self._add("EPI006", text, long[part_of], found, most)
        if not self.has("returns") or len(length) < 8:
            return
        value = np.add.reduceat(self.array("returns"), starts)
        middle, spread = map(float, robust(value))
        far = np.abs(value - middle)
        reached = limits.outlier * max(spread, 1e-3 * abs(middle))
        if reached > 0 and 0 < (odd := far > reached).mean() < limits.few / 3:
            worst = float(value[odd][np.argmax(far[odd])])
            what = "the return is" if odd.sum() == 1 else "a return is"
            text = f"{{}}: {what} {worst:g}, while the median is {middle:g}"
            self._add("EPI007", text, odd[part_of], worst, reached, parts=["next.reward"])

    @property
    def alike(self) -> list[list[int]]:
        """Groups of episodes, by number, that have the same states and actions; complete after all rows were seen."""
        return [same for same in self._digests.values() if len(same) > 1]

    def report_copies(
        self,
        splits: Mapping[str, range],
        tasks: Mapping[int, Sequence[str]],
        has_same_pictures: Callable[[int, int], bool | None],
    ) -> None:
        """Report copies of episodes. The other rules report first, so that the original is an episode without findings.

        Args:
            splits: the episodes of each split.
            tasks: the tasks of each episode.
            has_same_pictures: returns whether two episodes have the same frames of kept videos; None if not known.
        """
        if not self.numbers:
            return
        spoiled = {
            number for one in self._report.findings if BY_ID[one.rule].mend.startswith("leave out")
            for number in one.episodes
        }  # fmt: skip
        where = {number: at for at, number in enumerate(self._number.tolist())}
        equal: set[int] = set()
        found: dict[str, list[tuple[list[int], str, float]]] = defaultdict(list)
        varies = self._varied()
        varied = varies & ~np.isin(self._number, self._number[~self._begins])  # without episodes measured in parts
        for same in self._digests.values():
            same = sorted((one for one in same if one in where and varied[where[one]]), key=spoiled.__contains__)
            if len(same) < 2:
                continue
            equal |= set(same)
            first = dict[tuple[Any, ...], list[int]]()  # by the digests of all fields but videos
            copies_of = defaultdict[int, list[int]](list)
            for number in same:
                beside = *self.array("beside")[where[number]].tolist(), *tasks.get(number, ())
                others = first.setdefault(beside, [])
                original = next((one for one in others if has_same_pictures(one, number)), None)
                if original is not None:
                    copies_of[original].append(number)
                    continue
                others.append(number)
                if number != same[0]:
                    differing = self._differing(where[same[0]], where[number], tasks, has_same_pictures)
                    found["EPI009"].append(([number], f"the same motion as episode {same[0]}, {differing}", 1))
            for original, numbers in copies_of.items():
                names = {
                    next((name for name, split in splits.items() if one in split), "no split")
                    for one in (original, *numbers)
                }
                across = f", in different splits: {' and '.join(sorted(names))}" if len(names) > 1 else ""
                found["EPI001"].append((numbers, f"the same as episode {original}{across}", len(numbers) + 1))
        near = self._near(equal, varied, spoiled)
        for number, (other, apart) in near.items():
            text = f"nearly the same as episode {other}: compared values differ by at most {apart:.1g} of their range"
            found["EPI002"].append(([number], text, apart))
        for one, other, share in self._contained():
            if one in where and other in where and not {one, other} <= equal and varies[where[one]]:
                text = f"about {share:.0%} of the steps also occur in episode {other}, bit for bit"
                found["EPI003"].append(([one], text, share))
        for rule, copies in found.items():
            limit = {"EPI001": 1.0, "EPI009": 1.0, "EPI002": self._limits.near, "EPI003": self._limits.contained}[rule]
            if len(copies) > _MOST_COPIES:  # one finding for all, with the first one as an example
                copies.sort(key=lambda one: "splits" not in one[1])
                numbers = [number for one, _, _ in copies for number in one]
                example, text, figure = copies[0]
                copies = [(numbers, f"for example, {of_episodes(example)}: {text}", figure)]
            for numbers, text, figure in copies:
                self._add(rule, f"{{}}: {text}", np.isin(self._number, numbers), figure, limit)

    def _differing(
        self,
        at: int,
        other: int,
        tasks: Mapping[int, Sequence[str]],
        has_same_pictures: Callable[[int, int], bool | None],
    ) -> str:
        """Return how the episodes at two positions differ that have the same states and actions, as text."""
        one, another = int(self._number[at]), int(self._number[other])
        pictures, rest = self.array("beside")[at] != self.array("beside")[other]
        alike = False if pictures else has_same_pictures(one, another)
        names = ["other pictures"] * (alike is False)
        names += ["another task"] * (tasks.get(one, ()) != tasks.get(another, ()))
        names += ["other rewards, flags or further values"] * bool(rest)
        found = f"with {' and '.join(names)}" if names else ""
        return "; ".join(filter(None, (found, "pictures were not compared" * (alike is None))))

    def _varied(self) -> Array:
        """Whether anything varies in each episode."""
        found = self.array("beside_varies") if self._recognised and not [*self._signals()] else self._begins & False
        for _, signal in self._signals():
            found |= (signal.span > 0).any(1)
        return found

    def _near(self, equal: set[int], varied: Array, spoiled: set[int]) -> dict[int, tuple[int, float]]:
        """Find pairs of episodes of equal length whose rows at five places are nearly equal.

        Returns, by the number of one episode, the number of the other and the largest difference. Episodes are sorted
        by length and by the sum of their values, so that each has to be compared with its neighbours only.
        """
        found: dict[int, tuple[int, float]] = {}
        if not self.has("picks"):
            return found
        picks, numbers = self.array("picks"), self._number
        count = min(len(picks), len(numbers))
        widths = np.concatenate([np.tile(np.maximum(signal.spread, 1e-12), 5) for _, signal in self._signals()])
        if picks.shape[1] != len(widths):
            return found
        scaled = picks[:count] / widths
        order = np.lexsort((scaled.sum(1), self._length[:count]))
        for back in range(1, 5):
            pairs = np.sort(np.column_stack((order[back:], order[:-back])), axis=1)
            one, other = pairs[(self._length[pairs[:, 0]] == self._length[pairs[:, 1]]) & varied[pairs[:, 0]]].T
            apart = np.abs(scaled[one] - scaled[other]).max(1)
            for at in np.flatnonzero((apart < self._limits.near) & (self._length[one] >= self._limits.least)).tolist():
                first, second = sorted((int(numbers[one[at]]), int(numbers[other[at]])), key=spoiled.__contains__)
                if not {first, second} <= equal:
                    found.setdefault(second, (first, float(apart[at])))
        return found

    def _constant(self) -> None:
        for name, signal in self._signals():
            span = signal.span
            moving = np.median(span[self._whole], axis=0) > 0 if self._whole.any() else np.zeros(span.shape[1], bool)
            if moving.any():
                still = self._whole & (span[:, moving] == 0).all(1)
                if 0 < still.sum() <= self._limits.few * self._whole.sum():
                    what = "observations" if name == "state" else "actions"
                    self._add("EPI005", f"{{}}: {what} never change", still, 0, 0)

    def _rewards(self) -> None:
        success = self.has("success") and self.array("success")
        if success is not False and not np.any(success):
            self._add("EPI008", "success is recorded, but no episode succeeds", np.zeros(len(self._number), bool), 0, 1)
        limits = self._limits
        ended = self.array("terminated") if self.has("terminated") else np.zeros(len(self._number), bool)
        length, everything = self._length, np.ones(len(self._number), bool)
        share = (length == length.max()).mean()
        if len(length) >= 5 and ended.all() and share > limits.all and length.max() >= limits.least:
            text = f"all episodes terminate, {share:.0%} of them after exactly {length.max():,} steps"
            self._add("REW004", text, everything, share, limits.all)
        if not self.has("returns"):
            return
        if self.has("sums"):
            self._stored_returns()
        low, high = self.array("reward_low").min(), self.array("reward_high").max()
        same_end = len(length) > 2 and (not ended.any() or (length == length.max()).all())
        if low == high and (low == 0 or same_end):
            self._add("REW001", f"every reward is {low + 0:g}", everything, 0, 0)  # + 0 makes -0 a 0
            return
        whole = self._whole
        if whole.sum() >= 3:
            grows, first, last = (self.array(name)[whole] for name in ("growing", "reward_first", "reward_last"))
            summed = (
                (grows > limits.growing) & (last > 5 * first) & (self.array("rewarded")[whole] > 0.5 * length[whole])
            )
            value = last / length[whole]
            steady = np.std(value) < 0.5 * np.mean(value) if np.mean(value) else False
            beyond = max(abs(low), abs(high)) > 1.001  # progress up to 1 grows as well
            if summed.mean() > limits.all and steady and beyond:
                text = f"in {summed.mean():.0%} of the episodes, rewards only grow, to {last.mean():.3g} on average"
                self._add("REW003", text, everything, float(summed.mean()), limits.all, parts=["next.reward"])
                return
        lone = self.array("reward_from_end")[self.array("rewarded") > 0]
        if len(lone) >= 5 and self.array("rewarded").max() <= 2 and (lone == 1).mean() > limits.all:
            share = f"{(lone == 1).mean():.0%} of the episodes with rewards"
            text = f"in {share}, the last reward comes one step before the last step"
            self._add("REW002", text, everything, float((lone == 1).mean()), limits.all)
        elif self.has("fit_rows"):
            self._shifted_rewards(everything)

    def _stored_returns(self) -> None:
        """Compare a field of returns with the rewards.

        The field holds either the sum of the episode in every row, or returns-to-go. For these, the discount is
        estimated from consecutive rows, as `stored[t] = reward[t] + discount * stored[t + 1]`.
        """
        name = key_name(self._stored[0])
        rows, first = self.array("sums"), np.flatnonzero(self.array("sums_first"))
        stored, reward = rows.T
        count = len(first)
        lasts = np.append(first[1:], len(rows)) - 1
        scale = max(float(np.abs(stored).max()), 1e-9)
        if (np.maximum.reduceat(stored, first) - np.minimum.reduceat(stored, first)).max() <= 1e-6 * scale:
            apart = np.abs(stored[first] - np.add.reduceat(reward, first))
            apart = np.maximum(apart - np.abs(reward[lasts]), 0)  # the last step of a source may be left out
        else:
            inner = np.ones(len(rows), bool)
            inner[lasts] = False
            here, after = stored[:-1] - reward[:-1], stored[1:]
            use = inner[:-1] & (np.abs(after) > 1e-3 * scale)
            ratio = float(np.median(here[use] / after[use])) if use.any() else np.nan
            discount = min(max(ratio, 0.0), 1.0) if np.isfinite(ratio) else 1.0
            off = np.append(np.where(inner[:-1], np.abs(here - discount * after), 0), 0)
            apart = np.maximum.reduceat(off, first)
        wrong = np.zeros(len(self._number), bool)
        wrong[:count] = apart > 1e-3 * scale
        if not wrong.any():
            return
        text = "{}: " if wrong.mean() < self._limits.all else ""
        text += f"{name} differs from the sum of the rewards by up to {float(apart.max()):.4g}"
        self._add("REW005", text, wrong, float(apart.max()), 1e-3 * scale, parts=[name, "next.reward"])

    def _shifted_rewards(self, everything: Array) -> None:
        """Report rewards that a regression on states and actions explains better if they are moved by one step."""
        rows = self.array("fit_rows").astype(np.float64)
        if len(rows) < 200:
            return
        width = self.states.spread.shape[0]
        x = rows[:, :-3]
        x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)
        change = x[:, width : 2 * width] - x[:, :width]
        x = np.column_stack((x[:, : 2 * width], x[:, 2 * width :], x**2, change**2, np.ones(len(x))))
        half = len(x) // 2
        fits = []
        for at in (-3, -2, -1):
            y = rows[:, at]
            gram = x[:half].T @ x[:half] + 1e-3 * half * np.eye(x.shape[1])
            guess = x[half:] @ np.linalg.solve(gram, x[:half].T @ y[:half])
            fits.append(1 - float(((y[half:] - guess) ** 2).mean() / max(float(y[half:].var()), 1e-12)))
        before, here, after = fits
        other = max(before, after)
        limits = self._limits
        if other > limits.explained and (1 - here) > 1.25 * (1 - other) and other - here > limits.shifted:
            # The rewards of the step before fit best: these are stored one step too early.
            side = "after" if before > after else "before"
            text = (
                f"rewards fit the step {side} theirs better than their own: states and actions explain {other:.1%} of "
                f"their variance there, and {max(here, 0.0):.1%} here"
            )
            self._add("REW002", text, everything, other - here, limits.shifted, parts=["next.reward"])

    def _family(self, values: Array) -> Array:
        return np.asarray(np.median(values[self._whole], axis=0))

    def _leaps(self, signal: Signal) -> None:
        limits = self._limits
        span = self._family(signal.span)
        glitch, leap, speed, rough, turns = (
            signal.array(name) for name in ("glitch", "leap", "speed", "rough", "turns")
        )
        alternating = signal.array("alternating")
        chatter = turns > np.minimum(limits.chatter + 2 * self._family(turns), 2 * limits.chatter)
        chatter &= turns * self._length[:, None] >= limits.alternating
        chatter |= alternating > limits.alternating + 3 * self._family(alternating)
        chatter &= self._family(np.sqrt(signal.array("variance"))) > self._family(
            rough
        )  # what is noise alone turns back
        noisy = self._far_above(rough, limits.rough) & (rough > limits.noise * span)
        quick = self._far_above(speed, limits.fast) & (span > 0)
        quick &= (quick.mean(1) > limits.most)[:, None]
        shaken = self._together(rough, limits.rougher, span)
        unlike = ((noisy | quick).mean(1) > limits.several) | shaken | self._together(speed, limits.fast, span)
        usual, (middle, spread) = np.maximum(self._family(glitch), 2 * self._family(speed)), robust(glitch[self._whole])
        wild = (
            (glitch > np.maximum(limits.spike * usual, middle + limits.outlier * spread))
            & (glitch > limits.spike_range * span)
            & (span > 0)
        )
        jump = (leap > limits.jump * self._family(leap)) & (leap > limits.spike_range / 2 * span) & (span > 0)
        wild |= jump & (jump.sum(1) > max(1, limits.several * jump.shape[1]))[:, None]
        wild &= glitch > limits.spike_range / 3 * signal.span  # a rare but smooth move is no spike
        wild &= wild.mean(0) < limits.few
        steady = self._whole & ~self._scaled(signal).any(1)
        which = (
            steady & (wild & ~chatter).any(1) & ~((rough > limits.rough * self._family(rough)).mean(1) > limits.most)
        )
        if self._few(which):
            ratio = float((glitch[which] / np.maximum(usual, 1e-12)).max())
            parts, steps = wild[which].any(0), self._spans(which, signal.array("peak")[:, 0], 1)
            text = f"{{}}: {signal.called(parts)} jumps by up to {ratio:.0f} times the usual largest change"
            self._add("MOT001", text, which, ratio, limits.spike, steps, parts=signal.places(parts))
        one_joint = chatter.any(1) & ~shaken
        odd = steady & unlike & ~which & ~one_joint
        if self._few(odd):
            by_rough, by_speed = (one / np.maximum(self._family(one), 1e-12) for one in (rough, speed))
            most = np.maximum(by_rough, by_speed)[odd]
            parts = (most > limits.fast).any(0)
            text = f"{{}}: {signal.called(parts)} moves up to {most.max():.1f} times as fast or as roughly as usual"
            self._add("MOT009", text, odd, most.max(), limits.rough, parts=signal.places(parts))
        odd = steady & one_joint
        if odd.any():
            most, parts = turns[odd].max(), chatter[odd].any(0)
            text = f"{{}}: {signal.called(parts)} reverses by a large amount in up to {most:.0%} of the steps"
            if longest := int(alternating[odd].max()):
                text += f", {longest} times in a row"
            self._add("MOT005", text, odd, most, limits.chatter, parts=signal.places(parts))

    def _together(self, values: Array, ratio: float, span: Array) -> Array:
        """Whether most components of each episode have many times the usual value, judged by their median ratio."""
        family = self._family(values)
        use = (span > 0) & (family > 1e-11)
        if use.sum() < 3:
            return np.zeros(len(values), bool)
        size = np.median(np.log(np.maximum(values[:, use], 1e-12) / family[use]), axis=1)
        middle, spread = (float(one) for one in robust(size[self._whole]))
        return np.asarray(size > middle + max(np.log(ratio), self._limits.apart * max(spread, 0.02)))

    def _far_above(self, values: Array, ratio: float) -> Array:
        """Whether each value is at least `ratio` times the usual one, and far outside its spread."""
        size = np.log(np.maximum(values, 1e-12))
        middle, spread = robust(size[self._whole])
        far = size > middle + np.maximum(np.log(ratio), self._limits.apart * spread)
        return np.asarray(far & (middle > np.log(1e-11)))

    def _scaled(self, signal: Signal) -> Array:
        """Whether each component of an episode seems to have another unit than usual, `[episodes, components]`."""
        span = signal.span
        size = np.maximum(np.abs(signal.array("high")), np.abs(signal.array("low")))
        usual, usual_size = self._family(span), self._family(size)
        larger = (span > self._limits.units * usual) & (size > self._limits.units * usual_size) & (usual > 0)
        smaller = (span * self._limits.units < usual) & (size * self._limits.units < usual_size) & (span > 0)
        rough = signal.array("rough")  # another unit scales the noise as well, a larger move does not
        noisier = rough / np.maximum(self._family(rough), 1e-12)
        ratio = span / np.maximum(usual, 1e-12)
        alike = np.abs(np.log(np.maximum(noisier, 1e-12)) - np.log(np.maximum(ratio, 1e-12))) < np.log(4)
        found = (larger | smaller) & alike
        if len(usual) > 1:  # for a single component, the ratio has to be one of common units
            few = found.sum(1) < max(2, self._limits.several * (usual > 0).sum())
            ratio = np.maximum(ratio, usual / np.maximum(span, 1e-12))
            common = ((ratio > 40) & (ratio < 75)) | ((ratio > 700) & (ratio < 1400))
            common &= np.quantile(span[self._whole], 0.1, axis=0) > 0.2 * usual if self._whole.any() else False
            found[few] &= common[few]
        return np.asarray(found)

    def _units(self, signal: Signal) -> None:
        found = self._scaled(signal)
        odd = self._whole & found.any(1)
        if self._few(odd):
            ratio = float(np.median((signal.span / np.maximum(self._family(signal.span), 1e-12))[odd][found[odd]]))
            guess, parts = ", as if degrees were mixed with radians" if 40 < ratio < 75 else "", found[odd].any(0)
            text = f"{{}}: the range of {signal.called(parts)} is {ratio:.3g} times the usual range{guess}"
            self._add("MOT008", text, odd, ratio, self._limits.units, parts=signal.places(parts))

    def _still(self, signal: Signal) -> None:
        limits = self._limits
        stuck, span = signal.array("stuck"), signal.span
        regular = (self._family(stuck) < limits.resting) & (self._family(signal.array("resting")) < 0.5)
        regular &= (
            np.quantile(span[self._whole], 0.1, axis=0) > limits.regular / 3 * self._family(span)
            if self._whole.sum() > 5
            else True
        )
        usual, share, whole = self._family(span), signal.array("limits"), self._whole
        low, high = signal.array("low")[whole].min(0), signal.array("high")[whole].max(0)
        touches = (signal.array("low") == low) | (signal.array("high") == high)
        shared = (touches & (span > 0))[whole].sum(0) > 2  # several episodes reach the same limit
        held = (stuck - np.where(touches & (span > 0) & shared, share, 0) > limits.stuck) & regular & (usual > 0)
        always = np.quantile(span[self._whole], 0.1, axis=0) > limits.regular * usual
        share_of = span / np.maximum(usual, 1e-12)
        moving = np.median(share_of, axis=1, keepdims=True) > limits.regular
        noise = np.sqrt(signal.array("variance")) < signal.array("rough")  # even a small move exceeds its noise
        held |= (share_of > 0) & (share_of < limits.held) & always & moving & (usual > 0) & noise
        held &= ~signal.is_gripper()
        joints = ~signal.is_gripper() & (self._family(span) > 0) & (self._family(signal.array("resting")) < 0.5)
        often = (
            (share - 2 / self._length[:, None] > limits.clipped)
            & (share > 4 * self._family(share) + limits.limits)
            & joints
        )
        often &= span > 0.05 * self._family(span)
        clipped = (often.sum(1) > 1) & ~(signal.array("turns") > limits.chatter).any(1)
        odd = self._whole & held.any(1) & (held.mean(1) < 0.9) & ~clipped
        if self._few(odd) and len(span[0]) > 1:
            most, parts = float(stuck[odd][held[odd]].max()), held[odd].any(0)
            text = f"stands still in up to {most:.0%} of the steps in which other components move"
            if most <= limits.stuck:
                most = 1 - float(share_of[odd][held[odd]].min())
                text = f"hardly moves: {1 - most:.2%} of the usual range"
            text = f"{{}}: {signal.called(parts)} {text}"
            self._add("MOT002", text, odd, most, limits.stuck, parts=signal.places(parts))
        length = self._length[:, None]
        total = (share * touches * length)[whole].sum(0) / self._length[whole].sum()
        several = touches[whole].mean(0) > 0.5
        often_there = (share * touches * length)[whole].sum(0) > 5 * touches[whole].sum(0)
        several &= often_there & (whole.sum() > 2)
        everywhere = (total > limits.limits) & (total < 0.6) & several & joints
        ordinary = np.isin(low, (-1, 0)) | ((signal.array("low") == low)[whole].sum(0) < 3)
        ordinary &= np.isin(high, (0, 1, 100)) | ((signal.array("high") == high)[whole].sum(0) < 3)
        if everywhere.sum() > (everywhere & ordinary).sum() or (everywhere.sum() > 1 and total[everywhere].max() > 0.2):
            most = total[everywhere].max()
            text = f"{signal.called(everywhere)} is at its minimum or maximum in {most:.0%} of the steps with motion"
            self._add("MOT004", text, whole, most, limits.limits, parts=signal.places(everywhere))
            return
        odd = whole & clipped
        if self._few(odd):
            most, parts = share[odd][often[odd]].max(), often[odd].any(0)
            text = f"{{}}: {signal.called(parts)} is at a limit in up to {most:.0%} of the steps with motion"
            self._add("MOT004", text, odd, most, limits.clipped, parts=signal.places(parts))

    def _pairs(self) -> None:
        limits, whole = self._limits, self._whole
        run = self.array("frozen")
        odd = whole & (run >= limits.frozen) & (run > limits.frozen_ratio * np.median(run[whole]))
        if self._few(odd):
            steps = self._spans(odd, self.array("frozen_at"), run)
            text = f"{{}}: states stand still for up to {run[odd].max()} steps while actions change"
            self._add("MOT003", text, odd, run[odd].max(), limits.frozen, steps, parts=self._first(2, 1))
        rests = {name: self.array(name) for name in ("lead", "tail")}
        idle, left = self._idle(rests, self._varied())
        for name, end in (("lead", "beginning"), ("tail", "end")):
            rest, odd = rests[name], idle[name]
            if odd.any():
                text = f"{{}}: up to {counted(int(rest[odd].max()), 'step')} of rest at the {end}"
                steps = self._spans(odd, 0 if name == "lead" else self._length - rest, rest)
                share = (rest / left[name])[odd].max()
                self._add("MOT006", text, odd, share, limits.idle, steps, parts=self._first(2, 1))
        run, at = self.array("repeated"), self.array("repeated_at")
        inside = (at > 1) & (at + run < self._length - 1)
        odd = whole & inside & (run >= limits.frozen) & (run > limits.frozen_ratio * np.median(run[whole]) + 2)
        if self._few(odd):
            text = f"{{}}: neither states nor actions change at all for up to {run[odd].max()} steps"
            steps = self._spans(odd, at, run)
            self._add("MOT003", text, odd, run[odd].max(), limits.frozen, steps, parts=self._first(2, 1))
        run = self.array("pause")
        usual = float(np.quantile(run[whole], 1 - limits.few))
        least = max(limits.pause, (self._rate or 0) * limits.pause_seconds, limits.frozen_ratio * usual)
        allowed = np.maximum(least, limits.pause_share * self._length)
        odd = whole & (run > allowed) & ~self._known()
        if self._few(odd):
            figure, steps = run[odd].max(), self._spans(odd, self.array("pause_at"), run)
            text = f"{{}}: up to {figure:.0f} steps of rest in the middle, while up to {usual:.0f} are usual"
            self._add("MOT011", text, odd, figure, allowed[odd].min(), steps, parts=self._first(2, 1))
        self._lag()
        if self.has("agree"):
            self._agreement()

    def _idle(self, rests: Mapping[str, Array], moves: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return which episodes rest too long at each end, and the lengths of episodes that this was compared with.

        Once one end is cut off, the rest at the other end is a larger share of the remaining steps. So the first end
        is checked again, and `clean` does not have to be run twice.
        """
        limits, length = self._limits, self._length.astype(np.int64)
        short = self._whole & moves
        idle = {name: np.zeros_like(short) for name in rests}
        left = dict.fromkeys(rests, length)
        for name, other in (("lead", "tail"), ("tail", "lead"), ("lead", "tail")):
            rest = rests[name]
            cut = np.where(idle[other], np.maximum(rests[other] - KEPT_REST, 0), 0)
            left[name] = np.where(idle[name], left[name], length - cut)
            found = short & (rest > np.maximum(limits.idle_steps, limits.idle * left[name])) & (rest < length - 2)
            idle[name] = idle[name] | found
        return idle, left

    def _lags(self) -> tuple[Array, int, float]:
        """Return the correlations `[episodes, lags]`, the index of the usual lag in `LAGS`, and its correlation."""
        found = []
        for name in ("lags", "lags_of_speeds"):
            if self.has(name):
                lags = self.array(name)
                family = np.median(lags[self._whole], axis=0)
                found.append((lags, int(np.argmax(family)), float(family.max())))
        most = max(agreed for _, _, agreed in found)
        # In a periodic motion both agree, and the wrong one at a lag of a quarter of the period.
        return min((one for one in found if one[2] > most - _AS_GOOD), key=lambda one: abs(int(LAGS[one[1]])))

    def _lag(self) -> None:
        limits, whole = self._limits, self._whole
        lags, usual, agreed = self._lags()
        if agreed < _AGREED and self._predict():
            return
        if agreed < limits.agreement:
            return
        own, best = lags.argmax(1), lags.max(1)
        middle, spread = (float(one) for one in robust(lags[whole, usual]))
        odd = (
            whole
            & (lags[:, usual] < middle - 3 * spread)
            & (np.abs(own - usual) >= max(limits.lag, 4 * np.median(np.abs(own - usual)[whole])))
            & (best - lags[:, usual] > 0.05)
            & (best > limits.agreement)
        )
        if self._few(odd):
            self._late(odd, int(LAGS[own[odd]][0]), int(LAGS[usual]))
        family = np.median(lags[whole], axis=0)
        if family[usual] - family[len(LAGS) // 2] > 0.05:
            self._lag_of_all(int(LAGS[usual]))

    def _late(self, odd: Array, lag: int, usual: int) -> None:
        text = f"{{}}: states follow actions by {lag} steps, while {usual} are usual"
        self._add("MOT007", text, odd, lag - usual, self._limits.lag, parts=self._first(1, 1))

    def _lag_of_all(self, lag: int) -> None:
        """Report a lag that all episodes share, if it is longer than a robot needs, or negative."""
        limits = self._limits
        most = max(limits.lag + 1, limits.lead * self._rate) if self._rate is not None else np.inf
        if -limits.precede < lag <= most:
            return
        how = f"precede actions by {-lag}" if lag < 0 else f"follow actions by {lag}"
        limit = float(most) if lag > 0 else -limits.precede
        text, everything = f"states {how} steps in all episodes", np.ones_like(self._whole)
        self._add("MOT007", text, everything, float(lag), limit, parts=self._first(1, 1))

    def _predict(self) -> bool:
        """Predict actions from states and their changes by a linear regression on all episodes, and report outliers.

        This compares actions that are not positions, or have other dimensions than the states. An episode whose
        actions fit best at another lag is reported as lagging; one whose actions fit at no lag has foreign actions.
        Returns whether states explain actions; if they do not, nothing is reported.
        """
        limits, room = self._limits, int(LAGS[-1])
        where = {number: at for at, number in enumerate(self._number.tolist())}
        numbers = [
            number for number, pose in self.poses.items()
            if number in self._moves and len(pose) > 3 * room and number in where
        ]  # fmt: skip
        if len(numbers) < 4:
            return False
        center = np.median(np.concatenate([self.poses[one] for one in numbers[:256]]), axis=0)
        width = np.maximum(self.states.spread[: len(center)], 1e-12)
        by_action = np.maximum(self.actions.spread[:_POSE_WIDTH], 1e-12)
        seen, done = {}, {}
        for number in numbers:
            pose = np.clip((self.poses[number] - center) / width, -10, 10)
            change = np.gradient(pose, axis=0)
            seen[number] = np.column_stack((pose, 10 * change, np.ones(len(pose))))
            done[number] = np.clip(self._moves[number] / by_action, -10, 10)[room:-room]
        most = max(4, (1 << 14) // int(np.median([len(one) for one in done.values()])))
        used = numbers[:: max(1, len(numbers) // most)][:most]
        target = np.concatenate([done[number] for number in used])
        middle = target.mean(0)
        total = float(((target - middle) ** 2).mean())
        found: list[tuple[float, Array]] = []
        for lag in LAGS.tolist():
            x = np.concatenate([seen[one][room + lag : len(seen[one]) - room + lag] for one in used])
            gram = x.T @ x + 1e-4 * len(x) * np.eye(x.shape[1])
            weights = np.linalg.solve(gram, x.T @ target)
            found.append((float(((x @ weights - target) ** 2).mean()), weights))
        usual = int(np.argmin([error for error, _ in found]))
        if total <= 0 or 1 - found[usual][0] / total < limits.agreement:
            return False
        errors = np.full((len(numbers), len(LAGS)), np.inf)
        parts = np.zeros((len(numbers), target.shape[1]))
        for at, number in enumerate(numbers):
            guess, action = seen[number] @ found[usual][1], done[number]
            for place, lag in enumerate(LAGS.tolist()):  # a guess is for the action `usual` steps before its state
                shift = room + int(LAGS[usual]) + lag
                ahead, behind = guess[max(shift, 0) :], action[max(-shift, 0) :]
                count = min(len(ahead), len(behind))
                if count >= room:
                    apart = (ahead[:count] - behind[:count]) ** 2
                    errors[at, place] = apart.mean()
                    parts[at] = apart.mean(0) if lag == 0 else parts[at]
        own, here = errors.argmin(1), errors[:, room]
        places = np.array([where[number] for number in numbers])
        is_late = (np.abs(own - room) >= limits.lag) & (errors.min(1) < 0.5 * here) & (errors.min(1) < 0.4 * total)
        odd = np.zeros_like(self._whole)
        odd[places[is_late]] = True
        if self._few(odd):
            self._late(odd, int(LAGS[usual] + own[is_late][0] - room), int(LAGS[usual]))
        family, spread = robust(np.log(np.maximum(parts, 1e-12)))
        scale = np.maximum(target.var(0), 1e-12)
        far = np.log(np.maximum(parts, 1e-12)) > family + np.maximum(np.log(5), limits.apart * spread)
        varying = np.array([done[number].var(0) for number in numbers]) > 0.1 * scale
        usually = np.nanmedian(np.where(varying | ~varying.any(0), parts, np.nan), axis=0)
        far &= (parts > 0.5 * scale) & (usually < (1 - limits.agreement) * scale)
        other: Array = np.zeros_like(self._whole)
        other[places[far.any(1) & ~is_late]] = True
        other &= ~self._known()
        if self._few(other):
            there = np.isin(places, np.flatnonzero(other))
            names = Signal([], self.actions.names[:_POSE_WIDTH], {}).called(far[there].any(0))
            figure = (parts / scale)[there][far[there]].max()
            text = f"{{}}: states predict the actions {names} far worse than in the other episodes"
            self._add("MOT010", text, other, figure, 0.5, parts=self._first(2, 2))
        if found[usual][0] < 0.7 * found[room][0] and found[room][0] > (1 - _AGREED) * total:
            self._lag_of_all(int(LAGS[usual]))
        return True

    def _known(self) -> Array:
        """Whether another rule has already reported the motion of each episode, which explains a disagreement."""
        found = {
            number
            for one in self._report.findings
            if one.rule[:3] == "MOT" and one.rule != "MOT007"
            for number in one.episodes
        }
        return (
            np.isin(self._number, list(found)) if len(found) < len(set(self._report.numbers)) else self._whole & False
        )

    def _agreement(self) -> None:
        agree = self.array("agree")
        apart = self.actions.array("mean") - self.states.array("mean")
        usual_apart, spread_apart = robust(apart[self._whole])
        span = self._family(self.states.span)
        far = np.abs(apart - usual_apart) > np.maximum(10 * spread_apart, self._limits.offset * span) + 1e-9
        far &= ~(self.states.array("stuck") > 0.5) | self.states.is_gripper()
        known = self._known()
        odd = self._whole & far.any(1) & ~known
        if self._few(odd) and np.median(agree[self._whole]) > 0.7:
            figure, parts = np.abs(apart - usual_apart)[odd][far[odd]].max(), far[odd].any(0)
            text = (
                f"{{}}: the mean of {self.states.called(parts)} is off from that of its actions by up to {figure:.3g}"
            )
            limit = (10 * spread_apart + self._limits.offset * span).min()
            self._add("MOT010", text, odd, figure, limit, parts=self._both(parts))
        if (np.abs(apart) == 0).all() and self._equal:
            text = "every action equals the state of its own step, so it does not say where the robot moves next"
            self._add("MOT010", text, np.ones_like(self._whole), 1, 1)
        middle, spread = robust(agree[self._whole])
        moves = ~(self.states.array("stuck") > self._limits.stuck) & ~(self.actions.array("stuck") > self._limits.stuck)
        far = (
            (agree < middle - np.maximum(self._limits.disagreement, 8 * spread))
            & (middle > 0.7)
            & moves
            & np.isfinite(agree)
        )
        odd = self._whole & far.any(1) & ~known
        lags, usual, _ = self._lags()
        odd &= np.abs(lags.argmax(1) - usual) < self._limits.lag
        if self._few(odd):
            parts = far[odd].any(0)
            worst, usual_one = agree[odd][far[odd]].min(), float(middle[parts].min())
            names = self.states.called(parts)
            text = f"{{}}: states and actions of {names} correlate by only {worst:.2f}, while {usual_one:.2f} is usual"
            limit = usual_one - self._limits.disagreement
            self._add("MOT010", text, odd, worst, limit, parts=self._both(parts))

    def _time(self) -> None:
        limits = self._limits
        usual, tick = self.array("usual"), self.array("tick")
        gap, back = self.array("gap"), self.array("backward")
        skips = gap > limits.gap * np.maximum(usual, 1e-12)
        if skips.any() and skips.mean() < 0.9:
            steps, most = self._spans(skips, self.array("gap_at") - 1, 2), gap[skips].max()
            text = f"{{}}: up to {most:.3f} s between two steps, while {usual[0]:.3f} s are usual"
            self._add("TIM001", text, skips, most, limits.gap * usual[0], steps, parts=["timestamp"])
        if (odd := back > 0).any():
            steps = self._spans(odd, self.array("backward_at") - 1, 2)
            text = f"{{}}: time stamps do not increase in {counted(int(back.sum()), 'step')}"
            self._add("TIM003", text, odd, back.sum(), 0, steps, parts=["timestamp"])
        jitter = self.array("jitter")
        if (odd := self.array("jittered") > limits.jittered).any():
            most, limit = jitter[odd].max(), max(limits.jitter * usual[0], limits.tolerance)
            text = f"{{}}: time steps deviate by up to {1e3 * most:.1f} ms"
            self._add("TIM002", text, odd, most, limit, parts=["timestamp"])
        first = self.array("time_first")
        middle = float(np.median(first))
        begins, limit = self._begins, limits.late * tick[0]
        late, absolute = (
            (np.abs(first - origin) > limits.late * np.maximum(tick, 1e-12)) & begins for origin in (middle, 0)
        )
        if not self._report.is_raw or len(first) < 3:
            pass  # the time stamps of a converted dataset may begin anywhere
        elif self._rate is not None and absolute.mean() > 0.5:
            text = f"{{}}: time stamps begin up to {np.abs(first[begins]).max():.3f} s away from 0"
            self._add("TIM004", text, absolute, np.abs(first).max(), limit)
        elif self._few(late):
            text = f"{{}}: time stamps begin at {first[late][0]:.3f} s, while {middle:.3f} s is usual"
            self._add("TIM004", text, late, np.abs(first[late] - middle).max(), limit)
        several = self._length > 1
        lasting = float(np.median(self.array("lasting")[several])) if several.any() else 0.0
        if self._rate and lasting > 0 and abs(lasting * self._rate - 1) > limits.jitter:
            text = (
                f"steps last {lasting:.4f} s, but the metadata state {self._rate:g} steps per second, which is "
                f"{1 / self._rate:.4f} s"
            )
            self._add("TIM005", text, np.ones(len(first), bool), 1 / lasting, self._rate)

    # Statistics ----------------------------------------------------------------------------------------------

    def of_each(self) -> tuple[list[int], dict[str, dict[str, Array]]]:
        """Return the numbers of all episodes, and `low`, `high`, `mean` and `variance` of their fields by name.

        The measures of an episode that was measured in parts are joined.
        """
        numbers, length = np.concatenate(self.numbers), np.concatenate(self.lengths)[:, None].astype(np.float64)
        starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        total = np.add.reduceat(length, starts)
        found: dict[str, dict[str, Array]] = {}
        for _, signal in self._signals():
            mean, variance = (signal.array(name).astype(np.float64) for name in ("mean", "variance"))
            whole = np.add.reduceat(mean * length, starts) / total
            apart = mean - np.repeat(whole, np.diff(np.append(starts, len(numbers))), axis=0)
            each = {
                "low": np.minimum.reduceat(signal.array("low"), starts),
                "high": np.maximum.reduceat(signal.array("high"), starts), "mean": whole,
                "variance": np.add.reduceat((variance + apart**2) * length, starts) / total,
            }  # fmt: skip
            for name, place in signal.components.items():
                found[name] = {measure: values[:, place] for measure, values in each.items()}
        return numbers[starts].tolist(), found

    def moments(self) -> dict[str, dict[str, Any]]:
        """Return statistics of each field, by its name: number of rows, extremes, mean, standard deviation, quantiles.

        `quantiles` has a lower and an upper bound for each of them, such as `q01`, estimated from some rows.
        """
        found: dict[str, dict[str, Any]] = {}
        count = np.concatenate(self.lengths)[:, None].astype(np.float64)
        for _, signal in self._signals():
            mean, variance = (signal.array(name).astype(np.float64) for name in ("mean", "variance"))
            middle = (mean * count).sum(0) / count.sum()
            spread = np.sqrt(((variance + (mean - middle) ** 2) * count).sum(0) / count.sum())
            low, high = signal.array("low"), signal.array("high")
            quantiles = _quantile_bounds(np.concatenate(signal.samples), low, high) if signal.samples else {}
            for name, place in signal.components.items():
                found[name] = {
                    "min": low[:, place].min(0), "max": high[:, place].max(0), "mean": middle[place],
                    "std": spread[place], "rows": count.sum(),
                    "quantiles": {one: (least[place], most[place]) for one, (least, most) in quantiles.items()},
                }  # fmt: skip
        for name, one in self._others.items():
            rows, total, square, least, most = one
            mean = total / rows
            spread = np.sqrt(np.maximum(square / rows - mean**2, 0))
            found[name] = {"min": least, "max": most, "mean": mean, "std": spread, "rows": rows, "quantiles": {}}
        return found


_FRACTIONS = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_SAMPLED, _MOST_SAMPLED, _MOST_SAMPLES = 64, 1024, 1 << 23
"""The rows of an episode, the episodes, and the values in all that quantiles are estimated from."""
_RANKS = 0.05
"""The allowed error of the rank of an estimated quantile."""


def _quantile_bounds(samples: Array, low: Array, high: Array) -> dict[str, tuple[Array, Array]]:
    """Return lower and upper bounds of quantiles, estimated from rows of episodes `[episodes, rows, components]`.

    The bounds are wide, because tools differ: some store the quantiles of all rows, others the mean of the quantiles
    of each episode, or their extremes.
    """
    fractions = list(_FRACTIONS.values())
    rows = samples.reshape(-1, samples.shape[2])
    least, most = (np.quantile(rows, np.clip(np.add(fractions, by), 0, 1), axis=0) for by in (-_RANKS, _RANKS))
    episodes = np.quantile(samples, fractions, axis=1)
    least, most = np.minimum(least, episodes.min(1)), np.maximum(most, episodes.max(1))
    least[0], most[-1] = np.minimum(least[0], low.min(0)), np.maximum(most[-1], high.max(0))
    return dict(zip(_FRACTIONS, zip(least, most, strict=True), strict=True))


_BELOW = 0.524
"""The distance of the median and the 0.3 quantile (0.3 is `few`) of a normal distribution, in standard deviations."""


def least_length(length: Array, limits: Thresholds, *, robot: bool) -> float:
    """Return the number of steps below which an episode is very short, given the lengths of all; 0 if not known."""
    middle, deviation = map(float, robust(length.astype(float)))
    if limits.length or middle < 20 or len(length) < 5:
        return limits.length
    least = max(limits.short * middle, limits.fewest)
    # If most episodes run into a time limit, the spread of lengths is estimated from the shorter ones.
    below = (middle - float(np.quantile(length, limits.few, method="higher"))) / _BELOW
    usual = middle - limits.outlier * max(deviation, below, limits.level * middle)
    return max(least, min(limits.shorter * middle, usual)) if robot else least


_PICTURE_ROLES: frozenset[Role] = frozenset({"observation", "state"})


@dataclass
class _Beside:
    """Hashes the bytes of a field that is not part of the signals, such as an image, to a code for each row.

    `is_last` is true for a field that repeats the next row, such as `next.observation`: only the last rows of episodes
    are hashed then. `factors` are odd random numbers that the bytes or 32-bit words of a row are multiplied with.
    """

    field: Field
    is_last: bool
    factors: Array

    @classmethod
    def of(cls, field: Field, *, is_last: bool) -> _Beside:
        seed = np.frombuffer(field.name.encode().ljust(4, b"."), np.uint8)
        width = field.row_bytes if field.row_bytes % 4 else field.row_bytes // 4
        factors = np.random.default_rng(seed.tolist()).integers(
            1, 1 << 32, (1 if width > _RICH else 2, width), np.uint32
        )
        return cls(field, is_last, factors | np.uint32(1))

    def add(self, rows: Rows, codes: Array) -> None:
        """Add the codes of this field to `codes`, uint64 `[rows, 2]`: to column 0 for pictures, else to column 1."""
        values = rows.columns.get(self.field.key)
        which = rows.last if self.is_last else slice(None)
        if values is None or not self.field.row_bytes or not len(x := np.ascontiguousarray(values[which])):
            return
        data = x.reshape(len(x), -1).view(np.uint8)
        words = data.astype(np.uint32) if data.shape[1] % 4 else data.view(np.uint32)
        low, *more = (np.einsum("rc,c->r", words, one).astype(np.uint64) for one in self.factors)
        code = low | more[0] << np.uint64(32) if more else low
        is_picture = self.field.dtype == "uint8" and len(self.field.shape) == 3 and self.field.role in _PICTURE_ROLES
        codes[which, 0 if is_picture else 1] += _mixed(code + np.uint64(self.factors[0, 0]))


def _mixed(code: Array) -> Array:
    """Mix the bits of codes, so that codes that differ in any bit differ in many."""
    code = code ^ code >> np.uint64(29)
    code *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(code ^ code >> np.uint64(32))


def _digests(code: Array, batch: _Batch) -> Array:
    """Return a digest of each episode from the codes of its rows; it depends on their order."""
    within = np.arange(batch.rows, dtype=np.uint64) - batch.spread(batch.starts).astype(np.uint64)
    ordered = (code ^ (within + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)) * np.uint64(0x9E3779B97F4A7C15)
    return batch.sum(ordered ^ ordered >> np.uint64(31))


def _inverse(scale: Array) -> Array:
    """Return weights that bring components to a common scale; 0 for components that never change."""
    return np.asarray(np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0), np.float32)


def _running(before: Array, now: Array) -> Array:
    return now.astype(np.float64) if not len(before) else 0.8 * before + 0.2 * now


def _finite(x: Array) -> Array:
    """Replace values that are not finite, which TED007 reports, by the finite value before them."""
    if np.isfinite(x.sum()):
        return x
    bad = ~np.isfinite(x)
    if not bad.any():
        return x
    last = np.maximum.accumulate(np.where(bad, 0, np.arange(x.shape[1])), axis=1)
    return np.asarray(np.nan_to_num(np.take_along_axis(x, last, axis=1), nan=0.0, posinf=0.0, neginf=0.0))


def _first_of(marked: Array, batch: _Batch) -> Array:
    """Return the step of the first marked row in each episode; 0 if no row is marked."""
    where = np.where(marked, np.arange(batch.rows), batch.rows)
    found = np.minimum.reduceat(where, batch.starts) - batch.starts
    return np.where(found < batch.lengths, found, 0)


def _correlation(one: Array, other: Array, batch: _Batch) -> Array:
    """Return the correlation of each component of two signals in each episode; NaN where either is constant."""
    one, other = batch.centred(one), batch.centred(other)
    both = np.sqrt(batch.sum(one * one) * batch.sum(other * other))
    return np.asarray(np.divide(batch.sum(one * other), both, out=np.full(both.shape, np.nan), where=both > 1e-12))


def lag_correlations(one: Array, other: Array, batch: _Batch) -> Array:
    """Return the correlations `[episodes, lags]` of two signals `[n, rows]`, where `other` is later by `LAGS` steps.

    The episodes are laid out with zeros between them, so that one product over all rows for each lag is enough: no lag
    reaches into another episode.
    """
    room = len(LAGS) // 2
    places = np.arange(batch.rows) + batch.spread(room * np.arange(1, len(batch.starts) + 1))
    total = int(places[-1]) + 1 + room
    early, late = (np.zeros((len(one), total), np.float32) for _ in range(2))
    early[:, places], late[:, places] = batch.centred(one), batch.centred(other)
    starts = places[batch.starts]
    both = np.sqrt(
        np.prod([np.add.reduceat(np.einsum("cr,cr->r", part, part), starts) for part in (early, late)], axis=0)
    )
    product = np.zeros((len(LAGS), total), np.float32)
    inner = product[:, room : total - room]
    for row, part in zip(early, late, strict=True):
        inner += row[room : total - room] * np.lib.stride_tricks.sliding_window_view(part, total - 2 * room)
    sums = np.add.reduceat(product, starts, axis=1).T
    fits = batch.lengths[:, None] > np.abs(LAGS) + 4
    return np.asarray(np.where(fits & (both > 1e-12)[:, None], sums / np.maximum(both, 1e-12)[:, None], 0), np.float32)
