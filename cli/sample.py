"""`rbtool sample`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from ..core.progress import counted
from ..core.progress import readable_size as size
from ..core.verbs.options import SampleOptions
from .help import STORED, Example
from .options import (
    CacheSize,
    Dataset,
    OptionGroup,
    ReaderOptions,
    Streaming,
    refuse_stream_options,
    verb,
)
from .output import Output
from .text import Cell, Line, Styled, Table, folded, number

if TYPE_CHECKING:
    from ..core.verbs.sample import SampledField, SampledSlice, SampleResult, SampleTiming

EXAMPLES = (
    Example("rbtool sample ./cartpole -n 256 --seed 0", "a batch of 256 steps, the same one every time"),
    Example(
        f"rbtool sample {STORED} -n 4 --json",
        "the drawn steps and a summary of their values, as JSON",
    ),
    Example(
        "rbtool sample ./cartpole --sampler slice --slice-len 32 --seed 0",
        "eight runs of 32 steps, each of one episode",
    ),
    Example("rbtool sample ./cartpole --sampler prioritized --priority next.reward", "draw high rewards more often"),
    Example("rbtool sample ./cartpole --frame-stack 4", "each observation with the three before it in its episode"),
    Example("rbtool sample ./cartpole --window action=0:8", "each step with its action and the seven after it"),
    Example("rbtool sample ./cartpole --time --seconds 0.5", "how fast batches are drawn"),
    Example(
        "rbtool sample hf://me/cartpole --streaming --cache-size 2GB", "a dataset on a hub, without downloading it"
    ),
)

_SHOWN = 6
_TITLE = 9


@verb("sample", EXAMPLES)
def sample(
    dataset: Dataset,
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(SampleOptions)],
    streaming: Streaming = False,
    cache_size: CacheSize = None,
    raw: ReaderOptions,
) -> None:
    """Draw steps or slices of a dataset, a mixture or a stream at random, as training would.

    The batch is the first one of a buffer with this sampler and seed. -q prints the row of each drawn step, one per
    line, for a mixture as DATASET:ROW; with --time, it prints the steps per second. Streams are sampled without
    replacement, shard by shard.
    """
    if streaming:
        from ..core.verbs.sample import sample_stream

        result = sample_stream(dataset, raw, cache_size=cache_size, **options)
    else:
        from ..core.verbs.sample import sample as run

        refuse_stream_options(cache_size, raw)
        result = run(dataset, **options)
    out.show(result, _names(result), lines)


def _names(result: SampleResult) -> list[str]:
    """Return the output of `-q`: with `--time` the rate, else the rows of the drawn steps.

    For a mixture, the number of the dataset comes first: `1:512`.
    """
    if result.timing is not None:
        return [f"{round(result.timing.steps_per_second)} steps/s"]
    if result.sources:
        return [f"{source}:{index}" for source, index in zip(result.sources, result.indices, strict=True)]
    return [str(index) for index in result.indices]


def lines(result: SampleResult, width: int | None) -> list[list[Cell]]:
    """Return the first few steps or slices, a summary of each leaf, and the speed."""
    rows: list[Line] = [
        [
            f"  {field.key}",
            Styled(field.dtype, "cyan"),
            f"[{', '.join(map(str, field.shape))}]",
            size(field.bytes),
            about,
        ]
        for field in result.fields
        for about in [_about(field)]
    ]
    how = "" if result.sampler == "random" else f"   {result.sampler}"
    title: Line = [Styled(f"{_counts(result)} of {result.path}", "bold"), f"   seed {result.seed}{how}"]
    return [
        *folded(title, width, 2),
        *_drawn_lines(result, width),
        [Styled("batch", "dim")],
        *Table(rows, right=frozenset({3})).lines(width),
        *(line for row in (_speed(result.timing) if result.timing else []) for line in folded(row, width, _TITLE)),
    ]


def _counts(result: SampleResult) -> str:
    steps = counted(result.n, "step")
    return f"{steps} in {counted(len(result.slices), 'slice')}" if result.slices else steps


def _drawn_lines(result: SampleResult, width: int | None) -> Iterator[list[Cell]]:
    """Return the first few drawn steps or slices; for a mixture, the first few of each dataset and their number."""
    if not result.datasets:
        yield from folded([Styled("drawn    ", "dim"), _drawn(result)], width, _TITLE)
        return
    yield [Styled("drawn", "dim")]
    rows: list[Line] = [
        [
            f"  {one.name}",
            Styled(f"{one.steps / result.n:.1%}", "cyan"),
            counted(one.steps, "step"),
            _drawn(result, number) if one.steps else "",
        ]
        for number, one in enumerate(result.datasets)
    ]
    yield from Table(rows, right=frozenset({1, 2})).lines(width)


def _drawn(result: SampleResult, source: int = 0) -> str:
    """Format the first few drawn steps of a dataset as `episode:step`, or slices as `episode:first-last`."""
    if result.slices:
        form = "episode:first-last"
        drawn = [_slice(one) for one in result.slices if one.source == source]
    else:
        form = "episode:step"
        sources = result.sources or (source,) * result.n
        places = zip(sources, result.episodes, result.steps, strict=True)
        drawn = [f"{episode}:{step}" for found, episode, step in places if found == source]
    return f"{form} {' '.join(drawn[:_SHOWN])}{' …' if len(drawn) > _SHOWN else ''}"


def _slice(one: SampledSlice) -> str:
    padding = f"+{one.padding}" if one.padding else ""
    return f"{one.episode}:{one.first}-{one.last}({one.length}{padding})"


def _about(field: SampledField) -> str:
    if field.true_fraction is not None:
        return f"{field.true_fraction:.1%} true"
    if field.min is None or field.mean is None or field.max is None:
        return ""
    return f"mean {number(field.mean)}, {number(field.min)} … {number(field.max)}"


def _speed(timing: SampleTiming) -> list[list[Cell]]:
    """Return the lines on speed."""
    rates = [
        counted(round(timing.batches_per_second), "batch").replace("batchs", "batches") + "/s",
        f"{number(round(timing.steps_per_second))} steps/s",
        f"{size(timing.bytes_per_second)}/s",
    ]
    each = f"a batch takes {number(timing.median_us)} µs, 95 % of them under {number(timing.p95_us)} µs"
    measured = f"{timing.batches:,} batches in {timing.seconds:.1f} s, {counted(timing.threads, 'thread')}"
    return [
        [Styled("speed    ", "dim"), " · ".join(rates)],
        [f"         {each}"],
        [Styled(f"         {measured}", "dim")],
    ]
