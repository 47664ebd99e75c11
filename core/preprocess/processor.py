"""Blocks of rows, and the contract of a processor, which turns one block after the other into a new block."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..format.contracts import Array
from ..format.episodes import EpisodeTable
from ..ted.episodes import ranges_of
from ..ted.schema import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, Numbers, as_numbers


class BlockColumn(NamedTuple):
    """One leaf of a block: the name of its element type in `ted.DTYPES`, and its rows `[n, *shape]`.

    The array has the element type `ted.numpy_dtype(dtype)`: for bfloat16, which NumPy lacks, uint16 with the same bits.
    """

    dtype: str
    values: Array


@dataclass(frozen=True, slots=True)
class Pieces:
    """The runs of a block, in order, as arrays `[p]`. A run consists of consecutive rows of one episode.

    `episode` is the row of the episode in `Context.episodes`, `rows` the length of the run, which is 0 if no row of the
    episode is left. `begins` and `ends` say whether the episode begins at the first row of the run and ends at the
    last. An episode that does not end here continues in the first run of the next block:

        block 0                       block 1
        [A A A A A] [B B B            B B B] [C C C C]
        begins+ends  begins            ends   begins+ends
    """

    episode: Numbers
    rows: Numbers
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.episode)

    @classmethod
    def of(cls, episode: Any, rows: Any, begins: Any, ends: Any) -> Self:
        """Convert array-likes to the element types."""
        return cls(
            np.asarray(episode, np.int64), np.asarray(rows, np.int64),
            np.asarray(begins, np.bool_), np.asarray(ends, np.bool_),
        )  # fmt: skip

    @property
    def starts(self) -> Numbers:
        """The first row of each run in the block, `[p]`."""
        return np.cumsum(self.rows) - self.rows

    @property
    def steps(self) -> int:
        """Number of rows of all runs."""
        return int(self.rows.sum())

    def where(self, keep: NDArray[np.bool_]) -> tuple[Pieces, Numbers]:
        """Keep some rows, `keep` bool `[steps]`; return their runs, and the rows that now end an episode.

        A run that loses rows in its middle is split at each gap. Every part that lost the row after it ends there:

            keep  1 1 0 1 1 0    ->    [0 1] [2 3]    new ends: rows 1 and 3

        The new ends are counted in the kept rows, and need the flag `truncated`. If the next block loses the first rows
        of an episode, the end in this block is not marked; where that matters, blocks must hold whole episodes.
        """
        runs: list[tuple[int, int, bool, bool]] = []
        cut: list[int] = []
        rows = 0
        for episode, start, length, begins, ends in zip(
            self.episode.tolist(), self.starts.tolist(), self.rows.tolist(), self.begins.tolist(), self.ends.tolist(),
            strict=True,
        ):  # fmt: skip
            found = ranges_of(keep[start : start + length])
            if not found:
                runs.append((episode, 0, begins, ends))
            for first, last in found:
                whole = last == length
                rows += last - first
                runs.append((episode, last - first, begins or first > 0, ends or not whole))
                if not whole:
                    cut.append(rows - 1)
        columns = zip(*runs, strict=True) if runs else ((), (), (), ())
        return Pieces.of(*columns), np.array(cut, np.int64)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[n]` of some leaves; `first` is the number of the first row among the selected steps.

    `videos` are the new video files that the rows refer to, by name; videos of the source are not included.
    """

    columns: Mapping[Key, BlockColumn]
    pieces: Pieces
    first: int
    videos: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.pieces.steps


_ENDS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)


class _LeafRows(Protocol):
    """A column of rows: `BlockColumn`, or another class with the same two attributes."""

    @property
    def dtype(self) -> str: ...

    @property
    def values(self) -> Array: ...


def flagged(columns: Mapping[Key, _LeafRows], rows: Any) -> NDArray[np.bool_]:
    """Whether a flag of each of these rows ends an episode, bool `[len(rows)]`; False if there are no flags."""
    chosen = np.asarray(rows, np.int64)
    found = np.zeros(len(chosen), np.bool_)
    for key in _ENDS:
        if key in columns:
            leaf = columns[key]
            flags = as_numbers(leaf.values[chosen], leaf.dtype) != 0
            found |= flags.any(tuple(range(1, flags.ndim)))
    return found


def marked(columns: Mapping[Key, _LeafRows], rows: Any) -> dict[Key, BlockColumn]:
    """Return copies of the columns `truncated` and `done`, if they exist, with the flags set in these rows."""
    chosen, result = np.asarray(rows, np.int64), {}
    for key in (NEXT_TRUNCATED, NEXT_DONE):
        if len(chosen) and key in columns:
            leaf = columns[key]
            copy = leaf.values.copy()
            copy[chosen] = True if leaf.dtype != "bfloat16" else 0x3F80  # the bits of 1.0
            result[key] = BlockColumn(leaf.dtype, copy)
    return result


def marked_pieces(block: Block, source_marked: NDArray[np.bool_]) -> Block:
    """Mark as truncated the episodes that end in a block without a flag.

    Only the runs in `source_marked`, bool `[pieces]`, are marked: those whose last row had a flag in the source.
    """
    pieces = block.pieces
    last = pieces.starts + pieces.rows - 1
    ending = last[pieces.ends & (pieces.rows > 0) & source_marked]
    bare = ending[~flagged(block.columns, ending)]
    return Block({**block.columns, **marked(block.columns, bare)}, pieces, block.first)


def numbers_episodes(columns: Mapping[Key, BlockColumn]) -> bool:
    """Whether there is a column `episode` with one integer for each row."""
    column = columns.get(EPISODE)
    return column is not None and is_numbering(Field(EPISODE, column.dtype, column.values.shape[1:], "id"))


def is_numbering(field: Field) -> bool:
    """Whether a field is `episode`, with one integer for each row."""
    return field.key == EPISODE and "int" in field.dtype and math.prod(field.shape) == 1


EpisodeTexts: TypeAlias = Sequence[dict[str, str]]
"""The texts of each episode, by name."""

Unit: TypeAlias = Literal["step", "row", "episode"]
"""The argument of one call: some steps, a single step, or a whole episode."""


@dataclass(frozen=True, slots=True)
class Context:
    """The data that a processor is loaded for: the fields of the source, the selected episodes, and the seed."""

    fields: tuple[Field, ...]
    episodes: EpisodeTable
    seed: int


class LoadedProcessor(ABC):
    """A processor in the process that runs it, with its code loaded."""

    @abstractmethod
    def apply(self, block: Block) -> Block:
        """Return the result's rows for a block. The block's arrays may only be changed if the processor `edits_rows`.

        FunctionFailed if user code raises, ResultRefused for a result that cannot be stored.
        """

    def probe(self, block: Block) -> Any:
        """Inspect a block; return an answer that can be pickled, for `Processor.with_probe`."""
        raise AssertionError("called only where needs_probing")

    def measure(self, block: Block) -> Any:
        """Measure a block; return a value that can be pickled, for `Processor.with_measurements`."""
        raise AssertionError("called only where needs_measuring")


class Processor(ABC):
    """Applies a function or operations to rows. It can be sent to other processes and described in a file."""

    unit: Unit = "step"

    whole_episodes: bool = False
    """Whether a block must hold whole episodes; unit `episode` implies it."""

    row_bytes: int = 0
    """The size of a row in memory where it is largest; 0 if it does not grow beyond its size in the source."""

    keeps_ends: bool = False
    """Whether an episode still ends with the last observation of the source when its length changes."""

    edits_rows: bool = True
    """Whether `apply` may write into the arrays of its block; otherwise they may be views of the source's files."""

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
        """Load the code in the process that runs it; UsageError if that fails."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Everything that decides the result, other than files, as JSON for the provenance."""

    def inputs(self) -> dict[str, str]:
        """Digests of the files that decide the result; empty if they are not known."""
        return {}

    def is_described(self) -> bool:
        """Whether `arguments` and `inputs` decide the result completely. Work that is equal in both is not repeated."""
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
        """Return the rows of the episode table that are used, int64 ascending; None means all."""
        return None

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the source's own metadata files, by name, changed so that they fit the result."""
        return documents

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        """Return the texts of the selected episodes, given their numbers and their texts in the source; `[]`: none."""
        return texts

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

    def notes(self, fields: Sequence[Field], result: Sequence[Field]) -> tuple[str, ...]:
        """Return notes for the manifest, given the fields of the source and of the result.

        Fields that are left out are not noted here, see `left_out`.
        """
        return ()

    def left_out(self, fields: Sequence[Field], result: Sequence[Field]) -> Mapping[str, Any]:
        """Return the names of the source's fields that the result lacks, each with the reason."""
        kept = {field.key for field in result}
        return {field.name: f"{self.label} leaves it out" for field in fields if field.key not in kept}
