"""`rbtool inspect`."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UsageError
from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import EXAMPLE_SOURCE, SOURCE, STORED, Example
from .mix import member_lines, mixture_counts
from .options import (
    CacheSize,
    FromFormat,
    ReaderOptions,
    Root,
    Streaming,
    ends,
    not_following,
    refuse_stream_options,
    verb,
    without_final,
)
from .output import Output
from .several import Datasets, of_each
from .text import TITLE, Cell, Line, Styled, Table, folded, kind_cells, number, sparkline, titled, vector

if TYPE_CHECKING:
    from ..core.format.locate import ColumnView
    from ..core.format.manifest import Provenance
    from ..core.verbs.inspect import (
        BufferResult,
        ColumnsResult,
        EnsembleResult,
        EpisodeView,
        FieldView,
        InspectResult,
        PartsResult,
        RowView,
        Spread,
        StreamResult,
    )
    from ..core.verbs.mix import MixResult


_INDENT = "  "
_STEPS_TO_NEXT = ("steps_to_next_obs",)


def summary_lines(result: InspectResult, width: int | None = None) -> Iterator[list[Cell]]:
    """Return the summary, with the most important facts in the first line, wrapped at `width` columns."""
    what = {"dataset": "TED", "checkpoint": "checkpoint"}.get(result.type, "raw dataset")
    title: Line = [
        Styled(result.name, "bold"),
        f"   {what}, {'format' if result.type == 'source' else 'layout'} {result.layout}",
        f"   {counted(result.steps, 'step')}   {counted(result.episodes, 'episode')}   {size(result.bytes)}",
    ]
    yield from folded(title, width, len(_INDENT))
    counts = {name: getattr(result.ends, name) for name in result.ends.__slots__}
    yield from titled("ends", ends(counts), width)
    if apart := _steps_ahead(result.fields) or not_following(counts):
        yield from titled("next", apart, width)
    if apart := without_final(counts):
        yield from titled("final", f"{apart}: the source has no observation after it", width)
    spreads = [("length", result.length), ("return", result.returns)]
    spreads += [(name.rpartition(".")[2], spread) for name, spread in result.scores.items()]
    rows = [_spread(title, spread) for title, spread in spreads if spread is not None]
    yield from Table(rows, indent=TITLE).lines(width)
    if result.layouts:
        yield from titled("layouts", _layouts(result), width)
    yield [Styled("fields", "dim")]
    yield from Table(list(_field_rows(result.fields)), frozenset({3, 4, 6}), frozenset({5, 6}), TITLE).lines(width)
    for problem in result.problems:
        yield from titled("damaged", problem, width, "red")
    for title, text in (*_spaces(result), *_remarks(result)):
        yield from titled(title, text, width)
    yield from _origin(result, width)


def _steps_ahead(fields: Iterable[FieldView]) -> str:
    """Return how far ahead `next` is in n-step data; "" for other data."""
    ahead = next((field for field in fields if field.key == _STEPS_TO_NEXT), None)
    if ahead is None:
        return ""
    most = "several steps" if ahead.max is None else f"up to {counted(int(ahead.max), 'step')}"
    return f"n-step data: next.observation is {most} ahead"


def _layouts(result: InspectResult) -> str:
    """Return the bytes of the rows in each layout, and what `packed` saves."""
    shown = [f"{name} {size(count)}" for name, count in result.layouts.items()]
    ted, packed = result.layouts["ted"], result.layouts["packed"]
    share = f" ({100 - round(100 * packed / ted)} % less)" if packed < ted else ""
    return f"{' · '.join(shown)}{share}"


def _spread(title: str, spread: Spread) -> Line:
    return [
        Styled(f"{title:<7}", "dim"),
        f"mean {number(spread.mean)}",
        f"median {number(spread.median)}",
        f"min {number(spread.min)}",
        f"max {number(spread.max)}",
        Styled(sparkline(spread.histogram), "cyan"),
    ]


def _field_rows(fields: tuple[FieldView, ...]) -> Iterator[Line]:
    """Yield one row per leaf, indented as a tree; neighbouring flags that differ in name only share one."""
    shown: tuple[str, ...] = ()
    for _, same in groupby(enumerate(fields), key=lambda item: _likeness(*item)):
        group = [field for _, field in same]
        *folders, _ = group[0].key
        for depth, folder in enumerate(folders):
            if shown[: depth + 1] != tuple(folders[: depth + 1]):
                yield [_INDENT * (depth + 1) + folder]
        shown = tuple(folders)
        yield _field_row(_INDENT * (len(folders) + 1) + ", ".join(field.key[-1] for field in group), group)


def _likeness(position: int, field: FieldView) -> tuple[Any, ...]:
    """Return the grouping key of a leaf: equal for flags that share a row, unique for other leaves."""
    return (field.key[:-1], field.dtype, field.shape) if field.role == "done" else (position,)


def _field_row(name: str, group: list[FieldView]) -> Line:
    field = group[0]
    low, high = field.min, field.max
    known = low is not None and high is not None and field.dtype != "bool"
    return [
        name,
        *kind_cells(field.dtype, field.shape, field.role),
        size(sum(one.bytes for one in group)),
        number(low) if known and low is not None else "",
        "…" if known else "",
        number(high) if known and high is not None else "",
    ]


def _spaces(result: InspectResult) -> Iterator[tuple[str, str]]:
    from ..core.format.manifest import space_text

    for name, space in result.spaces.items():
        yield "space", f"{name}: {space_text(space)}"


def _remarks(result: InspectResult) -> Iterator[tuple[str, str]]:
    for before, after in result.renamed_keys.items():
        yield "renamed", f"{before} → {after}"
    for dropped in result.dropped_keys:
        yield "left out", f"{dropped.key} ({dropped.why})"
    for note in result.notes:
        yield "note", note


def _origin(result: InspectResult, width: int | None) -> Iterator[list[Cell]]:
    for step in result.provenance:
        yield from step_lines(step, Styled(f"{'made':<{TITLE}}", "dim"), TITLE, width)
    for transfer in result.transfers:
        other = "" if transfer.content_digest == result.content_digest else " · of other contents"
        text = f"{transfer.address}@{transfer.commit[:7]} · {transfer.time[:10]}{other}"
        yield from titled(transfer.verb, text, width)
    if result.content_digest:
        yield from titled("digest", result.content_digest, width)


_FLAGS = ("next.terminated", "next.truncated")
_HIDDEN = {"episode", "next.done", "next.reward", *_FLAGS}
_WIDEST = 160


def episode_lines(view: EpisodeView, fields: tuple[FieldView, ...], width: int | None) -> list[list[Cell]]:
    """Return an episode as a table, or step by step if the table is too wide."""
    states, actions, results = _split(view.rows[0].values, fields) if view.rows else ([], [], [])
    table = Table([_header(states, actions, results), *_rows(view, states, actions, results)], right=frozenset({0}))
    facts = [counted(view.length + 1, "observation"), counted(view.length, "step"), view.end]
    facts.append("no return" if view.total_reward is None else f"return {number(view.total_reward)}")
    head: list[Cell] = [Styled(f"episode {view.episode}", "bold"), f"   {', '.join(facts)}"]
    if table.width <= (width or _WIDEST):
        return [*folded(head, width, 4), *table.lines()]
    return [*folded(head, width, 4), *_step_by_step(view, states, actions, results, width)]


def _split(values: Any, fields: tuple[FieldView, ...]) -> tuple[list[str], list[str], list[str]]:
    """Split the names of the leaves into states, actions and results of the step."""
    roles = {".".join(field.key): field.role for field in fields}
    names = [name for name in values if name not in _HIDDEN]
    results = [name for name in names if name.startswith("next.")]
    actions = [name for name in names if roles.get(name) == "action"]
    return [name for name in names if name not in {*results, *actions}], actions, results


def _header(states: list[str], actions: list[str], results: list[str]) -> Line:
    names = ["t", *states, *actions, "→", "reward", *(_after(name) for name in results), "end"]
    return [Styled(name, "dim") for name in names]


def _after(name: str) -> str:
    return f"next {name.removeprefix('next.')}"


def _rows(view: EpisodeView, states: list[str], actions: list[str], results: list[str]) -> list[Line]:
    rows: list[Line] = []
    before = -1
    for row in view.rows:
        if row.step != before + 1:
            rows.append(["…"])
        before = row.step
        known = [vector(row.values[name]) for name in (*states, *actions)]
        after = [vector(row.values[name]) for name in results]
        rows.append([f"{row.step:,}", *known, "→", _reward(row), *after, Styled(_end(row), "yellow")])
    return rows


def _reward(row: RowView) -> str:
    value = row.values.get("next.reward")
    return vector(value[0] if isinstance(value, list) and len(value) == 1 else value) if value is not None else ""


def _end(row: RowView) -> str:
    return " ".join(name.removeprefix("next.") for name in _FLAGS if row.values.get(name) in (True, [True]))


def _step_by_step(
    view: EpisodeView, states: list[str], actions: list[str], results: list[str], width: int | None
) -> list[list[Cell]]:
    """Return one line per leaf, with its value before and after the step."""
    lines: list[list[Cell]] = []
    before = -1
    for row in view.rows:
        if row.step != before + 1:
            lines.append(["…"])
        before = row.step
        parts: list[Line] = []
        for name in states:
            after = f"next.{name}"
            arrow = [f"→ {vector(row.values[after])}"] if after in results else []
            parts.append([name, vector(row.values[name]), *arrow])
        parts += [[name, vector(row.values[name])] for name in actions]
        parts += [["reward", f"→ {_reward(row)}"]] if "next.reward" in row.values else []
        only_after = [name for name in results if name.removeprefix("next.") not in states]
        parts += [[name, f"→ {vector(row.values[name])}"] for name in only_after]
        lines.append([Styled(f"t = {row.step:,}", "bold"), Styled(f"  {_end(row)}".rstrip(), "yellow")])
        lines += [["  ", *line] for line in Table(parts).lines(width and width - 2)]
    return lines


EXAMPLES = (
    Example(f"rbtool inspect {STORED}", "what is in a stored dataset"),
    Example("rbtool inspect ./cartpole --episode 3 --head 5", "the first steps of an episode, row by row"),
    Example(
        f"rbtool inspect ./{SOURCE}/tuple/trunc-v0",
        f"a raw {EXAMPLE_SOURCE.title} dataset, before it is converted",
    ),
    Example("rbtool inspect ./cartpole.h5 --json", "a checkpoint, as JSON"),
    Example(f"rbtool inspect ./cartpole '{SOURCE}:*'", "several: each one after the other"),
    Example("rbtool inspect hf://me/cartpole --streaming", "a dataset on a hub; fetches one shard"),
    Example("rbtool inspect ./log.csv", "a table: its columns, and a command that converts it"),
    Example("rbtool inspect ./run.mcap --write-map map.toml", "a robot log: topics, rates, clocks, and a map to edit"),
)


@verb("inspect", EXAMPLES)
def inspect(
    datasets: Datasets,
    *,
    out: Output,
    episode: Annotated[
        int | None, typer.Option("--episode", metavar="K", help="Show this episode as s → a → (r, s′).")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", help="Only its first N steps, and the last.")
    ] = None,
    root: Root = None,
    source_format: FromFormat = None,
    streaming: Streaming = False,
    cache_size: CacheSize = None,
    write_map: Annotated[
        Path | None,
        typer.Option("--write-map", metavar="FILE", help="Write the proposed map as a TOML file, for --map FILE."),
    ] = None,
    raw: ReaderOptions,
) -> int:
    """Show what is in a dataset, a checkpoint or a raw dataset.

    Reads metadata only, so the time does not depend on the size of the dataset. For a table in an unknown format (HDF5,
    npz, npy, CSV, Parquet), shows the columns and a command that would convert it; for a robot log, the topics with
    their rates and clocks. For a stream, fetches one shard.
    """
    from ..core.verbs.inspect import inspect as run
    from ..core.verbs.inspect import write_proposed_map

    if streaming:
        local = {"from": source_format, "episode": episode, "head": head, "write-map": write_map}
        for name, value in local.items():
            if value is not None:
                raise UsageError(f"--{name} works only for datasets on this disk, not for streams", hint="leave it out")
        return of_each("inspect", datasets, root, out, functools.partial(_inspect_stream, root, cache_size, raw))
    refuse_stream_options(cache_size, {})

    def inspect_one(dataset: str, out: Output) -> int:
        result = run(dataset, episode=episode, head=head, format=source_format, root=root, **raw)
        if write_map is not None:
            write_proposed_map(result, write_map)
        _show(result, dataset, out, plain=source_format is None and not any(raw.values()))
        return 0

    return of_each("inspect", datasets, root, out, inspect_one, named=episode is not None)


def _show(
    result: InspectResult | ColumnsResult | MixResult | PartsResult | EnsembleResult | BufferResult,
    dataset: str,
    out: Output,
    *,
    plain: bool,
) -> None:
    """Show a result. With `plain`, no option for raw datasets was given, and a next command is suggested."""
    from ..core.verbs.inspect import BufferResult, ColumnsResult, EnsembleResult, PartsResult
    from ..core.verbs.mix import MixResult

    if isinstance(result, ColumnsResult):
        out.show(result, [str(result.path)], column_lines)
        return
    if isinstance(result, PartsResult):
        out.show(result, [str(part.path) for part in result.parts], parts_lines)
        return
    if isinstance(result, EnsembleResult):
        out.show(result, [str(one.path) for one in result.members], ensemble_lines)
        return
    if isinstance(result, BufferResult):
        title: Line = [Styled(str(result.path), "bold"), f"   {result.sentence}"]
        out.show(result, [str(result.path)], lambda _, width: folded(title, width, len(_INDENT)))
        return
    if isinstance(result, MixResult):
        out.show(result, [str(result.path)], mixture_lines)
        out.suggest(f"rbtool sample {shlex.quote(dataset)}")
        return
    out.show(result, [str(result.path)], lines)
    if result.episode is not None or not plain:
        return  # the next command would need the same options
    if result.type == "source":
        out.suggest(f"rbtool convert {shlex.quote(dataset)} DEST")
    elif result.problems:
        out.suggest(f"rbtool check {shlex.quote(dataset)}")
    elif result.first_episode is not None:
        out.suggest(f"rbtool inspect {shlex.quote(dataset)} --episode {result.first_episode} --head 5")


def column_lines(result: ColumnsResult, width: int | None) -> Iterator[Line]:
    """Return the columns of a file in an unknown format, and the command that would convert it."""
    if result.topics:
        yield from _topic_lines(result, width)
    else:
        known = f"of format {result.format}" if result.format != "table" else "in no known format"
        most = max((column.rows for column in result.columns), default=0)
        title: Line = [
            Styled(str(result.path), "bold"),
            f"   {result.file} {known}   {counted(most, 'row')}   {counted(len(result.columns), 'column')}",
            f"   {size(result.bytes)}",
        ]
        yield from folded(title, width, len(_INDENT))
    yield [Styled("columns", "dim")]
    rows = 0 if result.topics else max((column.rows for column in result.columns), default=0)
    yield from Table([_column_row(group, rows) for group in _alike(result.columns)], indent=TITLE).lines(width)
    for doubt in result.doubts:
        yield from titled("note", doubt, width)
    yield [Styled("to convert, where this is what the columns are:", "dim")]
    yield [f"{_INDENT}{result.command}"]


def _topic_lines(result: ColumnsResult, width: int | None) -> Iterator[Line]:
    """Return the topics of a robot log."""
    seconds, messages = max(topic.end for topic in result.topics), sum(topic.messages for topic in result.topics)
    title: Line = [
        Styled(str(result.path), "bold"),
        f"   {result.file}   {counted(messages, 'message')}   {counted(len(result.topics), 'topic')}   {seconds:.3f} s",
        f"   {size(result.bytes)}",
    ]
    yield from folded(title, width, len(_INDENT))
    yield [Styled("topics", "dim")]
    rows: list[Line] = []
    for topic in result.topics:
        stamps = "no stamps"
        if topic.delay is not None:
            stamps = f"stamps {topic.delay:.4f} s before the log, ± {topic.jitter:.4f} s"
        rate = f"{topic.rate:.4g} Hz" if topic.rate else ""
        kind = Styled(topic.type or topic.encoding, "cyan")
        gap = f"gaps up to {topic.gap:.3f} s" if topic.gap else ""
        rows.append([_INDENT + topic.name, kind, counted(topic.messages, "message"), rate, gap, stamps])
    yield from Table(rows, indent=TITLE).lines(width)


_NUMBERED = re.compile(r"(.*?)\d+")


def _alike(columns: Iterable[ColumnView]) -> Iterator[list[ColumnView]]:
    """Group neighbouring columns that differ only in a number at the end of their names: `joint_0`, `joint_1`, …."""

    def likeness(item: tuple[int, ColumnView]) -> tuple[Any, ...]:
        position, column = item
        numbered = _NUMBERED.fullmatch(column.name)
        rest = (column.dtype, column.shape, column.rows, column.key, column.why)
        return (numbered[1], *rest) if numbered else (position, *rest)

    for _, same in groupby(enumerate(columns), key=likeness):
        yield [column for _, column in same]


def _column_row(group: list[ColumnView], rows: int) -> Line:
    first = group[0]
    name = first.name if len(group) == 1 else f"{first.name} … {group[-1].name}"
    count = f"{len(group):,} ×" if len(group) > 1 else ""
    lengths = "" if first.rows == rows or not rows else f"{counted(first.rows, 'row')}"
    remark = Styled(first.why or lengths, "yellow")
    shown = Styled(f"→ {first.key}" if first.key else "", "green")
    return [_INDENT + name, count, Styled(first.dtype, "cyan"), f"[{', '.join(map(str, first.shape))}]", shown, remark]


def lines(result: InspectResult, width: int | None = None) -> Iterable[Line]:
    """Return the summary, or the requested episode."""
    return (
        summary_lines(result, width) if result.episode is None else episode_lines(result.episode, result.fields, width)
    )


_CONSTANTS, _OPERATIONS = "constants", "operations"
_MEASURES = "normalize"
"""The operation that measures constants, which are recorded apart from its parameters."""
_SPEC, _OF_SPEC = "env_spec", ("max_episode_steps", "kwargs")
"""The spec of a recorded environment, and the entries of it that are shown; `--json` has all."""
_MOST = 16
"""The longest list of constants that is shown in full; `--json` has all."""


def step_lines(step: Provenance, title: Cell, indent: int, width: int | None) -> Iterator[list[Cell]]:
    """Return the lines of a step of the provenance: one that starts with `title`, then its operations."""
    operations = _operations(step.arguments)
    rest = {name: value for name, value in step.arguments.items() if not operations or name not in _OPERATION_PARTS}
    spec = rest.pop(_SPEC, None)
    if isinstance(spec, Mapping):
        rest |= {name: spec.get(name) for name in _OF_SPEC}
    what = f"{step.verb} {_arguments(rest)}".rstrip()
    yield from folded([title, f"{what} · {step.time[:10]} · rbtool {step.version}"], width, indent)
    rows: list[Line] = []
    for operation in operations:
        parameters = {name: value for name, value in operation.items() if name not in {"name", _CONSTANTS}}
        rows.append([Styled(str(operation["name"]), "cyan"), _arguments(parameters)])
    inner = None if width is None else max(1, width - indent)
    for operation, block in zip(operations, Table(rows, indent=2).blocks(inner), strict=True):
        yield from ([" " * indent, *line] for line in block)
        for text in _constants(operation.get(_CONSTANTS)):
            yield from folded([" " * (indent + 2), Styled(text, "dim")], width, indent + 4)


_OPERATION_PARTS = frozenset({_OPERATIONS, _CONSTANTS})


def _operations(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the operations of a step, each with the constants that were measured for it; [] for other steps."""
    listed, measured = arguments.get(_OPERATIONS), arguments.get(_CONSTANTS)
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "name" in one for one in listed):
        return []
    rest = iter(measured if isinstance(measured, list) else [])
    return [
        {_CONSTANTS: next(rest, []), **one} if one["name"] == _MEASURES and _CONSTANTS not in one else one
        for one in listed
    ]


def _constants(measured: Any) -> Iterator[str]:
    """Format the constants of each field of an operation."""
    for one in measured if isinstance(measured, list) else []:
        if isinstance(one, dict):
            rest = (f"{name} {_constant(value)}" for name, value in one.items() if name != "key")
            yield f"{one.get('key', '')}: {' · '.join(rest)}"


def _constant(value: Any) -> str:
    if not isinstance(value, list):
        return _text(value)
    few = len(value) <= _MOST and all(isinstance(item, int | float) for item in value)
    return f"[{' '.join(f'{item:.4g}' for item in value)}]" if few else vector(value)


def _arguments(arguments: Mapping[str, Any]) -> str:
    """Format arguments that are given: switches by their name, others as `name=value`."""
    shown = {name: value for name, value in arguments.items() if value is not False and value not in (None, "", {}, [])}
    return " ".join(name if value is True else f"{name}={_text(value)}" for name, value in shown.items())


def _text(value: Any) -> str:
    """Format a value as one shell word; lists and mappings as options take them: `a,b`, `key=value`."""
    if isinstance(value, Mapping):
        value = [f"{name}={_plain(one)}" for name, one in value.items()]
    if isinstance(value, list):
        words = [_plain(one) for one in value]
        value = (" " if any("," in word or " " in word for word in words) else ",").join(words)
    return shlex.quote(_plain(value))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def mixture_lines(result: MixResult, width: int | None) -> Iterator[Line]:
    """Return a mixture as `inspect` shows it: its totals, then `member_lines`."""
    yield from folded([Styled(str(result.path), "bold"), f"   mixture   {mixture_counts(result)}"], width, 2)
    yield from member_lines(result, width)
    yield from titled("digest", result.content_digest, width)


def ensemble_lines(result: EnsembleResult, width: int | None) -> Iterator[Line]:
    """Return the members of a saved ensemble as `inspect` shows them."""
    batch = "" if result.batch_size is None else f"   batches of {result.batch_size:,}"
    counts = f"{counted(len(result.members), 'member')}   {counted(result.elements, 'element')}{batch}"
    yield from folded([Styled(str(result.path), "bold"), f"   checkpoint of an ensemble   {counts}"], width, 2)
    rows: list[list[Cell]] = [
        [
            f"  {one.name}",
            counted(one.elements, "element"),
            "" if one.capacity is None else f"room for {one.capacity:,}",
            "weight by size" if one.weight is None else f"weight {number(one.weight)}",
        ]
        for one in result.members
    ]
    yield from Table(rows, frozenset({1, 2})).lines(width)


def parts_lines(result: PartsResult, width: int | None) -> Iterator[Line]:
    """Return the parts of a split as `inspect` shows them."""
    how = [f"by {result.by}", "in order" if result.in_order else f"seed {result.seed}"]
    how += [f"stratified by {result.stratify}"] if result.stratify else []
    counts = f"{counted(result.steps, 'step')}   {counted(result.episodes, 'episode')}"
    yield from folded([Styled(str(result.path), "bold"), f"   split {', '.join(how)}   {counts}"], width, 2)
    rows: list[list[Cell]] = [
        [
            f"  {part.name}",
            counted(part.steps, "step"),
            counted(part.episodes, "episode"),
            f"{part.episodes / max(result.episodes, 1):.1%}",
            "" if part.mean_return is None else f"mean return {number(part.mean_return)}",
            Styled(part.problem or "", "red"),
        ]
        for part in result.parts
    ]
    yield from Table(rows, frozenset({1, 2, 3, 4})).lines(width)
    if result.duplicates:
        line = f"{counted(result.duplicates, 'episode')} also in another part"
        yield from titled("identical", line, width, "yellow")
    yield from titled("digest", f"{result.content_digest}, before the split", width)


def _inspect_stream(
    root: str | None, cache_size: str | None, options: Mapping[str, Any], dataset: str, out: Output
) -> int:
    """Show the contents of a stream."""
    from ..core.verbs.inspect import inspect_stream as run

    result = run(dataset, options, root, cache_size)
    out.show(result, [result.address], _stream_lines)
    if not any(options.values()):  # the next command would need the same options
        out.suggest(f"rbtool sample {shlex.quote(dataset)} --streaming")
    return 0


def _stream_lines(result: StreamResult, width: int | None) -> Iterator[Line]:
    """Return the totals of a stream, as far as they are known, the size of its first shard, and its fields."""
    counts = [counted(result.shards, "shard")]
    counts += [counted(result.steps, "step")] if result.steps is not None else []
    counts += [counted(result.episodes, "episode")] if result.episodes is not None else []
    counts += [size(result.bytes)] if result.bytes is not None else []
    yield from folded([Styled(result.address, "bold"), f"   stream   {'   '.join(counts)}"], width, 2)
    first = f"the first has {counted(result.shard_steps, 'step')} in {counted(result.shard_episodes, 'episode')}"
    yield from titled("shards", first, width)
    yield [Styled("fields", "dim")]
    rows: list[Line] = [[f"  {one.key}", *kind_cells(one.dtype, one.shape, one.role)] for one in result.fields]
    yield from Table(rows, indent=TITLE).lines(width)
    for sentence in result.lacking:
        yield from titled("left out", sentence, width, "yellow")
