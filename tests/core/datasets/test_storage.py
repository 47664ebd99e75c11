"""Rows of a dataset as a storage, its padded trajectories, their queries and windows of steps."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import HANG

import rbtool
from rbtool import Sequence, traj
from rbtool.core.datasets.buffer import DatasetReplayBuffer
from rbtool.core.datasets.storage import DatasetStorage, padded, trajectory_lengths
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, SchemaError, UsageError
from rbtool.core.format.manifest import MANIFEST
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_mixture, write_packed, write_walks


def bytes_below(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(buffer: DatasetReplayBuffer) -> None:
    """Edit in every way there is: a batch, a view, rows, an entry, one element."""
    buffer.sample(4)["action"].fill_(9)
    buffer[:]["observation"].add_(1)
    buffer[:3]["next", "reward"].zero_()
    buffer[torch.tensor([1, 2])] = buffer[torch.tensor([3, 4])]
    buffer.set_("episode", torch.full((13,), 77))
    buffer[0]["action"].neg_()


def act_in_a_child(act: str, buffer: DatasetReplayBuffer, told: Any) -> None:
    """What a child does with a buffer that it inherited or was sent."""
    torch.set_num_threads(1)
    if act == "edit":
        edit(buffer)
    told.send((buffer.sample(5)["index"].tolist(), buffer[:]["observation"].sum().item()))


def test_every_leaf_is_what_the_reader_reads(walks: Path) -> None:
    storage = DatasetStorage(walks)
    with TedReader(walks) as reader:
        assert (len(storage), storage.max_size, storage.shape) == (13, 13, (13,))
        for field in reader.fields:
            found = storage.get(slice(None)).get(field.key)
            assert found.numpy().tobytes() == reader.read(field.key, 0, 13).tobytes(), field.name
            assert tuple(found.shape) == (13, *field.shape)


@pytest.mark.parametrize("split", [False, True])
def test_no_edit_reaches_the_disk(walks: Path, split: bool) -> None:
    before = bytes_below(walks)
    storage = DatasetStorage(walks, split_trajs=split)
    buffer = DatasetReplayBuffer(storage=storage)
    if not split:
        edit(buffer)
        assert (buffer[:]["episode"] == 77).all()
    buffer[:]["observation"].fill_(0)
    assert not buffer[:]["observation"].any()
    del buffer, storage
    assert bytes_below(walks) == before


def test_edits_in_mode_r_plus_reach_the_disk(walks: Path) -> None:
    before = bytes_below(walks)
    writer, reader = (DatasetReplayBuffer(storage=DatasetStorage(walks, mode=mode)) for mode in ("r+", "c"))
    writer.sample(4)["action"].fill_(9)  # a batch is a copy in any mode
    assert bytes_below(walks) == before
    writer[torch.tensor([2])] = writer[torch.tensor([5])]
    writer.set_("episode", torch.full((13,), 77))
    assert (reader[:]["episode"] == 77).all()
    changed = {name for name, data in bytes_below(walks).items() if data != before[name]}
    assert str(walks / "episode.memmap") in changed
    assert str(walks / MANIFEST) not in changed
    with TedReader(walks) as again:
        assert (again.read(("observation",), 2, 3) == again.read(("observation",), 5, 6)).all()


def test_a_pickle_holds_the_path_and_not_the_edits(walks: Path) -> None:
    buffer = DatasetReplayBuffer(storage=DatasetStorage(walks), batch_size=4)
    original = buffer[:].clone()
    edit(buffer)
    data = pickle.dumps(buffer)
    assert len(data) < 4000
    again = pickle.loads(data)
    assert (again[:] == original).all()
    assert (again.batch_size, type(again.writer), again.sample().shape) == (4, type(buffer.writer), (4,))


def test_a_pickle_opens_its_own_dataset_or_none(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = DatasetReplayBuffer(storage=DatasetStorage(walks, split_trajs=True), batch_size=2)
    again = pickle.loads(pickle.dumps(buffer))
    assert (again[:] == buffer[:]).all()
    monkeypatch.chdir(walks.parent)
    storage = DatasetStorage("walks")
    monkeypatch.chdir("/")
    assert len(pickle.loads(pickle.dumps(storage))) == 13
    data = pickle.dumps(DatasetStorage(walks))
    shutil.rmtree(walks)
    with pytest.raises(DatasetNotFoundError):
        pickle.loads(data)
    write_walks(walks, [(5, "open"), (8, "open")])
    with pytest.raises(CorruptDataError, match="it was replaced since"):
        pickle.loads(data)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", ["sample", "edit"])
def test_a_child_draws_the_same_and_keeps_its_edits(walks: Path, method: str, act: str) -> None:
    buffer = DatasetReplayBuffer(storage=DatasetStorage(walks), generator=torch.Generator().manual_seed(4))
    context = multiprocessing.get_context(method)
    answers, told = context.Pipe(duplex=False)
    child = context.Process(target=act_in_a_child, args=(act, buffer, told))
    child.start()
    told.close()  # so that a child which fails is heard of
    index, total = answers.recv()
    child.join(HANG)
    expected = buffer[:]["observation"].sum().item()
    assert child.exitcode == 0
    assert (total == expected) is (act == "sample")
    assert act == "edit" or index == buffer.sample(5)["index"].tolist()
    assert not (buffer[:]["episode"] == 77).any()


def test_copy_on_write_rows_cannot_be_shared(walks: Path) -> None:
    with pytest.raises(SchemaError, match="copy-on-write"):
        DatasetStorage(walks).share()
    shared = DatasetStorage(walks, mode="r+")
    shared.share()
    assert shared.shared


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"mode": "w"}, "the mode is 'w', expected"), ({"mode": "r+", "split_trajs": True}, "padded copies")],
)
def test_arguments_and_datasets_without_rows_are_refused(walks: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DatasetStorage(walks, **arguments)
    write_walks(walks.parent / "none", [])
    for split in (False, True):
        with pytest.raises(UsageError, match="has no steps"):
            DatasetStorage(walks.parent / "none", split_trajs=split)


@pytest.mark.parametrize("mode", ["c", "r+"])
@pytest.mark.parametrize("damage", ["cut", "grown", "removed"])
def test_a_damaged_file_is_refused_and_left_alone(walks: Path, mode: Any, damage: str) -> None:
    leaf = walks / "next" / "observation.memmap"
    data = leaf.read_bytes()
    leaf.unlink()
    if damage != "removed":
        leaf.write_bytes(data[:-8] if damage == "cut" else data + b"12345678")
    before = bytes_below(walks)
    with pytest.raises(CorruptDataError, match=r"next/observation\.memmap"):
        DatasetStorage(walks, mode=mode)
    assert bytes_below(walks) == before


def test_a_replacement_that_was_cut_short_is_finished(walks: Path) -> None:
    walks.rename(walks.with_name(f".{walks.name}.rbtool-old-0123abcd"))
    assert len(DatasetStorage(walks)) == 13
    assert [path.name for path in walks.parent.iterdir()] == [walks.name]


def test_a_changed_manifest_is_refused(walks: Path) -> None:
    manifest = walks / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"steps": 13', b'"steps": 12'))
    with pytest.raises(CorruptDataError, match="was changed after it was written"):
        DatasetStorage(walks)


def test_trajectories_are_those_of_the_episode_table(walks: Path) -> None:
    rows, found = DatasetStorage(walks)[:], DatasetStorage(walks, split_trajs=True)
    assert (len(found), found[:].batch_size) == (4, (4, 6))
    mask = found[:]["mask"]
    assert mask.sum(1).tolist() == [4, 1, 6, 2]
    assert (found[:][mask].exclude("mask", "traj_ids") == rows).all()
    assert found[:]["next", "done"][mask].sum() == 4


def test_write_protected_files_are_refused_in_mode_r_plus(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the superuser may write to any
    with pytest.raises(UsageError, match="may not be written to"):
        DatasetStorage(walks, mode="r+")
    assert len(DatasetStorage(walks)) == 13


@pytest.mark.parametrize("linked", ["action.memmap", "next/observation.memmap", "next"])
def test_nothing_is_written_through_a_symbolic_link(walks: Path, tmp_path: Path, linked: str) -> None:
    outside = tmp_path / "outside"
    (walks / linked).rename(outside)
    (walks / linked).symlink_to(outside)
    before = bytes_below(tmp_path)
    with pytest.raises(UsageError, match=r"is a symbolic link") as caught:
        DatasetStorage(walks, mode="r+")[:]["next", "observation"].fill_(7)
    assert caught.value.hint == f"edit a copy: rbtool convert {walks} DEST --layout ted"
    assert bytes_below(tmp_path) == before
    assert len(DatasetStorage(walks)) == 13  # reading is another matter: the hub's cache consists of links


def test_a_link_to_a_dataset_can_be_edited(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(walks)
    DatasetStorage(tmp_path / "link", mode="r+")[:]["action"].fill_(7)
    assert (DatasetStorage(walks)[:]["action"] == 7).all()


lengths_of_episodes = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def _rows(steps: int) -> TensorDict:
    numbers = torch.arange(1, steps + 1)
    inner = TensorDict({"observation": numbers.unsqueeze(1) * torch.tensor([1.0, -1.0])}, [steps])
    wide = (numbers + 70_000).numpy().astype(np.uint32)
    return TensorDict({"action": numbers.to(torch.bfloat16), "wide": torch.from_numpy(wide), "next": inner}, [steps])


@given(lengths_of_episodes)
def test_padding_puts_every_step_in_its_place(lengths: list[int]) -> None:
    rows = _rows(sum(lengths))
    found = padded(rows, np.array(lengths))
    assert found.batch_size == found["next"].batch_size == (len(lengths), max(lengths))
    starts = np.cumsum([0, *lengths])
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        assert found["mask"][number].tolist() == [step < length for step in range(max(lengths))]
        assert found["traj_ids"][number].tolist() == [number] * length + [0] * (max(lengths) - length)
        for key in ("action", ("next", "observation")):
            assert torch.equal(found[key][number, :length], rows[key][start : start + length])
            assert not found[key][number, length:].any()
        assert found["wide"][number].tolist()[:length] == rows["wide"].tolist()[start : start + length]


@given(lengths_of_episodes, st.data())
def test_a_trajectory_ends_with_its_episode_and_with_done(lengths: list[int], data: st.DataObject) -> None:
    done = np.array(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    kept = done.copy()
    found = trajectory_lengths(np.array(lengths), done)
    ends = {*np.cumsum(lengths).tolist(), *(np.flatnonzero(done) + 1).tolist()}
    assert np.cumsum(found).tolist() == sorted(ends)
    assert (done == kept).all()


def test_trajectories_end_with_their_steps() -> None:
    assert trajectory_lengths(np.array([0, 3, 0, 2, 0]), np.zeros(5, bool)).tolist() == [3, 2]
    found = padded(_rows(3), np.array([3]))
    assert (found.batch_size, found["mask"].tolist()) == ((1, 3), [[True] * 3])


@pytest.mark.parametrize("name", ["mask", "traj_ids"])
def test_an_entry_that_padding_would_replace_is_named(name: str) -> None:
    rows = TensorDict({name: torch.arange(3)}, [3])
    with pytest.raises(RuntimeError, match=f"entry '{name}' of its own"):
        padded(rows, np.array([3]))
    padded(TensorDict({"info": rows}, [3]), np.array([3]))  # deeper down it is in nobody's way


@pytest.mark.peer
@pytest.mark.parametrize("lengths", [[4, 4, 2], [3], [2, 2], [1, 5, 1]])
def test_trajectories_are_padded_as_by_torchrl(lengths: list[int]) -> None:
    collectors = pytest.importorskip("torchrl.collectors.utils")
    rows = _rows(sum(lengths)).exclude("wide")
    done = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    done[np.cumsum(lengths) - 1] = True
    rows["next", "done"] = done
    theirs, ours = collectors.split_trajectories(rows.clone()), padded(rows, np.array(lengths))
    assert (set(theirs.keys(True, True)), theirs.batch_size) == (set(ours.keys(True, True)), ours.batch_size)
    assert (theirs == ours).all()


# Trajectories of datasets: the episode table separates them, and nothing else is read than what is asked for.

EPISODES = [(9, "terminated"), (3, "truncated"), (1, "both"), (1, "terminated"), (12, "open"), (4, "terminated")]
LENGTHS = [length for length, _ in EPISODES]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both layouts."""
    work = tmp_path_factory.mktemp("walks")
    write_walks(work / "ted", EPISODES)  # type: ignore[arg-type]
    write_packed(work / "ted", work / "packed")
    return work


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_trajectories_are_the_episodes(layout: str, both: Path) -> None:
    dataset = rbtool.load_dataset(both / layout)
    found = rbtool.filter_trajectories(dataset)
    assert [one.length for one in found] == LENGTHS
    whole = dataset.storage[:]
    start = 0
    for one in found:
        assert (one.data == whole[start : start + one.length]).all()
        assert one.observation.equal(whole["observation"][start : start + one.length])
        start += one.length


@pytest.mark.parametrize(("layout", "kind"), [("ted", TensorStorage), ("packed", PackedStorage)])
def test_queries_read_only_the_entries_they_need(
    layout: str, kind: Any, both: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = rbtool.load_dataset(both / layout)
    totals = [float(one.data["next", "reward"].double().sum()) for one in dataset.query()]
    asked: list[Any] = []
    monkeypatch.setattr(kind, "read_at", lambda self, index: asked.append(index))
    assert [one.length for one in dataset.query(traj.length > 3)] == [9, 12, 4]
    middle = sorted(totals)[3]
    found = dataset.query(traj.total_reward >= middle)
    assert [float(one.total_reward) for one in found] == [total for total in totals if total >= middle]
    assert found[0]["observation"].shape[0] == found[0].length
    assert asked == []


def test_queries_apply_only_the_transforms_they_need(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = rbtool.Normalize(["observation"], loc=1.0, scale=2.0)
    dataset = rbtool.load_dataset(both / "ted", transform=scale)
    rewards = [one["next", "reward"] for one in dataset.query()]
    first = dataset.query()[0]
    assert first["observation"].equal(dataset[: first.length]["observation"])
    monkeypatch.setattr(rbtool.Normalize, "forward", lambda self, data: None)
    assert all(one["next", "reward"].equal(old) for one, old in zip(dataset.query(), rewards, strict=True))


# Windows of steps of datasets: the episode table separates them, next to a flag of the caller's choice.

NUMBERS = np.repeat(np.arange(len(EPISODES)), LENGTHS)


def assert_whole(batch: Any, width: int) -> None:
    index, valid = batch["index"].reshape(-1, width).numpy(), batch["validity_mask"].reshape(-1, width).numpy()
    for window, real in zip(index, valid, strict=True):
        assert len(set(NUMBERS[window])) == 1
        assert (np.diff(window[real]) == 1).all()
        assert set(window) == set(window[real])


@pytest.mark.parametrize("key", ["done", "terminated"])  # the table says the same, and more
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_windows_stay_in_their_episodes(layout: str, key: str, both: Path) -> None:
    unit = Sequence(4, burn_in=2, done_key=("next", key))
    dataset = rbtool.load_dataset(both / layout, 16, seed=0, sample_unit=unit)
    for _ in range(10):
        batch = dataset.sample()
        assert batch.shape == (96,)
        assert_whole(batch, 6)
        assert batch["observation"].equal(dataset.storage[batch["index"]]["observation"])


@pytest.mark.parametrize("style", ["iterable", "map"])
def test_epochs_of_a_loader_have_each_anchor_once(style: Any, both: Path) -> None:
    options: Any = {"sample_unit": Sequence(3), "sampler": rbtool.SamplerWithoutReplacement()}
    dataset = rbtool.load_dataset(both / "ted", 8, seed=0, **options)
    found = []
    for batch in rbtool.TorchLoader(rbtool.torch_dataset(dataset, seed=0, style=style)):
        assert_whole(batch, 3)
        found += batch["anchor_index"][::3].tolist()
    assert sorted(found) == list(range(len(NUMBERS)))


def test_rows_that_were_written_over_have_the_ends_of_their_flags(both: Path) -> None:
    storage = rbtool.load_dataset(both / "ted", 8).storage
    unit = Sequence(4, done_key=("next", "terminated"))
    assert unit.expand(torch.tensor([0, 9]), {}, storage)[0].tolist() == [0, 1, 2, 3, 9, 10, 11, 11]
    rows = storage[3:4].clone()
    rows["next", "terminated"][:] = True
    storage.set(torch.tensor([3]), rows)
    assert unit.expand(torch.tensor([2]), {}, storage)[0].tolist() == [2, 3, 3, 3]


def test_mixtures_refuse_windows(both: Path, tmp_path: Path) -> None:
    write_mixture(tmp_path / "both.toml", both / "ted", both / "packed")
    with pytest.raises(rbtool.UsageError, match="draws single elements"):
        rbtool.load_dataset(tmp_path / "both.toml", 8, sample_unit=Sequence(2))
