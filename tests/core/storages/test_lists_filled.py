"""The contract of storages that begin empty, for the storages of the list family."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

import rbtool.core.checkpointers  # noqa: F401  the storages find theirs
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.testing.storages import StorageFillTests


class OfLists(StorageFillTests):
    kinds = ("tensor", "tensordict", "nested tensordict")
    ndims = (1,)
    alike = False

    def read(self, storage: ListStorage, rows: list[int] | None = None) -> Any:
        return torch.stack(super().read(storage, rows))


class TestListStorage(OfLists):
    def make_empty(self, max_size: int, ndim: int) -> ListStorage:
        return ListStorage(max_size)


class TestCompressedListStorage(OfLists):
    def make_empty(self, max_size: int, ndim: int) -> CompressedListStorage:
        return CompressedListStorage(max_size)


class TestCompressedByZlib(OfLists):
    def make_empty(self, max_size: int, ndim: int) -> CompressedListStorage:
        return CompressedListStorage(max_size, codec="zlib")


class TestLazyStackStorage(StorageFillTests):
    kinds = ("tensordict", "nested tensordict")
    ndims = (1,)
    alike = False

    def make_empty(self, max_size: int, ndim: int) -> LazyStackStorage:
        return LazyStackStorage(max_size)

    def read(self, storage: LazyStackStorage, rows: list[int] | None = None) -> TensorDict:
        return super().read(storage, rows).contiguous()
