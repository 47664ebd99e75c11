"""Modules that turn rows of a tensor into integers: hashes, and consecutive numbers for hashes.

The loops are compiled if numba can be imported, otherwise NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import MissingKeyError, SchemaError, UsageError
from ..kernels.rows import compiled_module

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_LEAST = 1024


def siphash(rows: Bytes, key: bytes) -> Numbers:
    """Hash each row of uint8 `[n, width]` with SipHash-2-4 (Aumasson and Bernstein, 2012); int64 `[n]`.

    `key` is 16 bytes. The hash is the same in every process and on every machine. The paper's hash is unsigned; the
    int64 has the same bits.
    """
    words = np.frombuffer(key, "<u8").astype(np.uint64)
    rows = np.ascontiguousarray(rows)
    compiled = compiled_module("compiled_hashes", __package__)
    if compiled is None:
        return _plain_siphash(rows, words)
    hashes = np.empty(len(rows), np.uint64)
    compiled.siphash_rows(_address(rows), rows.shape[1], words, hashes)
    return hashes.view(np.int64)


def _plain_siphash(rows: Bytes, key: NDArray[np.uint64]) -> Numbers:
    """The same with NumPy, one word of all rows at a time."""
    count, width = rows.shape
    padded = np.zeros((count, (width // 8 + 1) * 8), np.uint8)
    padded[:, :width] = rows
    padded[:, -1] = width & 0xFF
    start = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    state = [np.full(count, value, np.uint64) ^ key[number % 2] for number, value in enumerate(start)]
    for word in padded.view("<u8").T:
        state[3] ^= word
        _mix(state, 2)
        state[0] ^= word
    state[2] ^= np.uint64(0xFF)
    _mix(state, 4)
    hashes: Numbers = (state[0] ^ state[1] ^ state[2] ^ state[3]).view(np.int64)
    return hashes


def _mix(state: list[NDArray[np.uint64]], rounds: int) -> None:
    def turned(word: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))

    v0, v1, v2, v3 = state
    for _ in range(rounds):
        v0 = v0 + v1
        v1 = turned(v1, 13) ^ v0
        v0 = turned(v0, 32)
        v2 = v2 + v3
        v3 = turned(v3, 16) ^ v2
        v0 = v0 + v3
        v3 = turned(v3, 21) ^ v0
        v2 = v2 + v1
        v1 = turned(v1, 17) ^ v2
        v2 = turned(v2, 32)
    state[:] = v0, v1, v2, v3


def project(rows: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply float64 `[n, features]` by `[features, components]`, adding in the order of the features.

    The order in a BLAS matrix product would depend on the machine and the number of rows.
    """
    projected = np.zeros((len(rows), matrix.shape[1]))
    compiled = compiled_module("compiled_hashes", __package__)
    if compiled is not None:
        compiled.project_rows(np.ascontiguousarray(rows), np.ascontiguousarray(matrix), projected)
        return projected
    for feature, weights in enumerate(matrix):
        projected += rows[:, feature, None] * weights
    return projected


class KeyTable:
    """Numbers keys, rows of `width` bytes, from 0 in the order of arrival.

    Keys are compared byte by byte, so that two keys with the same hash get different numbers. With width 0 the hash
    itself is the key. Memory grows by doubling.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._count = 0
        self._hashes = np.empty(0, np.int64)
        self._keys = np.empty((0, width), np.uint8)

    def __len__(self) -> int:
        return self._count

    @property
    def hashes(self) -> Numbers:
        """The hash of each entry, int64 `[len]`, as a view."""
        return self._hashes[: self._count]

    @property
    def keys(self) -> Bytes:
        """The key of each entry, uint8 `[len, width]`, as a view."""
        return self._keys[: self._count]

    def find(self, hashes: Numbers, keys: Bytes) -> Numbers:
        """Return the numbers of keys, int64 `[n]`, -1 if they are missing; `keys` is uint8 `[n, width]`."""
        return self._search(hashes, keys, extend=False)

    def add(self, hashes: Numbers, keys: Bytes) -> Numbers:
        """Return the numbers of keys, int64 `[n]`; missing keys are added."""
        self._make_room(self._count + len(hashes))
        before = self._count
        found = self._search(hashes, keys, extend=True)
        if self._count > before:
            new = found >= before
            self._hashes[found[new]] = hashes[new]
        return found

    def truncate(self, count: int) -> None:
        """Remove the entries from number `count` on."""
        if count < self._count:
            hashes, keys = self.hashes[:count].copy(), self.keys[:count].copy()
            self._count = 0
            self._forget()
            self.add(hashes, keys)

    def _make_room(self, count: int) -> None:
        capacity = len(self._hashes)
        if count <= capacity:
            return
        capacity = max(_LEAST, 2 * capacity, count)
        hashes, keys = np.empty(capacity, np.int64), np.empty((capacity, self.width), np.uint8)
        hashes[: self._count], keys[: self._count] = self.hashes, self.keys
        self._hashes, self._keys = hashes, keys
        self._spread()

    def _spread(self) -> None:
        """Called once there is room for more entries."""

    def _forget(self) -> None:
        raise NotImplementedError

    def _search(self, hashes: Numbers, keys: Bytes, *, extend: bool) -> Numbers:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.width, self.hashes.copy(), self.keys.copy())


class PlainTable(KeyTable):
    """A `KeyTable` on a Python dict."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._numbers: dict[tuple[int, bytes], int] = {}

    def _forget(self) -> None:
        self._numbers.clear()

    def _search(self, hashes: Numbers, keys: Bytes, *, extend: bool) -> Numbers:
        numbers = self._numbers
        found = np.empty(len(hashes), np.int64)
        for row, (value, key) in enumerate(zip(hashes.tolist(), keys, strict=True)):
            entry = (value, key.tobytes())
            if extend and entry not in numbers:
                self._keys[self._count] = key
                numbers[entry] = self._count
                self._count += 1
            found[row] = numbers.get(entry, -1)
        return found


class CompiledTable(KeyTable):
    """A `KeyTable` with open addressing; its functions release the interpreter lock."""

    def __init__(self, width: int, compiled: ModuleType) -> None:
        super().__init__(width)
        self._loops = compiled
        self._slots = np.zeros((2, 2), np.int64)

    def _spread(self) -> None:
        self._slots = np.zeros((1 << (2 * len(self._hashes) - 1).bit_length(), 2), np.int64)
        self._loops.fill_slots(self.hashes, self._slots)

    def _forget(self) -> None:
        self._slots.fill(0)

    def _search(self, hashes: Numbers, keys: Bytes, *, extend: bool) -> Numbers:
        hashes, keys = np.ascontiguousarray(hashes), np.ascontiguousarray(keys)
        found = np.empty(len(hashes), np.int64)
        known = _address(self._keys)
        self._count = self._loops.find_keys(
            hashes, _address(keys), self.width, self._slots, known, self._count, extend, found
        )
        return found


def _address(array: NDArray[Any]) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def key_table(width: int) -> KeyTable:
    """Make a compiled table if numba can be imported, otherwise a plain one."""
    compiled = compiled_module("compiled_hashes", __package__)
    return PlainTable(width) if compiled is None else CompiledTable(width, compiled)


def _rebuilt(width: int, hashes: Numbers, keys: Bytes) -> KeyTable:
    table = key_table(width)
    table.add(hashes, keys)
    return table


DEFAULT_KEY = bytes(range(16))
"""The default key, from SipHash's published test vectors."""


def row_bytes(rows: Any, what: str = "the tensor") -> Bytes:
    """Return the bytes of each row of a tensor `[n, …]` of any dtype as uint8 `[n, width]`.

    SchemaError for tensors without dimensions, sparse and nested tensors, and tensors on the device `meta`.
    """
    if not isinstance(rows, torch.Tensor):
        raise SchemaError(f"{what} is a {type(rows).__name__}; only rows of tensors can be hashed")
    if rows.is_nested or rows.layout != torch.strided or rows.is_meta:
        raise SchemaError(f"{what} is nested, sparse or without data; only rows of dense tensors can be hashed")
    if not rows.dim():
        raise SchemaError(f"{what} has no dimensions; the first one must count the rows that are hashed")
    width = math.prod(rows.shape[1:]) * rows.element_size()
    if not rows.numel():
        return np.zeros((len(rows), width), np.uint8)
    flat = rows.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # possible for a single element, even if it is contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    found: Bytes = flat.view(torch.uint8).numpy().reshape(len(rows), width)
    return found


class BinaryToDecimal(nn.Module):
    """Reads the last dimension as binary numbers of `num_bits` bits and returns their sum.

    `[…, k * num_bits]` becomes `[…]`: the last dimension is cut into k chunks, most significant bit first, and the
    values of the chunks are added. Different rows may have the same sum.

    Args:
        num_bits: bits per number.
        device, dtype: of the result.
        convert_to_binary: count values above 0 as 1 and all others as 0.

    Raises:
        UsageError (a ValueError): a value is neither 0 nor 1 (without `convert_to_binary`), the last dimension is not a
            multiple of `num_bits`, or a sum does not fit `dtype`.

    >>> to_decimal = BinaryToDecimal(num_bits=4, device="cpu", dtype=torch.int32)
    >>> to_decimal(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]))
    tensor([ 6, 15], dtype=torch.int32)
    """

    def __init__(
        self,
        num_bits: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.int64,
        convert_to_binary: bool = False,
    ) -> None:
        super().__init__()
        if type(num_bits) is not int or not 1 <= num_bits <= 62:
            raise UsageError(f"num_bits is {num_bits!r}; expected a whole number from 1 to 62")
        self.num_bits = num_bits
        self.dtype = dtype
        self.convert_to_binary = convert_to_binary
        bases = 1 << torch.arange(num_bits - 1, -1, -1, dtype=torch.int64, device=device)
        self.register_buffer("bases", bases, persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        bases: torch.Tensor = self.get_buffer("bases")
        size = features.shape[-1] if features.dim() else 0
        if not size or size % self.num_bits:
            raise UsageError(f"the last dimension has {size} bits; expected a multiple of {self.num_bits}")
        if self.convert_to_binary:
            features = features > 0
        elif ((features != 0) & (features != 1)).any():
            raise UsageError("found a value that is neither 0 nor 1", hint="use convert_to_binary=True")
        chunks = features.to(bases.device, torch.int64).unflatten(-1, (-1, self.num_bits))
        sums = (chunks * bases).sum((-1, -2))
        limits = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        if sums.numel() and sums.max() > limits.max:
            raise UsageError(f"the sum {int(sums.max())} does not fit {self.dtype}")
        decimals: torch.Tensor = sums.to(self.dtype)
        return decimals


class SipHash(nn.Module):
    """Hashes each row of a tensor `[n, …]` with SipHash-2-4; returns int64 `[n]` on the tensor's device.

    A hash depends only on the bytes of the row: it is the same in every process and on every machine, and differs for
    0.0 and -0.0. SipHash is by Aumasson and Bernstein (2012). TorchRL's module of this name uses Python's `hash`, which
    differs from one process to the next.

    Args:
        as_tensor: if False, return the bytes of each row unhashed, as a list.
        key: 16 bytes; by default the key of the published test vectors.

    Raises:
        SchemaError (a RuntimeError): the tensor has no dimensions, or is nested or sparse.

    >>> SipHash()(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.1, 0.2]])).unique().numel()
    2
    """

    def __init__(self, as_tensor: bool = True, *, key: bytes = DEFAULT_KEY) -> None:
        super().__init__()
        if type(key) is not bytes or len(key) != 16:
            raise UsageError(f"key is {key!r}, expected 16 bytes")
        self.as_tensor = as_tensor
        self.key = key

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[bytes]:
        rows = row_bytes(x)
        if not self.as_tensor:
            return [row.tobytes() for row in rows]
        return torch.from_numpy(siphash(rows, self.key)).to(x.device)


class RandomProjectionHash(SipHash):
    """Projects each row of a tensor `[n, …]` onto random directions, rounds, and hashes the result.

    Similar rows get the same hash, so the hash groups states rather than identifies them. The directions have entries
    +1 and -1 (Achlioptas, 2003) and are the same in every process. They are drawn when a number of features is seen for
    the first time, or in advance by `fit`. Sums are computed in float64, feature by feature, so that a hash depends
    neither on the machine nor on the number of rows in a call.

    Args:
        n_components: the number of directions.
        dtype_cast: the floating type that the projections are rounded to.
        as_tensor: if False, return the bytes of the projections unhashed, as a list.
        init_method: fills a float tensor `[features, n_components]` in place with directions, or returns one.
        key: see `SipHash`.

    Raises:
        UsageError (a ValueError): there is less than 1 component, or `dtype_cast` is not a floating type.
    """

    def __init__(
        self,
        *,
        n_components: int | None = None,
        dtype_cast: torch.dtype = torch.bfloat16,
        as_tensor: bool = True,
        init_method: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        key: bytes = DEFAULT_KEY,
    ) -> None:
        super().__init__(as_tensor, key=key)
        self.n_components = 16 if n_components is None else n_components
        if type(self.n_components) is not int or self.n_components < 1:
            raise UsageError(f"n_components is {n_components!r}; expected a whole number from 1")
        if not dtype_cast.is_floating_point:
            raise UsageError(f"dtype_cast is {dtype_cast}; expected a floating type")
        self.dtype_cast = dtype_cast
        self.init_method = init_method
        self._matrices: dict[int, torch.Tensor] = {}

    def fit(self, x: torch.Tensor) -> None:
        """Draw the directions for rows of the width of `x`, `[n, …]`, unless they exist already."""
        self._matrix(math.prod(x.shape[1:]))

    def _matrix(self, features: int) -> torch.Tensor:
        if features not in self._matrices:
            self._matrices[features] = self._drawn(features)
        return self._matrices[features]

    def _drawn(self, features: int) -> torch.Tensor:
        shape = (features, self.n_components)
        if self.init_method is None:
            places = np.arange(math.prod(shape), dtype="<i8").view(np.uint8).reshape(-1, 8)
            signs = 1 - 2 * (siphash(places, DEFAULT_KEY) & 1)
            return torch.from_numpy(signs.astype(np.float64)).reshape(shape)
        given = torch.empty(shape)
        returned = self.init_method(given)
        matrix = given if returned is None else returned
        if matrix.shape != shape:
            raise SchemaError(f"init_method made {list(matrix.shape)}, expected {list(shape)}")
        return matrix.detach().cpu().double()

    def forward(self, x: Any) -> torch.Tensor | list[bytes]:
        if not isinstance(x, torch.Tensor) or not x.dim() or x.is_complex():
            raise SchemaError("expected a tensor of real numbers whose first dimension counts rows")
        rows = x.detach().cpu().reshape(len(x), math.prod(x.shape[1:])).double()
        projected = project(rows.numpy(), self._matrix(rows.shape[1]).numpy())
        return super().forward(torch.from_numpy(projected).to(self.dtype_cast).to(x.device))

    def get_extra_state(self) -> dict[int, torch.Tensor]:
        return dict(self._matrices)

    def set_extra_state(self, state: dict[int, torch.Tensor]) -> None:
        self._matrices = dict(state)


class HashToInt(nn.Module):
    """Assigns consecutive numbers from 0 to hashes, in the order in which they are first seen.

    Called with int64 hashes of any shape, it returns their numbers in the same shape. Unknown hashes raise
    MissingKeyError (a KeyError); with `extend=True` they get the next numbers instead. `find` and `add` also take the
    hashed keys and compare them byte by byte, so that keys whose hashes collide get different numbers. The table grows
    by doubling and is part of `state_dict()`.

    >>> numbers = HashToInt()
    >>> numbers(torch.tensor([70, -3, 70]), extend=True)
    tensor([0, 1, 0])
    """

    def __init__(self) -> None:
        super().__init__()
        self._table: KeyTable | None = None

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    def forward(self, hashes: Any, extend: bool = False) -> torch.Tensor:
        if not isinstance(hashes, torch.Tensor) or hashes.dtype != torch.int64:
            found = hashes.dtype if isinstance(hashes, torch.Tensor) else f"a {type(hashes).__name__}"
            raise SchemaError(f"expected hashes as an int64 tensor, found {found}")
        flat = hashes.detach().cpu().reshape(-1)
        keys = np.empty((len(flat), 0), np.uint8)
        numbers = self.add(flat, keys) if extend else self.find(flat, keys)
        if unknown := int((numbers < 0).sum()):
            raise MissingKeyError(
                f"{unknown} of {len(flat)} hashes were never seen", hint="use extend=True to add them"
            )
        return numbers.reshape(tuple(hashes.shape)).to(hashes.device)

    def find(self, hashes: torch.Tensor, keys: Bytes) -> torch.Tensor:
        """Return the numbers of keys, int64 `[n]` on the CPU, -1 for unknown keys.

        Args:
            hashes: the hashes of the keys, int64 `[n]`.
            keys: the keys, uint8 `[n, width]`. SchemaError if earlier keys had another width.
        """
        if self._table is None:
            return torch.full((len(keys),), -1)
        return torch.from_numpy(self._of(keys).find(hashes.cpu().numpy(), keys))

    def add(self, hashes: torch.Tensor, keys: Bytes) -> torch.Tensor:
        """Return the numbers of keys as `find` does, but give unknown keys the next numbers."""
        return torch.from_numpy(self._of(keys).add(hashes.cpu().numpy(), keys))

    def _of(self, keys: Bytes) -> KeyTable:
        if self._table is None:
            self._table = key_table(keys.shape[1])
        if self._table.width != keys.shape[1]:
            raise SchemaError(f"keys have {keys.shape[1]} bytes, earlier ones have {self._table.width}")
        return self._table

    def truncate(self, count: int) -> None:
        """Forget the numbers from `count` on; after `truncate(0)`, keys may have another width."""
        if self._table is not None:
            self._table.truncate(count)
        if not count:
            self._table = None

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        if self._table is None:
            return {}
        hashes, keys = torch.from_numpy(self._table.hashes.copy()), torch.from_numpy(self._table.keys.copy())
        return {"hashes": hashes, "keys": keys}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._table = None
        if state:
            self.add(state["hashes"], state["keys"].numpy())
