"""What every spec does, by one table of specs: on the CPU, and on a GPU that is pretended."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from pretend_cuda import GPU, pretended_gpu
from tensordict import TensorDictBase

from rbtool.core.specs.base import LeafSpec, SpecTypeError, Stacked, TensorSpec
from rbtool.core.specs.bounded import Bounded, BoundedContinuous, Unbounded
from rbtool.core.specs.categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from rbtool.core.specs.composite import Composite, StackedComposite
from rbtool.core.specs.non_tensor import Choice, NonTensor

SHAPES = [(), (3,), (2, 3)]
Make = Callable[[tuple[int, ...]], TensorSpec]


def nested(shape: tuple[int, ...]) -> Composite:
    return Composite(
        {
            "action": Bounded(-1, 1, (*shape, 2)),
            "hold": None,
            "inner": {"number": Categorical(4, shape), "text": NonTensor(shape, example_data="a")},
        },
        shape=shape,
    )


def varied(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that differ from element to element."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


MAKERS: dict[str, Make] = {
    "bounded": lambda shape: Bounded(-varied(shape) - 1, varied(shape) + 1, shape),
    "bounded float64": lambda shape: Bounded(-3, 7.5, shape, dtype=torch.float64),
    "bounded bfloat16": lambda shape: Bounded(-3, 7.5, shape, dtype=torch.bfloat16),
    "bounded infinite": lambda shape: Bounded(-float("inf"), 5, shape),
    "bounded int32": lambda shape: Bounded(-3, varied(shape) + 3, shape, dtype=torch.int32),
    "bounded uint16": lambda shape: Bounded(2, 60_000, shape, dtype=torch.uint16),
    "bounded whole floats": lambda shape: Bounded(-2.5, 3.5, shape, domain="discrete"),
    "unbounded": lambda shape: Unbounded(shape),
    "unbounded uint8": lambda shape: Unbounded(shape, dtype=torch.uint8),
    "unbounded int64": lambda shape: Unbounded(shape, dtype=torch.int64),
    "unbounded bool": lambda shape: Unbounded(shape, dtype=torch.bool),
    "categorical": lambda shape: Categorical(5, shape),
    "categorical masked": lambda shape: Categorical(4, shape, mask=torch.tensor([True, False, True, False])),
    "multi categorical": lambda shape: MultiCategorical([2, 5], (*shape, 2)),
    "multi categorical masked": lambda shape: MultiCategorical(
        [2, 3], (*shape, 2), mask=torch.tensor([True, True, False, True, True])
    ),
    "one-hot": lambda shape: OneHot(4, (*shape, 4)),
    "one-hot numbers masked": lambda shape: OneHot(
        4, (*shape, 4), dtype=torch.int64, mask=torch.tensor([True, False, True, True])
    ),
    "multi one-hot": lambda shape: MultiOneHot([2, 3], (*shape, 5)),
    "multi one-hot masked": lambda shape: MultiOneHot(
        [2, 3], (*shape, 5), dtype=torch.float32, mask=torch.tensor([True, True, False, True, True])
    ),
    "choice": lambda shape: Choice([Bounded(-1, 1, shape), Bounded(3, 4, shape)]),
    "choice of categories": lambda shape: Choice([Categorical(3, shape), Categorical(7, shape)]),
    "unbounded whole floats": lambda shape: Unbounded(shape, dtype=torch.float32, domain="discrete"),
    "binary": lambda shape: Binary(3, (*shape, 3)),
    "non tensor": lambda shape: NonTensor(shape, example_data="a"),
    "composite": nested,
}
CASES = list(itertools.product(MAKERS, SHAPES))
every = each(("name", "shape"), CASES)
TENSORS = [case for case in CASES if case[0] not in {"non tensor", "composite"}]
every_tensor = each(("name", "shape"), TENSORS)


def made(name: str, shape: tuple[int, ...], device: torch.device | None = None) -> TensorSpec:
    return MAKERS[name](shape) if device is None else MAKERS[name](shape).to(device)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device | None]:
    """No device, or a GPU that is pretended."""
    with pretended_gpu() if request.param == "gpu" else contextlib.nullcontext():
        yield GPU if request.param == "gpu" else None


def devices(value: Any) -> set[torch.device]:
    leaves = value.values(True, True) if isinstance(value, TensorDictBase) else [value]
    return {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}


def require_on(device: torch.device | None, value: Any) -> None:
    assert devices(value) <= {device or torch.device("cpu")}


def ends(spec: TensorSpec) -> int:
    """The last place for a new dimension that can be unbound; one event stays behind it."""
    return spec.ndim - isinstance(spec, OneHot | MultiOneHot | MultiCategorical | Binary)


def sizes(value: Any) -> torch.Size:
    return torch.Size(value.batch_size) if isinstance(value, TensorDictBase) else torch.Size(value.shape)


@every
@each("batch", [(), (4,), (2, 1)])
def test_random_values_are_members(name: str, shape: tuple[int, ...], batch: tuple[int, ...], device: Any) -> None:
    spec = made(name, shape, device)
    drawn = spec.rand(batch)
    require_on(device, drawn)
    assert sizes(drawn) == (*batch, *spec.shape)
    assert spec.is_in(drawn)
    assert spec.contains(drawn)
    spec.assert_is_in(spec.project(drawn))
    assert spec.is_in(val=drawn)
    assert spec.contains(item=drawn)
    assert spec.project(val=drawn) is drawn


@every
def test_zeros_and_ones_have_shape_and_type(name: str, shape: tuple[int, ...], device: Any) -> None:
    spec = made(name, shape, device)
    for value in (spec.zero((2,)), spec.one((2,))):
        require_on(device, value)
        assert sizes(value) == (2, *spec.shape)
        spec.type_check(value)


@every
def test_a_seed_repeats_the_draw(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    torch.manual_seed(3)
    first = spec.rand((5,))
    torch.manual_seed(3)
    assert str(spec.to_numpy(spec.rand((5,)))) == str(spec.to_numpy(first))
    before = torch.random.get_rng_state()
    one, other = (spec.rand((5,), generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert str(spec.to_numpy(one)) == str(spec.to_numpy(other))
    assert torch.equal(torch.random.get_rng_state(), before)


@every_tensor
def test_projecting_gives_members_and_leaves_them(name: str, shape: tuple[int, ...]) -> None:
    spec: Any = made(name, shape)
    wild = torch.randn(6, *spec.shape, generator=torch.Generator().manual_seed(1)) * 50
    kept = wild.clone()
    found = spec.project(wild)
    assert spec.is_in(found)
    assert spec.project(found) is found
    assert torch.equal(wild, kept), "the input was changed"
    for extreme in (float("nan"), 1e300, -1e300):
        assert spec.is_in(spec.project(torch.full(spec.shape, extreme, dtype=torch.float64))), extreme


@every_tensor
def test_other_types_shapes_and_things_are_not_in(name: str, shape: tuple[int, ...]) -> None:
    spec: Any = made(name, shape)
    member = spec.rand()
    assert not spec.is_in(member.to(torch.complex64))
    assert not spec.is_in(member.numpy() if member.dtype is not torch.bfloat16 else 3)
    assert not spec.is_in(None)
    if spec.ndim:
        assert not spec.is_in(torch.cat([member, member]))
        assert not spec.is_in(member[0])


@every
def test_expanding_and_indexing_go_together(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    wide = spec.expand(5, 2, *spec.shape)
    assert wide.shape == (5, 2, *spec.shape)
    assert wide[3, 1] == spec
    assert wide[-1][..., 0, *[slice(None)] * spec.ndim] == spec
    drawn = wide.rand()
    assert wide.is_in(drawn)
    assert spec.is_in(drawn)


@every
def test_squeezing_and_reshaping_undo_each_other(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    assert spec.unsqueeze(0).squeeze(0) == spec
    assert torch.squeeze(torch.unsqueeze(spec, ends(spec)), ends(spec)) == spec
    wide = spec.expand(6, *spec.shape)
    assert wide.unflatten(0, (2, -1)).flatten(0, 1) == wide
    assert wide.reshape(3, 2, *spec.shape).view(6, *spec.shape) == wide


@every
@each("index", [1, slice(None, None, 2), None, ..., [2, 0], torch.tensor([True, False, True])])
def test_an_index_picks_from_spec_and_value_alike(name: str, shape: tuple[int, ...], index: Any) -> None:
    spec = made(name, shape)
    stacked: Any = torch.stack([spec, spec, spec])
    picked, value = stacked[index], stacked.rand()[index]
    assert picked.shape == sizes(value)
    assert picked.is_in(value)


@every
def test_stacking_and_unbinding_undo_each_other(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    for dim in (0, ends(spec), ends(spec) - spec.ndim - 1):
        stacked: Any = torch.stack([spec, spec.clone()], dim)
        assert type(stacked) is type(spec)
        assert stacked.unbind(dim) == (spec, spec)
        assert stacked.shape[dim] == 2


@every
def test_copies_are_equal(name: str, shape: tuple[int, ...]) -> None:
    spec, again = made(name, shape), made(name, shape)
    spec.rand()  # what it remembers of its bounds is not pickled
    for twin in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec), spec.clone(), again):
        assert twin == spec
        assert type(twin) is type(spec)
        assert twin.is_in(spec.rand())
    if name != "composite":
        assert hash(spec) == hash(again)
    assert spec == spec.expand(*spec.shape)
    for other in (spec.unsqueeze(0), spec.expand(2, *spec.shape), "spec"):
        assert spec != other
    assert repr(spec).startswith(type(spec).__name__)
    assert f"shape={spec.shape}" in repr(spec)


def test_no_spec_equals_another() -> None:
    specs = [make((3,)) for make in MAKERS.values()]
    assert [(a, b) for a, one in enumerate(specs) for b, other in enumerate(specs) if (one == other) != (a == b)] == []


@every
def test_moving_to_a_device_keeps_all_else(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    moved = spec.to("meta")
    assert moved.device == torch.device("meta")
    assert moved.shape == spec.shape
    assert moved.dtype == spec.dtype
    assert moved != spec
    assert moved.expand(2, *moved.shape)[0].device == torch.device("meta")
    assert spec.to("cpu").cpu().device == torch.device("cpu")


@every_tensor
@each("dtype", [torch.float64, torch.float16, torch.int32])
def test_casting_gives_members_of_the_new_type(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    spec: Any = made(name, shape)
    cast = spec.to(dtype)
    assert cast.dtype == dtype
    assert cast.shape == spec.shape
    assert cast.is_in(cast.rand((3,)))
    assert (cast == spec) == (spec.dtype == dtype)


@every
def test_numpy_values_come_back_when_encoded(name: str, shape: tuple[int, ...], device: Any) -> None:
    spec = made(name, shape, device)
    member = spec.rand()
    encoded = spec.encode(val=spec.to_numpy(val=member, safe=True))
    require_on(device, encoded)
    assert spec.is_in(encoded)
    assert str(spec.to_numpy(encoded)) == str(spec.to_numpy(member))


@every
def test_any_size_is_a_member_if_the_size_is_unknown(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape).expand(-1, *made(name, shape).shape)
    assert spec.shape[0] == -1
    assert sizes(spec.rand((2,))) == (2, 1, *spec.shape[1:])
    if not isinstance(spec, Choice):  # all places are then of one alternative
        assert spec.is_in(made(name, shape).rand((9,)))
    assert spec.unsqueeze(0).shape == (1, -1, *spec.shape[1:])
    assert spec[0] == made(name, shape)
    assert (spec[:].shape, spec[-7], spec[[9, 9]].shape[0]) == (spec.shape, spec[0], 2)
    with pytest.raises(IndexError, match="unknown size"):
        spec[1:]
    with pytest.raises(ValueError, match="unknown"):
        spec.reshape(-1)


def test_numbers_become_tensors_of_the_spec() -> None:
    spec = Bounded(0, 1, (3,))
    for value in ([0, 1, 1], (0.0, 1.0, 1.0), np.array([0, 1, 1], np.int8), np.array([[0, 1, 1]], ">f8")):
        found = spec.encode(value)
        assert (found.dtype, found.tolist()) == (torch.float32, [0, 1, 1])
    value = torch.zeros(9, dtype=torch.int8)
    assert spec.encode(value) is value, "tensors pass as they are"
    array = np.array(0.5, np.float32)
    found = Bounded(0, 1, ()).encode(array)
    array[...] = 9
    assert found.item() == 0.5, "the memory of the caller is not shared"
    assert Unbounded((2,)).encode([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]
    assert Categorical(4).encode([3]).shape == Categorical(4).encode([[3]]).shape == ()
    assert Unbounded((-1, 2)).encode([[1, 2], [3, 4], [5, 6]]).shape == (3, 2)
    assert Unbounded((1,), dtype=torch.bfloat16).to_numpy(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32
    spec = Unbounded((1,), device="meta")
    assert spec.encode([3.0]).device.type == "meta"
    assert spec.encode([3.0], ignore_device=True).tolist() == [3]


@each(
    ("spec", "value", "error", "says"),
    [
        (Bounded(0, 1, (2, 3)), 0.5, RuntimeError, "does not fill"),
        (Bounded(0, 1, (3,)), np.zeros((5, 3)), RuntimeError, r"\[5, 3\]"),
        (Categorical(4), 1.5, RuntimeError, "does not fit"),
        (Categorical(4), float("nan"), RuntimeError, "does not fit"),
        (Categorical(4, dtype=torch.uint8), 300, RuntimeError, "does not fit"),
        (Categorical(2, dtype=torch.bool), 2, RuntimeError, "does not fit"),
        (Bounded(0, 1, ()), "a", TypeError, "numbers"),
        (Bounded(0, 1, ()), None, TypeError, "numbers"),
    ],
)
def test_values_that_cannot_be_encoded_are_refused(spec: Any, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        spec.encode(value)


def test_values_are_checked_where_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Bounded(0, 1, (1,))
    assert spec.encode([3.0]).tolist() == [3]
    assert spec.to_numpy(torch.tensor([3.0])).tolist() == [3]
    monkeypatch.setenv("CHECK_SPEC_ENCODE", "1")
    for ask in (lambda: spec.encode([3.0]), lambda: spec.to_numpy(torch.tensor([3.0]))):
        with pytest.raises(AssertionError, match="is not in BoundedContinuous"):
            ask()
    assert spec.to_numpy(torch.tensor([3.0]), safe=False).tolist() == [3]


def test_encoded_values_can_be_remembered() -> None:
    spec = Categorical(4)
    assert spec.memoize_encode() is None
    first = spec.encode(3)
    first += 1
    assert spec.encode(3).item() == 3
    assert spec.encode([2]).item() == 2
    spec.erase_memoize_cache()
    assert spec.encode(3).item() == 3
    assert spec == Categorical(4)
    spec.memoize_encode(False)


def test_a_type_check_says_what_was_found() -> None:
    with pytest.raises(TypeError, match=r"'x' is of type torch.int32, expected a tensor of torch.float32"):
        Unbounded((1,)).type_check(torch.zeros(1, dtype=torch.int32), "x")
    with pytest.raises(TypeError, match="the value is a list"):
        Unbounded((1,)).type_check([1.0])


def test_torch_functions_on_specs() -> None:
    spec: Any = Bounded(torch.arange(3.0), 5)
    assert torch.index_select(spec, 0, torch.tensor([2, 0])).low.tolist() == [2, 0]
    assert torch.index_select(spec.expand(2, 3), -1, torch.tensor([1])).shape == (2, 1)
    with pytest.raises(NotImplementedError, match="out is set"):
        torch.stack([spec, spec], out=torch.zeros(2))
    with pytest.raises(SpecTypeError, match=r"torch.add does not accept specs"):
        torch.add(spec, 1)


@each(
    ("change", "error"),
    [
        (lambda spec: spec.expand(3, 4), ValueError),
        (lambda spec: spec.expand(2), ValueError),
        (lambda spec: spec.reshape(5), ValueError),
        (lambda spec: spec.reshape(-1, -1), ValueError),
        *((lambda spec: spec.unflatten(0, (2, 2)), kind) for kind in (ValueError, RuntimeError)),
        (lambda spec: spec.flatten(1, 0), ValueError),
        (lambda spec: spec.squeeze(2), IndexError),
        *((lambda spec: spec.unsqueeze(4), kind) for kind in (IndexError, ValueError)),
        (lambda spec: spec.unbind(2), IndexError),
        (lambda spec: spec[0, 0, 0], IndexError),
        (lambda spec: spec[2], IndexError),
        (lambda spec: spec[..., ...], IndexError),
        (lambda spec: spec["a"], IndexError),
        (lambda spec: spec[True], IndexError),
        (lambda spec: spec.expand(-1, 2, 3).unbind(0), NotImplementedError),
    ],
)
def test_changes_of_shape_that_do_not_fit_are_refused(change: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        change(Bounded(torch.arange(6.0).reshape(2, 3), 9))


@each("index", [[0, 1], [[0, 1], [1, 0]], range(2), [], [True, False], np.array([1, 0]), (slice(None), [2, 0])])
def test_indices_of_many_kinds(index: Any) -> None:
    low = np.arange(6.0).reshape(2, 3)
    part = np.asarray(index, dtype=None if len(index) else int) if not isinstance(index, tuple) else index
    assert Bounded(low, 9)[index].low.tolist() == low[part].tolist()


def test_names_of_one_thing() -> None:
    spec = Bounded(0, 1, (2, 3))
    assert spec.ndim == spec.ndimension() == 2
    assert torch.equal(spec.zeros((4,)), spec.zero((4,)))
    assert torch.equal(spec.ones(4), spec.one((4,)))
    assert spec.is_in(spec.sample((4,)))
    assert spec.clear_device_() is spec
    low, high = spec.space
    assert (low is spec.low, high is spec.high) == (True, True)


def test_a_value_outside_is_named_by_numbers_or_by_shape() -> None:
    spec = Bounded(0, 1, (2,))
    with pytest.raises(AssertionError, match=r"a tensor of torch.float32 \[2.0, 0.0\] is not in Bounded"):
        spec.assert_is_in(torch.tensor([2.0, 0.0]))
    with pytest.raises(AssertionError, match=r"a tensor of torch.float32 \[50, 2\] is not in"):
        spec.assert_is_in(torch.full((50, 2), 2.0))
    with pytest.raises(AssertionError, match="…") as raised:
        Categorical(2).assert_is_in("a" * 1000)
    assert len(str(raised.value)) < 400


@each("dim", [0, 1, -1])
def test_torch_stack_is_lazy_where_one_spec_cannot_hold_all(dim: int) -> None:
    ragged: Any = torch.stack([Unbounded((2, 3)), Unbounded((2, 4))], dim)
    assert type(ragged) is Stacked
    assert -1 in ragged.shape
    assert ragged.unbind(dim) == (Unbounded((2, 3)), Unbounded((2, 4)))
    assert type(torch.stack([Categorical(3, (2,)), Categorical(4, (2,))], min(dim, 1))) is Stacked
    assert type(torch.stack([Bounded(0, 1, (2,)), Bounded(0, 2, (2,))], min(dim, 1))) is BoundedContinuous


@each(
    ("specs", "says"),
    [
        ([Unbounded((2,)), Bounded(0, 1, (2,))], "one class"),
        ([Unbounded((2,)), Unbounded((2,), dtype=torch.float64)], "same dtype"),
        ([Unbounded((2,)), Unbounded((2,), device="meta")], "same device"),
        ([Unbounded((2,)), Unbounded((2, 2))], "same ndim"),
        ([Composite(shape=(2,)), Composite(shape=(3,))], "same shape"),
        ([Composite(), Unbounded(())], "one class"),
    ],
)
def test_specs_that_differ_otherwise_are_not_stacked(specs: Any, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        torch.stack(specs)


def test_arguments_that_make_no_stack_are_refused() -> None:
    with pytest.raises(ValueError, match="no specs"):
        Stacked(dim=0)
    with pytest.raises(IndexError):
        Stacked(Unbounded((2,)), dim=2)
    with pytest.raises(ValueError, match="categories"):
        Stacked(OneHot(2), OneHot(3), dim=1)
    with pytest.raises(RuntimeError, match="Composites"):
        StackedComposite(Unbounded(()), dim=0)  # type: ignore[arg-type]


def test_values_of_several_sizes_are_nested_tensors_or_sequences() -> None:
    spec: Any = torch.stack([Bounded(0, 1, (2,)), Bounded(0, 1, (3,))])
    drawn = spec.rand()
    assert drawn.is_nested
    assert spec.is_in(drawn)
    assert [part.tolist() for part in spec.project([torch.tensor([2.0, 0]), torch.zeros(3)])] == [[1, 0], [0, 0, 0]]
    assert [array.shape for array in spec.to_numpy(drawn)] == [(2,), (3,)]
    assert spec.encode([[0, 1], [0, 1, 1]]).is_nested
    assert spec.is_in(spec.project(spec.one() * 3))
    assert not spec.is_in([torch.zeros(2)])
    assert not spec.is_in(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="nested tensor along dimension 0"):
        spec.rand((4,))
    spec = torch.stack([OneHot(2, (4, 2)), OneHot(3, (4, 3))])
    assert spec.to_numpy(spec.rand()).shape == (2, 4)
    assert spec.is_in(spec.encode(spec.to_numpy(spec.rand())))
    spec = torch.stack([NonTensor((2,), example_data="a"), NonTensor((3,), example_data="b")])
    assert spec.to_numpy(spec.rand()) == ["a", "b"]


def test_sharp_edge_9_equal_shapes_make_tensors() -> None:
    spec = Stacked(Categorical(2, (3,)), Categorical(5, (3,)), dim=1)
    assert spec.rand((4,)).shape == spec.zero((4,)).shape == (4, 3, 2)
    assert spec.project(torch.full((3, 2), 9)).tolist() == [[1, 4]] * 3
    assert spec.space is not None
    assert (spec == spec.to("meta"), spec.to("meta").device) == (False, torch.device("meta"))
    assert (spec.cardinality(), spec.enumerate().shape) == (10, (10, 3, 2))
    assert spec.is_in(spec.enumerate())


def test_a_size_of_all_members_becomes_unknown() -> None:
    spec = Stacked(Categorical(3, (2,)), Categorical(4, (2,)), dim=0)
    with pytest.raises(ValueError, match="along which the members are stacked"):
        spec.make_neg_dim(0)
    spec.make_neg_dim(1)
    assert (spec.shape, spec[0].shape) == ((2, -1), (-1,))
    assert spec.is_in(torch.zeros(2, 9, dtype=torch.int64))


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretended_gpu():
        yield


@every
def test_stacks_members_and_indices_stay_on_their_gpu(name: str, shape: tuple[int, ...], gpu: None) -> None:
    spec = made(name, shape, GPU)
    stacked = torch.stack([spec, spec.clone()])
    for one in (stacked, stacked[0], *stacked.unbind(), spec.expand(2, *spec.shape), spec.unsqueeze(0)):
        assert one.device in (GPU, None)
        drawn = one.rand()
        require_on(GPU, drawn)
        assert one.is_in(drawn)


@every
def test_a_gpu_has_the_values_of_the_cpu(name: str, shape: tuple[int, ...], gpu: None) -> None:
    here, spec = made(name, shape), made(name, shape, GPU)
    assert spec.cpu() == here.cpu()
    assert spec == made(name, shape, GPU)
    assert (spec == here) == (here.device is None and spec.device is None)
    one, other = (kind.rand((5,), generator=torch.Generator().manual_seed(7)) for kind in (here, spec))
    assert str(spec.to_numpy(other)) == str(here.to_numpy(one))
    if (name, shape) not in TENSORS:
        return
    numbers = torch.randn((4, *spec.shape), generator=torch.Generator().manual_seed(1)) * 20
    values = numbers > 0 if spec.dtype == torch.bool else numbers.abs().to(spec.dtype)
    found = spec.project(values.to(GPU))
    assert found.device == GPU
    assert torch.equal(found.cpu(), here.project(values))
    assert spec.is_in(values.to(GPU)) == here.is_in(values)
    if "unbounded" in name:
        return
    assert spec.cardinality() == here.cardinality()
    if isinstance(here.cardinality(), int) and here.cardinality() < 300:
        assert np.array_equal(spec.enumerate().cpu(), here.enumerate())


@every_tensor
def test_attributes_can_be_assigned(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    if not isinstance(spec, LeafSpec):
        return
    expected = spec.expand(4, *spec.shape)
    spec.shape = expected.shape
    assert spec == expected
    spec.dtype = torch.float64
    spec.device = torch.device("meta")
    expected = expected.to(torch.float64).to("meta")
    assert (type(spec), spec.device.type) == (type(expected), "meta")
    assert spec == expected
    spec = made(name, shape)
    assert isinstance(spec, LeafSpec)
    spec.space = None  # a box that says nothing is kept
    assert spec.space is None
    assert spec.is_in(spec.rand())
    spec.domain = "other"
    assert spec.domain == "other"


def test_a_new_shape_keeps_what_differs_along_other_dimensions() -> None:
    spec = MultiCategorical([[2, 3], [2, 3]])
    spec.shape = torch.Size([5, 2])
    assert spec == MultiCategorical([2, 3], (5, 2))
    assert spec.is_in(spec.rand())


@every
def test_none_is_the_shape_of_one_value(name: str, shape: tuple[int, ...]) -> None:
    spec = made(name, shape)
    for draw in (spec.rand, spec.sample, spec.zero, spec.zeros, spec.one, spec.ones):
        assert sizes(draw(None)) == sizes(draw(()))
        assert sizes(draw([2])) == sizes(draw(torch.Size([2]))) == sizes(draw((2,)))


@every
def test_steps_may_be_negative(name: str, shape: tuple[int, ...]) -> None:
    spec: Any = made(name, shape).expand(5, 2, *made(name, shape).shape)
    for index, count in ((slice(10, 1, -1), 3), (slice(None, None, -1), 5), (slice(4, 0, -2), 2), (slice(0, 3, -1), 0)):
        assert (spec[index].shape, spec[:, ::-1].shape) == ((count, *spec.shape[1:]), spec.shape)
    with pytest.raises(ValueError, match="zero"):
        spec[::0]


def test_negative_steps_reverse_what_belongs_to_the_elements() -> None:
    rows = torch.arange(20.0).reshape(5, 4)
    spec = Bounded(rows, rows + 1)
    assert torch.equal(spec[::-2, 3:0:-1].low, rows.flip(0)[::2].flip(1)[:, :3])
    assert torch.equal(spec.expand(-1, 5, 4)[0, ::-1].low, rows.flip(0))
    members = [Unbounded((size,)) for size in (3, 4, 5)]
    assert list(torch.stack(members)[::-1].unbind()) == members[::-1]
    assert [spec.shape for spec in torch.stack(members)[:, ::-2].unbind()] == [(2,), (2,), (3,)]


@every
def test_a_size_of_one_can_become_unknown(name: str, shape: tuple[int, ...]) -> None:
    known = made(name, shape)
    spec = known.expand(3, 1, *known.shape).expand(3, -1, *known.shape)
    assert (spec.shape, sizes(spec.rand())) == ((3, -1, *known.shape), (3, 1, *known.shape))
    assert spec.is_in(known.expand(3, 7, *known.shape).rand()) or isinstance(spec, Choice)
    assert (spec[0].shape, spec[:, 9].shape, spec[1, 7]) == ((-1, *known.shape), (3, *known.shape), known)
    assert spec[0, [3, 4, 5]].shape == (3, *known.shape)
    assert spec[:, :].shape == spec.clone().shape == spec.expand(3, -1, *known.shape).shape == spec.shape
    with pytest.raises(IndexError, match=r"dimension 1 of .*has an unknown size"):
        spec[0, 1:2]
    assert known.expand(3, *known.shape).expand(-1, *known.shape).shape == (3, *known.shape)


@each("dim", [0, 1, -1])
def test_a_member_of_a_stack_is_indexed_itself(dim: int) -> None:
    members = [Unbounded((2, size)) for size in (3, 4)]
    stack: Any = torch.stack(members, dim)
    assert stack.dim == stack.stack_dim == dim % 3
    lead = [slice(None)] * stack.dim
    for index in ((*lead, 1), (*lead, torch.tensor(-1), ...), (*lead, 1, *[slice(None)] * (2 - stack.dim))):
        assert stack[index] is members[1]
    assert stack[(*lead, slice(1, 2))].unbind(dim)[0] == members[1]
