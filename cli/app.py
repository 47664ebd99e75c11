"""Entry point of the command `rbtool`: registers the verbs and runs them."""

from __future__ import annotations

import enum
import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..core import __version__
from .complete import SCRIPTS, install
from .failures import EXIT_CODES, Stopped, allow_open_files, release_streams, report
from .help import CONTEXT, EXAMPLE_SOURCE, SOURCE, Example, VerbGroup, examples_text
from .options import add_verb
from .output import STDOUT, Output
from .words import GROUPS, SECTIONS, SHORT_NAMES, VERBS, in_order

EXAMPLES = (
    Example("rbtool demo", "see every step at work, on data recorded on the spot"),
    Example(
        f"rbtool convert ./{SOURCE}/cartpole/scripted-v0 ./cartpole",
        f"a {EXAMPLE_SOURCE.title} dataset to TED",
    ),
    Example("rbtool inspect ./cartpole", "show its contents"),
)


class _Verbs(VerbGroup):
    """All verbs, in the order of `VERBS`; Typer lists groups of verbs first."""

    sections = SECTIONS

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(VERBS).index)


_EXAMPLES_TEXT = examples_text([one for one in EXAMPLES if one.command.split()[1] in VERBS])
_SHORT = ", ".join(f"{short} = {' '.join(verb)}" for short, verb in SHORT_NAMES.items())

ShellName = enum.StrEnum("ShellName", {name.upper(): name for name in SCRIPTS})  # type: ignore[misc]  # from the table

app = typer.Typer(
    cls=_Verbs,
    add_completion=False,  # `complete` replaces Typer's completion, which lacks datasets and takes twice as long
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
    epilog=f"{EXIT_CODES}\n\nHelp for a verb: rbtool VERB --help\nShort names: {_SHORT}\n\n{_EXAMPLES_TEXT}",
)


@app.callback(invoke_without_command=True)
def rbtool(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    install_completion: Annotated[
        ShellName | None, typer.Option("--install-completion", help="Install completion for a shell.")
    ] = None,
    show_completion: Annotated[
        ShellName | None, typer.Option("--show-completion", help="Print the completion script of a shell.")
    ] = None,
) -> None:
    """Offline-RL datasets in one clear form, TED, that is fast to train from."""
    if version:
        Output().text(f"rbtool {__version__}")
        raise typer.Exit
    if show_completion is not None:
        Output().text(SCRIPTS[show_completion.value].strip())
        raise typer.Exit
    if install_completion is not None:
        Output().text(str(install(install_completion.value)))
        Output().summary("start a new shell to use it")
        raise typer.Exit
    if context.invoked_subcommand is None:
        Output().text(context.get_help())


for name in VERBS:
    add_verb(app, name)


def main() -> None:
    """Run the command line on `sys.argv` and exit with its code. `start.main` has set up streams and signals."""
    allow_open_files()
    code = _run(sys.argv[1:])
    failed = release_streams()
    sys.exit(report(failed, Output()) if failed is not None and code == 0 else code)


def _run(given: Sequence[str]) -> int:
    """Run the command line and report errors of parsing; verbs report their own errors."""
    words = in_order(given, GROUPS)
    try:
        return int(app(args=words, prog_name="rbtool", standalone_mode=False) or 0)
    except Stopped as stopped:
        return report(stopped, Output.from_arguments(words))
    except SystemExit as ended:
        # Typer exits this way if the reader of its help page has closed the pipe.
        cause = ended.__context__
        closed = isinstance(cause, OSError) and cause.errno == errno.EPIPE
        return 0 if closed else ended.code if isinstance(ended.code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = STDOUT  # Typer writes nothing but help pages
        return report(error, Output.from_arguments(words))
