"""Processes for tests: scripts that run in forks, lines on a terminal, and Ray.

What the forking process has imported costs a script nothing. `Forked` forks this process; `Interpreter` forks one that
has imported a few modules, with an environment of its own.

    python processes.py MODULE...
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from waiting import HANG


class Forked:
    """A script that runs like `python -c SCRIPT ARGUMENTS...`, in a fork of this process."""

    def __init__(self, script: str, *arguments: object) -> None:
        self.returncode: int | None = None
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(script, [str(argument) for argument in arguments], [stream.fileno() for stream in self._streams])

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has been waited for."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the process to end, and return its exit code, or minus the number of the signal that ended it."""
        ends = time.monotonic() + HANG
        while self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > ends:
                raise TimeoutError(f"the script did not end in {HANG:g} s")
            else:
                time.sleep(0.002)
        return self.returncode

    def read(self) -> list[str]:
        """Return what was written to stdout and to stderr, and close both."""
        said = []
        for stream in self._streams:
            with stream:
                stream.seek(0)
                said.append(stream.read().decode())
        return said


def run_forked(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork of this process to its end."""
    process = Forked(script, *arguments)
    try:
        code = process.wait()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        out, err = process.read()
    return subprocess.CompletedProcess([script, *arguments], code, out, err)


class ChildError(Exception):
    """The error of a function in another process, as text."""


def in_a_child(act: Callable[..., Any], *arguments: Any, method: str = "fork") -> Any:
    """Call a function in another process, and return what it returned; raise `ChildError` if it failed."""
    context = multiprocessing.get_context(method)
    answers, told = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(told, act, *arguments))
    process.start()
    told.close()
    failed, said = answers.recv()
    process.join()
    if failed:
        raise ChildError(said)
    return said


def _tell(told: Any, act: Callable[..., Any], *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        told.send((False, act(*arguments)))
    except Exception as error:
        told.send((True, f"{type(error).__name__}: {error}"))


class Interpreter:
    """Runs scripts in forks of a process that has imported a few modules, with these variables; close it at the end."""

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, *modules],
            env=None if environment is None else dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, script: str, *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, in a folder and with these variables in place of those of the process."""
        words = [str(argument) for argument in arguments]
        asked = json.dumps([script, words, None if cwd is None else str(cwd), environment])
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{asked}\n".encode())
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the interpreter ended"
        return subprocess.CompletedProcess([script, *words], **json.loads(answer))

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


def _run(script: str, arguments: list[str], streams: list[int]) -> NoReturn:
    """Become the interpreter of a script, and end as that does."""
    code = 1
    try:
        for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # What the parent registered for its own end, such as the removal of temporary folders, is not for its fork.
        atexit._clear()
        finalizers: Any = weakref.finalize
        finalizers._registry.clear()
        finalizers._registered_with_atexit = False
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, ["-c", *arguments]
        code = _execute(script, main)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _execute(script: str, main: types.ModuleType) -> int:
    try:
        exec(compile(script, "<string>", "exec"), main.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0


def _serve(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        script, arguments, folder, environment = json.loads(line)
        if folder is not None:
            os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        done = run_forked(script, *arguments)
        print(json.dumps({"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}), flush=True)


QUESTION = "[y/N] "


def type_line(line: str, folder: Path, environment: Mapping[str, str], answer: str | None = "") -> tuple[int, str]:
    """Run a line of bash with all its streams on a terminal; return its code and all that was shown.

    Where it asks a question, `answer` is typed, and None interrupts it.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, answered = b"", False
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
        if not answered and shown.endswith(QUESTION.encode()):
            answered = True
            process.send_signal(signal.SIGINT) if answer is None else os.write(ours, answer.encode())
    os.close(ours)
    assert answered == (QUESTION in shown.decode())
    return process.wait(), shown.decode()


@contextlib.contextmanager
def two_cores() -> Iterator[Any]:
    """Start Ray and give its module; skip without it."""
    import pytest

    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
        yield ray
        ray.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1:])
