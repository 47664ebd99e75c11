"""Apply a processor to a dataset, task by task, and publish the new dataset completely or not at all.

A run goes through these passes:

    probe     first rows        the processor looks at them (can the function be vmapped?)
    measure   all rows          constants of the program (normalisation), on tasks of a fixed size
    schema    first tasks       the fields of the result, from the first task that returns rows
    run       all tasks         each worker writes rows; the journal gets a line for each finished task
    assemble  from the front    episode numbers, table, digests; files are only copied if row numbers changed

The journal (see `core/engine/workspace.py`) makes a run resumable. Its first line is the run's `identity`: everything
that decides the result, such as the content digest of the source, the selected steps, the processor with its measured
constants, and the boundaries of tasks. An interrupted run leaves its folder next to the destination. `resume` continues
it if the identities are equal: finished tasks whose rows still match their digests are kept, all others run again.
Because random numbers are seeded by the place in the dataset, the result is the same for any number of workers and any
interruption.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.tasks import (
    BackgroundCall,
    Executor,
    FunctionFailed,
    InProcessExecutor,
    Limits,
    ResultRefused,
    SerialExecutor,
    Task,
    TaskFailed,
    TaskTimeout,
    WorkerFailed,
    origin_of,
)
from ..engine.workspace import (
    Journal,
    field_entries,
    journal_path,
    keeping,
    require_same_run,
    result_folder,
)
from ..errors import CorruptDataError, RbtoolError, SchemaError, UsageError
from ..format.checks import SoundSteps
from ..format.contracts import StepReader
from ..format.files import digest_bytes
from ..format.manifest import ENV_METADATA, Dropped, Manifest, Provenance, Request
from ..format.memmap.builder import Origin, write_manifest
from ..format.returns import return_field_of
from ..format.staging import Outcome, Publication, Staging, share_files
from ..format.videos import VideoContents, videos_of_leaves
from ..open_steps import finished_manifest
from ..progress import Progress, Silent, counted
from ..ted.schema import ACTION, NEXT_TERMINATED, Field, Key, key_name
from .processor import Processor
from .result import Assembled, Assembly, Finished, ResumeState, UnfinishedRun, journal_entry
from .runner import Job
from .selection import Plan, StepSelection, task_order


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is executed; nothing here changes the result.

    `engine` is `local` or `ray`. `resume` keeps the chunks finished by an earlier run of the same work; `keep_going`
    finishes all other tasks if one fails.
    """

    limits: Limits = field(default_factory=Limits)
    start_method: str | None = None
    engine: str = "local"
    resume: bool = False
    keep_going: bool = False

    @property
    def needs_workers(self) -> str:
        """The setting that needs worker processes; empty if none does."""
        if self.engine == "ray":
            return "engine ray"
        return "" if self.limits.timeout is None else "a timeout"


@dataclass(frozen=True)
class Preprocessing:
    """The selected steps of a dataset, a processor and a plan.

    Any worker may run any task, as random numbers are seeded by the place in the dataset. `source_files` is the state
    of the source's files at the start; everything must be read from these.
    """

    selection: StepSelection
    processor: Processor
    plan: Plan
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    source_files: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source_files", self.selection.reader.files_state())

    def preview(self) -> tuple[Field, ...]:
        """Run the first task in this process and return the fields of the result; nothing is written."""
        with self.reporter.reported(), InProcessExecutor(self._job(), Limits(retries=0)) as executor:
            self.prepared(executor, Silent())
            return self.fields(executor)

    def publish(
        self, publication: Publication[Manifest], asked: str, step: Provenance, progress: Progress
    ) -> Outcome[Manifest]:
        """Run all tasks and publish the result.

        `asked` is the source as the user named it, `step` the provenance of this run. After an error nothing is
        published; finished tasks are kept next to the destination for a run that resumes.
        """
        with self.reporter.reported(), self._executor() as executor:
            run = _Run(self, executor, progress)
            made: list[Manifest] = []

            def find() -> Manifest | None:
                # Another run's result is compared by its digest once there is one: functions cannot be compared.
                return finished_manifest(publication.staging.destination) if made else publication.find()

            def build(staging: Staging) -> Outcome[Manifest]:
                with self.reporter.reported():
                    assembled, fields, processor = run.rows(staging)
                folder = result_folder(staging.path)
                manifest = self._complete(folder, assembled, fields, processor, asked, step)
                shared = share_files(folder, manifest, [self.selection.reader], links=True)
                made.append(manifest)
                return Outcome(manifest, {"shared_bytes": shared})

            @contextlib.contextmanager
            def kept(staging: Staging) -> Iterator[None]:
                with keeping(staging, progress, run.count), contextlib.closing(executor):
                    yield

            return replace(publication, find=find).publish(build, kept)

    @property
    def reporter(self) -> ErrorReporter:
        return ErrorReporter(self.selection, self.processor.label)

    def _job(self) -> Job:
        selection = self.selection
        chosen = None if len(selection.rows) == len(selection.reader.episodes) else selection.rows
        digest = selection.reader.manifest.content_digest
        return Job(selection.reader, digest, self.processor, chosen, selection.steps, selection.cut, self.seed)

    def _executor(self) -> Executor:
        settings, job = self.settings, self._job()
        if settings.engine == "ray":
            from ..engine.ray_cluster import RayExecutor

            return RayExecutor(job, self.plan.workers, settings.limits)
        if not self.plan.workers:
            return InProcessExecutor(job, settings.limits)
        from ..engine.pool import WorkerPool

        if self.processor.needs_measuring:
            self.processor.portable()  # refused now, not when it is sent to forks after it has measured
        return WorkerPool(job, self.plan.workers, settings.limits, settings.start_method)

    def prepared(self, executor: Executor, progress: Progress) -> Processor:
        """Run the processor's probe and measurements where it needs them; return the processor with their results."""
        processor = self.processor
        if processor.needs_probing:
            answer = _asked(executor, "probe", self.plan.tasks()[0])
            processor = processor.with_probe(answer)
            executor.broadcast("settle", answer)
        if processor.needs_measuring:
            processor = processor.with_measurements(self._measured(executor, progress))
            executor.broadcast("use_processor", processor)
        return processor

    def fields(self, executor: Executor) -> tuple[Field, ...]:
        """The fields of the first task that returns any rows."""
        fields: tuple[Field, ...] = ()
        tasks = self.plan.tasks()
        executor.begin(task_order(tasks)[1:])
        for task in tasks:
            fields, rows = _asked(executor, "schema", task)
            if rows:
                break
        return fields

    def _measured(self, executor: Executor, progress: Progress) -> list[Any]:
        # These tasks do not depend on the requested chunk size, which would change the last bits of sums.
        tasks = Plan.of(self.selection, None, 0, whole_episodes=True).tasks()
        found: dict[int, Any] = {}
        progress.start("measuring", self.selection.steps, "steps")
        for task, answer in executor.run("measure", tasks):
            if isinstance(answer, TaskFailed):
                raise answer
            found[task.index] = answer
            progress.advance(task.stop - task.start)
        progress.done()
        return [found[index] for index in sorted(found)]

    def identity(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON; equal identities mean equal tasks."""
        reader = self.selection.reader
        sound = {"sound episodes": digest_bytes(reader.rows.tobytes())} if isinstance(reader, SoundSteps) else {}
        return {
            "source": reader.manifest.content_digest,
            "files of the source": self.source_files,
            "work": self.processor.arguments(),
            "inputs": self.processor.inputs(),
            "fingerprint": self.processor.fingerprint(),
            "episodes": digest_bytes(self.selection.rows.tobytes()),
            "steps": self.selection.steps,
            "chunk_size": self.plan.chunk_size,
            "seed": self.seed,
            **sound,
        }

    def keys_read(self, processor: Processor) -> frozenset[Key]:
        """Return the leaves of the source that a run may read: for blocks, and for the table also ends and rewards."""
        reader = self.selection.reader
        reward = return_field_of(reader.manifest)
        table = [NEXT_TERMINATED] if reward is None else [NEXT_TERMINATED, reward.key]
        return processor.reads(reader.fields).union(self.processor.reads(reader.fields), table)

    def same_run(self, folder: Path) -> bool:
        """Whether a folder holds an unfinished run of the same tasks; UsageError if it belongs to another run."""
        found = UnfinishedRun.of(folder)
        if found is not None:
            require_same_run(found.run, self.identity(), folder)
        return found is not None

    def _complete(
        self,
        folder: Path,
        found: Assembled,
        fields: Sequence[Field],
        processor: Processor,
        asked: str,
        step: Provenance,
    ) -> Manifest:
        if not found.table.steps:
            raise UsageError(f"{processor.label} leaves no rows: there is nothing to write")
        reader = self.selection.reader
        step = replace(step, arguments={**step.arguments, **processor.arguments()})
        dropped = [Dropped(name, why) for name, why in processor.left_out(reader.fields, fields).items()]
        notes = [*processor.notes(reader.fields, fields), *_notes(processor.label, found)]
        videos = videos_of_leaves(folder, fields, reader.videos())
        origin = result_origin(reader, fields, asked, step, notes, dropped, processor.rescaled, videos)
        return write_manifest(folder, fields, found.data, found.ranges, found.table, origin, found.text)

    def refuse_changed_source(self) -> None:
        """Raise CorruptDataError if files of the source have changed, even if they were verified before the change."""
        reader = self.selection.reader
        if reader.files_state() != self.source_files:
            raise CorruptDataError(f"{reader.path} was changed while it was read", hint="run it again")


class _Run:
    """One run of the tasks, from the start or from a resume state."""

    def __init__(self, processor: Preprocessing, executor: Executor, progress: Progress) -> None:
        self._of = processor
        self._executor = executor
        self._folder = Path()
        self._progress = progress
        self._tasks = processor.plan.tasks()
        self._unfinished: ResumeState | None = None
        self._finished = 0

    def count(self) -> tuple[int, int]:
        """Return how many tasks are finished, by this run or by the one that it continues, and how many there are."""
        return self._finished, len(self._tasks)

    def rows(self, staging: Staging) -> tuple[Assembled, tuple[Field, ...], Processor]:
        """Run what is not finished yet in the folder of `staging`, and put the rows together."""
        self._folder = staging.path
        if staging.taken_up:
            self._unfinished = ResumeState.at(staging.path, self._of.selection.steps)
            self._finished = len(self._unfinished.finished) if self._unfinished is not None else 0
        of, executor = self._of, self._executor
        processor = of.prepared(executor, self._progress)
        verified = BackgroundCall(partial(of.selection.reader.verify_leaves, of.keys_read(processor)))
        kept: Mapping[int, Finished] = {}
        if self._unfinished is not None:
            fields = self._unfinished.fields
            kept = self._unfinished.sound(self._folder, self._tasks, of.selection.steps)
        else:
            fields = of.fields(executor)
        resumed = self._unfinished is not None
        with (
            Assembly(self._folder, fields, of.selection, processor, len(self._tasks), resumed=resumed) as assembly,
            SerialExecutor() as line,
        ):
            executor.broadcast("open", self._folder, fields)
            with self._journal(fields) as journal:
                self._progress.start("preprocessing", of.selection.steps, "steps")
                self._add_kept(assembly, kept)
                left = [task for task in task_order(self._tasks) if task.index not in kept]
                for task, finished in self._run(journal, left):
                    line.do(assembly.take, task, finished)
                    if verified.failed:
                        self._require_sound(verified)
                executor.dismiss()
                line.finish()
                self._progress.done()
            self._require_sound(verified)
            return assembly.finish(), fields, processor

    def _require_sound(self, verified: BackgroundCall[None]) -> None:
        """Raise if the source is damaged or has changed: the result must then not get a valid manifest."""
        self._of.refuse_changed_source()
        verified.result()

    def _journal(self, fields: Sequence[Field]) -> Journal:
        if self._unfinished is not None:
            return Journal(journal_path(self._folder))
        return Journal.begin(journal_path(self._folder), self._of.identity(), {"fields": field_entries(fields)})

    def _add_kept(self, assembly: Assembly, kept: Mapping[int, Finished]) -> None:
        if kept:
            self._progress.note(f"{len(kept):,} of {len(self._tasks):,} chunks are finished already")
        self._finished = len(kept)
        for index, finished in kept.items():
            task = self._tasks[index]
            assembly.take(task, finished)
            self._progress.advance(task.stop - task.start)

    def _run(self, journal: Journal, tasks: list[Task]) -> Iterator[tuple[Task, Finished]]:
        """Run tasks and yield those that are finished; failures are raised at the end, or at once."""
        failed: list[TaskFailed] = []
        for task, answer in self._executor.run("run", tasks):
            if isinstance(answer, TaskFailed):
                failed.append(answer)
                if not self._of.settings.keep_going or not TaskFailed.others_may_pass(answer.cause):
                    break
                self._progress.note(self._of.reporter.sentence(answer))
                continue
            journal.append(journal_entry(task.index, answer))
            self._finished += 1
            yield task, answer
            self._progress.advance(task.stop - task.start)
        if failed:
            raise self._of.reporter.error(failed, len(self._tasks)) if len(failed) > 1 else failed[0]


def _asked(executor: Executor, method: str, task: Task) -> Any:
    """Call a method of one worker's TaskRunner with a task; TaskFailed where that fails."""
    try:
        return executor.call(method, task)
    except (FunctionFailed, ResultRefused) as error:
        raise TaskFailed(task, error) from error


def _notes(label: str, found: Assembled) -> Iterator[str]:
    table = found.table
    bare = int((~table.terminated & ~table.truncated).sum())
    if bare:
        end = "ends" if bare == 1 else "end"
        yield f"after {label} {counted(bare, 'episode')} {end} with neither terminated nor truncated"
    if found.emptied:
        yield f"{label} leaves nothing of {counted(found.emptied, 'episode')}"
    if found.renumbered:
        own = "has a number of its own" if found.renumbered == 1 else "have numbers of their own"
        yield f"{counted(found.renumbered, 'episode')} {own}: another one had it already"


_SPACES = {"observation": "observation", "action": ACTION[0]}


def result_origin(
    reader: StepReader,
    fields: Sequence[Field],
    asked: str,
    step: Provenance,
    notes: Sequence[str],
    dropped_keys: Sequence[Dropped],
    rescaled: frozenset[Key],
    videos: VideoContents,
) -> Origin:
    """Carry over from the source's manifest everything that the new fields do not contradict.

    A space is kept if its leaves keep their keys, element types, shapes and scale; `env_metadata.json`, which describes
    both spaces, is only kept with both.
    """
    manifest = reader.manifest
    spaces, documents, dropped = dict(manifest.spaces), dict(reader.documents()), []
    for name, root in _SPACES.items():
        changed = _leaves_under(reader.fields, root) != _leaves_under(fields, root)
        if name in spaces and (changed or any(key[0] == root for key in rescaled)):
            del spaces[name]
            dropped.append(name)
    if dropped:
        documents.pop(ENV_METADATA, None)
    notes = [*manifest.notes, *notes, *(f"the {name} space no longer fits the data: left out" for name in dropped)]
    request = Request(source="preprocess", asked=asked, id=manifest.request.id)
    return Origin(
        request=request,
        provenance=(*manifest.provenance, step),
        resolved_revision=manifest.resolved_revision,
        spaces=spaces,
        renamed_keys=manifest.renamed_keys,
        dropped_keys=(*manifest.dropped_keys, *dropped_keys),
        notes=tuple(notes),
        documents=documents,
        videos=videos,
    )


def _leaves_under(fields: Sequence[Field], root: str) -> dict[Any, Any]:
    return {field.key: (field.dtype, field.shape) for field in fields if field.key[0] == root}


_TRACEBACK = "--debug shows the traceback"


_LISTED = 5


class ErrorReporter:
    """Turns failures into errors that name steps and episodes by their numbers in the dataset."""

    def __init__(self, selection: StepSelection, label: str) -> None:
        self._selection = selection
        self._label = label

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Convert failures raised inside into errors for users."""
        try:
            yield
        except TaskFailed as failed:
            raise self.error([failed], 1) from origin_of(failed.cause)
        except WorkerFailed as error:
            text = f"a worker process failed: {error.text}" if error.trace else f"{error.text} before it began"
            raise RbtoolError(text) from origin_of(error)
        except FunctionFailed as error:
            raise self._one(error, None) from origin_of(error)
        except ResultRefused as error:
            raise self._one(error, None) from error

    def error(self, failed: Sequence[TaskFailed], tasks: int) -> RbtoolError:
        """The error of a run in which some tasks failed."""
        if len(failed) == 1:
            found = self._one(failed[0].cause, failed[0].task)
            if isinstance(found, RbtoolError):
                return found
            raise found  # a bug of rbtool: shown with its traceback
        listed = "; ".join(self.sentence(one) for one in failed[:_LISTED])
        more = f"; and {len(failed) - _LISTED:,} more" if len(failed) > _LISTED else ""
        return RbtoolError(f"{len(failed):,} of {tasks:,} chunks failed: {listed}{more}", hint=_TRACEBACK)

    def sentence(self, failed: TaskFailed) -> str:
        """Describe the failure of one task in one line."""
        return str(self._one(failed.cause, failed.task))

    def _one(self, cause: BaseException, task: Task | None) -> BaseException:
        label = self._label
        place = self._place(cause, task)
        if isinstance(cause, WorkerFailed):
            if cause.trace:
                return RbtoolError(f"a worker process failed{_on(place)}: {cause.text}", hint=_TRACEBACK)
            hint = "--num-workers 0 runs it in this process"
            if "SIGKILL" in cause.text:  # by which the system ends processes that use too much memory
                hint = f"if memory ran out, try a smaller --chunk-size; {hint}"
            if isinstance(cause, TaskTimeout):
                hint = "a longer --timeout or a smaller --chunk-size gives it more time"
            where = f" while {label} worked on {place}" if place else f" in {label}"
            return RbtoolError(f"{cause.text}{where}", hint=hint)
        if isinstance(cause, FunctionFailed):
            fields = f". Fields here: {', '.join(self._fields(cause))}" if cause.text.startswith("KeyError") else ""
            return RbtoolError(f"{label} failed{_on(place)}: {cause.text}{fields}", hint=_TRACEBACK)
        if isinstance(cause, ResultRefused):
            return SchemaError(f"{label}{_on(place)}: {cause}")
        return cause

    def _fields(self, cause: FunctionFailed) -> Iterable[str]:
        """Return the keys that existed when one was missing; groups of the dataset, such as `next`, by their
        full key.
        """
        keys = [field.key for field in self._selection.reader.fields]
        if not cause.there:
            return dict.fromkeys(key[0] for key in keys)
        groups: dict[Key, set[str]] = {}
        for key in keys:
            for depth, part in enumerate(key):
                groups.setdefault(key[:depth], set()).add(part)
        there = set(cause.there)  # maybe not a whole group: the function may have edited its argument
        group = max(sorted(groups, key=len), key=lambda key: len(groups[key] & there) / len(groups[key] | there))
        return [key_name((*group, name)) for name in cause.there]

    def _place(self, cause: BaseException, task: Task | None) -> str:
        """Name steps and episodes by their numbers in the dataset."""
        narrow = getattr(cause, "steps", None)
        if narrow is None and task is None:
            return ""
        start, stop = narrow if narrow is not None else (task.start, task.stop)  # type: ignore[union-attr]
        selection = self._selection
        rows = np.searchsorted(selection.table.start, [start, stop - 1], "right") - 1
        source = selection.reader.episodes
        here = selection.rows[rows]
        shift = source.start[here] - selection.table.start[rows]
        low, high = int(start + shift[0]), int(stop - 1 + shift[1])
        first, last = source.episode[here].tolist()
        steps = f"steps {low:,} to {high:,}" if stop - start > 1 else f"step {low:,}"
        return f"{steps} (episodes {first} to {last})" if first != last else f"{steps} (episode {first})"


def _on(place: str) -> str:
    return f" on {place}" if place else ""
