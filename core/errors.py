"""Every error rbtool raises on purpose.

    RbtoolError                                  exit code
    ├── UsageError(ValueError)                    2
    ├── CheckFailed                               3
    ├── DatasetNotFoundError(FileNotFoundError)   4
    ├── NetworkError(ConnectionError)             5
    ├── AuthorisationError(PermissionError)       5
    ├── OutOfSpaceError(OSError)                  6
    ├── FormatError(ValueError)                   1
    │   └── CorruptDataError                      1
    ├── SchemaError(RuntimeError)                 1
    └── MissingKeyError(KeyError)                 1

Each inherits from the built-in error that general code would catch. A message is one
sentence: what was found, what was expected; `hint` is what to do about it, where there is something, and tracebacks
show it below the message. `did_you_mean` and `suggests_keywords` add the name that was probably meant.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""Control characters and line ends as a message shows them: names in damaged files may have any of them."""

_CAUGHT, _HINT = "Caught ", "hint: "
_NEXT_LINE, _IN_HINT = "\n" + " " * len(_HINT), "\0"


class RbtoolError(Exception):
    """Root of every error that rbtool raises on purpose.

    One that a worker of a `DataLoader` raised has the message and the hint that it had there, and the traceback of the
    worker as a note.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        if message.startswith(_CAUGHT) and (raised := _raised_in_worker(type(self), message)):
            message, hint, trace = raised
            self.add_note(trace)
        message = message.translate(_ESCAPES)
        super().__init__(message)
        self.message = message
        self._hint = ""
        self.hint = hint

    @property
    def hint(self) -> str:
        """What to do about it, "" where nothing is known; a note of the exception, so that tracebacks end with it."""
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        if self._hint:
            self.__notes__.remove(self.note)
        self._hint = hint
        if hint:
            self.add_note(self.note)

    @property
    def note(self) -> str:
        """The hint as a traceback shows it; its later lines are indented, which tells them from other notes."""
        return _HINT + self._hint.replace("\n", _NEXT_LINE)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def _raised_in_worker(kind: type[RbtoolError], text: str) -> tuple[str, str, str] | None:
    """Return message and hint of an error, and the traceback, from what torch makes of one that a worker raised.

    Torch calls the type of the error with this text: `Caught TYPE in DataLoader worker process 0.`, then `Original `
    and the traceback, whose end is the message and the notes.
    """
    where, _, trace = text.partition(".\nOriginal ")
    _, found, end = trace.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
    if not found:
        return None
    message, *notes = end.rstrip("\n").replace(_NEXT_LINE, _IN_HINT).split("\n")
    hint = next((note.removeprefix(_HINT) for note in notes if note.startswith(_HINT)), "").replace(_IN_HINT, "\n")
    trace = f"{trace.removesuffix(end)}{message}"
    return message, hint, f"raised {where.removeprefix(f'{_CAUGHT}{kind.__name__} ')}:\n{trace}"


def _rebuild(kind: type[RbtoolError], message: str, hint: str) -> RbtoolError:
    """Unpickle an error that crossed from a worker process."""
    return kind(message, hint=hint)


class UsageError(RbtoolError, ValueError):
    """The caller asked for something that has no meaning here."""

    exit_code = 2


class NoLengthError(UsageError, TypeError):
    """`len()` of something that never ends, or whose end is not known yet, was called."""


class WrongKindError(UsageError, TypeError):
    """A part of a buffer, or an argument, is of the wrong type."""


class UnsupportedError(UsageError, NotImplementedError):
    """An argument is not supported by this kind of buffer."""


class CheckFailed(RbtoolError):
    """A check or a comparison found problems in the data."""

    exit_code = 3


class DatasetNotFoundError(RbtoolError, FileNotFoundError):
    """No dataset, checkpoint or source at the place named."""

    exit_code = 4


class NetworkError(RbtoolError, ConnectionError):
    """A remote source could not be reached, or the network is forbidden."""

    exit_code = 5


class AuthorisationError(RbtoolError, PermissionError):
    """A remote source refused access."""

    exit_code = 5


class OutOfSpaceError(RbtoolError, OSError):
    """The file system, a quota or a file-size limit has no room for what was to be written."""

    exit_code = 6


class FormatError(RbtoolError, ValueError):
    """A file or folder is not what it was taken for, or contradicts itself."""


class CorruptDataError(FormatError):
    """Bytes are missing or differ from the digest recorded for them."""


class SchemaError(RbtoolError, RuntimeError):
    """Wrong dtype, shape, structure or capacity."""


class EmptyPartError(SchemaError):
    """A part of a stream has nothing to draw."""


class WorkerDiedError(RbtoolError, RuntimeError):
    """A worker of a loader ended."""


class MissingKeyError(RbtoolError, KeyError):
    """A key that was asked for is not there."""


def require_flags(**flags: object) -> None:
    """Raise UsageError unless each of these arguments is True or False: any text, also "no", would count as True."""
    for name, value in flags.items():
        # The bool of NumPy is named like Python's, or bool_; this module imports nothing.
        if type(value).__name__ not in ("bool", "bool_") and not (isinstance(value, int) and value in (0, 1)):
            raise UsageError(f"{name} is {value!r}, expected True or False")


def quiet() -> bool:
    """Whether warnings are disabled by TorchRL's variable `RL_WARNINGS=0`."""
    return os.environ.get("RL_WARNINGS", "1").lower() in {"0", "false", "no"}


_BETWEEN = {"rbtool", "torch", "tensordict", "concurrent", "contextlib", "functools", "threading"}
"""The packages whose code may be between a line of a user's and a warning."""


def warn_caller(message: str) -> None:
    """Warn (UserWarning) with the place of the line outside of rbtool that led here, however deep the call is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Write `; did you mean …?` for the known name that is nearest to `name`, "" where none comes near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6, whole: bool = False) -> str:
    """Find the known name that is nearest to `name`, "" where none comes near.

    `cutoff` is the least similarity, from 0 to 1. A dotted name is compared whole, then by its last part; the beginning
    of a name counts as near to it. Names are only compared `whole` if that is set.
    """
    from difflib import get_close_matches  # only errors need it

    names = {one.lower(): one for one in known}
    typed = name.lower()
    ends = {one.rpartition(".")[2]: one for one in names}
    near = get_close_matches(typed, names, n=1, cutoff=cutoff)
    if whole:
        return names[near[0]] if near else ""
    near = near or [ends[end] for end in get_close_matches(typed.rpartition(".")[2], ends, n=1, cutoff=0.75)]
    near = near or [one for one in names if typed and one.startswith(typed)]
    return names[near[0]] if near else ""


# Keyword arguments ----------------------------------------------------------------------------------


def suggests_keywords(*more: str) -> Callable[[_Function], _Function]:
    """Make a function name the argument that is nearest to a misspelt one, as Python itself does from 3.13 on.

    `more` are the names that the function takes through `**options`; for any other name it raises TypeError. What is
    declared as `bool`, or `bool | None`, has to be one: `force="no"` is UsageError.

    >>> @suggests_keywords()
    ... def halve(number, *, digits=2):
    ...     return round(number / 2, digits)
    >>> halve(3, digts=1)
    Traceback (most recent call last):
    TypeError: halve() got an unexpected keyword argument 'digts'; did you mean 'digits'?
    """

    def decorated(function: _Function) -> _Function:
        known = [*keywords_of(function), *more]
        kinds = function.__annotations__  # texts: all modules postpone their evaluation
        flags = [name for name in keywords_of(function) if kinds.get(name) in ("bool", "bool | None")]

        @functools.wraps(function)
        def call(*arguments: Any, **given: Any) -> Any:
            require_keywords(function.__name__, given, known)
            for name in flags:
                if name in given and not (given[name] is None and kinds[name] == "bool | None"):
                    require_flags(**{name: given[name]})
                    given[name] = bool(given[name])  # of NumPy's, no JSON can be written
            return function(*arguments, **given)

        call.__keywords__ = known  # type: ignore[attr-defined]
        return cast("_Function", call)

    return decorated


def require_keywords(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError, with the nearest name, for an argument of the function or class `name` that is not `known`."""
    for argument in given:
        if argument not in known:
            raise unknown_keyword(name, argument, known)


def refuse_misspelt(function: Callable[..., Any], given: Iterable[str], elsewhere: Collection[str]) -> None:
    """Raise TypeError for an argument that nearly is one of a function, which passes it on to what has `elsewhere`.

    Others are left to what they are passed on to: that may take more than its signature names.
    """
    known = keywords_of(function)
    for argument in given:
        if argument not in elsewhere and nearest(argument, known):
            raise unknown_keyword(function.__name__, argument, known)


def unknown_keyword(name: str, argument: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that the function or class `name` does not have."""
    return TypeError(f"{name}() got an unexpected keyword argument {argument!r}{did_you_mean(argument, known)}")


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that can be given to a function by keyword.

    For a class they are those of all its constructors: each passes on what it does not take itself.
    """
    if isinstance(function, type):
        makers = [vars(base)["__init__"] for base in function.__mro__ if "__init__" in vars(base)]
        return list(dict.fromkeys(name for one in makers for name in keywords_of(one)))
    declared = getattr(function, "__keywords__", None)
    if declared is not None:
        return list(declared)
    code = getattr(getattr(function, "__func__", function), "__code__", None)  # a built-in function has none
    if code is None:
        return []
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name not in ("self", "cls")]
