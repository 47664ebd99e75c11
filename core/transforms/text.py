"""Makes strings of the bytes that text is stored as."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from ..errors import CorruptDataError, MissingKeyError, SchemaError
from .base import Transform
from .keyed import Path, as_keys, in_next, require_tensordict, under_next

__all__ = ["DecodeText"]

_LENGTH = "_length"


class DecodeText(Transform):
    """Replaces text, stored as uint8 `[..., L]` in UTF-8 beside its length in bytes, int32 `[...]`, by strings.

    Each of `in_keys` becomes non-tensor data of the batch's shape, and `<key>_length` goes; `next` likewise. Without
    `in_keys` every entry that is stored this way is decoded. MissingKeyError (a KeyError) for one that is not there,
    SchemaError (a RuntimeError) for one that is not stored so, CorruptDataError for bytes that are no UTF-8.
    """

    follows_next = True

    def __init__(self, in_keys: Any = None) -> None:
        super().__init__()
        self.in_keys = None if in_keys is None else as_keys(in_keys)

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys or ())

    def forward(self, data: Any, elsewhere: frozenset[Path] = frozenset()) -> Any:
        batch = require_tensordict(data, self)
        decoded = {key: self._decoded(batch, key) for key in self._keys(batch) if key not in elsewhere}
        batch = batch.exclude(*(_length_of(key) for key in decoded))
        for key, value in decoded.items():
            batch.set(key, value)
        return batch

    def _keys(self, batch: TensorDictBase) -> list[Path]:
        if self.in_keys is None:
            leaves = [key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)]
            return [key for key in leaves if _length_of(key) in leaves and batch.get(key).dtype == torch.uint8]
        following = [key for key in map(in_next, self.in_keys) if key is not None and batch.get(key, None) is not None]
        return [*self.in_keys, *(key for key in following if key not in self.in_keys)]

    @staticmethod
    def _decoded(batch: TensorDictBase, key: Path) -> Any:
        name, text, length = ".".join(key), batch.get(key, None), batch.get(_length_of(key), None)
        if text is None or length is None:
            raise MissingKeyError(f"{name if text is None else name + _LENGTH} is not in the batch")
        shape = batch.batch_size
        if text.dtype != torch.uint8 or text.shape[:-1] != shape or length.numel() != shape.numel():
            raise SchemaError(
                f"{name} is {text.dtype} {list(text.shape)} with lengths {list(length.shape)}, text of the batch "
                f"{list(shape)} is expected"
            )
        rows, counts = text.reshape(-1, text.shape[-1]).numpy(force=True), length.reshape(-1).tolist()
        try:
            strings = [rows[number, :count].tobytes().decode() for number, count in enumerate(counts)]
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{name} is not UTF-8: {error}") from error
        return _stacked(strings, shape)


def _length_of(key: Path) -> Path:
    return (*key[:-1], key[-1] + _LENGTH)


def _stacked(strings: list[str], shape: torch.Size) -> Any:
    """Give strings the shape of a batch."""
    if not shape:
        return NonTensorData(strings[0])
    width = len(strings) // shape[0] if shape[0] else 0
    parts = [_stacked(strings[start * width : (start + 1) * width], shape[1:]) for start in range(shape[0])]
    return NonTensorStack(*parts)
