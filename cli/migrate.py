"""`rbtool migrate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import CheckFailed
from ..core.progress import counted
from .help import Example
from .options import DryRun, verb
from .output import Output
from .text import Cell, Line, Style, Styled, Table

if TYPE_CHECKING:
    from ..core.verbs.migrate import MigrateResult

EXAMPLES = (
    Example("rbtool migrate train.py --diff", "what would change"),
    Example("rbtool migrate .", "change the files of a folder, and list what remains to be done"),
    Example("(rbtool migrate . --check; test $? = 3)", "for CI: exit code 3 if a file would be changed"),
)


@verb("migrate", EXAMPLES)
def migrate(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Python files, or folders of them.")],
    *,
    out: Output,
    diff: Annotated[bool, typer.Option("--diff", help="Print the changes, and write nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 3 if a file would be changed.")
    ] = False,
    dry_run: DryRun = False,
) -> int:
    """Make code that imports torchrl.data import rbtool.

    Handles aliases, imports from submodules, and `import torchrl.data as d`. Names that rbtool lacks are still imported
    from TorchRL. They are listed, as are names that behave differently and places to check by hand. Needs
    rbtool[migrate].
    """
    from ..core.verbs.migrate import migrate as run

    result = out.run(run, paths, dry_run=dry_run or diff or check)
    failed = [file for file in result.files if file.error]
    for file in failed:
        out.warn(f"{file.path} is left unchanged: {file.error}")
    changed = [file for file in result.files if file.changed]
    if diff:
        for place, kind, text in _note_rows(result):
            out.summary(place, " ", kind, " ", text)
    out.summary(_total(result))
    shown = _diff_lines if diff else _lines
    out.show(result, [str(file.path) for file in changed], shown)
    return max(int(bool(failed)), CheckFailed.exit_code if check and changed else 0)


def _total(result: MigrateResult) -> str:
    would = "would be " if result.dry_run else ""
    names = sum(len(file.names) for file in result.files)
    return f"{result.changed:,} of {counted(result.examined, 'file')} {would}changed, {counted(names, 'name')} moved"


def _lines(result: MigrateResult, width: int | None) -> list[list[Cell]]:
    names: list[Line] = [
        [Styled(str(file.path), "bold"), Styled("changed", "green"), ", ".join(file.names)]
        for file in result.files
        if file.changed
    ]
    return Table([*names, *_note_rows(result)]).lines(width)


def _note_rows(result: MigrateResult) -> list[tuple[str, Styled, str]]:
    """Return a row for each note; a note that a name behaves differently comes once for all files."""
    rows: dict[str, tuple[str, Styled, str]] = {}
    for file in result.files:
        for note in file.notes:
            place = f"{file.path}:{note.line}"
            row = place, Styled(note.kind, "cyan" if note.kind == "differs" else "yellow"), note.text
            rows.setdefault(note.text if note.kind == "differs" else place + note.text, row)
    return sorted(rows.values(), key=lambda row: row[1].text == "differs")


def _diff_lines(result: MigrateResult, width: int | None) -> list[Line]:
    lines = (line.rstrip("\r") for file in result.files for line in file.diff.split("\n")[:-1])
    colours: Mapping[str, Style] = {"+": "green", "-": "red", "@": "cyan"}
    return [[Styled(line, colours.get(line[:1], ""))] for line in lines]
