"""`rbtool bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ..core.progress import counted
from ..core.progress import readable_size as size
from ..core.verbs.options import BENCH_JOBS, BenchOptions
from .help import Example
from .options import Dataset, OptionGroup, verb
from .output import Output
from .text import Cell, Line, Styled, Table, folded

if TYPE_CHECKING:
    from ..core.verbs.bench import BenchResult, JobFigures

EXAMPLES = (
    Example("rbtool bench ./cartpole", "rbtool, and the other libraries that are installed here"),
    Example("rbtool bench ./cartpole --library rbtool --folder ./forms", "one library; keeps its files for next time"),
    Example("rbtool bench ./cartpole --job epoch --json", "one job, with all figures"),
)


@verb("bench", EXAMPLES)
def bench(
    dataset: Dataset,
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(BenchOptions)],
) -> None:
    """Compare how fast rbtool and other libraries read a dataset.

    The values that each library reads are compared with the dataset first, so that none gains by reading less. Each
    library reads the same rows in its own file format and in its own process, and the libraries take turns.
    """
    from ..core.verbs.bench import bench as run

    result = out.run(run, dataset, **options)
    fastest = [one.name for one in result.libraries if any(job.rank == 1 for job in one.jobs.values())]
    out.show(result, fastest or [one.name for one in result.libraries], bench_lines)
    if result.missing:
        out.summary(Styled(f"not installed here: {', '.join(result.missing)}", "dim"))
        out.suggest(f"rbtool bench {dataset} --library rbtool --library {result.missing[0]}=PYTHON")


def bench_lines(result: BenchResult, width: int | None) -> list[Line]:
    """Return a line for each library, with the fastest of each job in bold, then the jobs that a library cannot do."""
    names = ("frames/s", "chunks/s", "epoch rows/s", "shuffled", "resume", "on disk", "made in")
    lines: list[Line] = [[Styled(text, "dim") for text in ("library", *names)]]
    for one in result.libraries:
        jobs = [one.jobs.get(job) for job in BENCH_JOBS]
        epoch = one.jobs.get("epoch")
        shuffled = "-" if epoch is None or epoch.shuffled is None else f"{epoch.shuffled:.2f}"
        cells: list[Cell] = [*(_cell(job) for job in jobs[:3]), shuffled, _cell(jobs[3])]
        made = f"{one.seconds:,.1f} s" if one.form else "-"
        lines.append([f"{one.name} {one.versions.get(one.name, '')}", *cells, size(one.bytes), made])
    table: list[Line] = list(Table(lines, right=frozenset(range(1, 1 + len(names)))).lines(width))
    for one in result.libraries:
        for job, why in one.lacks.items():
            table += folded([Styled(f"{one.name} {why}: no {job}", "dim")], width, 2)
    text = (
        f"{counted(result.steps, 'step')} of {', '.join(result.keys)}; batches of {result.batch_size}, medians of "
        f"{counted(result.rounds, 'round')}; {result.machine}"
    )
    return table + folded([Styled(text, "dim")], width, 2)


def _cell(job: JobFigures | None) -> Cell:
    if job is None:
        return "-"
    text = f"{job.seconds * 1e3:,.0f} ms" if job.rate is None else f"{job.rate:,.0f}"
    return Styled(text, "bold") if job.rank == 1 else text
