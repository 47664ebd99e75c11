"""What saves and loads storages. One checkpointer a file; importing this package makes storages find theirs."""

from .base import StorageCheckpointerBase
from .compressed import CompressedListStorageCheckpointer
from .list import ListStorageCheckpointer
from .tensor import TensorStorageCheckpointer

__all__ = [
    "CompressedListStorageCheckpointer",
    "ListStorageCheckpointer",
    "StorageCheckpointerBase",
    "TensorStorageCheckpointer",
]
