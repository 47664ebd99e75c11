"""Programs from options, from TOML as in pipeline files, and from JSON as in manifests, and replays from manifests."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ...declarations import OPERATION_OPTIONS
from ...errors import DatasetNotFoundError, UsageError, did_you_mean
from ...format import fs
from ...format.documents import load_json, toml_value
from ...format.manifest import MANIFEST, Manifest, Provenance
from .base import Discount, EpisodeChoice, Operation, RowOperation, texts_of
from .filters import Episodes
from .program import OPERATIONS, Program, find_operation
from .values import Constants, NormalizeFields

Made = TypeVar("Made")

_TABLE = "operation"
_KIND = "name"


def program_of(
    operations: Mapping[str, Any] | None = None,
    pipeline: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    *,
    replay_filters: bool = False,
) -> Program:
    """Make the program that options ask for, in their fixed order, or a pipeline file, or a manifest.

    `operations` maps names of options, with `-` or `_`, to their values: a text, or a list of texts where the option
    may be repeated; for rename, cast, cat, resize and normalize also a mapping, for clip-reward a pair. Options
    that are None, False or empty are not given. `episodes` alone may be combined with a pipeline or a manifest, and is
    applied first. What chose the episodes and rows of the dataset of the manifest is only applied again with
    `replay_filters`.
    UsageError for more than one of the three, or none.
    """
    if replay_filters and not replay:
        raise UsageError("--replay-filters is about --replay, which was not given")
    given = given_operations(operations)
    written = pipeline is not None or replay is not None
    ways = [
        *(["operations"] if given.keys() - ({"episodes"} if written else set()) else []),
        *(["pipeline"] if pipeline else []),
        *(["replay"] if replay else []),
    ]
    if len(ways) > 1:
        hint = "of the operations, only --episodes can be combined with them"
        raise UsageError(f"{' and '.join(ways)} are set, expected one of them", hint=hint)
    if written:
        program = (
            pipeline_program(Path(pipeline))
            if pipeline
            else replayed_program(Path(replay or ""), filters=replay_filters)
        )
        return program.of_episodes(Episodes(",".join(texts_of(given["episodes"], "episodes")))) if given else program
    for name in given:
        if name not in OPERATIONS and name != "gamma":
            raise UsageError(
                f"there is no operation {name!r}{did_you_mean(name, OPERATIONS)}",
                hint=f"there are {', '.join(OPERATIONS)}",
            )
    discount = Discount(given.get("gamma"))
    asked = (kind.from_option(given[name], discount) for name, kind in OPERATIONS.items() if name in given)
    program = Program(tuple(operation for operations in asked for operation in operations))
    if not discount.used:
        *first, last = (option.name for option in OPERATION_OPTIONS if option.discounted)
        raise UsageError(f"gamma is set, expected with an operation that discounts: {', '.join(first)} or {last}")
    return program


def given_operations(operations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that are given, with `-` in their names."""
    return {name.replace("_", "-"): value for name, value in (operations or {}).items() if _is_given(value)}


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list | tuple | Mapping) and not value)


def program_of_documents(documents: Sequence[Any], origin: str) -> Program:
    """Make a program of its JSON; `origin` names it in the UsageError for what is not understood."""
    found = tuple(
        operation_of(document, f"{origin}: operation {number}") for number, document in enumerate(documents, start=1)
    )
    return _with_origin(lambda: Program(found), origin)


def operation_of(document: Any, origin: str, kind: type[Operation] | None = None) -> Operation:
    """Make an operation of its JSON; `kind` is its class, by default found by the name."""
    if not isinstance(document, Mapping) or not isinstance(document.get(_KIND), str):
        raise UsageError(f"{origin} has no name, expected one of {', '.join(OPERATIONS)}")
    name = document[_KIND]
    kind = kind or find_operation(name)
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
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise UsageError(f"{place} = {_short(value)}, expected {words}")
    return float(value) if wanted == (int, float) else value


_SCALARS: dict[str, tuple[Any, str]] = {
    str(str): (str, "a text"),
    str(int): (int, "a whole number"),
    str(float): ((int, float), "a number"),
    str(bool): (bool, "true or false"),
}


def _listed(value: Any, kind: Any, words: str, place: str) -> list[Any]:
    good = isinstance(value, list) and all(isinstance(part, kind) and not isinstance(part, bool) for part in value)
    if not good:
        raise UsageError(f"{place} = {_short(value)}, expected a list of {words}")
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
        raise DatasetNotFoundError(f"there is no {path}, expected a pipeline file") from None
    except OSError as error:
        raise UsageError(f"the pipeline {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the pipeline {path} is not TOML: {error}") from error
    for key in document:
        if key != _TABLE:
            raise UsageError(
                f"{path} has {key!r}, which is unknown{did_you_mean(key, [_TABLE])}",
                hint="write [[operation]] tables",
            )
    tables = document.get(_TABLE)
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} has no operations, expected [[operation]] tables")
    return program_of_documents(tables, str(path))


def pipeline_text(program: Program) -> str:
    """Write a program as a pipeline file; reading it gives the same program."""
    tables = []
    for document in program.describe():
        lines = [f"{key} = {toml_value(value)}" for key, value in document.items()]
        tables.append("\n".join([f"[[{_TABLE}]]", *lines]))
    return "\n\n".join(tables) + "\n"


def replayed_program(path: str | os.PathLike[str], *, filters: bool = False) -> Program:
    """Take the program that made a dataset out of its manifest; `path` is that file or the folder of the dataset.

    Constants that were measured come with it; with `filters` also what chose its episodes and rows, which is about
    these and not about others. UsageError where the dataset was not made by operations, or by such a choice alone.
    """
    documents, constants = _documents_of(path)
    kept = [document for document in documents if filters or not _chooses(document)]
    if documents and not kept:
        raise UsageError(
            f"{path} was made by choosing episodes and rows alone, which is not done again",
            hint="add --replay-filters to do so",
        )
    return program_of_documents(_with_constants(kept, constants), str(path))


def replayed_frames(path: str | os.PathLike[str]) -> int | None:
    """The number of first steps that the dataset at `path` was made of; None for all of them."""
    frames = _last_step(path).arguments.get("num_frames")
    return frames if type(frames) is int else None


def filters_left_out(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Name what chose the episodes and rows of a dataset, and `replayed_program` leaves out without `filters`."""
    chosen = [
        " ".join(str(value) for value in ("--" + str(document[_KIND]), *(document[k] for k in document if k != _KIND)))
        for document in _documents_of(path)[0]
        if _chooses(document)
    ]
    frames = replayed_frames(path)
    chosen += [] if frames is None else [f"--num-frames {frames}"]
    left = ", ".join(chosen)
    return (f"the replay leaves out what chose episodes and rows: {left} (--replay-filters does it again)",) * bool(
        left
    )


def _chooses(document: Any) -> bool:
    return isinstance(document, dict) and _is_choice(document.get(_KIND))


def _is_choice(name: Any) -> bool:
    """Whether an operation chooses episodes or rows, and does nothing else."""
    kind = (find_operation(name) if isinstance(name, str) else None) or Operation
    drops = issubclass(kind, RowOperation) and kind.drops_rows and kind.makes is RowOperation.makes
    return drops or issubclass(kind, EpisodeChoice)


def _documents_of(path: str | os.PathLike[str]) -> tuple[list[Any], list[Any]]:
    """The operations that made a dataset, and the constants that were measured for them."""
    last = _last_step(path)
    documents = last.arguments.get("operations")
    if not isinstance(documents, list):
        made = last.arguments.get("function", "a function")
        raise UsageError(f"{path} was made by {made}, only operations can be replayed", hint="name it with --fn")
    constants = last.arguments.get("constants")
    return documents, constants if isinstance(constants, list) else []


def _last_step(path: str | os.PathLike[str]) -> Provenance:
    """Return the step that made a dataset; UsageError if it was not `preprocess`."""
    manifest = _manifest_at(path)
    last = manifest.provenance[-1] if manifest.provenance else None
    if last is None or last.verb != "preprocess":
        made = "does not say how it was made" if last is None else f"was made by {last.verb}"
        raise UsageError(f"{path} {made}, expected a dataset that preprocess made")
    return last


def _with_constants(documents: list[Any], measured: list[Any]) -> list[Any]:
    """Put what was measured into the normalizations that had to be measured, in order."""
    rest = iter(measured)
    return [
        {**document, "constants": next(rest, [])} if _lacks_constants(document) else document for document in documents
    ]


def _lacks_constants(document: Any) -> bool:
    return isinstance(document, dict) and document.get(_KIND) == NormalizeFields.name and "constants" not in document


def different_past(path: str | os.PathLike[str], manifest: Manifest) -> tuple[str, ...]:
    """Return a note if the dataset at `path` had gone through other steps before its last than that of `manifest`.

    A replay applies the last step alone: its constants fit only rows that the same steps have changed.
    """
    theirs, ours = _made_before(_manifest_at(path).provenance[:-1]), _made_before(manifest.provenance)
    if theirs == ours:
        return ()
    before, here = _joined_steps(theirs), _joined_steps(ours)
    return (f"{path} had gone through {before} before, this dataset through {here}: scales may differ",)


def _joined_steps(steps: Sequence[str]) -> str:
    return ", then ".join(steps) or "nothing"


def _made_before(provenance: Sequence[Provenance]) -> list[str]:
    """Name what changed the values of rows on the way, preprocess by preprocess; choosing some of them does not."""
    found = []
    for step in provenance:
        if step.verb == "preprocess":
            documents = step.arguments.get("operations")
            names = [part.get(_KIND) for part in documents or () if isinstance(part, dict)]
            changing = [str(name) for name in names if not _is_choice(name)]
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
    raise DatasetNotFoundError(f"there is no {path}, expected a dataset or its {MANIFEST}")
