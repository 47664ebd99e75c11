"""From the keys in a tensordict to row numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import nn

from ..errors import MissingKeyError, SchemaError, UsageError, did_you_mean
from .hashing import Bytes, HashToInt, SipHash, row_bytes

Key = str | tuple[str, ...]
HashModule = Callable[[torch.Tensor], Any]


Kinds = list[tuple[torch.dtype, torch.Size]]
"""The dtype and the shape, without the batch size, of each entry of a key."""


class Hashed(NamedTuple):
    """Keys of a tensordict with batch size `batch`: n hashes, int64 `[n]`, and n rows of bytes, uint8 `[n, width]`.

    `device` is that of the first entry of the key; numbers, hashes and masks for the user go there.
    """

    hashes: torch.Tensor
    keys: Bytes
    batch: torch.Size
    kinds: Kinds
    device: torch.device


class QueryModule(TensorDictModuleBase):
    """Numbers the keys in a tensordict from 0 on: the same values of the entries `in_keys` have the same number.

    Each entry `[*batch, …]` is hashed row by row, with `hash_module` or with one of a list of modules, one for each
    entry (default: `SipHash`); a module takes a tensor `[n, …]` and returns n numbers. `aggregator` hashes the hashes
    of several entries, int64 `[n, entries]`, to one (default: `SipHash`). `hash_to_int`, a `HashToInt`, numbers keys
    and compares them byte by byte, so keys with the same hash have different numbers.

    Calling the module writes the numbers, int64 `[*batch]`, under `index_key`, and with `write_hash` the hashes under
    `hash_key`, in the tensordict or with `clone` in a shallow copy of it, which is returned. Unknown keys get the next
    numbers; with `extend=False` they raise MissingKeyError (a KeyError), as does an entry that is not there.
    SchemaError (a RuntimeError) for entries whose dtype or shape differs from the first ones', and for those that are
    no tensors. No `in_keys`, and a number of modules other than that of entries, raise UsageError (a ValueError).

    Names and defaults are those of TorchRL, where `aggregator` defaults to a single `hash_module` that is given.

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

    def _modules_of(self, given: HashModule | Sequence[HashModule] | None) -> list[HashModule]:
        if given is None or callable(given):
            return [given or SipHash()] * len(self.in_keys)
        if len(given) != len(self.in_keys):
            raise UsageError(f"there are {len(given)} hash modules, expected one for each of {len(self.in_keys)} keys")
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
        """Hash the keys in a tensordict; nothing is remembered."""
        if not is_tensor_collection(tensordict):
            raise UsageError(f"keys are entries of a tensordict, found a {type(tensordict).__name__}")
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
            raise UsageError("a hash module returned bytes; numbers are needed", hint="say as_tensor=True")
        hashes = torch.as_tensor(found).detach().cpu()
        if hashes.shape != rows.shape[:1] or hashes.is_complex():
            raise SchemaError(f"a hash module made {list(hashes.shape)} of {len(rows)} rows; one number each is needed")
        return hashes.double().view(torch.int64) if hashes.is_floating_point() else hashes.long()

    def find(self, hashed: Hashed) -> torch.Tensor:
        """Return the numbers of keys, int64 `[n]`, -1 for unknown ones."""
        return self.hash_to_int.find(hashed.hashes, hashed.keys)

    def add(self, hashed: Hashed) -> torch.Tensor:
        """Return the numbers of keys, int64 `[n]`; unknown ones get the next numbers."""
        numbers = self.hash_to_int.add(hashed.hashes, hashed.keys)
        if len(numbers):
            self._kinds = hashed.kinds
        return numbers

    def truncate(self, count: int) -> None:
        """Forget the numbers from `count` on, and with 0 also what keys look like."""
        self.hash_to_int.truncate(count)
        if not count:
            self._kinds = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"kinds": self._kinds}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._kinds = state["kinds"]


def known_only(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers, or raise MissingKeyError where one is negative."""
    unknown = numbers < 0
    if unknown.any():
        count, first = int(unknown.sum()), int(unknown.nonzero()[0, 0])
        raise MissingKeyError(f"{count} of {len(numbers)} keys are not in the map, the first of them in row {first}")
    return numbers
