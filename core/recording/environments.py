"""RecordEpisodes: a gymnasium wrapper that records what an environment returns."""

from __future__ import annotations

import os
from typing import Any, Generic, Literal, SupportsFloat, TypeVar

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from ..errors import SchemaError, UsageError, require_flags
from ..format.manifest import Manifest
from ..format.packed.recording import SYNC_SECONDS
from .recorder import NO_FRAME, EnvironmentRecorder, require_seeds

_Obs = TypeVar("_Obs")
_Act = TypeVar("_Act")


class RecordEpisodes(gymnasium.Wrapper[_Obs, _Act, _Obs, _Act], RecordConstructorArgs, Generic[_Obs, _Act]):
    """Records every episode of `env` into a dataset at `dest`.

        with rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), "cartpole") as env:
            observation, info = env.reset(seed=0)
            ...

    Leaving the `with` block, or `finish()`, makes the dataset, in layout `packed`. Kept are observations, actions,
    rewards, flags and infos, as they were returned, the seeds of `reset`, and the spec of the environment. An episode
    is written when it ends and survives the death of the process: `rbtool repair DEST` makes a
    dataset of them, or `resume=True` continues them. An episode that `reset`, `finish` or an error of the environment
    interrupts is cut off: its last step becomes truncated, its end reason `end_of_file`.

    Spaces may nest; texts, sequences and graphs are padded with zeros, next to how many elements count. Infos that
    cannot be stored are named in the manifest (`dropped_keys`); `infos=False` leaves all out. `render=True` records
    the frames of `env.render()` as `pixels`, which takes an environment made with `render_mode="rgb_array"`.
    `sync_seconds` is what a power failure may cost, see `PackedStorage.create`. `max_episodes` stops recording after
    so many; the environment can still be used. With both `resume` and `max_episodes`, a dataset that such a recording
    has become is left as it is if it has all these episodes, and `finish()` returns its manifest.

    UsageError (a ValueError) where something is at `dest`; SchemaError (a RuntimeError) for spaces, observations and
    actions that cannot be recorded without a change.
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
        """Reset the environment and begin an episode; one under way is cut off."""
        require_seeds([seed])
        self.recorder.require_spaces(self.env.observation_space, self.env.action_space)
        self.recorder.cut_off(0)
        self._ended = False
        observation, info = self.env.reset(seed=seed, options=options)
        self.recorder.begin(0, observation, info, seed=seed, frame=self._frame())
        return observation, info

    def step(self, action: _Act) -> tuple[_Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record the step; the last one of an episode writes it."""
        if self._ended and self._autoreset:
            result = self.env.step(action)
            self._ended = False  # an error below must not let the next step begin an episode
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
        """How many episodes are written."""
        return self.recorder.writer.episodes

    def finish(self) -> Manifest:
        """Make a dataset of the recording and return its manifest; an episode under way is cut off."""
        return self.recorder.finish()

    def close(self) -> None:
        """Close the environment, and the recording if it is not finished: it can be continued then."""
        self.recorder.close()
        super().close()

    def abandon(self) -> None:
        """Close after an error."""
        self.close()

    def __exit__(self, *args: Any) -> Literal[False]:
        try:
            self.recorder.leave(args[1] if len(args) > 1 else None)
        finally:
            self.close()
        return False


def _resets_itself(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether the step after an episode resets the environment."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        if isinstance(inner, gymnasium.wrappers.Autoreset):
            return True
        inner = inner.env
    return False
