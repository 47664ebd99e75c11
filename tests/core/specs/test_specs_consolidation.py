"""Lazy stacks made whole, specs of tensordicts, and the former names of specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

import rbtool
from rbtool.core.specs import interop
from rbtool.core.specs.base import Stacked
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Categorical, OneHot
from rbtool.core.specs.composite import (
    Composite,
    StackedComposite,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
)
from rbtool.core.specs.interop import make_composite_from_td
from rbtool.core.specs.non_tensor import Choice, NonTensor


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


@pytest.mark.parametrize(
    ("entries", "shapes"),
    [
        (({"a": Unbounded((3, 2))}, {}), [(3, 2), (0, 0)]),
        (({"a": Unbounded((3, 2))}, {"a": Unbounded((3, 5))}, {}), [(3, 2), (3, 5), (3, 0)]),
        (({"a": OneHot(4)}, {}), [(4,), (0,)]),
        (({"a": Unbounded(())}, {}), [(), ()]),
        (({"a": NonTensor((2,), example_data="x")}, {}), [(2,), (2,)]),
    ],
)
def test_missing_entries_are_made_of_those_of_the_others(entries: Any, shapes: list[tuple[int, ...]]) -> None:
    before, whole = stack(*entries), consolidate_spec(stack(*entries))
    assert [member["a"].shape for member in whole.unbind()] == shapes
    assert check_no_exclusive_keys(whole)
    assert whole.is_in(whole.rand())
    assert stack(*entries) == before


def test_nested_entries_are_made_whole() -> None:
    spec = stack({"in": {"b": Bounded(0, 1, (3,))}}, {"in": {"c": Categorical(3, (2,))}}, {"d": None})
    whole: Any = consolidate_spec(Composite(outer=spec, shape=(3,)))["outer"]
    assert [member["in", "b"].shape for member in whole.specs] == [(3,), (0,), (0,)]
    assert [member["in", "c"].shape for member in whole.specs] == [(0,), (2,), (0,)]
    assert whole.is_in(whole.rand((2,)))
    assert check_no_exclusive_keys(whole)
    kept = consolidate_spec(Composite(outer=spec, shape=(3,)), recurse_through_entries=False)
    assert not check_no_exclusive_keys(kept)


def test_entries_without_one_form_are_refused() -> None:
    for other in (Categorical(3, (2,)), Unbounded((2, 2))):
        with pytest.raises(ValueError, match="'a'"):
            consolidate_spec(stack({"a": Unbounded((2,))}, {"a": other}, {}))


@tensorclass
class Step:
    x: torch.Tensor


def test_a_tensordict_is_a_member_of_its_spec() -> None:
    inner = TensorDict({"b": torch.zeros(4, 2, dtype=torch.uint8)}, [4, 2])
    step: Any = Step(x=torch.zeros(4, 5), batch_size=[4])  # type: ignore[call-arg]
    entries = {"a": torch.zeros(4, 3), "in": inner, "step": step, "text": NonTensorStack(*"abcd")}
    td = TensorDict(entries, [4])
    spec = make_composite_from_td(td)
    assert spec.is_in(td)
    assert spec.is_in(spec.rand())
    assert (spec["in"].shape, spec["in", "b"].dtype) == ((4, 2), torch.uint8)
    assert (spec["text"].example_data, spec["step"].data_cls, spec.data_cls) == ("a", Step, TensorDict)


def test_shapes_of_a_tensordict() -> None:
    td = TensorDict({"a": torch.zeros(()), "b": torch.zeros(3), "c": torch.zeros(2, 3)}, [])
    assert [entry.shape for entry in make_composite_from_td(td).values() if entry] == [(1,), (3,), (2, 3)]
    free = make_composite_from_td(td, unsqueeze_null_shapes=False, dynamic_shape=True)
    assert [entry.shape for entry in free.values() if entry] == [(), (-1,), (2, -1)]
    batched = make_composite_from_td(TensorDict({"a": torch.zeros(5)}, [5]), dynamic_shape=True)
    assert batched["a"].shape == (5,)


@pytest.mark.parametrize("function", [make_composite_from_td, consolidate_spec])
def test_what_is_no_nest_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="is a dict, expected a"):
        function({"a": 1})


def test_a_lazy_stack_has_a_lazy_spec() -> None:
    td = LazyStackedTensorDict.lazy_stack([TensorDict({"a": torch.zeros(n)}, []) for n in (2, 3)], 0)
    spec = make_composite_from_td(td)
    assert type(spec) is StackedComposite
    assert spec.is_in(td)


FORMER = [name for name, found in vars(interop).items() if isinstance(found, interop.FormerName)]


@pytest.mark.parametrize("name", FORMER)
def test_former_names_are_the_classes_of_today_and_warn(name: str) -> None:
    former = getattr(rbtool, name)
    arguments: Any = {
        "BoundedTensorSpec": (0, 1, (2,)), "DiscreteTensorSpec": (3,), "OneHotDiscreteTensorSpec": (3,),
        "MultiDiscreteTensorSpec": ([2, 3],), "MultiOneHotDiscreteTensorSpec": ([2, 3],),
        "BinaryDiscreteTensorSpec": (3,),
    }.get(name, ())  # fmt: skip
    named: Any = {"LazyStackedTensorSpec": {"dim": 0}, "LazyStackedCompositeSpec": {"dim": 0}}.get(name, {})
    if named:
        arguments = (Composite() if "Composite" in name else Unbounded(()),)
    with pytest.warns(DeprecationWarning, match=f"{name} is now called {former.now.__name__}"):
        spec = former(*arguments, **named)
    assert isinstance(spec, former.now)
    assert isinstance(spec, former)
    assert issubclass(former.now, former)


def test_all_twelve_former_names_are_there() -> None:
    assert len(FORMER) == 12


@pytest.mark.parametrize("ask", [contains_lazy_spec, check_no_exclusive_keys, consolidate_spec])
def test_what_is_no_spec_is_refused(ask: Any) -> None:
    with pytest.raises(TypeError, match="the spec is a dict, expected a"):
        ask({})
