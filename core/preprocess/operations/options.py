"""Programs out of options: those of the command line, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError, did_you_mean
from .base import Operation
from .documents import pipeline_program, replayed_program
from .filters import Episodes, Filter, Where
from .keys import Cat, Exclude, Flatten, Rename, Select
from .lookahead import AddMcReturn, AddReturnToGo, NStep
from .normalize import METHODS, NormalizeFields
from .program import Program
from .values import Cast, ClipReward, ResizeImages

__all__ = ["OPTIONS", "given_operations", "program_of"]


def program_of(
    operations: Mapping[str, Any] | None = None,
    pipeline: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    *,
    replay_filters: bool = False,
) -> Program:
    """Make the program that options ask for, in their fixed order, or a pipeline file, or a manifest.

    `operations` maps names of options, with `-` or `_`, to what is typed behind them: a text, or a list of such where
    the option may come again; for rename, cast, cat, resize and normalize also a mapping, for clip-reward a pair.
    Options that are None, False or empty are not given. `episodes` alone may be said of a pipeline or a manifest as
    well, and goes before what is said there. What chose the episodes of the dataset whose manifest it is, is done again
    with `replay_filters` alone. UsageError for more than one of the three, or none.
    """
    if replay_filters and not replay:
        raise UsageError("--replay-filters is about --replay, which was not given")
    given = given_operations(operations)
    written = pipeline is not None or replay is not None
    said = [
        *(["operations"] if given.keys() - ({"episodes"} if written else set()) else []),
        *(["pipeline"] if pipeline else []),
        *(["replay"] if replay else []),
    ]
    if len(said) > 1:
        hint = "of the operations, only --episodes can be combined with them"
        raise UsageError(f"{' and '.join(said)} were given, one of them says what is done", hint=hint)
    if written:
        program = (
            pipeline_program(Path(pipeline))
            if pipeline
            else replayed_program(Path(replay or ""), filters=replay_filters)
        )
        return program.of_episodes(_episodes(given["episodes"])) if given else program
    for name in given:
        if name not in OPTIONS and name != "gamma":
            raise UsageError(
                f"there is no operation {name!r}{did_you_mean(name, OPTIONS)}", hint=f"there are {_known()}"
            )
    discount = _Discount(given)
    program = Program(tuple(o for name, make in OPTIONS.items() if name in given for o in make(given[name], discount)))
    discount.require_use()
    return program


def given_operations(operations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that are given, with `-` in their names."""
    return {name.replace("_", "-"): value for name, value in (operations or {}).items() if _is_given(value)}


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list | tuple | Mapping) and not value)


class _Discount:
    """The one `--gamma` that several operations share."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._gamma = None if "gamma" not in given else _number(given["gamma"], "gamma")
        self._used = self._gamma is None

    def needed(self, operation: str) -> float:
        """Return it, or raise UsageError: a discount that nobody named is silently wrong."""
        if self._gamma is None:
            raise UsageError(f"{operation} needs a discount", hint="say --gamma 0.99")
        return self.or_else(1.0)

    def or_else(self, default: float) -> float:
        """Return it if it is given."""
        self._used = True
        return default if self._gamma is None else self._gamma

    def require_use(self) -> None:
        """Raise UsageError where nobody needed it."""
        if not self._used:
            raise UsageError("gamma was given, but nothing discounts: n-step, return-to-go and mc-return do")


Make = Callable[[Any, _Discount], Iterable[Operation]]


def _pairs(option: str, make: Callable[[str, Any], Operation]) -> Make:
    """Read `a=b`, some of them, or a mapping."""

    def read(value: Any, _: _Discount) -> Iterable[Operation]:
        if isinstance(value, Mapping):
            return [make(str(left), right) for left, right in value.items()]
        found = []
        for text in _texts(value, option):
            left, sign, right = text.partition("=")
            if not (left.strip() and sign and right.strip()):
                raise UsageError(f"--{option} {text!r} is not understood, it is written {_FORMS[option]}")
            found.append(make(left.strip(), right.strip()))
        return found

    return read


_FORMS = {
    "rename": "old=new",
    "cast": "field=type, like observation=float32",
    "cat": "new=part,part, like obs=observation.a,observation.b",
    "resize": "field=HEIGHTxWIDTH, like image=84x84",
}


def _texts(value: Any, option: str) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise UsageError(f"{option} is {value!r}, a text or a list of them is expected")
    return list(found)


def _names(value: Any, option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for text in _texts(value, option) for name in text.split(","))
    if not all(names):
        raise UsageError(f"--{option} {value!r} has an empty name, names with commas between them are expected")
    return names


def _episodes(value: Any) -> Episodes:
    return Episodes(",".join(_texts(value, "episodes")))


def _cat(key: str, parts: Any) -> Operation:
    return Cat(key, _names(parts, "cat"))


def _resize(key: str, size: Any) -> Operation:
    size, _, layout = str(size).partition(":")
    return ResizeImages(key, size, layout or None)


def _normalize(value: Any, _: _Discount) -> Iterable[Operation]:
    if isinstance(value, Mapping):
        return [NormalizeFields(str(key), str(method)) for key, method in value.items()]
    found = []
    for name in _names(value, "normalize"):
        key, _sign, method = name.partition(":")
        found.append(NormalizeFields(key, method or METHODS[0]))
    return found


def _clip(value: Any, _: _Discount) -> Iterable[Operation]:
    if isinstance(value, str):
        low, sign, high = value.partition(":")
        if not sign:
            raise UsageError(f"--clip-reward {value!r} is not understood, it is written LOW:HIGH, like -1:1")
        bounds = [text.strip() or None for text in (low, high)]
    elif isinstance(value, list | tuple) and len(value) == 2:
        bounds = list(value)
    else:
        raise UsageError(f"clip-reward is {value!r}, LOW:HIGH or two numbers are expected")
    return [ClipReward(*(None if bound is None else _number(bound, "clip-reward") for bound in bounds))]


def _number(value: Any, option: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{option} is {value!r}, a number is expected") from None


def _steps(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"n-step is {value!r}, a whole number is expected")
    return value


OPTIONS: dict[str, Make] = {
    "episodes": lambda value, _: [_episodes(value)],
    "filter": lambda value, _: [Filter(text) for text in _texts(value, "filter")],
    "where": lambda value, _: [Where(text) for text in _texts(value, "where")],
    "rename": _pairs("rename", Rename),
    "cast": _pairs("cast", Cast),
    "cat": _pairs("cat", _cat),
    "flatten": lambda _value, _: [Flatten()],
    "resize": _pairs("resize", _resize),
    "n-step": lambda value, gamma: [NStep(_steps(value), gamma.needed("n-step"))],
    "return-to-go": lambda _, gamma: [AddReturnToGo(gamma.or_else(1.0))],
    "mc-return": lambda _, gamma: [AddMcReturn(gamma.needed("mc-return"))],
    "clip-reward": _clip,
    "normalize": _normalize,
    "select": lambda value, _: [Select(_names(value, "select"))],
    "exclude": lambda value, _: [Exclude(_names(value, "exclude"))],
}
"""What makes the operations of each option, in their fixed order."""


def _known() -> str:
    return ", ".join(OPTIONS)
