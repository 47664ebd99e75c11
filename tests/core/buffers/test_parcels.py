"""What a parcel brings to another process is what was put into it, on one copy of the bytes at most."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rbtool.core.buffers.parcels import Parcel, joined, split

TENSORS = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "a number": torch.tensor(5.0),
    "no rows": torch.zeros(0, 3),
    "bfloat16": torch.ones(4).bfloat16(),
    "conjugated": torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    "bool": torch.tensor([True, False]),
    "with gradients": torch.ones(3, requires_grad=True),
    "unsigned": torch.tensor([1, 60_000], dtype=torch.uint16),
}


def sent(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    document = pickle.dumps(Parcel(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(document, buffers=[bytes(buffer) for buffer in buffers])


def in_parts(value: Any, count: int) -> Any:
    return joined([pickle.loads(pickle.dumps(part)) for part in split(value, count)])


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_are(name: str) -> None:
    tensor = TENSORS[name]
    for found in (sent(tensor), in_parts(tensor, 1), in_parts(tensor, 3)):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
        assert not found.requires_grad
        found.zero_()  # nobody else reads this memory


def test_nests_and_tensordicts_arrive_as_they_are() -> None:
    data = TensorDict({"a": torch.arange(6), "next": {"b": torch.ones(6, 2)}, "text": NonTensorData("x", [6])}, [6])
    for found in (sent(data), in_parts(data, 2)):
        assert (found.batch_size, found["text"], found.device) == (data.batch_size, "x", data.device)
        assert (found.exclude("text") == data.exclude("text")).all()
    assert sent((True, {"index": torch.arange(3)}, [1, "x"]))[1]["index"].tolist() == [0, 1, 2]
    named = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", "batch"])
    assert sent(named).names == ["time", "batch"]


def test_a_generator_continues_where_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    assert torch.equal(torch.rand(3, generator=sent(generator)), torch.rand(3, generator=generator))
