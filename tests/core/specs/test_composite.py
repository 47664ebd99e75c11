"""Composite and StackedComposite: mappings of specs, and the specs of tensordicts."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.specs.base import SpecTypeError, Stacked, TensorSpec
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Binary, Categorical, MultiCategorical, OneHot
from rbtool.core.specs.composite import (
    Composite,
    StackedComposite,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
)
from rbtool.core.specs.non_tensor import Choice, NonTensor


@tensorclass
class Reading:
    number: torch.Tensor


def spec_of(shape: tuple[int, ...] = ()) -> Composite:
    return Composite(
        {
            "action": Bounded(-1, 1, (*shape, 2)),
            "inner": {"number": Categorical(4, shape), "deep": {"bits": Binary(shape=(*shape, 3))}},
        },
        shape=shape,
    )


def test_composite_keys_nested_and_leaves() -> None:
    spec = spec_of()
    assert list(spec.keys()) == ["action", "inner"]
    assert list(spec.keys(True, True)) == ["action", ("inner", "number"), ("inner", "deep", "bits")]
    everything = ["action", "inner", ("inner", "number"), ("inner", "deep"), ("inner", "deep", "bits")]
    assert list(spec.keys(include_nested=True)) == everything
    assert list(spec.keys(leaves_only=True)) == ["action"]
    assert list(spec.keys(True, True, is_leaf=lambda kind: issubclass(kind, Composite))) == ["action", "inner"]


def test_views_are_live_and_compare_as_sets() -> None:
    spec = spec_of()
    keys = spec.keys()
    spec["more"] = Unbounded((1,))
    assert keys == {"action", "inner", "more"}
    assert len(keys) == len(spec) == 3
    assert "more" in keys
    assert ("inner", "number") not in keys
    assert ("inner", "number") in spec.keys(True)
    assert (("inner", ("deep", "bits"))) in spec.keys(True)
    assert list(spec) == list(keys)
    assert repr(keys) == "View(['action', 'inner', 'more'])"
    assert [spec[key] for key in spec.keys(True)] == list(spec.values(True))
    assert list(zip(spec.keys(True, True), spec.values(True, True), strict=True)) == list(spec.items(True, True))


def test_entries_of_static_composites_can_be_left_out() -> None:
    fixed = Composite(b=Unbounded(), inner=Composite(c=Unbounded()), step_mdp_static=True)
    spec = Composite(a=Unbounded(), nested=Composite(fixed=fixed))
    left = ["a", ("nested", "fixed")]
    assert list(spec.keys(True, True, step_mdp_static_only=True)) == left
    assert list(spec.items(True, True, step_mdp_static_only=True)) == [(key, spec[key]) for key in left]
    assert list(fixed.keys(step_mdp_static_only=True)) == []


def test_entries_are_set_through_nested_keys() -> None:
    spec = Composite()
    spec["a", "b", "c"] = Categorical(3)
    spec.set(("a", ("b", "d")), None)
    assert list(spec.keys(True, True)) == [("a", "b", "c"), ("a", "b", "d")]
    assert spec["a"]["b"]["c"] == spec["a", "b", "c"] == Categorical(3)
    del spec["a", "b", "c"]
    assert list(spec["a", "b"].keys()) == ["d"]
    with pytest.raises(ValueError, match="Categorical, which has no entry 'e'"):
        Composite(c=Categorical(2)).set(("c", "e"), None)


@each(
    ("arguments", "named", "error", "says"),
    [
        *[(({key: Categorical(2)},), {}, ValueError, "property") for key in ("device", "dtype", "space", "shape")],
        (({("a", "shape"): Categorical(2)},), {}, ValueError, "property"),
        ((), {"shape": Categorical(2)}, ValueError, "'shape'"),
        (({}, {}), {}, RuntimeError, "2 positional"),
        ((Categorical(2),), {}, RuntimeError, "expected a dict of specs"),
        (({"a": 3},), {}, TypeError, "'a' is a int"),
        (({3: Categorical(2)},), {}, TypeError, "3 is not a key"),
    ],
)
def test_composites_of_other_keys_or_values_are_refused(arguments, named, error, says) -> None:
    with pytest.raises(error, match=says):
        Composite(*arguments, **named)


def test_entries_begin_with_the_shape() -> None:
    with pytest.raises(ValueError, match=r"\[2\], which should begin with \[3\]"):
        Composite(a=Unbounded((2,)), shape=(3,))
    spec = Composite({"a": {"b": Unbounded((3, 4))}, "text": NonTensor((1,)), "empty": Composite()}, batch_size=3)
    assert [entry.shape for entry in spec.values(True) if entry] == [(3,), (3, 4), (3, 1), (3,)]
    assert spec.batch_size == spec.shape == (3,)
    spec = Composite(a=Unbounded((3, 4)), b={"c": Unbounded((3,))})
    spec.shape = (3,)
    assert spec["b"].shape == (3,)
    with pytest.raises(ValueError, match="'c' has the shape"):
        spec.shape = (3, 4)
    assert (spec.shape, spec["b"].shape) == ((3,), (3,))


def test_the_device_holds_for_all_entries() -> None:
    with pytest.raises(RuntimeError, match="on cpu, the Composite on meta"):
        Composite(a=Unbounded(device="cpu"), device="meta")
    spec = Composite(a=Unbounded(device="cpu"), b={"c": NonTensor()}, device="cpu")
    assert spec["b", "c"].device == spec["b"].device == torch.device("cpu")
    spec.device = "meta"
    assert {entry.device for entry in spec.values(True) if entry} == {torch.device("meta")}
    assert spec.clear_device_().device is None
    assert spec["a"].device == torch.device("meta")


def test_a_missing_key_raises_unless_there_is_a_default() -> None:
    spec = spec_of()
    for ask in (lambda: spec.get("b"), lambda: spec["b"], lambda: spec["inner", "b"], lambda: spec.pop("b")):
        with pytest.raises(KeyError, match="no entry"):
            ask()
    assert spec.get("b", None) is None
    assert spec.get(("action", "b"), 4) == 4
    assert spec.pop(("inner", "b"), 4) == 4


def test_a_missing_entry_is_named() -> None:
    spec = spec_of()
    value = spec.rand()
    del value["inner", "deep", "bits"]
    for missing, name in ((value, "bits"), ({"action": torch.zeros(2)}, "inner")):
        for ask in (spec.is_in, spec.contains, spec.project, spec.assert_is_in):
            with pytest.raises(KeyError, match=f"no entry .*'{name}'"):
                ask(missing)
        assert missing not in spec
    assert Composite(a=None).is_in({})
    assert not Choice([Composite(a=Unbounded(())), Composite(b=Unbounded(()))]).is_in({"c": torch.zeros(())})


def test_composites_share_no_state() -> None:
    before = dict(vars(Composite))
    one = Composite(device="cpu").lock_()
    other = Composite()
    assert (other.is_locked, other.device, one.is_locked) == (False, None, True)
    assert dict(vars(Composite)) == before


def test_membership_looks_at_all_entries() -> None:
    spec = spec_of((2,))
    value = spec.rand((5,))
    assert spec.is_in(value)
    assert value in spec
    assert "action" in spec
    assert ("inner", "number") in spec
    assert "else" not in spec
    assert spec.is_in(value.set("more", torch.zeros(5, 2)))
    assert not spec.is_in(value.clone().set("action", torch.full((5, 2, 2), 3.0)))
    assert not spec.is_in(value.clone().set("inner", torch.zeros(5, 2)))
    assert not spec.is_in(torch.zeros(2))


def test_entries_that_are_none_are_skipped() -> None:
    spec = Composite(a=Categorical(2), b=None)
    assert list(spec.rand().keys()) == ["a"]
    assert spec.is_in({"a": torch.tensor(1), "b": "anything"})
    assert spec.cardinality() == 2
    assert spec.encode({"a": 1, "b": 3})["b"] == 3
    assert spec.to_numpy({"b": torch.tensor(3)})["b"] == 3


def test_projecting_changes_all_entries_in_place_or_none() -> None:
    spec = spec_of()
    value = TensorDict({"action": torch.tensor([0.5, 9.0]), "inner": {"number": torch.tensor(9)}})
    with pytest.raises(KeyError, match=r"inner.*deep"):
        spec.project(value)
    assert value["action"].tolist() == [0.5, 9.0]
    value["inner", "deep"] = {"bits": torch.tensor([0, 1, 1], dtype=torch.int8)}
    kept = value["inner", "deep", "bits"]
    assert spec.project(value) is value
    assert spec.is_in(value)
    assert (value["action"].tolist(), value["inner", "number"].item()) == ([0.5, 1.0], 3)
    assert value["inner", "deep", "bits"] is kept
    plain = {"action": torch.tensor([0.5, 9.0])}
    assert Composite(action=Bounded(-1, 1, (2,))).project(plain)["action"].tolist() == [0.5, 1.0]
    with pytest.raises(SpecTypeError, match="tensordict"):
        spec.project(torch.zeros(2))


def test_composites_encode_dicts() -> None:
    spec = spec_of()
    found = spec.encode({"action": [0, 1], "inner": {"number": 3}})
    assert isinstance(found, TensorDict)
    assert (found["action"].dtype, found["inner", "number"].dtype) == (torch.float32, torch.int64)
    with pytest.raises(KeyError, match="'other'"):
        spec.encode({"other": 1})
    with pytest.raises(RuntimeError, match="'action' is None"):
        spec.encode({"action": None})
    with pytest.raises(TypeError, match="cannot encode a list"):
        spec.encode([1, 2])


def test_the_type_check_names_the_entry() -> None:
    spec = spec_of()
    spec.type_check(spec.rand())
    spec.type_check(torch.tensor(1), ("inner", "number"))
    with pytest.raises(TypeError, match=r"'number' is of type torch\.float32"):
        spec.type_check(spec.rand().set(("inner", "number"), torch.tensor(1.0)))
    with pytest.raises(KeyError, match="'inner'"):
        spec.type_check({"action": torch.zeros(2)})
    with pytest.raises(TypeError, match="expected a tensordict"):
        spec.type_check(torch.zeros(2))


def test_values_may_be_a_tensorclass() -> None:
    spec = Composite(number=Categorical(4), data_cls=Reading)
    drawn = spec.rand((3,))
    assert isinstance(drawn, Reading)
    assert drawn.batch_size == (3,)
    assert spec.is_in(drawn)
    assert not spec.is_in(TensorDict(number=drawn.number, batch_size=[3]))
    assert spec != Composite(number=Categorical(4))
    assert Composite(number=Categorical(4)).is_in(drawn)


def test_composites_count_and_list_all_combinations() -> None:
    spec = Composite(a=Categorical(2), b={"c": MultiCategorical([2, 3])})
    listed = spec.enumerate()
    assert spec.cardinality() == len(listed) == 12
    rows = {(int(a), *c) for a, c in zip(listed["a"], listed["b", "c"].tolist(), strict=True)}
    assert len(rows) == 12
    assert spec.is_in(listed)
    with pytest.raises(NotImplementedError):
        Composite(a=Unbounded()).enumerate()


@each(("method", "number"), [("zeros_update", 0), ("ones_update", 1), ("rand_update", None)])
def test_updating_a_tensordict(method: str, number: int | None) -> None:
    spec = Composite(a=Categorical(9, (2,)), shape=(2,))
    value = TensorDict({"a": torch.full((5, 2), 100), "b": torch.ones(5, 2)}, [5, 2])
    assert getattr(spec, method)(value) is value
    assert spec.is_in(value)
    assert (value["b"] == 1).all()
    assert number is None or (value["a"] == number).all()
    with pytest.raises(RuntimeError, match=r"\[5\]"):
        getattr(spec, method)(TensorDict({}, [5]))


def test_a_failed_update_changes_nothing() -> None:
    spec = spec_of()
    kept = spec.clone()
    with pytest.raises(TypeError, match="'bad'"):
        spec.update({"inner": {"number": Categorical(9)}, "new": Categorical(2), "bad": 3})
    assert spec == kept
    spec.update({"inner": {"number": Categorical(9)}, "new": Categorical(2)})
    assert spec["inner", "number"].n == 9
    assert ("inner", "deep", "bits") in spec
    spec.update(Composite(new=Categorical(5)))
    assert spec["new"].n == 5


@each(
    "change",
    [
        lambda spec: spec.set("b", None),
        lambda spec: spec.pop("action"),
        lambda spec: spec.update({"b": None}),
        lambda spec: spec["inner"].set("b", None),
        lambda spec: spec.pop(("inner", "number")),
        lambda spec: spec.separates("action"),
        lambda spec: spec.clear_device_(),
        lambda spec: spec.make_neg_dim(0),
        lambda spec: setattr(spec, "shape", ()),
        lambda spec: setattr(spec, "device", "meta"),
    ],
)
def test_a_locked_composite_refuses_changes(change: Callable[[Composite], Any]) -> None:
    spec = spec_of((2,)).lock_()
    kept = spec.clone()
    with pytest.raises(RuntimeError, match="locked"):
        change(spec)
    assert spec == kept
    assert (spec.is_locked, spec.locked, spec["inner", "deep"].is_locked, kept.is_locked) == (True, True, True, False)
    assert not spec.unlock_().is_locked
    spec.set("b", None)
    assert pickle.loads(pickle.dumps(spec.lock_())).is_locked


def test_composites_are_locked_at_one_level() -> None:
    spec = spec_of((2,)).lock_(recurse=False)
    with pytest.raises(RuntimeError, match="locked"):
        spec.set("new", None)
    assert (spec.is_locked, spec["inner"].is_locked) == (True, False)
    assert spec["inner"].set("new", None)["new"] is None
    spec.lock_().unlock_(recurse=False)
    assert (spec.is_locked, spec["inner"].is_locked) == (False, True)


def test_nested_entries_are_written_below_a_lock_of_one_level() -> None:
    spec = Composite(a=Composite(x=Unbounded(())), b=Composite()).lock_(recurse=False)
    spec["a", "x"] = Categorical(3)
    spec["a", "new"] = Unbounded(())
    spec.update({"a": {"x": Categorical(4)}})
    assert (spec["a", "x"], list(spec["a"])) == (Categorical(4), ["x", "new"])
    assert spec.pop(("a", "new")) == Unbounded(())
    for change in (lambda: spec.set(("c", "x"), None), lambda: spec.set("a", None), lambda: spec.update({"c": None})):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    assert not spec["a"].lock_().unlock_().is_locked
    assert list(spec) == ["a", "b"]


@each("recurse", [None, True, False])
@each("name", ["a", ("a", "b")])
def test_composites_that_were_locked_together_are_unlocked_together(recurse: bool | None, name: Any) -> None:
    root = Composite(a=Composite(b=Composite(x=Unbounded(()))))
    for spec in (root.lock_(), pickle.loads(pickle.dumps(root)), copy.deepcopy(root)):
        with pytest.raises(RuntimeError, match="while the outer one that locked it is locked"):
            spec[name].unlock_(recurse)
        assert (spec.is_locked, spec["a", "b"].is_locked) == (True, True)
        assert spec.unlock_(recurse=False)[name].is_locked
        spec["a"].unlock_()
        assert not spec[name].is_locked
        assert not spec.lock_().unlock_()["a", "b"].is_locked
    for spec in (root.lock_().clone(), root.expand(3), root.to("cpu")):
        assert (spec.is_locked, spec["a", "b"].is_locked, spec["a"].unlock_().is_locked) == (False, False, False)


def test_two_roots_lock_what_they_share() -> None:
    inner = Composite(x=Unbounded(()))
    roots = [Composite(a=inner), Composite(b=Composite(c=inner))]
    for root in roots:
        root.lock_()
    for root in roots:
        with pytest.raises(RuntimeError, match="locked"):
            root.unlock_()
        assert [inner.is_locked, *(one.is_locked for one in roots)] == [True, True, True]
    del root
    roots.pop()
    gc.collect()
    roots[0].unlock_()
    assert not inner.is_locked
    apart = Composite(a=inner).lock_(recurse=False)
    assert (inner.lock_().unlock_().is_locked, apart.is_locked) == (False, True)
    other = Composite(a=inner)
    other.lock_().unlock_(recurse=False).pop("a")
    other.lock_()
    assert not inner.unlock_().is_locked


def test_entries_are_separated() -> None:
    spec = spec_of()
    apart = spec.separates("action", ("inner", "number"), "absent")
    assert list(apart.keys(True, True)) == ["action", ("inner", "number")]
    assert list(spec.keys(True, True)) == [("inner", "deep", "bits")]
    assert spec.separates("absent", default=Categorical(2))["absent"].n == 2


def test_composites_are_empty_without_entries() -> None:
    assert Composite().is_empty()
    assert not Composite(a=Composite()).is_empty()
    assert Composite(a=Composite(b=Composite())).is_empty(recurse=True)
    assert not Composite(a=Composite(b=None)).is_empty(recurse=True)
    assert spec_of((2,)).empty() == Composite(shape=(2,))
    assert Composite()


def test_names_of_dimensions_follow_the_shape() -> None:
    spec = Composite(a=Unbounded((3, 1, 2)), shape=(3, 1), names=["time", None])
    assert spec.names == ["time", None]
    assert spec.zero((4,)).names == [None, "time", None]
    assert spec.unsqueeze(0).names == [None, "time", None]
    assert spec.squeeze(1).names == ["time"]
    assert spec.expand(2, 3, 1).names == [None, "time", None]
    assert spec[:, 0].names == ["time"]
    assert spec[0].names == [None]
    assert spec[[0, 1]].names == [None, None]
    assert spec.refine_names(..., "batch").names == ["time", "batch"]
    for error in (ValueError, RuntimeError):
        for names in (("other", ...), (None, "batch")):
            with pytest.raises(error, match="renamed"):
                spec.refine_names(*names)
    with pytest.raises(ValueError, match="2 dimensions"):
        spec.refine_names("time")
    with pytest.raises(ValueError, match="names has 1"):
        spec.names = ["time"]


def test_nested_entries_get_the_names() -> None:
    inner = Composite(m=Composite(shape=(3, 4)), x=Unbounded((3, 4)), shape=(3, 4), names=["a", "b"])
    spec = Composite(n=inner, shape=(3,), names=["time"])
    assert (spec["n"].names, spec["n", "m"].names) == (["time", None], ["time", None])
    assert spec.rand()["n"].names == ["time", None]
    spec["later"] = Composite(shape=(3, 4), names=["a", "b"])
    assert spec["later"].names == ["a", "b"]
    assert spec._has_names()
    spec._erase_names()
    assert (spec._has_names(), spec.names, spec["n"].names) == (False, [None], ["time", None])
    spec.refine_names("step")
    assert (spec["n"].names, spec["later"].names) == (["step", None], ["step", None])


@each("name", ["shape", "device", "dtype", "space"])
def test_names_of_properties_are_reserved(name: str) -> None:
    spec = Composite(a=Composite(b=Unbounded(())))
    changes: list[Callable[[], Any]] = [
        lambda: spec.set(name, None), lambda: spec.__setitem__(name, Unbounded(())), lambda: spec.__setitem__(name, 5),
        lambda: spec.__setitem__(("a", name), Unbounded(())), lambda: Composite({name: Unbounded(())}),
        lambda: spec[name], lambda: spec.get(name), lambda: spec["a", name],
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(AttributeError, match=name):
            change()
    for error in (ValueError, KeyError):
        with pytest.raises(error):
            del spec[name]
    assert spec.get(name, 3) == spec.pop(name, 3) == 3
    for allowed in ("domain", "names", "data_cls", "keys"):
        spec[allowed] = Unbounded(())
    assert list(spec) == ["a", "domain", "names", "data_cls", "keys"]


def test_arguments_go_by_the_names_of_torchrl() -> None:
    for spec in (Composite(a=Unbounded((2, 3)), shape=(2,)), torch.stack([Composite(a=Unbounded((3,))), Composite()])):
        spec.set(name="b", spec=Unbounded((2, 3)))
        assert spec.update(dict_or_spec={"c": Unbounded((2, 4))}) is spec
        assert (spec.get(item="b"), spec.get(item="d", default=None)) == (Unbounded((2, 3)), None)
        assert spec.get(item="c").shape == (2, 4)
    for method in ("rand_update", "zeros_update", "ones_update"):
        assert getattr(Composite(a=Unbounded(())), method)(val=TensorDict())["a"].shape == ()


@each("make", [dict, TensorDict])
def test_some_entries_are_type_checked(make: Any) -> None:
    spec = Composite(a=Unbounded((3,)), b=Unbounded((2,)), n=Composite(c=Unbounded(())))
    value = make({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)})
    spec.type_check(value=value, selected_keys=["a"])
    spec.type_check(value, {"a"})
    with pytest.raises(TypeError, match="'b' is of type torch"):
        spec.type_check(value, selected_keys=["a", "b"])
    with pytest.raises(KeyError, match="no entry 'n'"):
        spec.type_check(value, selected_keys=["n"])
    value["n"] = make({"c": torch.zeros(3, dtype=torch.int64)})
    spec.type_check(value, selected_keys=["a"])
    for keys in (["n"], [("n", "c")], None):
        with pytest.raises(TypeError, match="is of type"):
            spec.type_check(value, selected_keys=keys)
    with pytest.raises(KeyError, match="no entry"):
        spec.type_check(value, selected_keys=[("a", "c")])


def test_changes_of_shape_and_dtype_reach_nested_entries() -> None:
    spec = spec_of((2, 3))
    flat = [entry.shape for entry in spec.flatten(0, 1).values(True) if entry]
    assert flat == [(6, 2), (6,), (6,), (6,), (6, 3)]
    assert spec[1, ..., 0]["inner", "deep"].shape == ()
    assert spec[torch.tensor([True, False])]["inner", "deep", "bits"].shape == (1, 3, 3)
    cast = Composite(a=Unbounded(), b={"c": Categorical(3)}).to(torch.float64)
    assert {entry.dtype for entry in cast.values(True, True) if entry} == {torch.float64}
    assert cast.dtype is None
    assert cast.is_in(cast.rand())
    with pytest.raises(TypeError, match="unhashable"):
        hash(cast)


def test_stacking_joins_entry_by_entry() -> None:
    one, other = Composite(a=Bounded(0, 1, (2,)), b=None), Composite(a=Bounded(0, 5, (2,)), b=None)
    stacked: Any = torch.stack([one, other])
    assert stacked["a"].high.tolist() == [[1, 1], [5, 5]]
    assert stacked.unbind(0) == (one, other)
    for entries in ({"a": Bounded(0, 1, (2,))}, {"a": None, "b": None}, {"a": Categorical(2, (2,)), "b": None}):
        lazy: Any = torch.stack([one, Composite(entries)])
        assert (type(lazy), lazy.unbind()) == (StackedComposite, (one, Composite(entries)))


def test_a_size_is_made_unknown_in_all_entries_or_none() -> None:
    spec = spec_of((2,))
    spec.make_neg_dim(0)
    assert {entry.shape[0] for entry in spec.values(True) if entry} == {-1}
    assert spec.is_in(spec_of((7,)).rand())
    uneven = Composite(a=Unbounded((2,)), b=Bounded([0, 1], 5), shape=(2,))
    with pytest.raises(ValueError, match="differ along it"):
        uneven.make_neg_dim(0)
    assert {entry.shape[0] for entry in uneven.values() if entry} == {2}


@each(
    "value",
    [
        {("next", "reward"): torch.zeros(3, 1)},
        {"other": TensorDict({"reward": torch.zeros(3, 1)}, [3], names=["time"])},
        {"next": TensorDict({"reward": torch.zeros(3, 1)})},
        {"other": [1, 2, 3], "next": {"reward": torch.zeros(3, 1)}},
        {"other": TensorDict({"reward": torch.zeros(3, 1)}, [3], device="cpu")},
    ],
)
def test_entries_are_encoded_as_by_the_constructor_of_a_tensordict(value: Any) -> None:
    spec = Composite(other=None, next=Composite(reward=Unbounded((3, 1)), shape=(3,)), shape=(3,))
    found, expected = spec.encode(value), TensorDict(value, [3])
    assert found.batch_size == expected.batch_size
    assert found.names == expected.names
    assert all(entry.batch_size == torch.Size([3]) for entry in found.values() if isinstance(entry, TensorDict))
    assert set(found.keys(True)) == set(expected.keys(True))
    assert (found == expected).all()
    with pytest.raises(RuntimeError, match="batch dimension"):
        Composite(a=Unbounded((3, 1)), shape=(3,)).encode({"a": torch.zeros(2, 1)})


SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def leaf(number: int, shape: tuple[int, ...]) -> TensorSpec:
    """Specs that have no value in common, so that a value in a wrong place is not a member."""
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
def test_stack_values_are_drawn_projected_and_encoded(make: Any, data: st.DataObject) -> None:
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


def agents() -> Any:
    one = Composite(obs=Bounded(0, 1, (3,)), only=Unbounded((1,)), inner=Composite(x=Categorical(3)), hold=None)
    other = Composite(obs=Bounded(0, 1, (4,)), inner=Composite(x=Categorical(5), y=Unbounded(())), hold=None)
    return torch.stack([one, other])


def test_stack_keys_are_those_that_all_members_have() -> None:
    spec = agents()
    assert isinstance(spec, Composite)
    assert list(spec.keys(True, True)) == ["hold", ("inner", "x"), "obs"]
    assert (len(spec), "only" in spec, "obs" in spec, spec["hold"]) == (2, False, True, None)
    assert [key for key, _ in spec.items()] == list(spec) == ["hold", "inner", "obs"]
    assert spec["inner", "x"].shape == (2,)
    assert spec.exclusive_keys == (("only",), (("inner", "y"),))
    assert "'only'" in spec.repr_exclusive_keys()
    assert spec.get("only", 3) == 3
    with pytest.raises(KeyError, match="'hold', 'inner', 'obs' in common"):
        spec["only"]


@each("dim", [0, 1, -1])
def test_a_stack_holds_its_members_themselves(dim: int) -> None:
    members = [Composite({"a": Unbounded((3,)), name: Unbounded((3, 2))}, shape=(3,)) for name in "xy"]
    spec = torch.stack(members, dim)
    lead = [slice(None)] * spec.dim
    assert (spec.dim, spec.stack_dim, len(spec)) == (dim % 2, dim % 2, spec.shape[0])
    assert (spec.expand(4, *spec.shape).dim, len(spec.expand(4, *spec.shape))) == (spec.dim + 1, 4)
    assert all(spec[(*lead, number, ...)] is member for number, member in enumerate(members))
    spec[(*lead, 0)]["new"] = Unbounded((3,))
    assert "new" in members[0]
    other = spec.clone()
    assert other == spec
    del other[(*lead, 0)]["new"]
    assert other != spec
    other = spec.clone()
    members[1]["y"] = Bounded(0, 1, (3, 2))
    other[(*lead, 1)]["y"] = Bounded(0, 1, (3, 2))
    assert other == spec
    other[(*lead, 1)]["y"].space.low += 0.5
    assert other != spec


@each("key", ["obs", "only", ("inner", "x"), ("inner", "y"), "inner"])
def test_an_entry_is_deleted_in_the_members_that_have_it(key: Any) -> None:
    spec: Any = agents()
    owners = [member for member in spec.specs if key in member]
    others = [[other for other in member.keys(True, True) if other != key and other[0] != key] for member in spec.specs]
    del spec[key]
    assert owners
    assert [list(member.keys(True, True)) for member in spec.specs] == others
    with pytest.raises(KeyError, match="not all members have"):
        del spec[key]


def test_stack_entries_are_set_in_all_members() -> None:
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


@each(
    ("key", "entry", "error"),
    [
        ("shape", Unbounded((2,)), ValueError),
        ("x", Unbounded((3,)), ValueError),
        ("x", 3, TypeError),
        (5, Unbounded((2,)), TypeError),
        (("obs", "x"), Unbounded((2,)), ValueError),
    ],
)
def test_stack_entries_that_do_not_fit_change_no_member(key: Any, entry: Any, error: type[Exception]) -> None:
    spec, before = agents(), agents()
    with pytest.raises(error):
        spec[key] = entry
    assert spec == before


def test_a_locked_stack_is_not_changed() -> None:
    spec = agents().lock_()
    assert spec.specs[0].is_locked
    for change in (
        lambda: spec.set("new", None), lambda: spec.pop("obs"), lambda: spec.update({}), lambda: spec["inner"].pop("x"),
        lambda: spec.make_neg_dim(0), spec.clear_device_,
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="locked"):
            change()
    assert spec.unlock_().set("new", None)["new"] is None
    member = agents().lock_(recurse=False).specs[0]
    assert (member.is_locked, member["inner"].is_locked) == (False, False)
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
    arrays = spec.to_numpy(spec.rand())
    assert [array.shape for array in arrays["obs"]] == [(3,), (4,)]
    assert (list(arrays), arrays["inner"]["x"].shape) == (["obs", "inner"], (2,))
    with pytest.raises(AssertionError):
        spec.to_numpy(spec.one() * 3, safe=True)
    for safe in (True, False):
        with pytest.raises(ValueError, match="of a stack of specs"):
            spec.to_numpy([*spec.rand().unbind(0), spec[0].rand()], safe)
    assert spec.encode({"inner": {"x": [2, 4]}})["inner", "x"].tolist() == [2, 4]
    with pytest.raises(TypeError, match="expected"):
        spec.project(3)
    spec.type_check(torch.zeros(2, dtype=torch.int64), ("inner", "x"))
    with pytest.raises(TypeError, match="float32"):
        spec.type_check(torch.zeros(2), ("inner", "x"))
    with pytest.raises(TypeError, match="'x'"):
        spec.type_check([{"obs": torch.zeros(3), "only": torch.zeros(1), "inner": {"x": torch.zeros(())}}, {}])
    assert spec.memoize_encode() is None
    assert spec.encode([{"inner": {"x": 1}}, {"inner": {"x": 4}}])["inner", "x"].tolist() == [1, 4]
    spec.erase_memoize_cache()


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
    with pytest.raises(ValueError, match="follows from its members"):
        spec.shape = (3,)
    with pytest.raises(ValueError, match="names has"):
        spec.names = ["a"]


def stack(*entries: dict[str, Any]) -> Any:
    return torch.stack([Composite(one) for one in entries])


def test_lazy_specs_are_found_at_any_depth() -> None:
    lazy = Stacked(Categorical(2), Categorical(3), dim=0)
    assert contains_lazy_spec(lazy)
    assert contains_lazy_spec(Composite(a=Composite(b=lazy)))
    assert contains_lazy_spec(Choice([lazy, lazy]))
    assert not contains_lazy_spec(Composite(a=Unbounded(()), b=None, c=Composite()))


def test_exclusive_keys_are_found_at_any_depth() -> None:
    deep = Composite(outer=stack({"a": {"b": Unbounded(()), "c": None}}, {"a": {"b": Unbounded(())}}), shape=(2,))
    assert not check_no_exclusive_keys(deep)
    assert check_no_exclusive_keys(deep, recurse=False)
    assert not check_no_exclusive_keys(stack({"a": None}, {}), recurse=False)
    assert check_no_exclusive_keys(stack({"a": Unbounded((2,))}, {"a": Unbounded((3,))}))
    assert check_no_exclusive_keys(Unbounded(()))


@each(
    ("entries", "shapes"),
    [
        (({"a": Unbounded((3, 2))}, {}), [(3, 2), (0, 0)]),
        (({"a": Unbounded((3, 2))}, {"a": Unbounded((3, 5))}, {}), [(3, 2), (3, 5), (3, 0)]),
        (({"a": OneHot(4)}, {}), [(4,), (0,)]),
        (({"a": Unbounded(())}, {}), [(), ()]),
        (({"a": NonTensor((2,), example_data="x")}, {}), [(2,), (2,)]),
    ],
)
def test_consolidation_makes_missing_entries_like_the_others(entries: Any, shapes: list[tuple[int, ...]]) -> None:
    before, whole = stack(*entries), consolidate_spec(stack(*entries))
    assert [member["a"].shape for member in whole.unbind()] == shapes
    assert check_no_exclusive_keys(whole)
    assert whole.is_in(whole.rand())
    assert stack(*entries) == before
    for other in whole.unbind()[1:]:
        assert other["a"] is not whole.unbind()[0]["a"], "members share no entry"


def test_consolidation_makes_nested_entries_whole() -> None:
    spec = stack({"in": {"b": Bounded(0, 1, (3,))}}, {"in": {"c": Categorical(3, (2,))}}, {"d": None})
    whole: Any = consolidate_spec(Composite(outer=spec, shape=(3,)))["outer"]
    assert [member["in", "b"].shape for member in whole.specs] == [(3,), (0,), (0,)]
    assert [member["in", "c"].shape for member in whole.specs] == [(0,), (2,), (0,)]
    assert whole.is_in(whole.rand((2,)))
    assert check_no_exclusive_keys(whole)
    kept = consolidate_spec(Composite(outer=spec, shape=(3,)), recurse_through_entries=False)
    assert not check_no_exclusive_keys(kept)


def test_consolidation_of_entries_without_one_form_is_refused() -> None:
    for other in (Categorical(3, (2,)), Unbounded((2, 2))):
        with pytest.raises(ValueError, match="'a'"):
            consolidate_spec(stack({"a": Unbounded((2,))}, {"a": other}, {}))
