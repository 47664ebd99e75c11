"""From a reader to a published dataset: what `convert` and `download` share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format import (
    ENV_METADATA,
    HIDDEN,
    Ingest,
    Layout,
    Manifest,
    Origin,
    PackedSchema,
    Reader,
    Request,
    SourceFacts,
    Staging,
    decode,
    digest_text,
    dump_json,
    env_metadata_bytes,
    fs,
    load_json,
    mend,
    parse_codecs,
    parse_episodes,
    provenance_step,
    require_apart,
    row_builder,
)
from ..progress import Progress
from ..remote import matches
from ..ted import Field, ted_fields
from .layouts import refuse_other_compression, require_layout, rows_bytes
from .results import published_entries, seconds_since, standing, taken

__all__ = ["SourceConversion", "facts_of", "fetched_checksums", "unverified_versions"]

_EPISODE_BYTES = 64  # what a row of the episode table takes, roughly
_CHECKSUMS = "checksums.json"  # where those of a remote lie that are too many for the provenance
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

    `arguments` are recorded in the provenance of the result; the layout is the request's. `compress` says how some
    fields are compressed there. `root` is the storage root above the destination, if any: then the path to it
    contains no link. `inputs` are the digests of the source's files and `revision` the state of the source, where a
    remote gives them; else they are taken from the files.
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
    inputs: Mapping[str, str] | None = None
    revision: str | None = None
    compress: tuple[str, ...] = ()
    root: Path | None = None

    def run(self) -> dict[str, Any]:
        """Convert, unless an equal dataset is there already; return the entries of a `Published`.

        Raises UsageError if something else is there and `force` is off, OutOfSpaceError before anything is written
        if the result cannot fit.
        """
        begun = time.perf_counter()
        require_apart(self.source, self.destination)
        codecs = parse_codecs(self.compress, self._fields)
        if codecs or self._layout == "packed":
            PackedSchema.of(self._fields, codecs)  # refuses what cannot be, before anything is done
        if not self.dry_run:
            mend(self.destination)
        manifest = None if self.force else self._standing()
        already_there = manifest is not None
        if manifest is None:
            Staging(self.destination, replace=self.force, below=self.root).refuse_if_taken()
            fs.require_space(self.destination.parent, self._expected_bytes + _SMALL_FILES)
            if self.dry_run:
                return self._estimate() | {"seconds": seconds_since(begun)}
            manifest, already_there = self._convert()
        entries = published_entries(manifest, self.destination, begun)
        return entries | {"already_there": already_there, "dry_run": self.dry_run}

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        return ted_fields(self.facts.fields)

    @property
    def _layout(self) -> Layout:
        return require_layout(self.request.layout, self.compress)

    @cached_property
    def _inputs(self) -> Mapping[str, str]:
        return self.reader.digests() if self.inputs is None else self.inputs

    @cached_property
    def _revision(self) -> str:
        """Which state of the source this is: what a remote calls it, else one digest over the source's files."""
        return self.revision or digest_of_inputs(self._inputs)

    @cached_property
    def _expected_bytes(self) -> int:
        documents = sum(map(len, self.facts.documents.values()))
        episodes = _EPISODE_BYTES * len(self.facts.episode_numbers)
        return (
            rows_bytes(self._fields, self._layout, self.facts.steps, len(self.facts.episode_numbers))
            + episodes
            + documents
        )

    def _standing(self) -> Manifest | None:
        """Return the manifest of the equal dataset at the destination; None if the place is free."""
        manifest = standing(self.destination, self.request)
        if manifest is not None and not self._is_of_this_state(manifest):
            raise taken(self.destination, "was made from another state of the source")
        if manifest is not None and manifest.provenance:
            refuse_other_compression(self.destination, manifest, self.compress)
        return manifest

    def _is_of_this_state(self, manifest: Manifest) -> bool:
        if manifest.resolved_revision == self._revision:
            return True
        fetched = fetched_checksums(self.destination, manifest)  # see whether these files have them
        if not fetched or (self.request.episodes is None and len(fetched) != len(self._inputs)):
            return False
        return all(_is_as_fetched(self.source / name, checksum) for name, checksum in fetched.items())

    def _estimate(self) -> dict[str, Any]:
        table = self.reader.episode_table(self.facts.episode_numbers)
        return {
            "path": self.destination,
            "layout": self._layout,
            "steps": self.facts.steps,
            "episodes": len(self.facts.episode_numbers),
            "bytes": self._expected_bytes,
            "content_digest": None,
            "boundary": table.counts().to_dict(),
            "renamed_keys": dict(self.facts.renamed_keys),
            "dropped_keys": tuple(asdict(dropped) for dropped in self.facts.dropped_keys),
            "notes": self.facts.notes,
            "request": self.request.to_dict(),
            "dry_run": True,
        }

    def _convert(self) -> tuple[Manifest, bool]:
        """Build and publish; return what stands there then, and whether it did already."""
        with contextlib.ExitStack() as stack:
            try:
                staging = stack.enter_context(Staging(self.destination, replace=self.force, below=self.root))
            except UsageError:
                there = None if self.force else self._standing()  # another process may have made the very same
                if there is None:
                    raise
                return there, True
            manifest = self._build(staging.path)
            if staging.publish():
                return manifest, False
            there = None if self.force else self._standing()
            if there is None or there.content_digest != manifest.content_digest:
                raise taken(self.destination, "was put there by another process just now")
            return there, True

    def _build(self, folder: Path) -> Manifest:
        origin = self._origin()
        codecs = parse_codecs(self.compress, self._fields)
        with row_builder(folder, self._fields, self._layout, codecs) as builder:
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
        if self.inputs is not None and len(self.inputs) > _FEW_INPUTS:
            documents[_CHECKSUMS] = dump_json(self.inputs, indent=1).encode()
        return Origin(
            request=self.request,
            provenance=(provenance_step(self.verb, self.arguments, _recorded_inputs(self._inputs)),),
            resolved_revision=self._revision,
            spaces=self.facts.spaces,
            renamed_keys=self.facts.renamed_keys,
            dropped_keys=self.facts.dropped_keys,
            notes=self.facts.notes,
            documents=documents,
        )


def _is_as_fetched(file: Path, checksum: str) -> bool:
    return file.is_file() and matches(file, file.stat().st_size, checksum)


def fetched_checksums(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return the remote's checksums of the files that a dataset was made from, by their paths; {} if unknown."""
    if manifest.request.origin != "remote" or not manifest.provenance:
        return {}
    listed = folder / HIDDEN / "source" / _CHECKSUMS
    if not listed.is_file():
        return dict(manifest.provenance[0].inputs)
    return decode(dict[str, str], load_json(listed), str(listed))


def unverified_versions(manifest: Manifest) -> dict[str, str | None]:
    """Return the versions of the files that a dataset was made from and for which the remote gave no checksum."""
    if manifest.request.origin != "remote" or not manifest.provenance:
        return {}
    recorded = manifest.provenance[0].arguments.get("unverified", {})
    return decode(dict[str, str | None], recorded, "the provenance of the dataset")


def digest_of_inputs(inputs: Mapping[str, str]) -> str:
    """One digest over the digests of a source's files."""
    return digest_text("".join(f"{name}\0{digest}\n" for name, digest in sorted(inputs.items())))


def _recorded_inputs(inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs as the provenance has them: each by name, or one digest over all of many."""
    few = len(inputs) <= _FEW_INPUTS
    return dict(inputs) if few else {f"{len(inputs)} files": digest_of_inputs(inputs)}
