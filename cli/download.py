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
        "how much would be fetched, and the free space",
    ),
    Example(
        f"rbtool download {SOURCE} cartpole/scripted-v0 --local",
        f"from the local {EXAMPLE_SOURCE.title} cache, without the network",
    ),
    Example("rbtool download d4rl hopper-medium-v2 --dry-run", "a D4RL dataset; needs neither gym nor d4rl"),
    Example(f"rbtool download {SOURCE}:pendulum/random-v0 --local --episodes 0:3", "only some of its episodes"),
    Example(
        "rbtool download hf://me/cartpole", "a dataset that rbtool upload put there; its name here is hf:me/cartpole"
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

    The dataset is stored as SOURCE/ID below the root, and its name is SOURCE:ID. Files that were fetched before are not
    fetched again, and an interrupted download resumes where it stopped. hf://OWNER/NAME is a dataset that rbtool upload
    put on the Hugging Face hub; its files are stored unchanged.
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
        there = f" ({size(fetch.bytes_present)} of it present)" if fetch.bytes_present else ""
        files = f"{counted(fetch.files, 'file')}, {size(fetch.bytes)}"
        out.summary(f"to fetch: {files} from {result.fetched_from}{there}; {size(fetch.bytes_free)} free")
    if result.originals is not None:
        out.summary(f"originals: {result.originals}")
