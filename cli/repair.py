"""`rbtool repair`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.progress import counted
from ..core.progress import readable_size as size
from .help import Example
from .options import DryRun, verb
from .output import Output

EXAMPLES = (
    Example("rbtool repair ./recording", "make a dataset of all episodes that were finished"),
    Example("rbtool repair ./recording --dry-run --json", "what would be kept, as JSON"),
)


@verb("repair", EXAMPLES)
def repair(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder of a recording.")],
    *,
    out: Output,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Give up finished episodes that are damaged.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Restore a recording that was interrupted.

    Keeps the longest valid prefix: a crash loses only the unfinished episode.
    """
    from ..core.recording.repair import repair as run

    result = out.run(run, path, yes=yes, dry_run=dry_run)
    state = "would keep" if dry_run else "restored" if result.repaired else "sound as it is:"
    out.summary(f"{state} {counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}")
    if result.remade:
        out.summary(f"{'to be' if dry_run else ''} rebuilt, because damaged: {', '.join(result.remade)}".lstrip())
    if result.cut_bytes:
        out.summary(f"{'to be cut' if dry_run else 'cut'}: {size(result.cut_bytes)} after the last finished episode")
    if result.lost_episodes:
        out.summary(f"given up: {counted(result.lost_episodes, 'finished episode')}")
    out.show(result, [path])
