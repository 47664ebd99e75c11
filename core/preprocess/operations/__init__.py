"""What can be done to rows without writing Python: operations by name, and programs of them."""

from .base import Operation
from .documents import different_past, filters_left_out, pipeline_program, pipeline_text, replayed_program
from .options import OPTIONS, given_operations, program_of
from .program import OPERATIONS, Program, ProgramProcessor

__all__ = [
    "OPERATIONS",
    "OPTIONS",
    "Operation",
    "Program",
    "ProgramProcessor",
    "different_past",
    "filters_left_out",
    "given_operations",
    "pipeline_program",
    "pipeline_text",
    "program_of",
    "replayed_program",
]
