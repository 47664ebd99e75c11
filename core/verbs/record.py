"""`record`: run a policy in a gymnasium environment and record the episodes.

Unlike the other verbs that write, it uses no `Publication` and no staging folder, because every episode has to be saved
as soon as it ends. The recording grows at the destination itself, and its log is turned into a dataset at the end,
after a crash (`repair`) or when it is continued (`resume`). Nothing is ever replaced.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from ..engine.tasks import error_text
from ..errors import RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.packed.recording import RecordedOrigin
from ..format.staging import mend
from ..options import takes
from ..preprocess.functions import find_function
from ..progress import Progress, counted
from ..recording.environments import RecordEpisodes, RecordVectorEpisodes, WholeInfos
from ..recording.recorder import EnvironmentRecorder, finished_recording
from ..results import Published, published_entries
from .options import RecordOptions

Policy: TypeAlias = Callable[[Any], Any]
_Recording: TypeAlias = RecordEpisodes[Any, Any] | RecordVectorEpisodes
RANDOM, EXPERT = "random", "expert"


@takes(RecordOptions)
def record(asked: RecordOptions) -> Published:
    """Record episodes of a gymnasium environment into a new dataset in layout `packed`.

    If the run is interrupted, finished episodes are kept: `resume` continues the recording, and `rbtool repair` makes a
    dataset of them.

    Args:
        env_id: the id of the environment, or `MODULE:ID`.
        dest: the folder to write.
        episodes: how many episodes.
        policy: a function that takes an observation and returns an action, given as a callable or as `FILE.py:NAME`;
            `random` draws actions from the action space, `expert` is a built-in controller for CartPole-v1 and
            Pendulum-v1.
        seed: episode k is reset with the seed `seed + k`, which also determines its random actions. Default: a seed is
            drawn, and recorded in the manifest.
        num_envs: environments that run in parallel, each in a process. The episodes do not depend on their number.
        max_steps: truncate episodes after so many steps.
        render: record rendered frames in the field `pixels`.
        resume: continue a recording that the same call has started. A finished dataset with all `episodes` is returned
            as it is.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was written.

    Raises:
        UsageError: the environment is unknown, or something else is at `dest`.
        SchemaError: observations or actions are not in their spaces.
        RbtoolError: the environment or the policy failed.
    """
    started, progress, seed = time.perf_counter(), asked.reporter, asked.seed
    for name in ("episodes", "num_envs", "max_steps"):
        number = getattr(asked, name)
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}, expected a number from 1")
    place = fs.expanded(asked.dest).absolute()
    if seed is not None and not 0 <= seed < 1 << 62:
        raise UsageError(f"the seed is {seed}, expected a number from 0 that 62 bits hold")
    if asked.resume:
        mend(place)
    before = _origin(place) if asked.resume else None
    first = _first_seed(place, asked, before)
    player = _Player(asked, first)
    arguments = {
        "policy": player.label, "seed": first, "max_steps": asked.max_steps, "render": asked.render, **player.inputs,
    }  # fmt: skip
    if before is not None:
        _require_same(place, before.arguments, arguments)
        if (finished := finished_recording(place, asked.episodes)) is not None:
            return Published(**published_entries(finished[0], place, started), already_there=True)
    env = _make(asked, place)
    with _failures(asked.env_id, env):
        known = env.recorder.writer.numbers
        env.recorder.describe(arguments | {"episodes": max([asked.episodes, *(number + 1 for number in known)])})
        if beyond := sum(number >= asked.episodes for number in known):
            are = "is" if beyond == 1 else "are"
            progress.note(f"{counted(beyond, 'episode')} beyond the first {asked.episodes:,} {are} kept")
        progress.start("recording", asked.episodes, "episodes")
        progress.advance(len(known) - beyond)
        if isinstance(env, RecordEpisodes):
            _run(env, player, progress)
        else:
            _run_together(env, player, progress)
        manifest = env.finish()
    with contextlib.suppress(Exception):  # the dataset is complete, even if the environment fails to close
        env.close()
    progress.done()
    return Published(**published_entries(manifest, place, started))


def _origin(place: Path) -> RecordedOrigin | None:
    """Return the origin of an unfinished recording; None if there is no recording."""
    try:
        return RecordedOrigin.load(place)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _first_seed(place: Path, asked: RecordOptions, before: RecordedOrigin | None) -> int:
    """Return the seed of episode 0; for a recording that is continued, the one that it was started with."""
    env_id, seed = asked.env_id, asked.seed
    if before is not None:
        if before.asked != env_id.rpartition(":")[2]:
            raise UsageError(f"{place} has episodes of {before.asked}, expected {env_id} to continue the recording")
        first = before.arguments.get("seed")
        if seed is not None and first != seed:
            raise UsageError(f"{place} was recorded with the seed {first}, expected the same instead of {seed}")
        if isinstance(first, int):
            return first
    return secrets.randbits(31) if seed is None else seed


def _require_same(place: Path, before: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise UsageError if a recording would be continued with other arguments."""
    names = {"policy": "the policy", "max_steps": "max_steps", "render": "render", "seed": "the seed"}
    for name, shown in names.items():
        if name not in before:
            raise UsageError(
                f"{place} does not state {shown} of its episodes, so the recording cannot be continued",
                hint=f"make a dataset of them: rbtool repair {shlex.quote(str(place))}",
            )
        if before[name] != arguments[name]:
            raise UsageError(
                f"{place} was recorded with {shown} {before[name]}, expected the same instead of {arguments[name]}"
            )
    if before.get("policy_files") != arguments.get("policy_files"):
        raise UsageError(
            f"the files of {arguments['policy']} have changed since {place} was recorded",
            hint=f"make a dataset of its episodes: rbtool repair {shlex.quote(str(place))}",
        )


def _balance(observation: Any) -> int:
    """Push the cart in the direction in which the pole falls, and slowly back to the middle; lasts all 500 steps."""
    position, speed, angle, turning = map(float, observation)
    return int(angle + 0.3 * turning + 0.1 * speed + 0.05 * position > 0)


def _swing_up(observation: Any) -> Any:
    """Pump energy into the pendulum until it reaches the upright position, then hold it there.

    Up to a constant factor, its energy is `speed² / 6 + 5 cosine`, which is 5 at rest in the upright position.
    """
    cosine, sine, speed = map(float, observation)
    if cosine > 0.9:
        torque = -12 * math.atan2(sine, cosine) - 3 * speed
    else:
        torque = 2 * math.copysign(1, speed) * (speed**2 / 6 + 5 * cosine < 5)
    return np.clip(np.asarray([torque], np.float32), -2, 2)


_EXPERTS: dict[str, Callable[[Any], Any]] = {"CartPole-v1": _balance, "Pendulum-v1": _swing_up}


def _expert_of(env_id: str) -> Callable[[Any], Any]:
    try:
        return _EXPERTS[env_id]
    except KeyError:
        known = " and ".join(_EXPERTS)
        raise UsageError(
            f"rbtool has no expert for {env_id}, only for {known}", hint="--policy FILE.py:NAME runs your own policy"
        ) from None


class _Player:
    """Chooses actions: `begin` starts an episode of a lane, `act` returns the action for an observation."""

    def __init__(self, asked: RecordOptions, first_seed: int) -> None:
        self.inputs: dict[str, Any] = {}
        self.label = RANDOM
        self._first_seed = first_seed
        self._function: Policy | None = None
        self._spaces: dict[int, Any] = {}
        if asked.policy == EXPERT:
            self.label, self._function = EXPERT, _expert_of(asked.env_id)
        elif asked.policy != RANDOM:
            found = find_function(asked.policy)
            self.label, self._function = found.label, found.load()
            self.inputs = {"policy_files": found.inputs()} if found.inputs() else {}

    def seed(self, number: int) -> int:
        """Return the seed of an episode."""
        return self._first_seed + number

    def begin(self, lane: int, number: int | None, space: Any) -> None:
        """Begin an episode. Seed its random actions by its number only, and differently from the seed of its reset."""
        if number is None or self._function is not None:
            return
        if lane not in self._spaces:
            self._spaces[lane] = copy.deepcopy(space)
        self._spaces[lane].seed(int(np.random.SeedSequence([self.seed(number), 1]).generate_state(1)[0]))

    def act(self, lane: int, observation: Any) -> Any:
        """Return an action."""
        if self._function is None:
            return self._spaces[lane].sample()
        try:
            return self._function(observation)
        except Exception as error:
            raise RbtoolError(f"the policy {self.label} failed: {error_text(error)}") from error


def _make(asked: RecordOptions, dest: Path) -> _Recording:
    env_id = asked.env_id
    options: Any = {"resume": asked.resume, "render": asked.render, "max_episodes": asked.episodes}
    given: dict[str, Any] = {"max_episode_steps": asked.max_steps} if asked.max_steps is not None else {}
    given |= {"render_mode": "rgb_array"} if asked.render else {}
    try:
        module, _, name = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        _require_version(name)
        made = functools.partial(gymnasium.make, env_id, **given)
        if asked.num_envs == 1:
            single = made()
        else:
            with made() as single:
                spec = single.spec
            envs = [lambda: WholeInfos(made())] * asked.num_envs
            several = AsyncVectorEnv(envs, autoreset_mode=AutoresetMode.DISABLED)
            several.spec = spec
    except UsageError:
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise UsageError(f"environment {env_id!r} not found: {error_text(error).partition(': ')[2]}") from error
    except Exception as error:
        raise RbtoolError(f"the environment {env_id} cannot be made: {error_text(error)}") from error
    if asked.num_envs == 1:
        return RecordEpisodes(single, dest, **options)
    try:
        return RecordVectorEpisodes(several, dest, **options)
    except BaseException:
        several.close()
        raise


def _require_version(name: str) -> None:
    """Raise UsageError, with a suggestion, for the id of a versioned environment without its version."""
    if name in gymnasium.registry:
        return
    known = [spec for spec in gymnasium.registry.values() if spec.id == f"{name}-v{spec.version}"]
    if known:
        newest = max(known, key=lambda spec: spec.version or 0).id
        raise UsageError(f"environment {name!r} not found without a version", hint=f"did you mean {newest}?")


def _run(env: RecordEpisodes[Any, Any], player: _Player, progress: Progress) -> None:
    while (number := env.recorder.number(0)) is not None:
        player.begin(0, number, env.action_space)
        observation, _ = env.reset(seed=player.seed(number))
        ended = False
        while not ended:
            observation, _, terminated, truncated, _ = env.step(player.act(0, observation))
            ended = terminated or truncated
        progress.advance(1)


def _run_together(env: RecordVectorEpisodes, player: _Player, progress: Progress) -> None:
    lanes, space = range(env.num_envs), env.single_action_space
    rows: list[Any] = [None] * env.num_envs
    ended = np.ones(env.num_envs, bool)
    empty: Any = create_empty_array(space, env.num_envs)
    idle = copy.deepcopy(space)  # lanes without an episode to record still need an action for each step
    while not env.recorder.is_complete:
        if ended.any():
            numbers = [env.recorder.number(lane) if ended[lane] else None for lane in lanes]
            for lane in lanes:
                player.begin(lane, numbers[lane], space)
            seeds = [None if number is None else player.seed(number) for number in numbers]
            observations, _ = env.reset(seed=seeds, options=None if ended.all() else {"reset_mask": ended})
            found = list(iterate(env.observation_space, observations))
            rows = [found[lane] if ended[lane] else rows[lane] for lane in lanes]
        actions = []
        for lane in lanes:
            env.recorder.lane = lane
            actions.append(player.act(lane, rows[lane]) if env.recorder.records(lane) else idle.sample())
            env.recorder.act(lane, actions[-1])  # checks the action; `concatenate` would cast a wrong shape or dtype
        batch = concatenate(space, actions, empty)
        before = env.episodes
        observations, _, terminated, truncated, _ = env.step(batch)
        rows, ended = list(iterate(env.observation_space, observations)), terminated | truncated
        progress.advance(env.episodes - before)


@contextlib.contextmanager
def _failures(env_id: str, env: _Recording) -> Iterator[None]:
    """Add to errors the episode in which they occurred, and a hint about the episodes that are kept."""
    recorder = env.recorder
    try:
        yield
    except BaseException as error:
        recorder.abandon()
        with contextlib.suppress(Exception):  # a failed environment may fail again, which would hide the first error
            env.abandon()
        raised = error
        place = recorder.under_way()
        if isinstance(error, SchemaError):
            raised = SchemaError(f"{place}: {error}", hint=error.hint)
        elif type(error) is RbtoolError:
            raised = RbtoolError(f"{place}: {error}", hint=error.hint)
        elif isinstance(error, Exception) and not isinstance(error, RbtoolError | OSError | MemoryError):
            raised = RbtoolError(f"{place}: the environment {env_id} failed: {error_text(error)}")
        if recorder.writer.episodes:
            kept = _kept(recorder)
            if isinstance(raised, RbtoolError):
                raised.hint = f"{raised.hint}; {kept}" if raised.hint else kept
            else:
                raised.add_note(f"hint: {kept}")
        if raised is error:
            raise
        raise raised from error


def _kept(recorder: EnvironmentRecorder) -> str:
    episodes, dest = recorder.writer.episodes, shlex.quote(str(recorder.writer.dest))
    many = f"{counted(episodes, 'episode')} {'is' if episodes == 1 else 'are'} kept"
    return f"{many}: add --resume to continue, or make a dataset of them: rbtool repair {dest}"
