"""Buffers on datasets: what a training script opens."""

from .base import BaseDatasetExperienceReplay
from .buffer import DatasetReplayBuffer
from .load import load_dataset
from .minari import MinariExperienceReplay
from .storage import DatasetStorage, Mode

__all__ = [
    "BaseDatasetExperienceReplay",
    "DatasetReplayBuffer",
    "DatasetStorage",
    "MinariExperienceReplay",
    "Mode",
    "load_dataset",
]
