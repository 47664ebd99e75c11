"""Works for tests of preprocess: one that does whatever a worker is to be seen doing, and functions on small blocks."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rbtool.core.engine.tasks import Task
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.functions import FunctionProcessor, find_function
from rbtool.core.preprocess.processor import Block, BlockColumn, Context, LoadedProcessor, Pieces, Processor, Unit
from rbtool.core.preprocess.run import Job
from rbtool.core.ted.schema import Key

STEPS = 100
TASKS = [Task(index, 10 * index, 10 * index + 10) for index in range(10)]


@dataclass(frozen=True)
class Acting(Processor):
    """Calls `act` with the number of the first step of a task; `begin` is called in each new worker."""

    act: Callable[[int], Any]
    begin: Callable[[], Any] = os.getpid
    modules: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return "acting"

    def load(self, context: Context) -> LoadedProcessor:
        self.begin()
        return _Acting(self.act)

    def arguments(self) -> dict[str, Any]:
        return {}

    def user_modules(self) -> frozenset[str]:
        return self.modules


class _Acting(LoadedProcessor):
    def __init__(self, act: Callable[[int], Any]) -> None:
        self._act = act

    def apply(self, block: Block) -> Block:
        return block

    def measure(self, block: Block) -> Any:
        return self._act(block.first)


def job_of(source: Path | StepReader, work: Processor) -> Job:
    """All steps of a dataset, which has at least 100, at a path or open."""
    reader = open_steps(source) if isinstance(source, Path) else source
    return Job(reader, reader.manifest.content_digest, work, None, STEPS, False, 0)


def once(mark: Path) -> bool:
    """Tell one caller, of whatever process, that it is the first."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


SURROUNDINGS = {
    "leads its group": True, "threads": 1, "threads of others": "1", "interrupt": True, "terminate": True,
    "blocked": set(), "input": "",
}  # fmt: skip
"""What `surroundings` returns in any worker, but for the process it is."""


def surroundings(first: int) -> dict[str, Any]:
    """What a worker process looks like from inside, and a line on each stream."""
    print(f"printed {first}")
    os.write(1, b"written\n")
    return {
        "pid": os.getpid(),
        "leads its group": os.getpgrp() == os.getpid(),
        "threads": torch.get_num_threads(),
        "threads of others": os.environ.get("OMP_NUM_THREADS"),
        "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "input": sys.stdin.read(),
    }


def die(how: str, hung: Path | None = None) -> None:
    """End this process, or not, in a way that nobody awaits; one that hangs first makes the file `hung`."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "crash":
        faulthandler.disable()  # pytest's: a trace of this one would look like a defect
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        if hung is not None:
            hung.touch()
        while True:
            signal.pause()


_setup_calls: list[None] = []


def count_set_up() -> None:
    """Count, in each process."""
    _setup_calls.append(None)


def counted_set_ups(first: int) -> tuple[int, int]:
    """The process id, and the number of its set-ups."""
    return os.getpid(), len(_setup_calls)


def server_and_self(first: int) -> tuple[int, int]:
    """Who forked this process, and who it is."""
    return os.getppid(), os.getpid()


def wait_for_ever(first: int) -> None:
    """Say through the file FIFO that this worker is here, and keep it open."""
    fifo = os.open(os.environ["FIFO"], os.O_WRONLY)
    os.write(fifo, b"x")
    die("hang")


def _kill_at_20(first: int) -> int:
    if first == 20:
        die("kill")
    return first


def _hang_at_20(first: int) -> int:
    if first == 20:
        die("hang")
    return first


end_at_20 = {"kill": _kill_at_20, "hang": _hang_at_20}


FLAGS = ("done", "terminated", "truncated")


def block_of(lengths: Sequence[int], first: int = 0, ids: Sequence[int] | None = None) -> Block:
    """Whole episodes of these lengths, each ending terminated; episode 3 and up by default."""
    rows, starts = sum(lengths), np.cumsum(lengths) - lengths
    numbers = np.arange(3, 3 + len(lengths)) if ids is None else np.asarray(ids)
    step = np.arange(first, first + rows + 1, dtype=np.float32)
    ends = np.zeros((rows, 1), bool)
    ends[(starts + lengths - 1)[np.asarray(lengths) > 0]] = True
    columns: dict[Key, BlockColumn] = {
        ("observation", "x"): BlockColumn("float32", np.stack([step[:-1], step[:-1] ** 2], 1)),
        ("observation", "y"): BlockColumn("int32", step[:-1].astype(np.int32)),
        ("action",): BlockColumn(
            "bfloat16", (step[:-1] + 1).astype(np.float32).view(np.uint32).__rshift__(16).astype("u2")
        ),
        ("episode",): BlockColumn("int64", np.repeat(numbers, lengths).astype(np.int64)),
        ("next", "observation", "x"): BlockColumn("float32", np.stack([step[1:], step[1:] ** 2], 1)),
        ("next", "observation", "y"): BlockColumn("int32", step[1:].astype(np.int32)),
        ("next", "reward"): BlockColumn("float64", np.sqrt(step[:-1, None].astype(np.float64))),
        ("next", "done"): BlockColumn("bool", ends),
        ("next", "terminated"): BlockColumn("bool", ends.copy()),
        ("next", "truncated"): BlockColumn("bool", np.zeros_like(ends)),
    }
    yes = np.ones(len(lengths), bool)
    return Block(columns, Pieces.of(np.arange(len(lengths)), lengths, yes, yes), first)


def part_of(block: Block, start: int, stop: int) -> Block:
    """Copy some rows of a block; episodes that go on beyond say so."""
    pieces = block.pieces
    begin, end = pieces.starts, pieces.starts + pieces.rows
    inside = (begin < stop) & (end > start)
    cut = Pieces.of(
        pieces.episode[inside],
        (np.minimum(end, stop) - np.maximum(begin, start))[inside],
        (begin >= start)[inside],
        (end <= stop)[inside],
    )
    columns = {key: BlockColumn(dtype, values[start:stop].copy()) for key, (dtype, values) in block.columns.items()}
    return Block(columns, cut, block.first + start)


def started(
    function: Callable[[Any], Any] | str, unit: Unit = "step", vmap: bool | None = None, seed: int = 0
) -> LoadedProcessor:
    """Load a function as a work would in the process that runs it."""
    return FunctionProcessor(find_function(function), unit, vmap).load(Context((), EpisodeTable.from_rows([]), seed))


def values_of(block: Block) -> dict[Key, tuple[str, list[Any]]]:
    """What a block holds as plain lists, to compare."""
    return {key: (column.dtype, column.values.tolist()) for key, column in block.columns.items()}


def runs_of(block: Block) -> list[tuple[int, int, bool, bool]]:
    """The pieces of a block as tuples."""
    pieces = block.pieces
    columns = (pieces.episode, pieces.rows, pieces.begins, pieces.ends)
    return list(zip(*(column.tolist() for column in columns), strict=True))
