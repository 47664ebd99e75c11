"""Small files straight into memory, and many small questions at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import CorruptDataError, FormatError, RbtoolError
from .checksums import hasher
from .retries import Transient, retrying
from .threads import Watch, run_together
from .transport import Transport

__all__ = ["ask_all", "read_small"]

T = TypeVar("T")


def read_small(
    transport: Transport,
    address: str,
    *,
    limit: int,
    size: int | None = None,
    checksum: str | None = None,
) -> bytes:
    """Read a file into memory, trying again what may pass, and verify it where its size and checksum are known.

    Raises FormatError for one of more than `limit` bytes, CorruptDataError if the bytes never match, and what the
    transport raises.
    """

    def attempt() -> bytes:
        data = bytearray()
        with transport.open(address, 0) as (_, blocks):
            for block in blocks:
                data += block
                if len(data) > limit:
                    raise FormatError(f"{address} has more than the {limit:,} bytes that are expected there")
        if size is not None and checksum is not None:
            checking = hasher(checksum, size)
            checking.update(data)
            if len(data) != size or not checking.matches():
                raise Transient(CorruptDataError(f"{address} came with {len(data):,} bytes that are not {checksum}"))
        return bytes(data)

    return retrying(attempt)


def ask_all(
    calls: Sequence[Callable[[], T]],
    transport: Transport,
    *,
    workers: int = 8,
    done: Callable[[int], None] | None = None,
) -> list[T | RbtoolError]:
    """Make all calls in a few threads; return their results, or the RbtoolError of each that failed, in order.

    `done` receives, in this thread, how many more calls are finished. Any other exception ends it all at once, as does
    an interruption: what the transport waits for is broken off.
    """
    results: dict[int, T | RbtoolError] = {}

    def job(index: int, watch: Watch) -> None:
        watch.check()
        try:
            results[index] = calls[index]()
        except RbtoolError as error:
            results[index] = error
        watch.progress(1)

    jobs = [functools.partial(job, index) for index in range(len(calls))]
    watch = Watch() if done is None else Watch(progress=done)
    run_together(jobs, watch, workers=workers, interrupt=transport.interrupt)
    return [results[index] for index in range(len(calls))]
