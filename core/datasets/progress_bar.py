"""Shows in a script how far work is, where `pbar=True` asks for it."""

from __future__ import annotations

import sys

from tqdm import tqdm

from ..progress import clean

__all__ = ["ProgressBar"]


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # it would start a thread, and then this process could not be forked in safety


class ProgressBar:
    """A `Progress` that draws a tqdm bar on stderr."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage."""
        self.done()
        self._bar = _Bar(desc=clean(label), total=total, unit=f" {unit}", unit_scale=False)

    def advance(self, amount: int) -> None:
        """Report so many more units done."""
        if self._bar is not None:
            self._bar.update(amount)

    def done(self, remark: str = "") -> None:
        """End the stage, with the bar left where it is."""
        if self._bar is not None:
            self._bar.set_postfix_str(clean(remark))
            self._bar.close()
            self._bar = None

    def note(self, text: str) -> None:
        """Write a message on a line of its own."""
        _Bar.write(clean(text), file=sys.stderr)
