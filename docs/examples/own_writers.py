"""Three writers: a ring, a ring that keeps every other element, and a reservoir."""

from collections.abc import Mapping
from typing import Any

import torch

from rbtool import Writer


class EveryOther(Writer):
    """Leaves out every other element of all that comes, in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros((), dtype=torch.int64)

    def place(self, data: Any, count: int, capacity: int) -> torch.Tensor:
        kept = (torch.arange(count) + self.seen) % 2 == 0
        self.waiting = count
        return torch.where(kept, (self.cursor + kept.cumsum(0) - 1) % capacity, -1)

    def on_written(self, rows: int | range | torch.Tensor, capacity: int) -> None:
        super().on_written(rows, capacity)
        self.seen = self.seen + self.waiting

    def reset(self) -> None:
        self.seen = torch.zeros((), dtype=torch.int64)

    def save_state(self) -> dict[str, Any]:
        return {"seen": int(self.seen)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = torch.tensor(int(state["seen"]))


class Ring(Writer):
    """The shortest writer of all."""

    def place(self, data: Any, count: int, capacity: int) -> range:
        return range(self.cursor % capacity, self.cursor % capacity + count)


class Reservoir(Writer):
    """Keeps a fair sample of all that was ever written."""

    keeps_order = False
    seen = 0

    def place(self, data: Any, count: int, capacity: int) -> torch.Tensor:
        numbers = self.seen + torch.arange(count)
        self.seen += count
        rows = (torch.rand(count, generator=self.generator) * (numbers + 1)).long()
        return torch.where(numbers < capacity, numbers, rows.where(rows < capacity, -1))

    def save_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = int(state["seen"])
