"""A save of a buffer or an ensemble that is killed leaves the older checkpoint or the newer one, in all its parts."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from strikes import Job, course_of, forked, kill, spread
from tensordict import TensorDict

from rbtool import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)


def require_old_or_new(folder: Path, job: Job, state_of: Callable[[Path], str], strikes: int | None) -> None:
    """Kill the save at changes of files, spread over it; the older checkpoint is in `older`."""
    shutil.copytree(folder / "older", folder / "whole" / "saved")
    course = course_of(job, folder / "whole", folder / "whole" / "saved")
    assert course.status == 0
    assert course.operations > 20
    seen = set()
    for at in spread(course.changes, strikes):
        out = folder / str(at)
        shutil.copytree(folder / "older", out / "saved")
        status, _ = forked(job, out, out / "saved", kill, at)
        assert os.WIFSIGNALED(status)
        seen.add(state_of(out / "saved"))
        job(out / "saved")
        assert state_of(out / "saved") == "new"
        assert [one.name for one in out.iterdir()] == ["saved"]
        shutil.rmtree(out)
    assert seen == {"old", "new"}


# A buffer, whatever `durable` is.

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


DURABLE = ("none", "data", "full", "in the background")
EVERY_DAY = [*(("default", durable) for durable in DURABLE), ("flat", "full"), ("h5", "data"), ("h5", DURABLE[-1])]


@pytest.mark.parametrize(
    ("kind", "durable", "strikes"),
    [
        *((*pair, 5) for pair in EVERY_DAY),
        *(pytest.param(*pair, None, marks=pytest.mark.slow) for pair in itertools.product(KINDS, DURABLE)),
    ],
)
def test_killed_anywhere_the_checkpoint_is_old_or_new(
    memory: Path, kind: str, durable: str, strikes: int | None
) -> None:
    buffer_of(kind, "old").dumps(memory / "older")
    new = buffer_of(kind, "new")

    def job(dest: Path) -> None:
        if durable == "in the background":
            new.dumps(dest, background=True).result()
        else:
            new.dumps(dest, durable=durable)  # type: ignore[arg-type]

    require_old_or_new(memory, job, lambda dest: state_of(kind, dest), strikes)


# An ensemble, with all members of one time.

MEMBERS = {"old": [3, 4, 2], "new": [7, 5, 2]}


def ensemble(sizes: list[int], value: float = 0.0) -> ReplayBufferEnsemble:
    """Three rings, every element of which is `value`."""
    samplers = (SamplerWithoutReplacement(), PrioritizedSampler(9, 0.7, 0.5), None)
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler) for sampler in samplers]
    for member, size in zip(members, sizes, strict=True):
        if size:
            member.extend(TensorDict({"a": torch.full((size, 3), value)}, [size]))
    return ReplayBufferEnsemble(*members, p=[1 + value, 1, 1], batch_size=6)


def members_of(dest: Path, *, parts: bool) -> str:
    """Load the checkpoint; return which one it is, `old` or `new`, in all its parts."""
    found = ensemble([0, 0, 0])
    (found.storage if parts else found).loads(dest)
    name = "old" if found.storage.sizes == MEMBERS["old"] else "new"
    assert found.storage.sizes == MEMBERS[name]
    value = float(name == "new")
    assert all(bool((leaf[:]["a"] == value).all()) for leaf in found.storage.leaves)
    if not parts:
        assert torch.allclose(found.p * (3 + value), torch.tensor([1 + value, 1, 1]).double())
        assert [one.write_count for one in found.writer.members] == MEMBERS[name]
    return name


@pytest.mark.parametrize("parts", [False, True], ids=["buffer", "storage"])
@pytest.mark.parametrize("strikes", [6, pytest.param(None, marks=pytest.mark.slow)])
def test_killed_anywhere_the_ensemble_is_old_or_new(memory: Path, parts: bool, strikes: int | None) -> None:
    older, newer = (ensemble(sizes, float(name == "new")) for name, sizes in MEMBERS.items())
    old, new = ((one.storage if parts else one) for one in (older, newer))
    assert isinstance(old, StorageEnsemble) is parts
    old.dumps(memory / "older")
    require_old_or_new(memory, new.dumps, lambda dest: members_of(dest, parts=parts), strikes)
