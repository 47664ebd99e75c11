"""What can be done to rows without writing Python: operations by name, and programs of them."""

from .base import BoundOperation, Columns, EpisodeChoice, FieldChanges, Operation, RowOperation
from .documents import (
    different_past,
    filters_left_out,
    given_operations,
    operation_of,
    pipeline_program,
    pipeline_text,
    program_of,
    program_of_documents,
    replayed_program,
)  # fmt: skip
from .fields import Fields
from .lazy import LazyBatch, LazyColumn
from .program import OPERATIONS, Program, ProgramProcessor

__all__ = [
    "OPERATIONS",
    "BoundOperation",
    "Columns",
    "EpisodeChoice",
    "FieldChanges",
    "Fields",
    "LazyBatch",
    "LazyColumn",
    "Operation",
    "Program",
    "ProgramProcessor",
    "RowOperation",
    "different_past",
    "filters_left_out",
    "given_operations",
    "operation_of",
    "pipeline_program",
    "pipeline_text",
    "program_of",
    "program_of_documents",
    "replayed_program",
]
