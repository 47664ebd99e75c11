"""How Arrow columns become arrays: leaves of structs, lists of fixed and of varying length, rows without a value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...core.errors import CorruptDataError, FormatError
from ...core.format import Array
from .store import ColumnPath, Form

__all__ = [
    "as_array",
    "as_strings",
    "at",
    "declared_forms",
    "forms_with_holes",
    "found_forms",
    "of_free_length",
    "row_width",
]

_RAGGED = "its rows are lists of different lengths"
_ABSENT = "it has no value in some rows"


def declared_forms(field: pa.Field, prefix: ColumnPath = ()) -> dict[ColumnPath, Form]:
    """Forms of the leaves of a top-level column, as its type says them."""
    path = (*prefix, field.name)
    if not pa.types.is_struct(field.type):
        return {path: _form(field)}
    return {name: form for child in field.type for name, form in declared_forms(child, path).items()}


def _form(field: pa.Field) -> Form:
    kind, shape, ragged = field.type, [], False
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Form("text")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return Form("bytes")
    while _is_list(kind):
        if pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        else:
            ragged = True
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return Form("odd", why=f"its Arrow type {field.type} is neither numbers nor text")
    dtype = np.dtype(kind.to_pandas_dtype()).name
    if ragged:
        return Form("odd", dtype, why=_RAGGED)
    declared = (field.metadata or {}).get(b"shape")
    if declared is None:
        return Form("array", dtype, tuple(shape), flat=bool(shape))
    # Infos are flat too, with their shape beside them.
    sizes = tuple(int(size) for size in declared.split(b",") if size.isdigit())
    return Form("array", dtype, sizes if math.prod(sizes) == math.prod(shape) else tuple(shape))


def found_forms(forms: Mapping[ColumnPath, Form], chunks: Iterable[pa.Array]) -> dict[ColumnPath, Form]:
    """Forms of the leaves as the rows of one episode show them: lengths of lists, rows without a value."""
    absent: set[ColumnPath] = set()
    holes: set[ColumnPath] = set()
    shapes: dict[ColumnPath, set[tuple[int, ...] | None]] = {
        path: set() for path, form in forms.items() if form.why == _RAGGED
    }
    for chunk in chunks:
        for path in forms:
            array = at(chunk, path[1:])
            if _has_holes(array):
                holes.add(path)
            if array.null_count and not pa.types.is_floating(array.type):
                absent.add(path)
            elif path in shapes and len(array):
                shapes[path].add(_row_shape(array))
    found = dict(forms)
    for path in absent:  # whole numbers without a value here and there are read as floats, like Minari does
        whole = forms[path].kind == "array" and "int" in forms[path].dtype and not forms[path].shape
        found[path] = Form("array", "float64", forms[path].shape, holes=True) if whole else Form("odd", why=_ABSENT)
    for path, seen in shapes.items():
        if path not in absent and len(seen) == 1 and None not in seen:
            found[path] = Form("array", forms[path].dtype, next(shape for shape in seen if shape is not None))
    return found | {path: replace(found[path], holes=True) for path in holes if found[path].kind == "array"}


def forms_with_holes(forms: Mapping[ColumnPath, Form], chunks: Iterable[pa.Array]) -> dict[ColumnPath, Form]:
    """Mark the forms of the leaves in which floats are missing; where there are no floats, no row is looked at."""
    floats = {path for path, form in forms.items() if form.kind == "array" and "float" in form.dtype}
    holes: set[ColumnPath] = set()
    for chunk in chunks if floats else ():
        holes |= {path for path in floats - holes if _has_holes(at(chunk, path[1:]))}
    return {path: replace(form, holes=path in holes) for path, form in forms.items()}


def _has_holes(array: pa.Array) -> bool:
    """Tell whether floats are missing, also inside of rows that are lists."""
    while _is_list(array.type):
        array = array.flatten()
    return bool(pa.types.is_floating(array.type) and array.null_count)


def _row_shape(array: pa.Array) -> tuple[int, ...] | None:
    """Shape of every row of a list column, or None where rows differ."""
    shape = []
    while _is_list(array.type):
        lengths = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            return None
        shape.append(lengths[0])
        array = array.flatten()
    return None if array.null_count else tuple(shape)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def at(array: pa.Array, path: ColumnPath) -> pa.Array:
    """Follow names down through structs; a row that has no struct has no value in it either."""
    for name in path:
        place = array.type.get_field_index(name)
        if place < 0:  # what pyarrow says of a name that is there twice, and where Python would take the last column
            raise FormatError(f"the column {name!r} is there twice")
        array = array.flatten()[place]
    return array


def as_array(array: pa.Array, form: Form, what: str) -> Array:
    """Turn rows of numbers into an array `[n, *shape]`; a float without a value is NaN."""
    rows = len(array)
    if not math.prod(form.shape):
        return np.empty((rows, *form.shape), form.dtype)
    while _is_list(array.type):
        _require_values(array, what)
        array = array.flatten()
    if "float" not in form.dtype:
        _require_values(array, what)
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.astype(form.dtype, copy=False).reshape(rows, *form.shape)


def as_strings(array: pa.Array, what: str) -> list[bytes]:
    """Turn rows of text or of byte strings into bytes."""
    array.validate(full=True)  # offsets that point outside the file would kill the process
    _require_values(array, what)
    rows: list[bytes] = array.cast(pa.large_binary()).to_pylist()
    return rows


def _require_values(array: pa.Array, what: str) -> None:
    if array.null_count:
        raise CorruptDataError(f"{what} has no value in {array.null_count} rows")


def of_free_length(kind: pa.DataType) -> bool:
    """Tell whether one row of this type can be as long as it likes: text, byte strings, lists."""
    if kind.num_fields and not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return any(of_free_length(kind.field(number).type) for number in range(kind.num_fields))
    return not (pa.types.is_primitive(kind) or pa.types.is_null(kind))


def row_width(kind: pa.DataType) -> int:
    """Bytes of one row of this type, as far as the type tells."""
    if pa.types.is_struct(kind):
        return sum(row_width(child.type) for child in kind)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * row_width(kind.value_type)
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return 64
