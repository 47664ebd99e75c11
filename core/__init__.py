"""The library under the verbs: what TED is, how a dataset lies on disk, and what is done with it.

Naming a class loads the package it lies in, and no other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .buffers import (
        PrioritizedReplayBuffer,
        ReplayBuffer,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )
    from .checkpointers import (
        CompressedListStorageCheckpointer,
        ListStorageCheckpointer,
        StorageCheckpointerBase,
        TensorStorageCheckpointer,
    )
    from .datasets import BaseDatasetExperienceReplay, MinariExperienceReplay, load_dataset
    from .samplers import (
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        Sampler,
        SamplerWithoutReplacement,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        find_start_stop_traj,
    )
    from .specs import (
        Binary,
        Bounded,
        BoundedContinuous,
        BoundedDiscrete,
        Categorical,
        Composite,
        MultiCategorical,
        NonTensor,
        TensorSpec,
        Unbounded,
        UnboundedContinuous,
        UnboundedDiscrete,
    )
    from .storages import (
        CompressedListStorage,
        LazyMemmapStorage,
        LazyStackStorage,
        LazyTensorStorage,
        ListStorage,
        Storage,
        TensorStorage,
    )
    from .transforms import Compose, Transform
    from .writers import (
        ImmutableDatasetWriter,
        RoundRobinWriter,
        TensorDictMaxValueWriter,
        TensorDictRoundRobinWriter,
        Writer,
    )

_HOMES = {
    "buffers": (
        "PrioritizedReplayBuffer",
        "ReplayBuffer",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
    ),
    "checkpointers": (
        "CompressedListStorageCheckpointer",
        "ListStorageCheckpointer",
        "StorageCheckpointerBase",
        "TensorStorageCheckpointer",
    ),
    "datasets": (
        "BaseDatasetExperienceReplay",
        "MinariExperienceReplay",
        "load_dataset",
    ),
    "samplers": (
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "RandomSampler",
        "Sampler",
        "SamplerWithoutReplacement",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
        "find_start_stop_traj",
    ),
    "specs": (
        "Binary",
        "Bounded",
        "BoundedContinuous",
        "BoundedDiscrete",
        "Categorical",
        "Composite",
        "MultiCategorical",
        "NonTensor",
        "TensorSpec",
        "Unbounded",
        "UnboundedContinuous",
        "UnboundedDiscrete",
    ),
    "storages": (
        "CompressedListStorage",
        "LazyMemmapStorage",
        "LazyStackStorage",
        "LazyTensorStorage",
        "ListStorage",
        "Storage",
        "TensorStorage",
    ),
    "transforms": (
        "Compose",
        "Transform",
    ),
    "writers": (
        "ImmutableDatasetWriter",
        "RoundRobinWriter",
        "TensorDictMaxValueWriter",
        "TensorDictRoundRobinWriter",
        "Writer",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BaseDatasetExperienceReplay",
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Compose",
    "Composite",
    "CompressedListStorage",
    "CompressedListStorageCheckpointer",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "ListStorageCheckpointer",
    "MinariExperienceReplay",
    "MultiCategorical",
    "NonTensor",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "StorageCheckpointerBase",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorSpec",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Transform",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "Writer",
    "find_start_stop_traj",
    "load_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME_OF[name] == "storages":
        importlib.import_module(".checkpointers", __name__)  # so that what is named here can be saved, too
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
