"""Wrappers of gymnasium that record the episodes of an environment, or of each environment of a vector environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, SupportsFloat, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AsyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate

from ..errors import SchemaError, UsageError, require_flags
from ..format.contracts import Array
from ..format.manifest import Manifest
from ..format.packed.recording import SYNC_SECONDS
from .recorder import NO_FRAME, EnvironmentRecorder, require_seeds

_Obs = TypeVar("_Obs")
_Act = TypeVar("_Act")


class RecordEpisodes(gymnasium.Wrapper[_Obs, _Act, _Obs, _Act], RecordConstructorArgs, Generic[_Obs, _Act]):
    """A gymnasium wrapper that records every episode of `env` into a dataset at `dest`.

        with rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), "cartpole") as env:
            observation, info = env.reset(seed=0)
            ...

    It records observations, actions, rewards, flags and infos exactly as the environment returns them, the seeds of
    `reset`, and the spec of the environment. Spaces may be nested. Texts, sequences and graphs are padded with zeros,
    and their lengths are stored beside them. Infos that cannot be stored are listed in the manifest (`dropped_keys`).

    Each episode is written when it ends, and survives if the process dies afterwards. Leaving the `with` block, or
    calling `finish()`, turns the recording into a dataset in layout `packed`. After a crash, `rbtool repair DEST` makes
    a dataset of the episodes so far, and `resume=True` continues the recording. An episode that is interrupted by
    `reset`, `finish` or an error of the environment is kept up to its last step; this step is marked truncated, and the
    end reason is `end_of_file`.

    Args:
        env: a single environment; for vector environments use `RecordVectorEpisodes`.
        dest: the folder of the dataset; it must be missing or empty unless `resume` is set.
        resume: continue the unfinished recording at `dest`. With `max_episodes`, a finished dataset that has all these
            episodes is also accepted, and left unchanged; `finish()` returns its manifest.
        infos: record infos.
        render: record the frames of `env.render()` as `pixels`. The environment must have `render_mode="rgb_array"`.
        max_episodes: stop recording after this many episodes. The environment can still be used.
        sync_seconds: how many seconds of recording a power failure may cost, see `PackedStorage.create`.

    Raises:
        UsageError (a ValueError): `dest` is occupied, or an argument is invalid.
        SchemaError (a RuntimeError): a space, observation or action cannot be recorded unchanged.
    """

    def __init__(
        self,
        env: gymnasium.Env[_Obs, _Act],
        dest: str | os.PathLike[str],
        *,
        resume: bool = False,
        infos: bool = True,
        render: bool = False,
        max_episodes: int | None = None,
        sync_seconds: float = SYNC_SECONDS,
    ) -> None:
        require_flags(resume=resume, infos=infos, render=render)
        RecordConstructorArgs.__init__(
            self, dest=os.fspath(dest), resume=resume, infos=infos, render=render, max_episodes=max_episodes,
            sync_seconds=sync_seconds,
        )  # fmt: skip
        if isinstance(env, gymnasium.vector.VectorEnv):
            raise UsageError("RecordEpisodes takes a single environment", hint="use RecordVectorEpisodes")
        super().__init__(env)
        if render and env.render_mode != "rgb_array":
            raise UsageError(
                f"render needs an environment with render_mode='rgb_array', it has {env.render_mode!r}",
                hint="gymnasium.make(ID, render_mode='rgb_array')",
            )
        self._render = render
        self._autoreset = _resets_itself(env)
        self._ended = False
        self.recorder = EnvironmentRecorder(
            dest, env.observation_space, env.action_space, env.spec, lanes=1, resume=resume, infos=infos,
            max_episodes=max_episodes, sync_seconds=sync_seconds,
        )  # fmt: skip

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[_Obs, dict[str, Any]]:
        """Reset the environment and begin an episode. An unfinished episode is kept, truncated at its last step."""
        require_seeds([seed])
        self.recorder.require_spaces(self.env.observation_space, self.env.action_space)
        self.recorder.cut_off(0)
        self._ended = False
        observation, info = self.env.reset(seed=seed, options=options)
        self.recorder.begin(0, observation, info, seed=seed, frame=self._frame())
        return observation, info

    def step(self, action: _Act) -> tuple[_Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record the step; at the end of an episode, write the episode."""
        if self._ended and self._autoreset:
            result = self.env.step(action)
            self._ended = False  # before `begin`, which may raise: the next step must not begin an episode again
            self.recorder.begin(0, result[0], result[4], frame=self._frame())
            return result
        self.recorder.act(0, action)
        try:
            result = self.env.step(action)
            self._ended = self.recorder.observe(0, *result, self._frame())
        except BaseException:
            self.recorder.interrupt()
            raise
        return result

    def _frame(self) -> Any:
        if not self._render or not self.recorder.records(0):
            return None
        frame = self.env.render()
        if frame is None:
            raise SchemaError(NO_FRAME)
        return frame

    @property
    def episodes(self) -> int:
        """The number of episodes written so far."""
        return self.recorder.writer.episodes

    def finish(self) -> Manifest:
        """Turn the recording into a dataset and return its manifest; an unfinished episode ends truncated."""
        return self.recorder.finish()

    def close(self) -> None:
        """Close the environment. An unfinished recording keeps its complete episodes, and can be resumed."""
        self.recorder.close()
        super().close()

    def abandon(self) -> None:
        """Close after an error (the counterpart of `RecordVectorEpisodes.abandon`)."""
        self.close()

    def __exit__(self, *args: Any) -> Literal[False]:
        try:
            self.recorder.leave(args[1] if len(args) > 1 else None)
        finally:
            self.close()
        return False


def _resets_itself(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether the environment is wrapped in `Autoreset`, so that the step after an episode's end resets it."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        if isinstance(inner, gymnasium.wrappers.Autoreset):
            return True
        inner = inner.env
    return False


_MODES = {"NextStep": "next", "SameStep": "same", "Disabled": "disabled"}
_FINAL = ("final_obs", "final_info")
_WHOLE = "rbtool_whole_info"


class RecordVectorEpisodes(VectorWrapper):
    """A wrapper that records every episode of each environment of a vector environment into one dataset at `dest`.

    It records the same data as `RecordEpisodes`, and has the same arguments. Episodes are stored in the order in which
    they end. Boundaries are exact in every autoreset mode of gymnasium:

    - `NEXT_STEP`: the step that resets an environment is not recorded as a step;
    - `SAME_STEP`: the last observation and info of an episode are taken from `final_obs` and `final_info`;
    - `DISABLED`: environments are reset by `reset(options={"reset_mask": mask})`.

    The mode is read from the environment (`autoreset_mode`, or its metadata). Infos are recorded as gymnasium batches
    them: it casts the numbers of an entry to the type that the first environment returned. Wrap the single environments
    in `WholeInfos` to record the infos of each environment unchanged.

    Args:
        max_episodes: the number of episodes to record in total. Each environment records an equal share (the first ones
            one more if the number is not divisible). Which episodes are recorded then does not depend on timing.
        autoreset_mode: a `gymnasium.vector.AutoresetMode`, for environments that do not state their mode.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        dest: str | os.PathLike[str],
        *,
        autoreset_mode: Any = None,
        resume: bool = False,
        infos: bool = True,
        render: bool = False,
        max_episodes: int | None = None,
        sync_seconds: float = SYNC_SECONDS,
    ) -> None:
        require_flags(resume=resume, infos=infos, render=render)
        if not isinstance(env, VectorEnv):
            raise UsageError("RecordVectorEpisodes takes a vector environment", hint="use RecordEpisodes")
        super().__init__(env)
        if render and env.render_mode != "rgb_array":
            raise UsageError(f"render needs an environment with render_mode='rgb_array', it has {env.render_mode!r}")
        self._render = render
        self._mode = _mode_of(env, autoreset_mode)
        if render and self._mode == "same":
            raise UsageError("the last frame of an episode cannot be rendered in autoreset mode SAME_STEP")
        self._ended = np.zeros(env.num_envs, bool)
        self._may_reset_again = np.zeros(env.num_envs, bool)
        self.recorder = EnvironmentRecorder(
            dest, env.single_observation_space, env.single_action_space, env.spec, lanes=env.num_envs, resume=resume,
            infos=infos, max_episodes=max_episodes, sync_seconds=sync_seconds,
        )  # fmt: skip

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]`; their unfinished episodes end truncated."""
        self.recorder.require_spaces(self.env.single_observation_space, self.env.single_action_space)
        mask = None if options is None else options.get("reset_mask")
        lanes = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        seeds = self._seeds(seed)
        require_seeds(seeds)
        self._refuse_second_reset(lanes)
        for lane in lanes:
            self.recorder.cut_off(lane)
        self._ended[lanes] = False
        self._may_reset_again[lanes], self.recorder.lane = False, None
        observations, infos = self.env.reset(seed=seed, options=options)
        rows, frames = self._rows(observations), self._frames()
        for lane in lanes:
            info = lane_info(infos, lane, self.num_envs)
            self.recorder.begin(lane, rows[lane], info, seed=seeds[lane], frame=frames[lane])
        return observations, infos

    def _seeds(self, seed: Any) -> list[int | None]:
        if seed is None or isinstance(seed, int | np.integer):
            return [None if seed is None else int(seed) + lane for lane in range(self.num_envs)]
        return list(seed)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments and record the steps; write each episode that ends."""
        resetting = self._ended
        if self._mode == "disabled" and resetting.any():
            raise UsageError(
                f"environment {int(np.flatnonzero(resetting)[0])} has ended its episode",
                hint='reset it first: env.reset(options={"reset_mask": mask})',
            )
        for lane, action in enumerate(iterate(self.env.action_space, actions)):
            if not resetting[lane]:
                self.recorder.act(lane, action)
        self._ended = np.zeros(self.num_envs, bool)  # after an error, nothing is recorded until a reset
        self._may_reset_again[:], self.recorder.lane = True, None
        try:
            result = self.env.step(actions)
            self._observe(resetting, *result)
        except BaseException:
            self.recorder.interrupt()
            raise
        self._may_reset_again = self._ended.copy()
        return result

    def _refuse_second_reset(self, lanes: list[int]) -> None:
        """Raise UsageError if the step after this `reset` would reset an environment again.

        The second reset would be recorded as a step. In gymnasium 1.1 to 1.4, the processes of an AsyncVectorEnv
        without shared memory do not note that `reset` has been called.
        """
        env: Any = self.unwrapped
        if self._mode != "next" or not isinstance(env, AsyncVectorEnv) or env.shared_memory:
            return
        doubtful = [lane for lane in lanes if self._may_reset_again[lane]]
        if doubtful:
            raise UsageError(
                f"environment {doubtful[0]} has ended its episode: without shared memory it resets again in the step "
                "after this reset()",
                hint="create the AsyncVectorEnv with shared_memory=True, or call step() instead, which resets it",
            )

    def _observe(
        self,
        resetting: Array,
        observations: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        infos: Mapping[str, Any],
    ) -> None:
        rows, frames = self._rows(observations), self._frames()
        done = np.logical_or(terminated, truncated)
        for lane in range(self.num_envs):
            info: Mapping[str, Any] = lane_info(infos, lane, self.num_envs) if infos else {}
            frame = frames[lane]
            if resetting[lane]:
                self.recorder.begin(lane, rows[lane], info, frame=frame)
            elif done[lane] and self._mode == "same":
                self._end_and_begin(
                    lane, rows[lane], (rewards[lane], terminated[lane], truncated[lane]), infos, info, frame
                )
            else:
                self.recorder.observe(lane, rows[lane], rewards[lane], terminated[lane], truncated[lane], info, frame)
        if self._mode != "same":
            self._ended = done

    def _end_and_begin(
        self, lane: int, row: Any, outcome: tuple[Any, Any, Any], infos: Mapping[str, Any], info: Mapping[str, Any],
        frame: Any,
    ) -> None:  # fmt: skip
        """Record the last step of an episode and the first observation of the next one, both of the same call."""
        if "final_obs" not in infos or not np.all(infos.get("_final_obs", np.ones(self.num_envs, bool))[lane]):
            raise SchemaError(f"environment {lane} ended its episode, but the infos have no final_obs for it")
        after = getattr(self.unwrapped, "_env_obs", None)  # SyncVectorEnv stores the result of reset here, uncopied
        if after is not None and _shares(infos["final_obs"][lane], after[lane]):
            raise SchemaError(
                f"environment {lane} reuses its observation array: its reset overwrote the episode's last observation",
                hint="return copies, or use the autoreset mode NEXT_STEP",
            )
        last = {name: value for name, value in info.items() if name not in _FINAL}
        final = lane_info(infos.get("final_info", {}), lane, self.num_envs)
        if _is_statistics(last.get("episode")):
            final.setdefault("episode", last.pop("episode"))
        self.recorder.observe(lane, infos["final_obs"][lane], *outcome, final, frame)
        self.recorder.begin(lane, row, last, frame=frame)

    def _rows(self, observations: Any) -> list[Any]:
        return list(iterate(self.env.observation_space, observations))

    def _frames(self) -> Any:
        if not self._render:
            return (None,) * self.num_envs
        frames: Any = self.env.render()
        if frames is None or any(frame is None for frame in frames):
            raise SchemaError(NO_FRAME)
        return frames

    @property
    def episodes(self) -> int:
        """The number of episodes written so far."""
        return self.recorder.writer.episodes

    def finish(self) -> Manifest:
        """Turn the recording into a dataset and return its manifest; unfinished episodes end truncated."""
        return self.recorder.finish()

    def close(self, **kwargs: Any) -> None:
        """Close the environments. An unfinished recording keeps its complete episodes, and can be resumed."""
        if hasattr(self, "recorder"):  # gymnasium 1.2 also closes an object whose constructor has raised
            self.recorder.close()
        super().close(**kwargs)

    def __enter__(self) -> RecordVectorEpisodes:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.recorder.leave(error)
        finally:
            if error is None:
                self.close()
            else:
                self.abandon()

    def abandon(self) -> None:
        """Close after an error without waiting for environments in other processes, which may never answer."""
        env: Any = self.unwrapped
        if isinstance(env, AsyncVectorEnv) and not env.closed:
            # AsyncVectorEnv.close() waits for a pending step and raises its error again, which leaves it open.
            for process in env.processes:
                process.terminate()
            for process in env.processes:
                process.join()
            for pipe in env.parent_pipes:
                pipe.close()
            env.closed = True
        self.close()


def _mode_of(env: VectorEnv[Any, Any, Any], asked: Any) -> str:
    stated = asked
    if stated is None and env.metadata is env.unwrapped.metadata:  # no wrapper declares another mode
        stated = getattr(env.unwrapped, "autoreset_mode", None)  # environments may share one metadata (gymnasium 1.1)
    if stated is None:
        stated = env.metadata.get("autoreset_mode")
    mode = _MODES.get(str(getattr(stated, "value", stated)))
    if mode is None:
        found = "declares no autoreset mode" if stated is None else f"has the unknown autoreset mode {stated!r}"
        raise UsageError(
            f"the environment {found}, on which the ends of episodes depend",
            hint="give autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED",
        )
    return mode


def _shares(one: Any, other: Any) -> bool:
    """Return whether two observations of one space share memory."""
    if isinstance(one, Mapping):
        return any(_shares(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple | list):
        return any(map(_shares, one, other))
    return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.shares_memory(one, other)


def _is_statistics(value: Any) -> bool:
    """Return whether an info has the form of the statistics that `RecordEpisodeStatistics` adds at an episode's end."""
    return isinstance(value, Mapping) and value.keys() == {"r", "l", "t"}


@dataclass(frozen=True, slots=True)
class _Whole:
    """Wraps an info so that gymnasium batches it as one opaque object."""

    info: dict[str, Any]


class WholeInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wraps one environment of a vector environment, so that its infos are recorded exactly as it returns them.

    The infos are copied, because in autoreset mode `SAME_STEP` the reset of an environment that reuses its arrays would
    overwrite the last info of the episode.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {_WHOLE: _Whole(_copied(info))}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        *result, info = self.env.step(action)
        return (*result, {_WHOLE: _Whole(_copied(info))})


def _copied(value: Any) -> Any:
    """Copy the arrays, lists and dicts of an info; return anything else unchanged."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    return [*map(_copied, value)] if type(value) is list else value


def lane_info(infos: Mapping[str, Any], lane: int, lanes: int) -> dict[str, Any]:
    """Return the info of one environment from batched infos, without the entries whose mask `_NAME` is False for it."""
    found = {}
    if _WHOLE in infos:
        whole = infos[_WHOLE][lane]
        return dict(whole.info) if isinstance(whole, _Whole) else {}
    for name, value in infos.items():
        if name.startswith("_") and name[1:] in infos:
            continue
        mask = infos.get(f"_{name}")
        if mask is not None and not mask[lane]:
            continue
        if isinstance(value, Mapping):
            found[name] = lane_info(value, lane, lanes)
        elif isinstance(value, np.ndarray | list | tuple) and len(value) == lanes:
            found[name] = value[lane]
        else:
            found[name] = value
    return found
