"""Tensordicts that tree specs make, and states of classes that no module has, because functions define them."""

from __future__ import annotations

import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Interpreter
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.errors import SchemaError
from rbtool.core.storages import pytree
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.pytree import tree_spec_of
from rbtool.core.storages.tensor import TensorStorage


@pytest.fixture(params=[True, False], ids=["directly", "by tensordict"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(pytree, "_ENTRIES", None)


def rows(device: str | None = None) -> TensorDict:
    """Rows whose tensors come before, between and after nests."""
    inner = TensorDict({"reward": torch.rand(4, 2), "info": {"id": torch.arange(4)}}, [4], device=device)
    more = TensorDict({"frames": torch.rand(4, 2, 3)}, [4, 2], device=device)
    entries = {"action": torch.rand(4), "next": inner, "step": torch.arange(4), "more": more, "done": torch.ones(4)}
    return TensorDict(entries, [4], device=device)


def inside(data: TensorDict) -> dict[str, Any]:
    """Return all that a tensordict is made of."""
    entries = {key: inside(value) if isinstance(value, TensorDict) else value for key, value in data.items()}
    return vars(data) | {"_tensordict": entries}


def test_the_attributes_of_tensordict_are_the_known_ones() -> None:
    assert pytree._ENTRIES is not None


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_tensordict_is_made_as_the_constructor_makes_it(device: str | None) -> None:
    data = rows(device)
    structure = tree_spec_of(data, 1)
    made = structure.unflatten(iter(structure.flatten(data)), data.batch_size)
    assert inside(made) == inside(data)
    assert list(made.keys(True, True)) == list(data.keys(True, True))
    assert type(made._tensordict) is type(data._tensordict)


@pytest.mark.usefixtures("_ways")
def test_a_tensordict_that_was_made_is_used_as_others_are() -> None:
    data = rows()
    structure = tree_spec_of(data, 1)
    made = structure.unflatten(iter(structure.flatten(data)), data.batch_size)
    assert (pickle.loads(pickle.dumps(made)) == data).all()
    assert (torch.stack([made, data])[0] == data[...]).all()
    made.lock_()
    with pytest.raises(RuntimeError):
        made["new"] = torch.zeros(4)
    with made.unlock_():
        made["next", "new"] = torch.zeros(4)
    assert ("next", "new") in made.keys(True)
    assert ("next", "new") not in data.keys(True)


def local_class() -> Any:
    @tensorclass
    class Step:
        action: torch.Tensor

    return Step


def written_out(data: Any) -> Any:
    """Return all that a tensordict is made of, with the values of its tensors."""
    entries = {
        key: written_out(value)
        if type(value) is TensorDict
        else (value.dtype, value.tolist(), value.requires_grad)
        if isinstance(value, torch.Tensor)
        else str(value)
        for key, value in data._tensordict.items()
    }
    return vars(data) | {"_tensordict": entries}


def one(**more: Any) -> TensorDict:
    """A tensordict of one step."""
    return TensorDict({"b": torch.rand(3), "a": {"c": torch.rand(2), "d": {"e": torch.arange(2)}}}, **more)


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize(
    "items",
    [
        [one(), one()],
        [one(device="cpu"), one(device="cpu"), one(device="cpu")],
        [rows(), rows()],
        [one().lock_(), one()],
        [one().update({"b": torch.rand(3, requires_grad=True)}), one()],
        [TensorDict({"a": TensorDict()}), TensorDict({"a": TensorDict()})],
    ],
)
def test_plain_tensordicts_are_stacked_as_torch_stacks_them(items: list[TensorDict]) -> None:
    made, expected = pytree.stacked(items), torch.stack(items)
    assert made is not None
    assert written_out(made) == written_out(expected)
    assert list(made.keys(True, True)) == list(expected.keys(True, True))
    made["a", "new"] = torch.zeros(made.shape)
    assert ("a", "new") not in items[0].keys(True)


@pytest.mark.parametrize(
    "items",
    [
        [one(), one(device="cpu")],
        [one(), TensorDict({"b": torch.rand(3)})],
        [one(), one().update({"b": torch.rand(4)})],
        [one(), one().update({"b": torch.ones(3, dtype=torch.int64)})],
        [one(), one().update({"b": "text"})],
        [one(), one().update({"a": torch.ones(3)})],
        [TensorDict(a=torch.ones(2), batch_size=[2], names=["x"])] * 2,
        [TensorDict(a=torch.ones(2), batch_size=[2]), TensorDict(a=torch.ones(2))],
        [local_class()(torch.ones(3), batch_size=[3])] * 2,
        [LazyStackedTensorDict(one(), one(), stack_dim=0)] * 2,
    ],
)
def test_other_tensordicts_are_left_to_torch(items: list[Any]) -> None:
    assert pytree.stacked(items) is None


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize(
    "data",
    [
        one(),
        one(device="cpu").lock_(),
        rows(),
        one().update({"text": "words", "more": LazyStackedTensorDict(one(), one(), stack_dim=0)}),
        TensorDict(a=torch.ones(2), batch_size=[2], names=["x"]),
        local_class()(torch.ones(3), batch_size=[3]),
        LazyStackedTensorDict(one(), one(), stack_dim=0),
    ],
)
def test_a_shallow_copy_has_the_same_tensors_and_containers_of_its_own(data: Any) -> None:
    made, expected = pytree.shallow_copy(data), data.copy()
    assert type(made) is type(expected)
    assert str(made) == str(expected)
    if type(made) is TensorDict:
        assert written_out(made) == written_out(expected)
    leaves = [(key, data.get(key)) for key in data.keys(True, True) if isinstance(data.get(key), torch.Tensor)]
    if type(data) is not LazyStackedTensorDict:
        assert all(made.get(key) is leaf for key, leaf in leaves if key[0] != "more")
    assert not made.is_locked
    if type(data) is TensorDict and data.batch_dims == 0:
        made["a", "new"] = torch.zeros(1)
        assert ("a", "new") not in data.keys(True)


def filled(kind: Any, data: Any, rows: int) -> TensorStorage:
    storage: TensorStorage = kind(10)
    storage.set(range(rows), data)
    return storage


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("where", ["whole", "in a tensordict", "in a nest"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_the_class_is_that_of_the_receiver(tmp_path: Path, kind: Any, where: str, as_folder: bool) -> None:
    def data(step: Any, rows: int, first: float) -> Any:
        made = step(action=torch.arange(first, first + rows), batch_size=[rows])
        if where == "whole":
            return made
        return TensorDict({"a": {"b": made}}, [rows]) if where == "in a tensordict" else {"a": [torch.ones(rows), made]}

    ours = local_class()
    saved, target = filled(kind, data(local_class(), 4, 5.0), 4), filled(kind, data(ours, 2, 0.0), 2)
    if as_folder:
        saved.dumps(tmp_path / "saved")
        target.loads(tmp_path / "saved")
    else:
        target.load_state_dict(saved.state_dict())
    found = target[:]
    step = found if where == "whole" else found["a", "b"] if where == "in a tensordict" else found["a"][1]
    assert type(step) is ours
    assert step.action.tolist() == [5, 6, 7, 8]


def test_a_named_tuple_is_that_of_the_receiver() -> None:
    kinds: list[Any] = [namedtuple("Step", "action reward") for _ in range(2)]
    saved, target = (filled(LazyTensorStorage, kind(torch.arange(4.0), torch.ones(4)), 4) for kind in kinds)
    state = saved.state_dict()
    state["_structure"]["class"] = "gone:Step"
    target.load_state_dict(state)
    assert type(target[:]) is kinds[1]


OWN = """
import sys
from collections import namedtuple
import torch
from rbtool import LazyTensorStorage
saved, target = LazyTensorStorage(4), LazyTensorStorage(4)
saved.set(range(2), namedtuple("Start", "seed epoch batch")(*torch.ones(3, 2)))
state = saved.state_dict()
state["_structure"]["class"] = "rbtool.core.loading.torch_dataset:Start"
assert "rbtool.core.loading.torch_dataset" not in sys.modules
target.load_state_dict(state)
print(type(target[:]))
"""


def test_a_class_of_rbtool_is_imported(interpreter: Interpreter) -> None:
    done = interpreter.run(OWN)
    assert "torch_dataset.Start" in done.stdout, done.stderr


def test_nests_that_were_saved_under_names_with_dots_find_their_entries() -> None:
    saved = filled(LazyTensorStorage, TensorDict({"a.b": torch.arange(4.0), "c": torch.ones(4)}, [4]), 4)
    target = filled(LazyTensorStorage, TensorDict({"c": torch.zeros(4), "a": {"b": torch.zeros(4)}}, [4]), 4)
    target.load_state_dict(saved.state_dict())
    assert (target[:]["a", "b"].tolist(), target[:]["c"].tolist()) == ([0, 1, 2, 3], [1] * 4)


def test_a_class_that_cannot_be_imported_is_an_error() -> None:
    step = local_class()
    saved = filled(LazyTensorStorage, step(action=torch.ones(4), batch_size=[4]), 4)
    plain = filled(LazyTensorStorage, TensorDict({"action": torch.zeros(4)}, [4]), 4)
    for target in (LazyTensorStorage(10), plain):
        with pytest.raises(SchemaError, match="is not imported"):
            target.load_state_dict(saved.state_dict())
