"""Batches that threads make ahead are ordered with the CUDA streams of who writes and who samples."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.draws import arrived, cuda_devices

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


DEVICES = [torch.device("cuda", number) for number in range(2)]


class Stream:
    """Stands in for a CUDA stream: notes what waits for what."""

    def __init__(self, name: str, device: int = 0) -> None:
        self.name = name
        self.device = DEVICES[device]
        self.waited: list[str] = []

    def record_event(self) -> str:
        return f"the end of {self.name}"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


class OnDevice:
    """Stands in for a tensor on a device."""

    is_cuda = True

    def __init__(self, device: int = 0) -> None:
        self.device = DEVICES[device]
        self.used_by: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_by.append(stream)


DEFAULTS = [Stream("the default stream", number) for number in range(2)]


class Streams(threading.local):
    """The current device and streams of each thread, and the devices that batches are on."""

    of_batches: ClassVar = {DEVICES[0]}

    def __init__(self) -> None:
        self.device = 0
        self.current = list(DEFAULTS)

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        device, number = self.device, stream.device.index
        before, self.device, self.current[number] = self.current[number], number, stream
        try:
            yield
        finally:
            self.device, self.current[number] = device, before

    def of(self, device: torch.device | int | None = None) -> Stream:
        number = getattr(device, "index", device)
        return self.current[self.device if number is None else number]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(DEVICES))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(torch.cuda, "default_stream", DEFAULTS.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", made.of)
    monkeypatch.setattr(torch.cuda, "stream", made.within)
    monkeypatch.setattr("rbtool.core.buffers.draws.cuda_devices", lambda batch: Streams.of_batches)
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
        seen.append((threading.get_ident(), streams.of().name))
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


def test_a_thread_has_the_device_and_the_streams_of_its_caller(streams: Streams) -> None:
    seen: list[tuple[int, str, str]] = []

    def noted(batch: Any) -> Any:
        seen.append((streams.device, streams.of(0).name, streams.of(1).name))
        return batch

    made = buffer(noted)
    with streams.within(Stream("one", 0)), streams.within(Stream("another", 1)):
        made.sample()
    assert set(seen) == {(1, "one", "another")}


def test_each_device_of_a_batch_is_waited_for(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "of_batches", set(DEVICES))
    made, writers = buffer(), [Stream("w0", 0), Stream("w1", 1)]
    readers = [Stream("r0", 0), Stream("r1", 1)]
    with streams.within(writers[0]), streams.within(writers[1]):
        made.sample()
    with streams.within(readers[0]), streams.within(readers[1]):
        made.sample()
    assert [reader.waited for reader in readers] == [["the end of w0"], ["the end of w1"]]


def test_cuda_that_starts_in_a_thread_is_waited_for(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: threading.get_ident() != main)
    made, reader = buffer(), Stream("the reader")
    with streams.within(reader):
        made.sample()
    assert reader.waited == ["the end of the default stream"]


def test_a_batch_of_the_cpu_waits_for_nothing(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "of_batches", set())
    made, reader = buffer(), Stream("the reader")
    made.sample()
    with streams.within(reader):
        made.sample()
    assert not reader.waited


def test_memory_is_kept_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, reader = [OnDevice(), OnDevice(), OnDevice(1)], Stream("the reader")
    monkeypatch.setattr("rbtool.core.buffers.draws.each_tensor", lambda use, batch: [use(one) for one in batch])
    assert arrived(parts, "the end", reader, DEVICES[0]) is parts  # type: ignore[arg-type]
    assert [part.used_by for part in parts] == [[reader], [reader], []]
    assert reader.waited == ["the end"]


def test_what_is_on_the_cpu_has_no_stream() -> None:
    batch = TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}}, [3])
    reader = Stream("the reader")
    assert arrived(batch, "the end", reader, DEVICES[0]) is batch  # type: ignore[arg-type]
    assert cuda_devices((batch, {"d": torch.zeros(2)}, TensorDict({}, [], device="cpu"), "text")) == set()


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


@needs_a_gpu
def test_the_devices_of_a_batch() -> None:
    cuda = torch.zeros(3, device="cuda")
    assert cuda_devices(TensorDict({"a": torch.zeros(3), "b": {"c": cuda}}, [3])) == {cuda.device}
    assert cuda_devices([TensorDict({"a": cuda}, [3], device=cuda.device), torch.zeros(3)]) == {cuda.device}


@needs_a_gpu
def test_a_transform_that_starts_on_the_gpu_in_a_thread() -> None:
    made = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(1000), batch_size=1000, prefetch=2, transform=lambda batch: batch.to("cuda")
    )
    made.extend(TensorDict({"a": torch.arange(1000)}, [1000]))
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        for batch in (made.sample() for _ in range(20)):
            assert torch.equal(batch["a"], batch["index"].to("cuda"))


@needs_a_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is only one CUDA device here")
def test_rows_on_a_device_that_is_not_the_current_one() -> None:
    made = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(8, device="cuda:1"), batch_size=8, prefetch=2)
    own, work = torch.cuda.Stream("cuda:1"), torch.randn(4000, 4000, device="cuda:1")
    torch.cuda.synchronize("cuda:1")
    for number in range(20):
        with torch.cuda.stream(own), torch.cuda.device(0):
            work = (work @ work).clamp(-1, 1)  # keeps the stream busy
            made.extend(TensorDict({"a": torch.full((8, 1000), number).to("cuda:1") + 0 * work[0, 0].long()}, [8]))
            batch = made.sample()
            assert (batch["a"] == batch["a"][:, :1]).all()
