"""What can be done to rows without writing Python: operations by name, and programs of them."""

from .base import Operation
from .documents import pipeline_program, pipeline_text, replayed_program
from .options import OPTIONS, program_of
from .program import OPERATIONS, Program
from .work import ProgramWork

__all__ = [
    "OPERATIONS",
    "OPTIONS",
    "Operation",
    "Program",
    "ProgramWork",
    "pipeline_program",
    "pipeline_text",
    "program_of",
    "replayed_program",
]
