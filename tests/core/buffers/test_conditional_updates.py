"""Conditional updates against a model of a ring whose elements are updated one record after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import (
    ConditionalUpdateResult,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

CAPACITY = 6


def rows(first: int, count: int, lanes: int = 0) -> TensorDict:
    shape = (lanes, count) if lanes else (count,)
    value = torch.arange(first, first + count).expand(shape)
    version = torch.zeros(*shape, 1, dtype=torch.int64)
    return TensorDict({"value": value.clone(), "version": version, "next": {"other": value.double()}}, shape)


def ring(count: int = 0, lanes: int = 0, storage: Any = None, **options: Any) -> TensorDictReplayBuffer:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    if storage is None:
        storage = LazyTensorStorage(CAPACITY * max(lanes, 1), ndim=2 if lanes else 1)
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4, **options)
    if count:
        buffer.extend(rows(0, count, lanes))
    return buffer


def update(buffer: Any, index: list[int], generation: list[int], **options: Any) -> ConditionalUpdateResult:
    values = {"value": 100 + torch.arange(len(index))}
    return buffer.update_if_present(
        index=torch.tensor(index, dtype=torch.int64), generation=torch.tensor(generation, dtype=torch.int64),
        **{"patch": values} | options,
    )  # fmt: skip


RECORDS = st.lists(st.tuples(st.integers(-2, CAPACITY + 1), st.integers(-1, 3), st.integers(-1, 3)), max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4), RECORDS, st.sampled_from([None, False, True]))
def test_updates_are_those_of_the_model(writes: list[int], records: list[Any], newer: bool | None) -> None:
    buffer, stamps, first = ring(), [-1] * CAPACITY, 0
    for count in writes:
        buffer.extend(rows(first, count))
        for number in range(first, first + count):
            stamps[number % CAPACITY] += 1
        first += count
    index, generation, version = (list(part) for part in zip(*records, strict=True)) if records else ([], [], [])
    values, versions = buffer[:]["value"].tolist(), buffer[:]["version"].flatten().tolist()
    live = [0 <= row < CAPACITY and stamp == stamps[row] >= 0 for row, stamp in zip(index, generation, strict=True)]
    updated = list(live)
    if newer is not None:
        stored = list(versions)
        fits = [
            is_live and (v > stored[row] if newer else v >= stored[row])
            for row, v, is_live in zip(index, version, live, strict=True)
        ]
        best = {
            row: max((v, n) for n, (r, v, ok) in enumerate(zip(index, version, fits, strict=True)) if ok and r == row)[
                1
            ]
            for row, ok in zip(index, fits, strict=True)
            if ok
        }
        updated = [best.get(row) == number for number, row in enumerate(index)]
    for number, (row, done) in enumerate(zip(index, updated, strict=True)):
        if done:
            values[row] = 100 + number
            versions[row] = version[number] if newer is not None else versions[row]
    options = (
        {}
        if newer is None
        else {"version_key": "version", "version": torch.tensor(version, dtype=torch.int64), "require_newer": newer}
    )
    found = update(buffer, index, generation, **options)
    assert found.updated.tolist() == updated
    assert buffer[:]["value"].tolist() == values
    assert buffer[:]["version"].flatten().tolist() == versions
    if newer is None:
        assert found.version_rejected is None
    else:
        assert found.version_rejected.tolist() == [one and not other for one, other in zip(live, updated, strict=True)]
    counts = found.updated_count, found.version_rejected_count, found.stale_count
    assert counts == (sum(updated), sum(live) - sum(updated), len(live) - sum(live))


@pytest.mark.parametrize("kind", ["memory", "memmap", "lanes", "shared"])
def test_batches_are_updated_until_they_are_overwritten(kind: str, tmp_path: Any) -> None:
    lanes = 2 if kind == "lanes" else 0
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows") if kind == "memmap" else None
    buffer = ring(4, lanes, storage, shared=kind == "shared")
    batch = buffer.sample()
    handle = {"index": batch["index"], "generation": batch["index_generation"]}
    for value in (5, 6):  # a second update of the same batch works
        found = buffer.update_if_present(**handle, patch={("next", "other"): torch.full((4,), float(value)).double()})
        assert found.updated.all()
        index = tuple(batch["index"].unbind(-1)) if lanes else batch["index"]
        assert (buffer.storage[index]["next", "other"] == value).all()
    buffer.extend(rows(50, CAPACITY, lanes))
    found = buffer.update_if_present(**handle, patch={("next", "other"): torch.full((4,), 7.0).double()})
    assert (found.updated_count, found.stale_count) == (0, 4)
    assert not (buffer.storage[:]["next", "other"] == 7).any()
    buffer.empty()
    if not lanes:
        assert update(buffer, [0], [2]).stale_count == 1


def test_slice_samplers_see_the_change() -> None:
    buffer = ring(6, sampler=SliceSampler(slice_len=2, traj_key="value"))
    with pytest.raises(RuntimeError, match="long enough"):
        buffer.sample()
    buffer.update_if_present(
        index=torch.tensor([2, 3]), generation=torch.tensor([0, 0]), patch={"value": torch.tensor([9, 9])}
    )
    assert set(buffer.sample()["index"].flatten().tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("dtype", "version", "kept"),
    [
        (torch.uint8, -1, None), (torch.uint8, 256, None), (torch.uint8, 255, 255), (torch.float32, 2**24 + 1, None),
        (torch.float32, 2**24, 2.0**24), (torch.float32, 0.1, pytest.approx(0.1)), (torch.int64, 3.0, 3),
    ],
)  # fmt: skip
def test_versions_are_those_that_were_given_or_an_error(dtype: torch.dtype, version: Any, kept: Any) -> None:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=writer)
    buffer.extend(TensorDict({"value": torch.zeros(1), "version": torch.zeros(1, dtype=dtype)}, [1]))
    asked = {"index": [0], "generation": [0], "patch": {"value": torch.ones(1)}, "version_key": "version"}
    if kept is None:
        with pytest.raises(ValueError, match="cannot hold"):
            buffer.update_if_present(**asked, version=version)
    else:
        assert buffer.update_if_present(**asked, version=version).updated_count == 1
    assert buffer[:]["version"].item() == (0 if kept is None else kept)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"generation": torch.zeros(3, dtype=torch.int64)}, ValueError, "3 numbers for 2 elements"),
        ({"generation": torch.zeros(2)}, ValueError, "whole numbers"),
        ({"index": torch.zeros(2)}, ValueError, "whole numbers"),
        ({"version_key": "version"}, ValueError, "both or neither"),
        ({"version": 3}, ValueError, "both or neither"),
        ({"version_key": ("value",), "version": 3}, ValueError, "part of the patch"),
        ({"version_key": "missing", "version": 3}, KeyError, "missing"),
        ({"version_key": "next.other", "version": 3}, ValueError, "without dots"),
        ({"version_key": "version", "version": torch.ones(2, dtype=torch.int32)}, ValueError, "int32"),
        ({"version_key": "version", "version": torch.ones(3, dtype=torch.int64)}, ValueError, r"\[3\]"),
        ({"version_key": "version", "version": 2.7}, ValueError, "2.7, which 'version', torch.int64, cannot"),
        ({"version_key": "version", "version": [1, 1.5]}, ValueError, r"\[1, 1.5\].* cannot hold"),
        ({"version_key": "version", "version": 2**63}, ValueError, "cannot hold"),
        ({"version_key": "version", "version": float("nan")}, ValueError, "version is nan"),
        ({"version_key": "version", "version": "3"}, ValueError, "version is '3', expected numbers"),
        ({"version_key": "version", "version": 2**70}, ValueError, "expected numbers"),
        ({"patch": {"missing": torch.zeros(2)}}, KeyError, "missing"),
        ({"patch": {"value": torch.zeros(2)}}, ValueError, "float32"),
        ({"patch": {"value": torch.zeros(3, dtype=torch.int64)}}, ValueError, r"\[3\]"),
        ({"patch": {"value": 3}}, ValueError, "is int in the patch"),
    ],
)  # fmt: skip
def test_bad_updates_change_nothing(options: dict[str, Any], error: type[Exception], words: str) -> None:
    buffer = ring(4)
    before = buffer[:].clone()
    asked: dict[str, Any] = {
        "index": torch.tensor([0, 1]), "generation": torch.tensor([0, 0]),
        "patch": {"value": torch.tensor([7, 7])},
    }  # fmt: skip
    with pytest.raises(error, match=words):
        buffer.update_if_present(**asked | options)
    assert (buffer[:] == before).all()


def test_parts_that_cannot() -> None:
    for buffer in (
        TensorDictReplayBuffer(storage=LazyTensorStorage(4)),
        ring(2, storage=ListStorage(4)),
        ring(),
    ):
        with pytest.raises(RuntimeError, match="conditional"):
            update(buffer, [0], [0])
