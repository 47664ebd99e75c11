"""`rbtool download`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.declarations import declared_sources
from ..core.progress import counted
from ..core.progress import readable_size as size
from ..core.verbs.options import DownloadOptions
from .help import EXAMPLE_SOURCE, SOURCE, Example
from .options import (
    OptionGroup,
    show_published,
    verb,
)
from .output import Output

if TYPE_CHECKING:
    from ..core.verbs.download import DownloadResult


EXAMPLES = (
    Example(
        f"rbtool download {SOURCE} {EXAMPLE_SOURCE.example[1]}",
        "fetch, verify, convert; the path is on stdout",
    ),
    Example(
        f"rbtool download {SOURCE}:{EXAMPLE_SOURCE.example[0]} --dry-run",
        "how much there is to fetch, and the room for it",
    ),
    Example(
        f"rbtool download {SOURCE} cartpole/scripted-v0 --local",
        f"from the local {EXAMPLE_SOURCE.title} cache, without the network",
    ),
    Example(
        "rbtool download d4rl hopper-medium-v2 --dry-run", "one of D4RL's datasets: neither gym nor d4rl is needed"
    ),
    Example(f"rbtool download {SOURCE}:pendulum/random-v0 --local --episodes 0:3", "only some of its episodes"),
    Example(
        "rbtool download hf://me/cartpole", "the same files that rbtool upload put there; hf:me/cartpole from then on"
    ),
    Example(
        f'rbtool inspect "$(rbtool download {SOURCE} cartpole/scripted-v0 --local -q)" --json',
        "in a pipeline: -q prints the path, and nothing else",
    ),
)


@verb("download", EXAMPLES)
def download(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help=f"Where from: {declared_sources()}. Or SOURCE:ID in one word, or hf://OWNER/NAME."
        ),
    ],
    id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help=f"Which dataset: {EXAMPLE_SOURCE.example[0]}, or words that name it."),
    ] = None,
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(DownloadOptions)],
) -> None:
    """Fetch a dataset, verify it, and store it as TED.

    It is stored as SOURCE/ID below the root, and is named SOURCE:ID from then on. What was fetched before is not
    fetched again, and an interrupted download resumes where it stopped. hf://OWNER/NAME is a dataset that was uploaded
    to the Hugging Face hub, which comes as it is.
    """
    from ..core.format.locate import substitution_text
    from ..core.verbs.download import download as run

    result = out.run(run, source, id, **options)
    if out.quiet and result.resolved == "words":  # with -q no note has named it
        out.warn(f"{substitution_text(result.asked, result.id)} (disable with --exact-id)")
    _show_fetch(out, result)
    show_published(out, result)


def _show_fetch(out: Output, result: DownloadResult) -> None:
    fetch = result.fetch
    if fetch is not None and result.dry_run:
        there = f" ({size(fetch.bytes_present)} of it is there already)" if fetch.bytes_present else ""
        files = f"{counted(fetch.files, 'file')}, {size(fetch.bytes)}"
        out.summary(f"to fetch: {files} from {result.fetched_from}{there}; {size(fetch.bytes_free)} free")
    if result.originals is not None:
        out.summary(f"originals: {result.originals}")
