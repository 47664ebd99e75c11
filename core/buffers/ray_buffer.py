"""A buffer in a Ray actor, which tasks and actors on all nodes can write to and sample from.

Messages do not copy tensors: pickle's protocol 5 passes their bytes as separate buffers, Ray puts these into memory
that all processes of a machine share, and the received tensors are views of it. torch's own pickling would copy each
tensor several times.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar, overload

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import MemoryMappedTensor, TensorDict, is_tensor_collection
from torch.utils.data import get_worker_info

from ..engine.ray_cluster import connect, imported_ray
from ..errors import (
    NetworkError,
    SchemaError,
    UsageError,
    WrongKindError,
    refuse_misspelt,
    require_flags,
    require_keywords,
)
from ..format.syncing import Durable
from ..options import PathLike
from ..storages.columns import MappedView
from ..torchrl_classes import counterpart
from .data_loader import NestLayout, NestPiece, check_use, fetcher_asking, serve
from .pytrees import map_tensors
from .replay_buffer import ReplayBuffer, arguments_of, completed

_PLAIN = frozenset({torch.Tensor, MemoryMappedTensor, MappedView})
_ALIGNMENT = 64
_SIZE_BYTES = 8


class Parcel:
    """Wraps a value for sending; unpickling it gives the value itself. See `packed`."""

    def __init__(self, value: Any, *, to_cpu: bool = False) -> None:
        self.value = value
        self._to_cpu = to_cpu

    def __reduce__(self) -> tuple[Any, ...]:
        document, buffers = packed(self.value, to_cpu=self._to_cpu)
        return opened, (document, *buffers)


def packed(value: Any, *, to_cpu: bool = False) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return the pickle of a value, and the bytes of its tensors by reference.

    Tensors on the CPU, and with `to_cpu` all others, arrive as plain contiguous tensors on the CPU without gradients.
    Functions and classes that cannot be imported are pickled by value.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=buffers.append)
    pickler.to_cpu = to_cpu
    pickler.dump(value)
    return stream.getvalue(), buffers


def opened(document: bytes, *buffers: Any) -> Any:
    """Return the value of a pickle, whose tensors are views of the buffers."""
    return pickle.loads(document, buffers=buffers)  # safe: it comes from a process that runs this program's code


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
    """Pack a nest of dense tensors of up to `limit` bytes to plain bytes; None for anything else.

    Ray sends plain bytes as they are. For a parcel it has to manage a list of buffers, which takes longer.
    """
    piece = NestPiece.of(value)
    if piece is None or piece.size > limit or any(piece.layout.structure.constants()):
        return None
    try:
        document = pickle.dumps(piece.layout)
    except (AttributeError, TypeError, pickle.PicklingError):  # the nest has a class that cannot be imported
        return None
    return b"".join((*piece.parts(), document, piece.size.to_bytes(_SIZE_BYTES, "little")))


def opened_small(data: bytes) -> Any:
    """Return the nest that `small` packed, in memory of its own."""
    size = int.from_bytes(data[-_SIZE_BYTES:], "little")
    return _layout(data[size:-_SIZE_BYTES]).nest_in(bytearray(data[:size]))


@functools.lru_cache(maxsize=16)
def _layout(document: bytes) -> NestLayout:
    found: NestLayout = pickle.loads(document)  # safe: it comes from a process that runs this program's code
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    to_cpu = False

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN and (obj.is_cpu or self.to_cpu) and obj.layout is torch.strided:
            return _tensor, (pickle.PickleBuffer(_content(obj.cpu()).data), obj.dtype, tuple(obj.shape))
        if kind is TensorDict and not any(obj.names or ()):
            device = torch.device("cpu") if self.to_cpu and obj.device is not None else obj.device
            return _tensordict, (dict(obj.items()), tuple(obj.batch_size), device)
        if kind is torch.Generator:
            return _generator, (obj.get_state(), str(obj.device))
        return super().reducer_override(obj)


def _content(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the bytes of a tensor as an array in C order, by reference if the tensor is contiguous."""
    try:
        return np.ascontiguousarray(tensor.detach().numpy())
    except (RuntimeError, TypeError):  # lazily conjugated or negated, or of a type that NumPy does not have
        plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy()


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    found = np.frombuffer(content, np.uint8)
    if not len(found):
        return torch.empty(shape, dtype=dtype)
    writable = found if found.flags.writeable else np.asarray(_Writable(found))
    return torch.from_numpy(writable).view(dtype).view(shape)


class _Writable:
    """Makes the bytes of a received array writable, which is safe as each parcel has a single receiver."""

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
_OWNERS = frozenset({"client", "clients", "close", "shutdown", "start"})
"""Methods that a `RayReplayBuffer` has, and its clients do not have."""
_MASKS = ("mask", ("collector", "mask"))
_END = "end of the iteration"
# Ray sends results of up to 100 kB with the answer. Larger ones go through the object store, which takes twice the time
# for 200 kB, so that batches of up to `_MOST_PARTS` such results are sent in parts.
_PART_BYTES, _MOST_PARTS = 90_000, 12
_DEFAULTS: dict[str, Any] = {"num_cpus": 1}
_NO_OPTIONS: Mapping[str, Any] = {}


class BufferLostError(NetworkError, RuntimeError):
    """The actor with the buffer has ended, and all elements since the last checkpoint are lost."""


class _Host:
    """The class of the actor, which owns the buffer and answers calls."""

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


def _build(host: Any, kind: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    host.buffer = kind(*arguments, **options)


class _Itself:
    """Stands for the buffer in the actor's answers, where a method returns the buffer itself."""


def _method(host: Any, name: str, *arguments: Any, **options: Any) -> Any:
    buffer = host.buffer
    # A storage of objects keeps references to its data, which must not be memory of the object store.
    if getattr(buffer.storage, "returns_objects", False):
        arguments = tuple(map_tensors(_copy, argument) for argument in arguments)
    found = getattr(buffer, name)(*arguments, **options)
    return _Itself if found is buffer else found


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
    """Stands for a method in the actor's answers; the client makes a function that calls it in the actor."""

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path


def _parts_of(batch: Any) -> int:
    """Return the number of parts in which a batch of this size is sent fastest."""
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

    def __init__(self, buffer: RayBufferClient, name: str) -> None:
        object.__setattr__(self, "_buffer", buffer)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        buffer: RayBufferClient = self._buffer
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


_Arguments = ParamSpec("_Arguments")
_Found = TypeVar("_Found")


def _there(
    method: Callable[Concatenate[Any, _Arguments], _Found],
) -> Callable[Concatenate[Any, _Arguments], _Found]:
    """Return a method of clients that calls this method of the buffer in the actor."""

    @functools.wraps(method)
    def call(client: Any, /, *arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Found:
        found: _Found = client._ask(_method, method.__name__, *arguments, **options)
        return found

    return call


def _kept_there(name: str) -> Any:
    """Make a property that is read from the buffer in the actor; `__setattr__` sets it there."""
    return property(lambda client: client._ask(_attribute, (name,)), doc=getattr(ReplayBuffer, name).__doc__)


class RayBufferClient:
    """A small handle of the buffer in a Ray actor: it can be pickled, and has the methods of the buffer.

    `RayReplayBuffer.client()` makes it. It cannot end the actor or make other clients. To `isinstance` it has the class
    of the buffer in the actor.
    """

    _lost = ""
    _to_cpu = True
    _kind: type = ReplayBuffer

    def __init__(self, actor: Any, kind: type, *, to_cpu: bool) -> None:
        self._actor, self._kind, self._to_cpu = actor, kind, to_cpu
        self._ray = imported_ray("a RayReplayBuffer")
        self._parts: dict[int | None, int] = {}  # for each batch size, the number of parts in which batches are sent
        self._priority_key: Any = None

    @property  # type: ignore[misc]  # mypy does not expect a read-only property
    def __class__(self) -> Any:
        return self._kind

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(type(self))})

    def __reduce__(self) -> tuple[Any, ...]:
        return _reached, (type(self), self._actor, self._kind, self._to_cpu, self._lost)

    # The actor -------------------------------------------------------------------------------------

    def _ask(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._require_actor()
        work = Parcel((function, arguments, options), to_cpu=self._to_cpu)
        done, found = self._get(self._actor.answer.remote(work))
        if not done:
            raise found
        return self if found is _Itself else found

    def _require_actor(self) -> None:
        if not self._lost and not self._ray.is_initialized():  # a call would start another Ray
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

    # Parts and state --------------------------------------------------------------------------------

    batch_size: int | None = _kept_there("batch_size")
    dim_extend: int = _kept_there("dim_extend")
    write_count: int = _kept_there("write_count")

    stats = _there(ReplayBuffer.stats)
    state_dict = _there(ReplayBuffer.state_dict)
    load_state_dict = _there(ReplayBuffer.load_state_dict)
    set_rng = _there(ReplayBuffer.set_rng)
    set_sampler = _there(ReplayBuffer.set_sampler)
    set_storage = _there(ReplayBuffer.set_storage)
    set_writer = _there(ReplayBuffer.set_writer)
    append_transform = _there(ReplayBuffer.append_transform)
    insert_transform = _there(ReplayBuffer.insert_transform)

    # Writing ---------------------------------------------------------------------------------------

    add = _there(ReplayBuffer.add)
    extend = _there(ReplayBuffer.extend)
    write_all = _there(ReplayBuffer.write_all)
    empty = _there(ReplayBuffer.empty)
    mark_update = _there(ReplayBuffer.mark_update)
    update_if_present = _there(ReplayBuffer.update_if_present)
    synchronize = _there(ReplayBuffer.synchronize)
    update_priority = _there(ReplayBuffer.update_priority)

    def submit_update_if_present(self, **update: Any) -> Future[Any]:
        """Update as `update_if_present` does, and return a future with the result."""
        return completed(functools.partial(self.update_if_present, **update))

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of a sampled batch's elements; only its index, mask and priorities are sent."""
        if is_tensor_collection(data):
            self._priority_key = self._priority_key or self._ask(_attribute, ("priority_key",))
            data = data.select("index", self._priority_key, *_MASKS, strict=False)
        self._ask(_method, "update_tensordict_priority", data)

    def __setitem__(self, index: Any, data: Any) -> None:
        self._ask(_method, "__setitem__", index, data)

    # Reading ---------------------------------------------------------------------------------------

    can_sample = _there(ReplayBuffer.can_sample)
    next = _there(ReplayBuffer.next)
    query = _there(ReplayBuffer.query)
    read_all_in_order = _there(ReplayBuffer.read_all_in_order)

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], **options: Any
    ) -> tuple[Any, dict[Any, Any]]: ...

    @overload
    def sample(self, batch_size: int | None = None, **options: Any) -> Any: ...

    def sample(self, batch_size: int | None = None, **options: Any) -> Any:
        """Draw a batch; with `return_info`, return a pair `(batch, info)`. UsageError (a ValueError) for `out`."""
        if options.get("out") is not None:
            raise UsageError("out cannot be used: batches come from the actor")
        self._require_actor()
        parts = self._parts.get(batch_size, 1)
        method = self._actor.sample
        if parts == 1:
            # Ray serializes each argument separately, which takes time, so arguments with their defaults are left out.
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
        if (fetcher := fetcher_asking(self)) is not None:
            worker = get_worker_info()
            workers = 0 if worker is None else worker.num_workers
            check_use(self.sampler, workers, batches_again=fetcher.auto_collation)
            serve(fetcher)
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

    def dumps(self, path: PathLike, *, durable: Durable = "full") -> None:
        """Write a checkpoint to a folder on the actor's machine; see `ReplayBuffer.dumps`.

        A relative path is resolved against the caller's working directory.
        """
        self._ask(_method, "dumps", Path(path).absolute(), durable=durable)

    def loads(self, path: PathLike, *, verify: bool = False) -> None:
        """Load a checkpoint from a folder on the actor's machine; see `ReplayBuffer.loads`.

        A relative path is resolved against the caller's working directory.
        """
        self._ask(_method, "loads", Path(path).absolute(), verify=verify)

    dump = save = dumps
    load = loads

    # Everything else -------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _OWNERS:
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


def _reached(kind: type[RayBufferClient], actor: Any, of: type, to_cpu: bool, lost: str) -> RayBufferClient:
    """Return the unpickled handle of an actor."""
    found: RayBufferClient = object.__new__(kind)
    RayBufferClient.__init__(found, actor, of, to_cpu=to_cpu)
    found._lost = lost
    return found


@counterpart
class RayReplayBuffer(RayBufferClient):
    """A buffer that lives in an actor of a Ray cluster; it has the methods of the buffer.

    The actor handles calls one after another, so the buffer can be passed to tasks and other actors. To `isinstance` it
    has the class of the buffer in the actor, and `ReplayBuffer(…, service_backend="ray")`, or any other class of
    buffers with this argument, makes one. Methods raise the errors of the buffer. Batches are sent through Ray's object
    store: on the actor's machine their tensors are views of it, without a copy, and occupy it as long as they exist
    (use `batch.clone()` to release it). `sampler`, `storage`, `writer` and `transform` are `RemotePart`s, and
    `call(function)` runs any function in the actor. Checkpoints are on the actor's machine.

    Args:
        replay_buffer_cls: the class of the buffer; default `ReplayBuffer`.
        remote_config: options of the actor, as for `ray.remote`; default `{"num_cpus": 1}`.
        ray_init_config: options of `ray.init`, if Ray does not run in this process yet. By default the cluster of the
            environment variable RAY_ADDRESS is used, otherwise a local Ray that listens on the loopback device only.
        transport, transport_options: `"auto"` or `"ray"`, and no options: data is always sent through Ray.
        *arguments, **options: arguments of the buffer's class. Parts given as callables are made in the actor:
            `storage=partial(LazyTensorStorage, 1_000_000)`. Data on a GPU arrives there on the CPU, unless
            `remote_config` has `num_gpus`.

    Raises:
        UsageError: (a ValueError) Ray is not installed, the cluster cannot be reached, the transport is another one, or
            `max_restarts` is set: a restarted actor would be empty.
        BufferLostError: (a ConnectionError and a RuntimeError) from any method, if the actor has died or was shut down:
            make a new buffer, and `loads` a checkpoint.

    Names and behaviour follow TorchRL.
    """

    def __init__(
        self,
        *arguments: Any,
        replay_buffer_cls: Callable[..., Any] = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refuse_misspelt(RayReplayBuffer, options, arguments_of(replay_buffer_cls))
        if again := options.keys() & {"service_backend", "service_backend_options", "use_ray_service"}:
            raise UsageError(f"{', '.join(sorted(again))} is for other classes: a RayReplayBuffer lives in Ray already")
        if transport not in ("auto", "ray") or transport_options:
            raise UsageError(
                f"transport is {transport!r} and transport_options is {transport_options!r}, expected 'auto' or 'ray', "
                "without options",
                hint="leave both out: Ray's object store passes batches without a copy on the machine of the actor",
            )
        config = _DEFAULTS | dict(remote_config or {})
        if config.get("max_restarts"):
            raise UsageError("max_restarts cannot be set: a restarted actor would have an empty buffer")
        ray = imported_ray("a RayReplayBuffer")
        if not ray.is_initialized():
            connect(ray, **dict(ray_init_config or {}))
        actor = ray.remote(**config)(_Host).remote(sys.path)
        super().__init__(actor, _class_of(replay_buffer_cls), to_cpu=not config.get("num_gpus"))
        try:
            self._ask(_build, replay_buffer_cls, arguments, options)
        except BaseException:
            self.shutdown()
            raise

    @property
    def transport_kind(self) -> str:
        """How data reaches the buffer: `"ray"`, through Ray's object store."""
        return "ray"

    @property
    def service_backend(self) -> str:
        """Where the buffer lives: `"ray"` for an actor."""
        return "ray"

    def start(self) -> Self:
        """Return this buffer, whose actor was started when it was made; BufferLostError if the actor has ended."""
        self._require_actor()
        return self

    def client(self) -> RayBufferClient:
        """Return a small handle of the same buffer, for another process; BufferLostError if the actor has ended."""
        self._require_actor()
        return RayBufferClient(self._actor, self._kind, to_cpu=self._to_cpu)

    def clients(self, count: int) -> list[RayBufferClient]:
        """Return several handles, see `client`.

        Raises:
            WrongKindError: (a TypeError) the number is not an int.
            UsageError: (a ValueError) it is below 1.
        """
        if isinstance(count, bool) or not isinstance(count, int):
            raise WrongKindError(f"the number of clients is {count!r}, expected an int")
        if count < 1:
            raise UsageError(f"the number of clients is {count}, expected a number from 1")
        return [self.client() for _ in range(count)]

    def shutdown(self, timeout: float | None = None) -> None:
        """End the actor, and with it the buffer; Ray keeps running.

        Args:
            timeout: has no effect, as this does not wait; it exists for code that also uses other buffers.
        """
        if self._ray.is_initialized() and not self._lost:
            self._ray.kill(self._actor)
        self._lost = self._lost or "shutdown() was called"

    close = shutdown


def _class_of(maker: Any) -> type:
    """Return the class of the buffers that a callable makes; `ReplayBuffer` if it is unknown."""
    while isinstance(maker, functools.partial):
        maker = maker.func
    return maker if isinstance(maker, type) else ReplayBuffer


_SERVICE = ("ray_init_config", "remote_config")


def deployed_on_ray(kind: type, arguments: Sequence[Any], options: Mapping[str, Any]) -> RayReplayBuffer:
    """Make a buffer of this class in an actor, for `service_backend="ray"` or the older `use_ray_service`.

    Raises:
        UsageError: (a ValueError) the two arguments contradict each other; and for the reasons of `RayReplayBuffer`.
        TypeError: `service_backend_options` has an unknown entry.
    """
    given = dict(options)
    backend, older = given.pop("service_backend", None), given.pop("use_ray_service", None) or False
    require_flags(use_ray_service=older)
    if backend not in (None, "ray"):
        raise UsageError(f"use_ray_service is {older} and service_backend is {backend!r}, expected one of them")
    if older:
        warnings.warn('use_ray_service=True is deprecated: write service_backend="ray"', FutureWarning, stacklevel=3)
    service = dict(given.pop("service_backend_options", None) or {})
    require_keywords("service_backend_options", service, _SERVICE)
    return RayReplayBuffer(*arguments, replay_buffer_cls=kind, **service, **given)
