"""Modules that turn rows of a tensor into whole numbers: hashes, and dense numbers for hashes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import MissingKeyError, SchemaError, UsageError
from ..kernels.hashes import KeyTable, key_table, project, siphash

Bytes = NDArray[np.uint8]

DEFAULT_KEY = bytes(range(16))
"""The default key: the one of SipHash's published test vectors."""


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
    if flat.stride(0) != 1:  # a single element may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    found: Bytes = flat.view(torch.uint8).numpy().reshape(len(rows), width)
    return found


class BinaryToDecimal(nn.Module):
    """Reads the last dimension as binary numbers, and adds them up.

    The last dimension is cut into chunks of `num_bits` bits, most significant first; the values of the chunks are
    added: `[…, k * num_bits]` becomes `[…]` of `dtype` on `device`. Different rows may have the same sum. With
    `convert_to_binary`, values above 0 count as 1 and others as 0; otherwise other values than 0 and 1 raise
    UsageError (a ValueError), as do a last dimension that is no multiple of `num_bits`, and sums beyond `dtype`.

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
            raise UsageError("a value that is neither 0 nor 1 was found", hint="say convert_to_binary=True")
        chunks = features.to(bases.device, torch.int64).unflatten(-1, (-1, self.num_bits))
        sums = (chunks * bases).sum((-1, -2))
        limits = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        if sums.numel() and sums.max() > limits.max:
            raise UsageError(f"the sum {int(sums.max())} was found, which is beyond {self.dtype}")
        decimals: torch.Tensor = sums.to(self.dtype)
        return decimals


class SipHash(nn.Module):
    """Hashes each row of a tensor `[n, …]` with SipHash-2-4; the result is int64 `[n]` on the tensor's device.

    A row's hash depends on its bytes alone: it is the same in every process and on every machine, and 0.0 and -0.0
    have different ones. `key` is 16 bytes; the default is the key of the published test vectors. With `as_tensor=False`
    the bytes of each row are returned unhashed, as a list. Tensors without dimensions, nested and sparse ones raise
    SchemaError (a RuntimeError).

    The hash is by Aumasson and Bernstein (2012); TorchRL's module of this name uses Python's `hash`, which differs
    from one process to the next.

    >>> SipHash()(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.1, 0.2]])).unique().numel()
    2
    """

    def __init__(self, as_tensor: bool = True, *, key: bytes = DEFAULT_KEY) -> None:
        super().__init__()
        if type(key) is not bytes or len(key) != 16:
            raise UsageError(f"the key of a SipHash is 16 bytes, found {key!r}")
        self.as_tensor = as_tensor
        self.key = key

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[bytes]:
        rows = row_bytes(x)
        if not self.as_tensor:
            return [row.tobytes() for row in rows]
        return torch.from_numpy(siphash(rows, self.key)).to(x.device)


class RandomProjectionHash(SipHash):
    """Projects each row of a tensor `[n, …]` on `n_components` random directions, rounds, and hashes the result.

    Rows that are almost alike get the same hash: it is short work for a table that compares keys, not an identity.
    Directions are drawn for each number of features that is met, `fit(x)` draws them beforehand. Their entries are
    +1 and -1 and the same everywhere (Achlioptas, 2003), unless `init_method` fills a float tensor
    `[features, n_components]` in place, or returns one. Sums are taken in float64, feature after feature, and rounded
    to `dtype_cast`; they depend neither on the machine nor on how many rows come at once.

    UsageError (a ValueError) for less than 1 component and a `dtype_cast` that is no floating type.
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
        """Draw the directions for rows as wide as the rows of `x`, `[n, …]`, unless they exist."""
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
    """Numbers hashes from 0 on, in the order in which they come.

    Called with int64 hashes of any shape it returns their numbers, int64 in that shape; hashes that were never seen
    raise MissingKeyError (a KeyError), or with `extend=True` get the next numbers. `find` and `add` take the keys that
    were hashed too, and compare them: two keys with the same hash have different numbers then. The table grows by
    doubling, and is part of `state_dict()`.

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
            raise SchemaError(f"hashes are int64 tensors, found {found}")
        flat = hashes.detach().cpu().reshape(-1)
        keys = np.empty((len(flat), 0), np.uint8)
        numbers = self.add(flat, keys) if extend else self.find(flat, keys)
        if unknown := int((numbers < 0).sum()):
            raise MissingKeyError(
                f"{unknown} of {len(flat)} hashes were never seen", hint="use extend=True to add them"
            )
        return numbers.reshape(tuple(hashes.shape)).to(hashes.device)

    def find(self, hashes: torch.Tensor, keys: Bytes) -> torch.Tensor:
        """Return the numbers of keys, int64 `[n]` on the CPU, -1 for unknown ones.

        `hashes` are int64 `[n]`, `keys` uint8 `[n, width]`, with the width of all keys before, else SchemaError.
        """
        if self._table is None:
            return torch.full((len(keys),), -1)
        return torch.from_numpy(self._of(keys).find(hashes.cpu().numpy(), keys))

    def add(self, hashes: torch.Tensor, keys: Bytes) -> torch.Tensor:
        """Return the numbers of keys as `find` does; unknown ones get the next numbers."""
        return torch.from_numpy(self._of(keys).add(hashes.cpu().numpy(), keys))

    def _of(self, keys: Bytes) -> KeyTable:
        if self._table is None:
            self._table = key_table(keys.shape[1])
        if self._table.width != keys.shape[1]:
            raise SchemaError(f"keys have {keys.shape[1]} bytes, those before have {self._table.width}")
        return self._table

    def truncate(self, count: int) -> None:
        """Forget the numbers from `count` on; with 0 keys of another width may come."""
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
