"""`rbtool download`."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import Example
from .options import DryRun, Episodes, Force, Root, verb
from .output import Output
from .published import show_published

__all__ = ["EXAMPLES", "add"]

EXAMPLES = (
    Example("rbtool download minari cartpole/scripted-v0 --local", "from the local Minari cache into the store"),
    Example("rbtool download minari:pendulum/random-v0 --local --episodes 0:3", "only some of its episodes"),
    Example(
        'rbtool inspect "$(rbtool download minari cartpole/scripted-v0 --local -q)" --json',
        "in a pipeline: -q prints the path, and nothing else",
    ),
)


def add(app: typer.Typer) -> None:
    """Make it a verb of the command line."""
    verb(app, "download", EXAMPLES)(download)


def download(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Where from: minari. Or SOURCE:ID in one word.")],
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Which dataset: D4RL/door/human-v2.")] = None,
    *,
    out: Output,
    local: Annotated[
        bool, typer.Option("--local", help="Take it from the source's own cache ($MINARI_DATASETS_PATH); no network.")
    ] = False,
    root: Root = None,
    episodes: Episodes = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Fetch a dataset and store it as TED.

    It is stored as SOURCE/ID below the root, and is named SOURCE:ID from then on.
    """
    from ..core.errors import UsageError
    from ..core.verbs.download import download as run

    if id is None:
        source, _, id = source.partition(":")
    if not id:
        raise UsageError("no dataset is named", hint=f"name one, like: rbtool download {source} D4RL/door/human-v2")
    with out.progress() as progress:
        result = run(
            source, id, local=local, root=root, episodes=episodes, force=force, dry_run=dry_run, progress=progress
        )
    show_published(out, result)
