"""Where rows live. torch begins here."""

from ..contract import FinalMethodError
from .base import IndexedStorage, Storage, register_checkpointer
from .compressed import CompressedListStorage
from .cursors import as_index, grown_rows, known_rows, last_of_repeats, rows_of
from .dataset import MappedDataset, StepStorage, dataset_tensors
from .elements import require_like
from .lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from .list_storage import LazyStackStorage, ListStorage
from .packed import PackedStorage
from .packed_recording import PackedRecording
from .pytree import TreeSpec, tree_spec_of
from .tensor import TensorStorage
from .write_log import Change, Counter, WriteLog, Written

__all__ = [
    "Change",
    "CompressedListStorage",
    "Counter",
    "FinalMethodError",
    "IndexedStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MappedDataset",
    "PackedRecording",
    "PackedStorage",
    "StepStorage",
    "Storage",
    "TensorStorage",
    "TreeSpec",
    "WriteLog",
    "Written",
    "as_index",
    "dataset_tensors",
    "grown_rows",
    "known_rows",
    "last_of_repeats",
    "register_checkpointer",
    "require_like",
    "rows_of",
    "tree_spec_of",
]
