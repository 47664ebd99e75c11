"""What a dataset states about the environment it was recorded in, with specs for spaces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..format import ENV_METADATA, decode, parse_json
from ..opening import open_steps
from ..specs import BoundedContinuous, Composite, TensorSpec, Unbounded, spec_from_space

__all__ = ["environment_metadata"]

_SOURCE_DOCUMENT = "metadata.json"


def environment_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of the dataset at `path`.

    `observation_space` and `action_space` are specs, None where the source does not state them, and Unbounded where no
    bound is finite; `total_steps` and
    `total_episodes` count what is stored. The rest is what the source wrote, in the words of `env_metadata.json` as
    TorchRL has it (`env_spec` is a dictionary there), or where there is none, of the source itself. FormatError for
    spaces that have no spec.
    """
    with open_steps(path) as reader:
        manifest, documents = reader.manifest, reader.documents()
    document = _read(documents)
    document.setdefault("dataset_id", manifest.request.id)
    spaces: dict[str, TensorSpec | None] = {
        f"{name}_space": _without_infinite_bounds(spec_from_space(manifest.spaces[name]))
        if manifest.spaces.get(name)
        else None
        for name in ("observation", "action")
    }
    return {**document, "total_episodes": manifest.episodes, "total_steps": manifest.steps, **spaces}


def _read(documents: Mapping[str, bytes]) -> dict[str, Any]:
    """Read the document that states most."""
    if ENV_METADATA in documents:
        return decode(dict[str, Any], parse_json(documents[ENV_METADATA], ENV_METADATA), ENV_METADATA)
    text = documents.get(_SOURCE_DOCUMENT, b"{}")
    document = decode(dict[str, Any], parse_json(text, _SOURCE_DOCUMENT), _SOURCE_DOCUMENT)
    if isinstance(document.get("env_spec"), str):
        document["env_spec"] = parse_json(document["env_spec"], f"env_spec in {_SOURCE_DOCUMENT}")
    return document


def _without_infinite_bounds(spec: TensorSpec) -> TensorSpec:
    """Make an Unbounded of what has no finite bound, in a nest too."""
    if isinstance(spec, Composite):
        for name, child in list(spec.items()):
            if child is not None:
                spec.set(name, _without_infinite_bounds(child))
    elif isinstance(spec, BoundedContinuous) and bool((spec.space.low.isneginf() & spec.space.high.isposinf()).all()):
        return Unbounded(spec.shape, spec.device, spec.dtype)
    return spec
