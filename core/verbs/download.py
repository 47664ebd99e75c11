"""`download`: fetch a dataset of a known source by id and store it as TED below the root.

A dataset comes from the remote of its source or from the local cache of the source's own library (`SourceDownload`), or
from a Hugging Face hub to which `upload` sent it; then its files are stored unchanged (`HubDownload`).
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ..declarations import declared, default_layout, example_source
from ..errors import (
    CheckFailed,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    RbtoolError,
    UsageError,
    nearest,
)
from ..format import fs
from ..format.converter import (
    FinalStep,
    Reader,
    RemoteDataset,
    RemoteFile,
    Source,
    StaleListing,
    require_final_step,
    require_trust,
    safe_id,
)
from ..format.documents import parse_json, written_time
from ..format.episodes import expected_episodes, normal_form, parse_episodes, select_episodes
from ..format.locate import (
    HUB,
    KnownNames,
    Resolution,
    dataset_folder,
    is_hub_address,
    reader_class,
    source_class,
    source_names,
    storage_root,
    substitution_text,
)
from ..format.manifest import MANIFEST, TRANSFERS, Layout, Manifest, Request, has_manifest, is_canonical
from ..format.open_files import ListedFiles
from ..format.packed.schema import named_codecs, parse_codecs
from ..format.staging import Outcome, Publication, Staging, remove_at_once, sweep
from ..open_steps import open_steps
from ..options import takes
from ..progress import Progress, counted, readable_size
from ..remote.catalogue import is_complete, not_found, resolve
from ..remote.fetch import fetch_files
from ..remote.hub import Hub, HubFile, hub_endpoint
from ..remote.hub_address import HubAddress, Transfer, add_transfer, transfers_of
from ..remote.originals import Originals
from ..remote.transport import matches, read_small
from ..results import (
    PICKLED,
    Published,
    content_options,
    existing_result,
    final_step_arguments,
    given_options,
    layout_arguments,
    occupied_error,
    published_entries,
    require_layout,
    require_workers,
    seconds_since,
)
from .convert import (
    SourceConversion,
    choose_episodes,
    compared_with,
    hinting_at_skip_bad,
    require_unchanged,
    unverified_note,
    versions_of,
)
from .options import DownloadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadResult(Published):
    """The dataset at `path`.

    `id` is the dataset of `source`; `asked` is the requested name, and `resolved` how it was resolved: `exact`,
    `latest` (the version was filled in), `words` (another name with the same words). `fetched_from` is the address of
    the original, for display. `fetch` describes the transfer, None if nothing was transferred. `originals` is the
    folder of the original files, if they are kept.
    """

    kind: ClassVar[str] = "download"
    source: str
    id: str
    asked: str
    resolved: str
    fetched_from: str
    fetch: Fetch | None = None
    originals: Path | None = None


@takes(DownloadOptions)
def download(asked: DownloadOptions) -> DownloadResult:
    """Fetch a dataset of a source, verify it, and convert it into `<root>/<source>/<id>`.

    A dataset that an equal request has stored is returned without using the network. An interrupted fetch resumes when
    the request is repeated.

    Args:
        source: the name of the source; `"source:ID"`; or `"hf://OWNER/NAME@REVISION"` for a dataset that `upload` sent
            to a hub: its files are stored unchanged in `<root>/hf/OWNER/NAME`, and options of a conversion are refused.
        id: the dataset. Without its version, the latest one is taken. An old name without a namespace, like
            `door-human-v1`, stands for the dataset whose id has the same words. The result states both in `resolved`.
        local: take the original from the source's own local cache, by exact id and without the network.
        root: where datasets are stored.
        episodes, layout, final_step, skip_bad: as in `convert`. A dataset that differs in one of them, in `revision` or
            in an option of its format is stored separately, at `<id>@<8 hex digits>`.
        compress: as in `convert`. A stored dataset with another compression is kept, with a note, unless `force` is
            set.
        revision: a branch, tag or commit of the remote.
        exact_id: take `id` as it is.
        frozen: fail if the files of the remote differ from those that the stored dataset was made from.
        keep_source: keep the original files.
        num_workers, force, dry_run, progress: as in `convert`.
        horizon, ends, filter_key, reward, map, episode_key, files, images, jpeg, trust_pickle, rlds_last: for some
            formats only, as in `convert`.

    Returns:
        What is stored, and what was transferred.

    Raises:
        UsageError: the source is unknown, or the id could leave its folder or may mean several datasets.
        DatasetNotFoundError: the remote has no such dataset; the message names the nearest.
        NetworkError, AuthorisationError: the remote cannot be reached, or refuses.
        CheckFailed: `frozen` is set and the files of the remote have changed.
        CorruptDataError: the bytes do not match the remote's checksums after retries.
        FormatError, OutOfSpaceError: as in `convert`.
    """
    if asked.frozen and asked.force:
        raise UsageError("--frozen keeps the stored dataset and --force replaces it", hint="leave one out")
    given = given_options(asked.of_reader())
    address = hub_address(asked.source, asked.id, asked.revision)
    if address is not None:
        _refuse_conversions(address, asked, given)
        with Hub() as hub:
            return DownloadResult(**HubDownload(asked, hub, address, storage_root(asked.root)).run())
    source, name = _named(asked.source, asked.id)
    origin = source_class(source)()
    safe_id(name)
    chosen = asked.episodes if asked.episodes is not None and normal_form(asked.episodes) else None
    wanted = require_layout(asked.layout or default_layout(source), asked.compress)
    named_codecs(tuple(asked.compress))  # fails early on methods that are invalid for any field
    ends = require_final_step(asked.final_step)
    require_workers(asked.num_workers)
    fetching = SourceDownload(asked, origin, name, storage_root(asked.root), chosen, wanted, ends, given)
    if asked.local:
        _refuse_remote_options(asked)
        return DownloadResult(**fetching.from_cache(), source=source, asked=name)
    with origin, fetching.hinting_at_cache():
        return DownloadResult(**fetching.run(), source=source, asked=name)


def _refuse_conversions(address: HubAddress, asked: DownloadOptions, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options that would change the files of a dataset from the hub."""
    names = ("local", "episodes", "layout", "compress", "exact_id", "keep_source", "num_workers", "skip_bad")
    found = [name for name in names if getattr(asked, name)] + [name for name in given if given[name]]
    found += ["final_step"] if asked.final_step != "auto" else []
    if found:
        raise UsageError(
            f"{address} is stored unchanged, and --{found[0].replace('_', '-')} needs a conversion",
            hint=f"download it without that, then convert it: rbtool convert {HUB}:{address.repository} DEST",
        )


def _named(source: str, dataset_id: str | None) -> tuple[str, str]:
    """Return source and id; either argument may have the form `source:id`."""
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


def _refuse_remote_options(asked: DownloadOptions) -> None:
    for name in ("revision", "keep_source", "frozen"):
        if getattr(asked, name):
            raise UsageError(
                f"--{name.replace('_', '-')} needs the remote, which --local does not use", hint="leave one out"
            )


def _origin(entries: Mapping[str, Any], original: Path) -> str:
    """Return where a dataset comes from; one that was stored before may come from the remote."""
    if entries["request"]["origin"] == "remote":
        steps = Manifest.load(entries["path"]).provenance
        return str(steps[0].arguments.get("from", "")) if steps else ""
    return str(original)


_PARTLY = "fields and the widths of texts come from the chosen episodes; the files of the others were not fetched"
_NUMBERS_UNKNOWN = (
    "the remote gives the count of its episodes but not their numbers: --episodes can be resolved only once they are "
    "fetched"
)
_COMMIT = re.compile(r"@([0-9a-f]{7})[0-9a-f]{33}\b")


@dataclass(frozen=True, slots=True)
class Fetch:
    """A transfer: `files` and `bytes` in total, `bytes_present` already there, `bytes_free` on the disk."""

    files: int
    bytes: int
    bytes_present: int
    bytes_free: int


@dataclass(frozen=True)
class SourceDownload:
    """The download of the dataset `name` of a source, below `root`; `given` are the options of the reader.

    `run` uses the remote, unless the dataset is stored; `from_cache` takes the original from the source's own cache.
    """

    asked: DownloadOptions
    source: Source
    name: str
    root: Path
    episodes: str | None
    layout: Layout
    final_step: FinalStep
    given: Mapping[str, Any]

    @property
    def _progress(self) -> Progress:
        return self.asked.reporter

    @property
    def _recorded(self) -> Mapping[str, Any]:
        """The options that a request records: the reader's, and `skip_bad` if it is set."""
        return {**self.given, **self.asked.recorded()}

    @property
    def _normal(self) -> str | None:
        """The selection of episodes in normal form, by which requests are compared."""
        return normal_form(self.episodes) if self.episodes else None

    def _arguments(self, first: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for the provenance, `first` among them."""
        layout = layout_arguments(self.layout, self.asked.compress)
        return {**first, **layout, **final_step_arguments(self.final_step), **self._recorded}

    def from_cache(self) -> dict[str, Any]:
        """Convert from the local cache; return the entries of a `DownloadResult`, except `source` and `asked`."""
        source = self.source
        if source.local_cache is None:
            raise UsageError(f"{source.name} has no local cache of its own", hint="leave out --local")
        original = source.local_cache.find(self.name, reader_class(source.name))
        request = Request(
            source.name, f"{source.name}:{self.name}", self.name, None, self._normal, self.layout, "local",
            self.final_step, content_options(source, self._recorded),
        )  # fmt: skip
        arguments = {"source": source.name, "id": self.name, "local": True, "episodes": self._normal}
        with self._reader(original, self.name) as reader:
            facts = choose_episodes(reader, self.episodes, self.asked)
            if facts.id != self.name:
                facts = replace(facts, notes=(*facts.notes, f"the dataset calls itself {facts.id}"))
            entries = SourceConversion(
                self.asked, reader, facts, original, dataset_folder(request, self.root), request,
                self._arguments(arguments), root=self.root,
            ).run()  # fmt: skip
        return entries | {"id": self.name, "resolved": "exact", "fetched_from": _origin(entries, original)}

    @contextlib.contextmanager
    def _reader(self, path: Path, dataset_id: str) -> Iterator[Reader]:
        options = {**self.source.reader_options(dataset_id), **self.given}
        with (
            reader_class(self.source.name)(path, final_step=self.final_step, options=options) as reader,
            hinting_at_skip_bad(reader, self.asked),
        ):
            yield reader

    @contextlib.contextmanager
    def hinting_at_cache(self) -> Iterator[None]:
        """Suggest `--local` in network errors if the source's own cache has the dataset."""
        try:
            yield
        except NetworkError as error:
            cache, asked = self.source.local_cache, self.asked
            if cache is None or asked.revision or asked.keep_source or asked.frozen:
                raise
            with contextlib.suppress(RbtoolError, OSError):
                found = resolve(self.name, list(cache.ids(reader_class(self.source.name))), self.source.name).id
                line = shlex.join(["rbtool", "download", self.source.name, found, "--local"])
                error.hint = "; ".join(filter(None, (error.hint, f"{cache.folder} has it: {line}")))
            raise

    def run(self) -> dict[str, Any]:
        """Fetch and convert the dataset unless it is stored; return the entries of the result, as `from_cache` does."""
        started = time.perf_counter()
        found, there = self._remembered()
        if found is None:
            found = self._find()
            there = self._existing(found)
        if self.asked.frozen:
            self._require_unchanged(there, found, self.asked.revision)
        if there is None:
            return self._fetch_and_convert(found, started)
        if self.asked.keep_source and not self.asked.dry_run and not self._kept(found):
            return self._stored_entries(there, found, started) | self._keep(there, found)
        return self._stored_entries(there, found, started)

    # Names -----------------------------------------------------------------------------------------

    def _remembered(self) -> tuple[Resolution | None, Manifest | None]:
        """Resolve the id and find the stored dataset without the network; (None, None) if that is not possible."""
        known = [Resolution(self.name, self.name, "exact")]
        before = None if self.asked.exact_id else KnownNames(self.root, self.source.name).get(self.name)
        for found in (*known, *([before] if before else [])):
            there = self._existing(found)
            if there is not None:
                self._note_resolution(found, remembered=True)
                return found, there
        return None, None

    def _find(self) -> Resolution:
        """Resolve the id; fetch the names of the remote if necessary."""
        named = self.source.open_ended and "/" in self.name
        if self.asked.exact_id or named or is_complete(self.name, namespaced=self.source.namespaced):
            return Resolution(self.name, self.name, "exact")
        if set(self.name) & set("*?["):
            raise UsageError(
                f"{self.name!r} is a pattern, expected the id of one dataset",
                hint=f"list the datasets that match: rbtool list --remote {self.source.name} '{self.name}'",
            )
        self._progress.note(f"fetching the dataset names of {self.source.remote}")
        listed = self.source.ids()
        if self.name in listed.ids:
            return Resolution(self.name, self.name, "exact")
        if listed.unreachable:  # the right name may be among those that could not be read
            raise NetworkError(
                f"{self.name!r} cannot be matched with the names of {self.source.remote}: {listed.problems[0]}",
                hint="try again later, or give the id in full",
            )
        for problem in listed.problems:
            self._progress.note(f"skipped: {problem}")
        found = resolve(self.name, listed.ids, self.source.name)
        self._note_resolution(found)
        if not self.asked.dry_run:
            with contextlib.suppress(OSError, UsageError):  # only a cache of names
                KnownNames(self.root, self.source.name).put(found)
        return found

    def _note_resolution(self, found: Resolution, *, remembered: bool = False) -> None:
        if found.how == "words":
            substitution = substitution_text(found.asked, found.id, before=remembered)
            self._progress.note(f"{substitution} (disable with --exact-id)")
        elif found.how == "latest" and remembered:
            self._progress.note(f"the latest version of {found.asked} was {found.id} when it was fetched")
        elif found.how == "latest":
            self._progress.note(f"the latest version of {found.asked} is {found.id}")

    # Stored datasets -------------------------------------------------------------------------------

    def _request(self, found: Resolution) -> Request:
        asked = f"{self.source.name}:{found.asked}"
        return Request(
            self.source.name, asked, found.id, self.asked.revision, self._normal,
            self.layout, "remote", self.final_step, content_options(self.source, self._recorded),
        )  # fmt: skip

    def _destination(self, found: Resolution) -> Path:
        return dataset_folder(self._request(found), self.root)

    def _publication(self, found: Resolution) -> Publication[Manifest]:
        destination = self._destination(found)
        return Publication(
            staging=Staging(destination, replace=self.asked.force, below=self.root),
            find=lambda: existing_result(destination, self._request(found)),
            dry_run=self.asked.dry_run,
        )

    def _existing(self, found: Resolution) -> Manifest | None:
        there = self._publication(found).existing()
        return None if there is None else there.content

    def _stored_entries(self, manifest: Manifest, found: Resolution, started: float) -> dict[str, Any]:
        """Return the entries of the existing dataset."""
        first = manifest.provenance[0].arguments if manifest.provenance else {}
        entries = published_entries(manifest, self._destination(found), started)
        return {
            **entries,
            "notes": (*entries["notes"], *self._compressed_otherwise(manifest)),
            "already_there": True,
            "dry_run": self.asked.dry_run,
            "id": found.id,
            "resolved": found.how,
            "fetched_from": str(first.get("from", "")),
            "originals": self._originals(found).files if self._kept(found) else None,
        }

    def _compressed_otherwise(self, manifest: Manifest) -> list[str]:
        """Return a note if the stored dataset is compressed in another way; UsageError for an unknown field."""
        parse_codecs(self.asked.compress, manifest.fields)
        stored = manifest.provenance[-1].arguments.get("compress", []) if manifest.provenance else []
        if self.layout != "packed" or stored == sorted(self.asked.compress):
            return []
        how = f"with --compress {' '.join(stored)}" if stored else "without compression"
        return [f"already stored {how}; --force converts it again"]

    def _require_unchanged(self, manifest: Manifest | None, found: Resolution, revision: str | None) -> None:
        """Raise CheckFailed unless the remote has, at a revision, the files that the dataset was made from."""
        if manifest is None:
            raise DatasetNotFoundError(
                f"--frozen compares the remote with the stored dataset: {self._destination(found)} not found",
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
        """Return the remote dataset, reduced to the files and episodes that this request needs.

        Raises UsageError for episodes that cannot exist. If the remote gives only their count, the conversion checks
        them again: numbers can have gaps, so the largest need not be the count minus one.
        """
        chosen = None if self.episodes is None else parse_episodes(self.episodes)
        files = tuple(self.source.needed(remote, chosen, self._recorded))
        if chosen is None:
            return replace(remote, files=files)
        numbers, count = self.source.episode_numbers(remote), remote.episodes
        if numbers is not None:
            count = len(select_episodes(chosen, numbers))
        elif count is not None:
            count = expected_episodes(chosen, count)
        return replace(remote, files=files, episodes=count, steps=None)

    def _fetch_and_convert(self, found: Resolution, started: float) -> dict[str, Any]:
        self._publication(found).staging.refuse_if_taken()
        if self.asked.dry_run:
            return self._estimate(found, started)
        if self.source.pickled:
            require_trust(Path(found.id), self._recorded.get("trust_pickle"), PICKLED)
        originals = self._originals(found)
        with originals.lock(lambda: self._note_waiting(found)):
            there = self._existing(found)  # the previous holder of the lock may have made it
            if there is not None:
                return self._stored_entries(there, found, started)
            remote, fetch = self._fetch(found, originals, self.asked.revision)
            try:
                entries = self._convert(found, remote, originals)
            except UsageError as error:
                error.hint = error.hint or "the fetched files are kept: run it again"
                raise
            kept = self._kept(found)
            if not kept:
                originals.discard(self._progress.note)
        return entries | {
            "id": found.id,
            "resolved": found.how,
            "fetched_from": remote.address,
            "fetch": fetch,
            "originals": originals.files if kept else None,
            "seconds": seconds_since(started),
        }

    def _keep(self, manifest: Manifest, found: Resolution) -> dict[str, Any]:
        """Fetch and keep the originals of a stored dataset, in the revision that it was made from."""
        commit = _COMMIT.fullmatch(f"@{manifest.resolved_revision}")
        revision = manifest.resolved_revision if commit else self.asked.revision
        self._require_unchanged(manifest, found, revision)
        originals = self._originals(found)
        with originals.lock(lambda: self._note_waiting(found)):
            fetch = self._fetch(found, originals, revision)[1]
        return {"fetch": fetch, "originals": originals.files}

    def _fetch(self, found: Resolution, originals: Originals, revision: str | None) -> tuple[RemoteDataset, Fetch]:
        """Fetch the needed originals; try once more if the remote changes during the fetch."""
        with _hinting_at_kept(originals):
            try:
                return self._fetch_listed(self._describe(found, revision), originals)
            except StaleListing as error:
                self._progress.note(f"the remote changed during the fetch ({error}): trying again")
                return self._fetch_listed(self._describe(found, revision), originals)

    def _fetch_listed(self, whole: RemoteDataset, originals: Originals) -> tuple[RemoteDataset, Fetch]:
        remote = self._needed(whole)
        fetch = self._fetch_ahead(remote, originals)
        originals.begin(whole, remote.paths, kept=self.asked.keep_source)
        self._progress.note(_announcement(fetch, remote.address))
        sized = all(file.size is not None for file in remote.files)
        self._progress.start("fetching", remote.bytes if sized else None, "bytes")
        self.source.fetch(remote.files, originals.files, progress=self._progress.advance, note=self._progress.note)
        self._progress.done(compared_with(remote))
        return remote, fetch

    def _fetch_ahead(self, remote: RemoteDataset, originals: Originals) -> Fetch:
        # Room for the dataset as well, which exists beside the originals and rarely has less than half their size.
        return _planned_fetch(self.root, remote, originals, remote.bytes // 2)

    def _note_waiting(self, found: Resolution) -> None:
        self._progress.note(f"another process is fetching {found.id}: waiting for it")

    def _convert(self, found: Resolution, remote: RemoteDataset, originals: Originals) -> dict[str, Any]:
        arguments = self._arguments({
            "source": self.source.name, "id": found.id, "asked": found.asked, "resolved": found.how,
            "from": remote.address, "episodes": self._normal, "revision": self.asked.revision,
        })  # fmt: skip
        received = originals.take_digests(remote.unverified)
        if received:
            arguments["unverified"] = versions_of(remote)
        with originals.only(remote.paths) as folder, self._reader(folder, found.id) as reader:
            facts = choose_episodes(reader, self.episodes, self.asked)
            notes = [f"the dataset calls itself {facts.id}"] if facts.id != found.id else []
            notes += [_PARTLY] if self._is_part(originals, remote) else []
            notes += [unverified_note(remote)] if received else []
            facts = replace(facts, notes=(*facts.notes, *notes))
            return SourceConversion(
                self.asked, reader, facts, folder, self._destination(found), self._request(found), arguments,
                inputs=dict(sorted((remote.checksums | received).items())) if received else remote.checksums,
                revision=remote.revision, root=self.root,
            ).run()  # fmt: skip

    def _is_part(self, originals: Originals, remote: RemoteDataset) -> bool:
        record = originals.record()
        return record is not None and len(remote.files) < len(
            self.source.needed(record.dataset(), None, self._recorded)
        )

    def _estimate(self, found: Resolution, started: float) -> dict[str, Any]:
        """Return the entries of a dry run: what would be fetched, and what the remote states about the dataset."""
        whole = self._describe(found, self.asked.revision, totals=True)
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


def _planned_fetch(root: Path, remote: RemoteDataset, originals: Originals, more: int = 0) -> Fetch:
    """Return what is to be fetched; OutOfSpaceError unless there is room for it and `more` bytes."""
    present = originals.present(remote)
    fs.require_space(root, max(0, remote.bytes - present) + more)
    return Fetch(len(remote.files), remote.bytes, present, fs.free_space(root))


@contextlib.contextmanager
def _hinting_at_kept(originals: Originals) -> Iterator[None]:
    try:
        yield
    except NetworkError as error:
        if originals.has_any():
            error.hint = error.hint or "run it again: what was fetched so far is kept"
        raise


def _announcement(fetch: Fetch, address: str) -> str:
    files = counted(fetch.files, "file")
    there = f", {readable_size(fetch.bytes_present)} of it present" if fetch.bytes_present else ""
    short = _COMMIT.sub(r"@\1", address)
    return f"{files}, {readable_size(fetch.bytes)}, from {short}{there}; {readable_size(fetch.bytes_free)} free"


_MANIFEST_BYTES = 64 << 20
_Stored: TypeAlias = tuple[Manifest, str]
"""The manifest of a stored dataset, and the address it was fetched from."""
_DATASET = "dataset"
"""The name of the dataset's folder inside the staging folder."""


def hub_address(source: str, dataset_id: str | None, revision: str | None) -> HubAddress | None:
    """Return the address that the arguments of `download` name, `hf://OWNER/NAME` or `hf` and OWNER/NAME, else None."""
    if not (is_hub_address(source) or source.partition(":")[0] == HUB):
        return None
    if dataset_id is None:
        return HubAddress.parse(source, revision)
    if source != HUB:
        raise UsageError(f"{source} names the dataset, and so does {dataset_id}", hint="leave one out")
    return HubAddress.parse(dataset_id, revision)


@dataclass(frozen=True)
class HubDownload:
    """The download of a dataset from a hub; `run` uses the network only if it is not stored."""

    asked: DownloadOptions
    hub: Hub
    address: HubAddress
    root: Path

    @property
    def _progress(self) -> Progress:
        return self.asked.reporter

    def run(self) -> dict[str, Any]:
        """Return the entries of a `DownloadResult`."""
        started = time.perf_counter()
        publication = Publication(
            staging=Staging(self._folder, replace=self.asked.force, below=self.root),
            find=self._existing,
            dry_run=self.asked.dry_run,
            name=_DATASET,
        )
        if self.asked.frozen:
            self._require_unchanged(publication.existing())
        outcome = publication.prepare(self._plan)
        if outcome is None:
            outcome = self._fetch(publication)
        elif not self.asked.dry_run:
            self._tidy()
        manifest, origin = outcome.content
        return self._entries(manifest, origin, started) | outcome.entries

    def _plan(self) -> Outcome[_Stored]:
        remote, manifest = self._describe()
        return Outcome((manifest, remote.address), {"fetch": _planned_fetch(self.root, remote, self._originals)})

    @property
    def _folder(self) -> Path:
        return dataset_folder(self.address.request, self.root)

    @property
    def _originals(self) -> Originals:
        return Originals(self.root, HUB, self._folder.relative_to(self.root / HUB).as_posix())

    def _entries(self, manifest: Manifest, origin: str, started: float) -> dict[str, Any]:
        return published_entries(manifest, self._folder, started) | {
            "source": HUB, "id": self.address.repository, "asked": str(self.address), "resolved": "exact",
            "fetched_from": origin,
        }  # fmt: skip

    # What is stored ------------------------------------------------------------------------------------

    def _existing(self) -> _Stored | None:
        """Return the stored dataset, None if there is none; UsageError if it is another or a damaged one."""
        if not has_manifest(self._folder):
            return None
        origin = next((one for one in reversed(transfers_of(self._folder)) if self._is_ours(one)), None)
        if origin is None:
            raise occupied_error(self._folder, f"is not recorded as a download of {self.address}")
        if origin.hub != hub_endpoint():
            self._progress.note(f"{self._folder} was downloaded from {origin.hub}, not from {hub_endpoint()}")
        try:
            with ListedFiles.at(self._folder) as files:
                files.check_sizes()
                return files.manifest, f"{origin.address}@{origin.commit}"
        except RbtoolError as error:
            raise occupied_error(self._folder, f"is damaged ({error})") from error

    def _tidy(self) -> None:
        """Remove the leftovers of a process that was killed after it had put the dataset in place."""
        fetched = self._originals.folder
        aside = fetched.parent.with_name(fetched.name)
        with contextlib.suppress(OSError, UsageError):  # such as a disk that cannot be written to
            sweep(self._folder, below=self.root)
            remove_at_once(fetched, near=aside, below=self.root)
            sweep(aside, below=self.root)

    def _is_ours(self, transfer: Transfer) -> bool:
        asked = "download", f"hf://{self.address.repository}", self.address.revision
        return (transfer.verb, transfer.address, transfer.revision) == asked

    def _require_unchanged(self, there: Outcome[_Stored] | None) -> None:
        """Raise CheckFailed unless the hub has, in the requested revision, the files that are stored."""
        if there is None:
            raise DatasetNotFoundError(
                f"--frozen compares the hub with the stored dataset: {self._folder} not found",
                hint="leave out --frozen to fetch it",
            )
        commit = self.hub.commit(self.address.repository, self.address.revision)
        tree = {file.path: file for file in self.hub.tree(self.address.repository, commit)}
        for path in (MANIFEST, *(file.path for file in there.content[0].files)):
            remote = tree.get(path)
            if remote is None or not matches(self._folder / path, remote.size, remote.checksum):
                raise CheckFailed(
                    f"{self.address} has changed since {self._folder} was downloaded: {path} differs at {commit[:7]}",
                    hint="replace --frozen by --force to take the new version, or add --revision for the old one",
                )

    # What the hub has ----------------------------------------------------------------------------------

    def _describe(self) -> tuple[RemoteDataset, Manifest]:
        """Return the files that the manifest on the hub lists, and the manifest; FormatError for an invalid one."""
        name = self.address.repository
        commit = self.hub.commit(name, self.address.revision)
        tree = {file.path: file for file in self.hub.tree(name, commit)}
        listed = tree.get(MANIFEST)
        if listed is None:
            raise _not_a_dataset(self.address, tree)
        place, origin = self.hub.address(name, commit, MANIFEST), f"{MANIFEST} of {self.address.at(commit)}"
        data = read_small(self.hub, place, limit=_MANIFEST_BYTES, size=listed.size, checksum=listed.checksum)
        manifest = Manifest.from_dict(parse_json(data, origin), origin)
        if manifest.kind != "dataset":
            raise FormatError(f"{self.address.at(commit)} is a {manifest.kind}, expected a dataset")
        if not is_canonical(data):
            raise CorruptDataError(f"{origin} was changed after it was written")
        for record in manifest.files:
            found = tree.get(record.path)
            if found is None or found.size != record.size or record.path in (MANIFEST, TRANSFERS):
                have = "is missing" if found is None else f"has {found.size:,} bytes there"
                raise CorruptDataError(
                    f"{self.address.at(commit)} is incomplete: {record.path} {have}, expected {record.size:,} bytes "
                    "by the manifest"
                )
        files = tuple(self._remote(tree[path], commit) for path in (MANIFEST, *(one.path for one in manifest.files)))
        return RemoteDataset(self._originals.id, self.address.at(commit), commit, files), manifest

    def _remote(self, file: HubFile, commit: str) -> RemoteFile:
        place = self.hub.address(self.address.repository, commit, file.path)
        return RemoteFile(file.path, file.size, file.checksum, (place,))

    # Fetching ------------------------------------------------------------------------------------------

    def _fetch(self, publication: Publication[_Stored]) -> Outcome[_Stored]:
        originals = self._originals
        waiting = f"another process is fetching {self.address}: waiting for it"
        with originals.lock(lambda: self._progress.note(waiting)):
            there = publication.existing()  # the previous holder of the lock may have fetched it
            if there is not None:
                return there
            remote, manifest = self._describe()
            fetch = self._fetch_missing(remote, originals)
            self._verify(originals, remote)
            self._add_transfer(originals, remote, manifest)

            def build(staging: Staging) -> Outcome[_Stored]:
                with (
                    fs.folder_below(self.root, originals.folder) as within,
                    fs.folder_below(self.root, staging.path) as into,
                ):
                    fs.rename(originals.files, staging.path / _DATASET, within=within, into=into)
                return Outcome((manifest, remote.address), {"fetch": fetch})

            outcome = publication.publish(build)
            originals.discard(self._progress.note)
        return outcome

    def _fetch_missing(self, remote: RemoteDataset, originals: Originals) -> Fetch:
        """Fetch the missing files, and compare them with the checksums of the hub."""
        fetch = _planned_fetch(self.root, remote, originals)
        originals.begin(remote, remote.paths, kept=False)
        self._progress.note(_announcement(fetch, remote.address))
        self._progress.start("fetching", remote.bytes, "bytes")
        with _hinting_at_kept(originals):
            fetch_files(
                remote.files,
                originals.files,
                self.hub,
                progress=self._progress.advance,
                note=self._progress.note,
            )
        self._progress.done()
        return fetch

    def _verify(self, originals: Originals, remote: RemoteDataset) -> None:
        """Compare all files with the digests in the manifest; if one does not match, remove them all."""
        try:
            with ListedFiles.at(originals.files) as files:
                self._progress.start("verifying", files.manifest.bytes, "bytes")
                for record in files.manifest.files:
                    files.verify([record])
                    self._progress.advance(record.size)
            open_steps(originals.files).close()
        except FormatError as error:
            originals.remove()
            raise CorruptDataError(
                f"{remote.address} does not match its manifest, and nothing was kept: {error.message}"
            ) from error
        self._progress.done()

    def _add_transfer(self, originals: Originals, remote: RemoteDataset, manifest: Manifest) -> None:
        transfer = Transfer(
            "download", f"hf://{self.address.repository}", self.address.revision, str(remote.revision), hub_endpoint(),
            manifest.content_digest, written_time(),
        )  # fmt: skip
        add_transfer(originals.files, transfer)


def _not_a_dataset(address: HubAddress, tree: Mapping[str, HubFile]) -> FormatError:
    """Return the error for a repository without a manifest, which states what the repository looks like."""
    looks, hint = _look_of(address.repository, tree)
    return FormatError(f"{address} was not made by rbtool upload: it has no {MANIFEST}{looks}", hint=hint)


def _look_of(repository: str, tree: Mapping[str, HubFile]) -> tuple[str, str]:
    ends = {path.rpartition(".")[2].lower() for path in tree}
    if "meta/info.json" in tree:
        known = "lerobot" in source_names()
        return ", and looks like a LeRobot dataset", f"rbtool download lerobot {repository}" if known else ""
    if any(path.endswith(("main_data.hdf5", "namespace_metadata.json")) for path in tree):
        return (
            ", and looks like Minari datasets",
            f"set MINARI_REMOTE=hf://{repository.partition('/')[0]} to download them as minari:ID",
        )
    if "tar" in ends:
        return (
            ", and looks like shards in tar archives",
            "rbtool list --formats lists the formats that can be converted",
        )
    if ends & {"parquet", "arrow", "hdf5", "h5", "npz", "csv", "tfrecord"}:
        return ", and has data files", "fetch it with the hub's own client, and convert it: rbtool convert PATH DEST"
    return "", "the repository has no data files that rbtool knows"
