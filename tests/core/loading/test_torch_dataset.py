"""Batches of torch datasets: exact for any number of workers and ranks, after a failed batch and from a state."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from streams import BATCH, EPISODES, SAMPLERS, WITH_EPOCHS, Fails, Works, contents, epochs, opened, rows, taken
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

import rbtool
from rbtool.core.loading import torch_dataset as loading
from rbtool.core.loading.torch_dataset import KeyedOrder, Passes, Shard, shard_of_process
from rbtool.core.samplers.uniform import seed_of
from rbtool.core.testing.datasets import write_walks

Walks = Callable[[str], Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it
]
ALL = [(episodes, sampler) for episodes in EPISODES for sampler in SAMPLERS]


@contextmanager
def acting_as_worker(number: int, workers: int, seed: int = 77) -> Iterator[None]:
    """Have this process pass for a worker."""
    info: Any = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=seed + number, dataset=None)
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = None


def of_workers(dataset: Any, workers: int, seed: int = 77) -> list[Any]:
    """The batches of a pass of so many workers, in the order of a loader."""
    if not workers:
        return list(dataset)
    found: list[list[Any]] = []
    for number in range(workers):
        with acting_as_worker(number, workers, seed):
            found.append([*copy.copy(dataset)])
    return [found[k % workers][k // workers] for k in range(sum(map(len, found)))]


@each(("episodes", "sampler"), ALL)
def test_batches_do_not_depend_on_the_number_of_workers(walks: Walks, episodes: str, sampler: str) -> None:
    expected = epochs(walks(episodes), 2, sampler)
    for workers in (1, 2, 4):
        dataset = opened(walks(episodes), sampler)
        assert [contents(of_workers(dataset, workers, seed)) for seed in (5, 900)] == expected
    by_number = opened(walks(episodes), sampler, style="map")
    assert contents(by_number[1, k] for k in range(len(by_number))) == expected[1]


@each("ranks", [1, 2, 3])
@each(("episodes", "sampler"), [one for one in ALL if one[1] in WITH_EPOCHS])
def test_an_epoch_of_all_ranks_has_every_element_once(walks, episodes, sampler, ranks) -> None:
    entry = "episode" if "slices" in sampler else "index"
    for workers in (0, 2):
        parts = [opened(walks(episodes), sampler, rank=rank, world_size=ranks) for rank in range(ranks)]
        batches = [of_workers(part, workers) for part in parts]
        assert {len(found) for found in batches} == {len(parts[0])}
        seen = [batch[entry].unique() for found in batches for batch in found]
        lengths = [length for length, _ in EPISODES[episodes]]
        count = len(lengths) if entry == "episode" else sum(lengths)
        assert sorted(torch.cat(seen).tolist()) == list(range(count))


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 9),
    ranks=st.integers(1, 3),
    workers=st.sampled_from([0, 1, 2, 4]),
    drop_last=st.booleans(),
)
def test_any_size_is_divided_among_ranks_and_workers(size, batch, ranks, workers, drop_last) -> None:
    buffer = rbtool.ReplayBuffer(
        storage=rbtool.TensorStorage(torch.arange(size)), sampler=rbtool.SamplerWithoutReplacement()
    )
    if size < ranks * (batch if drop_last else 1):
        return
    options: Any = {"seed": 1, "world_size": ranks, "drop_last": drop_last}
    found = [of_workers(rbtool.torch_dataset(buffer, batch, rank=rank, **options), workers) for rank in range(ranks)]
    assert len({len(part) for part in found}) == 1
    elements = [element for part in found for one in part for element in one.tolist()]
    assert len(set(elements)) == len(elements)
    assert len(elements) == size if not drop_last else {len(one) for part in found for one in part} == {batch}


@pytest.mark.parametrize("sampler", ["uniform", "slices"])
def test_ranks_draw_different_elements_with_replacement(walks: Walks, sampler: str) -> None:
    found = [rows(opened(walks("ragged"), sampler, rank=rank, world_size=2)) for rank in range(2)]
    assert all(one != other for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("sampler", ["slices", "slices by steps", "slices without replacement"])
@pytest.mark.parametrize("episodes", EPISODES)
def test_slices_are_consecutive_steps_of_one_episode(walks: Walks, episodes: str, sampler: str) -> None:
    for batch in of_workers(opened(walks(episodes), sampler), 2):
        real = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        index, episode = batch["index"].squeeze(-1)[real], batch["episode"][real]
        ends = batch["next", "truncated"].squeeze(-1)[real]
        assert ends[-1]
        inside = ~ends[:-1]
        assert (index.diff()[inside] == 1).all()
        assert (episode.diff()[inside] == 0).all()
        assert int(ends.sum()) <= 2
        if sampler == "slices":
            assert batch.shape == (2, BATCH // 2)


def test_every_epoch_has_another_order_in_workers_as_well(walks: Walks) -> None:
    one, other, by_workers = (opened(walks("ragged")) for _ in range(3))
    found = [rows(one) for _ in range(3)]
    assert found[0] != found[1] != found[2] != found[0]
    assert [rows(other) for _ in range(3)] == found
    other.set_epoch(1)
    assert rows(other) == found[1]
    for seed in (4, (1 << 64) - 1):
        assert rows(opened(walks("ragged"), seed=seed)) != found[0]
    assert [rows(of_workers(by_workers, 2, seed=5)) for _ in range(3)] == found


def test_an_endless_dataset_has_no_length_and_different_batches(walks: Walks) -> None:
    dataset = rbtool.torch_dataset(walks("ragged"), BATCH, sampler=rbtool.RandomSampler(), seed=1)
    stream = iter(dataset)
    found = [next(stream)["index"].tolist() for _ in range(30)]
    assert len({tuple(batch) for batch in found}) == 30
    with pytest.raises(TypeError, match="no len"):
        len(dataset)


def test_transforms_are_applied_and_draw_the_same(walks: Walks) -> None:
    class Noise(rbtool.Transform):
        draws = True

        def forward(self, data: Any) -> Any:
            return data.copy().set("noise", torch.rand(len(data), generator=self.generator))

    options: Any = {"transform": Noise()}
    alone = contents(opened(walks("ragged"), **options))
    assert all("noise" in batch for batch in alone)
    assert contents(of_workers(opened(walks("ragged"), **options), 2)) == alone


def test_members_of_an_ensemble_with_seeds_of_their_own_draw_the_same(walks: Walks) -> None:
    def made() -> Any:
        members = [rbtool.load_dataset(walks(name), seed=5) for name in ("ragged", "truncated")]
        ensemble = rbtool.ReplayBufferEnsemble(*members, p=[1, 2], batch="exact", batch_size=BATCH)
        return rbtool.torch_dataset(ensemble, seed=1, batches=5)

    alone = contents(made())
    assert contents(of_workers(made(), 2)) == alone
    assert len({str(batch) for batch in alone}) == 5


def test_a_torch_dataset_does_not_advance_its_buffer(walks: Walks) -> None:
    for sampler in (rbtool.RandomSampler, rbtool.SamplerWithoutReplacement):
        one, other = (rbtool.load_dataset(walks("ragged"), BATCH, sampler=sampler(), seed=1) for _ in range(2))
        batches = {} if sampler is rbtool.SamplerWithoutReplacement else {"batches": 3}
        assert one.sample()["index"].tolist() == other.sample()["index"].tolist()
        list(rbtool.torch_dataset(one, seed=9, **batches))
        assert one.sample()["index"].tolist() == other.sample()["index"].tolist()


def ring(size: int) -> Any:
    """A ring of 20 rows, to which so many were written."""
    buffer = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(20), batch_size=BATCH, sampler=rbtool.SamplerWithoutReplacement()
    )
    for first in range(0, size, 5):
        buffer.extend(TensorDict({"a": torch.arange(first, first + 5)}, [5]))
    return buffer


@pytest.mark.parametrize("size", [5, 20, 30])
def test_an_epoch_of_a_ring_has_the_rows_at_its_start(size: int) -> None:
    buffer = ring(size)
    dataset = rbtool.torch_dataset(buffer, seed=1)
    assert sorted(torch.cat([batch["a"] for batch in dataset]).tolist()) == list(range(max(0, size - 20), size))
    buffer.extend(TensorDict({"a": torch.arange(100, 105)}, [5]))
    assert len(dataset) == min(size + 5, 20) // BATCH + (min(size + 5, 20) % BATCH > 0)
    stream = iter(dataset)
    next(stream)
    buffer.extend(TensorDict({"a": torch.arange(5)}, [5]))
    with pytest.raises(RuntimeError, match="written to the buffer during an epoch"):
        next(stream)


def test_only_the_path_is_pickled(walks: Walks) -> None:
    dataset = opened(walks("ragged"), "slices")
    list(dataset)
    assert len(pickle.dumps(dataset)) < 20_000
    again = pickle.loads(pickle.dumps(dataset))
    assert rows(again) == rows(dataset)  # both go on with the second epoch


# Refusals -------------------------------------------------------------------------------------------


class Counting(rbtool.Sampler):
    """Draws in an order of its own."""

    def draw(self, storage: Any, batch_size: int) -> Any:
        return torch.arange(batch_size), {}

    def save_state(self) -> dict[str, Any]:
        return {"count": 1}


class Reversed(rbtool.SamplerWithoutReplacement):
    """Draws otherwise than the class that numbers its elements."""

    def draw(self, storage: Any, batch_size: int) -> Any:
        index, info = super().draw(storage, batch_size)
        return torch.flip(index, [0]), info  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": rbtool.PrioritizedSampler(100, 0.6, 0.4)}, "priorities of the training process"),
        ({"sampler": Counting()}, "depend on those before"),
        ({"sampler": Reversed()}, "depend on those before"),
        ({"sampler": rbtool.RandomSampler(), "drop_last": True}, "drop_last"),
        ({"batches": 3}, "epochs of its own"),
        ({"batches": 0, "sampler": rbtool.RandomSampler()}, "batches is 0"),
        ({"batch_size": None}, "no batch size"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"style": "list"}, "style is 'list'"),
        ({"style": "map", "sampler": rbtool.RandomSampler()}, "needs epochs"),
        ({"rank": 0, "world_size": 2, "seed": None}, "no seed in common"),
        ({"rank": 2, "world_size": 2}, "rank is 2 of 2"),
        ({"rank": 1}, "both or none"),
        ({"rank": "0", "world_size": 2}, "rank is '0'"),
        ({"seed": -1}, "the seed is -1"),
        ({"seed": 1 << 64}, "64-bit"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": "1"}, "seed is .1."),
    ],
)
def test_arguments_without_sense_are_a_value_error(walks: Walks, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rbtool.torch_dataset(walks("ragged"), **{"batch_size": BATCH, "seed": 0} | options)


def test_ranks_can_be_integers_of_numpy() -> None:
    assert shard_of_process(np.int64(1), np.int64(2)) == shard_of_process(1, 2)  # type: ignore[arg-type]


def test_samplers_of_members_and_arguments_of_a_buffer_are_refused(walks: Walks) -> None:
    member = rbtool.load_dataset(walks("ragged"), sampler=rbtool.SamplerWithoutReplacement(), seed=0)
    with pytest.raises(ValueError, match="member 0"):
        rbtool.torch_dataset(rbtool.ReplayBufferEnsemble(member), BATCH, seed=0)
    buffer = rbtool.load_dataset(walks("ragged"), BATCH, seed=0)
    for options in ({"sampler": rbtool.RandomSampler()}, {"verify": True}, {"transform": rbtool.Compose()}):
        with pytest.raises(ValueError, match="expected in the buffer"):
            rbtool.torch_dataset(buffer, seed=0, batches=2, **options)
    with pytest.raises(rbtool.SchemaError, match="12 is not divisible by slice_len=5"):
        rbtool.load_dataset(walks("ragged"), 12, sampler=rbtool.SliceSampler(slice_len=5))


def test_too_few_elements_are_a_runtime_error(walks: Walks) -> None:
    with pytest.raises(RuntimeError, match="there are 0 elements"):
        list(rbtool.torch_dataset(ring(0), seed=0))
    with pytest.raises(RuntimeError, match="there are 5 elements, at least 6"):
        list(rbtool.torch_dataset(ring(5), seed=0, rank=0, world_size=6))
    with pytest.raises(RuntimeError, match="at least 40"):
        list(rbtool.torch_dataset(ring(20), 40, seed=0, drop_last=True))
    sampler = rbtool.SliceSamplerWithoutReplacement(slice_len=50)
    with pytest.raises(RuntimeError, match="there are 0 trajectories of the length of a slice"):
        list(rbtool.torch_dataset(walks("ragged"), 50, sampler=sampler, seed=0))


@pytest.mark.parametrize(
    ("sampler", "size", "message"),
    [
        (rbtool.SliceSampler(slice_len=5), 12, "12 is not divisible by slice_len=5"),
        (rbtool.SliceSampler(num_slices=5), 12, "12 is not divisible by num_slices=5"),
        (rbtool.SliceSampler(slice_len=4, span=4), 12, "span is 4, expected less than 4"),
        (rbtool.SliceSamplerWithoutReplacement(slice_len=5), 12, "12 is not divisible by slice_len=5"),
        (rbtool.SliceSampler(slice_len=500), 500, "no trajectory is long enough"),
        (rbtool.SliceSamplerWithoutReplacement(slice_len=500), 500, "there are 0 trajectories"),
    ],
)
def test_impossible_batches_are_refused_before_workers_start(walks, sampler, size, message) -> None:
    with pytest.raises((ValueError, RuntimeError, KeyError), match=message):
        rbtool.torch_dataset(walks("ragged"), size, sampler=sampler, seed=0)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (rbtool.SliceSampler(slice_len=5), "12 is not divisible by slice_len=5"),
        (rbtool.PromptGroupSampler(num_groups=5), "12 elements cannot be divided by num_groups=5"),
        (rbtool.SamplerEnsemble(rbtool.SliceSampler(slice_len=5), batch="exact"), "expected a multiple of 5"),
        (rbtool.SamplerEnsemble(*[rbtool.RandomSampler() for _ in range(5)]), "expected a multiple of 5"),
    ],
)
def test_samplers_refuse_a_batch_size_without_a_storage(sampler: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        sampler.check_batch_size(12)


def test_an_empty_ring_can_be_filled_later() -> None:
    buffer = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(20), sampler=rbtool.SliceSampler(slice_len=4), batch_size=8
    )
    batches = rbtool.torch_dataset(buffer, seed=0, batches=2)
    buffer.extend(TensorDict({"episode": torch.zeros(10, dtype=torch.int64)}, [10]))
    assert [len(batch) for batch in batches] == [8, 8]


@pytest.mark.parametrize("style", ["iterable", "map"])
def test_a_loader_that_batches_batches_is_refused(walks: Walks, style: str) -> None:
    loader: Any = DataLoader(opened(walks("ragged"), style=style), batch_size=2)
    with pytest.raises(RuntimeError, match="batches of the batches") as caught:
        next(iter(loader))
    assert "batch_size=None" in caught.value.hint  # type: ignore[attr-defined]


def test_batches_by_number_end(walks: Walks) -> None:
    dataset = opened(walks("ragged"), style="map")
    assert contents([dataset[-1]]) == contents([dataset[len(dataset) - 1]])
    with pytest.raises(IndexError, match="of an epoch"):
        dataset[len(dataset)]
    dataset.set_epoch(2)
    assert contents([dataset[0]]) == contents([dataset[2, 0]])
    with pytest.raises(ValueError, match="the epoch is -1"):
        dataset.set_epoch(-1)


def test_the_rank_is_read_from_the_variables_of_torchrun(walks: Walks, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(opened(walks("ragged"), rank=1, world_size=3))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rows(opened(walks("ragged"))) == whole


# A batch that cannot be made is made again: a loop that catches the error has every step of the epoch.


@each("sampler", SAMPLERS)
@each("episodes", EPISODES)
@each("make", [iter, lambda dataset: iter(rbtool.TorchLoader(dataset))])
def test_a_pass_has_every_batch_in_order(walks: Walks, episodes: str, sampler: str, make: Any) -> None:
    expected = contents(opened(walks(episodes), sampler, transform=Works()))
    found, failures = taken(make(opened(walks(episodes), sampler, transform=Fails())))
    assert contents(found) == expected
    assert failures or len(expected) < 2


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_workers_has_every_batch_in_order(walks: Walks, persistent: bool) -> None:
    expected = opened(walks("ragged"), transform=Works())
    loader = rbtool.TorchLoader(
        opened(walks("ragged"), transform=Fails(9)), num_workers=2, persistent_workers=persistent
    )
    for _ in range(1 + persistent):
        found, failures = taken(iter(loader))
        assert contents(found) == contents(expected)
        assert failures


@pytest.mark.parametrize("persistent", [False, True])
def test_a_failure_ends_the_workers(walks: Walks, persistent: bool) -> None:
    before = set(multiprocessing.active_children())
    dataset = opened(walks("ragged"), transform=Fails())
    loader = rbtool.TorchLoader(dataset, num_workers=2, persistent_workers=persistent)
    with pytest.raises(OSError, match="does not answer"):
        list(batches := iter(loader))
    assert set(multiprocessing.active_children()) <= before
    assert len(list(itertools.islice(batches, 1))) == 1


def test_the_workers_of_a_torch_loader_lose_no_batch(walks: Walks) -> None:
    dataset = opened(walks("ragged"), transform=Fails())
    found, failures = taken(iter(DataLoader(dataset, batch_size=None, num_workers=2)))
    assert sorted(map(tuple, rows(found))) == sorted(map(tuple, rows(opened(walks("ragged")))))
    assert failures


@pytest.mark.parametrize("loader", [False, True])
def test_the_state_after_a_failure_includes_the_failed_batch(walks: Walks, loader: bool) -> None:
    dataset = opened(walks("ragged"), transform=Fails())
    source = rbtool.TorchLoader(dataset) if loader else dataset
    batches, found = iter(source), []
    with contextlib.suppress(OSError):
        while True:
            found.append(next(batches))
    again = opened(walks("ragged"), seed=99)
    again.load_state_dict(source.state_dict())
    assert rows([*found, *again]) == rows(opened(walks("ragged")))


# A stream continues from its state with exactly the batches that it would have had.


@each("sampler", SAMPLERS)
@each("episodes", EPISODES)
def test_a_stream_continues_after_any_batch(walks: Walks, episodes: str, sampler: str) -> None:
    dataset = opened(walks(episodes), sampler)
    first = len(dataset)
    whole = contents([*dataset, *dataset])
    for stop in range(first + 1):
        stream, again = opened(walks(episodes), sampler), opened(walks(episodes), sampler, seed=99)
        batches = iter(stream)
        for _ in range(stop):
            next(batches)
        again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert contents([*again, *again]) == whole[stop:]


@pytest.mark.parametrize(
    ("sampler", "before", "after"),
    [
        ("without replacement", 0, 2),
        ("slices", 2, 4),
        *(pytest.param("without replacement", *one, marks=pytest.mark.slow) for one in ((2, 4), (2, 0), (1, 3))),
        *(pytest.param("slices", *one, marks=pytest.mark.slow) for one in ((0, 2), (2, 0), (1, 3))),
    ],
)
def test_a_loader_continues_with_another_number_of_workers(walks: Walks, sampler: str, before: int, after: int) -> None:
    dataset = opened(walks("ragged"), sampler)
    whole, count = contents([*dataset, *dataset]), len(dataset)
    loader = rbtool.TorchLoader(opened(walks("ragged"), sampler), num_workers=before)
    taken = 0
    for taken, _ in enumerate(loader, 1):
        if taken == 3:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["batch"], taken) == (0, 3, 3)
    again = rbtool.TorchLoader(opened(walks("ragged"), sampler, seed=99), num_workers=after)
    again.load_state_dict(state)
    assert contents(again) == whole[3:count]
    assert (again.state_dict()["epoch"], again.state_dict()["batch"]) == (1, 0)
    assert contents(again) == whole[count:]


def test_states_of_loaders_and_datasets_are_the_same(walks: Walks) -> None:
    dataset, loader = opened(walks("ragged")), rbtool.TorchLoader(opened(walks("ragged")))
    one, other = iter(dataset), iter(loader)
    for _ in range(2):
        assert contents([next(one)]) == contents([next(other)])
        assert dataset.state_dict() == loader.state_dict()
    again = opened(walks("ragged"))
    again.load_state_dict(loader.state_dict())
    assert contents(again) == contents(one)
    for made in (opened(walks("ragged")), rbtool.TorchLoader(opened(walks("ragged")))):
        assert (made.state_dict()["epoch"], made.state_dict()["batch"]) == (0, 0)
        made.set_epoch(4)
        assert (made.state_dict()["epoch"], made.state_dict()["batch"]) == (4, 0)


def test_a_drawn_seed_is_part_of_the_state(walks: Walks) -> None:
    one, other = (rbtool.torch_dataset(walks("ragged"), BATCH) for _ in range(2))
    assert rows(one) != rows(other)
    stream = iter(one)
    next(stream)
    other.load_state_dict(one.state_dict())
    assert rows(other) == rows(stream)
    assert rows(other) == rows(one)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"rank": 1, "world_size": 2}, "rank"), ({"sampler": "uniform"}, "sampler"), ({"path": "truncated"}, "size")],
)
def test_a_state_of_other_batches_is_refused(walks: Walks, options: dict[str, Any], name: str) -> None:
    state = opened(walks("ragged")).state_dict()
    other = opened(walks(options.pop("path", "ragged")), **options)
    before = rows(opened(walks("truncated"))) if name == "size" else None
    for made in (other, rbtool.TorchLoader(other)):
        with pytest.raises(RuntimeError, match=name):
            made.load_state_dict(state)
    if before is not None:
        assert rows(other) == before


def test_states_of_others_and_of_workers_ahead_are_refused(walks: Walks, tmp_path: Path) -> None:
    write_walks(tmp_path / "other", EPISODES["ragged"], seed=9)
    with pytest.raises(RuntimeError, match="content"):
        opened(tmp_path / "other").load_state_dict(opened(walks("ragged")).state_dict())
    with pytest.raises(RuntimeError, match="expected the state of a torch dataset"):
        opened(walks("ragged")).load_state_dict({"epoch": 1})
    dataset = opened(walks("ragged"))
    list(DataLoader(dataset, batch_size=None, num_workers=1))
    with pytest.raises(RuntimeError, match="ahead of the training loop") as caught:
        dataset.state_dict()
    assert "TorchLoader" in caught.value.hint  # type: ignore[attr-defined]


# torchdata ------------------------------------------------------------------------------------------


def stateful(dataset: Any, workers: int, **options: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)


@pytest.mark.parametrize("style", ["iterable", "map"])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_continues(walks: Walks, style: str, workers: int) -> None:
    expected = epochs(walks("ragged"), 2)
    for stop in (3, len(expected[0])):
        loader = stateful(opened(walks("ragged"), style=style), workers)
        stream = iter(loader)
        for _ in range(stop):
            next(stream)
        state = loader.state_dict()
        dataset = opened(walks("ragged"), style=style)
        again = stateful(dataset, workers)
        again.load_state_dict(state)
        assert contents(again) == expected[0][stop:]
        if style == "map":
            dataset.set_epoch(1)
        assert contents(again) == expected[1]


def test_torchdatas_state_needs_as_many_workers(walks: Walks) -> None:
    loader = stateful(opened(walks("ragged")), 2)
    next(iter(loader))
    state = loader.state_dict()
    worker = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    with pytest.raises(RuntimeError, match="worker 0 of 2 was loaded by worker 0 of 1"):
        opened(walks("ragged")).load_state_dict(worker)


# Several passes at a time: each has its own epoch and seed to its end --------------------------------

MAKERS: dict[str, Callable[[Any], Any]] = {
    "data set": lambda dataset: dataset,
    "loader": rbtool.TorchLoader,
    "loader with workers": lambda dataset: rbtool.TorchLoader(dataset, num_workers=2),
    "DataLoader with workers": lambda dataset: DataLoader(dataset, batch_size=None, num_workers=2),
}
WITH_STATE = [name for name in MAKERS if not name.startswith("DataLoader")]


@pytest.mark.parametrize("kind", MAKERS)
def test_passes_that_take_turns_are_different_epochs(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    one, other = iter(made), iter(made)
    found: list[list[Any]] = [[], []]
    for pair in zip(one, other, strict=True):
        for batches, batch in zip(found, pair, strict=True):
            batches.append(batch)
    if kind not in WITH_STATE:  # whose workers start first decides
        found.sort(key=lambda batches: contents(batches) != epochs(walks("ragged"), 1)[0])
    assert list(map(contents, found)) == epochs(walks("ragged"), 2)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_state_that_is_loaded_changes_no_pass_that_has_started(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    started = iter(made)
    first = [next(started), next(started)]
    state = opened(walks("ragged"), seed=99).state_dict() | {"batch": 2}
    made.load_state_dict(state)
    assert made.state_dict() == state
    assert contents([*first, *started]) == epochs(walks("ragged"), 1)[0]
    made.load_state_dict(state)
    assert contents(made) == epochs(walks("ragged"), 1, seed=99)[0][2:]


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_pass_that_has_ended_stays_so_and_changes_no_state(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    ended = iter(made)
    assert contents(ended) == epochs(walks("ragged"), 1)[0]
    started = iter(made)
    next(started)
    state = made.state_dict()
    assert next(ended, None) is None
    assert made.state_dict() == state


@pytest.mark.parametrize("kind", WITH_STATE)
def test_an_epoch_that_was_chosen_is_the_state(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    next(iter(made))
    made.set_epoch(7)
    state = made.state_dict()
    assert (state["epoch"], state["batch"]) == (7, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_one_data_set_do_not_change_each_others_pass(walks: Walks, workers: int) -> None:
    data = opened(walks("ragged"))
    one, other = (rbtool.TorchLoader(data, num_workers=workers) for _ in range(2))
    started = iter(one)
    first = [next(started)]
    other.load_state_dict(opened(walks("ragged"), seed=99).state_dict())
    found = contents(other)
    first.append(next(started))
    state = one.state_dict()
    assert (state["seed"], state["epoch"], state["batch"]) == (3, 0, 2)
    assert contents([*first, *started]) == epochs(walks("ragged"), 1)[0]
    assert found == epochs(walks("ragged"), 1, seed=99)[0]


def test_rows_written_are_found_by_passes_that_take_turns() -> None:
    buffer = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(20), sampler=rbtool.SamplerWithoutReplacement(), batch_size=4
    )
    buffer.extend(torch.arange(16))
    data = rbtool.torch_dataset(buffer, seed=1)
    passes = [iter(data), iter(data)]
    for stream in passes:
        next(stream)
    buffer.extend(torch.arange(2))
    for stream in passes:
        with pytest.raises(RuntimeError, match="written to the buffer during an epoch"):
            next(stream)


def test_a_persistent_worker_that_starts_its_next_pass_early_does_not_join_this_one(monkeypatch) -> None:
    shared, found = Passes(3), []
    for worker in (0, 0, 1, 1, 0, 1):
        info = SimpleNamespace(id=worker, num_workers=2, seed=100 + worker)
        monkeypatch.setattr(loading, "get_worker_info", lambda info=info: info)
        found.append((worker, shared.enter().epoch))
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("how", ["seeded", "new loaders"])
def test_passes_with_equal_base_seeds_are_different_epochs(walks: Walks, how: str) -> None:
    data, found = opened(walks("ragged")), []
    loader: Any = DataLoader(data, batch_size=None, num_workers=2)
    for _ in range(3):
        if how == "seeded":
            torch.manual_seed(0)
        else:
            loader = DataLoader(data, batch_size=None, num_workers=2, generator=torch.Generator().manual_seed(0))
        found.append(contents(loader))
    assert found == epochs(walks("ragged"), 3)


# Orders of which any part is computed by itself, and the shards of ranks ------------------------------

SHARDS = st.integers(1, 5).flatmap(lambda ranks: st.tuples(st.integers(ranks, 200), st.just(ranks), st.integers(1, 9)))


@pytest.fixture(params=["list", "network"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "network":
        monkeypatch.setattr(loading, "_LISTED", 0)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 100, 4095, 4096, 10_007])
def test_an_order_has_each_number_once(size: int) -> None:
    for key in range(5):
        assert sorted(KeyedOrder(size, key).at(np.arange(size))) == list(range(size))


@pytest.mark.usefixtures("_kind")
def test_any_part_of_an_order_is_that_of_the_whole() -> None:
    whole = KeyedOrder(1000, 3).at(np.arange(1000))
    places = np.array([999, 0, 17, 17, 500])
    assert KeyedOrder(1000, 3).at(places).tolist() == whole[places].tolist()
    assert (KeyedOrder(1000, 4).at(np.arange(1000)) != whole).any()


def test_long_orders_are_permutations_that_look_random() -> None:
    size = (1 << 20) + 7
    found = KeyedOrder(size, 11).at(np.arange(size))
    assert np.array_equal(np.bincount(found), np.ones(size))
    size = 3_000_000
    found = KeyedOrder(size, 5).at(np.arange(300_000))
    bins = found * 32 // size
    assert 0.5 < deviation(bins, 32) < 1.7
    assert 0.8 < deviation(bins[:-1] * 32 + bins[1:], 1024) < 1.2  # of neighbours
    assert 0.5 < deviation(found % 31, 31) < 1.7


def deviation(numbers: np.ndarray, bins: int) -> float:
    """Chi-square of counts in bins, over its degrees of freedom: about 1 for uniform numbers."""
    counts = np.bincount(numbers, minlength=bins)
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum() / (bins - 1))


def test_keys_give_independent_long_orders() -> None:
    size = 3_000_000
    found = np.array([KeyedOrder(size, key).at(np.array([0, 1])) for key in range(3000)])
    assert 0.4 < deviation(found[:, 0] * 32 // size, 32) < 1.8
    assert 0.4 < deviation((found[:, 1] - found[:, 0]) % size * 32 // size, 32) < 1.8
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 1), ((1 << 64) - 1, 0, 0)]
    assert len({seed_of(*key) for key in keys}) == len(keys)


@given(SHARDS)
@pytest.mark.slow
def test_ranks_have_all_elements_once_and_equally_many_batches(drawn: tuple[int, int, int]) -> None:
    size, ranks, each = drawn
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    counts = {shard.batches(size, each, drop_last=False) for shard in shards}
    assert len(counts) == 1
    places = [[shard.places(size, each, n, drop_last=False) for n in range(max(counts))] for shard in shards]
    lengths = [[len(part) for part in parts] for parts in places]
    assert sorted(np.concatenate([part for parts in places for part in parts])) == list(range(size))
    assert all(set(parts[:-1]) <= {each} and 1 <= parts[-1] <= each + (ranks > 1) for parts in lengths)
    assert max(parts[-1] for parts in lengths) - min(parts[-1] for parts in lengths) <= 1


@given(SHARDS)
def test_without_incomplete_rounds_all_batches_are_whole(drawn: tuple[int, int, int]) -> None:
    size, ranks, each = drawn
    count = Shard(0, ranks).batches(size, each, drop_last=True)
    found = [Shard(r, ranks).places(size, each, n, drop_last=True) for r in range(ranks) for n in range(count)]
    assert all(len(part) == each for part in found)
    assert len({place for part in found for place in part}) == count * ranks * each
    assert size - count * ranks * each < ranks * each
    assert max((part.max() for part in found), default=0) < size
