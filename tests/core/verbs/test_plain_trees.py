"""Folders of tensordict or TorchRL without a manifest: what becomes of open ends and of padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer
from rbtool.core.errors import FormatError
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.lazy_tensor import LazyTensorStorage


def steps(lengths: list[int], *, last_open: bool = True) -> TensorDict:
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


@pytest.mark.parametrize("made", [tree, saved_buffer])
@pytest.mark.parametrize(("make", "layout"), [(convert, "ted"), (convert, "packed"), (preprocess, "ted")])
def test_an_open_end_is_made_truncated(
    tmp_path: Path, made: Callable[..., Path], make: Callable[..., Any], layout: str
) -> None:
    source, dest = made(tmp_path / "source", steps([3, 1, 4])), tmp_path / "made"
    result = make(source, dest, layout)
    assert (result.boundary["terminated"], result.boundary["end_of_file"]) == (2, 1)
    with open_steps(dest) as reader:
        flags = {name: reader.read(("next", name), 0, 8).reshape(-1).tolist() for name in ("done", "truncated")}
        assert reader.episodes.truncated.tolist() == [False, False, True]
    assert flags == {"done": [0, 0, 1, 1, 0, 0, 0, 1], "truncated": [0, 0, 0, 0, 0, 0, 0, 1]}
    assert rbtool.check(dest).findings == ()


def test_an_export_marks_an_open_end(tmp_path: Path) -> None:
    rbtool.export(tree(tmp_path / "tree", steps([2, 2])), tmp_path / "made.npz", to="npz")
    with np.load(tmp_path / "made.npz") as file:
        assert file["next.truncated"].reshape(-1).tolist() == [False, False, False, True]


def test_a_done_flag_alone_is_an_end(tmp_path: Path) -> None:
    data = steps([2, 3], last_open=False).exclude(("next", "terminated"), ("next", "truncated"), "episode")
    result = convert(tree(tmp_path / "tree", data), tmp_path / "made")
    assert (result.boundary["inferred"], result.boundary["end_of_file"]) == (2, 0)
    assert rbtool.check(tmp_path / "made").findings == ()


def padded(lengths: list[int], mask: Any = "mask") -> TensorDict:
    """The same steps, each episode on a lane of its own, filled up with rows that are not its own."""
    flat, time = steps(lengths), max(lengths)
    lanes = torch.stack([torch.arange(time) + start for start in np.cumsum([0, *lengths[:-1]])]) % len(flat)
    found = flat[lanes.reshape(-1)].reshape(len(lengths), time)
    found.set(mask, torch.arange(time)[None] < torch.tensor(lengths)[:, None])
    return found


@pytest.mark.parametrize("mask", ["mask", ("collector", "mask")])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_padding_is_left_out(tmp_path: Path, mask: Any, ids: bool, layout: str) -> None:
    data = padded([3, 1, 4, 2], mask)
    source = tree(tmp_path / "padded", data if ids else data.exclude("episode"))
    result = convert(source, tmp_path / "made", layout)
    assert (result.steps, result.episodes, len(result.dropped_keys)) == (10, 4, 1)
    expected = steps([3, 1, 4, 2])
    with open_steps(tmp_path / "made") as reader:
        assert reader.episodes.length.tolist() == [3, 1, 4, 2]
        for key in (("observation",), ("action",), ("episode",), ("next", "observation"), ("next", "reward")):
            assert np.array_equal(reader.read(key, 0, 10), expected.get(key).numpy())
            assert np.array_equal(reader.read(key, 3, 6), expected.get(key)[3:6].numpy())
    assert rbtool.check(tmp_path / "made").findings == ()


def test_steps_of_several_agents_with_a_mask_are_not_padded(tmp_path: Path) -> None:
    data = steps([3, 2]).set("mask", torch.ones(5, 2, dtype=torch.bool))
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
