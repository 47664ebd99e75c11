"""Storages that keep elements in a Python list: as they are, as a lazy stack, or with each tensor compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection, is_tensorclass

from ..errors import FormatError, MissingKeyError, SchemaError, UsageError
from .base import IndexedStorage, copied, objects_of
from .codec import CODECS, byte_count, codec_of_bytes, tensor_bytes, tensor_from_bytes, to_bytestream
from .columns import Memory
from .cursors import as_index, grown_rows, rows_of
from .items import (
    ObjectNode,
    Tree,
    item_of_state,
    items_of_states,
    leaf_of_state,
    read_dtype,
    read_shape,
    state_of_item,
    to_device,
    tree_from,
    tree_of,
)
from .pytree import Path


class ListStorage(IndexedStorage):
    """Keeps up to `max_size` objects of any kind, by reference; None is room for 2^63-1.

    An int reads and writes one object. Anything else that names rows (a slice, list, mask, array, tensor) reads a
    list of objects, and writes one object a row from a list, tuple, set, range, array, tensor or tensordict. With
    `device`, tensors and tensordicts, also those inside dicts, lists and tuples, are moved there when written.

    A write beyond `max_size` or past the end, and one with more or fewer objects than rows, raises SchemaError (a
    RuntimeError), which is also a TypeError for a dict or a text where several objects are due. Nothing changes then.
    The objects live in one process: passing the storage to a spawned one raises SchemaError.

    >>> storage = ListStorage(10)
    >>> storage.set(range(2), ["a text", {"a": 1}])
    >>> storage[[1, 0]]
    [{'a': 1}, 'a text']
    """

    returns_objects: ClassVar[bool] = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__((1 << 63) - 1 if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self._items: list[Any] = []

    def __len__(self) -> int:
        return len(self._items)

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read one object for an int, else the list of objects at `index`."""
        found = index if type(index) is int else _one_dimensional(index)
        if isinstance(found, int):
            return self._shown(self._item(found))
        if isinstance(found, slice):
            return self._gathered(self._items[found])
        return self._gathered([self._item(row) for row in self._rows(found)])

    def _item(self, row: int) -> Any:
        try:
            return self._items[row]
        except IndexError:
            raise IndexError(f"row is {row}, expected one of {len(self._items)} rows") from None

    def _rows(self, index: torch.Tensor) -> list[int]:
        if index.dtype != torch.bool:
            rows: list[int] = index.tolist()
            return rows
        if len(index) != len(self._items):
            raise IndexError(f"the mask is for {len(index)} rows, expected {len(self._items)}")
        return self._rows(index.nonzero().squeeze(1))

    def _shown(self, item: Any) -> Any:
        """Turn what is kept of one object into the object."""
        return item

    def _gathered(self, items: list[Any]) -> Any:
        """Turn a fresh list of what is kept of some objects into what reading them gives."""
        return items

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor:
        """Write one object at an int, else one of `data` at each row, later ones over earlier ones.

        All are moved and checked before the first is put in place.
        """
        if type(cursor) is int and 0 <= cursor < len(self._items):
            self._items[cursor] = self._prepared([data])[0]
            return slice(cursor, cursor + 1)
        return self._write(_one_dimensional(cursor), data)

    def _write(self, index: int | slice | torch.Tensor, data: Any) -> slice | torch.Tensor:
        """Write, and return the rows that were written."""
        rows = rows_of(index, len(self._items), self.max_size)
        if not isinstance(rows, slice) and not len(rows):
            rows = slice(0, 0)
        grown = grown_rows(rows, len(self._items))
        if isinstance(index, int):
            self._place(rows, grown, self._prepared([data]))
        else:
            items = objects_of(data)
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            if len(items) != count:
                raise SchemaError(f"{len(items)} objects given for {count} rows")
            self._place(rows, grown, self._prepared(items))
        return rows

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        """Turn objects into what is kept of them; may raise, nothing has changed yet.

        With `alone` they replace all that is there.
        """
        return items if self.device is None else [to_device(item, self.device) for item in items]

    def _place(self, rows: slice | torch.Tensor, grown: int, kept: list[Any]) -> None:
        """Put prepared objects in place; a reader never sees a row without its object."""
        if isinstance(rows, slice):
            self._items[rows] = kept
            return
        by_row = dict(zip(rows.tolist(), kept, strict=True))
        fresh = [by_row.pop(row) for row in range(len(self._items), grown)]
        for row, item in by_row.items():
            self._items[row] = item
        self._items += fresh

    def repeated(self, index: Any, data: Any) -> Any:
        """Return copies of one tensor or tensordict for several rows; data that has rows, or may have, as it is."""
        if not (isinstance(data, torch.Tensor) or is_tensor_collection(data)) or data.ndim != self._element_dims:
            return data
        found = _one_dimensional(index)
        if isinstance(found, int):
            return data
        rows = rows_of(found, len(self._items), self.max_size)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return copied(data.expand(count, *data.shape))

    @property
    def _element_dims(self) -> int:
        """How many dimensions a tensor has that is surely one element, and not several."""
        return 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Refuse: elements need not be alike."""
        raise SchemaError(f"a {type(self).__name__} keeps elements one by one; replace them with rb[i] = …")

    def clear_rows(self) -> None:
        """Forget all objects."""
        self._items = []

    # State -----------------------------------------------------------------------------------------

    def trees(self) -> Iterator[Tree]:
        """Yield the tree of every object, its tensors by reference: what a checkpoint is written from."""
        return map(tree_of, self._items)

    def save_state(self) -> dict[str, Any]:
        """Return `_storage`, a list, and `_metadata`, which describes it; tensors stand there by reference.

        An item of `_storage` is a tensor, a dict of an object's tensors by dotted path, or another object as it is.
        """
        states = [state_of_item(tree) for tree in self.trees()]
        return {"_storage": [tensors for tensors, _ in states], "_metadata": [about for _, about in states]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `save_state` returned, here or in TorchRL; tensors are copied.

        SchemaError if there is no room for it. A state of TorchRL's with anything but tensors and tensordicts in it
        has lost their types: that raises TypeError, as it does there.
        """
        saved = state["_storage"]
        self.require_room(len(saved))
        if "_metadata" in state:
            items = items_of_states(saved, state["_metadata"])
        else:
            items = [item_of_state(state) for state in saved]
        self.replace_all(items)

    def replace_all(self, items: list[Any], *, capacity: int | None = None, last_row: int | None = None) -> None:
        """Forget all objects and keep these; nothing changes if they cannot all be kept.

        They are from a storage of `capacity` rows of which `last_row` was written last, where that is known: a buffer
        has the oldest come first if it was full and this is larger.
        """
        self.require_room(len(items))
        self._take_over(self._prepared(items, alone=True), capacity, last_row)

    def _take_over(self, kept: list[Any], capacity: int | None = None, last_row: int | None = None) -> None:
        turn = self.rotation_of(len(kept), self.max_size, capacity, last_row)
        self._items = [*kept[turn:], *kept[:turn]]
        self.mark_replaced(len(kept) % self.max_size, last_row if self.rotated is None else len(kept) - 1)

    def require_room(self, count: int) -> None:
        """Raise SchemaError unless so many objects can be loaded."""
        if count > self.max_size:
            raise SchemaError(f"{count} objects are to be loaded; this storage has room for {self.max_size}")

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SchemaError(
                f"a {type(self).__name__} cannot be shared with a spawned process: its objects live in this one",
                hint="use a LazyMemmapStorage, or a LazyTensorStorage with shared_init=True",
            )
        return super().__getstate__()


def _one_dimensional(index: Any) -> int | slice | torch.Tensor:
    """Bring whatever names rows into an int, a slice or a vector."""
    while isinstance(index, tuple):
        if len(index) != 1:
            raise SchemaError(f"{len(index)} coordinates given; a list has one dimension")
        index = index[0]
    found = as_index(index, 1)
    if not isinstance(found, torch.Tensor):
        return found  # type: ignore[return-value]
    if found.dim() == 0:
        return int(found)
    if found.dim() != 1:
        raise IndexError(f"rows are named by a vector, found one of shape {list(found.shape)}")
    return found


class LazyStackStorage(ListStorage):
    """Keeps tensordicts one by one; several are read as a lazy stack along `stack_dim`, which may be negative.

    Their shapes may differ, but not the number of their batch dimensions; that, anything but a tensordict or a
    tensorclass, and tensordicts with too few batch dimensions for `stack_dim` raise SchemaError (a RuntimeError)
    when written. An int reads one as it is; of several, the tensors are the storage's own, but not the containers.

    >>> from tensordict import TensorDict
    >>> storage = LazyStackStorage(10, stack_dim=-1)
    >>> storage.set(range(2), [TensorDict({"a": torch.zeros(n, 3)}, [n]) for n in (4, 5)])
    >>> storage[:].batch_size
    torch.Size([-1, 2])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        if type(stack_dim) is not int:
            raise UsageError(f"stack_dim is {stack_dim!r}, expected an int")
        self.stack_dim = stack_dim

    def _gathered(self, items: list[Any]) -> Any:
        if items:
            # An entry that is put into the batch is put into none of the elements, nor into one of them twice.
            return LazyStackedTensorDict.lazy_stack([item.copy() for item in items], self.stack_dim)
        if not self._items:
            return TensorDict({}, [0])
        one: Any = torch.stack([self._items[0]], self.stack_dim)  # no rows, but keys and shapes
        return one[(slice(None),) * (self.stack_dim % one.batch_dims) + (slice(0, 0),)]

    # Editing ---------------------------------------------------------------------------------------

    @property
    def _element_dims(self) -> int:
        return self._items[0].batch_dims if self._items else 0

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Return one entry of all elements, stacked; SchemaError where these differ in shape."""
        parts = [item.get(key, None) for item in self._items]
        if not parts:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        missing = next((row for row, part in enumerate(parts) if part is None), None)
        if missing is not None:
            raise MissingKeyError(f"{'.'.join(key)!r} is not in element {missing}, expected in all")
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise SchemaError(f"{'.'.join(key)!r} is no tensor, expected the key of a tensor")
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise SchemaError(f"{'.'.join(key)!r} differs in shape or type; replace elements with rb[i] = …")
        return torch.stack(parts, self._dimension)

    def put_back(self, key: tuple[str, ...], values: torch.Tensor, index: Any) -> None:
        """Give the elements that `index` concerns tensors of their own: those they have may be the caller's."""
        touched = torch.zeros(values.shape, dtype=torch.bool)
        touched[index] = True
        pairs = zip(values.unbind(self._dimension), touched.unbind(self._dimension), strict=True)
        for row, (value, chosen) in enumerate(pairs):
            if chosen.any():
                item = self._items[row].copy()
                item.set(key, value.clone())
                self._items[row] = item

    def create_entries(self, values: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Add entries, values of all elements; SchemaError where these differ in batch size, or values do not fit."""
        if not self._items or any(is_tensorclass(item) for item in self._items):
            super().create_entries(values)
        size = self._items[0].batch_size
        if any(item.batch_size != size for item in self._items):
            raise SchemaError("elements differ in shape, and cannot get a new entry together; use rb[i] = …")
        expected = [*size[: self._dimension], len(self._items), *size[self._dimension :]]
        for path, value in values.items():
            if list(value.shape[: len(expected)]) != expected:
                raise SchemaError(
                    f"{'.'.join(path)!r} is {list(value.shape)}, expected {expected} in front: "
                    "a new entry is one of all elements"
                )
        items = [item.copy() for item in self._items]
        for path, value in values.items():
            for item, part in zip(items, value.unbind(self._dimension), strict=True):
                item.set(path, part.clone())
        self._items = items

    @property
    def _dimension(self) -> int:
        """The dimension that several elements are stacked along, counted from the front."""
        dimensions: int = self._items[0].batch_dims + 1
        return self.stack_dim % dimensions

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        for item in items:
            if not is_tensor_collection(item):
                raise SchemaError(f"a {type(item).__name__} cannot be stacked lazily, expected a tensordict")
        self._refuse_other_dimensions({item.batch_dims for item in [*items, *([] if alone else self._items[:1])]})
        return super()._prepared(items, alone=alone)

    def _refuse_other_dimensions(self, dimensions: set[int]) -> None:
        if len(dimensions) > 1:
            found = " and ".join(map(str, sorted(dimensions)))
            raise SchemaError(f"tensordicts of {found} batch dimensions cannot be in one lazy stack")
        if any(not -count - 1 <= self.stack_dim <= count for count in dimensions):
            raise SchemaError(f"tensordicts of {dimensions.pop()} batch dimensions have no dimension {self.stack_dim}")


_Bytes: TypeAlias = bytes  # the storage has a method of that name

CUSTOM = "custom"
"""The codec of tensors that the user's own function compressed."""


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A compressed tensor: bytes of a codec of ours, or the uint8 tensor that a custom function gave."""

    codec: str
    data: bytes | torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Compressed size."""
        return self.data.nbytes if isinstance(self.data, torch.Tensor) else len(self.data)

    @property
    def as_tensor(self) -> torch.Tensor:
        """The compressed bytes as a uint8 tensor."""
        if isinstance(self.data, torch.Tensor):
            return self.data
        return tensor_from_bytes(self.data, torch.uint8, (len(self.data),))

    def document(self) -> dict[str, Any]:
        """Describe it with plain JSON."""
        return {"shape": list(self.shape), "dtype": str(self.dtype), "codec": self.codec}


class CompressedListStorage(ListStorage):
    """Keeps up to `max_size` objects, every tensor in them compressed; reading gives fresh tensors on `device`.

    Tensors, arrays, tensordicts (nested ones, too), tensorclasses, and dicts, lists and tuples of them are
    compressed; anything else is kept as it is. `codec` is "zstd" or "zlib" (which TorchRL reads below Python 3.14),
    at `compression_level`. A `compression_fn`, which makes a uint8 vector of a tensor on `device`, takes its place;
    `decompression_fn` gets such a vector and a dict of `shape`, `dtype` and `device`, and returns the tensor.
    Several rows are read as a list. Otherwise it is a `ListStorage`.

    Damaged bytes raise CorruptDataError when they are read.

    >>> storage = CompressedListStorage(10)
    >>> storage.set(0, torch.zeros(1000))
    >>> storage.bytes() < 100, storage[0].shape
    (True, torch.Size([1000]))
    """

    returns_objects: ClassVar[bool] = False

    def __init__(
        self,
        max_size: int,
        *,
        compression_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decompression_fn: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor] | None = None,
        compression_level: int = 3,
        device: torch.device | str | int = "cpu",
        compilable: bool = False,
        codec: str = "zstd",
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        if codec not in CODECS:
            raise UsageError(f"the codec {codec!r} is unknown; known: {', '.join(CODECS)}")
        self.codec = codec if compression_fn is None else CUSTOM
        self.compression_level = compression_level
        self.compression_fn = compression_fn
        self.decompression_fn = decompression_fn
        self._codec = CODECS[codec](compression_level)

    to_bytestream = staticmethod(to_bytestream)

    def bytes(self) -> int:
        """Count the compressed bytes of all tensors."""
        return sum(leaf.nbytes for tree in self._items for leaf in tree.leaves)

    def trees(self) -> Iterator[Tree]:
        """Yield the tree of every object, its tensors compressed: what a checkpoint is written from."""
        return iter(self._items)

    # One tensor ------------------------------------------------------------------------------------

    def _prepared(self, items: list[Any], *, alone: bool = False) -> list[Any]:
        return self.compressed(items)

    def compressed(self, items: list[Any]) -> list[Tree]:
        """Compress objects as a write does, without keeping them."""
        return [tree_of(item, self._pack) for item in items]

    def _shown(self, item: Any) -> Any:
        return item.unflatten(self.unpacked)

    def _gathered(self, items: list[Any]) -> Any:
        return [item.unflatten(self.unpacked) for item in items]

    def _pack(self, tensor: torch.Tensor) -> CompressedTensor:
        shape = tuple(tensor.shape)
        if self.compression_fn is None:
            return CompressedTensor(self.codec, self._codec.compress(tensor_bytes(tensor)), tensor.dtype, shape)
        data: Any = self.compression_fn(tensor.detach().to(self._place_of_tensors))
        if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.dim() != 1:
            found = f"{data.dtype} {list(data.shape)}" if isinstance(data, torch.Tensor) else f"a {type(data).__name__}"
            raise SchemaError(f"compression_fn returned {found}, expected a vector of torch.uint8")
        return CompressedTensor(CUSTOM, _apart(data, tensor), tensor.dtype, shape)

    def unpacked(self, packed: CompressedTensor) -> torch.Tensor:
        """Make a compressed tensor again; CorruptDataError if its bytes were damaged."""
        if isinstance(packed.data, torch.Tensor):
            return self._unpack_custom(packed)
        data = CODECS[packed.codec]().decompress(packed.data, byte_count(packed.dtype, packed.shape))
        return tensor_from_bytes(data, packed.dtype, packed.shape).to(self._place_of_tensors)

    def _unpack_custom(self, packed: CompressedTensor) -> torch.Tensor:
        if self.decompression_fn is None:
            raise UsageError("the data was compressed by a function; this storage has no decompression_fn to undo it")
        about = {
            "type": "tensor", "shape": torch.Size(packed.shape), "dtype": packed.dtype, "device": self._place_of_tensors
        }  # fmt: skip
        found: torch.Tensor = _apart(self.decompression_fn(packed.as_tensor, about), packed.as_tensor)
        return found

    @property
    def _place_of_tensors(self) -> torch.device:
        return self.device or torch.device("cpu")

    def compressed_tensor(self, document: Mapping[str, Any], data: _Bytes) -> CompressedTensor:
        """Make a compressed tensor of its bytes and what is recorded of it.

        TorchRL records no codec: it is that of this storage's `decompression_fn`, if there is one, or shows in the
        bytes. FormatError (a ValueError) for what is no such record, UsageError where a function is missing.
        """
        dtype, shape = read_dtype(document.get("dtype")), read_shape(document.get("shape"))
        codec = document.get("codec")
        if codec is None:
            codec = codec_of_bytes(data) if self.decompression_fn is None else CUSTOM
        if codec == CUSTOM:
            if self.decompression_fn is None:
                raise UsageError(
                    "the data was compressed by a function of its writer's, and this storage has no decompression_fn",
                    hint="make the storage with the function that undoes it",
                )
            vector = tensor_from_bytes(data, torch.uint8, (len(data),))
            return CompressedTensor(CUSTOM, vector.to(self._place_of_tensors), dtype, shape)
        if not isinstance(codec, str) or codec not in CODECS:
            raise FormatError(f"the codec {codec!r} is unknown; known: {', '.join(CODECS)}")
        CODECS[codec]().refuse_too_few(data, byte_count(dtype, shape))
        return CompressedTensor(codec, data, dtype, shape)

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return `_storage`, a list, and `_metadata`, which describes it with the codec of every tensor.

        An item of `_storage` is a compressed tensor, a dict of them by dotted path, or another object as it is.
        """
        states = [state_of_item(tree, CompressedTensor.document) for tree in self._items]
        return {"_storage": [_as_tensors(kept) for kept, _ in states], "_metadata": [about for _, about in states]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `save_state` returned, here or in TorchRL; bytes are copied, and not decompressed yet.

        SchemaError if there is no room for it, or tensors and descriptions do not belong together.
        """
        saved, abouts = state["_storage"], state["_metadata"]
        self.require_room(len(saved))
        if len(saved) != len(abouts):
            raise SchemaError(f"the state holds {len(saved)} objects and describes {len(abouts)}")
        self._take_over([self._tree(state, about) for state, about in zip(saved, abouts, strict=True)])

    def _tree(self, state: Any, about: Any) -> Tree:
        if isinstance(about, Mapping) and about.get("type") == "other":
            return Tree(ObjectNode(state), [])

        def take(document: Mapping[str, Any], path: Path) -> CompressedTensor:
            return self.compressed_tensor(document, to_bytestream(leaf_of_state(state, path)))

        return tree_from(about, take, portable=False)

    def replace_trees(self, trees: list[Tree]) -> None:
        """Forget all objects and keep these, whose tensors are compressed already; SchemaError if there is no room."""
        self.require_room(len(trees))
        self._take_over(trees)


def _apart(made: Any, source: torch.Tensor) -> Any:
    """Copy what a function of the user's made if it is a view of what it was made of: edits must not go through."""
    if not isinstance(made, torch.Tensor) or not Memory([source]).may_hold(made):
        return made
    return made.clone()


def _as_tensors(kept: Any) -> Any:
    if isinstance(kept, CompressedTensor):
        return kept.as_tensor
    if isinstance(kept, dict) and all(isinstance(packed, CompressedTensor) for packed in kept.values()):
        return {path: packed.as_tensor for path, packed in kept.items()}
    return kept
