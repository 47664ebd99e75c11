"""What holds for every form in which whole episodes are saved: nothing is lost on the way there and back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buffers_of_episodes import BufferPlan, bits, buffer_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass

import rbtool
from rbtool.core.buffers.base import ReplayBuffer
from rbtool.core.checkpointers.base import StorageCheckpointerBase
from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from rbtool.core.encodings.rows import compare_steps
from rbtool.core.opening import open_steps
from rbtool.core.storages.dataset import dataset_tensors
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_walks

MAKERS: dict[str, Callable[..., StorageCheckpointerBase]] = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "gzip": lambda **keys: H5StorageCheckpointer(h5_kwargs={"compression": "gzip"}, **keys),
}
any_form = pytest.mark.parametrize("form", MAKERS)


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
@settings(max_examples=20, deadline=None)
def test_there_and_back(form: str, plan: BufferPlan, more: int) -> None:
    make, source = maker(form, plan), plan.buffer()._storage
    with tempfile.TemporaryDirectory() as folder:
        make().dumps(source, Path(folder) / "saved")
        for target in (plan.storage(), plan.storage(capacity=plan.capacity + more), plan.buffer()._storage):
            make().loads(target, Path(folder) / "saved")
            assert bits(target[:]) == bits(source[:])
            assert (len(target), target.shape) == (len(source), source.shape)


@any_form
@given(plan=buffer_plans())
@settings(max_examples=8, deadline=None)
def test_a_buffer_goes_on_where_it_was(form: str, plan: BufferPlan) -> None:
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
@settings(max_examples=10, deadline=None)
def test_from_form_to_form(plan: BufferPlan, forms: list[str]) -> None:
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
@settings(max_examples=8, deadline=None)
def test_one_changed_byte_is_found_and_nothing_is_touched(form: str, plan: BufferPlan, flips: list[float]) -> None:
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
        ((), (6,), 0.0, [6]),
        ((), (6,), 1.0, [1] * 6),
        ((), (8, 3), 0.0, [8]),
        ((2,), (8, 3), 0.0, [8, 8]),
        ((2,), (5,), 0.0, [5, 5]),
    ],
)
def test_every_lane_ends_with_an_episode(
    tmp_path: Path, lanes: tuple[int, ...], batches: tuple[int, ...], ends: float, expected: list[int]
) -> None:
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


def test_the_newest_and_the_oldest_row_do_not_become_one_episode(tmp_path: Path) -> None:
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
def test_an_agent_that_is_done_ends_the_episode_if_the_next_observation_does_not_follow(
    tmp_path: Path, follows: list[bool], expected: list[int]
) -> None:
    no, one, both = (False, False), (True, False), (True, True)
    storage = TensorStorage(agents([no, one, one, both, no], follows))
    FlatStorageCheckpointer().dumps(storage, tmp_path / "saved")
    assert spans(tmp_path / "saved") == expected


@any_form
def test_custom_keys_lie_where_those_of_ted_would(tmp_path: Path, form: str) -> None:
    plan = BufferPlan(oddities=("agents", "score"))
    maker(form, plan)().dumps(
        plan.buffer()._storage, tmp_path / "saved.h5" if form in {"h5", "gzip"} else tmp_path / "s"
    )
    if form == "flat":
        names = {path.relative_to(tmp_path / "s").as_posix() for path in (tmp_path / "s").rglob("*.memmap")}
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
def test_memory_maps_are_filled_too(tmp_path: Path, form: str) -> None:
    source = BufferPlan(8, (8, 3), oddities=("types", "jumps")).buffer()._storage
    MAKERS[form]().dumps(source, tmp_path / "saved")
    target = LazyMemmapStorage(9, scratch_dir=tmp_path / "maps")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:]) == bits(source[:])


@any_form
def test_an_emptied_storage_is_saved_as_one(tmp_path: Path, form: str) -> None:
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
def test_lanes_that_do_not_lie_together_are_read_and_written(tmp_path: Path, form: str) -> None:
    rows = BufferPlan(6, (6,), (3,), ("jumps",)).buffer()._storage[:].transpose(0, 1)
    source, target = (TensorStorage(rows.contiguous().clone().transpose(0, 1), ndim=2) for _ in range(2))
    for leaf in target.columns.leaves:
        leaf.zero_()
    MAKERS[form]().dumps(source, tmp_path / "saved")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:]) == bits(source[:])


@any_form
def test_the_checkpoint_of_a_dataset_fills_a_storage(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "dataset", [(5, "terminated"), (3, "truncated")])
    as_form = "h5" if form == "gzip" else form
    rbtool.checkpoint.save(tmp_path / "dataset", tmp_path / "saved.h5", form=as_form)
    storage, expected = LazyTensorStorage(9), dataset_tensors(tmp_path / "dataset")
    if form in {"flat", "nested"}:
        (tmp_path / "saved.h5").rename(tmp_path / "saved")
    MAKERS[form]().loads(storage, tmp_path / ("saved" if form in {"flat", "nested"} else "saved.h5"))
    assert len(storage) == 8
    assert torch.equal(storage[:]["action"], expected["action"])
    assert torch.equal(storage[:]["next", "observation"], expected["next", "observation"])
