"""The rewards that are still to come."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MissingKeyError, SchemaError, UsageError
from .base import Transform
from .keyed import NEXT, as_key, require_tensordict

__all__ = ["ReturnToGo", "discounted_to_go"]


class ReturnToGo(Transform):
    """Adds to every step the sum of the rewards from it on to the end of its trajectory, discounted by `gamma`.

    Time is the last dimension of the batch. What lies behind the batch is not known: a return goes to the end of the
    slice where a trajectory was cut. So put it in front of a buffer of whole trajectories (`split_trajs=True`), or,
    with `append_transform(..., invert=True)`, on the way in, where whole episodes are written. Trajectories end where
    one of `done_keys` is set; steps that `mask_key` does not mark as real count nothing.

    `out_key` gets the shape and type of the reward. MissingKeyError (a KeyError) for a reward that is not there,
    SchemaError (a RuntimeError) for one that is not a float, UsageError (a ValueError) for a `gamma` outside of [0, 1].
    """

    def __init__(
        self,
        gamma: float = 1.0,
        *,
        reward_key: Any = (NEXT, "reward"),
        done_keys: Any = ((NEXT, "done"), (NEXT, "terminated"), (NEXT, "truncated")),
        out_key: Any = "return_to_go",
        mask_key: Any = "mask",
    ) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise UsageError(f"gamma is {gamma}, a discount from 0 to 1 is expected")
        self.gamma = float(gamma)
        self.reward_key = as_key(reward_key)
        self.done_keys = [as_key(key) for key in done_keys]
        self.out_key = as_key(out_key)
        self.mask_key = as_key(mask_key)

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        if not batch.ndim:
            raise SchemaError("a batch of steps is expected, found a single one")
        reward = batch.get(self.reward_key, None)
        if reward is None:
            raise MissingKeyError(f"the reward {'.'.join(self.reward_key)} is not in the batch")
        if not reward.is_floating_point():
            raise SchemaError(f"the reward {'.'.join(self.reward_key)} is {reward.dtype}, a type of floats is expected")
        shape = batch.batch_size
        ends = torch.zeros(shape, dtype=torch.bool, device=reward.device)
        for key in self.done_keys:
            done = batch.get(key, None)
            if done is not None:
                ends = ends | done.reshape(*shape, -1).any(-1)
        tail = (1,) * (reward.dim() - len(shape))
        mask = batch.get(self.mask_key, None)
        if mask is not None and mask.shape[: len(shape)] == shape and mask.numel() == shape.numel():
            reward = reward * mask.reshape(*shape, *tail)
        batch = batch.copy()
        batch.set(self.out_key, discounted_to_go(reward, ends.view(*shape, *tail), self.gamma, len(shape) - 1))
        return batch

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, {'.'.join(self.reward_key)} -> {'.'.join(self.out_key)}"


def discounted_to_go(reward: torch.Tensor, ends: torch.Tensor, gamma: float, time: int) -> torch.Tensor:
    """Sum rewards from each step on to the end of its trajectory, discounted, along dimension `time`.

    `ends`, bool, is True where a trajectory ends, and has the shape of `reward` or one that expands to it.
    """
    found = torch.empty_like(reward)
    going_on = torch.zeros_like(reward.select(time, 0))
    keep = torch.where(ends, 0.0, gamma).to(reward.dtype)
    for step in reversed(range(reward.shape[time])):
        going_on = reward.select(time, step) + keep.select(time, step) * going_on
        found.select(time, step).copy_(going_on)
    return found
