"""A row builder that writes in a thread of its own, while the next rows are read."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ..ted.schema import Key
from .contracts import Array
from .episodes import EpisodeTable
from .manifest import Manifest
from .row_runs import Rows
from .ted.builder import Origin, RowBuilder
from .together import started

_Rows: TypeAlias = tuple[Mapping[Key, Rows], Array]
_WAITING = 1
"""Blocks of rows that may wait to be written."""


class OverlappedBuilder(RowBuilder):
    """Passes rows to `builder`, fresh ones in a thread: digests, writes and ranges of arrays run without Python's lock.

    Rows are written in the order in which they come. What the thread raises is raised by the next call. A context
    manager: leaving stops the thread and closes `builder`.
    """

    def __init__(self, builder: RowBuilder) -> None:
        self._builder = builder
        self._waiting: queue.Queue[_Rows | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Append rows at once, after those that wait."""
        self._finish_waiting()
        self._builder.append(columns, last)

    def append_fresh(self, columns: Mapping[Key, Rows], last: Array) -> None:
        """Append rows in the thread, and wait for it where a block is waiting; at once where none can be started."""
        self._raise_error()
        if self._thread is None:
            self._thread = started(self._write, "rbtool-writer")
        if self._thread is None:
            self._builder.append_fresh(columns, last)
        else:
            self._waiting.put((columns, last))

    def _write(self) -> None:
        while (rows := self._waiting.get()) is not None:
            if self._error is None and not self._stopped:
                try:
                    self._builder.append_fresh(*rows)
                except BaseException as error:
                    self._error = error
            del rows  # while the next ones are awaited

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _finish_waiting(self) -> None:
        """Wait until everything is written, and end the thread; raise what it raised."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        self._finish_waiting()
        return self._builder.finish(table, origin, text)

    def close(self) -> None:
        """End the thread, without writing what still waits, and close the builder."""
        self._stopped = True
        try:
            if self._thread is not None:
                self._waiting.put(None)
                self._thread.join()
                self._thread = None
        finally:
            self._builder.close()
