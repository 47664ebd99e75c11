"""Worker processes, each at the other end of a pipe.

They are started by running Python anew, not by fork (torch's threads do not survive one) and not by
multiprocessing's spawn (which would run the caller's script again). A worker whose parent is gone sees its pipe
close and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ..ted import Field
from .crew import Chunk, Crew
from .failures import ChunkFailed, WorkerTrouble
from .job import Finished, Job

__all__ = ["WorkerPool"]

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    f"from {__package__}.worker import main; main(int(sys.argv[1]))"
)
_QUEUED = 2
"""Chunks a worker has before it: the one it works on, and one it can begin before it is heard."""

_LOOK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class _Worker:
    """One process and the chunks it was given."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.connection: Connection = ours
        self.chunks: deque[Chunk] = deque()
        try:
            path = json.dumps([str(entry) for entry in sys.path])
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the function prints must not mix with our own result
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                process_group=0,  # Ctrl-C in a terminal is for the parent, which stops its workers
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def call(self, method: str, *arguments: Any) -> None:
        """Ask for something; the answer comes through the connection."""
        try:
            self.connection.send((method, arguments))
        except OSError:
            raise self.ended() from None

    def answer(self) -> Any:
        """Wait for the next answer and return it, or raise the exception it is."""
        try:
            while not self.connection.poll(_LOOK_SECONDS):
                if self.process.poll() is not None and not self.connection.poll():
                    raise self.ended()
            found = self.connection.recv()
        except (EOFError, OSError):
            raise self.ended() from None
        if isinstance(found, BaseException):
            raise found
        return found

    def ended(self) -> WorkerTrouble:
        """Say how the process ended."""
        try:
            code = self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerTrouble("a worker process closed its pipe", "")
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        return WorkerTrouble(f"a worker process {how}", "")

    def stop(self) -> None:
        """Kill the process and what it started: they have nothing to put in order."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class WorkerPool(Crew):
    """Deals chunks out to worker processes in order, two ahead to each."""

    def __init__(self, job: Job, workers: int) -> None:
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker())
            for worker in self._workers:
                worker.call("start", job)
            for worker in self._workers:
                worker.answer()
        except BaseException:
            self.close()
            raise

    def schema(self, chunk: Chunk) -> tuple[Field, ...]:
        """Let the first worker run the first chunk."""
        try:
            self._workers[0].call("schema", *chunk)
            fields: tuple[Field, ...] = self._workers[0].answer()
        except Exception as error:
            raise ChunkFailed(*chunk) from error
        return fields

    def open(self, folder: Path, fields: Sequence[Field]) -> None:
        """Let all workers open the files."""
        for worker in self._workers:
            worker.call("open", folder, fields)
        for worker in self._workers:
            worker.answer()

    def run(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Finished]]:
        """Keep all workers busy until every chunk is done. The first worker holds the first chunk already."""
        left = deque(chunks)
        for _ in range(_QUEUED):
            for worker in self._workers:
                self._deal(worker, left)
        while busy := [worker for worker in self._workers if worker.chunks]:
            for worker in _heard(busy):
                chunk = worker.chunks[0]
                try:
                    finished = worker.answer()
                except Exception as error:
                    raise ChunkFailed(*chunk) from error
                worker.chunks.popleft()
                self._deal(worker, left)
                yield chunk, finished

    def _deal(self, worker: _Worker, left: deque[Chunk]) -> None:
        if left:
            chunk = left.popleft()
            worker.chunks.append(chunk)
            try:
                worker.call("run", *chunk)
            except WorkerTrouble as error:
                raise ChunkFailed(*worker.chunks[0]) from error

    def close(self) -> None:
        """Stop all workers and wait for them."""
        while self._workers:
            self._workers.pop().stop()


def _heard(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait a while for workers that answered or ended; what a worker started may hold the pipe of a dead one."""
    ready = wait([worker.connection for worker in workers], _LOOK_SECONDS)
    return [worker for worker in workers if worker.connection in ready or worker.process.poll() is not None]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
