"""`rbtool preprocess`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import preprocess_options as option
from .help import Example
from .options import Dataset, DryRun, Force, Root, SkipBad, verb
from .output import Output, stdout_aside
from .published import show_published

if TYPE_CHECKING:
    import typer

__all__ = ["EXAMPLES", "add"]

EXAMPLES = (
    Example(
        "rbtool preprocess ./cartpole --fn prep.py:normalise --dest ./normalised --num-workers 2",
        "a function in a file, run by two processes",
    ),
    Example(
        "rbtool preprocess minari:cartpole/scripted-v0 --fn prep:normalise --dest ./first --num-frames 100",
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
    """Make it a verb of the command line."""
    verb(app, "preprocess", EXAMPLES)(preprocess)


def preprocess(
    dataset: Dataset,
    dest: option.Destination = None,
    *,
    out: Output,
    fn: option.Function = None,
    unit: option.Unit = option.UnitName.STEP,
    seed: option.Seed = 0,
    episodes: option.Episodes = None,
    where_episodes: option.Filter = None,
    where: option.Where = None,
    rename: option.Rename = None,
    cast: option.Cast = None,
    cat: option.Cat = None,
    flatten: option.Flatten = False,
    resize: option.Resize = None,
    n_step: option.NStep = None,
    gamma: option.Gamma = None,
    return_to_go: option.ReturnToGo = False,
    mc_return: option.McReturn = False,
    clip_reward: option.ClipReward = None,
    normalize: option.Normalize = None,
    select: option.Select = None,
    exclude: option.Exclude = None,
    pipeline: option.Pipeline = None,
    show_pipeline: option.ShowPipeline = False,
    replay: option.Replay = None,
    replay_filters: option.ReplayFilters = False,
    num_workers: option.NumWorkers = None,
    chunk_size: option.ChunkSize = None,
    num_frames: option.NumFrames = None,
    resume: option.Resume = False,
    keep_going: option.KeepGoing = False,
    timeout: option.Timeout = None,
    retries: option.Retries = 1,
    start_method: option.StartMethod = None,
    engine: option.Engine = option.EngineName.LOCAL,
    root: Root = None,
    skip_bad: SkipBad = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Run a function, or operations that need no Python, over all rows of a dataset, in parallel.

    A function takes a TensorDict of K rows, one row or an episode (--unit) and returns one; the first chunk decides
    which keys, dtypes and shapes the result has, and every other is held to it. Operations are done in the order in
    which they are listed here; what is done to a field is done to what next holds of it as well. Fields are named
    like observation.position, and the name of a group means all of it.
    """
    operations: dict[str, Any] = {
        "episodes": episodes, "filter": where_episodes, "where": where, "rename": rename, "cast": cast, "cat": cat,
        "flatten": flatten, "resize": resize, "n_step": n_step, "gamma": gamma, "return_to_go": return_to_go,
        "mc_return": mc_return, "clip_reward": clip_reward, "normalize": normalize, "select": select,
        "exclude": exclude,
    }  # fmt: skip
    if show_pipeline:
        return _show_pipeline(out, fn, operations, pipeline, replay, replay_filters)
    from ..core.verbs.preprocess import preprocess as run

    with stdout_aside(), out.progress() as progress:
        result = run(
            dataset, fn, dest, unit=unit.value, operations=operations, pipeline=pipeline, replay=replay,
            replay_filters=replay_filters, skip_bad=skip_bad,
            num_workers=num_workers, chunk_size=chunk_size, num_frames=num_frames, seed=seed, resume=resume,
            keep_going=keep_going, timeout=timeout, retries=retries,
            start_method=None if start_method is None else start_method.value, engine=engine.value, root=root,
            force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    return show_published(out, result, dest)


def _show_pipeline(
    out: Output,
    fn: str | None,
    operations: Mapping[str, Any],
    pipeline: str | None,
    replay: str | None,
    replay_filters: bool,
) -> None:
    from ..core.errors import UsageError
    from ..core.verbs.pipeline import show_pipeline

    if fn is not None:
        raise UsageError("--fn names a function, and only operations make a pipeline")
    result = show_pipeline(operations, pipeline, replay, replay_filters=replay_filters)
    for note in result.notes:
        out.summary(f"note: {note}")
    lines = result.text.rstrip("\n").split("\n")
    out.show(result, lines, lambda width: [[line] for line in lines])
