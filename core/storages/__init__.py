"""Where rows live. torch begins here."""

from .base import Storage, register_checkpointer
from .compressed import CompressedListStorage
from .counter import Counter
from .dataset import MappedDataset, dataset_tensors
from .lazy_stack import LazyStackStorage
from .lazy_tensor import LazyTensorStorage
from .list_storage import ListStorage
from .memmap import LazyMemmapStorage
from .packed import PackedStorage
from .packed_recording import PackedRecording
from .steps import StepStorage
from .tensor import TensorStorage

__all__ = [
    "CompressedListStorage",
    "Counter",
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
    "dataset_tensors",
    "register_checkpointer",
]
