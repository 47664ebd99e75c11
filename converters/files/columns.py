"""How files of other libraries store the columns of an episode, and which errors a damaged column raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ...core.errors import CorruptDataError, RbtoolError
from ...core.format.read_errors import FETCH_AGAIN, disk_failed, reading_from

ColumnPath: TypeAlias = tuple[str, ...]
"""Names from the episode to a column, as in the file: `("infos", "debug", "t")`."""


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """How the rows of a column are stored.

    `array`: elements of type `dtype`, each row of `shape`; `text`: strings; `bytes`: byte strings (JPEG); `odd`: none
    of these, for the reason in `why`. A `flat` array has rows of one dimension whatever their real shape. With
    `holes`, some values are missing and are read as NaN.
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


class StoredColumn(NamedTuple):
    """A column of one episode: its form and how many rows it has.

    `place` is the byte of the file at which the rows begin, where they are there as in memory, one after the other; -1
    where only the library of the format finds them.
    """

    form: ColumnForm
    rows: int
    place: int = -1


def column_name(path: ColumnPath) -> str:
    """Write the path of a column with slashes."""
    return "/".join(path)


# Changed bytes may be read as a name, a type or a size; which exceptions follow is not documented.
DAMAGED: tuple[type[Exception], ...] = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)


@contextmanager
def reading(what: str, file: Path, *also: type[Exception], hint: str = FETCH_AGAIN) -> Iterator[None]:
    """Turn the exceptions of a library on damaged files, `DAMAGED` and `also`, into CorruptDataError."""
    try:
        yield
    except (RbtoolError, MemoryError):
        raise
    except (*DAMAGED, *also) as error:
        if disk_failed(error):
            with reading_from(file):
                raise
        reason = str(error).splitlines()[0].strip(" '\"") if str(error) else type(error).__name__
        raise CorruptDataError(
            f"{what} in {file} cannot be read, the file is damaged or was cut: {reason}", hint=hint
        ) from error
