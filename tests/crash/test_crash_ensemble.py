"""A save of an ensemble that is killed leaves the older checkpoint or the newer one, with all members of one time."""

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
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictReplayBuffer,
)

SIZES = {"old": [3, 4, 2], "new": [7, 5, 2]}


def ensemble(sizes: list[int], value: float = 0.0) -> ReplayBufferEnsemble:
    """Three rings, every element of which is `value`."""
    samplers = (SamplerWithoutReplacement(), PrioritizedSampler(9, 0.7, 0.5), None)
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler) for sampler in samplers]
    for member, size in zip(members, sizes, strict=True):
        if size:
            member.extend(TensorDict({"a": torch.full((size, 3), value)}, [size]))
    return ReplayBufferEnsemble(*members, p=[1 + value, 1, 1], batch_size=6)


def state_of(dest: Path, *, parts: bool) -> str:
    """Load the checkpoint; return which one it is, `old` or `new`, in all its parts."""
    found = ensemble([0, 0, 0])
    (found.storage if parts else found).loads(dest)
    name = "old" if found.storage.sizes == SIZES["old"] else "new"
    assert found.storage.sizes == SIZES[name]
    value = float(name == "new")
    assert all(bool((leaf[:]["a"] == value).all()) for leaf in found.storage.leaves)
    if not parts:
        assert torch.allclose(found.p * (3 + value), torch.tensor([1 + value, 1, 1]).double())
        assert [one.write_count for one in found.writer.members] == SIZES[name]
    return name


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is such a place: a thousand saves wait for no disk there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        yield Path(place)


@pytest.mark.parametrize("parts", [False, True], ids=["buffer", "storage"])
@pytest.mark.parametrize("strikes", [6, pytest.param(None, marks=pytest.mark.slow)])
def test_killed_anywhere_the_checkpoint_is_old_or_new(folder: Path, parts: bool, strikes: int | None) -> None:
    older, newer = (ensemble(sizes, float(name == "new")) for name, sizes in SIZES.items())
    old, new = ((one.storage if parts else one) for one in (older, newer))
    assert isinstance(old, StorageEnsemble) is parts
    old.dumps(folder / "older")
    shutil.copytree(folder / "older", folder / "whole" / "saved")
    course = course_of(new.dumps, folder / "whole", folder / "whole" / "saved")
    assert course.status == 0
    assert course.operations > 20
    seen = set()
    for at in spread(course.changes, strikes):
        out = folder / str(at)
        shutil.copytree(folder / "older", out / "saved")
        status, _ = forked(new.dumps, out, out / "saved", kill, at)
        assert os.WIFSIGNALED(status)
        seen.add(state_of(out / "saved", parts=parts))
        new.dumps(out / "saved")
        assert state_of(out / "saved", parts=parts) == "new"
        assert [one.name for one in out.iterdir()] == ["saved"]
        shutil.rmtree(out)
    assert seen == {"old", "new"}
