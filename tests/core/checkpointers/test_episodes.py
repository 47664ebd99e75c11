"""Forms in which whole episodes are saved: nothing is lost there and back, bad input is refused, memory is bounded."""

from __future__ import annotations

import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from buffers_of_episodes import BufferPlan, bits, buffer_plans
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.base import StorageCheckpointerBase
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.declarations import LEAVES
from rbtool.core.encodings.compact import compare_steps
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    MissingKeyError,
    OutOfSpaceError,
    RbtoolError,
    SchemaError,
    UsageError,
)
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.dataset import dataset_tensors
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_walks

MAKERS: dict[str, Callable[..., StorageCheckpointerBase]] = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "gzip": lambda **keys: H5StorageCheckpointer(h5_kwargs={"compression": "gzip"}, **keys),
}
any_form = pytest.mark.parametrize("form", MAKERS)
PLAN = BufferPlan(8, (8, 3), ends=0.4, seed=1, oddities=("jumps", "types"))
CLASSES: dict[str, Callable[..., Any]] = {form: MAKERS[form] for form in ("flat", "nested", "h5")}
each_class = pytest.mark.parametrize("form", CLASSES)


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of small files are written here, and no test of this module pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def maker(form: str, plan: BufferPlan) -> Callable[[], StorageCheckpointerBase]:
    return lambda: MAKERS[form](done_keys=plan.done_keys, reward_keys=plan.reward_keys)


@any_form
@given(plan=buffer_plans(), more=st.integers(0, 3))
@settings(max_examples=8)
def test_rows_come_back_bit_for_bit(form: str, plan: BufferPlan, more: int) -> None:
    make, source = maker(form, plan), plan.buffer()._storage
    with tempfile.TemporaryDirectory() as folder:
        make().dumps(source, Path(folder) / "saved")
        for target in (plan.storage(), plan.storage(capacity=plan.capacity + more), plan.buffer()._storage):
            make().loads(target, Path(folder) / "saved")
            assert bits(target[:]) == bits(source[:])
            assert (len(target), target.shape) == (len(source), source.shape)


@any_form
@given(plan=buffer_plans())
@settings(max_examples=4)
def test_a_loaded_buffer_continues_where_the_saved_one_was(form: str, plan: BufferPlan) -> None:
    make = maker(form, plan)
    buffer, other = plan.buffer(make()), ReplayBuffer(storage=plan.storage(), batch_size=2, dim_extend=0)
    other._storage.checkpointer = make()
    with tempfile.TemporaryDirectory() as folder:
        buffer.dumps(Path(folder) / "saved")
        other.loads(Path(folder) / "saved")
        again = Path(folder) / "again"
        other.dumps(again)
        other.loads(again)
    rows = plan.buffer()._storage[:1]
    assert bits(other[:]) == bits(buffer[:])
    assert torch.equal(other.extend(rows), buffer.extend(rows))
    assert bits(other[:]) == bits(buffer[:])


@given(plan=buffer_plans(), forms=st.permutations(list(MAKERS)))
@settings(max_examples=5)
def test_rows_survive_every_sequence_of_forms(plan: BufferPlan, forms: list[str]) -> None:
    source = plan.buffer()._storage
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.h5" for number in range(len(forms))]
        paths = [p if form in {"h5", "gzip"} else p.with_suffix("") for p, form in zip(paths, forms, strict=True)]
        held = source
        for path, form in zip(paths, forms, strict=True):
            maker(form, plan)().dumps(held, path)
            held = plan.storage()
            maker(form, plan)().loads(held, path)
        assert bits(held[:]) == bits(source[:])
        for path in paths[1:]:
            with open_steps(paths[0]) as one, open_steps(path) as other:
                assert compare_steps(one, other) == []


def spread(folder: Path, flips: list[float]) -> Iterator[tuple[Path, int]]:
    """Choose bytes of the files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = [path.stat().st_size for path in files]
    for part in flips:
        place = int(part * sum(sizes))
        for path, size in zip(files, sizes, strict=True):
            if place < size:
                yield path, place
                break
            place -= size


@any_form
@given(plan=buffer_plans(), flips=st.lists(st.floats(0, 1, exclude_max=True), min_size=6, max_size=6))
@settings(max_examples=4)
def test_a_changed_byte_is_found_and_the_storage_stays_as_it_is(
    form: str, plan: BufferPlan, flips: list[float]
) -> None:
    make, target = maker(form, plan), plan.buffer()._storage
    before = bits(target[:])
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        make().dumps(plan.buffer()._storage, saved)
        for path, place in spread(saved, flips):
            whole = path.read_bytes()
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
            with pytest.raises((ValueError, FileNotFoundError)):
                make().loads(target, saved)
            path.write_bytes(whole)
        assert bits(target[:]) == before
        make().loads(target, saved)


def spans(path: Path) -> list[int]:
    with open_steps(path) as reader:
        return [int(length) for length in reader.episodes.length]


@pytest.mark.parametrize(
    ("lanes", "batches", "ends", "expected"),
    [
        ((), (6,), 0.0, [6]), ((), (6,), 1.0, [1] * 6), ((), (8, 3), 0.0, [8]), ((2,), (8, 3), 0.0, [8, 8]),
        ((2,), (5,), 0.0, [5, 5]),
    ],
)  # fmt: skip
def test_every_lane_ends_with_an_episode(tmp_path, lanes, batches, ends, expected) -> None:
    plan = BufferPlan(8, batches, lanes, ends=ends)
    maker("flat", plan)().dumps(plan.buffer()._storage, tmp_path / "saved")
    assert spans(tmp_path / "saved") == expected


def test_the_oldest_row_comes_first(tmp_path: Path) -> None:
    plan = BufferPlan(8, (8, 3), (2,))
    storage = plan.buffer()._storage
    maker("flat", plan)().dumps(storage, tmp_path / "saved")
    with open_steps(tmp_path / "saved") as reader:
        rows = torch.from_numpy(reader.read(("action",), 8, 16))
    assert torch.equal(rows, storage[:]["action"][:, 1].roll(-3, 0))


def test_the_newest_and_the_oldest_row_are_of_two_episodes(tmp_path: Path) -> None:
    plan = BufferPlan(8, (8, 3), ends=0.0)
    maker("flat", plan)().dumps(plan.buffer()._storage, tmp_path / "saved")
    larger = plan.storage(capacity=12)
    maker("flat", plan)().loads(larger, tmp_path / "saved")
    maker("flat", plan)().dumps(larger, tmp_path / "again")
    assert spans(tmp_path / "again") == [3, 5]


def test_each_observation_is_stored_once(tmp_path: Path) -> None:
    plan = BufferPlan(64, (64,), ends=0.1, seed=3)
    maker("flat", plan)().dumps(plan.buffer()._storage, tmp_path / "saved")
    rows = (tmp_path / "saved/observation.memmap").stat().st_size // 24
    assert rows == 64 + len(spans(tmp_path / "saved"))
    assert not (tmp_path / "saved/explicit_next").exists()
    assert not (tmp_path / "saved/at_root").exists()


def agents(flags: list[tuple[bool, bool]], follows: list[bool]) -> TensorDict:
    """Rows of two agents with flags of their own; after some rows the next observation does not follow."""
    observation = torch.arange(len(flags) + 1).float()
    after = torch.where(torch.tensor(follows), observation[1:], -1.0)
    done = torch.tensor(flags).unsqueeze(-1)
    return TensorDict({"observation": observation[:-1], "next": {"observation": after, "done": done}}, [len(flags)])


@pytest.mark.parametrize(
    ("follows", "expected"), [([True, True, True, False, True], [4, 1]), ([True, False, True, False, True], [2, 2, 1])]
)
def test_an_agent_that_is_done_ends_the_episode_if_the_next_observation_does_not_follow(tmp_path, follows, expected):
    no, one, both = (False, False), (True, False), (True, True)
    storage = TensorStorage(agents([no, one, one, both, no], follows))
    FlatStorageCheckpointer().dumps(storage, tmp_path / "saved")
    assert spans(tmp_path / "saved") == expected


def test_custom_keys_are_stored_where_those_of_ted_would_be(tmp_path: Path) -> None:
    plan = BufferPlan(oddities=("agents", "score"))
    maker("flat", plan)().dumps(plan.buffer()._storage, tmp_path / "saved")
    names = {path.relative_to(tmp_path / "saved").as_posix() for path in (tmp_path / "saved").rglob("*.memmap")}
    assert {"score.memmap", "agents/done.memmap", "at_root/agents/done.memmap"} <= names
    assert "at_root/score.memmap" not in names


@tensorclass
class Step:
    observation: torch.Tensor
    next: TensorDict


@any_form
def test_classes_and_constants_come_back(tmp_path: Path, form: str) -> None:
    plan = BufferPlan(batches=(8,))
    rows = plan.buffer()._storage[:]
    inner = TensorDict({**rows["next"].to_dict(), "task": NonTensorData("reach", [8])}, [8])
    data = Step(observation=rows["observation"], next=inner, batch_size=[8])
    MAKERS[form]().dumps(TensorStorage(data), tmp_path / "saved")
    storage = LazyTensorStorage(8)
    MAKERS[form]().loads(storage, tmp_path / "saved")
    assert isinstance(storage[0], Step)
    assert storage[3].next["task"] == "reach"
    assert bits(storage[:].next.exclude("task")) == bits(inner.exclude("task"))


@any_form
def test_two_keys_with_one_name_in_dots_come_back(tmp_path: Path, form: str) -> None:
    rows = BufferPlan(batches=(8,)).buffer()._storage[:]
    for place in (rows, rows["next"]):
        del place["observation"]
        place["observation"] = {"a.b": torch.rand(8, 2), "a": {"b": torch.rand(8, 2)}}
    MAKERS[form]().dumps(TensorStorage(rows), tmp_path / "saved")
    storage = LazyTensorStorage(8)
    MAKERS[form]().loads(storage, tmp_path / "saved")
    assert bits(storage[:]) == bits(rows)


@any_form
def test_memory_maps_are_filled(tmp_path: Path, form: str) -> None:
    source = BufferPlan(8, (8, 3), oddities=("types", "jumps")).buffer()._storage
    MAKERS[form]().dumps(source, tmp_path / "saved")
    target = LazyMemmapStorage(9, scratch_dir=tmp_path / "maps")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:]) == bits(source[:])


@any_form
def test_an_emptied_storage_is_saved_without_rows(tmp_path: Path, form: str) -> None:
    plan = BufferPlan()
    source, target = plan.buffer()._storage, plan.buffer()._storage
    source.empty()
    MAKERS[form]().dumps(source, tmp_path / "saved")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert len(target) == 0


@any_form
def test_hooks_see_the_rows(tmp_path: Path, form: str) -> None:
    source, target = BufferPlan(batches=(8,)).buffer()._storage, LazyTensorStorage(8)
    saver, loader = MAKERS[form](), MAKERS[form]()

    def double(rows: Any, **_: Any) -> Any:
        rows = rows.clone()
        rows["action"] = rows["action"] * 2
        return rows

    saver.register_save_hook(double)
    loader.register_load_hook(double)
    saver.dumps(source, tmp_path / "saved")
    loader.loads(target, tmp_path / "saved")
    assert torch.equal(target[:]["action"], source[:]["action"] * 4)


@any_form
def test_transposed_lanes_are_read_and_written(tmp_path: Path, form: str) -> None:
    rows = BufferPlan(6, (6,), (3,), ("jumps",)).buffer()._storage[:].transpose(0, 1)
    source, target = (TensorStorage(rows.contiguous().clone().transpose(0, 1), ndim=2) for _ in range(2))
    for leaf in target.columns.leaves:
        leaf.zero_()
    MAKERS[form]().dumps(source, tmp_path / "saved")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:]) == bits(source[:])


@each_class
def test_the_checkpoint_of_a_dataset_fills_a_storage(tmp_path: Path, form: Any) -> None:
    write_walks(tmp_path / "dataset", [(5, "terminated"), (3, "truncated")])
    path = tmp_path / ("saved.h5" if form == "h5" else "saved")
    if form != "h5":
        path.mkdir()
    with open_steps(tmp_path / "dataset") as reader:
        save_checkpoint(reader, path, form)
    storage, expected = LazyTensorStorage(9), dataset_tensors(tmp_path / "dataset")
    CLASSES[form]().loads(storage, path)
    assert len(storage) == 8
    assert torch.equal(storage[:]["action"], expected["action"])
    assert torch.equal(storage[:]["next", "observation"], expected["next", "observation"])


def saved(form: str, path: Path, plan: BufferPlan = PLAN) -> Path:
    CLASSES[form]().dumps(plan.buffer()._storage, path)
    return path


def refused(form: str, path: Path, error: type[RbtoolError], match: str, plan: BufferPlan = PLAN) -> None:
    """Load into a full storage and an empty one; neither may change."""
    full, empty = plan.buffer()._storage, plan.storage()
    before = bits(full[:])
    for target in (full, empty):
        with pytest.raises(error, match=match) as raised:
            CLASSES[form]().loads(target, path)
        assert str(raised.value).count("\n") == 0
    assert bits(full[:]) == before
    assert not empty.initialized


# Loading -------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _swap(one: Path, other: Path) -> None:
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


@pytest.mark.parametrize("form", ["flat", "nested"])
@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda f: _cut(f / "observation.memmap"), CorruptDataError, "bytes"),
        (lambda f: (f / "action.memmap").unlink(), CorruptDataError, "missing"),
        (lambda f: (f / MANIFEST).unlink(), CorruptDataError, "manifest is missing"),
        (lambda f: _cut(f / "storage_metadata.json"), CorruptDataError, "bytes"),
        (lambda f: (f / "storage_metadata.json").unlink(), CorruptDataError, "missing"),
        (lambda f: (f / MANIFEST).write_text("{}"), FormatError, "not an rbtool manifest"),
        (lambda f: (f / ".rbtool/episodes/length.memmap").unlink(), CorruptDataError, "missing"),
        (lambda f: _swap(f / "done.memmap", f / "terminated.memmap"), CorruptDataError, "changed after it was written"),
    ],
)
def test_damage_is_named(tmp_path, form, damage, error, match) -> None:
    damage(saved(form, tmp_path / "saved"))
    refused(form, tmp_path / "saved", error, match)


def test_a_missing_shape_table_is_found(tmp_path: Path) -> None:
    (saved("nested", tmp_path / "saved") / "observation.shape.memmap").unlink()
    refused("nested", tmp_path / "saved", CorruptDataError, "missing")


def test_mixed_lanes_are_found(tmp_path: Path) -> None:
    flat = saved("flat", tmp_path / "saved", BufferPlan(4, (4,), (2,), ends=0.0))
    path = flat / "observation.memmap"
    rows = np.fromfile(path, np.float64).reshape(2, -1)
    rows[::-1].tofile(path)
    refused("flat", flat, CorruptDataError, "changed", BufferPlan(4, (4,), (2,)))


@each_class
@pytest.mark.parametrize("cut", [1, 1000, 0.5])
def test_a_cut_h5_file_is_found(tmp_path: Path, form: str, cut: float) -> None:
    path = saved("h5", tmp_path / "saved.h5")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut) if cut < 1 else -int(cut)])
    refused("h5", path, CorruptDataError, "cut")
    if form != "h5":
        refused(form, path, FormatError, "writes a folder")


def test_an_h5_file_of_another_program_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as h5:
        h5["observation"] = np.arange(3)
    refused("h5", tmp_path / "other.h5", FormatError, "not written by rbtool")
    with pytest.raises(UsageError, match="no argument 'shift'"):
        NestedStorageCheckpointer(shift="s")


@each_class
def test_the_checkpoint_of_another_form_is_named(tmp_path: Path, form: str) -> None:
    for other in {*CLASSES} - {form}:
        refused(form, saved(other, tmp_path / other), FormatError, f"{other.capitalize()}StorageCheckpointer")
    PLAN.buffer()._storage.dumps(tmp_path / "plain")
    refused(form, tmp_path / "plain", FormatError, "TensorStorageCheckpointer")
    with pytest.raises(FormatError, match=f"{form.capitalize()}StorageCheckpointer"):
        PLAN.storage().loads(saved(form, tmp_path / "mine"))


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_a_dataset_and_a_plain_folder_are_named(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "dataset", [(5, "terminated")])
    refused(form, tmp_path / "dataset", FormatError, "is a dataset in layout ted")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").write_text("mine")
    refused(form, tmp_path / "plain", FormatError, "is not a checkpoint")


@each_class
def test_a_missing_checkpoint_is_not_found(tmp_path: Path, form: str) -> None:
    refused(form, tmp_path / "absent", DatasetNotFoundError, "absent")


@pytest.mark.parametrize("name", ["empty", "text", "text.h5"])
@each_class
def test_a_path_of_something_else_is_named(tmp_path: Path, form: str, name: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("text", "text.h5"):
        (tmp_path / file).write_text("mine")
    refused(form, tmp_path / name, FormatError, name)


def test_a_checkpoint_file_of_another_name_is_not_loaded(tmp_path: Path) -> None:
    H5StorageCheckpointer(checkpoint_file="mine").dumps(PLAN.buffer()._storage, tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["mine"]
    refused("h5", tmp_path / "saved", FormatError, r"saved has no checkpoint\.h5, which an H5StorageChe")


@each_class
@pytest.mark.parametrize(
    ("target", "match"),
    [
        (lambda: LazyTensorStorage(7), "room for"),
        (lambda: LazyTensorStorage(16, ndim=2), "ndim=1"),
        (lambda: TensorStorage(torch.zeros(8)), "this storage holds"),
        (lambda: TensorStorage(TensorDict({"action": torch.zeros(8, 2)}, [8])), "this storage holds"),
    ],
)
def test_a_storage_that_does_not_fit_stays_as_it_is(tmp_path, form, target, match) -> None:
    storage, other = target(), target()
    with pytest.raises(SchemaError, match=match):
        CLASSES[form]().loads(storage, saved(form, tmp_path / "saved"))
    assert storage.initialized is other.initialized
    assert not other.initialized or bool((storage[:] == other[:]).all())


# Saving --------------------------------------------------------------------------------------------


@each_class
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (torch.zeros(4, 2), "only tensordicts"),
        ({"a": torch.zeros(4)}, "only tensordicts"),
        (TensorDict({"a": torch.zeros(4)}, [4]), "no done, terminated or truncated below"),
        (TensorDict({"a": torch.zeros(4), "done": torch.zeros(4, 1).bool()}, [4]), "the ends of episodes are unknown"),
        (TensorDict({"a": torch.zeros(4).to(torch.float8_e5m2), "next": {"done": torch.ones(4, 1)}}, [4]), "float8"),
    ],
)
def test_data_without_episodes_is_refused(tmp_path: Path, form: str, data: Any, match: str) -> None:
    with pytest.raises(SchemaError, match=match) as raised:
        CLASSES[form]().dumps(TensorStorage(data), tmp_path / "saved")
    assert "TensorStorageCheckpointer" in raised.value.hint
    assert not (tmp_path / "saved").exists()


@each_class
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_empty_storages_are_refused(tmp_path: Path, form: str, storage: Any) -> None:
    with pytest.raises(SchemaError, match="storage is empty"):
        CLASSES[form]().dumps(storage(3), tmp_path / "saved")


@each_class
def test_compressed_lists_are_refused(tmp_path: Path, form: str) -> None:
    storage = CompressedListStorage(3)
    storage.set(0, PLAN.rows(np.random.default_rng(0), 1)[0])
    with pytest.raises(UsageError, match=r"^an? \w+ saves .*, found a CompressedListStorage\nhint") as raised:
        CLASSES[form]().dumps(storage, tmp_path / "saved")
    assert "CompressedListStorageCheckpointer" in raised.value.hint
    with pytest.raises(UsageError, match="found a CompressedListStorage"):
        CLASSES[form]().loads(storage, saved(form, tmp_path / "saved"))


@each_class
@pytest.mark.parametrize("compatible", [False, True] if "foreign_form" in LEAVES else [False])
@pytest.mark.parametrize(
    ("keys", "match", "near"),
    [
        ({"reward_keys": ["rewrad"]}, "reward_keys has 'rewrad', but below 'next' .* has only .*reward", "reward"),
        ({"reward_keys": [("info", "bonus")]}, r"has 'info\.bonus', but", ""),
        ({"done_keys": ["done", ("next", "trunctaed")]}, "done_keys has 'trunctaed', but", "truncated"),
        ({"done_keys": ["observation_"]}, "done_keys has 'observation_', but", "observation"),
    ],
)
def test_a_misspelt_key_is_named(tmp_path, form, compatible, keys, match, near) -> None:
    plan = BufferPlan(8, (8,), ends=0.4)
    with pytest.raises(MissingKeyError, match=match) as raised:
        CLASSES[form](compatible=compatible, **keys).dumps(plan.buffer()._storage, tmp_path / "saved")
    assert raised.value.hint == (f"did you mean {near!r}?" if near else "")
    assert not (tmp_path / "saved").exists()
    CLASSES[form](compatible=compatible).dumps(plan.buffer()._storage, tmp_path / "saved")
    with pytest.raises(MissingKeyError, match=match):
        CLASSES[form](**keys).loads(plan.storage(), tmp_path / "saved")


@each_class
def test_done_keys_that_are_not_stored_are_refused(tmp_path: Path, form: str) -> None:
    data = TensorDict({"next": {"over": torch.ones(4, 1).bool()}}, [4])
    with pytest.raises(SchemaError, match="has no truncated below"):
        CLASSES[form](done_keys=["truncated"]).dumps(TensorStorage(data), tmp_path / "saved")
    for wrong in ([3], [()], [("a", 3)], []):
        with pytest.raises(UsageError, match="done_keys"):
            CLASSES[form](done_keys=wrong)


@each_class
def test_other_files_at_the_destination_stay(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "dataset", [(5, "terminated")])
    digest = Manifest.load(tmp_path / "dataset").content_digest
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").write_text("mine")
    (tmp_path / "file.h5").write_bytes(b"mine")
    with h5py.File(tmp_path / "theirs.h5", "w") as h5:
        h5["a"] = 1
    shutil.copytree(saved(form, tmp_path / "with"), tmp_path / "mixed")
    (tmp_path / "mixed/notes.txt").write_text("mine")
    for name in ("dataset", "dataset/inside", "plain", "file.h5", "theirs.h5", "mixed"):
        with pytest.raises(UsageError):
            CLASSES[form]().dumps(PLAN.buffer()._storage, tmp_path / name)
    assert Manifest.load(tmp_path / "dataset").content_digest == digest
    assert (tmp_path / "file.h5").read_bytes() == b"mine"
    assert (tmp_path / "mixed/notes.txt").read_text() == "mine"


@each_class
def test_an_older_checkpoint_of_any_form_is_replaced(tmp_path: Path, form: str) -> None:
    for other in CLASSES:
        saved(form, saved(other, tmp_path / "saved"))
        target = PLAN.storage()
        CLASSES[form]().loads(target, tmp_path / "saved")
    PLAN.buffer()._storage.dumps(tmp_path / "saved")
    saved(form, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_a_checkpoint_in_one_file_is_replaced(tmp_path: Path) -> None:
    for plan in (PLAN, BufferPlan(6, (6,))):
        saved("h5", tmp_path / "saved.h5", plan)
        target = plan.storage()
        H5StorageCheckpointer().loads(target, tmp_path / "saved.h5")
        assert len(target) == len(plan.buffer())


@each_class
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(form, tmp_path / "saved")
    before = {path: path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file()}

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for call in ("writev", "pwritev"):
        monkeypatch.setattr(f"os.{call}", full)
    with pytest.raises(OutOfSpaceError):
        saved(form, tmp_path / "saved", BufferPlan(6, (6,)))
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "kwargs",
    [{"compression": "szip"}, {"compression": "gzip", "compression_opts": 12}, {"dtype": "f8"}, {"chunks": (3,)},
     {"compression": "lzf", "compression_opts": 3}, {"shuffle": 3}],
)  # fmt: skip
def test_h5_kwargs_that_not_every_hdf5_supports_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="h5_kwargs has"):
        H5StorageCheckpointer(h5_kwargs=kwargs)


@pytest.mark.parametrize("name", ["", "a/b.h5", "..", "/x.h5"])
def test_a_checkpoint_file_needs_a_plain_name(name: str) -> None:
    with pytest.raises(UsageError, match="checkpoint_file"):
        H5StorageCheckpointer(checkpoint_file=name)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"compression": "gzip", "compression_opts": 9}, ("gzip", 9, True, False)),
        ({"compression": 2, "shuffle": False}, ("gzip", 2, False, False)),
        ({"compression": "lzf", "fletcher32": True}, ("lzf", None, True, True)),
        ({"chunks": True}, (None, None, False, False)),
    ],
)
def test_h5_kwargs_reach_the_datasets(tmp_path: Path, kwargs: dict[str, Any], expected: tuple[Any, ...]) -> None:
    H5StorageCheckpointer(h5_kwargs=kwargs).dumps(PLAN.buffer()._storage, tmp_path / "saved.h5")
    with h5py.File(tmp_path / "saved.h5") as h5:
        found = h5["observation"]
        assert (found.compression, found.compression_opts, found.shuffle, found.fletcher32) == expected
        assert found.chunks is not None
    target = PLAN.storage()
    H5StorageCheckpointer().loads(target, tmp_path / "saved.h5")
    assert bits(target[:]) == bits(PLAN.buffer()._storage[:])


@each_class
@each("argument", ["done_keys", "reward_keys"])
@each("keys", [5, 0, 1.5, [5], [()], False])
def test_arguments_that_are_no_keys_are_refused(form: str, argument: str, keys: Any) -> None:
    with pytest.raises(UsageError, match=f"^{argument} .*texts or tuples of texts"):
        CLASSES[form](**{argument: keys})


MOST = 24 << 20


def steps(rows: int, lanes: tuple[int, ...]) -> TensorDict:
    """About 100 MB of episodes of 50 steps, in which every tenth next observation does not follow."""
    observation = torch.rand(rows + 1, *lanes, 128)
    after = observation[1:].clone()
    after[::10] += 1
    done = (torch.arange(rows) % 50 == 49).view(-1, *([1] * len(lanes)), 1).expand(rows, *lanes, 1)
    return TensorDict({"observation": observation[:-1], "next": {"observation": after, "done": done}}, [rows, *lanes])


@pytest.mark.parametrize("lanes", [(), (8,)])
@each_class
def test_memory_is_bounded(tmp_path: Path, form: str, lanes: tuple[int, ...]) -> None:
    source = TensorStorage(steps(100_000 // (8 if lanes else 1), lanes), ndim=1 + len(lanes))
    source.last_cursor = 1_000  # as if the ring had begun anew
    target = TensorStorage(source[:].clone(), ndim=1 + len(lanes))
    tracemalloc.start()
    try:
        CLASSES[form]().dumps(source, tmp_path / "saved")
        assert tracemalloc.get_traced_memory()[1] < MOST
        tracemalloc.reset_peak()
        CLASSES[form]().loads(target, tmp_path / "saved")
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert torch.equal(target[:]["next", "observation"], source[:]["next", "observation"])


def test_save_hooks_keep_the_order_of_a_full_ring(tmp_path: Path) -> None:
    saver = FlatStorageCheckpointer()
    saver.register_save_hook(lambda data, path: data)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, checkpointer=saver))
    number, end = torch.arange(13.0)[:, None], torch.zeros(13, 1).bool()
    after = {"number": number + 1, "done": end, "terminated": end, "truncated": end}
    buffer.extend(TensorDict({"number": number, "next": after}, [13]))
    buffer.dumps(tmp_path / "saved")
    larger = ReplayBuffer(storage=LazyTensorStorage(15, checkpointer=FlatStorageCheckpointer()))
    larger.loads(tmp_path / "saved")
    assert larger[:]["number"].flatten().tolist() == list(range(3, 13))
    with open_steps(tmp_path / "saved" / "storage") as steps:
        assert steps.read(("number",), 0, 10).flatten().tolist() == list(range(3, 13))
