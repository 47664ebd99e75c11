"""Rows and priorities on GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.draws import arrived, cuda_devices
from rbtool.core.buffers.tensordict import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage

# CUDA streams of who writes and who samples -------------------------------------------------------


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


def buffer_in_streams(transform: Any = None) -> Any:
    made = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(10), batch_size=4, prefetch=2, transform=transform,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    made.extend(torch.arange(10))
    return made


def test_threads_work_on_the_device_and_in_the_streams_of_the_caller(streams: Streams) -> None:
    seen: list[tuple[int, int, str, str]] = []

    def noted(batch: Any) -> Any:
        seen.append((threading.get_ident(), streams.device, streams.of(0).name, streams.of(1).name))
        return batch

    made, own = buffer_in_streams(noted), Stream("another", 1)
    with streams.within(Stream("one", 0)), streams.within(own):
        for _ in range(4):
            made.sample()
    assert {found[1:] for found in seen} == {(1, "one", "another")}
    assert threading.get_ident() not in {found[0] for found in seen}
    assert not own.waited
    failing = buffer_in_streams(lambda batch: batch[99])
    with pytest.raises(IndexError):
        failing.sample()


def test_another_stream_waits_for_the_batch(streams: Streams) -> None:
    made, one, other = buffer_in_streams(), Stream("one"), Stream("another")
    with streams.within(one):
        made.sample()
    with streams.within(other):
        batch = made.sample()
    assert other.waited == ["the end of one"]
    assert not one.waited
    assert batch.shape == (4,)


def test_the_batches_are_those_without_streams(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [made.sample() for made in [buffer_in_streams()] for _ in range(20)]
    monkeypatch.undo()
    assert all(torch.equal(batch, made.sample()) for made in [buffer_in_streams()] for batch in found)


def test_each_device_of_a_batch_is_waited_for(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "of_batches", set(DEVICES))
    made, writers = buffer_in_streams(), [Stream("w0", 0), Stream("w1", 1)]
    readers = [Stream("r0", 0), Stream("r1", 1)]
    with streams.within(writers[0]), streams.within(writers[1]):
        made.sample()
    with streams.within(readers[0]), streams.within(readers[1]):
        made.sample()
    assert [reader.waited for reader in readers] == [["the end of w0"], ["the end of w1"]]


def test_cuda_that_starts_in_a_thread_is_waited_for(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: threading.get_ident() != main)
    made, reader = buffer_in_streams(), Stream("the reader")
    with streams.within(reader):
        made.sample()
    assert reader.waited == ["the end of the default stream"]


def test_a_batch_of_the_cpu_waits_for_nothing(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "of_batches", set())
    made, reader = buffer_in_streams(), Stream("the reader")
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


def test_tensors_of_the_cpu_have_no_stream() -> None:
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


# Where rows and priorities live -------------------------------------------------------------------


ROWS, BATCH = 100_000, 65_536
EXPONENTS: dict[str, Any] = {"alpha": 0.7, "beta": 0.5}
CPU, CUDA = "cpu", "cuda"


def made(storage: Storage, **more: Any) -> TensorDictPrioritizedReplayBuffer:
    arguments = {"storage": storage, "batch_size": BATCH, "priority_key": "td_error", **EXPONENTS}
    return TensorDictPrioritizedReplayBuffer(**arguments | more)


def steps(count: int = ROWS, device: str = CPU) -> TensorDict:
    observation, error = torch.randn(count, 32, device=device), torch.ones(count, device=device)
    return TensorDict({"obs": observation, "td_error": error}, batch_size=[count], device=device)


def learn(buffer: TensorDictPrioritizedReplayBuffer, device: str, rows: int = ROWS) -> None:
    """Write, sample, give new priorities and see that they count: nothing with priority 0 is drawn any more."""
    data = steps(rows, device)
    buffer.extend(data)
    sample = buffer.sample()
    assert torch.equal(sample["obs"], data["obs"][sample["index"].to(device)])
    assert torch.equal(sample["priority_weight"], torch.ones_like(sample["priority_weight"]))
    sample["td_error"] = torch.rand(sample.shape, device=device)
    buffer.update_tensordict_priority(sample)
    everything = torch.arange(rows, device=device)
    buffer.update_priority(everything, (everything % 2).float())
    again = buffer.sample()
    assert (again["index"] % 2 == 1).float().mean() > 0.999
    assert {leaf.device.type for leaf in again.values()} == {device}
    assert again["priority_weight"].max() <= 1


def tree_device(buffer: Any) -> str:
    return torch.device(buffer.sampler.device).type


@pytest.mark.parametrize("sampler_device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_the_example_of_the_reference_on_the_cpu(kind: Any, sampler_device: Any) -> None:
    buffer = made(kind(10_000), sampler_device=sampler_device, batch_size=4096)
    learn(buffer, CPU, 5_000)
    assert tree_device(buffer) == CPU


def test_rows_may_be_mapped_in_a_given_folder(tmp_path: Path) -> None:
    buffer = made(LazyMemmapStorage(1_000, scratch_dir=tmp_path / "rows"), sampler_device="cpu", batch_size=256)
    learn(buffer, CPU, 500)
    assert (tmp_path / "rows").is_dir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_a_missing_gpu_is_named(kind: Any) -> None:
    with pytest.raises(RbtoolError, match="cuda"):
        kind(**EXPONENTS, storage=LazyTensorStorage(10), sampler_device="cuda")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5])
def test_unknown_devices_are_refused(device: Any) -> None:
    with pytest.raises(RbtoolError, match=r"sampler_device|device"):
        PrioritizedReplayBuffer(**EXPONENTS, storage=LazyTensorStorage(10), sampler_device=device)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_buffers_of_the_cpu_do_not_start_cuda(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    def asked(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", asked)
    buffer = made(LazyTensorStorage(1_000), sampler_device=device, batch_size=64)
    learn(buffer, CPU, 500)


@needs_a_gpu
@pytest.mark.parametrize(
    ("storage", "more", "rows", "priorities"),
    [
        (lambda place: LazyTensorStorage(1_000_000, device=CUDA), {}, CUDA, CUDA),
        (lambda place: LazyMemmapStorage(1_000_000, scratch_dir=place), {"sampler_device": CUDA}, CPU, CUDA),
        (lambda place: LazyTensorStorage(1_000_000, device=CUDA), {"sampler_device": CPU}, CUDA, CPU),
        (lambda place: LazyTensorStorage(200_000, device="auto"), {}, CUDA, None),  # that of its first rows
    ],
)
def test_rows_and_priorities_may_be_on_different_devices(
    storage: Any, more: Any, rows: str, priorities: Any, tmp_path: Path
) -> None:
    buffer = made(storage(tmp_path / "rows"), **more)
    learn(buffer, rows)
    assert priorities is None or tree_device(buffer) == priorities


@needs_a_gpu
def test_a_filled_storage_on_the_gpu() -> None:
    buffer = PrioritizedReplayBuffer(**EXPONENTS, storage=TensorStorage(torch.arange(100, device=CUDA)), batch_size=32)
    rows, info = buffer.sample(return_info=True)
    assert torch.equal(rows, info["index"])
    assert tree_device(buffer) == CUDA
    error = torch.rand(32, device=CUDA, requires_grad=True)
    buffer.update_priority(info["index"], error * 2)
    buffer.update_priority(info["index"].cpu(), error.cpu())
    buffer.update_priority(info["index"].tolist(), error.tolist())


@needs_a_gpu
@pytest.mark.parametrize("placement", [{"device": CUDA}, {"device": CPU}])
def test_saved_on_one_device_and_loaded_on_the_other(placement: dict[str, str], tmp_path: Path) -> None:
    one = made(LazyTensorStorage(1_000, **placement), batch_size=64)
    learn(one, placement["device"], 500)
    one.dumps(tmp_path / "saved")
    other = made(LazyTensorStorage(1_000, device=CPU if placement["device"] == CUDA else CUDA), batch_size=64)
    other.loads(tmp_path / "saved")
    assert (other.sample()["index"] % 2 == 1).float().mean() > 0.99


@needs_a_gpu
def test_bad_priorities_on_the_gpu_change_nothing() -> None:
    buffer = made(LazyTensorStorage(1_000, device=CUDA), batch_size=64)
    learn(buffer, CUDA, 500)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="priorit"):
            buffer.update_priority(torch.arange(3, device=CUDA), torch.tensor([1.0, bad, 1.0], device=CUDA))
    assert (buffer.sample()["index"] % 2 == 1).all()
