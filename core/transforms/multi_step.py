"""Returns over several steps: every step gets the rewards of the next few, and what was observed after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from ..errors import SchemaError, UsageError
from ..ted import DEFAULT_DONE_KEYS
from ..trajectories import NestedKey, is_cut_behind, key_path, leaves, require_steps, step_ends, step_mask
from .returns import discounted, per_step_like

__all__ = ["MultiStep", "Windows", "multi_step", "require_discount"]

WINDOW = "multi_step"
"""Where the flags of the steps at which windows end are kept."""


class Windows(NamedTuple):
    """For each step of `[..., T]`, how many steps its window has, where it ends, and whether the batch cut it short."""

    steps: torch.Tensor
    last: torch.Tensor
    cut: torch.Tensor


class MultiStep(nn.Module):
    """Makes n-step transitions of a batch of steps `[T]` or `[..., T]`, as a collector's post-processing.

    The window of a step has m = min(`n_steps`, steps to the end of its trajectory or of the batch) steps. What lies
    under `next` becomes what was after the last of them; each reward under `next` becomes the sum of gamma^i times
    the rewards of the window, and stays as it was at `original_<name>` beside it. New are, with one value a step,
    `steps_to_next_obs` (m, int64), `gamma` (gamma^m, float32) and `nonterminal` (m > 1; False where
    `("collector", "mask")` is).

    The flags under `next` stay those of the step itself, for they say where trajectories lie in a buffer. Those of
    the last step of the window are at `("multi_step", "done")`, "terminated" and "truncated"; `("multi_step", "cut")`
    says that a window is short because the batch, not the trajectory, ends there. So a target is
    `reward + gamma * ~terminated * value(next)` with the entries `gamma` and `("multi_step", "terminated")`: right
    for windows that were cut as well, only over fewer steps. `MultiStepTransform` cuts none between batches.

    A flag with several values a step, such as one an agent, ends the trajectory where any of them is set.

    UsageError (a ValueError) unless `n_steps` is a whole number from 1 and 0 < gamma <= 1. The idea is that of n-step
    returns (Watkins, 1989), the names are TorchRL's.
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
        super().__init__()
        self.n_steps = require_steps_ahead(n_steps)
        self.gamma = require_discount(gamma)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the n-step transitions of `tensordict`, which is left as it is."""
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

    `apart` (bool, like the batch) marks further steps that the one behind them does not follow.
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
    out.set("gamma", torch.tensor(gamma, device=windows.steps.device) ** windows.steps)
    nonterminal = windows.steps > 1
    out.set("nonterminal", nonterminal if valid is None else nonterminal & valid)
    return out


def find_windows(follows: torch.Tensor, ended: torch.Tensor, n_steps: int) -> Windows:
    """Find the windows of all steps, given which steps the next one follows, bool `[..., T]`."""
    time = follows.shape[-1]
    position = torch.arange(time, device=follows.device).expand(follows.shape)
    stops = torch.where(follows, time - 1, position)
    border = stops.flip(-1).cummin(-1).values.flip(-1) if time else stops
    last = torch.minimum(position + (n_steps - 1), border)
    steps = last - position + 1
    return Windows(steps, last, (steps < n_steps) & ~ended.gather(-1, last))


def _summed(reward: torch.Tensor, windows: Windows, gamma: float, dim: int) -> torch.Tensor:
    """Return the sum of gamma^i r[t + i] over the window of each step t."""
    values = reward if reward.is_floating_point() or reward.is_complex() else reward.to(torch.get_default_dtype())
    total, longest = values.clone(), int(windows.steps.max()) if windows.steps.numel() else 1
    for ahead in range(1, longest):
        inside = per_step_like(windows.steps > ahead, values).narrow(dim, 0, values.shape[dim] - ahead)
        later = values.narrow(dim, ahead, values.shape[dim] - ahead)
        # A product with zero would let NaN and infinities of other trajectories in.
        part = total.narrow(dim, 0, values.shape[dim] - ahead)
        part.copy_(torch.where(inside, part + discounted(later, gamma**ahead), part))
    return total


def _ahead(value: torch.Tensor, last: torch.Tensor, dim: int) -> torch.Tensor:
    """Return for each step the row of `value` at the end of its window."""
    if not isinstance(value, torch.Tensor):
        raise SchemaError(f"an entry under next is a {type(value).__name__}; n-step transitions are made of tensors")
    if dim == 0:
        return value[last]
    index = per_step_like(last, value).expand(value.shape)
    return value.gather(dim, index)


def require_steps_ahead(n_steps: Any) -> int:
    """Return a number of steps; UsageError (a ValueError) unless it is a whole number from 1."""
    if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1:
        raise UsageError(f"n_steps is {n_steps!r}, a whole number from 1 is expected")
    return n_steps


def require_discount(gamma: Any) -> float:
    """Return a discount; UsageError (a ValueError) unless it lies in (0, 1]."""
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 < gamma <= 1:
        raise UsageError(f"the discount is {gamma!r}, a number above 0 and up to 1 is expected")
    return float(gamma)
