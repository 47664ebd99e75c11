"""Rebuilds what comes after a step from the step that follows it in the batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from ..errors import MissingKeyError, SchemaError
from .base import Transform
from .keyed import NEXT, Path, as_key, as_keys, require_tensordict

__all__ = ["NextStateReconstructor"]

_TRAJECTORIES: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))


class NextStateReconstructor(Transform):
    """Sets `("next", key)` of every step to `key` of the step behind it, for data stored without its next entries.

    The steps follow one another along the last dimension of the batch, as slices have them. Where the following one
    does not continue a step, the entry is `fill_value`: at the end of the batch and of a trajectory, where ids
    (`traj_key`; by default `("collector", "traj_ids")`, else `"episode"`) differ, where `done_key` is set, and where
    `step_count_key` or the stored `"index"` does not go on by one. Whatever of these is not in the batch is not
    compared, except that MissingKeyError (a KeyError) is raised for one that was named, and for an entry of `keys`.

    SchemaError (a RuntimeError) if there is nothing at all that tells trajectories apart, and for a `fill_value` that
    the type of an entry cannot hold, as no whole number is NaN.
    """

    def __init__(
        self,
        keys: Any,
        traj_key: Any = None,
        done_key: Any = (NEXT, "done"),
        step_count_key: Any = "step_count",
        fill_value: float = float("nan"),
    ) -> None:
        super().__init__()
        self.keys = as_keys(keys)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.done_key = None if done_key is None else as_key(done_key)
        self.step_count_key = None if step_count_key is None else as_key(step_count_key)
        self.fill_value = fill_value

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        if not batch.ndim:
            raise SchemaError("a batch of steps is expected, found a single one")
        follows = self._follows(batch)
        rebuilt = {(NEXT, *key): self._shifted(batch, key, follows) for key in self.keys}
        batch = batch.copy()
        for key, value in rebuilt.items():
            batch.set(key, value)
        return batch

    def _follows(self, batch: TensorDictBase) -> torch.Tensor:
        """Tell of each step but the last whether the one behind it continues it; bool `[..., T - 1]`."""
        shape = batch.batch_size
        found = []
        trajectory = self._trajectories(batch)
        if trajectory is not None:
            ids = trajectory.reshape(*shape, -1)
            found.append((ids[..., 1:, :] == ids[..., :-1, :]).all(-1))
        done = batch.get(self.done_key, None) if self.done_key is not None else None
        if done is not None:
            found.append(~done.reshape(*shape, -1).any(-1)[..., :-1])
        for key in (self.step_count_key, ("index",)):
            count = batch.get(key, None) if key is not None else None
            if count is not None and count.numel() == shape.numel():
                count = count.reshape(shape)
                found.append(count[..., 1:] == count[..., :-1] + 1)
        if not found:
            raise SchemaError(
                "the batch has no entry that marks the ends of trajectories",
                hint="name traj_key, done_key or step_count_key",
            )
        return torch.stack(found).all(0)

    def _trajectories(self, batch: TensorDictBase) -> torch.Tensor | None:
        if self.traj_key is not None:
            found = batch.get(self.traj_key, None)
            if found is None:
                raise MissingKeyError(f"{'.'.join(self.traj_key)}, which separates trajectories, is not in the batch")
            return found  # type: ignore[no-any-return]
        return next((found for key in _TRAJECTORIES if (found := batch.get(key, None)) is not None), None)

    def _shifted(self, batch: TensorDictBase, key: Path, follows: torch.Tensor) -> torch.Tensor:
        value = batch.get(key, None)
        if value is None:
            raise MissingKeyError(f"{'.'.join(key)} is not in the batch: there is nothing to rebuild its next from")
        time = batch.ndim - 1
        fill = _filling(value, self.fill_value, key)
        rest = value.narrow(time, 1, value.shape[time] - 1)
        mask = follows.view(*follows.shape, *(1,) * (value.dim() - follows.dim()))
        last = fill.expand(value.narrow(time, 0, 1).shape)
        return torch.cat([torch.where(mask, rest, fill), last], time)


def _filling(value: torch.Tensor, fill_value: float, key: Path) -> torch.Tensor:
    if not (value.is_floating_point() or value.is_complex() or float(fill_value).is_integer()):
        raise SchemaError(f"{'.'.join(key)} is {value.dtype}, which cannot hold {fill_value}", hint="name a fill_value")
    return torch.as_tensor(fill_value, device=value.device).to(value.dtype)
