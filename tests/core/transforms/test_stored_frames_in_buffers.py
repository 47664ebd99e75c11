"""Where stacks of stored frames are made: in buffers of every kind, in ensembles and loaders, and while rows change."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from numbered_frames import PAD, drawing, flagged, require_stacks, stack, with_next
from tensordict import TensorDict

from rbtool.core.buffers.ensemble import ReplayBufferEnsemble
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError, SchemaError
from rbtool.core.loading.loader import TorchLoader
from rbtool.core.loading.torch_dataset import torch_dataset
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.slice_samplers import situation
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.windows import StoredFrameStack


def test_other_transforms_follow() -> None:
    chain = Compose(stack(2), lambda batch: batch.set("number", batch["number"] * 2))
    assert ReplayBuffer(storage=TensorStorage(flagged()), transform=chain)[3]["number"].tolist() == [4, 6]
    buffer = ReplayBuffer(storage=TensorStorage(flagged()), transform=stack(2)).append_transform(
        lambda batch: batch + 1
    )
    assert buffer[3]["number"].tolist() == [3, 4]


def test_two_stacks_of_one_buffer() -> None:
    rows = flagged(other=torch.arange(9) * 10)
    chain = Compose(stack(2), StoredFrameStack(3, "other", dim=-1, padding="same"))
    found = ReplayBuffer(storage=TensorStorage(rows), transform=chain)[3]
    assert (found["number"].tolist(), found["other"].tolist()) == ([2, 3], [10, 20, 30])


@pytest.mark.parametrize(
    ("transform", "rows", "error", "words"),
    [
        (Compose(lambda rows: rows, stack()), flagged(), SchemaError, "only a buffer can provide"),
        (stack(), flagged().exclude(("next", "done")), MissingKeyError, "episodes cannot be separated"),
        (stack(traj_key="game"), flagged(), MissingKeyError, "'game' is not in the storage"),
        (stack(done_key="over"), flagged(episode=torch.arange(9)), MissingKeyError, "'over' is not in the storage"),
        (StoredFrameStack(2), flagged(), MissingKeyError, "pixels is not in the batch"),
        (StoredFrameStack(2, "number"), flagged(), SchemaError, "which have no dimension dim=-3"),
        (stack(), torch.arange(9), MissingKeyError, "episodes cannot be separated"),
        (stack(), flagged(steps_to_next_obs=torch.full((9,), 3)), SchemaError, "up to 3 steps ahead"),
        (stack(), flagged().set(("next", "number"), torch.rand(9)), SchemaError, "but the root has torch.int64"),
    ],
)
def test_bad_input(transform: Any, rows: Any, error: type[Exception], words: str) -> None:
    buffer = ReplayBuffer(storage=TensorStorage(rows), transform=transform, batch_size=4)
    for read in (buffer.sample, lambda: buffer[:], lambda: buffer[2]):
        with pytest.raises(error, match=words):
            read()


def test_a_batch_alone_is_refused() -> None:
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        stack()(flagged())


def test_whole_trajectories_are_refused() -> None:
    rows = flagged(8, (7,)).reshape(2, 4)
    with pytest.raises(SchemaError, match="expected single steps"):
        ReplayBuffer(storage=TensorStorage(rows), transform=stack())[:]


def rings(sampler: Callable[[], Sampler] = RandomSampler, count: int = 2) -> list[TensorDictReplayBuffer]:
    """Buffers with numbers of their own."""
    found = []
    for number in range(count):
        twin = with_next(situation("wrapped mid-episode", "ragged", slots=12 + number))
        found.append(drawing(twin, sampler()))
        found[-1].model = twin.model  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(
    ("form", "sampler"),
    [
        ("stack", RandomSampler),
        ("exact", RandomSampler),
        ("exact", SamplerWithoutReplacement),
        ("exact", lambda: SliceSampler(slice_len=2)),
        ("exact", lambda: PrioritizedSampler(20, 0.6, 0.4)),
    ],
)
def test_members_of_an_ensemble(form: Any, sampler: Callable[[], Sampler], prefetch: int | None) -> None:
    members = rings(sampler)
    buffer = ReplayBufferEnsemble(*members, batch=form, batch_size=8, prefetch=prefetch, schema="error")
    for _ in range(5):
        batch = buffer.sample().reshape(-1)
        for number, member in enumerate(members):
            part = batch[batch["source_id"] == number]
            part["index"] = part["index", "index"]
            require_stacks(part, member.model, 3)  # type: ignore[attr-defined]


def test_an_ensemble_has_no_rows_of_its_own() -> None:
    plain = [ReplayBuffer(storage=TensorStorage(flagged())) for _ in range(2)]
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        ReplayBufferEnsemble(*plain, transform=stack(), batch_size=4).sample()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_loaders(workers: int) -> None:
    twin = with_next(situation("wrapped mid-episode", "ragged"))
    for sampler in (SamplerWithoutReplacement(), SliceSamplerWithoutReplacement(slice_len=2, strict_length=False)):
        batches = list(TorchLoader(torch_dataset(drawing(twin, sampler, batch_size=4), seed=0), num_workers=workers))
        assert batches
        for batch in batches:
            require_stacks(batch, twin.model, 3)


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: SliceSampler(slice_len=2)])
@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_ring_that_is_written_meanwhile(sampler: Callable[[], Sampler], prefetch: int | None) -> None:
    """Frames are of one moment: each is the number after the one before, or padding."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler(), transform=stack(4), batch_size=32, prefetch=prefetch
    )
    batches = numbered(17)
    buffer.extend(next(batches))
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            buffer.extend(next(batches))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            require_consecutive(buffer.sample())
    finally:
        over.set()
        writer.join()


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: SliceSampler(slice_len=2)])
def test_a_ring_that_another_process_writes(sampler: Callable[[], Sampler], tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(50, scratch_dir=tmp_path),
        sampler=sampler(),
        transform=stack(4),
        batch_size=32,
        shared=True,
    )
    batches = numbered(17)
    buffer.extend(next(batches))
    context = multiprocessing.get_context("fork")
    over = context.Event()

    def write() -> None:
        while not over.is_set():
            buffer.extend(next(batches))

    writer = context.Process(target=write)
    writer.start()
    try:
        for _ in range(200):
            require_consecutive(buffer.sample())
    finally:
        over.set()
        writer.join()
    assert len(buffer) == 50


def numbered(count: int) -> Iterator[TensorDict]:
    """Batches of steps whose numbers go on; an episode ends with each number of `count` * 10 + 9."""
    start = 0
    while True:
        number = torch.arange(start, start + count)
        done = (number % 10 == 9).unsqueeze(-1)
        yield TensorDict({"number": number, "next": {"number": number + 1, "done": done}}, [count])
        start += count


def require_consecutive(batch: Any) -> None:
    for root, following in zip(batch["number"].tolist(), batch["next", "number"].tolist(), strict=True):
        known = [number for number in root if number != PAD]
        assert root == [PAD] * (4 - len(known)) + known
        assert known == list(range(known[-1] - len(known) + 1, known[-1] + 1))
        assert known[0] // 10 == known[-1] // 10
        assert following == [*root[1:], known[-1] + 1]


def test_a_pickled_buffer_stacks() -> None:
    import pickle

    twin = with_next(situation("partly filled", "ragged"))
    buffer = pickle.loads(pickle.dumps(drawing(twin, RandomSampler())))
    require_stacks(buffer.sample(), twin.model, 3)


def test_steps_of_one_ring_after_another() -> None:
    buffer = drawing(with_next(situation("exactly full", "ragged")), RandomSampler())
    buffer.sample()
    twin = with_next(situation("wrapped mid-episode", "truncated"))
    buffer.set_storage(twin.buffer.storage)
    require_stacks(buffer.sample(), twin.model, 3)
