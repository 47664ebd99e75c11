"""Fingerprints of functions: digests of their code and of what it uses, equal in every process."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, range)

_TENSORS = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))


def fingerprint_of(function: Any) -> str:
    """Return a digest of a callable's code, constants, defaults, closure and the globals that it uses, without calling
    it.

    For classes, also of objects, it covers methods, attributes and base classes; classes of installed packages
    are identified by name. Equal code and data give equal fingerprints in every process. Changes in C code, in modules
    that it uses, and in objects whose data is not in their attributes are not noticed.
    """
    return _Digests().of(function).hex()


class _Digests:
    """Digests of values by their contents; each value is visited once, and cycles end where they close."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, bytes]] = {}  # with the value, so that its id stays unique
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
    """Bytes that are digested without their type."""


def _contents(value: Any) -> Iterator[Any]:
    """Yield the contents of a value, values or raw bytes, by its exact type: methods of subclasses are user code."""
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
    elif kind in (staticmethod, classmethod):
        yield value.__func__
    elif kind is property:
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, type):
        yield from _class(value)
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        yield str(getattr(value, "__qualname__", None) or value.__name__)
    else:
        yield from _object(value)


def _globals_of(code: types.CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """Yield the globals that a function, or one inside it, uses."""
    for name in code.co_names:
        if name in known:
            yield from (name, known[name])
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _globals_of(constant, known)


_NOT_OF_THE_CODE = {
    "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__", "__doc__",
    "__firstlineno__", "__module__", "__static_attributes__", "__weakref__", "_abc_impl",
}  # fmt: skip


def _class(kind: type) -> Iterator[Any]:
    """Yield the name of a class and, unless it is of an installed package, its bases and what its body defines."""
    yield kind.__qualname__
    if _is_installed(kind.__module__):
        return
    yield kind.__bases__
    for name, item in sorted(vars(kind).items()):  # decorators may add methods in the order of a set
        if name not in _NOT_OF_THE_CODE:
            function: Any = item.fget if type(item) is property else getattr(item, "__func__", item)
            yield from (name, function.__qualname__ if _is_of_a_package(function) else item)


def _is_of_a_package(function: Any) -> bool:
    """Whether it is a function that a decorator or a base class of an installed package added."""
    if not isinstance(function, types.FunctionType):
        return False
    return _is_installed(function.__globals__.get("__name__", "")) or _in_packages(function.__code__.co_filename)


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is of Python, of this package or of another installed one, and not of the user's own files."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return True
    return _in_packages(getattr(sys.modules.get(module), "__file__", None) or "")


def _in_packages(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _object(value: Any) -> Iterator[Any]:
    """Yield an object's type, its `__call__` and the object's attributes; of a tensor on the CPU its elements."""
    kind = type(value)
    if (kind.__module__, kind.__name__) in _TENSORS and value.device.type == "cpu" and not value.is_sparse:
        yield from (str(value.dtype), tuple(value.shape))
        bits = value.detach().contiguous().resolve_conj().resolve_neg().view(-1).view(sys.modules["torch"].uint8)
        yield _Raw(bits.numpy().tobytes())
        return
    yield kind
    yield from (vars(base).get("__call__") for base in kind.__mro__[:-1])
    try:
        yield object.__getattribute__(value, "__dict__")
    except AttributeError:
        yield None
