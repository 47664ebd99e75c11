"""The rewards that are still to come."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..errors import MissingKeyError, SchemaError, UsageError
from ..trajectories import is_cut_behind, step_mask
from .base import Transform
from .keyed import NEXT, as_key, require_tensordict

__all__ = ["ReturnToGo", "discounted", "discounted_to_go", "per_step_like"]

_ORIGINAL = "original_"
_TINY = torch.finfo(torch.float32).tiny


class ReturnToGo(Transform):
    """Adds to every step the sum of the rewards from it on to the end of its trajectory, discounted by `gamma`.

    Time is the last dimension of the batch. What lies behind the batch is not known: a return goes to the end of the
    slice where a trajectory was cut. So put it in front of a buffer of whole trajectories (`split_trajs=True`), or,
    with `append_transform(..., invert=True)`, on the way in, where whole episodes are written. Trajectories end where
    one of `done_keys` is set and where the next step has another id (`("collector", "traj_ids")`, "traj_ids" or
    "episode"). Steps that the mask does not mark as real count nothing; it is `mask_key`, or by default
    `("collector", "mask")` or "mask". A reward of one trajectory never reaches another, NaN and infinity included.
    Of n-step transitions (`steps_to_next_obs`) the rewards of single steps count, which they keep as `original_reward`.

    `out_key` gets the shape and type of the reward. MissingKeyError (a KeyError) for a reward that is not there,
    SchemaError (a RuntimeError) for one that is not a float, for sums over n steps without the rewards of single steps
    and for a `mask_key` without one value a step, UsageError (a ValueError) for a `gamma` outside of [0, 1].
    """

    def __init__(
        self,
        gamma: float = 1.0,
        *,
        reward_key: Any = (NEXT, "reward"),
        done_keys: Any = ((NEXT, "done"), (NEXT, "terminated"), (NEXT, "truncated")),
        out_key: Any = "return_to_go",
        mask_key: Any = None,
    ) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise UsageError(f"gamma is {gamma}, a discount from 0 to 1 is expected")
        self.gamma = float(gamma)
        self.reward_key = as_key(reward_key)
        self.done_keys = [as_key(key) for key in done_keys]
        self.out_key = as_key(out_key)
        self.mask_key = None if mask_key is None else as_key(mask_key)

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        if not batch.ndim:
            raise SchemaError("a batch of steps is expected, found a single one")
        reward = batch.get(self.reward_key, None)
        if reward is None:
            raise MissingKeyError(f"the reward {'.'.join(self.reward_key)} is not in the batch")
        if not reward.is_floating_point():
            raise SchemaError(f"the reward {'.'.join(self.reward_key)} is {reward.dtype}, a type of floats is expected")
        reward = self._of_single_steps(batch, reward)
        shape = batch.batch_size
        mask = step_mask(batch, self.mask_key)
        ends = is_cut_behind(batch, mask).to(reward.device)
        for key in self.done_keys:
            done = batch.get(key, None)
            if done is not None:
                ends = ends | done.reshape(*shape, -1).any(-1)
        if mask is not None:  # a product with zero would keep the NaN and infinities of padding
            reward = torch.where(per_step_like(mask, reward), reward, torch.zeros_like(reward))
        batch = batch.copy()
        batch.set(self.out_key, discounted_to_go(reward, per_step_like(ends, reward), self.gamma, len(shape) - 1))
        return batch

    def _of_single_steps(self, batch: Any, reward: torch.Tensor) -> torch.Tensor:
        """The reward of each step alone: in n-step data those of the windows overlap."""
        *path, name = self.reward_key
        if batch.get("steps_to_next_obs", None) is None or name.startswith(_ORIGINAL):
            return reward
        single = batch.get((*path, f"{_ORIGINAL}{name}"), None)
        if single is None:
            raise SchemaError(
                f"{'.'.join(self.reward_key)} holds sums over n steps, and {'.'.join((*path, _ORIGINAL + name))}, the "
                "reward of every step, is not in the batch"
            )
        return cast("torch.Tensor", single.to(reward.dtype))

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, {'.'.join(self.reward_key)} -> {'.'.join(self.out_key)}"


def discounted_to_go(reward: torch.Tensor, ends: torch.Tensor, gamma: float, time: int) -> torch.Tensor:
    """Sum rewards from each step on to the end of its trajectory, discounted, along dimension `time`.

    `ends`, bool, is True where a trajectory ends, and has the shape of `reward` or one that expands to it. The sums
    over 1, 2, 4, … steps ahead are put together, in log2(T) rounds.
    """
    total, ahead = reward.movedim(time, -1).clone(), 1
    runs_on = ~ends.expand(reward.shape).movedim(time, -1) if gamma else torch.zeros_like(total, dtype=torch.bool)
    steps = total.shape[-1]
    while ahead < steps and bool(runs_on[..., : steps - ahead].any()):
        rest = steps - ahead
        summed = total[..., :rest] + discounted(total[..., ahead:], gamma**ahead)
        # A product with zero would let NaN and infinities of the next trajectory in.
        total = torch.cat((torch.where(runs_on[..., :rest], summed, total[..., :rest]), total[..., rest:]), -1)
        reached = runs_on[..., :rest] & runs_on[..., ahead:]
        runs_on = torch.cat((reached, torch.zeros_like(runs_on[..., rest:])), -1)
        ahead *= 2
    return total.movedim(-1, time).contiguous()


def discounted(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `values * factor` for a factor above 0; infinities stay so where the type has no number so small."""
    if factor == 1:
        return values
    return values * factor if factor >= _TINY else torch.where(values.isfinite(), values * factor, values)


def per_step_like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Append dimensions of one, so that one value a step goes with any shape a step."""
    return value.reshape(*value.shape, *(1,) * (other.ndim - value.ndim))
