"""TorchRL's classes beside ours: rbtool's objects pass TorchRL's `isinstance` checks, though they inherit nothing.

rbtool never imports TorchRL. If a program does, before or after it loads a class of rbtool, that class becomes a
subclass of TorchRL's class of the same name:

- An abstract base class of TorchRL, such as `Sampler`, registers rbtool's class.
- A plain class, such as `Storage` or `ReplayBuffer`, becomes a base of rbtool's class, behind a "wall": a class placed
  before it in the method resolution order, which hides everything that TorchRL's class defines.

The order of the imports therefore makes no difference, and objects that were created before TorchRL was imported count,
too. Objects keep their type, so that pickles, copies and dispatch by type are not affected.

The end of the module lists the modules in which TorchRL has its classes, and the names that rbtool leaves out.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PEER = "torchrl.data"

_LIBRARY_OF_PEER = PEER.partition(".")[0]

_PLACES = (PEER, f"{PEER}.replay_buffers.samplers")
"""The modules of TorchRL that have its classes; `Sampler` is in the second one only."""

_Class = TypeVar("_Class", bound=type)

_waiting: list[Callable[[], None]] = []


class Rebased:
    """The first base of classes that get more bases when TorchRL is imported.

    Python only allows to assign `__bases__` if the memory layout stays the same, which an unchanged first base ensures.
    """

    __slots__ = ()


def counterpart(ours: _Class) -> _Class:
    """Decorate a class so that it is a subclass of TorchRL's class of the same name once TorchRL is imported."""
    when_imported(partial(_introduce, ours))
    return ours


def _introduce(ours: type) -> None:
    peers = (getattr(sys.modules.get(place), ours.__name__, None) for place in _PLACES)
    peer = next(filter(None, peers), None)
    if peer is not None:  # older and newer versions may lack it
        join(ours, peer)


def join(ours: type, peer: type) -> None:
    """Make a class of ours a subclass of one of TorchRL's, from which it inherits nothing."""
    if isinstance(peer, ABCMeta):
        peer.register(ours)
    elif peer not in ours.__mro__:
        bases = ours.__bases__
        behind = max((place for place, base in enumerate(bases, 1) if _library(base) == _library(ours)), default=0)
        ours.__bases__ = (*bases[:behind], _wall(ours, peer), peer, *bases[behind:])


def _wall(ours: type, peer: type) -> type:
    """Return a base class that hides what a class of TorchRL defines.

    Each of its names leads to what `ours` would find without TorchRL, in `object` or in a class of torch, or is absent.
    """
    others = [kind for kind in ours.__mro__ if _library(kind) not in (_library(ours), _library(peer))]
    names = {name for kind in peer.__mro__ if _library(kind) == _library(peer) for name in vars(kind)}
    hidden = {
        name: next((vars(kind)[name] for kind in others if name in vars(kind)), _Hidden(name))
        for name in names - _OF_EACH_CLASS
    }
    return type("Wall", (), hidden | {"__slots__": (), "__module__": __name__})


_OF_EACH_CLASS = {
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__slots__", "__static_attributes__",
    "__weakref__",
}  # fmt: skip
"""Attributes that every class has for itself, so that Python does not look for them in bases."""


class _Hidden:
    """A descriptor for an attribute that is to look as if it did not exist."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: object, kind: type) -> NoReturn:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}", name=self._name, obj=owner)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_torchrl(part: object) -> bool:
    """Whether an object is of one of TorchRL's own classes."""
    return _library(type(part)) == _LIBRARY_OF_PEER


def described(part: object, expected: str) -> str:
    """Return the end of a message about an object of a wrong type; for one of TorchRL it says what to use instead."""
    libraries = (_library(_Hidden), _LIBRARY_OF_PEER)
    known = next((kind for kind in type(part).__mro__ if _library(kind) in libraries), type(part))
    name = known.__name__
    if _library(known) != _LIBRARY_OF_PEER:
        return f"a {type(part).__name__}, expected {expected}"
    if known is type(part):
        return f"TorchRL's {name}: use rbtool.{name} instead, with the same arguments"
    return f"a {type(part).__name__}, which derives from TorchRL's {name}: derive it from rbtool.{name} instead"


def when_imported(act: Callable[[], None]) -> None:
    """Call a function as soon as TorchRL is imported: now, if it is."""
    _waiting.append(act)
    if PEER in sys.modules:
        _act()
    elif _WATCH not in sys.meta_path:
        sys.meta_path.insert(0, _WATCH)


def _act() -> None:
    while _waiting:
        _waiting.pop(0)()


class _Watch:
    """A module finder that notices the import of TorchRL: the other finders find it, and its loader is wrapped."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != PEER:
            return None
        others = sys.meta_path[sys.meta_path.index(_WATCH) + 1 :]  # Python has called the finders before this one
        found = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _act()

            found.loader.exec_module = executed  # type: ignore[method-assign]
        return found


_WATCH: Any = _Watch()


_FILES = {
    "": "data",
    "data": "datasets llm map postprocs replay_buffers rlhf tensor_specs utils video vla",
    "data.datasets": "atari_dqn common d4rl d4rl_infos gen_dgrl lerobot minari_data openml openx roboset utils vd4rl",
    "data.llm": "chat common dataset history prompt reward topk utils",
    "data.map": "hash query tdstorage tree utils",
    "data.postprocs": "postprocs",
    "data.replay_buffers": "checkpointers her offline_to_online query ray_buffer replay_buffers sample_units samplers "
    "scheduler storages utils writers",
    "data.replay_buffers.replay_buffers": "base deprecated ensemble prioritized prioritized_tensordict remote "
    "tensordict",
    "data.replay_buffers.samplers": "base ensemble llm prioritized prioritized_slice random slice "
    "slice_without_replacement staleness streaming_slice",
    "data.replay_buffers.storages": "base ensemble list store tensor utils",
    "data.replay_buffers.writers": "base ensemble max_value round_robin",
    "data.rlhf": "dataset prompt reward utils",  # before TorchRL 0.8
    "data.vla": "containers metadata preprocessing schema tokenizers",
}
MODULES = frozenset(
    f"torchrl.{folder}.{name}".replace("..", ".") for folder in _FILES for name in _FILES[folder].split()
)
"""The modules of TorchRL's data part, with those of older versions."""

MISSING: Mapping[str, str] = {
    "DiscreteBox": "its name is CategoricalBox now",
    "InPlaceSampler": "it fails at every call in TorchRL, too",
    "StoreStorage": "it needs a server; a LazyMemmapStorage with `shared=True` serves processes of one machine, and "
    "RayReplayBuffer those of several",
    "invertible_dict": "an internal of TorchRL",
    "pin_memory_output": "an internal of TorchRL",
    "stack_tensors": "an internal of TorchRL",
    "tree_iter": "an internal of TorchRL",
    "unravel_index": "torch has it, as `torch.unravel_index`",
}
"""Names of TorchRL that rbtool does not have, each with the reason or the replacement."""
