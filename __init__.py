"""rbtool: offline-RL datasets in one clear form, fast to train from.

One function a verb (`rbtool.convert`, `rbtool.inspect`, …) does what the command line does and returns the
document that `--json` prints. Importing rbtool imports no torch: each name below loads its module when first used.
"""

from __future__ import annotations

import os
import sys


def _leave_current_folder() -> None:
    """Remove the current folder from `sys.path` if `python -m rbtool` put it there: a `json.py` in it would run.

    It stays if this package itself was found there. Called before any import that the folder could shadow.
    """
    here = os.getcwd()  # noqa: PTH109  # pathlib may not be loaded yet
    started = sys.orig_argv[-len(sys.argv)] if sys.argv[:1] == ["-m"] else ""
    ours = started == __name__ or (started.startswith("-") and started.endswith(f"m{__name__}"))
    if ours and sys.path[:1] == [here] and not sys.flags.safe_path and os.path.dirname(__path__[0]) != here:  # noqa: PTH120
        del sys.path[0]


_leave_current_folder()


import importlib  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from typing import Any  # noqa: E402


def _hand_over() -> None:
    """Replace this module by the installed rbtool, if this one is a clone that happens to lie beside a script.

    Python searches the folder of the script first, or for `-c` and `-m` the current one, and would import any folder
    named `rbtool` there. The clone is used if no other rbtool is installed, or if `sys.path` also lists its parent.
    """
    above, argument = os.path.dirname(__path__[0]), sys.argv[0] if sys.argv else ""  # noqa: PTH120
    beside = (os.getcwd(), os.path.dirname(os.path.realpath(argument)))  # noqa: PTH109, PTH120
    if not sys.path or os.path.abspath(sys.path[0]) != above or above not in beside:
        return
    first = sys.path.pop(0)
    try:
        specs = [spec for finder in sys.meta_path if (spec := finder.find_spec(__name__, None))]
    finally:
        sys.path.insert(0, first)
    if specs and specs[0].loader and specs[0].origin != __file__:
        from importlib.util import module_from_spec

        sys.modules[__name__] = installed = module_from_spec(specs[0])
        specs[0].loader.exec_module(installed)


_hand_over()

from .core import __version__  # noqa: E402, F401

# The one list of public names, by what people do with them: the names that each module defines.
# `python docs/tools/generated_pages.py` makes `__init__.pyi` of it.
_NAMES = {
    "Verbs": {
        ".core.preprocess.functions": "CloudpickleWrapper",
        ".core.preprocess.preprocess": "preprocess",
        ".core.recording.repair": "repair",
        ".core.verbs": "cache checkpoint",
        ".core.verbs.check": "check",
        ".core.verbs.clean": "clean",
        ".core.verbs.convert": "convert",
        ".core.verbs.demo": "demo",
        ".core.verbs.diff": "diff",
        ".core.verbs.download": "download",
        ".core.verbs.env": "env",
        ".core.verbs.export": "export",
        ".core.verbs.frames": "frames",
        ".core.verbs.inspect": "inspect",
        ".core.verbs.list": "list list_remote",
        ".core.verbs.merge": "merge",
        ".core.verbs.migrate": "migrate",
        ".core.verbs.mix": "mix",
        ".core.verbs.plot": "plot",
        ".core.verbs.record": "record",
        ".core.verbs.report": "report",
        ".core.verbs.sample": "sample",
        ".core.verbs.schema": "schema",
        ".core.verbs.bench": "bench",
        ".core.verbs.score": "score",
        ".core.verbs.split": "split",
        ".core.verbs.stats": "stats",
        ".core.verbs.upload": "upload write_shard_digests",
    },
    "Datasets": {
        ".converters.atari.replay": "AtariDQNExperienceReplay",
        ".converters.d4rl.replay": "D4RLExperienceReplay",
        ".converters.gen_dgrl.replay": "GenDGRLExperienceReplay",
        ".converters.lerobot.replay": "LeRobotExperienceReplay VideoClipRef lerobot_columns_to_tensordict",
        ".converters.minari.replay": "MinariExperienceReplay",
        ".converters.openml.replay": "OpenMLExperienceReplay",
        ".converters.openx.replay": "OpenXExperienceReplay",
        ".converters.roboset.replay": "RobosetExperienceReplay",
        ".converters.vd4rl.replay": "VD4RLExperienceReplay",
        ".core.datasets.load_dataset": "load_dataset register_dataset",
        ".core.datasets.offline_online": "OfflineToOnlineReplayBuffer prefill_replay_buffer",
        ".core.experience_replay": "BaseDatasetExperienceReplay",
        ".core.loading.loader": "TorchLoader",
        ".core.loading.torch_dataset": "TorchDataset TorchMapDataset torch_dataset",
        ".core.robots.deployment": "ActionMapping action_space",
        ".core.streams.stream_dataset": "StreamDataset",
        ".core.ted.schema": "DEFAULT_DONE_KEYS",
        ".core.verbs.ray_data": "from_ray_dataset to_ray_dataset",
    },
    "Recording": {
        ".core.recording.environments": "RecordEpisodes RecordVectorEpisodes",
        ".core.recording.rollouts": "record_rollout",
    },
    "Buffers": {
        ".core.buffers.checkpoint": "BackgroundDump",
        ".core.buffers.editing": "ConditionalUpdateResult",
        ".core.buffers.ensemble": "ReplayBufferEnsemble",
        ".core.buffers.hindsight": "HERReplayBuffer",
        ".core.buffers.ray_buffer": "RayReplayBuffer",
        ".core.buffers.replay_buffer": "ReplayBuffer",
        ".core.buffers.schedulers": "LambdaScheduler LinearScheduler ParameterScheduler SchedulerList StepScheduler",
        ".core.buffers.tensordict": (
            "PrioritizedReplayBuffer RemoteTensorDictReplayBuffer TensorDictPrioritizedReplayBuffer "
            "TensorDictReplayBuffer"
        ),
        ".core.buffers.trajectories": "Trajectory TrajectoryPredicate filter_trajectories iter_trajectories traj",
        ".core.trajectories": "split_trajectories",
    },
    "Storages": {
        ".core.storages.base": "Storage",
        ".core.storages.ensemble": "StorageEnsemble",
        ".core.storages.lazy_tensor": "LazyMemmapStorage LazyTensorStorage",
        ".core.storages.list_storage": "CompressedListStorage LazyStackStorage ListStorage",
        ".core.storages.packed": "PackedRecording PackedStorage",
        ".core.storages.tensor": "TensorStorage",
    },
    "Samplers": {
        ".core.samplers.base": "Sampler",
        ".core.samplers.ensemble": "SamplerEnsemble",
        ".core.samplers.hindsight": "HindsightStrategy",
        ".core.samplers.prioritized": "PrioritizedSampler PrioritizedSliceSampler",
        ".core.samplers.prompt_groups": "PromptGroupSampler",
        ".core.samplers.sample_units": "SampleUnit Sequence Transition",
        ".core.samplers.slices": "SliceSampler SliceSamplerWithoutReplacement",
        ".core.samplers.staleness": "StalenessAwareSampler",
        ".core.samplers.stream": "StreamSampler StreamSliceSampler",
        ".core.samplers.streaming_slice": "StreamingSliceSampler",
        ".core.samplers.trajectories": "find_start_stop_traj",
        ".core.samplers.uniform": "ConsumingSampler RandomSampler SamplerWithoutReplacement",
    },
    "Writers": {
        ".core.writers.base": "ImmutableDatasetWriter Writer WriterEnsemble",
        ".core.writers.max_value": "TensorDictMaxValueWriter",
        ".core.writers.round_robin": "RoundRobinWriter TensorDictRoundRobinWriter",
    },
    "Transforms": {
        ".core.encodings.video": "clear_video_decoder_cache set_video_decoder_cache_size",
        ".core.transforms.base": "Compose Transform",
        ".core.transforms.keyed": (
            "CatTensors DecodeText ExcludeTransform Normalize RenameTransform Resize SelectTransform ToTensorImage"
        ),
        ".core.transforms.returns": "DensifyReward MultiStep MultiStepTransform ReturnToGo",
        ".core.transforms.video": "DecodeVideo",
        ".core.transforms.windows": "FrameStack NextStateReconstructor RandomCropTensorDict StoredFrameStack Windows",
    },
    "Checkpointers": {
        ".core.checkpointers.base": "StorageCheckpointerBase",
        ".core.checkpointers.ensemble": "StorageEnsembleCheckpointer",
        ".core.checkpointers.episodes": "FlatStorageCheckpointer H5StorageCheckpointer NestedStorageCheckpointer",
        ".core.checkpointers.lists": "CompressedListStorageCheckpointer ListStorageCheckpointer",
        ".core.checkpointers.references": "PackedStorageCheckpointer",
        ".core.checkpointers.tensor": "TensorStorageCheckpointer",
        ".core.torchrl.hooks": "Flat2TED H5Combine H5Split Nested2TED TED2Flat TED2Nested",
    },
    "Specs": {
        ".core.specs.base": "DEVICE_TYPING Box BoxList CategoricalBox Stacked TensorSpec",
        ".core.specs.bounded": (
            "Bounded BoundedContinuous BoundedDiscrete ContinuousBox Unbounded UnboundedContinuous UnboundedDiscrete"
        ),
        ".core.specs.categorical": "ACTION_SPACE_MAP Binary BinaryBox Categorical MultiCategorical MultiOneHot OneHot",
        ".core.specs.composite": (
            "Composite StackedComposite check_no_exclusive_keys consolidate_spec contains_lazy_spec"
        ),
        ".core.specs.interop": (
            "BinaryDiscreteTensorSpec BoundedTensorSpec CompositeSpec DiscreteTensorSpec LazyStackedCompositeSpec "
            "LazyStackedTensorSpec MultiDiscreteTensorSpec MultiOneHotDiscreteTensorSpec NonTensorSpec "
            "OneHotDiscreteTensorSpec UnboundedContinuousTensorSpec UnboundedDiscreteTensorSpec "
            "make_composite_from_td space_from_spec spec_from_space"
        ),
        ".core.specs.non_tensor": "Choice NonTensor",
    },
    "Maps and trees": {
        ".core.maps.tensordict_map": (
            "BinaryToDecimal HashToInt QueryModule RandomProjectionHash SipHash TensorDictMap TensorMap"
        ),
        ".core.maps.forest": "MCTSForest Tree",
    },
    "Text": {
        ".core.text.history": "ContentBase History LLMData LLMInput LLMOutput add_chat_template",
        ".core.text.loader": "TokenizedDatasetLoader create_infinite_iterator get_dataloader",
        ".core.text.rewards": "PairwiseDataset RewardData",
        ".core.text.rollouts": (
            "AdaptiveKLController ConstantKLController KLControllerBase PromptData RolloutFromModel "
            "get_prompt_dataloader_tldr"
        ),
        ".core.text.tokenizers": "PromptTensorDictTokenizer TensorDictTokenizer",
        ".core.text.topk": "TopKRewardSelector",
    },
    "Robots": {
        ".core.vla.preprocessing": "OpenVLAImagePreprocessor",
        ".core.vla.robot_data": (
            "ACTION_CHUNK_KEY ACTION_IS_PAD_KEY ACTION_KEY ACTION_TOKENS_KEY IMAGE_KEY INSTRUCTION_KEY "
            "OBSERVATION_KEY STATE_KEY VLA_ACTION_KEY ActionSpace ActionTokenizerBase GripperMode "
            "RobotDatasetMetadata UniformActionTokenizer VLAAction VLAImages VLAObservation VocabTailActionTokenizer "
            "validate_vla_tensordict"
        ),
    },
    "Errors and version": {
        ".core": "__version__",
        ".core.errors": (
            "AuthorisationError CheckFailed CorruptDataError DatasetNotFoundError FormatError MissingKeyError "
            "NetworkError OutOfSpaceError RbtoolError SchemaError UsageError"
        ),
    },
}
__doc__ = "\n\n".join([__doc__ or "", *(f"{title}: {' '.join(homes.values())}" for title, homes in _NAMES.items())])

_HOMES = {name: home for homes in _NAMES.values() for home, names in homes.items() for name in names.split()}
"""The module of each name."""

# A star import hides nothing of Python's.
__all__ = [name for name in _HOMES if name != "list"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if not name.startswith("_") and _DeepPaths.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f".{name}", __name__)
        from .core.torchrl_classes import MISSING

        why = f": {MISSING[name]}" if name in MISSING else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
    home = _HOMES[name]
    if home == ".core.verbs":
        found = importlib.import_module(f"{home}.{name}", __name__)
    else:
        found = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = found
    return found


def __dir__() -> Iterable[str]:
    return sorted(_HOMES)


def _own_module(inner: str) -> Any:
    """Return the spec of a module of `rbtool.converters`; None if this installation lacks it."""
    from importlib.util import find_spec

    try:
        return find_spec(f".converters.{inner}", __name__)
    except ModuleNotFoundError:
        return None


class _DeepPaths:
    """Finds TorchRL's modules, such as `rbtool.data.replay_buffers.samplers`; each offers all names of rbtool.

    Code that imports from TorchRL's deep paths then only changes the name of the package. Type checkers do not see
    these modules: `rbtool migrate` turns such imports into `from rbtool import …`. `rbtool.adapters` and its modules
    are those of `rbtool.converters.adapters`.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of such a module, None for any other; called after all other finders."""
        package, _, inner = name.partition(".")
        if package != __name__:
            return None
        from importlib.machinery import ModuleSpec

        from .core.torchrl_classes import MODULES

        known = not MODULES.isdisjoint({f"torchrl.{inner}", f"torchrl.data.{inner}"})
        known = known or (inner.startswith("adapters") and _own_module(inner) is not None)
        return ModuleSpec(name, _DeepPaths, is_package=True) if known else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> None:
        """Let Python create the module."""

    @staticmethod
    def exec_module(module: Any) -> None:
        """Give the module the names of rbtool, or the names of the adapters."""
        inner = module.__name__.removeprefix(f"{__name__}.")
        if inner.startswith("adapters."):
            sys.modules[module.__name__] = importlib.import_module(f".converters.{inner}", __name__)
        elif inner == "adapters":
            own = importlib.import_module(f".converters.{inner}", __name__)
            module.__doc__, module.__all__ = own.__doc__, own.__all__
            module.__getattr__, module.__dir__ = lambda name: getattr(own, name), lambda: own.__all__
        else:
            module.__getattr__, module.__dir__, module.__all__ = __getattr__, __dir__, __all__


if vars(sys.modules[__name__]) is globals():  # not a clone that handed over
    sys.meta_path.append(_DeepPaths)  # type: ignore[arg-type]
