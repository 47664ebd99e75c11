"""Records environments: an episode buffer for each lane gathers steps in memory, and one writer appends whole episodes.

    env.reset, env.step  ->  EnvironmentRecorder  ->  EpisodeBuffer of the lane  ->  EpisodeWriter  ->  recording
                             (`begin, act, observe`)  (the episode under way)        (layout, resume)   (packed folder)

The wrappers of single and of vector environments both use `EnvironmentRecorder`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array
from ..format.documents import dump_json, parse_json
from ..format.manifest import Dropped, Manifest, has_manifest
from ..format.packed.recording import PackedRecorder, RecordedOrigin, unfinished_recording
from ..format.packed.repair import continued
from ..format.staging import mend, new_sibling, sweep
from ..open_steps import open_steps
from ..progress import counted
from ..ted.schema import NEXT, NEXT_DONE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Key
from .layout import InfoRows, RawEpisode, RowLayout, RowLeaf, entries_renamed, fit_infos, form_of, renaming
from .spaces import Encoder, RecordedLeaf, renamed_entries, space_document, space_encoder, stack_padded

PIXELS = "pixels"
NO_FRAME = "render() gave a frame for some steps and None for others, or for all, expected one for each step"
_ROOM = 64


class EnvironmentRecorder:
    """Records `lanes` environments with the same spaces; each lane has its own episode under way.

    With `max_episodes`, lane k records the episodes k, k + lanes, k + 2 lanes, … below that number and then stops, so
    that which episodes are recorded does not depend on how fast the lanes are.

    A finished dataset that has all of them can be resumed, too: nothing is recorded, and `finish` returns its manifest.
    """

    def __init__(
        self,
        dest: str | os.PathLike[str],
        observation_space: Any,
        action_space: Any,
        spec: Any,
        *,
        lanes: int,
        resume: bool,
        infos: bool,
        max_episodes: int | None,
        sync_seconds: float,
    ) -> None:
        if not sync_seconds >= 0:
            raise UsageError(f"sync_seconds is {sync_seconds}, expected a number from 0")
        if max_episodes is not None and max_episodes < 1:
            raise UsageError(f"max_episodes is {max_episodes}, expected a number from 1")
        self._spaces = (observation_space, action_space)
        parts = (("observation", observation_space), ("action", action_space))
        encoders = [space_encoder(name, space, name) for name, space in parts]  # type: ignore[arg-type]
        self._lanes = [EpisodeBuffer(*encoders, infos=infos) for _ in range(lanes)]
        self._paused = [False] * lanes
        self._max_episodes = max_episodes
        name = getattr(spec, "id", None) or "an environment without a spec"
        origin = RecordedOrigin(
            name,
            {"env": name, "env_spec": _spec_document(spec), "num_envs": lanes},
            {name: document for name, space in parts if (document := space_document(space)) is not None},
            renamed_keys=dict(pair for part in parts for pair in renamed_entries(*part)),
            notes=tuple(_notes(parts)),
        )
        self.writer = EpisodeWriter(
            fs.expanded(dest).absolute(), origin, sync_seconds=sync_seconds, resume=resume, wanted=max_episodes
        )
        done = set(self.writer.numbers)
        self.lane: int | None = None
        """The lane whose data are being recorded; None while the environments are stepped."""
        self._open_numbers = [number for number in range(max_episodes or 0) if number not in done]
        self._numbers: list[int | None] = [self._next_number(lane) for lane in range(lanes)]

    def under_way(self) -> str:
        """Name the current episode for messages, or all candidates if the lane is not known."""
        numbers = self._numbers if self.lane is None else [self._numbers[self.lane]]
        known = sorted(number for number in numbers if number is not None) or [self.writer.episodes]
        return f"episode {known[0]}" if len(known) == 1 else f"one of the episodes {', '.join(map(str, known))}"

    def describe(self, arguments: Mapping[str, Any]) -> None:
        """Add arguments to the provenance in the manifest, also when a recording is resumed."""
        self.writer.describe(arguments)

    def _next_number(self, lane: int) -> int | None:
        """Return the number of a lane's next episode; None if it is done, or there is no `max_episodes`."""
        if self._max_episodes is None:
            return None
        lanes = len(self._lanes)
        return next((number for number in self._open_numbers if number % lanes == lane), None)

    def number(self, lane: int) -> int | None:
        """Return the number that a lane's episode gets; None if the lane is done, or there is no `max_episodes`."""
        return self._numbers[lane]

    def records(self, lane: int) -> bool:
        """Return whether a lane still records; not after it has recorded its share of `max_episodes`."""
        return self._max_episodes is None or self._numbers[lane] is not None

    @property
    def is_complete(self) -> bool:
        """Whether all `max_episodes` episodes are written."""
        return not any(map(self.records, range(len(self._lanes))))

    def require_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Raise SchemaError if the environment's spaces changed since the recording began."""
        for name, space, found in zip(
            ("observation", "action"), self._spaces, (observation_space, action_space), strict=True
        ):
            if found is not space and found != space:
                raise SchemaError(
                    f"the {name} space changed: it is {_brief(found)}, recorded is {_brief(space)}",
                    hint="record each space to a dataset of its own",
                )

    def begin(self, lane: int, observation: Any, info: Any, *, seed: int | None = None, frame: Any = None) -> None:
        """Begin an episode with what `reset` returned; an unfinished episode is cut off first."""
        self.lane = lane
        self.cut_off(lane)
        if self.records(lane):
            self._lanes[lane].begin(observation, info, seed=seed, frame=frame)

    def act(self, lane: int, action: Any) -> None:
        """Check the action of the next step, before the environment is stepped."""
        self.lane = lane
        if self.records(lane):
            self._lanes[lane].act(action)

    def observe(
        self, lane: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any, frame: Any = None
    ) -> bool:
        """Record a step, write the episode if the step ended it, and return whether it did."""
        self.lane = lane
        if not self.records(lane):
            return bool(terminated or truncated)
        ended = self._lanes[lane].observe(observation, reward, terminated, truncated, info, frame)
        if ended:
            self._write(lane)
        return ended

    def interrupt(self) -> None:
        """Accept no more steps of the current episodes after an error, because a step may be missing.

        Their steps so far are cut off and written at the next `reset` or `finish`, or at the end of the `with` block.
        """
        for buffer in self._lanes:
            buffer.is_open = False

    def cut_off(self, lane: int) -> None:
        """Write the unfinished episode of a lane, if it has a step; its last step becomes truncated."""
        if self._lanes[lane].length and not self.writer.is_closed:
            self._write(lane)
        self._lanes[lane].discard()

    def _write(self, lane: int) -> None:
        buffer = self._lanes[lane]
        raw = buffer.take()
        self.writer.add(raw, self._numbers[lane], buffer.dropped, buffer.renamed)
        number = self._numbers[lane]
        if number is not None:
            self._open_numbers.remove(number)
            self._numbers[lane] = self._next_number(lane)

    def discard(self) -> None:
        """Forget the unfinished episodes."""
        for buffer in self._lanes:
            buffer.discard()

    def finish(self) -> Manifest:
        """Turn the recording into a dataset; unfinished episodes are cut off."""
        for lane in range(len(self._lanes)):
            self.cut_off(lane)
        return self.writer.finish()

    def close(self) -> None:
        """Stop without making a dataset; unfinished episodes are lost. May be called again, and after `finish`."""
        self.discard()
        self.writer.close()

    def leave(self, error: BaseException | None) -> None:
        """Leave a `with` block: finish, or close after an error; unfinished episodes are cut off in both cases."""
        if self.writer.is_closed:
            return
        try:
            if error is None:
                self.finish()
                return
            with contextlib.suppress(RbtoolError, OSError):  # the original error is the one to show
                for lane in range(len(self._lanes)):
                    self.cut_off(lane)
        except BaseException as raised:
            error = error or raised
            raise
        finally:
            if error is not None:
                self.abandon()
                if self.writer.episodes:
                    error.add_note(f"hint: {self.kept()}")

    def abandon(self) -> None:
        """Close after an error, and suppress errors of closing: the original error is the one to show."""
        with contextlib.suppress(RbtoolError, OSError):
            self.close()

    def kept(self) -> str:
        """Return the hint that says what an interrupted recording holds and what to do with it."""
        episodes, dest = self.writer.episodes, self.writer.dest
        many = f"{counted(episodes, 'episode')} {'is' if episodes == 1 else 'are'}"
        return f"{many} kept; make a dataset of {dest}: rbtool repair {shlex.quote(str(dest))}, or continue with resume"


def require_seeds(seeds: Sequence[Any]) -> None:
    """Raise UsageError for a seed that the episode table cannot store."""
    for seed in seeds:
        if seed is not None and not (isinstance(seed, int | np.integer) and 0 <= seed < 1 << 63):
            raise UsageError(f"the seed is {seed!r}, expected a whole number from 0 to 2**63 - 1")


def _notes(parts: Any) -> list[str]:
    return [
        f"the {name} space is not recorded: it is {_brief(space)}"
        for name, space in parts
        if space_document(space) is None
    ]


def _brief(space: Any) -> str:
    text = " ".join(repr(space).split())
    return text if len(text) <= 120 else text[:119] + "…"


def _spec_document(spec: Any) -> Any:
    """Return the spec of an environment as a JSON document, without what JSON cannot hold; None without a spec."""
    if spec is None:
        return None
    try:
        return parse_json(spec.to_json(), "the spec of the environment")
    except (TypeError, ValueError, AttributeError):
        kwargs = {name: str(value) for name, value in (spec.kwargs or {}).items()}
        return {"id": spec.id, "max_episode_steps": spec.max_episode_steps, "kwargs": kwargs}


class _Rows:
    """The rows of one leaf; the array is reused from one episode to the next."""

    def __init__(self, leaf: RecordedLeaf) -> None:
        self.leaf = leaf
        self._array = np.empty((_ROOM, *leaf.shape), leaf.dtype) if not leaf.ragged else None
        self._held: list[Array] = []

    def put(self, row: int, value: Any) -> None:
        """Copy a value to a row, which is the next one or belongs to a step that was not completed."""
        array = self._array
        if array is None:
            del self._held[row:]
            self._held.append(np.array(value))
            return
        if row == len(array):
            self._array = array = np.concatenate([array, np.empty_like(array)])
        array[row] = value

    def take(self, count: int) -> Array:
        """Return the first rows, `[count, *shape]`; the array is valid until the next `put`."""
        if self._array is not None:
            return self._array[:count]
        return stack_padded(self._held[:count], self.leaf)


class EpisodeBuffer:
    """Gathers the steps of one episode at a time in memory.

    A step comes in two parts: `act` checks and keeps the action before the environment is stepped, `observe` keeps what
    the step returned. An error in either keeps the steps before it, and the buffer accepts no step until the next
    `begin`: otherwise the episode would have a gap.
    """

    def __init__(self, observation: Encoder, action: Encoder, *, infos: bool = True) -> None:
        self.is_open = False
        self.length = 0
        self.seed: int | None = None
        self._observation, self._action = observation, action
        self._states = [_Rows(leaf) for leaf in observation.leaves]
        self._steps = [_Rows(leaf) for leaf in action.leaves]
        self._pixels: _Rows | None = None
        self._rewards: list[float] = []
        self._terminated: list[bool] = []
        self._truncated: list[bool] = []
        self._infos = InfoRows() if infos else None

    @property
    def dropped(self) -> Mapping[str, str]:
        """Names of the infos that cannot be stored, and the reasons."""
        return self._infos.dropped if self._infos is not None else {}

    @property
    def renamed(self) -> Mapping[str, str]:
        """Names of infos that are stored under another name, and that name."""
        return self._infos.renamed if self._infos is not None else {}

    @property
    def leaves(self) -> tuple[RowLeaf, ...]:
        """The leaves of the rows."""
        states = [*self._states, *([self._pixels] if self._pixels is not None else [])]
        return (*(RowLeaf(one.leaf, True) for one in states), *(RowLeaf(one.leaf, False) for one in self._steps))

    def begin(self, observation: Any, info: Mapping[Any, Any], *, seed: int | None = None, frame: Any = None) -> None:
        """Begin an episode with what `reset` returned; the steps of an unfinished one are lost."""
        self.discard()
        self._put_state(0, observation, info, frame)
        self.seed, self.is_open = seed, True

    def act(self, action: Any) -> None:
        """Check and keep the action of the next step. UsageError if no episode has begun."""
        if not self.is_open:
            raise UsageError("step() comes after the end of an episode: call reset() first")
        values = self._action.encode(action)
        for rows, value in zip(self._steps, values, strict=True):
            rows.put(self.length, value)

    def observe(
        self,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[Any, Any],
        frame: Any = None,
    ) -> bool:
        """Keep what the step returned; return whether the episode ended."""
        self.is_open = False  # until the step is kept completely
        if type(reward) is not float:
            reward = _reward(reward)
        ended = (bool(terminated), bool(truncated))
        self._put_state(self.length + 1, observation, info, frame)
        self._rewards.append(reward)
        self._terminated.append(ended[0])
        self._truncated.append(ended[1])
        self.length += 1
        self.is_open = not (ended[0] or ended[1])
        return not self.is_open

    def _put_state(self, row: int, observation: Any, info: Mapping[Any, Any], frame: Any) -> None:
        values = self._observation.encode(observation)
        for rows, value in zip(self._states, values, strict=True):
            rows.put(row, value)
        if frame is not None:
            self._put_frame(row, frame)
        elif self._pixels is not None:
            raise SchemaError(NO_FRAME)
        if info and self._infos is not None:
            self._infos.put(row, info)

    def _put_frame(self, row: int, frame: Any) -> None:
        found = np.asarray(frame)
        if self._pixels is None:
            if row:
                raise SchemaError(NO_FRAME)
            if found.dtype != np.uint8 or found.ndim != 3:
                raise SchemaError(f"render() gave {found.dtype} {list(found.shape)}, expected uint8 [height, width, 3]")
            self._pixels = _Rows(RecordedLeaf((PIXELS,), "uint8", found.shape, "observation"))
        expected = self._pixels.leaf.shape
        if found.dtype != np.uint8 or found.shape != expected:
            raise SchemaError(
                f"render() gave {found.dtype} {list(found.shape)}, the frames before it are uint8 {list(expected)}"
            )
        self._pixels.put(row, found)

    def take(self) -> RawEpisode:
        """Return the episode, which needs at least one step, and empty the buffer.

        The arrays are valid until the next `begin`. If the episode has not ended, its last step becomes truncated.
        """
        length = self.length
        terminated, truncated = (
            np.array(flags[:length], bool)[:, None] for flags in (self._terminated, self._truncated)
        )
        cut_off = not (terminated[-1, 0] or truncated[-1, 0])
        truncated[-1] |= cut_off
        states = {row.leaf.key: row.take(length + 1) for row in self._states}
        if self._pixels is not None:
            states[PIXELS,] = self._pixels.take(length + 1)
        steps: dict[Key, Array] = {row.leaf.key: row.take(length) for row in self._steps}
        steps[NEXT_REWARD] = np.array(self._rewards[:length], np.float64)[:, None]
        steps |= {NEXT_DONE: terminated | truncated, NEXT_TERMINATED: terminated, NEXT_TRUNCATED: truncated}
        infos = self._infos.take(length) if self._infos is not None else {}
        raw = RawEpisode(length, self.leaves, states, steps, infos, self.seed, bool(cut_off))
        self.discard()
        return raw

    def discard(self) -> None:
        """Forget the current episode."""
        self.is_open, self.length, self.seed = False, 0, None
        self._rewards, self._terminated, self._truncated = [], [], []
        if self._infos is not None:
            self._infos.clear()


def _reward(reward: Any) -> float:
    try:
        found = np.asarray(reward)
        if found.size == 1 and found.dtype.kind in "biuf":
            number = found.item()
            kept = float(number)
            if kept == number or number != number:
                return kept
            raise SchemaError(f"the reward {number} ({found.dtype}) is not exact as float64, the type of rewards")
    except (TypeError, ValueError, OverflowError):
        pass
    shape = f" {list(reward.shape)}" if isinstance(reward, np.ndarray) else ""
    raise SchemaError(f"the reward is a {type(reward).__name__}{shape}, expected one number")


class EpisodeWriter:
    """Appends episodes to a recording at `dest`; when `add` returns, the episode survives the death of the process.

    With `resume`, an unfinished recording at `dest` is continued, and a finished one is left unchanged if it has all
    `wanted` episodes. UsageError if `dest` holds anything else.

    `add` first finds the layout that holds the new episode. As long as that is the current layout, the episode is
    appended. Otherwise all episodes are rewritten with the wider layout into a sibling folder, which then takes the
    place of the recording atomically (`_rewritten`).
    """

    def __init__(
        self,
        dest: Path,
        origin: RecordedOrigin,
        *,
        sync_seconds: float,
        resume: bool = False,
        wanted: int | None = None,
    ) -> None:
        self.dest = dest
        self._origin, self._sync_seconds = origin, sync_seconds
        self._recorder: PackedRecorder | None = None
        self._finished: tuple[Manifest, list[int]] | None = None
        self._layout: RowLayout | None = None
        self._dropped = {one.key: one.why for one in origin.dropped_keys}
        self._made = False
        self._next = 0
        self.is_closed = False
        mend(dest)
        sweep(dest)  # leftovers of a process that died while it rewrote a recording
        occupied = dest.exists() and (not dest.is_dir() or any(dest.iterdir()))
        if occupied and resume:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._origin = RecordedOrigin.load(dest)
                self._dropped = {one.key: one.why for one in self._origin.dropped_keys}
                _require_same(self._origin, origin, dest)
            self._finished = None if wanted is None else finished_recording(dest, wanted)
            if self._finished is not None:
                return
            self._recorder = continued(dest, sync_seconds=sync_seconds)
            if self._origin is origin and not self.episodes:  # the process died before it saved the origin
                origin.save(dest)
            self._next = max(self.numbers, default=-1) + 1
        elif occupied:
            raise _occupied(dest)
        elif not dest.exists():
            fs.make_folder(dest)  # fails now rather than after an environment ran for hours
            self._made = True

    def describe(self, arguments: Mapping[str, Any]) -> None:
        """Add arguments to the provenance."""
        self._origin = replace(self._origin, arguments={**self._origin.arguments, **arguments})
        if self._recorder is not None:
            self._origin.save(self.dest)

    @property
    def episodes(self) -> int:
        """The number of episodes written so far."""
        return len(self.numbers)

    @property
    def steps(self) -> int:
        """The number of steps written so far."""
        if self._finished is not None:
            return self._finished[0].steps
        return self._recorder.steps if self._recorder is not None else 0

    @property
    def numbers(self) -> list[int]:
        """The numbers of the episodes written so far."""
        if self._finished is not None:
            return self._finished[1]
        return [commit.row.episode for commit in self._recorder.commits] if self._recorder is not None else []

    def add(
        self,
        raw: RawEpisode,
        number: int | None = None,
        dropped: Mapping[str, str] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Write an episode.

        Args:
            raw: the episode.
            number: the episode's number; by default one more than the highest so far.
            dropped: infos that the episode lacks, mapped to the reasons.
            renamed: infos that are stored under another name, mapped to that name.
        """
        if self.is_closed:
            raise UsageError(f"the recording {self.dest} is closed: nothing can be added")
        recorder = self._recorder
        ranges = recorder.rows.ranges if recorder is not None else {}
        layout = self._layout
        if layout is None:
            layout = RowLayout(raw.leaves)
            if recorder is not None:
                layout = RowLayout.of_fields(recorder.fields, raw.leaves, str(self.dest))
                several = frozenset(entries_renamed(self._origin.renamed_keys, layout.infos))
                layout = replace(layout, several=several)
        before, stated = layout, dict[str, str]()
        layout = layout.separated(raw.infos)
        if layout.several:
            moved = layout.moved(before)
            stated = self._renamings(before, layout, raw)
            raw.infos = layout.named(raw.infos)
            ranges = {_moved(key, moved): found for key, found in ranges.items()}
        lost = dict(dropped or {}) | fit_infos(layout, raw, ranges)
        names = dict(renamed or {}) | {entry: name for entry, name in stated.items() if name not in lost}
        grown = layout.grown(raw, ranges, first=recorder is None)
        noted = bool(lost.keys() - self._dropped.keys() or names.keys() - self._origin.renamed_keys.keys())
        if recorder is None:
            recorder = PackedRecorder(self.dest, grown.fields(), sync_seconds=self._sync_seconds)
            self._recorder = recorder
            self._origin.save(self.dest)
        elif grown is not before:
            if noted:  # saved before the rewrite, so that `renamed_keys` never lacks the name of a stored leaf
                self._note(lost, names)
            recorder, noted = self._rewritten(recorder, before, grown), False
        self._layout = grown
        if noted:
            self._note(lost, names)
        states, steps = grown.columns(raw, self._next if number is None else number)
        number = int(steps[("episode",)][0])
        recorder.add_states(states, steps, episode=number, seed=raw.seed, cut_off=raw.cut_off)
        self._next = max(self._next, number + 1)

    def _renamings(self, before: RowLayout, layout: RowLayout, raw: RawEpisode) -> dict[str, str]:
        """Return the items of `renamed_keys` for the forms of this episode, and for earlier ones that are named now."""
        forms = [(key, form_of(one)) for key, one in raw.infos.items()]
        forms += [(key, leaf.form) for key, leaf in before.infos.items()]
        return dict(renaming(key, form) for key, form in forms if key in layout.several)

    def _note(self, dropped: Mapping[str, str], renamed: Mapping[str, str]) -> None:
        self._dropped = dict(dropped) | self._dropped
        named = tuple(Dropped(key, why) for key, why in sorted(self._dropped.items()))
        names = {**self._origin.renamed_keys, **renamed}
        self._origin = replace(self._origin, dropped_keys=named, renamed_keys=dict(sorted(names.items())))
        self._origin.save(self.dest)

    def _rewritten(self, old: PackedRecorder, layout: RowLayout, grown: RowLayout) -> PackedRecorder:
        """Rewrite all episodes with the leaves of `grown` into a new folder, and swap it atomically with `dest`."""
        built = new_sibling(self.dest)
        new = PackedRecorder(built, grown.fields(), sync_seconds=math.inf)
        try:
            self._origin.save(built)
            moved = grown.moved(layout)
            for stored in old.episodes():
                raw, row = layout.raw(stored), stored.commit.row
                raw.infos = {moved.get(key, key): one for key, one in raw.infos.items()}
                states, steps = grown.columns(raw, row.episode)
                new.add_states(states, steps, episode=row.episode, seed=row.seed, cut_off=raw.cut_off)
            new.sync()
            aside = _put_in_place(built, self.dest)
        except BaseException:
            with contextlib.suppress(OSError):  # leftovers are swept by whoever opens the recording next
                new.close()
                fs.remove(built)
            raise
        self._recorder, self._layout = new, grown  # first of all: the old recorder's files are no longer at dest
        new.moved(self.dest, self._sync_seconds)
        old.close()
        fs.sync_folder(self.dest.parent)
        with contextlib.suppress(OSError):  # the next process that opens the recording sweeps it
            fs.remove(aside)
        return new

    def sync(self) -> None:
        """Wait until all episodes are on the disk."""
        if self._recorder is not None and not self.is_closed:
            self._recorder.sync()

    def finish(self) -> Manifest:
        """Turn the recording into a dataset. SchemaError if nothing was recorded."""
        if self.is_closed:
            raise UsageError(f"the recording {self.dest} is closed already")
        if self._finished is not None:
            self.is_closed = True
            return self._finished[0]
        if self._recorder is None or not self.episodes:
            self.close()
            raise SchemaError(f"nothing was recorded at {self.dest}: no episode has a step")
        manifest = self._recorder.finish()
        self.is_closed = True
        return manifest

    def close(self) -> None:
        """Stop without making a dataset. Episodes stay; a folder that was created for none is removed."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._recorder is not None:
            try:
                self._recorder.sync()
            finally:
                self._recorder.close()
        elif self._made:
            with contextlib.suppress(OSError):
                fs.remove_empty_folder(self.dest)


def finished_recording(dest: Path, wanted: int) -> tuple[Manifest, list[int]] | None:
    """Return manifest and episode numbers of a finished recording; None if it lacks one of the `wanted` episodes.

    None also for anything else at `dest`.
    """
    if not has_manifest(dest):
        return None
    with open_steps(dest) as reader:
        recorded = [step.verb for step in reader.manifest.provenance] == ["record"]
        numbers: list[int] = reader.episodes.episode.tolist()
        return (reader.manifest, numbers) if recorded and set(range(wanted)) <= set(numbers) else None


def _moved(key: Key, moved: Mapping[Key, Key]) -> Key:
    """Return the key of a leaf, at the root or under `next`, after infos got new names."""
    return (NEXT, *moved.get(key[1:], key[1:])) if key[0] == NEXT else moved.get(key, key)


def _occupied(dest: Path) -> UsageError:
    unfinished = dest.is_dir() and not has_manifest(dest) and unfinished_recording(dest) is not None
    if not unfinished:
        return UsageError(f"{dest} exists already; recordings need a new folder", hint="choose another destination")
    return UsageError(
        f"{dest} has a recording that was not finished",
        hint=f"continue it with resume (--resume), or finish it: rbtool repair {shlex.quote(str(dest))}",
    )


def _put_in_place(built: Path, dest: Path) -> Path:
    """Put a folder in the place of another, and return where that one is now. On an error nothing changes."""
    if fs.exchange(built, dest):
        return built
    aside = new_sibling(dest, aside=True)
    fs.rename(dest, aside)
    try:
        fs.rename(built, dest)
    except BaseException:
        fs.rename(aside, dest)
        raise
    return aside


def _require_same(recorded: RecordedOrigin, found: RecordedOrigin, dest: Path) -> None:
    """Raise if a recording would be resumed with another environment, or with other spaces."""
    if recorded.asked != found.asked:
        raise UsageError(f"{dest} was recorded from {recorded.asked}, expected the same environment, not {found.asked}")
    spaces = parse_json(dump_json(dict(found.spaces)), "the spaces")
    for name in sorted(recorded.spaces.keys() | spaces.keys()):
        if recorded.spaces.get(name) != spaces.get(name):
            raise SchemaError(
                f"{dest} was recorded with another {name} space, expected the same to resume it",
                hint="record each space to a dataset of its own",
            )
