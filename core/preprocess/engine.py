"""Takes a dataset through a function, chunk by chunk, into a new dataset that appears whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..checkpoint import open_steps
from ..dataset import EpisodeTable, Manifest, PositionedTree, Provenance, Staging, StepReader, write_manifest
from ..errors import CorruptDataError, RbtoolError, SchemaError, UsageError
from ..progress import Progress
from ..ted import Field
from .crew import Crew, InProcess
from .episodes import ResultEpisodes, first_steps, is_cut
from .failures import ChunkFailed, FunctionFailed, ResultRefused, WorkerTrace, WorkerTrouble
from .functions import ChunkFunction
from .job import Job
from .origin import result_origin
from .plan import Plan
from .pool import WorkerPool

__all__ = ["Preprocessing"]

_TRACEBACK = "--debug shows the traceback"


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """A dataset, a function and a plan.

    The function takes a tensordict of some consecutive steps and returns as many rows under any keys. It is called
    once a chunk, by whichever process is free; global random numbers are seeded by the chunk.
    """

    reader: StepReader
    function: ChunkFunction
    plan: Plan

    def preview(self) -> tuple[Field, ...]:
        """Run the first chunk in this process and say which fields come out; nothing is written."""
        with self._told(), InProcess(self._job()) as crew:
            return crew.schema(self.plan.chunks()[0])

    def publish(self, staging: Staging, asked: str, step: Provenance, progress: Progress) -> Manifest:
        """Run all chunks and publish the result at the destination of `staging`.

        `asked` is the source as the user named it, `step` what the provenance says of this run. Whatever goes
        wrong, nothing is left behind: workers end before their files go.
        """
        with self._told(), self._crew() as crew:
            fields = crew.schema(self.plan.chunks()[0])
            with staging, contextlib.closing(crew):
                manifest = self._write(crew, fields, staging, asked, step, progress)
                self._refuse_changed_source()
                if not staging.publish():
                    return _same_result(staging, manifest)
        return manifest

    def _job(self) -> Job:
        manifest = self.reader.manifest
        cut = is_cut(self.reader.episodes, self.plan.steps)
        return Job(self.reader.path.absolute(), manifest.content_digest, self.function, self.plan.steps, cut)

    def _crew(self) -> Crew:
        if not self.plan.workers:
            return InProcess(self._job())
        return WorkerPool(replace(self._job(), function=self.function.portable()), self.plan.workers)

    def _write(
        self, crew: Crew, fields: tuple[Field, ...], staging: Staging, asked: str, step: Provenance, progress: Progress
    ) -> Manifest:
        with PositionedTree(staging.path, fields, self.plan.steps) as tree:
            crew.open(staging.path, fields)
            episodes = ResultEpisodes(first_steps(self.reader, self.plan.steps), tree)
            self._run(crew, tree, episodes, progress)
            data = tree.finish()
        table = episodes.table()
        notes = [*self._left_out(fields), *_ending_notes(self.function, table)]
        origin = result_origin(self.reader, fields, asked, step, notes)
        text = (self.reader.episode_text or [])[: len(table)]
        return write_manifest(staging.path, fields, data, tree.ranges, table, origin, text)

    def _run(self, crew: Crew, tree: PositionedTree, episodes: ResultEpisodes, progress: Progress) -> None:
        """Run all chunks; keep books and take digests of the finished ones from the front, in order."""
        progress.start("preprocessing", self.plan.steps, "steps")
        waiting, front = {}, 0
        for (start, stop), finished in crew.run(self.plan.chunks()):
            tree.merge_ranges(finished.ranges)
            waiting[start] = stop, np.unpackbits(finished.follows, count=stop - start - 1).astype(bool)
            progress.advance(stop - start)
            while front in waiting:
                end, follows = waiting.pop(front)
                episodes.take(front, end, follows)
                tree.settle(end)
                front = end
        progress.done()

    def _left_out(self, fields: tuple[Field, ...]) -> list[str]:
        """Name what the dataset has and the result has not: a function may drop keys, but not in silence."""
        kept = {field.key for field in fields}
        lost = ", ".join(field.name for field in self.reader.fields if field.key not in kept)
        return [f"{self.function.label} leaves out {lost}"] if lost else []

    def _refuse_changed_source(self) -> None:
        """Workers open the source by its path: an exchange in the meantime would have mixed two datasets."""
        with open_steps(self.reader.path) as now:
            if now.manifest.content_digest != self.reader.manifest.content_digest:
                raise CorruptDataError(f"{self.reader.path} was replaced while it was read", hint="run it again")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what went wrong in a chunk into a sentence that names the function, the steps and the episodes."""
        try:
            yield
        except ChunkFailed as failed:
            raise self._sentence(failed) from _origin_of(failed.__cause__)
        except WorkerTrouble as error:
            text = f"a worker process failed: {error.text}" if error.trace else f"{error.text} before it began"
            raise RbtoolError(text) from _origin_of(error)

    def _sentence(self, failed: ChunkFailed) -> BaseException:
        label, place, cause = self.function.label, self._place(failed.start, failed.stop), failed.__cause__
        if isinstance(cause, WorkerTrouble):
            if cause.trace:
                return RbtoolError(
                    f"a worker process failed on {place}: {cause.text}", hint="--debug shows the traceback"
                )
            hint = "for want of memory, try a smaller --chunk-size; --num-workers 0 runs it in one process"
            return RbtoolError(f"{cause.text} while {label} worked on {place}", hint=hint)
        if isinstance(cause, FunctionFailed):
            known = ", ".join(dict.fromkeys(field.key[0] for field in self.reader.fields))
            fields = f". Fields here: {known}" if cause.text.startswith("KeyError") else ""
            return RbtoolError(f"{label} failed on {place}: {cause.text}{fields}", hint=_TRACEBACK)
        if isinstance(cause, ResultRefused):
            return SchemaError(f"{label} on {place}: {cause}")
        return cause or failed

    def _place(self, start: int, stop: int) -> str:
        table = self.reader.episodes
        first, last = table.episode[table.index_of_step(np.array([start, stop - 1]))].tolist()
        steps = f"steps {start:,} to {stop - 1:,}" if stop - start > 1 else f"step {start:,}"
        return f"{steps} (episodes {first} to {last})" if first != last else f"{steps} (episode {first})"


def _origin_of(error: BaseException | None) -> BaseException | None:
    """What to show below an error under --debug: the exception itself, or the traceback a worker sent."""
    if error is None or error.__cause__ is not None or not isinstance(error, FunctionFailed):
        return error.__cause__ if error is not None else None
    return WorkerTrace(error.trace) if error.trace else None


def _ending_notes(function: ChunkFunction, table: EpisodeTable) -> list[str]:
    bare = int((~table.terminated & ~table.truncated).sum())
    return [f"after {function.label} {bare:,} episodes end with neither terminated nor truncated"] if bare else []


def _same_result(staging: Staging, manifest: Manifest) -> Manifest:
    """Somebody else published here in the meantime: fine if it is the very same."""
    there = Manifest.load(staging.destination)
    if there.content_digest != manifest.content_digest:
        raise UsageError(f"{staging.destination} was put there in the meantime", hint="add --force to replace it")
    return there
