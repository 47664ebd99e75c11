import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.encodings.streams import Blocks, Stream


class Kept(Stream):
    """Keeps what it is given; fails at some block."""

    def __init__(self, fails_at: int = 0) -> None:
        self.data = b""
        self.blocks = 0
        self.finished = False
        self.fails_at = fails_at

    def write(self, parts: list[memoryview]) -> None:
        self.blocks += 1
        if self.blocks == self.fails_at:
            raise OSError("no more")
        assert not self.finished
        self.data += b"".join(parts)

    def finish(self) -> None:
        self.finished = True


@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=4), st.integers(1, 40))
@settings(deadline=None)
def test_every_stream_gets_its_bytes_in_order(sizes: list[list[int]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch, Blocks() as blocks:
        patch.setattr("rbtool.core.encodings.streams._BLOCK", block)
        patch.setattr("rbtool.core.encodings.streams._MOST_PARTS", 3)
        streams = [Kept() for _ in sizes]
        arrays = [[np.random.default_rng(n).integers(0, 99, (n, 2), np.int16) for n in part] for part in sizes]
        for stream, parts in zip(streams, arrays, strict=True):
            blocks.begin(stream)
            for rows in parts:
                blocks.append(rows)
        blocks.finish()
    assert [stream.data for stream in streams] == [b"".join(rows.tobytes() for rows in parts) for parts in arrays]
    assert all(stream.finished for stream in streams)


def write_nine(stream: Stream) -> None:
    with Blocks() as blocks:
        blocks.begin(stream)
        for _ in range(9):
            blocks.append(np.zeros(8, np.uint8))
        blocks.finish()


@pytest.mark.parametrize("fails_at", [1, 3, 9])
def test_what_fails_in_the_background_is_raised(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    monkeypatch.setattr("rbtool.core.encodings.streams._BLOCK", 8)
    before = threading.active_count()
    with pytest.raises(OSError, match="no more"):
        write_nine(Kept(fails_at))
    assert threading.active_count() == before


def test_rows_that_do_not_lie_together_are_copied() -> None:
    stream, rows = Kept(), np.arange(24).reshape(4, 6)[:, ::2]
    with Blocks() as blocks:
        blocks.begin(stream)
        blocks.append(rows)
        blocks.finish()
    assert stream.data == rows.tobytes()
