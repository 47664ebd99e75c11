"""Maps from tensordicts to tensordicts: `QueryModule` numbers keys, `TensorDictMap` stores a value for each number.

    key entries  ->  hash per entry  ->  one hash  ->  number  ->  row of a storage
    (in_keys)        (hash_module)       (aggregator)  (HashToInt, compares the keys' bytes)

Hashes and tables of keys are computed by compiled loops if numba can be imported, and otherwise by NumPy.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import nn

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean
from ..kernels.rows import compiled_module
from ..storages.base import Storage
from ..storages.cursors import as_index, row_numbers
from ..storages.lazy_tensor import LazyTensorStorage

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_LEAST = 1024
"""The smallest number of entries for which growing tables and storages make room."""


def siphash(rows: Bytes, key: bytes) -> Numbers:
    """Hash each row of uint8 `[n, width]` with SipHash-2-4 (Aumasson and Bernstein, 2012); int64 `[n]`.

    `key` is 16 bytes. Hashes are the same in every process and on every machine. The hash of the paper is unsigned; the
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
    """Compute `siphash` with NumPy, one word of all rows at a time."""
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

    The result of a BLAS matrix product would depend on the machine and the number of rows.
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
    """Numbers keys, which are rows of `width` bytes, from 0 in the order in which they are added.

    Keys are compared byte by byte, so that two keys with the same hash get different numbers. With width 0, the hash
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
        """Return the numbers of keys, int64 `[n]`; missing keys are added and get the next numbers."""
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
        """Called when the arrays for entries have grown."""

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
    """A `KeyTable` with open addressing, in compiled loops that release the interpreter lock."""

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

    SchemaError if the tensor has no dimensions, is sparse or nested, or is on the device `meta`; `what` names it.
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
    if flat.stride(0) != 1:  # a tensor with a single element is contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    found: Bytes = flat.view(torch.uint8).numpy().reshape(len(rows), width)
    return found


class BinaryToDecimal(nn.Module):
    """Reads the last dimension as binary numbers of `num_bits` bits and returns their sum.

    `[…, k * num_bits]` becomes `[…]`: the last dimension is cut into k chunks, each with the most significant bit
    first, and the values of the chunks are added. Different rows may have the same sum.

    Args:
        num_bits: the number of bits of each number.
        device, dtype: the device and element type of the result.
        convert_to_binary: whether values above 0 count as 1, and all others as 0.

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
        as_tensor: if False, the bytes of each row are returned as a list, without hashing.
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

    Similar rows get the same hash, so that the hash groups states rather than identifying them. Directions have the
    entries +1 and -1 (Achlioptas, 2003), and are the same in every process. They are made when a number of features is
    first seen, or in advance by `fit`. Sums are computed in float64, feature by feature, so that hashes do not depend
    on the machine or the number of rows in a call.

    Args:
        n_components: the number of directions.
        dtype_cast: the floating type that the projections are rounded to.
        as_tensor: if False, the bytes of the projections are returned as a list, without hashing.
        init_method: a function that fills a float tensor `[features, n_components]` with directions in place, or
            returns one.
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
        """Make the directions for rows with as many features as `x`, `[n, …]`, unless they exist already."""
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

    Calling it with int64 hashes of any shape returns their numbers in the same shape. Unknown hashes raise
    MissingKeyError (a KeyError); with `extend=True` they get the next numbers instead. `find` and `add` also take the
    hashed keys and compare them byte by byte, so that keys whose hashes collide get different numbers. The table grows
    by doubling, and is part of `state_dict()`.

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
        """Return the numbers of keys as `find` does; unknown keys get the next numbers."""
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


Key = str | tuple[str, ...]
HashModule = Callable[[torch.Tensor], Any]


Kinds = list[tuple[torch.dtype, torch.Size]]
"""The dtype and the shape, without the batch size, of each entry of a key."""


class Hashed(NamedTuple):
    """The n keys in a tensordict of batch size `batch`: their hashes, int64 `[n]`, and bytes, uint8 `[n, width]`.

    `kinds` has the dtype and shape of each entry. `device` is the device of the first entry, to which results for the
    user are moved.
    """

    hashes: torch.Tensor
    keys: Bytes
    batch: torch.Size
    kinds: Kinds
    device: torch.device


class QueryModule(TensorDictModuleBase):
    """Numbers the keys in tensordicts: equal values of the entries `in_keys` get the same number, counted from 0.

    Calling the module writes the numbers, int64 `[*batch]`, under `index_key`, and with `write_hash` the hashes under
    `hash_key`. Unknown keys get the next numbers; with `extend=False` they raise MissingKeyError. Keys are compared
    byte by byte, so that keys whose hashes collide get different numbers. Names and defaults match TorchRL, except that
    TorchRL's `aggregator` defaults to a single given `hash_module`.

    Args:
        in_keys: the entries, `[*batch, …]`, that make up a key.
        index_key, hash_key: the entries to which numbers and hashes are written.
        hash_module: the module that hashes the rows of an entry: it takes a tensor `[n, …]` and returns n integers. One
            module, or a list with one for each entry; by default `SipHash`.
        hash_to_int: the module that numbers the hashes; by default a new `HashToInt`.
        aggregator: the module that hashes the hashes of several entries, int64 `[n, entries]`, to one; by default
            `SipHash`.
        clone: whether to write to a shallow copy of the tensordict, and return that.

    Raises:
        UsageError (a ValueError): `in_keys` is empty, or the number of modules differs from the number of entries.
        MissingKeyError (a KeyError): the tensordict lacks an entry, or a key is unknown and `extend` is False.
        SchemaError (a RuntimeError): an entry is not a tensor, or its dtype or shape differs from earlier keys.

    >>> from tensordict import TensorDict
    >>> query = QueryModule(in_keys=["state", "goal"])
    >>> keys = TensorDict(state=torch.tensor([[1.0], [1.0], [2.0]]), goal=torch.tensor([3, 3, 3]), batch_size=3)
    >>> query(keys)["_index"]
    tensor([0, 0, 1])
    """

    def __init__(
        self,
        in_keys: Sequence[Key],
        index_key: Key = "_index",
        hash_key: Key = "_hash",
        *,
        hash_module: HashModule | Sequence[HashModule] | None = None,
        hash_to_int: HashToInt | None = None,
        aggregator: HashModule | None = None,
        clone: bool = False,
    ) -> None:
        if isinstance(in_keys, str) or not len(in_keys):
            raise UsageError(f"in_keys is {in_keys!r}; expected a list of one key or more")
        if hash_to_int is not None and not isinstance(hash_to_int, HashToInt):
            raise UsageError(f"hash_to_int is a {type(hash_to_int).__name__}; expected a HashToInt")
        super().__init__()
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.out_keys = [unravel_key(index_key), unravel_key(hash_key)]
        self.index_key, self.hash_key = self.out_keys
        self.clone = clone
        modules = self._modules_of(hash_module)
        self.hash_modules = nn.ModuleList(module for module in modules if isinstance(module, nn.Module))
        self._hash_modules = modules
        self.aggregator = SipHash() if aggregator is None else aggregator
        self.hash_to_int = HashToInt() if hash_to_int is None else hash_to_int
        self._kinds: Kinds | None = None

    @property
    def hash_module(self) -> dict[Key, HashModule]:
        """The hash module of each of the entries `in_keys`."""
        return dict(zip(self.in_keys, self._hash_modules, strict=True))

    def _modules_of(self, given: HashModule | Sequence[HashModule] | None) -> list[HashModule]:
        if given is None or callable(given):
            return [given or SipHash()] * len(self.in_keys)
        if len(given) != len(self.in_keys):
            raise UsageError(f"found {len(given)} hash modules, expected one for each of {len(self.in_keys)} keys")
        return list(given)

    def __len__(self) -> int:
        return len(self.hash_to_int)

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        extend: bool = True,
        write_hash: bool = True,
        clone: bool | None = None,
    ) -> TensorDictBase:
        hashed = self.hashed(tensordict)
        numbers = self.add(hashed) if extend else known_only(self.find(hashed))
        written = tensordict.copy() if (self.clone if clone is None else clone) else tensordict
        self.write(written, hashed, numbers, write_hash=write_hash)
        return written

    def write(
        self, tensordict: TensorDictBase, hashed: Hashed, numbers: torch.Tensor, *, write_hash: bool = True
    ) -> None:
        """Write numbers, int64 `[n]`, and with `write_hash` hashes, into a tensordict."""
        tensordict.set(self.index_key, numbers.reshape(hashed.batch).to(hashed.device))
        if write_hash:
            tensordict.set(self.hash_key, hashed.hashes.reshape(hashed.batch).to(hashed.device))

    def hashed(self, tensordict: TensorDictBase) -> Hashed:
        """Hash the keys in a tensordict without numbering them."""
        if not is_tensor_collection(tensordict):
            raise UsageError(f"expected a tensordict with the keys, found a {type(tensordict).__name__}")
        batch = tensordict.batch_size
        entries = [self._entry(tensordict, key) for key in self.in_keys]
        kinds = [(entry.dtype, entry.shape[len(batch) :]) for entry in entries]
        if self._kinds is not None and kinds != self._kinds:
            self._refuse(kinds, self._kinds)
        flat = [entry.reshape(math.prod(batch), *entry.shape[len(batch) :]) for entry in entries]
        rows = [row_bytes(entry, f"{key!r}") for entry, key in zip(flat, self.in_keys, strict=True)]
        hashes = [self._hash(module, entry) for module, entry in zip(self._hash_modules, flat, strict=True)]
        whole = hashes[0] if len(hashes) == 1 else self._hash(self.aggregator, torch.stack(hashes, -1))
        keys = rows[0] if len(rows) == 1 else np.concatenate(rows, 1)
        return Hashed(whole, keys, batch, kinds, entries[0].device)

    def _entry(self, tensordict: TensorDictBase, key: Key) -> torch.Tensor:
        entry = tensordict.get(key, None)
        if entry is None:
            names = [name if isinstance(name, str) else ".".join(name) for name in tensordict.keys(True, True)]
            name = key if isinstance(key, str) else ".".join(key)
            raise MissingKeyError(f"the key {key!r} is not in the tensordict{did_you_mean(name, names)}")
        if not isinstance(entry, torch.Tensor) or entry.is_nested or entry.layout != torch.strided:
            raise SchemaError(f"{key!r} is a {type(entry).__name__}; only entries that are dense tensors can be hashed")
        return entry

    def _refuse(self, found: Kinds, known: Kinds) -> None:
        for key, (dtype, shape), (expected, like) in zip(self.in_keys, found, known, strict=True):
            if (dtype, shape) != (expected, like):
                raise SchemaError(f"{key!r} is {dtype} {list(shape)}, expected {expected} {list(like)} as before")

    @staticmethod
    def _hash(module: HashModule, rows: torch.Tensor) -> torch.Tensor:
        """Hash rows `[n, …]` to int64 `[n]` on the CPU."""
        found = module(rows)
        if isinstance(found, list) and found and isinstance(found[0], bytes):
            raise UsageError("a hash module returned bytes, expected integers", hint="use as_tensor=True")
        hashes = torch.as_tensor(found).detach().cpu()
        if hashes.shape != rows.shape[:1] or hashes.is_complex():
            raise SchemaError(
                f"a hash module returned {list(hashes.shape)} for {len(rows)} rows, expected a number each"
            )
        return hashes.double().view(torch.int64) if hashes.is_floating_point() else hashes.long()

    def find(self, hashed: Hashed) -> torch.Tensor:
        """Return the numbers of keys, int64 `[n]`, -1 for unknown keys."""
        return self.hash_to_int.find(hashed.hashes, hashed.keys)

    def add(self, hashed: Hashed) -> torch.Tensor:
        """Return the numbers of keys, int64 `[n]`; unknown keys get the next numbers."""
        numbers = self.hash_to_int.add(hashed.hashes, hashed.keys)
        if len(numbers):
            self._kinds = hashed.kinds
        return numbers

    def truncate(self, count: int) -> None:
        """Forget the numbers from `count` on; with 0 also the dtypes and shapes of keys."""
        self.hash_to_int.truncate(count)
        if not count:
            self._kinds = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"kinds": self._kinds}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._kinds = state["kinds"]


def known_only(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers of keys; MissingKeyError if one is negative, because the key is unknown."""
    unknown = numbers < 0
    if unknown.any():
        count, first = int(unknown.sum()), int(unknown.nonzero()[0, 0])
        raise MissingKeyError(f"{count} of {len(numbers)} keys are not in the map, the first of them in row {first}")
    return numbers


K = TypeVar("K")
V = TypeVar("V")

WriteFunction = Callable[..., Any]


class TensorMap(ABC, Generic[K, V]):
    """A map from batches of keys to batches of values."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all entries."""

    @abstractmethod
    def __getitem__(self, item: K) -> V:
        """Return the values of keys; KeyError for an unknown key."""

    @abstractmethod
    def __setitem__(self, key: K, value: V) -> None:
        """Set the values of keys."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of entries."""

    @abstractmethod
    def contains(self, item: K) -> torch.Tensor:
        """Return which of the keys have a value, a bool tensor of the keys' batch size on the keys' device."""

    def __contains__(self, item: K) -> bool:
        """Whether all of the keys have a value."""
        return bool(self.contains(item).all())


class TensorDictMap(TensorDictModuleBase, TensorMap[Any, TensorDictBase]):
    """A dictionary from tensordicts to tensordicts: a storage whose rows are looked up by keys.

    - `map[key] = value` stores entries of `value` for the keys in the tensordict `key`, and writes row numbers and
      hashes into `key` unless it is locked. If a key occurs several times in a batch, its last value counts.
    - `map[key]` and `map(key)` return the values, and do not change `key`. `map[index]` reads rows by number.
    - `map.contains(key)` returns which keys have a value, a bool tensor; `key in map` whether all of them do;
      `len(map)` the number of keys with a value.

    Keys and values have any batch size, including `[]`. A write that fails changes nothing.

    Args:
        query_module: the module that numbers the keys; its `in_keys` are the entries that make up a key.
        storage: a storage of tensordicts, or a dict of storages, one for each out key.
        collate_fn: a function that makes a batch of what a storage returns for several rows. By default objects are
            stacked, and tensors are used unchanged.
        out_keys: the entries of values that are stored; by default all entries of the first value. If they are given
            for a single storage, entries that the first value lacks are left out.
        write_fn: a function that computes the value to store: `write_fn(new)` for a new key, `write_fn(new, old)` for a
            key with a value. Equal keys in a batch are then written one after the other.

    Raises:
        MissingKeyError (a KeyError): a key is unknown, or a value has none of the entries to store.
        IndexError: a row number is beyond the map.
        SchemaError (a RuntimeError): a value does not fit the storage, or the storage is full.

    >>> query = QueryModule(in_keys=["state", "action"])
    >>> results = TensorDictMap(query_module=query, storage={"next_state": LazyTensorStorage(100)})
    >>> key = TensorDict(state=torch.tensor([[0.5], [1.5]]), action=torch.tensor([1, 0]), batch_size=2)
    >>> results[key] = TensorDict(next_state=torch.tensor([[1.5], [2.5]]), batch_size=2)
    >>> results[key[1]]["next_state"]
    tensor([2.5000])
    """

    def __init__(
        self,
        *,
        query_module: QueryModule,
        storage: Storage | Mapping[Key, Storage],
        collate_fn: Callable[[Any], Any] | None = None,
        out_keys: Sequence[Key] | None = None,
        write_fn: WriteFunction | None = None,
    ) -> None:
        parts = storage.values() if isinstance(storage, Mapping) else [storage]
        if not parts or not all(isinstance(part, Storage) for part in parts):
            raise UsageError("expected storage to be a storage, or a dict of storages by out key")
        super().__init__()
        self.query_module = query_module
        self.in_keys = query_module.in_keys
        self.storage: Any = storage if isinstance(storage, Storage) else {unravel_key(k): s for k, s in storage.items()}
        self.collate_fn = _stacked if collate_fn is None else collate_fn
        self.write_fn = write_fn
        self._remake: Callable[[int], Storage] | None = None
        self._wanted = list(map(unravel_key, out_keys or (() if isinstance(storage, Storage) else storage)))
        self._out_keys = list(self._wanted)
        self._may_lack = bool(out_keys) and isinstance(storage, Storage)
        """Whether values may lack some out keys; after the first write, all have to fit the stored ones."""
        if isinstance(storage, Mapping) and set(self._wanted) != set(self.storage):
            raise UsageError(f"out_keys are {self._wanted}, but the storages are for {list(self.storage)}")
        self._filled = torch.zeros(0, dtype=torch.bool)
        self._count = 0

    @classmethod
    def from_tensordict_pair(
        cls,
        source: TensorDictBase,
        dest: TensorDictBase,
        in_keys: Sequence[Key],
        out_keys: Sequence[Key] | None = None,
        max_size: int | None = None,
        storage_constructor: Callable[..., Storage] | None = None,
        hash_module: HashModule | Sequence[HashModule] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        write_fn: WriteFunction | None = None,
        consolidated: bool | None = None,
    ) -> TensorDictMap:
        """Make a map for keys like `source` and values like `dest`.

        Args:
            source: an example of keys.
            dest: an example of values.
            in_keys, out_keys: the entries of keys and values; by default values consist of all entries of `dest`. Given
                `out_keys` may be missing in `dest`.
            max_size: the largest number of keys. With None, the default (TorchRL's is 1000), memory grows by doubling.
            storage_constructor: a class, which is called with `max_size` (1000 if it is None), or a function without
                arguments.
            hash_module: see `QueryModule`.
            collate_fn, write_fn: see `TensorDictMap`.
            consolidated: whether to put all entries into one piece of memory.

        Raises:
            MissingKeyError (a KeyError): `source` lacks one of the keys.
        """
        query = QueryModule(in_keys=in_keys, hash_module=hash_module)
        query.hashed(source)
        wanted = list(map(unravel_key, out_keys)) if out_keys else list(dest.keys(True, True))
        remake: Callable[[int], Storage] | None = None
        if storage_constructor is None:
            make = functools.partial(LazyTensorStorage, device="auto", consolidated=bool(consolidated))
            remake = make if max_size is None else None
            storage: Storage = make(_LEAST if max_size is None else max_size)
        elif isinstance(storage_constructor, type):
            storage = storage_constructor(1000 if max_size is None else max_size)
        else:
            storage = storage_constructor()
        made = cls(query_module=query, storage=storage, collate_fn=collate_fn, out_keys=wanted, write_fn=write_fn)
        made._remake, made._may_lack = remake, bool(out_keys)
        return made

    @property
    def max_size(self) -> int | None:
        """The largest number of keys; None for a map that grows."""
        return None if self._remake is not None else min(storage.max_size for _, storage in self._stores())

    @property
    def out_keys(self) -> list[Key]:
        """The entries of values; empty before the first write if none were given."""
        keys: list[Key] = self._out_keys
        return keys

    @out_keys.setter
    def out_keys(self, keys: Sequence[Key]) -> None:
        self._out_keys = list(keys)

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        self.query_module.truncate(0)
        for _, storage in self._stores():
            storage.empty()
        self._out_keys = list(self._wanted)
        self._filled, self._count = torch.zeros(0, dtype=torch.bool), 0

    def contains(self, item: TensorDictBase) -> torch.Tensor:
        hashed = self.query_module.hashed(item)
        return (self._rows(hashed) >= 0).reshape(hashed.batch).to(hashed.device)

    def __contains__(self, item: Any) -> bool:  # mypy needs to know from which base class it comes
        return TensorMap.__contains__(self, item)

    def _stores(self) -> Iterator[tuple[Key | None, Storage]]:
        yield from self.storage.items() if isinstance(self.storage, dict) else [(None, self.storage)]

    # Reading ---------------------------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self[tensordict]

    def __getitem__(self, item: Any) -> TensorDictBase:
        if is_tensor_collection(item):
            hashed = self.query_module.hashed(item)
            return self._read(known_only(self._rows(hashed)), hashed.batch)
        length = min(len(storage) for _, storage in self._stores())
        rows = torch.as_tensor(row_numbers(as_index(item, 1), length))
        flat = rows.reshape(-1)
        empty = ~self._filled[flat]
        if empty.any():
            raise IndexError(f"row {int(flat[empty][0])} has no value")
        return self._read(flat, rows.shape)

    def _rows(self, hashed: Hashed) -> torch.Tensor:
        """Return the rows of keys, int64 `[n]`, -1 for keys without a value."""
        rows = self.query_module.find(hashed)
        if self._count == len(self.query_module):
            return rows
        known = (rows >= 0) & (rows < len(self._filled))
        known[known.clone()] &= self._filled[rows[known]]
        return torch.where(known, rows, -1)

    def _read(self, rows: torch.Tensor, batch: torch.Size) -> TensorDictBase:
        """Read rows, int64 `[n]`, as a tensordict of batch size `batch`."""
        found = {key: self.collate_fn(storage.get(rows)) for key, storage in self._stores()}
        values = found[None] if None in found else TensorDict(found, rows.shape)
        return values if batch == rows.shape else values.reshape(batch)

    # Writing ---------------------------------------------------------------------------------------

    def __setitem__(self, key: TensorDictBase, value: TensorDictBase) -> None:
        hashed = self.query_module.hashed(key)
        if not is_tensor_collection(value) or value.batch_size != hashed.batch:
            found = f"batch size {list(value.batch_size)}" if is_tensor_collection(value) else type(value).__name__
            raise SchemaError(f"the value has {found}; expected a tensordict of batch size {list(hashed.batch)}")
        kept = self._kept(value)
        count = len(self.query_module)
        rows = self.query_module.add(hashed)
        try:
            self._store(rows, value.select(*kept).reshape(len(rows)))
        except BaseException:
            self.query_module.truncate(count)
            raise
        if not key.is_locked:
            self.query_module.write(key, hashed, rows)

    def _kept(self, value: TensorDictBase) -> list[Key]:
        """Return which entries of a value are stored; MissingKeyError if none exists, or a required one is missing."""
        keys = self._out_keys or list(value.keys(True, True))
        found = [key for key in keys if value.get(key, None) is not None]
        if not found or (len(found) < len(keys) and not self._may_lack):
            lacking = next((key for key in keys if key not in found), None)
            raise MissingKeyError(f"the value has no entry {lacking!r}; its keys are {list(value.keys(True, True))}")
        return found

    def _store(self, rows: torch.Tensor, values: TensorDictBase) -> None:
        """Write values, `[n]`, to rows, int64 `[n]`: all of them, or none if an error occurs."""
        if not len(rows):
            return
        out_keys = self._out_keys or list(values.keys(True, True))
        self._make_room(int(rows.max()) + 1)
        if len(self._filled) < len(self.query_module):
            grown = torch.zeros(max(_LEAST, 2 * len(self._filled), len(self.query_module)), dtype=torch.bool)
            grown[: len(self._filled)] = self._filled
            self._filled = grown
        if self.write_fn is not None:
            rows, values = self._merged(self.write_fn, rows, values)
        self._write(*self._without_gaps(rows, values))
        fresh = rows[~self._filled[rows]]
        self._filled[fresh] = True
        self._count += len(fresh.unique()) if len(fresh) else 0
        self._out_keys = out_keys

    def _make_room(self, count: int) -> None:
        """Make room for `count` rows in the storage; SchemaError if they exceed `max_size`."""
        size = min(storage.max_size for _, storage in self._stores())
        if count <= size:
            return
        if self._remake is None:
            raise SchemaError(f"found {count} different keys, but the map has room for {size}")
        larger = self._remake(max(2 * size, count))
        if len(self.storage):
            larger.set(range(len(self.storage)), self.storage.get(slice(None)))
        self.storage = larger

    def _merged(
        self, write: WriteFunction, rows: torch.Tensor, values: TensorDictBase
    ) -> tuple[torch.Tensor, TensorDictBase]:
        """Pass values through `write_fn`; return distinct rows and the values to store there.

        If a key occurs several times, its values are passed one after the other: in turn t, all keys with more than t
        values are written at once.
        """
        order = rows.argsort(stable=True)
        ordered, _, counts = rows[order].unique_consecutive(return_inverse=True, return_counts=True)
        starts = counts.cumsum(0) - counts
        filled = self._filled[ordered]
        merged: list[Any] = [None] * len(ordered)
        if filled.any():
            old = self._read(ordered[filled], ordered[filled].shape)
            for place, stored in zip(filled.nonzero()[:, 0].tolist(), old.unbind(0), strict=True):
                merged[place] = stored
        for turn in range(int(counts.max())):
            due = (counts > turn).nonzero()[:, 0]
            new = values[order[starts[due] + turn]]
            fresh = torch.tensor([merged[place] is None for place in due.tolist()])
            for chosen, known in ((due[fresh], False), (due[~fresh], True)):
                if len(chosen):
                    given = new[~fresh if known else fresh]
                    before = torch.stack([merged[place] for place in chosen.tolist()]) if known else None
                    made = write(given, before) if known else write(given)
                    for place, one in zip(chosen.tolist(), made.unbind(0), strict=True):
                        merged[place] = one
        stacked: Any = torch.stack(merged)
        return ordered, stacked

    def _without_gaps(self, rows: torch.Tensor, values: TensorDictBase) -> tuple[torch.Tensor, TensorDictBase]:
        """Add placeholder rows for keys that were numbered but never got a value; they are never read."""
        length = min(len(storage) for _, storage in self._stores())
        top = int(rows.max()) + 1
        if top <= length:
            return rows, values
        lacking = torch.ones(top - length, dtype=torch.bool)
        lacking[rows[rows >= length] - length] = False
        gaps = lacking.nonzero()[:, 0] + length
        if not len(gaps):
            return rows, values
        filled: Any = torch.cat([values[:1].expand(len(gaps)), values])
        return torch.cat([gaps, rows]), filled

    def _write(self, rows: torch.Tensor, values: TensorDictBase) -> None:
        done: list[tuple[Storage, Any]] = []
        known = rows[rows < min(len(storage) for _, storage in self._stores())]
        try:
            for key, storage in self._stores():
                before = storage.get(known) if isinstance(self.storage, dict) and len(known) else None
                storage.set(rows, values if key is None else values.get(key))
                done.append((storage, before))
        except BaseException:
            for storage, before in done:
                if before is not None:
                    storage.set(known, before)
            raise

    # State -----------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        states = [(key, storage.state_dict(), len(storage)) for key, storage in self._stores()]
        return {"storages": states, "filled": self._filled, "count": self._count, "out_keys": self._out_keys}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if [key for key, _, _ in state["storages"]] != [key for key, _ in self._stores()]:
            raise SchemaError("the saved map has storages for other keys than this one")
        if self._remake is not None and state["storages"][0][2] > self.storage.max_size:
            self.storage = self._remake(state["storages"][0][2])
        for (_, saved, _), (_, storage) in zip(state["storages"], self._stores(), strict=True):
            storage.load_state_dict(saved)
        self._filled, self._count = state["filled"].clone(), state["count"]
        self._out_keys = list(state["out_keys"])


def _stacked(found: Any) -> Any:
    """Return one batch from what a storage returned for several rows."""
    if not isinstance(found, list):
        return found
    if found and is_tensor_collection(found[0]):
        return LazyStackedTensorDict.maybe_dense_stack(found)
    if not all(isinstance(item, torch.Tensor) for item in found):
        raise SchemaError("the stored objects cannot be stacked", hint="pass a collate_fn to the map")
    return torch.stack(found)
