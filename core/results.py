"""Results of the verbs, and the search for an equal result at the destination.

Results are frozen dataclasses that the command line renders, or prints in full with `--json`. Each document has
`schema`, the version of its structure, and `kind`, the name of the verb.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .declarations import from_leaf
from .errors import CorruptDataError, RbtoolError, UsageError
from .format.checks import SoundSteps
from .format.contracts import StepReader
from .format.converter import Source
from .format.documents import plain
from .format.manifest import Layout, Manifest, Request, has_manifest
from .format.open_files import ListedFiles
from .open_steps import BufferSteps, is_steps


class Result:
    """Base of every verb's result."""

    schema: ClassVar[int] = 1
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetsResult(Result):
    """The results of `inspect` or `check` (`verb`) for several datasets: the document or the error of each, by name."""

    kind: ClassVar[str] = "datasets"
    verb: str
    datasets: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Result):
    """A dataset or checkpoint that a verb wrote to `path`, or would write there (`dry_run`).

    `already_there` is True if an equal one existed and nothing was written. `bytes` is the size of all files;
    `shared_bytes` is the part that takes no disk space of its own, because those files are shared with a source.
    `notes`, `renamed_keys` and `dropped_keys` list only what this step added; the manifest, which `inspect` shows, also
    has the entries of the datasets that were read.
    """

    kind: ClassVar[str] = "published"
    path: Path
    layout: str
    steps: int
    episodes: int
    bytes: int
    content_digest: str | None
    boundary: Mapping[str, int]
    renamed_keys: Mapping[str, str]
    dropped_keys: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]
    request: Mapping[str, Any]
    already_there: bool = False
    dry_run: bool = False
    seconds: float = 0.0
    shared_bytes: int = 0


def published_entries(manifest: Manifest, path: Path, started: float, *readers: StepReader) -> dict[str, Any]:
    """Return the entries of a `Published` from a manifest; `started` is the start of the verb (perf_counter).

    `readers` read the datasets that it was made from; their notes and keys are not repeated.
    """
    stored = _stored_manifests(readers)
    renamed = {pair for one in stored for pair in one.renamed_keys.items()}
    dropped = {item for one in stored for item in one.dropped_keys}
    return {
        "path": path,
        "layout": manifest.layout,
        "steps": manifest.steps,
        "episodes": manifest.episodes,
        "bytes": manifest.bytes,
        "content_digest": manifest.content_digest,
        "boundary": manifest.boundary.to_dict(),
        "renamed_keys": {key: name for key, name in manifest.renamed_keys.items() if (key, name) not in renamed},
        "dropped_keys": tuple(dataclasses.asdict(item) for item in manifest.dropped_keys if item not in dropped),
        "notes": new_notes(manifest.notes, *readers),
        "request": manifest.request.to_dict(),
        "seconds": seconds_since(started),
    }


def new_notes(notes: Sequence[str], *readers: StepReader) -> tuple[str, ...]:
    """Return the notes that are in no manifest of the datasets that were read: those were shown when they were made."""
    known = {note for manifest in _stored_manifests(readers) for note in manifest.notes}
    return tuple(note for note in notes if note not in known)


def _stored_manifests(readers: Sequence[StepReader]) -> list[Manifest]:
    """Return the manifests of stored datasets, whose notes were shown when they were made; none of saved buffers."""
    stored = [reader.source if isinstance(reader, SoundSteps) else reader for reader in readers]
    return [reader.manifest for reader in stored if not isinstance(reader, BufferSteps)]


def seconds_since(started: float) -> float:
    """Return the seconds since `started` (perf_counter), rounded to milliseconds."""
    return round(time.perf_counter() - started, 3)


def to_document(result: Any) -> dict[str, Any]:
    """Turn a result into its JSON document: `schema` and `kind` first, then the fields in order."""
    return dict(plain(entries_of(result)))


def entries_of(result: Any) -> dict[str, Any]:
    """Return the entries of a JSON document whose values need not be plain: `Places` are left as they are."""
    return {"schema": result.schema, "kind": result.kind, **_plain_paths(result)}


def _plain_paths(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain_paths(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_paths(item) for item in value]
    return value


def existing_result(destination: Path, request: Request) -> Manifest | None:
    """Return the manifest of the dataset at `destination` if an equal request made it and its files are complete.

    None if there is no dataset. Raises UsageError if there is another dataset, or a damaged one.
    """
    if not has_manifest(destination):
        return None
    try:
        files = ListedFiles.at(destination)
    except RbtoolError as error:
        raise occupied_error(destination, f"is damaged ({error})") from error
    with files:
        return _equal(files, destination, request)


def _equal(files: ListedFiles, destination: Path, request: Request) -> Manifest:
    manifest = files.manifest
    if manifest.kind != "dataset":
        raise occupied_error(destination, f"is a {manifest.kind} of {_request_text(manifest.request)}, not a dataset")
    if manifest.request.identity() != request.identity():
        raise occupied_error(destination, f"is dataset {_request_text(manifest.request)}, not {_request_text(request)}")
    try:
        files.check_sizes()
    except CorruptDataError as error:
        raise occupied_error(destination, f"is damaged ({error})") from error
    return manifest


def occupied_error(destination: Path, why: str) -> UsageError:
    """Return the error for a destination that must not be overwritten."""
    return UsageError(f"{destination} already exists and {why}", hint="add --force to replace it")


def _request_text(request: Request) -> str:
    episodes = f", episodes {request.episodes}" if request.episodes else ""
    revision = f", revision {request.revision}" if request.revision else ""
    layout = f", layout {request.layout}" if request.layout != "ted" else ""
    final = f", final step {request.final_step}" if request.final_step != "auto" else ""
    options = "".join(f", {name} {value}" for name, value in sorted(request.options.items()))
    return f"{request.source}:{request.id}{revision}{episodes}{layout}{final}{options}"


def require_layout(layout: str, compress: Sequence[str]) -> Layout:
    """Validate a layout of datasets; UsageError for an unknown one, and for compression in a layout without it."""
    if layout == "packed":
        return "packed"
    if layout != "ted":
        raise UsageError(f"there is no dataset layout {layout!r}", hint="take ted or packed")
    if compress:
        raise UsageError("layout ted has no compressed fields, only packed has", hint="add --layout packed")
    return "ted"


def final_step_arguments(final_step: str) -> dict[str, Any]:
    """Return the provenance entry for last steps without a next observation; {} for the default."""
    return {} if final_step == "auto" else {"final_step": final_step}


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reader's options that are given, without those that are None or False.

    A map of columns is brought to its normal form, in which files are replaced by their contents; UsageError for one
    that is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    texts = options.get("map")
    if texts is not None:
        given["map"] = from_leaf("normal_map")(texts)
    return given


PICKLED = "its files are pickles, which can run anything"


def content_options(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change the dataset; `trust_pickle` does not if the source cannot be read without it."""
    return {name: value for name, value in options.items() if not (source.pickled and name == "trust_pickle")}


def refuse_map_alone(path: Path, options: Mapping[str, Any]) -> None:
    """Raise UsageError if options for tables are given for a file that rbtool did not write, without the format."""
    if path.is_file() and not is_steps(path) and any(options.get(name) is not None for name in ("map", "episode_key")):
        raise UsageError(f"{path} is in no format that is recognised by its content", hint="add --from table")


def refuse_raw_options(path: Path, options: Mapping[str, Any], instead: Mapping[str, str] | None = None) -> None:
    """Raise UsageError if options for raw datasets of other libraries are given for data that rbtool wrote.

    `options` has the values by Python name, None for an option that is not given. `instead` maps an option to a hint
    that says what has the same effect on a TED dataset.
    """
    refuse_map_alone(path, options)
    for name, value in options.items():
        if value is not None:
            option = "--" + {"format": "from"}.get(name, name).replace("_", "-")
            hint = (instead or {}).get(name) or f"leave it out: {path} is TED"
            raise UsageError(f"{option} is about raw datasets of other libraries", hint=hint)


def require_workers(number: int, *, resume: bool = False) -> int:
    """Return the number of worker processes; UsageError if it is negative, or 0 with `resume`."""
    if number < 0:
        raise UsageError(f"--num-workers is {number!r}, expected 0 (no other process) or more")
    if resume and not number:
        raise UsageError("--resume needs worker processes: this one keeps nothing", hint="add --num-workers N")
    return number


def require_engine(engine: str, workers: int | None = None) -> str:
    """Return the engine that runs worker processes; UsageError for an unknown one, and for Ray without workers."""
    if engine not in {"local", "ray"}:
        raise UsageError(f"engine {engine!r} is unknown; known: local, ray")
    if engine == "ray" and workers == 0:
        raise UsageError("--engine ray needs workers, and there are none", hint="add --num-workers N")
    return engine


def layout_arguments(layout: Layout, compress: Sequence[str]) -> dict[str, Any]:
    """Return the provenance entries of layout and compression; {} for the defaults."""
    named = {"layout": layout} if layout != "ted" else {}
    return named | ({"compress": sorted(compress)} if compress else {})


def refuse_other_compression(destination: Path, manifest: Manifest, compress: Sequence[str]) -> None:
    """Raise UsageError if the existing dataset at `destination` was compressed in another way."""
    if manifest.provenance[-1].arguments.get("compress", []) != sorted(compress):
        raise occupied_error(destination, "was compressed in another way")
