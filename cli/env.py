"""`rbtool env`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.progress import readable_size
from .help import Example
from .options import verb
from .output import Output
from .text import Cell, Line, Styled, Table

if TYPE_CHECKING:
    from ..core.verbs.env import EnvResult

EXAMPLES = (
    Example("rbtool env", "text to paste into a bug report"),
    Example("rbtool env --json | jq -r .packages.torch", "the version of one package"),
)


@verb("env", EXAMPLES)
def env(*, out: Output) -> None:
    """Show versions, extras, folders and environment variables, for a bug report.

    Uses no network. Values of variables that look secret are not shown.
    """
    from ..core.verbs.env import env as run

    result = run()
    out.show(result, [result.rbtool], _lines)


def _lines(result: EnvResult, width: int | None) -> list[list[Cell]]:
    free = "not there yet" if result.free_bytes is None else f"{readable_size(result.free_bytes)} free"
    rows: list[Line] = [
        ["rbtool", f"{result.rbtool} in {result.package}"],
        ["python", result.python],
        ["system", f"{result.system}, processors for this process: {result.processors}"],
        ["store", f"{result.store}, {free}"],
    ]
    rows += [[name, version or Styled("not installed", "red")] for name, version in result.packages.items()]
    for extra, state in result.extras.items():
        there = ", ".join(f"{name} {version}" for name, version in state.packages.items())
        asked = Styled(f"pip install 'rbtool[{extra}]'", "dim") if state.missing else there
        rows.append([f"[{extra}]", asked])
    rows += [[name, value] for name, value in result.variables.items()]
    return Table(rows).lines(width)
