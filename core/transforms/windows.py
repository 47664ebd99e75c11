"""Transforms along time: random windows of a batch, the successor of each step, and stacks of frames."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, get_args

import torch
from tensordict import TensorDictBase

from ..errors import MissingKeyError, SchemaError, UsageError, require_flags, warn_caller
from ..ted.schema import NEXT_DONE, TRAJECTORY_KEYS
from .base import Past, Transform
from .keyed import (
    NEXT,
    KeyedTransform,
    Path,
    as_key,
    as_keys,
    not_there,
    require_count,
    require_named,
    require_tensordict,
)

_STEP_COUNT = ("step_count",)


class RandomCropTensorDict(Transform):
    """Cuts a window of `sub_seq_len` steps out of every row of a batch; all starts are equally likely.

    Args:
        sub_seq_len: the steps of a window, up to the length of a row.
        sample_dim: the dimension of time, counted from the end.
        mask_key: a bool entry in the batch's shape that marks the real steps, which come first; windows lie within
            them.

    Raises:
        SchemaError: (a RuntimeError) a row is shorter than the window.
        MissingKeyError: (a KeyError) the mask does not exist.
        UsageError: (a ValueError) the window has no steps.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"step": torch.arange(8).expand(3, 8)}, [3, 8])
    >>> RandomCropTensorDict(8)(batch)["step"].shape
    torch.Size([3, 8])
    """

    draws = True

    def __init__(self, sub_seq_len: int, sample_dim: int = -1, mask_key: Any = None) -> None:
        super().__init__()
        if sample_dim >= 0:
            warn_caller(f"sample_dim is {sample_dim}: counting dimensions from the end works for batches of any shape")
        self.sub_seq_len = require_count("sub_seq_len", sub_seq_len, "steps")
        self.sample_dim = sample_dim
        self.mask_key = None if mask_key is None else as_key(mask_key)

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        shape = batch.batch_size
        if not -len(shape) <= self.sample_dim < len(shape):
            raise SchemaError(f"dimension {self.sample_dim} cannot be cut: the batch has the shape {list(shape)}")
        dim = self.sample_dim % len(shape)
        legal = self._lengths(batch, dim) - self.sub_seq_len + 1
        if legal.numel() and int(legal.min()) < 1:
            shortest = int(legal.min()) + self.sub_seq_len - 1
            raise SchemaError(f"sub_seq_len is {self.sub_seq_len}, expected at most the steps of a row, {shortest}")
        generator, device = self.generator, self.generator.device if self.generator is not None else None
        chances = torch.rand(legal.shape, generator=generator, device=device, dtype=torch.float64).to(legal.device)
        starts = (chances * legal).long().minimum(legal - 1).unsqueeze(dim)
        steps = torch.arange(self.sub_seq_len, device=starts.device).view(-1, *[1] * (len(shape) - dim - 1))
        return batch.gather(dim, starts + steps)

    def _lengths(self, batch: TensorDictBase, dim: int) -> torch.Tensor:
        """Return the number of real steps of every row."""
        others = [size for number, size in enumerate(batch.batch_size) if number != dim]
        if self.mask_key is None:
            return torch.full(others, batch.batch_size[dim], device=batch.device)
        mask = batch.get(self.mask_key, None)
        if mask is None:
            raise not_there(self.mask_key, batch)
        if mask.shape[: batch.ndim] != batch.batch_size or mask.numel() != batch.batch_size.numel():
            raise SchemaError(f"the mask has the shape {list(mask.shape)}, expected {list(batch.batch_size)}")
        real: torch.Tensor = mask.reshape(batch.batch_size)
        return real.sum(dim)

    def extra_repr(self) -> str:
        return f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}"


class FillError(SchemaError, TypeError):
    """A fill value does not fit the type of its entry."""


class NextStateReconstructor(Transform):
    """Sets `("next", key)` of every step to `key` of the following step, for data stored without next entries.

    Steps follow one another along the last dimension of the batch, as in slices. Where a step is not continued, the
    entry is `fill_value`: at the end of the batch, and where ids differ, a done flag is set, or `step_count_key` or the
    stored `"index"` does not increase by one. Default entries that are not in the batch are not compared.

    Args:
        keys: the entries.
        traj_key: the entry with ids; default `("collector", "traj_ids")` or `"episode"`.
        done_key: a flag that ends trajectories.
        step_count_key: an entry that counts steps.
        fill_value: the value where there is no successor.
        strict: False ignores a named `traj_key` that does not exist, and treats a batch without separators as one
            trajectory.

    Raises:
        MissingKeyError: (a KeyError) one of `keys`, or an entry passed by name, does not exist.
        SchemaError: (a RuntimeError) no entry separates trajectories.
        FillError: (also a TypeError) the type of an entry cannot hold `fill_value`, for example NaN in whole numbers.
    """

    def __init__(
        self,
        keys: Any,
        traj_key: Any = None,
        done_key: Any = NEXT_DONE,
        step_count_key: Any = _STEP_COUNT,
        fill_value: float = float("nan"),
        strict: bool = True,
    ) -> None:
        require_flags(strict=strict)
        super().__init__()
        self.strict = strict
        self.keys = as_keys(keys)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.done_key = None if done_key is None else as_key(done_key)
        self.step_count_key = None if step_count_key is None else as_key(step_count_key)
        self.fill_value = fill_value

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        if not batch.ndim:
            raise SchemaError("expected a batch of steps, found a single one")
        follows = self._follows(batch)
        rebuilt = {(NEXT, *key): self._shifted(batch, key, follows) for key in self.keys}
        batch = batch.copy()
        for key, value in rebuilt.items():
            batch.set(key, value)
        return batch

    def _follows(self, batch: TensorDictBase) -> torch.Tensor:
        """Return, for each step but the last, whether the next one continues it; bool `[..., T - 1]`."""
        shape = batch.batch_size
        found = []
        if self.strict:
            require_named(batch, filter(None, (self.done_key, self.step_count_key)), defaults=[NEXT_DONE, _STEP_COUNT])
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
        if not found and not self.strict:
            return torch.ones(*shape[:-1], max(shape[-1] - 1, 0), dtype=torch.bool, device=batch.device)
        if not found:
            raise SchemaError(
                "the batch has no entry that marks the ends of trajectories",
                hint="name traj_key, done_key or step_count_key",
            )
        return torch.stack(found).all(0)

    def _trajectories(self, batch: TensorDictBase) -> torch.Tensor | None:
        if self.traj_key is not None:
            found = batch.get(self.traj_key, None)
            if found is None and self.strict:
                raise not_there(self.traj_key, batch, ", so trajectories cannot be told apart")
            return found  # type: ignore[no-any-return]
        return next(
            (found for key in TRAJECTORY_KEYS["next states"] if (found := batch.get(key, None)) is not None), None
        )

    def _shifted(self, batch: TensorDictBase, key: Path, follows: torch.Tensor) -> torch.Tensor:
        value = batch.get(key, None)
        if value is None:
            raise not_there(key, batch, ", so its next entry cannot be rebuilt")
        time = batch.ndim - 1
        fill = _filling(value, self.fill_value, key)
        rest = value.narrow(time, 1, value.shape[time] - 1)
        mask = follows.view(*follows.shape, *(1,) * (value.dim() - follows.dim()))
        last = fill.expand(value.narrow(time, 0, 1).shape)
        return torch.cat([torch.where(mask, rest, fill), last], time)


def _filling(value: torch.Tensor, fill_value: float, key: Path) -> torch.Tensor:
    if not (value.is_floating_point() or value.is_complex() or float(fill_value).is_integer()):
        raise FillError(
            f"{'.'.join(key)} is {value.dtype}, which cannot hold {fill_value}", hint="pass another fill_value"
        )
    return torch.as_tensor(fill_value, device=value.device).to(value.dtype)


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
