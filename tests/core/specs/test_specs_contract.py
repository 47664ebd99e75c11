"""What every spec does, in every shape."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from every_spec import MAKERS, Make, every, every_tensor
from tensordict import TensorDictBase

from rbtool.core.specs.base import TensorSpec
from rbtool.core.specs.categorical import MultiOneHot, OneHot
from rbtool.core.specs.non_tensor import Choice


def ends(spec: TensorSpec) -> int:
    """The last place for a new dimension; the categories of one-hot specs stay behind it."""
    return spec.ndim - isinstance(spec, OneHot | MultiOneHot)


def sizes(value: Any) -> torch.Size:
    return torch.Size(value.batch_size) if isinstance(value, TensorDictBase) else torch.Size(value.shape)


@every
@pytest.mark.parametrize("batch", [(), (4,), (2, 1)])
def test_random_values_are_members(make: Make, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
    spec = make(shape)
    drawn = spec.rand(batch)
    assert sizes(drawn) == (*batch, *spec.shape)
    assert spec.is_in(drawn)
    assert spec.contains(drawn)
    spec.assert_is_in(drawn)


@every
def test_zeros_and_ones_have_shape_and_type(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    for value in (spec.zero((2,)), spec.one((2,))):
        assert sizes(value) == (2, *spec.shape)
        spec.type_check(value)


@every
def test_a_seed_repeats_the_draw(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    torch.manual_seed(3)
    first = spec.rand((5,))
    torch.manual_seed(3)
    assert str(spec.to_numpy(spec.rand((5,)))) == str(spec.to_numpy(first))
    one, other = (spec.rand((5,), generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert str(spec.to_numpy(one)) == str(spec.to_numpy(other))


@every
def test_a_generator_leaves_the_global_one_alone(make: Make, shape: tuple[int, ...]) -> None:
    before = torch.random.get_rng_state()
    make(shape).rand((5,), generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.random.get_rng_state(), before)


@every_tensor
def test_projecting_gives_members_and_leaves_them(make: Make, shape: tuple[int, ...]) -> None:
    spec: Any = make(shape)
    wild = torch.randn(6, *spec.shape, generator=torch.Generator().manual_seed(1)) * 50
    kept = wild.clone()
    found = spec.project(wild)
    assert spec.is_in(found)
    assert spec.project(found) is found
    assert torch.equal(wild, kept), "the input was changed"


@every_tensor
def test_no_extreme_number_survives_projection(make: Make, shape: tuple[int, ...]) -> None:
    spec: Any = make(shape)
    for extreme in (float("nan"), 1e300, -1e300):
        found = spec.project(torch.full(spec.shape, extreme, dtype=torch.float64))
        assert spec.is_in(found)


@every_tensor
def test_other_types_shapes_and_things_are_not_in(make: Make, shape: tuple[int, ...]) -> None:
    spec: Any = make(shape)
    member = spec.rand()
    assert not spec.is_in(member.to(torch.complex64))
    assert not spec.is_in(member.numpy() if member.dtype is not torch.bfloat16 else 3)
    assert not spec.is_in(None)
    if spec.ndim:
        assert not spec.is_in(torch.cat([member, member]))
        assert not spec.is_in(member[0])


@every
def test_expanding_and_indexing_go_together(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    wide = spec.expand(5, 2, *spec.shape)
    assert wide.shape == (5, 2, *spec.shape)
    assert wide[3, 1] == spec
    assert wide[-1][..., 0, *[slice(None)] * spec.ndim] == spec
    drawn = wide.rand()
    assert wide.is_in(drawn)
    assert spec.is_in(drawn)


@every
def test_squeezing_and_reshaping_undo_each_other(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    assert spec.unsqueeze(0).squeeze(0) == spec
    assert torch.squeeze(torch.unsqueeze(spec, ends(spec)), ends(spec)) == spec
    wide = spec.expand(6, *spec.shape)
    assert wide.unflatten(0, (2, -1)).flatten(0, 1) == wide
    assert wide.reshape(3, 2, *spec.shape).view(6, *spec.shape) == wide


@every
@pytest.mark.parametrize("index", [1, slice(None, None, 2), None, ..., [2, 0], torch.tensor([True, False, True])])
def test_an_index_picks_from_spec_and_value_alike(make: Make, shape: tuple[int, ...], index: Any) -> None:
    spec = make(shape)
    stacked: Any = torch.stack([spec, spec, spec])
    picked, value = stacked[index], stacked.rand()[index]
    assert picked.shape == sizes(value)
    assert picked.is_in(value)


@every
def test_stacking_and_unbinding_undo_each_other(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    for dim in (0, ends(spec), ends(spec) - spec.ndim - 1):
        stacked: Any = torch.stack([spec, spec.clone()], dim)
        assert type(stacked) is type(spec)
        assert stacked.unbind(dim) == (spec, spec)
        assert stacked.shape[dim] == 2


@every
def test_copies_are_equal(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    spec.rand()  # what it remembers of its bounds is not pickled
    for twin in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec), spec.clone(), make(shape)):
        assert twin == spec
        assert type(twin) is type(spec)
        assert twin.is_in(spec.rand())


@every
def test_other_shapes_are_not_equal(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    assert spec == spec.expand(*spec.shape)
    assert spec != spec.unsqueeze(0)
    assert spec != spec.expand(2, *spec.shape)
    assert spec != "spec"


def test_no_spec_equals_another() -> None:
    specs = [make((3,)) for make in MAKERS.values()]
    assert [(a, b) for a, one in enumerate(specs) for b, other in enumerate(specs) if (one == other) != (a == b)] == []


@every
def test_moving_to_a_device_keeps_all_else(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    moved = spec.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.shape == spec.shape
    assert moved.dtype == spec.dtype
    assert moved != spec
    assert moved.expand(2, *moved.shape)[0].device == torch.device("meta")
    assert spec.to("cpu").cpu().device == torch.device("cpu")


@every_tensor
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_casting_gives_members_of_the_new_type(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    spec: Any = make(shape)
    cast = spec.to(dtype)
    assert cast.dtype == dtype
    assert cast.shape == spec.shape
    assert cast.is_in(cast.rand((3,)))
    assert (cast == spec) == (spec.dtype == dtype)


@every_tensor
def test_equal_specs_have_one_hash(make: Make, shape: tuple[int, ...]) -> None:
    assert hash(make(shape)) == hash(make(shape))
    assert len({make(shape), make(shape)}) == 1


@every
def test_numpy_values_come_back_when_encoded(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    member = spec.rand()
    encoded = spec.encode(spec.to_numpy(member, safe=True))
    assert spec.is_in(encoded)
    assert str(spec.to_numpy(encoded)) == str(spec.to_numpy(member))


@every
def test_any_size_is_a_member_where_a_size_is_unknown(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape).expand(-1, *make(shape).shape)
    assert spec.shape[0] == -1
    assert sizes(spec.rand((2,))) == (2, 1, *spec.shape[1:])
    if not isinstance(spec, Choice):  # all places are then of one alternative
        assert spec.is_in(make(shape).rand((9,)))
    assert spec.unsqueeze(0).shape == (1, -1, *spec.shape[1:])
    assert spec[0] == make(shape)
    assert spec[1:].shape[0] == -1
    with pytest.raises(ValueError, match="unknown"):
        spec.reshape(-1)


@every
def test_the_repr_names_class_and_shape(make: Make, shape: tuple[int, ...]) -> None:
    spec = make(shape)
    assert repr(spec).startswith(type(spec).__name__)
    assert f"shape={spec.shape}" in repr(spec)
