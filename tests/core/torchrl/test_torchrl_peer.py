"""Beside TorchRL: what is written for it is loaded by it, what it writes is loaded here, and hooks undo its hooks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.torchrl import hooks

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    data = pytest.importorskip("torchrl.data")
    peer = pytest.importorskip("torchrl.data.replay_buffers.checkpointers")

FORMS = ("FlatStorageCheckpointer", "NestedStorageCheckpointer", "H5StorageCheckpointer")
RINGS = {
    "partly": ((), 16, (7,)),
    "full": ((), 16, (9, 7)),
    "wrapped": ((), 16, (10, 13)),
    "wrapped often": ((), 50, (45, 45, 49)),
    "one row": ((), 1, (1,)),
    "lanes, partly": ((2,), 24, (7,)),
    "lanes, full": ((2,), 24, (12,)),
    "lanes, wrapped": ((2,), 24, (9, 8)),
}


def steps(lanes: tuple[int, ...], rows: int, seed: int) -> TensorDict:
    """Random rows, ends (an odd seed ends the last) and observations of two kinds, continuous between the ends."""
    draw = torch.Generator().manual_seed(seed)
    shape = (*lanes, rows)
    done = torch.rand(*shape, 1, generator=draw) < 0.2
    done[..., -1, :] = seed % 2 == 1
    terminated = done & (torch.rand(*shape, 1, generator=draw) < 0.5)
    vector = torch.randn(*lanes, rows + 1, 3, generator=draw)
    image = torch.randint(0, 255, (*lanes, rows + 1, 2, 2), generator=draw, dtype=torch.uint8)
    after = vector[..., 1:, :] + 100 * done
    flags = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    root = {
        "observation": {"vector": vector[..., :-1, :], "image": image[..., :-1, :, :]},
        "action": torch.randn(*shape, 2, generator=draw).half(), "collector": {"traj_ids": done.cumsum(-2)[..., 0]},
        **{name: torch.zeros_like(done) for name in flags},
    }  # fmt: skip
    after_step = {"observation": {"vector": after, "image": image[..., 1:, :, :]}, **flags}
    reward = torch.randn(*shape, 1, generator=draw)
    return TensorDict({**root, "next": {**after_step, "reward": reward}}, shape)


def fill(buffer: Any, ring: str, seed: int) -> Any:
    lanes, _, writes = RINGS[ring]
    rows, begin = steps(lanes, sum(writes), seed), 0
    for count in writes:
        buffer.extend(rows[..., begin : begin + count].clone())
        begin += count
    return buffer


def ours(ring: str, form: str, kind: str = "LazyTensorStorage", **arguments: Any) -> ReplayBuffer:
    lanes, capacity, _ = RINGS[ring]
    storage = getattr(rbtool, kind)(capacity, ndim=len(lanes) + 1)
    storage.checkpointer = getattr(rbtool, form)(**arguments)
    return ReplayBuffer(storage=storage, batch_size=1)


def theirs(ring: str, form: str, kind: str = "LazyTensorStorage") -> Any:
    lanes, capacity, _ = RINGS[ring]
    buffer = data.ReplayBuffer(storage=getattr(data, kind)(capacity, ndim=len(lanes) + 1), batch_size=1)
    buffer.storage.checkpointer = getattr(peer, form)()  # it replaces one that was set before
    return buffer


def same(one: Any, other: Any) -> bool:
    keys = set(one.keys(True, True))
    return keys == set(other.keys(True, True)) and all(torch.equal(one[key], other[key]) for key in keys)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("kind", ["LazyTensorStorage", "LazyMemmapStorage"])
def test_torchrl_loads_what_is_written_for_it(form: str, ring: str, written: bool, kind: str, tmp_path: Path) -> None:
    source = fill(ours(ring, form, kind, compatible=True), ring, len(ring))
    source.dumps(tmp_path / "saved")
    buffer = theirs(ring, form, kind)
    if written:
        fill(buffer, ring, 99)
    buffer.loads(tmp_path / "saved")
    assert (len(buffer), buffer._writer._cursor) == (len(source), source.writer._cursor)
    assert same(buffer[:], source[:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", ["LazyTensorStorage", "LazyMemmapStorage"])
def test_what_torchrl_writes_is_loaded(form: str, ring: str, kind: str, tmp_path: Path) -> None:
    source = fill(theirs(ring, form, kind), ring, 7 * len(ring))
    source.dumps(tmp_path / "saved")
    for written in (False, True):
        buffer = ours(ring, form)
        if written:
            fill(buffer, ring, 99)
        buffer.loads(tmp_path / "saved")
        assert (len(buffer), buffer.writer._cursor) == (len(source), source._writer._cursor)
        assert same(buffer[:], source[:])


def told(hook: Any, is_full: bool, shift: int) -> Any:
    hook.is_full, hook.shift = is_full, shift
    return hook


@pytest.mark.parametrize("name", ["Flat", "Nested"])
@pytest.mark.parametrize(("is_full", "shift"), [(True, 4), (False, 6), (True, 10)])
@pytest.mark.parametrize("lanes", [(), (2,)])
def test_hooks_undo_each_other(name: str, is_full: bool, shift: int, lanes: tuple[int, ...]) -> None:
    rows = steps(lanes, 10, 5)
    rows = rows.transpose(0, -1).contiguous() if lanes else rows
    valid = 10 if is_full else shift
    here, there = (told(getattr(home, f"TED2{name}")(), is_full, shift) for home in (hooks, data))
    back_here, back_there = (getattr(home, f"{name}2TED")() for home in (hooks, data))
    assert same(back_here(there(rows))[:valid], rows[:valid])
    if not (lanes and shift == 10):  # its own result it does not load either
        assert same(back_there(here(rows))[:valid], rows[:valid])
    if name == "Flat":
        one, other = here(rows), there(rows)
        assert all(torch.equal(one[key], other[key]) for key in [("observation", "vector"), "action", "done", "reward"])


def test_split_episodes_go_both_ways() -> None:
    rows = steps((), 30, 3)
    split = told(data.H5Split(), True, 4)(told(data.TED2Nested(), True, 4)(rows))
    assert same(hooks.Nested2TED()(hooks.H5Combine()(split)), rows)
    mine = told(hooks.H5Split(), True, 4)(told(hooks.TED2Nested(), True, 4)(rows))
    assert sorted(mine.keys()) == sorted(split.keys())
    assert same(data.Nested2TED()(data.H5Combine()(mine)), rows)
