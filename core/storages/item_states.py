"""Items of a list as entries of a state dict, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from ..errors import SchemaError
from .documents import parse
from .items import Node, Path, TensorNode, ValueNode

__all__ = ["item_of_state", "items_of_states", "leaf_of_state", "state_of_item"]


def state_of_item(node: Node, describe: Callable[[Any], dict[str, Any]] = lambda _: {}) -> tuple[Any, dict[str, Any]]:
    """Return an item's tensors (the one, or all by dotted path) or the object itself, and what describes it."""
    if isinstance(node, ValueNode):
        return node.value, {"type": "other"}
    about = node.document(describe, portable=False)
    if isinstance(node, TensorNode):
        return node.payload, about
    leaves = list(node.leaves())
    tensors = {".".join(path): payload for path, payload in leaves}
    if len(tensors) < len(leaves):
        names = ", ".join(".".join(path) for path, _ in leaves)
        raise SchemaError(f"two of the keys {names} are written alike with dots")
    return tensors, about


def leaf_of_state(state: Any, path: Path) -> torch.Tensor:
    """Find a tensor of an item's state; SchemaError if it is not there."""
    found = state
    if path:
        found = state.get(".".join(path)) if isinstance(state, Mapping) else None
    if not isinstance(found, torch.Tensor):
        raise SchemaError(f"the state has no tensor {'.'.join(path)!r}, but describes one")
    return found


def items_of_states(states: Sequence[Any], abouts: Sequence[Any]) -> list[Any]:
    """Make the items that `state_of_item` described, of copies of their tensors."""
    if len(states) != len(abouts):
        raise SchemaError(f"the state holds {len(states)} objects and describes {len(abouts)}")
    return [_item(state, about) for state, about in zip(states, abouts, strict=True)]


def _item(state: Any, about: Any) -> Any:
    if about == {"type": "other"}:
        return state
    node = parse(about, lambda _, path: leaf_of_state(state, path), portable=False)
    return node.build(torch.clone)


def item_of_state(state: Any) -> Any:
    """Make an item of what TorchRL keeps of one: a tensor, or what `TensorDict.state_dict` returns."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if not isinstance(state, Mapping) or not all(isinstance(leaf, torch.Tensor) for leaf in state.values()):
        raise TypeError(f"a state without descriptions holds tensors and tensordicts, found a {type(state).__name__}")
    # torch keeps such facts in an attribute of the OrderedDict, by dotted path, parents before children.
    facts: Mapping[str, Mapping[str, Any]] = getattr(state, "_metadata", {})
    root = TensorDict({}, batch_size=facts.get("", {}).get("batch_size", []))
    for name, about in facts.items():
        if name:
            root.set(tuple(name.split(".")), _empty_node(about))
    for name, leaf in state.items():
        root.set(tuple(name.split(".")), leaf.clone())
    return root


def _empty_node(about: Mapping[str, Any]) -> Any:
    batch = about.get("batch_size", [])
    if about.get("_type") == "NonTensorData":
        return NonTensorData(about.get("_non_tensor", {}).get("data"), batch_size=batch)
    return TensorDict({}, batch_size=batch)
