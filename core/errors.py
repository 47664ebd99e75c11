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

Each class also inherits from the built-in error that general code would catch. A message is one sentence: what was
found, and what was expected. `hint` says what to do about it, if there is something to do; tracebacks show it below the
message. `did_you_mean` and `suggests_keywords` add the name that was probably meant.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from numbers import Real
from types import FunctionType
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""How messages show control characters and line ends, which names in damaged files may contain."""

_CAUGHT, _HINT = "Caught ", "hint: "
_NEXT_LINE, _IN_HINT = "\n" + " " * len(_HINT), "\0"


class RbtoolError(Exception):
    """Root of every error that rbtool raises on purpose.

    An error that a worker process of a `DataLoader` raised arrives with its original message and hint, and with the
    worker's traceback as a note.

    Args:
        message: one sentence: what was found, and what was expected.
        hint: what to do about it.
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
        """What to do about the error, or "". It is also a note of the exception, so that tracebacks end with it."""
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
    """Recover message, hint and traceback of an error that a worker of a `DataLoader` raised.

    Torch creates a new error of the same type from a text: `Caught TYPE in DataLoader worker process 0.`, then
    `Original ` and the traceback, which ends with the message and the notes.
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
    """Recreate an unpickled error, for example one from a worker process."""
    return kind(message, hint=hint)


class UsageError(RbtoolError, ValueError):
    """The caller asked for something that makes no sense here."""

    exit_code = 2


class NoLengthError(UsageError, TypeError):
    """`len()` was called on something that never ends, or whose end is not known yet."""


class WrongKindError(UsageError, TypeError):
    """An argument, such as a part of a buffer, has the wrong type."""


class UnsupportedError(UsageError, NotImplementedError):
    """This kind of buffer does not support an argument."""


class CheckFailed(RbtoolError):
    """A check or a comparison found problems in the data."""

    exit_code = 3


class DatasetNotFoundError(RbtoolError, FileNotFoundError):
    """A dataset, checkpoint or source does not exist."""

    exit_code = 4


class NetworkError(RbtoolError, ConnectionError):
    """A remote source could not be reached, or network access is forbidden."""

    exit_code = 5


class AuthorisationError(RbtoolError, PermissionError):
    """A remote source refused access."""

    exit_code = 5


class OutOfSpaceError(RbtoolError, OSError):
    """The disk is full, or a quota or file-size limit was reached."""

    exit_code = 6


class FormatError(RbtoolError, ValueError):
    """A file or folder does not have the expected format, or contradicts itself."""


class CorruptDataError(FormatError):
    """Bytes are missing or differ from the digest recorded for them."""


class SchemaError(RbtoolError, RuntimeError):
    """Data have the wrong dtype, shape or structure, or exceed a capacity."""


class EmptyPartError(SchemaError):
    """A part of a stream has no elements to draw."""


class WorkerDiedError(RbtoolError, RuntimeError):
    """A worker process of a loader died."""


class MissingKeyError(RbtoolError, KeyError):
    """A requested key does not exist."""


def not_installed(
    needs: str, extra: str, error: ImportError, kind: type[RbtoolError] = UsageError, hint: str = ""
) -> RbtoolError:
    """Return the error for a library that cannot be imported; `needs` is its start, like "video needs PyAV".

    The hint is how to install `extra`, unless another `hint` is given.
    """
    return kind(f"{needs}, which is not installed here ({error})", hint=hint or f"pip install 'rbtool[{extra}]'")


def require_flags(**flags: object) -> None:
    """Raise UsageError unless each of these arguments is True or False; a text such as "no" would count as True."""
    for name, value in flags.items():
        as_kind(name, value, {"bool"})


def require_number(name: str, value: Any, least: int, of: str = "") -> int:
    """Return an argument that is a whole number from `least` on; UsageError for others, with `of` as what it counts."""
    number = as_int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{name} is {value!r}, expected a number {of and f'of {of} '}from {least}")
    return number


def as_int(value: Any) -> Any:
    """Return an integer of NumPy or torch as an int, and anything else unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def require_seed(seed: Any) -> int:
    """Return a seed that is an integer of 64 bits without sign, of any library; UsageError for anything else."""
    number = as_int(seed)
    if not isinstance(number, int) or not 0 <= number < 1 << 64:
        raise UsageError(f"the seed is {seed!r}, expected an unsigned 64-bit number")
    return number


def require_share(name: str, value: Any) -> float:
    """Return an argument that is a number from 0 to 1; UsageError for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise UsageError(f"{name} is {value!r}, expected a number from 0 to 1")
    return float(value)


def require_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise UsageError unless an argument is one of these texts."""
    if value not in choices:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def quiet() -> bool:
    """Return whether TorchRL's environment variable `RL_WARNINGS=0` turns warnings off."""
    return os.environ.get("RL_WARNINGS", "1").lower() in {"0", "false", "no"}


_BETWEEN = {"rbtool", "torch", "tensordict", "concurrent", "contextlib", "functools", "threading"}
"""Packages whose frames `warn_caller` skips while it looks for the user's line."""


def warn_caller(message: str) -> None:
    """Issue a UserWarning that points to the user's line, the nearest one on the call stack outside of rbtool."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the known name closest to `name`, or "" if none is similar."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6, whole: bool = False) -> str:
    """Return the known name closest to `name`, or "" if none is similar.

    A dotted name is compared as a whole, then by its last part; a prefix of a name counts as similar, too.

    Args:
        name: the name that was typed.
        known: the names that exist.
        cutoff: the least similarity, from 0 to 1.
        whole: only compare names as a whole.
    """
    from difflib import get_close_matches  # imported late: only errors need it

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
    """Decorate a function so that a misspelt keyword argument raises a TypeError with a suggestion.

    Python 3.13 does so by itself. `more` are names that the function accepts through `**options`; any other name is
    refused. An argument annotated as `bool`, `int`, `float`, `str` or `Sequence[str]`, or as a union of these and None,
    must have that type, also by position: `force="no"` raises WrongKindError.

    >>> @suggests_keywords()
    ... def halve(number, *, digits=2):
    ...     return round(number / 2, digits)
    >>> halve(3, digts=1)
    Traceback (most recent call last):
    TypeError: halve() got an unexpected keyword argument 'digts'; did you mean 'digits'?
    """

    def decorated(function: _Function) -> _Function:
        known = [*keywords_of(function), *more]
        kinds = simple_kinds(function.__annotations__)
        code = cast("FunctionType", function).__code__
        places = [(place, name) for place, name in enumerate(code.co_varnames[: code.co_argcount]) if name in kinds]

        @functools.wraps(function)
        def call(*arguments: Any, **given: Any) -> Any:
            require_keywords(function.__name__, given, known)
            given |= {name: as_kind(name, given[name], kinds[name]) for name in kinds.keys() & given.keys()}
            for place, name in places:
                if place < len(arguments):
                    value = as_kind(name, arguments[place], kinds[name])
                    arguments = (*arguments[:place], value, *arguments[place + 1 :])
            return function(*arguments, **given)

        call.__keywords__ = known  # type: ignore[attr-defined]
        return cast("_Function", call)

    return decorated


def simple_kinds(annotations: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the arguments whose annotation, a type or its text, is a union of None and the types of `as_kind`.

    >>> simple_kinds({"size": "int", "force": bool, "rows": "list[int]"})
    {'size': {'int'}, 'force': {'bool'}}
    """
    texts = {name: kind.__name__ if isinstance(kind, type) else str(kind) for name, kind in annotations.items()}
    kinds = {name: set(text.replace("collections.abc.", "").split(" | ")) for name, text in texts.items()}
    return {name: kind for name, kind in kinds.items() if name != "return" and kind <= {*_EXPECTED, "None"}}


_EXPECTED = {
    "bool": "True or False",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "Sequence[str]": "several texts",
}


def as_kind(name: str, value: Any, kinds: Set[str]) -> Any:
    """Return an argument as one of these types, given by their names; WrongKindError if it has none of them.

    Numbers of NumPy and torch become Python's, because `json` cannot write them. Text such as "no" does not pass for a
    bool, nor does a bool for a number, nor one text for several; 0 and 1 pass for a bool.
    """
    if value is None and "None" in kinds:
        return None
    number = as_int(value)
    # NumPy's bool is recognised by its name (bool or bool_), because this module does not import NumPy.
    if type(value).__name__ in ("bool", "bool_"):
        if "bool" in kinds:
            return bool(value)
    elif isinstance(number, int) and kinds & {"int", "float"}:
        return number
    elif isinstance(value, Real) and "float" in kinds:
        return float(value)
    elif isinstance(value, str):
        if "str" in kinds:
            return value
    elif "Sequence[str]" in kinds and isinstance(value, Iterable) and all(isinstance(one, str) for one in value):
        return value
    elif "bool" in kinds and isinstance(number, int) and number in (0, 1):
        return bool(number)
    expected = " or ".join(text for kind, text in _EXPECTED.items() if kind in kinds)
    raise WrongKindError(f"{name} is {value!r}, expected {expected}")


def require_keywords(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError with a suggestion if the function or class `name` was given an argument that is not `known`."""
    for argument in given:
        if argument not in known:
            raise unknown_keyword(name, argument, known)


def refuse_misspelt(function: Callable[..., Any], given: Iterable[str], elsewhere: Collection[str]) -> None:
    """Raise TypeError for an argument that looks like a misspelling of one of the function's own.

    The function passes its remaining arguments on to another one, which accepts those in `elsewhere`. Arguments that
    resemble nothing are left to that function: it may accept more than its signature names.
    """
    known = keywords_of(function)
    for argument in given:
        if argument not in elsewhere and nearest(argument, known):
            raise unknown_keyword(function.__name__, argument, known)


def unknown_keyword(name: str, argument: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that the function or class `name` does not have."""
    return TypeError(f"{name}() got an unexpected keyword argument {argument!r}{did_you_mean(argument, known)}")


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function accepts by keyword.

    For a class these are the arguments of all constructors in its MRO, because each passes on what it does not take.
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
