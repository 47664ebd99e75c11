"""The base classes of processors, which change the rows of a dataset, and the job and tasks that apply one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ..format.contracts import StepReader
from ..format.episodes import EpisodeTable
from ..format.ted.tree import FieldRange
from ..ted.schema import Field, Key
from .block import Block, Pieces

Unit: TypeAlias = Literal["step", "row", "episode"]
"""The argument of one call: some steps, a single one, or a whole episode."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a processor gets when it is loaded: the source's fields, the episodes that take part, and the seed."""

    fields: tuple[Field, ...]
    episodes: EpisodeTable
    seed: int


class LoadedProcessor(ABC):
    """A processor in the process that runs it, with its code loaded."""

    @abstractmethod
    def apply(self, block: Block) -> Block:
        """Return the result's rows for a block, whose arrays may be changed if the processor `edits_rows`.

        FunctionFailed where user code raises, ResultRefused for a result that cannot be stored.
        """

    def probe(self, block: Block) -> Any:
        """Inspect a block; return an answer that can be pickled, for `Processor.with_probe`."""
        raise AssertionError("called only where needs_probing")

    def measure(self, block: Block) -> Any:
        """Measure a block; return a value that can be pickled, for `Processor.with_measurements`."""
        raise AssertionError("called only where needs_measuring")


class Processor(ABC):
    """Applies a function or operations to rows. Can be sent to other processes and described in a file."""

    unit: Unit = "step"

    whole_episodes: bool = False
    """Whether a block must hold whole episodes; unit `episode` implies it."""

    edits_rows: bool = True
    """Whether `apply` may write into the arrays of its block; else these are views of the source's files."""

    needs_probing: bool = False
    """Whether `LoadedProcessor.probe` must run on the first rows before `apply`."""

    needs_measuring: bool = False
    """Whether `LoadedProcessor.measure` must run on all rows before `apply`."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name in messages."""

    @abstractmethod
    def load(self, context: Context) -> LoadedProcessor:
        """Load the code in the process that runs it; UsageError where that fails."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Everything that decides the result and is not a file, as JSON, for the provenance."""

    def inputs(self) -> dict[str, str]:
        """Digests of the files that decide the result; empty where they are not known."""
        return {}

    def is_described(self) -> bool:
        """Whether `arguments` and `inputs` decide the result completely, so that equal ones need not run again."""
        return bool(self.inputs())

    def keeps_rows(self) -> bool:
        """Whether the result is known to have one row for each step."""
        return False

    def fingerprint(self) -> str:
        """For `--resume`: a digest that differs between processors of equal `arguments` and `inputs`, else empty."""
        return ""

    def reads(self, fields: Sequence[Field]) -> frozenset[Key]:
        """The keys that blocks must have."""
        return frozenset(field.key for field in fields)

    def selects(self, episodes: EpisodeTable) -> Any:
        """Rows of the episode table that take part, int64 ascending; None: all."""
        return None

    def portable(self) -> Processor:
        """Return an equal processor that can be pickled."""
        return self

    def user_modules(self) -> frozenset[str]:
        """Top-level names of user modules that each run imports again."""
        return frozenset()

    def with_probe(self, answer: Any) -> Processor:
        """Return the processor that uses the answer of `probe`."""
        return self

    def with_measurements(self, measured: Iterable[Any]) -> Processor:
        """Return the processor with the results of `measure` for all blocks, in order."""
        return self

    @property
    def fields(self) -> tuple[Field, ...]:
        """Fields of the result that are known before a row is read; only their roles are used."""
        return ()

    @property
    def rescaled(self) -> frozenset[Key]:
        """Keys whose values are rescaled, so that the source's metadata about them no longer applies."""
        return frozenset()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the result's manifest, other than `left_out`."""
        return ()

    def left_out(self, fields: Sequence[Field], result: Sequence[Field]) -> Mapping[str, Any]:
        """The source's fields that the result lacks, by name, each with the reason."""
        kept = {field.key for field in result}
        return {field.name: f"{self.label} leaves it out" for field in fields if field.key not in kept}


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """Steps `[start, stop)` of the job, counted from its first; `index` numbers the tasks."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Job:
    """A dataset, the steps of it that are taken, and their processor.

    Each worker opens the dataset with `reader.again()` and compares the `content_digest`. `chosen` are the rows of the
    episode table that take part, int64 ascending; None means all. Of their steps the first `steps` are taken; `cut` is
    whether the last one is not the last of its episode in the dataset.
    """

    reader: StepReader
    content_digest: str
    processor: Processor
    chosen: Any
    steps: int
    cut: bool
    seed: int


class Finished(NamedTuple):
    """A task whose rows are written.

    `placed`: the rows are in the task's own place of the result's files, as is possible if there are as many as steps;
    else they are in a separate file. `digest` is over the bytes of all leaves in order. For each run of `pieces`:
    `ids` is the episode number, `returns` the sum of rewards, `terminated` and `truncated` the flags of the last row,
    `broken` whether the next observation of some step differs from the observation of the step after it.
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
