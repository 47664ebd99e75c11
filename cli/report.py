"""`rbtool report`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import Example
from .options import Root, verb
from .output import Output
from .text import Cell, Styled, Table

if TYPE_CHECKING:
    from ..core.verbs.report import ReportResult

EXAMPLES = (
    Example("rbtool report ./cartpole -o cartpole.html", "one self-contained page, to read and to send"),
    Example("rbtool report ./cartpole ./cartpole.h5 -o both.html --json", "two datasets next to each other"),
)


@verb("report", EXAMPLES)
def report(
    datasets: Annotated[list[str], typer.Argument(metavar="DATASET...", help="Paths or stored datasets, up to 8.")],
    *,
    out: Output,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page to write: .html.")],
    root: Root = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page that is there.")] = False,
) -> int:
    """Write an HTML page about datasets: figures, episodes, images, findings, provenance.

    The page is one file of at most 3 MB, opens in any browser and loads nothing from the network. Every row is read and
    checked; the page shows errors, and the exit code is 3 if there are any. Needs rbtool[plot].
    """
    from ..core.verbs.report import report as run

    result = out.run(run, datasets, output, root=root, force=force)
    out.summary(f"{counted(len(result.datasets), 'dataset')}, {size(result.bytes)}, {result.seconds:.1f} s")
    for row in Table([_row(result, place) for place in range(len(result.datasets))]).lines():
        out.summary(*row)
    out.show(result, [output])
    return 3 if result.failed() else 0


def _row(result: ReportResult, place: int) -> list[Cell]:
    one = result.datasets[place]
    found = f"{counted(one.errors, 'error')}, {counted(one.warnings, 'warning')}"
    state = Styled(found, "red") if one.errors else Styled(found, "yellow") if one.warnings else found
    return [one.name, counted(one.steps, "step"), counted(one.episodes, "episode"), state]
