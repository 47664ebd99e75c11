"""Packed datasets and recordings give the same batches and draws as the same dataset in layout `ted`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.format.files import digest_file
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.format.packed.schema import PackedSchema, RowCodec
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages import packed
from rbtool.core.storages.dataset import dataset_tensors
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.packed import PackedRecording, PackedStorage
from rbtool.core.storages.pytree import tree_spec_of
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.testing.storages import ROWS, StorageTests, same

PLAN = DatasetPlan(
    (5, 1, 7, 3), ("terminated", "open", "truncated", "both"), (False, False, True, False), ODD_LEAVES, "set"
)
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {}, "views": {"views": True}, "large": {"larger_than_memory": True},
    "large views": {"larger_than_memory": True, "views": True},
}  # fmt: skip


def pack(ted: Path, packed: Path, codecs: tuple[str, ...] = ()) -> Path:
    with TedReader(ted) as reader:
        stored = [one.field for one in PackedSchema.of(reader.fields).fields if one.field.row_bytes]
        chosen = {one.key: RowCodec.parse(codecs[n % len(codecs)]) for n, one in enumerate(stored) if codecs and n % 2}
        write_dataset(reader, packed, "packed", Origin.of(reader.manifest, reader.documents()), chosen)
    return packed


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in layout `ted`, plainly packed, and with compressed fields."""
    work = tmp_path_factory.mktemp("odd")
    write_plan(PLAN, work / "ted")
    pack(work / "ted", work / "plain")
    pack(work / "ted", work / "small", ("zstd:1", "lz4"))
    return work


def assert_same(found: Any, expected: Any) -> None:
    structure = tree_spec_of(expected)
    for name, one, other in zip(structure.paths(), structure.flatten(found), structure.flatten(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        bits = [leaf.contiguous().reshape(-1).view(torch.uint8) if leaf.numel() else leaf for leaf in (one, other)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain", "small"])
def test_batches_and_single_entries_are_those_of_ted(
    odd: Path, name: str, way: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_LARGE", 1 if compiled else 1 << 40)
    storage, rows = PackedStorage(odd / name, **WAYS[way]), dataset_tensors(odd / "ted")
    drawn = torch.from_numpy(np.random.default_rng(1).integers(-16, 16, (6, 9)))
    for index in (*drawn, drawn, torch.tensor([], dtype=torch.int64), slice(3, 14, 2), 7, -1, [15, 0], range(2, 5)):
        expected = rows[list(index)] if isinstance(index, range) else rows[index]
        assert_same(storage[index], expected)
    assert_same(pickle.loads(pickle.dumps(storage))[:], rows[:])
    for index in (drawn[0], drawn, torch.tensor([], dtype=torch.int64), slice(3, 14, 2)):
        for key in rows.keys(True, True):
            path = (key,) if isinstance(key, str) else tuple(key)
            assert_same(storage.entry(path, index), rows[index].get(key))
    assert storage.entry(("absent",), slice(0, 1)) is None
    with pytest.raises(IndexError, match="row is 16"):
        storage.entry(("action",), torch.tensor([16]))


def test_views_share_one_piece_of_memory(odd: Path) -> None:
    batch = PackedStorage(odd / "plain", views=True)[torch.arange(9)]
    pointers = {batch[key].untyped_storage().data_ptr() for key in ("action", "x", ("next", "x"), ("next", "done"))}
    assert len(pointers) == 1
    apart = PackedStorage(odd / "plain")[torch.arange(9)]
    assert all(leaf.is_contiguous() for leaf in apart.values(True, True))


@pytest.mark.parametrize("way", WAYS)
def test_edits_reach_neither_the_dataset_nor_other_batches(odd: Path, way: str) -> None:
    digests = {path: digest_file(path) for path in (odd / "plain").rglob("*") if path.is_file()}
    storage = PackedStorage(odd / "plain", **WAYS[way])
    for index in (torch.arange(5), slice(0, 5), 3):
        before = storage[index].clone()
        for leaf in storage[index].values(True, True):
            leaf.zero_()
        assert_same(storage[index], before)
    assert digests == {path: digest_file(path) for path in digests}


class TestContract(StorageTests):
    """The contract of every storage."""

    writes = False

    @pytest.fixture(autouse=True)
    def _dataset(self, tmp_path: Path) -> None:
        write_walks(tmp_path / "ted", [(6, "terminated"), (4, "open")])
        self.packed = pack(tmp_path / "ted", tmp_path / "packed")

    def make(self) -> PackedStorage:
        storage = PackedStorage(self.packed)
        assert len(storage) == ROWS
        return storage


def test_loading_picks_the_storage_by_the_manifest(odd: Path) -> None:
    storage = load_dataset(odd / "small")._storage
    assert isinstance(storage, PackedStorage)
    assert storage.path == odd / "small"
    assert storage.content_digest == Manifest.load(odd / "small").content_digest
    assert storage.episodes.length.tolist() == [5, 1, 7, 3]
    with pytest.raises(UsageError, match="cannot be edited in place"):
        load_dataset(odd / "small", mode="r+")
    with pytest.raises(UsageError, match="the mode is 'w', expected"):
        load_dataset(odd / "small", mode="w")  # type: ignore[arg-type]


def test_whole_trajectories_are_those_of_ted(tmp_path: Path) -> None:
    write_walks(tmp_path / "ted", [(6, "terminated"), (4, "open"), (1, "both")])
    pack(tmp_path / "ted", tmp_path / "packed")
    one, other = (load_dataset(tmp_path / name, 3, split_trajs=True, seed=0).sample() for name in ("ted", "packed"))
    assert_same(other, one)


def test_nothing_can_be_written(odd: Path) -> None:
    storage = PackedStorage(odd / "plain")
    with pytest.raises(SchemaError, match="is read-only"):
        storage[0] = storage[1]
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        load_dataset(odd / "plain").extend(storage[:2])
    with pytest.raises(SchemaError, match="belongs to other data"):
        storage.load_state_dict(PackedStorage(odd / "small").state_dict())


def test_a_restored_buffer_continues_with_the_same_batches(odd: Path, tmp_path: Path) -> None:
    one, other = (load_dataset(odd / "plain", 4, seed=seed) for seed in (1, 2))
    one.sample()
    one.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for _ in range(5):
        assert_same(other.sample(), one.sample())
    assert sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*")) < 100_000
    with pytest.raises(SchemaError, match="refers to other data"):
        load_dataset(odd / "small", 4).loads(tmp_path / "saved")


def test_other_layouts_and_empty_datasets_are_refused(odd: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has layout ted, expected packed"):
        PackedStorage(odd / "ted")
    write_plan(DatasetPlan((), (), (), ()), tmp_path / "none")
    with pytest.raises(UsageError, match="has no steps"):
        PackedStorage(pack(tmp_path / "none", tmp_path / "packed"))


def test_a_dataset_that_was_replaced_is_not_taken_for_the_old_one(odd: Path, tmp_path: Path) -> None:
    storage = PackedStorage(pack(odd / "ted", tmp_path / "packed"))
    pickled = pickle.dumps(storage)
    (tmp_path / "packed").rename(tmp_path / "old")
    pack(odd / "ted", tmp_path / "packed", ("zstd",))
    with pytest.raises(CorruptDataError, match="was replaced since"):
        pickle.loads(pickled)


EPISODES = [(9, "terminated"), (3, "truncated"), (1, "both"), (12, "open"), (4, "terminated")]
STEPS = 29
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "slices": lambda: SliceSampler(slice_len=3),
    "batched": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True, batched=True),
    "hanging over": lambda: SliceSampler(num_slices=4, span=True, strict_length=False, weight="step"),
    "slices by id": lambda: SliceSampler(slice_len=3, traj_key="episode"),
    "slices by flag": lambda: SliceSampler(slice_len=3, end_key=("next", "done")),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "prioritized": lambda: PrioritizedSampler(STEPS, 0.6, 0.4),
    "prioritized slices": lambda: PrioritizedSliceSampler(STEPS, 0.6, 0.4, slice_len=3),
}
GROWING = {name: make for name, make in SAMPLERS.items() if name not in {"slices by id", "slices by flag"}}


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both layouts."""
    work = tmp_path_factory.mktemp("walks")
    write_walks(work / "ted", EPISODES)  # type: ignore[arg-type]
    pack(work / "ted", work / "packed")
    return work


def drawn(path: Path, sampler: Sampler, seed: int, count: int = 5) -> list[Any]:
    """Batches of a dataset; what is prioritized learns its priorities between them."""
    buffer = load_dataset(path, 12, sampler=sampler, seed=seed)
    found = []
    for _ in range(count):
        batch = buffer.sample()
        found.append(batch)
        if isinstance(sampler, PrioritizedSampler):
            index = batch["index"].reshape(-1)
            buffer.update_priority(index, batch["next", "reward"].abs().reshape(-1) + index)
    return found


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_draws_the_same_from_either_layout(walks: Path, name: str, seed: int) -> None:
    ted, packed = (drawn(walks / layout, SAMPLERS[name](), seed) for layout in ("ted", "packed"))
    for one, other in zip(ted, packed, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert one.batch_size == other.batch_size
        assert same(one, other)
    assert not same(ted[0], ted[1])


def steps(first: int, count: int, *, done: bool) -> TensorDict:
    """Rows that count on; the last may end an episode."""
    number = torch.arange(first, first + count)
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[-1] = done
    after = {"reward": torch.ones(count, 1), "done": ends, "terminated": ends.clone(), "truncated": ends & False}
    return TensorDict({"number": number, "next": {"number": number + 1, **after}}, [count])


@pytest.mark.parametrize("name", GROWING)
def test_a_recording_gives_what_a_ring_in_memory_gives(tmp_path: Path, name: str) -> None:
    buffers = [
        TensorDictReplayBuffer(
            storage=storage, sampler=GROWING[name](), batch_size=12, generator=torch.Generator().manual_seed(3)
        )
        for storage in (PackedRecording(tmp_path / "recording", max_size=STEPS), LazyTensorStorage(STEPS))
    ]
    first = 0
    for count, done in ((3, False), (2, True), (1, True), (4, False), (7, True), (5, False), (7, False)):
        rows = steps(first, count, done=done)
        buffers[0].extend(rows.clone())
        buffers[1].extend(rows.set("episode", torch.full((count,), (first > 4) + (first > 5) + (first > 16))))
        first += count
        if name != "in order" or first >= 12:
            one, other = (buffer.sample() for buffer in buffers)
            assert same(one, other.select(*one.keys(True, True)))
    assert first == STEPS


def test_slices_of_a_recording_without_bounds_never_cross_episodes(tmp_path: Path) -> None:
    recording = PackedStorage.create(tmp_path / "recording")
    samplers = (SliceSampler(slice_len=4), PrioritizedSliceSampler(8, 0.6, 0.4, slice_len=4))
    buffers = [TensorDictReplayBuffer(storage=recording, sampler=one, batch_size=32) for one in samplers]
    episode_of: list[int] = []
    for turn in range(12):
        rows = steps(len(episode_of), 5, done=turn % 3 == 2)
        episode_of += [turn // 3] * 5
        buffers[0].extend(rows)
        for buffer in buffers:
            batch = buffer.sample()
            number = batch["number"].view(-1, 4)
            assert (number.diff(dim=1) == 1).all()
            assert batch["episode"].tolist() == [episode_of[one] for one in batch["number"].tolist()]
            assert (batch["episode"].view(-1, 4).diff(dim=1) == 0).all()
    assert recording.episode_lengths().tolist() == [15] * 4
    buffers[0].extend(steps(60, 5, done=False))
    assert recording.episode_lengths().tolist() == [15] * 4  # the fifth is under way
    recording.finish()
    assert recording.episode_lengths().tolist() == [15] * 4 + [5]
    assert PackedStorage(tmp_path / "recording").episode_lengths().tolist() == [15] * 4 + [5]
    assert buffers[0].sample()["number"].max() <= 64


def test_a_write_counts_in_the_log_and_a_refused_one_does_not(tmp_path: Path) -> None:
    recording = PackedRecording(tmp_path / "recording", max_size=100)
    recording.set(range(5), steps(0, 5, done=True))
    recording.set(5, steps(5, 1, done=False)[0])
    assert recording.log.now == (6, 6, 0)
    for place, rows in ((0, steps(0, 1, done=False)), (6, steps(6, 1, done=False).to(torch.float64))):
        with pytest.raises(SchemaError):
            recording.set(slice(place, place + 1), rows)
    assert recording.log.now == (6, 6, 0)
    recording.finish()
    assert recording.log.now.irregular == 1


def test_nothing_is_added_behind_an_episode_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = PackedRecording(tmp_path / "recording")
    recording.set(range(5), steps(0, 5, done=True))
    with monkeypatch.context() as patched:
        patched.setattr(PackedRecorder, "add_episode", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            recording.set(range(5, 8), steps(5, 3, done=True))
    assert recording[:]["number"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SchemaError, match="nothing can be added"):
        recording.set(range(5, 8), steps(5, 3, done=True))


def test_a_closed_recording_tells_how_to_make_a_dataset_of_it(tmp_path: Path) -> None:
    recording = PackedRecording(tmp_path / "recording")
    recording.set(range(5), steps(0, 5, done=True))
    recording.close()
    with pytest.raises(SchemaError, match="is closed and can no longer be read") as raised:
        recording[0]
    assert "rbtool repair" in str(raised.value.hint)
