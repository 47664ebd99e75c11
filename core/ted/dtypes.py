"""Element types by name: NumPy's names, plus bfloat16, which NumPy lacks and stores as its bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SchemaError

__all__ = ["DTYPES", "as_numbers", "dtype_name", "is_floating", "numpy_dtype", "torch_name"]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bfloat16": np.dtype("uint16")}
"""Name of each element type to the NumPy type its bytes are read and written with."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type that holds the bytes of elements of type `name`."""
    try:
        return DTYPES[name]
    except KeyError:
        raise SchemaError(f"element type {name!r} is unknown; known are {', '.join(DTYPES)}") from None


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy element type, or raise SchemaError for one that tensors cannot hold."""
    name = dtype.newbyteorder("=").name
    if name not in DTYPES:
        raise SchemaError(f"element type {dtype} cannot be stored; known are {', '.join(DTYPES)}")
    return name


def torch_name(name: str) -> str:
    """Return the name tensordict writes into `meta.json`."""
    return f"torch.{name}"


def is_floating(name: str) -> bool:
    """Return whether elements of this type can be NaN or infinite."""
    return "float" in name or "complex" in name


def as_numbers(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return values to compute with: `array` itself, or float32 for the bits of bfloat16."""
    if name != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
