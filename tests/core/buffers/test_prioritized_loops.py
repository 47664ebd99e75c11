"""What users of prioritised buffers hand over: priorities and indices of many kinds, and batches of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.errors import RbtoolError
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.testing.buffers import draw_many, drawn_weights, expected, of_steps, plain, steps


@pytest.mark.parametrize(
    "given",
    [
        lambda error: error, lambda error: error.unsqueeze(-1), lambda error: error.numpy(force=True),
        lambda error: error.tolist(), lambda error: error.double().requires_grad_() * 1,
        lambda error: error[:, None].numpy(force=True), lambda error: error.half(),
        lambda error: [one.requires_grad_() for one in error], lambda error: error.numpy()[::-1].copy()[::-1],
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_index", [lambda index: index, lambda index: index.numpy(), lambda index: index.tolist()])
def test_what_priorities_may_come_as(given: Callable[[Any], Any], as_index: Callable[[Any], Any]) -> None:
    buffer = plain()
    buffer.extend(torch.arange(4))
    _, info = draw_many(buffer, 50)
    buffer.update_priority(as_index(info["index"]), given(1 + info["index"].float()))
    assert drawn_weights(buffer) == expected(1, 2, 3, 4)


@pytest.mark.parametrize("shape", [(), (1,), (4, 2), (3,), (2, 2)])
def test_one_priority_for_all_or_one_each(shape: tuple[int, ...]) -> None:
    buffer = plain()
    index = buffer.extend(torch.arange(4))
    if shape in {(), (1,), (2, 2)}:
        buffer.update_priority(index, torch.full(shape, 2.0))
        assert drawn_weights(buffer) == expected(1, 1, 1, 1)
        return
    with pytest.raises(RuntimeError, match="4"):
        buffer.update_priority(index, torch.ones(shape))


@pytest.mark.parametrize("index", [slice(2), ..., None, "a", TensorDict({"index": torch.arange(2)}, [2])])
def test_elements_that_are_not_named(index: Any) -> None:
    buffer = plain()
    buffer.extend(torch.arange(4))
    with pytest.raises(TypeError, match="priorities are set by the numbers of elements, found a"):
        buffer.update_priority(index, 1.0)


@pytest.mark.parametrize("priority", [None, "high", [1.0, None, "x"], {"td_error": 1.0}])
def test_priorities_that_are_no_numbers(priority: Any) -> None:
    buffer = plain()
    buffer.extend(torch.arange(4))
    with pytest.raises(TypeError, match="priorities are numbers, found") as refused:
        buffer.update_priority([0, 1, 2], priority)
    assert isinstance(refused.value, RbtoolError)


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage, CompressedListStorage, LazyTensorStorage])
def test_what_batches_are_given_stays_out_of_the_elements(storage: Any) -> None:
    """Also where a batch is a stack of the very elements that are stored, and of one of them twice."""
    buffer = of_steps(storage=storage(2), batch_size=8)
    buffer.extend(steps(2))
    torch.manual_seed(0)
    batch = buffer.sample()
    batch["td_error"] = torch.arange(1.0, 9)
    assert batch["td_error"].tolist() == list(range(1, 9))
    buffer.update_tensordict_priority(batch)
    last = {int(row): position + 1.0 for position, row in enumerate(batch["index"])}
    assert drawn_weights(buffer) == expected(last[0], last[1])
    assert set(buffer[0].keys()) == {"a", "index"}
    buffer.sample()["a"] = torch.full((8,), -1)
    assert buffer[:]["a"].tolist() == [0, 1]


def test_td_errors_in_a_batch() -> None:
    buffer = of_steps()
    buffer.extend(steps(4))
    for error in (torch.ones(4, 1), np.ones(4, np.float32), torch.ones(4, requires_grad=True) * 2):
        batch = buffer.sample()
        batch["td_error"] = error
        buffer.update_tensordict_priority(batch)
    with pytest.raises(RuntimeError, match="td_error"):
        buffer.update_tensordict_priority(buffer.sample().set_non_tensor("td_error", "high"))
    with pytest.raises(ValueError, match="expected a tensordict"):
        buffer.update_tensordict_priority({"index": torch.arange(4), "td_error": torch.ones(4)})
    buffer.update_tensordict_priority(buffer.sample()[:0])


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("sync", [True, False])
def test_a_dqn_learns_from_what_it_got_wrong(prefetch: int | None, sync: bool) -> None:
    torch.manual_seed(3)
    net = torch.nn.Linear(2, 1)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    buffer = of_steps(64, batch_size=16, prefetch=prefetch, sync=sync)
    losses = []
    for step in range(60):
        seen = torch.randn(2, 2)
        buffer.extend(TensorDict({"seen": seen, "target": seen.sum(-1, keepdim=True)}, [2]))
        batch = buffer.sample()
        error = net(batch["seen"]) - batch["target"]
        loss = (batch["priority_weight"] * error.squeeze(-1) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        batch["td_error"] = error.abs()
        buffer.update_tensordict_priority(batch)
        buffer.sampler.beta = min(1.0, 0.4 + step / 100)
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10]) / 5
    assert (len(buffer), buffer.write_count) == (64, 120)


@pytest.mark.parametrize("cut", [lambda batch: batch[0], lambda batch: batch.reshape(2, 2), lambda batch: batch[1:3]])
def test_parts_of_a_batch(cut: Callable[[Any], Any]) -> None:
    buffer = of_steps()
    buffer.extend(steps(4))
    batch = cut(buffer.sample())
    batch["td_error"] = batch["index"] + 2.0
    buffer.update_tensordict_priority(batch)
    updated = set(batch["index"].flatten().tolist())
    assert drawn_weights(buffer) == expected(*[row + 2 if row in updated else 1 for row in range(4)])
