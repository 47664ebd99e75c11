"""`download`: a dataset of a known source, by its id, becomes a TED dataset under the root."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..errors import UsageError, nearest
from ..format import (
    FinalStep,
    Layout,
    Manifest,
    Request,
    Source,
    dataset_folder,
    named_codecs,
    normal_form,
    reader_class,
    require_final_step,
    safe_id,
    source_class,
    source_names,
    storage_root,
)
from ..progress import Progress, Silent
from .layouts import final_step_arguments, layout_arguments, require_layout
from .remote_download import Fetch, RemoteDownload
from .results import Published
from .source_conversion import SourceConversion, facts_of

__all__ = ["DownloadResult", "download"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadResult(Published):
    """The dataset at `path`.

    `id` of `source` is what it is; `asked` are the words that named it, and `resolved` says how they led to it:
    `exact`, `latest` (the version was filled in), `words` (another name with the same words in it). `fetched_from`
    is where its original lies, for people. `fetch` tells what was fetched, None if nothing had to be: `files` and
    `bytes` in all, `bytes_present` of them that were there from before, `bytes_free` on the disk before it began.
    `originals` is the folder of the original files, where they were to be kept.
    """

    kind: ClassVar[str] = "download"
    source: str
    id: str
    asked: str
    resolved: str
    fetched_from: str
    fetch: Fetch | None = None
    originals: Path | None = None


def download(
    source: str,
    id: str | None = None,
    *,
    local: bool = False,
    root: str | os.PathLike[str] | None = None,
    episodes: str | None = None,
    revision: str | None = None,
    layout: str = "ted",
    compress: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    keep_source: bool = False,
    exact_id: bool = False,
    frozen: bool = False,
    final_step: str = "auto",
    progress: Progress | None = None,
) -> DownloadResult:
    """Fetch dataset `id` of `source`, verify it, and convert it into `<root>/<source>/<id>`.

    `"source:ID"` in one word will do, too. `id` may lack its version (the latest is taken), or be a name from before
    namespaces, like `door-human-v1`: the dataset with the same words is taken then, which the result says. `exact_id`
    refuses both. An equal request that was fulfilled before is answered at once, without the network; `frozen` asks
    the remote whether it still has the very same files, and raises CheckFailed if not. `revision` is a branch, tag or
    commit of the remote. A choice of `episodes`, or a revision, goes to `<id>@<8 hex digits>`. An interrupted fetch
    goes on where it ended when it is asked for again. `keep_source` keeps the original files. `force` and `dry_run`
    are those of `convert`, as are `layout` and `compress`: another layout is another dataset, `<id>@<8 hex digits>`.
    `final_step` is that of `convert`, too: another one is another dataset. Another `compress` is not: what is there
    stays without `force`, and the notes of the result say how it is stored.

    With `local` the original is taken from the source's own local cache (its `local_cache`), by its
    exact id and without any use of the network.

    Raises UsageError for an unknown source, an id that could leave its folder or that may mean several datasets,
    DatasetNotFoundError with the nearest names, NetworkError, AuthorisationError, OutOfSpaceError, CorruptDataError
    if the bytes never match the remote's checksums, and what `convert` raises.
    """
    source, id = _named(source, id)
    origin = source_class(source)()
    safe_id(id)
    chosen = episodes if episodes is not None and normal_form(episodes) else None
    heard = progress or Silent()
    wanted, methods = require_layout(layout, compress), tuple(compress)
    named_codecs(methods)  # what can be wrong with them whatever the fields are
    ends = require_final_step(final_step)
    if local:
        _refuse_remote_options(revision=revision, keep_source=keep_source, frozen=frozen)
        return DownloadResult(
            **_from_cache(origin, id, storage_root(root), chosen, (wanted, methods), ends, force, dry_run, heard)
        )
    with origin:
        fetching = RemoteDownload(
            source=origin,
            asked=id,
            root=storage_root(root),
            episodes=chosen,
            revision=revision,
            layout=wanted,
            compress=methods,
            force=force,
            dry_run=dry_run,
            keep_source=keep_source,
            exact_id=exact_id,
            frozen=frozen,
            progress=heard,
            final_step=ends,
        )
        return DownloadResult(**fetching.run(), source=source, asked=id)


def _named(source: str, dataset_id: str | None) -> tuple[str, str]:
    """Take `source:id` apart, wherever it stands."""
    if dataset_id is None:
        source, _, dataset_id = source.partition(":")
    dataset_id = dataset_id.removeprefix(f"{source}:")
    if dataset_id:
        return source, dataset_id
    known = source_names()
    if source not in known and not nearest(source, known):
        line = f"rbtool download {known[0]} {shlex.quote(source)}"
        raise UsageError(f"no source is named for {source!r}", hint=f"name it, like: {line}")
    source_class(source)
    raise UsageError("no dataset is named", hint=f"name one, like: rbtool download {source} D4RL/door/human-v2")


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
    force: bool,
    dry_run: bool,
    progress: Progress,
) -> Mapping[str, Any]:
    if source.local_cache is None:
        raise UsageError(f"{source.name} has no local cache of its own", hint="leave out --local")
    original = source.local_cache.find(dataset_id, reader_class(source.name))
    normal = normal_form(chosen) if chosen else None
    request = Request(
        source.name, f"{source.name}:{dataset_id}", dataset_id, episodes=normal, layout=layout[0], origin="local",
        final_step=final_step,
    )  # fmt: skip
    with reader_class(source.name)(original, final_step=final_step) as reader:
        facts = facts_of(reader, chosen, progress)
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
            | final_step_arguments(final_step),
            force=force,
            dry_run=dry_run,
            progress=progress,
            compress=layout[1],
            root=root,
        )
        entries = conversion.run()
        named = {"source": source.name, "id": dataset_id, "asked": dataset_id, "resolved": "exact"}
        return entries | named | {"fetched_from": _origin(entries, original)}


def _origin(entries: Mapping[str, Any], original: Path) -> str:
    """Where a dataset came from: one that was there already may have come from the remote."""
    if entries["request"]["origin"] == "remote":
        steps = Manifest.load(entries["path"]).provenance
        return str(steps[0].arguments.get("from", "")) if steps else ""
    return str(original)
