"""Buffers and states that TorchRL saved: they load with equal contents, and go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from tensordict import TensorDict, is_tensor_collection

import rbtool
from rbtool import LazyTensorStorage, TensorDictMaxValueWriter
from rbtool.core.buffers.pytrees import map_tensors
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.declarations import LEAVES
from rbtool.core.samplers import prioritized, slices
from rbtool.core.samplers.prioritized import NEVER_WRITTEN, PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage

WRITTEN = Path(__file__).parents[2] / "data/torchrl_checkpoints"
CASES = sorted(case.parent.name for case in WRITTEN.glob("*/case.json"))
EPISODES = ("flat_", "nested_", "h5_")  # layouts of whole episodes, which a leaf reads
PARTS = (prioritized, prioritized, slices, slices)
NAMES = {name: getattr(rbtool, name) for name in rbtool.__all__} | {
    name: value for part in PARTS for name, value in vars(part).items()
}


def buffer_of(facts: dict[str, Any], **more: Any) -> ReplayBuffer:
    """Make the buffer that a case was saved from, out of the constructor calls that it names."""
    parts = facts["components"]
    made = {part: eval(parts[part], NAMES) for part in ("sampler", "writer")}
    arguments = {name: value for name, value in parts["buffer_args"].items() if name in {"batch_size", "dim_extend"}}
    storage = parts["storage"]
    if storage.startswith("TensorStorage"):
        storage = f"LazyTensorStorage({facts['capacity']}, ndim={facts['ndim']})"
    built = eval(storage, NAMES)
    if "checkpointer" in parts:
        built.checkpointer = eval(parts["checkpointer"], NAMES)
    return getattr(rbtool, parts["buffer"])(storage=built, **made, **arguments, **more)


def leaves(data: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return {path.removeprefix("/") or "_-single-tensor-_": data}
    items = data.items() if is_tensor_collection(data) or isinstance(data, dict) else enumerate(data)
    return {name: leaf for key, value in items for name, leaf in leaves(value, f"{path}/{key}").items()}


def nest(expected: Any, bfloat16: list[str]) -> Any:
    """Make a first batch of zeros as a case has them: its folder does not tell lists, tuples and dicts apart."""
    root: dict[str, Any] = {}
    for name in expected.files:
        *above, last = name.split("/")
        node = root
        for part in above:
            node = node.setdefault(part, {})
        zeros = torch.zeros_like(torch.from_numpy(expected[name][:1]))
        node[last] = zeros.bfloat16() if name in bfloat16 else zeros
    return _with_tuples(root)


def _with_tuples(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _with_tuples(child) for key, child in node.items()}
    return tuple(children.values()) if all(key.isdigit() for key in children) else children


def test_the_cases_are_there() -> None:
    assert len(CASES) > 40


@each("case", [one for one in CASES if "foreign_form" in LEAVES or not one.startswith(EPISODES)])
def test_a_saved_buffer_loads(case: str) -> None:
    facts = json.loads((WRITTEN / case / "case.json").read_text())
    buffer = buffer_of(facts)
    if facts["kind"] == "pytree":
        buffer.extend(nest(np.load(WRITTEN / case / "expected.npz"), facts["bfloat16_keys"]))
    buffer.loads(WRITTEN / case / "checkpoint")
    counts = (len(buffer), buffer.writer._cursor, buffer.write_count)
    assert counts == (facts["len"], facts["cursor"], facts["write_count"])
    # What the layouts of whole episodes lost is lost: then there is what TorchRL gives back.
    lossy = facts["kind"] in {"flat", "nested", "h5"} and (WRITTEN / case / "torchrl_loads.npz").exists()
    found = leaves(buffer[:])
    expected = np.load(WRITTEN / case / ("torchrl_loads.npz" if lossy else "expected.npz"))
    assert set(expected.files) <= set(found)
    for name in expected.files:
        leaf = found[name].float() if name in facts["bfloat16_keys"] else found[name]
        assert np.array_equal(leaf.numpy(), expected[name], equal_nan=leaf.is_floating_point())
    assert (buffer._rng is not None) == (case == "td_memmap_rng_state")
    if not isinstance(buffer.writer, rbtool.TensorDictMaxValueWriter):
        buffer.add(map_tensors(torch.clone, buffer.storage[0]))
        rows = facts.get("capacity_shape", [facts["capacity"]])[0]
        assert buffer.writer._cursor == (facts["cursor"] + 1) % rows


# States of older versions, of live samplers, and of rankings --------------------------------------


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


def test_a_writer_loads_an_older_state_before_it_has_a_storage() -> None:
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
def test_invalid_trees_are_refused_and_change_nothing(tree: Any) -> None:
    sampler = rbtool.PrioritizedSampler(10, 0.7, 0.5)
    before = sampler.state_dict()
    with pytest.raises(RuntimeError):
        sampler.load_state_dict(before | {"_sum_tree": tree, "_beta": 1.0})
    assert str(sampler.state_dict()) == str(before)


@pytest.mark.parametrize("case", ["writer_max_value_full", "writer_max_value_partly"])
@pytest.mark.parametrize("written", [0, 3, 8, 30])
def test_a_ranking_loads_into_a_buffer_that_was_written(tmp_path: Path, case: str, written: int) -> None:
    """TorchRL stores no `"index"` with ranked elements of a batch."""
    facts = json.loads((WRITTEN / case / "case.json").read_text())
    saved, storage = tmp_path / "saved", LazyTensorStorage(facts["capacity"])
    ReplayBuffer(storage=storage).extend(rows(facts["len"]))
    storage.dumps(saved / "storage")
    shutil.rmtree(saved / "storage" / ".rbtool")
    shutil.copytree(WRITTEN / case / "checkpoint" / "writer", saved / "writer")
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


# Slice samplers: its trajectories, its weights and its epochs -------------------------------------


DONE = ("next", "done")


def loaded(case: str, sampler: Any, capacity: int = 16, ndim: int = 1, **more: Any) -> Any:
    storage = LazyMemmapStorage(capacity, ndim=ndim)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=sampler, generator=torch.Generator().manual_seed(0), **more
    )
    buffer.loads(WRITTEN / case / "checkpoint")
    return buffer


def slices_of(buffer: ReplayBuffer, slices: int) -> set[tuple[tuple[int, ...], ...]]:
    """The slices of a large batch, each as the coordinates of its steps."""
    buffer._batch_size = None
    _, info = buffer.sample(slices * 3, return_info=True)
    index = info["index"] if isinstance(info["index"], tuple) else (info["index"],)
    steps = [tuple(step) for step in torch.stack(index, -1).reshape(-1, len(index)).tolist()]
    ends = (info["next", "truncated"].flatten().nonzero().flatten() + 1).tolist()
    return {tuple(steps[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)}


@pytest.mark.parametrize("case", ["sampler_slice_partly", "sampler_slice_wrapped", "sampler_slice_ndim2_wrapped"])
def test_every_slice_of_its_trajectories_and_no_other_is_drawn(case: str) -> None:
    facts = json.loads((WRITTEN / case / "case.json").read_text())
    sampler = SliceSampler(slice_len=3, end_key=DONE, strict_length=False)
    buffer = loaded(case, sampler, facts["capacity"], facts["ndim"])
    theirs, rows = np.load(WRITTEN / case / "expected_sampler.npz"), facts["capacity_shape"][0]
    expected = set()
    for start, length in zip(theirs["start"].tolist(), theirs["length"].tolist(), strict=True):
        for first in range(max(1, length - 2)):
            window = range(first, first + min(3, length))
            expected.add(tuple(((start[0] + step) % rows, *start[1:]) for step in window))
    assert slices_of(buffer, 4000) == expected


def test_weights_of_starts_are_loaded_and_saved(tmp_path: Path) -> None:
    case = "sampler_prioritized_slice"
    sampler = PrioritizedSliceSampler(16, alpha=0.6, beta=0.4, slice_len=2, end_key=DONE, strict_length=False)
    buffer = loaded(case, sampler, batch_size=4)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    ours, theirs = (folder / "sampler" for folder in (tmp_path / "saved", WRITTEN / case / "checkpoint"))
    for name in ("sumtree.memmap", "mintree.memmap"):
        assert np.allclose(np.fromfile(ours / name), np.fromfile(theirs / name), rtol=1e-7, atol=0)
    assert np.fromfile(ours / "sumtree.memmap").sum() == pytest.approx(16.850658, abs=1e-5)


def test_an_epoch_of_trajectories_continues() -> None:
    case = "sampler_slice_without_replacement"
    sampler = SliceSamplerWithoutReplacement(slice_len=3, end_key=DONE, strict_length=False)
    buffer = loaded(case, sampler, batch_size=6)
    trajectory = torch.cat([torch.zeros(1), buffer[:]["next", "done"].flatten()[:-1].cumsum(0)]).int()
    theirs = np.load(WRITTEN / case / "expected_sampler.npz")
    assert set(theirs["remaining"].tolist()) == {0, 4, 2}
    drawn = [set(trajectory[buffer.sample()["index"].flatten()].tolist()) for _ in range(2)]
    assert drawn[0] | drawn[1] == {0, 4, 2}
    assert not drawn[0] & drawn[1]
    assert buffer.sampler.ran_out
