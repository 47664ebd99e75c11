"""What a chunk runner is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..dataset import Array, FieldRange
from ..ted import Key
from .functions import ChunkFunction

__all__ = ["Finished", "Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """Which dataset, told apart by its digest, and which function. `steps` may be fewer than the dataset has.

    `cut` says that the last of these steps ends an episode that goes on in the dataset.
    """

    source: Path
    content_digest: str
    function: ChunkFunction
    steps: int
    cut: bool


class Finished(NamedTuple):
    """What is known of a chunk that was written: the range of each leaf, and which rows lead to the one after them.

    `follows` holds a bit for each row but the last: whether every state leaf under `next` equals the next row's.
    """

    ranges: dict[Key, FieldRange]
    follows: Array
