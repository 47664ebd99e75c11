"""Buffers on datasets: `preprocess` as TorchRL documents it, the bar that it shows, and their checkpoints."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import without_digests
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.datasets.buffer import DatasetReplayBuffer, ProgressBar
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_packed, write_walks
from rbtool.core.writers.max_value import TensorDictMaxValueWriter


@pytest.mark.parametrize("arguments", [{"num_chunks": 3}, {"chunksize": 5}, {"chunksize": 0}, {}])
def test_the_example_of_the_data_page(walks: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    seen: list[int] = []

    def func(data: Any) -> Any:
        seen.append(data.numel() if data.ndim else 0)
        return data.set("obs_norm", data.get("observation").norm(dim=-1))

    buffer = load_dataset(walks)
    storage = buffer.preprocess(func, num_workers=0, dest=tmp_path / "new", **arguments)
    assert isinstance(storage, TensorStorage)
    assert torch.equal(storage[:]["obs_norm"], buffer[:]["observation"].norm(dim=-1))
    expected = {"num_chunks": [5, 5, 3], "chunksize": [5, 5, 3]}.get(next(iter(arguments), ""))
    assert set(seen) == ({0} if not expected or not arguments.get("chunksize", 1) else set(expected))


def double(row: Any) -> Any:
    return {"a": row["action"] * 2, "drawn": torch.tensor(random.random())}


def test_random_numbers_depend_on_the_generator_and_not_on_the_workers(walks: Path, tmp_path: Path) -> None:
    buffer = load_dataset(walks)

    def drawn(seed: int | None, **arguments: Any) -> list[float]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        dest = tmp_path / str(len(list(tmp_path.iterdir())))
        rows: Any = buffer.preprocess(double, dest=dest, generator=generator, **arguments)[:]
        return rows["drawn"].tolist()  # type: ignore[no-any-return]

    one, two, plain = (drawn(seed, num_workers=0) for seed in (1, 2, None))
    assert drawn(1, num_workers=2, mp_start_method="fork") == one
    assert len({*map(tuple, (one, two, plain))}) == 3
    assert len(set(one)) == 13


def test_preprocess_takes_the_first_frames(walks: Path, tmp_path: Path) -> None:
    buffer = load_dataset(walks)
    for frames, expected in ((6, 6), (1000, 13)):
        storage = buffer.preprocess(lambda row: row, num_workers=0, num_frames=frames, dest=tmp_path / str(frames))
        assert (len(storage), Manifest.load(tmp_path / str(frames)).steps) == (expected, expected)
    cut = buffer.preprocess(lambda row: row, num_workers=0, num_frames=6, dest=tmp_path / "c")
    assert cut[5]["next", "truncated"].all()
    storage = load_dataset(walks).preprocess(
        double, 0, 0, max_tasks_per_child=1, worker_threads=3, index_with_generator=True, dest=tmp_path / "new"
    )
    assert len(storage) == 13


def test_the_progress_bar_escapes_control_characters(
    walks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_dataset(walks).preprocess(lambda td: td, num_workers=0, chunksize=3, pbar=True, dest=tmp_path / "a")
    out, err = capsys.readouterr()
    assert out == ""
    assert "preprocessing: 100%" in err
    assert "13/13" in err
    load_dataset(walks).preprocess(lambda td: td, num_workers=0, dest=tmp_path / "b")
    assert capsys.readouterr() == ("", "")
    bar = ProgressBar()
    bar.start("reading \x9b2J", 2, "steps")
    bar.advance(2)
    bar.note("left out: a\x1b[31m\u202eb")
    bar.done("\x1b[2J")
    shown = capsys.readouterr().err
    assert r"left out: a\x1b[31m\u202eb" in shown
    assert not any(sign in shown for sign in ("\x9b", "\u202e", "\x1b[2J"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 1}, RuntimeError, "dim is 1, expected 0"),
        ({"pool": object()}, ValueError, "pool is set"),
        ({"chunksize": 2, "num_chunks": 2}, ValueError, "both set"),
        ({"chunksize": -1}, ValueError, "chunksize is -1, expected a number from 0"),
        ({"num_chunks": 0}, ValueError, "num_chunks is 0, expected a number from 1"),
        ({"worker_threads": 0}, ValueError, "worker_threads is 0"),
        ({"max_tasks_per_child": True}, ValueError, "max_tasks_per_child is True"),
        ({"num_frames": 0}, ValueError, "num_frames is 0"),
        ({"num_workers": -1}, ValueError, "-1"),
        ({"mp_start_method": "threads"}, ValueError, "threads"),
        ({"fn": lambda row: 1 / 0}, RbtoolError, "ZeroDivisionError"),
        ({"fn": lambda row: None}, SchemaError, "it returned None"),
    ],
)
def test_refused_arguments_leave_nothing_behind(walks, tmp_path, arguments, error, message) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        load_dataset(walks).preprocess(**{"fn": double, "num_workers": 0, "dest": tmp_path / "new", **arguments})
    assert sorted(tmp_path.iterdir()) == before


def test_preprocess_refuses_storages_that_are_no_dataset(walks: Path, tmp_path: Path) -> None:
    rows = load_dataset(walks)[:]
    listed: Any = DatasetReplayBuffer(storage=ListStorage(4))
    with pytest.raises(RuntimeError, match="holds a ListStorage, expected a TensorStorage"):
        listed.preprocess(double, dest=tmp_path / "new")
    padded: Any = load_dataset(walks, split_trajs=True)
    with pytest.raises(UsageError, match="whole trajectories"):
        padded.preprocess(double, dest=tmp_path / "new")
    edited: Any = load_dataset(walks)
    edited.storage[0:2] = rows[2:4]
    with pytest.raises(SchemaError, match="written over in this process"):
        edited.preprocess(double, dest=tmp_path / "new")


@pytest.mark.parametrize("make", [TensorStorage, lambda rows: LazyMemmapStorage(20)])
def test_preprocess_takes_rows_that_are_in_no_dataset(walks: Path, tmp_path: Path, make: Callable[[Any], Any]) -> None:
    rows: Any = TensorDict(load_dataset(walks)[:].to_dict(), [13])
    storage = make(rows)
    if not len(storage):
        storage.set(range(13), rows)
    result = DatasetReplayBuffer(storage=storage).preprocess(double, num_workers=0, dest=tmp_path / "new")
    assert torch.equal(result[:]["a"], rows["action"] * 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new", "walks"]


@pytest.mark.parametrize("split_trajs", [False, True])
def test_functions_on_datasets_take_a_buffer_for_its_dataset(walks: Path, tmp_path: Path, split_trajs: bool) -> None:
    buffer = load_dataset(walks, split_trajs=split_trajs)
    result = rbtool.preprocess(buffer, lambda td: td[:2], tmp_path / "new", unit="episode", num_workers=0)
    assert (result.source, result.steps, result.episodes) == (walks, 7, 4)
    with pytest.raises(SchemaError, match="the rows of a ListStorage are in no dataset on disk"):
        rbtool.preprocess(DatasetReplayBuffer(storage=ListStorage(4)), double, tmp_path / "other")


# Checkpoints of buffers on datasets: loaded by buffers on other layouts, and by plain buffers.

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without": lambda: SamplerWithoutReplacement(shuffle=True),
    "slices": lambda: SliceSampler(num_slices=2, traj_key="episode", strict_length=False),
    "slices without": lambda: SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode", strict_length=False),
    "prioritized": lambda: PrioritizedSampler(13, 0.7, 0.5),
}
FORMS = {
    None: lambda: None, "flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}  # fmt: skip
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
def test_a_loaded_buffer_continues_with_the_same_batches(
    layouts: Path, source: str, sampler: str, form: str | None
) -> None:
    turn = list(SAMPLERS).index(sampler) + list(FORMS).index(form) + LAYOUTS.index(source)
    target = LAYOUTS[turn % 2]  # the other layout for each second sampler
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


def test_datasets_without_a_common_history_are_compared(layouts: Path) -> None:
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


def test_a_replaced_or_edited_dataset_is_refused(layouts: Path) -> None:
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


def test_folders_that_are_no_checkpoints_are_refused(layouts: Path) -> None:
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
def test_rows_of_a_dataset_go_into_a_plain_buffer(walks, tmp_path, kind, layout: str, more: int) -> None:
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


def test_a_ranking_writer_ranks_the_loaded_rows(walks: Path, tmp_path: Path) -> None:
    source = load_dataset(walks)
    source._storage.checkpointer = FlatStorageCheckpointer()
    source.dumps(tmp_path / "saved")
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    storage = LazyTensorStorage(len(source), checkpointer=FlatStorageCheckpointer())
    target = TensorDictReplayBuffer(storage=storage, writer=writer)
    target.loads(tmp_path / "saved")
    lowest = int(target[:]["next", "reward"].argmin())
    row = target[:1].clone()
    row["next", "reward"][:] = 1e6
    target.extend(row)
    assert float(target[:]["next", "reward"][lowest]) == 1e6


def test_a_checkpoint_without_its_writer_is_refused(tmp_path: Path, walks: Path) -> None:
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
