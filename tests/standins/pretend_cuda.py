"""CUDA tensors without a GPU: their values are on the CPU, and what torch refuses of a GPU is refused.

An operation that mixes devices fails, as do `numpy()` and `pin_memory()` of a tensor there and an index there for rows
on the CPU; `waits` counts the reads of values, for which a program waits for the device. Nothing is asynchronous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_ATEN = torch.ops.aten
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)
_COPIES = (_ATEN.copy_.default, _ATEN._to_copy.default)
_WAITING = ("__float__", "__int__", "__bool__", "__index__", "item", "tolist")
_OF_VALUES = ("is_neg", "is_conj", "untyped_storage", "data_ptr")


class PretendTensor(torch.Tensor):
    """A tensor that is on the device `GPU` and has the values of `held`, a tensor on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=GPU, storage_offset=held.storage_offset()
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over what torch does in C++ with a device that it does not find here."""
        kwargs, name, tensor = kwargs or {}, getattr(function, "__name__", ""), args[0] if args else None
        if name in _WAITING:
            Pretended.waits += 1
        if name in _WAITING or name in _OF_VALUES:
            return function(_held(tensor), *args[1:])
        if name == "as_subclass":
            return tensor
        if name == "__invert__":
            return torch.bitwise_not(*args)
        if name == "pin_memory":
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if name == "numpy":
            if not kwargs.get("force"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return _held(tensor).numpy(force=True)
        if name == "__getitem__" and isinstance(tensor, cls):
            return cls(tensor.held[_held(args[1])])
        if name == "__setitem__":
            return _set_item(*args)
        if name in ("copy_", "index_copy_", "index_fill_"):
            _require_one_device(name, args if name != "copy_" else args[:1])
            getattr(_held(tensor), name)(*_held(tuple(args[1:])))
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class Pretended(TorchDispatchMode):
    """Runs operations of pretended tensors, and makes tensors on their device."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch starts no device under a mode of this kind
    waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _held(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.held
    if isinstance(value, tuple):
        return tuple(map(_held, value))
    return list(map(_held, value)) if isinstance(value, list) else value


def _require_one_device(name: str, values: Any) -> None:
    """Numbers on the CPU, which are tensors without dimensions, go with tensors on a device."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    kinds = {isinstance(tensor, PretendTensor) for tensor in tensors if tensor.dim() or tensor.is_cuda}
    if len(kinds) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {name}")


def _set_item(target: Any, index: Any, value: Any) -> None:
    parts = index if isinstance(index, tuple) else (index,)
    named = [part for part in parts if isinstance(part, torch.Tensor)]
    if not isinstance(target, PretendTensor) and any(isinstance(part, PretendTensor) for part in named):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if named or any(isinstance(part, list) for part in parts):
        _require_one_device("index_put_", [target, value])
    _held(target)[_held(index)] = _held(value)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    there, asked = [isinstance(tensor, PretendTensor) for tensor in tensors], kwargs.get("device")
    on_gpu = any(there) if asked is None else torch.device(asked).type == "cuda"
    if not any(there) and not on_gpu:
        return function(*args, **kwargs)
    if function in _INDEXING:
        if not there[0]:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        _require_one_device(str(function), [args[0], *args[2:3]])
    elif function not in _COPIES:
        _require_one_device(str(function), tensors)
    if function is _ATEN._local_scalar_dense.default:
        Pretended.waits += 1
    kwargs = (
        kwargs
        | ({} if asked is None else {"device": _CPU})
        | ({"non_blocking": False} if "non_blocking" in kwargs else {})
    )
    found = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    if function._schema.is_mutable and isinstance(found, torch.Tensor):
        return kwargs.get("out", args[0])
    return tree_map(_pretended, found) if on_gpu else found


def _pretended(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor) else value


def _maker(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `torch.tensor` or `torch.as_tensor` for pretended devices too: they make tensors without a dispatch."""

    def made(data: Any, *args: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
        on_gpu = isinstance(data, PretendTensor) if device is None else torch.device(device).type == "cuda"
        found = make(_held(data), *args, dtype=dtype, **options)
        return PretendTensor(found) if on_gpu else found

    return made


@contextlib.contextmanager
def pretended_gpu() -> Iterator[type[Pretended]]:
    """Pretend that there is a GPU; only tensors on "cuda:0" can be made, in this thread."""
    Pretended.waits = 0
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch, "tensor", _maker(torch.tensor)),
        mock.patch.object(torch, "as_tensor", _maker(torch.as_tensor)),
        Pretended(),
    ):
        yield Pretended
