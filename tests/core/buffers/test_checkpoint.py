"""Folders of saved buffers: whole, without pickles, and one of two states after a crash."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip, flips, without_digests
from strikes import course_of, forked, kill
from tensordict import TensorDict, TensorDictBase
from waiting import HANG

import rbtool
from rbtool.core.buffers.checkpoint import BufferFolder
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from rbtool.core.checkpointers.base import StorageCheckpointerBase
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.checkpointers.tensor import TensorStorageCheckpointer
from rbtool.core.declarations import LEAVES
from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.testing.buffers import moved
from rbtool.core.testing.datasets import write_walks
from rbtool.core.transforms.base import Transform
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter


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


def test_a_saved_buffer_has_a_file_or_folder_for_each_part(tmp_path: Path) -> None:
    buffer = filled(batch_size=2, generator=torch.Generator(), transform=Counts(), sampler=SamplerWithoutReplacement())
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    expected = {".rbtool", "storage", "writer", "sampler", "rng_state", "transform.t", "buffer_metadata.json"}
    assert names(tmp_path / "saved") == expected
    assert json.loads((tmp_path / "saved/buffer_metadata.json").read_text())["batch_size"] == 2
    filled().save(tmp_path / "plain")
    assert names(tmp_path / "plain") == {".rbtool", "storage", "writer", "buffer_metadata.json"}
    assert names(tmp_path) == {"saved", "plain"}


def test_a_restored_buffer_continues_with_the_same_batches(tmp_path: Path) -> None:
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


def test_the_cursor_continues_in_every_capacity_that_holds_the_rows(tmp_path: Path) -> None:
    filled(batch_size=2).dumps(tmp_path / "saved")
    for capacity, cursor in ((7, 1), (8, 0), (10, 8), (100, 8)):
        other = made(capacity)
        other.loads(tmp_path / "saved")
        assert other["a"].tolist() == list(range(7))
        other.add(steps(1, 50)[0])
        assert other.writer._cursor == cursor
        assert 50 in other["a"]
    other = made(6, batch_size=4)
    other.extend(steps(3, 20))
    with pytest.raises(RuntimeError, match="6"):
        other.loads(tmp_path / "saved")
    assert (other["a"].tolist(), other.batch_size, other.write_count, other.writer._cursor) == ([20, 21, 22], 4, 3, 3)


def test_an_empty_buffer_is_saved_and_loaded(tmp_path: Path) -> None:
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


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, other = tmp_path / "saved", made()
    filled().dumps(path)
    torch.save(Bomb(), path / "prefetch.pkl")
    other.loads(path)
    assert len(other) == 7
    torch.save(Bomb(), path / "transform.t")
    without_digests(path)
    with pytest.raises(FormatError, match="not a state of tensors"):
        other.loads(path)


def test_a_transform_whose_state_needs_a_pickle_is_refused(tmp_path: Path) -> None:
    odd = type("Odd", (Transform,), {"get_extra_state": lambda self: Bomb()})()
    with pytest.raises(UsageError, match="a state of tensors and numbers can be saved"):
        filled(transform=odd).dumps(tmp_path / "saved")
    assert names(tmp_path) == set()


def cut_rows(folder: Path) -> None:
    (folder / "storage/segment-00000.memmap").chmod(0o644)
    os.truncate(folder / "storage/segment-00000.memmap", 20)


@pytest.mark.parametrize(
    "document",
    ["[]", '{"capacity": 1.5, "queue": []}', '{"capacity": 2, "queue": 3}', '{"capacity": 2, "queue": [[]]}',
     '{"capacity": 2, "queue": [{"index": {"tuple": 3}, "info": [], "last": false}]}',
     '{"capacity": 2, "queue": [{"index": 4, "info": [], "last": false}]}',
     '{"capacity": 2, "queue": [{"index": {"value": 1}, "info": [[{}, {"value": 1}]], "last": false}]}'],
)  # fmt: skip
def test_an_invalid_queue_is_refused(document: str, tmp_path: Path) -> None:
    filled().dumps(tmp_path)
    without_digests(tmp_path)
    (tmp_path / "prefetch.json").write_text(document)
    with pytest.raises(FormatError, match=r"prefetch\.json has"):
        made(batch_size=2, prefetch=2).loads(tmp_path)


ODD_QUEUE = '{"version": 1, "capacity": 2, "queue": [{"index": {"dtype": "torch.load"}}]}'


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (shutil.rmtree, DatasetNotFoundError),
        (lambda folder: (folder / "buffer_metadata.json").unlink(), FormatError),
        (lambda folder: (folder / "buffer_metadata.json").write_text('{"batch_size": "many"}'), FormatError),
        (lambda folder: shutil.rmtree(folder / "writer"), CorruptDataError),
        (lambda folder: os.truncate(folder / "rng_state/rng_state.memmap", 100), CorruptDataError),
        (cut_rows, FormatError),
        (lambda folder: (folder / "prefetch.json").write_text(ODD_QUEUE), FormatError),
    ],
)
def test_a_damaged_folder_changes_nothing(tmp_path: Path, damage: Any, error: type[Exception]) -> None:
    filled(batch_size=2, generator=torch.Generator().manual_seed(1)).dumps(tmp_path / "saved")
    damage(tmp_path / "saved")
    other = made(batch_size=3, generator=torch.Generator().manual_seed(2))
    other.extend(steps(4, 30))
    before = other._rng.get_state()
    with pytest.raises(error):
        other.loads(tmp_path / "saved")
    assert (other["a"].tolist(), other.batch_size, other.write_count) == ([30, 31, 32, 33], 3, 4)
    assert torch.equal(other._rng.get_state(), before)


def test_a_state_may_lack_newer_keys() -> None:
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


@pytest.mark.parametrize("batch_size", [1, 5])
def test_batches_made_ahead_of_several_dimensions_are_saved(batch_size: int, tmp_path: Path) -> None:
    arguments: Any = {"sampler": SamplerWithoutReplacement, "batch_size": batch_size, "prefetch": 3}
    one, other = (ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), **arguments) for _ in range(2))
    for buffer in (one, other):
        buffer.set_rng(torch.Generator().manual_seed(0))
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
        (lambda walks, out: Path(__file__), "is a file, and is not the folder of a saved buffer", ""),
    ],
)
def test_other_paths_are_named(make: Any, message: str, hint: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated"), (2, "truncated")])
    (tmp_path / "out").mkdir()
    path = make(tmp_path / "walks", tmp_path / "out")
    with pytest.raises(FormatError, match=message) as caught:
        made(8, batch_size=2).loads(path)
    assert hint in (caught.value.hint or "")
    assert str(path) in str(caught.value)


def a_storage(out: Path) -> Path:
    storage = LazyTensorStorage(4)
    storage.set(range(2), TensorDict({"x": torch.arange(2)}, [2]))
    storage.dumps(out / "x")
    return out / "x"


# Digests of every part ----------------------------------------------------------------------------


CAPACITY = 10


def episode_steps(count: int, start: int = 0) -> TensorDict:
    """Steps of episodes of four, numbered by their actions."""
    number = torch.arange(start, start + count)
    done, obs = (number % 4 == 3).unsqueeze(1), number.unsqueeze(1).expand(-1, 3).double()
    after = {"obs": obs + 1, "done": done, "terminated": done, "truncated": done ^ done, "reward": number.unsqueeze(1)}
    root = {"obs": obs, "action": number, "done": done ^ done, "terminated": done ^ done}
    return TensorDict({**root, "next": TensorDict(after, [count])}, [count])


def _episodes(kind: type[StorageCheckpointerBase], compatible: bool) -> Callable[[], Storage]:
    return lambda: LazyTensorStorage(CAPACITY, checkpointer=kind(compatible=compatible))  # type: ignore[call-arg]


EPISODES = {"flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer}
FORMS: dict[str, Callable[[], Storage]] = {
    "tensor": lambda: LazyTensorStorage(CAPACITY),
    "list": lambda: ListStorage(CAPACITY),
    "compressed": lambda: CompressedListStorage(CAPACITY),
    **{name: _episodes(kind, False) for name, kind in EPISODES.items()},
}
if "foreign_form" in LEAVES:
    FORMS |= {f"{name} for torchrl": _episodes(kind, True) for name, kind in EPISODES.items()}
any_form = pytest.mark.parametrize("form", FORMS)


def digest_made(form: str, **changes: Any) -> TensorDictReplayBuffer:
    """A buffer in which every part has a state: priorities, generations, a generator, transforms, draws ahead."""
    sampler = PrioritizedSampler(CAPACITY, 0.7, 0.5) if form == "tensor" else SamplerWithoutReplacement()
    arguments: dict[str, Any] = {
        "storage": FORMS[form](), "sampler": sampler, "batch_size": 2, "prefetch": 2, "transform": Counts(),
        "generator": torch.Generator().manual_seed(3), "writer": TensorDictRoundRobinWriter(track_generations=True),
    }  # fmt: skip
    return TensorDictReplayBuffer(**arguments | changes)


def saved(form: str, path: Path, start: int = 0) -> Path:
    buffer = digest_made(form)
    buffer.extend(episode_steps(CAPACITY + start, start))
    for _ in range(1 + start):
        buffer.sample()
    buffer.transform[0].seen += start
    buffer.dumps(path)
    return path


def state_of(buffer: TensorDictReplayBuffer) -> list[Any]:
    """Everything a buffer holds, as something that can be compared."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), list(value.shape), value.tolist()
        if isinstance(value, TensorDictBase | dict):
            return [(str(key), plain(item)) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))]
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value)

    state = buffer.state_dict()
    return [plain(buffer[:]), *(plain(state[part]) for part in ("_sampler", "_writer", "_rng", "_prefetch_state"))]


def digest_damaged(path: Path, form: str, expected: list[Any]) -> None:
    """Load a damaged dump: it is refused with nothing changed, or the damage is of no effect."""
    buffer = digest_made(form)
    try:
        buffer.loads(path)
    except CorruptDataError:
        assert len(buffer) == 0
    else:
        assert state_of(buffer) == expected


def expected_of(form: str, path: Path) -> list[Any]:
    buffer = digest_made(form)
    buffer.loads(path)
    return state_of(buffer)


@pytest.mark.parametrize("places", [1, pytest.param(24, marks=pytest.mark.slow)])
@any_form
def test_a_flip_in_any_file_is_found_or_of_no_effect(tmp_path: Path, form: str, places: int) -> None:
    path = saved(form, tmp_path / "saved")
    expected = expected_of(form, path)
    for _ in flips(path, places=places):
        digest_damaged(path, form, expected)


def _bytes_of(path: Path) -> list[bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [file.read_bytes() for file in files]


@any_form
def test_a_part_of_another_dump_is_found(tmp_path: Path, form: str) -> None:
    path, other = saved(form, tmp_path / "one"), saved(form, tmp_path / "other", 5)
    found = 0
    for part in [*path.iterdir(), *(file for file in (path / "sampler").iterdir() if file.is_file())]:
        kept, theirs = tmp_path / "kept", other / part.relative_to(path)
        if _bytes_of(part) == _bytes_of(theirs):
            continue
        found += 1
        part.rename(kept)
        (shutil.copytree if theirs.is_dir() else shutil.copy)(theirs, part)
        with pytest.raises(CorruptDataError, match=r"belongs to another checkpoint|were saved"):
            digest_made(form).loads(path)
        shutil.rmtree(part) if part.is_dir() else part.unlink()
        kept.rename(part)
    assert found >= 6
    digest_made(form).loads(path)


def test_a_part_that_was_not_saved_is_found(tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    buffer.extend(episode_steps(4))
    buffer.dumps(tmp_path / "plain")
    full = saved("tensor", tmp_path / "full")
    for name in ("transform.t", "prefetch.json", "rng_state", "sampler"):
        part, folder = tmp_path / "plain" / name, (full / name).is_dir()
        (shutil.copytree if folder else shutil.copy)(full / name, part)
        with pytest.raises(CorruptDataError, match=name):
            buffer.loads(tmp_path / "plain")
        shutil.rmtree(part) if folder else part.unlink()
    buffer.loads(tmp_path / "plain")


@any_form
def test_a_dump_without_digests_loads(tmp_path: Path, form: str) -> None:
    path = saved(form, tmp_path / "saved")
    expected = expected_of(form, path)
    for digests in list(path.rglob("digests.json")):
        digests.unlink()
    with pytest.raises(CorruptDataError, match=r"digests\.json is missing"):
        digest_made(form).loads(path)
    metadata = json.loads((path / "buffer_metadata.json").read_text())
    assert metadata.pop("digests") is True
    (path / "buffer_metadata.json").write_text(json.dumps(metadata))
    assert expected_of(form, path) == expected


def test_a_dump_that_was_written_over_says_how_to_load_it(tmp_path: Path) -> None:
    path = saved("tensor", tmp_path / "saved")
    (path / "writer" / "metadata.json").write_text('{"cursor": 3}')
    with pytest.raises(CorruptDataError) as raised:
        digest_made("tensor").loads(path)
    assert "remove the folders .rbtool" in raised.value.hint


@any_form
def test_a_saved_buffer_is_replaced_whole(tmp_path: Path, form: str) -> None:
    path, other = saved(form, tmp_path / "saved"), saved(form, tmp_path / "other", 50)
    before = expected_of(form, path)
    saved(form, path, 50)
    assert expected_of(form, path) == expected_of(form, other) != before


def test_files_of_others_in_a_saved_buffer_are_left_alone(tmp_path: Path) -> None:
    path = saved("tensor", tmp_path / "saved")
    assert len(list(path.rglob("digests.json"))) == 2
    for name in ("notes.txt", "storage/mine.json", "sampler/mine.memmap", "writer/sub/mine.json", ".rbtool/mine.json"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")
        with pytest.raises(UsageError, match=name):
            saved("tensor", path)
        (path / name).unlink()
    saved("tensor", path)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in {"flat", "nested", "h5"}])
def test_the_checkpoint_of_a_storage_alone_has_digests_too(tmp_path: Path, form: str) -> None:
    storage = FORMS[form]()
    TensorDictReplayBuffer(storage=storage).extend(episode_steps(CAPACITY))
    storage.dumps(tmp_path / "saved")
    expected = [str(row) for row in (storage[row].to_dict() for row in range(CAPACITY))]
    for _ in flips(tmp_path / "saved", places=1):
        target = FORMS[form]()
        try:
            target.loads(tmp_path / "saved")
        except CorruptDataError:
            assert len(target) == 0
        else:
            assert [str(row) for row in (target[row].to_dict() for row in range(CAPACITY))] == expected


# What a dump waits for, by durable ----------------------------------------------------------------


KINDS: dict[str, Callable[[], Any]] = {
    "default": rbtool.TensorStorageCheckpointer,
    "flat": rbtool.FlatStorageCheckpointer,
    "nested": rbtool.NestedStorageCheckpointer,
    "h5": rbtool.H5StorageCheckpointer,
}
if "foreign_form" in LEAVES:
    KINDS["compatible"] = lambda: rbtool.FlatStorageCheckpointer(compatible=True)


def buffer_of(kind: str, size: int = 25) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, checkpointer=KINDS[kind]()), batch_size=4)
    if size:
        buffer.extend(episode_steps(size))
    return buffer


@pytest.mark.parametrize("kind", KINDS)
def test_each_level_waits_for_what_it_promises(kind: str, tmp_path: Path, synced: list[str]) -> None:
    waited = {}
    for durable in ("none", "data", "full"):
        synced.clear()
        buffer_of(kind).dumps(tmp_path / durable, durable=durable)  # type: ignore[arg-type]
        waited[durable] = {name: synced.count(name) for name in set(synced)}
    files = sum(path.is_file() for path in (tmp_path / "full").rglob("*"))
    folders = sum(path.is_dir() for path in (tmp_path / "full").rglob("*")) + 1
    assert waited["none"] == {}
    assert waited["data"]["file"] == waited["full"]["file"] == files
    assert "folder" not in waited["data"]
    assert waited["full"]["folder"] == folders + 1  # the one around it holds the name


@pytest.mark.parametrize("durable", ["none", "data", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_has_its_digests_with_each_level(kind: str, durable: Any, tmp_path: Path) -> None:
    saved, other = buffer_of(kind), buffer_of(kind, 0)
    saved.dumps(tmp_path / "saved", durable=durable)
    other.loads(tmp_path / "saved")
    assert torch.equal(other[:]["next", "obs"], saved[:]["next", "obs"])
    largest = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size - 1)
    with pytest.raises(CorruptDataError):
        buffer_of(kind, 0).loads(tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_ensembles_save_themselves_with_each_level(kind: str, tmp_path: Path, synced: list[str]) -> None:
    storage = buffer_of(kind).storage
    storage.dumps(tmp_path / "saved", durable="none")
    rbtool.ReplayBufferEnsemble(buffer_of(kind), batch_size=4).dumps(tmp_path / "ensemble", durable="none")
    assert synced == []
    storage.dumps(tmp_path / "saved", durable="full")
    assert {"file", "folder"} <= set(synced)


def test_a_checkpointer_for_torchrl_needs_no_levels(tmp_path: Path, synced: list[str]) -> None:
    class Plain(rbtool.StorageCheckpointerBase):
        def dumps(self, storage: Any, path: Any) -> None:
            Path(path).mkdir()
            torch.save(len(storage), Path(path) / "rows.pt")

        def loads(self, storage: Any, path: Any) -> None:
            raise NotImplementedError

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, checkpointer=Plain()), batch_size=4)
    buffer.extend(episode_steps(5))
    buffer.dumps(tmp_path / "none", durable="none")
    assert synced == []
    buffer.dumps(tmp_path / "full")
    assert {"file", "folder"} <= set(synced)


@pytest.mark.parametrize("durable", ["fully", "", None, True])
def test_another_level_is_refused(durable: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'none', 'data' or 'full'"):
        buffer_of("default").dumps(tmp_path / "saved", durable=durable)
    assert list(tmp_path.iterdir()) == []


# Full rings that are loaded into larger storages --------------------------------------------------


CHECKPOINTERS = [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]
ways = pytest.mark.parametrize("way", ["state", "folder"])


def full_made(capacity: int, storage: Any = LazyTensorStorage, **more: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(capacity), **more)


def wrapped(*sizes: int, over: int = 4, **more: Any) -> list[TensorDictReplayBuffer]:
    """Buffers of these sizes; the first is written full, and on over its oldest steps."""
    found = [full_made(size, **more) for size in sizes]
    found[0].extend(episode_steps(sizes[0], 0))
    found[0].extend(episode_steps(over, sizes[0]))
    return found


def require_in_time(buffer: Any, written: int) -> None:
    """The buffer holds the last ten of so many steps, and goes on behind them."""
    action = torch.arange(written - 10, written)
    assert torch.equal(buffer[:]["action"], action)
    index = buffer.extend(episode_steps(5, written))
    assert index.tolist() == [10, 11, 12, 13, 14]
    assert torch.equal(buffer[:]["action"], torch.arange(written - 10, written + 5))
    assert torch.equal(buffer[:]["index"], torch.arange(15))
    assert (len(buffer), buffer.write_count, buffer.writer._cursor) == (15, written + 5, 15)


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@pytest.mark.parametrize(
    ("written", "storage"),
    [(10, LazyTensorStorage), (14, LazyMemmapStorage), (20, LazyTensorStorage), (36, LazyMemmapStorage)],
)
def test_a_full_ring_continues_in_a_larger_storage(
    checkpointer: Any, written: int, storage: Any, tmp_path: Path
) -> None:
    one, other = (full_made(size, storage=storage, checkpointer=checkpointer()) for size in (10, 1000))
    for start in range(0, written, 2):
        one.extend(episode_steps(2, start))
    require_in_time(moved(one, other, "folder", tmp_path), written)


@pytest.mark.parametrize("written", [10, 14])
@pytest.mark.parametrize("way", ["state", "TorchRL's"])
def test_a_full_ring_of_torchrl_continues_in_a_larger_storage(way: str, written: int, tmp_path: Path) -> None:
    one, other = full_made(10), full_made(20)
    for start in range(0, written, 2):
        one.extend(episode_steps(2, start))
    if way == "state":
        other.load_state_dict(one.state_dict())
    else:
        one.dumps(tmp_path)
        for hidden in [*tmp_path.rglob(".rbtool")]:  # TorchRL has no hidden folders
            shutil.rmtree(hidden)
        (tmp_path / "buffer_metadata.json").write_text('{"batch_size": null, "consume_after_n_samples": null}')
        other.loads(tmp_path)
    require_in_time(other, written)


@ways
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_a_full_list_continues_in_a_larger_one(storage: Any, way: str, tmp_path: Path) -> None:
    other = moved(*wrapped(10, 20, storage=storage), way, tmp_path)
    other.extend(episode_steps(2, 14))
    found = [other[row] for row in range(12)]
    assert [int(item["action"]) for item in found] == list(range(4, 16))
    assert [int(item["index"]) for item in found] == list(range(12))


def test_rows_keep_their_places_in_a_storage_alone_and_in_a_ring_of_the_same_size(tmp_path: Path) -> None:
    one, other = wrapped(10, 10)
    storage = LazyTensorStorage(30)
    one.storage.dumps(tmp_path / "storage")
    storage.loads(tmp_path / "storage")
    assert torch.equal(storage[:]["action"], one[:]["action"])
    for way in ("state", "folder"):
        moved(one, other, way, tmp_path / "buffer")
        assert torch.equal(other[:]["action"], one[:]["action"])
        assert other.writer._cursor == 4


@ways
def test_a_full_ring_of_lanes_continues_in_a_larger_storage(way: str, tmp_path: Path) -> None:
    one, other = (
        ReplayBuffer(storage=LazyTensorStorage(size, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=3)
        for size in (12, 60)
    )
    for start in range(0, 8, 2):
        one.extend(torch.arange(start, start + 2) + 100 * torch.arange(2).unsqueeze(1))
    drawn = one.sample()
    moved(one, other, way, tmp_path)
    assert other[:].tolist() == [list(range(2, 8)), list(range(102, 108))]
    left = torch.cat([other.sample() for _ in range(3)])
    assert sorted([*drawn.tolist(), *left.tolist()]) == sorted(other[:].flatten().tolist())
    other.extend(torch.tensor([[8], [108]]))
    assert other[:].tolist() == [list(range(2, 9)), list(range(102, 109))]


@ways
def test_batches_made_ahead_and_epochs_continue_with_the_same_rows(way: str, tmp_path: Path) -> None:
    one, other = wrapped(10, 20, sampler=SamplerWithoutReplacement, batch_size=2, prefetch=2)
    for buffer in (one, other):
        buffer.set_rng(torch.Generator().manual_seed(1))
    one.sample()
    moved(one, other, way, tmp_path)
    for _ in range(4):
        batch, expected = other.sample(), one.sample()
        assert torch.equal(batch["action"], expected["action"])
        assert torch.equal(batch["index"], batch["action"] - 4)


@ways
def test_slices_follow_time_in_a_larger_storage(way: str, tmp_path: Path) -> None:
    one, other = wrapped(10, 20, sampler=partial(SliceSampler, slice_len=2), batch_size=40)
    moved(one, other, way, tmp_path).extend(episode_steps(4, 14))
    action = other.sample()["action"].view(-1, 2)
    assert (action.diff() == 1).all()
    assert (action[:, 0] // 4 == action[:, 1] // 4).all()


@ways
def test_epochs_of_trajectories_continue_in_a_larger_storage(way: str, tmp_path: Path) -> None:
    sampler = partial(SliceSamplerWithoutReplacement, slice_len=2, strict_length=False)
    one, other = wrapped(18, 40, over=10, sampler=sampler, batch_size=2)  # steps 10 to 27: episodes 2 to 6
    drawn = [int(one.sample()["action"][0]) // 4 for _ in range(2)]
    moved(one, other, way, tmp_path)
    drawn += [int(other.sample()["action"][0]) // 4 for _ in range(3)]
    assert sorted(drawn) == [2, 3, 4, 5, 6]


@ways
def test_generations_go_with_their_rows(way: str, tmp_path: Path) -> None:
    one, other = (
        ReplayBuffer(storage=LazyTensorStorage(size), writer=RoundRobinWriter(track_generations=True))
        for size in (4, 8)
    )
    one.extend(torch.arange(4))
    one.extend(torch.arange(4, 6))
    moved(one, other, way, tmp_path)
    assert other[:].tolist() == [2, 3, 4, 5]
    assert other.writer.generations_of(torch.arange(6)).tolist() == [0, 0, 1, 1, -1, -1]


@ways
def test_priorities_go_with_their_elements(way: str, tmp_path: Path) -> None:
    one, other = (
        TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(size, ndim=2), batch_size=500, dim_extend=0
        )
        for size in (8, 16)
    )
    data = torch.arange(12).reshape(6, 2)
    one.extend(TensorDict({"a": data[:4]}, [4, 2]))
    one.extend(TensorDict({"a": data[4:]}, [2, 2]))
    one.update_priority(torch.tensor([[0, 0], [3, 1]]), torch.tensor([5e9, 1e9]))  # rows 8 and 7; others: 1
    moved(one, other, way, tmp_path)
    assert set(other.sample()["a"].tolist()) <= {7, 8}
    assert other[:]["a"].flatten().tolist() == list(range(4, 12))


# Several processes at one place -------------------------------------------------------------------


ROWS = 50
LOADS = 30


def ring() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(ROWS))


def race_steps(count: int, first: int) -> TensorDict:
    return TensorDict({"a": torch.arange(first, first + count)}, [count])


def save_again_and_again(path: Path, saves: Any, ended: Any, errors: Any) -> None:
    """Save rings whose rows are consecutive numbers in the order of writes, and count the saves."""
    buffer, first = ring(), 0
    while not ended.is_set():
        buffer.extend(race_steps(7, first))
        first += 7
        try:
            buffer.dumps(path, durable="none")
        except Exception as error:
            errors.put(repr(error))
            return
        saves.value += 1
    errors.put("")


def require_one_state(buffer: ReplayBuffer) -> None:
    """The cursor of the writer and the rows are those of one save."""
    rows = buffer.storage.get(torch.arange(len(buffer)))["a"]
    cursor = buffer.writer._cursor % len(rows) if len(rows) == ROWS else 0
    assert (rows.roll(-cursor).diff() == 1).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("writers", [1, 2])
def test_a_checkpoint_that_is_replaced_is_loaded_whole(tmp_path: Path, writers: int) -> None:
    context, path = multiprocessing.get_context("fork"), tmp_path / "saved"
    first = ring()
    first.extend(race_steps(5, 0))
    first.dumps(path)
    ended, errors = context.Event(), context.Queue()
    saves = [context.RawValue("q") for _ in range(writers)]
    processes = [context.Process(target=save_again_and_again, args=(path, one, ended, errors)) for one in saves]
    for process in processes:
        process.start()
    try:
        loads = 0
        while (loads < LOADS or any(one.value < LOADS for one in saves)) and errors.empty():
            loaded = ring()
            loaded.loads(path)
            require_one_state(loaded)
            loads += 1
    finally:
        ended.set()
    assert [errors.get(timeout=HANG) for _ in processes] == [""] * writers
    for process in processes:
        process.join()


def test_a_load_starts_again_if_the_checkpoint_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, loads = tmp_path / "saved", ring(), 0
    other.extend(race_steps(20, 0))
    other.dumps(path)
    other.extend(race_steps(37, 20))
    loaded = ring()
    real = type(loaded.storage).loads

    def replaced_first(storage: Any, *arguments: Any, **options: Any) -> None:
        nonlocal loads
        loads += 1
        if loads == 1:
            other.dumps(path)
        real(storage, *arguments, **options)

    monkeypatch.setattr(LazyTensorStorage, "loads", replaced_first)
    loaded.loads(path)
    assert loads == 2
    require_one_state(loaded)
    assert loaded.writer._cursor == other.writer._cursor == 7
    monkeypatch.setattr(BufferFolder, "_in_place", lambda _: False)
    with pytest.raises(CorruptDataError, match="was replaced while it was loaded"):
        ring().loads(path)


# Dumps that are killed at any step ----------------------------------------------------------------


OLD, NEW = 3, 8


def crash_made(rows: int = 0, prioritised: bool = False) -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(10, 1.0, 1.0) if prioritised else SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=sampler, batch_size=2, generator=torch.Generator()
    )
    if rows:
        buffer.extend(TensorDict({"a": torch.arange(rows)}, [rows]))
        buffer.sample()
        if prioritised:
            buffer.update_priority(torch.arange(rows), 1.0 + torch.arange(rows))
    return buffer


def sampler_is_whole(buffer: TensorDictReplayBuffer) -> bool:
    """Tell whether the sampler's state is the one that belongs to this many rows."""
    sampler, rows = buffer.sampler, len(buffer)
    if isinstance(sampler, SamplerWithoutReplacement):
        return sampler._sample_list is not None and len(sampler._sample_list) == rows - 2
    batch = buffer.sample()
    return bool(torch.allclose(batch["priority_weight"] * (1 + batch["a"]), torch.ones(2)))


def places(buffer: TensorDictReplayBuffer, older: TensorDictReplayBuffer | None, folder: Path) -> Iterator[int]:
    """The operations of a dump before which files change; behind them every third, for what sweeping adds."""
    folder.mkdir()
    if older is not None:
        older.dumps(folder / "saved")
    course = course_of(buffer.dumps, folder, folder / "saved")
    assert course.status == 0
    yield from course.changes
    yield from range(course.operations + 1, 1000, 3)


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("prioritised", [False, True])
def test_a_dump_killed_where_files_change(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, prioritised: bool, there: bool
) -> None:
    path, old, new = tmp_path / "saved", crash_made(OLD, prioritised), crash_made(NEW, prioritised)
    found = set()
    for number, at in enumerate(places(new, old if there else None, tmp_path_factory.mktemp("undisturbed") / "made")):
        if there and number % 7 == 0:
            old.dumps(path)
        status, _ = forked(new.dumps, tmp_path, path, kill, at)
        if not os.WIFSIGNALED(status):
            break
        if path.exists():
            other = crash_made(0, prioritised)
            other.loads(path)
            assert other["a"].tolist() == list(range(len(other)))
            assert sampler_is_whole(other)
            found.add(len(other))
    assert number > 30
    assert os.waitstatus_to_exitcode(status) == 0
    assert found == ({OLD, NEW} if there else {NEW})
    new.dumps(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_dump_in_the_middle_of_writing_is_of_one_instant(tmp_path: Path) -> None:
    buffer, stop = TensorDictReplayBuffer(storage=LazyMemmapStorage(10)), threading.Event()

    def write() -> None:
        rows = torch.arange(4)
        while not stop.is_set():
            buffer.extend(TensorDict({"a": rows, "b": -rows}, [4]))
            rows += 4

    buffer.extend(TensorDict({"a": torch.arange(10) - 10, "b": 10 - torch.arange(10)}, [10]))
    thread = threading.Thread(target=write)
    thread.start()
    counts: set[int] = set()
    number = 0
    while len(counts) < 3:
        number += 1
        buffer.dumps(tmp_path / str(number))
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        other.loads(tmp_path / str(number))
        assert torch.equal(other["a"], -other["b"])
        in_order = other["a"].roll(-other.writer._cursor)
        assert torch.equal(in_order, torch.arange(other.write_count - 20, other.write_count - 10))
        counts.add(other.write_count)
    stop.set()
    thread.join()
