"""`download`: fetch a dataset of a known source by id and store it as TED below the root."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

from ..declarations import ReaderOptions, declared, default_layout, example_source
from ..errors import UsageError, nearest, suggests_keywords
from ..format.episodes import normal_form
from ..format.hub_address import HUB, HubAddress
from ..format.locate import dataset_folder, reader_class, source_class, source_names, storage_root
from ..format.manifest import Layout, Manifest, Request
from ..format.packed.row_files import named_codecs
from ..format.reader import FinalStep, require_final_step
from ..format.sources import Source, safe_id
from ..progress import Progress, Silent
from ..remote.hub import Hub
from ..results import (
    Published,
    content_options,
    final_step_arguments,
    given_options,
    layout_arguments,
    require_layout,
    require_workers,
)
from .hub_download import HubDownload, hub_address
from .remote_download import Fetch, RemoteDownload
from .source_conversion import SourceConversion, facts_of, hinting_at_skip_bad


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadResult(Published):
    """The dataset at `path`.

    `id` is the dataset of `source`; `asked` is the requested name, and `resolved` how it was resolved: `exact`,
    `latest` (the version was filled in), `words` (another name with the same words). `fetched_from` is the address of
    the original, for display. `fetch` describes the transfer, None if there was none: `files` and `bytes` in total,
    `bytes_present` already present, `bytes_free` on the disk before it started. `originals` is the folder of the
    original files, if they are kept.
    """

    kind: ClassVar[str] = "download"
    source: str
    id: str
    asked: str
    resolved: str
    fetched_from: str
    fetch: Fetch | None = None
    originals: Path | None = None


@suggests_keywords(*ReaderOptions.__annotations__)
def download(
    source: str,
    id: str | None = None,
    *,
    local: bool = False,
    root: str | os.PathLike[str] | None = None,
    episodes: str | None = None,
    revision: str | None = None,
    layout: str | None = None,
    compress: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    keep_source: bool = False,
    exact_id: bool = False,
    frozen: bool = False,
    final_step: str = "auto",
    num_workers: int = 0,
    skip_bad: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ReaderOptions],
) -> DownloadResult:
    """Fetch dataset `id` of `source`, verify it, and convert it into `<root>/<source>/<id>`.

    `source` may also be `"source:ID"`, or `"hf://OWNER/NAME@REVISION"` for a dataset that `upload` put on a hub: its
    files come as they are, into `<root>/hf/OWNER/NAME`, and options that need a conversion are refused. `id` may omit
    its version (the latest is taken), or be a name from before namespaces, like `door-human-v1`: then the dataset with
    the same words is taken, as `resolved` records. `exact_id` disables both. `revision` is a branch, tag or commit.

    An equal request that was completed before is answered without the network; `frozen` compares the files of the
    remote with those it was made from, and raises CheckFailed if they differ. An interrupted fetch resumes when the
    request is repeated. `keep_source` keeps the original files. With `local` the original is taken from the source's
    own local cache (its `local_cache`), by exact id and without the network.

    `layout`, `compress`, `final_step`, `num_workers`, `skip_bad`, `force`, `dry_run` and `options` are those of
    `convert`. A selection of `episodes`, a revision, another layout, `final_step`, `skip_bad` or option is another
    dataset, at `<id>@<8 hex digits>`. Another `compress` is not: without `force` a stored dataset stays, with a note.

    Raises UsageError for an unknown source, an id that could leave its folder or that may mean several datasets,
    DatasetNotFoundError with the nearest names, NetworkError, AuthorisationError, OutOfSpaceError, CorruptDataError
    if the bytes do not match the remote's checksums after retries, and the errors of `convert`.
    """
    given, progress = given_options(options), progress or Silent()
    address = hub_address(source, id, revision)
    if address is not None:
        _refuse_conversions(
            address, local=local, episodes=episodes, layout=layout, compress=compress, exact_id=exact_id,
            keep_source=keep_source, num_workers=num_workers, skip_bad=skip_bad, **given,
            final_step=final_step != "auto",
        )  # fmt: skip
        return _from_hub(address, storage_root(root), force, dry_run, frozen, progress)
    source, id = _named(source, id)
    origin = source_class(source)()
    safe_id(id)
    chosen = episodes if episodes is not None and normal_form(episodes) else None
    wanted, methods = require_layout(layout or default_layout(source), compress), tuple(compress)
    named_codecs(methods)  # fails early on methods that are invalid for any field
    ends, workers = require_final_step(final_step), require_workers(num_workers)
    recorded = given | ({"skip_bad": True} if skip_bad else {})
    if local:
        _refuse_remote_options(revision=revision, keep_source=keep_source, frozen=frozen)
        asked = storage_root(root), chosen, (wanted, methods), ends, given, force, dry_run, workers, skip_bad, progress
        return DownloadResult(**_from_cache(origin, id, *asked))
    with origin:
        fetching = RemoteDownload(
            source=origin, asked=id, root=storage_root(root), episodes=chosen, revision=revision, layout=wanted,
            compress=methods, force=force, dry_run=dry_run, keep_source=keep_source, exact_id=exact_id, frozen=frozen,
            progress=progress, final_step=ends, options=recorded, num_workers=workers,
        )  # fmt: skip
        return DownloadResult(**fetching.run(), source=source, asked=id)


def _refuse_conversions(address: HubAddress, **given: object) -> None:
    """Raise UsageError for an option that would make other files of a dataset than those on the hub.

    Options that are not given are false.
    """
    for name, value in given.items():
        if value:
            raise UsageError(
                f"{address} is stored as it is, and --{name.replace('_', '-')} is about a conversion",
                hint=f"download it without, then convert it: rbtool convert {HUB}:{address.repository} DEST",
            )


def _from_hub(
    address: HubAddress, root: Path, force: bool, dry_run: bool, frozen: bool, progress: Progress
) -> DownloadResult:
    with Hub() as hub:
        fetching = HubDownload(
            hub=hub, address=address, root=root, force=force, dry_run=dry_run, frozen=frozen, progress=progress
        )
        return DownloadResult(**fetching.run())


def _named(source: str, dataset_id: str | None) -> tuple[str, str]:
    """Return source and id, of which either may be given as `source:id`."""
    if dataset_id is None:
        source, _, dataset_id = source.partition(":")
    dataset_id = dataset_id.removeprefix(f"{source}:")
    if dataset_id:
        return source, dataset_id
    known = source_names()
    name, _, rest = source.partition("/")
    if rest and name in known:
        whole = _example(name).startswith(f"{name}/")  # an id of a hub begins with its owner
        line = shlex.join(["rbtool", "download", name, source if whole else rest])
        raise UsageError(f"{source!r} is one word, expected the source and the dataset", hint=f"write: {line}")
    if source not in known and not nearest(source, known):
        line = f"rbtool download {known[0]} {shlex.quote(source)}"
        raise UsageError(f"{source!r}: no source named", hint=f"name it, like: {line}")
    source_class(source)
    raise UsageError("no dataset named", hint=f"name one, like: rbtool download {source} {_example(source)}")


def _example(source: str) -> str:
    return next((one for one in declared() if one.name == source), example_source()).example[0]


def _refuse_remote_options(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(
                f"--{name.replace('_', '-')} is about the remote, and --local does not ask it", hint="leave one out"
            )


def _from_cache(
    source: Source,
    dataset_id: str,
    root: Path,
    chosen: str | None,
    layout: tuple[Layout, tuple[str, ...]],
    final_step: FinalStep,
    given: dict[str, Any],
    force: bool,
    dry_run: bool,
    num_workers: int,
    skip_bad: bool,
    progress: Progress,
) -> Mapping[str, Any]:
    if source.local_cache is None:
        raise UsageError(f"{source.name} has no local cache of its own", hint="leave out --local")
    original = source.local_cache.find(dataset_id, reader_class(source.name))
    normal = normal_form(chosen) if chosen else None
    recorded = given | ({"skip_bad": True} if skip_bad else {})
    request = Request(
        source.name, f"{source.name}:{dataset_id}", dataset_id, episodes=normal, layout=layout[0], origin="local",
        final_step=final_step, options=content_options(source, recorded),
    )  # fmt: skip
    options = {**source.reader_options(dataset_id), **given}
    with (
        reader_class(source.name)(original, final_step=final_step, options=options) as reader,
        hinting_at_skip_bad(reader, possible=not skip_bad),
    ):
        facts = facts_of(reader, chosen, progress, skip_bad=skip_bad, num_workers=num_workers)
        if facts.id != dataset_id:
            facts = replace(facts, notes=(*facts.notes, f"the dataset calls itself {facts.id}"))
        conversion = SourceConversion(
            reader=reader,
            facts=facts,
            source=original,
            destination=dataset_folder(request, root),
            request=request,
            verb="download",
            arguments={"source": source.name, "id": dataset_id, "local": True, "episodes": normal}
            | layout_arguments(*layout)
            | final_step_arguments(final_step)
            | recorded,
            force=force,
            dry_run=dry_run,
            progress=progress,
            compress=layout[1],
            root=root,
            num_workers=num_workers,
        )
        entries = conversion.run()
        named = {"source": source.name, "id": dataset_id, "asked": dataset_id, "resolved": "exact"}
        return entries | named | {"fetched_from": _origin(entries, original)}


def _origin(entries: Mapping[str, Any], original: Path) -> str:
    """Return the origin of a dataset; one that existed before may come from the remote."""
    if entries["request"]["origin"] == "remote":
        steps = Manifest.load(entries["path"]).provenance
        return str(steps[0].arguments.get("from", "")) if steps else ""
    return str(original)
