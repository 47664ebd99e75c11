"""What TorchRL 0.14 wrote, and what it makes of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.writers.base import Writer
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
MAX_VALUE = ("writer_max_value_full", "writer_max_value_nested_rank_key", "writer_max_value_partly")
ROUND_ROBIN = ("writer_round_robin_generations", "writer_td_round_robin_generations_partly")


def loaded(writer: Writer, case: str) -> tuple[dict, dict]:
    """Load a case's writer, with a storage of as many rows; return its facts and its expected arrays."""
    facts = json.loads((CASES / case / "case.json").read_text())
    storage = LazyTensorStorage(facts["capacity"])
    storage.set(range(facts["len"]), TensorDict({"score": torch.zeros(facts["len"], 1)}, [facts["len"]]))
    writer.register_storage(storage)
    writer.loads(CASES / case / "checkpoint" / "writer")
    assert (writer._cursor, writer._write_count) == (facts["cursor"], facts["write_count"])
    return facts, dict(np.load(CASES / case / "expected_sampler.npz"))


@pytest.mark.parametrize("case", MAX_VALUE)
def test_a_ranking_is_read(case: str) -> None:
    writer = TensorDictMaxValueWriter()
    _, expected = loaded(writer, case)
    assert writer.rank_key == (("next", "reward") if "nested" in case else "score")
    assert writer._ranking.state().tolist() == sorted(expected["heap"].tolist())


@pytest.mark.parametrize("case", MAX_VALUE)
def test_a_ranking_that_was_read_goes_on(case: str) -> None:
    writer = TensorDictMaxValueWriter()
    facts, expected = loaded(writer, case)
    writer.rank_key = "score"
    lowest, slot = min(expected["heap"].tolist())
    free = facts["len"] < facts["capacity"]
    batch = TensorDict({"score": torch.tensor([[lowest], [100.0]])}, [2])
    assert writer.extend(batch).tolist() == ([6, 7] if free else [-1, int(slot)])


@pytest.mark.parametrize("case", ROUND_ROBIN)
def test_generations_are_read(case: str) -> None:
    writer = RoundRobinWriter(track_generations=True)
    facts, expected = loaded(writer, case)
    assert writer.generations_of(torch.arange(facts["capacity"])).tolist() == expected["generation"].tolist()


@pytest.mark.parametrize("case", ROUND_ROBIN)
def test_a_writer_without_generations_leaves_them_aside(case: str) -> None:
    writer = TensorDictRoundRobinWriter()
    loaded(writer, case)
    assert "_generation" not in writer.state_dict()


@pytest.mark.peer
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", ["RoundRobinWriter", "TensorDictRoundRobinWriter"])
def test_torchrl_reads_our_ring(tmp_path, name: str, tracked: bool) -> None:
    data = pytest.importorskip("torchrl.data.replay_buffers")
    writer = RoundRobinWriter(track_generations=tracked)
    writer.register_storage(LazyTensorStorage(4))
    writer.extend(torch.arange(6))
    writer.dumps(tmp_path)
    theirs = getattr(data, name)(track_generations=tracked)
    theirs.register_storage(data.LazyTensorStorage(4))
    theirs.loads(tmp_path)
    state = theirs.state_dict()
    assert (state["_cursor"], state["_write_count"]) == (2, 6)
    assert not tracked or state["_generation"].tolist() == [1, 1, 0, 0]
    theirs.load_state_dict(writer.state_dict())
    writer.load_state_dict(theirs.state_dict())


@pytest.mark.peer
@pytest.mark.parametrize("ranks", [[], [3.0, 1.0, 2.0, 7.0, 5.0], [3, 1, 2, 7, 5]])
def test_torchrl_reads_our_ranking(tmp_path, ranks: list) -> None:
    data = pytest.importorskip("torchrl.data.replay_buffers")
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    writer.register_storage(LazyTensorStorage(4))
    if ranks:
        writer.extend(TensorDict({("next", "reward"): torch.tensor(ranks)}, [len(ranks)]))
    writer.dumps(tmp_path)
    theirs = data.TensorDictMaxValueWriter()
    theirs.register_storage(data.LazyTensorStorage(4))
    theirs.loads(tmp_path)
    assert sorted(map(tuple, theirs._current_top_values)) == sorted(writer._ranking._heap)
    assert theirs._cursor == writer._cursor
