"""PackedStorage gives the batches that the same dataset gives in layout `ted`, and never edits it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.buffer import load_dataset
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.format.digest import digest_file
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.format.packed.row_files import RowCodec
from rbtool.core.format.packed.schema import PackedSchema
from rbtool.core.format.ted.builder import Origin
from rbtool.core.format.ted.reader import TedReader
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages import packed
from rbtool.core.storages.dataset import dataset_tensors
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.pytree import tree_spec_of
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.testing.storages import ROWS, StorageTests

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
def test_batches_are_those_of_ted(
    odd: Path, name: str, way: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_LARGE", 1 if compiled else 1 << 40)
    storage, rows = PackedStorage(odd / name, **WAYS[way]), dataset_tensors(odd / "ted")
    drawn = torch.from_numpy(np.random.default_rng(1).integers(-16, 16, (6, 9)))
    for index in (*drawn, drawn, torch.tensor([], dtype=torch.int64), slice(3, 14, 2), 7, -1, [15, 0], range(2, 5)):
        expected = rows[list(index)] if isinstance(index, range) else rows[index]
        assert_same(storage[index], expected)
    assert_same(pickle.loads(pickle.dumps(storage))[:], rows[:])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain", "small"])
def test_single_entries(odd: Path, name: str, way: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_LARGE", 1 if compiled else 1 << 40)
    storage, rows = PackedStorage(odd / name, **WAYS[way]), dataset_tensors(odd / "ted")
    drawn = torch.from_numpy(np.random.default_rng(1).integers(-16, 16, (2, 9)))
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


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63), batch=st.integers(1, 20))
def test_the_same_seed_draws_the_same_rows_from_either_layout(odd: Path, seed: int, batch: int) -> None:
    drawn = []
    for name in ("ted", "plain", "small"):
        buffer = load_dataset(odd / name, batch, seed=seed)
        drawn.append(buffer.sample())
    assert_same(drawn[1], drawn[0])
    assert_same(drawn[2], drawn[0])


def test_a_sampler_without_replacement_sees_every_row_once(odd: Path) -> None:
    storage = PackedStorage(odd / "plain")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=5)
    seen = torch.cat([batch["index"] for batch in buffer])
    assert sorted(seen.tolist()) == list(range(16))


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


def test_a_buffer_goes_on_with_the_same_batches(odd: Path, tmp_path: Path) -> None:
    one, other = (load_dataset(odd / "plain", 4, seed=seed) for seed in (1, 2))
    one.sample()
    one.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for _ in range(5):
        assert_same(other.sample(), one.sample())
    assert sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*")) < 100_000
    with pytest.raises(SchemaError, match="is of other data"):
        load_dataset(odd / "small", 4).loads(tmp_path / "saved")


def test_what_cannot_be_opened_is_said(odd: Path, tmp_path: Path) -> None:
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
