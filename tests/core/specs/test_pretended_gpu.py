"""Specs on a GPU that is not there: their values are there, and no operation mixes devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from every_spec import TENSORS, Make, every, every_tensor
from pretend_cuda import GPU, Pretended, pretended_gpu
from tensordict import TensorDictBase

from rbtool.core.specs.base import TensorSpec


@pytest.fixture(autouse=True)
def gpu() -> Iterator[type[Pretended]]:
    with pretended_gpu() as found:
        yield found


def devices(value: Any) -> set[torch.device]:
    leaves = value.values(True, True) if isinstance(value, TensorDictBase) else [value]
    return {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}


def there(make: Make, shape: tuple[int, ...]) -> TensorSpec:
    return make(shape).to(GPU)


@every
@pytest.mark.parametrize("batch", [(), (4,)])
def test_random_values_are_members(make: Make, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
    spec = there(make, shape)
    drawn = spec.rand(batch)
    assert devices(drawn) <= {GPU}
    assert spec.is_in(drawn)
    spec.assert_is_in(spec.project(drawn))


@every
def test_a_generator_of_the_cpu_draws_what_it_draws_there(make: Make, shape: tuple[int, ...]) -> None:
    here, spec = make(shape), there(make, shape)
    one, other = (each.rand((5,), generator=torch.Generator().manual_seed(7)) for each in (here, spec))
    assert str(spec.to_numpy(other)) == str(here.to_numpy(one))


@every
def test_zeros_and_ones_are_there(make: Make, shape: tuple[int, ...]) -> None:
    spec = there(make, shape)
    for value in (spec.zero((2,)), spec.one((2,))):
        assert devices(value) <= {GPU}
        spec.type_check(value)


@every_tensor
def test_projection_is_that_of_the_cpu(make: Make, shape: tuple[int, ...]) -> None:
    here, spec = make(shape), there(make, shape)
    numbers = torch.randn((4, *spec.shape), generator=torch.Generator().manual_seed(1)) * 20
    values = numbers > 0 if spec.dtype == torch.bool else numbers.abs().to(spec.dtype)
    found = spec.project(values.to(GPU))
    assert found.device == GPU
    assert torch.equal(found.cpu(), here.project(values))
    assert spec.is_in(values.to(GPU)) == here.is_in(values)


@every
def test_numpy_values_come_back_when_encoded(make: Make, shape: tuple[int, ...]) -> None:
    spec = there(make, shape)
    value = spec.rand()
    found = spec.encode(spec.to_numpy(value))
    assert devices(found) <= {GPU}
    assert str(spec.to_numpy(found)) == str(spec.to_numpy(value))


@every
def test_stacks_members_and_indices_are_there(make: Make, shape: tuple[int, ...]) -> None:
    spec = there(make, shape)
    stacked = torch.stack([spec, spec.clone()])
    for one in (stacked, stacked[0], *stacked.unbind(), spec.expand(2, *spec.shape), spec.unsqueeze(0)):
        assert one.device in (GPU, None)
        drawn = one.rand()
        assert devices(drawn) <= {GPU}
        assert one.is_in(drawn)


@every
def test_a_spec_comes_back_to_the_cpu(make: Make, shape: tuple[int, ...]) -> None:
    here = make(shape)
    assert here.to(GPU).cpu() == here.cpu()
    assert here.to(GPU) == make(shape).to(GPU)
    assert (here.to(GPU) == here) == (here.device is None and here.to(GPU).device is None)


@pytest.mark.parametrize(("make", "shape"), [case for case in TENSORS if "unbounded" not in str(case.id)])
def test_all_values_are_counted_there(make: Make, shape: tuple[int, ...]) -> None:
    here, spec = make(shape), there(make, shape)
    assert spec.cardinality() == here.cardinality()
    if isinstance(here.cardinality(), int) and here.cardinality() < 300:
        assert np.array_equal(spec.enumerate().cpu(), here.enumerate())
