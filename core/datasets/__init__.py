"""Buffers on datasets: what a training script opens."""

from .base import BaseDatasetExperienceReplay
from .buffer import DatasetReplayBuffer
from .checkpointer import DatasetStorageCheckpointer
from .load import load_dataset
from .minari import MinariExperienceReplay
from .storage import DatasetStorage, Mode

__all__ = [
    "BaseDatasetExperienceReplay",
    "DatasetReplayBuffer",
    "DatasetStorage",
    "DatasetStorageCheckpointer",
    "MinariExperienceReplay",
    "Mode",
    "load_dataset",
]
