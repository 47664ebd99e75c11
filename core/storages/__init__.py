"""Where rows live. torch begins here."""

from .base import Storage, register_checkpointer
from .compressed import CompressedListStorage
from .counter import Counter
from .dataset import dataset_tensors
from .lazy_tensor import LazyTensorStorage
from .memmap import LazyMemmapStorage
from .lazy_stack import LazyStackStorage
from .list_storage import ListStorage
from .steps import StepStorage
from .tensor import TensorStorage

__all__ = [
    "CompressedListStorage",
    "Counter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "StepStorage",
    "Storage",
    "TensorStorage",
    "dataset_tensors",
    "register_checkpointer",
]
