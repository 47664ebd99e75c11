"""rbtool: offline-RL datasets in one clear form, fast to train from.

One function a verb (`rbtool.convert`, `rbtool.inspect`, …) does what the command line does and returns the
document that `--json` prints. Importing rbtool imports no torch: each name below loads its module when first used.
"""

from __future__ import annotations

import os
import sys


def _leave_current_folder() -> None:
    """Take the current folder off the import path where `python -m rbtool` put it: a `json.py` there would run.

    It stays where this package itself was found there. Called before anything is imported that may lie there.
    """
    here = os.getcwd()  # noqa: PTH109  # pathlib may not be loaded yet
    started = sys.orig_argv[-len(sys.argv)] if sys.argv[:1] == ["-m"] else ""
    ours = started == __name__ or (started.startswith("-") and started.endswith(f"m{__name__}"))
    if ours and sys.path[:1] == [here] and not sys.flags.safe_path and os.path.dirname(__path__[0]) != here:  # noqa: PTH120
        del sys.path[0]


_leave_current_folder()

import importlib  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from .core.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from .converters.minari.replay import MinariExperienceReplay
    from .core import (
        DEFAULT_DONE_KEYS,
        BaseDatasetExperienceReplay,
        Binary,
        Bounded,
        BoundedContinuous,
        BoundedDiscrete,
        Categorical,
        CatTensors,
        Compose,
        Composite,
        CompressedListStorage,
        CompressedListStorageCheckpointer,
        DecodeText,
        DensifyReward,
        ExcludeTransform,
        Flat2TED,
        FlatStorageCheckpointer,
        FrameStack,
        H5Combine,
        H5Split,
        H5StorageCheckpointer,
        ImmutableDatasetWriter,
        LambdaScheduler,
        LazyMemmapStorage,
        LazyStackStorage,
        LazyTensorStorage,
        LinearScheduler,
        ListStorage,
        ListStorageCheckpointer,
        MultiCategorical,
        MultiStep,
        MultiStepTransform,
        Nested2TED,
        NestedStorageCheckpointer,
        NextStateReconstructor,
        NonTensor,
        Normalize,
        PackedRecording,
        PackedStorage,
        PackedStorageCheckpointer,
        ParameterScheduler,
        PrioritizedReplayBuffer,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomCropTensorDict,
        RandomSampler,
        RenameTransform,
        ReplayBuffer,
        Resize,
        ReturnToGo,
        RoundRobinWriter,
        Sampler,
        SamplerWithoutReplacement,
        SchedulerList,
        SelectTransform,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        StepScheduler,
        Storage,
        StorageCheckpointerBase,
        TED2Flat,
        TED2Nested,
        TensorDictMaxValueWriter,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
        TensorDictRoundRobinWriter,
        TensorSpec,
        TensorStorage,
        TensorStorageCheckpointer,
        ToTensorImage,
        Transform,
        Unbounded,
        UnboundedContinuous,
        UnboundedDiscrete,
        Writer,
        find_start_stop_traj,
        load_dataset,
        split_trajectories,
    )
    from .core.errors import (
        AuthorisationError,
        CheckFailed,
        CorruptDataError,
        DatasetNotFoundError,
        FormatError,
        MissingKeyError,
        NetworkError,
        OutOfSpaceError,
        RbtoolError,
        SchemaError,
        UsageError,
    )
    from .core.verbs import cache, checkpoint
    from .core.verbs.check import check
    from .core.verbs.convert import convert
    from .core.verbs.demo import demo
    from .core.verbs.download import download
    from .core.verbs.export import export
    from .core.verbs.inspect import inspect
    from .core.verbs.listing import list_datasets as list  # noqa: F401  # of the module, not of a star import
    from .core.verbs.listing import list_remote
    from .core.verbs.preprocess import preprocess
    from .core.verbs.repair import repair
    from .core.verbs.sample import sample
    from .core.verbs.stats import stats

_ERRORS = (
    "AuthorisationError", "CheckFailed", "CorruptDataError", "DatasetNotFoundError", "FormatError", "MissingKeyError",
    "NetworkError", "OutOfSpaceError", "RbtoolError", "SchemaError", "UsageError",
)  # fmt: skip
_VERBS = ("check", "convert", "demo", "download", "export", "inspect", "preprocess", "repair", "sample", "stats")
_CLASSES = (
    "DEFAULT_DONE_KEYS", "BaseDatasetExperienceReplay", "Binary", "Bounded", "BoundedContinuous", "BoundedDiscrete",
    "CatTensors", "Categorical", "Compose", "Composite", "CompressedListStorage", "CompressedListStorageCheckpointer",
    "DecodeText", "DensifyReward", "ExcludeTransform", "Flat2TED", "FlatStorageCheckpointer", "FrameStack",
    "H5Combine", "H5Split", "H5StorageCheckpointer", "ImmutableDatasetWriter", "LambdaScheduler", "LazyMemmapStorage",
    "LazyStackStorage", "LazyTensorStorage", "LinearScheduler", "ListStorage", "ListStorageCheckpointer",
    "MultiCategorical", "MultiStep", "MultiStepTransform", "Nested2TED",
    "NestedStorageCheckpointer", "NextStateReconstructor", "NonTensor", "Normalize", "PackedRecording",
    "PackedStorage", "PackedStorageCheckpointer", "ParameterScheduler", "PrioritizedReplayBuffer",
    "PrioritizedSampler", "PrioritizedSliceSampler", "RandomCropTensorDict", "RandomSampler", "RenameTransform",
    "ReplayBuffer", "Resize", "ReturnToGo", "RoundRobinWriter", "Sampler", "SamplerWithoutReplacement",
    "SchedulerList", "SelectTransform", "SliceSampler", "SliceSamplerWithoutReplacement", "StepScheduler", "Storage",
    "StorageCheckpointerBase", "TED2Flat", "TED2Nested", "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer", "TensorDictRoundRobinWriter", "TensorSpec",
    "TensorStorage", "TensorStorageCheckpointer", "ToTensorImage", "Transform", "Unbounded", "UnboundedContinuous",
    "UnboundedDiscrete", "Writer", "find_start_stop_traj", "load_dataset", "split_trajectories",
)  # fmt: skip
_HOMES: dict[str, str] = {
    **dict.fromkeys(_ERRORS, "core.errors"),
    **{verb: f"core.verbs.{verb}" for verb in _VERBS},
    **dict.fromkeys(_CLASSES, "core"),
    "MinariExperienceReplay": "converters.minari.replay",
}
_RENAMED = {
    "list": ("core.verbs.listing", "list_datasets"),
    "list_remote": ("core.verbs.listing", "list_remote"),
    **{group: (f"core.verbs.{group}", "") for group in ("cache", "checkpoint")},
}

# Without `list`: a star import must not hide Python's own.
__all__ = [
    "DEFAULT_DONE_KEYS",
    "AuthorisationError",
    "BaseDatasetExperienceReplay",
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "CatTensors",
    "Categorical",
    "CheckFailed",
    "Compose",
    "Composite",
    "CompressedListStorage",
    "CompressedListStorageCheckpointer",
    "CorruptDataError",
    "DatasetNotFoundError",
    "DecodeText",
    "DensifyReward",
    "ExcludeTransform",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "FormatError",
    "FrameStack",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LinearScheduler",
    "ListStorage",
    "ListStorageCheckpointer",
    "MinariExperienceReplay",
    "MissingKeyError",
    "MultiCategorical",
    "MultiStep",
    "MultiStepTransform",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "NetworkError",
    "NextStateReconstructor",
    "NonTensor",
    "Normalize",
    "OutOfSpaceError",
    "PackedRecording",
    "PackedStorage",
    "PackedStorageCheckpointer",
    "ParameterScheduler",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomCropTensorDict",
    "RandomSampler",
    "RbtoolError",
    "RenameTransform",
    "ReplayBuffer",
    "Resize",
    "ReturnToGo",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "SchemaError",
    "SelectTransform",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StepScheduler",
    "Storage",
    "StorageCheckpointerBase",
    "TED2Flat",
    "TED2Nested",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorSpec",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "ToTensorImage",
    "Transform",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "UsageError",
    "Writer",
    "__version__",
    "cache",
    "check",
    "checkpoint",
    "convert",
    "demo",
    "download",
    "export",
    "find_start_stop_traj",
    "inspect",
    "list_remote",
    "load_dataset",
    "preprocess",
    "repair",
    "sample",
    "split_trajectories",
    "stats",
]


def __getattr__(name: str) -> Any:
    home, attribute = _RENAMED.get(name, (_HOMES.get(name, ""), name))
    if not home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    found = getattr(module, attribute) if attribute else module
    globals()[name] = found
    return found


def __dir__() -> Iterable[str]:
    return sorted({*__all__, *_RENAMED})
