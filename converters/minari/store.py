"""The contract of Minari's storage formats: how the columns of an episode lie in its files, and their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from ...core.errors import CorruptDataError, RbtoolError
from ...core.format import Array
from .spaces import SpacePath

__all__ = ["DERIVED", "Column", "ColumnPath", "EpisodeStore", "Form", "StoredEpisode", "column_name", "reading"]

ColumnPath: TypeAlias = tuple[str, ...]
"""Names from the episode down to a column, as they are in the file: `("infos", "debug", "t")`."""

DERIVED = frozenset({"id", "total_steps", *(f"rewards_{part}" for part in ("sum", "mean", "std", "max", "min"))})
"""Attributes of an episode that its rows tell as well."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the rows of a column are stored.

    `array`: elements of type `dtype`, `shape` a row; `text`: strings; `bytes`: byte strings (JPEG); `odd`: none of
    these, and `why` says what it is. A `flat` array has rows of one dimension whatever their real shape. `holes` says
    that values are missing, which are read as NaN.
    """

    kind: Literal["array", "text", "bytes", "odd"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    why: str = ""
    flat: bool = False
    holes: bool = field(default=False, compare=False)

    @property
    def is_jpeg(self) -> bool:
        """Whether an image stored so is JPEG: frames that happen to be of one length are rows of so many bytes."""
        return self.kind == "bytes" or (self.dtype == "uint8" and len(self.shape) == 1 and not self.flat)


class Column(NamedTuple):
    """A column of one episode: its form and how many rows it has."""

    form: Form
    rows: int


class StoredEpisode(ABC):
    """One episode, open for reading. Rows are asked for from front to back."""

    @abstractmethod
    def columns(self) -> dict[ColumnPath, Column]:
        """List every column, by structure alone."""

    @abstractmethod
    def form(self, path: ColumnPath) -> Form:
        """Look up how one column is stored."""

    @abstractmethod
    def array(self, path: ColumnPath, start: int, stop: int, form: Form | None = None) -> Array:
        """Read rows of an `array` column; whoever knows its form saves a look at the file."""

    @abstractmethod
    def strings(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        """Read rows of a `text` column (as UTF-8) or of a `bytes` column."""

    @abstractmethod
    def attribute_paths(self) -> Collection[ColumnPath]:
        """List the names of `attributes`, without a look at what they say."""

    @abstractmethod
    def attributes(self) -> Mapping[ColumnPath, Any]:
        """What is said of the episode beside its columns: `("seed",)`, `("options", <name>)` and the like.

        `DERIVED` may lack.
        """


class EpisodeStore(ABC):
    """All episodes of a dataset in one storage format. `numbers` are their ids, ascending."""

    numbers: Sequence[int]

    @abstractmethod
    def episode(self, number: int) -> StoredEpisode:
        """Open one episode."""

    @abstractmethod
    def location(self, path: SpacePath) -> ColumnPath:
        """Names in the file of a leaf of a space."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Every data file, sorted."""

    def strangers(self) -> list[str]:
        """Names beside the episodes that are none."""
        return []

    def close(self) -> None:
        """Close the files."""


def column_name(path: ColumnPath) -> str:
    """Write a column's path the way people type it."""
    return "/".join(path)


# Changed bytes may look like a name, a type or a size as well; what they then raise is not documented.
_DAMAGED: tuple[type[Exception], ...] = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)


@contextmanager
def reading(what: str, file: Path, *also: type[Exception]) -> Iterator[None]:
    """Turn what a library raises on damaged files into CorruptDataError."""
    try:
        yield
    except (RbtoolError, MemoryError):
        raise
    except (*_DAMAGED, *also) as error:
        reason = str(error).splitlines()[0].strip(" '\"") if str(error) else type(error).__name__
        raise CorruptDataError(
            f"{what} in {file} cannot be read, the file is damaged or was cut: {reason}",
            hint="copy or fetch the dataset again, whole",
        ) from error
