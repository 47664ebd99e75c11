"""`StreamDataset`: workers and ranks divide the shards of a stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streams import EPISODES as RAGGED
from streams import Fails, Works, contents, rows, taken
from torch.utils.data import DataLoader

import rbtool
from rbtool.core.remote import shards
from rbtool.core.testing.datasets import write_walks

EPISODES: Any = [(6, "terminated"), (1, "truncated"), (9, "open"), (11, "both")] * 4
STEPS = sum(length for length, _ in EPISODES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it
]


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., rbtool.StreamDataset]:
    """Opens a stream of eight shards or so."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1500)
    write_walks(tmp_path / "walks", EPISODES)

    def opened(seed: int = 0, **options: Any) -> rbtool.StreamDataset:
        buffer = rbtool.load_dataset(tmp_path / "walks", 5, streaming=True)
        return rbtool.StreamDataset(buffer, seed=seed, **options)

    return opened


def loader(dataset: Any, workers: int, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def steps(batches: Any) -> list[int]:
    return [row for batch in rows(batches) for row in batch]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_have_every_step_once_and_epochs_differ(stream: Any, workers: int) -> None:
    made = loader(stream(), workers)
    passes = [steps(made) for _ in range(3)]
    assert all(sorted(one) == list(range(STEPS)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    again = loader(stream(), workers)
    assert [steps(again) for _ in range(3)] == passes


def test_persistent_workers_go_on_with_the_next_epoch(stream: Any) -> None:
    kept, fresh = loader(stream(), 2, persistent_workers=True), loader(stream(), 2)
    assert [steps(kept) for _ in range(3)] == [steps(fresh) for _ in range(3)]


@pytest.mark.slow
def test_spawned_workers_have_the_same_batches(stream: Any) -> None:
    assert steps(loader(stream(), 1, multiprocessing_context="spawn")) == steps(stream())


def test_ranks_have_every_step_once(stream: Any) -> None:
    ranks = [stream(rank=rank, world_size=3) for rank in range(3)]
    assert sorted(row for rank in ranks for row in steps(rank)) == list(range(STEPS))
    workers = [loader(stream(rank=rank, world_size=2), 2) for rank in range(2)]
    assert sorted(row for one in workers for row in steps(one)) == list(range(STEPS))
    workers = [loader(stream(rank=rank, world_size=3), count) for rank, count in enumerate((2, 0, 3))]
    assert sorted(row for one in workers for row in steps(one)) == list(range(STEPS))
    with pytest.raises(rbtool.UsageError, match="shards for 99 ranks"):
        stream(rank=0, world_size=99)


def test_workers_without_a_shard_have_no_batch(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 20)
    assert sorted(steps(loader(stream(), 3))) == list(range(STEPS))


@pytest.mark.parametrize("taken", [0, 1, 7, 999])
def test_a_pass_continues_after_any_batch(stream: Any, taken: int) -> None:
    first, again = stream(), stream(seed=5)
    whole = [*rows(first), *rows(first)]
    count = len(rows(stream()))
    first = stream()
    for number, _ in enumerate(first, 1):
        if number == taken:
            break
    if taken:
        again.load_state_dict(first.state_dict())
    else:
        again.load_state_dict(stream().state_dict())
    assert [*rows(again), *rows(again)] == whole[min(taken, count) :]


def test_states_are_of_their_part_and_their_loader(stream: Any) -> None:
    first, again = stream(), stream()
    next(batches := iter(first))
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    assert rows(again) == rows(batches)
    dataset = stream()
    steps(loader(dataset, 1))
    with pytest.raises(rbtool.SchemaError, match="ahead of the training loop"):
        dataset.state_dict()
    state = stream(rank=0, world_size=2).state_dict()
    with pytest.raises(rbtool.SchemaError, match="the state has part"):
        stream(rank=1, world_size=2).load_state_dict(state)
    with pytest.raises(rbtool.SchemaError, match="batches of the batches"):
        next(iter(DataLoader(stream(), batch_size=4)))


@pytest.mark.parametrize(("workers", "taken"), [(0, 4), (2, 5), (2, 20)])
def test_a_stateful_loader_continues(stream: Any, workers: int, taken: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def made(seed: int) -> Any:
        return torchdata.StatefulDataLoader(stream(seed=seed), batch_size=None, num_workers=workers)

    first = made(0)
    whole = rows(first)
    loader = made(0)
    for number, _ in enumerate(loader, 1):
        if number == taken:
            break
    again = made(5)
    again.load_state_dict(loader.state_dict())
    assert rows(again) == whole[taken:]


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", EPISODES)
    buffer: Any = rbtool.load_dataset(tmp_path / "walks", 5)
    with pytest.raises(rbtool.UsageError, match="expected a stream"):
        rbtool.StreamDataset(buffer)
    with pytest.raises(rbtool.UsageError, match="no batch size"):
        rbtool.StreamDataset(rbtool.load_dataset(tmp_path / "walks", streaming=True))
    with pytest.raises(rbtool.UsageError, match="prefetch"):
        rbtool.StreamDataset(rbtool.load_dataset(tmp_path / "walks", 5, streaming=True, prefetch=2))
    with pytest.raises(rbtool.UsageError, match="no seed in common"):
        rbtool.StreamDataset(rbtool.load_dataset(tmp_path / "walks", 5, streaming=True), rank=0, world_size=2)


def test_a_batch_size_that_slices_do_not_divide_is_refused_when_the_stream_is_opened(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", EPISODES)
    sampler = rbtool.StreamSliceSampler(slice_len=3)
    with pytest.raises(rbtool.SchemaError, match="5 is not divisible by slice_len=3"):
        rbtool.load_dataset(tmp_path / "walks", 5, sampler=sampler, streaming=True)


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    write_walks(tmp_path / "ragged", RAGGED["ragged"])
    return tmp_path / "ragged"


def streamed(path: Path, transform: Any = None) -> Any:
    stream = rbtool.load_dataset(path, 4, streaming=True, transform=transform)
    return rbtool.StreamDataset(stream, seed=3)


def test_a_batch_that_failed_is_made_again_in_its_place(ragged: Path) -> None:
    found, failures = taken(iter(streamed(ragged, Fails())))
    assert contents(found) == contents(streamed(ragged, Works()))
    assert failures
    stream = streamed(ragged, Fails())
    with contextlib.suppress(OSError):
        list(stream)
    found, _ = taken(iter(stream))
    assert len({row for batch in rows(found) for row in batch}) == sum(map(len, rows(found)))


def test_the_state_of_a_stream_after_a_failure_has_the_batch_that_failed(ragged: Path) -> None:
    stream, found = streamed(ragged, Fails()), []
    batches = iter(stream)
    with contextlib.suppress(OSError):
        while True:
            found.append(next(batches))
    state = stream.state_dict()
    for again in (streamed(ragged), stream):  # another process, and this one
        again.load_state_dict(state)
        assert rows([*found, *taken(iter(again))[0]]) == rows(streamed(ragged))
