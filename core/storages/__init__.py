"""Where rows live. torch begins here."""

from .base import Storage
from .dataset import dataset_tensors
from .steps import StepStorage
from .tensor import TensorStorage

__all__ = ["StepStorage", "Storage", "TensorStorage", "dataset_tensors"]
