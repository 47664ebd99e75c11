"""Tree specs as JSON, with the leaves by name, and as the files in which tensordict and TorchRL keep the leaves."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from tensordict import is_tensorclass

from ..errors import FormatError, SchemaError
from ..format.ted.tree import require_own_files
from ..ted.schema import file_stem
from .pytree import ConstantNode, MappingNode, Path, SequenceNode, TensorDictNode, TensorNode, TreeSpec

SUFFIX = ".memmap"
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
_FIELDS = "_tensordict"
"""The folder in which a tensorclass keeps its tensors."""

_OWN = __package__.rpartition(".")[0] + "."
"""How the names of the modules begin that may be imported for a class."""

_SEQUENCES = {"list": list, "tuple": tuple}


# JSON ----------------------------------------------------------------------------------------------


def spec_to_json(spec: TreeSpec) -> dict[str, Any]:
    """Return a tree spec of rows as JSON, with classes by name, as `module:name`.

    SchemaError for constants and keys that JSON cannot represent.
    """
    if isinstance(spec, TensorNode):
        return {"kind": "tensor"}
    if isinstance(spec, ConstantNode):
        _require_json(spec.value)
        return {"kind": "constant", "value": spec.value, **_batch(spec)}
    if isinstance(spec, SequenceNode):
        entries = [spec_to_json(child) for child in spec.children.values()]
        kind = spec.kind.__name__ if spec.kind in _SEQUENCES.values() else "named tuple"
        named = {} if kind in _SEQUENCES else {"class": _name(spec.kind)}
        return {"kind": kind, "entries": entries, **named}
    if not isinstance(spec, MappingNode):
        raise TypeError(f"a {type(spec).__name__} has no description")
    children = [[_key(key), spec_to_json(child)] for key, child in spec.children.items()]
    if not isinstance(spec, TensorDictNode):
        return {"kind": "dict", "entries": children}
    kind = "tensorclass" if spec.kind else "tensordict"
    named = {"class": _name(spec.kind)} if spec.kind else {}
    return {"kind": kind, "entries": children, **_batch(spec), **named}


def spec_from_json(document: Mapping[str, Any], like: TreeSpec | None = None) -> TreeSpec:
    """Return the tree spec of what `spec_to_json` returned.

    Classes are looked up among the loaded modules: nothing is imported because of a file. A class that is not there,
    as one defined in a function, is the one that `like` has in the same place; SchemaError where there is none either.
    FormatError for a document that `spec_to_json` cannot have returned.
    """
    try:
        return _spec(document, like)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a description of data is damaged: {error!r}") from error


def _spec(document: Mapping[str, Any], like: TreeSpec | None) -> TreeSpec:
    kind = document["kind"]
    if kind == "tensor":
        return TensorNode()
    if kind == "constant":
        return ConstantNode(document["value"], torch.Size(document["batch"]), _device(document))
    entries = document["entries"]
    if kind in (*_SEQUENCES, "named tuple"):
        counterparts: Any = list(like.children.values()) if isinstance(like, SequenceNode) else ()
        parts = [_spec(*pair) for pair in zip_longest(entries, counterparts[: len(entries)])]
        if kind in _SEQUENCES:
            return SequenceNode(parts, _SEQUENCES[kind])
        known = like.kind if isinstance(like, SequenceNode) else None
        return SequenceNode(parts, _class(document["class"], _is_named_tuple, known))
    counterparts = like.children if isinstance(like, MappingNode) else {}
    children = {key: _spec(child, counterparts.get(key)) for key, child in entries}
    if kind == "dict":
        return MappingNode(children)
    if kind not in {"tensordict", "tensorclass"}:
        raise FormatError(f"a description of data names the unknown kind {kind!r}")
    owner = None
    if kind == "tensorclass":
        owner = _class(document["class"], is_tensorclass, like.kind if isinstance(like, TensorDictNode) else None)
    return TensorDictNode(children, torch.Size(document["batch"]), _device(document), owner)


def _batch(node: TensorDictNode | ConstantNode) -> dict[str, Any]:
    return {"batch": list(node.tail), "device": None if node.device is None else str(node.device)}


def _device(document: Mapping[str, Any]) -> torch.device | None:
    return None if document["device"] is None else torch.device(document["device"])


def _key(key: Any) -> str | int:
    if type(key) not in {str, int}:
        raise SchemaError(f"the key {key!r} is a {type(key).__name__}; keys that are kept are text or whole numbers")
    return key  # type: ignore[no-any-return]


def _require_json(value: Any) -> None:
    if isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _require_json(item)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise SchemaError(
            f"a constant is a {type(value).__name__}; text, numbers and lists and dicts of them can be kept",
            hint="nothing is pickled, because nothing is unpickled",
        )


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_named_tuple(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")


def _class(name: str, fits: Any, known: type[Any] | None) -> type[Any]:
    """Find a class by its name among the loaded modules and those of this package, else take the one that is known.

    What a file names is not imported: it would run.
    """
    module, _, path = name.partition(":")
    if module.startswith(_OWN):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None or not isinstance(found, type) or not fits(found):
        if known is not None and fits(known):
            return known
        raise SchemaError(
            f"the data was made with the class {path} of the module {module}, which is not loaded",
            hint=f"import {module} first",
        )
    return found


# Leaves by name ------------------------------------------------------------------------------------


def named_tensors(names: Sequence[str], leaves: Sequence[torch.Tensor]) -> Any:
    """Return the leaves by name, or the only one where it has none."""
    if list(names) == [""]:
        return leaves[0]
    if len(set(names)) < len(names):
        raise SchemaError(f"two of the keys {', '.join(names)} are written alike with dots")
    return dict(zip(names, leaves, strict=True))


def saved_tensors(
    saved: Any, description: Mapping[str, Any] | None, like: TreeSpec | None
) -> tuple[TreeSpec, list[torch.Tensor]]:
    """Undo `named_tensors`. Without a description of the data, dots in names separate the keys of a tensordict.

    Classes that are not loaded are taken from `like`, how the data of the receiver is made.
    """
    if isinstance(saved, torch.Tensor):
        return TensorNode(), [saved]
    tensors = {name: value for name, value in dict(saved).items() if not name.startswith("__")}
    if description:
        structure = spec_from_json(description, like)
    else:
        structure = TensorDictNode.nested(tuple(name.split(".")) for name in tensors)
    names = [".".join(path) for path in structure.paths()]
    if sorted(names) != sorted(tensors):
        raise SchemaError(f"the state holds {', '.join(tensors)}; it says that it holds {', '.join(names)}")
    return structure, [tensors[name] for name in names]


def in_order(names: Sequence[str], structure: TreeSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, which belong together like `structure`, in the order of `names`."""
    found = {".".join(path): tensor for path, tensor in zip(structure.paths(), tensors, strict=True)}
    if sorted(found) != sorted(names):
        raise SchemaError(f"what was saved holds {', '.join(found)}; this storage holds {', '.join(names)}")
    return [found[name] for name in names]


# Files of leaves -----------------------------------------------------------------------------------


def is_tree(spec: TreeSpec) -> bool:
    """Whether the data is a tensordict or tensorclass, whose folders describe themselves in `meta.json` files."""
    return isinstance(spec, TensorDictNode)


def single_name() -> str:
    """The file name of a bare tensor; the environment variable `SINGLE_TENSOR_BUFFER_NAME` overrides it."""
    return os.environ.get("SINGLE_TENSOR_BUFFER_NAME", "_-single-tensor-_")


def leaf_files(spec: TreeSpec) -> list[str]:
    """Return the path of every leaf's file, in the order of the leaves, with `/` between its parts.

    Keys are escaped, so that none can name a place outside the folder. SchemaError where two need the same file.
    """
    places = list(_places(spec, ()))
    keys = [place or (single_name(),) for place in places]
    require_own_files(keys)
    return ["/".join(map(file_stem, key)) + SUFFIX for key in keys]


def _places(spec: TreeSpec, prefix: Path) -> Iterator[Path]:
    if isinstance(spec, TensorNode):
        yield prefix
    folder = (*prefix, _FIELDS) if isinstance(spec, TensorDictNode) and spec.kind else prefix
    for key, child in spec.children.items():
        yield from _places(child, (*folder, str(key)))


def tree_documents(
    spec: TreeSpec, leaves: Sequence[tuple[torch.dtype, Sequence[int]]], lead: Sequence[int]
) -> dict[str, bytes]:
    """Return the `meta.json` files of a tensordict whose leaves have these types and whole shapes, by their paths.

    `lead` is the shape that counts elements. Nothing for data that is no tensordict.
    """
    if not isinstance(spec, TensorDictNode):
        return {}
    documents: dict[str, Mapping[str, Any]] = {}
    _describe(spec, iter(leaves), list(lead), "", documents)
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
        if isinstance(child, TensorNode):
            dtype, shape = next(leaves)
            entries[key] = {"device": "cpu", "shape": list(shape), "dtype": str(dtype), "is_nested": False}
        elif isinstance(child, ConstantNode):
            entries[key] = {"type": "NonTensorData"}
            documents[f"{inner}meta.json"] = _constant(child, key)
        elif isinstance(child, TensorDictNode):
            entries[key] = {"type": child.kind.__name__ if child.kind else "TensorDict"}
            _describe(child, leaves, lead, inner, documents)
    entries |= {"shape": [*lead, *node.tail], "device": "cpu", "_type": _TENSORDICT}


def _constant(child: ConstantNode, key: str) -> dict[str, Any]:
    try:
        json.dumps(child.value)
    except (TypeError, ValueError):
        kind = type(child.value).__name__
        raise SchemaError(
            f"the entry {key!r} is a {kind}; of what is no tensor, only what JSON can say is written to disk",
            hint="nothing is pickled, because nothing is unpickled",
        ) from None
    return {"_type": _NON_TENSOR, "data": child.value, "_metadata": None, "_is_non_tensor": True}
