"""Where rows live. torch begins here."""

from ..contract import FinalMethodError
from .base import IndexedStorage, Storage, register_checkpointer
from .compressed import CompressedListStorage
from .counter import Counter
from .cursors import as_index, grown_rows, known_rows, last_of_repeats, rows_of
from .dataset import MappedDataset, dataset_tensors
from .elements import require_like
from .lazy_stack import LazyStackStorage
from .lazy_tensor import LazyTensorStorage
from .list_storage import ListStorage
from .memmap import LazyMemmapStorage
from .packed import PackedStorage
from .packed_recording import PackedRecording
from .steps import StepStorage
from .structure import Structure, structure_of
from .tensor import TensorStorage
from .write_log import Change, WriteLog, Written

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
    "Structure",
    "TensorStorage",
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
    "structure_of",
]
