"""Rows that benchmarks write: of states, of images, and in episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

CHUNK = 50_000
Make = Callable[[int], TensorDict]


def state_rows(rows: int) -> TensorDict:
    """Rows of a robot's states: 11 leaves, 758 bytes."""

    def flag() -> torch.Tensor:
        return torch.rand(rows, 1) < 0.01

    after = {
        "observation": torch.rand(rows, 39, dtype=torch.float64),
        "reward": torch.rand(rows, 1, dtype=torch.float64),
        "done": flag(),
        "terminated": flag(),
        "truncated": flag(),
    }
    now = {"observation": torch.rand(rows, 39, dtype=torch.float64), "action": torch.rand(rows, 28)}
    flags = {"done": flag(), "terminated": flag(), "truncated": flag(), "episode": torch.arange(rows)}
    return TensorDict({**now, **flags, "next": TensorDict(after, [rows])}, [rows])


def narrow_rows(rows: int) -> TensorDict:
    """Rows of 45 bytes."""
    after = TensorDict({"reward": torch.rand(rows, 1), "done": torch.zeros(rows, 1, dtype=torch.bool)}, [rows])
    return TensorDict({"observation": torch.rand(rows, 8), "episode": torch.zeros(rows).long(), "next": after}, [rows])


def image_rows(rows: int) -> TensorDict:
    """Rows of four stacked frames, 28 kB."""
    pixels = torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8)
    return TensorDict({"pixels": pixels, "action": torch.rand(rows, 6)}, [rows])


def filled(buffer: Any, rows: int, make: Make = state_rows) -> Any:
    """Write rows into a buffer, chunk by chunk."""
    chunk = make(min(rows, CHUNK))
    for start in range(0, rows, len(chunk)):
        buffer.extend(chunk[: rows - start])
    return buffer


def episodes(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the episodes of 100 to 400 steps that so many rows are of, and flag their last rows."""
    lengths = np.random.default_rng(0).integers(100, 401, rows // 100 + 1)
    numbers = np.repeat(np.arange(len(lengths)), lengths)[:rows]
    last = np.append(numbers[1:] != numbers[:-1], True)
    return torch.from_numpy(numbers), torch.from_numpy(last)[:, None]


def in_episodes(buffer: Any, rows: int, make: Make = state_rows) -> Any:
    """Write rows into a buffer, in episodes."""
    numbers, last = episodes(rows)
    chunk = make(min(rows, CHUNK))
    for start in range(0, rows, CHUNK):
        part = chunk[: rows - start].clone()
        part["episode"] = numbers[start : start + CHUNK]
        part["next", "done"] = last[start : start + CHUNK]
        buffer.extend(part)
    return buffer
