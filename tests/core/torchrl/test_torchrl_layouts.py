"""TorchRL's flat, nested and H5 layouts: what it wrote is read, what it can hold is written, the rest is refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from buffers_of_episodes import BufferPlan, bits
from cases import each
from damage import flip
from tensordict import TensorDict

from rbtool.core import declarations
from rbtool.core.checkpointers.base import writer_of
from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    is_compatible,
    open_compatible,
)
from rbtool.core.checkpointers.storage_rows import fill_storage
from rbtool.core.encodings.foreign import foreign_form
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_packed, write_plan, write_walks
from rbtool.core.torchrl.reader import TorchrlForm

DATA = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
CASES = sorted(path.name for path in DATA.iterdir() if path.name.startswith(("flat_", "nested_", "h5_")))
FORMS = {"flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer}


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def require_unchanged(storage: TensorStorage, before: dict[str, np.ndarray]) -> None:
    assert all(np.array_equal(rows, before[name]) for name, rows in rows_of(storage).items())


def require_loaded(found: TensorStorage, expected: TensorStorage, made_up: str) -> None:
    """Require the rows that were saved, and a root flag that was not there: TorchRL makes it up, and so do we."""
    rows, saved = rows_of(found), rows_of(expected)
    assert set(rows) - set(saved) == {made_up}
    assert all(np.array_equal(rows[name], saved[name]) for name in saved)


def load_compatible(storage: Any, folder: Path, form: Any, options: Any) -> None:
    with open_compatible(storage, folder, form, options) as reader:
        fill_storage(storage, reader, reader.filled)


def place_of(case: str) -> Path:
    folder = DATA / case / "checkpoint" / "storage"
    return next(folder.glob("*.h5"), folder)


def rows_of(storage: TensorStorage) -> dict[str, np.ndarray]:
    data = storage[:]
    names = [name if isinstance(name, tuple) else (name,) for name in data.keys(True, True)]
    found = {"/".join(name): data[name] for name in names}
    return {name: (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy() for name, leaf in found.items()}


def steps(rows: int = 9, ends: tuple[int, ...] = (2, 5), lanes: tuple[int, ...] = ()) -> TensorDict:
    """Rows `[time, *lanes]` in which every number is another one."""
    count = int(np.prod(lanes, dtype=int))
    numbers = torch.arange(rows * count).reshape(count, rows).T.reshape(rows, *lanes)
    done = torch.zeros(rows, *lanes, 1, dtype=torch.bool)
    done[list(ends)] = True
    observation = torch.stack([numbers, -numbers], -1).double()
    after = {"observation": observation + torch.tensor([1.0, -1.0]) + 100 * done, "reward": numbers[..., None] / 2}
    flags = {"done": done, "terminated": done & (numbers[..., None] % 2 == 0)}
    root = {"observation": observation, "action": numbers.int(), "done": torch.zeros_like(done)}
    return TensorDict({**root, "next": {**after, **flags}}, [rows, *lanes])


def filled(data: TensorDict, capacity: int, shift: int = 0) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity, ndim=data.ndim)
    rows = torch.arange(len(data)).add(shift) % (capacity // data[0].numel() if data.ndim > 1 else capacity)
    if shift:
        storage.set(range(len(data)), data)
    storage.set(rows if shift else range(len(data)), data)
    return storage


@each("case", CASES)
@each(("kind", "more"), [(LazyTensorStorage, 0), (LazyMemmapStorage, 3)])
def test_what_torchrl_saved_is_loaded(case: str, kind: Any, more: int) -> None:
    facts = json.loads((DATA / case / "case.json").read_text())
    lost = DATA / case / "torchrl_loads.npz"
    expected = np.load(lost if lost.exists() else DATA / case / "expected.npz")
    rows, *lanes = facts["capacity_shape"]
    storage = kind((rows + more) * int(np.prod(lanes, dtype=int)), ndim=facts["ndim"])
    for _ in range(2):  # into a storage that is empty, and into one that is not
        load_compatible(storage, place_of(case), facts["kind"], {})
        found = rows_of(storage)
        assert len(storage) == facts["len"]
        assert storage.last_cursor == (facts["cursor"] or facts["filled_shape"][0]) - 1
        assert set(found) == set(expected.files)
        for name in expected.files:
            np.testing.assert_array_equal(np.swapaxes(found[name], 0, facts["ndim"] - 1), expected[name])


@each("case", CASES)
def test_the_form_is_told_by_the_content(case: str) -> None:
    form = json.loads((DATA / case / "case.json").read_text())["kind"]
    assert [name for name in FORMS if is_compatible(place_of(case), name)] == [form]  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "capacity", "shift", "lanes"),
    [
        (9, 9, 0, ()), (9, 9, 4, ()), (7, 16, 0, ()), (1, 1, 0, ()), (9, 27, 0, (3,)), (9, 27, 2, (3,)),
        (6, 30, 0, (3,)),
    ],
)  # fmt: skip
def test_what_is_written_for_torchrl_is_read(
    form: str, rows: int, capacity: int, shift: int, lanes: tuple[int, ...], tmp_path: Path
) -> None:
    ends = tuple(end for end in (2, 5) if end < rows)
    source = filled(steps(rows, ends, lanes), capacity, shift)
    source.checkpointer = FORMS[form](compatible=True)
    source.dumps(tmp_path / "saved")
    source.dumps(tmp_path / "saved")  # over itself
    storage = LazyTensorStorage(capacity, ndim=source.ndim)
    storage.checkpointer = FORMS[form]()
    storage.loads(tmp_path / "saved")
    require_loaded(storage, source, "terminated")
    assert storage.last_cursor == (shift or rows) - 1


def test_the_bytes_are_those_of_the_recipe(tmp_path: Path) -> None:
    data = steps(6, (1,))
    storage = filled(data, 6, shift=2)  # the ring begins at row 2
    storage.last_cursor = 1
    FlatStorageCheckpointer(compatible=True).dumps(storage, tmp_path / "flat")
    meta = json.loads((tmp_path / "flat" / "meta.json").read_text())
    assert (meta["shape"], meta["observation"]["shape"], meta["done"]["shape"]) == ([], [8, 2], [6, 1])
    assert json.loads((tmp_path / "flat" / "shift" / "meta.json").read_text())["data"] == 2
    assert json.loads((tmp_path / "flat" / "_storage_shape" / "meta.json").read_text())["data"] == [6]
    read = np.fromfile(tmp_path / "flat" / "observation.memmap", np.float64).reshape(-1, 2)[:, 0]
    assert read.tolist() == [0, 1, 102, 2, 3, 4, 5, 6]
    assert np.fromfile(tmp_path / "flat" / "action.memmap", np.int32).tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_never_written_take_no_room(tmp_path: Path) -> None:
    storage = filled(steps(), 1 << 20)
    for form, kind in FORMS.items():
        storage.checkpointer = kind(compatible=True)
        storage.dumps(tmp_path / form)
        files = [file.stat() for file in (tmp_path / form).rglob("*") if file.is_file()]
        assert sum(file.st_blocks * 512 for file in files) < 1 << 20


def with_entry(key: Any, value: torch.Tensor) -> TensorDict:
    return steps().set(key, value)


REFUSED: dict[str, tuple[TensorDict, str]] = {
    "next only": (with_entry(("next", "info"), torch.zeros(9)), "next.info is below 'next' only"),
    "root reward": (with_entry("reward", torch.zeros(9, 1)), "there is a reward at the root"),
    "root flag": (with_entry("done", torch.ones(9, 1, dtype=torch.bool)), "done is set at the root"),
    "root flag only": (with_entry("truncated", torch.zeros(9, 1, dtype=torch.bool)), "truncated is at the root only"),
    "agents": (with_entry(("next", "done"), torch.zeros(9, 3, 1, dtype=torch.bool)), r"\[3, 1\] numbers a step"),
    "discontinuous": (
        with_entry(("next", "observation"), torch.zeros(9, 2).double()), "next.observation of step 0 differs"
    ),
    "complex": (with_entry("z", torch.zeros(9, dtype=torch.complex64)), "z is of complex64"),
    "no elements": (with_entry("z", torch.zeros(9, 0)), "z has rows without elements"),
    "unlike": (with_entry("observation", torch.zeros(9, 2)), "differ in type or shape"),
    "three dimensions": (steps(4, (), (2, 2)), "the storage has ndim=3"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_the_layout_cannot_hold_is_refused(form: str, what: str, tmp_path: Path) -> None:
    data, sentence = REFUSED[what]
    storage = filled(steps(), 16)
    storage.checkpointer = FORMS[form](compatible=True)
    storage.dumps(tmp_path / "saved")
    before = bytes_of(tmp_path)
    other = filled(data, data.numel())
    other.checkpointer = FORMS[form](compatible=True)
    with pytest.raises(SchemaError, match=sentence) as caught:
        other.dumps(tmp_path / "saved")
    assert "TorchRL" in str(caught.value)
    assert bytes_of(tmp_path) == before


def test_names_and_types_that_files_cannot_hold_are_refused(tmp_path: Path) -> None:
    cases = [("h5", "a/b", torch.float32), ("h5", "b", torch.bfloat16), ("flat", "shape", torch.float32)]
    for form, key, dtype in [*cases, ("nested", "shift", torch.float32)]:
        storage = filled(with_entry(key, torch.zeros(9, 2, dtype=dtype)), 9)
        storage.checkpointer = FORMS[form](compatible=True)
        with pytest.raises(SchemaError, match="TorchRL's layout cannot hold"):
            storage.dumps(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("form", FORMS)
def test_other_names_are_honoured_both_ways(form: str, tmp_path: Path) -> None:
    data = steps().exclude(("next", "terminated"), "done")
    data["next"].rename_key_("done", "over").rename_key_("reward", "gain")
    storage = filled(data, 12)
    options: dict[str, Any] = {"done_keys": ["over"], "reward_keys": [("next", "gain")]}
    names = {"done_key": "over", "shift_key": "offset", "is_full_key": "whole"} if form != "flat" else {}
    if form == "flat":
        flat = FlatStorageCheckpointer(**options, compatible=True)
        with pytest.raises(SchemaError, match="no done"):
            flat.dumps(storage, tmp_path / "saved")
        return
    FORMS[form](**options, **names, compatible=True).dumps(storage, tmp_path / "saved")
    again = LazyTensorStorage(12)
    FORMS[form](**options, **names).loads(again, tmp_path / "saved")
    require_loaded(again, storage, "over")


def test_h5_takes_compression_and_a_file_name(tmp_path: Path) -> None:
    storage = filled(steps(), 9)
    one = H5StorageCheckpointer(compatible=True, checkpoint_file="other.h5", h5_kwargs={"compression": "gzip"})
    one.dumps(storage, tmp_path / "folder")
    with h5py.File(tmp_path / "folder" / "other.h5") as file:
        assert file["traj_0/action"].compression == "gzip"
        assert (int(file["_len"][()]), bool(file["is_full"][()]), sorted(file)[-3:]) == (
            9, True, ["traj_0", "traj_1", "traj_2"]
        )  # fmt: skip
    H5StorageCheckpointer(compatible=True).dumps(storage, tmp_path / "alone.h5")
    again = LazyTensorStorage(9)
    H5StorageCheckpointer().loads(again, tmp_path / "alone.h5")
    assert torch.equal(again[:]["next", "observation"], storage[:]["next", "observation"])


def copy_of(case: str, tmp_path: Path) -> Path:
    shutil.copytree(DATA / case / "checkpoint" / "storage", tmp_path / "copy")
    return tmp_path / "copy"


def _cut(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def _without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def _swap(one: str, other: str) -> Callable[[Path], None]:
    def swap(folder: Path) -> None:
        (folder / one).rename(folder / "aside")
        (folder / other).rename(folder / one)
        (folder / "aside").rename(folder / other)

    return swap


def _say(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / name / "meta.json").write_text(json.dumps({"data": value}))


def _flip_done(folder: Path) -> None:
    flip(folder / "done.memmap", 0)


def _edit_meta(folder: Path, **entries: Any) -> None:
    """Add entries to the metadata of a folder, or replace them."""
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | entries))


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a cut file": ("flat_full", _cut("observation.memmap"), "it was cut"),
    "a cut file of ragged rows": ("nested_full", _cut("action.memmap"), "it was cut"),
    "a missing file": ("flat_wrapped", _without("reward.memmap"), "is missing"),
    "a missing table": ("nested_wrapped", _without("observation.shape.memmap"), "table of the shapes"),
    "a cut table": ("nested_wrapped", _cut("observation.shape.memmap"), "it was cut"),
    "swapped fields": ("flat_full", _swap("observation.memmap", "action.memmap"), "it was cut"),
    "swapped tables": ("nested_full", _swap("observation.shape.memmap", "action.shape.memmap"), "it was cut"),
    "other ends": ("nested_full", _flip_done, "rows"),
    "other ends in flat": ("flat_full", _flip_done, "rows"),
    "mixed lanes": ("flat_ndim2_partly", _say("_storage_shape", [24, 2]), "a storage of"),
    "lanes in one row": ("flat_ndim2_partly", _say("_storage_shape", [24]), "next row 7, which does not fit"),
    "lanes in a column": ("flat_ndim2_partly", _say("_storage_shape", [24, 1]), "next row 7, which does not fit"),
    "lanes of ragged rows": ("nested_ndim2_partly", _say("_storage_shape", [24]), "next row 7, which does not fit"),
    "another number of lanes": ("flat_ndim2_full", _say("_storage_shape", [12, 1]), "counts 24"),
    "no shape": ("flat_full", _say("_storage_shape", "16"), "positive sizes"),
    "no truth value": ("flat_full", _say("is_full", "yes"), "truth value"),
    "a missing entry": ("flat_full", _without("shift/meta.json"), "entry 'shift'"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_nothing_changes(what: str, tmp_path: Path) -> None:
    case, damage, sentence = DAMAGE[what]
    folder, form = copy_of(case, tmp_path), case.partition("_")[0]
    lanes = 2 if "ndim2" in case else 1
    storage = LazyTensorStorage(64, ndim=lanes)
    load_compatible(storage, folder, form, {})  # type: ignore[arg-type]
    storage.set(0, storage[1])
    before = rows_of(storage)
    damage(folder)
    with pytest.raises(CorruptDataError, match=sentence):
        load_compatible(storage, folder, form, {})  # type: ignore[arg-type]
    require_unchanged(storage, before)


def change(case: str, tmp_path: Path, how: Callable[[h5py.File], None]) -> Path:
    file = copy_of(case, tmp_path) / "checkpoint.h5"
    with h5py.File(file, "r+") as opened:
        how(opened)
    return file


H5_DAMAGE: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "an episode less": (lambda file: file.pop("traj_1"), "rows"),
    "a leaf less": (lambda file: file.pop("traj_1/action"), "leaves"),
    "no length": (lambda file: file.pop("is_full"), "truth value"),
    "no episodes": (lambda file: [file.pop(name) for name in list(file) if name.startswith("traj")], "no group"),
    "another leaf": (lambda file: file.create_dataset("traj_1/odd", data=[1.0]), "not like the rows"),
    "ends": (lambda file: file["traj_0/done"].__setitem__(0, True), "rows"),
    "a link": (lambda file: file["traj_1"].__setitem__("link", h5py.SoftLink("/traj_0/action")), "link"),
}


@pytest.mark.parametrize("what", H5_DAMAGE)
def test_damaged_h5_files_are_refused(what: str, tmp_path: Path) -> None:
    how, sentence = H5_DAMAGE[what]
    file, storage = change("h5_full", tmp_path, how), LazyTensorStorage(16)
    with pytest.raises(CorruptDataError, match=sentence):
        H5StorageCheckpointer().loads(storage, file)
    assert len(storage) == 0


def test_an_entry_of_somebody_else_is_refused(tmp_path: Path) -> None:
    file = change("h5_full", tmp_path, lambda file: file.create_dataset("mine", data=[1]))
    with pytest.raises(FormatError, match="'mine'"):
        H5StorageCheckpointer().loads(LazyTensorStorage(16), file)
    folder = copy_of("flat_full", tmp_path / "flat")
    _edit_meta(folder, note={"type": "NonTensorData"})
    with pytest.raises(FormatError, match="'note' that is not a tensor"):
        FlatStorageCheckpointer().loads(LazyTensorStorage(16), folder)


def test_files_longer_than_their_shape_are_read(tmp_path: Path) -> None:
    folder, storage = copy_of("flat_full", tmp_path), LazyTensorStorage(16)
    for file in folder.glob("*.memmap"):
        file.write_bytes(file.read_bytes() + b"left over")
    load_compatible(storage, folder, "flat", {})
    assert np.array_equal(rows_of(storage)["observation"], np.load(DATA / "flat_full" / "expected.npz")["observation"])


def test_episodes_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    def rename(file: h5py.File) -> None:
        for name in [name for name in file if name.startswith("traj_0")]:
            file.move(name, f"traj_{int(name[5:])}")

    file, storage = change("h5_13_episodes", tmp_path, rename), LazyTensorStorage(26)
    with h5py.File(file) as opened:
        assert list(opened)[4:7] == ["traj_0", "traj_1", "traj_10"]
    load_compatible(storage, file, "h5", {})
    assert np.array_equal(rows_of(storage)["action"], np.load(DATA / "h5_13_episodes" / "expected.npz")["action"])


@pytest.mark.parametrize(("capacity", "ndim", "sentence"), [(15, 1, "16"), (16, 2, "ndim=1")])
def test_a_storage_that_does_not_fit_is_left_alone(capacity: int, ndim: int, sentence: str) -> None:
    storage = LazyTensorStorage(capacity, ndim=ndim)
    with pytest.raises(SchemaError, match=sentence):
        load_compatible(storage, place_of("flat_full"), "flat", {})
    assert not storage.initialized


def test_a_storage_of_other_keys_is_left_alone() -> None:
    storage = filled(steps(), 16)
    before = rows_of(storage)
    with pytest.raises(SchemaError):
        FlatStorageCheckpointer().loads(storage, place_of("flat_full"))
    require_unchanged(storage, before)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_without_a_checkpoint_is_refused(form: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert TorchrlForm().form_at(tmp_path) is None
    with pytest.raises((FormatError, FileNotFoundError)):
        FORMS[form]().loads(LazyTensorStorage(16), tmp_path)


@pytest.mark.parametrize("option", [{"done_key": 3}, {"shift_key": ("a",)}, {"shift_key": "is_full"}])
def test_names_that_are_none_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_compatible(LazyTensorStorage(16), place_of("flat_full"), "flat", option)


def test_a_flag_of_several_agents_has_no_ends(tmp_path: Path) -> None:
    folder = copy_of("flat_full", tmp_path)
    done = json.loads((folder / "meta.json").read_text())["done"]
    _edit_meta(folder, done=done | {"shape": [16, 1, 1]})
    with pytest.raises(FormatError, match="single agents"):
        load_compatible(LazyTensorStorage(16), folder, "flat", {})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_the_layout_of_another_form_is_named(tmp_path: Path, form: str, other: str) -> None:
    plan = BufferPlan(8, (8,))
    FORMS[other](compatible=True).dumps(plan.buffer()._storage, tmp_path / other)
    if form == other:
        FORMS[form]().loads(plan.storage(), tmp_path / other)
        return
    sentence = rf"written by an? {other.capitalize()}StorageCheckpointer, and"
    refused(form, tmp_path / other, FormatError, sentence)


def test_episodes_are_not_loaded_as_rows_of_tensors(tmp_path: Path) -> None:
    folder = copy_of("td_tensor_partly_7of16", tmp_path)
    _edit_meta(folder, **{key: {"type": "NonTensorData"} for key in ("is_full", "shift", "_storage_shape")})
    with pytest.raises(FormatError, match=r"episodes in the layout flat; a TensorStorageCheckpointer reads rows"):
        LazyTensorStorage(16).loads(folder)


def test_a_cut_h5_file_is_found(tmp_path: Path) -> None:
    H5StorageCheckpointer(compatible=True).dumps(BufferPlan(8, (8,)).buffer()._storage, tmp_path / "cut.h5")
    (tmp_path / "cut.h5").write_bytes((tmp_path / "cut.h5").read_bytes()[:-1])
    refused("h5", tmp_path / "cut.h5", CorruptDataError, "HDF5 cannot read the file")


def refused(form: str, path: Path, error: type[Exception], match: str) -> None:
    """Load into a full storage and an empty one; neither may change."""
    plan = BufferPlan(8, (8,))
    full, empty = plan.buffer()._storage, plan.storage()
    before = bits(full[:])
    for target in (full, empty):
        with pytest.raises(error, match=match) as raised:
            FORMS[form]().loads(target, path)
        assert str(raised.value).count("\n") == 0
    assert bits(full[:]) == before
    assert not empty.initialized


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_dataset_is_written_if_the_layout_can_hold_it(form: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "ted", [(4, "terminated"), (3, "truncated")])
    write_packed(tmp_path / "ted", tmp_path / "packed")
    packed = PackedStorage(tmp_path / "packed")
    FORMS[form](compatible=True).dumps(packed, tmp_path / "saved")
    FORMS[form]().loads(packed, tmp_path / "saved")
    target = LazyTensorStorage(7)
    FORMS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:].select(*packed[:].keys(True, True))) == bits(packed[:])
    write_plan(
        DatasetPlan((4, 1, 6), ("terminated", "both", "truncated"), (True, False, False), ODD_LEAVES, root_flags="set"),
        tmp_path / "odd",
    )
    write_packed(tmp_path / "odd", tmp_path / "odd packed")
    with pytest.raises(SchemaError, match="TorchRL's layout cannot hold"):
        FORMS[form](compatible=True).dumps(PackedStorage(tmp_path / "odd packed"), tmp_path / "other")


def test_numbers_of_another_byte_order_and_compressed_ones_are_read(tmp_path: Path) -> None:
    plan = BufferPlan(40, (40,), ends=0.5)
    H5StorageCheckpointer(compatible=True).dumps(plan.buffer()._storage, tmp_path / "saved.h5")
    with h5py.File(tmp_path / "saved.h5", "r+") as h5:
        for name in [name for name in h5 if name.startswith("traj")]:
            action, reward = h5[name]["action"][:], h5[name]["reward"][:]
            del h5[name]["action"], h5[name]["reward"]
            h5[name].create_dataset("action", data=action.astype(">f4"))
            h5[name].create_dataset("reward", data=reward, compression="gzip")
    target = plan.storage()
    H5StorageCheckpointer().loads(target, tmp_path / "saved.h5")
    source = plan.buffer()._storage[:]
    assert torch.equal(target[:]["action"], source["action"])
    assert torch.equal(target[:]["next", "reward"], source["next", "reward"])


def test_the_same_rows_are_the_same_bytes_of_h5(tmp_path: Path) -> None:
    storage = BufferPlan(40, (25,), ends=0.5).buffer()._storage
    H5StorageCheckpointer(compatible=True).dumps(storage, tmp_path / "one.h5")
    time.sleep(1.1)  # HDF5 would write the time, in seconds
    H5StorageCheckpointer(compatible=True).dumps(storage, tmp_path / "other.h5")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "other.h5").read_bytes()


@pytest.fixture
def without_the_leaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation from which `core/torchrl` and its declaration were removed."""
    monkeypatch.delitem(declarations.LEAVES, "foreign_form")
    foreign_form.cache_clear()
    yield
    foreign_form.cache_clear()


@each("case", CASES)
def test_layouts_are_not_recognised_without_the_leaf(case: str, without_the_leaf: None) -> None:
    assert foreign_form().find(place_of(case)) is None
    assert writer_of(place_of(case)) in {None, "TensorStorageCheckpointer"}
    with pytest.raises(FormatError):
        open_steps(place_of(case))


@pytest.mark.parametrize("form", FORMS)
def test_compatible_needs_the_leaf(form: str, tmp_path: Path, without_the_leaf: None) -> None:
    with pytest.raises(UsageError, match="not part of this installation"):
        FORMS[form](compatible=True).dumps(filled(steps(), 16), tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", FORMS)
def test_text_is_not_written_in_a_layout_of_torchrl(form: str, tmp_path: Path) -> None:
    done = torch.tensor([[False], [False], [True]])
    after = {"s": ["b", "c", "end"], "done": done, "terminated": done, "reward": torch.ones(3, 1)}
    steps = TensorDict({"s": ["a", "b", "c"], "action": torch.arange(3), "next": TensorDict(after, [3])}, [3])
    storage = LazyTensorStorage(7, checkpointer=FORMS[form](compatible=True))
    storage.set(range(3), steps)
    with pytest.raises(SchemaError, match=r"s is not a tensor"):
        storage.dumps(tmp_path / "one")
    assert not (tmp_path / "one").exists()
