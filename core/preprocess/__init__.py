"""The parallel engine of `preprocess`: applies a function or a program of operations to a dataset, chunk by chunk."""

from .preprocessing import Preprocessing, Settings
from .processor import Processor, Unit
from .step_selection import Plan, StepSelection
from .units.functions import ChunkFunction, find_function
from .workers.executor import Limits

__all__ = [
    "ChunkFunction",
    "Limits",
    "Plan",
    "Preprocessing",
    "Processor",
    "Settings",
    "StepSelection",
    "Unit",
    "find_function",
]
