"""Batches of loader workers in shared slots: never another's bytes, whatever ends, is kept or is left."""

from __future__ import annotations

import contextlib
import copy
import errno
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader, IterableDataset
from waiting import HANG

import rbtool
from rbtool.core.buffers.data_loader import CAPACITY, Sent, SharedSlots
from rbtool.core.errors import WorkerDiedError

FORK = multiprocessing.get_context("fork")
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files"),
]


def sent_by_child(slots: SharedSlots, *values: int, size: int = 100) -> list[Sent | None]:
    """Have a child write a message for each value, and end."""
    receiving, sending = FORK.Pipe(duplex=False)

    def child() -> None:
        claimed = [slots.claim(size) for _ in values]
        for one, value in zip(claimed, values, strict=True):
            if one is not None:
                one[0].fill_(value)
        sending.send([one and one[1] for one in claimed])

    process = FORK.Process(target=child)
    process.start()
    found: list[Sent | None] = receiving.recv()
    process.join()
    return found


def value_of(message: Sent | None) -> int:
    assert message is not None
    (value,) = set(message.received().tolist())
    return int(value)


def memory() -> int:
    """How many bytes the anonymous files of this process have."""
    found = {}
    for name in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if "rbtool-batches" in str(name.readlink()):
                found[name.stat().st_ino] = name.stat().st_blocks * 512
    return sum(found.values())


# Slots ----------------------------------------------------------------------------------------------


def test_messages_arrive_in_any_order_and_once_their_sender_ended() -> None:
    slots = SharedSlots()
    one, two, three = sent_by_child(slots, 1, 2, 3)
    assert [value_of(one), value_of(three), value_of(two)] == [1, 3, 2]


def test_received_messages_do_not_change() -> None:
    slots = SharedSlots()
    first = sent_by_child(slots, 1)[0]
    assert first is not None
    kept = first.received()
    assert value_of(sent_by_child(slots, 2)[0]) == 2
    assert set(kept.tolist()) == {1}


def test_a_message_in_memory_that_was_taken_over_is_an_error() -> None:
    slots = SharedSlots()
    lost, same = sent_by_child(slots, 1, 2)
    new = sent_by_child(slots, 3)[0]
    assert lost is not None
    with pytest.raises(WorkerDiedError, match="took over"):
        lost.received()
    assert value_of(same) == 2
    assert value_of(new) == 3


def test_slots_are_limited_in_number_and_size_and_not_for_the_own_process() -> None:
    slots = SharedSlots()
    found = sent_by_child(slots, *range(20))
    assert [message is None for message in found] == [False] * 8 + [True] * 12
    assert sent_by_child(slots, 1, size=CAPACITY + 1) == [None]
    assert slots.claim(1) is None
    assert [value_of(message) for message in found[1:8]] == [*range(1, 8)]


def test_a_copy_has_memory_of_its_own() -> None:
    slots = SharedSlots()
    for other in (copy.deepcopy(slots), copy.copy(slots), pickle.loads(pickle.dumps(slots))):
        mine, theirs = sent_by_child(slots, 1)[0], sent_by_child(other, 2)[0]
        assert (value_of(mine), value_of(theirs)) == (1, 2)
    stale = sent_by_child(other, 3)[0]
    del other
    assert stale is not None
    with pytest.raises(WorkerDiedError, match="does not have the dataset"):
        stale.received()


def test_memory_ends_with_the_slots() -> None:
    before, slots = memory(), SharedSlots()
    sent_by_child(slots, 1, size=1 << 20)
    assert memory() >= before + (1 << 20)
    for _ in range(5):  # nobody reads these: the next worker takes over the memory
        sent_by_child(slots, 1, size=1 << 20)
    assert memory() < before + (2 << 20)
    del slots
    assert memory() == before


# Loaders --------------------------------------------------------------------------------------------


def dataset(make: Callable[[Any], Any] | None = None, count: int = 40) -> Any:
    storage = rbtool.TensorStorage(
        TensorDict({"a": torch.arange(64), "b": {"c": torch.linspace(0, 1, 192).reshape(64, 3)}}, [64])
    )
    buffer = rbtool.ReplayBuffer(storage=storage, sampler=rbtool.RandomSampler(), batch_size=16, collate_fn=make)
    return rbtool.torch_dataset(buffer, seed=1, batches=count)


def same(one: Any, other: Any) -> bool:
    return all(bool((batch == again).all()) for batch, again in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 12}, {"persistent_workers": True}], ids=str)
def test_batches_that_are_kept_do_not_change(options: dict[str, Any]) -> None:
    data, alone = dataset(), dataset()
    data.buffer.share()
    made = DataLoader(data, batch_size=None, num_workers=2, **options)
    kept = [list(made) for _ in range(2)]
    kept[0][3]["a"].zero_()
    expected = [list(alone) for _ in range(2)]
    expected[0][3]["a"].zero_()
    assert all(map(same, kept, expected))


def test_abandoned_and_simultaneous_loops_get_their_own_batches() -> None:
    data, before = dataset(), memory()
    for number in range(6):
        loaders = [DataLoader(data, batch_size=None, num_workers=1 + number % 2) for _ in range(2)]
        passes = [iter(loader) for loader in loaders]
        found: list[list[Any]] = [[], []]
        for _ in range(7):
            for batches, stream in zip(found, passes, strict=True):
                batches.append(next(stream))
        expected = []
        for epoch in (2 * number, 2 * number + 1):
            alone = dataset()
            alone.set_epoch(epoch)
            expected.append([batch for batch, _ in zip(alone, range(7), strict=False)])
        if not same(found[0], expected[0]):  # whose workers start first decides
            expected.reverse()
        assert all(map(same, found, expected))
    assert memory() - before < 1 << 20


def test_batches_are_the_same_where_files_may_not_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, resize = list(dataset()), os.ftruncate

    def limited(descriptor: int, size: int) -> None:
        if size > 1 << 20:
            raise OSError(errno.EFBIG, "File too large")
        resize(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", limited)
    before, data = memory(), dataset()
    assert sent_by_child(SharedSlots(), 1) == [None]
    assert same(DataLoader(data, batch_size=None, num_workers=2), expected)
    assert memory() == before


class Wrapped(IterableDataset[Any]):
    """Opens its dataset in the worker, with a loader; the process that receives does not have that dataset."""

    def __iter__(self) -> Iterator[Any]:
        for batch in DataLoader(dataset(), batch_size=None):
            yield batch["a"]


def test_a_loader_in_a_worker_yields_batches() -> None:
    assert same(DataLoader(Wrapped(), batch_size=None, num_workers=1), [batch["a"] for batch in dataset()])


# Kinds of batches -----------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any], Any]] = {
    "texts": lambda rows: TensorDict({"a": rows["a"], "text": NonTensorStack(*map(str, rows["a"].tolist()))}, [16]),
    "constant": lambda rows: TensorDict({"a": rows["a"], "text": NonTensorData("same", [16])}, [16]),
    "nested lazy": lambda rows: TensorDict(
        {"a": LazyStackedTensorDict(*[TensorDict({"z": torch.ones(3)})] * 16)}, [16]
    ),
    "named": lambda rows: TensorDict({"a": rows["a"]}, [16], names=["time"]),
    "dict": lambda rows: {"a": rows["a"], "nest": {"b": (rows["a"] * 2, [rows["b", "c"]])}},
    "mixed dict": lambda rows: {"a": rows["a"], 1: "text", "1": None},
    "tuple": lambda rows: (rows["a"], rows["b"]),
    "tensor": lambda rows: rows["a"].reshape(4, 4).T,
    "expanded": lambda rows: {"a": rows["a"][:1].expand(5), "b": rows["b", "c"].to(torch.complex64).conj()},
    "parameter": lambda rows: {"a": torch.nn.Parameter(rows["b", "c"])},
    "empty": lambda rows: {"a": torch.zeros(0, 3)},
    "none": lambda rows: None,
    "large": lambda rows: {"a": rows["a"].repeat(CAPACITY // 64)},
}


def described(part: Any) -> Any:
    """A nest as text: types, dtypes, shapes, values."""
    if isinstance(part, torch.Tensor):
        return type(part), part.dtype, part.requires_grad, tuple(part.shape), part[:100].tolist()
    if isinstance(part, dict | TensorDict | LazyStackedTensorDict):
        names = None if isinstance(part, dict) else (part.batch_size, part.names)
        return type(part), names, [(key, described(part[key])) for key in part.keys()]  # noqa: SIM118
    if isinstance(part, list | tuple):
        return type(part), [*map(described, part)]
    return part.tolist() if isinstance(part, NonTensorStack) else part


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_arrives_as_it_was(kind: str) -> None:
    data, alone = dataset(KINDS[kind], 3), dataset(KINDS[kind], 3)
    found = list(DataLoader(data, batch_size=None, num_workers=1))
    assert list(map(described, found)) == list(map(described, alone))


UNSENT: dict[str, Callable[[Any], Any]] = {
    "dict": lambda rows: {"a": lambda: 1},
    "tensordict": lambda rows: TensorDict({"a": rows["a"], "f": NonTensorData(lambda: 1, [16])}, [16]),
}


@pytest.mark.parametrize("kind", UNSENT)
def test_a_batch_that_cannot_be_sent_is_an_error(kind: str) -> None:
    found = ""
    try:
        next(iter(rbtool.TorchLoader(dataset(UNSENT[kind]), num_workers=1, timeout=HANG)))
    except AttributeError as error:
        found, error.__traceback__ = str(error), None  # torch takes 5 s to end the workers that a traceback refers to
    assert "pickle" in found
