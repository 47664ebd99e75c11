"""What the result says of where it comes from, and what of the source's description still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format import ENV_METADATA, Dropped, Origin, Provenance, Request, StepReader
from ..ted import ACTION, Field, Key

__all__ = ["result_origin"]

_SPACES = {"observation": "observation", "action": ACTION[0]}


def result_origin(
    reader: StepReader,
    fields: Sequence[Field],
    asked: str,
    step: Provenance,
    notes: Sequence[str],
    dropped_keys: Sequence[Dropped],
    rescaled: frozenset[Key],
) -> Origin:
    """Carry over everything but what the new fields contradict.

    A space is kept while its leaves keep their keys, element types, shapes and scale; `env_metadata.json` describes
    both spaces and goes with either.
    """
    manifest = reader.manifest
    spaces, documents, dropped = dict(manifest.spaces), dict(reader.documents()), []
    for name, root in _SPACES.items():
        changed = _leaves_under(reader.fields, root) != _leaves_under(fields, root)
        if name in spaces and (changed or any(key[0] == root for key in rescaled)):
            del spaces[name]
            dropped.append(name)
    if dropped:
        documents.pop(ENV_METADATA, None)
    notes = [*manifest.notes, *notes, *(f"the {name} space no longer fits the data: left out" for name in dropped)]
    request = Request(source="preprocess", asked=asked, id=manifest.request.id)
    return Origin(
        request=request,
        provenance=(*manifest.provenance, step),
        resolved_revision=manifest.resolved_revision,
        spaces=spaces,
        renamed_keys=manifest.renamed_keys,
        dropped_keys=(*manifest.dropped_keys, *dropped_keys),
        notes=tuple(notes),
        documents=documents,
    )


def _leaves_under(fields: Sequence[Field], root: str) -> dict[Any, Any]:
    return {field.key: (field.dtype, field.shape) for field in fields if field.key[0] == root}
