"""`out=` of `sample` and `get`: a batch that is filled again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.errors import SchemaError
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages import columns

ROWS = 100


def rows_of(count: int) -> TensorDict:
    number = torch.arange(count)
    after = TensorDict({"done": (number % 10 == 9)[:, None], "pixels": number.to(torch.uint8)[:, None]}, [count])
    return TensorDict({"observation": number.double()[:, None].expand(-1, 5), "step": number, "next": after}, [count])


def uniform(**options: Any) -> Any:
    return rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(ROWS), **options)


def mapped() -> Any:
    return rbtool.TensorDictReplayBuffer(storage=rbtool.LazyMemmapStorage(ROWS))


def bare() -> Any:
    return rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(ROWS))


def prioritized() -> Any:
    return rbtool.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=rbtool.LazyTensorStorage(ROWS))


def sliced() -> Any:
    return uniform(sampler=rbtool.SliceSampler(slice_len=4, end_key=("next", "done")))


def transformed() -> Any:
    return uniform(transform=lambda rows: rows.set("sum", rows["observation"].sum(-1)))


def listed() -> Any:
    return rbtool.TensorDictReplayBuffer(storage=rbtool.ListStorage(ROWS))


def ahead() -> Any:
    return uniform(prefetch=2, batch_size=32)


KINDS = [uniform, mapped, bare, prioritized, sliced, transformed, listed, ahead]


def full(make: Callable[[], Any]) -> Any:
    buffer = make()
    buffer.set_rng(torch.Generator().manual_seed(0))
    buffer.extend(rows_of(ROWS))
    return buffer


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(columns, "_MANY", 0)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("make", KINDS)
def test_a_batch_that_is_filled_is_the_one_that_would_be_made(make: Callable[[], Any]) -> None:
    fresh, again = full(make), full(make)
    out = again.sample(32)
    memory = {key: value.data_ptr() for key, value in out.items(True, True)}
    fresh.sample(32)
    for _ in range(3):
        assert again.sample(32, out=out) is out
        assert (out == fresh.sample(32)).all()
    assert memory == {key: value.data_ptr() for key, value in out.items(True, True)}


@pytest.mark.usefixtures("_loops")
def test_a_storage_fills_what_it_returned() -> None:
    storage = full(uniform).storage
    out = storage.get(torch.arange(7))
    index = torch.tensor([5, -1, 5, 0, 99, 98, 3])
    assert storage.get(index, out=out) is out
    assert (out == storage.get(index)).all()
    with pytest.raises(IndexError):
        storage.get(torch.full((7,), ROWS), out=out)


def wrong(name: str, batch: TensorDict, buffer: Any) -> Any:
    """Return a batch that does not fit, of the one that does."""
    observation = batch["observation"]
    made = {
        "more entries": lambda: batch.set("more", torch.zeros(8)),
        "fewer entries": lambda: batch.exclude("step"),
        "another type": lambda: batch.set("observation", observation.float()),
        "another shape": lambda: batch.set("observation", observation[:, :4].contiguous()),
        "another size": lambda: buffer.sample(9),
        "not contiguous": lambda: batch.set("observation", torch.zeros(5, 8).double().T),
        "a graph": lambda: batch.set("observation", observation.requires_grad_()),
        "negated": lambda: batch.set("observation", torch._neg_view(observation)),
        "stored rows": lambda: buffer[:8],
        "one memory": lambda: batch.set("index", batch["step"]),
        "no tensordict": lambda: observation,
    }
    return made[name]()


NAMES = ["more entries", "fewer entries", "another type", "another shape", "another size", "not contiguous", "a graph",
         "negated", "stored rows", "one memory", "no tensordict"]  # fmt: skip


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("make", [uniform, transformed])
def test_a_batch_that_does_not_fit_is_refused_and_unchanged(make: Any, used: bool, name: str) -> None:
    buffer = full(make)
    batch = buffer.sample(8)
    if used:
        buffer.sample(8, out=batch)
    out, stored = wrong(name, batch, buffer), buffer[:].clone()
    before = copy.deepcopy(out.detach())
    with pytest.raises(SchemaError, match="out cannot be filled"):
        buffer.sample(8, out=out)
    assert (out.detach() == before).all()
    assert (buffer[:] == stored).all()


def test_what_was_drawn_for_a_batch_that_does_not_fit_comes_next() -> None:
    buffer = full(lambda: uniform(sampler=SamplerWithoutReplacement()))
    seen = [buffer.sample(25)["step"]]
    for _ in range(3):
        with pytest.raises(SchemaError):
            buffer.sample(25, out=buffer[:25])
        seen.append(buffer.sample(25)["step"])
    assert torch.cat(seen).sort().values.equal(torch.arange(ROWS))


def test_a_graph_notices_that_its_tensors_were_filled_again() -> None:
    buffer = full(bare)
    batch = buffer.sample(8)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    loss = (batch["observation"] * weight).sum()
    buffer.sample(8, out=batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_batches_of_inference_are_filled() -> None:
    buffer = full(bare)
    with torch.inference_mode():
        batch = buffer.sample(8)
        buffer.sample(8, out=batch)
    assert batch["observation"][:, 0].equal(batch["step"].double())


def test_copies_and_pickles_fill_batches_of_their_own_rows() -> None:
    buffer = full(bare)
    batch = buffer.sample(8)
    buffer.sample(8, out=batch)
    for other in (copy.deepcopy(buffer.storage), pickle.loads(pickle.dumps(buffer.storage))):
        other[:] = rows_of(ROWS).apply(lambda value: torch.zeros_like(value))
        assert not other.get(torch.arange(8), out=batch)["observation"].any()


def test_an_ensemble_fills_batches_but_no_rows_of_its_members() -> None:
    members = full(uniform), full(uniform)
    ensemble = rbtool.ReplayBufferEnsemble(*members, batch="exact")
    batch = ensemble.sample(16)
    assert ensemble.sample(16, out=batch) is batch
    batch.set("observation", members[1].storage.contents["observation"][:16])
    with pytest.raises(SchemaError, match="stored rows"):
        ensemble.sample(16, out=batch)
