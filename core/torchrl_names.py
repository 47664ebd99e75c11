"""TorchRL's names: the modules of its data part, what of them rbtool lacks for good, and what behaves differently."""

from __future__ import annotations

from collections.abc import Mapping

_FILES = {
    "": "data",
    "data": "datasets llm map postprocs replay_buffers rlhf tensor_specs utils video vla",
    "data.datasets": "atari_dqn common d4rl d4rl_infos gen_dgrl lerobot minari_data openml openx roboset utils vd4rl",
    "data.llm": "chat common dataset history prompt reward topk utils",
    "data.map": "hash query tdstorage tree utils",
    "data.postprocs": "postprocs",
    "data.replay_buffers": "checkpointers her offline_to_online query ray_buffer replay_buffers sample_units samplers "
    "scheduler storages utils writers",
    "data.replay_buffers.replay_buffers": "base deprecated ensemble prioritized prioritized_tensordict remote "
    "tensordict",
    "data.replay_buffers.samplers": "base ensemble llm prioritized prioritized_slice random slice "
    "slice_without_replacement staleness streaming_slice",
    "data.replay_buffers.storages": "base ensemble list store tensor utils",
    "data.replay_buffers.writers": "base ensemble max_value round_robin",
    "data.rlhf": "dataset prompt reward utils",  # before TorchRL 0.8
    "data.vla": "containers metadata preprocessing schema tokenizers",
}
MODULES = frozenset(
    f"torchrl.{folder}.{name}".replace("..", ".") for folder in _FILES for name in _FILES[folder].split()
)
"""The modules of TorchRL's data part, with those of older versions."""

MISSING: Mapping[str, str] = {
    "DiscreteBox": "its name is CategoricalBox now",
    "InPlaceSampler": "it fails at every call in TorchRL, too",
    "StoreStorage": "it needs a server; a LazyMemmapStorage with `shared=True` serves processes of one machine, and "
    "RayReplayBuffer those of several",
    "invertible_dict": "an internal of TorchRL",
    "pin_memory_output": "an internal of TorchRL",
    "stack_tensors": "an internal of TorchRL",
    "tree_iter": "an internal of TorchRL",
    "unravel_index": "torch has it, as `torch.unravel_index`",
}
"""What rbtool leaves to TorchRL, and why, or what there is instead."""

DIFFERENT: Mapping[str, str] = {
    "Binary": "`space` is a BinaryBox of as many members; in TorchRL it is a CategoricalBox of 2",
    "Bounded": "with `dtype=torch.bool` bounds are cut to False and True, and both values are drawn, in TorchRL always "
    "True; other bounds that the type cannot hold are refused; integers have a finite `cardinality()`",
    "Choice": "`cardinality()` and `enumerate()` have each value once; TorchRL counts duplicates",
    "Composite": "assigning `device` moves the entries, in TorchRL it does nothing; a locked one refuses `del`, `pop`; "
    "`get` of a missing key raises KeyError; `refine_names` keeps names under an Ellipsis; an empty one has one value",
    "HERReplayBuffer": "warns where no function computes terminations, so that stored flags belong to old goals",
    "History": "`append` and `extend` change this object alone, not one that it was indexed from; a chat template "
    "without a place for a role refuses it, where TorchRL drops the message",
    "LazyMemmapStorage": "rows with other keys than the storage has are refused, `schema='open'` takes them; a pickle "
    "of `rb[:]` holds the values, in TorchRL the name of the file; each row keeps its own text, in TorchRL all have "
    "the first one's",
    "LazyTensorStorage": "`extend` refuses rows with other keys than the storage has, `schema='open'` takes them; a "
    "checkpoint keeps the text of each row, in TorchRL all have the first one's; what JSON cannot hold must be the "
    "same in all rows; the text of `rb[:]` is a copy",
    "LeRobotExperienceReplay": "the last step of a slice has its next row where that is stored; in TorchRL always NaN",
    "MCTSForest": "`get_tree` keeps the last step of a rollout, which TorchRL drops; an unknown root raises KeyError, "
    "not IndexError; `len` counts a step that several rollouts share once",
    "MultiStep": "takes done flags and rewards with further dimensions; windows end before steps that "
    '`("collector", "mask")` leaves out; `"multi_step"` holds the flags of the last step of each window',
    "OpenVLAImagePreprocessor": "`backend='pil'` compresses images before it resizes them, as the others do; in "
    "TorchRL after",
    "PrioritizedSampler": "grows to a larger storage, with a warning; TorchRL never draws the rows beyond",
    "PrioritizedSliceSampler": "a `span` of a whole slice or more is refused",
    "NonTensor": "equality compares shapes, too; with `batched`, a nested example has a datum for each element",
    "OneHot": "an index counts the dimension of categories, as for values: `spec[..., 0]` raises IndexError; `reshape` "
    "and `unflatten` cannot change that dimension",
    "QueryModule": "`in_keys` is a list; the `aggregator` is a SipHash if none is given, also with a `hash_module`",
    "RayReplayBuffer": "Ray is its only transport: `transport='distributed'` is refused; after `close()` methods raise "
    "a RuntimeError, in TorchRL errors of Ray",
    "ReplayBuffer": "a transform added with `invert=True` changes written data by its own `forward`, if it has one, in "
    "TorchRL always by `_call`; `submit_update_if_present` returns when the update is done",
    "ReplayBufferEnsemble": "draws other elements than TorchRL from the same seed; `end_streams` is missing",
    "RobotDatasetMetadata": "statistics given as integers become float32",
    "Sequence": "also takes a ListStorage that holds tensordicts",
    "SliceSampler": "`span=k` leaves up to k steps out, as with PrioritizedSliceSampler, in TorchRL slices have k "
    "steps at least; a ListStorage of tensordicts and end flags with further dimensions are taken; `fragmented` is "
    "missing",
    "SliceSamplerWithoutReplacement": "batches have no gaps where trajectories are shorter than a slice",
    "Stacked": "specs of one shape become a dense spec when they are stacked",
    "StackedComposite": "iterating yields keys, as of a Composite; `unbind` returns a tuple; `reshape`, `encode` and "
    "all indices work",
    "StreamingSliceSampler": "only `add` and `extend` make windows; in TorchRL `mark_update` does, too",
    "TensorDictMap": "has `out_keys` before the first write, too; a later value may lack or bring no entries",
    "TensorDictMaxValueWriter": "`get_insert_index` only says where `add` would write; in TorchRL it takes the place",
    "TensorDictReplayBuffer": "`sample(0)` is refused",
    "TensorSpec": "`expand(-1)` keeps sizes other than 1; a list of True and False is a mask, as in torch",
    "Trajectory": "one of a buffer reads and transforms entries when they are used; a stack of several has no `length`",
    "Tree": "the root has a hash, and `vertices(key_type='hash')` are keyed by hashes",
    "UniformActionTokenizer": "bounds that differ from `action_dim` in number are refused; actions of half precision "
    "are not rounded further",
    "validate_vla_tensordict": "looks at every instruction of a stack, and refuses text as actions",
}
"""What has the same name in rbtool and behaves differently on purpose."""
