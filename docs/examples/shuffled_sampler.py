"""A sampler that draws each element once in every epoch."""

from collections.abc import Mapping
from typing import Any

import torch

from rbtool import Sampler, Storage


class Shuffled(Sampler):
    """Goes through the elements in epochs, in a random order."""

    has_epochs = True
    replacement = False
    reads_rows = False

    def __init__(self) -> None:
        self.left, self.count, self.size = torch.empty(0, dtype=torch.int64), 0, 0

    def reset(self) -> None:
        self.left, self.count = self.left[:0], 0

    def draw(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if len(storage) < self.count or not len(self.left):
            self.left, self.count = torch.randperm(len(storage), generator=self.generator), len(storage)
        self.left = torch.cat([self.left, torch.arange(self.count, len(storage))])
        self.count, self.size = len(storage), batch_size
        index, self.left = self.left[:batch_size].clone(), self.left[batch_size:]
        self.ran_out = not len(self.left)
        return (index if storage.ndim == 1 else torch.unravel_index(index, storage.shape)), {}

    @property
    def remaining_batches(self) -> int:
        return -(-len(self.left) // self.size)

    def on_rotate(self, row: int, storage: Storage) -> None:
        self.left = (self.left - row) % len(storage)

    def save_state(self) -> dict[str, Any]:
        return {"left": self.left, "count": self.count, "size": self.size}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.left, self.count, self.size = state["left"].clone(), int(state["count"]), int(state["size"])
