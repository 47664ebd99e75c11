"""What a worker process does: answer the calls that come through its pipe, one after the other."""

from __future__ import annotations

import os
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from ..errors import RbtoolError
from .failures import FunctionFailed, ResultRefused, WorkerTrouble, error_text

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve the parent at the other end of `descriptor` until it hangs up.

    A call is a method of `ChunkRunner` and its arguments; the first one makes the runner. An answer is the value
    returned, or the exception raised.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and decides
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    serving = _Serving()
    while True:
        method, arguments = calls.get()
        connection.send(serving.answer(method, arguments))


def _listen(connection: Connection, calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Hear calls, and the end of the parent even while the user's function runs."""
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


class _Serving:
    """The runner behind the calls; torch is first imported when it is made."""

    def __init__(self) -> None:
        self._runner: Any = None

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            if method == "start":
                return self._start(*arguments)
            return getattr(self._runner, method)(*arguments)
        except (RbtoolError, OSError, FunctionFailed, ResultRefused) as error:
            return error
        except BaseException as error:
            return WorkerTrouble(error_text(error), traceback.format_exc())

    def _start(self, job: Any) -> None:
        import torch

        from .runner import ChunkRunner

        torch.set_num_threads(1)
        self._runner = ChunkRunner(job)
