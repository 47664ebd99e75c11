"""What lies at a path that holds no steps to read, and what to do with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer
from rbtool.core.saved_steps import has_steps
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.datasets import write_walks

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


@pytest.mark.parametrize("verb", ["inspect", "sample", "export"])
@pytest.mark.parametrize(
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
def test_a_table_holds_no_steps(place: Path, verb: str) -> None:
    with pytest.raises(rbtool.FormatError, match=r"other\.h5 is an HDF5 file not written by rbtool"):
        of(place / "other.h5", verb)
    assert [column.name for column in rbtool.inspect(place / "other.h5").columns] == ["x"]


@pytest.mark.parametrize("verb", ["sample", "export"])
def test_a_raw_dataset_is_to_be_converted(place: Path, verb: str) -> None:
    with pytest.raises(rbtool.UsageError, match=r"a TED dataset is needed; .* is Minari") as refused:
        of(place / "minari", verb)
    assert refused.value.hint == f"convert it first: rbtool convert {place / 'minari'} DEST"


def test_what_can_be_read_is_let_through(place: Path) -> None:
    assert [has_steps(place / name) for name in ("walks", "flat/storage", "h5/storage/checkpoint.h5")] == [True] * 3
    assert not has_steps(place / "minari", raw=True)
    assert rbtool.inspect(place / "flat" / "storage").steps == 3
