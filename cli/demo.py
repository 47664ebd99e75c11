"""`rbtool demo`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.progress import counted
from .help import Example
from .options import verb
from .output import Output
from .text import Line, Styled

if TYPE_CHECKING:
    from ..core.verbs.demo import DemoResult

EXAMPLES = (Example("rbtool demo", "into ./rbtool-demo; about half a minute"),)


@verb("demo", EXAMPLES)
def demo(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="Where to put everything; a new folder, or an earlier demo's.")
    ] = "rbtool-demo",
    *,
    out: Output,
) -> None:
    """See every step at work, on episodes recorded on the spot.

    Plays CartPole and Pendulum, converts, inspects, preprocesses, checks, saves, samples, survives a kill -9, trains a
    clone and writes a report. Prints the commands for CartPole and what each of them proves; with -v also those for
    Pendulum, and all results. Needs no network.
    """
    from ..core.verbs.demo import demo as run

    result = out.run(run, folder, view=_Screen(out))
    out.show(result, [str(result.folder)], lambda _, width: _lines(result, verbose=out.verbose))


class _Screen:
    """Prints the commands for the first dataset and what they prove; with -v, those for all, and their results."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._names: list[str] = []

    def dataset(self, name: str) -> None:
        """Start a dataset."""
        self._names.append(name)
        if not self._is_shown():
            self._out.summary(f"the same with {name}")

    def command(self, line: str) -> None:
        """Print a command."""
        if self._is_shown():
            self._out.say(Styled(f"$ {line}", "bold"))  # not wrapped: people copy it

    def proved(self, sentence: str, *results: Any) -> None:
        """Print what the commands prove; with -v also their results, as the modules of their verbs render them."""
        if not self._is_shown():
            return
        if self._out.verbose:
            for result in results:
                module = importlib.import_module(f".{result.kind.partition(' ')[0]}", __package__)
                for line in module.lines(result, self._out.stderr_width):
                    self._out.summary(*line)
        self._out.summary("  ", Styled(sentence, "green"))

    def _is_shown(self) -> bool:
        return len(self._names) < 2 or self._out.verbose


def _lines(result: DemoResult, *, verbose: bool) -> list[Line]:
    lines: list[Line] = [[Styled(f"done in {result.seconds:.0f} s; everything is in {result.folder}", "bold")]]
    for one in result.datasets if verbose else ():
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
    return [*lines, ["next"], *([f"  {command}"] for command in result.suggestions)]
