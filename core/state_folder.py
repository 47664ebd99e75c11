"""A state in a folder: a memory-mapped tensordict, as TorchRL writes it, or a torch file without pickled objects."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import DatasetNotFoundError, FormatError, UsageError
from .format import fs
from .format.documents import load_json
from .format.memmap.tree import leaf_path, read_tree
from .format.open_files import OpenFiles
from .format.syncing import replace_file
from .ted.schema import numpy_dtype

_NODE = "<class 'tensordict._td.TensorDict'>"
_NOTHING = {
    "_type": "<class 'tensordict.tensorclass.NonTensorData'>",
    "data": None,
    "_is_non_tensor": True,
    "_metadata": None,
}


def write_values(folder: Path, state: Mapping[str, Any]) -> None:
    """Write tensors, numbers, bools and None to a folder, replacing an earlier state.

    Each file is replaced atomically, `meta.json` last. The folder as a whole is not: a buffer that saves itself stages
    all of it. UsageError, before anything is written, for values of other types.
    """
    tensors = {name: _tensor(name, value) for name, value in state.items()}
    fs.make_folder(folder)
    meta: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            fs.remove(folder / f"{name}.memmap")
            fs.make_folder(folder / name)
            replace_file(folder / name / "meta.json", json.dumps(_NOTHING).encode())
            meta[name] = {"type": "NonTensorData"}
        else:
            fs.remove(folder / name)
            replace_file(folder / f"{name}.memmap", tensor.contiguous().numpy().tobytes())
            shape = list(tensor.shape)
            meta[name] = {"device": "cpu", "shape": shape, "dtype": str(tensor.dtype), "is_nested": False}
    meta |= {"shape": [], "device": "cpu", "_type": _NODE}
    replace_file(folder / "meta.json", json.dumps(meta).encode())


def _tensor(name: str, value: Any) -> torch.Tensor | None:
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UsageError(
        f"{name} is a {type(value).__name__} in the state; only tensors, numbers, bools and None can be saved"
    )


def read_values(folder: Path) -> dict[str, Any]:
    """Read what `write_values`, or tensordict, wrote; a tensor without dimensions becomes a number or a bool.

    Raises:
        DatasetNotFoundError: there is no state.
        FormatError: the folder is something else.
        CorruptDataError: a file is missing, or does not have the size recorded in `meta.json`.
    """
    if not (folder / "meta.json").is_file():
        raise DatasetNotFoundError(f"{folder} does not hold a state: meta.json is missing")
    state: dict[str, Any] = {}
    with OpenFiles(folder) as files:
        for key, leaf in read_tree(files).items():
            values = np.zeros(leaf.shape, numpy_dtype(leaf.dtype))
            if math.prod(leaf.shape):
                values = np.frombuffer(bytearray(files.read(leaf_path(key))), values.dtype).reshape(leaf.shape)
            state[".".join(key)] = torch.from_numpy(values) if values.ndim else values.item()
    for name, entry in load_json(folder / "meta.json").items():
        if isinstance(entry, dict) and entry.get("type") == "NonTensorData":
            state[name] = None
    return state


def module_state_bytes(state: Any) -> bytes:
    """Serialise the state of transforms or of a sampler in torch's format.

    Raises:
        UsageError: it could not be loaded with `weights_only=True`.
    """
    torch.save(state, stream := io.BytesIO())
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(f"only a state of tensors and numbers can be saved: {error}") from error
    return stream.getvalue()


def load_module_state(file: Path) -> dict[str, Any] | None:
    """Read what `module_state_bytes` returned, tensors and numbers only; None if there is no file."""
    if not file.is_file():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise FormatError(f"{file} is not a state of tensors and numbers: {error}") from error
    if not isinstance(state, Mapping):
        raise FormatError(f"{file} is not a state of tensors and numbers: it holds a {type(state).__name__}")
    return dict(state)
