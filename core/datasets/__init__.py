"""Buffers on datasets: what a training script opens."""

from .buffer import DatasetReplayBuffer
from .experience_replay import BaseDatasetExperienceReplay, SourceExperienceReplay
from .load import load_dataset
from .storage import DatasetStorage, DatasetStorageCheckpointer, Mode

__all__ = [
    "BaseDatasetExperienceReplay",
    "DatasetReplayBuffer",
    "DatasetStorage",
    "DatasetStorageCheckpointer",
    "Mode",
    "SourceExperienceReplay",
    "load_dataset",
]
