"""A save of a buffer that is killed leaves the older checkpoint or the newer one, whatever `durable` is."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from strikes import course_of, forked, kill, spread
from tensordict import TensorDict

from rbtool import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)

SIZES = {"old": 30, "new": 80}
KINDS = {"default": TensorStorageCheckpointer, "flat": FlatStorageCheckpointer, "h5": H5StorageCheckpointer}


def texts_of(name: str) -> list[str]:
    """What the steps have beside tensors; the newer texts need a wider column."""
    return [f"{name} {row} " * (9 if name == "new" else 1) for row in range(SIZES[name])]


def buffer_of(kind: str, name: str | None) -> TensorDictReplayBuffer:
    """A ring of 80 elements with episodes of 10 steps, every number of which shows which checkpoint it is of."""
    storage = LazyTensorStorage(80, checkpointer=KINDS[kind]())
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(80, 0.7, 0.5), batch_size=4)
    if name is not None:
        size, value = SIZES[name], float(name == "new")
        ends = (torch.arange(size) % 10 == 9).unsqueeze(-1)
        after = {"observation": torch.full((size, 3), value), "done": ends, "reward": torch.zeros(size, 1)}
        rows = {"observation": torch.full((size, 3), value), "text": texts_of(name), "next": TensorDict(after, [size])}
        buffer.extend(TensorDict(rows, [size]))
    return buffer


def state_of(kind: str, dest: Path) -> str:
    """Load the checkpoint; return which one it is, in all its parts."""
    found = buffer_of(kind, None)
    found.loads(dest)
    name = "old" if len(found) == SIZES["old"] else "new"
    assert len(found) == SIZES[name]
    assert bool((found[:]["next", "observation"] == float(name == "new")).all())
    assert found[:]["text"] == texts_of(name)
    assert found.writer.write_count == SIZES[name]
    return name


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        yield Path(place)


@pytest.mark.parametrize("durable", ["none", "data", "full", "in the background"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strikes", [5, pytest.param(None, marks=pytest.mark.slow)])
def test_killed_anywhere_the_checkpoint_is_old_or_new(
    folder: Path, kind: str, durable: str, strikes: int | None
) -> None:
    buffer_of(kind, "old").dumps(folder / "older")
    new = buffer_of(kind, "new")
    shutil.copytree(folder / "older", folder / "whole" / "saved")

    def job(dest: Path) -> None:
        if durable == "in the background":
            new.dumps(dest, background=True).result()
        else:
            new.dumps(dest, durable=durable)  # type: ignore[arg-type]

    course = course_of(job, folder / "whole", folder / "whole" / "saved")
    assert course.status == 0
    assert course.operations > 20
    seen = set()
    for at in spread(course.changes, strikes):
        out = folder / str(at)
        shutil.copytree(folder / "older", out / "saved")
        status, _ = forked(job, out, out / "saved", kill, at)
        assert os.WIFSIGNALED(status)
        seen.add(state_of(kind, out / "saved"))
        job(out / "saved")
        assert state_of(kind, out / "saved") == "new"
        assert [one.name for one in out.iterdir()] == ["saved"]
        shutil.rmtree(out)
    assert seen == {"old", "new"}
