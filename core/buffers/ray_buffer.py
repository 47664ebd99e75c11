"""A buffer in a Ray actor, which tasks and actors on all nodes write to and sample from.

Messages do not copy tensors: pickle's protocol 5 passes their bytes as separate buffers, Ray puts these into the memory
shared by all processes of a machine, and the received tensors are views of it. torch alone would copy each tensor
several times.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import MemoryMappedTensor, TensorDict, is_tensor_collection

from ..engine.ray_cluster import connect, imported_ray
from ..errors import NetworkError, SchemaError, UsageError, refuse_misspelt
from ..format.syncing import Durable
from ..storages.columns import MappedView
from .data_loader import NestLayout, NestPiece
from .pytrees import map_tensors
from .replay_buffer import ReplayBuffer, arguments_of

_PLAIN = frozenset({torch.Tensor, MemoryMappedTensor, MappedView})
_ALIGNMENT = 64
_SIZE_BYTES = 8


class Parcel:
    """Wraps a value for sending; unpickling it gives the value itself. See `packed`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        document, buffers = packed(self.value)
        return opened, (document, *buffers)


def packed(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return a pickle, and the bytes of the tensors by reference.

    Tensors on the CPU arrive as plain contiguous tensors without gradients. Functions and classes that cannot be
    imported travel by value.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), buffers


def opened(document: bytes, *buffers: Any) -> Any:
    """Return the value of a pickle, whose tensors are views of the buffers."""
    return pickle.loads(document, buffers=buffers)  # safe: from a process that runs this program's code


def split(value: Any, count: int) -> list[Any]:
    """Pack a value into `count` parts of about the same size."""
    document, buffers = packed(value)
    raw = [buffer.raw() for buffer in buffers]
    starts, size = [], 0
    for part in raw:
        starts.append(size)
        size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    whole = np.empty(size, np.uint8)
    for start, part in zip(starts, raw, strict=True):
        whole[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
    first, *rest = np.array_split(whole, count)
    return [(document, starts, [part.nbytes for part in raw], first), *rest]


def joined(parts: Sequence[Any]) -> Any:
    """Return the value that `split` packed, in memory of its own."""
    document, starts, sizes, first = parts[0]
    whole = np.concatenate([first, *parts[1:]])
    return opened(document, *(whole[start : start + size] for start, size in zip(starts, sizes, strict=True)))


def small(value: Any, limit: int) -> bytes | None:
    """Pack a nest of dense tensors of up to `limit` bytes; None for anything else.

    Ray sends plain bytes as they are; for a parcel it manages a list of buffers, which takes longer.
    """
    piece = NestPiece.of(value)
    if piece is None or piece.size > limit or any(piece.layout.structure.constants()):
        return None
    try:
        document = pickle.dumps(piece.layout)
    except (AttributeError, TypeError, pickle.PicklingError):  # of a class that cannot be imported
        return None
    return b"".join((*piece.parts(), document, piece.size.to_bytes(_SIZE_BYTES, "little")))


def opened_small(data: bytes) -> Any:
    """Return the nest that `small` packed, in memory of its own."""
    size = int.from_bytes(data[-_SIZE_BYTES:], "little")
    return _layout(data[size:-_SIZE_BYTES]).nest_in(bytearray(data[:size]))


@functools.lru_cache(maxsize=16)
def _layout(document: bytes) -> NestLayout:
    found: NestLayout = pickle.loads(document)  # safe: from a process that runs this program's code
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN and obj.is_cpu and obj.layout is torch.strided:
            return _tensor, (pickle.PickleBuffer(_content(obj).data), obj.dtype, tuple(obj.shape))
        if kind is TensorDict and not any(obj.names or ()):
            return _tensordict, (dict(obj.items()), tuple(obj.batch_size), obj.device)
        if kind is torch.Generator:
            return _generator, (obj.get_state(), str(obj.device))
        return super().reducer_override(obj)


def _content(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the bytes of a tensor as an array in C order, by reference if the tensor is contiguous."""
    try:
        return np.ascontiguousarray(tensor.detach().numpy())
    except (RuntimeError, TypeError):  # conjugated, negated, or of a type that numpy lacks
        plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy()


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    found = np.frombuffer(content, np.uint8)
    if not len(found):
        return torch.empty(shape, dtype=dtype)
    writable = found if found.flags.writeable else np.asarray(_Writable(found))
    return torch.from_numpy(writable).view(dtype).view(shape)


class _Writable:
    """Makes the bytes of a received array writable: each parcel has a single receiver."""

    def __init__(self, array: Any) -> None:
        self._array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _tensordict(entries: Any, batch_size: tuple[int, ...], device: torch.device | None) -> TensorDict:
    return TensorDict._new_unsafe(entries, torch.Size(batch_size), device=device)


def _generator(state: torch.Tensor, device: str) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state.clone())
    return generator


_PARTS = frozenset({"sampler", "storage", "transform", "writer"})
_MASKS = ("mask", ("collector", "mask"))
_END = "end of the iteration"
# Ray sends up to 100 kB with the answer, and more through the object store, which doubles the time for 200 kB.
_PART_BYTES, _MOST_PARTS = 90_000, 12
_DEFAULTS: dict[str, Any] = {"num_cpus": 1}
_NO_OPTIONS: Mapping[str, Any] = {}


class BufferLostError(NetworkError):
    """The actor with the buffer is gone, and with it all elements since the last checkpoint."""


class _Host:
    """Runs in the actor: owns the buffer and answers calls."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.buffer: Any = None
        self.iterators: dict[str, Iterator[Any]] = {}

    def answer(self, work: Any) -> Any:
        """Call a function with the buffer; return a parcel of its result or of the error that it raised."""
        function, arguments, options = work
        return Parcel(self._answer(function, *arguments, **options))

    def sample(self, batch_size: int | None, options: Mapping[str, Any] = _NO_OPTIONS, parts: int = 1) -> Any:
        """Draw a batch; return it in the given number of parts, or as plain bytes if it is small."""
        done, found = self._answer(_method, "sample", batch_size, **options)
        if parts > 1:
            return split((done, found), parts)
        packed = small(found, _PART_BYTES) if done else None
        return Parcel((done, found)) if packed is None else packed

    def _answer(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[bool, Any]:
        try:
            return True, function(self, *arguments, **options)
        except Exception as error:
            return False, _portable(error)


def _build(host: Any, kind: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    host.buffer = kind(**arguments)


def _method(host: Any, name: str, *arguments: Any, **options: Any) -> Any:
    buffer = host.buffer
    if getattr(
        buffer.storage, "returns_objects", False
    ):  # it keeps references to its data, which must not be memory of the object store
        arguments = tuple(map_tensors(_copy, argument) for argument in arguments)
    found = getattr(buffer, name)(*arguments, **options)
    return None if found is buffer else found


def _copy(value: Any) -> Any:
    return value.clone()


def _attribute(host: Any, path: Sequence[str]) -> Any:
    found = host.buffer
    for name in path:
        found = getattr(found, name)
    return _Method(tuple(path)) if callable(found) and not isinstance(found, torch.nn.Module) else found


def _set_attribute(host: Any, path: Sequence[str], value: Any) -> None:
    *parents, name = path
    owner = host.buffer
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)


def _method_of(host: Any, path: Sequence[str], *arguments: Any, **options: Any) -> Any:
    found = host.buffer
    for name in path:
        found = getattr(found, name)
    return found(*arguments, **options)


def _call(host: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(host.buffer, *arguments, **options)


def _iterate(host: Any, name: str) -> None:
    host.iterators[name] = iter(host.buffer)


def _next(host: Any, name: str) -> Any:
    return next(host.iterators[name], _END)


def _stop(host: Any, name: str) -> None:
    host.iterators.pop(name, None)


class _Method:
    """A method of a part of the buffer, called in the actor."""

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path


def _parts_of(batch: Any) -> int:
    """Return in how many parts a batch of this size is sent fastest."""
    size = sum(buffer.raw().nbytes for buffer in packed(batch)[1])
    parts = max(1, -(-size // _PART_BYTES))
    return parts if parts <= _MOST_PARTS else 1


def _portable(error: Exception) -> Exception:
    """Return an error that any process can unpickle; a SchemaError with its text if the original cannot be."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        Parcel(error).__reduce__()
    except Exception:
        return SchemaError(f"{type(error).__name__} in the actor: {error}")
    return error


class RemotePart:
    """The sampler, storage, writer or transform of a buffer in an actor.

    Attributes are read and set, and methods called, in the actor: `buffer.sampler.beta = 0.6`.
    """

    def __init__(self, buffer: RayReplayBuffer, name: str) -> None:
        object.__setattr__(self, "_buffer", buffer)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        buffer: RayReplayBuffer = self._buffer
        path = (self._name, name)
        found = buffer._ask(_attribute, path)
        if isinstance(found, _Method):
            return lambda *arguments, **options: buffer._ask(_method_of, path, *arguments, **options)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self._buffer._ask(_set_attribute, (self._name, name), value)

    def __len__(self) -> int:
        found: int = self._buffer._ask(_method_of, (self._name, "__len__"))
        return found

    def __getitem__(self, index: Any) -> Any:
        return self._buffer._ask(_method_of, (self._name, "__getitem__"), index)

    def __repr__(self) -> str:
        return f"RemotePart({self._buffer._ask(_method_of, (self._name, '__repr__'))})"


class RayReplayBuffer:
    """A buffer that lives in an actor of a Ray cluster; it has the methods of the buffer.

    The actor handles calls one after another, so the buffer can be passed to tasks and other actors. Errors are the
    buffer's own. Batches travel through Ray's object store: on the actor's machine their tensors are views of it,
    without a copy, and occupy it as long as they exist (`batch.clone()` releases it). `sampler`, `storage`, `writer`
    and `transform` are `RemotePart`s, and `call(function)` runs anything in the actor. Paths of checkpoints are paths
    on the actor's machine.

    Args:
        replay_buffer_cls: the class of the buffer; default `ReplayBuffer`.
        remote_config: options of the actor, as for `ray.remote`; default `{"num_cpus": 1}`.
        ray_init_config: options of `ray.init`, if Ray does not run in this process yet. By default the cluster of the
            environment variable RAY_ADDRESS is used, otherwise a local Ray that listens on the loopback device only.
        **arguments: arguments of the buffer's class. Parts given as callables are made in the actor:
            `storage=partial(LazyTensorStorage, 1_000_000)`.

    Raises:
        UsageError: (a ValueError) Ray is not installed, the cluster cannot be reached, or `max_restarts` is set: a
            restarted actor would be empty.
        BufferLostError: (a NetworkError, a ConnectionError) from any method, if the actor has died: make a new buffer,
            and `loads` a checkpoint.

    Names and behaviour follow TorchRL.
    """

    service_backend = "ray"

    def __init__(
        self,
        *,
        replay_buffer_cls: Callable[..., Any] = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        refuse_misspelt(RayReplayBuffer, arguments, arguments_of(replay_buffer_cls))
        if transport not in {"auto", "ray"} or transport_options:
            raise UsageError(f"transport is {transport!r}, expected 'auto' or 'ray', without options")
        config = _DEFAULTS | dict(remote_config or {})
        if config.get("max_restarts"):
            raise UsageError("max_restarts cannot be set: a restarted actor would have an empty buffer")
        self._ray = ray = imported_ray("a RayReplayBuffer")
        if not ray.is_initialized():
            connect(ray, **dict(ray_init_config or {}))
        self._actor = ray.remote(**config)(_Host).remote(sys.path)
        self._lost = ""
        self._parts: dict[int | None, int] = {}  # batch size → number of parts it is sent in
        self._priority_key: Any = None
        try:
            self._ask(_build, replay_buffer_cls, arguments)
        except BaseException:
            self.shutdown()
            raise

    # The actor -------------------------------------------------------------------------------------

    def _ask(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._require_actor()
        done, found = self._get(self._actor.answer.remote(Parcel((function, arguments, options))))
        if not done:
            raise found
        return found

    def _require_actor(self) -> None:
        if not self._lost and not self._ray.is_initialized():  # otherwise the call would start another Ray
            self._lost = "Ray was shut down"
        if self._lost:
            self._raise_lost()

    def _get(self, answer: Any) -> Any:
        ray = self._ray
        try:
            return ray.get(answer)
        except ray.exceptions.ActorDiedError as error:
            self._lost = next(iter(str(error).splitlines()), type(error).__name__)
            self._raise_lost()
        except ray.exceptions.RayError as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise NetworkError(f"a call of the actor with the buffer failed: {reason}") from None

    def _raise_lost(self) -> NoReturn:
        raise BufferLostError(
            f"the actor with the buffer is gone, and its elements with it: {self._lost}",
            hint="make a new RayReplayBuffer, and loads() the last checkpoint",
        ) from None

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `function(buffer, …)` in the actor and return its result."""
        return self._ask(_call, function, *arguments, **options)

    @property
    def is_alive(self) -> bool:
        """Whether the actor answers."""
        try:
            self._ask(_attribute, ("batch_size",))
        except NetworkError:
            return False
        return True

    def shutdown(self) -> None:
        """End the actor, and with it the buffer; Ray keeps running."""
        if self._ray.is_initialized() and not self._lost:
            self._ray.kill(self._actor)
        self._lost = self._lost or "shutdown() was called"

    close = shutdown

    def start(self) -> RayReplayBuffer:
        """Return this buffer; its actor already runs."""
        return self

    client = start

    def __getstate__(self) -> dict[str, Any]:
        return {"_actor": self._actor, "_lost": self._lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts, self._priority_key = {}, None
        self._ray = imported_ray("a RayReplayBuffer")

    # Writing ---------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """Write one element and return its index; see the buffer's method."""
        return self._ask(_method, "add", data)

    def extend(self, data: Any, **options: Any) -> Any:
        """Write a batch of elements and return their indices; see the buffer's method."""
        return self._ask(_method, "extend", data, **options)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priority of elements."""
        self._ask(_method, "update_priority", index, priority)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of a sampled batch's elements; only its index, mask and priorities are sent."""
        if is_tensor_collection(data):
            self._priority_key = self._priority_key or self._ask(_attribute, ("priority_key",))
            data = data.select("index", self._priority_key, *_MASKS, strict=False)
        self._ask(_method, "update_tensordict_priority", data)

    def __setitem__(self, index: Any, data: Any) -> None:
        self._ask(_method, "__setitem__", index, data)

    # Reading ---------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, **options: Any) -> Any:
        """Draw a batch; with `return_info`, return a pair `(batch, info)`. UsageError (a ValueError) for `out`."""
        if options.get("out") is not None:
            raise UsageError("out cannot be used: batches come from the actor")
        self._require_actor()
        parts = self._parts.get(batch_size, 1)
        method = self._actor.sample
        if parts == 1:
            # Each argument is serialized separately, which takes time: leave out those with their default.
            answer = self._get(method.remote(batch_size, options) if options else method.remote(batch_size))
            if isinstance(answer, bytes):
                return opened_small(answer)
            done, found = answer
        else:
            done, found = joined(self._get(method.options(num_returns=parts).remote(batch_size, options, parts)))
        if not done:
            raise found
        if batch_size not in self._parts:
            self._parts[batch_size] = _parts_of(found)
        return found

    def __len__(self) -> int:
        found: int = self._ask(_method, "__len__")
        return found

    def __getitem__(self, index: Any) -> Any:
        return self._ask(_method, "__getitem__", index)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the end of an epoch, or without end if the sampler has no epochs."""
        name = uuid.uuid4().hex
        self._ask(_iterate, name)
        return self._batches(name)

    def _batches(self, name: str) -> Iterator[Any]:
        try:
            while not (isinstance(batch := self._ask(_next, name), str) and batch == _END):
                yield batch
        finally:
            if not self._lost:
                self._ask(_stop, name)

    # Checkpoints -----------------------------------------------------------------------------------

    def dumps(self, path: str | os.PathLike[str], *, durable: Durable = "full") -> None:
        """Write a checkpoint to a folder on the actor's machine; see `ReplayBuffer.dumps`.

        A relative path is resolved against the caller's working directory.
        """
        self._ask(_method, "dumps", Path(path).absolute(), durable=durable)

    def loads(self, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        """Load a checkpoint from a folder on the actor's machine; see `ReplayBuffer.loads`.

        A relative path is resolved against the caller's working directory.
        """
        self._ask(_method, "loads", Path(path).absolute(), verify=verify)

    dump = save = dumps
    load = loads

    # Everything else -------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _PARTS:
            return RemotePart(self, name)
        found = self._ask(_attribute, (name,))
        if not isinstance(found, _Method):
            return found
        return lambda *arguments, **options: self._ask(_method, name, *arguments, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._ask(_set_attribute, (name,), value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._lost or self._ask(_method, '__repr__')})"
