"""`rbtool checkpoint save`, `load` and `verify`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.progress import counted
from ..core.verbs.options import LoadOptions, SaveOptions
from .help import STORED, Example
from .options import Dataset, OptionGroup, Root, show_published, verb
from .output import Output
from .text import Cell, Styled, folded

if TYPE_CHECKING:
    from ..core.encodings.compact import Difference
    from ..core.verbs.checkpoint import CheckpointVerifyResult

SAVE_EXAMPLES = (
    Example("rbtool checkpoint save ./cartpole ./cartpole-saved.h5 --as h5 --compression gzip", "one HDF5 file"),
    Example(
        f"rbtool checkpoint save {STORED} ./flat --as flat",
        "each observation once, whole episodes",
    ),
    Example("rbtool checkpoint save ./cartpole ./theirs --as flat --for torchrl", "for TorchRL to load"),
)
LOAD_EXAMPLES = (
    Example("rbtool checkpoint load ./cartpole.h5 ./again", "a dataset folder again, with the same digest"),
    Example("rbtool checkpoint load ./cartpole.h5 ./small --layout packed", "smaller, and faster to draw from"),
    Example("rbtool checkpoint load ./torchrl ./dataset", "a dataset from a checkpoint that TorchRL saved"),
)
VERIFY_EXAMPLES = (
    Example("rbtool checkpoint verify ./cartpole.h5 ./cartpole", "compare every value; exit code 3 if one differs"),
)

_DESCRIPTIONS = {"episodes_text": ("text of episodes", "differs")}
_Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="The checkpoint: a folder, or an HDF5 file.")]


@verb("checkpoint save", SAVE_EXAMPLES)
def save(
    dataset: Dataset,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write, or the file for h5.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(SaveOptions)],
) -> None:
    """Save a dataset as a checkpoint."""
    from ..core.verbs import checkpoint

    result = out.run(checkpoint.save, dataset, dest, **options)
    after = None if "for_library" in options else f"rbtool checkpoint verify {shlex.join([dest, dataset])}"
    show_published(out, result, dest, after)


@verb("checkpoint load", LOAD_EXAMPLES)
def load(
    checkpoint: _Checkpoint,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(LoadOptions)],
) -> None:
    """Load a checkpoint into a dataset folder."""
    from ..core.verbs import checkpoint as verbs

    result = out.run(verbs.load, checkpoint, dest, **options)
    show_published(out, result, dest)


@verb("checkpoint verify", VERIFY_EXAMPLES)
def verify(checkpoint: _Checkpoint, dataset: Dataset, *, out: Output, root: Root = None) -> int:
    """Compare a checkpoint with a dataset, value for value."""
    from ..core.verbs import checkpoint as verbs

    result = out.run(verbs.verify, checkpoint, dataset, root=root)
    out.show(result, [one.key for one in result.differences], lines)
    return 0 if result.equal else 3


def lines(result: CheckpointVerifyResult, width: int | None) -> list[list[Cell]]:
    """Return the differences and the verdict."""
    return [part for line in _verdict(result) for part in folded(line, width, 4)]


def _verdict(result: CheckpointVerifyResult) -> list[list[Cell]]:
    lines: list[list[Cell]] = [[Styled("differs", "red"), f"  {_difference(one)}"] for one in result.differences]
    notes: list[list[Cell]] = [[f"note: {note}"] for note in result.notes]
    if result.equal:
        count = f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}"
        return [["equal", f", bit for bit: {count}"], *notes]
    return [*lines, *notes, [f"{result.checkpoint} is not equal to {result.dataset}"]]


def _difference(one: Difference) -> str:
    key, what = _DESCRIPTIONS.get(one.key, (one.key, one.what))
    other, _, saved = one.what.partition(" against ")  # the dataset comes first in the comparison
    if saved:
        what = f"checkpoint {saved}, dataset {other.removeprefix('text of ').removesuffix(' episodes')}"
    of_episodes = one.key.partition(".")[0] != one.key or one.key == "episodes_text"
    where = [f"in {counted(one.count, 'episode') if of_episodes else f'{one.count:,}'}"] if one.count else []
    where += [f"first at step {one.first_step:,}"] if one.first_step is not None else []
    where += [f"episode {one.episode:,}"] if one.episode is not None else []
    return f"{key}: {what}" + (f" ({', '.join(where)})" if where else "")
