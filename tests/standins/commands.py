"""Commands that are forked from a process which has imported everything, for tests that run them hundreds of times.

    python commands.py SOCKET

`folder_of_commands` starts such a process, once, and returns a folder to put in front of PATH with `rbtool`, `stream`,
which runs `streaming.py`, `ask`, which runs `main` below with every warning an error, and `script`, which runs its
first word as `python -c` does. A command sends its words, folder, variables and streams to the process and ends with
the code that comes back. Use the real command where a test needs signals or closed streams, or looks at what is
imported, and when. A fresh process takes up to 6 s, a forked one 0.1 s.

`ask` asks a hub, a bucket or a source in such a process, whose environment is set before any of them: `main` reads what
to do from stdin and prints the outcomes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import json
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from waiting import HANG

_SOCKET = "server.sock"
_LARGEST = 1 << 17
_MODULES = (
    "torch", "tensordict", "h5py", "rbtool.cli.app", "rbtool.converters.minari.reader",
    "rbtool.core.buffers.tensordict", "rbtool.core.samplers.prioritized",
    "rbtool.core.samplers.slices", "rbtool.core.verbs.checkpoint", "rbtool.core.preprocess.preprocess",
    "rbtool.core.verbs.download", "anyio", "filelock", "httpcore2", "httpx2", "pyarrow.dataset", "tenacity", "yaml",
    "rbtool.converters.export.reader", "rbtool.converters.files.exports", "rbtool.converters.files.pickles",
    "rbtool.converters.minari.store", "rbtool.core.datasets.mixtures", "rbtool.core.preprocess.operations.built_in",
    "rbtool.core.torchrl.reader", "rbtool.core.torchrl.writer", "rbtool.core.transforms.windows",
    "rbtool.core.verbs.check", "rbtool.core.verbs.inspect", "rbtool.core.verbs.list", "rbtool.core.verbs.sample",
    "rbtool.core.verbs.saved_buffers", "rbtool.core.verbs.stats", "rich.console", "rich.progress", "rich.table",
    "rbtool.core.datasets.load_dataset", "rbtool.core.remote.folders", "rbtool.core.streams.shards",
    "rbtool.core.transforms.video", "av",
)  # fmt: skip
_FRESH = ("huggingface_hub", "minari")
"""What reads the variables when it is imported: each command imports it."""
_COMMANDS = {"rbtool": "rbtool.cli.app", "ask": "commands", "stream": "streaming"}
# Only what is compiled into Python: to import `socket` takes longer than to run a short command.
_CLIENT = """#!{python} -ISE
import _socket, marshal, posix, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect({place!r})
asked = [{name!r}, sys.argv[1:], posix.getcwd(), posix.environ]
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
server.sendmsg([marshal.dumps(asked)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
code = int(server.recv(16) or b"1")
server.recv(1)
posix._exit(code)
"""


@functools.cache
def folder_of_commands(preloaded: str = "") -> Path:
    """Start the process, which ends with this one, and return the folder; `preloaded` is a library for its loader."""
    folder = Path(tempfile.mkdtemp())  # the path of a socket has to be short
    for name in (*_COMMANDS, "script"):
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
    # Typer makes all commands from their signatures whenever it is called, and torch takes its operators apart at the
    # end of a process: of the time of a short command, a third each.
    typer_main: Any = importlib.import_module("typer.main")
    typer_main.get_command = functools.cache(typer_main.get_command)
    typer_main.get_command(importlib.import_module("rbtool.cli.app").app)
    finalizers: Any = weakref.finalize
    finalizers._registry.clear()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(place)
        listening.listen(16)
        gc.freeze()  # collections in a child then copy no pages of what is imported
        print("ready", flush=True)
        ended, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking)
        running: dict[int, socket.socket] = {}
        while True:
            ready, _, _ = select.select([listening, ended], [], [])
            if listening in ready:
                connection, _ = listening.accept()
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (ended, waking):
                        os.close(descriptor)
                    for other in (listening, *running.values()):
                        other.close()
                    _run(connection)
                running[child] = connection
            if ended in ready:
                os.read(ended, 1 << 16)
            while running and (over := os.waitpid(-1, os.WNOHANG)[0]):
                running.pop(over).close()


def _run(connection: socket.socket) -> NoReturn:
    """Become the command that is asked for, and tell its code.

    The server closes its side of the connection when the process has ended, and with it what the command has locked is
    free: threads that still fetch keep files open for a moment after the first thread has closed the connection.
    """
    asked, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
    name, words, folder, variables = marshal.loads(asked)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environb.update(variables)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [name, *words]
    if name == "ask":
        warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object = 1
    try:
        if name == "script":
            sys.argv = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
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


def run_command(
    environment: Mapping[str, str],
    name: str,
    *words: object,
    given: str = "",
    cwd: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run one of the commands with these variables; `given` is its stdin, and it has to succeed where that is checked.

    No other process is started for it.
    """
    asked = [name, [str(word) for word in words], str(cwd or Path.cwd()), _encoded(environment)]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write(given.encode())
        streams[0].seek(0)
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        server.settimeout(HANG)
        server.connect(str(folder_of_commands() / _SOCKET))
        socket.send_fds(server, [marshal.dumps(asked)], [stream.fileno() for stream in streams])
        code = int(server.recv(16) or b"1")
        server.recv(1)
        for stream in streams[1:]:
            stream.seek(0)
        out, err = (stream.read().decode() for stream in streams[1:])
    assert not check or code == 0, err
    return subprocess.CompletedProcess(asked[1], code, out, err)


def _encoded(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}


_VARIABLES = {"RBTOOL_RETRIES": "3:0.01", "RBTOOL_TIMEOUT": str(HANG)}


@dataclasses.dataclass(frozen=True)
class Failed:
    """An error that rbtool raised on purpose, with the names of its types."""

    types: list[str]
    message: str
    hint: str


def ask(environment: Mapping[str, str], made: str, *calls: list[Any], arguments: tuple[str, ...] = ()) -> list[Any]:
    """Make a `hub`, a `bucket` or a `source:NAME` (`source` is Minari's), call its methods, and return their results.

    What a call raised on purpose is Failed. Nothing may reach stderr, and the token must be in nothing that is said.
    """
    order = json.dumps({"made": made, "arguments": arguments, "calls": calls})
    ran = run_command({**_VARIABLES, **environment}, "ask", given=order)
    assert not ran.stderr, ran.stderr
    assert environment.get("HF_TOKEN", "no token") not in ran.stdout
    outcomes = json.loads(ran.stdout)
    return [Failed(**outcome["failed"]) if "failed" in outcome else outcome["result"] for outcome in outcomes]


def ask_one(environment: Mapping[str, str], made: str, *call: Any, arguments: tuple[str, ...] = ()) -> Any:
    """Make one call and return what it returned, or Failed."""
    return ask(environment, made, list(call), arguments=arguments)[0]


def failed(outcome: object, kind: str) -> Failed:
    """Return the failure if the outcome is one of that type."""
    assert isinstance(outcome, Failed), outcome
    assert kind in outcome.types, outcome
    return outcome


def main() -> None:
    """Do what stdin says."""
    from rbtool.core.errors import RbtoolError

    order = json.load(sys.stdin)
    outcomes: list[dict[str, Any]] = []
    with _make(order["made"], order["arguments"]) as made:
        for name, *arguments in order["calls"]:
            try:
                outcomes.append({"result": _call(made, name, arguments)})
            except RbtoolError as error:
                types = [kind.__name__ for kind in type(error).__mro__]
                outcomes.append({"failed": {"types": types, "message": error.message, "hint": error.hint}})
    print(json.dumps(outcomes, default=dataclasses.asdict))


def _make(what: str, arguments: list[str]) -> Any:
    from rbtool.core.format.locate import source_class
    from rbtool.core.remote.bucket import Bucket
    from rbtool.core.remote.hub import Hub

    makers: dict[str, Any] = {"hub": Hub, "bucket": Bucket, "source": source_class("minari"), "toys": _toys}
    kind, _, name = what.partition(":")
    return (source_class(name) if name else makers[kind])(*arguments)


def _toys() -> Any:
    """A source of folders in the repository `acme/toys`, whose ids are paths below `kinds`."""
    from rbtool.core.remote.hub import HubFolderSource

    return type("Toys", (HubFolderSource,), {
        "name": "toys", "repository": "acme/toys", "folder": "kinds", "suffixes": (".h5", ".npz"),
    })()  # fmt: skip


def _call(made: Any, name: str, arguments: list[Any]) -> Any:
    if name in _OWN:
        return _OWN[name](made, *arguments)
    found = getattr(made, name)
    return found(*arguments) if callable(found) else found


def _read(transport: Any, address: str, limit: int = 1 << 20) -> str:
    """Text of a small file."""
    from rbtool.core.remote.transport import read_small

    return read_small(transport, address, limit=limit).decode()


def _digest_of(bucket: Any, index: int, offset: int, how: str = "once") -> str:
    """SHA-256 of what comes from an offset on of an object, by its place in the list."""
    from rbtool.core.remote.transport import retrying

    listed = bucket.objects()[index]

    def read() -> str:
        digest = hashlib.sha256()
        with bucket.open(listed.address, offset) as (start, blocks):
            for block in blocks:
                digest.update(block)
        assert start == offset
        return digest.hexdigest()

    return retrying(read) if how == "retried" else read()


def _describe(source: Any, dataset_id: str, revision: str | None = None) -> Any:
    """A dataset with its steps and episodes."""
    return source.describe(dataset_id, revision, totals=True)


def _fetch(source: Any, dataset_id: str, folder: str, episodes: str | None = None) -> dict[str, Any]:
    """Fetch what is needed of a dataset; return it and how many bytes were heard of."""
    from rbtool.core.format.episodes import parse_episodes

    found = source.describe(dataset_id, totals=True)
    files = source.needed(found, parse_episodes(episodes) if episodes else None)
    heard: list[int] = []
    source.fetch(files, Path(folder), progress=heard.append)
    return {"dataset": found, "files": [file.path for file in files], "heard": sum(heard)}


def _fetch_again(source: Any, files: list[dict[str, Any]], folder: str) -> None:
    """Fetch files that were described some time ago."""
    from rbtool.core.format.converter import RemoteFile

    listed = [RemoteFile(**{**file, "addresses": tuple(file["addresses"])}) for file in files]
    source.fetch(listed, Path(folder))


def _catalogue_twice(source: Any) -> dict[str, Any]:
    """List all, and once more with what is known from the first time; `heard` is the progress of the first."""
    heard: list[tuple[int, int]] = []
    first = source.catalogue(progress=lambda done, total: heard.append((done, total)))
    return {"first": first, "second": source.catalogue(first), "heard": heard}


_OWN = {
    "describe": _describe,
    "read": _read,
    "digest_of": _digest_of,
    "fetch_dataset": _fetch,
    "fetch_listed": _fetch_again,
    "catalogue_twice": _catalogue_twice,
}


if __name__ == "__main__":
    _serve(sys.argv[1])
