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
    """A gymnasium wrapper that records every episode of `env` into a dataset at `dest`.

        with rbtool.RecordEpisodes(gymnasium.make("CartPole-v1"), "cartpole") as env:
            observation, info = env.reset(seed=0)
            ...

    Recorded are observations, actions, rewards, flags and infos exactly as the environment returns them, the seeds
    given to `reset`, and the spec of the environment. Spaces may nest; texts, sequences and graphs are padded with
    zeros, with their lengths stored beside them. Infos that cannot be stored are named in the manifest
    (`dropped_keys`).

    Each episode is written when it ends, and survives if the process dies afterwards. Leaving the `with` block, or
    calling `finish()`, turns the recording into a dataset in layout `packed`. After a crash, `rbtool repair DEST` does
    the same for the episodes so far, and `resume=True` continues the recording. An episode interrupted by `reset`,
    `finish` or an error of the environment is kept up to its last step, which becomes truncated, with the end reason
    `end_of_file`.

    Args:
        env: a single environment; for vector environments use `RecordVectorEpisodes`.
        dest: the folder of the dataset; it must be missing or empty unless `resume` is set.
        resume: continue the unfinished recording at `dest`. With `max_episodes`, a finished dataset that has all these
            episodes is accepted, too, and left unchanged; `finish()` returns its manifest.
        infos: whether to record infos.
        render: record the frames of `env.render()` as `pixels`; needs an environment with `render_mode="rgb_array"`.
        max_episodes: stop recording after this many episodes. The environment can still be used.
        sync_seconds: how many seconds of recording a power failure may cost, see `PackedStorage.create`.

    Raises:
        UsageError (a ValueError): `dest` is occupied, or an argument makes no sense.
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
        """Reset the environment and begin an episode; an unfinished one is kept, truncated at its last step."""
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
            self._ended = False  # set before `begin`, which may raise: the next step must not begin an episode again
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
        """Close the environment; a recording that is not finished stays as it is, and can be resumed."""
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
    """Return whether the environment is wrapped in `Autoreset`: the step after an episode's end resets it."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        if isinstance(inner, gymnasium.wrappers.Autoreset):
            return True
        inner = inner.env
    return False
