"""`download`: a dataset of a known source, by its id, becomes a TED dataset under the root."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ..dataset import (
    Request,
    dataset_folder,
    normal_form,
    parse_episodes,
    reader_class,
    safe_id,
    source_class,
    storage_root,
)
from ..errors import UsageError
from ..progress import Progress, Silent
from .results import Published
from .source_conversion import SourceConversion, facts_of

__all__ = ["DownloadResult", "download"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadResult(Published):
    """The dataset at `path`: `source` and `id` name it, `fetched_from` is where its original lies."""

    kind: ClassVar[str] = "download"
    source: str
    id: str
    fetched_from: Path


def download(
    source: str,
    id: str,
    *,
    local: bool = False,
    root: str | os.PathLike[str] | None = None,
    episodes: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> DownloadResult:
    """Convert dataset `id` of `source` (`minari`) into `<root>/<source>/<id>`.

    With `local` the original is taken from the source's own local cache (`MINARI_DATASETS_PATH`, else
    `~/.minari/datasets`) without any use of the network; this version knows no other way. A choice of `episodes`
    goes to `<id>@<8 hex digits>`. `force` and `dry_run` are those of `convert`.

    Raises DatasetNotFoundError that names the folder searched, UsageError for an unknown source or an id that could
    leave its folder, and what `convert` raises.
    """
    cache = source_class(source).local_cache
    safe_id(id)
    if not local:
        raise UsageError(f"this version reads {source} datasets from the local cache only", hint="add --local")
    heard = progress or Silent()
    chosen = normal_form(parse_episodes(episodes)) if episodes is not None else None
    request = Request(source, f"{source}:{id}", id, episodes=chosen, origin="local")
    original = cache.find(id, reader_class(source))
    with reader_class(source)(original) as reader:
        facts = facts_of(reader, chosen, heard)
        if facts.id != id:
            facts = replace(facts, notes=(*facts.notes, f"the dataset calls itself {facts.id}"))
        conversion = SourceConversion(
            reader=reader,
            facts=facts,
            source=original,
            destination=dataset_folder(request, storage_root(root)),
            request=request,
            verb="download",
            arguments={"source": source, "id": id, "local": local, "episodes": chosen},
            force=force,
            dry_run=dry_run,
            progress=heard,
        )
        return DownloadResult(**conversion.run(), source=source, id=id, fetched_from=original)
