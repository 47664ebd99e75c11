"""Checkpoints: the steps of a dataset or a buffer in one of four forms, and whatever reads them back."""

from .buffer_steps import BufferSteps, whole_episodes
from .compare import Difference, compare_steps
from .compression import Compression
from .digests import DIGESTS, require_digests, write_digests
from .filled import STORAGE, FilledStorage
from .flat import STORAGE_METADATA, FlatReader
from .h5_reader import H5Reader
from .layout import CompactForm, CompactLayout, Form
from .open import is_steps, open_steps, standing
from .rows import differing_rows, leaf_parts, with_ends
from .save import dataset_digest, dataset_digests, load_checkpoint, save_checkpoint, save_compact, steps_digest
from .torchrl_header import STORAGE_SHAPE, TorchrlHeader, TorchrlKeys
from .torchrl_leaves import Counts
from .torchrl_parts import state_parts, step_ends
from .torchrl_plan import OWN_FORM, TorchrlPlan
from .torchrl_reader import BUFFER, STORAGE_FOLDER, TorchrlReader, find_torchrl, stat_fingerprint, torchrl_form
from .torchrl_sinks import FolderSink, TorchrlSink
from .torchrl_steps import TorchrlSteps
from .torchrl_writer import write_torchrl
from .verified import VerifyingReader

__all__ = [
    "BUFFER",
    "DIGESTS",
    "OWN_FORM",
    "STORAGE",
    "STORAGE_FOLDER",
    "STORAGE_METADATA",
    "STORAGE_SHAPE",
    "BufferSteps",
    "CompactForm",
    "CompactLayout",
    "Compression",
    "Counts",
    "Difference",
    "FilledStorage",
    "FlatReader",
    "FolderSink",
    "Form",
    "H5Reader",
    "TorchrlHeader",
    "TorchrlKeys",
    "TorchrlPlan",
    "TorchrlReader",
    "TorchrlSink",
    "TorchrlSteps",
    "VerifyingReader",
    "compare_steps",
    "dataset_digest",
    "dataset_digests",
    "differing_rows",
    "find_torchrl",
    "is_steps",
    "leaf_parts",
    "load_checkpoint",
    "open_steps",
    "require_digests",
    "save_checkpoint",
    "save_compact",
    "standing",
    "stat_fingerprint",
    "state_parts",
    "step_ends",
    "steps_digest",
    "torchrl_form",
    "whole_episodes",
    "with_ends",
    "write_digests",
    "write_torchrl",
]
