"""A process with torch imported, and nothing else in it, that forks worker processes on request.

It is asked through a socket: a zero, with the worker's end of its pipe and a descriptor, begins a worker, and the
worker's number kills it. Through the descriptor go the worker's number and, once it has ended, how.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from ..processor import Job
from .processes import (
    STOP_SECONDS,
    ChildProcess,
    ProcessStarter,
    WorkerProcess,
    ending_of,
    fork,
    kill_group,
    launch,
    reaped,
)
from .worker import START, import_runner, serve

__all__ = ["ForkServerStarter", "main"]

_NUMBER = struct.Struct("<q")
_NEW = 0


class ForkServerStarter(ProcessStarter):
    """Has members forked by a server, which is started anew if it should be lost."""

    def __init__(self, job: Job) -> None:
        self.greeting = pickle.dumps((START, (job,)))
        self._server = _server()

    def start(self) -> WorkerProcess:
        if self._server.ending() is not None:
            self._server.stop()
            self._server = _server()
        return _ServerChild(self._server)

    def close(self) -> None:
        self._server.stop()


def _server() -> ChildProcess:
    return ChildProcess(lambda theirs: launch(__name__, theirs.fileno()))


class _ServerChild(WorkerProcess):
    """A child of the server, which tells what becomes of it."""

    def __init__(self, server: ChildProcess) -> None:
        super().__init__()
        self._server = server
        self._pid: int | None = None
        self._ending: str | None = None
        self.sentinel, news = os.pipe()
        os.set_blocking(self.sentinel, False)
        with contextlib.suppress(OSError):  # a server that has ended is noticed where its news are read
            self._ask(_NEW, (self._theirs.fileno(), news))
        self._theirs.close()
        os.close(news)

    def _ask(self, number: int, descriptors: Sequence[int] = ()) -> None:
        control = socket.socket(fileno=self._server.connection.fileno())
        try:
            socket.send_fds(control, [_NUMBER.pack(number)], descriptors)
        finally:
            control.detach()

    def ending(self) -> str | None:
        while self._ending is None and (number := self._news()) is not None:
            if self._pid is None:
                self._pid = number
            else:
                self._set_ending(ending_of(number))
        return self._ending

    def _news(self) -> int | None:
        assert self.sentinel is not None, "open until the ending is known"
        try:
            data = os.read(self.sentinel, _NUMBER.size)
        except BlockingIOError:
            return None
        if data:
            number: int = _NUMBER.unpack(data)[0]
            return number
        if self._pid is None:
            self._set_ending("could not be forked")
        else:
            kill_group(self._pid)
            _wait_for(self._pid)
            self._set_ending("was lost with the process that it was forked from")
        return None

    def _set_ending(self, ending: str) -> None:
        assert self.sentinel is not None, "only once"
        os.close(self.sentinel)
        self._ending, self.sentinel = ending, None

    def kill(self) -> None:
        if self.ending() is None and self._pid is not None:
            try:
                self._ask(self._pid)
            except OSError:
                kill_group(self._pid)

    def stop(self) -> None:
        self.connection.close()  # whoever is forked only now, or has lost its server, ends by that
        self.kill()
        if self._pid is not None:
            super().stop()


def _wait_for(pid: int) -> None:
    """Wait for a process that is not ours."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            wait([descriptor], STOP_SECONDS)
            os.close(descriptor)


def main(descriptor: int) -> NoReturn:
    """Fork workers as the parent at the other end of `descriptor` asks for them, until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and decides
    os.set_inheritable(descriptor, False)
    import_runner()
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # it only has to wake us
    control = socket.socket(fileno=descriptor)
    forked: dict[int, int] = {}
    while True:
        ready = wait([control, awake])
        if awake in ready:
            os.read(awake, 4096)
            _report_exits(forked)
        if control in ready:
            _serve_request(control, forked, (awake, wake))


def _serve_request(control: socket.socket, forked: dict[int, int], ours: Sequence[int]) -> None:
    data, descriptors, _, _ = socket.recv_fds(control, _NUMBER.size, 2)
    if not data:
        os._exit(0)
    number: int = _NUMBER.unpack(data)[0]
    if number in forked:
        kill_group(number)
    if number != _NEW:
        return
    pipe, news = descriptors
    os.set_inheritable(pipe, False)
    os.set_inheritable(news, False)
    with contextlib.suppress(OSError):  # too many processes: the news end without a number
        pid = fork(lambda: serve(Connection(pipe)), (control.fileno(), news, *ours, *forked.values()))
        forked[pid] = news
        _write(news, pid)
    os.close(pipe)
    if news not in forked.values():
        os.close(news)


def _report_exits(forked: dict[int, int]) -> None:
    for pid, news in list(forked.items()):
        code = reaped(pid)
        if code is not None:
            _write(news, code)
            os.close(news)
            del forked[pid]


def _write(news: int, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know any more
        os.write(news, _NUMBER.pack(number))
