"""The folder of a sampler's state: a memory-mapped tensordict, as TorchRL writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..dataset import OpenFiles, fs, leaf_path, load_json, read_tree
from ..errors import DatasetNotFoundError
from ..ted import numpy_dtype

__all__ = ["read_state", "write_state"]

_NODE = "<class 'tensordict._td.TensorDict'>"
_NOTHING = {
    "_type": "<class 'tensordict.tensorclass.NonTensorData'>",
    "data": None,
    "_is_non_tensor": True,
    "_metadata": None,
}


def write_state(folder: Path, state: Mapping[str, torch.Tensor | None]) -> None:
    """Write tensors, and None where there is none, into a folder; the state that lay there before is replaced.

    Each file is replaced at once, the description last; a buffer that saves itself replaces the folder as a whole.
    """
    fs.make_folder(folder)
    meta: dict[str, Any] = {}
    for name, tensor in state.items():
        if tensor is None:
            fs.remove(folder / f"{name}.memmap")
            fs.make_folder(folder / name)
            fs.replace_file(folder / name / "meta.json", json.dumps(_NOTHING).encode())
            meta[name] = {"type": "NonTensorData"}
        else:
            fs.remove(folder / name)
            fs.replace_file(folder / f"{name}.memmap", tensor.contiguous().numpy().tobytes())
            shape = list(tensor.shape)
            meta[name] = {"device": "cpu", "shape": shape, "dtype": str(tensor.dtype), "is_nested": False}
    meta |= {"shape": [], "device": "cpu", "_type": _NODE}
    fs.replace_file(folder / "meta.json", json.dumps(meta).encode())


def read_state(folder: Path) -> dict[str, torch.Tensor | None]:
    """Read what `write_state`, or tensordict, wrote.

    DatasetNotFoundError where there is nothing, FormatError for what is no such folder, CorruptDataError for a file
    that is missing or has another size than is written beside it.
    """
    if not (folder / "meta.json").is_file():
        raise DatasetNotFoundError(f"{folder} holds no sampler's state: it has no meta.json")
    state: dict[str, torch.Tensor | None] = {}
    with OpenFiles(folder) as files:
        for key, leaf in read_tree(files).items():
            values = np.zeros(leaf.shape, numpy_dtype(leaf.dtype))
            if math.prod(leaf.shape):
                values = np.frombuffer(bytearray(files.read(leaf_path(key))), values.dtype).reshape(leaf.shape)
            state[".".join(key)] = torch.from_numpy(values)
    for name, entry in load_json(folder / "meta.json").items():
        if isinstance(entry, dict) and entry.get("type") == "NonTensorData":
            state[name] = None
    return state
