"""`checkpoint load` and `convert` of what buffers saved: the steps become a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from rbtool.core.errors import CorruptDataError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.verbs import checkpoint
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect
from rbtool.core.writers.max_value import TensorDictMaxValueWriter

DATA = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
MAKERS: dict[str, Callable[[], Any]] = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "tensors": lambda: None,
}
any_form = pytest.mark.parametrize("form", MAKERS)


def steps(rows: int = 10, ends: tuple[int, ...] = (3, 6), first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + rows)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[list(ends)] = True
    observation = torch.stack([numbers, -numbers], -1).double()
    after = {"observation": observation + torch.tensor([1.0, -1.0]) + 100 * done, "reward": numbers[:, None] / 2}
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    root = {"observation": observation, "action": numbers.int(), "done": torch.zeros_like(done)}
    return TensorDict({**root, "next": {**after, **flags}}, [rows])


def saved(folder: Path, form: str, data: TensorDict, capacity: int = 16, **how: Any) -> Path:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(capacity, checkpointer=MAKERS[form](), **how))
    buffer.extend(data)
    buffer.dumps(folder)
    return folder


def rows_of(path: Path) -> dict[str, np.ndarray]:
    with open_steps(path) as reader:
        return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


def place_in(folder: Path, place: str) -> Path:
    return next((folder / "storage").glob("*.h5"), folder / "storage") if place == "steps" else folder / place


@any_form
@pytest.mark.parametrize("place", ["", "storage", "steps"])
@pytest.mark.parametrize("verb", ["load", "convert"])
def test_the_checkpoint_of_a_buffer_becomes_a_dataset(form: str, place: str, verb: str, tmp_path: Path) -> None:
    source = place_in(saved(tmp_path / "buffer", form, steps()), place)
    run: Any = checkpoint.load if verb == "load" else convert
    tried = run(source, tmp_path / "dataset", dry_run=True)
    made = run(source, tmp_path / "dataset")
    assert (made.steps, made.episodes, made.boundary["end_of_file"]) == (10, 3, 1)
    assert tried.notes == made.notes == inspect(tmp_path / "dataset").notes
    assert "not finished ends truncated" in made.notes[-1]
    rows, expected = rows_of(tmp_path / "dataset"), steps()
    assert rows["next.done"][:, 0].nonzero()[0].tolist() == [3, 6, 9]
    assert rows["next.truncated"][:, 0].nonzero()[0].tolist() == [9]
    for name in ("observation", "action", "next.observation", "next.reward", "next.terminated", "done"):
        assert np.array_equal(rows[name], expected[tuple(name.split("."))].numpy())
    assert rows["episode"].tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert check(tmp_path / "dataset").findings == ()
    assert run(source, tmp_path / "dataset").already_there


@any_form
def test_the_oldest_row_of_a_ring_comes_first(form: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, checkpointer=MAKERS[form]()))
    buffer.extend(steps(8))
    buffer.extend(steps(3, (1,), first=8))
    buffer.dumps(tmp_path / "buffer")
    checkpoint.load(tmp_path / "buffer", tmp_path / "dataset")
    assert rows_of(tmp_path / "dataset")["action"].tolist() == [*range(3, 11)]
    assert checkpoint.verify(tmp_path / "buffer", tmp_path / "dataset").equal


@any_form
def test_lanes_come_one_after_the_other(form: str, tmp_path: Path) -> None:
    storage = LazyTensorStorage(12, ndim=2, checkpointer=MAKERS[form]())
    storage.set(range(4), torch.stack([steps(4, (1,)), steps(4, (3,), first=50)], 1))
    storage.dumps(tmp_path / "storage")
    loaded = checkpoint.load(tmp_path / "storage", tmp_path / "dataset")
    assert (loaded.episodes, rows_of(tmp_path / "dataset")["action"].tolist()) == (3, [0, 1, 2, 3, 50, 51, 52, 53])


@pytest.mark.parametrize("case", ["td_memmap_wrapped", "td_memmap_partly_7of16", "td_tensor_ndim2_wrapped"])
def test_plain_checkpoints_of_torchrl_become_datasets(case: str, tmp_path: Path) -> None:
    facts = json.loads((DATA / case / "case.json").read_text())
    loaded = checkpoint.load(DATA / case / "checkpoint", tmp_path / "dataset")
    expected = np.load(DATA / case / "expected.npz")["action"]
    lanes = expected[None] if facts["ndim"] == 1 else np.moveaxis(expected, 1, 0) if expected.shape[0] > 2 else expected
    ordered = lanes[:, np.array(facts["dim0_oldest_first"])].reshape(-1, 2)
    assert loaded.steps == facts["len"]
    assert np.array_equal(rows_of(tmp_path / "dataset")["action"], ordered)
    assert not [finding for finding in check(tmp_path / "dataset").findings if finding.rule != "TED010"]


@any_form
def test_flags_that_a_buffer_has_not_are_made(form: str, tmp_path: Path) -> None:
    data = steps().exclude(("next", "terminated"), ("next", "truncated"), "done")
    checkpoint.load(saved(tmp_path / "buffer", form, data), tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert rows["next.terminated"][:, 0].nonzero()[0].tolist() == [3, 6]
    assert rows["next.truncated"][:, 0].nonzero()[0].tolist() == [9]
    assert check(tmp_path / "dataset").findings == ()


def test_another_flag_ends_the_episodes(tmp_path: Path) -> None:
    data = steps().exclude(("next", "terminated"), ("next", "truncated"), "done")
    data["next"].rename_key_("done", "over")
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, checkpointer=FlatStorageCheckpointer(done_keys=["over"])))
    buffer.extend(data)
    buffer.dumps(tmp_path / "buffer")
    checkpoint.load(tmp_path / "buffer", tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert rows["next.done"][:, 0].nonzero()[0].tolist() == [3, 6, 9]
    assert rows["next.over"][:, 0].nonzero()[0].tolist() == [3, 6]


def test_packed_datasets_are_made_of_it_too(tmp_path: Path) -> None:
    source = saved(tmp_path / "buffer", "flat", steps())
    checkpoint.load(source, tmp_path / "packed", layout="packed")
    convert(source, tmp_path / "ted")
    before, after = rows_of(tmp_path / "ted"), rows_of(tmp_path / "packed")
    assert all(np.array_equal(rows, after[name]) for name, rows in before.items())


@any_form
def test_saving_it_again_is_refused_with_a_way_out(form: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "buffer", form, steps())
    with pytest.raises(UsageError, match="is a checkpoint of a buffer") as caught:
        checkpoint.save(source, tmp_path / "again", form="flat")
    assert "rbtool checkpoint load" in str(caught.value.hint)


@any_form
def test_one_wrong_byte_is_found(form: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "buffer", form, steps())
    files = [file for name in ("*.h5", "segment-*", "observation.memmap") for file in (source / "storage").rglob(name)]
    flip(files[0], 40 if form != "h5" else files[0].stat().st_size - 20)
    with pytest.raises(CorruptDataError):
        checkpoint.load(source, tmp_path / "dataset")
    assert not (tmp_path / "dataset").exists()


def test_rows_without_episodes_are_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(4))
    buffer.dumps(tmp_path / "buffer")
    with pytest.raises(SchemaError, match="steps of episodes need tensordicts"):
        checkpoint.load(tmp_path / "buffer", tmp_path / "dataset")


@pytest.mark.parametrize("verb", [checkpoint.load, convert])
def test_a_buffer_without_steps_is_called_one(verb: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend([1, 2])
    buffer.dumps(tmp_path / "buffer")
    with pytest.raises(UsageError, match="is the checkpoint of a replay buffer") as caught:
        verb(tmp_path / "buffer", tmp_path / "dataset")
    assert "rb.loads" in str(caught.value.hint)


@pytest.mark.parametrize("form", ["flat", "tensors"])
def test_rows_that_are_ranked_make_up_no_episodes(form: str, tmp_path: Path) -> None:
    storage, writer = LazyTensorStorage(10, checkpointer=MAKERS[form]()), TensorDictMaxValueWriter(("next", "reward"))
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer)
    buffer.extend(steps())
    buffer.dumps(tmp_path / "buffer")
    for place in ("buffer", "buffer/storage"):
        with pytest.raises(UsageError, match="no order of time"):
            checkpoint.load(tmp_path / place, tmp_path / "dataset")
