"""Buffers: a storage, a sampler, a writer and a transform, put together."""

from .base import ReplayBuffer
from .collate import default_collate
from .parts import UnsupportedError, WrongKindError
from .prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from .tensordict import TensorDictReplayBuffer

__all__ = [
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "UnsupportedError",
    "WrongKindError",
    "default_collate",
]
