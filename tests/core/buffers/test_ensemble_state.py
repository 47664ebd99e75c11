"""What an ensemble saves comes back: as a dictionary, as a folder, with batches made ahead, nested."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Normalize,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rbtool.core.testing.datasets import write_walks


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ring(start: int, count: int = 10) -> TensorDictReplayBuffer:
    """A ring with the elements `start` to `start + count`."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    if count:
        buffer.extend(numbers(count, start))
    return buffer


def rings(*counts: int) -> list[TensorDictReplayBuffer]:
    """Rings whose elements are those of member i from 1000 * i on."""
    return [ring(1000 * number, count) for number, count in enumerate(counts)]


def numbers(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(start, start + count)}, [count])


def make(filled: bool, **arguments: Any) -> ReplayBufferEnsemble:
    """An ensemble of a ring that has wrapped, one without replacement, a prioritised one, and an ensemble."""
    members: list[ReplayBuffer] = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=Normalize("a", scale=2.0)),
        TensorDictReplayBuffer(storage=LazyMemmapStorage(20), sampler=SamplerWithoutReplacement(), generator=seeded(9)),
        TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(15)),
    ]
    inner = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    if filled:
        for start, (count, buffer) in enumerate(zip((13, 7, 9, 4, 6), [*members, *inner], strict=True)):
            buffer.extend(numbers(count, 1000 * start))
    nested = ReplayBufferEnsemble(*inner, p=[1, 2], batch="exact")
    cast = TensorDictReplayBuffer(storage=LazyTensorStorage(3))
    if filled:
        cast.extend(numbers(3, 5000))
    for one in (members[1], members[2], nested, cast):
        one.append_transform(lambda batch: batch.set("a", batch["a"].float()))
    given = {"p": [1, 2, 3, 4, 1], "batch": "exact", "batch_size": 11, "generator": seeded()}
    given |= {"schema": "intersect"} | arguments  # one has weights of priorities
    return ReplayBufferEnsemble(*members, nested, cast, **given)


def drawn(buffer: ReplayBufferEnsemble) -> list[float]:
    return torch.cat([buffer.sample()["a"] for _ in range(12)]).tolist()


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_dictionary_of_state_continues_with_the_same_batches(prefetch: int | None) -> None:
    buffer = make(True, prefetch=prefetch)
    buffer.sample()
    buffer.p, buffer.temperature = [5, 4, 3, 2, 1], 2.0
    state = copy.deepcopy(buffer.state_dict())
    expected = drawn(buffer)
    other = make(False, generator=seeded(5), prefetch=prefetch)
    other.load_state_dict(state)
    assert drawn(other) == expected
    assert torch.equal(other.p, buffer.p)
    assert other.temperature == 2.0
    other[0].extend(numbers(2))
    buffer[0].extend(numbers(2))
    assert torch.equal(other[0].storage[:]["a"], buffer[0].storage[:]["a"])


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_folder_continues_with_the_same_batches(prefetch: int | None, tmp_path: Path) -> None:
    buffer = make(True, prefetch=prefetch)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    assert {"0", "1", "2", "3", "4"} <= {one.name for one in (tmp_path / "saved" / "storage").iterdir()}
    assert (tmp_path / "saved" / "storage" / "0_transform.pt").is_file()
    expected = drawn(buffer)
    other = make(False, generator=seeded(5), prefetch=prefetch)
    other.loads(tmp_path / "saved")
    assert drawn(other) == expected
    other.dumps(tmp_path / "saved")
    again = make(False, prefetch=prefetch)
    again.loads(tmp_path / "saved")
    assert drawn(again) == drawn(other)


def test_a_full_ring_of_a_member_is_loaded_into_a_larger_one(tmp_path: Path) -> None:
    small = ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(10)), batch_size=4)
    small[0].extend(numbers(13))
    large = ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(20)), batch_size=4)
    small.dumps(tmp_path / "saved")
    large.loads(tmp_path / "saved")
    large[0].extend(numbers(1, 50))
    assert large[0][:]["a"].tolist() == [*range(3, 13), 50]


def test_a_storage_ensemble_is_saved_and_loaded_by_itself(tmp_path: Path) -> None:
    storage = StorageEnsemble(*(one.storage for one in rings(5, 0, 7)))
    storage.dumps(tmp_path / "saved")
    other = StorageEnsemble(*(one.storage for one in rings(0, 3, 0)))
    other.loads(tmp_path / "saved")
    assert other.sizes == [5, 0, 7]
    assert torch.equal(other[2][:]["a"], storage[2][:]["a"])
    state = storage.state_dict()
    third = StorageEnsemble(*(one.storage for one in rings(0, 3, 0)))
    third.load_state_dict(state)
    assert third.sizes == [5, 0, 7]
    storage.dumps(tmp_path / "saved")


def test_the_samplers_and_writers_of_an_ensemble_are_saved_by_themselves(tmp_path: Path) -> None:
    buffer = make(True)
    buffer.sample()
    buffer.sampler.dumps(tmp_path / "sampler")
    buffer.writer.dumps(tmp_path / "writer")
    other = make(True)
    other.p = [1, 1, 1, 1, 1]
    other.sampler.loads(tmp_path / "sampler")
    other.writer.loads(tmp_path / "writer")
    assert torch.equal(other.p, buffer.p)
    assert [one.write_count for one in other.writer.members[:3]] == [13, 7, 9]


def test_an_empty_ensemble_is_saved_and_loaded(tmp_path: Path) -> None:
    make(False).dumps(tmp_path / "saved")
    other = make(True)
    other.loads(tmp_path / "saved")
    assert other.storage.sizes == [0] * 5


def test_a_checkpoint_of_another_set_of_members_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    two = ReplayBufferEnsemble(*rings(5, 6), p=[1, 3], batch_size=4)
    two.dumps(tmp_path / "two")
    ring(0).dumps(tmp_path / "one")
    three = ReplayBufferEnsemble(*rings(7, 8, 9), batch_size=4)
    for load in (lambda: three.loads(tmp_path / "two"), lambda: three.load_state_dict(two.state_dict())):
        with pytest.raises(RuntimeError, match="2 members, this ensemble has 3"):
            load()
    with pytest.raises(ValueError, match="single buffer"):
        three.loads(tmp_path / "one")
    with pytest.raises(rbtool.RbtoolError):
        ring(0).loads(tmp_path / "two")
    with pytest.raises(RuntimeError):
        three.load_state_dict(ring(0).state_dict())
    assert three.storage.sizes == [7, 8, 9]
    assert three.p is None


def test_a_member_that_refuses_its_rows_is_named_and_all_stay_as_they_were(tmp_path: Path) -> None:
    two = ReplayBufferEnsemble(*rings(5, 6), batch_size=4, p=[1, 3])
    two.dumps(tmp_path / "two")
    state = copy.deepcopy(two.state_dict())
    lists = ReplayBufferEnsemble(ring(70, 3), ReplayBuffer(storage=ListStorage(4)), batch_size=4)
    lists[1].extend(["a", "b"])
    for load in (lambda: lists.loads(tmp_path / "two"), lambda: lists.load_state_dict(state)):
        with pytest.raises(rbtool.RbtoolError) as raised:
            load()
        assert "member 1 of the ensemble; nothing was loaded" in raised.value.hint
        assert lists.p is None
        assert lists[0][:]["a"].tolist() == [70, 71, 72]
        assert lists[1][:] == ["a", "b"]


def test_a_changed_byte_of_a_member_is_found_and_all_stay_as_they_were(tmp_path: Path) -> None:
    saved, other = make(True), make(True, generator=seeded(7))
    saved.dumps(tmp_path / "saved")
    spoil(tmp_path / "saved" / "storage" / "4" / "segment-00000.memmap")
    other.sample()
    other[0].extend(numbers(4, 90))
    unharmed = copy.deepcopy(other)
    with pytest.raises(rbtool.FormatError, match=r"changed|differ|digest") as raised:
        other.loads(tmp_path / "saved")
    assert "member 4 of the ensemble; nothing was loaded" in raised.value.hint
    require_alike(other, unharmed)


def spoil(file: Path) -> None:
    """Change a byte."""
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def require_alike(buffer: ReplayBufferEnsemble, other: ReplayBufferEnsemble) -> None:
    """Both have the same rows, and sample and write the same from now on."""
    assert drawn(buffer) == drawn(other)
    for each in (buffer, other):
        each[0].extend(numbers(2, 800))
    for one, same in zip(buffer.storage.leaves, other.storage.leaves, strict=True):
        assert torch.equal(one[:]["a"], same[:]["a"])
    assert buffer.write_count == other.write_count


@pytest.mark.parametrize("entry", ["_rng", "_prefetch_state", "_members"])
def test_a_dictionary_that_is_refused_at_its_end_leaves_all_as_they_were(entry: str) -> None:
    buffer, state = make(True, generator=seeded(7)), copy.deepcopy(make(True, p=[5, 4, 3, 2, 1]).state_dict())
    wrong: dict[str, Any] = {"_rng": ("x", "cpu"), "_prefetch_state": {"capacity": 0, "queue": ({"index": 1},)}}
    state[entry] = wrong.get(entry, [*state["_members"][:-1], {}])
    unharmed = copy.deepcopy(buffer)
    with pytest.raises(rbtool.RbtoolError):
        buffer.load_state_dict(state)
    assert torch.equal(buffer.p, unharmed.p)
    require_alike(buffer, unharmed)


def test_a_storage_ensemble_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    storage = StorageEnsemble(*(one.storage for one in rings(5, 6, 7)))
    storage.dumps(tmp_path / "saved")
    state = storage.state_dict() | {"2": ListStorage(3).state_dict()}
    other = StorageEnsemble(*(one.storage for one in rings(3, 0, 2)))
    before = copy.deepcopy([leaf[:]["a"] if len(leaf) else None for leaf in other.leaves])
    spoil(tmp_path / "saved" / "2" / "segment-00000.memmap")
    for load in (lambda: other.loads(tmp_path / "saved"), lambda: other.load_state_dict(state)):
        with pytest.raises((rbtool.RbtoolError, KeyError)):
            load()
        assert other.sizes == [3, 0, 2]
        assert torch.equal(other[0][:]["a"], before[0])
        assert torch.equal(other[2][:]["a"], before[2])


def test_a_dataset_in_an_ensemble_is_saved_and_never_emptied(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(4, "open"), (6, "terminated")])
    dataset = rbtool.load_dataset(tmp_path / "walks", seed=0)
    live = TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    live.extend(dataset[:3])
    buffer = ReplayBufferEnsemble(dataset, live, batch="exact", batch_size=6)
    buffer.dumps(tmp_path / "saved")
    other = ReplayBufferEnsemble(
        rbtool.load_dataset(tmp_path / "walks", seed=1),
        TensorDictReplayBuffer(storage=LazyTensorStorage(30)),
        batch="exact",
    )
    other.loads(tmp_path / "saved")
    assert other.storage.sizes == [10, 3]
    assert torch.equal(other.sample(6)["index", "index"][:3], buffer.sample(6)["index", "index"][:3])
    with pytest.raises(RuntimeError, match="member 0"):
        buffer.empty()
    assert buffer.storage.sizes == [10, 3]
    with pytest.raises(ValueError, match="inside the dataset"):
        buffer.dumps(tmp_path / "walks" / "inside")


def test_emptying_and_exchanging_parts_of_members() -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 6), batch="exact")
    buffer[1].set_storage(ring(1000, 9).storage)
    assert buffer.storage.sizes == [5, 9]
    assert buffer.sample(300)["index", "index"].max() == 8
    with pytest.raises(TypeError):
        buffer.set_sampler(SamplerWithoutReplacement())
    with pytest.raises(NotImplementedError):
        buffer.set_storage(buffer.storage)
    buffer.empty()
    assert buffer.storage.sizes == [0, 0]
    assert buffer.stats()["size"] == 0


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_fault_in_a_member_leaves_the_older_checkpoint(
    member: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 6, 7), batch_size=6, p=[1, 2, 3], generator=seeded())
    buffer.dumps(tmp_path / "saved")
    expected = buffer.sample()["a"]
    buffer[member].extend(numbers(3, 50))
    with monkeypatch.context() as patched:
        patched.setattr(type(buffer[member].storage), "dumps", _failing(buffer[member].storage))
        with pytest.raises(OSError, match="disk is full"):
            buffer.dumps(tmp_path / "saved")
    assert {one.name for one in tmp_path.iterdir()} == {"saved"}
    other = ReplayBufferEnsemble(*rings(0, 0, 0), batch_size=6, generator=seeded(5))
    other.loads(tmp_path / "saved")
    assert other.storage.sizes == [5, 6, 7]
    assert torch.equal(other.sample()["a"], expected)


def _failing(chosen: Any) -> Any:
    """Return a `dumps` that writes a part and fails for one storage."""
    whole = type(chosen).dumps

    def dumps(storage: Any, path: Any) -> None:
        whole(storage, path)
        if storage is chosen:
            raise OSError("the disk is full")

    return dumps


def test_states_of_samplers_are_loaded_all_or_none() -> None:
    buffer, other = (ReplayBufferEnsemble(*rings(9, 9), batch_size=4, sample_from_all=True) for _ in range(2))
    for each in (buffer, other):
        for member in (0, 1):
            each[member].set_sampler(SamplerWithoutReplacement())
        each.sample()
    state = other.sampler.state_dict() | {"1": {"unknown": 1}}
    before = [member.state_dict()["_sample_list"].tolist() for member in buffer.sampler.members]
    with pytest.raises(rbtool.SchemaError):
        buffer.sampler.load_state_dict(state)
    assert [member.state_dict()["_sample_list"].tolist() for member in buffer.sampler.members] == before


def test_hooks_are_refused_when_they_are_registered_and_members_take_them(tmp_path: Path) -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 6), batch_size=4)
    for register in (buffer.register_save_hook, buffer.register_load_hook, buffer.storage.register_save_hook):
        with pytest.raises(ValueError, match="hooks") as raised:
            register(lambda data, **_: data)
        assert "members" in raised.value.hint  # type: ignore[attr-defined]
    paths: list[Path] = []
    buffer[1].register_save_hook(lambda data, path: paths.append(path) or data)
    buffer.dumps(tmp_path / "saved")
    assert len(paths) == 1


def test_the_checkpoint_of_an_ensemble_is_not_that_of_a_single_buffer(tmp_path: Path) -> None:
    members = rings(4, 4)
    ReplayBufferEnsemble(*members).dumps(tmp_path / "saved")
    with pytest.raises(rbtool.FormatError, match="of an ensemble was found, expected one of a single buffer"):
        members[0].loads(tmp_path / "saved")
    assert len(members[0]) == 4
