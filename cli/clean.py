"""`rbtool clean`."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.progress import counted
from ..core.verbs.options import CleanOptions
from .failures import stdout_to_stderr
from .help import Example
from .options import Dataset, OptionGroup, show_published, verb
from .output import Output
from .text import Line, Styled, Table, first_of

if TYPE_CHECKING:
    from ..core.verbs.clean import CleanResult

EXAMPLES = (
    Example("rbtool clean ./cartpole ./clean --dry-run", "show the proposed changes and why; write nothing"),
    Example("rbtool clean ./cartpole ./clean", "make all proposed changes"),
    Example("rbtool clean ./cartpole ./chosen --drop nan,stuck --dedupe near --min-length 10", "only some of them"),
    Example("rbtool clean ./cartpole ./trimmed --trim-idle --json", "cut off idle ends of episodes; as JSON"),
)
_COLOURS: dict[str, Any] = {"drop": "red", "trim": "yellow", "fix": "green"}


@verb("clean", EXAMPLES)
def clean(
    dataset: Dataset,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(CleanOptions)],
) -> None:
    """Write a new dataset with the changes that the findings of rbtool check propose.

    Without --drop, --dedupe, --min-length, --trim-idle and --fix, all proposed changes are made, except those that
    would leave out most episodes for one reason. DATASET may be in the format of another library; DEST is TED. Findings
    that remain are listed.
    """
    from ..core.verbs.clean import clean as run

    with stdout_to_stderr():
        result = out.run(run, dataset, dest, **options)
    if result.dry_run and not (out.quiet or out.as_json):
        out.summary(
            Styled("nothing was written; this would be ", "yellow"),
            f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}",
        )
        out.show(result, [dest], lines)
        return
    for line in lines(result, out.stderr_width):
        out.summary(*line)
    show_published(out, result, dest, f"rbtool check {shlex.quote(dest)}")


def lines(result: CleanResult, width: int | None) -> list[Line]:
    """Return a row for each change, and for each finding that remains."""
    found = [(one.what, one.rule, one.name, one.message) for one in result.changes]
    for left in result.remaining:
        mend = "" if left.mend.startswith("rbtool clean") else left.mend
        found.append(("left", left.rule, left.name, "; ".join(filter(None, (left.message, left.why, mend)))))
    rows: list[Line] = []
    for (what, rule, name), same in groupby(found, key=lambda one: one[:3]):
        texts = first_of([text for *_, text in same])
        rows += [[Styled(what, _COLOURS.get(what, "dim")), Styled(rule, "bold"), name, text] for text in texts]
    return list(Table(rows).lines(width)) if rows else [["nothing to change was found"]]
