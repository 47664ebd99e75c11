"""States of tensorclasses and named tuples that no module has, because functions define them."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

from rbtool.core.errors import SchemaError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage


def local_class() -> Any:
    @tensorclass
    class Step:
        action: torch.Tensor

    return Step


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


def test_without_a_receiver_that_has_it_the_class_is_asked_for() -> None:
    step = local_class()
    saved = filled(LazyTensorStorage, step(action=torch.ones(4), batch_size=[4]), 4)
    plain = filled(LazyTensorStorage, TensorDict({"action": torch.zeros(4)}, [4]), 4)
    for target in (LazyTensorStorage(10), plain):
        with pytest.raises(SchemaError, match="is not loaded"):
            target.load_state_dict(saved.state_dict())
