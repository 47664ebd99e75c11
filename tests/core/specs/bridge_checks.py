"""What works with rbtool's specs in TorchRL and TorchRL's in rbtool, each a function; no check converts a spec.

    python bridge_checks.py rbtool|torchrl [NAME...]

imports that library first, runs all checks or those named, and prints a JSON document: how many ran, and a traceback
for each that failed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule

warnings.simplefilter("ignore")


def leaves(lib: Any) -> dict[str, Any]:
    """One spec of each kind of tensor, made by the classes of a library; the first word names the class."""
    mask = torch.tensor([True, False, True])
    return {
        "Bounded": lib.Bounded(-1, 1, (3,)),
        "BoundedContinuous": lib.Bounded(torch.tensor([0.0, -2.0]), torch.tensor([1.0, 4.0])),
        "BoundedDiscrete": lib.Bounded(0, 5, (2,), dtype=torch.int64),
        "Unbounded": lib.Unbounded((3,)),
        "UnboundedContinuous": lib.Unbounded((), dtype=torch.float64),
        "UnboundedDiscrete": lib.Unbounded((4,), dtype=torch.uint8),
        "OneHot": lib.OneHot(3),
        "OneHot masked": lib.OneHot(3, mask=mask),
        "MultiOneHot": lib.MultiOneHot([2, 3]),
        "Categorical": lib.Categorical(3),
        "Categorical masked": lib.Categorical(3, (2,), mask=mask.expand(2, 3)),
        "Binary": lib.Binary(4),
        "MultiCategorical": lib.MultiCategorical([2, 5]),
    }


EARLY: dict[str, Any] = {}
"""Specs of ours that are older than the import of TorchRL, if there are any."""
if sys.argv[1] == "rbtool":
    library = importlib.import_module("rbtool")
    EARLY = {
        **leaves(library),
        "Composite": library.Composite(a=library.Unbounded((3,))),
        "NonTensor": library.NonTensor(),
    }
    assert not any(name.startswith("torchrl") for name in sys.modules)

import torchrl.collectors as collectors  # noqa: E402
import torchrl.data as data  # noqa: E402
import torchrl.envs as envs  # noqa: E402
import torchrl.modules as modules  # noqa: E402
import torchrl.objectives as objectives  # noqa: E402
from torchrl.data import tensor_specs  # noqa: E402
from torchrl.envs.utils import make_composite_from_td  # noqa: E402

import rbtool as rb  # noqa: E402


def kind_of(lib: Any, name: str) -> Any:
    return getattr(tensor_specs if lib is data else lib, name.split()[0])


def nest(lib: Any, number: int = 3) -> Any:
    return lib.Composite(a=lib.Bounded(0, 1, (3,)), b=lib.Composite(c=lib.OneHot(number)))


def lazy_stack(lib: Any) -> Any:
    """Two composites without a key in common."""
    return torch.stack([lib.Composite(a=lib.Unbounded((3,))), lib.Composite(b=lib.Unbounded((3,)))])


def refuses(call: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def same(one: Any, other: Any) -> bool:
    return (one == other, other == one, one != other, other != one) == (True, True, False, False)


# isinstance -----------------------------------------------------------------------------------------


def leaves_are_instances_both_ways() -> None:
    for one, other in ((rb, data), (data, rb)):
        for name, spec in leaves(one).items():
            assert isinstance(spec, other.TensorSpec), name
            assert isinstance(spec, kind_of(other, name)), name
            assert issubclass(type(spec), kind_of(other, name)), name


def no_leaf_is_an_instance_of_another_kind() -> None:
    for one, other in ((rb, data), (data, rb)):
        for name, spec in leaves(one).items():
            for kind in leaves(rb) | {"Composite": 0, "NonTensor": 0}:
                expected = isinstance(leaves(data)[name], kind_of(data, kind))
                assert isinstance(spec, kind_of(other, kind)) == expected, (name, kind)
    assert not isinstance(torch.zeros(3), rb.TensorSpec | data.TensorSpec)
    assert not issubclass(int, rb.TensorSpec)
    assert not issubclass(int, data.TensorSpec)


def composites_are_instances_both_ways() -> None:
    for one, other in ((rb, data), (data, rb)):
        assert isinstance(one.Composite(), other.Composite)
        assert isinstance(one.Composite(), other.TensorSpec)
        assert isinstance(one.NonTensor(()), other.NonTensor)
        assert isinstance(one.Choice([one.Unbounded(()), one.Unbounded(())]), other.Choice)
        assert isinstance(lazy_stack(one), other.StackedComposite)
        assert isinstance(lazy_stack(one), other.Composite)
        assert isinstance(torch.stack([one.Unbounded((3,)), one.Unbounded((4,))]), other.Stacked)


def boxes_are_instances_both_ways() -> None:
    for one, other in ((rb, tensor_specs), (tensor_specs, rb)):
        assert isinstance(one.Bounded(0, 1, (3,)).space, other.ContinuousBox)
        assert isinstance(one.Unbounded((3,)).space, other.ContinuousBox)
        assert isinstance(one.OneHot(3).space, other.CategoricalBox)
        assert isinstance(one.Categorical(3).space, other.CategoricalBox)
        assert isinstance(one.MultiOneHot([2, 3]).space, other.BoxList)


def older_specs_are_instances_too() -> None:
    for name, spec in EARLY.items():
        assert isinstance(spec, kind_of(data, name)), name
        assert type(spec).__module__.startswith("rbtool."), name


def subclasses_of_users_are_instances() -> None:
    class Ours(rb.Composite):
        pass

    class Theirs(data.Composite):
        pass

    assert isinstance(Ours(), data.Composite)
    assert isinstance(Theirs(), rb.Composite)
    assert not isinstance(rb.Composite(), Theirs)
    assert not isinstance(data.Composite(), Ours)


def types_stay_what_they_are() -> None:
    for name, spec in leaves(rb).items():
        for twin in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.clone(), spec.to(torch.device("cpu"))):
            assert type(twin) is type(spec), name
            assert twin == spec, name
    for name, spec in leaves(data).items():
        assert type(pickle.loads(pickle.dumps(spec))) is type(spec), name
    assert rb.Composite is not data.Composite
    assert type(rb.Bounded(0, 1, (2,)).space).__module__.startswith("rbtool.")


# == -------------------------------------------------------------------------------------------------


def leaves_are_equal_both_ways_to_their_twins_only() -> None:
    for name, ours in leaves(rb).items():
        for other, theirs in leaves(data).items():
            equal = name == other
            assert (ours == theirs, theirs == ours) == (equal, equal), (name, other)
            assert (ours != theirs, theirs != ours) == (not equal, not equal), (name, other)
    for theirs in (data.Bounded(0, 2, (3,)), data.Bounded(2, 1, (3,))):  # ours would refuse the second
        assert rb.Bounded(0, 1, (3,)) != theirs
        assert theirs != rb.Bounded(0, 1, (3,))
    assert rb.Unbounded((3,)) != data.Unbounded((3,), dtype=torch.float64)


def composites_are_equal_both_ways() -> None:
    ours, theirs = nest(rb), nest(data)
    assert same(ours, theirs)
    assert same(theirs, data.Composite(a=ours["a"], b=data.Composite(c=ours["b", "c"])))
    assert same(theirs, rb.Composite(a=theirs["a"], b=data.Composite(c=ours["b", "c"])))
    theirs["b", "c"] = data.OneHot(4)
    assert ours != theirs
    assert theirs != ours


def their_own_equality_is_unchanged() -> None:
    for one, other in zip(leaves(data).values(), leaves(data).values(), strict=True):
        assert one == other
    assert data.Unbounded((3,)) != data.Unbounded((4,))
    assert data.Composite() != 3
    assert rb.Composite() != 3


# Their specs in rbtool ------------------------------------------------------------------------------


def our_composite_takes_their_leaves() -> None:
    for name, theirs in leaves(data).items():
        spec = rb.Composite(x=theirs)
        assert isinstance(spec["x"], kind_of(rb, name)), name
        assert spec["x"] == theirs, name
        assert theirs.is_in(spec.rand()["x"]), name
        assert spec["x"].is_in(theirs.rand()), name


def our_composite_takes_their_nests() -> None:
    theirs = data.Composite(
        a=data.Unbounded((2, 3)), b=data.Composite(c=data.OneHot(3, (2, 3)), shape=(2,)), shape=(2,)
    )
    spec = rb.Composite(x=theirs, shape=(2,))
    assert spec["x"] == theirs
    assert spec["x", "b", "c"].shape == (2, 3)
    assert spec.is_in(spec.rand())
    assert theirs.is_in(spec.rand()["x"])
    assert rb.Composite(theirs, shape=(2,)) == theirs


def our_composite_takes_their_data_without_tensors() -> None:
    theirs = data.Composite(text=data.NonTensor((), example_data="go"), none=None)
    spec = rb.Composite(x=theirs)
    assert spec.rand()["x", "text"] == "go"
    assert spec["x", "none"] is None
    batched = rb.Composite(x=data.NonTensor((3,), example_data="go", batched=True))["x"]
    assert batched.rand().batch_size == (3,)
    choice = rb.Composite(x=data.Choice([data.Bounded(0, 1, (2,)), data.Bounded(5, 6, (2,))]))
    assert choice.is_in(choice.rand())


def our_composite_is_set_and_updated() -> None:
    spec = rb.Composite()
    spec["a", "b"] = data.Unbounded((3,))
    spec.set("c", data.Categorical(4))
    spec.update({"d": data.Binary(2)})
    spec.update(data.Composite(a=data.Composite(e=data.Unbounded(()))))
    assert list(spec.keys(True, True)) == [("a", "b"), ("a", "e"), "c", "d"]
    assert spec.is_in(spec.rand())


def our_composite_refuses_what_does_not_fit() -> None:
    for wrong in (data.Unbounded((3,)), data.OneHot(4)):
        assert refuses(lambda wrong=wrong: rb.Composite(x=wrong, shape=(2,)), ValueError), wrong


def our_composite_keeps_names_and_devices() -> None:
    theirs = data.Composite(a=data.Unbounded((2, 3), device="cpu"), shape=(2,), device="cpu", names=["time"])
    found = rb.Composite(x=theirs)["x"]
    assert (found.names, found.device, found.shape) == (["time"], torch.device("cpu"), (2,))


def unknown_sizes_are_kept() -> None:
    theirs = data.Composite(a=data.Unbounded((-1, 3)), b=data.Categorical(3, (-1,)))
    found = rb.Composite(x=theirs)["x"]
    assert found["a"].shape == (-1, 3)
    assert found["b"].is_in(torch.zeros(7, dtype=torch.int64))
    theirs = data.Bounded(0, 1, (2, 3))
    theirs.make_neg_dim(0)
    found = rb.Composite(x=theirs)["x"]
    assert found.shape == (-1, 3)
    assert found.is_in(torch.rand(7, 3))
    assert found == theirs
    assert found.to_torchrl().shape == (-1, 3)
    found = rb.Composite(x=data.Categorical(-1))["x"]
    found.set_provisional_n(3)
    assert found.n == 3


def our_composite_takes_lazy_stacks() -> None:
    spec = rb.Composite(x=lazy_stack(data), shape=())
    assert isinstance(spec["x"], rb.StackedComposite)
    assert list(spec["x"][0].keys()) == ["a"]
    ragged = rb.Composite(x=torch.stack([data.Unbounded((3,)), data.Unbounded((4,))]))
    assert isinstance(ragged["x"], rb.Stacked)
    assert ragged["x"].shape == (2, -1)


def consolidate_spec_takes_theirs() -> None:
    lazy = lazy_stack(data)
    assert rb.contains_lazy_spec(lazy)
    assert not rb.contains_lazy_spec(data.Composite(a=data.Unbounded(())))
    assert not rb.check_no_exclusive_keys(lazy)
    whole = rb.consolidate_spec(lazy)
    assert rb.check_no_exclusive_keys(whole)
    assert sorted(whole.keys()) == ["a", "b"]


def spaces_are_made_of_theirs() -> None:
    space = rb.space_from_spec(data.Composite(a=data.Bounded(-1, 1, (3,)), b=data.Categorical(4)))
    assert space["a"].shape == (3,)
    assert int(space["b"].n) == 4


def our_choice_takes_theirs() -> None:
    choice = rb.Choice([data.Bounded(0, 1, (2,)), rb.Bounded(5, 6, (2,))])
    assert all(choice.is_in(choice.rand()) for _ in range(4))


# torch functions ------------------------------------------------------------------------------------


def equal_leaves_of_both_are_stacked() -> None:
    for (name, ours), theirs in zip(leaves(rb).items(), leaves(data).values(), strict=True):
        for specs in ([ours, theirs], [theirs, ours]):
            stacked = torch.stack(specs)
            assert stacked.shape == (2, *ours.shape), name
            assert stacked.is_in(stacked.rand()), name
            assert isinstance(stacked, kind_of(data, name))
            assert isinstance(stacked, kind_of(rb, name))


def different_leaves_of_both_are_stacked() -> None:
    for specs in ((rb.Unbounded((3,)), data.Unbounded((4,))), (data.Unbounded((3,)), rb.Unbounded((4,)))):
        stacked = torch.stack(specs, 0)
        assert stacked.shape == (2, -1)
        assert stacked[1].shape == (4,)
    assert torch.stack([data.Bounded(0, 1, (2,)), rb.Bounded(0, 2, (2,))], -1).shape == (2, 2)


def composites_of_both_are_stacked() -> None:
    ours, theirs = rb.Composite(a=rb.Unbounded((3,))), data.Composite(a=data.Unbounded((3,)))
    for specs in ([ours, theirs], [theirs, ours]):
        stacked = torch.stack(specs)
        assert stacked.shape == (2,)
        assert stacked["a"].shape == (2, 3)
    other = data.Composite(a=data.Unbounded((3,)), b=rb.OneHot(2))
    for specs in ([ours, other], [other, ours]):
        assert isinstance(torch.stack(specs), data.StackedComposite)


def composites_that_hold_ours_are_stacked() -> None:
    specs = [data.Composite(a=rb.Bounded(0, 1, (3,))), data.Composite(a=data.Bounded(0, 1, (3,)))]
    assert torch.stack(specs)["a"].shape == (2, 3)
    lazy = torch.stack([*specs, data.Composite(a=rb.Bounded(0, 1, (4,)))])
    assert lazy["a"].shape == (3, -1)
    assert lazy[2]["a"].shape == (4,)


def their_own_stacks_are_unchanged() -> None:
    for name, spec in leaves(data).items():
        stacked = torch.stack([spec, spec.clone()])
        assert type(stacked) is type(spec), name
        assert stacked.shape == (2, *spec.shape), name


def other_torch_functions_take_both() -> None:
    for lib in (rb, data):
        spec = lib.Composite(a=rb.Unbounded((2, 3)), shape=(2,))
        assert torch.unsqueeze(spec, 0)["a"].shape == (1, 2, 3)
        assert torch.squeeze(torch.unsqueeze(spec, 0), 0)["a"].shape == (2, 3)
        assert torch.index_select(lib.Unbounded((2, 3)), 0, torch.tensor([0])).shape == (1, 3)


# Our specs in TorchRL's composites ------------------------------------------------------------------


def their_composite_takes_our_leaves() -> None:
    for name, ours in leaves(rb).items():
        spec = data.Composite(x=ours)
        assert isinstance(spec["x"], kind_of(data, name)), name
        value = spec.rand()
        assert spec.is_in(value), name
        assert ours.is_in(value["x"]), name
        assert spec.rand((2,))["x"].shape == (2, *ours.shape), name
        assert spec.zero()["x"].shape == ours.shape, name


def their_composite_takes_our_nests() -> None:
    spec = data.Composite(x=rb.Composite(y=rb.Composite(z=rb.Unbounded((3,)))))
    assert list(spec.keys(True, True)) == [("x", "y", "z")]
    assert spec["x", "y", "z"].shape == (3,)
    spec["x", "w"] = data.OneHot(3)
    spec["x", "y", "v"] = rb.OneHot(3)
    assert spec.is_in(spec.rand())
    assert spec.rand()["x", "w"].shape == (3,)
    del spec["x", "w"]
    assert list(spec["x"].keys()) == ["y"]


def their_composite_takes_our_data_without_tensors() -> None:
    spec = data.Composite(text=rb.NonTensor((), example_data="go"), none=None)
    assert spec.rand()["text"] == "go"
    assert spec.is_in(spec.rand())


def their_composite_changes_shape() -> None:
    spec = data.Composite(a=rb.Bounded(0, 1, (2, 3)), b=rb.Composite(c=rb.OneHot(3, (2, 3)), shape=(2,)), shape=(2,))
    assert spec.expand(4, 2)["b", "c"].shape == (4, 2, 3)
    assert spec[0]["a"].shape == (3,)
    assert spec[0]["b"].shape == ()
    assert spec.unsqueeze(0)["a"].shape == (1, 2, 3)
    assert spec.unsqueeze(0).squeeze(0)["b", "c"].shape == (2, 3)
    assert spec.unbind(0)[1]["b", "c"].shape == (3,)
    assert spec.reshape(1, 2)["a"].shape == (1, 2, 3)


def their_composite_is_copied() -> None:
    spec = data.Composite(dict(nest(rb).items()))
    for twin in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert twin == spec
        assert type(twin["a"]) is type(spec["a"])
        twin["b", "c"] = rb.OneHot(4)
        assert twin != spec


def their_composite_moves() -> None:
    spec = data.Composite(dict(nest(rb).items()))
    assert spec.to("cpu").device == torch.device("cpu")
    assert spec.to(torch.float64)["a"].dtype == torch.float64
    moved = data.Composite(a=rb.Bounded(0, 1, (3,)), b=rb.Composite(c=rb.Unbounded(())), device="cpu")
    assert moved["b"].device == torch.device("cpu")
    assert moved.clear_device_().device is None


def their_composite_is_locked() -> None:
    spec = data.Composite(dict(nest(rb).items()))
    spec.lock_()
    assert spec.is_locked
    assert spec["b"].is_locked
    for change in (lambda: spec.set("d", rb.OneHot(2)), lambda: spec["b"].set("d", rb.OneHot(2))):
        assert refuses(change, RuntimeError)
    spec.unlock_()
    spec["b", "d"] = rb.OneHot(2)
    assert not spec.is_locked
    assert spec["b", "d"].n == 2


def their_composite_projects_and_checks() -> None:
    spec = data.Composite(a=rb.Bounded(0, 1, (3,)), b=rb.Composite(c=rb.Bounded(0, 1, ())))
    value = TensorDict({"a": torch.tensor([3.0, 0.5, -1.0]), "b": {"c": torch.tensor(2.0)}})
    assert not spec.is_in(value)
    projected = spec.project(value)
    assert spec.is_in(projected)
    assert projected["a"].tolist() == [1.0, 0.5, 0.0]
    assert projected["b", "c"] == 1
    spec.type_check(projected)


def their_composite_encodes() -> None:
    spec = data.Composite(dict(nest(rb).items()))
    value = spec.encode({"a": np.array([0.1, 0.2, 0.3], np.float32), "b": {"c": 1}})
    assert value["b", "c"].tolist() == [False, True, False]
    assert value["a"].shape == (3,)
    assert spec.to_numpy(value)["a"].shape == (3,)


def their_utilities_take_ours() -> None:
    lazy = lazy_stack(rb)
    assert data.contains_lazy_spec(lazy)
    assert not data.check_no_exclusive_keys(lazy)
    assert data.check_no_exclusive_keys(data.consolidate_spec(lazy))
    nested = data.Composite(x=lazy)
    assert data.contains_lazy_spec(nested)
    assert not data.check_no_exclusive_keys(nested)


def their_composite_counts_and_lists() -> None:
    spec = data.Composite(a=rb.OneHot(3), b=rb.Categorical(2))
    assert spec.cardinality() == 6
    assert spec.enumerate().shape == (6,)


def to_torchrl_returns_theirs() -> None:
    for (name, ours), theirs in zip(leaves(rb).items(), leaves(data).values(), strict=True):
        made = ours.to_torchrl()
        assert type(made) is type(theirs), name
        assert made == theirs, name
        assert ours == made, name
    spec = rb.Composite(a=rb.Composite(b=rb.OneHot(3, (2, 3)), shape=(2,)), c=None, shape=(2,), names=["time"])
    made = spec.to_torchrl()
    assert type(made) is type(made["a"]) is data.Composite
    assert made.names == ["time"]
    assert made["c"] is None
    assert same(spec, made)
    lazy = lazy_stack(rb)
    assert type(lazy.to_torchrl()) is data.StackedComposite
    assert same(lazy, lazy.to_torchrl())
    assert rb.NonTensor((), example_data="go").to_torchrl().rand().data == "go"


# Environments ---------------------------------------------------------------------------------------


def make_env(action: Any, observation: Any = None, *, lib: Any = None, batch: tuple[int, ...] = ()) -> Any:
    """An environment that counts steps and ends at the fifth, with the specs that are given, as they are."""
    lib = lib or rb

    class Counting(envs.EnvBase):
        batch_locked = True

        def __init__(self) -> None:
            super().__init__(device="cpu", batch_size=torch.Size(batch))
            self.observation_spec = observation or lib.Composite(
                observation=lib.Bounded(0, 10, (*batch, 3), device="cpu"), shape=batch
            )
            self.action_spec = action
            self.reward_spec = lib.Unbounded((*batch, 1), device="cpu")
            self.done_spec = lib.Composite(
                done=lib.Categorical(2, (*batch, 1), dtype=torch.bool, device="cpu"),
                terminated=lib.Categorical(2, (*batch, 1), dtype=torch.bool, device="cpu"), shape=batch,
            )  # fmt: skip
            self.count = 0

        def _observed(self) -> dict[str, Any]:
            return dict(self.observation_spec.rand().items())

        def _reset(self, _: Any = None, **__: Any) -> Any:
            self.count = 0
            flags = {key: torch.zeros(*batch, 1, dtype=torch.bool) for key in ("done", "terminated")}
            return TensorDict({**self._observed(), **flags}, batch)

        def _step(self, value: Any) -> Any:
            self.count += 1
            assert self.action_spec.is_in(value["action"])
            flags = {key: torch.full((*batch, 1), self.count >= 5) for key in ("done", "terminated")}
            return TensorDict({**self._observed(), "reward": torch.ones(*batch, 1), **flags}, batch)

        def _set_seed(self, seed: Any) -> None:
            torch.manual_seed(seed or 0)

    return Counting()


@contextlib.contextmanager
def unlocked(env: Any) -> Iterator[None]:
    env.set_spec_lock_(False)
    yield
    env.set_spec_lock_(True)


def actions(lib: Any) -> dict[str, Any]:
    return {
        "one_hot": lib.OneHot(4, device="cpu", dtype=torch.int64), "categorical": lib.Categorical(4, device="cpu"),
        "bounded": lib.Bounded(-1, 1, (2,), device="cpu"),
        "multi_categorical": lib.MultiCategorical([2, 3], device="cpu"),
        "binary": lib.Binary(3, device="cpu"), "multi_one_hot": lib.MultiOneHot([2, 3], device="cpu"),
    }  # fmt: skip


def env_with_actions_of_each_kind() -> None:
    for kind, spec in actions(rb).items():
        env = make_env(spec)
        envs.check_env_specs(env)
        rolled = env.rollout(7)
        assert rolled.shape == (5,), kind
        assert rolled["next", "observation"].shape == (5, 3), kind
        assert env.action_spec == actions(rb)[kind] == actions(data)[kind]


def env_wraps_nothing_twice() -> None:
    env = make_env(actions(rb)["bounded"])
    assert list(env.observation_spec.keys(True)) == ["observation"]
    assert list(env.full_action_spec.keys(True)) == ["action"]
    assert list(env.full_done_spec.keys(True)) == ["done", "terminated"]
    assert list(env.full_reward_spec.keys(True)) == ["reward"]
    assert list(env.specs.keys()) == ["output_spec", "input_spec"]
    expected = make_env(actions(data)["bounded"], lib=data)
    assert same(env.observation_spec, expected.observation_spec)
    assert same(env.specs, expected.specs)
    assert env.fake_tensordict()["next", "observation"].shape == (3,)
    assert env.rand_step(env.reset())["next", "reward"].shape == (1,)


def env_with_nested_specs() -> None:
    spec = rb.Composite(
        agent=rb.Composite(pixels=rb.Unbounded((2, 2), device="cpu"), id=rb.Categorical(3, device="cpu"))
    )
    env = make_env(actions(rb)["one_hot"], spec)
    envs.check_env_specs(env)
    assert env.rollout(3)["agent", "pixels"].shape == (3, 2, 2)


def env_with_nested_action() -> None:
    env = make_env(rb.Composite(agent=rb.Composite(action=rb.OneHot(4, device="cpu"))))
    assert env.action_key == ("agent", "action")
    assert env.full_action_spec["agent", "action"].n == 4
    assert env.rand_action()["agent", "action"].sum() == 1


def env_specs_are_set_again() -> None:
    env = make_env(actions(rb)["one_hot"])
    with unlocked(env):
        env.action_spec = rb.OneHot(6, device="cpu")
        env.observation_spec = env.observation_spec.clone()
        env.reward_spec = env.reward_spec.clone()
        env.full_done_spec = env.full_done_spec.clone()
        env.state_spec = rb.Composite(hidden=rb.Unbounded((2,), device="cpu"))
    assert env.action_spec.n == 6
    assert list(env.observation_spec.keys(True)) == ["observation"]
    assert list(env.state_spec.keys(True)) == ["hidden"]
    assert env.fake_tensordict()["hidden"].shape == (2,)


def env_with_a_batch() -> None:
    env = make_env(rb.Bounded(-1, 1, (2, 4), device="cpu"), batch=(2,))
    envs.check_env_specs(env)
    assert env.rollout(3)["action"].shape == (2, 3, 4)
    assert env.observation_spec_unbatched["observation"].shape == (3,)
    assert env.action_spec_unbatched.shape == (4,)


def env_specs_go_into_our_composites() -> None:
    env = make_env(actions(data)["bounded"], lib=data)
    spec = rb.Composite(action=env.action_spec, observation=env.observation_spec)
    assert spec["action"] == env.action_spec
    assert spec.is_in(spec.rand())
    ours = make_env(actions(rb)["bounded"])
    assert rb.Composite(ours.specs) == env.specs


def serial_env_of_ours() -> None:
    env = envs.SerialEnv(2, lambda: make_env(actions(rb)["one_hot"]))
    assert env.rollout(3)["action"].shape == (2, 3, 4)
    assert env.action_spec.shape == (2, 4)
    envs.check_env_specs(env)
    env.close()


def serial_env_of_different_specs() -> None:
    def make(size: int) -> Any:
        return make_env(actions(rb)["one_hot"], rb.Composite(seen=rb.Unbounded((size,), device="cpu")))

    env = envs.SerialEnv(2, [lambda: make(2), lambda: make(3)])
    assert env.observation_spec["seen"].shape == (2, -1)


def gym_specs_go_both_ways() -> None:
    env = envs.GymEnv("CartPole-v1", categorical_action_encoding=True)
    assert isinstance(env.action_spec, rb.Categorical)
    assert isinstance(env.observation_spec, rb.Composite)
    assert rb.Composite(action=env.action_spec)["action"].n == 2
    with unlocked(env):
        env.action_spec = rb.Categorical(2, dtype=torch.int64)
    assert env.rollout(3)["action"].shape == (3,)
    env.close()


# Transforms -----------------------------------------------------------------------------------------


def _transformed(*steps: Any, action: str = "bounded", observation: Any = None) -> Any:
    env = envs.TransformedEnv(make_env(actions(rb)[action], observation), envs.Compose(*steps))
    envs.check_env_specs(env)
    assert env.rollout(3).shape == (3,)
    return env


def transforms_keep_specs_of_ours_valid() -> None:
    counted = _transformed(envs.StepCounter(max_steps=4))
    assert "step_count" in counted.observation_spec.keys()  # noqa: SIM118
    assert "truncated" in counted.full_done_spec.keys()  # noqa: SIM118
    assert "episode_reward" in _transformed(envs.RewardSum()).observation_spec.keys()  # noqa: SIM118
    assert "is_init" in _transformed(envs.InitTracker()).observation_spec.keys()  # noqa: SIM118
    scaled = _transformed(envs.ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"]))
    assert float(scaled.observation_spec["observation"].space.high.max()) == 21
    stacked = _transformed(envs.CatFrames(N=2, dim=-1, in_keys=["observation"]))
    assert stacked.observation_spec["observation"].shape == (6,)
    renamed = _transformed(envs.RenameTransform(["observation"], ["seen"]), envs.CatTensors(["seen"], "all"))
    assert renamed.observation_spec["all"].shape == (3,)
    clipped = _transformed(envs.RewardScaling(loc=0.0, scale=2.0), envs.RewardClipping(-1, 1))
    assert isinstance(clipped.reward_spec, rb.TensorSpec)
    assert isinstance(_transformed(envs.ActionDiscretizer(num_intervals=3)).action_spec, rb.TensorSpec)


def transform_that_casts() -> None:
    spec = rb.Composite(observation=rb.Unbounded((3,), dtype=torch.float64, device="cpu"))
    env = _transformed(envs.DoubleToFloat(), observation=spec)
    assert env.observation_spec["observation"].dtype == torch.float32


def transform_that_masks_actions() -> None:
    spec = rb.Composite(
        observation=rb.Unbounded((3,), device="cpu"),
        action_mask=rb.Binary(4, dtype=torch.bool, device="cpu"),
    )

    env = make_env(actions(rb)["categorical"], spec)
    env._observed = lambda: {"observation": torch.zeros(3), "action_mask": torch.tensor([True, False, True, False])}
    masked = envs.TransformedEnv(env, envs.ActionMask())
    assert set(masked.rollout(4)["action"].tolist()) <= {0, 2}


def transform_that_takes_several_actions() -> None:
    for spec in (actions(rb)[kind] for kind in ("bounded", "one_hot", "categorical")):
        env = envs.TransformedEnv(make_env(spec), envs.MultiAction())
        assert env.action_spec.shape == (-1, *spec.shape)
        assert env.rollout(3)["action"].shape == (3, 1, *spec.shape)


def primers_of_ours() -> None:
    primer = envs.TensorDictPrimer(rb.Composite(hidden=rb.Unbounded((4,), device="cpu")), default_value=1.0)
    env = _transformed(primer)
    assert env.reset()["hidden"].tolist() == [1.0] * 4
    assert "hidden" in env.observation_spec.keys()  # noqa: SIM118
    drawn = envs.TensorDictPrimer(primers={"hidden": rb.Unbounded((4,), device="cpu")}, random=True)
    assert _transformed(drawn).rollout(3)["hidden"].shape == (3, 4)
    keywords = envs.TensorDictPrimer(hidden=rb.Bounded(0, 1, (2,), device="cpu"))
    assert _transformed(keywords).reset()["hidden"].shape == (2,)


def primer_in_a_buffer() -> None:
    buffer = rb.ReplayBuffer(storage=rb.LazyTensorStorage(8), batch_size=3)
    buffer.append_transform(envs.TensorDictPrimer(rb.Composite(hidden=rb.Unbounded((3, 4)))))
    buffer.extend(TensorDict({"a": torch.arange(5)}, [5]))
    assert buffer.sample()["a"].shape == (3,)


def transforms_change_ours_as_theirs() -> None:
    def seen(lib: Any) -> Any:
        return lib.Composite(
            pixels=lib.Bounded(0, 255, (8, 8, 3), dtype=torch.uint8, device="cpu"),
            wide=lib.Unbounded((2,), dtype=torch.float64, device="cpu"),
            position=lib.Bounded(-3, 3, (4,), device="cpu"),
            kind=lib.Categorical(5, (2,), device="cpu"),
        )

    keys = {"in_keys": ["position"]}
    for make in (
        lambda: envs.DTypeCastTransform(torch.float64, torch.float32, in_keys=["wide"]),
        lambda: envs.ObservationNorm(loc=1.0, scale=2.0, in_keys=["wide", "position"]),
        lambda: envs.UnsqueezeTransform(dim=-1, in_keys=["position", "wide"]),
        lambda: envs.Compose(envs.UnsqueezeTransform(dim=-1, **keys), envs.SqueezeTransform(dim=-1, **keys)),
        lambda: envs.FlattenObservation(0, 1, in_keys=["pixels"], allow_positive_dim=True),
        lambda: envs.PermuteTransform([-1, -3, -2], in_keys=["pixels"]),
        lambda: envs.ClipTransform(low=-1.0, high=1.0, in_keys=["position", "wide"]),
        lambda: envs.CatFrames(N=3, dim=-1, **keys),
        lambda: envs.TimeMaxPool(T=3, **keys),
        lambda: envs.VecNormV2(**keys),
        lambda: envs.UnaryTransform(out_keys=["twice"], fn=lambda value: value * 2, **keys),
        lambda: envs.ExcludeTransform("position"),
        lambda: envs.SelectTransform("position"),
        envs.RemoveEmptySpecs,
        envs.ActionScaling,
        envs.TrajCounter,
        lambda: envs.TargetReturn(5.0),
        lambda: envs.BinarizeReward(),
    ):
        ours, theirs = (
            envs.TransformedEnv(make_env(actions(lib)["bounded"], seen(lib), lib=lib), make()) for lib in (rb, data)
        )
        assert same(ours.specs, theirs.specs), type(ours.transform)
        envs.check_env_specs(ours)


# Modules and losses ---------------------------------------------------------------------------------


def q_value_module_of_every_space() -> None:
    for kind in ("one_hot", "categorical"):
        module = modules.QValueModule(spec=actions(rb)[kind])
        action, values, chosen = module(torch.tensor([0.0, 3.0, 1.0, 2.0]))
        assert actions(rb)[kind].is_in(action)
        assert values.shape == (4,)
        assert chosen.shape == (1,)
    module = modules.QValueModule(action_space="one_hot", spec=rb.Composite(action=actions(rb)["one_hot"]))
    assert module(torch.tensor([0.0, 3.0, 1.0, 2.0]))[0].tolist() == [0, 1, 0, 0]


def _q_actor(kind: str) -> Any:
    torch.manual_seed(0)
    return modules.QValueActor(torch.nn.Linear(3, 4), in_keys=["observation"], spec=actions(rb)[kind])


def q_value_actor_of_every_space() -> None:
    for kind, shape in (("one_hot", (5, 4)), ("categorical", (5,))):
        found = _q_actor(kind)(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        assert found["action"].shape == shape
        assert actions(rb)[kind].is_in(found["action"])


def q_value_actor_in_an_env() -> None:
    env = make_env(actions(rb)["one_hot"])
    actor = modules.QValueActor(torch.nn.Linear(3, 4), in_keys=["observation"], spec=env.action_spec)
    assert env.rollout(4, actor)["chosen_action_value"].shape == (4, 1)


def dqn_loss_of_every_space() -> None:
    spaces = actions(rb)
    for kind, space in (("one_hot", spaces["one_hot"]), ("categorical", spaces["categorical"]), ("one_hot", None)):
        loss = objectives.DQNLoss(_q_actor(kind), action_space=space, delay_value=True)
        loss.make_value_estimator(gamma=0.9)
        found = loss(make_env(actions(rb)[kind]).rollout(4))["loss"]
        found.backward()
        assert found.isfinite(), (kind, space)


def policies_act_within_our_specs() -> None:
    one_hot, bounded, narrow = rb.OneHot(4), rb.Bounded(-1, 1, (2,)), rb.Bounded(-0.1, 0.1, (2,))
    given = TensorDict({"action": torch.zeros(9, 2), "is_init": torch.ones(9, 1, dtype=torch.bool)}, [9])
    greedy = modules.EGreedyModule(one_hot, eps_init=1.0, eps_end=1.0)
    assert one_hot.is_in(greedy(TensorDict({"action": torch.zeros(9, 4, dtype=torch.bool)}, [9]))["action"])
    assert one_hot.is_in(modules.RandomPolicy(one_hot)(TensorDict({}, []))["action"])
    noise = modules.AdditiveGaussianModule(bounded, sigma_init=5.0, sigma_end=5.0)(given.clone())["action"]
    assert noise.any()
    assert bounded.is_in(noise)
    assert bounded.is_in(modules.OrnsteinUhlenbeckProcessModule(bounded)(given.clone())["action"])
    actor = modules.Actor(torch.nn.Linear(3, 2), in_keys=["observation"], spec=narrow, safe=True)
    assert narrow.is_in(actor(TensorDict({"observation": torch.full((5, 3), 9.0)}, [5]))["action"])


def _tanh_actor(spec: Any, **options: Any) -> Any:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    net = TensorDictModule(layers, ["observation"], ["loc", "scale"])
    return modules.ProbabilisticActor(
        net, in_keys=["loc", "scale"], spec=spec, distribution_class=modules.TanhNormal, **options
    )


def probabilistic_actors() -> None:
    spec = rb.Bounded(-1, 1, (2,))
    actor = _tanh_actor(spec, distribution_kwargs={"low": spec.space.low, "high": spec.space.high})
    found = actor(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
    assert spec.is_in(found["action"])
    assert isinstance(actor.spec, data.Composite)


def sac_loss() -> None:
    spec = rb.Bounded(-1, 1, (2,))
    value = modules.ValueOperator(modules.MLP(in_features=5, out_features=1), in_keys=["observation", "action"])
    loss = objectives.SACLoss(_tanh_actor(spec), value, action_spec=spec)
    loss.make_value_estimator(gamma=0.9)
    found = loss(make_env(actions(rb)["bounded"]).rollout(4))
    assert float(loss.target_entropy) == -2
    assert found["loss_actor"].isfinite()


# Collectors and buffers -----------------------------------------------------------------------------


Collector = getattr(collectors, "Collector", None) or collectors.SyncDataCollector


def collector_with_an_env_of_ours() -> None:

    env = make_env(actions(rb)["one_hot"])
    actor = modules.QValueActor(torch.nn.Linear(3, 4), in_keys=["observation"], spec=env.action_spec)
    collector = Collector(env, actor, frames_per_batch=8, total_frames=16)
    assert [batch.shape for batch in collector] == [(8,), (8,)]
    collector.shutdown()


def collector_into_a_buffer_of_ours() -> None:

    buffer = rb.TensorDictReplayBuffer(storage=rb.LazyTensorStorage(50), batch_size=4)
    collector = Collector(make_env(actions(rb)["bounded"]), frames_per_batch=8, total_frames=16, replay_buffer=buffer)
    for _ in collector:
        pass
    collector.shutdown()
    assert len(buffer) == 16
    assert rb.Bounded(-1, 1, (2,)).is_in(buffer.sample()["action"])


def specs_of_rollouts_are_equal() -> None:
    rolled = make_env(actions(rb)["bounded"]).rollout(2)
    assert same(rb.make_composite_from_td(rolled), make_composite_from_td(rolled))


# ----------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "standins"))
    from peer_checks import run_checks

    HELPERS = {"actions", "kind_of", "lazy_stack", "leaves", "make_env", "nest", "refuses", "same", "unlocked"}

    run_checks(dict(globals()), HELPERS, sys.argv[2:])
