"""The rewards that are still to come: returns to go as a new entry, or in place of rewards."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase

from ..errors import MissingKeyError, SchemaError, UsageError
from ..format.returns import add_rewards_to_go
from ..ted.schema import NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED
from ..trajectories import NestedKey, is_cut_behind, key_path, require_steps, step_mask
from .base import Transform
from .keyed import NEXT, as_key, in_double, not_there, require_discount, require_named, require_tensordict

_ORIGINAL = "original_"
_ENDS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)
_TINY = torch.finfo(torch.float32).tiny


class ReturnToGo(Transform):
    """Adds to every step the sum of the rewards from it on to the end of its trajectory, discounted by `gamma`.

    Time is the last dimension of the batch. Later rewards are not known: a return reaches to the end of the
    slice where a trajectory was cut. So put it in front of a buffer of whole trajectories (`split_trajs=True`), or,
    with `append_transform(..., invert=True)`, on the way in, where whole episodes are written. Trajectories end where
    one of `done_keys` is set and where the next step has another id (`("collector", "traj_ids")`, "traj_ids" or
    "episode"). Steps that the mask does not mark as real count nothing; it is `mask_key`, or by default
    `("collector", "mask")` or "mask". A reward of one trajectory never reaches another, NaN and infinity included.
    Of n-step transitions (`steps_to_next_obs`) the rewards of single steps count, which they keep as `original_reward`.

    Sums are computed in float64 and rounded once, as by `rbtool preprocess --return-to-go`. `out_key` gets the shape
    and type of the reward. MissingKeyError (a KeyError) for a reward that is not there, and for a mask or an end flag
    that was named and is not there; SchemaError (a RuntimeError) for a reward that is not a float, for sums over n
    steps without the rewards of single steps and for a `mask_key` without one value a step; UsageError (a ValueError)
    for a `gamma` outside of [0, 1].
    """

    def __init__(
        self,
        gamma: float = 1.0,
        *,
        reward_key: Any = (NEXT, "reward"),
        done_keys: Any = _ENDS,
        out_key: Any = "return_to_go",
        mask_key: Any = None,
    ) -> None:
        super().__init__()
        self.gamma = require_discount(gamma)
        self.reward_key = as_key(reward_key)
        self.done_keys = [as_key(key) for key in ([done_keys] if isinstance(done_keys, str) else done_keys)]
        self.out_key = as_key(out_key)
        self.mask_key = None if mask_key is None else as_key(mask_key)

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        if not batch.ndim:
            raise SchemaError("expected a batch of steps, found a single one")
        reward = batch.get(self.reward_key, None)
        if reward is None:
            raise not_there(self.reward_key, batch)
        require_named(batch, [*self.done_keys, *([self.mask_key] if self.mask_key else [])], defaults=_ENDS)
        if not reward.is_floating_point():
            raise SchemaError(f"the reward {'.'.join(self.reward_key)} is {reward.dtype}, expected a type of floats")
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

    `ends`, bool, is True where a trajectory ends, and has the shape of `reward` or one that expands to it.
    """
    wide = in_double(reward) if reward.is_floating_point() or reward.is_complex() else reward
    total = wide.movedim(time, -1).contiguous().clone()
    cut = ends.expand(reward.shape).movedim(time, -1).cpu().numpy().copy()
    cut[..., -1:] = True
    if total.requires_grad:
        add_rewards_to_go(total.view(-1), cut.reshape(-1), gamma)
    else:  # step by step, each operation of a GPU would cost more than the copies
        sums = total.cpu()
        add_rewards_to_go(sums.view(-1).numpy(), cut.reshape(-1), gamma)
        total = sums.to(total.device)
    return total.movedim(-1, time).to(reward.dtype).contiguous()


def discounted(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `values * factor` for a factor that is 0 only by rounding: infinities stay infinite."""
    if factor == 1:
        return values
    return values * factor if factor >= _TINY else torch.where(values.isfinite(), values * factor, values)


def per_step_like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Append dimensions of one, so that one value a step goes with any shape a step."""
    return value.reshape(*value.shape, *(1,) * (other.ndim - value.ndim))


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
    differ or have no such dimension; UsageError (a ValueError) for a discount outside [0, 1] and for `time_dim` 0.
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
                f"the reward is {list(reward.shape)} and the done flag {list(done.shape)}, expected one shape"
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
        raise UsageError(f"time_dim is {dim!r}, expected a dimension counted from the end: 2 or -2")
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
        raise MissingKeyError(f"no {'.'.join(key)} in the batch, expected reward and done flag under next")
    return torch.as_tensor(value)
