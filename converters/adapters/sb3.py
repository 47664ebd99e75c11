"""A replay buffer for the off-policy algorithms of Stable-Baselines3 that keeps its rows in a storage of rbtool.

from rbtool.adapters.sb3 import ReplayBuffer

model = SAC("MlpPolicy", env, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"scratch_dir": "./buffer"})
model.replay_buffer.add_dataset("./pendulum")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from ...core.errors import SchemaError, not_installed, warn_caller
from ...core.format.contracts import Array, StepReader
from ...core.format.locate import find_dataset
from ...core.open_steps import open_episodes
from ...core.options import PathLike
from ...core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from ...core.ted.episodes import rows_equal
from ...core.ted.schema import ACTION, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Key, field_named, row_bytes

_Theirs: Any = object
_missing: ImportError | None = None
try:
    from stable_baselines3.common import buffers, type_aliases
except ImportError as error:
    _missing = error
else:
    _Theirs = buffers.ReplayBuffer

Parts: TypeAlias = dict[str, Array]
"""Observations, by the part of a Dict space; for any other space there is one part, `""`."""

_CHUNK_BYTES = 16 << 20
_ALL = ""


class ReplayBuffer(_Theirs):  # type: ignore[misc]  # a library without types
    """A `replay_buffer_class` for SAC, TD3, DQN and similar algorithms, with or without Dict observations.

    `storage` is a storage of rbtool with dimensions `[rows, n_envs]`. Its elements are steps of TED: `observation`,
    `action`, and under `next` `observation`, `reward`, `done` and `truncated`. `observations`, `next_observations`,
    `actions`, `rewards`, `dones` and `timeouts` are NumPy arrays that share its memory. After the same
    `np.random.seed`, the buffer draws the same batches as the buffers of Stable-Baselines3.

    What it adds:

    - `scratch_dir` keeps the rows in memory-mapped files: a buffer may be larger than memory.
    - With `optimize_memory_usage`, a next observation is stored only if it differs from the observation in the
      following row: at ends of episodes, and in the newest row. Batches are exact, also with
      `handle_timeout_termination` and for Dict spaces.
    - `add_dataset` and `from_dataset` fill it from a dataset.

    `model.save_replay_buffer(path)` writes the filled rows, each with its next observation; `rbtool convert` converts
    that file to a dataset. When a buffer with `scratch_dir` is loaded again, its rows are kept in temporary files.

    Args:
        buffer_size: the capacity in steps, of all environments together.
        observation_space, action_space: the spaces of the environment.
        device: the device of batches.
        n_envs: the number of parallel environments.
        optimize_memory_usage: whether to store next observations only if they are not in the following row.
        handle_timeout_termination: whether a step at a time limit counts as not done in batches.
        scratch_dir: a folder for memory-mapped files; default: rows are in memory.
        existsok: whether existing files in that folder may be replaced.

    Raises:
        UsageError: (a ValueError) Stable-Baselines3 is not installed.
        SchemaError: (a RuntimeError) `scratch_dir` contains files, and `existsok` is not set.
    """

    buffer_size: int
    pos: int
    full: bool
    optimize_memory_usage: bool
    handle_timeout_termination: bool
    observations: Any
    next_observations: Any
    actions: Array
    rewards: Array
    dones: Array
    timeouts: Array

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        scratch_dir: PathLike | None = None,
        existsok: bool = False,
    ) -> None:
        if _missing is not None:
            raise not_installed("this buffer needs Stable-Baselines3", "sb3", _missing)
        super(_Theirs, self).__init__(buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._in_files: bool = scratch_dir is not None
        self._make_storage(scratch_dir, existsok)

    def _make_storage(self, scratch_dir: PathLike | None, existsok: bool) -> None:
        """Make the storage, filled with zeros, and the arrays in its memory that Stable-Baselines3 uses."""
        capacity = self.buffer_size * self.n_envs
        self.storage: LazyTensorStorage = (
            LazyMemmapStorage(capacity, scratch_dir=scratch_dir, ndim=2, existsok=existsok)
            if self._in_files
            else LazyTensorStorage(capacity, ndim=2)
        )
        lead = (1, self.n_envs)
        # One row that every `add` fills again: making a tensordict takes longer than writing it.
        self._before, self._after = (
            {part: np.zeros((*lead, *shape), dtype) for part, (dtype, shape) in self._forms().items()} for _ in range(2)
        )
        actions = np.zeros((*lead, self.action_dim), self._maybe_cast_dtype(self.action_space.dtype))
        self._row = self._steps(self._before, self._after, actions, *[np.zeros(lead, np.float32) for _ in range(3)])
        self._row_arrays = _arrays_of(self._row)
        self.storage.set(range(1), self._row)
        self.storage.empty()  # the tensors stay allocated
        rows: Any = self.storage.array_rows(None)
        self._rows, self._row_values = rows, rows.take(_entries(self._row[0]), True)  # values in the memory of the row
        self.__dict__.update(_arrays_of(self.storage.contents))
        self._next: dict[int, Parts] = {}
        self._apart: Array = np.zeros((self.buffer_size, self.n_envs), bool)

    def _forms(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return the element type and shape of an observation, by part."""
        if isinstance(self.obs_shape, dict):
            return {part: (self.observation_space[part].dtype, shape) for part, shape in self.obs_shape.items()}
        return {_ALL: (self.observation_space.dtype, self.obs_shape)}

    def _steps(
        self, before: Parts, after: Parts, actions: Array, rewards: Array, dones: Array, timeouts: Array
    ) -> TensorDict:
        """Make steps of TED from arrays `[rows, n_envs, …]`."""
        outcome: dict[str, Any] = {
            "reward": torch.from_numpy(rewards.astype(np.float32, copy=False)).unsqueeze(-1),
            "done": torch.from_numpy(dones != 0).unsqueeze(-1),
            "truncated": torch.from_numpy(timeouts != 0).unsqueeze(-1),
        }
        if not self.optimize_memory_usage:
            outcome["observation"] = _nested(after)
        steps = {"observation": _nested(before), "action": torch.from_numpy(actions), "next": outcome}
        return TensorDict(steps, batch_size=rewards.shape)

    def _each(self, observations: Any) -> Parts:
        """Return observations by part, given an array or a dictionary of Stable-Baselines3."""
        return observations if isinstance(self.obs_shape, dict) else {_ALL: observations}

    # Writing -----------------------------------------------------------------------------------------

    def add(self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: Sequence[Any]) -> None:
        """Add a step of each environment."""
        for parts, state in ((self._before, obs), (self._after, next_obs)):
            given = self._each(state)
            for part, rows in parts.items():
                # Discrete observations come without the last dimension
                rows[0] = np.reshape(given[part], rows.shape[1:]) if rows.shape[2:] == (1,) else given[part]
        row = self._row_arrays
        row["actions"][0] = np.reshape(action, (self.n_envs, self.action_dim))
        row["rewards"][0], row["dones"][0] = reward, done
        if self.handle_timeout_termination:
            row["timeouts"][0] = [info.get("TimeLimit.truncated", False) for info in infos]
        taken = self._row_values
        if taken is None or not self.storage.write_arrays(self._rows, self.pos, taken[1], None, True):
            self.storage.set(range(self.pos, self.pos + 1), self._row)
        self._written(self.pos + 1, self._before, self._after)

    def _written(self, stop: int, before: Parts, after: Parts) -> None:
        """Advance the position to `stop` after rows from `pos` on were written."""
        if self.optimize_memory_usage:
            self._keep_next(before, after, stop - 1)
        self.full = self.full or stop == self.buffer_size
        self.pos = stop % self.buffer_size

    def _keep_next(self, before: Parts, after: Parts, newest: int) -> None:
        """Store the next observations of written rows that differ from the observation in the following row.

        `_apart` marks these rows, and `_next` holds their next observations by `row * n_envs + env`. The newest row
        always has one, because nothing follows it yet; the next write removes it if the new row begins with it.

            row              pos - 1   pos    pos + 1    newest = pos + 2
            observation         s3      s4       s0           s1
            next                s4      s5       s1           s2
            stored in _next     -       s5        -           s2
        """
        count = len(next(iter(before.values())))
        rows = slice(self.pos, self.pos + count)
        for row, env in np.argwhere(self._apart[rows]):
            del self._next[(self.pos + int(row)) * self.n_envs + int(env)]
        self._apart[rows] = False
        last = (self.pos - 1) % self.buffer_size  # the newest row before this write
        for env in np.flatnonzero(self._apart[last]).tolist():
            place = last * self.n_envs + env
            if all(rows_equal(kept[np.newaxis], before[part][:1, env]) for part, kept in self._next[place].items()):
                self._apart[last, env] = False
                del self._next[place]
        apart = np.ones((count, self.n_envs), bool)
        follows = [rows_equal(_flat(rows[:-1]), _flat(before[part][1:])) for part, rows in after.items()]
        apart[:-1] = ~np.logical_and.reduce(follows).reshape(count - 1, self.n_envs)
        apart[newest - self.pos] = True
        self._apart[rows] = apart
        for row, env in np.argwhere(apart):
            place = (self.pos + int(row)) * self.n_envs + int(env)
            self._next[place] = {part: values[row, env].copy() for part, values in after.items()}

    def reset(self) -> None:
        """Remove all steps."""
        super().reset()
        self.storage.empty()
        self._next.clear()
        self._apart[:] = False

    # Batches -----------------------------------------------------------------------------------------

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw steps with replacement; `env`, a VecNormalize, normalizes observations and rewards."""
        return super(_Theirs, self).sample(batch_size, env)

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        envs = np.random.randint(0, self.n_envs, len(batch_inds))  # noqa: NPY002  # what Stable-Baselines3 seeds
        places = batch_inds * self.n_envs + envs
        before = _taken(self._each(self.observations), places)
        after = self._states_after(places)
        if env is not None and isinstance(self.obs_shape, dict):
            before, after = env.normalize_obs(before), env.normalize_obs(after)
        elif env is not None:
            before, after = ({_ALL: env.normalize_obs(state[_ALL])} for state in (before, after))
        actions, rewards, dones, timeouts = (
            np.take(_flat(rows), places, axis=0) for rows in (self.actions, self.rewards, self.dones, self.timeouts)
        )
        others = (actions, (dones & ~timeouts).astype(np.float32)[:, np.newaxis])
        rewards = self._normalize_reward(rewards[:, np.newaxis], env)
        states = [
            {part: torch.from_numpy(rows).to(self.device) for part, rows in one.items()} for one in (before, after)
        ]
        action, done, reward = (torch.from_numpy(one).to(self.device) for one in (*others, rewards))
        if isinstance(self.obs_shape, dict):
            return type_aliases.DictReplayBufferSamples(states[0], action, states[1], done, reward)
        return type_aliases.ReplayBufferSamples(states[0][_ALL], action, states[1][_ALL], done, reward)

    def _states_after(self, places: Array) -> Parts:
        """Return the observations after steps, by part, `[n, …]`; a place is `row * n_envs + env`."""
        if not self.optimize_memory_usage:
            return _taken(self._each(self.next_observations), places)
        following = (places + self.n_envs) % self._apart.size
        found = _taken(self._each(self.observations), following)
        for number in np.flatnonzero(self._apart.reshape(-1)[places]).tolist():
            for part, kept in self._next[int(places[number])].items():
                found[part][number] = kept
        return found

    # Saving ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that the buffers of Stable-Baselines3 save, with the filled rows only."""
        rows, state = self.size(), dict(self.__dict__)
        for name in ("storage", "_row", "_row_arrays", "_rows", "_row_values", "_before", "_after", "_next", "_apart"):
            del state[name]
        if self.optimize_memory_usage:
            found = self._states_after(np.arange(rows * self.n_envs))
            parts = {part: values.reshape(rows, self.n_envs, *values.shape[1:]) for part, values in found.items()}
            state["next_observations"] = parts if isinstance(self.obs_shape, dict) else parts[_ALL]
        for name in _SAVED:
            one = state[name]
            state[name] = {part: each[:rows] for part, each in one.items()} if isinstance(one, dict) else one[:rows]
        return state | {name: state[name].astype(np.float32) for name in ("dones", "timeouts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = {name: state[name] for name in _SAVED}
        self.__dict__.update({name: value for name, value in state.items() if name not in _SAVED})
        self._make_storage(None, False)
        rows, position = len(saved["rewards"]), self.pos
        if not rows:
            return
        before, after, *others = saved.values()
        before, after, self.pos = self._each(before), self._each(after), 0
        self.storage.set(range(rows), self._steps(before, after, *others))
        if self.optimize_memory_usage:
            self._keep_next(before, after, (position - 1) % rows)
        self.pos = position

    # Datasets ----------------------------------------------------------------------------------------

    @classmethod
    def from_dataset(
        cls,
        dataset: PathLike,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        *,
        buffer_size: int | None = None,
        scale_actions: bool | None = None,
        **options: Any,
    ) -> Self:
        """Make a buffer with the steps of a dataset; `buffer_size` is the number of its steps by default.

        The other arguments are as for the buffer and for `add_dataset`.
        """
        if buffer_size is None:
            with open_episodes(find_dataset(dataset)) as reader:
                buffer_size = reader.manifest.steps
        buffer = cls(buffer_size, observation_space, action_space, device, n_envs, **options)
        buffer.add_dataset(dataset, scale_actions=scale_actions)
        return buffer

    def add_dataset(self, dataset: PathLike, *, scale_actions: bool | None = None) -> None:
        """Add all steps of a dataset, as if the environments of the buffer had produced them in parallel.

        Each environment gets an equal share of the steps, in the order of the dataset; a remainder is left out with a
        warning. The algorithms of Stable-Baselines3 store actions of a Box scaled from its bounds to -1 and 1, so they
        are scaled here as well, unless the dataset comes from a buffer of Stable-Baselines3.

        Args:
            dataset: a path, `source:id`, or the buffer of a dataset. Parts of a Dict space are `observation.NAME`.
            scale_actions: whether to scale actions of a Box; default: True, unless the dataset comes from
                Stable-Baselines3.

        Raises:
            MissingKeyError: (a KeyError) a field is missing; nothing is added.
            SchemaError: (a RuntimeError) types and shapes do not fit the spaces, or there are more steps than the
                buffer has room for; nothing is added.
        """
        with open_episodes(find_dataset(dataset)) as reader:
            source = _Dataset(reader, self, scale_actions)
            if source.rows > self.buffer_size:
                raise SchemaError(
                    f"{reader.path} has {reader.manifest.steps:,} steps, and the buffer has room for "
                    f"{self.buffer_size * self.n_envs:,}"
                )
            if left := reader.manifest.steps - source.rows * self.n_envs:
                warn_caller(
                    f"{reader.path}: the last {left} steps are left out, because {self.n_envs} environments get equal "
                    "shares"
                )
            done = 0
            while done < source.rows:
                stop = min(done + source.chunk, source.rows, done + self.buffer_size - self.pos)
                before, after, *others = source.steps(done, stop)
                end = self.pos + stop - done
                self.storage.set(range(self.pos, end), self._steps(before, after, *others))
                self._written(end, before, after)
                done = stop


class _Dataset:
    """The steps of a dataset as rows `[rows, n_envs, …]` of a buffer: each environment gets `rows` steps."""

    def __init__(self, reader: StepReader, buffer: ReplayBuffer, scale_actions: bool | None) -> None:
        self._reader, self._buffer = reader, buffer
        self.rows = reader.manifest.steps // buffer.n_envs
        self.chunk = max(1, _CHUNK_BYTES // max(1, row_bytes(reader.fields) * buffer.n_envs))
        self._bounds: tuple[Array, Array] | None = None
        space, ours = buffer.action_space, reader.manifest.request.source == "sb3"
        if hasattr(space, "low") and (not ours if scale_actions is None else scale_actions):
            low, high = (bound.reshape(-1) for bound in (space.low, space.high))
            if low.dtype.kind == "f" and np.isfinite(low).all() and np.isfinite(high).all():
                self._bounds = low, high
        for part, (dtype, shape) in buffer._forms().items():
            for key in _keys_of(part):
                self._require(key, dtype, shape)
        self._require(ACTION, buffer.actions.dtype, (buffer.action_dim,))
        self._require(NEXT_REWARD, np.dtype(np.float32), (1,))

    def _require(self, key: Key, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        field = field_named(self._reader.fields, key)
        same = field.shape == shape or (len(shape) == 1 and int(np.prod(field.shape)) == shape[0])
        if not same or not np.can_cast(field.numpy, dtype, "same_kind"):
            raise SchemaError(
                f"{self._reader.path}: {field.name} is {field.dtype} {list(field.shape)}, and the buffer has room for "
                f"{dtype} {list(shape)}"
            )

    def steps(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the arrays of steps in the order of `_SAVED`."""
        forms = self._buffer._forms()
        for number in (0, 1):
            yield {
                part: self._read(_keys_of(part)[number], start, stop).astype(dtype).reshape(stop - start, -1, *shape)
                for part, (dtype, shape) in forms.items()
            }
        actions = self._read(ACTION, start, stop).reshape(stop - start, self._buffer.n_envs, -1)
        if self._bounds is not None:
            low, high = self._bounds
            actions = 2.0 * ((actions - low) / (high - low)) - 1.0
        yield actions.astype(self._buffer.actions.dtype)
        yield self._read(NEXT_REWARD, start, stop)[..., 0]
        terminated, truncated = (self._read(key, start, stop)[..., 0] for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
        yield terminated | truncated
        yield truncated & ~terminated & self._buffer.handle_timeout_termination

    def _read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of each environment's share side by side, `[rows, n_envs, …]`."""
        shares = range(0, self.rows * self._buffer.n_envs, self.rows)
        return np.stack([self._reader.read(key, first + start, first + stop) for first in shares], axis=1)


_SAVED = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def _arrays_of(steps: TensorDict) -> dict[str, Any]:
    """Return NumPy arrays that share the memory of steps, by their names in Stable-Baselines3."""
    after = steps["next"]
    found = {"actions": steps["action"].numpy()}
    for name, key in (("rewards", "reward"), ("dones", "done"), ("timeouts", "truncated")):
        found[name] = after[key].numpy()[..., 0]
    states = {"observations": steps["observation"], "next_observations": after.get("observation", None)}
    for name, state in states.items():
        if state is not None:
            found[name] = (
                state.numpy()
                if isinstance(state, torch.Tensor)
                else {part: rows.numpy() for part, rows in state.items()}
            )
    return found


def _entries(steps: Any) -> dict[str, Any]:
    """Return the entries of a tensordict as arrays that share its memory."""
    return {key: rows.numpy() if isinstance(rows, torch.Tensor) else _entries(rows) for key, rows in steps.items()}


def _taken(parts: Parts, places: Array) -> Parts:
    """Take rows of all environments from arrays `[rows, n_envs, …]`."""
    return {part: np.take(_flat(rows), places, axis=0) for part, rows in parts.items()}


def _keys_of(part: str) -> tuple[Key, Key]:
    """Return the keys in TED of a part of the observation before and after a step."""
    key = ("observation", part) if part else ("observation",)
    return key, ("next", *key)


def _nested(parts: Parts) -> Any:
    """Return observations as in a step of TED: a tensor, or a dictionary of the parts of a Dict space."""
    if _ALL in parts:
        return torch.from_numpy(parts[_ALL])
    return {part: torch.from_numpy(rows) for part, rows in parts.items()}


def _flat(rows: Array) -> Array:
    """Merge the dimensions of rows and environments."""
    return rows.reshape(-1, *rows.shape[2:])
