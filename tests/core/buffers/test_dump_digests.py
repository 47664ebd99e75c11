"""Saved buffers carry digests of every part: what is damaged, mixed or added is found before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flips
from tensordict import TensorDict, TensorDictBase

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.base import StorageCheckpointerBase
from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, ListStorage
from rbtool.core.transforms.base import Transform
from rbtool.core.writers.round_robin import TensorDictRoundRobinWriter

CAPACITY = 8


def _episodes(kind: type[StorageCheckpointerBase], compatible: bool) -> Callable[[], Storage]:
    return lambda: LazyTensorStorage(CAPACITY, checkpointer=kind(compatible=compatible))  # type: ignore[call-arg]


FORMS: dict[str, Callable[[], Storage]] = {
    "tensor": lambda: LazyTensorStorage(CAPACITY),
    "list": lambda: ListStorage(CAPACITY),
    "compressed": lambda: CompressedListStorage(CAPACITY),
    "flat": _episodes(FlatStorageCheckpointer, False),
    "nested": _episodes(NestedStorageCheckpointer, False),
    "h5": _episodes(H5StorageCheckpointer, False),
    "flat for torchrl": _episodes(FlatStorageCheckpointer, True),
    "nested for torchrl": _episodes(NestedStorageCheckpointer, True),
    "h5 for torchrl": _episodes(H5StorageCheckpointer, True),
}
any_form = pytest.mark.parametrize("form", FORMS)


class Counts(Transform):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def steps(count: int, start: int = 0) -> TensorDict:
    rows = torch.arange(start, start + count, dtype=torch.float32).unsqueeze(-1)
    done = rows % 3 == 2
    after = {"observation": rows + 1, "reward": rows, "done": done, "terminated": done, "truncated": ~done & done}
    return TensorDict({"observation": rows, "action": rows.long(), "next": after}, [count])


def made(form: str, **changes: Any) -> TensorDictReplayBuffer:
    """A buffer in which every part has a state: priorities, generations, a generator, transforms, draws ahead."""
    sampler = PrioritizedSampler(CAPACITY, 0.7, 0.5) if form == "tensor" else SamplerWithoutReplacement()
    arguments: dict[str, Any] = {
        "storage": FORMS[form](), "sampler": sampler, "batch_size": 2, "prefetch": 2, "transform": Counts(),
        "generator": torch.Generator().manual_seed(3), "writer": TensorDictRoundRobinWriter(track_generations=True),
    }  # fmt: skip
    return TensorDictReplayBuffer(**arguments | changes)


def saved(form: str, path: Path, start: int = 0) -> Path:
    buffer = made(form)
    buffer.extend(steps(CAPACITY + start, start))
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


def damaged(path: Path, form: str, expected: list[Any]) -> None:
    """Load a damaged dump: it is refused with nothing changed, or the damage is of no effect."""
    buffer = made(form)
    try:
        buffer.loads(path)
    except CorruptDataError:
        assert len(buffer) == 0
    else:
        assert state_of(buffer) == expected


def expected_of(form: str, path: Path) -> list[Any]:
    buffer = made(form)
    buffer.loads(path)
    return state_of(buffer)


@pytest.mark.parametrize("places", [1, pytest.param(24, marks=pytest.mark.slow)])
@any_form
def test_a_flip_in_any_file_is_found_or_of_no_effect(tmp_path: Path, form: str, places: int) -> None:
    path = saved(form, tmp_path / "saved")
    expected = expected_of(form, path)
    for _ in flips(path, places=places):
        damaged(path, form, expected)


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
            made(form).loads(path)
        shutil.rmtree(part) if part.is_dir() else part.unlink()
        kept.rename(part)
    assert found >= 6
    made(form).loads(path)


def test_a_part_that_was_not_saved_is_found(tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    buffer.extend(steps(4))
    buffer.dumps(tmp_path / "plain")
    full = saved("tensor", tmp_path / "full")
    for name in ("transform.t", "prefetch.json", "rng_state", "sampler"):
        copy = shutil.copytree if (full / name).is_dir() else shutil.copy
        copy(full / name, tmp_path / "plain" / name)  # type: ignore[operator]
        with pytest.raises(CorruptDataError, match=f"{name}.* does not belong to the checkpoint"):
            buffer.loads(tmp_path / "plain")
        shutil.rmtree(tmp_path / "plain" / name) if (full / name).is_dir() else (tmp_path / "plain" / name).unlink()
    buffer.loads(tmp_path / "plain")


@any_form
def test_a_dump_from_before_there_were_digests_loads(tmp_path: Path, form: str) -> None:
    path = saved(form, tmp_path / "saved")
    expected = expected_of(form, path)
    for digests in list(path.rglob("digests.json")):
        digests.unlink()
    with pytest.raises(CorruptDataError, match=r"digests\.json is missing"):
        made(form).loads(path)
    metadata = json.loads((path / "buffer_metadata.json").read_text())
    assert metadata.pop("digests") is True
    (path / "buffer_metadata.json").write_text(json.dumps(metadata))
    assert expected_of(form, path) == expected


def test_a_dump_that_was_written_over_says_how_to_load_it(tmp_path: Path) -> None:
    path = saved("tensor", tmp_path / "saved")
    (path / "writer" / "metadata.json").write_text('{"cursor": 3}')
    with pytest.raises(CorruptDataError) as raised:
        made("tensor").loads(path)
    assert "remove the folders .rbtool" in raised.value.hint


def test_a_saved_buffer_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = saved("tensor", tmp_path / "saved")
    saved("tensor", path, 50)
    assert len(list(path.rglob("digests.json"))) == 2
    for name in ("notes.txt", "storage/mine.json", "sampler/mine.memmap", "writer/sub/mine.json", ".rbtool/mine.json"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")
        with pytest.raises(UsageError, match=name):
            saved("tensor", path)
        (path / name).unlink()
    saved("tensor", path)


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_buffer_of_any_storage_is_replaced(tmp_path: Path, form: str) -> None:
    path = saved(form, tmp_path / "saved")
    saved(form, path, 50)
    assert made(form).loads(path) is None


@pytest.mark.parametrize("form", [form for form in FORMS if form not in {"flat", "nested", "h5"}])
def test_the_checkpoint_of_a_storage_alone_has_digests_too(tmp_path: Path, form: str) -> None:
    storage = FORMS[form]()
    TensorDictReplayBuffer(storage=storage).extend(steps(CAPACITY))
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
