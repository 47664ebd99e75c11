"""Datasets as replay buffers of d3rlpy, and back."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from ...core.errors import SchemaError, not_installed
from ...core.format.contracts import Array
from ...core.format.converter import FinalStep, require_final_step
from ...core.format.locate import find_dataset
from ...core.open_steps import open_episodes
from ...core.ted.schema import (
    ACTION,
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Key,
    field_named,
)
from ..files.exports import leaves_of, only_leaf

OBSERVATION: Key = ("observation",)


def to_d3rlpy(dataset: str | os.PathLike[str]) -> Any:
    """Return a dataset as a `d3rlpy.dataset.MDPDataset`, which is a `ReplayBuffer` of d3rlpy.

    An episode of d3rlpy consists of its steps and a flag that says whether the last step is terminated. It has no
    observation after the last step, so d3rlpy trains on all steps but the last of an episode that was truncated.
    Several arrays of observations become a tuple, in the order of their names. Integer actions are discrete for d3rlpy,
    all others are continuous. All rows are read into memory.

    Args:
        dataset: a path, `source:id`, or the buffer of a dataset.

    Raises:
        UsageError: (a ValueError) d3rlpy is not installed.
        SchemaError: (a RuntimeError) there are several arrays of actions, or no observations.
    """
    constants, mdp = _imported()
    with open_episodes(find_dataset(dataset)) as reader:
        steps, table = reader.manifest.steps, reader.episodes
        states = [reader.read(field.key, 0, steps) for field in leaves_of(reader.fields, "observation")]
        action = only_leaf(reader.fields, "action", "d3rlpy")
        actions = reader.read(action.key, 0, steps)
        rewards = reader.read(field_named(reader.fields, NEXT_REWARD).key, 0, steps)
        space = reader.manifest.spaces.get("action") or {}
    ends = {name: np.zeros(steps, np.float32) for name in ("terminals", "timeouts")}
    last = table.start + table.length - 1
    ends["terminals"][last] = table.terminated
    ends["timeouts"][last] = ~table.terminated
    kind = constants.ActionSpace.DISCRETE if actions.dtype.kind in "iub" else constants.ActionSpace.CONTINUOUS
    size = space.get("n") if space.get("type") == "Discrete" else None
    states, rewards = [_with_dimension(state) for state in states], rewards.reshape(steps, 1).astype(np.float32)
    observations = states if len(states) > 1 else states[0]
    return mdp(observations, _with_dimension(actions), rewards, **ends, action_space=kind, action_size=size)


def _with_dimension(rows: Array) -> Array:
    """Give rows of single numbers a trailing dimension, as d3rlpy expects."""
    return rows.reshape(len(rows), -1) if rows.ndim == 1 else rows


def from_d3rlpy(buffer: Any, *, final_step: FinalStep = "auto") -> TensorDict:
    """Return the episodes of a buffer of d3rlpy as steps of TED, for example to `extend` a buffer of rbtool.

    A file that `buffer.dump` wrote becomes a dataset with `rbtool convert`, by the same rules.

    Args:
        buffer: a `ReplayBuffer`, an `MDPDataset`, or anything else with `episodes`.
        final_step: what to do with the last step of an episode, because d3rlpy stores no observation after it. `"auto"`
            keeps the step of a terminated episode, with the last observation repeated, and leaves out any other step,
            so that the episode is truncated after the step before. `"drop"` always leaves it out, `"repeat"` always
            keeps it.

    Returns:
        Steps `[n]`: `observation`, `action`, `episode`, and under `next` `observation`, `reward`, `done`, `terminated`,
        `truncated`. A tuple of observations becomes `observation.0`, `observation.1`, …

    Raises:
        SchemaError: (a RuntimeError) no step is left.
    """
    require_final_step(final_step)
    rows: dict[Key, list[Array]] = defaultdict(list)
    for number, episode in enumerate(buffer.episodes):
        terminated, steps = bool(episode.terminated), int(episode.size())
        kept = steps if final_step == "repeat" or (final_step == "auto" and terminated) else steps - 1
        states = episode.observations
        parts = (
            {(str(part),): one for part, one in enumerate(states)} if isinstance(states, list | tuple) else {(): states}
        )
        for part, one in parts.items():
            rows[OBSERVATION + part].append(one[:kept])
            rows[(NEXT, *OBSERVATION, *part)].append(np.concatenate((one[1:], one[-1:]))[:kept])
        end = np.arange(kept)[:, np.newaxis] == kept - 1
        ended = terminated and kept == steps
        rows[ACTION].append(episode.actions[:kept])
        rows[EPISODE].append(np.full(kept, number))
        rows[NEXT_REWARD].append(episode.rewards[:kept].reshape(kept, 1))
        for key, flag in ((NEXT_DONE, True), (NEXT_TERMINATED, ended), (NEXT_TRUNCATED, not ended)):
            rows[key].append(end & flag)
    steps = sum(map(len, rows[EPISODE]))
    if not steps:
        raise SchemaError("the buffer has no steps with an observation after them")
    return TensorDict({key: torch.from_numpy(np.concatenate(parts)) for key, parts in rows.items()}, [steps])


def _imported() -> tuple[Any, Any]:
    try:
        from d3rlpy import constants
        from d3rlpy.dataset import MDPDataset
    except ImportError as error:
        # There is no extra for d3rlpy: it pins a version of gymnasium with which rbtool does not work.
        how = "pip install --no-deps d3rlpy, and pip install gym structlog dataclasses-json scikit-learn"
        raise not_installed("this needs d3rlpy", "", error, hint=how) from error
    return constants, MDPDataset
