"""Stacks of frames: each frame with those before it, in the batch, or in the storage that the batch is drawn from."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, get_args

import torch
from tensordict import TensorDictBase

from ..errors import MissingKeyError, SchemaError, UsageError
from ..ted.schema import NEXT_DONE
from .base import Past
from .keyed import NEXT, KeyedTransform, Path, as_key, require_count, require_named, require_tensordict

Padding = Literal["same", "constant"]
_MULTI_STEP = "steps_to_next_obs"


class _Stack(KeyedTransform):
    """The arguments of both kinds of stacks."""

    def __init__(
        self,
        n: int,
        in_keys: Any = "pixels",
        out_keys: Any = None,
        dim: int = -3,
        *,
        padding: Padding = "same",
        padding_value: float = 0,
        done_key: Any = NEXT_DONE,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if dim >= 0:
            raise UsageError(f"dim is {dim}, expected a dimension of the frame counted from the end (below 0)")
        if padding not in get_args(Padding):
            raise UsageError(f"padding is {padding!r}, expected one of {', '.join(get_args(Padding))}")
        self.n = require_count("n", n, "frames")
        self.dim = dim
        self.padding: Padding = padding
        self.padding_value = padding_value
        self.done_key = as_key(done_key)

    def _filling(self, frames: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.padding_value, dtype=frames.dtype, device=frames.device)


class FrameStack(_Stack):
    """Joins every frame with the `n - 1` frames before it along `dim`, within the batch.

    Time is the last dimension of a batch with two or more dimensions, as in padded trajectories and in slices drawn
    with `batched=True`. Frames before the start of a row, or before an end inside of it, are unknown and padded. The
    stack of `("next", key)` is the root's stack moved on by one frame.

    Args:
        n: the number of frames in a stack.
        in_keys, out_keys: the entries.
        dim: the dimension along which frames are joined, counted from the end.
        padding: `"same"` repeats the first known frame, `"constant"` uses `padding_value`.
        padding_value: see `padding`.
        done_key: the flag that ends trajectories.

    Raises:
        MissingKeyError: (a KeyError) an entry that was named is not in the batch.
        SchemaError: (a RuntimeError) the batch has no time, or frames have no dimension `dim`.
    """

    def check(self, batch: TensorDictBase) -> None:
        if batch.ndim < 2:
            raise SchemaError(
                f"frames are stacked along the time of a batch, but the batch has the shape {list(batch.batch_size)}",
                hint="draw slices with batched=True, or whole trajectories",
            )
        require_named(batch, [self.done_key], defaults=[NEXT_DONE])

    def _age(self, batch: TensorDictBase) -> torch.Tensor:
        """Return how many steps of the same trajectory come before each step in the batch; int64 in its shape."""
        shape = batch.batch_size
        steps = torch.arange(shape[-1], device=batch.device).expand(shape)
        done = batch.get(self.done_key, None)
        if done is None:
            return steps
        ends = done.reshape(*shape, -1).any(-1)
        begins = torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], -1)
        return steps - torch.where(begins, steps, 0).cummax(-1).values

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        frame = list(value.shape[data.ndim :])
        if len(frame) < -self.dim:
            raise SchemaError(
                f"{'.'.join(key)} has frames of the shape {frame}, which have no dimension dim={self.dim}",
                hint="use dim=-1 to join them along their last dimension" if frame else "",
            )
        # Before the next frame come the frame of the step itself and the frames before that.
        root = data.get(key[1:], None) if key[0] == NEXT else None
        if (
            root is not None and root.shape[self.dim] == self.n * value.shape[self.dim]
        ):  # another transform has already stacked it
            root = root.narrow(self.dim, (self.n - 1) * value.shape[self.dim], value.shape[self.dim])
        frames, late = (value, 0) if root is None else (root, 1)
        age, time = self._age(data), data.ndim - 1
        earlier = [self._earlier(frames, back - late, age, time) for back in range(self.n - 1, 0, -1)]
        return torch.cat([*earlier, value], self.dim)

    def _earlier(self, frames: torch.Tensor, back: int, age: torch.Tensor, time: int) -> torch.Tensor:
        """Take the frame `back` steps before each frame if its trajectory is that old; otherwise the padding."""
        steps = torch.arange(frames.shape[time], device=frames.device).expand(age.shape)
        source = steps - torch.minimum(age, torch.full_like(age, back))
        tail = (1,) * (frames.dim() - source.dim())
        index = source.view(*source.shape, *tail).expand(*source.shape, *frames.shape[time + 1 :])
        found = frames.gather(time, index)
        if self.padding == "same":
            return found
        return torch.where((age < back).view(*age.shape, *tail), self._filling(found), found)


class StoredFrameStack(_Stack):
    """Joins every frame with the `n - 1` frames before it in its episode, read from the storage: frames are stored
    once.

    A transform of a buffer, for batches of single steps drawn by any sampler in any order. A stack never contains
    frames of another episode, nor from before a cut or the oldest row of a ring: such frames are replaced by
    `padding_value` (`"constant"`) or the first existing frame (`"same"`). The stack of `("next", key)` is the root's
    stack moved on by the step's next frame, at the end of an episode too. Frames that lack the dimension `dim` get it:
    a stack of `n` frames `[84, 84]` is `[n, 84, 84]`. It reads what is stored, so it must be the first transform of a
    buffer. (`FrameStack` only uses the frames of the batch.)

    Args:
        n, in_keys, out_keys, dim, padding, padding_value: see `FrameStack`.
        done_key, traj_key: where episodes end in storages other than datasets: at this flag, and where this id changes,
            by default `("collector", "traj_ids")` or `"episode"`.

    Raises:
        SchemaError: (a RuntimeError) it is not the first transform of a buffer, elements are not single steps, frames
            lack the dimension, or next observations are several steps ahead.
        MissingKeyError: (a KeyError) nothing separates episodes.

    >>> import rbtool
    >>> from tensordict import TensorDict
    >>> steps = {"pixels": torch.arange(1, 7).view(6, 1, 1), "episode": torch.tensor([0, 0, 0, 0, 1, 1])}
    >>> storage = rbtool.TensorStorage(TensorDict(steps, [6]))
    >>> rbtool.ReplayBuffer(storage=storage, transform=StoredFrameStack(3))[:]["pixels"].view(6, 3).tolist()
    [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 0, 5], [0, 5, 6]]
    """

    def __init__(
        self,
        n: int,
        in_keys: Any = "pixels",
        out_keys: Any = None,
        dim: int = -3,
        *,
        padding: Padding = "constant",
        padding_value: float = 0,
        done_key: Any = NEXT_DONE,
        traj_key: Any = None,
    ) -> None:
        super().__init__(n, in_keys, out_keys, dim, padding=padding, padding_value=padding_value, done_key=done_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.looks_back = self.n - 1
        self.episode_keys = (self.done_key, self.traj_key)

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> NoReturn:
        raise SchemaError(
            f"a {type(self).__name__} reads the frames before those of a batch, which only a buffer can provide",
            hint="make it the first transform of a buffer, or of each member of an ensemble",
        )

    def with_past(self, data: Any, past: Past) -> Any:
        """Return rows with stacks in place of frames."""
        batch = require_tensordict(data, self)
        if batch.batch_size != past.age.shape:
            raise SchemaError(
                f"the elements have the shape {list(batch.batch_size[past.age.dim() :])}, expected single steps",
                hint="FrameStack joins the frames of whole trajectories",
            )
        stacks: dict[Path, torch.Tensor] = {}
        changed = {}
        for key, out in self.pairs(batch):
            root = key[1:] if key[0] == NEXT else key
            if root not in stacks:
                stacks[root] = self._stack(root, past)
            stack = stacks[root] if root == key else self._after(stacks[root], key, batch, past)
            changed[out] = self._joined(stack, key, batch.batch_dims)
        batch = batch.copy()
        for out, value in changed.items():
            batch.set(out, value)
        return batch

    def _stack(self, key: Path, past: Past) -> torch.Tensor:
        """Return the stack of an entry at the root, `[*batch, n, *frame]`."""
        found = past.entry(key)
        if found is None:
            raise MissingKeyError(f"{'.'.join(key)} is not in the storage, from which stacks are made")
        if self.padding == "constant":
            missing = past.age.unsqueeze(-1) < torch.arange(self.n - 1, -1, -1)
            places = missing.reshape(-1).nonzero().squeeze(-1)
            if len(places):
                found.flatten(0, past.age.dim()).index_fill_(0, places.to(found.device), self._filling(found))
        return found

    def _after(self, stack: torch.Tensor, key: Path, batch: TensorDictBase, past: Past) -> torch.Tensor:
        """Return the stack of an entry under `next`: the root's, moved on by the next frame."""
        steps = batch.get(_MULTI_STEP, None)
        if steps is not None and bool((steps != 1).any()):
            raise SchemaError(
                f"{'.'.join(key)} is up to {int(steps.max())} steps ahead ({_MULTI_STEP}), but stacks need "
                "consecutive steps",
                hint="compute multi-step returns after sampling, from slices",
            )
        value, lead = batch.get(key), batch.batch_dims
        if (value.dtype, value.shape[lead:]) != (stack.dtype, stack.shape[lead + 1 :]):
            raise SchemaError(
                f"{'.'.join(key)} has frames {value.dtype} {list(value.shape[lead:])}, but the root has "
                f"{stack.dtype} {list(stack.shape[lead + 1 :])}"
            )
        return past.moved_on(stack, value, key)

    def _joined(self, stack: torch.Tensor, key: Path, lead: int) -> torch.Tensor:
        """Join the frames of a stack `[*batch, n, *frame]` along `dim`; `lead` is the number of batch dimensions."""
        frame = list(stack.shape[lead + 1 :])
        place = len(frame) + self.dim
        if place < -1:
            raise SchemaError(
                f"{'.'.join(key)} has frames of the shape {frame}, which have no dimension dim={self.dim}",
                hint=f"use dim={-len(frame) - 1} to join them along a new dimension",
            )
        if place < 0:
            return stack
        return stack.movedim(lead, lead + place).flatten(lead + place, lead + place + 1)
