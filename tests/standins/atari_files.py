"""Runs of the DQN Replay dataset written by plain NumPy, and a second reading of them that shares nothing with ours."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NAMES = ("observation", "action", "reward", "terminal")
FRAME = (6, 5)


@dataclass(frozen=True)
class Rows:
    """Rows of a run in the order of time, by column."""

    observation: Array
    action: Array
    reward: Array
    terminal: Array

    def __len__(self) -> int:
        return len(self.reward)

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(getattr(self, name)[start:stop] for name in NAMES))


def random_rows(lengths: Sequence[int], *, seed: int = 0, tail: int = 0, blanks: int = 0) -> Rows:
    """Make terminated episodes of these lengths and an unfinished one of `tail`, each after so many blank rows."""
    draw = np.random.default_rng(seed)
    parts: dict[str, list[Array]] = {name: [] for name in NAMES}
    for length, ends in [*((length, True) for length in lengths), *([(tail, False)] if tail else [])]:
        empty = np.zeros((blanks, *FRAME), np.uint8)
        parts["observation"] += [empty, draw.integers(1, 256, (length, *FRAME), np.uint8)]
        parts["action"] += [np.zeros(blanks, np.int32), draw.integers(0, 18, length).astype(np.int32)]
        parts["reward"] += [np.zeros(blanks, np.float32), draw.integers(-1, 2, length).astype(np.float32)]
        last = (np.arange(length) == length - 1) & ends
        parts["terminal"] += [np.zeros(blanks, np.uint8), last.astype(np.uint8)]
    return Rows(*(np.concatenate(parts[name]) for name in NAMES))


def save(path: Path, array: Any) -> None:
    """Write an array as the published files are."""
    held = io.BytesIO()
    np.save(held, np.asarray(array))
    path.write_bytes(gzip.compress(held.getvalue(), mtime=0))


def load(path: Path) -> Array:
    """Read an array whole."""
    return np.asarray(np.load(io.BytesIO(gzip.decompress(path.read_bytes())), allow_pickle=False))


def file_name(name: str, number: int) -> str:
    return f"$store$_{name}_ckpt.{number}.gz" if name in NAMES else f"{name}_ckpt.{number}.gz"


def write_checkpoint(
    folder: Path, number: int, rows: Rows, add_count: int | None, invalid: Iterable[int] | None = ()
) -> None:
    """Write the files of a checkpoint whose slots have these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        save(folder / file_name(name, number), getattr(rows, name))
    if add_count is not None:
        save(folder / file_name("add_count", number), np.array(add_count))
    if invalid is not None:
        save(folder / file_name("invalid_range", number), np.array(list(invalid), np.int64))


def write_run(folder: Path, rows: Rows, stops: Sequence[int], *, first: int = 0) -> Path:
    """Write the rows in checkpoints that end before these rows, and at the end; `add_count` counts from `first`."""
    logs = folder / "replay_logs"
    for number, (start, stop) in enumerate(zip([0, *stops], [*stops, len(rows)], strict=True)):
        write_checkpoint(logs, number, rows.part(start, stop), first + stop)
    return folder


def write_rings(folder: Path, rows: Rows, capacity: int, *, numbers: Sequence[int] | None = None) -> Path:
    """Write the rows as Dopamine logs its ring: one row before it is full, the oldest one in the last slot."""
    logs = folder / "replay_logs"
    for number in range((len(rows) + 1) // capacity) if numbers is None else numbers:
        count = (number + 1) * capacity - 1
        newest = rows.part(count - capacity + 1, count)
        oldest = rows.part(count - capacity, count - capacity + 1) if number else random_rows((1,), seed=99)
        ring = Rows(*(np.concatenate((getattr(newest, name), getattr(oldest, name))) for name in NAMES))
        invalid = [(capacity - 2 + place) % capacity for place in range(5)]
        write_checkpoint(logs, number, ring, count, invalid)
    return folder


def steps_of(rows: Rows, cuts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Read rows step by step, as `--final-step auto` does: a cut is before each of `cuts`, and after the last row."""
    found: list[dict[str, Any]] = []
    episode, pending = 0, 0
    for at in range(len(rows)):
        ends, cut = bool(rows.terminal[at]), at + 1 in cuts or at + 1 == len(rows)
        if ends or not cut:
            found.append(
                {
                    "observation": rows.observation[at], "action": rows.action[at], "next.reward": rows.reward[at],
                    "next.observation": rows.observation[at if ends else at + 1], "next.terminated": ends,
                    "next.truncated": False, "episode": episode,
                }
            )  # fmt: skip
            pending += 1
        elif pending:
            found[-1]["next.truncated"] = True
        if ends or cut:
            episode, pending = episode + 1, 0
    return found
