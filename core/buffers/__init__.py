"""Buffers: a storage, a sampler, a writer and a transform, put together."""

from .base import ReplayBuffer
from .collate import default_collate
from .parts import UnsupportedError, WrongKindError
from .tensordict import TensorDictReplayBuffer

__all__ = ["ReplayBuffer", "TensorDictReplayBuffer", "UnsupportedError", "WrongKindError", "default_collate"]
