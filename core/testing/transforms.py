"""The test suite for transforms. To run it, subclass `TransformTests` and implement `transform` and `batch`."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import TensorDictBase

from ..transforms.base import Transform


class TransformTests(ABC):
    """The contract of `Transform`, on one batch."""

    @abstractmethod
    def transform(self) -> Transform:
        """Return a new transform; every call must return an equal one."""

    @abstractmethod
    def batch(self) -> TensorDictBase:
        """Return a batch of several steps that the transform and its inverse accept; always with the same values."""

    def seeded(self, seed: int) -> Transform:
        """Return a new transform; if it is random, with a generator seeded by `seed`."""
        transform = self.transform()
        if transform.draws:
            transform.generator = torch.Generator().manual_seed(seed)
        return transform

    def test_forward_does_not_change_the_batch(self) -> None:
        batch = self.batch()
        self.seeded(0).forward(batch)
        _require_equal(batch, self.batch())

    def test_inv_does_not_change_the_data(self) -> None:
        data = self.batch()
        self.seeded(0).inv(data)
        _require_equal(data, self.batch())

    def test_forward_draws_from_its_generator_only(self) -> None:
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            results.append(self.seeded(0).forward(self.batch()))
        _require_equal(*results)

    def test_forward_does_not_advance_the_global_generator(self) -> None:
        before = torch.get_rng_state()
        self.seeded(0).forward(self.batch())
        assert torch.equal(torch.get_rng_state(), before)

    def test_forward_keeps_no_state(self) -> None:
        used = self.seeded(0)
        used.forward(self.batch())
        if used.draws:
            used.generator = torch.Generator().manual_seed(0)
        _require_equal(used.forward(self.batch()), self.seeded(0).forward(self.batch()))

    def test_inv_keeps_no_state_unless_it_counts_writes(self) -> None:
        transform = self.seeded(0)
        first = transform.inv(self.batch())
        if not transform.counts_writes:
            _require_equal(transform.inv(self.batch()), first)

    def test_the_state_is_complete(self) -> None:
        used = self.seeded(0)
        used.inv(self.batch())
        loaded = self.seeded(0)
        loaded.load_state_dict(copy.deepcopy(used.state_dict()))
        _require_equal(loaded.inv(self.batch()), used.inv(self.batch()))

    def test_a_copy_has_the_state_and_no_generator(self) -> None:
        used = self.seeded(0)
        used.inv(self.batch())
        copied = copy.deepcopy(used)
        assert copied.generator is None
        _require_equal(copied.inv(self.batch()), used.inv(self.batch()))

    def test_entries_named_elsewhere_are_left_alone(self) -> None:
        transform, batch = self.seeded(0), self.batch()
        if not transform.follows_next:
            return
        below = [key for key in batch.keys(True, True) if isinstance(key, tuple) and key[0] == "next"]
        found = transform.forward(batch, frozenset(below))  # type: ignore[call-arg]
        for key in set(below) - transform.named_in_next:
            assert torch.equal(found.get(key), self.batch().get(key))

    def test_steps_kept_for_later_can_be_restored(self) -> None:
        transform: Any = self.seeded(0)
        if not hasattr(transform, "flush"):
            return
        transform.inv(self.batch())
        kept = transform.held_back()
        first = transform.flush()
        assert transform.flush() is None
        transform.hold_back(kept)
        _require_equal(transform.flush(), first)
        transform.hold_back(None)
        assert transform.flush() is None


def _require_equal(found: Any, expected: Any) -> None:
    """Fail unless two batches have equal entries, NaN included."""
    if not isinstance(expected, TensorDictBase):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        else:
            assert found == expected
        return
    assert found.batch_size == expected.batch_size
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        _require_equal(found.get(key), expected.get(key))
