"""Rewards spread over the trajectories that earn them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from ..errors import MissingKeyError, SchemaError, UsageError
from ..trajectories import NestedKey, is_cut_behind, key_path, require_steps, step_mask
from .base import Transform
from .multi_step import require_discount
from .returns import discounted_to_go, per_step_like

__all__ = ["DensifyReward"]


class DensifyReward(Transform):
    """Gives every step the discounted sum of the rewards from there to the end of its trajectory, on the way out.

    Reward and done flag lie under `next` and have one shape. Time is the dimension `time_dim` of them, counted from
    the end: 2 (or -2) is the one before the trailing singleton, 3 (or -3) the one before that. A trajectory ends
    where the done flag is set, or its sibling "terminated" or "truncated", and at the end of the batch, as later
    rewards are unknown; where time is the last dimension of the batch, it also ends where the next step has another
    id (`("collector", "traj_ids")`, "traj_ids" or "episode"). Steps that `("collector", "mask")` or "mask" does not
    mark as real count nothing. The result takes the reward's place, or goes to `("next", reward_key_out)`; whole
    numbers and flags become floats if they are discounted. The data given are left as they are.

    MissingKeyError (a KeyError) where reward or flag is not there; SchemaError (a RuntimeError) if their shapes
    differ or have no such dimension; UsageError (a ValueError) for a discount outside (0, 1] and for `time_dim` 0.
    The name is TorchRL's.
    """

    def __init__(
        self,
        *,
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        reward_key_out: NestedKey | None = None,
        time_dim: int = 2,
        discount: float = 1.0,
    ) -> None:
        super().__init__()
        self.reward_key = ("next", *key_path(reward_key))
        self.done_key = ("next", *key_path(done_key))
        self.reward_key_out = self.reward_key if reward_key_out is None else ("next", *key_path(reward_key_out))
        self.time_dim = _from_the_end(time_dim)
        self.discount = require_discount(discount)

    def forward(self, data: Any) -> TensorDictBase:
        """Return the batch with dense rewards."""
        require_steps(data)
        reward, done = _entry(data, self.reward_key), _entry(data, self.done_key)
        if reward.shape != done.shape:
            raise SchemaError(
                f"the reward is {list(reward.shape)} and the done flag {list(done.shape)}, one shape is expected"
            )
        if reward.ndim < -self.time_dim:
            raise SchemaError(f"the reward is {list(reward.shape)} and has no dimension {self.time_dim} for time")
        if not (reward.is_floating_point() or reward.is_complex()) and (
            self.discount != 1 or reward.dtype == torch.bool
        ):
            reward = reward.to(torch.get_default_dtype())
        ends = _siblings(data, self.done_key, done)
        mask = step_mask(data)
        if data.ndim == reward.ndim + self.time_dim + 1:  # the batch has the dimension of time, as its last
            ends = ends | per_step_like(is_cut_behind(data, mask), reward)
        if mask is not None:
            reward = torch.where(per_step_like(mask, reward), reward, torch.zeros_like(reward))
        out: TensorDictBase = data.copy()
        out.set("next", out.get("next").copy())
        out.set(self.reward_key_out, discounted_to_go(reward, ends, self.discount, reward.ndim + self.time_dim))
        return out

    def extra_repr(self) -> str:
        return f"discount={self.discount}, time_dim={self.time_dim}"


def _from_the_end(dim: Any) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or not dim:
        raise UsageError(f"time_dim is {dim!r}, a dimension counted from the end is expected: 2 or -2")
    return -abs(dim)


def _siblings(data: TensorDictBase, done_key: tuple[str, ...], done: torch.Tensor) -> torch.Tensor:
    """Return where the done flag is set, or one of its sibling end flags of the same shape."""
    ends = done.bool()
    for name in ("terminated", "truncated"):
        flag = data.get((*done_key[:-1], name), None)
        if flag is not None and flag.shape == ends.shape:
            ends = ends | flag.bool()
    return ends


def _entry(data: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor:
    value = data.get(key, None)
    if value is None:
        raise MissingKeyError(f"no {'.'.join(key)} in the batch; reward and done flag are expected under next")
    return torch.as_tensor(value)
