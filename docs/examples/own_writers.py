"""Three writers: a ring, a ring that keeps every other element, and a reservoir."""

import torch

from rbtool import Writer


class EveryOther(Writer):
    """Leaves out every other element of all that comes, in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros((), dtype=torch.int64)

    def place(self, data, count, capacity):
        kept = (torch.arange(count) + self.seen) % 2 == 0
        self.waiting = count
        return torch.where(kept, (self.cursor + kept.cumsum(0) - 1) % capacity, -1)

    def on_written(self, rows, capacity):
        super().on_written(rows, capacity)
        self.seen = self.seen + self.waiting

    def reset(self):
        self.seen = torch.zeros((), dtype=torch.int64)

    def save_state(self):
        return {"seen": int(self.seen)}

    def load_state(self, state):
        self.seen = torch.tensor(int(state["seen"]))


class Ring(Writer):
    """The shortest writer of all."""

    def place(self, data, count, capacity):
        return range(self.cursor % capacity, self.cursor % capacity + count)


class Reservoir(Writer):
    """Keeps a fair sample of all that was ever written."""

    keeps_order = False
    seen = 0

    def place(self, data, count, capacity):
        numbers = self.seen + torch.arange(count)
        self.seen += count
        rows = (torch.rand(count, generator=self.generator) * (numbers + 1)).long()
        return torch.where(numbers < capacity, numbers, rows.where(rows < capacity, -1))

    def save_state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = int(state["seen"])
