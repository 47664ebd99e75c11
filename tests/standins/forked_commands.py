"""Commands that are forked from a process which has imported everything, for tests that run them hundreds of times.

    python forked_commands.py SOCKET

`folder_of_commands` starts such a process, once, and returns a folder to put in front of PATH with `rbtool`, `stream`,
which runs `streaming.py`, and `ask`, which runs `asking.py` with every warning an error. A command sends its words,
folder, variables and streams to the process and ends with the code that comes back. Use the real command where a test
needs signals, a terminal or closed streams, or looks at what is imported, and when. A fresh process takes up to 6 s, a
forked one 0.1 s.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

__all__ = ["folder_of_commands"]

_SOCKET = "server.sock"
_LARGEST = 1 << 17
_MODULES = (
    "torch", "tensordict", "h5py", "rbtool.cli.app", "rbtool.converters.minari.reader",
    "rbtool.core.buffers.tensordict", "rbtool.core.samplers.prioritized",
    "rbtool.core.samplers.slices", "rbtool.core.verbs.checkpoint", "rbtool.core.preprocess.preprocess",
    "rbtool.core.verbs.download", "anyio", "filelock", "httpcore2", "httpx2", "pyarrow.dataset", "tenacity", "yaml",
)  # fmt: skip
_FRESH = ("huggingface_hub", "minari")
"""What reads the variables when it is imported: each command imports it."""
_COMMANDS = {"rbtool": "rbtool.cli.app", "ask": "asking", "stream": "streaming"}
_CLIENT = """#!{python} -ISE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({place!r})
    asked = [{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"1"))
"""


@functools.cache
def folder_of_commands(preloaded: str = "") -> Path:
    """Start the process, which ends with this one, and return the folder; `preloaded` is a library for its loader."""
    folder = Path(tempfile.mkdtemp())  # the path of a socket has to be short
    for name in _COMMANDS:
        (folder / name).write_text(_CLIENT.format(python=sys.executable, place=str(folder / _SOCKET), name=name))
        (folder / name).chmod(0o755)
    theirs = ("RBTOOL_", "MINARI_", "HF_", "HUGGINGFACE_", "COV_", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    # Pipes, as every command then has other streams in their places: of a file, Python remembers that it can seek.
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder / _SOCKET)],
        env=environment | {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": preloaded} if preloaded else {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    atexit.register(_end, server, folder)
    assert server.stdout is not None
    printed = next((line for line in server.stdout if line == b"ready\n"), None)
    assert printed, "the process with everything imported did not start"
    return folder


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    with server:
        server.terminate()
    shutil.rmtree(folder, ignore_errors=True)


def _serve(place: str) -> NoReturn:
    for name in _MODULES:
        importlib.import_module(name)
    read_early = [name for name in _FRESH if name in sys.modules]
    assert not read_early, read_early
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(place)
        listening.listen(16)
        gc.freeze()  # collections in a child then copy no pages of what is imported
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
    name, words, folder, variables = json.loads(asked)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [name, *words]
    if name == "ask":
        warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object = 1
    try:
        importlib.import_module(_COMMANDS[name]).main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
        connection.send(str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
