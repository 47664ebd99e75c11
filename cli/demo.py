"""`rbtool demo`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .help import Example
from .options import verb
from .output import Output
from .text import Line, Styled, counted

if TYPE_CHECKING:
    from ..core.verbs.demo import DemoResult

EXAMPLES = (Example("rbtool demo", "into ./rbtool-demo; under a minute"),)


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "demo", EXAMPLES)(demo)


def demo(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="Where to put everything; a new folder, or that of a demo.")
    ] = "rbtool-demo",
    *,
    out: Output,
) -> None:
    """See every step at work, on episodes recorded on the spot.

    Plays CartPole and Pendulum, converts, preprocesses, checkpoints, inspects and samples, and prints the command of
    each step. Ends with where everything is. No network.
    """
    from ..core.verbs.demo import demo as run

    with out.progress() as progress:
        result = run(folder, progress=progress, show=lambda shown: _show(out, shown))
    out.show(result, [str(result.folder)], lambda width: _lines(result))


def _show(out: Output, result: Any) -> None:
    """Render an intermediate result on stderr as the module of its verb does, by its function `lines`."""
    module = importlib.import_module(f".{result.kind.partition(' ')[0]}", __package__)
    for line in module.lines(result, out.stderr_width):
        out.summary(*line)


def _lines(result: DemoResult) -> list[Line]:
    lines: list[Line] = [[Styled(f"done in {result.seconds:.0f} s; everything is in {result.folder}", "bold")]]
    for one in result.datasets:
        about = f"{counted(one.steps, 'step')} in {counted(one.episodes, 'episode')}"
        lines += [
            ["", Styled(one.name, "bold"), f"   {about}"],
            [f"  digest      {one.content_digest}"],
            [f"  recorded    {one.source}"],
            [f"  converted   {one.dataset}"],
            [f"  normalised  {one.normalised}"],
            *([f"  checkpoint  {path}"] for path in one.checkpoints.values()),
            [f"  loaded      {one.loaded}"],
        ]
    return [*lines, ["go on with"], *([f"  {command}"] for command in result.suggestions)]
