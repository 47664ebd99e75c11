"""Takes a dataset through a work, task by task, into a new dataset that appears whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, RbtoolError, SchemaError, UsageError
from ..format import (
    Dropped,
    EpisodeTable,
    Manifest,
    Provenance,
    SoundSteps,
    Staging,
    StepReader,
    digest_bytes,
    write_manifest,
)
from ..progress import Progress, Silent
from ..ted import Field
from .assembly import Assembled, Assembly
from .beside import Beside, InTurn
from .crew import Crew, InProcess, Limits
from .failures import FunctionFailed, ResultRefused, TaskFailed, counted
from .job import Finished, Job, Task
from .journal import Journal
from .origin import result_origin
from .places import journal_path, result_folder
from .plan import Plan, in_turn
from .resuming import Unfinished, same_run
from .taking import Taking
from .telling import Telling
from .work import Work

__all__ = ["Preprocessing", "Settings"]

_NOT_RESUMABLE = (SchemaError, CorruptDataError, UsageError)
"""What another go at the same tasks would run into again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run goes about it: nothing here changes what comes out.

    `engine` is `local` or `ray`. `resume` goes on with what an earlier run of the same work has finished;
    `keep_going` finishes all other tasks when one fails, so that a later run has only that one to do.
    """

    limits: Limits = field(default_factory=Limits)
    start_method: str | None = None
    engine: str = "local"
    resume: bool = False
    keep_going: bool = False

    @property
    def needs_workers(self) -> str:
        """What of it cannot be done in this process; empty if nothing."""
        if self.engine == "ray":
            return "engine ray"
        return "" if self.limits.timeout is None else "a timeout"


@dataclass(frozen=True)
class Preprocessing:
    """A dataset, the steps of it that are taken, a work and a plan.

    Every task is done by whichever process is free; random numbers are seeded by the place in the dataset.
    `source_files` tells how the files of the source are now: all that is read has to be of these.
    """

    taking: Taking
    work: Work
    plan: Plan
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    source_files: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source_files", self.taking.reader.files_state())

    def preview(self) -> tuple[Field, ...]:
        """Run the first task in this process and say which fields come out; nothing is written."""
        with self.telling.told(), InProcess(self._job(), Limits(retries=0)) as crew:
            self.prepared(crew, Silent())
            return self.fields(crew)

    def publish(self, staging: Staging, asked: str, step: Provenance, progress: Progress) -> Manifest:
        """Run all tasks and publish the result at the destination of `staging`.

        `asked` is the source as the user named it, `step` what the provenance says of this run. Whatever goes wrong,
        nothing half-done is published; finished tasks are kept beside the destination for a run that resumes.
        """
        with self.telling.told(), self._crew() as crew, staging, contextlib.closing(crew):
            run = _Run(self, crew, staging, progress)
            try:
                with self.telling.told():
                    assembled, fields, work = run.rows()
                result = result_folder(staging.path)
                manifest = self._complete(result, assembled, fields, work, asked, step)
                if not staging.publish(result.name):
                    return _same_result(staging, manifest)
            except BaseException as error:
                staging.kept = run.worth_keeping and not isinstance(error, _NOT_RESUMABLE)
                if staging.kept:
                    run.tell_of_kept(error)
                raise
        return manifest

    @property
    def telling(self) -> Telling:
        return Telling(self.taking, self.work.label)

    def _job(self) -> Job:
        taking = self.taking
        chosen = None if len(taking.rows) == len(taking.reader.episodes) else taking.rows
        digest = taking.reader.manifest.content_digest
        return Job(taking.reader, digest, self.work, chosen, taking.steps, taking.cut, self.seed)

    @property
    def _sound(self) -> Any:
        """The rows of the table of a damaged source that are taken as sound; None where it is whole."""
        reader = self.taking.reader
        return reader.rows if isinstance(reader, SoundSteps) else None

    def _crew(self) -> Crew:
        settings, job = self.settings, self._job()
        if settings.engine == "ray":
            from .ray_crew import RayCrew

            return RayCrew(replace(job, work=self.work.portable()), self.plan.workers, settings.limits)
        if not self.plan.workers:
            return InProcess(job, settings.limits)
        from .pool import WorkerPool

        return WorkerPool(job, self.plan.workers, settings.limits, settings.start_method)

    def prepared(self, crew: Crew, progress: Progress) -> Work:
        """Let the work look at the rows beforehand, where it has to; return the one that knows."""
        work = self.work
        if work.needs_probing:
            answer = _asked(crew, "probe", self.plan.tasks()[0])
            work = work.settled(answer)
            crew.tell("settle", answer)
        if work.needs_measuring:
            work = work.informed(self._measured(crew, progress))
            crew.tell("become", work)
        return work

    def fields(self, crew: Crew) -> tuple[Field, ...]:
        """The fields that come out of the first task that returns any rows."""
        fields: tuple[Field, ...] = ()
        tasks = self.plan.tasks()
        crew.begin(in_turn(tasks)[1:])
        for task in tasks:
            fields, rows = _asked(crew, "schema", task)
            if rows:
                break
        return fields

    def _measured(self, crew: Crew, progress: Progress) -> list[Any]:
        # The tasks do not depend on the chunk size asked for: sums would, in the last bits.
        tasks = Plan.of(self.taking, None, 0, whole_episodes=True).tasks()
        found: dict[int, Any] = {}
        progress.start("measuring", self.taking.steps, "steps")
        for task, answer in crew.run("measure", tasks):
            if isinstance(answer, TaskFailed):
                raise answer
            found[task.index] = answer
            progress.advance(task.stop - task.start)
        progress.done()
        return [found[index] for index in sorted(found)]

    def identity(self) -> dict[str, Any]:
        """What decides the result, as JSON; two runs whose identity is the same do the same tasks."""
        return {
            "source": self.taking.reader.manifest.content_digest,
            "files of the source": self.source_files,
            "work": self.work.arguments(),
            "inputs": self.work.inputs(),
            "fingerprint": self.work.fingerprint(),
            "episodes": digest_bytes(self.taking.rows.tobytes()),
            "steps": self.taking.steps,
            "chunk_size": self.plan.chunk_size,
            "seed": self.seed,
            **({} if self._sound is None else {"sound episodes": digest_bytes(self._sound.tobytes())}),
        }

    def same_run(self, folder: Path) -> bool:
        """Tell whether a folder holds an unfinished run of the same tasks; UsageError if it is of others."""
        return same_run(folder, self.identity())

    def _complete(
        self, folder: Path, found: Assembled, fields: Sequence[Field], work: Work, asked: str, step: Provenance
    ) -> Manifest:
        if not found.table.steps:
            raise UsageError(f"{work.label} leaves no rows: there is nothing to write")
        reader = self.taking.reader
        step = replace(step, arguments={**step.arguments, **work.arguments()})
        dropped = [Dropped(name, why) for name, why in work.left_out(reader.fields, fields).items()]
        notes = [*work.notes, *_notes(work.label, found)]
        origin = result_origin(reader, fields, asked, step, notes, dropped, work.rescaled)
        return write_manifest(folder, fields, found.data, found.ranges, found.table, origin, found.text)

    def refuse_changed_source(self) -> None:
        """A change in place may have come after that part was verified; what replaces the source is not read."""
        reader: StepReader = self.taking.reader
        if reader.files_state() != self.source_files:
            raise CorruptDataError(f"{reader.path} was changed while it was read", hint="run it again")


class _Run:
    """One go at the tasks of a preprocessing: from nothing, or from where an earlier one ended."""

    def __init__(self, work: Preprocessing, crew: Crew, staging: Staging, progress: Progress) -> None:
        self._of = work
        self._crew = crew
        self._folder = staging.path
        self._progress = progress
        self._tasks = work.plan.tasks()
        self._unfinished = Unfinished.at(staging.path, work.taking.steps) if staging.taken_up else None
        self._finished = 0

    @property
    def worth_keeping(self) -> bool:
        """Whether something is finished that a later run can take up."""
        return self._finished > 0 and journal_path(self._folder).exists()

    def tell_of_kept(self, error: BaseException) -> None:
        """Say how to go on, with the error or, where a signal ends the run, beside it."""
        are = "is" if self._finished == 1 else "are"
        kept = f"{self._finished:,} of {len(self._tasks):,} chunks {are} kept: add --resume to go on from there"
        if isinstance(error, RbtoolError):
            error.hint = f"{error.hint}; {kept}" if error.hint else kept
        else:
            self._progress.note(kept)

    def rows(self) -> tuple[Assembled, tuple[Field, ...], Work]:
        """Run what is not finished yet and put the rows together."""
        of, crew = self._of, self._crew
        verified = Beside(of.taking.reader.verify_files)
        work = of.prepared(crew, self._progress)
        kept: Mapping[int, Finished] = {}
        if self._unfinished is not None:
            fields = self._unfinished.fields
            kept = self._unfinished.sound(self._folder, self._tasks, of.taking.steps)
        else:
            fields = of.fields(crew)
        anew = self._unfinished is None
        with (
            Assembly(self._folder, fields, of.taking, work, len(self._tasks), anew=anew) as assembly,
            InTurn() as books,
        ):
            crew.tell("open", self._folder, fields)
            with self._journal(fields) as journal:
                self._progress.start("preprocessing", of.taking.steps, "steps")
                self._take_kept(assembly, kept)
                left = [task for task in in_turn(self._tasks) if task.index not in kept]
                for task, finished in self._run(journal, left):
                    books.do(assembly.take, task, finished)
                    if verified.failed:
                        self._require_sound(verified)
                crew.dismiss()
                books.finish()
                self._progress.done()
            self._require_sound(verified)
            return assembly.finish(), fields, work

    def _require_sound(self, verified: Beside[None]) -> None:
        """What came of a damaged source, or of one that changed, must not bear a sound manifest."""
        self._of.refuse_changed_source()
        verified.result()

    def _journal(self, fields: Sequence[Field]) -> Journal:
        if self._unfinished is not None:
            return Journal(journal_path(self._folder))
        return Journal.begin(journal_path(self._folder), self._of.identity(), fields)

    def _take_kept(self, assembly: Assembly, kept: Mapping[int, Finished]) -> None:
        if kept:
            self._progress.note(f"{len(kept):,} of {len(self._tasks):,} chunks are finished already")
        for index, finished in kept.items():
            task = self._tasks[index]
            assembly.take(task, finished)
            self._finished += 1
            self._progress.advance(task.stop - task.start)

    def _run(self, journal: Journal, tasks: list[Task]) -> Iterator[tuple[Task, Finished]]:
        """Run tasks and yield those that are finished; what failed is raised in the end, or at once."""
        failed: list[TaskFailed] = []
        for task, answer in self._crew.run("run", tasks):
            if isinstance(answer, TaskFailed):
                failed.append(answer)
                if not self._of.settings.keep_going or not TaskFailed.others_may_pass(answer.cause):
                    break
                self._progress.note(self._of.telling.sentence(answer))
                continue
            journal.add(task.index, answer)
            self._finished += 1
            yield task, answer
            self._progress.advance(task.stop - task.start)
        if failed:
            raise self._of.telling.error(failed, len(self._tasks)) if len(failed) > 1 else failed[0]


def _asked(crew: Crew, method: str, task: Task) -> Any:
    """Let one member look at a task; what fails names it."""
    try:
        return crew.call(method, task)
    except (FunctionFailed, ResultRefused) as error:
        raise TaskFailed(task, error) from error


def _notes(label: str, found: Assembled) -> Iterator[str]:
    table: EpisodeTable = found.table
    bare = int((~table.terminated & ~table.truncated).sum())
    if bare:
        end = "ends" if bare == 1 else "end"
        yield f"after {label} {counted(bare, 'episode')} {end} with neither terminated nor truncated"
    if found.emptied:
        yield f"{label} leaves nothing of {counted(found.emptied, 'episode')}"
    if found.renumbered:
        own = "has a number of its own" if found.renumbered == 1 else "have numbers of their own"
        yield f"{counted(found.renumbered, 'episode')} {own}: another one had it already"


def _same_result(staging: Staging, manifest: Manifest) -> Manifest:
    """Somebody else published here in the meantime: fine if it is the very same."""
    there = Manifest.load(staging.destination)
    if there.content_digest != manifest.content_digest:
        raise UsageError(f"{staging.destination} was put there in the meantime", hint="add --force to replace it")
    return there
