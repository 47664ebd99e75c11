"""TorchRL's layouts of whole episodes, flat, nested and H5: its files are read, and files that it reads are written."""

from .folder import FolderSink, TorchrlSink
from .layout import STORAGE_SHAPE, Counts, TorchrlHeader, TorchrlKeys
from .reader import BUFFER, STORAGE_FOLDER, TorchrlReader, find_torchrl, stat_fingerprint, torchrl_form
from .writer import OWN_FORM, TorchrlPlan, state_parts, step_ends, write_leaves, write_torchrl

__all__ = [
    "BUFFER",
    "OWN_FORM",
    "STORAGE_FOLDER",
    "STORAGE_SHAPE",
    "Counts",
    "FolderSink",
    "TorchrlHeader",
    "TorchrlKeys",
    "TorchrlPlan",
    "TorchrlReader",
    "TorchrlSink",
    "find_torchrl",
    "stat_fingerprint",
    "state_parts",
    "step_ends",
    "torchrl_form",
    "write_leaves",
    "write_torchrl",
]
