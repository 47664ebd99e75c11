"""A broken sampler of slices fails the test of the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from suite_runs import Broken

from rbtool import SliceSampler
from rbtool.core.testing.slice_samplers import SliceSamplerTests


def draw_with(change: Callable[..., Any]) -> dict[str, Any]:
    """Make a `draw` that changes what `SliceSampler` draws: its index and info."""
    return {"draw": lambda self, storage, batch_size: change(*SliceSampler.draw(self, storage, batch_size), storage)}


def reseeded(self, storage, batch_size):
    self.generator = torch.Generator()
    self.generator.seed()
    return SliceSampler.draw(self, storage, batch_size)


def favouring_the_first(self, storage, batch_size):
    found = [SliceSampler.draw(self, storage, batch_size) for _ in range(2)]
    return min(found, key=lambda pair: int(pair[0][0].sum()))


def looking_once(self, storage, batch_size):
    if not hasattr(self, "kept"):
        self.kept = SliceSampler.draw(self, storage, batch_size)
    return self.kept


def rows_in_another_order(self, storage, batch_size):
    index, info, rows = SliceSampler.draw_rows(self, storage, batch_size)
    return index, info, rows.flip(0)


MASK = ("collector", "mask")
MARKED = "test_marks_of_steps_fit_the_data"
BROKEN = {
    "crosses the ends of episodes": Broken(SliceSampler, "test_slices_are_legal", draw_with(
        lambda index, info, storage: (((index[0] + 1) % storage.shape[0], *index[1:]), info))),
    "crosses lanes": Broken(SliceSampler, "test_slices_are_legal", draw_with(
        lambda index, info, storage: ((index[0], *(part.flip(0) for part in index[1:])), info))),
    "returns a tensor alone": Broken(SliceSampler, "test_an_index_has_a_tensor_for_each_dimension", draw_with(
        lambda index, info, storage: (index[0] if len(index) == 1 else index, info))),
    "returns other rows": Broken(
        SliceSampler, "test_a_batch_of_the_buffer_holds_the_slices", {"draw_rows": rows_in_another_order}),
    "marks no end of a slice": Broken(SliceSampler, "test_slices_are_legal", draw_with(
        lambda index, info, _: (index, info | {("next", "truncated"): info["next", "truncated"] & False}))),
    "forgets done": Broken(SliceSampler, MARKED, draw_with(
        lambda index, info, _: (index, info | {("next", "done"): info["next", "truncated"]}))),
    "forgets is_init": Broken(SliceSampler, MARKED, draw_with(
        lambda index, info, _: (index, info | {"is_init": info["is_init"] & False}))),
    "masks no step": Broken(SliceSampler, "test_short_slices_repeat_their_last_step", draw_with(
        lambda index, info, _: (index, info | ({MASK: info[MASK] | True} if MASK in info else {})))),
    "draws numbers of its own": Broken(
        SliceSampler, "test_the_seed_decides test_torch_manual_seed_decides", {"draw": reseeded}),
    "favours the first rows": Broken(
        SliceSampler, "test_slices_have_their_exact_probabilities", {"draw": favouring_the_first}),
    "looks at the storage once": Broken(SliceSampler, "test_writes_are_seen", {"draw": looking_once}),
    "draws fewer steps": Broken(SliceSampler, "test_an_indivisible_batch_size_is_a_runtime_error", {
        "draw": lambda self, storage, size: SliceSampler.draw(self, storage, size - size % self.slice_len)}),
    "takes slices of any length": Broken(
        SliceSampler, "test_no_trajectory_that_is_long_enough_is_a_runtime_error",
        {"__init__": lambda self, **options: SliceSampler.__init__(self, **options | {"strict_length": False})}),
    "pickles the generator": Broken(SliceSampler, "test_a_pickle_leaves_the_generator_behind", {
        "__getstate__": lambda self: SliceSampler.__getstate__(self) | {"generator": 1}}),
}  # fmt: skip


def suite_of(kind: type[SliceSampler]) -> type[SliceSamplerTests]:
    return type("Suite", (SliceSamplerTests,), {"make": lambda self, **options: kind(**options)})


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_of_slices_fails(name: str) -> None:
    BROKEN[name].require_found(suite_of, __name__)


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
