"""Tells callables apart by what they are made of, without running any of them."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

__all__ = ["fingerprint_of"]

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, range)

_TENSORS = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))


def fingerprint_of(function: Any) -> str:
    """Return a digest of a callable's code, constants, defaults, and the values that it encloses or finds around it.

    Equal in every process for the same code and data. Not seen, so that a change there goes unnoticed: what C code
    does, modules that it uses, and objects that keep their data elsewhere than in their attributes.
    """
    return _Digests().of(function).hex()


class _Digests:
    """Digests of values by what they hold; each is looked into once, and circles end where they close."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, bytes]] = {}  # with the value, for another may get the number of a lost one
        self._open: list[Any] = []

    def of(self, value: Any) -> bytes:
        """Return the digest of a value."""
        kind = type(value)
        if kind in _PLAIN:
            return _digest(kind, [repr(value).encode("utf-8", "surrogatepass")])
        for depth, outer in enumerate(self._open):
            if outer is value:
                return _digest(kind, [str(depth).encode()])
        if id(value) not in self._done:
            self._open.append(value)
            if kind in (set, frozenset):
                parts = sorted(map(self.of, value))
            else:
                parts = [part if type(part) is _Raw else self.of(part) for part in _contents(value)]
            self._open.pop()
            self._done[id(value)] = value, _digest(kind, parts)
        return self._done[id(value)][1]


def _digest(kind: type, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in (f"{kind.__module__}.{kind.__qualname__}".encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class _Raw(bytes):
    """Bytes that go into the digest as they are."""


def _contents(value: Any) -> Iterator[Any]:
    """Yield what a value holds, values or raw bytes, by its exact type: methods of others might run foreign code."""
    kind = type(value)
    if kind is types.CodeType:
        yield from (value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_flags)
    elif kind is types.FunctionType:
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__)
        yield from _globals_of(value.__code__, value.__globals__)
    elif kind is types.CellType:
        try:
            yield value.cell_contents
        except ValueError:
            yield None  # not filled yet
    elif kind is types.MethodType:
        yield from (value.__func__, value.__self__)
    elif kind is functools.partial:
        yield from (value.func, value.args, value.keywords)
    elif kind in (list, tuple):
        yield from value
    elif kind is dict:
        for key, item in value.items():
            yield from (key, item)
    elif kind is np.ndarray and not value.dtype.hasobject:
        yield from (str(value.dtype), value.shape, _Raw(np.ascontiguousarray(value).tobytes()))
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        yield str(getattr(value, "__qualname__", None) or value.__name__)
    else:
        yield from _object(value)


def _globals_of(code: types.CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """Yield what a function, or one inside it, finds under the names that it uses."""
    for name in code.co_names:
        if name in known:
            yield from (name, known[name])
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _globals_of(constant, known)


def _object(value: Any) -> Iterator[Any]:
    """Yield the call of an object's type and the object's attributes; of a tensor on the CPU its elements."""
    kind = type(value)
    if (kind.__module__, kind.__name__) in _TENSORS and value.device.type == "cpu" and not value.is_sparse:
        yield from (str(value.dtype), tuple(value.shape))
        bits = value.detach().contiguous().resolve_conj().resolve_neg().view(-1).view(sys.modules["torch"].uint8)
        yield _Raw(bits.numpy().tobytes())
        return
    yield from (vars(base).get("__call__") for base in kind.__mro__[:-1])
    try:
        yield object.__getattribute__(value, "__dict__")
    except AttributeError:
        yield None
