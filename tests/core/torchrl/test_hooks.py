"""The hooks: flat, ragged and one entry an episode, and back, by hand and registered on storages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.errors import CorruptDataError, FormatError, MissingKeyError, SchemaError, UsageError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.torchrl.hooks import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

DATA = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
PAIRS = {"flat": ([TED2Flat], [Flat2TED]), "nested": ([TED2Nested], [Nested2TED])}
CHAINS = {**PAIRS, "h5": ([TED2Nested, H5Split], [H5Combine, Nested2TED])}


def steps(rows: int = 10, ends: tuple[int, ...] = (3, 7), first: int = 0) -> TensorDict:
    """Rows of a ring: behind the last one comes the first."""
    numbers = torch.arange(first, first + rows)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[list(ends)] = True
    observation = numbers.float()[:, None]
    after = {"observation": observation.roll(-1, 0) + 50 * done, "reward": observation * 2, "done": done}
    root = {"observation": observation, "action": numbers + 100, "done": torch.zeros_like(done)}
    return TensorDict({**root, "next": after}, [rows])


def lanes() -> TensorDict:
    return torch.stack([steps(6, (2,)), steps(6, (3, 5), 1000), steps(6, (), 2000)], 1).contiguous()


def told(hook: Any, is_full: bool, shift: int) -> Any:
    hook.is_full, hook.shift = is_full, shift
    return hook


def there_and_back(form: str, data: Any, is_full: bool, shift: int) -> Any:
    for kind in CHAINS[form][0]:
        data = told(kind(), is_full, shift)(data)
    for kind in CHAINS[form][1]:
        data = kind()(data)
    return data


def same(one: Any, other: Any) -> bool:
    keys = set(one.keys(True, True))
    return keys == set(other.keys(True, True)) and all(torch.equal(one[key], other[key]) for key in keys)


def test_a_flat_layout_has_each_observation_once() -> None:
    flat = told(TED2Flat(), True, 4)(steps())
    assert flat["observation"][:, 0].tolist() == [4, 5, 6, 7, 58, 8, 9, 0, 1, 2, 3, 54]
    assert flat["action"].tolist() == [104, 105, 106, 107, 108, 109, 100, 101, 102, 103]
    assert (flat["is_full"], flat["shift"], flat["_storage_shape"], flat.batch_size) == (True, 4, [10], torch.Size([]))


def test_the_row_in_front_of_the_next_counts_as_an_end() -> None:
    flat = told(TED2Flat(), False, 6)(steps())
    assert flat["observation"][:, 0].tolist() == [0, 1, 2, 3, 54, 4, 5, 6, 6, 7, 58, 8, 9]
    assert flat["done"][:, 0].nonzero()[:, 0].tolist() == [3, 7]


def test_ragged_episodes_end_with_flags_the_next_row_and_the_lane() -> None:
    ragged = told(TED2Nested(), False, 6)(steps())
    assert ragged.batch_size == torch.Size([4])
    assert [len(part) for part in ragged["action"].unbind(0)] == [4, 2, 2, 2]
    assert [len(part) for part in ragged["observation"].unbind(0)] == [5, 3, 3, 2]


def test_split_episodes_are_named_by_padded_numbers() -> None:
    split = told(H5Split(), True, 12)(told(TED2Nested(), True, 12)(steps(12, tuple(range(12)))))
    assert sorted(name for name in split.keys() if name.startswith("traj"))[:3] == ["traj_00", "traj_01", "traj_02"]  # noqa: SIM118
    assert split["traj_11", "observation"][:, 0].tolist() == [11, 50]
    assert (split["shift"], split["is_full"]) == (12, True)


@pytest.mark.parametrize("form", CHAINS)
@pytest.mark.parametrize("shift", [0, 1, 4, 9, 10])
def test_a_full_ring_comes_back(form: str, shift: int) -> None:
    assert same(there_and_back(form, steps(), True, shift), steps())


@pytest.mark.parametrize("form", CHAINS)
@pytest.mark.parametrize("shift", [1, 4, 6, 10])
def test_the_written_rows_of_a_ring_come_back(form: str, shift: int) -> None:
    assert same(there_and_back(form, steps(), False, shift)[:shift], steps()[:shift])


@pytest.mark.parametrize("form", CHAINS)
@pytest.mark.parametrize(("is_full", "shift"), [(True, 6), (True, 4), (False, 3)])
def test_lanes_come_back(form: str, is_full: bool, shift: int) -> None:
    rows = 6 if is_full else shift
    assert same(there_and_back(form, lanes(), is_full, shift)[:rows], lanes()[:rows])


@pytest.mark.parametrize("form", CHAINS)
def test_what_torchrls_layout_loses_comes_back(form: str) -> None:
    data = steps()
    data["next", "only"], data["reward"] = torch.randn(10, 2), torch.randn(10, 1)
    data["done"][3] = True
    data["next", "observation"][5] = float("nan")
    back = there_and_back(form, data, True, 4)
    assert back["next", "observation"][5].isnan().all()
    assert same(back.apply(torch.nan_to_num), data.apply(torch.nan_to_num))


@pytest.mark.parametrize("form", CHAINS)
def test_flags_of_agents_come_back(form: str) -> None:
    data = steps()
    data["next", "done"] = torch.rand(10, 3, 1, generator=torch.Generator().manual_seed(0)) < 0.2
    data["done"] = torch.zeros(10, 3, 1, dtype=torch.bool)
    assert same(there_and_back(form, data, True, 7), data)


@pytest.mark.parametrize("kind", [TED2Flat, TED2Nested, Flat2TED, Nested2TED])
def test_the_names_of_entries_can_be_read_and_set(kind: Any) -> None:
    hook = kind()
    assert (hook.done_keys, hook.reward_keys) == ({"done", "truncated", "terminated"}, {"reward"})
    assert (hook.shift_key, hook.is_full_key) == ("shift", "is_full")
    assert hook.done_key == (("next", "done") if isinstance(hook, TED2Flat) else "done")


def test_names_that_are_set_later_are_used() -> None:
    data = steps().rename_key_(("next", "reward"), ("next", "gain")).rename_key_(("next", "done"), ("next", "over"))
    there, back = told(TED2Flat(), True, 4), Flat2TED()
    for hook in (there, back):
        hook.done_key, hook.done_keys, hook.reward_keys = "over", {"over"}, {"gain"}
        hook.shift_key, hook.is_full_key = "place", "full"
    flat = there(data)
    assert {"over", "gain", "place", "full"} <= set(flat.keys())
    assert same(back(flat).exclude("over"), data)  # the flag at the root is made up


@pytest.mark.parametrize("pair", PAIRS)
def test_another_done_key_is_honoured_both_ways(pair: str) -> None:
    (save,), (load,) = PAIRS[pair]
    data = steps().exclude("done")
    data["next"].rename_key_("done", "over")
    names = {"shift_key": "offset", "is_full_key": "whole", "done_keys": ("over",)}
    laid_out = told(save(done_key=("next", "over"), **names), True, 4)(data)
    assert (laid_out["offset"], laid_out["whole"]) == (4, True)
    back = load(done_key="over", **names)(laid_out)
    assert same(back.exclude("over"), data)
    with pytest.raises(MissingKeyError, match="'is_full'"):
        load()(laid_out)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_path_gets_memory_mapped_files(pair: str, tmp_path: Path) -> None:
    (save,), (load,) = PAIRS[pair]
    laid_out = told(save(), True, 4)(steps(), path=tmp_path / "mapped")
    assert (tmp_path / "mapped" / "observation.memmap").stat().st_size == 12 * 4
    assert same(load()(laid_out), steps())
    assert same(load()(TensorDict.load_memmap(tmp_path / "mapped")), steps())
    with pytest.raises(UsageError, match="not an empty folder"):
        told(save(), True, 4)(steps(), path=tmp_path / "mapped")


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_are_copied_into_what_is_given(pair: str) -> None:
    (save,), (load,) = PAIRS[pair]
    laid_out, out = told(save(), True, 4)(steps()), torch.zeros_like(steps())
    assert load()(laid_out, out=out) is out
    assert same(out, steps())
    without = torch.zeros_like(steps()).exclude("done")
    assert same(load()(laid_out, out=without), steps().exclude("done"))
    for wrong in (steps(8), steps().exclude("action"), steps().set("more", torch.zeros(10)), steps().double()):
        before = wrong.clone()
        with pytest.raises(SchemaError):
            load()(laid_out, out=wrong)
        assert same(wrong, before)


@pytest.mark.parametrize("form", CHAINS)
@pytest.mark.parametrize(
    ("data", "capacity", "kind"),
    [
        (steps(), 10, LazyTensorStorage),
        (steps(), 16, LazyMemmapStorage),
        (lanes(), 18, LazyMemmapStorage),
        (lanes(), 30, LazyTensorStorage),
    ],
)
def test_registered_hooks_save_and_load_a_storage(
    form: str, kind: Any, data: TensorDict, capacity: int, tmp_path: Path
) -> None:
    storage, other = (kind(capacity, ndim=data.ndim) for _ in range(2))
    storage.set(range(len(data)), data)
    for hook in CHAINS[form][0]:
        storage.register_save_hook(hook())
    for hook in CHAINS[form][1]:
        other.register_load_hook(hook())
    for _ in range(2):  # over itself, and into what holds data
        storage.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
        assert len(other) == len(storage)
        assert same(other[:], storage[:])


@pytest.mark.parametrize(("case", "lanes"), [("wrapped", 1), ("ndim2_partly", 2), ("partly_7of16", 1)])
@pytest.mark.parametrize("form", PAIRS)
def test_hooks_undo_what_torchrl_laid_out(form: str, case: str, lanes: int) -> None:
    saved = DATA / f"{form}_{case}" / "checkpoint"
    expected = LazyTensorStorage(24, ndim=lanes)
    (FlatStorageCheckpointer if form == "flat" else NestedStorageCheckpointer)().loads(expected, saved / "storage")
    buffer = ReplayBuffer(storage=LazyTensorStorage(24 if lanes == 2 else 16, ndim=lanes))
    buffer.register_load_hook(PAIRS[form][1][0]())
    buffer.loads(saved)
    assert len(buffer) == len(expected)
    assert same(buffer._storage[:], expected[:])


def test_whole_episodes_are_no_rows_without_a_hook() -> None:
    with pytest.raises(FormatError, match="whole episodes in the layout flat"):
        LazyTensorStorage(16).loads(DATA / "flat_wrapped" / "checkpoint" / "storage")


def test_the_documented_example_of_a_buffer(tmp_path: Path) -> None:
    buffer, other = ReplayBuffer(storage=LazyMemmapStorage(200)), ReplayBuffer(storage=LazyMemmapStorage(200))
    buffer.register_save_hook(TED2Flat())
    buffer.extend(steps())
    buffer.dumps(tmp_path / "doc")
    other.register_load_hook(Flat2TED())
    other.loads(tmp_path / "doc")
    assert same(other[:], buffer[:])


def test_a_load_that_fails_behind_a_hook_changes_nothing(tmp_path: Path) -> None:
    storage, other = LazyTensorStorage(10), LazyTensorStorage(8)
    storage.set(range(10), steps())
    other.set(range(8), steps(8))
    storage.register_save_hook(TED2Flat())
    other.register_load_hook(Flat2TED())
    storage.dumps(tmp_path / "saved")
    with pytest.raises(SchemaError):
        other.loads(tmp_path / "saved")
    assert same(other[:], steps(8))


def test_load_hooks_see_what_torchrl_saved(tmp_path: Path) -> None:
    storage, other = LazyTensorStorage(10), LazyTensorStorage(10)
    storage.set(range(10), steps())
    FlatStorageCheckpointer(compatible=True).dumps(storage, tmp_path / "saved")
    checkpointer = FlatStorageCheckpointer()
    checkpointer.register_load_hook(lambda data, out: data.set("action", -data["action"]))
    checkpointer.loads(other, tmp_path / "saved")
    assert torch.equal(other[:]["action"], -steps()["action"])


@pytest.mark.parametrize("kind", [TED2Flat, TED2Nested])
def test_a_hook_must_be_told(kind: Any) -> None:
    hook = kind()
    assert (hook.is_full, hook.shift) == (None, None)
    with pytest.raises(TypeError, match="must be set"):
        hook(steps())
    for name, value in (("is_full", 1), ("shift", "4"), ("shift", True)):
        with pytest.raises(TypeError, match=f"{name} is"):
            setattr(hook, name, value)
    with pytest.raises(SchemaError, match="shift is 11"):
        told(kind(), True, 11)(steps())


@pytest.mark.parametrize("data", [torch.zeros(3), TensorDict({}, []), steps().exclude(("next", "done")), steps()[:0]])
def test_what_are_no_rows_is_refused(data: Any) -> None:
    with pytest.raises(SchemaError):
        told(TED2Flat(), True, 1)(data)


@pytest.mark.parametrize("name", ["at_root", "shift", "_storage_shape"])
def test_names_of_the_layout_are_taken(name: str) -> None:
    with pytest.raises(SchemaError, match=f"'{name}'"):
        told(TED2Flat(), True, 4)(steps().set(name, torch.zeros(10)))


def test_lengths_that_do_not_fit_are_found() -> None:
    flat = told(TED2Flat(), True, 4)(steps())
    for key, rows in (("observation", 11), ("action", 9), ("done", 9)):
        with pytest.raises(CorruptDataError, match=f"'{key}' has {rows}"):
            Flat2TED()(flat.clone().set(key, flat[key][:rows].clone()))
    with pytest.raises(MissingKeyError, match="no 'done'"):
        Flat2TED()(flat.exclude("done"))
    with pytest.raises(SchemaError, match="found a Tensor"):
        Flat2TED()(torch.zeros(3))
    with pytest.raises(SchemaError, match="Nested2TED"):
        Flat2TED()(told(TED2Nested(), True, 4)(steps()))


def test_episodes_that_differ_are_not_combined() -> None:
    split = told(H5Split(), True, 4)(told(TED2Nested(), True, 4)(steps()))
    for broken in (split.exclude(("traj_1", "action")), split.clone().set(("traj_1", "action"), torch.zeros(2))):
        with pytest.raises(CorruptDataError, match="traj_1"):
            H5Combine()(broken)
    with pytest.raises(CorruptDataError, match="other entries"):
        H5Combine()(split.clone().set(("traj_1", "more"), torch.zeros(2)))
    with pytest.raises(SchemaError, match="no entry traj_0"):
        H5Combine()(TensorDict({"a": torch.zeros(2)}, []))
    with pytest.raises(SchemaError, match="episodes"):
        H5Split()(TensorDict({}, [2, 3]))


def test_unpadded_numbers_are_put_in_order() -> None:
    split = told(H5Split(), True, 12)(told(TED2Nested(), True, 12)(steps(12, tuple(range(12)))))
    for number in range(10):
        split.rename_key_(f"traj_{number:02d}", f"traj_{number}")
    assert same(Nested2TED()(H5Combine()(split)), steps(12, tuple(range(12))))
