"""`rbtool merge`, `split` and `diff`: datasets into one, into parts, and compared."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import CheckFailed
from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import Example
from .options import Compress, Dataset, DryRun, Force, LayoutName, Root, SchemaName, show_published, verb
from .output import Output
from .text import Cell, Styled, Table, number

if TYPE_CHECKING:
    from ..core.verbs.diff import DiffResult
    from ..core.verbs.split import SplitPart, SplitResult

MERGE_EXAMPLES = (
    Example(
        "rbtool convert ./minari/cartpole/scripted-v0 ./more && rbtool merge ./cartpole ./more ./both",
        "the episodes of two datasets, one after the other",
    ),
    Example(
        "rbtool preprocess ./cartpole --select observation,action,next.reward --dest ./few"
        " && rbtool merge ./cartpole ./few ./common --schema intersect",
        "only the fields that both have; the others are listed",
    ),
    Example(
        "rbtool split ./cartpole --train 0.8 --test 0.2 --dest ./parts"
        " && rbtool merge ./parts/train ./parts/test ./whole",
        "the parts of a split: the same dataset again, with the same digest",
    ),
)
SPLIT_EXAMPLES = (
    Example("rbtool split ./cartpole --train 0.8 --val 0.1 --test 0.1 --seed 0", "into ./cartpole-split/train, …"),
    Example(
        "rbtool split ./cartpole --train 0.7 --test 0.3 --stratify return --dest ./parts",
        "with similar returns in both parts",
    ),
    Example("rbtool split ./cartpole --train 0.5 --val 0.5 --by seed --dest ./by-seed", "keep groups together"),
    Example(
        "rbtool split ./cartpole --train 0.9 --val 0.1 --in-order --dest ./tail --dry-run",
        "the last episodes for validation; what would be written",
    ),
)
DIFF_EXAMPLES = (
    Example(
        "rbtool convert ./cartpole ./small --layout packed && rbtool diff ./cartpole ./small",
        "the same data in two layouts are equal",
    ),
    Example(
        "rbtool preprocess ./cartpole --episodes 1: --dest ./tail && (rbtool diff ./cartpole ./tail; test $? = 3)",
        "what is in one only; exit code 3",
    ),
    Example("rbtool diff ./cartpole ./cartpole --rtol 1e-6 --json", "with a tolerance, as JSON"),
)
StratifyName = enum.StrEnum("StratifyName", {"RETURN": "return"})
KeptLayout = Annotated[
    LayoutName | None, typer.Option("--layout", help="ted or packed. Default: packed if all sources are.")
]
_MANY = 10


def add(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    verb(app, "merge", MERGE_EXAMPLES)(merge)
    verb(app, "split", SPLIT_EXAMPLES)(split)
    verb(app, "diff", DIFF_EXAMPLES)(diff)


def merge(
    datasets: Annotated[list[str], typer.Argument(metavar="DATASET...", help="Paths or stored datasets, two or more.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    schema: Annotated[
        SchemaName,
        typer.Option(
            "--schema",
            help="Fields that are not alike: refuse them; keep what all have; or keep all, zeros and a mask where one "
            "is missing.",
        ),
    ] = SchemaName.ERROR,
    cast: Annotated[
        bool, typer.Option("--cast", help="Convert different element types to the one that holds all their values.")
    ] = False,
    layout: KeptLayout = None,
    compress: Compress = None,
    root: Root = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Make one dataset of several: the episodes of each, in its order.

    Episode numbers are kept; if a number occurs twice, all episodes are numbered from 0, and the manifest lists where
    each comes from. The parts of a split give the dataset back that was split.
    """
    from ..core.verbs.merge import merge as run

    with out.progress() as progress:
        result = run(
            datasets, dest, schema=schema.value, cast=cast, layout=layout and layout.value, compress=compress,
            root=root, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    if result.renumbered:
        for name, source in zip(datasets, result.sources, strict=True):
            shown = f"episodes {_short(source.episodes)} are episodes {_short(source.numbers)} of {name}"
            out.summary(f"renumbered: {shown}")
    if result.restored:
        out.summary("restored: the content digest is that of the dataset that was split")
    show_published(out, result, dest)


def _short(runs: str) -> str:
    return runs if len(runs) <= 40 else f"{runs[:40].rpartition(',')[0]},…"


def split(
    dataset: Dataset,
    *,
    out: Output,
    train: Annotated[float | None, typer.Option("--train", metavar="F", help="Fraction of the episodes.")] = None,
    val: Annotated[float | None, typer.Option("--val", metavar="F", help="Fraction for validation.")] = None,
    test: Annotated[float | None, typer.Option("--test", metavar="F", help="Fraction for tests.")] = None,
    dest: Annotated[
        str | None,
        typer.Option("--dest", metavar="DIR", help="Parts are DIR/train, DIR/val, DIR/test. Default: ./NAME-split."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Draws the episodes. Default: 0.")] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="episode|content|KEY",
            help="What stays together: an episode, identical episodes, or those with one value of a field, a text or "
            "seed.",
        ),
    ] = "episode",
    stratify: Annotated[
        StratifyName | None, typer.Option("--stratify", help="Spread low and high returns over all parts.")
    ] = None,
    in_order: Annotated[bool, typer.Option("--in-order", help="Not at random: the first episodes to train.")] = False,
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Allow identical episodes in two parts.")
    ] = False,
    layout: KeptLayout = None,
    compress: Compress = None,
    root: Root = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Divide the episodes of a dataset into parts, at random.

    The fractions add up to 1. The parts are datasets, DIR/train, DIR/val and DIR/test; they appear all at once, and
    keep the numbers and the order of their episodes. The same seed gives the same parts.
    """
    from ..core.verbs.split import split as run

    with out.progress() as progress:
        result = run(
            dataset, dest, train=train, val=val, test=test, seed=seed, by=by, stratify=stratify and stratify.value,
            in_order=in_order, allow_duplicates=allow_duplicates, layout=layout and layout.value, compress=compress,
            root=root, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    _show_split(out, result, dest)


def _show_split(out: Output, result: SplitResult, dest: str | None) -> None:
    state = "nothing was written; this would be " if result.dry_run else ""
    state = "already there: " if result.already_there else state
    grouped = "" if result.by == "episode" else f" in {counted(result.groups, 'group')} by {result.by}"
    drawn = "in order" if result.seed is None else f"seed {result.seed}"
    facts = [f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}{grouped}", drawn]
    out.summary(Styled(state, "yellow"), " · ".join([*facts, size(result.bytes)]))
    if result.duplicates:
        out.summary(Styled("identical: ", "yellow"), f"{counted(result.duplicates, 'episode')} also in another part")
    for note in result.notes:
        out.summary(f"note: {note}")
    folder = dest or result.path.name
    names = {part.name: f"{folder.rstrip('/') or '/'}/{part.name}" for part in result.parts}
    out.show(
        result, names.values(), lambda width: Table(_part_rows(result, names), frozenset({1, 2, 3, 4})).lines(width)
    )
    if not result.dry_run:
        out.suggest(f"rbtool inspect {shlex.quote(names['train' if 'train' in names else result.parts[0].name])}")


def _part_rows(result: SplitResult, names: dict[str, str]) -> list[list[Cell]]:
    def row(part: SplitPart) -> list[Cell]:
        mean = "" if part.mean_return is None else f"mean return {number(part.mean_return)}"
        share = f"{part.episodes / result.episodes:.1%}"
        return [names[part.name], counted(part.steps, "step"), counted(part.episodes, "episode"), share, mean]

    return [row(part) for part in result.parts]


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A path, or a stored dataset.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The dataset to compare it with.")],
    *,
    out: Output,
    rtol: Annotated[float, typer.Option("--rtol", metavar="X", help="Relative tolerance. Default: bits.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", metavar="X", help="Absolute tolerance. Default: bits.")] = 0.0,
    ignore_order: Annotated[
        bool, typer.Option("--ignore-order", help="Order and numbers of episodes do not count.")
    ] = False,
    root: Root = None,
) -> int | None:
    """Compare two datasets: fields, episodes by their content, and values.

    Episodes are matched by their rows, at any place; those without an equal one by their number. The exit code is
    3 if the datasets differ.
    """
    from ..core.verbs.diff import diff as run

    with out.progress() as progress:
        result = run(a, b, rtol=rtol, atol=atol, ignore_order=ignore_order, root=root, progress=progress)
    rows = list(_differences(result, a, b))
    head = _verdict(result, a, b)
    out.show(result, (f"{kind} {text}".strip() for kind, text in rows), lambda width: _diff_lines(head, rows, width))
    return None if result.equal else CheckFailed.exit_code


def _verdict(result: DiffResult, a: str, b: str) -> list[Cell]:
    if result.equal:
        close = f", {counted(result.close, 'episode')} within the tolerances" if result.close else ""
        kind = "equal" if result.close or result.reordered or result.renumbered else "equal, bit for bit"
        return [
            Styled(kind, "green"),
            f": {counted(result.steps[0], 'step')} in {counted(result.episodes[0], 'episode')}{close}",
        ]
    found = [f"{counted(result.same, 'episode')} the same"]
    found += [f"{result.close:,} close"] if result.close else []
    found += [f"{len(result.changed):,} changed"] if result.changed else []
    found += [f"{len(alone):,} only in {name}" for alone, name in ((result.only_a, a), (result.only_b, b)) if alone]
    return [Styled("different", "red"), ": ", " · ".join(found)]


def _differences(result: DiffResult, a: str, b: str) -> Iterator[tuple[str, str]]:
    if len(set(result.steps)) > 1:
        yield "steps", f"{result.steps[0]:,} against {result.steps[1]:,}"
    if len(set(result.episodes)) > 1:
        yield "episodes", f"{result.episodes[0]:,} against {result.episodes[1]:,}"
    for field in result.fields:
        yield "field", field.sentence((a, b))
    for value in result.values:
        largest = "" if value.largest is None else f", by up to {number(value.largest)}"
        yield "values", f"{value.key}: {counted(value.steps, 'step')} in {counted(value.episodes, 'episode')}{largest}"
    for one in result.changed[:_MANY]:
        name = f"{one.a}" if one.a == one.b else f"{one.a} ({one.b} in {b})"
        lengths = f" {one.lengths[0]:,} against {one.lengths[1]:,}" if one.lengths[0] != one.lengths[1] else ""
        yield "changed", f"episode {name}: {', '.join(one.what)}{lengths}"
    if len(result.changed) > _MANY:
        yield "changed", f"and {len(result.changed) - _MANY:,} more episodes"
    for alone, name in ((result.only_a, a), (result.only_b, b)):
        if alone:
            yield "only in", f"{name}: {'episode' if len(alone) == 1 else 'episodes'} {_few(alone)}"
    if result.reordered:
        yield "order", "the episodes that both have come in another order"
    if result.renumbered:
        yield "numbers", f"{counted(result.renumbered, 'episode')} with another number"
    yield from (("table", entry) for entry in result.entries)


def _few(numbers: Iterable[int]) -> str:
    listed = list(map(str, numbers))
    return ", ".join(listed[:_MANY]) + (f" and {len(listed) - _MANY:,} more" if len(listed) > _MANY else "")


def _diff_lines(head: list[Cell], rows: list[tuple[str, str]], width: int | None) -> list[list[Cell]]:
    from .text import folded

    table = Table([[Styled(kind, "dim"), text] for kind, text in rows]).lines(width) if rows else []
    return [*folded(head, width, 2), *table]
