"""`StreamDataset`: workers and ranks divide the shards of a stream."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import EPISODES as RAGGED
from streams import Fails, Works, contents, rows, stream_buffer, taken
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

import rbtool
from rbtool.core.loading import torch_dataset
from rbtool.core.remote import shards
from rbtool.core.samplers.stream import StreamEpisodeSampler
from rbtool.core.streams import stream_dataset
from rbtool.core.testing.datasets import write_walks

EPISODES: Any = [(6, "terminated"), (1, "truncated"), (9, "open"), (11, "both")] * 4
STEPS = sum(length for length, _ in EPISODES)
SLOW = pytest.mark.slow
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


def advance(made: Any, count: int) -> None:
    """Take some batches, or all if there are fewer."""
    for _ in itertools.islice(iter(made) if count else (), count):
        pass


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_have_every_step_once_and_epochs_differ(stream: Any, workers: int) -> None:
    made = loader(stream(), workers)
    passes = [steps(made) for _ in range(2)]
    assert all(sorted(one) == list(range(STEPS)) for one in passes)
    assert passes[0] != passes[1]
    again = loader(stream(), workers)
    assert [steps(again) for _ in range(2)] == passes


def test_persistent_workers_go_on_with_the_next_epoch(stream: Any) -> None:
    kept, fresh = loader(stream(), 2, persistent_workers=True), loader(stream(), 2)
    assert [steps(kept) for _ in range(3)] == [steps(fresh) for _ in range(3)]


@SLOW
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


@each("taken", [0, 1, 7, 999])
def test_a_pass_continues_after_any_batch(stream: Any, taken: int) -> None:
    whole = stream()
    passes = [rows(whole), rows(whole)]
    first, again = stream(), stream(seed=5)
    advance(first, taken)
    again.load_state_dict(first.state_dict())
    assert [*rows(again), *rows(again)] == [*passes[0][taken:], *passes[1]]


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

    whole = rows(made(0))
    assert len(whole) >= taken
    first, again = made(0), made(5)
    advance(first, taken)
    again.load_state_dict(first.state_dict())
    assert rows(again) == whole[taken:]


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", EPISODES)

    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"batch_size": 5}, {}, "expected a stream"),
        ({"streaming": True}, {}, "no batch size"),
        ({"batch_size": 5, "streaming": True, "prefetch": 2}, {}, "prefetch"),
        ({"batch_size": 5, "streaming": True}, {"rank": 0, "world_size": 2}, "no seed in common"),
        ({"batch_size": 5, "streaming": True}, {"seed": -1}, "the seed is -1"),
        ({"batch_size": 5, "streaming": True}, {"seed": 1.5}, "the seed is 1.5"),
    ]
    for opened, options, message in cases:
        with pytest.raises(rbtool.UsageError, match=message):
            rbtool.StreamDataset(rbtool.load_dataset(tmp_path / "walks", **opened), **options)
    slices = rbtool.StreamSliceSampler(slice_len=3)
    with pytest.raises(rbtool.SchemaError, match="5 is not divisible by slice_len=3"):  # when the stream is opened
        rbtool.load_dataset(tmp_path / "walks", 5, sampler=slices, streaming=True)


# Other numbers of ranks and workers ------------------------------------------------------------------


@contextlib.contextmanager
def worker(number: int, workers: int) -> Iterator[None]:
    """Make this process one of the workers of a loader, for as long as the block runs."""
    info = WorkerInfo(id=number, num_workers=workers, seed=7 + number, dataset=None)
    asked = mock.Mock(return_value=info)
    with contextlib.ExitStack() as patches:
        for module in (stream_dataset, torch_dataset):
            patches.enter_context(mock.patch.object(module, "get_worker_info", asked))
        yield


class Division(NamedTuple):
    """How many workers each rank has, and after how many batches each of them ends."""

    workers: list[int]
    batches: list[int]


BEFORE = st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
    lambda workers: st.builds(
        Division, st.just(workers), st.lists(st.integers(0, 4), min_size=sum(workers), max_size=sum(workers))
    )
)
SHARDS = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=4, max_size=12).filter(any)


def sampler(options: Any, slices: bool) -> Any:
    if slices:
        return rbtool.StreamSliceSampler(slice_len=2, strict_length=False, **options)
    return rbtool.StreamSampler(**options)


def ranks_of(lengths: Any, division: Division, make: Any) -> list[tuple[int, int, rbtool.StreamDataset]]:
    """The data sets of all workers of all ranks, each with its number."""
    return [
        (number, workers, rbtool.StreamDataset(stream_buffer(lengths, make(), 4), seed=9, rank=rank, world_size=ranks))
        for ranks in [len(division.workers)]
        for rank, workers in enumerate(division.workers)
        for number in range(workers)
    ]


def drawn_by(lengths: Any, divisions: list[Division], make: Any) -> tuple[list[list[int]], Any]:
    """Draw as the divisions say, one after another, and all that is left; return the batches and the last states."""
    states: Any = None
    found: list[list[int]] = []
    for division in divisions:
        following = []
        for (number, workers, dataset), count in zip(ranks_of(lengths, division, make), division.batches, strict=True):
            if states is not None:
                dataset.load_state_dict(states)
            with worker(number, workers):
                found += [batch["x"].flatten().tolist() for batch in itertools.islice(dataset, count)]
                following.append(json.loads(json.dumps(dataset.state_dict())))
        states = following
    return found, states


@settings(max_examples=30)
@given(
    SHARDS, st.lists(BEFORE, min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.fixed_dictionaries({"window": st.integers(1, 5), "shuffle": st.booleans()}), st.booleans(),
)  # fmt: skip
def test_any_ranks_and_workers_draw_what_others_left(
    lengths: Any, before: list[Division], workers: list[int], options: Any, slices: bool
) -> None:
    last = Division(workers, [999] * sum(workers))
    found, states = drawn_by(lengths, [*before, last], lambda: sampler(options, slices))
    steps = sorted(itertools.chain(*found))
    if slices:  # the first steps of the slices are of all episodes
        ends = np.cumsum(list(itertools.chain(*lengths)))
        assert Counter(np.searchsorted(ends, steps, side="right").tolist()) == Counter(
            {episode: min(2, length) for episode, length in enumerate(itertools.chain(*lengths))}
        )
    else:
        assert steps == list(range(sum(map(sum, lengths))))
    assert drawn_by(lengths, [*before, last], lambda: sampler(options, slices))[0] == found
    one = rbtool.StreamDataset(stream_buffer(lengths, sampler(options, slices), 4))
    one.load_state_dict(states)
    whole = rbtool.StreamDataset(stream_buffer(lengths, sampler(options, slices), 4), seed=9)
    whole.set_epoch(1)
    assert [*one, *rows(one)] == rows(whole)


@pytest.mark.parametrize(("before", "after"), [((3, 2), (2, 1)), ((2, 0), (5, 1)), ((1, 3), (1, 0))])
def test_loaders_continue_with_other_ranks_and_workers(
    stream: Any, before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 700)
    found, states = list[int](), []
    for rank in range(before[0]):
        made = rbtool.TorchLoader(stream(rank=rank, world_size=before[0]), num_workers=before[1])
        batches = iter(made)
        found += steps(itertools.islice(batches, rank % 3))
        states.append(json.loads(json.dumps(made.state_dict())))
    later = []
    for rank in range(after[0]):
        made = rbtool.TorchLoader(stream(5, rank=rank, world_size=after[0]), num_workers=after[1])
        made.load_state_dict(states)
        kept = made.state_dict()
        assert kept["left"]
        assert not any("left" in state for state in kept["workers"])  # it can be long, and is the same for all
        made.load_state_dict(json.loads(json.dumps(kept)))
        found += steps(made)
        later += steps(made)
    assert sorted(found) == sorted(later) == list(range(STEPS))


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), (1, True), (3, False), pytest.param(1, False, marks=SLOW), pytest.param(3, True, marks=SLOW)],
)
def test_a_loader_of_a_stream_continues_with_the_next_batch(stream: Any, workers: int, persistent: bool) -> None:
    def made(seed: int) -> rbtool.TorchLoader:
        return rbtool.TorchLoader(stream(seed), num_workers=workers, device="cpu", persistent_workers=persistent)

    first = made(0)
    whole = [rows(first) for _ in range(3)]
    again = made(5)
    rows(again)
    for count in (0, 1, 4, len(whole[1])) if workers < 2 else (4, len(whole[1])):
        one = made(0)
        rows(one)
        advance(one, count)
        again.load_state_dict(one.state_dict())
        assert [rows(again), rows(again)] == [whole[1][count:], whole[2]]


def test_a_loader_of_a_stream_makes_a_batch_that_failed_again(ragged: Path) -> None:
    expected = rows(streamed(ragged))
    assert rows(taken(iter(rbtool.TorchLoader(streamed(ragged, Fails()), device="cpu")))[0]) == expected
    found, failures = taken(iter(rbtool.TorchLoader(streamed(ragged, Fails()), num_workers=2)))
    assert failures
    assert rows(found) == rows(rbtool.TorchLoader(streamed(ragged), num_workers=2))


def test_the_collate_function_of_a_loader_is_given_batches(stream: Any) -> None:
    made = rbtool.TorchLoader(stream(), num_workers=1, collate_fn=len)
    assert sum(made) == STEPS


def test_states_that_are_not_all_of_one_epoch_are_refused(stream: Any, tmp_path: Path) -> None:
    datasets = [stream(rank=rank, world_size=3) for rank in range(3)]
    for dataset in datasets:
        next(iter(dataset))
    states = [dataset.state_dict() for dataset in datasets]
    write_walks(tmp_path / "other", EPISODES[1:])
    other = rbtool.StreamDataset(rbtool.load_dataset(tmp_path / "other", 5, streaming=True), seed=0)
    slices = rbtool.load_dataset(tmp_path / "walks", 6, streaming=True, sampler=rbtool.StreamSliceSampler(slice_len=3))
    ended = stream(rank=2, world_size=3)
    rows(ended), next(iter(ended))
    divided = stream(rank=2, world_size=3)
    divided.load_state_dict(states)
    whole = rbtool.load_dataset(tmp_path / "walks", 2, streaming=True, sampler=StreamEpisodeSampler())
    episodes = rbtool.StreamDataset(whole, seed=0)
    next(iter(episodes))
    for refused, message in (
        ([], "no state"),
        ([None], "no state"),
        (episodes.state_dict(), "trajectories=True, this sampler trajectories=False"),
        ([episodes.state_dict()], "trajectories=True, this sampler trajectories=False"),
        ([{**one, "left": [[0, 10**9, 0]]} for one in states], "part 0 of 3 contradicts itself"),
        ([{**one, "drawn": []} for one in states], "part 0 of 3 contradicts itself"),
        (states[:2], "there are states of part 0 of 3, 1 of 3, expected all parts"),
        ([*states, states[1]], "two states have the same shards: part 1 of 3"),
        ([*states[:2], stream(seed=1, rank=2, world_size=3).state_dict()], "they have seed=0 and seed=1"),
        ([*states[:2], ended.state_dict()], "of the epochs 0 and 1"),
        ([*states[:2], divided.state_dict()], "two divisions of an epoch"),
        ([*states[:2], other.state_dict()], "belongs to other data"),
        ([*states[:2], {"identity": states[0]["identity"]}], "is missing in the state of a stream"),
        (rbtool.StreamDataset(slices, seed=0).state_dict(), "strict_length=True, this sampler strict_length=None"),
    ):
        again = stream()
        before = again.state_dict()
        with pytest.raises(rbtool.SchemaError, match=message):
            again.load_state_dict(refused)
        assert again.state_dict() == before
    with pytest.raises(rbtool.SchemaError, match="the state is of 1 workers, this loader has 2"):
        rbtool.TorchLoader(stream(rank=0, world_size=3), num_workers=2).load_state_dict(states[0])


def test_larger_batches_than_what_is_left_end_the_pass(stream: Any, tmp_path: Path) -> None:
    def made(batch_size: int) -> rbtool.StreamDataset:
        sampler = rbtool.StreamSampler(drop_last=True)
        buffer = rbtool.load_dataset(tmp_path / "walks", batch_size, streaming=True, sampler=sampler)
        return rbtool.StreamDataset(buffer, seed=0)

    one, other = made(4), made(40)
    advance(one, STEPS // 4 - 1)
    other.load_state_dict(one.state_dict())
    passes = [steps(other) for _ in range(3)]
    assert [len(found) for found in passes] == [0, STEPS // 40 * 40, STEPS // 40 * 40]
    assert passes[1] != passes[2]


def test_a_state_is_loaded_for_one_pass_of_workers_alone(stream: Any) -> None:
    dataset, again = stream(), stream()
    whole = [rows(dataset), rows(dataset)]
    next(batches := iter(dataset := stream()))
    again.load_state_dict(dataset.state_dict())
    made = loader(again, 1)
    assert [rows(made), rows(made)] == [whole[0][1:], whole[1]]
    del batches


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
