"""What TorchRL saved, as a dataset has it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ..dataset import Array
from .buffer_steps import BufferSteps
from .torchrl_header import TorchrlKeys
from .torchrl_reader import TorchrlReader

__all__ = ["TorchrlSteps"]


class TorchrlSteps(BufferSteps):
    """The rows of a `TorchrlReader` as a dataset has them, without made-up root flags."""

    def __init__(self, path: Path, keys: TorchrlKeys | None = None) -> None:
        chosen = keys or TorchrlKeys()
        self._theirs = TorchrlReader(path, chosen, frozenset(chosen.dones))
        super().__init__(self._theirs)
        self.manifest = replace(self.manifest, request=self._theirs.manifest.request)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self._theirs.keys)

    def again(self) -> TorchrlSteps:
        """Return a reader of what is at the path."""
        return type(self)(self.path, self._theirs.keys)

    @cached_property
    def _unfinished(self) -> Array:
        """The last steps of episodes that no flag ends."""
        unfinished: Array = self._ends[~self._theirs.flagged]
        return unfinished
