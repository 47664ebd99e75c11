"""What a parcel brings to another process is what was put into it, on one copy of the bytes at most."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rbtool.core.buffers.ray_buffer import Parcel, joined, opened_small, small, split

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


# Small nests ----------------------------------------------------------------------------------------

NESTS: dict[str, Any] = {
    "tensordict": TensorDict({"a": torch.arange(6), "next": {"b": torch.rand(6, 3), "done": torch.ones(6) > 0}}, [6]),
    "device": TensorDict({"a": torch.arange(3)}, [3], device="cpu"),
    "info": (TensorDict({"a": torch.arange(3)}, [3]), {"index": (torch.arange(3),), ("x", "y"): torch.zeros(3)}),
    "element types": {str(kind): torch.arange(5).to(kind) for kind in (
        torch.bool, torch.uint8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.complex64,
    )},
    "lazy bits": [torch.arange(4).to(torch.complex64).conj(), torch.arange(4).to(torch.complex128).conj().imag],
    "strides": [torch.arange(6).reshape(2, 3).T, torch.arange(1.0).expand(7), torch.tensor(3.5), torch.zeros(2, 0)],
    "nothing": {"a": torch.zeros(0, 3)},
}  # fmt: skip
LARGER: dict[str, Any] = {
    "bytes": torch.zeros(1001, dtype=torch.uint8), "text": {"a": torch.zeros(3), "b": "text"}, "no tensor": [],
    "value": TensorDict({"a": torch.zeros(3), "b": NonTensorData("text", [3])}, [3]), "named": TensorDict(
        {"a": torch.zeros(3)}, [3], names=["time"]), "gradient": torch.zeros(3, requires_grad=True),
}  # fmt: skip


def flat(nest: Any) -> list[Any]:
    """The types and values of a nest."""
    if isinstance(nest, torch.Tensor):
        return [nest.dtype, tuple(nest.shape), nest.tolist()]
    if isinstance(nest, TensorDict):
        return [nest.batch_size, nest.device, {key: flat(nest[key]) for key in nest.keys()}]  # noqa: SIM118
    return [type(nest), [flat(part) for part in (nest.values() if isinstance(nest, dict) else nest)]]


@pytest.mark.parametrize("kind", NESTS)
def test_a_small_nest_arrives_as_it_was_and_can_be_written(kind: str) -> None:
    data = small(NESTS[kind], 10_000)
    assert isinstance(data, bytes)
    one, other = opened_small(data), opened_small(data)
    assert flat(one) == flat(other) == flat(NESTS[kind])
    if kind == "tensordict":
        one["a"].zero_()
        assert flat(other) == flat(NESTS[kind])


@pytest.mark.parametrize("kind", LARGER)
def test_anything_else_is_not_packed_as_a_small_nest(kind: str) -> None:
    assert small(LARGER[kind], 1_000) is None
