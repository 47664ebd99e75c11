"""The parallel engine: a dataset through a function or a program of operations, task by task."""

from .engine.preprocessing import Preprocessing, Settings
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
