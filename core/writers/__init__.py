"""Where new rows go."""

from .base import ImmutableDatasetWriter, Writer
from .batches import EmptyBatchError, NotABatchError
from .max_value import TensorDictMaxValueWriter
from .round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = [
    "EmptyBatchError",
    "ImmutableDatasetWriter",
    "NotABatchError",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
