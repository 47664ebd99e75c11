"""`rbtool upload`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.progress import counted
from ..core.progress import readable_size as size
from ..core.verbs.options import UploadOptions
from .help import Example
from .options import Dataset, OptionGroup, verb
from .output import Output
from .text import Styled

if TYPE_CHECKING:
    from ..core.verbs.upload import UploadResult

EXAMPLES = (
    Example("rbtool upload ./cartpole hf://me/cartpole --private", "to a private repository; needs HF_TOKEN"),
    Example("rbtool upload ./cartpole hf://me/cartpole --license cc-by-4.0", "public, with a licence"),
    Example("rbtool upload ./cartpole hf://me/cartpole --dry-run --json", "check it and show what would be sent"),
)


@verb("upload", EXAMPLES)
def upload(
    dataset: Dataset,
    address: Annotated[
        str, typer.Argument(metavar="hf://OWNER/NAME", help="The repository; created if it does not exist.")
    ],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(UploadOptions)],
) -> None:
    """Upload a dataset to the Hugging Face hub, unchanged.

    The dataset is checked before, and compared with the uploaded files afterwards. Files that the hub already has are
    not sent again, so an interrupted upload resumes; all files appear at once, in one commit.
    """
    from ..core.verbs.upload import upload as run

    result = out.run(run, dataset, address, **options)
    _summarise(out, result)
    out.show(result, [result.address])
    if not result.dry_run:
        branch = "" if result.branch == "main" else f"@{result.branch}"
        out.suggest(f"rbtool download {shlex.quote(result.address.partition('@')[0] + branch)}")


def _summarise(out: Output, result: UploadResult) -> None:
    state = "nothing was sent; this would be " if result.dry_run else ""
    state = "already there: " if result.already_there else state
    facts = [
        f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}",
        f"{counted(result.files, 'file')}, {size(result.bytes)}",
        f"{size(result.bytes_sent)} sent" if not (result.dry_run or result.already_there) else "",
        "private" if result.private else "public",
        f"licence {result.license}",
    ]
    out.summary(Styled(state, "yellow"), " · ".join(filter(None, facts)))
    if result.errors or result.warnings:
        found = f"{counted(result.errors, 'error')}, {counted(result.warnings, 'warning')}"
        out.summary(f"check: {found}; the dataset card lists them")
    if result.deleted:
        out.summary(f"{'to be removed' if result.dry_run else 'removed'}: {counted(len(result.deleted), 'other file')}")
    for note in result.notes:
        out.summary(f"note: {note}")
