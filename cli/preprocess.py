"""`rbtool preprocess`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import typer

from ..core.declarations import OPERATION_OPTIONS
from ..core.errors import UsageError
from ..core.options import PreprocessOptions
from .failures import stdout_to_stderr
from .help import STORED, Example
from .options import Dataset, OptionGroup, optional, show_published, switch_or_value, verb
from .output import Output

_OPERATIONS = "Operations, in this order"
_FUNCTION, _PIPELINE = (PreprocessOptions.described()[name].panel for name in ("fn", "pipeline"))

_GOALS = tuple(
    optional(name, str | None, typer.Option(f"--{name}", metavar="FIELD", help=about, rich_help_panel=_FUNCTION))
    for name, about in (
        ("goal-key", "The goal. Default: the field called desired_goal."),
        ("achieved-goal-key", "What a step achieves. Default: achieved_goal under next."),
    )
)
_OF_OPERATIONS = tuple(
    switch_or_value(
        one.name,
        one.values,
        typer.Option(f"--{one.name}", metavar=one.metavar, help=one.help, rich_help_panel=_OPERATIONS),
    )
    for one in OPERATION_OPTIONS
)
_SHOW_PIPELINE = optional(
    "show-pipeline",
    bool,
    typer.Option(
        "--show-pipeline", help="Print these operations as a TOML file, and run nothing.", rich_help_panel=_PIPELINE
    ),
    False,
)
_Options: TypeAlias = Annotated[
    dict[str, Any],
    OptionGroup.of(PreprocessOptions, hindsight=(*_GOALS, *_OF_OPERATIONS), pipeline=(_SHOW_PIPELINE,)),
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
        "after a crash: continue with the chunks that are not finished",
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
        "the return from each step on",
    ),
    Example(
        "rbtool preprocess ./cartpole --normalize observation:quantile --select observation --show-pipeline > prep.toml"
        " && rbtool preprocess ./cartpole --pipeline prep.toml --dest ./piped",
        "write the operations to a file, edit it, apply it",
    ),
    Example(
        "rbtool preprocess ./cartpole --episodes 0:8 --normalize observation --dest ./train"
        " && rbtool preprocess ./cartpole --episodes 8: --replay ./train --dest ./test",
        "normalize held-out episodes with the constants of the training set",
    ),
)


@verb("preprocess", EXAMPLES)
def preprocess(
    dataset: Dataset,
    dest: Annotated[str | None, typer.Option("--dest", metavar="DIR", help="The folder to write.")] = None,
    *,
    out: Output,
    options: _Options,
) -> None:
    """Run a function, or operations that need no Python, over all rows of a dataset, in parallel.

    A function takes a TensorDict of K rows, one row or one episode (--unit), and returns one; the first chunk fixes the
    keys, dtypes and shapes of the result. Operations run in the order in which they are listed here. An operation on a
    field also applies to the same field under next. Fields have names like observation.position; the name of a group
    means all fields in it.
    """
    operations = {one.name: options.pop(one.name) for one in _OF_OPERATIONS if one.name in options}
    if options.pop("show_pipeline"):
        return _show_pipeline(out, operations, options)
    from ..core.preprocess.preprocess import preprocess as run

    keys = {name: options.pop(name, None) for name in ("goal_key", "achieved_goal_key")}
    options["hindsight"] = _relabelling(options.get("hindsight"), keys)
    with stdout_to_stderr():
        result = out.run(run, dataset, dest=dest, operations=operations, **options)
    return show_published(out, result, dest)


def _relabelling(hindsight: str | None, keys: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of hindsight relabelling; None without `--hindsight`."""
    if hindsight is None:
        if any(keys.values()):
            raise UsageError("--goal-key and --achieved-goal-key need --hindsight")
        return None
    from ..core.preprocess.hindsight import Hindsight

    return dataclasses.asdict(Hindsight.of(hindsight)) | keys


def _show_pipeline(out: Output, operations: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from ..core.preprocess.preprocess import show_pipeline

    if "fn" in options:
        raise UsageError("--show-pipeline needs operations, not --fn")
    replay, filters = options.get("replay"), options["replay_filters"]
    result = show_pipeline(operations, options.get("pipeline"), replay, replay_filters=filters)
    for note in result.notes:
        out.summary(f"note: {note}")
    lines = result.text.rstrip("\n").split("\n")
    out.show(result, lines)
