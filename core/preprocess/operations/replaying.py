"""Programs that made other datasets, taken out of their manifests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...errors import DatasetNotFoundError, UsageError
from ...format import MANIFEST, Manifest, Provenance, fs, load_json
from .choosing import Episodes, Filter
from .documents import program_of_documents
from .normalize import Normalize
from .program import Program

__all__ = ["different_past", "filters_left_out", "replayed_program"]

_KIND = "name"
_CHOOSING = {Episodes.name, Filter.name}


def replayed_program(path: str | os.PathLike[str], *, filters: bool = False) -> Program:
    """Take the program that made a dataset out of its manifest; `path` is that file or the folder of the dataset.

    Constants that were measured come with it; with `filters` also what chose its episodes, which is about these and not
    about others. UsageError where the dataset was not made by operations, or by such a choice alone.
    """
    documents, constants = _documents_of(path)
    kept = [document for document in documents if filters or not _chooses(document)]
    if documents and not kept:
        raise UsageError(
            f"{path} was made by choosing episodes alone, which is not done again", hint="add --replay-filters to do so"
        )
    return program_of_documents(_with_constants(kept, constants), str(path))


def filters_left_out(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Name what chose the episodes of the dataset at `path`, and `replayed_program` leaves out without `filters`."""
    chosen = [document for document in _documents_of(path)[0] if _chooses(document)]
    if not chosen:
        return ()
    named = ", ".join(
        " ".join(str(value) for value in ("--" + str(document[_KIND]), *(document[k] for k in document if k != _KIND)))
        for document in chosen
    )
    return (f"the replay leaves out what chose episodes: {named} (--replay-filters does it again)",)


def _chooses(document: Any) -> bool:
    return isinstance(document, dict) and document.get(_KIND) in _CHOOSING


def _documents_of(path: str | os.PathLike[str]) -> tuple[list[Any], list[Any]]:
    """The operations that made a dataset, and the constants that were measured for them."""
    manifest = _manifest_at(path)
    last = manifest.provenance[-1] if manifest.provenance else None
    if last is None or last.verb != "preprocess":
        made = "does not say how it was made" if last is None else f"was made by {last.verb}"
        raise UsageError(f"{path} {made}, a dataset that preprocess made is expected")
    documents = last.arguments.get("operations")
    if not isinstance(documents, list):
        made = last.arguments.get("function", "a function")
        raise UsageError(f"{path} was made by {made}, only operations can be replayed", hint="name it with --fn")
    constants = last.arguments.get("constants")
    return documents, constants if isinstance(constants, list) else []


def _with_constants(documents: list[Any], measured: list[Any]) -> list[Any]:
    """Put what was measured into the normalizations that had to be measured, in order."""
    rest = iter(measured)
    return [
        {**document, "constants": next(rest, [])} if _lacks_constants(document) else document for document in documents
    ]


def _lacks_constants(document: Any) -> bool:
    return isinstance(document, dict) and document.get(_KIND) == Normalize.name and "constants" not in document


def different_past(path: str | os.PathLike[str], manifest: Manifest) -> tuple[str, ...]:
    """Say what the dataset at `path` had gone through before its last step, if that of `manifest` has not.

    A replay does the last step alone: its constants fit only what has come the same way so far.
    """
    theirs, ours = _made_before(_manifest_at(path).provenance[:-1]), _made_before(manifest.provenance)
    if theirs == ours:
        return ()
    return (
        f"{path} had gone through {_listed(theirs)} before, this dataset through {_listed(ours)}: scales may differ",
    )


def _listed(steps: Sequence[str]) -> str:
    return ", then ".join(steps) or "nothing"


def _made_before(provenance: Sequence[Provenance]) -> list[str]:
    """Name what changed the values of rows on the way, preprocess by preprocess; choosing episodes does not."""
    found = []
    for step in provenance:
        if step.verb == "preprocess":
            documents = step.arguments.get("operations")
            names = [part.get(_KIND) for part in documents or () if isinstance(part, dict)]
            changing = [str(name) for name in names if name not in _CHOOSING]
            if changing or not names:
                found.append(", ".join(changing) or str(step.arguments.get("function")))
    return found


def _manifest_at(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest; `path` is that file or the folder of the dataset."""
    place = fs.expanded(path)
    if place.is_file():
        return Manifest.from_dict(load_json(place), str(place))
    if place.exists():
        return Manifest.load(place)
    raise DatasetNotFoundError(f"there is no {path}, a dataset or its {MANIFEST} is expected")
