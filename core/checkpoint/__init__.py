"""Checkpoints: the steps of a dataset or a buffer in one of four forms, and whatever reads them back."""

from .compare import Difference, compare_steps
from .compression import Compression
from .flat import FlatReader
from .h5_reader import H5Reader
from .layout import CompactLayout, Form
from .open import is_steps, open_steps, standing
from .save import dataset_digest, load_checkpoint, save_checkpoint

__all__ = [
    "CompactLayout",
    "Compression",
    "Difference",
    "FlatReader",
    "Form",
    "H5Reader",
    "compare_steps",
    "dataset_digest",
    "is_steps",
    "load_checkpoint",
    "open_steps",
    "save_checkpoint",
    "standing",
]
