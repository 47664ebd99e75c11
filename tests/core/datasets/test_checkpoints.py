"""Checkpoints of buffers on datasets: loaded by buffers on other layouts, and by plain buffers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import without_digests

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.datasets.buffer import DatasetReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.testing.datasets import write_packed, write_walks
from rbtool.core.writers.max_value import TensorDictMaxValueWriter

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without": lambda: SamplerWithoutReplacement(shuffle=True),
    "slices": lambda: SliceSampler(num_slices=2, traj_key="episode", strict_length=False),
    "slices without": lambda: SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode", strict_length=False),
    "prioritized": lambda: PrioritizedSampler(13, 0.7, 0.5),
}
FORMS = {
    None: lambda: None,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}
LAYOUTS = ("ted", "packed")


@pytest.fixture
def layouts(walks: Path, tmp_path: Path) -> Path:
    shutil.move(walks, tmp_path / "ted")
    write_packed(tmp_path / "ted", tmp_path / "packed")
    return tmp_path


def opened(path: Path, sampler: str = "random", form: str | None = None, seed: int = 3) -> DatasetReplayBuffer:
    buffer = load_dataset(path, batch_size=4, sampler=SAMPLERS[sampler](), seed=seed)
    buffer._storage.checkpointer = FORMS[form]()
    return buffer


def drawn(buffer: DatasetReplayBuffer, batches: int = 12) -> list[Any]:
    return [buffer.sample()["observation"].tolist() for _ in range(batches)]


@pytest.mark.parametrize(
    ("sampler", "form"), [*((sampler, None) for sampler in SAMPLERS), *(("slices", form) for form in FORMS if form)]
)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_the_same_batches_follow(layouts: Path, source: str, target: str, sampler: str, form: str | None) -> None:
    saved, other = opened(layouts / source, sampler, form), opened(layouts / target, sampler, form, seed=9)
    if sampler == "prioritized":
        saved.update_priority(torch.arange(5), torch.arange(5) + 1.0)
    drawn(saved, 2)
    saved.dumps(layouts / "saved")
    other.loads(layouts / "saved")
    assert drawn(other) == drawn(saved)
    assert torch.equal(other[:]["next", "reward"], saved[:]["next", "reward"])


def test_edits_that_were_not_saved_are_gone(layouts: Path) -> None:
    ted = opened(layouts / "ted")
    before = ted[:]["observation"].clone()
    opened(layouts / "packed").dumps(layouts / "saved")
    ted[:]["observation"].add_(1)
    ted.loads(layouts / "saved")
    assert torch.equal(ted[:]["observation"], before)


def test_datasets_that_share_no_history_are_compared(layouts: Path) -> None:
    with open_steps(layouts / "ted") as reader:
        saved = save_checkpoint(reader, layouts / "h5", "h5")
    loaded = write_packed(layouts / "h5", layouts / "again")
    assert loaded.content_digest == Manifest.load(layouts / "packed").content_digest
    for name in ("packed", "again"):
        forget(layouts / name)
        opened(layouts / name).dumps(layouts / f"saved-{name}")
        opened(layouts / "ted").loads(layouts / f"saved-{name}")
        opened(layouts / "packed").loads(layouts / f"saved-{name}")
    shutil.move(layouts / "again", layouts / "gone")
    with pytest.raises(SchemaError, match=r"; .*again cannot be compared"):
        opened(layouts / "ted").loads(layouts / "saved-again")
    assert saved.steps == 13


def forget(path: Path) -> None:
    """Take the provenance away, as if a dataset had been recorded in this layout."""
    manifest = Manifest.load(path)
    (path / MANIFEST).unlink()
    replace(manifest, provenance=()).save(path)


@pytest.mark.parametrize(("source", "target"), [("ted", "packed"), ("packed", "ted"), ("packed", "packed")])
@pytest.mark.parametrize("steps", [13, 12])
def test_other_data_is_refused_and_nothing_changes(layouts: Path, source: str, target: str, steps: int) -> None:
    write_walks(layouts / "other-ted", [(steps, "open")], seed=8)
    write_packed(layouts / "other-ted", layouts / "other-packed")
    opened(layouts / f"other-{source}").dumps(layouts / "saved")
    buffer = opened(layouts / target)
    expected = drawn(opened(layouts / target))
    with pytest.raises(SchemaError):
        buffer.loads(layouts / "saved")
    assert drawn(buffer) == expected


def test_a_dataset_that_was_replaced_or_edited(layouts: Path) -> None:
    opened(layouts / "packed").dumps(layouts / "saved")
    DatasetStorage(layouts / "ted", mode="r+")[:]["observation"].add_(1)
    with pytest.raises(CorruptDataError, match="observation"):
        DatasetStorage(layouts / "ted", mode="r+").loads(layouts / "saved" / "storage")
    with pytest.raises(SchemaError, match="whole trajectories"):
        DatasetStorage(layouts / "ted", split_trajs=True).loads(layouts / "saved" / "storage")
    write_walks(layouts / "other", [(13, "open")], seed=8)
    shutil.rmtree(layouts / "packed")
    write_packed(layouts / "other", layouts / "packed")
    storage = DatasetStorage(layouts / "other")
    with pytest.raises(SchemaError, match="packed was replaced since"):
        storage.loads(layouts / "saved" / "storage")


def test_what_is_no_checkpoint(layouts: Path) -> None:
    (layouts / "plain").mkdir()
    storage = DatasetStorage(layouts / "ted")
    for path, kind in (("plain", FormatError), ("absent", DatasetNotFoundError)):
        with pytest.raises(kind):
            storage.loads(layouts / path)
    opened(layouts / "packed").dumps(layouts / "saved")
    note = without_digests(layouts / "saved") / "storage" / "packed.json"
    note.write_text("{}")
    with pytest.raises(CorruptDataError, match=r"packed\.json has {}, expected an object with path"):
        storage.loads(note.parent)
    storage.register_load_hook(lambda data, out: data)
    with pytest.raises(UsageError, match="no row that hooks could change"):
        storage.loads(note.parent)


def plain(capacity: int, kind: Any = FlatStorageCheckpointer, **how: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity, checkpointer=kind()), **how)


@pytest.mark.parametrize("kind", [FlatStorageCheckpointer, H5StorageCheckpointer])
@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("more", [0, 5])
def test_rows_of_a_dataset_go_into_a_plain_buffer(
    walks: Path, tmp_path: Path, kind: Any, layout: str, more: int
) -> None:
    if layout == "packed":
        write_packed(walks, tmp_path / "dataset")
    else:
        walks.rename(tmp_path / "dataset")
    source = load_dataset(tmp_path / "dataset")
    source._storage.checkpointer = kind()
    source.dumps(tmp_path / "saved")
    target = plain(len(source) + more, kind)
    target.loads(tmp_path / "saved")
    assert torch.equal(target[:]["observation"], source[:]["observation"])
    row = target[:1].clone()
    assert target.extend(row).tolist() == [len(source) if more else 0]
    assert target.write_count == len(source) + 1
    source.loads(tmp_path / "saved")


def test_a_ranking_is_made_of_the_rows(walks: Path, tmp_path: Path) -> None:
    source = load_dataset(walks)
    source._storage.checkpointer = FlatStorageCheckpointer()
    source.dumps(tmp_path / "saved")
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    target = TensorDictReplayBuffer(
        storage=LazyTensorStorage(len(source), checkpointer=FlatStorageCheckpointer()), writer=writer
    )
    target.loads(tmp_path / "saved")
    lowest = int(target[:]["next", "reward"].argmin())
    row = target[:1].clone()
    row["next", "reward"][:] = 1e6
    target.extend(row)
    assert float(target[:]["next", "reward"][lowest]) == 1e6


def test_a_writer_whose_state_was_lost_is_still_found(tmp_path: Path, walks: Path) -> None:
    buffer = plain(20)
    buffer.extend(load_dataset(walks)[:])
    buffer.dumps(tmp_path / "saved")
    (tmp_path / "saved" / "writer" / "metadata.json").unlink()
    with pytest.raises(CorruptDataError, match=r"metadata\.json is missing"):
        plain(20).loads(tmp_path / "saved")
    with pytest.raises(DatasetNotFoundError, match="not hold the state of a writer"):
        plain(20).loads(without_digests(tmp_path / "saved"))


def test_a_recording_is_saved_by_its_buffer(tmp_path: Path, walks: Path) -> None:
    rows = load_dataset(walks)[:]
    buffer = ReplayBuffer(storage=PackedStorage.create(tmp_path / "recording"))
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    target = plain(len(rows))
    target.loads(tmp_path / "saved")
    assert torch.equal(target[:]["action"], rows["action"])
