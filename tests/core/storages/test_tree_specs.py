"""Tensordicts that tree specs make, without the checks of the constructor."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.storages import pytree
from rbtool.core.storages.pytree import tree_spec_of


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


def test_tensordict_is_made_of_what_is_known_here() -> None:
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
