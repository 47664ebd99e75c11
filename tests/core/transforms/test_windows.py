"""Stacks of stored frames against a plain walk back from every row: in rings, buffers, ensembles and loaders."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.ensemble import ReplayBufferEnsemble
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError, SchemaError
from rbtool.core.loading.loader import TorchLoader
from rbtool.core.loading.torch_dataset import torch_dataset
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.slice_samplers import (
    CONTENTS,
    SITUATIONS,
    Coordinates,
    RingModel,
    Twin,
    episodes,
    rows_of,
    situation,
    step_lists,
    tensordict_of,
)
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.windows import FrameStack, RandomCropTensorDict, StoredFrameStack
from rbtool.core.writers.base import ImmutableDatasetWriter


def rows(count: int, length: int) -> TensorDict:
    return TensorDict({"step": torch.arange(length).expand(count, length).contiguous()}, [count, length])


def seeded(transform: Any, seed: int = 0) -> Any:
    transform.generator = torch.Generator().manual_seed(seed)
    return transform


def test_every_start_of_a_crop_is_equally_likely() -> None:
    found = seeded(RandomCropTensorDict(3))(rows(6000, 8))["step"]
    assert found.shape == (6000, 3)
    assert bool((found[:, 1:] == found[:, :-1] + 1).all())
    counts = Counter(found[:, 0].tolist())
    assert set(counts) == set(range(6))
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5  # chi-square of 5, one in a thousand


def test_a_crop_may_have_the_whole_length() -> None:
    assert torch.equal(RandomCropTensorDict(8)(rows(3, 8))["step"], rows(3, 8)["step"])


def test_crops_lie_in_the_real_steps() -> None:
    data = rows(500, 8)
    lengths = torch.randint(3, 9, (500,), generator=torch.Generator().manual_seed(1))
    data["mask"] = torch.arange(8) < lengths.unsqueeze(1)
    found = seeded(RandomCropTensorDict(3, mask_key="mask"))(data)
    assert bool(found["mask"].all())
    assert bool((found["step"][:, -1] == lengths - 1).any())


def test_time_may_be_another_dimension() -> None:
    data = TensorDict({"x": torch.arange(24).reshape(4, 3, 2)}, [4, 3])
    found = seeded(RandomCropTensorDict(2, sample_dim=-2))(data)["x"]
    assert found.shape == (2, 3, 2)
    assert bool((found[1] == found[0] + 6).all())


def test_crops_follow_the_generator_of_the_buffer() -> None:
    def batches(seed: int) -> torch.Tensor:
        buffer = ReplayBuffer(
            storage=TensorStorage(rows(20, 9)),
            transform=RandomCropTensorDict(4),
            batch_size=5,
            generator=torch.Generator().manual_seed(seed),
        )
        return torch.stack([buffer.sample()["step"] for _ in range(3)])

    assert torch.equal(batches(1), batches(1))
    assert not torch.equal(batches(1), batches(2))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RandomCropTensorDict(9)(rows(2, 8)), RuntimeError, "sub_seq_len is 9, expected at most .* 8"),
        (lambda: RandomCropTensorDict(2, mask_key="m")(rows(2, 8)), KeyError, "m is not in the batch"),
        (lambda: RandomCropTensorDict(2, -3)(rows(2, 8)), RuntimeError, r"shape \[2, 8\]"),
        (lambda: RandomCropTensorDict(0), ValueError, "sub_seq_len is 0"),
        (lambda: FrameStack(0), ValueError, "n is 0"),
        (lambda: FrameStack(2, dim=1), ValueError, "below 0"),
        (lambda: FrameStack(2, padding="mirror"), ValueError, "'mirror', expected one of same, constant"),  # type: ignore[arg-type]
        (lambda: FrameStack(2, "step", dim=-1)(rows(2, 3)), RuntimeError, r"shape \[\], .* no dimension dim=-1"),
        (
            lambda: FrameStack(3, ["o"])(TensorDict({"o": torch.zeros(2, 3, 4)}, [2, 3])),
            RuntimeError,
            r"o has frames of the shape \[4\], .* dim=-3",
        ),
        (lambda: FrameStack(2, "step")(rows(2, 3)[0]), RuntimeError, "along the time of a batch"),
        (lambda: FrameStack(2, "step", dim=-1, done_key="doen")(rows(2, 3)), KeyError, "doen is not in the batch"),
    ],
)
def test_arguments_and_batches_without_sense_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_dimension_counted_from_the_front_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="sample_dim is 1"):
        RandomCropTensorDict(2, 1)


def video(ends: list[int], length: int = 6) -> TensorDict:
    """Frames 10, 11, … with ends inside, two rows of them; a frame is one number `[1, 1, 1]`."""
    frames = torch.arange(10, 10 + length).float().view(1, length, 1, 1, 1).repeat(2, 1, 1, 1, 1)
    done = torch.zeros(2, length, 1, dtype=torch.bool)
    done[:, ends] = True
    following = torch.where(done[..., None, None], 90.0, frames + 1)
    return TensorDict({"pixels": frames, "next": {"pixels": following, "done": done}}, [2, length])


@pytest.mark.parametrize(("padding", "first"), [("same", 10), ("constant", -1)])
def test_frames_are_stacked_and_next_is_one_ahead(padding: Any, first: int) -> None:
    found = FrameStack(3, padding=padding, padding_value=-1)(video([2]))
    stacks = found["pixels"][0, ..., 0, 0].int().tolist()
    after = found["next", "pixels"][1, ..., 0, 0].int().tolist()
    begin = 13 if padding == "same" else -1
    assert stacks == [
        [first, first, 10], [first, 10, 11], [10, 11, 12], [begin, begin, 13], [begin, 13, 14], [13, 14, 15],
    ]  # fmt: skip
    assert after == [
        [first, 10, 11], [10, 11, 12], [11, 12, 90], [begin, 13, 14], [13, 14, 15], [14, 15, 16],
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_a_stack_has_n_frames(n: int) -> None:
    found = FrameStack(n, out_keys="stack")(video([]))
    assert found["stack"].shape == found["next", "stack"].shape == (2, 6, n, 1, 1)
    assert torch.equal(found["stack"][:, :, -1:], found["pixels"])


PAD = -7


def after(number: int) -> int:
    """The next frame of a step, which is that of no other step."""
    return -number - 100


def stack(n: int = 3, **options: Any) -> StoredFrameStack:
    return StoredFrameStack(n, "number", dim=-1, padding_value=PAD, **options)


def with_next(twin: Twin) -> Twin:
    """Store a next frame with every step."""
    storage = twin.buffer.storage
    if len(storage):
        storage.add_entries({("next", "number"): -storage[:]["number"] - 100})
    return twin


def earlier(model: RingModel, place: Coordinates) -> list[int]:
    """Walk back from a step as long as the one before is of its episode and in the ring; the oldest number first."""
    slot, *lanes = place
    lane, found = (lanes or [0])[0], [model.step_at(place).number]
    while len(found) <= model.capacity:
        slot = (slot - 1) % model.capacity
        if not (model.follows(slot, lane, "ids") and model.follows(slot, lane, "done")):
            break
        found.append(model.step_at((slot, *lanes)).number)
    return found[::-1]


def expected(model: RingModel, place: Coordinates, n: int, padding: str) -> tuple[list[int], list[int]]:
    """The stack of a step, and that of its next frame."""
    known = earlier(model, place)
    padded = [known[0] if padding == "same" else PAD] * n + known
    # A frame that is known fills up no place before the first one.
    if padding == "same":
        padded = [known[max(0, len(known) - n)]] * n + known[max(0, len(known) - n) :]
    root = padded[-n:]
    return root, [*root[1:], after(known[-1])]


def require_stacks(batch: Any, model: RingModel, n: int, padding: str = "constant") -> None:
    """Compare every step of a batch, by its index, with the walk back."""
    places = batch["index"].reshape(-1, model.ndim).tolist()
    roots, nexts = (batch[key].reshape(-1, n).tolist() for key in ("number", ("next", "number")))
    assert len(places) == len(roots)
    for place, root, following in zip(places, roots, nexts, strict=True):
        assert (root, following) == expected(model, tuple(place), n, padding), place


def drawing(twin: Twin, sampler: Sampler, n: int = 3, batch_size: int = 8, **options: Any) -> TensorDictReplayBuffer:
    """A buffer over the rows of a twin that stacks; its writer leaves the ring where it is."""
    return TensorDictReplayBuffer(
        storage=twin.buffer.storage, sampler=sampler, transform=stack(n, **options), batch_size=batch_size,
        writer=ImmutableDatasetWriter(),
    )  # fmt: skip


def flagged(rows: int = 9, ends: tuple[int, ...] = (3, 4), **more: Any) -> TensorDict:
    """Steps with numbers, whose flags alone separate them."""
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[list(ends)] = True
    number = torch.arange(rows)
    return TensorDict({"number": number, **more, "next": {"number": number + 100, "done": done}}, [rows])


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=2, strict_length=False),
    "batched": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True, batched=True),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2, strict_length=False),
    "prioritized": lambda: PrioritizedSampler(100, 0.6, 0.4),
    "prioritized slices": lambda: PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=2, strict_length=False),
}


@each("ndim", [1, 2])
@each("contents", CONTENTS)
@each("name", SITUATIONS)
def test_every_row_of_every_ring(name: str, contents: str, ndim: int) -> None:
    twin = with_next(situation(name, contents, lanes=ndim, ndim=ndim))
    for n, padding in product((1, 2, 4, 20), ("constant", "same")):
        buffer = drawing(twin, RandomSampler(), n, padding=padding)
        for _ in range(2):
            require_stacks(buffer.sample(), twin.model, n, padding)


@pytest.mark.parametrize(
    ("name", "ndim"), [one for one in product(SAMPLERS, (1, 2)) if one[1] == 1 or "prioritized" not in one[0]]
)
def test_every_sampler(name: str, ndim: int) -> None:
    twin = with_next(situation("wrapped mid-episode", "ragged", lanes=ndim, ndim=ndim))
    buffer = drawing(twin, SAMPLERS[name]())
    for _ in range(8):
        require_stacks(buffer.sample(), twin.model, 3)


@given(st.data())
def test_stacks_are_right_after_any_history(data: st.DataObject) -> None:
    capacity, lanes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
    twin, ndim = Twin(capacity, None, lanes, 2 if lanes > 1 else 1), 2 if lanes > 1 else 1
    rows, n = data.draw(step_lists(lanes, 3 * capacity)), data.draw(st.integers(1, 5))
    buffer, place = drawing(twin, RandomSampler(), n, 16), 0
    while place < len(rows):
        count = data.draw(st.integers(1, capacity))
        part, place = rows[place : place + count], place + count
        written = tensordict_of(part, ndim)
        written["next", "number"] = -written["number"] - 100
        twin.buffer.extend(written)
        twin.model.extend(part)
        require_stacks(buffer.sample(), twin.model, n)


def test_an_empty_ring_has_no_stacks() -> None:
    with pytest.raises(SchemaError, match="empty"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=stack(), batch_size=2).sample()


def test_indexed_rows_are_stacked() -> None:
    twin = with_next(situation("wrapped mid-episode", "ragged"))
    buffer = drawing(twin, RandomSampler())
    wanted = [expected(twin.model, (row,), 3, "constant")[0] for row in range(len(buffer))]
    mask = torch.arange(len(buffer)) % 2 == 0
    assert buffer[:]["number"].tolist() == buffer[...]["number"].tolist() == wanted
    assert buffer[3:7]["number"].tolist() == wanted[3:7]
    assert buffer[::-2]["number"].tolist() == wanted[::-2]
    assert buffer[-1]["number"].tolist() == wanted[-1]
    assert buffer[mask]["number"].tolist() == wanted[::2]
    square = buffer[torch.tensor([[4, 1], [0, 11]])]["number"]
    assert square.tolist() == [[wanted[4], wanted[1]], [wanted[0], wanted[11]]]


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_indexed_rows_of_lanes_are_stacked(dim_extend: int) -> None:
    twin = with_next(situation("wrapped mid-episode", "ragged", lanes=2, ndim=2))
    buffer = TensorDictReplayBuffer(
        storage=twin.buffer.storage, transform=stack(), dim_extend=dim_extend, writer=ImmutableDatasetWriter()
    )
    grid = [[expected(twin.model, (row, lane), 3, "constant")[0] for lane in range(2)] for row in range(12)]
    wanted = torch.tensor(grid if dim_extend == 0 else [*zip(*grid, strict=True)])
    assert torch.equal(buffer[:]["number"], wanted)
    assert torch.equal(buffer[1]["number"], wanted[1])
    assert torch.equal(buffer[torch.tensor([1, 0])]["number"], wanted[torch.tensor([1, 0])])


@pytest.mark.parametrize("kind", [ListStorage, LazyTensorStorage])
def test_steps_of_lists_and_tensors_are_stacked(kind: type[Any]) -> None:
    sampler = SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(storage=kind(20), transform=stack(2), batch_size=9, sampler=sampler)
    buffer.extend(flagged())
    batch = buffer.sample()
    before = torch.tensor([PAD, 0, 1, 2, PAD, PAD, 5, 6, 7])
    assert torch.equal(batch["number"], torch.stack([before[batch["index"]], batch["index"]], -1))
    assert buffer[4]["next", "number"].tolist() == [4, 104]


def split_flags(rows: TensorDict) -> TensorDict:
    """The same ends, as two flags instead of `done`."""
    done = rows["next"].pop("done")
    rows["next", "terminated"], rows["next", "truncated"] = done & (torch.arange(9) < 4)[:, None], done.clone()
    return rows


IDS = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("rows", "options", "before"),
    [
        (flagged(episode=IDS), {}, [PAD, 0, PAD, 2, PAD, PAD, 5, 6, 7]),
        (flagged(episode=IDS).exclude(("next", "done")), {}, [PAD, 0, PAD, 2, 3, 4, 5, 6, 7]),
        (split_flags(flagged()), {}, [PAD, 0, 1, 2, PAD, PAD, 5, 6, 7]),
        (
            flagged(game=IDS, over=torch.arange(9) == 6),
            {"done_key": "over", "traj_key": "game"},
            [PAD, 0, PAD, 2, 3, 4, 5, PAD, 7],
        ),
    ],
    ids=["ids and flags", "ids", "two flags", "named keys"],
)
def test_stacks_end_where_ids_or_flags_do(rows: TensorDict, options: Any, before: list[int]) -> None:
    buffer = ReplayBuffer(storage=TensorStorage(rows), transform=stack(2, **options))
    assert buffer[:]["number"][:, 0].tolist() == before


def test_stacks_follow_edited_flags() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(flagged()), transform=stack(2))
    assert buffer[7]["number"].tolist() == [6, 7]
    buffer[6:7] = flagged(1, (0,))
    assert buffer[7]["number"].tolist() == [PAD, 7]


# How frames are joined -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "dim", "shape"),
    [
        ((5, 4), -3, (3, 5, 4)),
        ((2, 5, 4), -3, (6, 5, 4)),
        ((5, 4, 2), -1, (5, 4, 6)),
        ((6,), -1, (18,)),
        ((6,), -2, (3, 6)),
    ],
)
def test_frames_are_joined_along_the_dimension(frame: tuple[int, ...], dim: int, shape: tuple[int, ...]) -> None:
    images = torch.rand(9, *frame)
    rows = flagged(pixels=images).set(("next", "pixels"), images + 1)
    found = ReplayBuffer(storage=TensorStorage(rows), transform=StoredFrameStack(3, dim=dim))[:]
    assert found["pixels"].shape == found["next", "pixels"].shape == (9, *shape)
    join = torch.stack if len(shape) > len(frame) else torch.cat
    assert torch.equal(found["pixels"][7], join([*images[5:8]], dim))
    assert torch.equal(found["next", "pixels"][7], join([images[6], images[7], images[7] + 1], dim))
    assert torch.equal(found["pixels"][4], join([0 * images[0], 0 * images[0], images[4]], dim))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16, torch.complex64])
def test_frames_have_any_type_and_any_number_of_elements(dtype: torch.dtype) -> None:
    rows = flagged(empty=torch.zeros(9, 0, dtype=dtype), value=torch.arange(9).to(dtype))
    transform = StoredFrameStack(3, ["empty", "value"], dim=-1)
    buffer = ReplayBuffer(storage=TensorStorage(rows), transform=transform)
    assert buffer[torch.arange(0)]["value"].shape == (0, 3)
    with pytest.raises(SchemaError, match="no dimension"):
        ReplayBuffer(storage=TensorStorage(rows), transform=StoredFrameStack(3, "value"))[:]
    found = buffer[:]
    assert found["empty"].shape == (9, 0)
    assert torch.equal(found["value"][7], torch.tensor([5, 6, 7]).to(dtype))
    assert torch.equal(found["value"][4], torch.tensor([0, 0, 4]).to(dtype))


def test_batches_of_many_sizes_are_apart() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(flagged(300, (50, 200))), transform=stack(2))
    for size, batch in [(size, buffer[:size]) for size in (*range(1, 300, 9), 300, 2)]:
        assert batch["number"][:, 1].tolist() == list(range(size))


def test_next_frames_alone_can_be_stacked_under_another_name() -> None:
    storage = TensorStorage(flagged())
    transform = StoredFrameStack(2, [("next", "number")], ["later"], dim=-1)
    found = ReplayBuffer(storage=storage, transform=transform)[:]
    assert found["later"].tolist()[5:7] == [[5, 105], [6, 106]]
    assert found["number"].tolist() == list(range(9))


def test_the_storage_stays_as_it_is() -> None:
    rows = flagged()
    buffer = ReplayBuffer(storage=TensorStorage(rows), transform=stack(2), batch_size=9)
    for batch in (buffer[:], buffer[2], buffer.sample()):
        batch["number"].zero_()
        batch["next", "number"].zero_()
    assert rows["number"].tolist() == list(range(9))


def test_stored_frames_are_stacked_as_those_of_whole_trajectories() -> None:
    rows, images = flagged(8, (7,)), torch.rand(8, 1, 2, 2)
    rows["pixels"], rows["next", "pixels"] = images, torch.rand(8, 1, 2, 2)
    stored = ReplayBuffer(storage=TensorStorage(rows), transform=StoredFrameStack(3, padding="same"))[:]
    within = FrameStack(3)(rows.unsqueeze(0))[0]
    assert torch.equal(stored["pixels"], within["pixels"])
    assert torch.equal(stored["next", "pixels"], within["next", "pixels"])


def test_the_model_walks_back_within_an_episode() -> None:
    model = RingModel(6)
    model.extend(rows_of([episodes([3, 9], ["terminated"])], 8))
    expected = [[3, 4, 5, 6], [3, 4, 5, 6, 7], [2], [3], [3, 4], [3, 4, 5]]
    assert [earlier(model, (slot,)) for slot in range(6)] == expected


def test_other_transforms_follow() -> None:
    chain = Compose(stack(2), lambda batch: batch.set("number", batch["number"] * 2))
    assert ReplayBuffer(storage=TensorStorage(flagged()), transform=chain)[3]["number"].tolist() == [4, 6]
    buffer = ReplayBuffer(storage=TensorStorage(flagged()), transform=stack(2)).append_transform(
        lambda batch: batch + 1
    )
    assert buffer[3]["number"].tolist() == [3, 4]


def test_a_buffer_can_have_two_stacks() -> None:
    rows = flagged(other=torch.arange(9) * 10)
    chain = Compose(stack(2), StoredFrameStack(3, "other", dim=-1, padding="same"))
    found = ReplayBuffer(storage=TensorStorage(rows), transform=chain)[3]
    assert (found["number"].tolist(), found["other"].tolist()) == ([2, 3], [10, 20, 30])


@pytest.mark.parametrize(
    ("transform", "rows", "error", "words"),
    [
        (Compose(lambda rows: rows, stack()), flagged(), SchemaError, "only a buffer can provide"),
        (stack(), flagged().exclude(("next", "done")), MissingKeyError, "episodes cannot be separated"),
        (stack(traj_key="game"), flagged(), MissingKeyError, "'game' is not in the storage"),
        (stack(done_key="over"), flagged(episode=torch.arange(9)), MissingKeyError, "'over' is not in the storage"),
        (StoredFrameStack(2), flagged(), MissingKeyError, "pixels is not in the batch"),
        (StoredFrameStack(2, "number"), flagged(), SchemaError, "which have no dimension dim=-3"),
        (stack(), torch.arange(9), MissingKeyError, "episodes cannot be separated"),
        (stack(), flagged(steps_to_next_obs=torch.full((9,), 3)), SchemaError, "up to 3 steps ahead"),
        (stack(), flagged().set(("next", "number"), torch.rand(9)), SchemaError, "but the root has torch.int64"),
    ],
)
def test_rows_without_stacks_are_refused(transform: Any, rows: Any, error: type[Exception], words: str) -> None:
    buffer = ReplayBuffer(storage=TensorStorage(rows), transform=transform, batch_size=4)
    for read in (buffer.sample, lambda: buffer[:], lambda: buffer[2]):
        with pytest.raises(error, match=words):
            read()


def test_batches_and_whole_trajectories_are_refused() -> None:
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        stack()(flagged())
    rows = flagged(8, (7,)).reshape(2, 4)
    with pytest.raises(SchemaError, match="expected single steps"):
        ReplayBuffer(storage=TensorStorage(rows), transform=stack())[:]


def rings(sampler: Callable[[], Sampler] = RandomSampler, count: int = 2) -> list[TensorDictReplayBuffer]:
    """Buffers with numbers of their own."""
    found = []
    for number in range(count):
        twin = with_next(situation("wrapped mid-episode", "ragged", slots=12 + number))
        found.append(drawing(twin, sampler()))
        found[-1].model = twin.model  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(
    ("form", "sampler"),
    [
        ("stack", RandomSampler),
        ("exact", RandomSampler),
        ("exact", SamplerWithoutReplacement),
        ("exact", lambda: SliceSampler(slice_len=2)),
        ("exact", lambda: PrioritizedSampler(20, 0.6, 0.4)),
    ],
)
def test_members_of_an_ensemble_stack_their_own_frames(
    form: Any, sampler: Callable[[], Sampler], prefetch: int | None
) -> None:
    members = rings(sampler)
    buffer = ReplayBufferEnsemble(*members, batch=form, batch_size=8, prefetch=prefetch, schema="error")
    for _ in range(5):
        batch = buffer.sample().reshape(-1)
        for number, member in enumerate(members):
            part = batch[batch["source_id"] == number]
            part["index"] = part["index", "index"]
            require_stacks(part, member.model, 3)  # type: ignore[attr-defined]


def test_an_ensemble_has_no_rows_of_its_own() -> None:
    plain = [ReplayBuffer(storage=TensorStorage(flagged())) for _ in range(2)]
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        ReplayBufferEnsemble(*plain, transform=stack(), batch_size=4).sample()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_loaders_are_stacked(workers: int) -> None:
    twin = with_next(situation("wrapped mid-episode", "ragged"))
    for sampler in (SamplerWithoutReplacement(), SliceSamplerWithoutReplacement(slice_len=2, strict_length=False)):
        batches = list(TorchLoader(torch_dataset(drawing(twin, sampler, batch_size=4), seed=0), num_workers=workers))
        assert batches
        for batch in batches:
            require_stacks(batch, twin.model, 3)


def require_frames_of_one_moment(buffer: ReplayBuffer, start: Callable[..., Any], over: Any) -> None:
    """Each is the number after the one before, or padding, while a thread or process that `start` makes writes."""
    batches = numbered(17)
    buffer.extend(next(batches))

    def write() -> None:
        while not over.is_set():
            buffer.extend(next(batches))

    writer, drawn = start(target=write), 0
    writer.start()
    try:
        while drawn < 200 or buffer.write_count == 17:
            require_consecutive(buffer.sample())
            drawn += 1
    finally:
        over.set()
        writer.join(HANG)


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: SliceSampler(slice_len=2)])
@pytest.mark.parametrize("prefetch", [None, 3])
def test_stacks_are_of_one_moment_while_a_thread_writes(sampler: Callable[[], Sampler], prefetch: int | None) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler(), transform=stack(4), batch_size=32, prefetch=prefetch
    )
    require_frames_of_one_moment(buffer, threading.Thread, threading.Event())


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: SliceSampler(slice_len=2)])
def test_stacks_are_of_one_moment_while_a_process_writes(sampler: Callable[[], Sampler], tmp_path: Path) -> None:
    storage, context = LazyMemmapStorage(50, scratch_dir=tmp_path), multiprocessing.get_context("fork")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler(), transform=stack(4), batch_size=32, shared=True)
    require_frames_of_one_moment(buffer, context.Process, context.Event())
    assert len(buffer) == 50


def numbered(count: int) -> Iterator[TensorDict]:
    """Batches of steps whose numbers go on; an episode ends with each number of `count` * 10 + 9."""
    start = 0
    while True:
        number = torch.arange(start, start + count)
        done = (number % 10 == 9).unsqueeze(-1)
        yield TensorDict({"number": number, "next": {"number": number + 1, "done": done}}, [count])
        start += count


def require_consecutive(batch: Any) -> None:
    for root, following in zip(batch["number"].tolist(), batch["next", "number"].tolist(), strict=True):
        known = [number for number in root if number != PAD]
        assert root == [PAD] * (4 - len(known)) + known
        assert known == list(range(known[-1] - len(known) + 1, known[-1] + 1))
        assert known[0] // 10 == known[-1] // 10
        assert following == [*root[1:], known[-1] + 1]


def test_a_pickled_buffer_stacks() -> None:
    twin = with_next(situation("partly filled", "ragged"))
    buffer = pickle.loads(pickle.dumps(drawing(twin, RandomSampler())))
    require_stacks(buffer.sample(), twin.model, 3)


def test_stacks_follow_a_change_of_the_storage() -> None:
    buffer = drawing(with_next(situation("exactly full", "ragged")), RandomSampler())
    buffer.sample()
    twin = with_next(situation("wrapped mid-episode", "truncated"))
    buffer.set_storage(twin.buffer.storage)
    require_stacks(buffer.sample(), twin.model, 3)


def test_stacks_of_frames_end_where_the_id_changes() -> None:
    steps = {"pixels": torch.arange(5.0).view(1, 5, 1), "episode": torch.tensor([[0, 0, 1, 1, 1]])}
    stacks = FrameStack(2, dim=-1)(TensorDict(steps, [1, 5]))["pixels"]
    assert stacks.tolist() == [[[0, 0], [0, 1], [2, 2], [2, 3], [3, 4]]]
