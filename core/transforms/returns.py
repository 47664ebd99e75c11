"""Sums of rewards: n-step transitions, within a batch or across calls of `extend`, and returns to go.

With n_steps = 3, each step has a window of three steps, or fewer at the end of its trajectory:

    step             0    1    2    3    4 (done)
    window         0-2  1-3  2-4  3-4  4-4
    reward           r0 + gamma r1 + gamma² r2, …
    next state       next state of the last step in the window, which the target discounts by gamma^(window length)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import nn

from ..errors import MissingKeyError, SchemaError, UsageError, require_share, warn_caller
from ..format.returns import add_rewards_to_go
from ..storages.base import copied
from ..ted.schema import DEFAULT_DONE_KEYS, NEXT, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, as_key
from ..trajectories import (
    NestedKey,
    is_cut_behind,
    key_path,
    leaves,
    require_steps,
    step_ends,
    step_mask,
    trajectory_ids,
)
from .base import Transform
from .keyed import in_double, not_there, require_named, require_tensordict

_ORIGINAL = "original_"
_ENDS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)
_TINY = torch.finfo(torch.float32).tiny


class ReturnToGo(Transform):
    """Adds to every step the discounted sum of the rewards from it to the end of its trajectory.

    Time is the last dimension of the batch. Rewards after the end of the batch are unknown, so for a slice or a
    window that cuts a trajectory, returns reach only to its end. Use it for whole trajectories (`split_trajs=True`), or
    on the way in (`append_transform(..., invert=True)`) when whole episodes are written. Trajectories end at any of
    `done_keys`, and where the next step has another id (`("collector", "traj_ids")`, "traj_ids" or "episode"). Rewards,
    even NaN and infinity, do not affect other trajectories. For n-step transitions (`steps_to_next_obs`), the rewards
    of single steps, stored as `original_reward`, are summed. Sums are computed in float64 and rounded once, as by
    `rbtool preprocess --return-to-go`.

    Args:
        gamma: the discount, from 0 to 1.
        reward_key: the reward.
        out_key: the new entry, with the shape and element type of the reward.
        done_keys: flags that end trajectories.
        mask_key: the entry that marks real steps; the rewards of other steps count as 0. Default `("collector",
            "mask")` or "mask".

    Raises:
        MissingKeyError: (a KeyError) there is no reward, or a mask or end flag that was named is not in the batch.
        SchemaError: (a RuntimeError) the reward is not a float, sums over n steps lack the rewards of single steps, or
            the mask does not have one value per step.
        UsageError: (a ValueError) gamma is outside [0, 1].
    """

    crosses_steps = True

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
        self.gamma = require_share("the discount", gamma)
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
        """Return the rewards of single steps, as the rewards of n-step transitions overlap."""
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
    else:  # also for data on a GPU: copying it to the CPU takes less time than one operation for each step
        sums = total.cpu()
        add_rewards_to_go(sums.view(-1).numpy(), cut.reshape(-1), gamma)
        total = sums.to(total.device)
    return total.movedim(-1, time).to(reward.dtype).contiguous()


def discounted(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `values * factor`. Infinities stay infinite even if the factor was rounded to 0."""
    if factor == 1:
        return values
    return values * factor if factor >= _TINY else torch.where(values.isfinite(), values * factor, values)


def per_step_like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Append dimensions of size 1, so that one value per step broadcasts to any shape per step."""
    return value.reshape(*value.shape, *(1,) * (other.ndim - value.ndim))


class DensifyReward(Transform):
    """Replaces every reward in a batch by the discounted sum of the rewards from there to the end of its trajectory.

    Reward and done flag are under `next` and have the same shape. A trajectory ends where the done flag, or
    "terminated" or "truncated" next to it, is set, and at the end of the batch, as later rewards are unknown. If time
    is the last dimension of the batch, it also ends where the next step has another id (`("collector", "traj_ids")`,
    "traj_ids" or "episode"). The rewards of steps that `("collector", "mask")` or "mask" marks as padding count as 0.
    Whole numbers become floats if there is a discount, flags always. The given tensordict is changed and returned.

    Args:
        reward_key, done_key: the entries under `next`.
        reward_key_out: the entry for the result under `next`; by default it replaces the reward.
        time_dim: the dimension of time in these entries, counted from the end: 2 (or -2) is the one before the trailing
            singleton dimension, 3 (or -3) the one before that.
        discount: from 0 to 1.

    Raises:
        MissingKeyError: (a KeyError) reward or flag does not exist.
        SchemaError: (a RuntimeError) their shapes differ, or have no such dimension.
        UsageError: (a ValueError) the discount is outside [0, 1], or `time_dim` is 0.

    The name is TorchRL's.
    """

    crosses_steps = True

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
        self.discount = require_share("the discount", discount)
        self.in_keys = [reward_key, done_key]
        self.out_keys = [reward_key if reward_key_out is None else reward_key_out]

    def forward(self, tensordict: Any) -> TensorDictBase:
        """Set dense rewards, and return the same tensordict."""
        require_steps(tensordict)
        reward, done = _entry(tensordict, self.reward_key), _entry(tensordict, self.done_key)
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
        ends = _siblings(tensordict, self.done_key, done)
        mask = step_mask(tensordict)
        if tensordict.ndim == reward.ndim + self.time_dim + 1:  # time is the last dimension of the batch
            ends = ends | per_step_like(is_cut_behind(tensordict, mask), reward)
        if mask is not None:
            reward = torch.where(per_step_like(mask, reward), reward, torch.zeros_like(reward))
        found: TensorDictBase = tensordict
        found.set(self.reward_key_out, discounted_to_go(reward, ends, self.discount, reward.ndim + self.time_dim))
        return found

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


WINDOW = "multi_step"
"""The key under which are the end flags of the last step of each window."""


class Windows(NamedTuple):
    """The window of each step, `[..., T]`: its length, its last step, and whether the end of the batch cut it."""

    steps: torch.Tensor
    last: torch.Tensor
    cut: torch.Tensor


class MultiStep(nn.Module):
    """Makes n-step transitions from a batch of steps `[T]` or `[..., T]`, as a collector's post-processing.

    The window of a step has m = min(`n_steps`, steps to the end of its trajectory or batch) steps. Entries under `next`
    are replaced by the entries of the last step of the window. Each reward under `next` is replaced by the sum of
    gamma^i times the rewards in the window (in float64, rounded once); the original reward is kept as `original_<name>`
    next to it. New entries, with one value per step, are `steps_to_next_obs` (m, int64), `gamma` (gamma^m, float32) and
    `nonterminal` (m > 1; False where `("collector", "mask")` is False).

    The flags under `next` are kept, as they mark where trajectories end in a buffer. The flags of the window's last
    step are `("multi_step", "done")`, "terminated" and "truncated". `("multi_step", "cut")` marks windows that are
    short because the batch ends, not the trajectory. A target is then

        reward + gamma.unsqueeze(-1) * ~terminated * value(next)

    with the entries `gamma`, `[batch]`, and `("multi_step", "terminated")`, `[batch, 1]` like the reward. It is also
    correct for windows that were cut, which merely have fewer steps. `MultiStepTransform` does not cut windows between
    batches. A flag with several values per step, such as one for each agent, ends the trajectory if any of them is set.

    Args:
        gamma: the discount, from 0 to 1.
        n_steps: the longest window.

    Raises:
        UsageError: (a ValueError) an argument is out of range.

    n-step returns: Watkins, 1989; names are TorchRL's.
    """

    crosses_steps = True
    """Whether a step is combined with later ones; see `Transform`."""

    def __init__(self, gamma: float, n_steps: int) -> None:
        super().__init__()
        self.n_steps = require_steps_ahead(n_steps)
        self.gamma = require_share("the discount", gamma)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the n-step transitions of `tensordict`, which is not changed."""
        require_steps(tensordict)
        after = tensordict.get("next", None)
        rewards = [] if after is None else [key for key, _ in leaves(after) if key[-1] == "reward"]
        return multi_step(tensordict, self.n_steps, self.gamma, rewards, mask_key=("collector", "mask"))

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, n_steps={self.n_steps}"


def multi_step(
    td: TensorDictBase,
    n_steps: int,
    gamma: float,
    reward_keys: Sequence[NestedKey],
    *,
    done_key: NestedKey = "done",
    done_keys: Sequence[str] = DEFAULT_DONE_KEYS,
    mask_key: NestedKey | None = None,
    apart: torch.Tensor | None = None,
) -> TensorDictBase:
    """Make n-step transitions of `[..., T]`; see `MultiStep` for the entries.

    `apart`, bool in the shape of the batch, marks further steps that the next step does not continue.
    """
    ended = step_ends(td, done_key, done_keys)
    valid = None if mask_key is None else step_mask(td, mask_key)
    follows = ~(ended | is_cut_behind(td, valid))
    windows = find_windows(follows if apart is None else follows & ~apart, ended, n_steps)
    out = td.copy()
    after = out.get("next").copy()
    out.set("next", after)
    rewards = [key_path(key) for key in reward_keys]
    flags = {(*key_path(done_key)[:-1], name) for name in (key_path(done_key)[-1], *done_keys)}
    for key in rewards:
        reward = after.get(key, None)
        if reward is not None:
            after.set((*key[:-1], f"original_{key[-1]}"), reward)
            after.set(key, _summed(reward, windows, gamma, td.ndim - 1))
    for key, value in leaves(td.get("next")):
        if key not in rewards and key not in flags and key[-1] not in done_keys:
            after.set(key, _ahead(value, windows.last, td.ndim - 1))
    for key in sorted(flags):
        flag = after.get(key, None)
        if flag is not None:
            out.set((WINDOW, key[-1]), _ahead(flag, windows.last, td.ndim - 1))
    out.set((WINDOW, "cut"), windows.cut)
    out.set("steps_to_next_obs", windows.steps)
    out.set("gamma", (gamma ** in_double(windows.steps)).to(torch.get_default_dtype()))
    nonterminal = windows.steps > 1
    out.set("nonterminal", nonterminal if valid is None else nonterminal & valid)
    return out


def find_windows(follows: torch.Tensor, ended: torch.Tensor, n_steps: int) -> Windows:
    """Find the windows of all steps.

    Args:
        follows: whether the next step continues each step, bool `[..., T]`.
        ended: whether the trajectory ends at each step, bool `[..., T]`.
        n_steps: the longest window.
    """
    time = follows.shape[-1]
    position = torch.arange(time, device=follows.device).expand(follows.shape)
    stops = torch.where(follows, time - 1, position)
    border = stops.flip(-1).cummin(-1).values.flip(-1) if time else stops
    last = torch.minimum(position + (n_steps - 1), border)
    steps = last - position + 1
    return Windows(steps, last, (steps < n_steps) & ~ended.gather(-1, last))


def _summed(reward: torch.Tensor, windows: Windows, gamma: float, dim: int) -> torch.Tensor:
    """Return the sum of gamma^i r[t + i] over the window of each step t."""
    dtype = reward.dtype if reward.is_floating_point() or reward.is_complex() else torch.get_default_dtype()
    values = in_double(reward)
    total, longest = values.clone(), int(windows.steps.max()) if gamma and windows.steps.numel() else 1
    for ahead in range(1, longest):
        inside = per_step_like(windows.steps > ahead, values).narrow(dim, 0, values.shape[dim] - ahead)
        later = values.narrow(dim, ahead, values.shape[dim] - ahead)
        # Select with `where`: NaN and infinities of other trajectories times zero would be NaN.
        part = total.narrow(dim, 0, values.shape[dim] - ahead)
        part.copy_(torch.where(inside, part + discounted(later, gamma**ahead), part))
    return total.to(dtype)


def _ahead(value: torch.Tensor, last: torch.Tensor, dim: int) -> torch.Tensor:
    """Return for each step the value at the last step of its window."""
    if not isinstance(value, torch.Tensor):
        raise SchemaError(f"an entry under next is a {type(value).__name__}; n-step transitions need tensors")
    if dim == 0:
        return value[last]
    index = per_step_like(last, value).expand(value.shape)
    return value.gather(dim, index)


def require_steps_ahead(n_steps: Any) -> int:
    """Return a number of steps; UsageError (a ValueError) unless it is a whole number of at least 1."""
    if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1:
        raise UsageError(f"n_steps is {n_steps!r}, expected a whole number from 1")
    return n_steps


_NOT_CONTINUED = (
    "the first observation of a batch differs from the one under next of the last step before it, but n-step windows "
    "reach across: steps of several sources need ids, a lane each, or check_continuity=True, which ends windows there; "
    "check_continuity=False means that all steps come from one source"
)


class _Held(NamedTuple):
    """Steps that wait for their successors, `[..., n]`, and which of them the next step does not continue."""

    steps: TensorDictBase
    apart: torch.Tensor


class MultiStepTransform(Transform):
    """Makes n-step transitions of the steps written to a buffer, `[T]` or `[..., T]` with time last.

    Entries are as in `MultiStep`, with `original_<name>` next to every reward in `reward_keys`. The last `n_steps`
    steps are held back, because their windows may reach into later steps: `extend` writes all held and given steps
    except the last `n_steps`, and nothing if there are not more. At the end, `flush()` of the buffer writes the rest,
    with windows that end there. The steps held back are part of the buffer's state and checkpoints; `empty()` forgets
    them. Priorities in the data are used when the steps are written. `rb[i] = …` replaces stored n-step transitions and
    does not affect windows. Steps that have `steps_to_next_obs` are n-step transitions already, and pass unchanged.

    A window ends at a flag and, if ids are stored (`("collector", "traj_ids")`, "traj_ids" or "episode"), where the id
    changes. Without ids, steps that arrive alternately from several sources cannot be told apart: give them ids, or
    write each source to a lane of its own (`[lanes, T]`).

    Args:
        n_steps: the longest window.
        gamma: the discount, from 0 to 1.
        reward_keys: the rewards under `next` to be summed.
        done_key, done_keys: the flags that end trajectories.
        check_continuity: what happens if the first observation of a batch differs from the observation under `next` of
            the last step before it:

            - None: windows continue, as in TorchRL, with a UserWarning the first time. Observations of one source may
              differ if, for example, they are rounded or normalised again.
            - True: windows end there, marked by `("multi_step", "cut")`.
            - False: windows continue, and nothing is compared.

    Raises:
        UsageError: (a ValueError) `n_steps` is below 1, or gamma outside [0, 1].
        MissingKeyError: (a KeyError) rewards are not under `next` (use `reward_keys=()` for steps without rewards), or
            a flag or mask that was named is not in the data.
        SchemaError: (a RuntimeError) lanes or entries differ from the steps held back, or several processes share the
            buffer.

    Names and the number of steps written are the same as in TorchRL's transform.
    """

    counts_writes = True

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Sequence[NestedKey] = ("reward",),
        done_key: NestedKey = "done",
        done_keys: Sequence[str] = DEFAULT_DONE_KEYS,
        mask_key: NestedKey = "mask",
        check_continuity: bool | None = None,
    ) -> None:
        super().__init__()
        self.n_steps = n_steps
        self.gamma = require_share("the discount", gamma)
        self.reward_keys = [as_key(key) for key in ([reward_keys] if isinstance(reward_keys, str) else reward_keys)]
        self.done_key = done_key
        self.done_keys = (done_keys,) if isinstance(done_keys, str) else tuple(done_keys)
        self.mask_key = mask_key
        if check_continuity not in (None, True, False):
            raise UsageError(f"check_continuity is {check_continuity!r}, expected True, False or None")
        self.check_continuity = check_continuity
        self._warned = False
        self._held: _Held | None = None

    @property
    def n_steps(self) -> int:
        """The longest window; UsageError (a ValueError) unless it is a whole number of at least 1."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        self._n_steps = require_steps_ahead(n_steps)

    @property
    def held(self) -> int:
        """How many steps of each lane are held back."""
        return 0 if self._held is None else int(self._held.steps.shape[-1])

    def inv(self, data: Any) -> TensorDictBase | None:
        """Return the n-step transitions whose windows are complete now; None if there are none."""
        require_steps(data)
        if data.get("steps_to_next_obs", None) is not None:
            finished: TensorDictBase = data
            return finished
        every = self._behind_held(data)
        count = every.steps.shape[-1] - self.n_steps
        if count <= 0:
            self._held = _copied(every, 0)
            return None
        made = self._made(every)[..., :count]
        self._held = _copied(every, count)
        return made

    def flush(self) -> TensorDictBase | None:
        """Return the n-step transitions of the steps held back, whose windows end here, and forget these steps."""
        if self._held is None:
            return None
        made = self._made(self._held)
        self._held = None
        return made

    def held_back(self) -> Any:
        """Return the steps held back, for `hold_back`."""
        return self._held

    def hold_back(self, held: Any) -> None:
        """Replace the steps held back by those that `held_back` returned, or by none."""
        self._held = held

    def _made(self, every: _Held) -> TensorDictBase:
        return multi_step(
            every.steps, self.n_steps, self.gamma, self.reward_keys, done_key=self.done_key, done_keys=self.done_keys,
            mask_key=self.mask_key, apart=every.apart,
        )  # fmt: skip

    def _require_named(self, data: TensorDictBase) -> None:
        """Raise MissingKeyError if the data lacks a named entry; defaults, except the reward, may be missing."""
        done = (NEXT, *key_path(self.done_key))
        flags = [done, *((*done[:-1], name) for name in self.done_keys if name not in DEFAULT_DONE_KEYS)]
        rewards = [(NEXT, *key) for key in self.reward_keys]
        require_named(data, [*flags, *rewards, key_path(self.mask_key)], defaults=[NEXT_DONE, ("mask",)])

    def _behind_held(self, data: TensorDictBase) -> _Held:
        self._require_named(data)
        ended = step_ends(data, self.done_key, self.done_keys)  # refuse unusable data before holding it
        apart = torch.zeros_like(ended)
        held = self._held
        if held is None:
            return _Held(data, apart)
        if held.steps.shape[:-1] != data.shape[:-1]:
            found, expected = list(data.shape[:-1]), list(held.steps.shape[:-1])
            raise SchemaError(
                f"the steps have the lanes {found}, but those held back have {expected}",
                hint="flush() the buffer in between",
            )
        known, given = {key for key, _ in leaves(held.steps)}, {key for key, _ in leaves(data)}
        if known != given:
            odd = ", ".join(sorted(".".join(key) for key in known ^ given))
            raise SchemaError(
                f"only the new steps, or only the steps held back, have {odd}", hint="flush() the buffer in between"
            )
        before = held.apart.clone()
        if data.shape[-1] and before.shape[-1]:
            last, first = held.steps[..., -1], data[..., 0]
            goes_on = ~step_ends(held.steps[..., -1:], self.done_key, self.done_keys)[..., 0]
            if self._compares:
                elsewhere = goes_on & self._is_elsewhere(last, first)
                if self.check_continuity:
                    before[..., -1] |= elsewhere
                elif bool(elsewhere.any()):
                    self._warned = True
                    warn_caller(_NOT_CONTINUED)
        try:
            steps: Any = torch.cat((held.steps, data), -1)
        except (KeyError, RuntimeError) as error:
            raise SchemaError(f"the steps differ from those held back: {error}") from error
        return _Held(steps, torch.cat((before, apart), -1))

    @property
    def _compares(self) -> bool:
        if self.check_continuity is None:
            return self.n_steps > 1 and not self._warned
        return self.check_continuity

    def _is_elsewhere(self, last: TensorDictBase, first: TensorDictBase) -> torch.Tensor:
        """Return for each lane whether its first new step does not continue the last step held back."""
        other = torch.zeros(last.batch_size, dtype=torch.bool, device=last.device)
        if trajectory_ids(last) is not None:
            return other  # ids separate trajectories
        skip = {*self.reward_keys, *((*key_path(self.done_key)[:-1], name) for name in self.done_keys)}
        skip.add(key_path(self.done_key))
        for key, announced in leaves(last.get("next")):
            found = first.get(key, None)
            if key in skip or not isinstance(found, torch.Tensor) or found.shape != announced.shape:
                continue
            differ = (found != announced) & ~((found != found) & (announced != announced))  # NaN
            other |= differ.reshape(*last.batch_size, -1).any(-1)
        return other

    # State -----------------------------------------------------------------------------------------

    def share_memory_(self) -> Transform:
        """Raise SchemaError: other processes do not see the steps held back in one process."""
        raise SchemaError(
            "MultiStepTransform holds steps back, which other writing processes do not see",
            hint="make n-step transitions before the data reach the shared buffer, with MultiStep",
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Return the steps held back, as tensors, numbers and lists of strings."""
        if self._held is None:
            return {"held": None}
        held = [
            [list(key), value if isinstance(value, torch.Tensor) else value.tolist()]
            for key, value in leaves(self._held.steps)
        ]
        return {"held": held, "batch_size": list(self._held.steps.batch_size), "apart": self._held.apart}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_extra_state` returned; an empty state means that nothing is held back."""
        held = state.get("held")
        if held is None:
            self._held = None
            return
        steps = TensorDict({}, batch_size=state["batch_size"])
        for key, value in held:
            steps.set(tuple(key), value.clone() if isinstance(value, torch.Tensor) else NonTensorStack.from_list(value))
        self._held = _Held(steps, state["apart"].clone())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", {})  # TorchRL does not save the steps held back
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"n_steps={self.n_steps}, gamma={self.gamma}, held={self.held}"


def _copied(every: _Held, first: int) -> _Held:
    """Copy the steps from `first` on, as the caller may change the originals."""
    return _Held(copied(every.steps[..., first:]), every.apart[..., first:].clone())
