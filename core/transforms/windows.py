"""Transforms along time: random crops, next observations, stacks of frames, and windows around each step.

`StoredFrameStack` and `Windows` read the steps around a batch's steps from the storage; the others use only the batch.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import numpy as np
import torch
from tensordict import TensorDictBase

from ..errors import (
    MissingKeyError,
    SchemaError,
    UsageError,
    did_you_mean,
    require_choice,
    require_flags,
    require_number,
    warn_caller,
)
from ..format.contracts import StepReader
from ..format.videos import VIDEO, image_key, stated_fps
from ..storages.dataset import StreamStorage
from ..ted.schema import NEXT, NEXT_DONE, SINGLETONS, TRAJECTORY_KEYS, Numbers, as_key, key_called
from ..trajectories import is_cut_behind
from .base import Past, Transform
from .keyed import KeyedTransform, Path, as_keys, not_there, require_named, require_tensordict

_STEP_COUNT = ("step_count",)


class RandomCropTensorDict(Transform):
    """Cuts a window of `sub_seq_len` steps out of every row of a batch; all starts are equally likely.

    Args:
        sub_seq_len: how many steps a window has, at most as many as a row.
        sample_dim: the dimension of time, counted from the end.
        mask_key: a bool entry in the batch's shape that marks the real steps, which come first. Windows consist of real
            steps only.

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
        self.sub_seq_len = require_number("sub_seq_len", sub_seq_len, 1, "steps")
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

    Steps follow one another along the last dimension of the batch, as in slices. A step without a successor gets
    `fill_value`: at the end of the batch, and where the next step has another id, a done flag is set, or
    `step_count_key` or the stored `"index"` does not increase by one. Default entries that are not in the batch are
    ignored. Single steps drawn from a storage of several dimensions need ids, as `"index"` is only their row.

    Args:
        keys: the entries.
        traj_key: the entry with ids; default `("collector", "traj_ids")` or `"episode"`.
        done_key: a flag that ends trajectories.
        step_count_key: an entry that counts steps.
        fill_value: the value where there is no successor.
        strict: False ignores a named `traj_key` that does not exist, and treats a batch that has none of these entries
            as one trajectory.

    Raises:
        MissingKeyError: (a KeyError) one of `keys`, or an entry passed by name, does not exist.
        SchemaError: (a RuntimeError) no entry separates trajectories.
        FillError: (also a TypeError) the type of an entry cannot hold `fill_value`, for example NaN in whole numbers.
    """

    crosses_steps = True

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
        """Return for each step except the last one whether the next step continues it; bool `[..., T - 1]`."""
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
    """The arguments that both kinds of frame stacks have."""

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
        require_choice("padding", padding, get_args(Padding))
        self.n = require_number("n", n, 1, "frames")
        self.dim = dim
        self.padding: Padding = padding
        self.padding_value = padding_value
        self.done_key = as_key(done_key)

    def _filling(self, frames: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.padding_value, dtype=frames.dtype, device=frames.device)


class FrameStack(_Stack):
    """Joins every frame with the `n - 1` frames before it along `dim`, within the batch.

    Time is the last dimension of a batch with two or more dimensions, as in padded trajectories and in slices drawn
    with `batched=True`. Frames before the start of a row, and across the end of a trajectory within a row, are replaced
    by padding. A trajectory ends at the flag `done_key`, and where the next step has another id (`("collector",
    "traj_ids")`, "traj_ids" or "episode"). The stack of `("next", key)` is the root's stack, shifted by one frame.

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
        ends, done = is_cut_behind(batch, None).to(steps.device), batch.get(self.done_key, None)
        if done is not None:
            ends = ends | done.reshape(*shape, -1).any(-1).to(steps.device)
        begins = torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], -1)
        return steps - torch.where(begins, steps, 0).cummax(-1).values

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        frame = list(value.shape[data.ndim :])
        if len(frame) < -self.dim:
            raise SchemaError(
                f"{'.'.join(key)} has frames of the shape {frame}, which have no dimension dim={self.dim}",
                hint="use dim=-1 to join them along their last dimension" if frame else "",
            )
        # The frames before a next frame are the frame of the step itself and those before it, which the root has.
        root = data.get(key[1:], None) if key[0] == NEXT else None
        if root is not None and root.shape[self.dim] == self.n * value.shape[self.dim]:  # the root is stacked already
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
    """Joins every frame with the `n - 1` frames before it in its episode, which it reads from the storage.

    Each frame is thus stored once. This is a transform of a buffer, for batches of single steps that any sampler draws
    in any order. (`FrameStack` uses only the frames of the batch.) A stack never contains frames of another episode, or
    frames that a ring has overwritten: these are replaced by `padding_value` (`"constant"`) or by the first existing
    frame (`"same"`). The stack of `("next", key)` is the root's stack, shifted by the step's next frame, also at the
    end of an episode. Frames that lack the dimension `dim` get it: a stack of `n` frames `[84, 84]` is `[n, 84, 84]`.
    It needs frames as they are stored, so it must be the first transform of a buffer.

    Args:
        n, in_keys, out_keys, dim, padding, padding_value: see `FrameStack`.
        done_key, traj_key: in storages other than datasets, episodes end at the flag `done_key`, and where the id
            `traj_key` changes, by default `("collector", "traj_ids")` or `"episode"`.

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
            f"a {type(self).__name__} reads the frames before the frames of a batch, which only a buffer can provide",
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
        """Return the stack of an entry under `next`: the root's stack, shifted by the next frame."""
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


_IS_PAD = "is_pad"
_TOLERANCE = 1e-4
"""How many seconds an offset may differ from the time of a step, as in LeRobot; at most a tenth of a step."""
_FARTHEST = 1 << 20
"""The largest offset in steps. A batch may have that many values for each sampled step."""
_BOUNDS = re.compile(r"\s*([-+]?[\d.]+)(s?)\s*:\s*([-+]?[\d.]+)(s?)\s*")
Pad: TypeAlias = Literal["clamp", "zero"]


class Windows(Transform):
    """Extends entries to a window of the steps around each step of a batch: chunks of actions, frames of history.

    This is a transform of a buffer, for batches of single steps, the anchors, that any sampler draws in any order. The
    steps around them are read from the storage. An entry with a window is `[*batch, T, …]`, also for a window of one
    step. The same path under `"is_pad"`, bool `[*batch, T]`, marks steps that are not in the anchor's episode, or that
    a ring has overwritten. The values are the same as LeRobot's for the same `delta_timestamps`.

    Entries without a window have the value of the anchor. Next observations, which are the entries under `"next"` that
    the root has as well, are left out unless they have a window. A batch reads only what its windows need, and decodes
    only these frames of kept videos. It needs entries as they are stored, so it must be the first transform of a
    buffer; `load_dataset(…, windows=…)` puts it there.

    Args:
        windows: the window of each entry. Entries are tuples of names, or names with dots, such as
            `"observation.image.top"`; a group, such as `"observation"`, stands for all entries in it. A window is one
            of

            - `(start, stop)`, a range of offsets from the anchor that excludes `stop`: in steps, as in `(0, 16)`, or in
              seconds if one of them is a float;
            - a list or range of offsets: in steps, or in seconds if one of them is a float, as in LeRobot's
              `delta_timestamps`;
            - text: `"0:16"` for steps, `"0s:0.5s"` for seconds.
        pad: `"clamp"` pads with the first or last step of the episode, `"zero"` with zeros (and black frames).
        fps: the number of steps per second, for windows in seconds.

    Raises:
        UsageError: (a ValueError) a window has no steps, is in seconds without `fps`, or is at times between steps; or
            an entry has two windows.
        MissingKeyError: (a KeyError) an entry is not stored, or nothing separates episodes.
        SchemaError: (a RuntimeError) it is not the first transform of a buffer, or elements are not single steps.

    >>> import rbtool
    >>> from tensordict import TensorDict
    >>> steps = {"action": torch.arange(6), "episode": torch.tensor([0, 0, 0, 0, 1, 1])}
    >>> storage = rbtool.TensorStorage(TensorDict(steps, [6]))
    >>> batch = rbtool.ReplayBuffer(storage=storage, transform=Windows({"action": (-1, 2)}))[2:5]
    >>> batch["action"].tolist(), batch["is_pad", "action"].tolist()
    ([[1, 2, 3], [2, 3, 3], [4, 4, 5]], [[False, False, False], [False, False, True], [True, False, False]])
    """

    reads_rows = True

    def __init__(self, windows: Mapping[Any, Any], *, pad: Pad = "clamp", fps: float | None = None) -> None:
        super().__init__()
        given: Any = windows
        if not isinstance(given, Mapping) or not given:
            raise UsageError(f"windows is {windows!r}, expected a dict such as {{'action': (0, 16)}}")
        require_choice("pad", pad, get_args(Pad))
        if fps is not None and not (isinstance(fps, numbers.Real) and 0 < fps < float("inf")):
            raise UsageError(f"fps is {fps!r}, expected a number above 0")
        self.pad: Pad = pad
        self.windows = {
            key if isinstance(key, str) else as_key(key): _offsets(window, fps) for key, window in windows.items()
        }
        self.looks_back = max(0, *(-int(offsets.min()) for offsets in self.windows.values()))
        self._resolved: tuple[list[Path], dict[Path, tuple[Path, Numbers]]] | None = None

    @classmethod
    def of_dataset(cls, windows: Any, dataset: StepReader | StreamStorage) -> Windows:
        """Make windows for a dataset, with its steps per second; MissingKeyError if it lacks an entry.

        For a stream, entries are checked with the first batch, and a shard is fetched only for windows in seconds.
        """
        seconds = isinstance(windows, Mapping) and any(_in_seconds(_numbers(one)) for one in windows.values())
        if isinstance(dataset, StreamStorage):
            return cls(windows, fps=dataset.stated_fps() if seconds else None)
        made = cls(windows, fps=stated_fps(dataset) if seconds else None)
        made.of_entries([field.key for field in dataset.fields])
        return made

    def forward(self, data: Any) -> NoReturn:
        raise SchemaError(
            f"{type(self).__name__} needs the steps around each step of a batch, which only a buffer can provide",
            hint="make it the first transform of a buffer, or of each member of an ensemble",
        )

    def with_past(self, data: Any, past: Past) -> Any:
        """Return rows with windows in place of entries."""
        if data is not None and require_tensordict(data, self).batch_size != past.age.shape:
            raise SchemaError(
                f"the elements have the shape {list(data.batch_size[past.age.dim() :])}, expected single steps"
            )
        names = past.keys if data is None else None
        names = list(map(as_key, data.keys(True, True)) if names is None else names)
        windows = self.of_entries(names)
        unread = {key for key in names if key in windows or (key[0] == NEXT and _is_state(key[1:], names))}
        if data is None:
            batch = past.rows([key for key in names if key not in unread])
        else:
            batch = data.exclude(*unread)
        for key, (shown, offsets) in windows.items():
            value, missing = past.window(key, offsets)
            if value is None:
                raise MissingKeyError(f"{'.'.join(key)} is not in all elements of the storage")
            if self.pad == "zero":
                places = missing.reshape(-1).nonzero().squeeze(-1).to(value.device)
                value.flatten(0, missing.dim() - 1).index_fill_(0, places, 0)
            batch.set(key, value)
            batch.set((_IS_PAD, *shown), missing.to(value.device))
        return batch

    def of_entries(self, names: list[Path]) -> dict[Path, tuple[Path, Numbers]]:
        """Return, for each of these entries that has a window, its key in batches and the offsets of the window.

        The key in batches differs for a reference to frames of a video: it is the key of the image.
        """
        if (resolved := self._resolved) is not None and resolved[0] == names:
            return resolved[1]
        known = set(names)
        if any(key[0] == _IS_PAD for key in known):
            raise SchemaError(f"the data has an entry {_IS_PAD!r} of its own, where windows have their masks")
        frames = {image_key(key): key for key in names if key[key[0] == NEXT :][0] == VIDEO and image_key(key)}
        shown = {key: key for key in names} | {key: stored for key, stored in frames.items() if key not in known}
        found: dict[Path, tuple[Path, Numbers]] = {}
        for asked, offsets in self.windows.items():
            path = key_called(asked, shown, groups=True) if isinstance(asked, str) else asked
            leaves = [key for key in shown if path is not None and key[: len(path)] == path]
            name = asked if isinstance(asked, str) else ".".join(asked)
            if not leaves:
                there = sorted(".".join(key) for key in shown if key not in frames.values())
                raise MissingKeyError(
                    f"{name} is not in the data, so it cannot have a window{did_you_mean(name, there)}",
                    hint=f"it has {', '.join(there)}",
                )
            for key in leaves:
                if shown[key] in found:
                    raise UsageError(f"{'.'.join(key)} has two windows, expected one")
                found[shown[key]] = key, offsets
        self._resolved = names, found
        return found

    def extra_repr(self) -> str:
        return f"{self.windows}, pad={self.pad!r}"


def _is_state(key: Path, names: list[Path]) -> bool:
    return key in names and key not in SINGLETONS


def _numbers(window: Any) -> tuple[Any, ...] | list[Any]:
    """Return the bounds of a window as a tuple, or its offsets as a list."""
    found: tuple[Any, ...] | list[Any] = []
    if isinstance(window, str):
        if (match := _BOUNDS.fullmatch(window)) and match[2] == match[4]:
            with contextlib.suppress(ValueError):
                found = tuple(map(float if match[2] else int, (match[1], match[3])))
    elif isinstance(window, tuple | list | range):
        found = window if isinstance(window, tuple) else list(window[: _FARTHEST << 2])
    if not found or not all(isinstance(one, numbers.Real) and not isinstance(one, bool) for one in found):
        raise UsageError(
            f"the window is {window!r}, expected (start, stop), a list of offsets, or text like 0:16 or 0s:0.5s"
        )
    return found


def _in_seconds(found: Iterable[Any]) -> bool:
    return not all(isinstance(one, numbers.Integral) for one in found)


def _offsets(window: Any, fps: float | None) -> Numbers:
    """Return the offsets of a window in steps, int64 `[T]`."""
    found = _numbers(window)
    if isinstance(found, tuple) and len(found) != 2:
        raise UsageError(f"the window is {window!r}, expected two bounds, or a list of offsets")
    if _in_seconds(found):
        if fps is None:
            raise UsageError(
                f"the window {window!r} is in seconds, but the number of steps per second is unknown",
                hint="write it in steps: (0, 16); or rbtool.Windows(…, fps=30) as the first transform",
            )
        times = [float(one) for one in found]
        if not all(map(math.isfinite, times)):
            raise UsageError(f"the window is {window!r}, expected finite numbers")
        near = min(_TOLERANCE * fps, 0.1)  # in steps
        if isinstance(found, tuple):
            found = tuple(math.ceil(one * fps - near) for one in times)
        else:
            found = [round(one * fps) for one in times]
            for time, step in zip(times, found, strict=True):
                if abs(time * fps - step) > near:
                    raise UsageError(
                        f"{time:g} s is between two steps: at {fps:g} a second the nearest is {step / fps:g} s"
                    )
    if any(abs(one) > _FARTHEST for one in found):
        raise UsageError(f"the window is {window!r}, expected steps at most {_FARTHEST:,} away")
    offsets = np.array(range(*found) if isinstance(found, tuple) else found, np.int64)
    if not len(offsets):
        raise UsageError(f"the window is {window!r}, which has no steps")
    return offsets
