"""What is done to the rows of a dataset: the base class of processors, and the job and tasks that apply one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ..format import EpisodeTable, FieldRange, StepReader
from ..ted import Field, Key
from .block import Block, Pieces

__all__ = ["Context", "Finished", "Job", "LoadedProcessor", "Processor", "Task", "Unit"]

Unit: TypeAlias = Literal["step", "row", "episode"]
"""What one call of a work sees: some steps at once, a single one, or a whole episode."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a work may know where it runs: the fields of the source, its episodes that take part, and the seed."""

    fields: tuple[Field, ...]
    episodes: EpisodeTable
    seed: int


class LoadedProcessor(ABC):
    """A work in the process that runs it, its code loaded."""

    @abstractmethod
    def apply(self, block: Block) -> Block:
        """Return the rows that come of a block; the arrays given are the work's own to edit if it `edits_rows`.

        Raises FunctionFailed where user code raises, ResultRefused for what cannot be stored.
        """

    def probe(self, block: Block) -> Any:
        """Inspect a block of rows; returns an answer that can be pickled, for `Processor.with_probe`."""
        raise AssertionError("only a work that needs_probing is asked")

    def measure(self, block: Block) -> Any:
        """Return what `Processor.with_measurements` needs to know of a block, as something that can be pickled."""
        raise AssertionError("only a work that needs_measuring is asked")


class Processor(ABC):
    """What is done to the rows, by reference: it can be sent to other processes and described in a file."""

    unit: Unit = "step"

    whole_episodes: bool = False
    """Whether a block must hold whole episodes; unit `episode` implies it."""

    edits_rows: bool = True
    """Whether `apply` may write into the arrays that it is given; else they show the source where it lies."""

    needs_probing: bool = False
    """Whether `LoadedProcessor.probe` has to see the first rows before `apply` can run."""

    needs_measuring: bool = False
    """Whether the rows have to be looked over once, through `LoadedProcessor.measure`, before `apply` can run."""

    @property
    @abstractmethod
    def label(self) -> str:
        """How messages call it."""

    @abstractmethod
    def load(self, context: Context) -> LoadedProcessor:
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

    def selects(self, episodes: EpisodeTable) -> Any:
        """Rows of the episode table that take part, int64 ascending; None: all."""
        return None

    def portable(self) -> Processor:
        """Return an equal work that can be pickled."""
        return self

    def user_modules(self) -> frozenset[str]:
        """Top-level names of user modules that a run has to import anew."""
        return frozenset()

    def with_probe(self, answer: Any) -> Processor:
        """Return the work that goes about it as `probe` said."""
        return self

    def with_measurements(self, measured: Iterable[Any]) -> Processor:
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


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """Steps `[start, stop)` of those that the job takes, counted from the first of them; `index` numbers the tasks."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Job:
    """Which dataset, which of its steps, and what is done to them.

    `reader` has the dataset open: `again` gives each member its own, and `content_digest` says whether it is the same.

    `chosen` are the rows of the episode table that take part, int64 ascending; None means all. Of their steps the
    first `steps` are taken; `cut` says that the last of these ends an episode that goes on in the dataset.
    """

    reader: StepReader
    content_digest: str
    processor: Processor
    chosen: Any
    steps: int
    cut: bool
    seed: int


class Finished(NamedTuple):
    """What is known of a task whose rows are written.

    `placed` says that they lie at their task's own place in the result, which only as many rows as the task has can;
    else they lie in a file of their own. `digest` is over the bytes of all leaves in order. Of each run of `pieces`:
    `ids` holds the number of its episode, `returns` the sum of its rewards, `terminated` and `truncated` the flags of
    its last row, `broken` whether the observation after some of its steps is not the one before the next.
    """

    rows: int
    placed: bool
    digest: str
    ranges: dict[Key, FieldRange]
    pieces: Pieces
    ids: Any
    returns: Any
    terminated: Any
    truncated: Any
    broken: Any
