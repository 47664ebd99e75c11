"""Datasets as the arrays of `d4rl.qlearning_dataset` and the trajectories of `d4rl.sequence_dataset`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from ...core.errors import UsageError, require_flags
from ...core.format.contracts import Array, StepReader
from ...core.format.locate import find_dataset
from ...core.format.returns import add_rewards_to_go
from ...core.open_steps import open_episodes
from ...core.options import PathLike
from ...core.ted.episodes import Final
from ...core.ted.schema import NEXT, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, field_named
from ..files.exports import OUTCOMES, only_leaf

_CHUNK_BYTES = 16 << 20


def qlearning_arrays(
    dataset: PathLike, *, timeouts: Literal["keep", "drop"] = "keep", dtype: Any = np.float32
) -> dict[str, Array]:
    """Return a dataset as the arrays of `d4rl.qlearning_dataset`, for code that trains on those.

    D4RL's files have no observation after the last step of an episode. `d4rl.qlearning_dataset` therefore leaves out
    the last step of an episode that a time limit ended, and the last row of the file, and pairs terminal steps with the
    first observation of the following episode. A dataset of rbtool stores the observation after every step, and
    `next_observations` is that observation. The last steps at time limits are kept, and are not terminal. Only steps
    whose source had no observation after them are left out.

    Args:
        dataset: a path, `source:id`, or the buffer of a dataset, with one array of observations.
        timeouts: `"drop"` leaves out the steps that D4RL leaves out.
        dtype: the element type of all arrays but `terminals`; None for the stored ones.

    Returns:
        `observations` and `next_observations` `[n, *shape]`, `actions` `[n, *shape]`, `rewards` `[n]`, `terminals` bool
        `[n]`.

    Raises:
        SchemaError: (a RuntimeError) observations or actions are in several arrays.

    >>> import rbtool
    >>> rows = rbtool.record("CartPole-v1", "cartpole", episodes=3, seed=0).steps
    >>> arrays = qlearning_arrays("cartpole")
    >>> arrays["next_observations"].shape == (rows, 4), int(arrays["terminals"].sum())
    (True, 3)
    """
    if timeouts not in ("keep", "drop"):
        raise UsageError(f"timeouts is {timeouts!r}, expected 'keep' or 'drop'")
    with open_episodes(find_dataset(dataset)) as reader:
        fields = _fields(reader)
        rows = np.flatnonzero(_kept(reader, drop=timeouts == "drop"))
        return {
            name: _rows(reader, field, rows, None if name == "terminals" else dtype)
            for name, field in fields.items()
            if name != "timeouts"
        }


def _fields(reader: StepReader) -> dict[str, Field]:
    """Return the field of each array, by the array's name in D4RL."""
    observation, action = (only_leaf(reader.fields, role, "D4RL") for role in ("observation", "action"))
    keys: dict[str, Key] = {
        "observations": observation.key, "actions": action.key, "rewards": NEXT_REWARD,
        "next_observations": (NEXT, *observation.key), "terminals": NEXT_TERMINATED, "timeouts": NEXT_TRUNCATED,
    }  # fmt: skip
    return {name: field_named(reader.fields, key) for name, key in keys.items()}


def _kept(reader: StepReader, *, drop: bool) -> Array:
    """Return a mask of the steps that are returned, bool `[steps]`."""
    table = reader.episodes
    ends, kept = table.start + table.length - 1, np.ones(table.steps, bool)
    kept[ends[table.truncated & (drop | (~table.terminated & (table.final == Final.REPEATED)))]] = False
    if drop:
        kept[-1:] = False
    return kept


def _rows(reader: StepReader, field: Field, rows: Array, dtype: Any) -> Array:
    """Read rows of a field, given in ascending order, in chunks; rewards and flags lose their trailing dimension."""
    shape = () if field.key in OUTCOMES else field.shape
    found = np.empty((len(rows), *shape), field.numpy if dtype is None else dtype)
    size = max(1, _CHUNK_BYTES // max(1, field.row_bytes))
    for start in range(0, reader.manifest.steps, size):
        stop = min(start + size, reader.manifest.steps)
        low, high = np.searchsorted(rows, (start, stop))
        if low < high:
            found[low:high] = reader.view(field.key, start, stop)[rows[low:high] - start].reshape(-1, *shape)
    return found


def sequence_dataset(
    dataset: PathLike,
    *,
    pad: Literal["zero"] | None = None,
    timesteps: bool = False,
    returns_to_go: bool = False,
    gamma: float = 1.0,
) -> Iterator[dict[str, Array]]:
    """Yield each episode as a dictionary of arrays, as `d4rl.sequence_dataset` does, for sequence models.

    The arrays have D4RL's names and the stored element types: `observations`, `actions`, `rewards`,
    `next_observations`, `terminals`, `timeouts`, and `infos/NAME` for infos of each step. D4RL leaves out an unfinished
    last episode; this function yields it, with a timeout in its last step.

    Args:
        dataset: a path, `source:id`, or the buffer of a dataset, with one array of observations.
        pad: `"zero"` lengthens all arrays with zeros to the length of the longest episode, and adds `masks`, bool,
            which is true at steps.
        timesteps: adds `timesteps`, int64, the number of each step in its episode.
        returns_to_go: adds `returns_to_go`, the rewards from each step to the end of its episode, discounted by
            `gamma`, in the element type of the rewards.
        gamma: the discount.

    Raises:
        SchemaError: (a RuntimeError) observations or actions are in several arrays.

    >>> import rbtool
    >>> _ = rbtool.record("CartPole-v1", "poles", episodes=2, seed=0)
    >>> episodes = list(sequence_dataset("poles", pad="zero", returns_to_go=True))
    >>> [int(episode["masks"].sum()) == episode["returns_to_go"][0] for episode in episodes]
    [np.True_, np.True_]
    """
    require_flags(timesteps=timesteps, returns_to_go=returns_to_go)
    if pad not in (None, "zero"):
        raise UsageError(f"pad is {pad!r}, expected 'zero' or None")
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma is {gamma}, expected a number from 0 to 1")
    return _sequences(find_dataset(dataset), pad == "zero", timesteps, gamma if returns_to_go else None)


def _sequences(path: Any, padded: bool, timesteps: bool, gamma: float | None) -> Iterator[dict[str, Array]]:
    with open_episodes(path) as reader:
        fields, table = _fields(reader), reader.episodes
        infos = {"/".join(("infos", *one.key[1:])): one for one in reader.fields if one.key[0] == "info"}
        longest = int(table.length.max(initial=0))
        for start, length in zip(table.start.tolist(), table.length.tolist(), strict=True):
            rows = np.arange(start, start + length)
            episode = {name: _span(reader, field, start, start + length) for name, field in (fields | infos).items()}
            if timesteps:
                episode["timesteps"] = rows - start
            if gamma is not None:
                episode["returns_to_go"] = _to_go(episode["rewards"], gamma)
            if padded:
                episode["masks"] = np.ones(length, bool)
                episode = {name: _padded(array, longest) for name, array in episode.items()}
            yield episode


def _span(reader: StepReader, field: Field, start: int, stop: int) -> Array:
    rows = reader.read(field.key, start, stop)
    return rows.reshape(stop - start) if field.key in OUTCOMES else rows


def _to_go(rewards: Array, gamma: float) -> Array:
    """Return the discounted sums of the rewards from each step on, as float32 if the rewards are integers."""
    totals = rewards.astype(np.float64)
    ends = np.zeros(len(totals), bool)
    ends[-1:] = True
    add_rewards_to_go(totals, ends, gamma)
    return totals.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32)


def _padded(array: Array, length: int) -> Array:
    longer = np.zeros((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
