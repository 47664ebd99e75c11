"""What is done to the rows of a dataset: a user's function, or a program of operations that we know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..format import EpisodeTable
from ..ted import Field, Key
from .block import Block

__all__ = ["Context", "Started", "Unit", "Work"]

Unit: TypeAlias = Literal["step", "row", "episode"]
"""What one call of a work sees: some steps at once, a single one, or a whole episode."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a work may know where it runs: the fields of the source, its episodes that take part, and the seed."""

    fields: tuple[Field, ...]
    episodes: EpisodeTable
    seed: int


class Started(ABC):
    """A work in the process that runs it, its code loaded."""

    @abstractmethod
    def apply(self, block: Block) -> Block:
        """Return the rows that come of a block; the arrays given are the work's own to edit if it `edits_rows`.

        Raises FunctionFailed where user code raises, ResultRefused for what cannot be stored.
        """

    def probe(self, block: Block) -> Any:
        """Decide by a block of rows how to go about it; the answer, which can be pickled, goes to `Work.settled`."""
        raise AssertionError("only a work that needs_probing is asked")

    def measure(self, block: Block) -> Any:
        """Return what `Work.informed` needs to know of a block, as something that can be pickled."""
        raise AssertionError("only a work that needs_measuring is asked")


class Work(ABC):
    """What is done to the rows, by reference: it can be sent to other processes and described in a file."""

    unit: Unit = "step"

    whole_episodes: bool = False
    """Whether a block must hold whole episodes; unit `episode` implies it."""

    edits_rows: bool = True
    """Whether `apply` may write into the arrays that it is given; else they show the source where it lies."""

    needs_probing: bool = False
    """Whether `Started.probe` has to see the first rows before `apply` can run."""

    needs_measuring: bool = False
    """Whether the rows have to be looked over once, through `Started.measure`, before `apply` can run."""

    @property
    @abstractmethod
    def label(self) -> str:
        """How messages call it."""

    @abstractmethod
    def start(self, context: Context) -> Started:
        """Load what it takes, in the process that runs it; UsageError where that cannot be done."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """What the provenance says of it, as JSON: everything that decides the result and is not a file."""

    def inputs(self) -> dict[str, str]:
        """Digests of the files that decide what it does; empty where they are not known."""
        return {}

    def is_described(self) -> bool:
        """Whether `arguments` and `inputs` tell all there is to it, so that what is equal need not be done again."""
        return bool(self.inputs())

    def keeps_rows(self) -> bool:
        """Whether it is known beforehand that every step comes back as one."""
        return False

    def fingerprint(self) -> str:
        """Tell it apart from others where `arguments` and `inputs` do not: for `--resume`."""
        return ""

    def reads(self, fields: Sequence[Field]) -> frozenset[Key]:
        """The keys that blocks have to hold."""
        return frozenset(field.key for field in fields)

    def chooses(self, episodes: EpisodeTable) -> Any:
        """Rows of the episode table that take part, int64 ascending; None: all."""
        return None

    def portable(self) -> Work:
        """Return an equal work that can be pickled."""
        return self

    def neighbours(self) -> frozenset[str]:
        """Top-level names of user modules that a run has to import anew."""
        return frozenset()

    def settled(self, answer: Any) -> Work:
        """Return the work that goes about it as `probe` said."""
        return self

    def informed(self, measured: Iterable[Any]) -> Work:
        """Return the work that knows what `measure` found in all blocks, in order."""
        return self

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the result as far as they are known before a row is read: only their roles are looked at."""
        return ()

    @property
    def rescaled(self) -> frozenset[Key]:
        """Keys whose values are known to be on another scale, so that what the source says of them is no longer so."""
        return frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know beside what was left out."""
        return ()

    def left_out(self, fields: Sequence[Field], result: Sequence[Field]) -> Mapping[str, Any]:
        """Keys of the source that the result lacks, by name, with why; for the notes."""
        kept = {field.key for field in result}
        return {field.name: f"{self.label} leaves it out" for field in fields if field.key not in kept}
