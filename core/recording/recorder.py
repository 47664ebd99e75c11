"""What the wrappers of single and of vector environments share: an episode buffer for each lane, and one writer."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.documents import parse_json
from ..format.manifest import Manifest
from ..format.packed.recording import RecordedOrigin
from ..progress import counted
from .buffer import EpisodeBuffer
from .spaces import renamed_entries, space_document, space_encoder
from .writer import EpisodeWriter


class EnvironmentRecorder:
    """Records `lanes` environments of the same spaces, each of which is in an episode of its own.

    With `max_episodes`, lane k records episodes k, k + lanes and so on up to that number, and nothing more: which
    episodes there are does not depend on how long others take.
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
        self.writer = EpisodeWriter(fs.expanded(dest).absolute(), origin, sync_seconds=sync_seconds, resume=resume)
        done = set(self.writer.numbers)
        self.lane: int | None = None
        """The lane whose data are being taken; None while all are stepped."""
        self._open_numbers = [number for number in range(max_episodes or 0) if number not in done]
        self._numbers: list[int | None] = [self._next_number(lane) for lane in range(lanes)]

    def under_way(self) -> str:
        """Name the episode that the lane whose data are taken is in; several where the lane is not known."""
        numbers = self._numbers if self.lane is None else [self._numbers[self.lane]]
        known = sorted(number for number in numbers if number is not None) or [self.writer.episodes]
        return f"episode {known[0]}" if len(known) == 1 else f"one of the episodes {', '.join(map(str, known))}"

    def describe(self, arguments: Mapping[str, Any]) -> None:
        """Add to what the manifest states about the recording; a recording that is continued gets them too."""
        self.writer.describe(arguments)

    def _next_number(self, lane: int) -> int | None:
        """The number of the next episode of a lane; None where it records no more, or they are not limited."""
        if self._max_episodes is None:
            return None
        lanes = len(self._lanes)
        return next((number for number in self._open_numbers if number % lanes == lane), None)

    def number(self, lane: int) -> int | None:
        """The number that the next episode of a lane gets; None where it records no more, or they are not limited."""
        return self._numbers[lane]

    def records(self, lane: int) -> bool:
        """Return whether the episodes of a lane are recorded: not any more when it has made its part."""
        return self._max_episodes is None or self._numbers[lane] is not None

    @property
    def is_complete(self) -> bool:
        """Whether all of `max_episodes` are written."""
        return not any(map(self.records, range(len(self._lanes))))

    def require_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Raise SchemaError where the environment has other spaces than at first."""
        for name, space, found in zip(
            ("observation", "action"), self._spaces, (observation_space, action_space), strict=True
        ):
            if found is not space and found != space:
                raise SchemaError(
                    f"the {name} space changed: it is {_brief(found)}, recorded is {_brief(space)}",
                    hint="record each space to a dataset of its own",
                )

    def begin(self, lane: int, observation: Any, info: Any, *, seed: int | None = None, frame: Any = None) -> None:
        """Begin an episode with what `reset` returned; one under way is cut off first."""
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
        """Record a step; the last one writes the episode. Return whether the episode ended."""
        self.lane = lane
        if not self.records(lane):
            return bool(terminated or truncated)
        ended = self._lanes[lane].observe(observation, reward, terminated, truncated, info, frame)
        if ended:
            self._write(lane)
        return ended

    def interrupt(self) -> None:
        """Take no more steps of the episodes under way after an error in the middle of one: there would be a gap.

        What is there of them is kept until the next `reset`, `finish` or the end of the `with` block, and cut off.
        """
        for buffer in self._lanes:
            buffer.is_open = False

    def cut_off(self, lane: int) -> None:
        """End the episode of a lane at its last step, if it has one; its last step becomes truncated."""
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
        """Forget the episodes that are under way."""
        for buffer in self._lanes:
            buffer.discard()

    def finish(self) -> Manifest:
        """Make a dataset; episodes under way are cut off."""
        for lane in range(len(self._lanes)):
            self.cut_off(lane)
        return self.writer.finish()

    def close(self) -> None:
        """Stop without making a dataset; episodes under way are lost. Harmless when done twice, or finished."""
        self.discard()
        self.writer.close()

    def leave(self, error: BaseException | None) -> None:
        """Leave a `with` block: finish, or, after an error, close; what was under way is cut off in both cases."""
        if self.writer.is_closed:
            return
        try:
            if error is None:
                self.finish()
                return
            with contextlib.suppress(RbtoolError, OSError):  # the error that is under way is the one to show
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
        """Close after an error, which is the one to show: not what the disk says to closing."""
        with contextlib.suppress(RbtoolError, OSError):
            self.close()

    def kept(self) -> str:
        """State what is kept of a recording that was interrupted, and what to do with it."""
        episodes, dest = self.writer.episodes, self.writer.dest
        many = f"{counted(episodes, 'episode')} {'is' if episodes == 1 else 'are'}"
        return f"{many} kept; make a dataset of {dest}: rbtool repair {shlex.quote(str(dest))}, or continue with resume"


def require_seeds(seeds: Sequence[Any]) -> None:
    """Raise UsageError for a seed that the table of episodes cannot hold."""
    for seed in seeds:
        if seed is not None and not (isinstance(seed, int | np.integer) and 0 <= seed < 1 << 63):
            raise UsageError(f"the seed is {seed!r}, expected a whole number from 0 that 63 bits hold")


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
    """Return the spec of an environment as JSON; what JSON cannot hold is left out, and None is for no spec."""
    if spec is None:
        return None
    try:
        return parse_json(spec.to_json(), "the spec of the environment")
    except (TypeError, ValueError, AttributeError):
        kwargs = {name: str(value) for name, value in (spec.kwargs or {}).items()}
        return {"id": spec.id, "max_episode_steps": spec.max_episode_steps, "kwargs": kwargs}
