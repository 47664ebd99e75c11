"""The parallel engine: a dataset through a function, chunk by chunk."""

from .engine import Preprocessing
from .functions import ChunkFunction, find_function
from .plan import Plan

__all__ = ["ChunkFunction", "Plan", "Preprocessing", "find_function"]
