"""Blocks of a segment are read whole, several in one call of the system."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from rbtool.core.checkpointers import segments
from rbtool.core.errors import CorruptDataError


@pytest.mark.parametrize("most", [1, 7, 4096, 100_000])
def test_blocks_are_read_whole_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    data = bytes(torch.arange(60_000, dtype=torch.uint8).numpy())
    (tmp_path / "file").write_bytes(data)
    places = [(0, 5), (5, 0), (5, 4091), (4096, 1), (8192, 100), (30_000, 20_000), (59_999, 1)]
    monkeypatch.setattr(segments.os, "preadv", partial(_short, os.preadv, most))
    monkeypatch.setattr(segments, "_MOST_ROOMS", 2)
    blocks = [(start, memoryview(bytearray(size))) for start, size in places]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        segments.read_blocks(descriptor, blocks)
        assert [bytes(into) for _, into in blocks] == [data[start : start + size] for start, size in places]
        with pytest.raises(CorruptDataError, match="cut meanwhile"):
            segments.read_blocks(descriptor, [(59_990, memoryview(bytearray(11)))])
    finally:
        os.close(descriptor)


def _short(read: Callable[..., int], most: int, descriptor: int, rooms: list[memoryview], start: int) -> int:
    """Read no more than `most` bytes, as a system call may."""
    taken, left = [], most
    for room in rooms:
        taken.append(room[:left])
        left -= len(taken[-1])
    return read(descriptor, taken, start)
