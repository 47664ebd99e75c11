"""Functions for `rbtool preprocess --fn own_operations.py:NAME`."""

from tensordict import TensorDict


def scale_reward(rows: TensorDict) -> TensorDict:
    """Unit `step`, the default: gets some rows, batch size `[n]`, and returns as many."""
    rows["next", "reward"] = rows["next", "reward"] / 10
    return rows


def first_half(episode: TensorDict) -> TensorDict:
    """Unit `episode`: gets a whole episode and returns part of it. The new last step is marked truncated."""
    return episode[: len(episode) // 2]


def energy(rows: TensorDict) -> TensorDict:
    """Adds a field, at the root: float32 `[n, 1]`."""
    rows["energy"] = rows["observation"].square().sum(-1, keepdim=True)
    return rows
