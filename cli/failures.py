"""Failures and exit codes, signals, and the standard streams of the process."""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from ..core.errors import OutOfSpaceError, RbtoolError
from .output import STDOUT, Output, detach

EXIT_CODES = """Exit codes:
  0    success, also when the reader of a pipe has closed it
  1    failed
  2    usage: unknown command or option, or an invalid value
  3    a check or a comparison found problems
  4    not found
  5    network or authorisation
  6    no space
  129  the terminal was closed (SIGHUP)
  130  interrupted (Ctrl-C)
  143  terminated"""
_HUNG_UP = 129
_OPEN_FILES = 8192
_RAISE = "raise the limit: ulimit -n 4096"
_NO_MEMORY = re.compile(
    r"can(?:'t|not) allocate memory|not enough memory|out of memory|unable to allocate|bad_alloc|failed to map segment",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"\b\d[\d.,]*\s?(?:[KMGTPE]?i?B|bytes)\b")
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ADVICE = {
    errno.EIO: "the disk or the file server failed: check it, then run the command again",
    errno.ESTALE: "the file server has another file there now: run the command again",
    errno.EROFS: "mount it for writing, or choose another place",
    errno.EXDEV: "the two places are on different file systems: choose another place",
    errno.ETIMEDOUT: "the file server does not answer: run the command again when it does",
}
"""What to do about errors of the system, by number."""
_REPLACED = re.compile(r"(?<![^/\s])\.(?P<name>[^/\s]+)\.\d+\.new\b")
_STAGED = re.compile(
    r"(?<![^/\s])\.(?P<name>[^/]+?)\.rbtool-(?:new|old)-[0-9a-f]{8}"
    r"(?:/(?:dataset|export)(?=[/:\s]|$))?(?P<inside>/[^/\s:]+(?![^\s:]))?"
)


class Stopped(BaseException):
    """Raised on a signal to stop, so that unwinding cleans up unfinished work."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Failure(NamedTuple):
    """An error as it is shown to the user."""

    type: str
    message: str
    hint: str
    exit_code: int


def report(error: BaseException, out: Output) -> int:
    """Report an error to the user and return the exit code."""
    from ..core.progress import redact

    failure = _failure(error)
    logging.getLogger("rbtool").debug("failed", exc_info=error, extra={"shown": True})
    trace = redact(_trace(error)) if out.debug else ""
    message, hint = (redact(as_given(text, sys.argv[1:])) for text in (failure.message, failure.hint))
    out.fail(failure._replace(message=message, hint=hint)._asdict(), trace)
    return failure.exit_code


def as_given(text: str, words: Sequence[str]) -> str:
    """Replace absolute paths in `text` by the relative names that `words`, the arguments of the command, have for them.

    A user who types `./data` sees `./data/action.memmap` in an error, not `/home/me/project/data/action.memmap`.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):  # the current folder is gone
        for word in words:
            for name in (word, word.partition("=")[2], word.rpartition(":")[0]):
                shown = "" if name.startswith(("-", "/")) else name.rstrip("/")
                while shown:
                    found |= {os.path.abspath(shown): shown, os.path.realpath(shown): shown}
                    shown = shown.rpartition("/")[0]
    found.pop("/", None)
    if not found:
        return text
    places = "|".join(re.escape(place) for place in sorted(found, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{places})(?![\w-]|\.\w)", lambda place: found[place[0]], text)


def _trace(error: BaseException) -> str:
    """Format the traceback of an error without its hint, which is shown apart."""
    found = traceback.TracebackException.from_exception(error)
    notes: list[str] = list(found.__notes__ or ())
    if isinstance(error, RbtoolError) and error.note in notes:
        notes.remove(error.note)
    found.__notes__ = notes
    return "".join(found.format())


def _failure(error: BaseException) -> Failure:
    if isinstance(error, RbtoolError):
        message = final_names(str(error)) if isinstance(error, OutOfSpaceError) else str(error)
        return Failure(type(error).__name__, message, error.hint, error.exit_code)
    failure = _of_others(error)
    return failure._replace(hint="; ".join(filter(None, (failure.hint, _noted(error)))))


def _of_others(error: BaseException) -> Failure:
    """Describe an error that is not an RbtoolError, without the hint among its notes."""
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return Failure("Interrupted", "interrupted", "", 130)
    if isinstance(error, Stopped):
        message = "the terminal was closed" if error.exit_code == _HUNG_UP else "terminated"
        return Failure("Terminated", message, "", error.exit_code)
    if hasattr(error, "format_message"):  # raised by Typer for arguments it cannot parse
        return _usage(error)
    if _is_memory(error):
        return _out_of_memory(error)
    if isinstance(error, OSError) and error.errno not in {None, errno.EPIPE}:
        return _of_system(error)
    message = " ".join(str(error).split())
    return Failure(
        kind, f"internal error: {kind}{f': {message}' if message else ''}", "add --debug for the traceback", 1
    )


def _noted(error: BaseException) -> str:
    """Return the hint among the notes of an error that is not an RbtoolError; "" for none."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith("hint: "))
    return next(notes, "").removeprefix("hint: ")


def _is_memory(error: BaseException) -> bool:
    """Return whether memory ran out: NumPy and Arrow raise MemoryError, torch RuntimeError, and imports ImportError."""
    matched = isinstance(error, RuntimeError | ImportError) and _NO_MEMORY.search(str(error))
    return (
        isinstance(error, MemoryError) or bool(matched) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


def _out_of_memory(error: BaseException) -> Failure:
    needed = _AMOUNT.search(str(error))
    message = f"out of memory{f': {needed[0]} more needed' if needed else ''}"
    return Failure("MemoryError", message, "free some memory, or raise the limit: ulimit -v", 1)


def _of_system(error: OSError) -> Failure:
    message, no_space = os.strerror(error.errno or 0).lower(), error.errno in _NO_SPACE
    known = OutOfSpaceError if no_space else type(error)
    code = OutOfSpaceError.exit_code if no_space else 1
    if error.filename == STDOUT:
        return Failure(known.__name__, f"{STDOUT} cannot be written: {message}", "", code)
    where = final_names(f"{error.filename}: ") if error.filename else ""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return Failure(known.__name__, f"{where}too many open files (limit {limit})", _RAISE, code)
    advice = "free some space and run it again" if no_space else _ADVICE.get(error.errno or 0, "")
    return Failure(known.__name__, f"{where}{message}", advice, code)


def final_names(message: str) -> str:
    """Replace the hidden paths in which `Staging` builds results by their destinations."""

    def final(found: re.Match[str]) -> str:
        name, inside = found["name"], found["inside"] or ""
        is_file = "." in name and name.rpartition(".")[2] == inside.rpartition(".")[2]
        return name if is_file else name + inside

    return _STAGED.sub(final, _REPLACED.sub(r"\g<name>", message))


_ELSEWHERE = {
    "--frame-stack": "datasets store each frame once, and stacks are made as they are read: rbtool sample "
    "--frame-stack N, or the transform rbtool.StoredFrameStack(N, KEY) of a buffer"
}
"""Options that users look for in a verb that lacks them, and the alternative."""


def _usage(error: Any) -> Failure:
    message = _missing(error) or _extra(error) or error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path} --help" if context else ""
    if context and _extra(error) and any("--dest" in one.opts for one in context.command.params):
        hint = f"the destination is an option: --dest DEST; {hint}"
    if context and _extra(error) and context.command.name == "convert":
        hint = f"quote a pattern, or the shell replaces it by all matching names: 'runs/*.csv'; {hint}"
    if (elsewhere := _ELSEWHERE.get(getattr(error, "option_name", ""))) is not None:
        hint = f"{elsewhere}; {hint}"
    return Failure("UsageError", message, hint, 2)


def _extra(error: Any) -> str:
    """Return a sentence that names superfluous arguments; "" for any other error."""
    found = re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", error.format_message(), re.DOTALL)
    return f"too many arguments: {found[1]}" if found else ""


def _missing(error: Any) -> str:
    """Return a sentence that names a missing option and its choices; "" for any other error."""
    option: Any = getattr(error, "param", None)
    if type(error).__name__ != "MissingParameter" or option is None or option.param_type_name != "option":
        return ""
    wanted = option.type_descriptor.annotation
    is_choice = isinstance(wanted, type) and issubclass(wanted, enum.Enum)
    words = [str(word.value) for word in wanted] if is_choice else []
    choice = f": {', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else ""
    return f"{option.opts[0]} is missing{choice}"


def watch_signals() -> None:
    """Turn SIGINT, SIGTERM and SIGHUP into exceptions, so that unwinding cleans up.

    Signals that the parent process ignores (nohup) stay ignored; child processes are not affected.
    """
    here = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != here:
            os._exit(128 + number)
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, stop)
    if sys.platform == "win32" and hasattr(signal, "SIGBREAK"):
        signal.signal(signal.SIGBREAK, stop)


def allow_open_files() -> None:
    """Raise the soft limit on open files as far as the system allows: each column of a dataset is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def claim_streams() -> None:
    """Open the standard streams that the process was started without (`>&-`) as the null device.

    Otherwise the first opened files get their descriptors, and receive what other libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr within the context, also for C libraries and child processes."""
    import ctypes  # few verbs need it

    sys.stdout.flush()
    _saved_stdout.append(os.dup(1))
    try:
        os.dup2(2, 1)
        yield
    finally:
        try:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(_saved_stdout[-1], 1)
            os.close(_saved_stdout.pop())


_saved_stdout: list[int] = []


def _close_saved_stdout() -> None:
    """Close the saved stdout in a forked child: left open, it keeps the reader of a pipe waiting."""
    while _saved_stdout:
        os.close(_saved_stdout.pop())


os.register_at_fork(after_in_child=_close_saved_stdout)


def release_streams() -> OSError | None:
    """Flush both streams for the last time; return the error, unless the reader of a pipe has closed it."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            detach(stream)
            error.filename = STDOUT
            failed = error if stream is sys.stdout and error.errno != errno.EPIPE else failed
    return failed
