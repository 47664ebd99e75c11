"""Checkpointers save and load storages; importing this package registers those of each class of storages."""

from .base import StorageCheckpointerBase
from .episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from .folders import open_folder, writer_of
from .hooks import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from .lists import CompressedListStorageCheckpointer, ListStorageCheckpointer
from .loading import require_equal_rows
from .packed import PackedNote, PackedStorageCheckpointer
from .tensor import TensorStorageCheckpointer
from .tensor_reader import verify_tensors

__all__ = [
    "CompressedListStorageCheckpointer",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "ListStorageCheckpointer",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "PackedNote",
    "PackedStorageCheckpointer",
    "StorageCheckpointerBase",
    "TED2Flat",
    "TED2Nested",
    "TensorStorageCheckpointer",
    "open_folder",
    "require_equal_rows",
    "verify_tensors",
    "writer_of",
]
