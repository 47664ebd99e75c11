"""States that TorchRL gives or gave: of older versions, of live samplers, and of rankings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter, TensorDictReplayBuffer
from rbtool.core.samplers.prioritized import NEVER_WRITTEN

CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"


def rows(count: int) -> TensorDict:
    return TensorDict({"score": torch.arange(float(count))[:, None]}, [count])


def ring(count: int = 0, **more: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), **more)
    if count:
        buffer.extend(rows(count))
    return buffer


@pytest.mark.parametrize("writer", [rbtool.RoundRobinWriter, TensorDictMaxValueWriter])
@pytest.mark.parametrize("as_folder", [True, False])
def test_an_older_state_counts_no_writes(tmp_path: Path, writer: Any, as_folder: bool) -> None:
    more = {"writer": lambda: writer(rank_key="score") if writer is TensorDictMaxValueWriter else writer()}
    saved, buffer = ring(4, **more), ring(7, **more)
    saved.dumps(tmp_path / "saved")
    metadata, state = tmp_path / "saved" / "writer" / "metadata.json", saved.state_dict()
    document = json.loads(metadata.read_text())
    del document["write_count"], state["_writer"]["_write_count"]
    metadata.write_text(json.dumps(document))
    shutil.rmtree(tmp_path / "saved" / ".rbtool")  # the digests, which TorchRL does not write
    (tmp_path / "saved" / "buffer_metadata.json").write_text('{"batch_size": null}')
    buffer.loads(tmp_path / "saved") if as_folder else buffer.load_state_dict(state)
    assert (len(buffer), buffer.writer._cursor, buffer.write_count) == (4, 4, 0)
    assert buffer.extend(rows(2) + 9).tolist() == [4, 5]
    assert buffer.write_count == 2


def test_an_older_state_of_a_writer_holds_before_it_has_a_storage() -> None:
    writer, storage = rbtool.RoundRobinWriter(), LazyTensorStorage(10)
    storage.set(range(10), torch.zeros(10))
    writer.load_state_dict({"_cursor": 4})
    writer.register_storage(storage)
    assert writer.add(torch.ones(())) == 4


class Tree:
    """What TorchRL's compiled trees are in Python."""

    def __init__(self, leaves: torch.Tensor) -> None:
        self._leaves = leaves

    def __len__(self) -> int:
        return len(self._leaves)

    def __getitem__(self, index: Any) -> Any:
        return self._leaves[index]

    def query(self, start: int, stop: int) -> float:
        return float(self._leaves[start:stop].sum())


@pytest.mark.parametrize("count", [0, 7, 13])
@pytest.mark.parametrize("written", [0, 5])
@pytest.mark.parametrize("slices", [True, False])
def test_the_state_of_a_live_prioritized_sampler_is_taken(count: int, written: int, slices: bool) -> None:
    known, alpha = min(count, 10), 0.7
    priorities = torch.arange(1.0, known + 1) / 3
    sums, lows = torch.zeros(10), torch.full((10,), NEVER_WRITTEN)
    sums[:known] = lows[:known] = priorities.pow(alpha)
    largest = (priorities.max(), priorities.argmax()) if known else (None, None)
    live = {"_sum_tree": Tree(sums), "_min_tree": Tree(lows), "_max_priority": largest, "_schema_version": 1}
    more = {"_alpha": alpha, "_beta": 0.5, "_eps": 0.0}
    kind = rbtool.PrioritizedSliceSampler if slices else rbtool.PrioritizedSampler
    buffers = [ring(n, sampler=kind(10, 0.1, 0.2, **({"slice_len": 2} if slices else {}))) for n in (count, written)]
    buffers[1].load_state_dict(buffers[0].state_dict() | {"_sampler": live | more})
    state = buffers[1].sampler.state_dict()
    torch.testing.assert_close(state["_sum_tree"], sums.double())
    assert (state["_alpha"], state["_beta"], state["_eps"]) == (0.7, 0.5, 0.0)
    assert buffers[1].sampler.default_priority == pytest.approx(known / 3 if known else 1.0)


@pytest.mark.parametrize("tree", [Tree(torch.zeros(4)), "trees", [0.0] * 10])
def test_what_is_no_tree_of_this_capacity_changes_nothing(tree: Any) -> None:
    sampler = rbtool.PrioritizedSampler(10, 0.7, 0.5)
    before = sampler.state_dict()
    with pytest.raises(RuntimeError):
        sampler.load_state_dict(before | {"_sum_tree": tree, "_beta": 1.0})
    assert str(sampler.state_dict()) == str(before)


@pytest.mark.parametrize("case", ["writer_max_value_full", "writer_max_value_partly"])
@pytest.mark.parametrize("written", [0, 3, 8, 30])
def test_a_ranking_loads_into_a_buffer_that_was_written(tmp_path: Path, case: str, written: int) -> None:
    """TorchRL stores no `"index"` with ranked elements of a batch."""
    facts = json.loads((CASES / case / "case.json").read_text())
    saved, storage = tmp_path / "saved", LazyTensorStorage(facts["capacity"])
    ReplayBuffer(storage=storage).extend(rows(facts["len"]))
    storage.dumps(saved / "storage")
    shutil.rmtree(saved / "storage" / ".rbtool")
    shutil.copytree(CASES / case / "checkpoint" / "writer", saved / "writer")
    (saved / "buffer_metadata.json").write_text('{"batch_size": null}')
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(facts["capacity"]), writer=TensorDictMaxValueWriter(rank_key="score")
    )
    if written:
        buffer.extend(rows(written))
    buffer.loads(saved)
    assert buffer[:]["score"].flatten().tolist() == list(range(facts["len"]))
    if written:
        assert buffer[:]["index"].tolist() == list(range(facts["len"]))
    index = buffer.extend(rows(2) + 1000)
    assert buffer[index]["score"].flatten().tolist() == [1000, 1001]


def test_an_index_of_the_users_own_is_not_made_up(tmp_path: Path) -> None:
    ring(4).dumps(tmp_path / "saved")
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(rows(4).set("index", torch.arange(4) * 7))
    with pytest.raises(RuntimeError, match="this storage holds score, index"):
        buffer.loads(tmp_path / "saved")
