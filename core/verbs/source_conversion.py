"""From a reader to a published dataset: what `convert` and `download` share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..dataset import (
    ENV_METADATA,
    DatasetBuilder,
    Ingest,
    Manifest,
    Origin,
    Reader,
    Request,
    SourceFacts,
    Staging,
    check_sizes,
    digest_bytes,
    env_metadata_bytes,
    fs,
    has_manifest,
    mend,
    parse_episodes,
    provenance_step,
    require_apart,
)
from ..errors import CorruptDataError, RbtoolError, UsageError
from ..progress import Progress
from ..ted import BoundaryCounts, row_bytes, ted_fields

__all__ = ["SourceConversion", "facts_of"]

_EPISODE_BYTES = 64  # what a row of the episode table takes, roughly
_SMALL_FILES = 64 << 10  # what metadata and block sizes take, roughly
_FEW_INPUTS = 16
_SOON = 1.0  # seconds in which nobody needs to hear that the source is being looked over


def facts_of(reader: Reader, selection: str | None, progress: Progress) -> SourceFacts:
    """Look a source over; only where that takes long it becomes a stage to watch."""
    begun, seen, watched = time.monotonic(), 0, False

    def heard(episodes: int) -> None:
        nonlocal seen, watched
        seen += episodes
        if watched:
            progress.advance(episodes)
        elif time.monotonic() - begun > _SOON:
            watched = True
            progress.start("looking over", None, "episodes")
            progress.advance(seen)

    facts = reader.facts(parse_episodes(selection) if selection else None, progress=heard)
    if watched:
        progress.done()
    return facts


@dataclass(frozen=True, kw_only=True)
class SourceConversion:
    """One conversion of (part of) a source into the dataset at `destination`, or the finding that it is there.

    `arguments` are recorded in the provenance of the result.
    """

    reader: Reader
    facts: SourceFacts
    source: Path
    destination: Path
    request: Request
    verb: str
    arguments: Mapping[str, Any]
    force: bool
    dry_run: bool
    progress: Progress

    def run(self) -> dict[str, Any]:
        """Convert, unless an equal dataset is there already; return the entries of a `Published`.

        Raises UsageError if something else is there and `force` is off, OutOfSpaceError before anything is written
        if the result cannot fit.
        """
        started = time.perf_counter()
        require_apart(self.source, self.destination)
        if not self.dry_run:
            mend(self.destination)
        published = self._standing()
        if published is None:
            Staging(self.destination, replace=self.force).refuse_if_taken()
            fs.require_space(self.destination.parent, self._expected_bytes + _SMALL_FILES)
            published = self._estimate() if self.dry_run else self._convert()
        return published | {"dry_run": self.dry_run, "seconds": time.perf_counter() - started}

    @cached_property
    def _inputs(self) -> dict[str, str]:
        return self.reader.digests()

    @cached_property
    def _revision(self) -> str:
        """One digest over the source's files: which state of the source this is."""
        return digest_bytes("".join(f"{name}\0{digest}\n" for name, digest in sorted(self._inputs.items())).encode())

    @cached_property
    def _expected_bytes(self) -> int:
        documents = sum(map(len, self.facts.documents.values()))
        episodes = _EPISODE_BYTES * len(self.facts.episode_numbers)
        return self.facts.steps * row_bytes(ted_fields(self.facts.fields)) + episodes + documents

    def _standing(self) -> dict[str, Any] | None:
        """Describe the equal dataset at the destination; None if the place is free or may be taken."""
        if self.force or not has_manifest(self.destination):
            return None
        try:
            manifest = Manifest.load(self.destination)
        except RbtoolError as error:
            raise self._taken(f"is damaged ({error})") from error
        if manifest.kind != "dataset" or manifest.request.identity() != self.request.identity():
            raise self._taken(f"is {manifest.kind} {_shown(manifest.request)}, not {_shown(self.request)}")
        if manifest.resolved_revision != self._revision:
            raise self._taken("was made from another state of the source")
        try:
            check_sizes(self.destination, manifest.files)
        except CorruptDataError as error:
            raise self._taken(f"is damaged ({error})") from error
        return self._of_manifest(manifest, already_there=True)

    def _taken(self, why: str) -> UsageError:
        return UsageError(f"{self.destination} is there already and {why}", hint="add --force to replace it")

    def _estimate(self) -> dict[str, Any]:
        table = self.reader.episode_table(self.facts.episode_numbers)
        return self._entries(self._expected_bytes, None, table.counts(), already_there=False)

    def _convert(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            try:
                staging = stack.enter_context(Staging(self.destination, replace=self.force))
            except UsageError:
                standing = self._standing()  # another process may have made the very same in the meantime
                if standing is None:
                    raise
                return standing
            manifest = self._build(staging.path)
            if staging.publish():
                return self._of_manifest(manifest, already_there=False)
            standing = self._standing()
            if standing is None or standing["content_digest"] != manifest.content_digest:
                raise self._taken("was put there by another process just now")
            return standing

    def _build(self, folder: Path) -> Manifest:
        origin = self._origin()
        with DatasetBuilder(folder, ted_fields(self.facts.fields)) as builder:
            ingest = Ingest(builder, self.facts.fields)
            self.progress.start("converting", self.facts.steps, "steps")
            ingest.run(self.reader.pieces(self.facts.episode_numbers), self.progress.advance)
            manifest = builder.finish(ingest.rows, origin, ingest.text)
        self.progress.done()
        return manifest

    def _origin(self) -> Origin:
        documents = dict(self.facts.documents)
        if self.facts.env_metadata is not None:
            documents[ENV_METADATA] = env_metadata_bytes(self.facts.env_metadata)
        few = len(self._inputs) <= _FEW_INPUTS
        inputs = self._inputs if few else {f"{len(self._inputs)} files": self._revision}
        return Origin(
            request=self.request,
            provenance=(provenance_step(self.verb, self.arguments, inputs),),
            resolved_revision=self._revision,
            spaces=self.facts.spaces,
            renamed_keys=self.facts.renamed_keys,
            dropped_keys=self.facts.dropped_keys,
            notes=self.facts.notes,
            documents=documents,
        )

    def _of_manifest(self, manifest: Manifest, *, already_there: bool) -> dict[str, Any]:
        return self._entries(manifest.bytes, manifest.content_digest, manifest.boundary, already_there=already_there)

    def _entries(
        self, size: int, digest: str | None, boundary: BoundaryCounts, *, already_there: bool
    ) -> dict[str, Any]:
        return {
            "path": self.destination,
            "layout": "ted",
            "steps": self.facts.steps,
            "episodes": len(self.facts.episode_numbers),
            "bytes": size,
            "content_digest": digest,
            "boundary": boundary.to_dict(),
            "renamed_keys": dict(self.facts.renamed_keys),
            "dropped_keys": tuple(asdict(dropped) for dropped in self.facts.dropped_keys),
            "notes": self.facts.notes,
            "request": asdict(self.request),
            "already_there": already_there,
        }


def _shown(request: Request) -> str:
    episodes = f", episodes {request.episodes}" if request.episodes else ""
    return f"{request.source}:{request.id}{episodes}"
