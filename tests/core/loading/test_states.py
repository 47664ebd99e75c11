"""A stream continues from its state with exactly the batches that it would have had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch_streams import BATCH, EPISODES, SAMPLERS, contents, opened, rows

import rbtool

Walks = Callable[[str], Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("episodes", EPISODES)
def test_a_stream_continues_after_any_batch(walks: Walks, episodes: str, sampler: str) -> None:
    dataset = opened(walks(episodes), sampler)
    first = len(dataset)
    whole = contents([*dataset, *dataset])
    for taken in range(first + 1):
        stream, again = opened(walks(episodes), sampler), opened(walks(episodes), sampler, seed=99)
        batches = iter(stream)
        for _ in range(taken):
            next(batches)
        again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert contents([*again, *again]) == whole[taken:]


@pytest.mark.parametrize("sampler", ["without replacement", "slices"])
@pytest.mark.parametrize(
    ("before", "after"), [(0, 2), (2, 4), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 0), (1, 3)))]
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


def test_before_the_first_batch_a_state_is_that_of_the_start(walks: Walks) -> None:
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


def test_a_state_of_other_contents_is_refused(walks: Walks, tmp_path: Path) -> None:
    from rbtool.core.testing.datasets import write_walks

    write_walks(tmp_path / "other", EPISODES["ragged"], seed=9)
    with pytest.raises(RuntimeError, match="content"):
        opened(tmp_path / "other").load_state_dict(opened(walks("ragged")).state_dict())
    with pytest.raises(RuntimeError, match="expected the state of a torch dataset"):
        opened(walks("ragged")).load_state_dict({"epoch": 1})


def test_a_process_whose_workers_are_ahead_knows_no_state(walks: Walks) -> None:
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
    plain = opened(walks("ragged"))
    expected = [contents(plain), contents(plain)]
    for taken in (1, 3, len(expected[0])):
        loader = stateful(opened(walks("ragged"), style=style), workers)
        stream = iter(loader)
        for _ in range(taken):
            next(stream)
        state = loader.state_dict()
        dataset = opened(walks("ragged"), style=style)
        again = stateful(dataset, workers)
        again.load_state_dict(state)
        assert contents(again) == expected[0][taken:]
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
