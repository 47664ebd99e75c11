"""Buffers full of episodes with every oddity there is, made from a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.storages.codec import tensor_bytes
from rbtool.core.storages.columns import plain_column
from rbtool.core.storages.lazy_tensor import LazyTensorStorage

Oddity: TypeAlias = Literal[
    "jumps", "repeats", "specials", "agents", "root flags", "root reward", "next only", "types", "names", "score"
]
ODDITIES: tuple[Oddity, ...] = (
    "jumps", "repeats", "specials", "agents", "root flags", "root reward", "next only", "types", "names", "score",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """What to write: batches of so many rows one after the other into a ring of `capacity` rows of some lanes."""

    capacity: int = 8
    batches: tuple[int, ...] = (5,)
    lanes: tuple[int, ...] = ()
    oddities: tuple[Oddity, ...] = ()
    ends: float = 0.3
    seed: int = 0

    @property
    def done_keys(self) -> list[Any]:
        """The keys of done flags."""
        return ["done", "truncated", "terminated", *([("agents", "done")] if "agents" in self.oddities else [])]

    @property
    def reward_keys(self) -> list[Any]:
        """The keys of rewards."""
        return ["reward", *(["score"] if "score" in self.oddities else [])]

    def storage(self, checkpointer: Any = None, capacity: int | None = None) -> LazyTensorStorage:
        """Make an empty storage for such rows."""
        rows = self.capacity if capacity is None else capacity
        size = rows * int(np.prod(self.lanes, dtype=int))
        return LazyTensorStorage(size, ndim=1 + len(self.lanes), checkpointer=checkpointer)

    def buffer(self, checkpointer: Any = None) -> ReplayBuffer:
        """Make a buffer and write all batches to it."""
        buffer = ReplayBuffer(storage=self.storage(), batch_size=2, dim_extend=0)
        buffer._storage.checkpointer = checkpointer
        draw = np.random.default_rng(self.seed)
        for count in self.batches:
            buffer.extend(self.rows(draw, count))
        return buffer

    def rows(self, draw: np.random.Generator, count: int) -> TensorDict:
        """Make rows of one episode after the other; those of two calls do not follow each other."""
        shape, has = (count, *self.lanes), self.oddities.__contains__
        done = draw.random((*shape, 1)) < self.ends
        by_time = done & (draw.random(done.shape) < 0.4)
        root = {"observation": self._numbers(draw, (count + 1, *self.lanes, 3))}
        after: dict[str, Any] = {"done": done, "truncated": by_time, "terminated": done & ~by_time}
        now: dict[str, Any] = {"action": self._numbers(draw, (*shape, 2)).astype(np.float32)}
        after["reward"] = self._numbers(draw, (*shape, 1))
        if has("types"):
            root |= {"small": draw.integers(0, 2**16, (count + 1, *self.lanes), np.uint16)}
            now |= {"wide": draw.integers(0, 2**63, (*shape, 1), np.uint64), "none": np.zeros((*shape, 0))}
        if has("names"):
            root |= {
                name: draw.integers(0, 9, (count + 1, *self.lanes)) for name in ("shape", "x.shape", "x", "at_root")
            }
        states = {name: torch.from_numpy(values) for name, values in root.items()}
        if has("types"):
            states["brain"] = torch.from_numpy(draw.random((count + 1, *self.lanes, 2))).bfloat16()
        now |= {name: values[:-1] for name, values in states.items()}
        after |= {name: self._broken(draw, values[1:].clone(), done) for name, values in states.items()}
        if has("agents"):
            alive = draw.random((*shape, 2, 1)) < 0.5
            after["agents"] = {"done": (alive & draw.integers(0, 2, alive.shape, bool)) | done[..., None]}
            now["agents"] = {"done": draw.random(alive.shape) < 0.2, "done_at": draw.random(shape)}
        if has("root flags"):
            now |= {"done": draw.random(done.shape) < 0.3, "terminated": np.zeros_like(done)}
        if has("root reward"):
            now["reward"] = self._numbers(draw, (*shape, 1))
        if has("next only"):
            after["info"] = {"lap": draw.integers(0, 9, shape)}
        if has("score"):
            after["score"], now["score"] = draw.random((*shape, 2)), np.zeros((*shape, 2))
        return TensorDict({**now, "next": after}, [*shape])

    def _numbers(self, draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        values = draw.normal(size=shape)
        if "specials" in self.oddities:
            for special in (np.nan, -np.nan, np.inf, -0.0, 0.0):
                values[draw.random(shape) < 0.05] = special
        if "repeats" in self.oddities:
            values[1:][draw.random(shape[0] - 1) < 0.4] = values[0]
        return values

    def _broken(self, draw: np.random.Generator, after: torch.Tensor, done: np.ndarray[Any, Any]) -> torch.Tensor:
        """Change next observations at the ends of episodes, and elsewhere where they are to jump."""
        changed = done[..., 0] | (draw.random(done.shape[:-1]) < (0.2 if "jumps" in self.oddities else 0))
        plain_column(after)[torch.from_numpy(changed)] = 1
        return after


@st.composite
def buffer_plans(draw: st.DrawFn, max_rows: int = 7) -> BufferPlan:
    """Plans of empty, partly filled, full and wrapped rings with some of the oddities."""
    capacity = draw(st.integers(1, max_rows))
    return BufferPlan(
        capacity=capacity,
        batches=tuple(draw(st.lists(st.integers(1, capacity), min_size=1, max_size=4))),
        lanes=draw(st.sampled_from([(), (), (2,), (3, 2)])),
        oddities=tuple(draw(st.lists(st.sampled_from(ODDITIES), unique=True))),
        ends=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def bits(data: Any) -> Any:
    """Return element types, shapes and bytes of a nest of tensors."""
    if isinstance(data, TensorDictBase):
        return {key: bits(child) for key, child in data.items()}
    return str(data.dtype), tuple(data.shape), bytes(tensor_bytes(data))
