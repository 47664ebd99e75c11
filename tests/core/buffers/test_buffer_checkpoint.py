"""Folders of saved buffers: whole, without pickles, exchanged with TorchRL."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import without_digests
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.datasets import write_walks
from rbtool.core.transforms.base import Transform


class Counts(Transform):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, data: TensorDict) -> TensorDict:
        self.seen += len(data)
        return data


def steps(count: int, start: int = 0) -> TensorDict:
    rows = torch.arange(start, start + count)
    return TensorDict({"a": rows, "next": {"b": rows.float().unsqueeze(-1)}}, [count])


def made(capacity: int = 10, **arguments: object) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), **arguments)


def filled(**arguments: object) -> TensorDictReplayBuffer:
    buffer = made(**arguments)
    buffer.extend(steps(7))
    return buffer


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_the_layout(tmp_path: Path) -> None:
    buffer = filled(batch_size=2, generator=torch.Generator(), transform=Counts(), sampler=SamplerWithoutReplacement())
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    expected = {".rbtool", "storage", "writer", "sampler", "rng_state", "transform.t", "buffer_metadata.json"}
    assert names(tmp_path / "saved") == expected
    assert json.loads((tmp_path / "saved/buffer_metadata.json").read_text())["batch_size"] == 2
    plain = filled()
    plain.save(tmp_path / "plain")
    assert names(tmp_path / "plain") == {".rbtool", "storage", "writer", "buffer_metadata.json"}
    assert names(tmp_path) == {"saved", "plain"}


def test_everything_goes_round(tmp_path: Path) -> None:
    arguments = {"batch_size": 2, "transform": Counts(), "prefetch": 2, "sampler": SamplerWithoutReplacement}
    buffer = filled(generator=torch.Generator().manual_seed(3), **arguments)
    for _ in range(3):
        buffer.sample()
    buffer.dump(tmp_path / "saved")
    assert "prefetch.json" in names(tmp_path / "saved")
    other = made(**{**arguments, "transform": Counts(), "batch_size": 5})
    other.load(tmp_path / "saved")
    assert other.batch_size == 2
    assert int(other.transform[0].seen) >= 6
    assert all(torch.equal(buffer.sample()["a"], other.sample()["a"]) for _ in range(1000))


def test_the_cursor_goes_into_every_capacity_that_holds_it(tmp_path: Path) -> None:
    filled().dumps(tmp_path / "saved")
    for capacity, cursor in ((7, 1), (8, 0), (10, 8), (100, 8)):
        other = made(capacity)
        other.loads(tmp_path / "saved")
        assert other["a"].tolist() == list(range(7))
        other.add(steps(1, 50)[0])
        assert other.writer._cursor == cursor
        assert 50 in other["a"]


def test_a_capacity_that_does_not_hold_it_is_refused(tmp_path: Path) -> None:
    filled(batch_size=2).dumps(tmp_path / "saved")
    other = made(6, batch_size=4)
    other.extend(steps(3, 20))
    with pytest.raises(RuntimeError, match="6"):
        other.loads(tmp_path / "saved")
    assert (other["a"].tolist(), other.batch_size, other.write_count, other.writer._cursor) == ([20, 21, 22], 4, 3, 3)


# The edge: an empty buffer cannot be dumped.
def test_a_buffer_that_nothing_was_written_to_goes_round(tmp_path: Path) -> None:
    made().dumps(tmp_path / "saved")
    other = filled()
    other.loads(tmp_path / "saved")
    assert (len(other), other.write_count) == (0, 0)
    other.extend(steps(2))
    assert other["a"].tolist() == [0, 1]


# The edge: a dump over an older one leaves stale files, and a mixed folder if it is cut.
def test_an_older_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    filled(batch_size=2, transform=Counts(), generator=torch.Generator()).dumps(tmp_path / "saved")
    (tmp_path / "saved/prefetch.pkl").write_bytes(b"not ours")
    filled().dumps(tmp_path / "saved")
    assert names(tmp_path / "saved") == {".rbtool", "storage", "writer", "buffer_metadata.json"}


@pytest.mark.parametrize("broken", ["storage", "writer"])
def test_a_dump_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    buffer = filled()
    buffer.dumps(tmp_path / "saved")
    buffer.extend(steps(2, 30))
    monkeypatch.setattr(type(getattr(buffer, broken)), "dumps", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        buffer.dumps(tmp_path / "saved")
    assert names(tmp_path) == {"saved"}
    other = made()
    other.loads(tmp_path / "saved")
    assert len(other) == 7


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    filled().dumps(tmp_path / "saved")
    (tmp_path / "saved/notes.txt").write_text("mine, too")
    for taken in (tmp_path, tmp_path / "saved", tmp_path / "notes.txt"):
        with pytest.raises(UsageError, match=r"notes\.txt"):
            filled().dumps(taken)
    assert (tmp_path / "saved/notes.txt").read_text() == "mine, too"


def test_the_folder_where_the_storage_lives_is_left_alone(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "saved/storage"))
    buffer.extend(torch.arange(3))
    with pytest.raises(UsageError, match="the storage keeps its rows in"):
        buffer.dumps(tmp_path / "saved")
    assert buffer[:].tolist() == [0, 1, 2]


# The edge: prefetch.pkl is always written, and unpickled on load.
class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.abort, ()


@pytest.mark.parametrize("name", ["prefetch.pkl", "transform.t"])
def test_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    filled().dumps(tmp_path / "saved")
    torch.save(Bomb(), tmp_path / "saved" / name)
    if name == "transform.t":
        without_digests(tmp_path / "saved")
    other = made()
    if name == "prefetch.pkl":
        other.loads(tmp_path / "saved")
        assert len(other) == 7
    else:
        with pytest.raises(FormatError, match="not a state of tensors"):
            other.loads(tmp_path / "saved")


def test_a_transform_that_only_a_pickle_would_keep_is_refused(tmp_path: Path) -> None:
    class Odd(Transform):
        def get_extra_state(self) -> object:
            return Bomb()

    with pytest.raises(UsageError, match="a state of tensors and numbers can be saved"):
        filled(transform=Odd()).dumps(tmp_path / "saved")
    assert names(tmp_path) == set()


def damaged(folder: Path, how: str) -> type[Exception]:
    """Damage a saved buffer, and say which error is expected."""
    if how == "absent":
        shutil.rmtree(folder)
        return DatasetNotFoundError
    if how == "no metadata":
        (folder / "buffer_metadata.json").unlink()
        return FormatError
    if how == "odd metadata":
        (folder / "buffer_metadata.json").write_text('{"batch_size": "many"}')
        return FormatError
    if how == "no writer":
        shutil.rmtree(folder / "writer")
        return CorruptDataError
    if how == "cut generator":
        os.truncate(folder / "rng_state/rng_state.memmap", 100)
        return CorruptDataError
    if how == "cut rows":
        (folder / "storage/segment-00000.memmap").chmod(0o644)
        os.truncate(folder / "storage/segment-00000.memmap", 20)
        return FormatError
    (folder / "prefetch.json").write_text(
        '{"version": 1, "capacity": 2, "queue": [{"index": {"dtype": "torch.load"}}]}'
    )
    return FormatError


@pytest.mark.parametrize(
    "document",
    ["[]", '{"capacity": 1.5, "queue": []}', '{"capacity": 2, "queue": 3}', '{"capacity": 2, "queue": [[]]}',
     '{"capacity": 2, "queue": [{"index": {"tuple": 3}, "info": [], "last": false}]}',
     '{"capacity": 2, "queue": [{"index": 4, "info": [], "last": false}]}',
     '{"capacity": 2, "queue": [{"index": {"value": 1}, "info": [[{}, {"value": 1}]], "last": false}]}'],
)  # fmt: skip
def test_an_odd_queue_is_refused_by_its_schema(document: str, tmp_path: Path) -> None:
    filled().dumps(tmp_path)
    shutil.rmtree(tmp_path / ".rbtool")
    metadata = tmp_path / "buffer_metadata.json"
    metadata.write_text(metadata.read_text().replace('"digests": true', '"digests": false'))
    (tmp_path / "prefetch.json").write_text(document)
    with pytest.raises(FormatError, match=r"prefetch\.json has"):
        made(batch_size=2, prefetch=2).loads(tmp_path)


@pytest.mark.parametrize(
    "how", ["absent", "no metadata", "odd metadata", "no writer", "cut generator", "cut rows", "odd queue"]
)
def test_a_damaged_folder_changes_nothing(tmp_path: Path, how: str) -> None:
    filled(batch_size=2, generator=torch.Generator().manual_seed(1)).dumps(tmp_path / "saved")
    error = damaged(tmp_path / "saved", how)
    other = made(batch_size=3, generator=torch.Generator().manual_seed(2))
    other.extend(steps(4, 30))
    before = other._rng.get_state()
    with pytest.raises(error):
        other.loads(tmp_path / "saved")
    assert (other["a"].tolist(), other.batch_size, other.write_count) == ([30, 31, 32, 33], 3, 4)
    assert torch.equal(other._rng.get_state(), before)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    state = filled(batch_size=2).state_dict()
    other = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    other.extend(torch.arange(4))
    with pytest.raises(SchemaError):
        other.load_state_dict(state)
    assert (other[:].tolist(), other.batch_size, other.write_count, other.writer._cursor) == ([0, 1, 2, 3], 3, 4, 4)


def test_a_state_without_its_last_four_keys() -> None:
    state = filled(batch_size=2).state_dict()
    for name in ("_batch_size", "_consume_after_n_samples", "_rng", "_prefetch_state"):
        del state[name]
    other = made(batch_size=4)
    other.load_state_dict(state)
    assert (other.batch_size, other["a"].tolist()) == (4, list(range(7)))


def test_states_survive_torch_save(tmp_path: Path) -> None:
    buffer = filled(batch_size=2, generator=torch.Generator().manual_seed(1), prefetch=2)
    buffer.sample()
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    other = made(batch_size=2, prefetch=2)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(buffer.sample()["a"], other.sample()["a"]) for _ in range(20))


def test_hooks_see_what_is_saved_and_loaded(tmp_path: Path) -> None:
    buffer, other, seen = filled(), made(), []
    buffer.register_save_hook(lambda data, path=None: (seen.append("save"), data)[1])
    other.register_load_hook(lambda data, out=None: (seen.append("load"), data)[1])
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert (seen, other["a"].tolist()) == (["save", "load"], list(range(7)))


def test_pickles_keep_the_generator_and_leave_locks_and_threads() -> None:
    buffer = filled(batch_size=2, generator=torch.Generator().manual_seed(1), prefetch=2, transform=Counts())
    buffer.sample()
    other = pickle.loads(pickle.dumps(buffer))
    assert all(torch.equal(buffer.sample()["a"], other.sample()["a"]) for _ in range(20))
    other.extend(steps(2, 40))
    assert (len(other), len(buffer)) == (9, 7)


def test_list_storages_are_saved(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend([torch.zeros(2), torch.ones(2)])
    buffer.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=ListStorage(5))
    other.loads(tmp_path / "saved")
    assert torch.equal(other[:], buffer[:])


@pytest.mark.parametrize("batch_size", [1, 5])
def test_batches_made_ahead_of_several_dimensions_are_saved(batch_size: int, tmp_path: Path) -> None:
    one, other = (
        ReplayBuffer(
            storage=LazyTensorStorage(12, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=batch_size,
            prefetch=3, generator=torch.Generator().manual_seed(0),
        )
        for _ in range(2)
    )  # fmt: skip
    one.extend(torch.arange(6).reshape(2, 3))
    for _ in range(4):
        one.sample()
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    assert [one.sample().tolist() for _ in range(5)] == [other.sample().tolist() for _ in range(5)]


def a_checkpoint(walks: Path, place: Path, form: Form) -> Path:
    with open_steps(walks) as reader:
        save_checkpoint(reader, place, form)
    return place


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda walks, out: a_checkpoint(walks, out / "x.h5", "h5"), "layout h5", "opens it"),
        (lambda walks, out: a_checkpoint(walks, out, "flat"), "layout flat", "opens it"),
        (lambda walks, out: walks, "is a dataset in the layout ted", "rbtool.load_dataset("),
        (lambda walks, out: a_storage(out), "is the checkpoint of a storage", "buffer.storage.loads("),
        (lambda walks, out: a_text(out), "is a file, and is not the folder of a saved buffer", ""),
    ],
)
def test_what_is_no_saved_buffer_is_named(make: Any, message: str, hint: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated"), (2, "truncated")])
    (tmp_path / "out").mkdir()
    path = make(tmp_path / "walks", tmp_path / "out")
    ring = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    with pytest.raises(FormatError, match=message) as caught:
        ring.loads(path)
    assert hint in (caught.value.hint or "")
    assert str(path) in str(caught.value)


def a_storage(out: Path) -> Path:
    storage = LazyTensorStorage(4)
    storage.set(range(2), TensorDict({"x": torch.arange(2)}, [2]))
    storage.dumps(out / "x")
    return out / "x"


def a_text(out: Path) -> Path:
    (out / "x").write_text("hello")
    return out / "x"
