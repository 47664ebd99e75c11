"""`preprocess`: apply a function or a program of operations to a dataset and write the result as a new dataset."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ..engine.tasks import Limits
from ..engine.workspace import RESULT
from ..errors import UsageError
from ..format import fs
from ..format.checks import SoundSteps, damage_explained, sound_steps
from ..format.contracts import StepReader
from ..format.locate import find_dataset, require_apart
from ..format.manifest import Manifest, Provenance
from ..format.memmap.builder import provenance_step
from ..format.returns import table_with_returns
from ..format.staging import Outcome, Publication, Staging
from ..open_steps import finished_manifest, open_steps, whole_episodes
from ..options import PathLike, PreprocessOptions, takes
from ..results import Published, Result, published_entries, require_engine
from ..saved_steps import has_steps
from ..ted.schema import row_bytes
from .functions import find_function
from .processor import Processor
from .run import Preprocessing, Settings
from .selection import Plan, StepSelection, default_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessResult(Published):
    """The new dataset, its source, and how it was made.

    `function` is the name of the user function, or the word `operations` if there was none; `arguments` then lists the
    operations. `num_workers` is 0 if this process did the work.
    """

    kind: ClassVar[str] = "preprocess"
    source: Path
    function: str
    unit: str
    chunk_size: int
    num_workers: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


@takes(PreprocessOptions)
def preprocess(asked: PreprocessOptions) -> PreprocessResult:
    """Apply a function or built-in operations to a dataset and write the result as a new one.

    Exactly one of `fn`, `operations`, `pipeline` and `replay` says how rows change; `hindsight` goes with `fn`. The
    argument of `fn` depends on `unit`:

    - `step`: some consecutive steps, a tensordict of batch size `[K]`; `fn` returns any number of rows.
    - `row`: one step, batch size `[]`; `fn` returns one row. It runs under `torch.vmap` if that gives equal results, or
      as `vmap` says.
    - `episode`: a whole episode, batch size `[T]`; `fn` returns any number of rows.

    `fn` returns a tensordict or a dict of tensors under any keys, and may edit its argument. All results must have the
    keys, dtypes and shapes of the first chunk. If `fn` returns as many rows as it gets, rows stay in their episodes.
    The episode table (returns, end flags, continuity) is computed from the result.

    An interrupted run keeps its finished chunks for `resume`. The `content_digest` of the result does not depend on
    `num_workers`.

    Args:
        dataset: a path or `source:id`.
        fn: a callable, `FILE.py:NAME` or `module:name`.
        dest: the folder to write.
        unit: the argument of one call of `fn`: `step`, `row` or `episode`.
        seed: seeds the random generators for each call of `fn`, together with the number of the chunk's first step, of
            the row or of the episode.
        hindsight: `"future:0.8"`, or a mapping of the options. Steps get goals that their episode achieved; `fn` takes
            the relabelled steps and returns their (reward, terminated).
        operations: options of the command line and their values, like `{"n_step": 3}`.
        pipeline: a TOML file of operations.
        replay: a dataset or a `manifest.json`, whose last `preprocess` step is repeated.
        replay_filters: also repeat the choice of episodes and rows of that step.
        num_workers: number of worker processes; 0: this process does the work. Default: one for each core.
        chunk_size: rows of one call. Default: at least 16 chunks, of at least 256 rows and at most 16 MB.
        num_frames: use only this many steps from the start. An episode that is cut is marked truncated. Not with
            `resample`.
        resume: continue an interrupted run.
        keep_going: if a chunk fails, finish the others before raising the error.
        timeout: seconds after which a chunk is stopped.
        retries: how often a chunk that failed or was stopped is tried again.
        start_method: `fork`, `spawn` or `forkserver`.
        engine: where the worker processes run: `local` or `ray`.
        root: the folder of stored datasets.
        skip_bad: use the valid episodes of a damaged dataset; notes name the others.
        force: replace an existing `dest`.
        dry_run: do everything except writing.
        vmap: whether `fn` runs under `torch.vmap`, for `unit="row"`.
        progress: reports the progress. Default: no report.

    Returns:
        The dataset that was written. If `dest` already holds the result of the same work on the same data, it is left
        unchanged and `already_there` is True.

    Raises:
        UsageError: arguments contradict each other, or the function cannot be found, imported or sent to a worker.
            `dest` is unchanged after any error.
        RbtoolError: the function raises; the message names steps and episodes.
        SchemaError: a result differs from the first one in keys, dtypes or shapes.
        OutOfSpaceError: the disk has no room for the result.
    """
    started, destination = time.perf_counter(), _destination(asked.dest)
    path, asked = find_dataset(asked.dataset, asked.root), _with_replayed_frames(asked)
    engine = require_engine(asked.engine)
    settings = Settings(_limits(asked), asked.start_method, engine, asked.resume, asked.keep_going)
    with damage_explained(path, can_skip=not asked.skip_bad), _opened(path, asked.skip_bad) as reader:
        require_apart(reader.path, destination)
        processor = _processor(reader, asked)
        selection = _selection(reader, processor, asked.num_frames)
        selection.texts = processor.texts(selection.table.episode.tolist(), selection.texts)
        whole_episodes, apart = processor.whole_episodes, settings.needs_workers
        size = default_size(selection, processor.row_bytes) if asked.chunk_size is None else asked.chunk_size
        plan = Plan.of(selection, size, asked.num_workers, whole_episodes=whole_episodes, apart=apart)
        whole = Preprocessing(selection, processor, plan, asked.seed, settings)
        step = _step(whole, asked.num_frames)
        publication = Publication(
            staging=Staging(destination, replace=asked.force, takes=whole.same_run if asked.resume else None),
            find=lambda: _already_there(destination, step) if processor.is_described() else None,
            dry_run=asked.dry_run,
            name=RESULT,
        )
        found, arguments = publication.prepare(lambda: _preview(whole)), dict(processor.arguments())
        if found is None:
            found = whole.publish(publication, os.fspath(asked.dataset), step, asked.reporter)
            arguments = dict(found.content.provenance[-1].arguments)  # these include measured constants
        manifest, changes = found
        return PreprocessResult(
            **{"arguments": arguments, **published_entries(manifest, destination, started, reader), **changes},
            source=reader.path,
            function=processor.label,
            unit=processor.unit,
            chunk_size=plan.chunk_size,
            num_workers=plan.workers,
        )


def _opened(path: Path, skip_bad: bool) -> StepReader:
    has_steps(path)  # its errors say what the path holds instead
    reader = whole_episodes(open_steps(path, damaged=skip_bad))
    try:
        return sound_steps(reader) if skip_bad else reader
    except BaseException:
        reader.close()
        raise


def _destination(dest: PathLike | None) -> Path:
    if dest is None:
        raise UsageError("no destination: --dest is missing", hint="add --dest DIR")
    return fs.expanded(dest).absolute()


def _processor(reader: StepReader, asked: PreprocessOptions) -> Processor:
    from .operations.program import ProgramProcessor, different_past, filters_left_out, given_operations, program_of

    fn, unit, vmap, replay = asked.fn, asked.unit, asked.vmap, asked.replay
    operations = given_operations(asked.operations) or None
    ways = {"operations": operations, "a pipeline": asked.pipeline, "a replay": replay}
    given = [name for name, value in ways.items() if value is not None]
    if asked.hindsight is not None:
        if given:
            raise UsageError(f"hindsight and {given[0]} are both set, expected one: relabel first, then preprocess")
        if unit != "step" or vmap is not None:
            raise UsageError("hindsight works on whole episodes: unit and vmap are for functions without it")
        from .hindsight import HindsightProcessor

        return HindsightProcessor.of(fn, asked.hindsight, reader.fields)
    if (fn is None) != bool(given):
        found = f"there are a function and {' and '.join(given)}" if given else "nothing to run"
        raise UsageError(
            f"{found}, expected a function or operations",
            hint="add --fn FILE.py:NAME, operations like --select, --pipeline FILE or --replay MANIFEST",
        )
    if fn is not None:
        from .functions import FunctionProcessor

        return FunctionProcessor(find_function(fn), unit, vmap)
    if unit != "step" or vmap is not None or asked.seed:
        raise UsageError(f"unit, vmap and seed are for functions, found {given[0]}")
    program = program_of(asked.operations, asked.pipeline, replay, replay_filters=asked.replay_filters)
    remarks = different_past(replay, reader.manifest) if replay is not None else ()
    if replay is not None and not asked.replay_filters:
        remarks += filters_left_out(replay)
    made = [operation.name for operation in program.on_rows if operation.makes_rows]
    if made and asked.num_frames is not None:  # the last row would include events of the rows that are cut off
        raise UsageError(f"num_frames would cut an episode that {made[0]} makes rows of", hint="use two runs")
    return ProgramProcessor(program.settled(reader), reader.fields, remarks, None, reader.path)


def _with_replayed_frames(asked: PreprocessOptions) -> PreprocessOptions:
    """With `replay_filters`, use the `num_frames` of the replayed step, unless a number is given."""
    from .operations.program import replayed_frames

    if asked.num_frames is not None or asked.replay is None or not asked.replay_filters:
        return asked
    return replace(asked, num_frames=replayed_frames(asked.replay))


def _limits(asked: PreprocessOptions) -> Limits:
    if asked.timeout is not None and not asked.timeout > 0:
        raise UsageError(f"timeout is {asked.timeout} s, expected more than 0")
    if asked.retries < 0:
        raise UsageError(f"retries is {asked.retries}, expected 0 or more")
    return Limits(asked.timeout, asked.retries)


def _selection(reader: StepReader, processor: Processor, num_frames: int | None) -> StepSelection:
    if not reader.manifest.steps:
        raise UsageError("the dataset has no steps to preprocess")
    selection = StepSelection(reader, processor.selects(table_with_returns(reader)))
    if not selection.steps:
        raise UsageError(f"{processor.label} leaves none of the {len(reader.episodes):,} episodes")
    if num_frames is None:
        return selection
    if not 1 <= num_frames <= selection.steps:
        raise UsageError(f"num_frames is {num_frames:,}, expected 1 to {selection.steps:,}")
    return StepSelection(reader, selection.rows, num_frames)


def _step(whole: Preprocessing, num_frames: int | None) -> Provenance:
    """Return the provenance of this run: everything that affects the contents, which excludes the number of workers."""
    processor = whole.processor
    arguments = {
        **processor.arguments(), "chunk_size": whole.plan.chunk_size, "num_frames": num_frames, "seed": whole.seed,
    }  # fmt: skip
    if isinstance(whole.selection.reader, SoundSteps):
        arguments["skip_bad"] = True
    inputs = {**whole.selection.reader.manifest.inputs, **processor.inputs()}
    return provenance_step("preprocess", arguments, inputs)


def _already_there(destination: Path, step: Provenance) -> Manifest | None:
    """Return the manifest at `destination` if the same work on the same data produced it."""
    manifest = finished_manifest(destination)
    if manifest is None or not manifest.provenance:
        return None
    last = manifest.provenance[-1]
    if last.arguments.get("skip_bad") or step.arguments.get("skip_bad"):
        return None  # a damaged dataset has the digest of the intact one, and the episodes used are not recorded
    # vmap=None accepts a result that was computed with or without vmap.
    asked = {name: value for name, value in step.arguments.items() if (name, value) != ("vmap", None)}
    known = {name: last.arguments.get(name) for name in asked}
    same = (last.verb, known, last.inputs) == (step.verb, asked, step.inputs)
    return manifest if same else None


def _preview(whole: Preprocessing) -> Outcome[Manifest]:
    """Describe the result as far as the first task shows it, for a dry run."""
    fields, selection = whole.preview(), whole.selection
    notes = [f"{field.name}: {field.dtype} {list(field.shape)}" for field in fields]
    if not whole.processor.keeps_rows():
        notes.insert(0, f"counted before {whole.processor.label}, which may return more or fewer steps")
    planned = replace(
        selection.reader.manifest, layout="ted", steps=selection.steps, episodes=len(selection.table), files=(),
        content_digest="", renamed_keys={}, dropped_keys=(),
    )  # fmt: skip
    return Outcome(planned, {
        "bytes": selection.steps * row_bytes(fields), "content_digest": None, "boundary": {}, "notes": tuple(notes),
        "request": {}, "seconds": 0.0,
    })  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult(Result):
    """Operations in order: as JSON, and as the `text` of a pipeline file.

    `notes` name the parts of a replayed step that are left out, and those that a pipeline file cannot express.
    """

    kind: ClassVar[str] = "pipeline"
    operations: tuple[Mapping[str, Any], ...]
    text: str
    notes: tuple[str, ...] = ()


def show_pipeline(
    operations: Mapping[str, Any] | None = None,
    pipeline: PathLike | None = None,
    replay: PathLike | None = None,
    *,
    replay_filters: bool = False,
) -> PipelineResult:
    """Return the operations that `preprocess` would run with these arguments. No dataset is needed.

    UsageError for operations that are invalid for every dataset.
    """
    from .operations.program import filters_left_out, pipeline_text, program_of, replayed_frames

    program = program_of(operations, pipeline, replay, replay_filters=replay_filters)
    notes = filters_left_out(replay) if replay is not None and not replay_filters else ()
    if replay is not None and replay_filters and (frames := replayed_frames(replay)) is not None:
        notes = (f"a pipeline has no place for --num-frames {frames}, which the replay repeats: add it",)
    return PipelineResult(operations=tuple(program.describe()), text=pipeline_text(program), notes=notes)
