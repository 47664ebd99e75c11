"""The confined process that reads a pickle. The module `pickles` starts it, and describes its limits.

Only the standard library is imported, and no code that a pickle names is run: the classes of this module build NumPy's
arrays, scalars and element types from their bytes, and lists of numbers are packed as arrays. Requests are lines of
JSON on the standard input; an answer is the length of its JSON, the JSON, and the bytes that it announces.

Commands wait for this process to start, so it imports as little as possible; `typing` only for type checkers.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import pickle
import re
import sys
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, BinaryIO

_DEEPEST = 24
_MOST_KEYS = 100_000
_MOST_DIMENSIONS = 32
_PIECE = 1 << 20
_HEAD = 8
_NEW_USER, _NEW_NETWORK, _NO_NEW_PRIVILEGES = 0x10000000, 0x40000000, 38
_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUFFERS = ("numpy.core.numeric", "numpy._core.numeric")
_BUILTINS = ("builtins", "__builtin__")
_SPEC = re.compile(r"([biufcSUO])(\d*)")
_DEEPEST_LIST = 8
_MOST_PACKED = 1 << 24
_EXACT = 1 << 53
_ORDER = "<" if sys.byteorder == "little" else ">"
_CODES = {float: ("d", "f8"), int: ("q", "i8"), bool: ("B", "b1")}


class Refused(Exception):
    """A pickle contains something that is not data."""


class Broken(Exception):
    """A pickle is damaged or makes no sense."""


class Made:
    """Replaces a function or a class that a pickle may name: it can be called, but attributes cannot be set."""

    __slots__ = ("_make", "name")
    _make: Callable[..., Any]
    name: str

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_make", make)

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._make(*arguments)
        except (TypeError, ValueError, LookupError, AttributeError, UnicodeError) as error:
            raise Broken(f"{self.name} has arguments that make no sense") from error

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"{self.name} with attributes")

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"{self.name} with a state")


class ElementType:
    """An element type of NumPy: its kind, its byte order, and its size in bytes (0 for objects)."""

    __slots__ = ("kind", "order", "size")

    def __init__(self, spec: Any, *flags: Any) -> None:
        found = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
        if found is None:
            raise Refused(f"a numpy element type {str(spec)[:40]!r}")
        self.kind, self.order = found[1], "<" if sys.byteorder == "little" else ">"
        self.size = 0 if self.kind == "O" else int(found[2] or 0) * (4 if self.kind == "U" else 1)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise Broken("a numpy element type has a state that makes no sense")
        if any(part is not None for part in state[2:5]):
            raise Refused("a structured numpy element type")
        self.order = state[1] if state[1] in "<>" else self.order

    def __str__(self) -> str:
        count = self.size // 4 if self.kind == "U" else self.size
        return f"{self.order}{self.kind}{count}"


class BuiltArray:
    """An array of NumPy: its element type, its shape, and its bytes or objects."""

    __slots__ = ("data", "fortran", "kind", "shape")

    def __init__(self) -> None:
        self.kind, self.shape, self.fortran = ElementType("b1"), (0,), False
        self.data: Any = b""

    def __setstate__(self, state: Any) -> None:
        parts = state[-4:] if isinstance(state, tuple) else ()
        if len(parts) != 4:
            raise Broken("a numpy array has a state that makes no sense")
        self.fill(*parts)

    def fill(self, shape: Any, kind: Any, fortran: Any, data: Any) -> BuiltArray:
        whole = isinstance(shape, tuple) and all(type(part) is int and part >= 0 for part in shape)
        if not whole or not isinstance(kind, ElementType) or len(shape) > _MOST_DIMENSIONS:
            raise Broken("a numpy array has a form that makes no sense")
        if isinstance(data, str):  # bytes that Python 2 wrote
            data = data.encode("latin-1")
        count = math.prod(shape)
        fits = (
            isinstance(data, list) and len(data) == count
            if kind.kind == "O"
            else isinstance(data, bytes | bytearray) and len(data) == count * kind.size
        )
        if not fits:
            raise Broken("a numpy array has more or fewer data than its form states")
        self.kind, self.shape, self.fortran, self.data = kind, shape, bool(fortran) and len(shape) > 1, data
        return self


_NDARRAY = Made("numpy.ndarray", lambda *arguments: _never("numpy.ndarray that is called"))
_DTYPE = Made("numpy.dtype", ElementType)


def _never(what: str) -> Any:
    raise Refused(what)


def _reconstruct(kind: Any, *form: Any) -> BuiltArray:
    return BuiltArray() if kind is _NDARRAY else _never("a kind of numpy array of its own")


def _scalar(kind: Any, data: Any) -> BuiltArray:
    return BuiltArray().fill((), kind, False, data)


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any) -> BuiltArray:
    return BuiltArray().fill(shape, kind, order == "F", data)


def _bytes_of(text: Any = b"", *encoding: Any) -> bytes:
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    if not isinstance(text, str):
        raise Broken("bytes are made of something else than text")
    return text.encode("latin-1")


def _items(items: Any = ()) -> list[Any]:
    return list(items) if isinstance(items, list | tuple | set | frozenset) else _never("a set of something odd")


KNOWN: dict[tuple[str, str], Made] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("_codecs", "encode"): Made("_codecs.encode", _bytes_of),
    ("collections", "OrderedDict"): Made("collections.OrderedDict", dict),
}
KNOWN |= {
    (module, name): Made(f"{module}.{name}", make)
    for modules, name, make in (
        (_ARRAYS, "_reconstruct", _reconstruct), (_ARRAYS, "scalar", _scalar), (_BUFFERS, "_frombuffer", _from_buffer),
        (_BUILTINS, "bytes", _bytes_of), (_BUILTINS, "bytearray", _bytes_of), (_BUILTINS, "set", _items),
        (_BUILTINS, "frozenset", _items),
    )
    for module in modules
}  # fmt: skip
"""All globals that a pickle may name, and their replacements."""


class StandIn:
    """Replaces any object, or the result of any function: it keeps the name and the state, and runs no code.

    Each name gets its own subclass, since a pickle can only make objects of classes.
    """

    name = ""
    state: Any = None

    def __new__(cls, *arguments: Any, **options: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    """Unpickles data; a global that is not in `KNOWN` is refused or, with `stands_in`, replaced by a `StandIn`."""

    stands_in = False

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None and not self.stands_in:
            raise Refused(f"{module}.{name}")
        return found or type("StandIn", (StandIn,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("a reference to something outside of the pickle")


def unpickled(file: BinaryIO, *, stands_in: bool = False) -> Any:
    """Read one pickle; raises Refused for contents that are not data, Broken or any other exception for damage."""
    reader = Unpickler(file, fix_imports=False, encoding="latin-1")
    reader.stands_in = stands_in
    return reader.load()


class Numbers:
    """An array: its element type as text, its shape, and its bytes in C order; `python` if it was a list."""

    __slots__ = ("data", "kind", "python", "shape")

    def __init__(self, kind: str, shape: tuple[int, ...], data: Any, python: bool = True) -> None:
        self.kind, self.shape, self.data, self.python = kind, shape, data, python


def packed(value: Any) -> Numbers | None:
    """Return a list of numbers, of equally long lists, or of equally shaped arrays as one array; None for another list.

    A list is not packed if it mixes bools with other numbers, has integers that do not fit into 64 bits, or has
    integers beside floats that are not exact as floats.
    """
    kinds = set(map(type, value))
    if len(kinds) == 1 and not kinds.isdisjoint(_CODES):
        return _numbers((len(value),), value, kinds.pop())
    found = _leaves(value, 0)
    if found is None:
        return None
    shape, leaves = found
    kinds = set(map(type, leaves))
    if kinds == {BuiltArray}:
        return _stacked(shape, leaves)
    if kinds == {int, float} and all(type(leaf) is float or abs(leaf) <= _EXACT for leaf in leaves):
        kinds = {float}
    if len(kinds) != 1 or not kinds <= _CODES.keys():
        return None
    return _numbers(shape, leaves, kinds.pop())


def _numbers(shape: tuple[int, ...], leaves: Sequence[Any], kind: type) -> Numbers | None:
    code, name = _CODES[kind]
    try:
        return Numbers(_ORDER + name, shape, memoryview(array(code, leaves)).cast("B"))
    except OverflowError:
        return None


def _leaves(value: Sequence[Any], depth: int) -> tuple[tuple[int, ...], list[Any]] | None:
    """Return the shape of nested lists and the values in them; None if they are ragged or empty."""
    kinds = set(map(type, value))
    if not kinds or depth == _DEEPEST_LIST:
        return None
    if kinds <= {list, tuple}:
        first = _leaves(value[0], depth + 1)
        if first is None or len(value) * len(first[1]) > _MOST_PACKED:  # a small pickle may repeat one list many times
            return None
        parts = [first, *(_leaves(part, depth + 1) for part in value[1:])]
        if any(part is None or part[0] != first[0] for part in parts):
            return None
        return (len(value), *first[0]), [leaf for part in parts if part is not None for leaf in part[1]]
    if kinds == {BuiltArray} or kinds <= _CODES.keys():
        return (len(value),), list(value)
    return None


def _stacked(shape: tuple[int, ...], arrays: Sequence[Any]) -> Numbers | None:
    first = arrays[0]
    form = str(first.kind), first.shape
    if first.kind.kind == "O" or any((str(one.kind), one.shape) != form or one.fortran for one in arrays):
        return None
    return Numbers(form[0], (*shape, *first.shape), memoryview(b"".join(one.data for one in arrays)), python=False)


class Described:
    """An unpickled value as JSON; arrays and lists are numbered handles, whose parts later requests read."""

    def __init__(self, value: Any, *, pack: bool = False) -> None:
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._pack = pack
        self._keys = 0
        self.whole = self.describe(value, 0)

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = self._keep(value)
        return number

    def _keep(self, value: Any) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def describe(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return {"scalar": value}
        if isinstance(value, BuiltArray) and value.kind.kind != "O":
            return {"array": self._number(value), "kind": str(value.kind), "shape": list(value.shape)}
        if isinstance(value, BuiltArray):
            return {"list": self._number(value.data), "length": len(value.data), "shape": list(value.shape)}
        if isinstance(value, list | tuple) and self._pack and (numbers := packed(value)):
            found = {"array": self._keep(numbers), "kind": numbers.kind, "shape": list(numbers.shape)}
            return found | ({"python": True} if numbers.python else {})
        if isinstance(value, list | tuple | set | frozenset):
            return {"list": self._number(_in_order(value)), "length": len(value), "shape": [len(value)]}
        if isinstance(value, dict):
            return {"dict": self._describe_keys(value, depth)}
        if isinstance(value, bytes | bytearray):
            if not self._pack:
                return {"bytes": value.hex()}
            return {"blob": self._number(value), "size": len(value), "head": value[:_HEAD].hex()}
        if isinstance(value, StandIn):
            return {"object": value.name, "dict": self._attributes(value) if not depth else []}
        raise Refused(f"a value of type {getattr(value, 'name', type(value).__name__)}")

    def _attributes(self, value: StandIn) -> list[Any]:
        """Describe the attributes of an object; attributes that are not data become null."""
        found = []
        for name, part in value.state.items() if isinstance(value.state, dict) else ():
            try:
                found.append([str(name)[:200], self.describe(part, 1)])
            except (Refused, Broken):
                found.append([str(name)[:200], {"scalar": None}])
        return found

    def _describe_keys(self, value: dict[Any, Any], depth: int) -> list[Any]:
        self._keys += len(value)
        if depth == _DEEPEST or self._keys > _MOST_KEYS:
            raise Broken("its dictionaries are nested too deeply, or in circles, or have too many keys")
        found = []
        for name, part in value.items():
            text = name.decode("latin-1") if isinstance(name, bytes) else name
            if not isinstance(text, str | int):
                raise Refused(f"a dictionary with keys of type {type(name).__name__}")
            found.append([str(text), self.describe(part, depth + 1)])
        return found

    def items(self, number: int, start: int, stop: int) -> list[Any]:
        self._keys = 0
        return [self.describe(value, 0) for value in self._kept[number][start:stop]]

    def is_fortran(self, number: int) -> bool:
        return bool(getattr(self._kept[number], "fortran", False))

    def whole_parts(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return the bytes of whole arrays and byte strings."""
        kept = [self._kept[number] for number in numbers]
        return [memoryview(one if isinstance(one, bytes | bytearray) else one.data) for one in kept]

    def rows(self, number: int, start: int, stop: int) -> list[memoryview]:
        """Return the bytes of rows, in one part or, for an array in Fortran order, one part for each column.

        In Fortran order the elements of one column follow each other, so that rows are a range of each column.
        """
        array: BuiltArray = self._kept[number]
        data = memoryview(array.data)
        size = len(data) // max(1, math.prod(array.shape))
        if not array.shape:
            return [data]
        count = array.shape[0]
        if not self.is_fortran(number):
            row = size * math.prod(array.shape[1:])
            return [data[start * row : stop * row]]
        places = range(0, math.prod(array.shape), max(1, count))
        return [data[(at + start) * size : (at + stop) * size] for at in places]


def _in_order(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else list(value)


class _Announced(io.RawIOBase):
    """The next `size` bytes of another file; `drain` skips those that were not read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._file.read(min(len(buffer), self._left))
        buffer[: len(part)] = part
        self._left -= len(part)
        return len(part)

    def drain(self) -> None:
        while self._left and (part := self._file.read(min(self._left, _PIECE))):
            self._left -= len(part)


def _load(file: BinaryIO, size: int, *, pack: bool, stands_in: bool) -> Described:
    announced = _Announced(file, size)
    try:
        return Described(unpickled(io.BufferedReader(announced, _PIECE), stands_in=stands_in), pack=pack)
    finally:
        announced.drain()


def answers(requests: BinaryIO) -> Iterator[tuple[dict[str, Any], Sequence[memoryview]]]:
    """Yield the answer to each request in a file, and the parts of the data that follows the answer."""
    known = Described(None)
    while line := requests.readline():
        asked, parts = json.loads(line), list[memoryview]()
        try:
            if "load" in asked:
                known = Described(None)
                pack, stands_in = bool(asked.get("pack")), bool(asked.get("objects"))
                known = _load(requests, asked["load"], pack=pack, stands_in=stands_in)
                yield {"value": known.whole}, ()
            elif "parts" in asked:
                parts = known.whole_parts(asked["parts"])
                fortran = [known.is_fortran(number) for number in asked["parts"]]
                yield {"bytes": sum(map(len, parts)), "fortran": fortran}, parts
            elif "array" in asked:
                parts = known.rows(asked["array"], asked["start"], asked["stop"])
                yield {"bytes": sum(map(len, parts)), "fortran": known.is_fortran(asked["array"])}, parts
            else:
                yield {"items": known.items(asked["list"], asked["start"], asked["stop"])}, ()
        except Refused as error:
            yield {"refused": str(error)[:200]}, ()
        except MemoryError:
            yield {"memory": True}, ()
        except Exception as error:
            yield {"broken": f"{type(error).__name__}: {error}"[:200]}, ()


def confine(memory: int) -> None:
    """Limit this process for the rest of its life; raises OSError or ValueError if that is not possible."""
    import resource  # not on Windows

    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        libc.unshare(_NEW_USER | _NEW_NETWORK)
    except (OSError, AttributeError):
        pass  # a network namespace is an extra: the limits below already forbid new sockets
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 3,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (OSError, ValueError):
        if sys.platform != "darwin":  # macOS does not enforce this limit
            raise


def serve(memory: int) -> None:
    """Confine this process to `memory` bytes, and answer the requests on its input until there are no more."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    confine(memory)
    for answer, parts in answers(requests):
        try:
            text = json.dumps(answer).encode()
        except (MemoryError, ValueError, RecursionError):
            text, parts = b'{"broken": "a value that is too large"}', ()
        replies.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            replies.write(part)
        replies.flush()
