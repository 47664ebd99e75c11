"""Where new rows go."""

from .base import Writer
from .batches import EmptyBatchError, NotABatchError
from .immutable import ImmutableDatasetWriter
from .max_value import TensorDictMaxValueWriter
from .round_robin import RoundRobinWriter
from .tensordict_round_robin import TensorDictRoundRobinWriter

__all__ = [
    "EmptyBatchError",
    "ImmutableDatasetWriter",
    "NotABatchError",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
