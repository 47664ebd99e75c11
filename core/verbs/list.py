"""`list`: the datasets that are stored below the root, those that a source offers, and the supported formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..declarations import declared
from ..errors import NetworkError, UsageError, suggests_keywords
from ..format.converter import Catalogue, Source
from ..format.locate import fits, reader_names, source_class, storage_root, stored_datasets, stored_name
from ..format.manifest import Manifest, has_manifest
from ..options import PathLike
from ..progress import Progress, Silent
from ..remote.catalogue import CatalogueFile, catalogue_age
from ..results import Result


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """A dataset below the root. `created` is the UTC time of the last step of its provenance.

    `problem` is set if it cannot be read; its other entries are then empty.
    """

    name: str
    path: Path
    layout: str = ""
    steps: int = 0
    episodes: int = 0
    bytes: int = 0
    created: str | None = None
    content_digest: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListResult(Result):
    """The stored datasets, sorted by name."""

    kind: ClassVar[str] = "list"
    root: Path
    datasets: tuple[StoredDataset, ...]


def list_datasets(pattern: str | None = None, *, root: PathLike | None = None) -> ListResult:
    """List every dataset below the root, including unreadable ones.

    Args:
        pattern: filters the names `source:id`: a shell pattern if it contains one of `*?[`, else a part of the name.
        root: where datasets are stored. A missing root counts as empty.

    Returns:
        The datasets.

    Raises:
        UsageError: the root is not a folder.
    """
    folder = existing_root(root)
    found = [
        _entry(name, path, manifest)
        for path, manifest in stored_datasets(folder)
        if not (isinstance(manifest, Manifest) and manifest.kind != "dataset")
        if fits(name := stored_name(path, folder), pattern)
    ]
    return ListResult(root=folder, datasets=tuple(sorted(found, key=lambda entry: entry.name)))


list = list_datasets  # its public name


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFormat:
    """A format that can be read or written: how files are recognised, what ends an episode, and what it needs.

    `final` states whether files have an observation after the last step (yes, no, where stored), `extra` the extra of
    rbtool that has to be installed, `remote` whether datasets can be downloaded, `streams` whether they have shards
    that a stream can fetch one by one, `exported` whether `export` writes the format, `keeps_video` whether videos can
    be kept. `read` is False for a format that can only be written. For a format of another package, only the name is
    known.
    """

    name: str
    title: str = ""
    found: str = ""
    ends: str = ""
    final: str = ""
    extra: str = ""
    remote: bool = False
    streams: bool = False
    exported: bool = False
    keeps_video: bool = False
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatsResult(Result):
    """The formats of raw datasets and of exports, and the sources that have no file format of their own."""

    kind: ClassVar[str] = "list formats"
    formats: tuple[ListedFormat, ...]


def list_formats() -> FormatsResult:
    """List the formats that can be read or written; formats that other installed packages add come last."""
    ours = {one.name: one for one in declared()}
    described = [
        ListedFormat(
            name=one.name, title=one.title, found=one.found, ends=one.ends, final=one.final, extra=one.extra,
            remote=one.source is not None, streams=one.streams, exported=one.sink is not None,
            keeps_video=one.keeps_video, read=any((one.reader, one.source, one.steps)),
        )
        for one in ours.values()
    ]  # fmt: skip
    plugged = [ListedFormat(name=name) for name in reader_names() if name not in ours]
    return FormatsResult(formats=(*described, *plugged))


def existing_root(root: PathLike | None) -> Path:
    """Return the storage root, which may be missing. Raises UsageError if it is not a folder."""
    folder = storage_root(root)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder, so nothing can be stored in it", hint="choose another --root")
    return folder


def _entry(name: str, path: Path, manifest: Manifest | Exception) -> StoredDataset:
    if isinstance(manifest, Exception):
        return StoredDataset(name, path, problem=str(manifest))
    return StoredDataset(
        name,
        path,
        layout=manifest.layout,
        steps=manifest.steps,
        episodes=manifest.episodes,
        bytes=manifest.bytes,
        created=manifest.provenance[-1].time if manifest.provenance else None,
        content_digest=manifest.content_digest,
    )


_FRESH = 24 * 3600  # seconds for which a listing is used; sources publish datasets about once a month


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEntry:
    """A dataset that can be fetched. `stored` is True if it was; entries that the remote does not state are None."""

    name: str
    bytes: int | None
    steps: int | None
    episodes: int | None
    stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListResult(Result):
    """The datasets of a remote, sorted by name.

    `fetched` is the time of the listing (UTC), `age` its age in seconds, `cached` whether it was stored before.
    `problems` has one sentence for each part of the remote that could not be read.
    """

    kind: ClassVar[str] = "list_remote"
    source: str
    remote: str
    fetched: str
    age: float
    cached: bool
    datasets: tuple[RemoteEntry, ...]
    problems: tuple[str, ...]


@suggests_keywords()
def list_remote(
    source: str,
    pattern: str | None = None,
    *,
    root: PathLike | None = None,
    refresh: bool = False,
    progress: Progress | None = None,
) -> RemoteListResult:
    """List the datasets that a source offers, with their sizes.

    The listing is cached below the root for a day. If the remote cannot be reached, an older one is used.

    Args:
        source: the name of the source.
        pattern: filters names, as in `list_datasets`.
        root: where datasets are stored.
        refresh: fetch the listing again.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The datasets.

    Raises:
        UsageError: an unknown source.
        NetworkError, AuthorisationError: the remote cannot be reached, or refuses.
    """
    folder, progress = storage_root(root), progress or Silent()
    with source_class(source)() as origin:
        kept = CatalogueFile(folder, origin.name, origin.key)
        known = kept.load()
        usable = known is not None and not known.unreachable and catalogue_age(known) < _FRESH
        cached = usable and not refresh
        catalogue = known if known is not None and cached else _fetched(origin, known, progress)
        if not cached and catalogue is not known:
            try:
                kept.save(catalogue)
            except (OSError, UsageError) as error:
                progress.note(f"the listing cannot be kept below {folder}: {error}")
    return RemoteListResult(
        source=source,
        remote=catalogue.remote,
        fetched=catalogue.fetched,
        age=round(catalogue_age(catalogue), 1),
        cached=catalogue is known,
        datasets=_entries(catalogue, source, folder, pattern),
        problems=catalogue.problems,
    )


def _fetched(source: Source, known: Catalogue | None, progress: Progress) -> Catalogue:
    """Fetch the listing of the remote; fall back on the known one if the remote cannot be reached."""
    done = 0

    def on_listed(count: int, total: int) -> None:
        nonlocal done
        if done == 0:
            progress.start("listing", total, "datasets")
        progress.advance(count - done)
        done = count

    try:
        catalogue = source.catalogue(known, progress=on_listed)
    except NetworkError as error:
        if known is None:
            raise
        progress.note(f"{error}: using the listing of {known.fetched}")
        return known
    if done:
        progress.done()
    return catalogue


def _entries(catalogue: Catalogue, source: str, root: Path, pattern: str | None) -> tuple[RemoteEntry, ...]:
    return tuple(
        RemoteEntry(
            name=name,
            bytes=entry.bytes,
            steps=entry.steps,
            episodes=entry.episodes,
            stored=has_manifest(root / source / entry.id),
        )
        for entry in catalogue.entries
        if fits(name := f"{source}:{entry.id}", pattern)
    )
