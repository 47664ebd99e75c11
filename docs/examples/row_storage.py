"""Two storages: one keeps tensordicts, the other keeps any objects."""

from typing import Any

import torch

from rbtool.core.storages import Storage, require_like


class RowStorage(Storage):
    """Keeps tensordicts in one tensordict with room for all rows."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.rows: Any = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def read_rows(self, rows: Any) -> Any:
        return self.rows[rows].apply(torch.clone)

    def write_rows(self, rows: Any, data: Any) -> None:
        if self.rows is None:
            first = data if isinstance(rows, int) else data[0]
            self.rows = torch.zeros_like(first).expand(self.max_size).clone()
        require_like(data, self.rows[rows])
        self.rows[rows] = data
        self.length = self.length_after(rows)

    def clear_rows(self) -> None:
        self.length = 0


class ObjectStorage(Storage):
    """Keeps any objects in a dict."""

    returns_objects = True

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.items)

    def read_rows(self, rows: Any) -> Any:
        if isinstance(rows, int):
            return self.items[rows]
        return [self.items[row] for row in torch.arange(len(self))[rows].tolist()]

    def write_rows(self, rows: Any, data: Any) -> None:
        if isinstance(rows, int):
            self.items[rows] = data
        else:
            self.items |= dict(zip(torch.arange(self.max_size)[rows].tolist(), data, strict=True))

    def clear_rows(self) -> None:
        self.items = {}
