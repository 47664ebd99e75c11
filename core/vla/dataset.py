"""Datasets for vision-language-action models: their metadata, and the layout of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDictBase

from ..errors import FormatError, SchemaError, UsageError, suggests_keywords
from ..format.documents import load_json
from ..format.syncing import replace_file
from ..specs.base import TensorSpec
from ..specs.bounded import Bounded, Unbounded

NestedKey: TypeAlias = str | tuple[str, ...]
ActionSpace: TypeAlias = Literal[
    "joint_delta", "joint_position", "eef_delta", "eef_pose", "velocity", "mixed", "unknown"
]
GripperMode: TypeAlias = Literal["continuous", "binary", "none", "unknown"]

_STATISTICS = ("action_mean", "action_std", "action_low", "action_high")
_KEYS = ("state_key", "instruction_key", "action_key")


@dataclass(frozen=True, eq=False)
class RobotDatasetMetadata:
    """Describes a robot dataset: ids, actions and their statistics, control frequency in Hz, keys, licence and URL.

    The fields match TorchRL's class. The statistics `action_mean`, `action_std`, `action_low` and `action_high`
    are tensors or sequences of numbers, `[action_dim]` or one number for all dimensions. They are kept as float32, or
    as float64 if such a tensor is given (TorchRL keeps integers as they are). `action_space` is one of `ActionSpace`,
    `gripper_mode` one of `GripperMode`.

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
        for name, known in (("action_space", ActionSpace), ("gripper_mode", GripperMode)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(known))}")
        dim: Any = self.action_dim
        frequency: Any = self.control_frequency_hz
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
            raise UsageError(f"action_dim is {dim!r}, expected a whole number from 1")
        if frequency is not None and not (isinstance(frequency, int | float) and 0 < frequency < float("inf")):
            raise UsageError(f"control_frequency_hz is {frequency!r}, expected a number above 0")
        names = None if self.action_names is None else tuple(self.action_names)
        if names is not None and dim is not None and len(names) != dim:
            raise UsageError(f"action_names has {len(names)} names, expected {dim}: one for each dimension")
        self._set("action_names", names)
        self._set("camera_keys", tuple(_key(key) for key in self.camera_keys))
        for name in _KEYS:
            self._set(name, _key(getattr(self, name)))
        for name in _STATISTICS:
            self._set(name, _statistics(name, getattr(self, name), dim))
        low, high = self.action_low, self.action_high
        if low is not None and high is not None and bool((low > high).any()):
            raise UsageError("action_low is above action_high in some dimension")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RobotDatasetMetadata):
            return NotImplemented
        return all(_same(getattr(self, one.name), getattr(other, one.name)) for one in fields(self))

    def __hash__(self) -> int:
        return hash((self.dataset_id, self.action_dim))

    def make_action_spec(
        self, *, shape_prefix: tuple[int, ...] = (), device: torch.device | str | None = None
    ) -> TensorSpec:
        """Return the spec of actions of shape `[*shape_prefix, action_dim]`, bounded if both bounds are known.

        UsageError (a ValueError) if `action_dim` is None.
        """
        if self.action_dim is None:
            raise UsageError(f"{self.dataset_id!r} has no action_dim, without which there is no spec of its actions")
        shape = torch.Size((*shape_prefix, self.action_dim))
        if self.action_low is None or self.action_high is None:
            return Unbounded(shape, device=device)
        low, high = (bound.expand(shape).clone() for bound in (self.action_low, self.action_high))
        return Bounded(low, high, shape, device=device, dtype=low.dtype)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return all values as a JSON document, and write it to `path` if one is given."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        text = json.dumps(values, indent=2)
        if path is not None:
            replace_file(Path(path), text.encode())
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> RobotDatasetMetadata:
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
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})


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
        raise UsageError(f"{name} has to be numbers: {error}") from error
    if values.is_complex() or values.dtype == torch.bool:
        raise UsageError(f"{name} is {values.dtype}, expected numbers")
    values = values if values.dtype == torch.float64 else values.to(torch.float32)
    if bool(values.isnan().any()):
        raise UsageError(f"{name} is NaN in some dimension")
    if values.dim() > 1 or (values.dim() and dim is not None and len(values) != dim):
        raise UsageError(f"{name} is {list(values.shape)}, expected [{'action_dim' if dim is None else dim}]")
    return values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


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
    """The images of a batch of steps, `[*batch, C, H, W]`; has the fields of TorchRL's tensorclass.

    There are images of the main camera, of a wrist camera, and in the tensordict `extra` of other cameras by name; each
    may be None. `padded` marks steps at the end that repeat others.
    """

    image: Any = None
    wrist_image: Any = None
    extra: Any = None
    padded: Any = None


class VLAObservation(TensorClass):
    """What a policy sees: images, robot state `[*batch, n]`, instruction, and preprocessed entries.

    Has the fields of TorchRL's tensorclass.
    """

    images: Any = None
    state: Any = None
    instruction: Any = None
    preprocessed: Any = None


class VLAAction(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg, name-defined]
    """What a policy does: a chunk of actions `[*batch, steps, action_dim]`, its tokens, and their log-probabilities.

    `tokens` and `raw_tokens` (as the model produced them) are int64, `mask` is bool; `padded` marks steps at the end of
    a chunk that repeat others. Has the fields of TorchRL's tensorclass.
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

    Checked are the instruction (text that is not blank, one for all steps or one per step, or tokens), the actions
    (numbers, finite with `check_finite`), and that there is an image or a state. Entries that are not required are
    checked if they exist. TorchRL's function of this name looks at the first instruction only, and accepts text as
    actions.

    Raises:
        VLASchemaError (a ValueError and a RuntimeError): there are problems, and `raise_on_error` is True. The message
            has all sentences.
        UsageError (a ValueError): the steps are not a tensordict.

    >>> from tensordict import TensorDict
    >>> steps = TensorDict({"action": torch.zeros(3, 7), "observation": {"state": torch.zeros(3, 8)}}, [3])
    >>> validate_vla_tensordict(steps, raise_on_error=False)
    ["'language_instruction' is missing: the instruction"]
    """
    if not isinstance(tensordict, TensorDictBase):
        raise UsageError(f"the steps are a {type(tensordict).__name__}, expected a tensordict")
    issues = []
    instruction, action, image, state = (
        tensordict.get(key, None) for key in (instruction_key, action_key, image_key, state_key)
    )
    if instruction is not None:
        issues += _instruction_issues(_name(instruction_key), instruction)
    elif require_instruction:
        issues.append(f"{_name(instruction_key)} is missing: the instruction")
    if image is None and state is None and require_perception:
        issues.append(f"{_name(image_key)} and {_name(state_key)} are missing: an image or a state")
    if action is None and require_action:
        issues.append(f"{_name(action_key)} is missing: the action")
    if action is not None:
        issues += _action_issues(_name(action_key), action, finite=check_finite)
    if issues and raise_on_error:
        raise VLASchemaError("; ".join(issues))
    return issues


def _name(key: NestedKey) -> str:
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
            return [f"{name}{where} is blank"]
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
        return [f"{name} has values that are not finite"]
    return []
