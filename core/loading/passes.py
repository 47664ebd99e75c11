"""The epoch of each pass over a data set, agreed on by the workers of a loader."""

from __future__ import annotations

import struct
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ..buffers.processes import SharedGuard

_SEED, _EPOCH, _BATCH, _BY_WORKERS, _NEWEST, _TABLE = range(6)
_KEPT, _WIDTH = 64, 6
"""How many passes are remembered, and the numbers of each: key, workers, turn, epoch, batch, seed."""


class Start(NamedTuple):
    """Where a pass starts: a seed, an epoch and the number of a batch."""

    seed: int
    epoch: int
    batch: int


class Passes:
    """Gives every pass over a data set an epoch of its own, and all workers of a pass the same one.

    The numbers are in memory that forked and spawned workers share with the process that made them, so that epochs
    advance although every pass may have new workers. The workers of one pass have a seed in common, see `DataLoader`.
    Persistent workers keep it: the n-th pass of each of them is the same one, also where a worker starts its next pass
    before another one has started this one, as in a loop that ends after a batch. A plain copy counts by itself.
    """

    def __init__(self, seed: int) -> None:
        self._guard = SharedGuard()
        self._turns: dict[int, int] = {}
        self.start_at(Start(seed, 0, 0))

    @property
    def _cells(self) -> memoryview:
        return self._guard.numbers

    # Before a pass ----------------------------------------------------------------------------------

    @property
    def next(self) -> Start:
        """Where the next pass starts."""
        with self._guard.hold():
            cells = self._cells
            return Start(_unsigned(cells[_SEED]), cells[_EPOCH], cells[_BATCH])

    def start_at(self, start: Start, *, by_workers: bool = False) -> None:
        """Set where the next pass starts; `by_workers` if a worker sets it."""
        with self._guard.hold():
            cells = self._cells
            cells[_SEED], cells[_EPOCH], cells[_BATCH] = _signed(start.seed), start.epoch, start.batch
            cells[_BY_WORKERS] = by_workers

    @property
    def by_workers(self) -> bool:
        """Whether the newest pass is of loader workers."""
        return bool(self._cells[_BY_WORKERS])

    # Passes -----------------------------------------------------------------------------------------

    def enter(self) -> Start:
        """Start a pass in this process, or join the pass of the other workers; return where it starts."""
        worker = get_worker_info()
        with self._guard.hold():
            if worker is None:
                return self._advance(by_workers=False)
            key, cells = worker.seed - worker.id, self._cells
            turn = self._turns[worker.seed] = self._turns.get(worker.seed, -1) + 1
            passed = key, worker.num_workers, turn
            for number in range(_KEPT):
                row = _TABLE + _WIDTH * number
                if cells[row + 1] and tuple(cells[row : row + 3]) == passed:
                    return Start(_unsigned(cells[row + 5]), cells[row + 3], cells[row + 4])
            start = self._advance(by_workers=True)
            cells[_NEWEST] = (cells[_NEWEST] + 1) % _KEPT
            row = _TABLE + _WIDTH * cells[_NEWEST]
            cells[row], cells[row + 1], cells[row + 2] = passed
            cells[row + 3], cells[row + 4], cells[row + 5] = start.epoch, start.batch, _signed(start.seed)
            return start

    def _advance(self, *, by_workers: bool) -> Start:
        cells = self._cells
        start = Start(_unsigned(cells[_SEED]), cells[_EPOCH], cells[_BATCH])
        cells[_EPOCH], cells[_BATCH], cells[_BY_WORKERS] = start.epoch + 1, 0, by_workers
        return start

    def __getstate__(self) -> dict[str, Any]:
        copied = None if get_spawning_popen() is not None else self.next
        return {"_guard": self._guard, "copied": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._guard, self._turns = state["_guard"], {}
        if state["copied"] is not None:
            self.start_at(state["copied"])


def _signed(seed: int) -> int:
    return int(struct.unpack("<q", struct.pack("<Q", seed))[0])


def _unsigned(seed: int) -> int:
    return int(struct.unpack("<Q", struct.pack("<q", seed))[0])
