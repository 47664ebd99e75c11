"""Where the leaves of memory-mapped data lie in a folder, as tensordict and TorchRL lay them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import SchemaError
from ..format.ted.tree import require_own_files
from ..ted.schema import file_stem
from .structure import Constant, Leaf, Path, SequenceNode, Structure, TensorDictNode

__all__ = ["SUFFIX", "is_tree", "leaf_files", "single_name", "tree_documents"]

SUFFIX = ".memmap"
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
_FIELDS = "_tensordict"
"""The folder in which a tensorclass keeps its tensors."""


def is_tree(structure: Structure) -> bool:
    """Whether the data is a tensordict or tensorclass, whose folders describe themselves in `meta.json` files."""
    return isinstance(structure, TensorDictNode)


def single_name() -> str:
    """What the file of a bare tensor is called; `SINGLE_TENSOR_BUFFER_NAME` in the environment says otherwise."""
    return os.environ.get("SINGLE_TENSOR_BUFFER_NAME", "_-single-tensor-_")


def leaf_files(structure: Structure) -> list[str]:
    """Return the path of every leaf's file, in the order of the leaves, with `/` between its parts.

    Keys are escaped, so that none can name a place outside the folder. SchemaError where two need the same file.
    """
    places = list(_places(structure, ()))
    keys = [place or (single_name(),) for place in places]
    require_own_files(keys)
    return ["/".join(map(file_stem, key)) + SUFFIX for key in keys]


def _places(structure: Structure, prefix: Path) -> Iterator[Path]:
    if isinstance(structure, Leaf):
        yield prefix
    elif isinstance(structure, SequenceNode):
        for number, child in enumerate(structure.children):
            yield from _places(child, (*prefix, str(number)))
    elif not isinstance(structure, Constant):
        folder = (*prefix, _FIELDS) if isinstance(structure, TensorDictNode) and structure.kind else prefix
        for key, child in structure.children.items():  # type: ignore[attr-defined]
            yield from _places(child, (*folder, str(key)))


def tree_documents(
    structure: Structure, leaves: Sequence[tuple[torch.dtype, Sequence[int]]], lead: Sequence[int]
) -> dict[str, bytes]:
    """Return the `meta.json` files of a tensordict whose leaves have these types and whole shapes, by their paths.

    `lead` is the shape that counts elements. Nothing for data that is no tensordict.
    """
    if not isinstance(structure, TensorDictNode):
        return {}
    documents: dict[str, Mapping[str, Any]] = {}
    _describe(structure, iter(leaves), list(lead), "", documents)
    return {path: json.dumps(document, ensure_ascii=False).encode() for path, document in documents.items()}


def _describe(
    node: TensorDictNode,
    leaves: Iterator[tuple[torch.dtype, Sequence[int]]],
    lead: list[int],
    folder: str,
    documents: dict[str, Mapping[str, Any]],
) -> None:
    if node.kind:
        documents[f"{folder}meta.json"] = {"_type": str(node.kind)}
        folder += f"{_FIELDS}/"
    entries: dict[str, Any] = {}
    documents[f"{folder}meta.json"] = entries
    for key, child in node.children.items():
        inner = f"{folder}{file_stem(key)}/"
        if isinstance(child, Leaf):
            dtype, shape = next(leaves)
            entries[key] = {"device": "cpu", "shape": list(shape), "dtype": str(dtype), "is_nested": False}
        elif isinstance(child, Constant):
            entries[key] = {"type": "NonTensorData"}
            documents[f"{inner}meta.json"] = _constant(child, key)
        elif isinstance(child, TensorDictNode):
            entries[key] = {"type": child.kind.__name__ if child.kind else "TensorDict"}
            _describe(child, leaves, lead, inner, documents)
    entries |= {"shape": [*lead, *node.tail], "device": "cpu", "_type": _TENSORDICT}


def _constant(child: Constant, key: str) -> dict[str, Any]:
    try:
        json.dumps(child.value)
    except (TypeError, ValueError):
        kind = type(child.value).__name__
        raise SchemaError(
            f"the entry {key!r} is a {kind}; of what is no tensor, only what JSON can say is written to disk",
            hint="nothing is pickled, because nothing is unpickled",
        ) from None
    return {"_type": _NON_TENSOR, "data": child.value, "_metadata": None, "_is_non_tensor": True}
