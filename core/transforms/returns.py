"""Rewards still to come: returns to go as a new entry, or in place of rewards."""

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
    """Adds to every step the discounted sum of the rewards from it to the end of its trajectory.

    Time is the last dimension of the batch. Later rewards are unknown, so a return only reaches to the end of a slice
    in which a trajectory was cut: use it for whole trajectories (`split_trajs=True`), or on the way in
    (`append_transform(..., invert=True)`) when whole episodes are written. Trajectories end at any of `done_keys`, and
    where the next step has another id (`("collector", "traj_ids")`, "traj_ids" or "episode"). A reward never reaches
    another trajectory, not even NaN and infinity. For n-step transitions (`steps_to_next_obs`), the rewards of single
    steps, kept as `original_reward`, are summed. Sums are computed in float64 and rounded once, as by `rbtool
    preprocess --return-to-go`.

    Args:
        gamma: the discount, from 0 to 1.
        reward_key: the reward.
        out_key: the new entry, with shape and type of the reward.
        done_keys: flags that end trajectories.
        mask_key: marks real steps, others count nothing; default `("collector", "mask")` or "mask".

    Raises:
        MissingKeyError: (a KeyError) there is no reward, or a mask or end flag that was named is not in the batch.
        SchemaError: (a RuntimeError) the reward is not a float, sums over n steps lack the rewards of single steps, or
            the mask does not have one value a step.
        UsageError: (a ValueError) gamma is outside [0, 1].
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
        if mask is not None:  # multiplying by zero would keep NaN and infinities of padding
            reward = torch.where(per_step_like(mask, reward), reward, torch.zeros_like(reward))
        batch = batch.copy()
        batch.set(self.out_key, discounted_to_go(reward, per_step_like(ends, reward), self.gamma, len(shape) - 1))
        return batch

    def _of_single_steps(self, batch: Any, reward: torch.Tensor) -> torch.Tensor:
        """Return the rewards of single steps: in n-step data the rewards of windows overlap."""
        *path, name = self.reward_key
        if batch.get("steps_to_next_obs", None) is None or name.startswith(_ORIGINAL):
            return reward
        single = batch.get((*path, f"{_ORIGINAL}{name}"), None)
        if single is None:
            raise SchemaError(
                f"{'.'.join(self.reward_key)} holds sums over n steps, but {'.'.join((*path, _ORIGINAL + name))}, the "
                "reward of every step, is not in the batch"
            )
        return cast("torch.Tensor", single.to(reward.dtype))

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, {'.'.join(self.reward_key)} -> {'.'.join(self.out_key)}"


def discounted_to_go(reward: torch.Tensor, ends: torch.Tensor, gamma: float, time: int) -> torch.Tensor:
    """Sum rewards from each step to the end of its trajectory, discounted, along dimension `time`.

    `ends`, bool, is True where a trajectory ends; its shape is the reward's, or expands to it.
    """
    wide = in_double(reward) if reward.is_floating_point() or reward.is_complex() else reward
    total = wide.movedim(time, -1).contiguous().clone()
    cut = ends.expand(reward.shape).movedim(time, -1).cpu().numpy().copy()
    cut[..., -1:] = True
    if total.requires_grad:
        add_rewards_to_go(total.view(-1), cut.reshape(-1), gamma)
    else:  # on a GPU, one operation for each step would cost more than the copies
        sums = total.cpu()
        add_rewards_to_go(sums.view(-1).numpy(), cut.reshape(-1), gamma)
        total = sums.to(total.device)
    return total.movedim(-1, time).to(reward.dtype).contiguous()


def discounted(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `values * factor` for a factor that is only 0 because of rounding: infinities stay infinite."""
    if factor == 1:
        return values
    return values * factor if factor >= _TINY else torch.where(values.isfinite(), values * factor, values)


def per_step_like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Append dimensions of size 1, so that one value a step broadcasts to any shape a step."""
    return value.reshape(*value.shape, *(1,) * (other.ndim - value.ndim))


class DensifyReward(Transform):
    """Replaces every reward by the discounted sum of the rewards from there to the end of its trajectory, on the way
    out.

    Reward and done flag are under `next` and have the same shape. A trajectory ends where the done flag, or its sibling
    "terminated" or "truncated", is set, and at the end of the batch, as later rewards are unknown. If time is the last
    dimension of the batch, it also ends where the next step has another id (`("collector", "traj_ids")`, "traj_ids" or
    "episode"). Steps that `("collector", "mask")` or "mask" does not mark as real count nothing. Whole numbers and
    flags become floats if they are discounted. The given data is not changed.

    Args:
        reward_key, done_key: the entries under `next`.
        reward_key_out: the result under `next`; default in place of the reward.
        time_dim: the dimension of time in these entries, counted from the end: 2 (or -2) is the one before the trailing
            singleton, 3 (or -3) the one before that.
        discount: from 0 to 1.

    Raises:
        MissingKeyError: (a KeyError) reward or flag does not exist.
        SchemaError: (a RuntimeError) their shapes differ, or have no such dimension.
        UsageError: (a ValueError) the discount is outside [0, 1], or `time_dim` is 0.

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
                f"the reward has the shape {list(reward.shape)} and the done flag {list(done.shape)}, expected the same"
            )
        if reward.ndim < -self.time_dim:
            raise SchemaError(
                f"the reward has the shape {list(reward.shape)}, without a dimension {self.time_dim} for time"
            )
        if not (reward.is_floating_point() or reward.is_complex()) and (
            self.discount != 1 or reward.dtype == torch.bool
        ):
            reward = reward.to(torch.get_default_dtype())
        ends = _siblings(data, self.done_key, done)
        mask = step_mask(data)
        if data.ndim == reward.ndim + self.time_dim + 1:  # time is the last dimension of the batch
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
    """Return where the done flag, or one of its sibling flags of the same shape, is set."""
    ends = done.bool()
    for name in ("terminated", "truncated"):
        flag = data.get((*done_key[:-1], name), None)
        if flag is not None and flag.shape == ends.shape:
            ends = ends | flag.bool()
    return ends


def _entry(data: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor:
    value = data.get(key, None)
    if value is None:
        raise MissingKeyError(f"{'.'.join(key)} is not in the batch, expected reward and done flag under next")
    return torch.as_tensor(value)
