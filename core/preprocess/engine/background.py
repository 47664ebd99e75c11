"""Calls in background threads: one that nobody has to wait for, and a serial executor."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

__all__ = ["BackgroundCall", "SerialExecutor"]

_Found = TypeVar("_Found")


class BackgroundCall(Generic[_Found]):
    """A call that has begun. Unlike an executor's, nobody has to wait for it who does not ask what came of it."""

    def __init__(self, call: Callable[[], _Found]) -> None:
        self._future: Future[_Found] = Future()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], _Found]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def failed(self) -> bool:
        """Whether it has raised something by now."""
        return self._future.done() and self._future.exception() is not None

    def result(self) -> _Found:
        """Wait for what it returns, or raise what it raised."""
        return self._future.result()


class SerialExecutor:
    """Does calls one after the other in a thread of its own. Leaving the context drops those not begun and waits."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._calls: deque[Future[Any]] = deque()

    def do(self, call: Callable[..., object], *arguments: Any) -> None:
        """Do this after what came before; raises what one of those raised."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        self._calls.append(self._executor.submit(call, *arguments))

    def finish(self) -> None:
        """Wait until all is done; raises what one of them raised."""
        while self._calls:
            self._calls.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(cancel_futures=True)
