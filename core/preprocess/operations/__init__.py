"""What can be done to rows without writing Python: operations by name, and programs of them."""

from .base import Operation
from .documents import pipeline_program, pipeline_text
from .options import OPTIONS, given_operations, program_of
from .program import OPERATIONS, Program
from .replaying import different_past, filters_left_out, replayed_program
from .work import ProgramWork

__all__ = [
    "OPERATIONS",
    "OPTIONS",
    "Operation",
    "Program",
    "ProgramWork",
    "different_past",
    "filters_left_out",
    "given_operations",
    "pipeline_program",
    "pipeline_text",
    "program_of",
    "replayed_program",
]
