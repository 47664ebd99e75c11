"""A sampler written from the documentation passes the suite, and a broken one fails the test of the rule it breaks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from shuffled_sampler import Shuffled
from suite_runs import failure, failures, names_in

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


# Each breaks one rule: what breaks it, and the test that fails -----------------------------------------------------


class OutsideTheValidRows(RandomSampler):
    def draw(self, storage, batch_size):
        return torch.randint(storage.max_size, (batch_size,), generator=self.generator), {}


class BeyondTheLastRow(RandomSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return (index + 1 if isinstance(index, torch.Tensor) else tuple(part + 1 for part in index)), info


class AnotherBatchSize(RandomSampler):
    def draw(self, storage, batch_size):
        return super().draw(storage, max(1, batch_size - 1))


class ShortInfo(RandomSampler):
    def draw(self, storage, batch_size):
        return super().draw(storage, batch_size)[0], {"weight": torch.ones(batch_size - 1)}


class NarrowNumbers(RandomSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return (index.int() if isinstance(index, torch.Tensor) else index), info


class OneCoordinate(RandomSampler):
    def draw(self, storage, batch_size):
        return torch.randint(len(storage), (batch_size,), generator=self.generator), {}


class TorchsOwnGenerator(RandomSampler):
    def draw(self, storage, batch_size):
        return torch.randint(len(storage), (batch_size,)), {}


class NumpysGenerator(RandomSampler):
    def draw(self, storage, batch_size):
        return torch.from_numpy(np.random.default_rng().integers(len(storage), size=batch_size)), {}


class AlsoTorchsGenerator(RandomSampler):
    def draw(self, storage, batch_size):
        torch.rand(1)
        return super().draw(storage, batch_size)


class NeverLooksAgain(RandomSampler):
    def draw(self, storage, batch_size):
        self.length = getattr(self, "length", len(storage))
        return torch.randint(self.length, (batch_size,), generator=self.generator), {}


class WritesWhileDrawing(RandomSampler):
    def draw(self, storage, batch_size):
        storage[0] = storage[0] + 1
        return super().draw(storage, batch_size)


class ReadsInSecret(RandomSampler):
    reads_rows = False

    def draw(self, storage, batch_size):
        storage.get(0)
        return super().draw(storage, batch_size)


class OneBufferForAllIndices(RandomSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        if not isinstance(index, torch.Tensor):
            return index, info
        if not hasattr(self, "kept") or len(self.kept) != batch_size:
            self.kept = index
        return self.kept.copy_(index), info


class OtherRows(RandomSampler):
    def draw_rows(self, storage, batch_size):
        index, info = self.draw(storage, batch_size)
        return index, info, storage.get((index + 1) % len(storage))

    reads_rows = True


class KeepsTheGenerator(RandomSampler):
    def __getstate__(self):
        return self.__dict__ | {"generator": None if self.generator is None else 1}


class RunsOutUnannounced(RandomSampler):
    @property
    def ran_out(self):
        return True

    @ran_out.setter
    def ran_out(self, value):
        pass

    has_epochs = False


class DependsOnTime(RandomSampler):
    """Its draws depend on how many there were, and no state says so."""

    def __init__(self) -> None:
        self.draws = 0

    def draw(self, storage, batch_size):
        self.draws += 1
        index, info = super().draw(storage, batch_size)
        return ((index + self.draws) % len(storage) if isinstance(index, torch.Tensor) else index), info


class NothingAtAll(RandomSampler):
    def __init__(self) -> None:
        self.draws = 0

    def save_state(self):
        return {"draws": self.draws}

    def load_state(self, state):
        pass

    draw = DependsOnTime.draw


class ForgetsOnDisk(Shuffled):
    def write_state(self, folder, state):
        super().write_state(folder, state | {"left": state["left"].sort().values})


class LosesItInAPickle(Shuffled):
    def __getstate__(self):
        return super().__getstate__() | {"left": self.left[:0]}


class StateByReference(Shuffled):
    def draw(self, storage, batch_size):
        self.left.copy_(self.left.flip(0))
        return super().draw(storage, batch_size)


class RemembersWhenEmptied(Shuffled):
    def reset(self):
        pass

    def draw(self, storage, batch_size):
        self.count = min(self.count, len(storage))
        return super().draw(storage, batch_size)


class TrustsReset(RemembersWhenEmptied):
    reset = Shuffled.reset


class RepeatsInAnEpoch(Shuffled):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        if isinstance(index, torch.Tensor) and len(index) > 1:
            index[1] = index[0]
        return index, info


class LeavesSomeOut(Shuffled):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        if len(self.left) == 1:
            self.left, self.ran_out = self.left[:0], True
        return index, info


class NeverRunsOut(Shuffled):
    def draw(self, storage, batch_size):
        found = super().draw(storage, batch_size)
        self.ran_out = False
        return found


class CountsWrong(Shuffled):
    @property
    def remaining_batches(self) -> int:
        return super().remaining_batches + 1


class IgnoresTheTurnOfTheRing(Shuffled):
    def on_rotate(self, row, storage):
        pass


class ContinuesAnEpochOfAnother(Shuffled):
    def begin_epoch(self):
        pass


def suite_of(kind: type[Sampler]) -> type[SamplerTests]:
    parent: Any = EpochSamplerTests if issubclass(kind, Shuffled) else SamplerTests
    return type("Suite", (parent,), {"make": lambda self: kind()})


SABOTEURS = [
    (OutsideTheValidRows, "test_indices_are_valid_elements"),
    (BeyondTheLastRow, "test_indices_of_two_dimensions_are_a_pair"),
    (AnotherBatchSize, "test_indices_are_valid_elements"),
    (ShortInfo, "test_indices_are_valid_elements"),
    (NarrowNumbers, "test_indices_are_valid_elements"),
    (OneCoordinate, "test_indices_of_two_dimensions_are_a_pair"),
    (TorchsOwnGenerator, "test_the_same_seed_gives_the_same_batches"),
    (TorchsOwnGenerator, "test_a_restored_buffer_gives_the_batches_that_were_next"),
    (NumpysGenerator, "test_the_same_seed_gives_the_same_batches"),
    (AlsoTorchsGenerator, "test_the_generator_alone_decides"),
    (NeverLooksAgain, "test_rows_that_are_written_later_can_be_drawn"),
    (WritesWhileDrawing, "test_drawing_changes_no_row"),
    (ReadsInSecret, "test_a_sampler_that_reads_no_rows_reads_none"),
    (OneBufferForAllIndices, "test_indices_stay_as_they_were_drawn"),
    (OtherRows, "test_batches_of_a_buffer_are_the_rows_at_their_index"),
    (KeepsTheGenerator, "test_a_pickle_leaves_the_generator_behind"),
    (RunsOutUnannounced, "test_only_samplers_with_epochs_run_out"),
    (DependsOnTime, "test_state_is_restored"),
    (DependsOnTime, "test_a_restored_buffer_gives_the_batches_that_were_next"),
    (NothingAtAll, "test_state_is_restored"),
    (ForgetsOnDisk, "test_state_is_restored"),
    (LosesItInAPickle, "test_state_is_restored"),
    (StateByReference, "test_a_state_stays_as_it_was_saved"),
    (RemembersWhenEmptied, "test_emptying_resets_the_state"),
    (RemembersWhenEmptied, "test_an_emptied_buffer_gives_new_rows"),
    (RepeatsInAnEpoch, "test_an_epoch_holds_every_element_once"),
    (LeavesSomeOut, "test_an_epoch_holds_every_element_once"),
    (NeverRunsOut, "test_an_epoch_holds_every_element_once"),
    (CountsWrong, "test_the_batches_that_remain_are_counted"),
    (IgnoresTheTurnOfTheRing, "test_a_restored_buffer_finishes_the_epoch_in_a_larger_ring"),
    (ContinuesAnEpochOfAnother, "test_an_epoch_begins_anew_on_request"),
]


@pytest.mark.parametrize(("kind", "name"), SABOTEURS, ids=[f"{kind.__name__}-{name}" for kind, name in SABOTEURS])
def test_a_broken_sampler_fails(kind: type[Sampler], name: str) -> None:
    assert failure(suite_of(kind), name) is not None


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


def test_an_override_of_sample_gets_the_checks() -> None:
    suite = suite_of(OfTorchRL)
    for check in ("test_an_empty_batch_is_a_value_error", "test_an_empty_storage_is_a_runtime_error"):
        assert failure(suite, check) is None


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
