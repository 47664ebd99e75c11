"""Reads data out of pickles in a confined process.

A pickle is a program. It is read only if the user trusts it (`--trust-pickle`), and even then:

- Its globals may only name NumPy's arrays, scalars and element types, and plain containers. Any other global is refused
  or, in formats that are the pickle of an object, represented by its name and attributes. None is imported or called:
  `pickle_worker` builds all values from their bytes.
- The process imports neither NumPy nor rbtool, has no environment variables, can open no file and no socket
  (`RLIMIT_NOFILE` leaves only its pipes), and starts no process (`RLIMIT_NPROC`, from which root is exempt). Where
  Linux permits, it has its own network namespace without devices.
- Its memory is bounded (`RLIMIT_AS`, which macOS does not enforce), and so is the time for each answer.
- Answers are JSON and the bytes of arrays.

On systems without these limits, such as Windows, no pickle is read.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Closing
from ...core.ted.schema import odd_truths

_START = """
import sys
sys.path.append(sys.argv[1])
from pickle_worker import serve
serve(int(sys.argv[2]))
"""
"""The program of the process. The folder of `pickle_worker` is last on the path, so that it shadows no standard module.

The module is imported rather than run as a script, because Python caches the bytecode only of imported modules.
"""
_MEMORY = 1 << 30
"""Bytes that the process may use, in addition to three times the size of the pickle."""
_SECONDS = 60.0
_BYTES_A_SECOND = 10 << 20
_PIECE = 1 << 20
_LONGEST_ANSWER = 256 << 20


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array in an open pickle; `number` is its handle, and `python` is set if it was a list of numbers."""

    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    python: bool = False

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class PickledList:
    """A list, a tuple, a set or an array of objects in an open pickle; `number` is its handle."""

    number: int
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class PickledBytes:
    """Bytes in an open pickle; `number` is their handle, and `head` the first eight."""

    number: int
    size: int
    head: bytes


@dataclass(frozen=True, slots=True)
class PickledObject:
    """An object in a pickle: the name of its class or function, and its attributes.

    Attributes that are not data are None, and objects inside this one have no attributes.
    """

    name: str
    attributes: dict[str, Value]


Value: TypeAlias = (
    "PickledArray | PickledObject | PickledList | PickledBytes | dict[str, Value] | bytes | str | int | float | None"
)


def framed_answer(process: subprocess.Popen[bytes], longest: int, most: int) -> tuple[dict[str, Any], bytes]:
    """Read an answer of a process, and return its JSON and its data.

        length of the JSON (8 bytes) | JSON | as many bytes of data as `bytes` in the JSON states

    Raises EOFError if the process ends before that, if the JSON has more than `longest` bytes, or the data more than
    `most`.
    """

    def take(size: int, limit: int) -> bytes:
        assert process.stdout is not None
        data = process.stdout.read(size) if size <= limit else b""
        if len(data) < size:
            raise EOFError
        return data

    answer: dict[str, Any] = json.loads(take(int.from_bytes(take(8, 8), "little"), longest))
    return answer, take(answer.get("bytes", 0), most)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, close its pipes, and wait for it."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:  # closing flushes a request that the process can no longer read
                continue
    process.wait()


_HEAD = 4096


def is_pickle_of(path: Path, names: bytes) -> bool:
    """Return whether a file is a pickle whose first bytes match the pattern `names`; raises OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head[:1] == b"\x80" and re.search(names, head) is not None


@functools.lru_cache(maxsize=256)
def _element_type(text: str) -> np.dtype[Any]:
    return np.dtype(text)


class PickleReader(Closing):
    """Reads pickles, one at a time, in one confined process. Not thread-safe.

    If the process ended, or did not receive a complete request, the next `load` starts another; handles of the pickle
    before are then invalid.

    Args:
        what: the name of the file in messages.
        largest: the size of the largest pickle in bytes.
        memory: bytes that the process may use, in addition to three times `largest`.
        seconds: time limit for an answer, in addition to the time to read it.
    """

    def __init__(self, what: str, largest: int = 0, *, memory: int = _MEMORY, seconds: float = _SECONDS) -> None:
        self._what = what
        self._memory = memory + 3 * largest
        self._seconds = seconds + largest / _BYTES_A_SECOND
        self._late = False
        self._process: subprocess.Popen[bytes] | None = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable, "-I", "-S", *(["-B"] if sys.dont_write_bytecode else []),
                "-c", _START, str(Path(__file__).parent), str(self._memory),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, close_fds=True,
        )  # fmt: skip

    def load(self, file: BinaryIO, size: int, *, pack: bool = False, objects: bool = False) -> Value:
        """Unpickle the next `size` bytes of a file; handles of the pickle before become invalid.

        Args:
            file: the file.
            size: the size of the pickle.
            pack: whether lists of numbers become arrays, and bytes stay in the process for `parts`; for pickles with
                many small values.
            objects: whether values that are not data become a `PickledObject`, for pickles of objects whose
                attributes are the data.

        Returns:
            Plain values; arrays and lists are handles, read by `rows` and `items`.

        Raises:
            FormatError: without `objects`, the pickle holds something that is not data.
            CorruptDataError: the pickle is damaged, or takes too much memory or time.
        """
        if self._process is None:
            self._process, self._late = self._started(), False
        return self._value(self._ask({"load": size, "pack": pack, "objects": objects}, file, size)["value"])

    def items(self, found: PickledList, start: int = 0, stop: int | None = None) -> list[Value]:
        """Return the items `[start, stop)` of a list."""
        stop = len(found) if stop is None else stop
        answer = self._ask({"list": found.number, "start": start, "stop": stop})
        return [self._value(one) for one in answer["items"]]

    def rows(self, found: PickledArray, start: int = 0, stop: int | None = None) -> Array:
        """Return the rows `[start, stop)` of an array as a fresh array in this machine's byte order."""
        stop = len(found) if stop is None else stop
        shape = (stop - start, *found.shape[1:]) if found.shape else ()
        if not all(shape):
            return np.zeros(shape, found.dtype.newbyteorder("="))
        answer, data = self._exchange({"array": found.number, "start": start, "stop": stop}, None, 0)
        fortran = bool(answer.get("fortran"))
        rows = np.frombuffer(data, found.dtype).reshape(shape, order="F" if fortran else "C")
        return self._sound(np.array(rows, found.dtype.newbyteorder("="), order="C"))

    def parts(self, found: Sequence[PickledArray | PickledBytes]) -> list[Array | bytes]:
        """Return several whole arrays and byte strings with one request; arrays are in this machine's byte order."""
        if not found:
            return []
        answer, data = self._exchange({"parts": [one.number for one in found]}, None, 0)
        values: list[Array | bytes] = []
        view, start = memoryview(data), 0
        for one, fortran in zip(found, answer["fortran"], strict=True):
            if isinstance(one, PickledBytes):
                values.append(bytes(view[start : start + one.size]))
                start += one.size
                continue
            size = one.dtype.itemsize * int(np.prod(one.shape, dtype=np.int64))
            rows = np.frombuffer(view[start : start + size], one.dtype).reshape(
                one.shape, order="F" if fortran else "C"
            )
            values.append(self._sound(np.array(rows, one.dtype.newbyteorder("="), order="C")))
            start += size
        return values

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        end_process(process)

    def _sound(self, array: Array) -> Array:
        if array.dtype.kind == "b" and odd_truths(array).any():
            raise CorruptDataError(f"{self._what} is damaged: a truth value in it is neither 0 nor 1")
        return array

    def _value(self, found: dict[str, Any]) -> Value:
        if "array" in found:
            try:
                dtype = _element_type(found["kind"])
            except (TypeError, ValueError, OverflowError) as error:  # for example bools of four bytes
                raise CorruptDataError(
                    f"{self._what}: a pickle has the element type {found['kind']!r}, which NumPy does not support"
                ) from error
            return PickledArray(found["array"], dtype, tuple(found["shape"]), found.get("python", False))
        if "list" in found:
            return PickledList(found["list"], tuple(found["shape"]))
        if "object" in found:
            return PickledObject(found["object"], {name: self._value(part) for name, part in found["dict"]})
        if "dict" in found:
            return {name: self._value(part) for name, part in found["dict"]}
        if "blob" in found:
            return PickledBytes(found["blob"], found["size"], bytes.fromhex(found["head"]))
        if "bytes" in found:
            return bytes.fromhex(found["bytes"])
        scalar: str | int | float | None = found["scalar"]
        return scalar

    def _ask(self, request: dict[str, Any], file: BinaryIO | None = None, size: int = 0) -> dict[str, Any]:
        return self._exchange(request, file, size)[0]

    def _exchange(self, request: dict[str, Any], file: BinaryIO | None, size: int) -> tuple[dict[str, Any], bytes]:
        process, whole = self._process, False
        if process is None:
            raise CorruptDataError(f"{self._what}: the process that reads a pickle ended")
        watch = threading.Timer(self._seconds, self._end_late, (process,))
        watch.daemon = True
        watch.start()
        try:
            self._send(process, request, file, size)
            most = max(_LONGEST_ANSWER, self._memory)
            answer, data = framed_answer(process, most, most)
            whole = True
        except (BrokenPipeError, EOFError) as error:
            raise self._ended(process) from error
        finally:
            watch.cancel()
            if not whole:
                self.close()
        self._require_read(answer)
        return answer, data

    def _send(
        self, process: subprocess.Popen[bytes], request: dict[str, Any], file: BinaryIO | None, size: int
    ) -> None:
        pipe = process.stdin
        assert pipe is not None
        pipe.write(json.dumps(request).encode() + b"\n")
        while size and file is not None:
            part = file.read(min(size, _PIECE))
            if not part:
                raise CorruptDataError(f"{self._what} is truncated: {size:,} bytes of a pickle are missing")
            pipe.write(part)
            size -= len(part)
        pipe.flush()

    def _end_late(self, process: subprocess.Popen[bytes]) -> None:
        self._late = True
        process.kill()

    def _ended(self, process: subprocess.Popen[bytes]) -> CorruptDataError:
        if self._late:
            return CorruptDataError(f"{self._what}: reading a pickle took more than {self._seconds:.0f} s")
        code = process.wait()
        how = f"was ended by signal {-code}" if code < 0 else "could not be confined" if code == 1 else "ended"
        return CorruptDataError(f"{self._what}: the process that reads a pickle {how}")

    def _require_read(self, answer: dict[str, Any]) -> None:
        if "refused" in answer:
            raise FormatError(
                f"{self._what} is a pickle of more than data: it has {answer['refused']}; NumPy arrays, numbers, text "
                "and plain containers are read"
            )
        if "memory" in answer:
            self.close()  # a new process starts with all of its memory
            raise CorruptDataError(
                f"{self._what}: reading a pickle takes more than {self._memory >> 20:,} MiB of memory"
            )
        if "broken" in answer:
            raise CorruptDataError(f"{self._what}: a pickle cannot be read ({answer['broken']})")
