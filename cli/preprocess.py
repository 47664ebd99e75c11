"""`rbtool preprocess`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import typer

from ..core.declarations import OPERATION_OPTIONS
from .failures import stdout_to_stderr
from .help import STORED, Example
from .options import (
    Dataset,
    DryRun,
    EngineName,
    Force,
    OptionGroup,
    Root,
    SkipBad,
    show_published,
    switch_or_value,
    verb,
)
from .output import Output

UnitName = enum.StrEnum("UnitName", {"STEP": "step", "ROW": "row", "EPISODE": "episode"})
StartMethodName = enum.StrEnum("StartMethodName", {"FORK": "fork", "SPAWN": "spawn", "FORKSERVER": "forkserver"})

_FUNCTION = "Your own function"
_OPERATIONS = "Operations, in this order"
_PIPELINE = "Operations from a file or another dataset"
_RUN = "How to run it"


def _option(name: str, metavar: str | None, about: str, panel: str) -> Any:
    return typer.Option(name, metavar=metavar, help=about, rich_help_panel=panel)


Destination: TypeAlias = Annotated[str | None, typer.Option("--dest", metavar="DIR", help="The folder to write.")]

Function: TypeAlias = Annotated[
    str | None, _option("--fn", "FILE.py:NAME|MODULE:NAME", "The function to run, instead of operations.", _FUNCTION)
]
Unit: TypeAlias = Annotated[
    UnitName,
    _option("--unit", None, "What a call gets: K steps, a single row, or a whole episode.", _FUNCTION),
]
Seed: TypeAlias = Annotated[
    int, _option("--seed", "N", "Seeds its random numbers, by chunk, row or episode.", _FUNCTION)
]

Hindsight: TypeAlias = Annotated[
    str | None,
    _option(
        "--hindsight",
        "STRATEGY[:RATIO]",
        "Relabel this share (0.8) of the steps with goals that their episode achieved: at that step or later (future), "
        "at the end (final) or anywhere (episode). The function returns (reward, terminated) of the steps it gets.",
        _FUNCTION,
    ),
]
GoalKey: TypeAlias = Annotated[
    str | None, _option("--goal-key", "FIELD", "The goal. Default: the field called desired_goal.", _FUNCTION)
]
AchievedGoalKey: TypeAlias = Annotated[
    str | None,
    _option("--achieved-goal-key", "FIELD", "What a step achieves. Default: achieved_goal under next.", _FUNCTION),
]

Operations: TypeAlias = Annotated[
    dict[str, Any],
    OptionGroup(
        tuple(
            switch_or_value(one.name, one.values, _option(f"--{one.name}", one.metavar, one.help, _OPERATIONS))
            for one in OPERATION_OPTIONS
        )
    ),
]

Pipeline: TypeAlias = Annotated[
    str | None, _option("--pipeline", "FILE", "Apply the operations of a TOML file, in its order.", _PIPELINE)
]
ShowPipeline: TypeAlias = Annotated[
    bool, _option("--show-pipeline", None, "Print these operations as a TOML file, and do nothing.", _PIPELINE)
]
Replay: TypeAlias = Annotated[
    str | None,
    _option(
        "--replay",
        "MANIFEST",
        "Repeat the operations that made another dataset (its folder or manifest.json), with the same constants.",
        _PIPELINE,
    ),
]
ReplayFilters: TypeAlias = Annotated[
    bool,
    _option(
        "--replay-filters",
        None,
        "With --replay, choose episodes and rows as it did, too: by --episodes, --filter, --where, --num-frames.",
        _PIPELINE,
    ),
]

NumWorkers: TypeAlias = Annotated[
    int | None, _option("--num-workers", "N", "Processes; 0: this one only. Default: one a core.", _RUN)
]
ChunkSize: TypeAlias = Annotated[
    int | None,
    _option(
        "--chunk-size", "K", "Rows a call. Default: 16 chunks or more, of 256 rows at least and 16 MB at most.", _RUN
    ),
]
NumFrames: TypeAlias = Annotated[int | None, _option("--num-frames", "N", "Only the first N steps.", _RUN)]
Resume: TypeAlias = Annotated[
    bool, _option("--resume", None, "Continue an interrupted run with the same arguments.", _RUN)
]
KeepGoing: TypeAlias = Annotated[
    bool, _option("--keep-going", None, "If a chunk fails, finish the others before the error.", _RUN)
]
Timeout: TypeAlias = Annotated[float | None, _option("--timeout", "SECONDS", "End a chunk that takes longer.", _RUN)]
Retries: TypeAlias = Annotated[int, _option("--retries", "N", "How often a chunk that failed is tried again.", _RUN)]
StartMethod: TypeAlias = Annotated[
    StartMethodName | None, _option("--start-method", None, "How processes are started.", _RUN)
]
Engine: TypeAlias = Annotated[
    EngineName, _option("--engine", None, "This machine, or a Ray cluster over a shared folder.", _RUN)
]


EXAMPLES = (
    Example(
        "rbtool preprocess ./cartpole --fn prep.py:normalise --dest ./normalised --num-workers 2",
        "a function in a file, run by two processes",
    ),
    Example(
        f"rbtool preprocess {STORED} --fn prep:normalise --dest ./first --num-frames 100",
        "a function of an importable module, on the first 100 steps",
    ),
    Example(
        "rbtool preprocess ./cartpole --fn prep.py:normalise --unit episode --seed 7 --dest ./episodes",
        "a function that takes a whole episode and returns any number of rows",
    ),
    Example(
        "rbtool preprocess ./cartpole --fn prep.py:normalise --dest ./kept --timeout 60 --keep-going --resume",
        "the same after a crash: only what is not finished yet is done",
    ),
    Example(
        "rbtool preprocess ./cartpole --cast action=float32 --cat inputs=observation,action"
        " --select inputs,next.observation --dest ./inputs",
        "no Python: convert, join and choose fields",
    ),
    Example(
        "rbtool preprocess ./cartpole --filter 'length > 50 and return > 200' --where 'not truncated' --dest ./good",
        "the better episodes, without the steps at which they were cut",
    ),
    Example(
        "rbtool preprocess ./cartpole --n-step 3 --gamma 0.99 --clip-reward=-1:1 --normalize observation"
        " --dest ./three",
        "three-step transitions, with observations on one scale",
    ),
    Example(
        "rbtool preprocess ./cartpole --return-to-go --mc-return --gamma 0.99 --exclude episode --dest ./returns",
        "what each step still earns",
    ),
    Example(
        "rbtool preprocess ./cartpole --normalize observation:quantile --select observation --show-pipeline > prep.toml"
        " && rbtool preprocess ./cartpole --pipeline prep.toml --dest ./piped",
        "write the operations down, change them, do them",
    ),
    Example(
        "rbtool preprocess ./cartpole --episodes 0:8 --normalize observation --dest ./train"
        " && rbtool preprocess ./cartpole --episodes 8: --replay ./train --dest ./test",
        "bring what was held out to the same scale",
    ),
)


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "preprocess", EXAMPLES)(preprocess)


def preprocess(
    dataset: Dataset,
    dest: Destination = None,
    *,
    out: Output,
    fn: Function = None,
    unit: Unit = UnitName.STEP,
    seed: Seed = 0,
    hindsight: Hindsight = None,
    goal_key: GoalKey = None,
    achieved_goal_key: AchievedGoalKey = None,
    operations: Operations,
    pipeline: Pipeline = None,
    show_pipeline: ShowPipeline = False,
    replay: Replay = None,
    replay_filters: ReplayFilters = False,
    num_workers: NumWorkers = None,
    chunk_size: ChunkSize = None,
    num_frames: NumFrames = None,
    resume: Resume = False,
    keep_going: KeepGoing = False,
    timeout: Timeout = None,
    retries: Retries = 1,
    start_method: StartMethod = None,
    engine: Engine = EngineName.LOCAL,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Run a function, or operations that need no Python, over all rows of a dataset, in parallel.

    A function takes a TensorDict of K rows, one row or an episode (--unit) and returns one; the first chunk fixes the
    keys, dtypes and shapes of the result. Operations run in the order in which they are listed here; an operation on
    a field applies to the same field under next as well. Fields are named like observation.position, and the name of
    a group means all its fields.
    """
    if show_pipeline:
        return _show_pipeline(out, fn, operations, pipeline, replay, replay_filters)
    from ..core.preprocess.preprocess import preprocess as run

    with stdout_to_stderr(), out.progress() as progress:
        result = run(
            dataset, fn, dest, unit=unit.value, operations=operations, pipeline=pipeline, replay=replay,
            replay_filters=replay_filters, skip_bad=skip_bad,
            hindsight=_asked(hindsight, goal_key, achieved_goal_key),
            num_workers=num_workers, chunk_size=chunk_size, num_frames=num_frames, seed=seed, resume=resume,
            keep_going=keep_going, timeout=timeout, retries=retries,
            start_method=None if start_method is None else start_method.value, engine=engine.value, root=root,
            force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    return show_published(out, result, dest)


def _asked(hindsight: str | None, goal_key: str | None, achieved_goal_key: str | None) -> dict[str, Any] | None:
    """Return how steps are relabelled; None where they are not."""
    from ..core.errors import UsageError

    keys = {"goal_key": goal_key, "achieved_goal_key": achieved_goal_key}
    if hindsight is None:
        if any(keys.values()):
            raise UsageError("--goal-key and --achieved-goal-key need --hindsight")
        return None
    from ..core.preprocess.hindsight import Hindsight

    return dataclasses.asdict(Hindsight.of(hindsight)) | keys


def _show_pipeline(
    out: Output,
    fn: str | None,
    operations: Mapping[str, Any],
    pipeline: str | None,
    replay: str | None,
    replay_filters: bool,
) -> None:
    from ..core.errors import UsageError
    from ..core.preprocess.preprocess import show_pipeline

    if fn is not None:
        raise UsageError("--show-pipeline needs operations, not --fn")
    result = show_pipeline(operations, pipeline, replay, replay_filters=replay_filters)
    for note in result.notes:
        out.summary(f"note: {note}")
    lines = result.text.rstrip("\n").split("\n")
    out.show(result, lines, lambda width: [[line] for line in lines])
