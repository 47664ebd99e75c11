"""Data on its way to another process, whose tensors are not copied into the message.

Pickle's protocol 5 passes the bytes of tensors as separate buffers. Ray puts these into the memory that all processes
of a machine share, and the tensors that arrive are views of it. torch alone copies every tensor several times.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import MemoryMappedTensor, TensorDict

from .pieces import NestLayout, NestPiece

_PLAIN = frozenset({torch.Tensor, MemoryMappedTensor})
_ALIGNMENT = 64
_SIZE_BYTES = 8


class Parcel:
    """Wraps a value; unpickled, it is the value itself, see `packed`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        document, buffers = packed(self.value)
        return opened, (document, *buffers)


def packed(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Return a pickle and the bytes of the tensors, by reference.

    Tensors on the CPU become plain tensors, contiguous, without gradients. Functions and classes travel by value where
    they cannot be imported.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), buffers


def opened(document: bytes, *buffers: Any) -> Any:
    """Return the value of a pickle; its tensors are views of the buffers."""
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
    """Return the value that `split` packed, on memory of its own."""
    document, starts, sizes, first = parts[0]
    whole = np.concatenate([first, *parts[1:]])
    return opened(document, *(whole[start : start + size] for start, size in zip(starts, sizes, strict=True)))


def small(value: Any, limit: int) -> bytes | None:
    """Pack a nest of dense tensors of up to `limit` bytes; None for anything else.

    Ray sends plain bytes as they are; of a parcel it keeps a list of buffers, which takes longer.
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
    """Return the nest that `small` packed, on memory of its own."""
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
    """Return an array of the bytes of a tensor, in C order, by reference where they are so already."""
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
    """Gives write access to the bytes of an array, which nobody else reads: a parcel arrives once."""

    def __init__(self, array: Any) -> None:
        self._array = array  # keeps the memory
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _tensordict(entries: Any, batch_size: tuple[int, ...], device: torch.device | None) -> TensorDict:
    return TensorDict._new_unsafe(entries, torch.Size(batch_size), device=device)


def _generator(state: torch.Tensor, device: str) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state.clone())
    return generator
