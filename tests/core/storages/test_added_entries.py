"""Tensors that are added to a batch, as `set` adds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.storages.pytree import added


def batch() -> TensorDict:
    return TensorDict({"step": torch.arange(4), "next": TensorDict({"step": torch.arange(4)}, [4])}, [4])


def test_entries_at_the_root_and_below_are_those_that_set_adds() -> None:
    entries = {"index": torch.arange(4), ("next", "done"): torch.ones(4, 1), "step": torch.zeros(4, 2)}
    found, expected = batch(), batch()
    assert added(found, entries)
    for key, value in entries.items():
        expected.set(key, value)
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (batch(), "index", torch.arange(3)),
        (batch(), "index", torch.tensor(3)),
        (batch(), "index", torch.arange(4).numpy()),
        (batch(), ("other", "index"), torch.arange(4)),
        (batch(), ("step", "index"), torch.arange(4)),
        (batch(), ("next", 1), torch.arange(4)),
        (batch(), (), torch.arange(4)),
        (batch().lock_(), "index", torch.arange(4)),
        (TensorDict(batch(), [4], device="meta"), "index", torch.arange(4)),
        (batch().reshape(2, 2), "index", torch.arange(4).reshape(2, 2)),
        ({"step": torch.arange(4)}, "index", torch.arange(4)),
    ],
)
def test_what_set_has_to_do_changes_nothing(data: Any, key: Any, value: Any) -> None:
    before = list(data.keys())
    assert not added(data, {"first": torch.arange(4), key: value})
    assert list(data.keys()) == before
