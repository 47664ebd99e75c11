"""Data of robots for vision-language-action models: metadata, the layout of a step, and tokens of actions.

An action token is the number of a uniform bin, or one of the last tokens of a language model's vocabulary, as in
OpenVLA.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from ..errors import FormatError, MissingKeyError, SchemaError, UsageError, require_choice, suggests_keywords
from ..format.documents import load_json
from ..format.syncing import replace_file
from ..options import PathLike
from ..specs.base import TensorSpec
from ..specs.bounded import Bounded, Unbounded
from ..torchrl_classes import Rebased, counterpart

NestedKey: TypeAlias = str | tuple[str, ...]
ActionSpace: TypeAlias = Literal[
    "joint_delta", "joint_position", "eef_delta", "eef_pose", "velocity", "mixed", "unknown"
]
GripperMode: TypeAlias = Literal["continuous", "binary", "none", "unknown"]

_STATISTICS = ("action_mean", "action_std", "action_low", "action_high")
_KEYS = ("state_key", "instruction_key", "action_key")


class RobotDatasetMetadata(TensorClass["nocast"]):  # type: ignore[type-arg, name-defined]
    """Describes a robot dataset: ids, actions and their statistics, control frequency in Hz, keys, licence and URL.

    A tensorclass of batch size `[]`, with the fields of TorchRL's class. `a == b` compares field by field;
    `bool(a == b)` and `(a == b).all()` are True if all fields are equal. If a field is None in only one of the two,
    they are not equal, while TorchRL raises KeyError.

    The statistics `action_mean`, `action_std`, `action_low` and `action_high` are tensors or sequences of numbers,
    `[action_dim]`, or one number for all dimensions. They are stored as float32, or as float64 if such a tensor is
    given; TorchRL also stores integers. `action_space` is one of `ActionSpace`, `gripper_mode` one of `GripperMode`.

    Raises:
        UsageError (a ValueError): `action_dim` is not a whole number from 1, the space or mode is unknown, the
            frequency is not above 0, statistics are NaN or have the wrong shape, or bounds are in the wrong order.

    >>> metadata = RobotDatasetMetadata("bridge", action_dim=2, action_low=[-1, 0], action_high=[1, 5])
    >>> metadata.action_low, metadata.make_action_spec(shape_prefix=(4,)).shape
    (tensor([-1.,  0.]), torch.Size([4, 2]))
    >>> RobotDatasetMetadata.from_json(metadata.to_json()).action_high
    tensor([1., 5.])
    """

    dataset_id: str
    embodiment_id: str | None = None
    action_dim: int | None = None
    action_names: tuple[str, ...] | None = None
    action_space: ActionSpace = "unknown"
    gripper_mode: GripperMode = "unknown"
    control_frequency_hz: float | None = None
    camera_keys: tuple[NestedKey, ...] = ()
    state_key: NestedKey | None = ("observation", "state")
    instruction_key: NestedKey | None = "language_instruction"
    action_key: NestedKey = "action"
    action_mean: Any = None
    action_std: Any = None
    action_low: Any = None
    action_high: Any = None
    license: str | None = None
    source_url: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dataset_id, str):  # a stack of several, or the result of a comparison
            return
        for name, known in (("action_space", ActionSpace), ("gripper_mode", GripperMode)):
            require_choice(name, getattr(self, name), get_args(known))
        dim: Any = self.action_dim
        frequency: Any = self.control_frequency_hz
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
            raise UsageError(f"action_dim is {dim!r}, expected a whole number from 1")
        if frequency is not None and not (isinstance(frequency, int | float) and 0 < frequency < float("inf")):
            raise UsageError(f"control_frequency_hz is {frequency!r}, expected a number above 0")
        names = None if self.action_names is None else tuple(self.action_names)
        if names is not None and dim is not None and len(names) != dim:
            raise UsageError(f"action_names has {len(names)} names, expected {dim}: one for each dimension")
        self.action_names = names
        self.camera_keys = tuple(_key(key) for key in self.camera_keys)
        for name in _KEYS:
            setattr(self, name, _key(getattr(self, name)))
        for name in _STATISTICS:
            setattr(self, name, _statistics(name, getattr(self, name), dim))
        low, high = self.action_low, self.action_high
        if low is not None and high is not None and bool((low > high).any()):
            raise UsageError("action_low is above action_high in some dimension")

    def make_action_spec(
        self, *, shape_prefix: tuple[int, ...] = (), device: torch.device | str | None = None
    ) -> TensorSpec:
        """Return the spec of actions of shape `[*shape_prefix, action_dim]`, bounded if both bounds are known.

        UsageError (a ValueError) if `action_dim` is None.
        """
        if self.action_dim is None:
            raise UsageError(f"{self.dataset_id!r} has no action_dim, so its actions have no spec")
        shape = torch.Size((*shape_prefix, self.action_dim))
        if self.action_low is None or self.action_high is None:
            return Unbounded(shape, device=device)
        low, high = (bound.expand(shape).clone() for bound in (self.action_low, self.action_high))
        return Bounded(low, high, shape, device=device, dtype=low.dtype)

    def to_json(self, path: PathLike | None = None) -> str:  # type: ignore[override]
        """Return all values as a JSON document, and write it to `path` if one is given."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        text = json.dumps(values, indent=2)
        if path is not None:
            replace_file(Path(path), text.encode())
        return text

    @classmethod
    def from_json(cls, source: PathLike) -> RobotDatasetMetadata:  # type: ignore[override]
        """Read metadata that `to_json` wrote, here or in TorchRL; unknown keys are ignored.

        Args:
            source: a JSON document (a text that starts with "{") or the path of a file.

        Raises:
            FormatError (a ValueError): the document is not an object with a `dataset_id`.
            FileNotFoundError: the file does not exist.
            UsageError (a ValueError): the class refuses a value.
        """
        if isinstance(source, str) and source.lstrip().startswith("{"):
            try:
                found = json.loads(source)
            except ValueError as error:
                raise FormatError(f"the metadata is not a JSON document: {error}") from error
        else:
            found = load_json(Path(source))
        if not isinstance(found, Mapping) or not isinstance(found.get("dataset_id"), str):
            raise FormatError("the metadata is not an object with a dataset_id")
        return cls.from_dict(found)

    @classmethod
    def from_dict(cls, input_dict: Mapping[str, Any]) -> RobotDatasetMetadata:  # type: ignore[override]
        """Make metadata from the result of `to_dict`; unknown keys are ignored.

        The method of the base class would convert numbers to tensors, and keys to tensordicts.
        """
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in input_dict.items() if name in known})


def _compared(one: RobotDatasetMetadata, other: object) -> Any:
    """Return metadata with a bool tensor for each field that is set in one of two; `[]`, or of their common shape."""
    if not isinstance(other, RobotDatasetMetadata):
        return NotImplemented
    names = [field.name for field in fields(RobotDatasetMetadata)]
    found: dict[str, Any] = {name: _alike(getattr(one, name), getattr(other, name)) for name in names}
    return RobotDatasetMetadata(**found)


def _alike(one: Any, other: Any) -> torch.Tensor | None:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one == other if one.shape == other.shape else torch.tensor(False)
    return None if one is None and other is None else torch.tensor(type(one) is type(other) and one == other)


def _differ(one: RobotDatasetMetadata, other: object) -> Any:
    compared = _compared(one, other)
    return compared if compared is NotImplemented else torch.tensor(not _is_true(compared))


def _is_true(metadata: RobotDatasetMetadata) -> bool:
    return isinstance(metadata.dataset_id, str) or bool(metadata.all())


def _hashed(metadata: RobotDatasetMetadata) -> int:
    return hash((metadata.dataset_id, metadata.action_dim))


# The decorator of tensorclasses overwrites these methods, so they are assigned afterwards.
for _name, _method in {"eq": _compared, "ne": _differ, "bool": _is_true, "hash": _hashed}.items():
    setattr(RobotDatasetMetadata, f"__{_name}__", _method)


def _key(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _statistics(name: str, given: Any, dim: int | None) -> torch.Tensor | None:
    """Return statistics as a tensor of floats; UsageError for a wrong shape and for values that are not numbers."""
    if given is None:
        return None
    try:
        values = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} must be numbers: {error}") from error
    if values.is_complex() or values.dtype == torch.bool:
        raise UsageError(f"{name} is {values.dtype}, expected numbers")
    values = values if values.dtype == torch.float64 else values.to(torch.float32)
    if bool(values.isnan().any()):
        raise UsageError(f"{name} is NaN in some dimension")
    if values.dim() > 1 or (values.dim() and dim is not None and len(values) != dim):
        raise UsageError(f"{name} is {list(values.shape)}, expected [{'action_dim' if dim is None else dim}]")
    return values


OBSERVATION_KEY = "observation"
IMAGE_KEY = ("observation", "image")
STATE_KEY = ("observation", "state")
INSTRUCTION_KEY = "language_instruction"
ACTION_KEY = "action"
VLA_ACTION_KEY = "vla_action"
ACTION_CHUNK_KEY = ("vla_action", "chunk")
ACTION_TOKENS_KEY = ("vla_action", "tokens")
ACTION_IS_PAD_KEY = "action_is_pad"


class VLAImages(TensorClass["nocast"]):  # type: ignore[type-arg, name-defined]
    """The images of a batch of steps, `[*batch, C, H, W]`. It has the fields of TorchRL's tensorclass.

    `image` is from the main camera, `wrist_image` from a wrist camera; the tensordict `extra` has the images of other
    cameras by name. Each may be None. `padded` marks steps at the end that repeat others.
    """

    image: Any = None
    wrist_image: Any = None
    extra: Any = None
    padded: Any = None


class VLAObservation(TensorClass):
    """The input of a policy: images, robot state `[*batch, n]`, instruction, and preprocessed entries.

    It has the fields of TorchRL's tensorclass.
    """

    images: Any = None
    state: Any = None
    instruction: Any = None
    preprocessed: Any = None


class VLAAction(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg, name-defined]
    """The output of a policy: a chunk of actions `[*batch, steps, action_dim]`, its tokens and log-probabilities.

    `tokens` and `raw_tokens` (as the model produced them) are int64, `mask` is bool. `padded` marks steps at the end of
    a chunk that repeat others. It has the fields of TorchRL's tensorclass.
    """

    chunk: Any = None
    tokens: Any = None
    raw_tokens: Any = None
    logits: Any = None
    log_probs: Any = None
    mask: Any = None
    padded: Any = None


class VLASchemaError(SchemaError, ValueError):
    """A tensordict does not have the layout of steps of a vision-language-action dataset."""


@suggests_keywords()
def validate_vla_tensordict(
    tensordict: TensorDictBase,
    *,
    instruction_key: NestedKey = INSTRUCTION_KEY,
    action_key: NestedKey = ACTION_KEY,
    image_key: NestedKey = IMAGE_KEY,
    state_key: NestedKey = STATE_KEY,
    require_instruction: bool = True,
    require_action: bool = True,
    require_perception: bool = True,
    check_finite: bool = True,
    raise_on_error: bool = True,
) -> list[str]:
    """Check the layout of steps; return the problems, one sentence each, or an empty list.

    The instruction must be tokens, or text that is not blank: one for all steps, or one for each. Actions must be
    numbers, with `check_finite` finite ones. There must be an image or a state. Entries that are not required are
    checked if they exist. TorchRL's function of this name checks only the first instruction, and accepts text as
    actions.

    Raises:
        VLASchemaError (a ValueError and a RuntimeError): there are problems, and `raise_on_error` is True. The message
            has all sentences.
        UsageError (a ValueError): the steps are not a tensordict.

    >>> from tensordict import TensorDict
    >>> steps = TensorDict({"action": torch.zeros(3, 7), "observation": {"state": torch.zeros(3, 8)}}, [3])
    >>> validate_vla_tensordict(steps, raise_on_error=False)
    ["'language_instruction' is missing: the language instruction"]
    """
    if not isinstance(tensordict, TensorDictBase):
        raise UsageError(f"the steps are a {type(tensordict).__name__}, expected a tensordict")
    issues = []
    instruction, action, image, state = (
        _entry(tensordict, key) for key in (instruction_key, action_key, image_key, state_key)
    )
    if instruction is not None:
        issues += _instruction_issues(_shown(instruction_key), instruction)
    elif require_instruction:
        issues.append(f"{_shown(instruction_key)} is missing: the language instruction")
    if image is None and state is None and require_perception:
        issues.append(
            f"{_shown(image_key)} and {_shown(state_key)} are missing: there is no perception (image or state)"
        )
    if action is None and require_action:
        issues.append(f"missing action: there is no {_shown(action_key)}")
    if action is not None:
        issues += _action_issues(_shown(action_key), action, finite=check_finite)
    if issues and raise_on_error:
        raise VLASchemaError("; ".join(issues))
    return issues


def _entry(data: Any, key: NestedKey) -> Any:
    """Return an entry; None if it is missing, also if the key leads into a tensor."""
    for part in (key,) if isinstance(key, str) else key:
        data = data.get(part, None) if is_tensor_collection(data) and not is_non_tensor(data) else None
    return data


def _shown(key: NestedKey) -> str:
    return repr(key if isinstance(key, str) else ".".join(key))


def _instruction_issues(name: str, found: Any) -> list[str]:
    if isinstance(found, torch.Tensor):
        strange = found.is_floating_point() or found.is_complex() or not found.numel()
        return [f"{name} is {found.dtype} {list(found.shape)}, expected text or tokens"] if strange else []
    texts = _texts(found)
    if not texts:
        return [f"{name} has no text"]
    for place, text in enumerate(texts):
        where = f" of step {place}" if len(texts) > 1 else ""
        if not isinstance(text, str):
            return [f"{name}{where} is a {type(text).__name__}, expected text"]
        if not text.strip():
            return [f"{name}{where} is blank: an empty language instruction"]
    return []


def _texts(found: Any) -> list[Any]:
    """Return all values of a non-tensor entry in one list."""
    if isinstance(found, NonTensorStack):
        found = found.tolist()
    elif isinstance(found, NonTensorData):
        found = found.data
    if not isinstance(found, list | tuple):
        return [found]
    return [text for part in found for text in _texts(part)]


def _action_issues(name: str, found: Any, *, finite: bool) -> list[str]:
    if not isinstance(found, torch.Tensor):
        return [f"{name} is a {type(found).__name__}, expected numbers"]
    if not found.numel():
        return [f"{name} is {list(found.shape)}: it has no values"]
    if finite and not bool(found.isfinite().all()):
        return [f"{name} has non-finite values"]
    return []


_TINY = 1e-8
"""OpenVLA adds this to the width of a range, so that it never divides by zero."""


@counterpart
class ActionTokenizerBase(Rebased, torch.nn.Module, ABC):
    """The base class of action tokenizers, which convert actions to tokens and back.

    A tokenizer is a module, so that its constants move to a device together with a model. Subclasses implement
    `encode(actions)`, from floats `[..., action_dim]` to int64 of the same shape, `decode(tokens)`, back to float32,
    and `vocab_size`.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The size of the vocabulary; all tokens are smaller."""

    @abstractmethod
    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens of actions, int64 of the same shape."""

    @abstractmethod
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the actions of tokens, float32 of the same shape."""

    def forward(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens of actions."""
        return self.encode(actions)


@counterpart
class UniformActionTokenizer(ActionTokenizerBase):
    """Divides the range of each action dimension into `num_bins` bins of equal width; a token is the index of a bin.

    Actions outside of the range get the first or last bin; `decode` returns the centres of bins. It has the
    arguments of TorchRL's class. NaN is an error here, while TorchRL encodes it as an arbitrary token.

    Args:
        num_bins: the number of bins per dimension.
        low, high: the range, numbers or `[action_dim]`.
        action_dim: the width of actions; numbers are repeated for all dimensions.

    Raises:
        UsageError (a ValueError): bounds are not finite, not in order or of different shapes, or there is no bin.
        SchemaError (a RuntimeError): actions are NaN or of another width, or tokens are not bins.

    >>> tokenizer = UniformActionTokenizer(4, low=-1.0, high=1.0)
    >>> tokens = tokenizer.encode(torch.tensor([-2.0, -0.3, 0.0, 1.0]))
    >>> tokens, tokenizer.decode(tokens)
    (tensor([0, 1, 2, 3]), tensor([-0.7500, -0.2500,  0.2500,  0.7500]))
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, num_bins: int, *, low: Any, high: Any, action_dim: int | None = None) -> None:
        super().__init__()
        self.num_bins = _count("num_bins", num_bins, 1)
        low, high = (_floats(name, value) for name, value in (("low", low), ("high", high)))
        if action_dim is not None:
            width = _count("action_dim", action_dim, 1)
            low, high = (bound if bound.dim() else bound.repeat(width) for bound in (low, high))
        _require_range("low", low, "high", high)
        if not bool((low < high).all()):
            raise UsageError("expected low below high in every dimension")
        dim = len(low) if low.dim() else None
        if action_dim is not None and dim not in (None, action_dim):
            raise UsageError(f"action_dim is {action_dim}, but the bounds have {dim}")
        self._action_dim = None if action_dim is None and dim is None else _count("action_dim", action_dim or dim, 1)
        self.register_buffer("low", low.float())
        self.register_buffer("high", high.float())

    @classmethod
    def from_metadata(cls, metadata: RobotDatasetMetadata, num_bins: int) -> UniformActionTokenizer:
        """Create a tokenizer for the action bounds of a dataset; UsageError (a ValueError) if they are not known."""
        if metadata.action_low is None or metadata.action_high is None:
            raise UsageError(f"the action bounds of {metadata.dataset_id!r} are not known")
        return cls(num_bins, low=metadata.action_low, high=metadata.action_high, action_dim=metadata.action_dim)

    @property
    def action_dim(self) -> int | None:
        """The width of actions; None if it is not known."""
        return self._action_dim

    @property
    def vocab_size(self) -> int:
        """The number of bins."""
        return self.num_bins

    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the bins of actions."""
        actions, low, high = _actions(actions, self.action_dim), self.low, self.high
        part = (actions.clamp(low, high) - low) / (high - low)  # in float32, so that rounding is the same as TorchRL's
        return (part * self.num_bins).floor().to(torch.int64).clamp(0, self.num_bins - 1)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the centres of bins."""
        _require_tokens(tokens, self.num_bins, self.action_dim)
        return self.low + (tokens + 0.5) / self.num_bins * (self.high - self.low)


@counterpart
class VocabTailActionTokenizer(ActionTokenizerBase):
    """OpenVLA's action tokens: bins of [-1, 1] are the last tokens of a vocabulary, in descending order.

    Actions are first scaled from [`norm_low`, `norm_high`] to [-1, 1]. With V the size of the vocabulary and
    `num_bins` equally spaced edges from -1 to 1, an action x becomes the token V - digitize(x, edges):

        action   -1                       1
        edges     |     |     |     |     |
        token       V-1   V-2   V-3   V-4

    `decode` returns the centres between edges. A token outside of the bins, which a model may produce, is decoded as
    the nearest bin. The tokens match OpenVLA, the arguments TorchRL. The buffers `bins`, float64 `[num_bins]`, and
    `bin_centers`, `[num_bins - 1]`, are the edges and the centres between them.

    Args:
        num_bins: the number of edges.
        full_vocab_size: V; by default `num_bins`.
        norm_low, norm_high: the range of actions `[action_dim]` that is scaled to [-1, 1]; for OpenVLA the 1st and 99th
            percentile. None: actions are not scaled.
        norm_mask: bool `[action_dim]`. Dimensions where it is False, such as a gripper, are not scaled.
        gripper_binarize: `decode` sets the dimensions that are not scaled to 1 if they are above
            `gripper_binarize_threshold`, else to -1.
        gripper_invert: `decode` changes the sign of these dimensions.

    Raises:
        UsageError (a ValueError): there are fewer than 2 bins, or more bins than tokens in the vocabulary; a range is
            not finite, not in order, of another shape, or incomplete.
        SchemaError (a RuntimeError): actions are NaN or of another width, or tokens are outside of the vocabulary.

    >>> tokenizer = VocabTailActionTokenizer(256, full_vocab_size=32000)
    >>> tokens = tokenizer.encode(torch.tensor([-1.0, 0.0, 1.0]))
    >>> tokens, tokenizer.decode(tokens)
    (tensor([31999, 31872, 31744]), tensor([-0.9961,  0.0000,  0.9961]))
    """

    bins: torch.Tensor
    bin_centers: torch.Tensor
    norm_low: torch.Tensor | None
    norm_high: torch.Tensor | None
    norm_mask: torch.Tensor | None

    def __init__(
        self,
        num_bins: int = 256,
        *,
        full_vocab_size: int | None = None,
        norm_low: Any = None,
        norm_high: Any = None,
        norm_mask: Any = None,
        gripper_binarize: bool = False,
        gripper_binarize_threshold: float = 0.0,
        gripper_invert: bool = False,
    ) -> None:
        super().__init__()
        self.num_bins = _count("num_bins", num_bins, 2)
        self.full_vocab_size = full_vocab_size
        if full_vocab_size is not None and _count("full_vocab_size", full_vocab_size, 1) < num_bins:
            raise UsageError(f"full_vocab_size is {full_vocab_size}, expected at least the {num_bins} bins")
        self.gripper_binarize, self.gripper_invert = gripper_binarize, gripper_invert
        self.gripper_binarize_threshold = gripper_binarize_threshold
        if (norm_low is None) != (norm_high is None):
            raise UsageError("only one of norm_low and norm_high is set, expected both or neither")
        low = high = mask = None
        if norm_low is not None:
            low, high = (_floats(name, value) for name, value in (("norm_low", norm_low), ("norm_high", norm_high)))
            _require_range("norm_low", low, "norm_high", high)
            mask = torch.ones_like(low, dtype=torch.bool) if norm_mask is None else torch.as_tensor(norm_mask).bool()
            if mask.shape != low.shape:
                raise UsageError(f"norm_mask is {list(mask.shape)}, expected {list(low.shape)}")
        elif norm_mask is not None:
            raise UsageError("norm_mask is set, but norm_low and norm_high are None")
        bins = torch.from_numpy(np.linspace(-1, 1, num_bins))  # torch.linspace rounds differently
        self.register_buffer("bins", bins)
        self.register_buffer("bin_centers", (bins[1:] + bins[:-1]) / 2)
        for name, value in (("norm_low", low), ("norm_high", high), ("norm_mask", mask)):
            self.register_buffer(name, value)

    @classmethod
    def from_norm_stats(
        cls, norm_stats: Mapping[str, Any], unnorm_key: str, **options: Any
    ) -> VocabTailActionTokenizer:
        """Create a tokenizer from OpenVLA's statistics.

        `norm_stats[unnorm_key]["action"]` has `q01`, `q99` and optionally `mask`; MissingKeyError (a KeyError) if the
        dataset or one of the first two is missing.
        """
        if unnorm_key not in norm_stats:
            raise MissingKeyError(f"{unnorm_key!r} is not in the statistics, which have {', '.join(norm_stats)}")
        found = norm_stats[unnorm_key].get("action", {})
        missing = [name for name in ("q01", "q99") if name not in found]
        if missing:
            raise MissingKeyError(f"{' and '.join(missing)} of actions are missing in the statistics of {unnorm_key!r}")
        return cls(norm_low=found["q01"], norm_high=found["q99"], norm_mask=found.get("mask"), **options)

    @property
    def vocab_size(self) -> int:
        """The size of the whole vocabulary."""
        return self.num_bins if self.full_vocab_size is None else self.full_vocab_size

    @property
    def action_dim(self) -> int | None:
        """The width of actions; None if no range is given."""
        return len(self.norm_low) if self.norm_low is not None and self.norm_low.dim() else None

    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens of actions."""
        actions = _actions(actions, self.action_dim)
        if self.norm_low is not None and self.norm_high is not None and self.norm_mask is not None:
            low, high = self.norm_low.to(actions.dtype), self.norm_high.to(actions.dtype)
            actions = (2 * (actions - low) / (high - low + _TINY) - 1).where(self.norm_mask, actions)
        places = torch.bucketize(actions.to(torch.float64).clamp(-1, 1).contiguous(), self.bins, right=True)
        return self.vocab_size - places

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the actions of tokens."""
        _require_tokens(tokens, self.vocab_size, self.action_dim)
        actions = self.bin_centers[(self.vocab_size - tokens - 1).clamp(0, self.num_bins - 2)]
        if self.norm_low is not None and self.norm_high is not None and self.norm_mask is not None:
            scaled = 0.5 * (actions + 1) * (self.norm_high - self.norm_low + _TINY) + self.norm_low
            actions = scaled.where(self.norm_mask, self._gripper(actions))
        return actions.to(torch.float32)

    def _gripper(self, values: torch.Tensor) -> torch.Tensor:
        if self.gripper_binarize:
            values = torch.where(values > self.gripper_binarize_threshold, 1.0, -1.0).to(values.dtype)
        return -values if self.gripper_invert else values


def _count(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{name} is {number!r}, expected a whole number from {least}")
    return number


def _floats(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given, dtype=torch.float64).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} must be numbers: {error}") from error


def _require_range(low_name: str, low: torch.Tensor, high_name: str, high: torch.Tensor) -> None:
    """Raise UsageError unless two tensors are the lower and upper ends of ranges."""
    if low.shape != high.shape or low.dim() > 1:
        raise UsageError(f"{low_name} is {list(low.shape)} and {high_name} {list(high.shape)}, expected [action_dim]")
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise UsageError(f"{low_name} or {high_name} is not finite")
    if not bool((low <= high).all()):
        raise UsageError(f"{low_name} is above {high_name} in some dimension")


def _require_width(found: torch.Tensor, width: int | None, what: str) -> None:
    if width is not None and (not found.dim() or found.shape[-1] != width):
        raise SchemaError(f"{what} are {list(found.shape)}, expected [..., {width}]")


def _actions(actions: torch.Tensor, width: int | None) -> torch.Tensor:
    """Return actions as float32, or unchanged if float64; SchemaError for NaN and for another width."""
    _require_width(actions, width, "actions")
    if bool(actions.isnan().any()):
        raise SchemaError("actions contain NaN, for which there is no token", hint="drop or repair those steps")
    return actions if actions.dtype == torch.float64 else actions.to(torch.float32)


def _require_tokens(tokens: torch.Tensor, size: int, width: int | None) -> None:
    """Raise SchemaError unless these are tokens of a vocabulary of this size."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise SchemaError(f"tokens are {tokens.dtype}, expected whole numbers")
    _require_width(tokens, width, "tokens")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise SchemaError(f"tokens are from {int(tokens.min())} to {int(tokens.max())}, expected 0 to {size - 1}")
