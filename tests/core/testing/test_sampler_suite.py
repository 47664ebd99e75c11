"""A sampler written from the documentation passes the suite, and a broken one fails the test of the rule it breaks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shuffled_sampler import Shuffled
from suite_runs import Broken, failure, failures, names_in

from rbtool import RandomSampler, Sampler, SamplerWithoutReplacement
from rbtool.core.samplers import base
from rbtool.core.testing.samplers import EpochSamplerTests, SamplerTests


def test_a_sampler_from_the_documentation_passes() -> None:
    class Suite(EpochSamplerTests):
        def make(self) -> Sampler:
            return Shuffled()

    assert failures(Suite) == {}
    source = inspect.getsource(Shuffled)
    assert source.count("\n") <= 40
    assert "._" not in source


# Each breaks one rule -----------------------------------------------------------------------------------------------


def below(storage: Any, size: int, count: int, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return torch.randint(count, (size,), **options), {}


def with_index(change: Callable[..., torch.Tensor], parent: type = RandomSampler) -> Callable[..., Any]:
    """Make a `draw` that changes what the parent's draws of a storage of one dimension; others stay as they are."""

    def draw(self, storage, batch_size):
        index, info = parent.draw(self, storage, batch_size)
        return (change(self, storage, index) if isinstance(index, torch.Tensor) else index), info

    return draw


def beyond_the_last_row(self, storage, batch_size):
    index, info = RandomSampler.draw(self, storage, batch_size)
    return (index + 1 if isinstance(index, torch.Tensor) else tuple(part + 1 for part in index)), info


def global_generator_too(self, storage, batch_size):
    torch.rand(1)
    return RandomSampler.draw(self, storage, batch_size)


def never_looks_again(self, storage, batch_size):
    self.length = getattr(self, "length", len(storage))
    return below(storage, batch_size, self.length, generator=self.generator)


def writes_while_drawing(self, storage, batch_size):
    storage[0] = storage[0] + 1
    return RandomSampler.draw(self, storage, batch_size)


def reads_in_secret(self, storage, batch_size):
    storage.get(0)
    return RandomSampler.draw(self, storage, batch_size)


def one_buffer_for_all(self, storage, index):
    if not hasattr(self, "kept") or len(self.kept) != len(index):
        self.kept = index
    return self.kept.copy_(index)


def other_rows(self, storage, batch_size):
    index, info = self.draw(storage, batch_size)
    return index, info, storage.get((index + 1) % len(storage))


def moved_by_the_number_of_draws(self, storage, index):
    self.draws = getattr(self, "draws", 0) + 1
    return (index + self.draws) % len(storage)


def in_another_order(self, storage, batch_size):
    self.left.copy_(self.left.flip(0))
    return Shuffled.draw(self, storage, batch_size)


def some_left_out(self, storage, batch_size):
    found = Shuffled.draw(self, storage, batch_size)
    if len(self.left) == 1:
        self.left, self.ran_out = self.left[:0], True
    return found


def never_running_out(self, storage, batch_size):
    found = Shuffled.draw(self, storage, batch_size)
    self.ran_out = False
    return found


def repeated(self, storage, index):
    if len(index) > 1:
        index[1] = index[0]
    return index


class TrustsReset(Shuffled):
    """Empties itself in `reset` alone."""

    def draw(self, storage, batch_size):
        self.count = min(self.count, len(storage))
        return super().draw(storage, batch_size)


def suite_of(kind: type[Sampler]) -> type[SamplerTests]:
    parent: Any = EpochSamplerTests if issubclass(kind, Shuffled) else SamplerTests
    return type("Suite", (parent,), {"make": lambda self: kind()})


BROKEN = {
    "draws beyond the valid rows": Broken(RandomSampler, "test_indices_are_valid_elements", {
        "draw": lambda self, storage, size: below(storage, size, storage.max_size, generator=self.generator)}),
    "draws beyond the last row": Broken(
        RandomSampler, "test_indices_of_two_dimensions_are_a_pair", {"draw": beyond_the_last_row}),
    "draws another batch size": Broken(RandomSampler, "test_indices_are_valid_elements", {
        "draw": lambda self, storage, size: RandomSampler.draw(self, storage, max(1, size - 1))}),
    "returns a short info": Broken(RandomSampler, "test_indices_are_valid_elements", {
        "draw": lambda self, storage, size: (
            RandomSampler.draw(self, storage, size)[0], {"weight": torch.ones(size - 1)})}),
    "draws 32-bit numbers": Broken(RandomSampler, "test_indices_are_valid_elements", {
        "draw": with_index(lambda self, storage, index: index.int())}),
    "draws one coordinate": Broken(RandomSampler, "test_indices_of_two_dimensions_are_a_pair", {
        "draw": lambda self, storage, size: below(storage, size, len(storage), generator=self.generator)}),
    "draws with torch's own generator": Broken(
        RandomSampler,
        "test_the_same_seed_gives_the_same_batches test_a_restored_buffer_gives_the_batches_that_were_next",
        {"draw": lambda self, storage, size: below(storage, size, len(storage))}),
    "draws with a generator of NumPy": Broken(RandomSampler, "test_the_same_seed_gives_the_same_batches", {
        "draw": lambda self, storage, size: (
            torch.from_numpy(np.random.default_rng().integers(len(storage), size=size)), {})}),
    "draws with torch's own generator, too": Broken(
        RandomSampler, "test_the_generator_alone_decides", {"draw": global_generator_too}),
    "never looks at the storage again": Broken(
        RandomSampler, "test_rows_that_are_written_later_can_be_drawn", {"draw": never_looks_again}),
    "writes while drawing": Broken(RandomSampler, "test_drawing_changes_no_row", {"draw": writes_while_drawing}),
    "reads in secret": Broken(
        RandomSampler, "test_a_sampler_that_reads_no_rows_reads_none", {"draw": reads_in_secret, "reads_rows": False}),
    "has one buffer for all indices": Broken(
        RandomSampler, "test_indices_stay_as_they_were_drawn", {"draw": with_index(one_buffer_for_all)}),
    "returns other rows": Broken(RandomSampler, "test_batches_of_a_buffer_are_the_rows_at_their_index", {
        "draw_rows": other_rows, "reads_rows": True}),
    "pickles the generator": Broken(RandomSampler, "test_a_pickle_leaves_the_generator_behind", {
        "__getstate__": lambda self: self.__dict__ | {"generator": None if self.generator is None else 1}}),
    "runs out unannounced": Broken(RandomSampler, "test_only_samplers_with_epochs_run_out", {
        "ran_out": property(lambda self: True, lambda self, value: None), "has_epochs": False}),
    "depends on the number of draws": Broken(
        RandomSampler, "test_state_is_restored test_a_restored_buffer_gives_the_batches_that_were_next",
        {"draw": with_index(moved_by_the_number_of_draws)}),
    "loads nothing of its state": Broken(RandomSampler, "test_state_is_restored", {
        "draw": with_index(moved_by_the_number_of_draws), "load_state": lambda self, state: None,
        "save_state": lambda self: {"draws": getattr(self, "draws", 0)}}),
    "forgets the order on the disk": Broken(Shuffled, "test_state_is_restored", {
        "write_state": lambda self, folder, state: Shuffled.write_state(
            self, folder, state | {"left": state["left"].sort().values})}),
    "loses its state in a pickle": Broken(Shuffled, "test_state_is_restored", {
        "__getstate__": lambda self: Shuffled.__getstate__(self) | {"left": self.left[:0]}}),
    "saves its state by reference": Broken(Shuffled, "test_a_state_stays_as_it_was_saved", {"draw": in_another_order}),
    "remembers its state when it is emptied": Broken(
        TrustsReset, "test_emptying_resets_the_state test_an_emptied_buffer_gives_new_rows",
        {"reset": lambda self: None}),
    "repeats an element in an epoch": Broken(
        Shuffled, "test_an_epoch_holds_every_element_once", {"draw": with_index(repeated, Shuffled)}),
    "leaves some elements out": Broken(Shuffled, "test_an_epoch_holds_every_element_once", {"draw": some_left_out}),
    "never runs out": Broken(Shuffled, "test_an_epoch_holds_every_element_once", {"draw": never_running_out}),
    "miscounts the batches": Broken(Shuffled, "test_the_batches_that_remain_are_counted", {
        "remaining_batches": property(lambda self: Shuffled.remaining_batches.fget(self) + 1)}),
    "ignores that the ring turns": Broken(
        Shuffled, "test_a_restored_buffer_finishes_the_epoch_in_a_larger_ring",
        {"on_rotate": lambda self, row, storage: None}),
    "continues the epoch of another": Broken(
        Shuffled, "test_an_epoch_begins_anew_on_request", {"begin_epoch": lambda self: None}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_fails(name: str) -> None:
    BROKEN[name].require_found(suite_of, __name__)


def test_what_the_base_does_by_itself_is_tested_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, without in [
        ("sample", lambda self, storage, batch_size: self.draw(storage, batch_size)),
        ("empty", lambda self: None),
        ("__getstate__", lambda self: self.__dict__),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(base.Sampler, name, without)
            assert failures(suite_of(TrustsReset)), name
    assert failures(suite_of(TrustsReset)) == {}


# Samplers that were written for TorchRL -----------------------------------------------------------------------------


class OfTorchRL(Sampler):
    """Overrides what TorchRL's documentation shows."""

    def sample(self, storage, batch_size):
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {}

    def _empty(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass

    def dumps(self, path):
        pass

    def loads(self, path):
        pass


def test_a_sampler_written_for_torchrl_passes_in_one_dimension() -> None:
    suite = suite_of(OfTorchRL)
    for name in set(names_in(suite)) - {"test_indices_of_two_dimensions_are_a_pair"}:
        assert failure(suite, name) is None, name


class Weighted(SamplerWithoutReplacement):
    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index.flip(0), info | {"weight": torch.ones(len(index))}


def test_an_override_of_sample_can_call_its_parents() -> None:
    suite = type("Suite", (EpochSamplerTests,), {"make": lambda self: Weighted(), "storage": EpochSamplerTests.storage})
    for name in ("test_iteration_over_a_buffer_is_an_epoch", "test_a_restored_buffer_gives_the_batches_that_were_next"):
        assert failure(suite, name) is None


class Mixin(Sampler):
    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index, info | {"mixed": torch.ones(batch_size)}


class Plain:
    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)  # type: ignore[misc]
        return index, info | {"mixed": torch.ones(batch_size)}


@pytest.mark.parametrize("mixin", [Mixin, Plain])
def test_a_mixin_reaches_the_next_class(mixin: type) -> None:
    both: Any = type("Both", (mixin, RandomSampler), {})
    index, info = both().sample(SamplerTests.storage(None), 4)  # type: ignore[arg-type]
    assert (len(index), list(info), both.reads_rows) == (4, ["mixed"], True)
    assert failure(suite_of(both), "test_an_empty_batch_is_a_value_error") is None
    child: Any = type("Child", (both,), {"draw": RandomSampler.draw})
    assert list(child().sample(SamplerTests.storage(None), 4)[1]) == ["mixed"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "instead"), [("sample_rows", "draw_rows"), ("empty", "reset")])
def test_final_methods_name_what_to_implement(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=rf"Own overrides {name}\(\).*final\n?.*implement {instead}"):
        type("Own", (RandomSampler,), {name: lambda self: None})


def test_without_a_draw_there_is_no_sampler() -> None:
    with pytest.raises(TypeError, match="draw"):
        type("Own", (Sampler,), {})()


def test_what_a_base_promises_does_not_bind_a_subclass() -> None:
    own = functools.partial(type, "Own")
    for name in ("sample", "draw"):
        assert own((RandomSampler,), {name: lambda self, storage, batch_size: None}).reads_rows is True
        assert own((RandomSampler,), {name: lambda self, *a: None, "reads_rows": False}).reads_rows is False
    assert own((RandomSampler,), {}).reads_rows is False
    assert own((Sampler,), {"ran_out": True, "draw": None}).has_epochs is True
    for name, flag in [
        ("extend", "follows_writes"),
        ("on_update", "follows_updates"),
        ("update_priority", "takes_priorities"),
    ]:
        assert getattr(own((RandomSampler,), {name: lambda self, *a, **o: None}), flag) is True
        assert getattr(RandomSampler, flag) is False
