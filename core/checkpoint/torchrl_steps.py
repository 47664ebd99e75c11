"""What TorchRL saved, as a dataset has it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ..format import Array
from .buffer_steps import BufferSteps
from .torchrl_header import TorchrlKeys
from .torchrl_reader import TorchrlReader

__all__ = ["TorchrlSteps"]


class TorchrlSteps(BufferSteps):
    """The rows of a `TorchrlReader`, made without root flags, as a dataset has them."""

    def __init__(self, rows: TorchrlReader) -> None:
        self._theirs = rows
        super().__init__(rows)
        self.manifest = replace(self.manifest, request=rows.manifest.request)

    @classmethod
    def at(cls, path: Path) -> TorchrlSteps:
        """Open what TorchRL saved at `path`."""
        keys = TorchrlKeys()
        return cls(TorchrlReader(path, keys, frozenset(keys.dones)))

    @cached_property
    def _unfinished(self) -> Array:
        """The last steps of episodes that no flag ends."""
        unfinished: Array = self._ends[~self._theirs.flagged]
        return unfinished
