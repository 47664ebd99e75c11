"""`score`: how good each episode is as a demonstration, compared with the other episodes of its dataset.

There is nothing to train or to configure: a figure is computed for each episode and compared with the median of all
episodes, in units of their spread, the median absolute deviation (MAD). The same formulas therefore fit a pendulum in
radians and an arm in degrees, as long as most episodes are good.

Every score is a number from 0 to 1, and more is better:

- `smooth`: states and actions change without jerks. The figure is the mobility of the velocity, which is the root of
  the ratio of the powers of acceleration and velocity (Hjorth, 1970) and depends neither on units nor on the length.
- `moving`: the motion does not stall. The figures are the share of steps in which nothing moves, and the share in which
  the pace is below a twentieth of the usual one, both among all steps and among those between the first and the last
  motion (idle time; Hoffman, 2019).
- `agreement`: in the same state, other episodes of the same task take the same action, with the same effect. The
  figures are the distances of actions, and of changes of the state, from their median at the nearest states of the
  seven nearest episodes, after a linear fit (action consistency; Belkhale, Cui and Sadigh, 2023).
- `typical`: length, path, first and last state, and means and deviations of states and actions resemble those of the
  other episodes of the same task. The figure is the root of the 4-norm of their robust z-scores.
- `novelty`: no other episode visits the same states. The score is d / (d + m), where d is the median distance of its
  states to the nearest state of another episode, and m the median of d (Lehman and Stanley, 2011). A copy has 0.
- `coverage`: how much of the dataset an episode represents. The score is the share of the states of all other episodes
  that are within the usual distance of one of its states (Naeem et al., 2020).
- `quality`: the product of the first four. It leaves out novelty and coverage, because an episode that is unlike all
  others may be the best one.

Figures become scores by a logistic function of their modified z-score, 0.6745 (x - median) / MAD, which is 0.5 at 3.5,
where Iglewicz and Hoaglin (1993) call a value an outlier: a typical episode has 0.97.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import CorruptDataError, UsageError
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.episodes import SCORE
from ..format.files import FileRecord
from ..format.language import TASK
from ..format.locate import find_dataset, require_apart
from ..format.manifest import SCORES, Manifest, Provenance, content_digest
from ..format.memmap.builder import created_by, provenance_step
from ..format.memmap.reader import FolderReader
from ..format.mixture import refuse_mixture
from ..format.open_files import pread_into
from ..format.staging import Outcome, Publication, Staging, share_files
from ..format.syncing import NewFile
from ..format.videos import reference_keys
from ..open_steps import finished_manifest, open_steps
from ..options import takes
from ..progress import Progress, counted
from ..results import Result, seconds_since
from ..saved_steps import has_steps
from ..ted.schema import ACTION, Field, as_numbers, is_floating
from .options import ScoreOptions

NAMES = ("quality", "smooth", "moving", "agreement", "typical", "coverage", "novelty")
_LEAST = 3
"""The least number of episodes that can be compared with each other."""
_FEW_EPISODES = 10
_OUTLIER = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScores:
    """The scores of an episode, from 0 to 1; None for a score whose fields the dataset lacks."""

    episode: int
    length: int
    quality: float | None
    smooth: float | None
    moving: float | None
    agreement: float | None
    typical: float | None
    coverage: float | None
    novelty: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult(Result):
    """The scores of all episodes, in storage order; `path` is the copy of the dataset with the scores, if any.

    `looked_at` names the fields that were compared.
    """

    kind: ClassVar[str] = "score"
    source: Path
    path: Path | None
    steps: int
    episodes: int
    content_digest: str | None
    looked_at: tuple[str, ...]
    scores: tuple[EpisodeScores, ...]
    notes: tuple[str, ...] = ()
    already_there: bool = False
    dry_run: bool = False
    seconds: float = 0.0


@takes(ScoreOptions)
def score(asked: ScoreOptions) -> ScoreResult:
    """Score each episode of a dataset from 0 to 1, for example for smoothness, stalls, agreement and novelty.

    Episodes are compared with each other, for some scores only with others of the same task. Most of them must be good:
    a flaw that all share is not noticed. All steps are read, in bounded memory; states are compared at some steps of
    each episode. Kept videos are ignored.

    With `dest`, a copy of the dataset is written that has the scores as columns of its episode table, `score.quality`
    and so on. Its rows and its content digest stay the same. Conditions of `preprocess` can name the scores, `split`
    can divide by them, and `mix` and `load_dataset(..., weights="score.quality")` can draw by them. Verbs that copy
    whole episodes keep them.

    Args:
        dataset: a path or `source:id`.
        dest: the folder to write a copy of the dataset with the scores to; default: none is written.
        root: where stored datasets are.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The scores of each episode.

    Raises:
        UsageError: there are too few episodes to compare, there are no states, images or actions in numbers, or `dest`
            is given and the input is not the folder of a dataset.
        DatasetNotFoundError, CorruptDataError: the dataset does not exist, or is damaged.
        OutOfSpaceError: the disk has no room for the copy.

    >>> from pathlib import Path
    >>> from rbtool.core.testing.datasets import write_walks
    >>> written = write_walks(Path("walks"), [(50, "terminated"), (40, "truncated"), (60, "terminated")])
    >>> result = score("walks", "scored")
    >>> result.content_digest == written.content_digest, [one.length for one in result.scores]
    (True, [50, 40, 60])
    """
    started, path = time.perf_counter(), find_dataset(asked.dataset, asked.root)
    refuse_mixture(path)
    has_steps(path)
    with open_steps(path) as reader:
        destination = None if asked.dest is None else fs.expanded(asked.dest).absolute()
        if destination is not None:
            require_apart(path, destination)
            if not isinstance(reader, FolderReader) or reader.manifest.kind != "dataset" or not reader.has_digests:
                raise UsageError(
                    f"{path} is not the folder of a dataset, which a copy with scores needs",
                    hint=f"convert it first: rbtool convert {shlex.quote(str(path))} DATASET",
                )
        found = _Scoring(reader, asked.reporter)
        changes: dict[str, Any] = {"dry_run": asked.dry_run}
        if destination is None:
            scores = found.scores()
        else:
            assert isinstance(reader, FolderReader)
            copy = _Copy(reader, os.fspath(asked.dataset), asked.reporter)
            publication = copy.publication(destination, force=asked.force, dry_run=asked.dry_run)
            there = publication.prepare(lambda: Outcome(reader.manifest))
            scores = found.scores()
            changes = (there or publication.publish(lambda staging: copy.build(staging, scores))).entries
        table = reader.episodes
        columns = [table.episode.tolist(), table.length.tolist(), *(_listed(scores[name]) for name in NAMES)]
        entries: dict[str, Any] = {
            "source": reader.path, "path": destination, "steps": reader.manifest.steps, "episodes": len(table),
            "content_digest": reader.manifest.content_digest if reader.has_digests else None,
            "looked_at": tuple(found.looked_at), "notes": tuple(found.notes), "seconds": seconds_since(started),
            "scores": tuple(
                EpisodeScores(**dict(zip(("episode", "length", *NAMES), row, strict=True)))
                for row in zip(*columns, strict=True)
            ),
        }  # fmt: skip
        return ScoreResult(**entries | changes)


def _listed(values: Array) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


# A copy with scores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """A copy of a dataset, file by file, with scores added to its episode table."""

    reader: FolderReader
    dataset: str
    reporter: Progress

    @property
    def _kept(self) -> list[FileRecord]:
        return [file for file in self.reader.manifest.files if not file.path.startswith(SCORES)]

    @property
    def _step(self) -> Provenance:
        inputs = {"content_digest": self.reader.manifest.content_digest}
        return provenance_step("score", {"dataset": self.dataset}, inputs)

    def publication(self, destination: Path, *, force: bool, dry_run: bool) -> Publication[Manifest]:
        """Return the publication of the copy; an existing copy of the same content with scores is kept."""

        def there() -> Manifest | None:
            found, step = finished_manifest(destination), self._step
            last = found.provenance[-1] if found is not None and found.provenance else None
            same = last is not None and (last.verb, last.inputs, last.version) == (step.verb, step.inputs, step.version)
            return found if same else None

        size = sum(file.size for file in self._kept)
        return Publication(
            staging=Staging(destination, replace=force), find=there, needed=lambda: size, dry_run=dry_run
        )  # fmt: skip

    def build(self, staging: Staging, scores: Mapping[str, Array]) -> Outcome[Manifest]:
        """Copy all files, verify their digests, and add the scores."""
        self.reporter.start("copying", sum(file.size for file in self._kept), "bytes")
        for file in self._kept:
            self._copy(file, staging.path)
        self.reporter.done()
        columns = {f"{SCORE}{name}": values for name, values in scores.items()}
        added = replace(self.reader.episodes, scores=columns).save_scores(staging.path)
        manifest, files = self.reader.manifest, tuple(sorted([*self._kept, *added]))
        made = replace(
            manifest,
            files=files,
            content_digest=content_digest(files),
            created_by=created_by(),
            provenance=(*manifest.provenance, self._step),
        )
        share_files(staging.path, made, [self.reader], links=True)
        made.save(staging.path)
        return Outcome(made)

    def _copy(self, file: FileRecord, folder: Path) -> None:
        files, path = self.reader.listed, self.reader.path / file.path
        with closing(NewFile(folder / file.path, expected=file.size)) as copy:
            for start in range(0, file.size, _PIECE):
                part = np.empty(min(_PIECE, file.size - start), np.uint8)
                pread_into(part, files.descriptor(file.path), path, start, "its end")
                copy.append(part.data)
                self.reporter.advance(len(part))
            copy.complete()
        if (copy.size, copy.digest) != (file.size, file.digest):
            raise CorruptDataError(f"{self.reader.path / file.path} does not match its digest in the manifest")


# Figures of episodes -------------------------------------------------------------------------------------

_PIECE = 4 << 20
_BLOCK, _LONGEST = 1 << 21, 1 << 24
"""The numbers (of states and actions) that are read at once for whole episodes, and the most for a longer episode."""
_MOST_WIDE = 512
"""The most numbers per row of a field that is compared as a vector."""
_MOST_VALUES = 64
"""The most values of a discrete action that is compared by equality."""
_FAMILY = 64
"""The number of episodes, evenly spread, from which the scales of components are estimated."""
_FEW = 16
"""The number of episodes from which the usual distance to the nearest states of others is estimated."""
_STATES, _SAMPLES = 1 << 14, (4, 128)
"""About how many states are compared with each other, and the least and most per episode."""
_PICTURE_SAMPLES, _CELLS = 24, 8
_WIDEST = 64
_NEIGHBOURS = 7
_SLOW = 0.05
_RESOLUTION = 0.01
"""Added to figures before their logarithm is taken, so that tiny differences do not count."""
_RIDGE = 1e-3
_MOST_TASKS = 1000


class _Scoring:
    """Computes figures of all episodes of a dataset, and turns them into scores."""

    def __init__(self, reader: StepReader, reporter: Progress) -> None:
        self._reader = reader
        self._reporter = reporter
        self._table = reader.episodes
        self.notes: list[str] = []
        count = len(self._table)
        if count < _LEAST:
            raise UsageError(
                f"{reader.path} has {count} episode{'s' * (count != 1)}: scores compare episodes with each other, "
                f"expected {_LEAST} or more"
            )
        fields = [one for one in reader.fields if one.role not in ("text", "id") and "complex" not in one.dtype]
        self._states = [one for one in fields if one.key[0] == "observation" and 0 < _width(one) <= _MOST_WIDE]
        self._states = [one for one in self._states if not _is_picture(one)]
        self._pictures = [one for one in fields if one.key[0] == "observation" and _is_picture(one)]
        self._actions = [one for one in fields if one.key[0] == ACTION[0] and 0 < _width(one) <= _MOST_WIDE]
        self.looked_at = [one.name for one in (*self._states, *self._pictures, *self._actions)]
        if not self.looked_at:
            raise UsageError(f"{reader.path} has no states or actions in numbers and no images to compare")
        if count < _FEW_EPISODES:
            self.notes.append(f"there are only {count} episodes, from which medians are unreliable")
        if reference_keys(reader.fields):
            self.notes.append("images in kept videos are not compared")
        self._values = {one.key: self._values_of(one) for one in self._actions if not is_floating(one.dtype)}
        width = max(1, self._state_rows(0, 0).shape[1] + self._action_rows(0, 0).shape[1])
        self._block_rows = max(1, _BLOCK // width)
        self._lengths = np.minimum(self._table.length, _LONGEST // width)
        if longer := int((self._lengths < self._table.length).sum()):
            self.notes.append(
                f"only the first {_LONGEST // width:,} steps of {counted(longer, 'episode')} are compared"
            )
        self._not_finite = np.zeros(count, bool)
        self._figures: dict[str, list[Array]] = defaultdict(list)
        self._parts_of_family: list[int] = []
        self._estimate_scales()

    def _values_of(self, field: Field) -> Array:
        """Return the values of a discrete action, for one-hot encoding; none if there are too many."""
        low, high = self._reader.manifest.ranges.get(field.key) or (0, 1 if field.dtype == "bool" else _MOST_VALUES)
        count = int(high) - int(low) + 1
        return np.arange(int(low), int(high) + 1) if _width(field) * count <= _MOST_VALUES else np.zeros(0, np.int64)

    def _estimate_scales(self) -> None:
        """Estimate the ranges of states and the deviations of all components from some episodes."""
        table = self._table
        some = np.unique(np.linspace(0, len(table) - 1, _FAMILY).astype(np.int64))
        most = max(2, self._block_rows // len(some))
        spans = [(int(table.start[row]), min(int(table.length[row]), most)) for row in some]
        states = [_finite(self._state_rows(start, start + length)) for start, length in spans]
        actions = np.concatenate([_finite(self._action_rows(start, start + length)) for start, length in spans])
        states = [one for one in states if len(one)] or [np.zeros((1, self._state_rows(0, 0).shape[1]), np.float32)]
        changes = [np.diff(one, axis=0) for one in states]
        joined = np.concatenate(states)
        ranges = np.median([np.ptp(one, axis=0) for one in states], axis=0)
        self._deviation = _above_zero(joined.std(0))
        self._range = np.where(ranges > 1e-6 * self._deviation, ranges, self._deviation)
        self._change = _above_zero(np.concatenate(changes).std(0) if len(joined) > len(states) else joined.std(0))
        self._action_deviation = _above_zero(actions.std(0) if len(actions) else np.zeros(actions.shape[1]))
        paces = [self._pace(one).mean() for one in changes if len(one)]
        self._pace_of_family = float(np.median(paces)) if paces else 0.0

    def _pace(self, changes: Array) -> Array:
        return np.asarray(np.abs(changes / self._range).mean(1)) if changes.shape[1] else np.zeros(len(changes))

    def _state_rows(self, start: int, stop: int) -> Array:
        return self._joined([self._numbers(one, start, stop) for one in self._states], stop - start)

    def _action_rows(self, start: int, stop: int) -> Array:
        parts = []
        for one in self._actions:
            rows, values = self._numbers(one, start, stop), self._values.get(one.key, np.zeros(0))
            if len(values):
                rows = (rows[:, :, None] == values).reshape(len(rows), rows.shape[1] * len(values))
            parts.append(rows)
        return self._joined(parts, stop - start)

    def _numbers(self, field: Field, start: int, stop: int) -> Array:
        return as_numbers(self._reader.view(field.key, start, stop), field.dtype).reshape(stop - start, _width(field))

    @staticmethod
    def _joined(parts: Sequence[Array], rows: int) -> Array:
        return np.concatenate([np.zeros((rows, 0), np.float32), *parts], axis=1, dtype=np.float32)

    # The pass over rows ------------------------------------------------------------------------------

    def scores(self) -> dict[str, Array]:
        """Return the scores by name, float64 `[episodes]`; NaN if a score cannot be computed."""
        self._reporter.start("scoring", self._reader.manifest.steps, "steps")
        samples = self._samples_of_an_episode()
        kept: list[list[Array]] = [[], [], []]
        for rows in self._blocks():
            for store, seen in zip(kept, self._measure(rows, samples), strict=True):
                store.append(seen)
        self._reporter.done()
        figures = {name: np.concatenate(parts) for name, parts in self._figures.items()}
        tasks = self._tasks()
        states, actions, changes = (np.concatenate(parts) for parts in kept)
        near = _Neighbours(states, tasks, self._reporter)
        agreements = [near.disagreement(actions)] if actions.shape[2] else []
        agreements += [near.disagreement(changes, actions)] if changes.shape[2] else []
        worst = {
            "smooth": [_modified_z(_logarithm(figures[name])) for name in ("jerks", "action_jerks") if name in figures],
            "moving": [_modified_z(figures[name], 0.02) for name in ("stalls", "slow", "still") if name in figures],
            "agreement": [_modified_z(_logarithm(one)) for one in agreements],
            "typical": [_modified_z(np.sqrt(self._distance_to_family(figures["family"], tasks)))],
        }
        found = {}
        for name, each in worst.items():
            known = [one for one in each if not np.isnan(one).all()]
            found[name] = _logistic(np.fmax.reduce(known)) if known else np.full(len(self._table), np.nan)
        quality = np.nanprod([found[name] for name in worst], axis=0)
        quality[np.isnan([found[name] for name in worst]).all(0)] = np.nan
        if self._not_finite.any():
            number = int(self._not_finite.sum())
            self.notes.append(f"{number:,} of {len(quality):,} episodes have NaN or infinite values: quality 0")
            quality[self._not_finite] = 0.0
        every = {"quality": quality, **found, "coverage": near.coverage(), "novelty": near.novelty()}
        return {name: np.asarray(every[name], np.float64) for name in NAMES}

    def _samples_of_an_episode(self) -> int:
        """Return the number of steps per episode at which states are compared."""
        least, most = _SAMPLES
        fitting = int(np.clip(_STATES // len(self._table), least, most))
        return min(fitting, int(self._table.length.max()), _PICTURE_SAMPLES if self._pictures else fitting)

    def _blocks(self) -> Iterator[slice]:
        """Yield slices of the episode table whose steps fit into a block, each with at least one episode."""
        table = self._table
        first = 0
        while first < len(table):
            fits = np.searchsorted(table.start + table.length, table.start[first] + self._block_rows, "right")
            last = max(first + 1, int(fits))
            yield slice(first, last)
            first = last

    def _measure(self, rows: slice, samples: int) -> tuple[Array, Array, Array]:
        """Compute the figures of some episodes; return states, actions and changes of states at some of their steps.

        `begins` are the rows of the block at which its episodes start: `np.add.reduceat(values, begins)` sums over
        each episode.
        """
        lengths = self._lengths[rows]
        start, stop = int(self._table.start[rows][0]), int(self._table.start[rows][-1] + lengths[-1])
        begins = self._table.start[rows] - start
        states, actions = self._state_rows(start, stop), self._action_rows(start, stop)
        for one in (states, actions):
            odd = ~np.isfinite(one).all(1)
            if odd.any():
                self._not_finite[rows] |= np.add.reduceat(odd, begins) > 0
                one[odd] = np.nan_to_num(one[odd], nan=0.0, posinf=0.0, neginf=0.0)
        change = _steps(states, begins)
        self._measure_motion(states, change, actions, begins, lengths)
        states = _narrowed(states / self._deviation)
        self._measure_family(states, change, actions, begins, lengths)
        # The change that follows the last step is not in these rows, so that an earlier step is taken.
        places = begins[:, None] + (np.linspace(0, 1, samples) * np.maximum(lengths - 2, 0)[:, None]).astype(np.int64)
        following = np.minimum(places + 1, (begins + lengths - 1)[:, None])
        seen = np.concatenate([states[places], *self._thumbnails(places + start)], axis=2)
        self._reporter.advance(int(self._table.length[rows].sum()))
        return seen, actions[places] / self._action_deviation, change[following] / self._change

    def _measure_motion(self, states: Array, change: Array, actions: Array, begins: Array, lengths: Array) -> None:
        """Compute jerks, and the shares of slow and still steps of each episode.

        A stall is a slow step with motion before and after it: `before` counts the moving steps of the episode up to
        each row, and `total` all of them.
        """
        if states.shape[1]:
            self._figures["jerks"].append(_mobility(change / self._range, begins))
            steps, pace = np.maximum(lengths - 1, 1), self._pace(change)
            slow, still = pace < _SLOW * self._pace_of_family, pace <= 1e-6
            slow[begins], still[begins] = False, False
            self._figures["slow"].append(np.add.reduceat(slow, begins, dtype=np.int64) / steps)
            self._figures["still"].append(np.add.reduceat(still, begins, dtype=np.int64) / steps)
            moves = ~slow
            moves[begins] = False
            which = np.repeat(np.arange(len(begins)), lengths)
            before: Array = np.cumsum(moves) - np.repeat((np.cumsum(moves) - moves)[begins], lengths)
            total = np.add.reduceat(moves, begins, dtype=np.int64)
            inside = slow & (before > 0) & (before < total[which])
            self._figures["stalls"].append(np.add.reduceat(inside, begins, dtype=np.int64) / steps)
        continuous = self._continuous_actions()
        if continuous.any():
            velocity = _steps(actions[:, continuous], begins) / self._action_deviation[continuous]
            self._figures["action_jerks"].append(_mobility(velocity, begins))

    def _continuous_actions(self) -> Array:
        found = [np.zeros(0, bool)]
        for one in self._actions:
            columns = _width(one) * max(1, len(self._values.get(one.key, ())))
            found.append(np.full(columns, is_floating(one.dtype)))
        return np.concatenate(found)

    def _measure_family(self, states: Array, change: Array, actions: Array, begins: Array, lengths: Array) -> None:
        """Collect a vector that describes each episode as a whole, in units of the deviations of components."""
        ends = begins + lengths - 1
        parts = [np.log(lengths)[:, None]]
        if states.shape[1]:
            path = np.add.reduceat(self._pace(change), begins)
            parts += [np.log(path + 1e-3)[:, None], states[begins], states[ends]]
            parts += _moments(states, begins, lengths)
        if actions.shape[1]:
            parts += _moments(actions / self._action_deviation, begins, lengths)
        self._figures["family"].append(np.concatenate(parts, axis=1).astype(np.float32))
        self._parts_of_family = [part.shape[1] for part in parts]

    def _thumbnails(self, steps: Array) -> list[Array]:
        """Return small copies of images at steps `[episodes, samples]`; each field weighs as much as all states."""
        found = []
        for field in self._pictures:
            small = np.array([_shrunk(self._numbers(field, at, at + 1).reshape(field.shape)) for at in steps.flat])
            small = small.reshape(*steps.shape, -1).astype(np.float32)
            weight = np.sqrt(max(1, len(self._deviation)) / small.shape[2])
            found.append(small * weight / 64)  # 64 is about the standard deviation of pixels from 0 to 255
        return found

    # Comparison of episodes ----------------------------------------------------------------------------

    def _tasks(self) -> Array:
        """Return the number of the task of each episode; 0 for all if no task is known or there are too many."""
        texts = self._reader.episode_text or [{}] * len(self._table)
        names: dict[str | None, int] = {}
        found = np.array([names.setdefault(text.get(TASK), len(names)) for text in texts], np.int64)
        return found if len(names) <= _MOST_TASKS else np.zeros_like(found)

    def _distance_to_family(self, figures: Array, tasks: Array) -> Array:
        """Return the distance of each episode from the median of its task, or of all if the task has few episodes.

        Each part (length, path, first state, …) has the same weight, however many components it has.
        """
        found = np.zeros(len(figures))
        counts = np.bincount(tasks)
        family = np.where(counts[tasks] > _NEIGHBOURS, tasks, -1)
        for one in np.unique(family):
            own = family == one
            among = figures[own] if one >= 0 else figures
            middle = np.median(among, axis=0)
            spread = np.maximum(1.4826 * np.median(np.abs(among - middle), axis=0), 0.05)
            powers = ((figures[own] - middle) / spread) ** 4
            edges = np.cumsum([0, *self._parts_of_family[:-1]])
            found[own] = np.mean(np.add.reduceat(powers, edges, axis=1) / self._parts_of_family, axis=1) ** 0.25
        return found


class _Neighbours:
    """For each sampled state of each episode, the nearest states of the nearest other episodes.

    `states` are `[episodes, samples, components]`, `tasks` the numbers of the tasks. If there are many episodes, each
    is compared with a subset of them, `_others`, which has about `_STATES` states. Distances are computed episode by
    episode, so that memory is bounded.
    """

    def __init__(self, states: Array, tasks: Array, reporter: Progress) -> None:
        count, samples, width = states.shape
        self._states = np.ascontiguousarray(_narrowed(states - states.mean((0, 1))), np.float32)
        self._others = np.unique(np.linspace(0, count - 1, max(_STATES // samples, _LEAST)).astype(np.int64))
        self._tasks = tasks
        self._k = min(_NEIGHBOURS, len(self._others) - 1)
        self._known = bool(width)
        self._nearest = np.full((count, samples), np.nan)
        self._places = np.zeros((count, samples, self._k, 2), np.int64)
        self._has = np.zeros(count, bool)
        self._coverage = np.full(count, np.nan)
        if self._known:
            self._find(reporter)

    def _find(self, reporter: Progress) -> None:
        everyone, samples = self._states[self._others], self._states.shape[1]
        flat = everyone.reshape(-1, everyone.shape[2])
        # |x - y|^2 is |x|^2 plus the product of (x, 1) and (-2 y, |y|^2).
        factors = np.concatenate([-2 * flat, np.einsum("rc,rc->r", flat, flat)[:, None]], axis=1).T
        found = np.empty((samples, len(flat)), np.float32)

        def distances(number: int) -> Array:
            own = self._states[number]
            np.matmul(np.concatenate([own, np.ones((samples, 1), np.float32)], axis=1), factors, out=found)
            np.add(found, np.einsum("rc,rc->r", own, own)[:, None], out=found)
            np.maximum(found, 0, out=found)
            each = found.reshape(samples, len(self._others), samples)
            each[:, self._others == number] = np.inf
            return each

        few = np.unique(np.linspace(0, len(self._states) - 1, _FEW).astype(np.int64))
        last = self._k - 1
        usual = float(np.median([np.partition(distances(one).min(2), last, axis=1)[:, last] for one in few]))
        reporter.start("comparing states", len(self._states), "episodes")
        for number in range(len(self._states)):
            each = distances(number)
            others = np.isfinite(each[0, :, 0])
            self._coverage[number] = (each.min(0)[others] <= usual).mean()
            place = each.argmin(2)
            least = np.take_along_axis(each, place[:, :, None], 2)[:, :, 0]
            which = least.argmin(1)  # the distance is taken again: those above are inexact near 0
            nearest = everyone[which, place[np.arange(samples), which]]
            self._nearest[number] = np.linalg.norm(self._states[number] - nearest, axis=1)
            alike = others & (self._tasks[self._others] == self._tasks[number])
            self._has[number] = alike.sum() >= self._k
            if self._has[number]:
                least[:, ~alike] = np.inf
                chosen = np.argpartition(least, self._k - 1, axis=1)[:, : self._k]
                self._places[number, :, :, 0] = self._others[chosen]
                self._places[number, :, :, 1] = np.take_along_axis(place, chosen, 1)
            reporter.advance(1)
        reporter.done()

    def disagreement(self, values: Array, *also: Array) -> Array:
        """Return the distances of values `[episodes, samples, components]` from their medians at the nearest states.

        A linear fit to the states, and to `also`, is subtracted first, because values may differ between states that
        are not close. It is a mean over steps of square roots, so that a few steps with large differences, at which
        any policy may change its direction, do not dominate.
        """
        found = np.full(len(values), np.nan)
        values = _without_trend(np.concatenate([self._states, *also], axis=2), values)
        for number in np.flatnonzero(self._has).tolist():
            places = self._places[number]
            apart = values[number] - np.median(values[places[..., 0], places[..., 1]], axis=1)
            found[number] = np.mean(np.mean(apart**2, axis=1) ** 0.25) ** 2
        return found

    def novelty(self) -> Array:
        """Return d / (d + m): 0 for a copy, 0.5 for a usual episode, close to 1 for one that is far from all others."""
        own = np.median(self._nearest, axis=1)
        usual = np.nanmedian(own) if self._known else np.nan
        return own / np.maximum(own + usual, 1e-12)

    def coverage(self) -> Array:
        """Return for each episode the share of the other episodes' states that are near one of its states."""
        return self._coverage


def _width(field: Field) -> int:
    return int(np.prod(field.shape, dtype=np.int64))


def _is_picture(field: Field) -> bool:
    return len(field.shape) in (2, 3) and _width(field) >= _CELLS**2


def _shrunk(picture: Array) -> Array:
    """Return the means of an image, with channels last or first, over the cells of a grid."""
    if picture.ndim == 3 and picture.shape[0] < min(picture.shape[1:]):
        picture = np.moveaxis(picture, 0, -1)
    for axis in (0, 1):
        edges = np.unique(np.linspace(0, picture.shape[axis], _CELLS, endpoint=False).astype(np.int64))
        sizes = np.diff(np.append(edges, picture.shape[axis]))
        sums = np.add.reduceat(picture, edges, axis, np.float64)
        picture = sums / sizes.reshape([-1 if place == axis else 1 for place in range(sums.ndim)])
    return picture.reshape(-1)


def _finite(rows: Array) -> Array:
    return rows[np.isfinite(rows).all(1)]


def _narrowed(values: Array) -> Array:
    """Reduce values `[..., components]` to `_WIDEST` components by a random projection, which preserves distances."""
    width = values.shape[-1]
    if width <= _WIDEST:
        return values
    projection = np.random.default_rng(0).normal(size=(width, _WIDEST)) / np.sqrt(_WIDEST)
    return np.asarray(values @ projection.astype(np.float32))


def _without_trend(inputs: Array, values: Array) -> Array:
    """Return the residuals of a ridge regression of values on inputs, both `[..., components]`."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    rows = np.concatenate([rows, np.ones((len(rows), 1), rows.dtype)], axis=1)
    wanted = values.reshape(-1, values.shape[-1])
    squares = (rows.T @ rows).astype(np.float64) + _RIDGE * len(rows) * np.eye(rows.shape[1])
    weights = np.linalg.solve(squares, (rows.T @ wanted).astype(np.float64))
    return np.asarray((wanted - rows @ weights).reshape(values.shape))


def _above_zero(values: Array) -> Array:
    """Replace zeros by ones, so that components that never change are not scaled."""
    return np.where(values > 1e-12, values, 1.0).astype(np.float32)


def _steps(values: Array, begins: Array) -> Array:
    """Return the change that led to each row, 0 at the beginnings of episodes."""
    found = np.zeros_like(values)
    np.subtract(values[1:], values[:-1], out=found[1:])
    found[begins] = 0
    return found


def _mobility(velocity: Array, begins: Array) -> Array:
    """Return for each episode the root of the ratio of the powers of acceleration and velocity, from 0 to 2."""
    acceleration = np.zeros_like(velocity)
    np.subtract(velocity[1:], velocity[:-1], out=acceleration[1:])
    acceleration[begins] = 0
    acceleration[np.minimum(begins + 1, len(velocity) - 1)] = 0  # the first velocity is unknown, not 0
    powers = [np.add.reduceat(np.einsum("rc,rc->r", one, one), begins) for one in (acceleration, velocity)]
    return np.sqrt(powers[0] / np.maximum(powers[1], 1e-12))


def _moments(values: Array, begins: Array, lengths: Array) -> list[Array]:
    """Return means and deviations of the components in each episode."""
    mean = np.add.reduceat(values, begins, dtype=np.float64) / lengths[:, None]
    square = np.add.reduceat(values * values, begins, dtype=np.float64) / lengths[:, None]
    return [mean, np.sqrt(np.maximum(square - mean**2, 0))]


def _logarithm(figures: Array) -> Array:
    return np.asarray(np.log(figures + _RESOLUTION))


def _modified_z(figures: Array, least: float = 0.1) -> Array:
    """Return the signed distances from the median in units of the spread, at least `least`; a higher one is worse."""
    if np.isnan(figures).all():
        return figures
    middle = np.nanmedian(figures)
    return np.asarray((figures - middle) / max(1.4826 * float(np.nanmedian(np.abs(figures - middle))), least))


def _logistic(z: Array) -> Array:
    return np.exp(-np.logaddexp(0, z - _OUTLIER))
