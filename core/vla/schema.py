"""The layout of a step of a vision-language-action dataset: its containers, its keys, and what is wrong with one."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDictBase

from ..errors import SchemaError, UsageError, suggests_keywords
from .metadata import NestedKey

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
    """Images of a batch of steps: of the main camera, of one at the wrist, and of others by name; None for none.

    Images are `[*batch, C, H, W]`, `extra` is a tensordict of them; `padded` states that the last steps repeat others.
    The name is that of TorchRL's tensorclass.
    """

    image: Any = None
    wrist_image: Any = None
    extra: Any = None
    padded: Any = None


class VLAObservation(TensorClass):
    """What a policy sees: images, the state of the robot `[*batch, n]`, the instruction, and preprocessed entries.

    The name is that of TorchRL's tensorclass.
    """

    images: Any = None
    state: Any = None
    instruction: Any = None
    preprocessed: Any = None


class VLAAction(TensorClass["nocast", "shadow"]):  # type: ignore[type-arg, name-defined]
    """What a policy does: a chunk of actions `[*batch, steps, action_dim]`, its tokens, and how likely they are.

    `tokens` and `raw_tokens` (as the model gave them) are int64, `mask` bool; `padded` states that the last steps of
    chunks repeat others. The name is that of TorchRL's tensorclass.
    """

    chunk: Any = None
    tokens: Any = None
    raw_tokens: Any = None
    logits: Any = None
    log_probs: Any = None
    mask: Any = None
    padded: Any = None


class VLASchemaError(SchemaError, ValueError):
    """A tensordict is not laid out as steps of a vision-language-action dataset."""


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
    """Return what is wrong with steps, one sentence each; an empty list for sound ones.

    An instruction is text that is not blank, for all steps or for each, or tokens; actions are numbers, with
    `check_finite` finite ones; there is an image or a state. What is not required may be missing, and is checked where
    it is there. VLASchemaError (a ValueError and a RuntimeError) with all sentences, unless
    `raise_on_error` is False; UsageError (a ValueError) for what is no tensordict.

    The name is that of TorchRL, which looks at the first instruction only, and takes text for actions.

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
    """Return all values of an entry that is no tensor, in one list."""
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
