"""Buffers: a storage, a sampler, a writer and a transform, put together."""

from .base import ReplayBuffer
from .parts import UnsupportedError, WrongKindError
from .prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from .pytrees import default_collate
from .schedulers import LambdaScheduler, LinearScheduler, ParameterScheduler, SchedulerList, StepScheduler
from .tensordict import TensorDictReplayBuffer

__all__ = [
    "LambdaScheduler",
    "LinearScheduler",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "SchedulerList",
    "StepScheduler",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "UnsupportedError",
    "WrongKindError",
    "default_collate",
]
