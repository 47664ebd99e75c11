"""Rules of behaviour about pictures: frames of videos, and images in rows.

Each picture is reduced to a copy of 8 x 8 grey values, its brightness, its sharpness, and its differences from the two
pictures before it. A regression on the other episodes predicts how states move from how the small copies change. If
this works for all episodes but one, the pictures of that episode do not belong to its states; the report says whether
they match the states some steps later, in reverse order, or of another episode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..format.contracts import Array
from ..format.videos import image_key, reference_keys
from ..progress import counted
from ..ted.episodes import ranges_of, runs_of
from ..ted.rules import Rows
from ..ted.schema import NEXT, Field, Key, key_name
from .rows import RowRules
from .rules import Report, Thresholds, of_episodes, robust

_SIDE, _SMALL = 48, 8
"""The sides to which pictures are reduced: approximately, to measure changes, and exactly, to keep a copy."""
_LEAST_SIDE = 16
"""The smallest side of an image in rows that counts as a picture."""
MOST_PICTURES = 1 << 20
"""The largest number of pictures that are compared, with about 90 bytes kept for each."""
_SHIFTS = range(-24, 25)
"""The delays, in steps, that are tried between pictures and states."""
_FOLDS = 12
"""The number of folds of the regression: the states of a fold are predicted from the other folds."""
_RIDGE = 3e-3
_LEAST_SPREAD, _GAIN, _BETTER = 0.02, 0.05, 0.2
"""The smallest spread of correlations of predicted states that is assumed; how much better the correlation with other
steps or another episode has to be to be reported; and the same for states in reverse order."""
_SURE = 0.85
"""The usual correlation from which pictures are reported even if they match no other states."""
_MOST_POOR = 64
"""The largest number of episodes whose pictures are compared with the states of all others."""
_LONGEST_GLITCH = 4
"""The largest number of consecutive pictures that are one glitch."""
_COMPARED = 5
"""The number of frames that are decoded to find out whether an episode is a copy."""


@dataclass
class Eye:
    """Measures pictures in the order in which they are decoded, and keeps the measures by frame number."""

    frames: list[Array] = field(default_factory=list)
    small: list[Array] = field(default_factory=list)
    color: list[Array] = field(default_factory=list)
    sharp: list[Array] = field(default_factory=list)
    change: list[Array] = field(default_factory=list)
    change_two: list[Array] = field(default_factory=list)
    _before: Array | None = None
    _reached: int = -2

    def take(self, first: int, images: Array) -> None:
        """Measure pictures `[n, height, width, channels]`, uint8, with consecutive frame numbers from `first` on."""
        height, width = images.shape[1:3]
        sharp = images[:, :: max(1, height // _SIDE), :, min(1, images.shape[3] - 1)].astype(np.int16)
        few = images[:, :: -(-height // _SIDE), :: -(-width // _SIDE)]
        grey = few.mean(-1, dtype=np.float32)
        known = self._before if self._before is not None and self._reached == first else grey[:0]
        joined = np.concatenate((known, grey))
        lead, count = len(known), len(grey)
        for name, away in (("change", 1), ("change_two", 2)):
            found = np.full(count, np.nan, np.float32)
            start = max(0, away - lead)
            if start < count:
                later, earlier = joined[lead + start :], joined[lead + start - away : lead + count - away]
                found[start:] = np.abs(later - earlier).mean((1, 2))
            getattr(self, name).append(found)
        self._before, self._reached = joined[-2:], first + count
        self.frames.append(np.arange(first, first + count, dtype=np.int32))
        color = few.mean((1, 2), dtype=np.float32)
        self.color.append(color if color.shape[1] == 3 else np.repeat(color.mean(1, keepdims=True), 3, axis=1))
        self.sharp.append(np.abs(np.diff(sharp, 2, axis=2)).mean((1, 2), dtype=np.float32))
        self.small.append(_shrunk(grey))

    def pause(self) -> None:
        """Do not compare the next picture with the last one, because frames between them were skipped."""
        self._before = None


def _shrunk(grey: Array) -> Array:
    """Return the means of 8 x 8 parts of each picture, uint8 `[n, 64]`."""
    rows = np.linspace(0, grey.shape[1], _SMALL, endpoint=False).astype(int)
    columns = np.linspace(0, grey.shape[2], _SMALL, endpoint=False).astype(int)
    total = np.add.reduceat(np.add.reduceat(grey, rows, axis=1), columns, axis=2)
    area = np.outer(np.diff(np.append(rows, grey.shape[1])), np.diff(np.append(columns, grey.shape[2])))
    return np.asarray(total / area, np.uint8).reshape(len(grey), -1)


def _runs(*numbers: Array) -> list[tuple[int, int]]:
    """Return the start and the stop of each run of rows in which none of the arrays changes."""
    cuts = np.flatnonzero(np.append(True, np.any([one[1:] != one[:-1] for one in numbers], axis=0))).tolist()
    return list(zip(cuts, [*cuts[1:], len(numbers[0])], strict=True))


class Frames(NamedTuple):
    """The frames that consecutive rows refer to: evenly spread from `first` to `last`, unless `others` lists them."""

    first: int
    last: int
    rows: int
    others: Array | None = None

    @classmethod
    def of(cls, frames: Array) -> Frames:
        found = cls(int(frames[0]), int(frames[-1]), len(frames))
        return found if np.array_equal(found.array(), frames) else found._replace(others=frames.astype(np.int32))

    def array(self) -> Array:
        """Return the frames, int64 `[rows]`."""
        if self.others is not None:
            return self.others.astype(np.int64)
        return np.linspace(self.first, self.last, self.rows).round().astype(np.int64)


class _Use(NamedTuple):
    """Consecutive rows of an episode, and the place of their pictures: a video, or the rows themselves."""

    number: int
    place: tuple[Any, ...]
    frames: Frames


@dataclass
class _Shots:
    """The measures of the pictures of one camera in one episode; `steps` holds the step of each picture."""

    steps: Array
    small: Array
    color: Array
    sharp: Array
    change: Array
    change_two: Array

    @classmethod
    def joined(cls, parts: Sequence[_Shots]) -> _Shots:
        """Join the parts of an episode."""
        return cls(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    @property
    def contrast(self) -> Array:
        """The standard deviation of the parts of each picture."""
        return np.asarray(self.small.std(axis=1))

    @property
    def light(self) -> Array:
        """The brightness of each picture, of 255."""
        return np.asarray(self.color.mean(1))


class PictureRules:
    """Measures the pictures of all cameras, and compares them with each other and with the states."""

    def __init__(self, fields_of_rows: Sequence[Field], limits: Thresholds) -> None:
        self._limits = limits
        self._references = [key for key in reference_keys(fields_of_rows) if key[0] != NEXT]
        self._images = [
            one for one in fields_of_rows
            if one.role == "observation" and one.key[0] != NEXT and one.dtype == "uint8" and len(one.shape) == 3
            and min(sorted(one.shape)[1:]) >= _LEAST_SIDE
        ]  # fmt: skip
        self._eyes: dict[tuple[Any, ...], list[Eye]] = defaultdict(list)
        self._count = 0
        self._missed = 0
        self._frames: dict[int, int] = {}
        self._uses: dict[Key, list[_Use]] = defaultdict(list)
        self._by_episode: dict[Key, dict[int, list[_Use]]] = {}
        self._seen: dict[Key, dict[int, _Shots]] = {}
        self.brightness: dict[str, float] = {}
        """The mean brightness of each camera, of 255; set by `report`."""

    @property
    def cameras(self) -> list[Key]:
        """The keys of all cameras."""
        return [*self._references, *(one.key for one in self._images)]

    def _called(self, key: Key) -> str:
        return key_name(image_key(key) if key in self._references else key)

    def eye(self, video: int) -> Eye | None:
        """Return an object that takes the frames of a video in order; None if no rule needs them."""
        if not self._references:
            return None
        found = Eye()
        self._eyes[video,].append(found)
        return found

    def has_frames(self, video: int, frames: int) -> None:
        """Set the number of frames of a video."""
        self._frames[video] = frames

    def see(self, rows: Rows) -> None:
        """Measure the images in rows, and remember which frames of videos the rows refer to."""
        if not len(rows):
            return
        number = rows.episode.reshape(-1).astype(np.int64)
        for key in self._references:
            places = rows.columns[key].reshape(len(rows), 2)
            for start, stop in _runs(number, places[:, 0]):
                frames = Frames.of(places[start:stop, 1])
                self._uses[key].append(_Use(int(number[start]), (int(places[start, 0]),), frames))
        if self._count > MOST_PICTURES:
            self._missed += len(rows) * len(self._images)
            return
        for one in self._images:
            images = rows.columns[one.key]
            images = images if one.shape[2] in (1, 3, 4) else np.moveaxis(images, 1, -1)
            for start, stop in _runs(number):
                place = (*one.key, int(number[start]))
                eyes = self._eyes[place]
                if not eyes:
                    eyes.append(Eye())
                eyes[0].take(rows.start + start, images[start:stop])
                frames = Frames(rows.start + start, rows.start + stop - 1, stop - start)
                self._uses[one.key].append(_Use(int(number[start]), place, frames))
            self._count += len(rows)

    def notes(self) -> list[str]:
        """Return a sentence about pictures that were not compared."""
        return (
            [f"{self._missed:,} pictures in rows were not compared: only the first ones were"] if self._missed else []
        )

    def _shots(self) -> dict[Key, dict[int, _Shots]]:
        """Return the measured pictures of each camera, by episode."""
        known: dict[tuple[Any, ...], tuple[Array, dict[str, Array]]] = {}
        names = ("small", "color", "sharp", "change", "change_two")
        for place, eyes in self._eyes.items():
            frames = np.concatenate([one for eye in eyes for one in eye.frames] or [np.zeros(0, int)])
            order = np.argsort(frames, kind="stable")
            if len(frames):
                arrays = {name: np.concatenate([one for eye in eyes for one in getattr(eye, name)]) for name in names}
                known[place] = frames[order], {name: array[order] for name, array in arrays.items()}
        found: dict[Key, dict[int, _Shots]] = {}
        for key in self.cameras:
            by_episode: dict[int, _Shots] = {}
            for number, uses in groupby(self._uses[key], key=lambda use: use.number):
                parts: list[_Shots] = []
                step = 0
                for use in uses:
                    frames, arrays = known.get(use.place, (np.zeros(0, int), {}))
                    wanted = use.frames.array()
                    at = np.minimum(np.searchsorted(frames, wanted), max(0, len(frames) - 1))
                    there = frames[at] == wanted if len(frames) else np.zeros(len(wanted), bool)
                    if there.any():
                        taken = {name: array[at[there]] for name, array in arrays.items()}
                        parts.append(_Shots(step + np.flatnonzero(there), **taken))
                    step += len(wanted)
                if parts:
                    by_episode[number] = parts[0] if len(parts) == 1 else _Shots.joined(parts)
            if by_episode:
                found[key] = by_episode
        return found

    def wanted(self, numbers: Collection[int]) -> list[tuple[int, int]]:
        """Return some frames of episodes, to compare the episodes with each other: pairs of a video and a frame."""
        found: list[tuple[int, int]] = []
        for key in self._references:
            parts = self._parts(key)
            for number in numbers:
                places = [
                    (use.place[0], frame) for use in parts.get(number, ()) for frame in use.frames.array().tolist()
                ]
                found += [places[at] for at in np.linspace(0, len(places) - 1, _COMPARED).astype(int)] if places else []
        return found

    def _parts(self, key: Key) -> dict[int, list[_Use]]:
        found: dict[int, list[_Use]] = defaultdict(list)
        for use in self._uses[key]:
            found[use.number].append(use)
        return found

    def are_same(self, one: int, other: int) -> bool | None:
        """Return whether two episodes have the same frames of kept videos; None if too few were decoded to compare.

        Frames that were encoded again differ a little, so small differences are allowed.
        """
        found: bool | None = True
        for key in self._references:
            if key not in self._by_episode:
                self._by_episode[key] = self._parts(key)
            first, second = (
                [(use.place, use.frames.array().tobytes()) for use in self._by_episode[key].get(number, ())]
                for number in (one, other)
            )
            if first and first == second:
                continue
            seen = self._seen.get(key, {})
            if one not in seen or other not in seen:
                found = None
                continue
            _, at, to = np.intersect1d(seen[one].steps, seen[other].steps, return_indices=True)
            if not len(at):
                found = None
                continue
            for name in ("small", "color"):
                apart = getattr(seen[one], name)[at].astype(np.float32) - getattr(seen[other], name)[to]
                if np.abs(apart).max() > self._limits.view:
                    return False
        return found

    def report(self, report: Report, rows: RowRules, *, whole: bool) -> None:
        """Report unusual pictures; and if the `whole` source was seen, frames that belong to no row."""
        if whole:
            self._surplus(report)
        shots = self._seen = self._shots()
        self.brightness = {
            self._called(key): float(np.mean(np.concatenate([part.light for part in one.values()])))
            for key, one in shots.items()
        }
        starts = dict(zip(report.numbers, np.concatenate(rows.places).tolist() if rows.places else [], strict=True))
        for key, episodes in shots.items():
            _Camera(self._called(key), episodes, rows, starts, self._limits, report).look()
        if len(shots) > 1:
            self._compare_cameras(report, shots)
        groups = [shots, *({key: one} for key, one in shots.items() if len(shots) > 1)]
        for group in groups if shots else ():
            self._compare_states(report, group, rows)

    def _surplus(self, report: Report) -> None:
        """Report frames that no row refers to: at the ends of videos, and between two episodes."""
        for key in self._references:
            found: dict[int, int] = {}
            by_video: dict[int, list[_Use]] = defaultdict(list)
            for use in self._uses[key]:
                by_video[use.place[0]].append(use)
            for video, uses in by_video.items():
                uses.sort(key=lambda use: use.frames.first)
                stride = max(1.0, float(np.median([
                    (use.frames.last - use.frames.first) / max(1, use.frames.rows - 1) for use in uses
                ])))  # fmt: skip
                nexts = [*(use.frames.first for use in uses[1:]), self._frames.get(video, 0)]
                for use, following in zip(uses, nexts, strict=True):
                    if (left := following - 1 - use.frames.last) >= self._limits.surplus * stride:
                        found[use.number] = left
                if uses[0].frames.first >= self._limits.surplus * stride:
                    found[uses[0].number] = uses[0].frames.first
            if found:
                most = max(found.values())
                text = f"{of_episodes(found)}: {self._called(key)}: up to {counted(most, 'frame')} belong to no row"
                report.add(
                    "PIC011",
                    text,
                    episodes=found,
                    figure=most,
                    threshold=self._limits.surplus,
                    components=[self._called(key)],
                )

    def _compare_cameras(self, report: Report, shots: dict[Key, dict[int, _Shots]]) -> None:
        keys = list(shots)
        names = {key: self._called(key) for key in keys}
        means = {
            key: {number: one.small.mean(0, dtype=np.float64) for number, one in shots[key].items()} for key in keys
        }
        family = {key: np.median(list(one.values()), axis=0) for key, one in means.items()}
        for at, one in enumerate(keys):
            for other in keys[:at]:
                both = sorted(shots[one].keys() & shots[other].keys())
                equal, swapped = [], []
                for number in both:
                    first, second = shots[one][number], shots[other][number]
                    if len(first.small) == len(second.small):
                        apart = np.abs(first.small.astype(int) - second.small).mean()
                        if apart < self._limits.equal and first.contrast.mean() > self._limits.flat:
                            equal.append(number)
                    own = np.abs(means[one][number] - family[one]) + np.abs(means[other][number] - family[other])
                    cross = np.abs(means[one][number] - family[other]) + np.abs(means[other][number] - family[one])
                    if cross.mean() < 0.4 * own.mean():
                        swapped.append(number)
                if equal:
                    text = f"{names[other]} and {names[one]} show the same pictures in {of_episodes(equal)}"
                    report.add("PIC006", text, episodes=equal, figure=len(equal), components=[names[other], names[one]])
                elif swapped and len(swapped) < 0.5 * len(both):
                    text = f"{of_episodes(swapped)}: {names[other]} and {names[one]} are swapped"
                    report.add(
                        "PIC007", text, episodes=swapped, figure=len(swapped), components=[names[other], names[one]]
                    )

    def _compare_states(self, report: Report, shots: dict[Key, dict[int, _Shots]], rows: RowRules) -> None:
        """Predict states from pictures by ridge regression on other episodes, and report pictures that do not match.

        The predictions of an episode are correlated with its own states, with the same states some steps later or
        earlier or in reverse order, and with the states of every other episode. Only episodes whose own correlation
        is far below the usual one are reported.
        """
        sights: dict[int, _Sight] = {}
        for number, pose in rows.poses.items():
            parts = [one[number] for one in shots.values() if number in one]
            if len(parts) < len(shots):
                continue
            steps = parts[0].steps
            for part in parts:
                steps = np.intersect1d(steps, part.steps[part.contrast >= self._limits.flat])
            steps = steps[steps < len(pose)]
            if len(steps) < 2 * self._limits.least:
                continue
            parts_of = [part.small[np.isin(part.steps, steps)].astype(np.float64) / 255 for part in parts]
            sights[number] = _Sight(steps, np.concatenate(parts_of, axis=1), pose[steps].astype(np.float64))
        if len(sights) < 4:
            return
        everything = np.concatenate([one.pose for one in sights.values()])
        middle, (lows, highs) = np.median(everything, axis=0), np.quantile(everything, (0.1, 0.9), axis=0)
        use = (np.std(everything, axis=0) > 1e-9) & (highs > lows)
        if not use.any():
            return
        for one in sights.values():  # only changes are compared: the mean of an episode depends on its scene
            one.pose = np.clip((one.pose[:, use] - middle[use]) / (highs - lows)[use], -2, 2)
            one.pose -= one.pose.mean(0)
            one.pictures -= one.pictures.mean(0)
        if not (weight := _predict(sights)).any():
            return
        own = {number: one.agreement() for number, one in sights.items()}
        best = {number: one.best_shift(own[number]) for number, one in sights.items()}
        usual, spread = (float(one) for one in robust(np.array(list(own.values()))))
        if usual < self._limits.fit:
            return
        spread = max(spread, _LEAST_SPREAD)
        lag, jitter = (float(one) for one in robust(np.array([shift for shift, _ in best.values()], float)))
        known = {number for one in report.findings if one.rule[:3] == "PIC" for number in one.episodes}
        placed = {number for one in report.findings if one.rule in {"PIC008", "PIC009"} for number in one.episodes}
        poor = sorted((number for number in sights if own[number] < usual - 2 * spread), key=own.__getitem__)
        shown = [self._called(key) for key in shots]
        names = np.flatnonzero(use)[np.argsort(-weight)[:2]]
        shown += [place for at in names for place in rows.states.places(np.arange(len(use)) == at)]
        for number in poor[:_MOST_POOR]:
            if number in placed:
                continue
            one, most = sights[number], usual - spread / 2
            shift, shifted = best[number]
            away, turned = shift - round(lag), one.agreement(turned=True)
            fits = {other: one.agreement(of) for other, of in sights.items() if other != number}
            other = max(fits, key=fits.__getitem__)
            strange = own[number] < usual - 6 * spread or sights[other].agreement(one) > own[other] + _GAIN
            late = abs(away) >= max(self._limits.lag, 2 * jitter) and own[number] < usual - 3 * spread
            others = [own[other] for other in sights if other not in {number, *known}]
            sure = usual > _SURE and len(others) > 2 and min(others) > usual - self._limits.disagreement / 2
            rule, figure, threshold = "PIC009", own[number], usual
            if turned > max(own[number] + _BETTER, usual - max(2 * spread, 2 * _GAIN), shifted, fits[other]):
                text = "pictures match the states in reverse order, but not in their own"
            elif strange and fits[other] > max(own[number] + _GAIN, most, shifted):
                text = f"pictures match the states of episode {other} instead"
            elif late and shifted > max(own[number] + _GAIN, most):
                rule, figure, threshold = "PIC008", away, self._limits.lag
                when = f"{abs(away)} steps {'later' if away > 0 else 'earlier'}"
                text = f"pictures match the states {when} better than those of their own step"
            elif number not in known and sure and own[number] < usual - max(self._limits.disagreement, 6 * spread):
                text = "pictures do not change along with the states, as they do in the other episodes"
            else:
                continue
            about = f"episode {number}: {text}"
            report.add(rule, about, episodes=[number], figure=figure, threshold=threshold, components=shown)


@dataclass
class _Sight:
    """Pictures and states of an episode at the same steps, and `guess`, the states predicted from the pictures."""

    steps: Array
    pictures: Array
    pose: Array
    guess: Array = field(default_factory=lambda: np.zeros(0))

    def agreement(self, of: _Sight | None = None, *, shift: int = 0, turned: bool = False) -> float:
        """Return the correlation of the prediction with the states, or with another episode's; 0 if undefined.

        Args:
            of: the other episode.
            shift: take the states this number of steps later.
            turned: take the states in reverse order.
        """
        guess, pose = self.guess, self.pose
        if of is not None:
            _, here, there = np.intersect1d(self.steps, of.steps, assume_unique=True, return_indices=True)
            if len(here) < max(len(self.steps), len(of.steps)) / 2:
                return 0.0
            guess, pose = guess[here], of.pose[there]
        elif turned:
            pose = pose[::-1]
        elif shift:
            guess = guess[max(0, -shift) : len(guess) - max(0, shift)]
            pose = pose[max(0, shift) : len(pose) + min(0, shift)]
        guess, pose = guess - guess.mean(0), pose - pose.mean(0)
        both = float(np.sqrt((guess * guess).sum() * (pose * pose).sum()))
        return float((guess * pose).sum()) / both if both > 1e-12 else 0.0

    def best_shift(self, own: float) -> tuple[int, float]:
        """Return the shift of the states that matches best, and its correlation; 0 and `own` if no shift is better."""
        regular = len(self.steps) == self.steps[-1] - self.steps[0] + 1
        shifts = [one for one in _SHIFTS if one and regular and abs(one) <= len(self.steps) // 2]
        best, shift = max([(self.agreement(shift=one), one) for one in shifts], default=(own, 0))
        return (shift, best) if best > own else (0, own)


def _predict(sights: Mapping[int, _Sight]) -> Array:
    """Predict the states of each episode by a regression on the other folds, and set its `guess`.

    The regression runs twice, the second time without the episodes that the first one predicts badly, so that these do
    not spoil the predictions of others. States and predictions are then weighted by the share of variance of each
    component that pictures explain; these weights are returned.
    """
    numbers = list(sights)
    folds, used = min(len(numbers), _FOLDS), set(numbers)
    for _ in range(2):
        chosen = [[sights[number] for number in numbers[fold::folds] if number in used] for fold in range(folds)]
        width, count = sights[numbers[0]].pictures.shape[1], sights[numbers[0]].pose.shape[1]
        grams = [sum((one.pictures.T @ one.pictures for one in part), np.zeros((width, width))) for part in chosen]
        products = [sum((one.pictures.T @ one.pose for one in part), np.zeros((width, count))) for part in chosen]
        gram, product = sum(grams), sum(products)
        for fold in range(folds):
            rest = gram - grams[fold]
            ridge = (_RIDGE * np.trace(rest) / width + 1e-12) * np.eye(width)
            weights = np.linalg.solve(rest + ridge, product - products[fold])
            for number in numbers[fold::folds]:
                sights[number].guess = sights[number].pictures @ weights
        errors = np.array([((one.guess - one.pose) ** 2).mean(0) for one in sights.values()])
        total = np.array([one.pose.var(0) for one in sights.values()])
        usual = np.median(total, axis=0)
        fit = np.where(usual > 1e-6, 1 - np.median(errors, axis=0) / np.maximum(usual, 1e-12), 0).clip(0)
        left = errors @ fit / np.maximum(total @ fit, 1e-12)
        used = {number for number, share in zip(numbers, left.tolist(), strict=True) if share <= 2 * np.median(left)}
    for one in sights.values():
        one.guess, one.pose = one.guess * np.sqrt(fit), one.pose * np.sqrt(fit)
    return np.asarray(fit)


@dataclass
class _Camera:
    """The pictures of one camera, by episode; `starts` has the first row of each episode."""

    name: str
    shots: dict[int, _Shots]
    rows: RowRules
    starts: dict[int, int]
    limits: Thresholds
    report: Report
    found: dict[str, list[tuple[int, str, list[tuple[int, int]], float, float]]] = field(default_factory=dict)

    def look(self) -> None:
        """Report unusual pictures and runs of pictures."""
        changes = np.concatenate([one.change for one in self.shots.values()])
        changes = changes[np.isfinite(changes)]
        if not len(changes):
            changes = np.zeros(1, np.float32)
        self._usual, self._calm = float(np.median(changes)), float(np.quantile(changes, 0.2))
        repeats = {number: self._repeated(one) for number, one in self.shots.items()}
        usual = float(np.quantile([one.mean() for one in repeats.values()], 0.75))
        self._sharp = float(np.median(np.concatenate([one.sharp for one in self.shots.values()])))
        lights = np.concatenate([np.abs(np.diff(one.light)) for one in self.shots.values()])
        self._flicker = float(np.quantile(lights, 0.95)) if len(lights) else 0.0
        for number, one in self.shots.items():
            flat = self._flat(number, one)
            self._frozen(number, one, flat)
            self._glitches(number, one, flat)
            self._exposure(number, one, flat)
            share = float(repeats[number].mean())
            if len(one.steps) >= 20 and share > max(self.limits.repeated, 2 * usual + 0.2):
                text = f"repeats the previous picture in {share:.0%} of the steps"
                self._add("PIC001", number, text, one.steps[repeats[number]], share, self.limits.repeated)
        self._blur()
        self._looks()
        self._tell()

    def _repeated(self, one: _Shots) -> Array:
        """Mark pictures that repeat the previous one between two changes, as a camera slower than the rate does."""
        change = np.nan_to_num(one.change, nan=np.inf)
        calm, changed = change < self.limits.calm * self._usual, (change > 0.6 * self._usual) & np.isfinite(change)
        found = np.zeros(len(change), bool)
        found[1:-1] = calm[1:-1] & changed[:-2] & changed[2:]
        return found

    def _add(self, rule: str, number: int, text: str, steps: Array, figure: float, threshold: float) -> None:
        places = runs_of(steps + self.starts.get(number, 0))
        self.found.setdefault(rule, []).append((number, text, places, figure, threshold))

    def _tell(self) -> None:
        """Report the findings of each rule: for more than three episodes together, with the worst one as text."""
        for rule, found in self.found.items():
            by_number = {
                number: [one for one in found if one[0] == number] for number in dict.fromkeys(one[0] for one in found)
            }
            for group in [found] if len(by_number) > 3 else by_number.values():
                worst = max(group, key=lambda one: sum(stop - start for start, stop in one[2]))
                numbers = list(dict.fromkeys(one[0] for one in group))
                self.report.add(
                    rule, f"{of_episodes(numbers)}: {self.name}: {worst[1]}", episodes=numbers,
                    steps=[place for one in group for place in one[2]], figure=worst[3], threshold=worst[4],
                    components=[self.name],
                )  # fmt: skip

    def _flat(self, number: int, one: _Shots) -> Array:
        """Report black and white pictures, and return a mask of them."""
        even = one.contrast < self.limits.flat
        black, white = even & (one.light < self.limits.dark), even & (one.light > 255 - self.limits.dark)
        for which, word in ((black, "black"), (white, "white")):
            if which.any():
                text = f"{int(which.sum()):,} of {len(which):,} pictures are {word}"
                self._add("PIC002", number, text, one.steps[which], float(one.light[which].mean()), self.limits.dark)
        return np.asarray(black | white)

    def _frozen(self, number: int, one: _Shots, flat: Array) -> None:
        change = np.fmin(one.change, one.change_two)
        known = np.isfinite(change)
        pose = self.rows.poses.get(number)
        if pose is None or not len(pose):
            return
        still = (change < self.limits.calm * max(self._calm, 0.2)) & ~flat & known
        steps, quiet, small = one.steps[known], still[known], one.small[known].astype(np.int16)
        runs: list[tuple[int, int]] = []
        for begin, end in ranges_of(quiet):
            joins = runs and begin - runs[-1][1] == 1 and min(end - begin, runs[-1][1] - runs[-1][0]) >= 4
            # The key frame of a video differs a little from the frames before and after it.
            if joins and np.abs(small[begin] - small[runs[-1][1] - 1]).mean() < 1:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((begin, end))
        spread = np.maximum(self.rows.states.spread[: pose.shape[1]], 1e-12)
        for begin, end in runs:
            first, last = int(steps[begin]), int(steps[end - 1])
            length = last - first + 1
            if length < self.limits.frozen_pictures or end - begin < 4:
                continue
            part = pose[first : min(last + 1, len(pose))]
            least = self.limits.moved
            if self._calm > 0.3 and np.median(change[known][begin:end]) < 0.1 * self._calm:
                least /= 4  # not even the noise of a camera is there
            if len(part) and float(((part.max(0) - part.min(0)) / spread).mean()) > least:
                self._add("PIC001", number, f"shows the same picture for {length} steps while the robot moves",
                          np.arange(first, last + 1), length, self.limits.frozen_pictures)  # fmt: skip

    def _glitches(self, number: int, one: _Shots, flat: Array) -> None:
        if len(one.steps) < 4 or self._usual <= 0:
            return
        least = self.limits.glitch * max(self._usual, 0.5)
        here, after, across = one.change[:-1], one.change[1:], one.change_two[1:]
        single = (here > least) & (after > least) & (across < 0.5 * np.minimum(here, after))
        single &= ~flat[:-1] & ~flat[1:] & (np.diff(one.steps) == 1)
        single[1:] &= ~flat[:-2]
        odd = np.append(single, False)
        jumps = np.flatnonzero(one.change > least)
        small = one.small.astype(np.int16)
        for begin, end in pairwise(jumps.tolist()):
            steady = (
                begin > 0
                and 1 < end - begin <= _LONGEST_GLITCH
                and one.steps[end] - one.steps[begin - 1] == end - begin + 1
            )
            if steady and not flat[begin - 1 : end + 1].any():
                across_all = np.abs(small[end] - small[begin - 1]).mean()
                inside = np.abs(small[begin:end] - small[begin - 1]).mean(1).min()
                odd[begin:end] |= across_all < 0.4 * inside and inside > self.limits.view
        if odd.any():
            figure = float(one.change[odd].max() / max(self._usual, 0.5))
            text = f"{counted(int(odd.sum()), 'picture')} unlike those before and after"
            self._add("PIC003", number, text, one.steps[odd], figure, self.limits.glitch)

    def _exposure(self, number: int, one: _Shots, flat: Array) -> None:
        light = one.light
        least = max(self.limits.exposure, 6 * self._flicker)
        if len(light) < 8:
            return
        for at in np.flatnonzero(np.abs(np.diff(light)) > least).tolist():
            before, after = slice(max(0, at - 4), at + 1), slice(at + 1, at + 6)
            jump = float(np.median(light[after]) - np.median(light[before]))
            if abs(jump) > 0.7 * least and not flat[before].any() and not flat[after].any():
                text = f"gets {'brighter' if jump > 0 else 'darker'} by {abs(jump):.0f} of 255 in a single step"
                self._add("PIC005", number, text, one.steps[[at + 1]], abs(jump), least)
                return

    def _blur(self) -> None:
        usual = max(1.0, float(np.median(np.concatenate([one.contrast for one in self.shots.values()]))))
        low_in = {
            number: (one.sharp < self.limits.sharp * self._sharp * np.minimum(one.contrast / usual, 1))
            & (one.contrast >= self.limits.flat)
            for number, one in self.shots.items()
        }
        if self._sharp < 1 or np.median([low.mean() for low in low_in.values()]) > 0.02:
            return
        for number, low in low_in.items():
            one = self.shots[number]
            if low.sum() >= max(5, self.limits.blurred * len(low)):
                figure = float(np.median(one.sharp[low]) / self._sharp)
                text = f"{int(low.sum())} of {len(low)} pictures are blurred, with {figure:.0%} of the usual sharpness"
                self._add("PIC004", number, text, one.steps[low], figure, self.limits.sharp)

    def _looks(self) -> None:
        """Compare brightness, colours and view of whole episodes."""
        whole = {number: one for number, one in self.shots.items() if (one.contrast >= self.limits.flat).mean() > 0.9}
        if len(whole) < 5:
            return
        numbers = list(whole)
        color = np.array([np.median(one.color, axis=0) for one in whole.values()])
        small = np.array([np.median(one.small, axis=0) for one in whole.values()])
        light, tint = color.mean(1), color - color.mean(1, keepdims=True)
        view = small - small.mean(1, keepdims=True)
        sharp = np.array([np.median(one.sharp) for one in whole.values()])
        usual = np.median(tint, axis=0)
        for what, found, least in (
            ("brightness", np.abs(light - np.median(light)), self.limits.brightness),
            ("colours", np.abs(tint - usual).max(1), self.limits.colours),
            ("view", np.abs(view - np.median(view, axis=0)).mean(1), self.limits.view),
            ("noise", np.maximum(sharp - np.median(sharp), 0), max(1.0, self.limits.grain * float(np.median(sharp)))),
        ):
            middle, spread = map(float, robust(found))
            most = max(least, middle + 8 * spread)
            for at in np.flatnonzero(found > most).tolist() if (found > most).mean() < 0.3 else ():
                swapped = what == "colours" and np.abs(tint[at][::-1] - usual).max() < 0.4 * found[at]
                verb = "differ" if what == "colours" else "differs"
                text = f"{what} {verb} from the other episodes by {found[at]:.0f} of 255"
                text += ", as if red and blue were swapped" if swapped else ""
                self._add("PIC010", numbers[at], text, whole[numbers[at]].steps, float(found[at]), most)
