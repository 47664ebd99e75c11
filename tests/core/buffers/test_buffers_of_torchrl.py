"""Buffers that TorchRL saved: every one loads with equal contents, length, cursor and count, and can be written on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import is_tensor_collection

import rbtool
from rbtool.core.buffers.pytrees import map_tensors
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.samplers import prioritized, prioritized_slices, slices

WRITTEN = Path(__file__).parents[2] / "data/torchrl_checkpoints"
CASES = sorted(case.parent.name for case in WRITTEN.glob("*/case.json"))
PARTS = (prioritized, prioritized_slices, slices, slices)
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


@pytest.mark.parametrize("case", CASES)
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
