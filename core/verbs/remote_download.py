"""Download of a dataset from a remote into the storage root, without the network if an equal one is stored."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..encodings.pickles import require_trust
from ..errors import DatasetNotFoundError, FormatError, NetworkError, RbtoolError, UsageError
from ..format import fs
from ..format.episodes import expected_episodes, normal_form, parse_episodes, select_episodes
from ..format.locate import KnownNames, Resolution, dataset_folder, reader_class, substitution_text
from ..format.manifest import Layout, Manifest, Request
from ..format.packed.row_files import parse_codecs
from ..format.reader import FinalStep
from ..format.sources import RemoteDataset, Source, StaleListing
from ..format.staging import Staging, mend
from ..progress import Progress, counted, readable_size
from ..remote.catalogue import is_complete, not_found, resolve
from ..remote.originals import Originals
from ..results import (
    PICKLED,
    content_options,
    existing_result,
    final_step_arguments,
    layout_arguments,
    published_entries,
    seconds_since,
)
from .source_conversion import (
    SourceConversion,
    compared_with,
    facts_of,
    hinting_at_skip_bad,
    require_unchanged,
    unverified_note,
    versions_of,
)

_PARTLY = "fields and the widths of texts are those of the chosen episodes: the files of the others were not fetched"
_NUMBERS_UNKNOWN = (
    "the remote gives the count of its episodes and not their numbers: which of them --episodes takes is known once "
    "they are fetched"
)
_COMMIT = re.compile(r"@([0-9a-f]{7})[0-9a-f]{33}\b")


@dataclass(frozen=True, slots=True)
class Fetch:
    """A transfer: `files` and `bytes` in total, `bytes_present` already there, `bytes_free` on the disk."""

    files: int
    bytes: int
    bytes_present: int
    bytes_free: int


@dataclass(frozen=True, kw_only=True)
class RemoteDownload:
    """One request to a remote; `run` uses the network only for what is not stored."""

    source: Source
    asked: str
    root: Path
    episodes: str | None
    revision: str | None
    layout: Layout
    compress: tuple[str, ...]
    force: bool
    dry_run: bool
    keep_source: bool
    exact_id: bool
    frozen: bool
    progress: Progress
    final_step: FinalStep = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of the reader, and `skip_bad` if it is set."""
    num_workers: int = 0

    @property
    def _normal(self) -> str | None:
        """The selection of episodes in normal form, by which requests are compared."""
        return normal_form(self.episodes) if self.episodes else None

    def run(self) -> dict[str, Any]:
        """Return the entries of a `DownloadResult`, but for `source` and `asked`."""
        started = time.perf_counter()
        if self.frozen and self.force:
            raise UsageError("--frozen keeps the stored one and --force replaces it", hint="leave one out")
        found, there = self._remembered()
        if found is None:
            found = self._find()
            there = self._existing(found)
        if self.frozen:
            self._require_unchanged(there, found, self.revision)
        if there is None:
            return self._fetch_and_convert(found, started)
        if self.keep_source and not self.dry_run and not self._kept(found):
            return self._there(there, found, started) | self._keep(there, found)
        return self._there(there, found, started)

    # Names -----------------------------------------------------------------------------------------

    def _remembered(self) -> tuple[Resolution | None, Manifest | None]:
        """Resolve the id and find the stored dataset without the network; (None, None) if that is not possible."""
        known = [Resolution(self.asked, self.asked, "exact")]
        before = None if self.exact_id else KnownNames(self.root, self.source.name).get(self.asked)
        for found in (*known, *([before] if before else [])):
            there = self._existing(found)
            if there is not None:
                self._note_resolution(found, remembered=True)
                return found, there
        return None, None

    def _find(self) -> Resolution:
        """Resolve the id, with the names of the remote if necessary."""
        named = self.source.open_ended and "/" in self.asked
        if self.exact_id or named or is_complete(self.asked, namespaced=self.source.namespaced):
            return Resolution(self.asked, self.asked, "exact")
        if set(self.asked) & set("*?["):
            raise UsageError(
                f"{self.asked!r} is a pattern, and one dataset at a time is downloaded",
                hint=f"see what fits: rbtool list --remote {self.source.name} '{self.asked}'",
            )
        self.progress.note(f"asking {self.source.remote} for its names")
        listed = self.source.ids()
        if self.asked in listed.ids:
            return Resolution(self.asked, self.asked, "exact")
        if listed.unreachable:  # the match may be among the names that could not be read
            raise NetworkError(
                f"{self.asked!r} cannot be matched with the names of {self.source.remote}: {listed.problems[0]}",
                hint="try again later, or give the id in full",
            )
        for problem in listed.problems:
            self.progress.note(f"passed over: {problem}")
        found = resolve(self.asked, listed.ids, self.source.name)
        self._note_resolution(found)
        if not self.dry_run:
            with contextlib.suppress(OSError, UsageError):  # only a cache of names
                KnownNames(self.root, self.source.name).put(found)
        return found

    def _note_resolution(self, found: Resolution, *, remembered: bool = False) -> None:
        if found.how == "words":
            substitution = substitution_text(found.asked, found.id, before=remembered)
            self.progress.note(f"{substitution} (disable with --exact-id)")
        elif found.how == "latest" and remembered:
            self.progress.note(f"the latest version of {found.asked} was {found.id} when it was fetched")
        elif found.how == "latest":
            self.progress.note(f"the latest version of {found.asked} is {found.id}")

    # What is there ---------------------------------------------------------------------------------

    def _request(self, found: Resolution) -> Request:
        asked = f"{self.source.name}:{found.asked}"
        return Request(
            self.source.name, asked, found.id, self.revision, self._normal,
            self.layout, "remote", self.final_step, content_options(self.source, self.options),
        )  # fmt: skip

    def _destination(self, found: Resolution) -> Path:
        return dataset_folder(self._request(found), self.root)

    def _existing(self, found: Resolution) -> Manifest | None:
        if self.force:
            return None
        if not self.dry_run:
            mend(self._destination(found))
        return existing_result(self._destination(found), self._request(found))

    def _there(self, manifest: Manifest, found: Resolution, started: float) -> dict[str, Any]:
        """Return the entries of the existing dataset."""
        first = manifest.provenance[0].arguments if manifest.provenance else {}
        entries = published_entries(manifest, self._destination(found), started)
        return {
            **entries,
            "notes": (*entries["notes"], *self._compressed_otherwise(manifest)),
            "already_there": True,
            "dry_run": self.dry_run,
            "id": found.id,
            "resolved": found.how,
            "fetched_from": str(first.get("from", "")),
            "originals": self._originals(found).files if self._kept(found) else None,
        }

    def _compressed_otherwise(self, manifest: Manifest) -> list[str]:
        """Return a note if the stored dataset is compressed in another way; UsageError for an unknown field."""
        parse_codecs(self.compress, manifest.fields)
        stored = manifest.provenance[-1].arguments.get("compress", []) if manifest.provenance else []
        if self.layout != "packed" or stored == sorted(self.compress):
            return []
        how = f"with --compress {' '.join(stored)}" if stored else "without compression"
        return [f"already stored {how}; --force converts it again"]

    def _require_unchanged(self, manifest: Manifest | None, found: Resolution, revision: str | None) -> None:
        """Raise CheckFailed unless the remote has, at a revision, the files that the dataset was made from."""
        if manifest is None:
            raise DatasetNotFoundError(
                f"--frozen compares the remote with what is stored, and {self._destination(found)} is not there",
                hint="leave out --frozen to fetch it",
            )
        require_unchanged(manifest, self._destination(found), lambda: self._needed(self._describe(found, revision)))

    # Fetching --------------------------------------------------------------------------------------

    def _originals(self, found: Resolution) -> Originals:
        return Originals(self.root, self.source.name, found.id)

    def _kept(self, found: Resolution) -> bool:
        """Return whether all originals that this request needs are present and kept."""
        originals = self._originals(found)
        with contextlib.suppress(FormatError, UsageError):
            record = originals.record()
            if record is not None and record.kept:
                wanted = self._needed(record.dataset()).files
                return all(file.path in record.asked and originals.has(file) for file in wanted)
        return False

    def _describe(self, found: Resolution, revision: str | None, *, totals: bool = False) -> RemoteDataset:
        try:
            return self.source.describe(found.id, revision, totals=totals or self.episodes is not None)
        except DatasetNotFoundError as error:
            if error.hint:
                raise
            try:
                listed = self.source.ids()
            except RbtoolError:
                raise error from None
            if found.id in listed.ids:
                raise
            raise not_found(found.id, listed.ids, self.source.name) from error

    def _needed(self, remote: RemoteDataset) -> RemoteDataset:
        """Return the remote dataset reduced to the files and episodes that this request needs.

        Raises UsageError for episodes that it cannot have. If the remote gives only their count, the conversion checks
        the rest: numbers can have gaps, so the largest need not be the count minus one.
        """
        chosen = None if self.episodes is None else parse_episodes(self.episodes)
        files = tuple(self.source.needed(remote, chosen, self.options))
        if chosen is None:
            return replace(remote, files=files)
        numbers, count = self.source.episode_numbers(remote), remote.episodes
        if numbers is not None:
            count = len(select_episodes(chosen, numbers))
        elif count is not None:
            count = expected_episodes(chosen, count)
        return replace(remote, files=files, episodes=count, steps=None)

    def _fetch_and_convert(self, found: Resolution, started: float) -> dict[str, Any]:
        Staging(self._destination(found), replace=self.force, below=self.root).refuse_if_taken()
        if self.dry_run:
            return self._estimate(found, started)
        if self.source.pickled:
            require_trust(Path(found.id), self.options.get("trust_pickle"), PICKLED)
        originals = self._originals(found)
        with originals.lock(lambda: self._note_waiting(found)):
            there = self._existing(found)  # the previous holder of the lock may have made it
            if there is not None:
                return self._there(there, found, started)
            remote, fetch = self._fetch(found, originals, self.revision)
            try:
                entries = self._convert(found, remote, originals)
            except UsageError as error:
                error.hint = error.hint or "what was fetched is kept: run it again"
                raise
            kept = self._kept(found)
            if not kept:
                originals.discard(self.progress.note)
        return entries | {
            "id": found.id,
            "resolved": found.how,
            "fetched_from": remote.address,
            "fetch": fetch,
            "originals": originals.files if kept else None,
            "seconds": seconds_since(started),
        }

    def _keep(self, manifest: Manifest, found: Resolution) -> dict[str, Any]:
        """Fetch and keep the originals of an existing dataset, in the revision it was made from."""
        commit = _COMMIT.fullmatch(f"@{manifest.resolved_revision}")
        revision = manifest.resolved_revision if commit else self.revision
        self._require_unchanged(manifest, found, revision)
        originals = self._originals(found)
        with originals.lock(lambda: self._note_waiting(found)):
            fetch = self._fetch(found, originals, revision)[1]
        return {"fetch": fetch, "originals": originals.files}

    def _fetch(self, found: Resolution, originals: Originals, revision: str | None) -> tuple[RemoteDataset, Fetch]:
        """Fetch the needed originals; once more if the remote changes during the fetch."""
        try:
            try:
                return self._fetch_listed(self._describe(found, revision), originals)
            except StaleListing as error:
                self.progress.note(f"the remote changed while it was fetched ({error}): looking again")
                return self._fetch_listed(self._describe(found, revision), originals)
        except NetworkError as error:
            if originals.has_any():
                error.hint = error.hint or "run it again: what came so far is kept"
            raise

    def _fetch_listed(self, whole: RemoteDataset, originals: Originals) -> tuple[RemoteDataset, Fetch]:
        remote = self._needed(whole)
        fetch = self._fetch_ahead(remote, originals)
        originals.begin(whole, remote.paths, kept=self.keep_source)
        self.progress.note(_announcement(fetch, remote.address))
        sized = all(file.size is not None for file in remote.files)
        self.progress.start("fetching", remote.bytes if sized else None, "bytes")
        self.source.fetch(remote.files, originals.files, progress=self.progress.advance, note=self.progress.note)
        self.progress.done(compared_with(remote))
        return remote, fetch

    def _fetch_ahead(self, remote: RemoteDataset, originals: Originals) -> Fetch:
        present = originals.present(remote)
        # The dataset is rarely smaller than half of the originals, and both exist at the same time.
        fs.require_space(self.root, max(0, remote.bytes - present) + remote.bytes // 2)
        return Fetch(len(remote.files), remote.bytes, present, fs.free_space(self.root))

    def _note_waiting(self, found: Resolution) -> None:
        self.progress.note(f"another process is fetching {found.id}: waiting for it")

    def _convert(self, found: Resolution, remote: RemoteDataset, originals: Originals) -> dict[str, Any]:
        arguments = {
            "source": self.source.name, "id": found.id, "asked": found.asked, "resolved": found.how,
            "from": remote.address, "episodes": self._normal, "revision": self.revision,
            **layout_arguments(self.layout, self.compress), **final_step_arguments(self.final_step),
            **self.options,
        }  # fmt: skip
        received = originals.take_digests(remote.unverified)
        if received:
            arguments["unverified"] = versions_of(remote)
        options = {**self.source.reader_options(found.id), **self.options}
        skip_bad = bool(options.pop("skip_bad", False))
        with (
            originals.only(remote.paths) as folder,
            reader_class(self.source.name)(folder, final_step=self.final_step, options=options) as reader,
            hinting_at_skip_bad(reader, possible=not skip_bad),
        ):
            facts = facts_of(reader, self.episodes, self.progress, skip_bad=skip_bad, num_workers=self.num_workers)
            notes = [f"the dataset calls itself {facts.id}"] if facts.id != found.id else []
            notes += [_PARTLY] if self._is_part(originals, remote) else []
            notes += [unverified_note(remote)] if received else []
            facts = replace(facts, notes=(*facts.notes, *notes))
            return SourceConversion(
                reader=reader,
                facts=facts,
                source=folder,
                destination=self._destination(found),
                request=self._request(found),
                verb="download",
                arguments=arguments,
                force=self.force,
                dry_run=False,
                progress=self.progress,
                inputs=dict(sorted((remote.checksums | received).items())) if received else remote.checksums,
                revision=remote.revision,
                compress=self.compress,
                root=self.root,
                num_workers=self.num_workers,
            ).run()

    def _is_part(self, originals: Originals, remote: RemoteDataset) -> bool:
        record = originals.record()
        return record is not None and len(remote.files) < len(self.source.needed(record.dataset(), None, self.options))

    def _estimate(self, found: Resolution, started: float) -> dict[str, Any]:
        """Return the entries of a dry run: what would be fetched, and what the remote records about it."""
        whole = self._describe(found, self.revision, totals=True)
        remote = self._needed(whole)
        unknown = self.episodes is not None and self.source.episode_numbers(whole) is None
        fetch = self._fetch_ahead(remote, self._originals(found))
        return {
            "path": self._destination(found), "layout": self.layout, "request": self._request(found).to_dict(),
            "steps": remote.steps or 0, "episodes": remote.episodes or 0, "bytes": 0, "content_digest": None,
            "boundary": {}, "renamed_keys": {}, "dropped_keys": (), "notes": (_NUMBERS_UNKNOWN,) if unknown else (),
            "id": found.id, "resolved": found.how, "fetched_from": remote.address, "fetch": fetch,
            "dry_run": True, "seconds": seconds_since(started),
        }  # fmt: skip


def _announcement(fetch: Fetch, address: str) -> str:
    files = counted(fetch.files, "file")
    there = f", {readable_size(fetch.bytes_present)} of it is there already" if fetch.bytes_present else ""
    short = _COMMIT.sub(r"@\1", address)
    return f"{files}, {readable_size(fetch.bytes)}, from {short}{there}; {readable_size(fetch.bytes_free)} free"
