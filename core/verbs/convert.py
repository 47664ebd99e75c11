"""`convert`: write a TED dataset from one in another format or layout, anywhere on disk.

`SourceConversion` converts the formats of other libraries, also for `download`; `Rewriting` writes steps of rbtool or
TorchRL in another layout. A dataset records the checksums of the source files it was made from, or their versions if
the remote gives no checksum.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..declarations import default_layout
from ..encodings.save import dataset_digest
from ..engine.workspace import RESULT
from ..errors import CheckFailed, CorruptDataError, FormatError, RbtoolError, UsageError
from ..format import fs
from ..format.checks import SoundSteps, damage_explained, sound_episodes, sound_steps
from ..format.contracts import SourceFacts, StepReader
from ..format.converter import PartsReader, Reader, RemoteDataset, require_final_step
from ..format.documents import decode, dump_json, load_json
from ..format.episodes import normal_form, parse_episodes, select_episodes
from ..format.files import LEAVES_OUT, digest_text, digests_in, reading_from
from ..format.locate import find_source, open_source, require_apart
from ..format.manifest import ENV_METADATA, HIDDEN, SHARDS_DOCUMENT, Layout, Manifest, Provenance, Request
from ..format.memmap.builder import Origin, OverlappedBuilder, created_by, env_metadata_bytes, provenance_step
from ..format.packed.builder import row_builder, rows_bytes, write_dataset
from ..format.packed.reader import PackedReader
from ..format.packed.schema import PackedSchema, RowCodec, parse_codecs
from ..format.returns import Ingest
from ..format.staging import Outcome, Publication, Staging, share_files
from ..format.videos import UNDECODED, size_of_videos
from ..open_steps import BufferSteps, is_steps, refuse_several
from ..options import takes
from ..progress import Progress, some_of
from ..remote.transport import matches
from ..results import (
    Published,
    existing_result,
    final_step_arguments,
    given_options,
    layout_arguments,
    occupied_error,
    published_entries,
    refuse_other_compression,
    refuse_raw_options,
    require_engine,
    require_layout,
    require_workers,
)
from ..saved_steps import is_of_buffer, open_saved, verified_steps
from ..ted.schema import Field, Key, ted_fields
from .options import ConvertOptions, DownloadOptions, LoadOptions

if TYPE_CHECKING:
    from .convert_workers import ConversionWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult(Published):
    """The dataset at `path`, made from the one at `source`."""

    kind: ClassVar[str] = "convert"
    source: Path


@takes(ConvertOptions)
def convert(asked: ConvertOptions) -> ConvertResult:
    """Convert a dataset to TED; its format is detected from its content.

    Values and dtypes are kept. The result appears when it is complete, or not at all.

    Args:
        path: a dataset of another library, or, to write it in another layout, a dataset of rbtool (a path or
            `source:id`) or a checkpoint of rbtool or TorchRL.
        dest: the folder to write.
        episodes: episodes of a dataset of another library by number, like `0:100,250`; default: all.
        max_episodes: take only the first so many of them.
        layout: `ted`, or `packed`, which is smaller and faster to sample from. Default: `packed` for formats that
            declare it, such as Atari frames, else `ted`.
        compress: fields of layout `packed` to compress, like `observation.image=zstd:3` (a level of 1 to 22, or lz4).
        final_step: what to do with a last step that has no next observation. `auto` keeps it, with its observation
            repeated, if it is terminated; otherwise it drops the step, and the one before it becomes the truncated end
            (some formats keep it if there are no rewards). `drop` drops all such steps, `repeat` keeps all. The episode
            table records what was done.
        root: where stored datasets are.
        skip_bad: convert the sound episodes of a damaged dataset, which is then read twice; notes name the others.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        num_workers: processes that read and write a dataset of another library; 0: this one alone. The bytes of the
            result do not depend on it.
        engine: where these processes run: `local`, or `ray` for a Ray cluster that shares the folders.
        resume: continue an interrupted run of these processes.
        format: the name of the format, instead of detecting it. With `table`, `path` may be a folder of CSV or Parquet
            files, or a pattern like `runs/*.csv`; all files are one dataset.
        progress: shows how far it is; default: nothing is shown.
        horizon, ends, filter_key, reward, map, episode_key, files, images, jpeg, trust_pickle, rlds_last: for some
            formats only; the pages of the formats explain them.

    Returns:
        What was written. An equal conversion of an unchanged source is left as it is, and `already_there` is True.

    Raises:
        DatasetNotFoundError: nothing is at `path`.
        FormatError, CorruptDataError: the source cannot be read. `dest` is unchanged after any error.
        UsageError: arguments make no sense, or something else is at `dest`.
        OutOfSpaceError: the disk has no room for the result.
    """
    named, methods = os.fspath(asked.path), tuple(asked.compress)
    source, pattern = find_source(asked.path, asked.root, asked.format)
    destination = fs.expanded(asked.dest)
    require_layout(asked.layout or "packed", methods)  # before anything is read
    ends = require_final_step(asked.final_step)
    require_engine(asked.engine, require_workers(asked.num_workers, resume=asked.resume))
    given = given_options(asked.of_reader())
    if pattern and "files" in given:
        raise UsageError(f"{named} is a pattern, and --files is a second one", hint="leave out --files")
    given |= pattern
    if is_steps(source, asked.format) or is_of_buffer(source):
        refuse_raw_options(source, asked.raw() | given, _chosen_instead(asked))
        rewriting = Rewriting(asked, source, destination, require_layout(asked.layout or "ted", methods))
        return ConvertResult(**rewriting.run(), source=source)
    refuse_several(source)
    chosen = normal_form(asked.episodes) if asked.episodes is not None else None
    with (
        reading_from(source),
        open_source(source, format=asked.format, final_step=ends, options=given) as reader,
        hinting_at_skip_bad(reader, asked),
    ):
        facts = choose_episodes(reader, asked.episodes if chosen else None, asked, max_episodes=asked.max_episodes)
        wanted = require_layout(asked.layout or default_layout(facts.source), methods)
        given |= asked.recorded()
        ends = ends if facts.final_missing else "auto"
        request = Request(
            facts.source, named, facts.id, episodes=chosen, layout=wanted, origin="file", final_step=ends,
            options=given,
        )  # fmt: skip
        arguments = {"path": named, "episodes": chosen} | layout_arguments(wanted, methods)
        arguments |= final_step_arguments(ends) | given
        conversion = SourceConversion(asked, reader, facts, source, destination, request, arguments)
        return ConvertResult(**conversion.run(), source=source)


def _chosen_instead(asked: ConvertOptions) -> dict[str, str]:
    """Return hints for options that choose episodes: for datasets of rbtool, `preprocess` has them."""
    first, named, dest = f"0:{asked.max_episodes}", os.fspath(asked.path), os.fspath(asked.dest)
    return {
        name: shlex.join(["rbtool", "preprocess", named, "--episodes", numbers, "--dest", dest])
        for name, numbers in (("episodes", asked.episodes), ("max_episodes", first))
        if numbers is not None
    }


_REWRITING = ("convert", "checkpoint load")


@dataclass(frozen=True)
class Rewriting:
    """Rewrites a dataset or checkpoint of rbtool or TorchRL, or a tensordict folder, as a dataset at `destination`."""

    asked: ConvertOptions | LoadOptions
    source: Path
    destination: Path
    layout: Layout

    @property
    def _skip_bad(self) -> bool:
        return isinstance(self.asked, ConvertOptions) and self.asked.skip_bad

    def run(self) -> dict[str, Any]:
        """Write the dataset unless an equal one exists; return the entries of a `Published`.

        Every byte of the source is compared with its digest, and the rows of a checkpoint with the digest of the
        dataset that it was saved from. Raises UsageError if the destination must not be replaced, CorruptDataError for
        a damaged source, OutOfSpaceError.
        """
        started = time.perf_counter()
        require_apart(self.source, self.destination)
        explained = damage_explained(
            self.source, can_skip=isinstance(self.asked, ConvertOptions) and not self._skip_bad
        )
        with explained, open_saved(self.source, damaged=self._skip_bad) as opened:
            reader = sound_steps(opened) if self._skip_bad else opened
            PackedSchema.of(reader.fields, parse_codecs(self.asked.compress, reader.fields))
            size = rows_bytes(reader.fields, self.layout, reader.manifest.steps, reader.manifest.episodes)

            def plan() -> Outcome[Manifest]:
                planned = replace(_planned(reader), layout=self.layout, request=self._request(reader.manifest))
                return Outcome(planned, {"bytes": size, "content_digest": None})

            def build(staging: Staging) -> Outcome[Manifest]:
                manifest = self._write(reader, staging.path)
                shared = share_files(staging.path, manifest, [reader])  # without links: the result can be edited
                return Outcome(manifest, {"shared_bytes": shared})

            publication = Publication(
                staging=Staging(self.destination, replace=self.asked.force),
                find=lambda: self._existing(reader),
                needed=lambda: None if self.asked.compress else size,
                dry_run=self.asked.dry_run,
            )
            manifest, changes = publication.run(plan, build)
            entries = published_entries(manifest, self.destination, started, reader) | changes
            if self._skip_bad and reader.videos() and UNDECODED not in entries["notes"]:
                entries["notes"] = (*entries["notes"], UNDECODED)
            return entries

    def _existing(self, reader: StepReader) -> Manifest | None:
        there = existing_result(self.destination, self._request(reader.manifest))
        if there is None or not there.provenance:
            return there
        made = there.provenance[-1]
        inputs = reader.manifest.inputs
        if any(made.inputs.get(name) != inputs.get(name) for name in ("content_digest", "scores")):
            raise occupied_error(self.destination, "was made from another dataset")
        if made.verb not in _REWRITING:  # preprocess results keep the request of their source
            raise occupied_error(self.destination, f"was made from the same dataset by {made.verb}")
        if there.steps != reader.manifest.steps:
            raise occupied_error(self.destination, f"has {there.steps:,} of its steps, not {reader.manifest.steps:,}")
        sound = isinstance(reader, SoundSteps)  # its notes name the damaged files and the episodes left out
        if sound != bool(made.arguments.get("skip_bad")) or (sound and there.notes != reader.manifest.notes):
            raise occupied_error(self.destination, "was made while other files of the dataset were damaged")
        refuse_other_compression(self.destination, there, self.asked.compress)
        return there

    def _request(self, manifest: Manifest) -> Request:
        return replace(manifest.request, layout=self.layout)

    def _write(self, reader: StepReader, folder: Path) -> Manifest:
        manifest = reader.manifest
        codecs = parse_codecs(self.asked.compress, reader.fields)
        origin = replace(
            Origin.of(_planned(reader), reader.documents(), reader.videos()),
            request=self._request(manifest),
            provenance=(*manifest.provenance, self._step(reader)),
        )
        with verified_steps(reader) as steps:
            self.asked.reporter.start("converting", manifest.steps, "steps")
            made = write_dataset(steps, folder, self.layout, origin, codecs, self.asked.reporter.advance)
        if _is_saved(reader):
            _require_digest(reader, folder, made)
        self.asked.reporter.done()
        return made

    def _step(self, reader: StepReader) -> Provenance:
        verb, arguments = "convert", dict[str, Any]()
        if isinstance(self.asked, LoadOptions):
            verb, arguments["checkpoint"] = "checkpoint load", os.fspath(self.asked.checkpoint)
        else:
            arguments["path"] = os.fspath(self.asked.path)
        arguments |= {"layout": self.layout} | layout_arguments(self.layout, self.asked.compress)
        if isinstance(reader, SoundSteps):
            arguments["skip_bad"] = True
        return provenance_step(verb, arguments, reader.manifest.inputs)


def _planned(reader: StepReader) -> Manifest:
    return reader.planned if isinstance(reader, BufferSteps) else reader.manifest


def _is_saved(reader: StepReader) -> bool:
    """Return whether this is an rbtool checkpoint, whose manifest records the digest of its dataset."""
    return reader.manifest.kind == "checkpoint" and not isinstance(reader, BufferSteps)


def _require_digest(reader: StepReader, folder: Path, made: Manifest) -> None:
    """Raise CorruptDataError unless the written dataset is the one that the checkpoint was saved from."""
    expected, found = dataset_digest(reader.manifest), made.content_digest
    if made.layout == "packed":
        with PackedReader(folder) as written:
            found = written.ted_digest
    if found != expected:
        raise CorruptDataError(
            f"{reader.path} does not restore the data that was saved: its digest is {found}, expected {expected}"
        )


_EPISODE_BYTES = 64  # about the bytes of a row of the episode table
_CHECKSUMS = "checksums.json"  # the remote's checksums, if they are too many for the provenance
_FEW_INPUTS = 16
_SOON = 1.0  # seconds before reading the facts of a source is shown as a stage


def choose_episodes(
    reader: Reader, selection: str | None, asked: ConvertOptions | DownloadOptions, *, max_episodes: int | None = None
) -> SourceFacts:
    """Choose the episodes (in `selection`, the first `max_episodes` of them, the sound ones) and return their facts."""
    reader.survey_workers, progress = asked.num_workers, asked.reporter
    if not asked.skip_bad and max_episodes is None:
        return _with_notes(_stated_facts(reader, selection, progress))
    chosen = _chosen(reader, selection, max_episodes)
    chosen, notes = sound_episodes(reader, chosen, progress) if asked.skip_bad else (chosen, [])
    return _with_notes(reader.facts([(number, number + 1) for number in chosen]), notes)


def _chosen(reader: Reader, selection: str | None, max_episodes: int | None) -> list[int]:
    """Return the numbers of the chosen episodes, from the metadata of the files."""
    numbers = reader.stated().episode_numbers
    return list(select_episodes(parse_episodes(selection), numbers) if selection else numbers)[:max_episodes]


def _with_notes(facts: SourceFacts, more: Sequence[str] = ()) -> SourceFacts:
    return replace(facts, notes=(*facts.notes, *more, *([UNDECODED] if facts.videos else ())))


@contextlib.contextmanager
def hinting_at_skip_bad(reader: Reader, asked: ConvertOptions | DownloadOptions) -> Iterator[None]:
    """Suggest --skip-bad in errors about the data, but only if it is not set and other episodes would remain."""
    try:
        yield
    except FormatError as error:
        helps = not asked.skip_bad
        with contextlib.suppress(RbtoolError, OSError):
            most = asked.max_episodes if isinstance(asked, ConvertOptions) else None
            helps = helps and len(_chosen(reader, asked.episodes, most)) > 1
            if helps and not error.hint:
                error.hint = "add --skip-bad to convert the episodes that are sound"
        if not helps:
            error.hint = error.hint.removesuffix(LEAVES_OUT)
        raise


def _stated_facts(reader: Reader, selection: str | None, progress: Progress) -> SourceFacts:
    """Read the facts of a source; show progress only if that takes long."""
    started, seen, watched = time.monotonic(), 0, False

    def on_episodes(episodes: int) -> None:
        nonlocal seen, watched
        seen += episodes
        if watched:
            progress.advance(episodes)
        elif time.monotonic() - started > _SOON:
            watched = True
            progress.start("looking over", None, "episodes")
            progress.advance(seen)

    facts = reader.facts(parse_episodes(selection) if selection else None, progress=on_episodes)
    if watched:
        progress.done()
    return facts


@dataclass(frozen=True)
class SourceConversion:
    """Converts a source, or some of its episodes, into the dataset at `destination`, unless an equal one exists.

    `arguments` are recorded in the provenance of the result; the layout is in `request`. `root` is the storage root
    above the destination, if any: the path from it to the destination must contain no link. `inputs` are the digests
    of the source's files and `revision` the state of the source, as the remote gives them; by default both are
    computed from the files. With `asked.num_workers`, finished tasks are kept after an interruption: `convert`
    continues with them if `resume` is set, a download if it is repeated.
    """

    asked: ConvertOptions | DownloadOptions
    reader: Reader
    facts: SourceFacts
    source: Path
    destination: Path
    request: Request
    arguments: Mapping[str, Any]
    _: KW_ONLY
    inputs: Mapping[str, str] | None = None
    revision: str | None = None
    root: Path | None = None

    def run(self) -> dict[str, Any]:
        """Convert, unless an equal dataset exists; return the entries of a `Published`.

        Raises UsageError if something else exists and `force` is not set, OutOfSpaceError before anything is written
        if there is not enough space; FormatError where `final_step` leaves no step.
        """
        started = time.perf_counter()
        for read in self._files if "files" in self.reader.options else [self.source]:
            require_apart(read, self.destination)
        if self.facts.final_missing and not self.facts.steps:
            key = self.reader.options.get("episode_key")
            raise FormatError(
                f"{self.source}: no step is left, since every episode is a single step without an observation after it",
                hint=("" if key is None else f"--episode-key {key} may name the wrong column; ")
                + "--final-step repeat keeps it",
            )
        if self._codecs or self._layout == "packed":
            PackedSchema.of(self._fields, self._codecs)  # raises for unsupported codecs before anything is done
        publication = Publication(
            staging=Staging(self.destination, replace=self.asked.force, below=self.root),
            find=self._existing,
            needed=lambda: self._expected_bytes,
            dry_run=self.asked.dry_run,
        )
        manifest, changes = publication.prepare(self._plan) or self._published(publication)
        return published_entries(manifest, self.destination, started) | changes

    @property
    def _verb(self) -> str:
        return "convert" if isinstance(self.asked, ConvertOptions) else "download"

    @cached_property
    def _codecs(self) -> Mapping[Key, RowCodec]:
        return parse_codecs(self.asked.compress, self._fields)

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        return ted_fields(self.facts.fields)

    @property
    def _layout(self) -> Layout:
        return require_layout(self.request.layout, self.asked.compress)

    @cached_property
    def _files(self) -> list[Path]:
        return list(self.reader.files())

    @cached_property
    def _inputs(self) -> Mapping[str, str]:
        return digests_in(self.reader.folder, self._files) if self.inputs is None else self.inputs

    @cached_property
    def _revision(self) -> str:
        """The state of the source: the revision of the remote, else a digest of the source's files."""
        return self.revision or digest_of_inputs(self._inputs)

    @cached_property
    def _expected_bytes(self) -> int:
        documents = sum(map(len, self.facts.documents.values())) + size_of_videos(self.facts.videos)
        episodes = _EPISODE_BYTES * len(self.facts.episode_numbers)
        return (
            rows_bytes(self._fields, self._layout, self.facts.steps, len(self.facts.episode_numbers))
            + episodes
            + documents
        )

    def _existing(self) -> Manifest | None:
        """Return the manifest of an equal dataset at the destination; None if there is none."""
        manifest = existing_result(self.destination, self.request)
        if manifest is not None and not self._is_of_this_state(manifest):
            raise occupied_error(self.destination, "was made from another state of the source")
        if manifest is not None and manifest.provenance:
            refuse_other_compression(self.destination, manifest, self.asked.compress)
        return manifest

    def _is_of_this_state(self, manifest: Manifest) -> bool:
        if manifest.resolved_revision == self._revision:
            return True
        fetched = fetched_checksums(self.destination, manifest)  # local files may equal those that were fetched
        if not fetched or (self.request.episodes is None and len(fetched) != len(self._inputs)):
            return False
        return all(_is_as_fetched(self.source / name, checksum) for name, checksum in fetched.items())

    def _plan(self) -> Outcome[Manifest]:
        facts = self.facts
        planned = Manifest(
            kind="dataset", layout=self._layout, request=self.request, steps=facts.steps,
            episodes=len(facts.episode_numbers), fields=self._fields, files=(), content_digest="",
            created_by=created_by(), boundary=self.reader.episode_table(facts.episode_numbers).counts(),
            renamed_keys=facts.renamed_keys, dropped_keys=facts.dropped_keys, notes=facts.notes,
        )  # fmt: skip
        return Outcome(planned, {"bytes": self._expected_bytes, "content_digest": None})

    def _published(self, publication: Publication[Manifest]) -> Outcome[Manifest]:
        """Build and publish, in this process or with workers."""
        if not (self.asked.num_workers and self.facts.steps):
            return publication.publish(lambda staging: Outcome(self._build(staging.path)))
        with self._workers() as workers:
            resumes: Callable[[Path], bool] | None = workers.is_same_run
            how = "run it again"
            if isinstance(self.asked, ConvertOptions):
                resumes, how = workers.require_same_run if self.asked.resume else None, "add --resume"
            staging = Staging(self.destination, replace=self.asked.force, takes=resumes, below=self.root)
            return replace(publication, staging=staging, name=RESULT).publish(
                lambda staging: Outcome(workers.build(staging, self._codecs, self._origin, self.asked.reporter)),
                lambda staging: workers.keeping(staging, self.asked.reporter, how),
            )

    def _workers(self) -> ConversionWorkers:
        from .convert_workers import ConversionWorkers

        _ = self._files  # before the reader is closed

        def identity() -> dict[str, Any]:  # called late: the revision may need to read the whole source
            compression = sorted(self.asked.compress)
            return {"source": self._revision, "request": self.request.identity(), "compression": compression}

        engine = self.asked.engine if isinstance(self.asked, ConvertOptions) else "local"
        return ConversionWorkers(self.reader, self.facts, self._layout, self.asked.num_workers, engine, identity)

    def _build(self, folder: Path) -> Manifest:
        made = row_builder(folder, self._fields, self._layout, self._codecs, self.facts.steps)
        with OverlappedBuilder(made) as builder:
            ingest = Ingest(builder, self.facts.fields)
            self.asked.reporter.start("converting", self.facts.steps, "steps")
            ingest.run(self.reader.blocks(self.facts.episode_numbers), self.asked.reporter.advance)
            manifest = builder.finish(ingest.table, self._origin(), ingest.text)
        self.asked.reporter.done()
        return manifest

    def _origin(self) -> Origin:
        documents = dict(self.facts.documents)
        if self.facts.env_metadata is not None:
            documents[ENV_METADATA] = env_metadata_bytes(self.facts.env_metadata)
        starts = self.reader.shard_starts() if isinstance(self.reader, PartsReader) else None
        if starts:
            documents[SHARDS_DOCUMENT] = dump_json(starts).encode()
        if self.inputs is not None and len(self.inputs) > _FEW_INPUTS:
            documents[_CHECKSUMS] = dump_json(self.inputs, indent=1).encode()
        return Origin(
            request=self.request,
            provenance=(provenance_step(self._verb, self.arguments, _recorded_inputs(self._inputs)),),
            resolved_revision=self._revision,
            spaces=self.facts.spaces,
            renamed_keys=self.facts.renamed_keys,
            dropped_keys=self.facts.dropped_keys,
            notes=self.facts.notes,
            documents=documents,
            videos=self.facts.videos,
        )


def _is_as_fetched(file: Path, checksum: str) -> bool:
    return file.is_file() and matches(file, file.stat().st_size, checksum)


def fetched_checksums(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return the remote's checksums of the files that a dataset was made from, by path; {} if unknown."""
    if manifest.request.origin != "remote" or not manifest.provenance:
        return {}
    listed = folder / HIDDEN / "source" / _CHECKSUMS
    if not listed.is_file():
        return dict(manifest.provenance[0].inputs)
    return decode(dict[str, str], load_json(listed), str(listed))


def unverified_versions(manifest: Manifest) -> dict[str, str | None]:
    """Return the versions of the source files without a checksum of the remote, by path."""
    if manifest.request.origin != "remote" or not manifest.provenance:
        return {}
    recorded = manifest.provenance[0].arguments.get("unverified", {})
    return decode(dict[str, str | None], recorded, "the provenance of the dataset")


def digest_of_inputs(inputs: Mapping[str, str]) -> str:
    """Return one digest over the digests of a source's files."""
    return digest_text("".join(f"{name}\0{digest}\n" for name, digest in sorted(inputs.items())))


def _recorded_inputs(inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs for the provenance: each by name, or one digest over all if there are many."""
    few = len(inputs) <= _FEW_INPUTS
    return dict(inputs) if few else {f"{len(inputs)} files": digest_of_inputs(inputs)}


def require_unchanged(manifest: Manifest, folder: Path, describe: Callable[[], RemoteDataset]) -> None:
    """Raise CheckFailed unless the remote still has the files that the dataset in `folder` was made from.

    `describe` queries the remote; it is not called for a dataset without recorded checksums.
    """
    made_from, versions = fetched_checksums(folder, manifest), unverified_versions(manifest)
    if not made_from:
        raise CheckFailed(
            f"{folder} was made from the local cache, so it has no checksums of the remote",
            hint="add --force to fetch it again",
        )
    remote = describe()
    here = {path: checksum for path, checksum in made_from.items() if path not in versions} | versions
    there = {**remote.checksums, **versions_of(remote)}
    if here != there:
        raise CheckFailed(
            f"{remote.address} has changed since {folder} was made from it",
            hint="replace --frozen by --force to take the new version, or add --revision for the old one",
        )
    unknown = sorted(path for path, version in there.items() if version is None)
    if unknown:
        raise CheckFailed(
            f"{remote.address} gives neither a checksum nor a version of {unknown[0]}, so it cannot be compared",
            hint="replace --frozen by --force to fetch it again",
        )


def compared_with(remote: RemoteDataset) -> str:
    """Return a phrase that states how the fetched bytes were verified."""
    kinds = sorted({checksum.partition(":")[0] for checksum in remote.checksums.values()})
    unverified = "read again, unverified by the remote" if len(remote.checksums) < len(remote.files) else ""
    verified = f"verified {' and '.join(kinds)}" if kinds or not unverified else ""
    return "; ".join(filter(None, (verified, unverified)))


def versions_of(remote: RemoteDataset) -> dict[str, str | None]:
    """Return the version of every file without a checksum, by path."""
    return {file.path: file.version for file in remote.files if file.checksum is None}


def unverified_note(remote: RemoteDataset) -> str:
    """Return the note for the manifest on files without a checksum of the remote."""
    paths = remote.unverified
    names = some_of(paths, 3)
    return f"unverified by the remote: it gives no checksum of {len(paths)} of {len(remote.files)} files ({names})"
