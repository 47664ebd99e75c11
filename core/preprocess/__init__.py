"""The parallel engine: a dataset through a function or a program of operations, task by task."""

from .crew import Limits
from .engine import Preprocessing, Settings
from .functions import ChunkFunction, find_function
from .plan import Plan
from .taking import Taking
from .work import Unit, Work

__all__ = ["ChunkFunction", "Limits", "Plan", "Preprocessing", "Settings", "Taking", "Unit", "Work", "find_function"]
