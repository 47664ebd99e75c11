"""Batches that threads make ahead are ordered with the CUDA streams of who writes and who samples."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.cuda_streams import arrived

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


class Stream:
    """Stands in for a CUDA stream: notes what waits for what."""

    device = "cuda:0"

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def record_event(self) -> str:
        return f"the end of {self.name}"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


class OnDevice:
    """Stands in for a tensor on a device."""

    is_cuda = True

    def __init__(self) -> None:
        self.used_by: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)


class Streams(threading.local):
    """The current stream of each thread."""

    current = Stream("the default stream")

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.within)
    return made


def buffer(transform: Any = None) -> Any:
    made = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(10), batch_size=4, prefetch=2, transform=transform,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    made.extend(torch.arange(10))
    return made


def test_threads_work_in_the_stream_of_the_caller(streams: Streams) -> None:
    seen: list[tuple[int, str]] = []

    def noted(batch: Any) -> Any:
        seen.append((threading.get_ident(), streams.current.name))
        return batch

    made, own = buffer(noted), Stream("one of the caller's")
    with streams.within(own):
        for _ in range(4):
            made.sample()
    assert {name for _, name in seen} == {own.name}
    assert threading.get_ident() not in {thread for thread, _ in seen}
    assert not own.waited


def test_another_stream_waits_for_the_batch(streams: Streams) -> None:
    made, one, other = buffer(), Stream("one"), Stream("another")
    with streams.within(one):
        made.sample()
    with streams.within(other):
        batch = made.sample()
    assert other.waited == ["the end of one"]
    assert not one.waited
    assert batch.shape == (4,)


def test_the_batches_are_those_without_streams(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [made.sample() for made in [buffer()] for _ in range(20)]
    monkeypatch.undo()
    assert all(torch.equal(batch, made.sample()) for made in [buffer()] for batch in found)


def test_a_failure_in_a_stream_is_raised(streams: Streams) -> None:
    made = buffer(lambda batch: batch[99])
    with pytest.raises(IndexError):
        made.sample()


def test_memory_is_kept_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, reader = [OnDevice(), OnDevice()], Stream("the reader")
    monkeypatch.setattr("rbtool.core.buffers.cuda_streams.each_tensor", lambda use, batch: [use(one) for one in batch])
    assert arrived(parts, "the end", reader) is parts  # type: ignore[arg-type]
    assert all(part.used_by == [reader] for part in parts)
    assert reader.waited == ["the end"]


def test_what_is_on_the_cpu_has_no_stream() -> None:
    batch = TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}}, [3])
    reader = Stream("the reader")
    assert arrived(batch, "the end", reader) is batch  # type: ignore[arg-type]


@needs_a_gpu
@pytest.mark.parametrize("prefetch", [1, 3])
def test_rows_written_in_a_stream_of_its_own_are_read_whole(prefetch: int) -> None:
    made = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(8, device="cuda"), batch_size=8, prefetch=prefetch
    )
    own, work = torch.cuda.Stream(), torch.randn(4000, 4000, device="cuda")
    torch.cuda.synchronize()
    for number in range(30):
        with torch.cuda.stream(own if number % 2 else torch.cuda.current_stream()):
            own.wait_stream(torch.cuda.default_stream())
            for _ in range(5):
                work = (work @ work).clamp(-1, 1)  # keeps the stream busy
            made.extend(TensorDict({"a": torch.full((8, 1000), number) + 0 * work[0, 0].long()}, [8]))
            batch = made.sample()
            assert (batch["a"] == batch["a"][:, :1]).all()
        torch.cuda.default_stream().wait_stream(own)


@needs_a_gpu
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loader_feeds_a_stream_of_its_own_while_tensors_are_freed(ahead: int) -> None:
    storage = rbtool.TensorStorage(torch.arange(4000).view(-1, 1).expand(-1, 5000).contiguous())
    dataset = rbtool.torch_dataset(
        rbtool.ReplayBuffer(storage=storage, sampler=rbtool.SamplerWithoutReplacement(shuffle=False)), 100, seed=0
    )
    own, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(own):
        for batch in rbtool.TorchLoader(dataset, device="cuda", prefetch=ahead):
            work = torch.randn(3000, 3000, device="cuda")
            (work @ work).sum()  # the batch is read long after the next one is on its way
            sums.append(batch.double().mean())
            del batch
    assert [float(one) for one in sums] == [100 * number + 49.5 for number in range(40)]
