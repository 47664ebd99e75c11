"""A list whose tensors are compressed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from ..errors import FormatError, SchemaError, UsageError
from .codec import CODECS, byte_count, codec_of_bytes, tensor_bytes, tensor_from_bytes, to_bytestream
from .item_documents import leaf_of_state, read_dtype, read_shape, state_of_item, tree_from
from .items import ObjectNode, Tree, tree_of
from .list_storage import ListStorage
from .memory import Memory
from .pytree import Path

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
