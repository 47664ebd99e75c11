"""Rows of several storages of tensors, gathered into one batch without a copy in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict

from ..kernels.rows import Memory, memory_of
from .columns import Columns
from .ensemble import BUFFER_IDS, INDEX, SOURCE_ID
from .pytree import TensorDictNode, TensorNode, TreeSpec
from .tensor import TensorStorage

Read: TypeAlias = tuple[Any, torch.Tensor, Callable[..., Any]]
"""A storage, rows int64 `[n]` of it, and what calls a function of the rows so that no row is read half-written."""


class Gatherer:
    """Gathers rows of storages that have the same columns, in memory that is used again once a batch is freed."""

    def __init__(self, source_key: str | None) -> None:
        self._source_key = source_key
        self._labelled: tuple[TreeSpec, TreeSpec, list[int]] | None = None
        self._known: dict[int, tuple[Columns, Any]] = {}
        self._batch_kind: Any = None
        self._memory: tuple[int, list[Memory]] = (-1, [])

    def gather(self, reads: Sequence[Read], labels: TensorDict, *, stack: bool) -> TensorDict | None:
        """Return a batch `[n]`, or with `stack` `[k, n]`, with an index of an ensemble as its labels.

        None for storages that differ, that are not of plain tensors, or that have an entry of the name of the source.
        """
        storages: list[TensorStorage] = []
        for storage, index, _ in reads:
            if not isinstance(storage, TensorStorage) or storage.ndim != 1 or index.dim() != 1:
                return None
            storages.append(storage)
        columns = [storage.columns for storage in storages]
        if not self._alike(columns, storages):
            return None
        lengths = [len(index) for _, index, _ in reads]
        if stack and len(set(lengths)) > 1:
            return None
        structure = storages[0].structure
        if self._source_key is not None and self._source_key in structure.children:
            return None
        start, total = 0, sum(lengths)
        leaves = [torch.from_numpy(make()) for make in self._makers(total, columns[0])]
        for storage, (_, index, read), length in zip(storages, reads, lengths, strict=True):
            read(partial(_gather, storage, [leaf[start : start + length] for leaf in leaves]), index)
            start += length
        size = torch.Size([len(reads), lengths[0]] if stack else [total])
        if stack:
            leaves = [leaf.view(*size, *leaf.shape[1:]) for leaf in leaves]
        ids = labels.get(BUFFER_IDS)
        named = [ids.unsqueeze(-1).expand(size).contiguous() if stack else ids, labels.get(INDEX)]
        if self._source_key is not None:
            named.append(labels.get(SOURCE_ID))
        structure, kept = self._with_labels(structure)
        batch: TensorDict = structure.unflatten(iter([*(leaves[number] for number in kept), *named]), size)
        return batch

    def _with_labels(self, structure: TreeSpec) -> tuple[TreeSpec, list[int]]:
        """Return the structure of a batch, which has labels for the rows' own index, and the leaves that are in it."""
        if self._labelled is None or self._labelled[0] is not structure:
            children = {key: child for key, child in structure.children.items() if key != INDEX}
            children[INDEX] = TensorDictNode({BUFFER_IDS: TensorNode(), INDEX: TensorNode()})
            if self._source_key is not None:
                children[self._source_key] = TensorNode()
            kept = [number for number, path in enumerate(structure.paths()) if path[0] != INDEX]
            self._labelled = structure, TensorDictNode(children, device=getattr(structure, "device", None)), kept
        return self._labelled[1:]

    def _alike(self, columns: Sequence[Columns], storages: Sequence[TensorStorage]) -> bool:
        first = self._kind_of(columns[0], storages[0])
        if first is None or any(
            self._kind_of(one, storage) is not first for one, storage in zip(columns[1:], storages[1:], strict=True)
        ):
            return False
        if first is not self._batch_kind:
            self._batch_kind, self._memory = first, (-1, [])
        return True

    def _kind_of(self, columns: Columns, storage: TensorStorage) -> Any:
        """Return the names, types and row shapes of columns, the same object for equal ones; None if unsuitable."""
        known, kind = self._known.get(id(columns), (None, None))
        if known is columns:
            return kind
        if columns.gathers_into and _is_plain(storage.structure):
            kind = (*columns.names, *columns.dtypes, *(leaf.shape[1:] for leaf in columns.leaves))
            kind = next((other for _, other in self._known.values() if other == kind), kind)
        else:
            kind = None
        self._known[id(columns)] = columns, kind
        return kind

    def _makers(self, count: int, columns: Columns) -> list[Memory]:
        known, makers = self._memory  # other threads may set it
        if known != count:
            kinds = [torch.empty(0, dtype=dtype).numpy().dtype for dtype in columns.dtypes]
            shapes = [(count, *leaf.shape[1:]) for leaf in columns.leaves]
            makers = [memory_of(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
            self._memory = count, makers
        return makers


def _gather(storage: TensorStorage, targets: Sequence[torch.Tensor], index: torch.Tensor) -> None:
    storage.gather_into(index, targets)


def _is_plain(structure: TreeSpec) -> bool:
    """Whether data is a tensordict of tensors and of such tensordicts."""
    if type(structure) is not TensorDictNode or structure.kind is not None or structure.tail:
        return False
    return all(isinstance(child, TensorNode) or _is_plain(child) for child in structure.children.values())
