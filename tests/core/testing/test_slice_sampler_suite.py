"""A broken sampler of slices fails the test of the rule it breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from suite_runs import failure

from rbtool import SliceSampler
from rbtool.core.testing.slice_samplers import SliceSamplerTests


class AcrossEpisodes(SliceSampler):
    """Moves every slice one row on, whatever lies there."""

    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return ((index[0] + 1) % storage.shape[0], *index[1:]), info


class AcrossLanes(SliceSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return (index[0], *(part.flip(0) for part in index[1:])), info


class ATensorAlone(SliceSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return (index[0] if len(index) == 1 else index), info


class OtherRows(SliceSampler):
    """Returns the rows that it read before it changed its mind."""

    def draw_rows(self, storage, batch_size):
        index, info, rows = super().draw_rows(storage, batch_size)
        return index, info, rows.flip(0)


class NoEndOfASlice(SliceSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return index, info | {("next", "truncated"): info["next", "truncated"] & False}


class ForgetsDone(SliceSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return index, info | {("next", "done"): info["next", "truncated"]}


class ForgetsInit(SliceSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        return index, info | {"is_init": info["is_init"] & False}


class AllSteps(SliceSampler):
    def draw(self, storage, batch_size):
        index, info = super().draw(storage, batch_size)
        mask = ("collector", "mask")
        return index, info | ({mask: info[mask] | True} if mask in info else {})


class NumbersOfItsOwn(SliceSampler):
    def draw(self, storage, batch_size):
        self.generator = torch.Generator()
        self.generator.seed()
        return super().draw(storage, batch_size)


class FavoursTheFirst(SliceSampler):
    def draw(self, storage, batch_size):
        found = [super(FavoursTheFirst, self).draw(storage, batch_size) for _ in range(2)]
        return min(found, key=lambda pair: int(pair[0][0].sum()))


class LooksOnce(SliceSampler):
    def draw(self, storage, batch_size):
        if not hasattr(self, "kept"):
            self.kept = super().draw(storage, batch_size)
        return self.kept


class FewerSteps(SliceSampler):
    def draw(self, storage, batch_size):
        return super().draw(storage, batch_size - batch_size % self.slice_len)


class AnyLength(SliceSampler):
    def __init__(self, **options):
        super().__init__(**options | {"strict_length": False})


class KeepsTheGenerator(SliceSampler):
    def __getstate__(self):
        return super().__getstate__() | {"generator": 1}


SABOTEURS = [
    (AcrossEpisodes, "test_slices_are_legal"),
    (AcrossLanes, "test_slices_are_legal"),
    (ATensorAlone, "test_an_index_has_a_tensor_for_each_dimension"),
    (OtherRows, "test_a_batch_of_the_buffer_holds_the_slices"),
    (NoEndOfASlice, "test_slices_are_legal"),
    (ForgetsDone, "test_marks_of_steps_fit_the_data"),
    (ForgetsInit, "test_marks_of_steps_fit_the_data"),
    (AllSteps, "test_short_slices_repeat_their_last_step"),
    (NumbersOfItsOwn, "test_the_seed_decides"),
    (NumbersOfItsOwn, "test_torch_manual_seed_decides"),
    (FavoursTheFirst, "test_slices_have_their_exact_probabilities"),
    (LooksOnce, "test_writes_are_seen"),
    (FewerSteps, "test_an_indivisible_batch_size_is_a_runtime_error"),
    (AnyLength, "test_no_trajectory_that_is_long_enough_is_a_runtime_error"),
    (KeepsTheGenerator, "test_a_pickle_leaves_the_generator_behind"),
]


def suite_of(kind: type[SliceSampler]) -> type[SliceSamplerTests]:
    return type("Suite", (SliceSamplerTests,), {"make": lambda self, **options: kind(**options)})


@pytest.mark.parametrize(("kind", "name"), SABOTEURS, ids=[f"{kind.__name__}-{name}" for kind, name in SABOTEURS])
def test_a_broken_sampler_of_slices_fails(kind: Any, name: str) -> None:
    assert failure(suite_of(kind), name) is not None


def test_an_override_of_sample_gets_the_rows_of_its_index() -> None:
    """What the parent has read on the way to its own index is not what lies at the one that the override returns."""

    class Moved(SliceSampler):
        def sample(self, storage, batch_size):
            (index,), info = super().sample(storage, batch_size)
            return (index.flip(0),), info

    twin = suite_of(Moved)().twin()
    for _ in range(5):
        batch = twin.buffer.sample(8)
        places = [tuple(place) for place in batch["index"].reshape(len(batch), -1).tolist()]
        assert batch["number"].tolist() == [twin.model.step_at(place).number for place in places]
