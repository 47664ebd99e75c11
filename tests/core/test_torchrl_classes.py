"""Identity with TorchRL's classes: with a stand-in for it here, with itself in `torchrl_classes_checks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_checks import require_checks
from processes import Interpreter

from rbtool.core.torchrl_classes import described

CHECKS = Path(__file__).with_name("torchrl_classes_checks.py")


@pytest.mark.peer
@pytest.mark.parametrize("first", ["rbtool", "torchrl"])
def test_our_objects_work_in_torchrl(first: str) -> None:
    pytest.importorskip("torchrl")
    assert "Exception ignored" not in require_checks(CHECKS, first)


# What a version of TorchRL might look like: classes with names that must not reach ours, and some that are missing.
DATA = """
from torch.nn import Module
from .replay_buffers.samplers import PrioritizedSampler

class _Shared:
    inherited = "theirs"
    def __setstate__(self, state): raise AssertionError
    def __del__(self): print("deleted by TorchRL")

class Storage(_Shared):
    def __init__(self, *arguments): raise AssertionError
    def __init_subclass__(cls): assert cls.__module__ == __name__
    def __eq__(self, other): raise AssertionError
    _is_full = "theirs"

class ListStorage(Storage):
    rows = property(lambda self: "theirs")

class ReplayBuffer(_Shared):
    of_theirs = "theirs"

class ActionTokenizerBase(Module):
    def __init__(self): raise AssertionError
    def forward(self, actions): raise AssertionError

class UniformActionTokenizer(ActionTokenizerBase):
    action_dim = property(lambda self: "theirs")
    num_bins = property(lambda self: "theirs")
"""
SAMPLERS = """
from abc import ABC

class Sampler(ABC):
    def __init_subclass__(cls): pass
    _empty = "theirs"

class PrioritizedSampler(Sampler):
    pass
"""
IDENTITY = """
import copy, importlib, pickle, sys
sys.path.insert(0, sys.argv[1])
first = sys.argv[2]
if first == "torchrl":
    import torchrl.data.replay_buffers.samplers
import torch, rbtool
assert first == "torchrl" or not any(name.startswith("torchrl") for name in sys.modules)

class OfUser(rbtool.ListStorage):
    pass

older = (
    rbtool.ListStorage(3), OfUser(3), rbtool.ReplayBuffer(batch_size=2), rbtool.PrioritizedSampler(5, 0.7, 0.5),
    rbtool.UniformActionTokenizer(4, low=-1.0, high=1.0), rbtool.RandomSampler(),
)
import torchrl.data.replay_buffers.samplers as samplers
from torchrl import data

importlib.reload(data)
newer = (
    rbtool.ListStorage(3), OfUser(3), rbtool.ReplayBuffer(batch_size=2), rbtool.PrioritizedSampler(5, 0.7, 0.5),
    rbtool.UniformActionTokenizer(4, low=-1.0, high=1.0, action_dim=2), rbtool.RandomSampler(),
)
for storage, of_user, buffer, sampler, tokenizer, uniform in (older, newer):
    for one in (storage, of_user):
        assert isinstance(one, samplers.ours.ListStorage) and isinstance(one, samplers.ours.Storage)
        assert not hasattr(one, "inherited") and not hasattr(one, "_is_full") and not hasattr(type(one), "inherited")
        assert (one == storage) is (one is storage)
        assert len(copy.deepcopy(one)) == 0
    assert type(pickle.loads(pickle.dumps(storage))) is rbtool.ListStorage
    assert isinstance(buffer, samplers.ours.ReplayBuffer) and not isinstance(buffer, samplers.ours.Storage)
    assert not hasattr(buffer, "of_theirs") and len(buffer) == 0
    assert isinstance(pickle.loads(pickle.dumps(buffer)), rbtool.ReplayBuffer)
    assert isinstance(sampler, samplers.PrioritizedSampler) and isinstance(sampler, samplers.Sampler)
    assert isinstance(uniform, samplers.Sampler) and not isinstance(uniform, samplers.PrioritizedSampler)
    assert isinstance(tokenizer, samplers.ours.UniformActionTokenizer) and isinstance(tokenizer, torch.nn.Module)
    assert tokenizer.num_bins == 4 and tokenizer.action_dim in (None, 2)
    assert tokenizer(torch.tensor([-1.0, 1.0])).tolist() == [0, 3]
    assert list(copy.deepcopy(tokenizer).state_dict()) == ["low", "high"]
assert issubclass(rbtool.LazyTensorStorage, samplers.ours.Storage) and not issubclass(int, samplers.ours.Storage)
assert not issubclass(samplers.ours.Storage, rbtool.Storage)
rbtool.ListStorage(1)  # and delete it
try:
    storage.inherited
except AttributeError as error:
    print(error)
"""


@pytest.fixture
def pretended(tmp_path: Path) -> Path:
    """A folder with a package `torchrl`, whose classes are the first ones, also when it is imported again."""
    package = tmp_path / "torchrl" / "data"
    (package / "replay_buffers").mkdir(parents=True)
    for folder in (package.parent, package / "replay_buffers"):
        (folder / "__init__.py").touch()
    (package / "replay_buffers" / "samplers.py").write_text(SAMPLERS)
    (package / "classes.py").write_text(DATA.replace(".replay_buffers", "torchrl.data.replay_buffers"))
    (package / "__init__.py").write_text(
        "from .classes import *\nfrom .replay_buffers import samplers\nfrom . import classes\nsamplers.ours = classes\n"
    )
    return tmp_path


@pytest.mark.parametrize("first", ["rbtool", "torchrl"])
def test_our_classes_count_as_those_of_torchrl_and_inherit_nothing(
    first: str, pretended: Path, interpreter: Interpreter
) -> None:
    done = interpreter.run(IDENTITY, pretended, first)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "'ListStorage' object has no attribute 'inherited'\n"


REFUSED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, rbtool
from torchrl.data.classes import ListStorage, ReplayBuffer, Storage
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler

class OfUser(Sampler):
    pass

theirs = object.__new__(ListStorage)
ring = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(4))
for use in (
    lambda: rbtool.ReplayBuffer(storage=theirs),
    lambda: rbtool.ReplayBuffer(storage=lambda: theirs),
    lambda: ring.set_storage(theirs),
    lambda: rbtool.StorageEnsemble(theirs),
    lambda: rbtool.OfflineToOnlineReplayBuffer(ring, online_storage=theirs),
    lambda: rbtool.ReplayBuffer(sampler=PrioritizedSampler),
    lambda: rbtool.ReplayBuffer(sampler=OfUser()),
    lambda: rbtool.ReplayBufferEnsemble(ReplayBuffer()),
    lambda: rbtool.OfflineToOnlineReplayBuffer(ReplayBuffer(), online_capacity=3),
    lambda: rbtool.LinearScheduler(ReplayBuffer(), "beta", 1.0, 3),
    lambda: rbtool.LazyTensorStorage(4, checkpointer=ReplayBuffer()),
):
    try:
        use()
    except TypeError as error:
        print(error)
"""
SAYS = """\
storage is TorchRL's ListStorage: use rbtool.ListStorage instead, with the same arguments
storage is TorchRL's ListStorage: use rbtool.ListStorage instead, with the same arguments
storage is TorchRL's ListStorage: use rbtool.ListStorage instead, with the same arguments
member 0 is TorchRL's ListStorage: use rbtool.ListStorage instead, with the same arguments
storage is TorchRL's ListStorage: use rbtool.ListStorage instead, with the same arguments
sampler is TorchRL's PrioritizedSampler: use rbtool.PrioritizedSampler instead, with the same arguments
sampler is a OfUser, which derives from TorchRL's Sampler: derive it from rbtool.Sampler instead
member 0 is TorchRL's ReplayBuffer: use rbtool.ReplayBuffer instead, with the same arguments
offline_dataset is TorchRL's ReplayBuffer: use rbtool.ReplayBuffer instead, with the same arguments
obj is TorchRL's ReplayBuffer: use rbtool.ReplayBuffer instead, with the same arguments
checkpointer is TorchRL's ReplayBuffer: use rbtool.ReplayBuffer instead, with the same arguments
"""


def test_parts_of_torchrl_are_refused_in_a_sentence_that_helps(pretended: Path, interpreter: Interpreter) -> None:
    done = interpreter.run(REFUSED, pretended)
    says = [line for line in done.stdout.splitlines() if line != "deleted by TorchRL"]
    assert (done.returncode, done.stderr, says) == (0, "", SAYS.splitlines())


def test_other_objects_are_described_by_their_type() -> None:
    assert described(3, "a Storage") == "a int, expected a Storage"


FINDERS = """
import importlib.abc, sys
from importlib.machinery import PathFinder
sys.path.insert(0, sys.argv[1])
import rbtool
rbtool.ListStorage

class Other(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and name.startswith("torchrl"):
                return finder.find_spec(name, path, target)

class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name.startswith("torchrl") else None

sys.meta_path.insert(0, {"other": Other, "alone": Alone}[sys.argv[2]]())
from torchrl.data.classes import Storage
if sys.argv[2] == "alone":  # it asks nobody else: the next class of ours that is loaded notices
    rbtool.TensorDictMaxValueWriter
assert issubclass(rbtool.ListStorage, Storage)
"""


@pytest.mark.parametrize("kind", ["other", "alone"])
def test_finders_of_other_libraries_do_not_interfere(kind: str, pretended: Path, interpreter: Interpreter) -> None:
    done = interpreter.run(FINDERS, pretended, kind)
    assert (done.returncode, done.stderr) == (0, "")
