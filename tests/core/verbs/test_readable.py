"""What lies at a path that holds no steps or no manifest, and what becomes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from cases import each
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer
from rbtool.core.errors import FormatError
from rbtool.core.open_steps import open_steps
from rbtool.core.saved_steps import has_steps
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.datasets import write_walks

# What lies at a path that holds no steps to read, and what to do with it.

MINARI = Path(__file__).parents[2] / "data" / "minari" / "cartpole" / "scripted-v0"
NEITHER = "is not a dataset or checkpoint, and its format is unknown; supported: "


def steps() -> TensorDict:
    flags = {name: torch.tensor([[False], [False], [True]]) for name in ("done", "terminated", "truncated")}
    after = {"observation": torch.ones(3, 2), "reward": torch.ones(3, 1), **flags}
    return TensorDict({"observation": torch.zeros(3, 2), "action": torch.zeros(3, 1), "next": after}, [3])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of a buffer of each kind, a storage's, a dataset, and what is none of these."""
    place = tmp_path_factory.mktemp("places")
    for name, storage in (
        ("plain", LazyTensorStorage(5)),
        ("list", ListStorage(5)),
        ("flat", LazyTensorStorage(5, checkpointer=FlatStorageCheckpointer())),
        ("h5", LazyTensorStorage(5, checkpointer=H5StorageCheckpointer())),
    ):
        buffer = ReplayBuffer(storage=storage)
        buffer.extend(steps())
        buffer.dumps(place / name)
    shutil.copytree(place / "plain" / "storage", place / "storage")
    write_walks(place / "walks", [(3, "open")])
    write_walks(place / "shelf/a/b/walks", [(3, "open")])
    (place / "empty").mkdir()
    (place / "folder").mkdir()
    (place / "folder" / "words.txt").write_text("words")
    (place / "damaged" / ".rbtool").mkdir(parents=True)
    with h5py.File(place / "other.h5", "w") as file:
        file["x"] = [1]
    shutil.copytree(MINARI, place / "minari")
    return place


def of(dataset: Path, verb: str) -> Any:
    verbs: dict[str, Callable[[], Any]] = {
        "inspect": lambda: rbtool.inspect(dataset),
        "sample": lambda: rbtool.sample(dataset, 2),
        "export": lambda: rbtool.export(dataset, dataset.parent / "exported", to="npz"),
    }
    return verbs[verb]()


@each("verb", ["inspect", "sample", "export"])
@each(
    ("name", "code", "sentence", "hint"),
    [
        ("plain", 2, "is the checkpoint of a replay buffer, expected a dataset or", "rb.loads('{place}/plain')"),
        ("list", 2, "is the checkpoint of a replay buffer, expected a dataset or", "rb.loads('{place}/list')"),
        ("flat", 2, "is the checkpoint of a replay buffer", "its steps alone are in {place}/flat/storage"),
        ("h5", 2, "is the checkpoint of a replay buffer", "its steps alone are in {place}/h5/storage/checkpoint.h5"),
        ("plain/storage", 2, "is part of the checkpoint of a replay buffer", "rb.loads('{place}/plain')"),
        ("list/writer", 2, "is part of the checkpoint of a replay buffer", "rb.loads('{place}/list')"),
        ("storage", 2, "is the checkpoint of a storage", "storage.loads('{place}/storage')"),
        ("empty", 4, "is an empty folder, expected a dataset or a checkpoint", ""),
        ("folder", 1, NEITHER, "name the folder of the dataset itself"),
        ("damaged", 1, "was an rbtool dataset or checkpoint, but", ""),
        ("folder/words.txt", 1, "is not a dataset or checkpoint", "rbtool list --formats"),
        (
            "shelf",
            1,
            "is not a dataset or checkpoint, but there are some in it",
            "datasets in it: {place}/shelf/a/b/walks",
        ),
        ("walks/next", 2, "is part of a dataset", "name its folder: {place}/walks"),
        ("walks/next/reward.memmap", 2, "is part of a dataset", "name its folder: {place}/walks"),
        ("walks/.rbtool/manifest.json", 2, "is part of a dataset", "name its folder: {place}/walks"),
    ],
)
def test_what_holds_no_steps_is_named(place: Path, name: str, code: int, sentence: str, hint: str, verb: str) -> None:
    if verb == "inspect" and name in {"plain", "list", "flat", "h5", "plain/storage", "storage"}:
        assert of(place / name, verb).kind == ("buffer" if name == "list" else "inspect")  # it shows what was saved
        return
    with pytest.raises(rbtool.RbtoolError) as refused:
        of(place / name, verb)
    assert refused.value.exit_code == code
    assert str(refused.value).startswith(f"{place / name} {sentence}")
    assert hint.format(place=place) in (refused.value.hint or "")
    assert not (place / "exported").exists()


@pytest.mark.parametrize("verb", ["sample", "export"])
def test_raw_data_are_to_be_converted_first(place: Path, verb: str) -> None:
    with pytest.raises(rbtool.FormatError, match=r"other\.h5 is an HDF5 file not written by rbtool"):
        of(place / "other.h5", verb)
    assert [column.name for column in rbtool.inspect(place / "other.h5").columns] == ["x"]
    with pytest.raises(rbtool.UsageError, match=r"a TED dataset is needed; .* is Minari") as refused:
        of(place / "minari", verb)
    assert refused.value.hint == f"convert it first: rbtool convert {place / 'minari'} DEST"


def test_what_can_be_read_is_let_through(place: Path) -> None:
    assert [has_steps(place / name) for name in ("walks", "flat/storage", "h5/storage/checkpoint.h5")] == [True] * 3
    assert not has_steps(place / "minari", raw=True)
    assert rbtool.inspect(place / "flat" / "storage").steps == 3


# Folders of tensordict or TorchRL without a manifest: what becomes of open ends and of padding.


def plain_steps(lengths: list[int], *, last_open: bool = True) -> TensorDict:
    """Episodes of these lengths, the last one without an end; every number differs."""
    count = sum(lengths)
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[np.cumsum(lengths) - 1] = True
    ends[-1] &= not last_open
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (torch.arange(1.0 * count) + 100 * ids).view(-1, 1)
    after = {"observation": seen + 1, "reward": torch.arange(count * 1.0).view(-1, 1) + 0.5, "done": ends,
             "terminated": ends.clone(), "truncated": torch.zeros_like(ends)}  # fmt: skip
    return TensorDict({"observation": seen, "action": -seen, "episode": ids, "next": after}, [count])


def convert(source: Path, dest: Path, layout: str = "ted") -> Any:
    return rbtool.convert(source, dest, layout=layout)


def preprocess(source: Path, dest: Path, layout: str = "ted") -> Any:
    return rbtool.preprocess(source, None, dest, operations={"clip_reward": "-99:99"}, num_workers=0)


def tree(path: Path, data: TensorDict) -> Path:
    data.memmap(path)
    return path


def saved_buffer(path: Path, data: TensorDict) -> Path:
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(data), checkpointer=FlatStorageCheckpointer()))
    buffer.extend(data)
    buffer.dumps(path)
    return path / "storage"


@each("made", [tree, saved_buffer])
@each(("make", "layout"), [(convert, "ted"), (convert, "packed"), (preprocess, "ted")])
def test_an_open_end_is_made_truncated(tmp_path, made, make, layout) -> None:
    source, dest = made(tmp_path / "source", plain_steps([3, 1, 4])), tmp_path / "made"
    result = make(source, dest, layout)
    assert (result.boundary["terminated"], result.boundary["end_of_file"]) == (2, 1)
    with open_steps(dest) as reader:
        flags = {name: reader.read(("next", name), 0, 8).reshape(-1).tolist() for name in ("done", "truncated")}
        assert reader.episodes.truncated.tolist() == [False, False, True]
    assert flags == {"done": [0, 0, 1, 1, 0, 0, 0, 1], "truncated": [0, 0, 0, 0, 0, 0, 0, 1]}
    assert rbtool.check(dest).findings == ()


def test_an_export_marks_an_open_end(tmp_path: Path) -> None:
    rbtool.export(tree(tmp_path / "tree", plain_steps([2, 2])), tmp_path / "made.npz", to="npz")
    with np.load(tmp_path / "made.npz") as file:
        assert file["next.truncated"].reshape(-1).tolist() == [False, False, False, True]


@each("name", ["terminated", "truncated"])
def test_a_missing_done_is_set_at_flags_inside_an_episode_too(tmp_path: Path, name: str) -> None:
    data = plain_steps([2, 3], last_open=False)
    data = data.exclude(("next", "done"), ("next", "terminated"), ("next", "truncated"))
    data["episode"] = torch.zeros(5, dtype=torch.int64)
    data["next", name] = torch.tensor([0, 1, 0, 0, 1]).bool().unsqueeze(1)
    result = convert(tree(tmp_path / "tree", data), tmp_path / "made")
    with open_steps(result.path) as reader:
        flags = {
            one: reader.read(("next", one), 0, 5).reshape(-1).tolist() for one in ("done", "terminated", "truncated")
        }
    none = [False] * 5
    set_there = [False, True, False, False, True]
    assert flags == {"done": set_there, "terminated": none, "truncated": none} | {name: set_there}
    assert {finding.rule for finding in rbtool.check(result.path).findings} == {"TED004", "TED006"}  # not TED003


def test_a_done_flag_alone_is_an_end(tmp_path: Path) -> None:
    data = plain_steps([2, 3], last_open=False).exclude(("next", "terminated"), ("next", "truncated"), "episode")
    result = convert(tree(tmp_path / "tree", data), tmp_path / "made")
    assert (result.boundary["inferred"], result.boundary["end_of_file"]) == (2, 0)
    assert rbtool.check(tmp_path / "made").findings == ()


def padded(lengths: list[int], mask: Any = "mask") -> TensorDict:
    """The same steps, each episode on a lane of its own, filled up with rows that are not its own."""
    flat, time = plain_steps(lengths), max(lengths)
    lanes = torch.stack([torch.arange(time) + start for start in np.cumsum([0, *lengths[:-1]])]) % len(flat)
    found = flat[lanes.reshape(-1)].reshape(len(lengths), time)
    found.set(mask, torch.arange(time)[None] < torch.tensor(lengths)[:, None])
    return found


@each("mask", ["mask", ("collector", "mask")])
@each("ids", [True, False])
@each("layout", ["ted", "packed"])
def test_padding_is_left_out(tmp_path: Path, mask: Any, ids: bool, layout: str) -> None:
    data = padded([3, 1, 4, 2], mask)
    source = tree(tmp_path / "padded", data if ids else data.exclude("episode"))
    result = convert(source, tmp_path / "made", layout)
    assert (result.steps, result.episodes, len(result.dropped_keys)) == (10, 4, 1)
    expected = plain_steps([3, 1, 4, 2])
    with open_steps(tmp_path / "made") as reader:
        assert reader.episodes.length.tolist() == [3, 1, 4, 2]
        for key in (("observation",), ("action",), ("episode",), ("next", "observation"), ("next", "reward")):
            assert np.array_equal(reader.read(key, 0, 10), expected.get(key).numpy())
            assert np.array_equal(reader.read(key, 3, 6), expected.get(key)[3:6].numpy())
    assert rbtool.check(tmp_path / "made").findings == ()


def test_steps_of_several_agents_with_a_mask_are_not_padded(tmp_path: Path) -> None:
    data = plain_steps([3, 2]).set("mask", torch.ones(5, 2, dtype=torch.bool))
    assert convert(tree(tmp_path / "tree", data), tmp_path / "made").steps == 5


@pytest.mark.parametrize("verb", ["convert", "check", "inspect"])
def test_a_batch_of_lanes_without_a_mask_is_refused(tmp_path: Path, verb: str) -> None:
    source = tree(tmp_path / "lanes", padded([3, 2]).exclude("mask"))
    with pytest.raises(FormatError, match=r"of batch \[2, 3\] without a mask"):
        getattr(rbtool, verb)(source, *([tmp_path / "made"] if verb == "convert" else []))


def test_a_mask_with_gaps_is_refused(tmp_path: Path) -> None:
    data = padded([4, 2])
    data["mask"][0, 1] = False
    with pytest.raises(FormatError, match="mask 'mask' has gaps"):
        convert(tree(tmp_path / "gaps", data), tmp_path / "made")
