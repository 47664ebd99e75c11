"""Draws of rows of several buffers that were drawn at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..samplers.ensemble import index_with
from ..storages.ensemble import INDEX, MemberRows
from .concurrency import Draw


class RowsDraw(Draw):
    """A draw of rows of members that were drawn at once; index, info and the draws of members are made when needed.

    `labels` and `common`, the info of the samplers, have the shape of the batch. `plain` is set if the batches of
    members are rows as their storages return them.
    """

    __slots__ = ("_source_key", "common", "labels", "of_members", "plain")

    def __init__(
        self,
        rows: MemberRows,
        labels: Sequence[torch.Tensor],
        source_key: str | None,
        common: Mapping[Any, Any],
        plain: bool,
    ) -> None:
        self.last, self.rows, self.chances, self.written, self.size = False, None, None, None, None
        self.of_members = rows
        self.labels = labels
        self.common = common
        self.plain = plain
        self._source_key = source_key

    @property
    def index(self) -> Any:
        return index_with(self.of_members, self.labels)

    @property
    def info(self) -> Any:  # type: ignore[override]
        source = {} if self._source_key is None else {self._source_key: self.labels[2]}
        return {**self.common, INDEX: self.index, **source}

    @property
    def parts(self) -> Any:  # type: ignore[override]
        rows, dims, found = self.of_members, self.labels[1].dim(), []
        flat = {key: value.flatten(0, dims - 1) for key, value in self.common.items()}
        for member, part in rows.parts:
            index = torch.from_numpy(rows.numbers[part])
            info = {key: value[part] for key, value in flat.items()} | {INDEX: index}
            found.append((member, Draw(index, info, written=None if self.written is None else self.written[member])))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Draw, (self.index, self.info, self.last, self.rows, self.parts, None, None, self.size)
