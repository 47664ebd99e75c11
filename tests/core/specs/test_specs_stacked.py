"""Stacks of specs that differ: Stacked and StackedComposite."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from rbtool.core.specs.base import Stacked, TensorSpec
from rbtool.core.specs.bounded import Bounded, BoundedContinuous, Unbounded
from rbtool.core.specs.categorical import Categorical, OneHot
from rbtool.core.specs.composite import Composite, StackedComposite
from rbtool.core.specs.non_tensor import NonTensor

SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def leaf(number: int, shape: tuple[int, ...]) -> TensorSpec:
    """Specs that have no value in common, so that a value in a wrong place is no member."""
    return Bounded(10 * number, 10 * number + 1, shape)


def nest(number: int, shape: tuple[int, ...]) -> Composite:
    entries = {"a": leaf(number, (*shape, 2)), "in": {"b": leaf(number, (*shape, number + 1))}}
    return Composite(entries, shape=shape)


def stack_of(make: Any, data: st.DataObject) -> Any:
    shape, count = data.draw(SHAPES), data.draw(st.integers(2, 3))
    dim = data.draw(st.integers(0, len(shape)))
    stacked = {leaf: Stacked, nest: StackedComposite}[make]
    return stacked(*(make(number, shape) for number in range(count)), dim=dim)


def index_for(shape: torch.Size, data: st.DataObject) -> Any:
    parts: list[Any] = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        one = st.integers(-size, size - 1)
        slices = st.slices(size).filter(lambda part: (part.step or 1) > 0)
        several = st.nothing() if list in map(type, parts) else st.lists(one, min_size=1, max_size=3)
        parts += [None] * data.draw(st.integers(0, 1)) + [data.draw(one | slices | several)]
    return tuple(parts)


@pytest.mark.parametrize("make", [leaf, nest])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_an_index_picks_from_stack_and_value_alike(make: Any, data: st.DataObject) -> None:
    spec = stack_of(make, data)
    index, value = index_for(spec.shape, data), spec.rand()
    part = value[index]
    assume(0 not in part.shape or list not in map(type, index))  # a copy of nothing does not show where it is from
    picked = spec[index]
    assert picked.shape == part.shape
    assume(make is leaf or list(part.keys()))  # tensordict 0.14 leaves out the entries of an empty stack
    assert picked.is_in(part)


@pytest.mark.parametrize("make", [leaf, nest])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changes_of_shape_do_to_the_stack_what_they_do_to_its_values(make: Any, data: st.DataObject) -> None:
    spec = stack_of(make, data)
    value, dims = spec.rand(), spec.ndim
    dim = data.draw(st.integers(-dims, dims - 1))
    lead = data.draw(st.lists(st.integers(1, 2), max_size=2))
    wide = (*lead, *spec.shape)
    pairs = [(spec.expand(wide), value.expand(*wide)), (spec.unsqueeze(dim), value.unsqueeze(dim))]
    if make is leaf:
        pairs += [(spec.flatten(0, dim), value.flatten(0, dim)), (spec.reshape(-1), value.reshape(-1))]
        pairs += [(spec.unflatten(dim, (1, -1)), value.unflatten(dim, (1, -1))), (spec.squeeze(), value.squeeze())]
    pairs += [*zip(spec.unbind(dim), value.unbind(dim), strict=True)]
    for changed, other in pairs:
        assert changed.shape == other.shape
        assert changed.is_in(other)
        assert changed.shape == changed.rand().shape


@pytest.mark.parametrize("make", [leaf, nest])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_values_are_drawn_projected_and_encoded(make: Any, data: st.DataObject) -> None:
    spec, batch = stack_of(make, data), data.draw(SHAPES)
    drawn = spec.rand(batch)
    assert drawn.shape == (*batch, *spec.shape)
    assert spec.is_in(drawn)
    assert spec.project(drawn) is drawn
    wild = spec.one(batch) * 5.5
    assert not spec.is_in(wild)
    assert spec.is_in(spec.project(wild))
    value = spec.rand()
    again = spec.encode(spec.to_numpy(value, safe=True))
    assert spec.is_in(again)
    assert bool((again == value).all())
    spec.type_check(value)
    for twin in (spec.clone(), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert twin == spec


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_torch_stack_is_lazy_where_one_spec_cannot_hold_all(dim: int) -> None:
    ragged: Any = torch.stack([Unbounded((2, 3)), Unbounded((2, 4))], dim)
    assert type(ragged) is Stacked
    assert -1 in ragged.shape
    assert ragged.unbind(dim) == (Unbounded((2, 3)), Unbounded((2, 4)))
    assert type(torch.stack([Categorical(3, (2,)), Categorical(4, (2,))], min(dim, 1))) is Stacked
    assert type(torch.stack([Bounded(0, 1, (2,)), Bounded(0, 2, (2,))], min(dim, 1))) is BoundedContinuous


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([Unbounded((2,)), Bounded(0, 1, (2,))], "one class"),
        ([Unbounded((2,)), Unbounded((2,), dtype=torch.float64)], "one dtype"),
        ([Unbounded((2,)), Unbounded((2,), device="meta")], "one device"),
        ([Unbounded((2,)), Unbounded((2, 2))], "one ndim"),
        ([Composite(shape=(2,)), Composite(shape=(3,))], "one shape"),
        ([Composite(), Unbounded(())], "one class"),
    ],
)
def test_what_differs_otherwise_is_not_stacked(specs: Any, says: str) -> None:
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


def test_one_hot_specs_of_several_sizes() -> None:
    spec: Any = torch.stack([OneHot(2, (4, 2)), OneHot(3, (4, 3))])
    assert spec.to_numpy(spec.rand()).shape == (2, 4)
    assert spec.is_in(spec.encode(spec.to_numpy(spec.rand())))


def test_sharp_edge_9_equal_shapes_make_tensors() -> None:
    spec = Stacked(Categorical(2, (3,)), Categorical(5, (3,)), dim=1)
    assert spec.rand((4,)).shape == spec.zero((4,)).shape == (4, 3, 2)
    assert spec.project(torch.full((3, 2), 9)).tolist() == [[1, 4]] * 3
    assert spec.space is not None
    assert (spec == spec.to("meta"), spec.to("meta").device) == (False, torch.device("meta"))
    assert (spec.cardinality(), spec.enumerate().shape) == (10, (10, 3, 2))
    assert spec.is_in(spec.enumerate())


def test_data_that_are_no_tensors_are_stacked() -> None:
    spec: Any = torch.stack([NonTensor((2,), example_data="a"), NonTensor((3,), example_data="b")])
    assert spec.to_numpy(spec.rand()) == ["a", "b"]


def agents() -> Any:
    one = Composite(obs=Bounded(0, 1, (3,)), only=Unbounded((1,)), inner=Composite(x=Categorical(3)), hold=None)
    other = Composite(obs=Bounded(0, 1, (4,)), inner=Composite(x=Categorical(5), y=Unbounded(())), hold=None)
    return torch.stack([one, other])


def test_keys_are_those_that_all_members_have() -> None:
    spec = agents()
    assert isinstance(spec, Composite)
    assert list(spec.keys(True, True)) == ["obs", ("inner", "x"), "hold"]
    assert (len(spec), "only" in spec, "obs" in spec, spec["hold"]) == (4 - 1, False, True, None)
    assert [key for key, _ in spec.items()] == list(spec) == ["obs", "inner", "hold"]
    assert spec["inner", "x"].shape == (2,)
    assert spec.exclusive_keys == (("only",), (("inner", "y"),))
    assert "'only'" in spec.repr_exclusive_keys()
    assert spec.get("only", 3) == 3
    with pytest.raises(KeyError, match="'obs', 'inner', 'hold' in common"):
        spec["only"]


def test_entries_are_set_in_all_members() -> None:
    spec = agents()
    spec["new"] = Unbounded((2, 7))
    spec["inner", "z"] = Categorical(4, (2,))
    spec.update({"inner": {"x": Categorical(9, (2,))}, "hold": Unbounded((2,))})
    assert [member["new"].shape for member in spec.specs] == [(7,), (7,)]
    assert spec[1]["inner", "z"] == Categorical(4)
    assert (spec[0]["inner", "x"], spec[0]["hold"]) == (Categorical(9), Unbounded(()))
    assert spec.pop("new") == Unbounded((2, 7))
    assert "new" not in spec[0]
    assert spec.pop("new", None) is None
    apart = spec.separates("obs")
    assert list(apart.keys()) == ["obs"]
    assert "obs" not in spec


@pytest.mark.parametrize(
    ("key", "entry", "error"),
    [
        ("shape", Unbounded((2,)), ValueError),
        ("x", Unbounded((3,)), ValueError),
        ("x", 3, TypeError),
        (5, Unbounded((2,)), TypeError),
        (("obs", "x"), Unbounded((2,)), ValueError),
    ],
)
def test_entries_that_do_not_fit_change_no_member(key: Any, entry: Any, error: type[Exception]) -> None:
    spec, before = agents(), agents()
    with pytest.raises(error):
        spec[key] = entry
    assert spec == before


def test_a_locked_stack_is_not_changed() -> None:
    spec = agents().lock_()
    assert spec.specs[0].is_locked
    changes: list[Any] = [
        lambda: spec.set("new", None), lambda: spec.pop("obs"), lambda: spec.update({}), lambda: spec["inner"].pop("x"),
        lambda: spec.make_neg_dim(0), spec.clear_device_,
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(RuntimeError, match="locked"):
            change()
    assert spec.unlock_().set("new", None)["new"] is None
    member = agents().lock_(recurse=False).specs[0]
    assert (member.is_locked, member["inner"].is_locked) == (True, False)
    assert not agents().lock_().clone().is_locked


def test_values_of_a_stacked_composite() -> None:
    spec = agents()
    drawn = spec.rand((5,))
    assert isinstance(drawn, LazyStackedTensorDict)
    assert spec.is_in(drawn)
    drawn[:, 1]["obs"] += 3
    assert not spec.is_in(drawn)
    assert spec.project(drawn) is drawn
    assert spec.is_in(drawn)
    lists = spec.to_numpy(spec.rand())
    assert (lists[0]["obs"].shape, lists[1]["obs"].shape) == ((3,), (4,))
    assert spec.encode({"inner": {"x": [2, 4]}})["inner", "x"].tolist() == [2, 4]
    with pytest.raises(TypeError, match="expected"):
        spec.project(3)
    with pytest.raises(TypeError, match="'x'"):
        spec.type_check([{"obs": torch.zeros(3), "only": torch.zeros(1), "inner": {"x": torch.zeros(())}}, {}])


def test_a_dense_value_is_projected_in_place() -> None:
    spec = StackedComposite(Composite(a=Bounded(0, 1, ())), Composite(a=Bounded(5, 6, ())), dim=0)
    value = TensorDict({"a": torch.tensor([[3.0, 3.0], [0.5, 5.5]]), "b": torch.zeros(2, 2)}, [2, 2])
    assert spec.project(value) is value
    assert value["a"].tolist() == [[1, 5], [0.5, 5.5]]


def test_a_stack_is_an_entry_like_others() -> None:
    spec = Composite(agents=agents(), step=Unbounded((2,)), shape=(2,), device="cpu")
    assert spec.is_in(spec.rand((3,)))
    assert spec["agents"].device == torch.device("cpu")
    assert spec.expand(4, 2)["agents"].shape == (4, 2)
    assert spec[1]["agents"] == agents()[1].to("cpu")
    wild = spec.one()
    wild["agents"][1]["obs"] *= 7
    assert spec.is_in(spec.project(wild))
    assert torch.stack([spec, spec], 1)[:, 0] == spec


def test_names_and_devices_of_a_stack() -> None:
    spec = StackedComposite(*(nest(number, (2,)) for number in range(3)), dim=1)
    assert spec.names == [None, None]
    spec.names = ["time", "agent"]
    assert (spec.names, spec[:, 0].names, spec[0].names) == (["time", "agent"], ["time"], ["agent"])
    spec.device = "meta"
    assert spec["a"].device == torch.device("meta")
    with pytest.raises(ValueError, match="that of its members"):
        spec.shape = (3,)
    with pytest.raises(ValueError, match="names has"):
        spec.names = ["a"]


def test_a_size_of_all_members_becomes_unknown() -> None:
    spec = Stacked(Categorical(3, (2,)), Categorical(4, (2,)), dim=0)
    with pytest.raises(ValueError, match="that of the stack"):
        spec.make_neg_dim(0)
    spec.make_neg_dim(1)
    assert (spec.shape, spec[0].shape) == ((2, -1), (-1,))
    assert spec.is_in(torch.zeros(2, 9, dtype=torch.int64))


def test_encoded_values_of_members_can_be_remembered() -> None:
    spec = agents()
    with pytest.warns(UserWarning, match="experimental"):
        spec.memoize_encode()
    assert spec.encode([{"inner": {"x": 1}}, {"inner": {"x": 4}}])["inner", "x"].tolist() == [1, 4]
    spec.erase_memoize_cache()
