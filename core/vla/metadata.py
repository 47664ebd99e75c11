"""What a dataset of a robot is: its embodiment, actions and keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from ..errors import FormatError, UsageError
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
    """What a dataset of a robot is: ids, actions, control frequency in Hz, keys of entries, licence and address.

    `action_mean`, `action_std`, `action_low` and `action_high` are tensors or sequences of numbers, `[action_dim]` or
    one number for all; they are kept as float32, or float64 where such a tensor is given. `action_space` is one of
    `ActionSpace`, `gripper_mode` of `GripperMode`.

    UsageError (a ValueError) for an `action_dim` that is no whole number from 1, an unknown space or mode, a frequency
    that is not above 0, statistics that are NaN or of another shape, and bounds in the wrong order. Names are those of
    TorchRL; its integer statistics stay integers there.

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
        """Return the spec of actions `[*shape_prefix, action_dim]`, bounded if both bounds are known.

        UsageError (a ValueError) without `action_dim`.
        """
        if self.action_dim is None:
            raise UsageError(f"the action_dim of {self.dataset_id!r} is not known: there is no spec of its actions")
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
        """Read a document, or the file at a path, that `to_json` wrote, here or in TorchRL; unknown keys are ignored.

        A text that starts with "{" is a document. FormatError (a ValueError) for anything else than an object that has
        a `dataset_id`; FileNotFoundError for a missing file; UsageError for values that the class refuses.
        """
        if isinstance(source, str) and source.lstrip().startswith("{"):
            try:
                found = json.loads(source)
            except ValueError as error:
                raise FormatError(f"the metadata is no JSON document: {error}") from error
        else:
            found = load_json(Path(source))
        if not isinstance(found, Mapping) or not isinstance(found.get("dataset_id"), str):
            raise FormatError("the metadata is no object with a dataset_id")
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})


def _key(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _statistics(name: str, given: Any, dim: int | None) -> torch.Tensor | None:
    """Return statistics as a tensor of floats; UsageError for other shapes and values that are no numbers."""
    if given is None:
        return None
    try:
        values = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is no numbers: {error}") from error
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
