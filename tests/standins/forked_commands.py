"""An `rbtool` that is forked from a process which has imported everything, for tests that run it hundreds of times.

    python forked_commands.py SOCKET

`commands` starts such a process and writes a command `rbtool` into a folder to put in front of PATH: it hands its
words, folder, variables and streams over and ends with the code that comes back. Signals, terminals and streams that
are closed are no business of it; what is imported, and when, is not seen.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

__all__ = ["commands"]

_SOCKET = "server.sock"
_LARGEST = 1 << 17
_MODULES = (
    "torch", "tensordict", "h5py", "rbtool.cli.app", "rbtool.converters.minari", "rbtool.core.buffers",
    "rbtool.core.samplers", "rbtool.core.verbs.checkpoint", "rbtool.core.verbs.preprocess",
)  # fmt: skip
_CLIENT = """#!{python} -ISE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({place!r})
    asked = [sys.argv[1:], os.getcwd(), dict(os.environ)]
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"1"))
"""


@contextlib.contextmanager
def commands(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Serve `rbtool` in `folder`, a short path; what is imported sees these variables."""
    command = folder / "rbtool"
    command.write_text(_CLIENT.format(python=sys.executable, place=str(folder / _SOCKET)))
    command.chmod(0o755)
    words = [sys.executable, __file__, str(folder / _SOCKET)]
    # Pipes, as every command then has other streams in their places: of a file, Python remembers that it can seek.
    with subprocess.Popen(
        words, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        said = next((line for line in server.stdout if line == b"ready\n"), None)
        assert said, "the process with everything imported did not start"
        try:
            yield folder
        finally:
            server.terminate()


def _serve(place: str) -> NoReturn:
    for name in _MODULES:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(place)
        listening.listen(16)
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _run(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _run(connection: socket.socket) -> NoReturn:
    """Become the command that is asked for, and tell its code."""
    asked, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
    words, folder, variables = json.loads(asked)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["rbtool", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object = 1
    try:
        importlib.import_module("rbtool.cli.app").main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        atexit._run_exitfuncs()
        connection.send(str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
