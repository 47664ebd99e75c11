"""Dumps in the background of all forms of checkpoints, and of ensembles, hold the rows as of the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from rbtool.core.format import open_files

from .test_background_capture import CAPACITY, Gate, Story, gate, same

__all__ = ["gate"]  # a fixture

FORMS: dict[str, Callable[[], Any]] = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "gzip": partial(H5StorageCheckpointer, h5_kwargs={"compression": "gzip"}),
    "compatible": partial(TensorStorageCheckpointer, compatible=True),
}


class Episodes(Story):
    """Random changes of a buffer of short episodes, whose storage has a checkpointer of some form."""

    def __init__(self, kind: str, seed: int, form: str) -> None:
        self.form = form
        super().__init__(kind, seed)

    def empty_buffer(self) -> Any:
        buffer = super().empty_buffer()
        buffer.storage.checkpointer = FORMS[self.form]()
        return buffer

    def rows(self, count: int) -> TensorDict:
        rows = super().rows(count)
        shape = rows.batch_size
        end = torch.tensor([self.draw.random() < 0.3 for _ in range(shape.numel())]).view(*shape, 1)
        after = {"done": end, "reward": torch.rand(*shape, 1), "a": rows["a"] + 1 / 64}
        return rows.set("next", TensorDict(after, shape))

    def load(self) -> None:
        other = Episodes(self.kind, self.draw.randrange(9), self.form)
        other.extend()
        self.buffer.load_state_dict(other.buffer.state_dict())

    def loaded(self, place: Path) -> Episodes:
        found = Episodes(self.kind, self.draw.randrange(1 << 30), self.form)
        found.number = self.number
        found.buffer.loads(place)
        return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["memory", "memmap", "lanes", "open"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("lends", [False, True], ids=["apart", "lent"])
def test_it_is_the_state_as_of_the_call(
    kind: str, form: str, seed: int, lends: bool, tmp_path: Path, gate: Gate
) -> None:
    """Changes at random between the reads of single rows; the buffer goes on from what was loaded now and then."""
    story: Story = Episodes(kind, seed, form)
    story.extend()
    for _ in range(4):
        for _ in range(story.draw.randint(0, 3)):
            story.change(lends=lends)
        if not len(story.buffer):
            story.extend()
        expected = story.state()
        gate.open = lends
        handle = story.buffer.dumps(tmp_path / "saved", background=True)
        for _ in range(story.draw.randint(0, 6)):
            story.change(lends=lends)
            for _ in range(story.draw.randint(0, 5)):
                gate.steps.release()
        gate.open = True
        handle.result(HANG)
        again = story.loaded(tmp_path / "saved")
        assert same(again.state(), expected)
        assert not story.buffer.storage.log.snapshots
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        if story.draw.random() < 0.3:
            story = again


def filled(form: str) -> Episodes:
    story = Episodes("memory", 0, form)
    story.buffer.extend(story.rows(CAPACITY))
    return story


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_call_returns_before_rows_are_read(
    form: str, maps: bool, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not maps:
        monkeypatch.setattr(open_files, "_LOCAL", frozenset())
    story = filled(form)
    expected, gate.open = story.state(), False
    handle = story.buffer.dumps(tmp_path / "saved", background=True)
    story.extend()
    story.empty()
    story.extend()
    assert not handle.done()
    gate.open = True
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state(), expected)


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
def test_data_that_a_form_cannot_hold_is_reported_by_result(form: str, tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4, checkpointer=FORMS[form]()), batch_size=2)
    buffer.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    handle = buffer.dumps(tmp_path / "saved", background=True)
    with pytest.raises(RuntimeError, match="done"):
        handle.result(HANG)
    assert not list(tmp_path.iterdir())
    assert not buffer.storage.log.snapshots


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])  # which needs load hooks then
def test_save_hooks_look_at_the_rows_at_the_call(form: str, tmp_path: Path, gate: Gate) -> None:
    story = filled(form)
    seen: list[Any] = []
    story.buffer.storage.checkpointer.register_save_hook(lambda data, path=None: seen.append(path) or data)
    expected = story.state()
    handle = story.buffer.dumps(tmp_path / "saved", background=True)
    assert len(seen) == 1
    story.extend()
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state()["rows"], expected["rows"])


def test_an_ensemble_captures_its_members(tmp_path: Path, gate: Gate) -> None:
    """Of a list, which cannot be captured, the rows are written at the call; a member without rows has none."""

    def members() -> list[TensorDictReplayBuffer]:
        storages = [
            LazyTensorStorage(CAPACITY),
            LazyMemmapStorage(CAPACITY, checkpointer=FlatStorageCheckpointer()),
            ListStorage(CAPACITY),
            LazyTensorStorage(CAPACITY),
        ]
        return [TensorDictReplayBuffer(storage=storage, batch_size=4) for storage in storages]

    def rows(number: float) -> TensorDict:
        end = torch.arange(CAPACITY).view(-1, 1) % 5 == 4
        value = torch.full((CAPACITY, 3), number)
        return TensorDict({"a": value, "next": {"a": value, "done": end, "reward": end.float()}}, [CAPACITY])

    def held(buffers: list[TensorDictReplayBuffer]) -> list[float]:
        return [float(buffer[torch.arange(len(buffer))]["a"].mean()) for buffer in buffers if len(buffer)]

    story, other = members(), members()
    for number, buffer in enumerate(story[:3]):
        buffer.extend(rows(number + 1.0))
    ensemble = ReplayBufferEnsemble(*story, batch_size=8, p=[0.4, 0.3, 0.3, 0.0])
    for repeat in range(2):
        gate.open, expected = False, held(story)
        handle = ensemble.dumps(tmp_path / "saved", background=True)
        for number, buffer in enumerate(story[:3]):
            buffer.extend(rows(10.0 * number + repeat))
        assert not handle.done()
        gate.open = True
        handle.result(HANG)
        ReplayBufferEnsemble(*other, batch_size=8, p=[0.4, 0.3, 0.3, 0.0]).loads(tmp_path / "saved")
        assert held(other) == expected
        assert all(not buffer.storage.log.snapshots for buffer in story[:2])
