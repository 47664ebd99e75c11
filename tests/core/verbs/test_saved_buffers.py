"""Saved buffers, ours and TorchRL's: parts that contradict each other, and digests that verify the bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from damage import flip, without_digests
from tensordict import TensorDict
from torch import Tensor, arange, zeros

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, ListStorage
from rbtool.core.verbs.saved_buffers import buffer_findings

THEIRS = Path(__file__).parents[2] / "data/torchrl_checkpoints"
CASES = sorted(case.parent for case in THEIRS.glob("*/case.json"))


def test_buffers_of_torchrl_have_no_findings() -> None:
    found = {case.name: buffer_findings(case / "checkpoint") for case in CASES}
    assert len(found) > 70
    assert {name: result for name, result in found.items() if result != ([], False)} == {}


@pytest.mark.parametrize(
    ("case", "steps", "episodes"),
    [("td_memmap_wrapped", 16, 5), ("nested_ndim2_partly", 14, 6), ("h5_full", 16, 6), ("pytree_memmap_partly", 0, 0)],
)
def test_check_notes_that_buffers_of_torchrl_have_no_digests(case: str, steps: int, episodes: int) -> None:
    result = rbtool.check(THEIRS / case / "checkpoint")
    assert (result.findings, result.steps, result.episodes, result.skipped) == ((), steps, episodes, ())
    assert result.rules == (15 if steps else 3)
    assert "these files have no digests, since TorchRL" in result.notes[0]


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(document | changes))

    return change


def put(name: str, dtype: str, index: int, value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        array = np.fromfile(folder / name, dtype)
        array[index] = value
        array.tofile(folder / name)

    return change


def fewer_priorities(folder: Path) -> None:
    edit(PRIORITIES, _max_capacity=13.0)(folder)
    for name in ("sumtree", "mintree"):
        os.truncate(folder / f"sampler/{name}.memmap", 8 * 13)


WRITER, LENGTH = "writer/metadata.json", "storage/storage_metadata.json"
PRIORITIES = "sampler/sampler_metadata.json"


@each(
    ("case", "change", "message"),
    [
        ("td_memmap_partly_7of16", edit(WRITER, cursor=9), "has the cursor 9, the storage holds 7 rows"),
        ("td_memmap_partly_7of16", edit(WRITER, cursor=16), "has the cursor 16, the storage has 16 rows"),
        ("td_memmap_partly_7of16", edit(WRITER, write_count=3), "counts 3 writes, which do not reach the cursor 7"),
        ("td_memmap_partly_7of16", edit(WRITER, cursor=-1), "has the cursor -1"),
        ("td_memmap_partly_7of16", edit(LENGTH, len=17), "counts 17 elements, its leaves have room for 16"),
        ("td_memmap_ndim2_partly", edit(LENGTH, len=13), "counts 13 elements, which 2 lanes do not share evenly"),
        ("pytree_memmap_partly", edit(LENGTH, len=5), "has the cursor 7, the storage holds 5 rows"),
        ("compressed_td_partly", edit(WRITER, cursor=9, write_count=9), "the cursor 9, the storage holds 8 rows"),
        ("flat_wrapped", edit(WRITER, cursor=8), "has the cursor 8, the rows of the storage go on at 7"),
        ("flat_wrapped", edit("storage/is_full/meta.json", data=False), "which does not fit a storage"),
        ("nested_partly_7of16", edit("storage/shift/meta.json", data=8), "which does not fit a storage"),
        ("writer_round_robin_generations", edit(WRITER, generation_shape=[15]), r"has 128 bytes, expected 120"),
        ("writer_max_value_full", edit(LENGTH, len=7), "ranks 8 elements, the storage holds 7"),
        ("sampler_without_replacement_mid_epoch", edit(LENGTH, len=4), "draws from .* elements, the storage holds 4"),
        ("sampler_without_replacement_mid_epoch", put("sampler/_sample_list.memmap", "<i8", 0, 99), "to draw outside"),
        ("sampler_prioritized_slice", edit(PRIORITIES, _max_capacity=13.0), "has 128 bytes, expected 104"),
        ("sampler_prioritized_slice", fewer_priorities, "has room for 13 priorities"),
        ("sampler_prioritized_slice", put("sampler/sumtree.memmap", "<f8", 1, -1.0), "not finite numbers from 0"),
        ("sampler_prioritized_slice", put("sampler/mintree.memmap", "<f8", 1, 9.0), "gives element 1 the priority"),
        ("sampler_prioritized_slice", edit(PRIORITIES, _max_priority=[8.0, 99.0]), "at element 99 of 16"),
    ],
)  # fmt: skip
def test_contradicting_values_of_a_buffer_are_found(tmp_path, case, change, message) -> None:
    folder = Path(shutil.copytree(THEIRS / case / "checkpoint", tmp_path / "copy"))
    change(folder)
    result = rbtool.check(folder)
    assert result.failed()
    assert [finding for finding in result.findings if re.search(message, finding.message)], result.findings


def test_contradicting_flags_of_a_buffer_are_found(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(THEIRS / "td_memmap_partly_7of16/checkpoint", tmp_path / "copy"))
    put("storage/next/terminated.memmap", "?", 5, True)(folder)
    assert "TED003" in {finding.rule for finding in rbtool.check(folder).findings}


STORAGES: dict[str, Callable[[], Storage]] = {
    "tensor": lambda: LazyTensorStorage(8),
    "list": lambda: ListStorage(8),
    "compressed": lambda: CompressedListStorage(8),
    "flat": lambda: LazyTensorStorage(8, checkpointer=FlatStorageCheckpointer()),
    "h5": lambda: LazyTensorStorage(8, checkpointer=H5StorageCheckpointer()),
}


def flags_of(steps: int, length: int) -> dict[str, Tensor]:
    """Flags of episodes of this length."""
    done = (arange(steps) % length == length - 1).unsqueeze(-1)
    return {"done": done, "terminated": done, "truncated": zeros(steps, 1).bool()}


def saved(kind: str, path: Path) -> Path:
    rows = arange(6).unsqueeze(-1)
    after = {"observation": rows + 1, "reward": rows.float() + 1, **flags_of(6, 3)}
    sampler = PrioritizedSampler(8, 0.7, 0.5) if kind == "tensor" else SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=STORAGES[kind](), sampler=sampler, batch_size=2)
    buffer.extend(TensorDict({"observation": rows, "action": rows.float() + 1, "next": after}, [6]))
    buffer.sample()
    buffer.dumps(path)
    return path


@each("kind", STORAGES)
def test_saved_buffers_are_compared_with_their_digests(tmp_path: Path, kind: str) -> None:
    path = saved(kind, tmp_path / "saved")
    result = rbtool.check(path)
    assert ([finding for finding in result.findings if finding.severity == "error"], result.notes) == ([], ())
    for file in [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]:
        at = 0 if "storage" in file.parts else file.stat().st_size // 2
        flip(file, at)
        assert rbtool.check(path).failed(), file
        flip(file, at)
    assert rbtool.check(without_digests(path)).notes


@each("kind", STORAGES)
def test_inspect_shows_a_saved_buffer(tmp_path: Path, kind: str) -> None:
    result = rbtool.inspect(saved(kind, tmp_path / "saved"))
    assert result.path == tmp_path / "saved"
    if kind in ("list", "compressed"):
        assert (result.kind, result.elements, result.batch_size) == ("buffer", 6, 2)
        assert result.sentence == "the checkpoint of a buffer: 6 elements, batches of 2"
        with pytest.raises(rbtool.UsageError, match="is the checkpoint of a replay buffer"):
            rbtool.inspect(tmp_path / "saved", episode=0)
        return
    assert (result.kind, result.type, result.steps, result.episodes) == ("inspect", "checkpoint", 6, 2)
    assert result.notes[0] == "the checkpoint of a buffer: 6 elements, room for 8, batches of 2"
    assert rbtool.inspect(tmp_path / "saved", episode=1).episode.length == 3


@pytest.mark.parametrize("kind", ["tensor", "flat", "h5"])
def test_check_and_inspect_open_a_saved_storage(tmp_path: Path, kind: str) -> None:
    storage = STORAGES[kind]()
    buffer = ReplayBuffer(storage=STORAGES[kind](), batch_size=2)
    buffer.loads(saved(kind, tmp_path / "saved"))
    buffer.storage.dumps(tmp_path / "rows")
    result = rbtool.check(tmp_path / "rows")
    assert (result.errors, result.steps, result.episodes, result.notes) == (0, 6, 2, ())
    notes = rbtool.inspect(tmp_path / "rows").notes
    assert kind == "flat" or notes[0] == "the checkpoint of a storage: 6 elements, room for 8"
    storage.loads(tmp_path / "rows")
    for file in (tmp_path / "rows").rglob("*"):
        if file.is_file() and file.stat().st_size > 40:
            flip(file, -30)
    with pytest.raises(rbtool.CorruptDataError):
        storage.loads(tmp_path / "rows")
    try:
        assert rbtool.check(tmp_path / "rows").failed()
    except rbtool.CorruptDataError:  # nothing can be opened
        assert kind != "h5"


def test_inspect_shows_a_saved_list_storage(tmp_path: Path) -> None:
    storage = ListStorage(8)
    storage.set(range(3), ["a", "b", "c"])
    storage.dumps(tmp_path / "rows")
    assert rbtool.inspect(tmp_path / "rows").sentence == "the checkpoint of a storage: 3 elements"


@each("kind", STORAGES)
@each(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder / ".rbtool"), "digests.json is missing: the digests of the checkpoint"),
        (lambda folder: shutil.rmtree(folder / "writer"), "is missing"),
        (lambda folder: (folder / "sampler/more.json").write_text("{}"), "more.json was not saved with the rest"),
    ],
)
def test_check_and_load_refuse_incomplete_buffers_as_the_buffer_does(tmp_path, kind, damage, message) -> None:
    path = saved(kind, tmp_path / "saved")
    damage(path)
    buffer = ReplayBuffer(storage=STORAGES[kind](), batch_size=2)
    with pytest.raises(rbtool.CorruptDataError, match=message):
        buffer.loads(path)
    with pytest.raises(rbtool.CorruptDataError, match=message):
        rbtool.checkpoint.load(path, tmp_path / "made")
    result = rbtool.check(path)
    assert message in next(one.message for one in result.findings if one.rule == "BUF001")
    assert result.notes == (), "digests were recorded: no note may say that there are none"


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
@pytest.mark.parametrize("whole", [True, False], ids=["buffer", "storage"])
def test_digests_of_our_checkpoints_for_torchrl_are_compared(tmp_path: Path, form: str, whole: bool) -> None:
    kinds = {"flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer}
    flags = flags_of(6, 3) | {"reward": zeros(6, 1)}
    ring = ReplayBuffer(storage=LazyTensorStorage(8, checkpointer=kinds[form](compatible=True)), batch_size=2)
    ring.extend(TensorDict({"action": arange(6.0), "next": flags}, [6]))
    (ring if whole else ring.storage).dumps(tmp_path / "saved")
    assert rbtool.check(tmp_path / "saved").notes == ()
    folder = tmp_path / "saved/storage" if whole else tmp_path / "saved"
    if form == "h5":
        with h5py.File(folder / "checkpoint.h5", "r+") as file:
            names: list[str] = []
            file.visit(lambda name: names.append(name) if name.endswith("action") else None)
            file[names[0]][0] = 9
    else:
        flip(folder / "action.memmap", 2)
    assert rbtool.check(tmp_path / "saved").failed()
    for verb in (rbtool.checkpoint.load, rbtool.convert):
        with pytest.raises(rbtool.CorruptDataError, match="does not hold the bytes that were saved"):
            verb(tmp_path / "saved", tmp_path / "made")
    assert not (tmp_path / "made").exists()


@each(
    ("name", "case"),
    [
        ("storage/segments.json", None), ("storage/storage_metadata.json", "td_memmap_partly_7of16"),
        ("storage/metadata.json", "compressed_td_partly"), ("writer/metadata.json", "td_memmap_partly_7of16"),
        ("sampler/sampler_metadata.json", "sampler_prioritized_slice"),
    ],
)  # fmt: skip
def test_broken_documents_of_a_buffer_are_findings(tmp_path: Path, name: str, case: str | None) -> None:
    path = tmp_path / "saved"
    if case is None:
        without_digests(saved("tensor", path))
    else:
        shutil.copytree(THEIRS / case / "checkpoint", path)
    for document in ("{}", "[]", "null", "3", '{"length": "x"}', '{"length": 6, "leaves": [{}]}'):
        (path / name).write_text(document)
        found = [one.message for one in buffer_findings(path)[0]]
        assert found, document
        assert not [text for text in found if re.search("Error|cannot be read", text)], "no exceptions of Python"


def save_ensemble(folder: Path) -> list[ReplayBuffer]:
    """Save an ensemble of a ring that has wrapped, an empty ring, and an ensemble of two."""
    rings = [rbtool.TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(4)]
    for number, count in enumerate((14, 0, 6, 7)):
        if count:
            rings[number].extend(TensorDict({"action": arange(count), "next": flags_of(count, 4)}, [count]))
    inner = rbtool.ReplayBufferEnsemble(*rings[2:])
    rbtool.ReplayBufferEnsemble(*rings[:2], inner).dumps(folder)
    return rings


def test_an_ensemble_is_checked_and_listed_with_all_members(tmp_path: Path) -> None:
    save_ensemble(tmp_path / "saved")
    assert buffer_findings(tmp_path / "saved") == ([], True)
    assert rbtool.check(tmp_path / "saved").findings == ()
    result = rbtool.inspect(tmp_path / "saved")
    assert (result.kind, result.elements) == ("ensemble", 23)
    found = {one.name: (one.elements, one.capacity, one.weight) for one in result.members}
    assert found == {"0": (10, 10, 1), "1": (0, None, 1), "2.0": (6, 10, 1), "2.1": (7, 10, 1)}


@pytest.mark.parametrize(
    ("damage", "rule", "named"),
    [
        (lambda folder: flip(folder / "storage/2/1/segment-00000.memmap", 3), "BUF001", "storage/2/1"),
        (edit("writer/2/0/metadata.json", cursor=99), "BUF002", "writer/2/0/metadata.json counts 6 writes"),
        (lambda folder: shutil.rmtree(folder / "storage/0"), "BUF002", "storage/0 is missing"),
        (lambda folder: (folder / "storage/ensemble.json").write_text("{}"), "BUF002", "does not list the members"),
    ],
)
def test_a_damaged_member_of_an_ensemble_is_named(damage, rule, named, tmp_path) -> None:
    save_ensemble(tmp_path / "saved")
    damage(tmp_path / "saved")
    found = {finding.rule: finding.message for finding in buffer_findings(tmp_path / "saved")[0]}
    assert named in found[rule]


def test_a_member_of_an_ensemble_is_loaded_in_temporal_order(tmp_path: Path) -> None:
    rings = save_ensemble(tmp_path / "saved")
    with pytest.raises(rbtool.UsageError, match="checkpoint of an ensemble") as raised:
        rbtool.checkpoint.load(tmp_path / "saved", tmp_path / "whole")
    assert str(tmp_path / "saved/storage/2") in (raised.value.hint or "")
    for name, ring in (("0", rings[0]), ("2/1", rings[3])):
        rbtool.checkpoint.load(tmp_path / "saved/storage" / name, tmp_path / "made" / name)
        made = rbtool.load_dataset(tmp_path / "made" / name)[:]["action"]
        assert made.tolist() == sorted(ring[:]["action"].tolist())


@pytest.mark.parametrize("document", ["{}", "[]", "null"])
def test_inspect_refuses_the_damaged_member_of_an_ensemble(tmp_path: Path, document: str) -> None:
    save_ensemble(tmp_path / "saved")
    (tmp_path / "saved/storage/2/0/segments.json").write_text(document)
    with pytest.raises(rbtool.CorruptDataError, match=r"2/0/segments.json has .*, expected an object"):
        rbtool.inspect(tmp_path / "saved")


def test_an_ensemble_refuses_members_that_changed_places(tmp_path: Path) -> None:
    rings = save_ensemble(tmp_path / "saved")
    inner = tmp_path / "saved/storage/2"
    (inner / "0").rename(inner / "aside")
    (inner / "1").rename(inner / "0")
    (inner / "aside").rename(inner / "1")
    ensemble = rbtool.ReplayBufferEnsemble(*rings[:2], rbtool.ReplayBufferEnsemble(*rings[2:]))
    with pytest.raises(rbtool.CorruptDataError, match="does not hold the bytes that were saved"):
        ensemble.loads(tmp_path / "saved")
    assert rbtool.check(tmp_path / "saved").failed()
