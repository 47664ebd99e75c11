"""`env_metadata.json`: what TorchRL keeps beside a Minari dataset, as far as its spec types can say the spaces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.errors import FormatError
from ...core.format import parse_json
from .metadata import MinariMetadata

__all__ = ["env_metadata"]

_DATASET_ID = re.compile(r"(?:(?P<namespace>.+)/)?(?P<name>[^/]+?)(?:-v(?P<version>\d+))?")
_ENV_ID = re.compile(r"(?:(?P<namespace>[\w:-]+)/)?(?P<name>[\w:.-]+?)(?:-v(?P<version>\d+))?")


def env_metadata(metadata: MinariMetadata) -> dict[str, Any] | None:
    """Return that document, or None where the spaces cannot be said.

    The path in it is relative, so that two machines write the same.
    """
    spaces = [_torchrl_space(space) for space in (metadata.observation_space, metadata.action_space)]
    if None in spaces:
        return None
    document = metadata.document
    named = _DATASET_ID.fullmatch(metadata.id)
    parts = named.groupdict() if named else {"namespace": None, "name": metadata.id, "version": None}
    return {
        "env_spec": _env_spec(document.get("env_spec")),
        "total_episodes": metadata.total_episodes,
        "total_steps": metadata.total_steps,
        "dataset_id": metadata.id,
        "combined_datasets": document.get("combined_datasets", []),
        "observation_space": spaces[0],
        "action_space": spaces[1],
        "data_path": "data",
        "minari_version": document.get("minari_version"),
        "namespace": parts["namespace"],
        "dataset_name": parts["name"],
        "version": _number(parts["version"]),
    }


def _env_spec(text: Any) -> dict[str, Any] | None:
    """The environment's specification with the parts of its id spelled out, as gymnasium's dataclass has them."""
    try:
        spec = parse_json(text, "env_spec") if isinstance(text, str) else text
    except FormatError:
        return None
    if not isinstance(spec, dict):
        return None
    named = _ENV_ID.fullmatch(str(spec.get("id", "")))
    if named is None:
        return spec
    return {**spec, "namespace": named["namespace"], "name": named["name"], "version": _number(named["version"])}


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _torchrl_space(space: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A Box, a Discrete from 0 or a Dict of such as TorchRL writes it; text inside a Dict is null."""
    if space is None:
        return None
    if space["type"] == "Box":
        return {name: space[name] for name in ("type", "low", "high", "dtype", "shape")}
    if space["type"] == "Discrete" and not space.get("start"):
        return {"type": "Discrete", "n": space["n"], "dtype": space.get("dtype", "int64"), "shape": []}
    if space["type"] == "Dict":
        children = {name: _torchrl_space(child) for name, child in space["subspaces"].items()}
        if all(children[name] or child["type"] == "Text" for name, child in space["subspaces"].items()):
            return {"type": "Dict", "subspaces": children}
    return None
