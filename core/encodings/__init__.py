"""Checkpoints of steps in four forms: `ted`, and `flat`, `nested` and `h5`, which store each state once."""

from .digests import DIGESTS, noted_files, require_digests, write_digests
from .flat import STORAGE_METADATA, FlatReader
from .h5_layout import Compression
from .h5_reader import H5Reader
from .layout import STORAGE, CompactForm, CompactLayout, FilledStorage, Form
from .rows import Difference, compare_steps, differing_rows, flags_at, leaf_parts, table_of_ends, with_ends
from .save import (
    VerifyingReader,
    dataset_digest,
    dataset_digests,
    load_checkpoint,
    save_checkpoint,
    save_compact,
    steps_digest,
)

__all__ = [
    "DIGESTS",
    "STORAGE",
    "STORAGE_METADATA",
    "CompactForm",
    "CompactLayout",
    "Compression",
    "Difference",
    "FilledStorage",
    "FlatReader",
    "Form",
    "H5Reader",
    "VerifyingReader",
    "compare_steps",
    "dataset_digest",
    "dataset_digests",
    "differing_rows",
    "flags_at",
    "leaf_parts",
    "load_checkpoint",
    "noted_files",
    "require_digests",
    "save_checkpoint",
    "save_compact",
    "steps_digest",
    "table_of_ends",
    "with_ends",
    "write_digests",
]
