"""Programs as JSON, as manifests store them, and as TOML, as people write them; replays of programs from manifests."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ...errors import DatasetNotFoundError, UsageError, did_you_mean
from ...format import MANIFEST, Manifest, Provenance, fs, load_json
from .base import Operation
from .filters import Episodes, Filter
from .normalize import Constants, NormalizeFields
from .program import OPERATIONS, Program

__all__ = [
    "different_past",
    "filters_left_out",
    "operation_of",
    "pipeline_program",
    "pipeline_text",
    "program_of_documents",
    "replayed_program",
]

Made = TypeVar("Made")

_TABLE = "operation"
_KIND = "name"


def program_of_documents(documents: Sequence[Any], origin: str) -> Program:
    """Make a program of its JSON; `origin` names it in the UsageError for what is not understood."""
    found = tuple(
        operation_of(document, f"{origin}: operation {number}") for number, document in enumerate(documents, start=1)
    )
    return _with_origin(lambda: Program(found), origin)


def operation_of(document: Any, origin: str) -> Operation:
    """Make an operation of its JSON."""
    if not isinstance(document, Mapping) or not isinstance(document.get(_KIND), str):
        raise UsageError(f"{origin} has no name, one of {', '.join(OPERATIONS)} is expected")
    name = document[_KIND]
    kind = OPERATIONS.get(name)
    if kind is None:
        raise UsageError(
            f"{origin} is {name!r}, which is none{did_you_mean(name, OPERATIONS)}",
            hint=f"there are {', '.join(OPERATIONS)}",
        )
    arguments = {key: value for key, value in document.items() if key != _KIND}
    return _made(kind, arguments, f"{origin} ({name})")


def _made(kind: type[Made], arguments: Mapping[str, Any], origin: str) -> Made:
    parts = {part.name: part for part in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    for key in arguments:
        if key not in parts:
            known = f"it takes {', '.join(parts)}" if parts else "it takes nothing"
            raise UsageError(f"{origin} has {key!r}, which it does not know{did_you_mean(key, parts)}", hint=known)
    for part in parts.values():
        if part.default is dataclasses.MISSING and part.name not in arguments:
            raise UsageError(f"{origin} lacks {part.name!r}")
    given = {key: _value(value, types[key], f"{origin} has {key}") for key, value in arguments.items()}
    return _with_origin(lambda: kind(**given), origin)


def _value(value: Any, kind: Any, place: str) -> Any:
    """Check one argument and bring it into the form of its field."""
    if kind == tuple[Constants, ...]:
        return tuple(_made(Constants, part, place) for part in _listed(value, dict, "tables", place))
    if kind == tuple[str, ...]:
        return tuple(_listed(value, str, "texts", place))
    if kind == tuple[float, ...]:
        return tuple(float(number) for number in _listed(value, (int, float), "numbers", place))
    if kind == tuple[int, ...]:
        return tuple(_listed(value, int, "whole numbers", place))
    wanted, words = _SCALARS[str(getattr(kind, "__args__", (kind,))[0])]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise UsageError(f"{place} = {_short(value)}, {words} is expected")
    return float(value) if wanted == (int, float) else value


_SCALARS: dict[str, tuple[Any, str]] = {
    str(str): (str, "a text"),
    str(int): (int, "a whole number"),
    str(float): ((int, float), "a number"),
}


def _listed(value: Any, kind: Any, words: str, place: str) -> list[Any]:
    good = isinstance(value, list) and all(isinstance(part, kind) and not isinstance(part, bool) for part in value)
    if not good:
        raise UsageError(f"{place} = {_short(value)}, a list of {words} is expected")
    return list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _with_origin(make: Callable[[], Made], origin: str) -> Made:
    """Name the origin in what is wrong with the values."""
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"{origin}: {error.message}", hint=error.hint) from None


def pipeline_program(path: str | Path) -> Program:
    """Read a pipeline file: `[[operation]]` tables in the order in which they are to be done.

    DatasetNotFoundError where there is no such file, UsageError for what is not understood in it.
    """
    place = fs.expanded(path)
    try:
        document = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetNotFoundError(f"there is no {path}, a pipeline file is expected") from None
    except OSError as error:
        raise UsageError(f"the pipeline {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the pipeline {path} is not TOML: {error}") from error
    for key in document:
        if key != _TABLE:
            raise UsageError(
                f"{path} has {key!r}, which is not known{did_you_mean(key, [_TABLE])}",
                hint="write [[operation]] tables",
            )
    tables = document.get(_TABLE)
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} has no operations, [[operation]] tables are expected")
    return program_of_documents(tables, str(path))


def pipeline_text(program: Program) -> str:
    """Write a program as a pipeline file; reading it gives the same program."""
    tables = []
    for document in program.describe():
        lines = [f"{key} = {_toml(value)}" for key, value in document.items()]
        tables.append("\n".join([f"[[{_TABLE}]]", *lines]))
    return "\n\n".join(tables) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{_commas(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {_commas(f'{key} = {_toml(part)}' for key, part in value.items())} }}"
    return repr(value)


def _commas(parts: Iterable[str]) -> str:
    return ", ".join(parts)


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
    return isinstance(document, dict) and document.get(_KIND) == NormalizeFields.name and "constants" not in document


def different_past(path: str | os.PathLike[str], manifest: Manifest) -> tuple[str, ...]:
    """Say what the dataset at `path` had gone through before its last step, if that of `manifest` has not.

    A replay does the last step alone: its constants fit only what has come the same way so far.
    """
    theirs, ours = _made_before(_manifest_at(path).provenance[:-1]), _made_before(manifest.provenance)
    if theirs == ours:
        return ()
    before, here = _joined_steps(theirs), _joined_steps(ours)
    return (f"{path} had gone through {before} before, this dataset through {here}: scales may differ",)


def _joined_steps(steps: Sequence[str]) -> str:
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
