"""The contract of what reads bytes behind addresses."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from ..format import Closing

__all__ = ["Answer", "Transport"]


class Answer(NamedTuple):
    """The bytes of a file from byte `start` on, in blocks, and which version of the file they are of.

    `size` is that of the whole file. `version` is a validator that only these very bytes have (a strong ETag, or a
    date of modification that is precise enough); both are None if the remote does not give them. `ends` states that the
    end of the blocks is certainly the end of the file, which an answer of unknown length may not state.
    """

    start: int
    blocks: Iterator[bytes]
    size: int | None = None
    version: str | None = None
    ends: bool = False


class Transport(Closing, ABC):
    """Reads the bytes behind addresses; safe to use from several threads at once."""

    @abstractmethod
    def open(self, address: str, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Begin to read at byte `offset` and give where the bytes start, and the bytes in blocks.

        They start at 0, or anywhere before `offset`, where the remote cannot begin at any byte. Opening and reading
        raise Transient for what may pass, and NetworkError, AuthorisationError or DatasetNotFoundError.
        """

    @contextlib.contextmanager
    def open_version(self, address: str, offset: int, version: str | None = None) -> Iterator[Answer]:
        """Begin to read as `open` does, and state what the remote has: for files without a checksum.

        With `version`, bytes from `offset` on are only asked for if the remote still has that version; whether it has
        is what the answer's `version` states. A transport without this method supports no versions and no sizes.
        """
        with self.open(address, offset) as (start, blocks):
            yield Answer(start, blocks)

    def interrupt(self) -> None:
        """Make reads that wait in other threads fail now; what is asked for later is not affected."""
