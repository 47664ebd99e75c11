"""Kinds of datasets that a program registers under a prefix, for `load_dataset`."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from ..declarations import declared
from ..errors import MissingKeyError, UsageError, suggests_keywords
from ..format.hub_address import is_hub_address

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")
_registered: dict[str, Callable[..., Any] | str] = {}


class RegisteredTypeError(UsageError, TypeError):
    """A prefix or a loader is of a type that cannot be registered."""


class TakenPrefixError(UsageError, KeyError):
    """A prefix is registered already, or is the name of a source."""


@suggests_keywords()
def register_dataset(prefix: str, dataset: Callable[..., Any] | str, *, replace: bool = False) -> None:
    """Let `load_dataset("prefix:ID", …)` return `dataset("ID", …)`, with the arguments that it is called with.

    `dataset` is a function or class, or its place as text, `"module:name"`, which is imported when it is first needed.
    Case and blanks around of a prefix do not count. Registered in this process only; a source or a reader for the
    command line is registered by its package, see the guide to extensions.

    RegisteredTypeError (a TypeError) for what is neither, UsageError (a ValueError) for a prefix that is empty or has a
    colon, and TakenPrefixError (a KeyError) for one that is taken, also by a source of rbtool, without `replace`.

    >>> register_dataset("numbers", lambda name, **options: list(range(int(name))))
    >>> from rbtool import load_dataset
    >>> load_dataset("numbers:3")
    [0, 1, 2]
    """
    if not isinstance(prefix, str):
        raise RegisteredTypeError(f"the prefix is {prefix!r}, expected text")
    name = prefix.strip().lower()
    if not name or ":" in name:
        raise UsageError(f"the prefix is {prefix!r}, expected a name without a colon")
    if not callable(dataset) and not isinstance(dataset, str):
        raise RegisteredTypeError(f"the dataset is {dataset!r}, expected a function or 'module:name'")
    if isinstance(dataset, str) and not re.fullmatch(r"[\w.]+:[\w.]+", dataset):
        raise UsageError(f"the dataset is {dataset!r}, expected a function or 'module:name'")
    if not replace and (name in _registered or name in {one.name for one in declared()} or name == "hf"):
        raise TakenPrefixError(f"the prefix {name!r} is taken", hint="replace=True puts another in its place")
    _registered[name] = dataset


def or_registered(load: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Call what is registered for the prefix of the first argument, `dataset`, and `load` where there is nothing."""

    @functools.wraps(load)
    def either(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Returned:
        asked = args[0] if args else options.get("dataset")
        if not isinstance(asked, str) or is_hub_address(asked):
            return load(*args, **options)
        prefix, colon, name = asked.partition(":")
        found = _registered.get(prefix.strip().lower()) if colon else None
        if found is None:
            return load(*args, **options)
        rest = {key: value for key, value in options.items() if key != "dataset"}
        return cast("_Returned", _resolved(found)(name, *args[1:], **rest))

    return either


def _resolved(dataset: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(dataset, str):
        return dataset
    module, _, name = dataset.partition(":")
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise MissingKeyError(f"the registered dataset {dataset!r} cannot be imported: {error}") from error
    if not callable(found):
        raise RegisteredTypeError(
            f"the registered dataset {dataset!r} is a {type(found).__name__}, expected a function"
        )
    return cast("Callable[..., Any]", found)
