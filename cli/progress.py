"""Displays of progress on stderr: a moving bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from ..core.progress import Silent, clean
from .text import amount

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID
    from rich.text import Text

_EVERY = 0.1  # seconds between two refreshes
_QUICK = 1.0  # seconds before a stage is reported
_WIDE, _NARROW = 100, 45
_SPEED_WIDTH = 26  # of `999.9k steps/s  0:03 left`, with a gap
_PAST = {"looking over": "looked over"}


class NotesOnly(Silent):
    """Shows the notes of the work, and no progress, for `--no-progress`."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def note(self, text: str) -> None:
        """Show the user a message that is not an error."""
        self._note(text)


class LineProgress:
    """Writes a line at each tenth of a stage, or one at its end if the total is unknown.

    A stage shorter than a second gets its last line only.
    """

    def __init__(self, write: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._write = write
        self.note = note
        self._label, self._unit = "", ""
        self._total: int | None = None
        self._count = self._tenths = 0
        self._started = 0.0

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Start a stage."""
        self._label, self._total, self._unit = label, total, unit
        self._count = self._tenths = 0
        self._started = time.monotonic()

    def advance(self, amount: int) -> None:
        """Add to the count; write a line at each tenth."""
        self._count += amount
        tenths = self._count * 10 // self._total if self._total else 0
        if tenths > self._tenths and (tenths >= 10 or time.monotonic() - self._started >= _QUICK):
            self._tenths = tenths
            self._write(f"{self._label} {self._tenths * 10} % ({self._progress()}{self._pace()})")

    def done(self, remark: str = "") -> None:
        """End the stage."""
        if self._total is None or remark:
            over = _PAST.get(self._label)
            text = remark or self._progress()
            self._write(f"{over} {text}" if over else f"{self._label} done ({text})")

    def _pace(self) -> str:
        """Return the rate and the remaining time; "" in the first second and at the end."""
        seconds = time.monotonic() - self._started
        if not self._total or self._tenths >= 10 or seconds < _QUICK:
            return ""
        return f", {_short(self._count / seconds, self._unit)}/s, {_left(self._count, self._total, seconds)}"

    def _progress(self) -> str:
        if self._total is None:
            return amount(self._count, self._unit)
        of = amount(self._total, self._unit)
        return f"{amount(self._count, self._unit) if self._unit == 'bytes' else f'{self._count:,}'} of {of}"


class TerminalProgress:
    """Draws one bar per stage, in the thread of the caller, so that worker processes can be forked at any time."""

    def __init__(self, stream: TextIO, note: Callable[[str], None]) -> None:
        self._stream = stream
        self.note = note
        self._bars: Bars | None = None
        self._console: Console | None = None
        self._task: TaskID | None = None
        self._unit = ""
        self._total: int | None = None
        self._count = 0
        self._started = self._drawn = 0.0

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Start a stage below the previous one."""
        self._finish_stage()
        self._unit, self._total, self._count = unit, total, 0
        self._started = time.monotonic()
        bars = self._open()
        self._task = bars.add_task(clean(label), total=total, count="", speed="")
        self._draw(self._started)

    def advance(self, amount: int) -> None:
        """Add to the count; redraw at most every `_EVERY` seconds."""
        self._count += amount
        now = time.monotonic()
        if now - self._drawn >= _EVERY:
            self._draw(now)

    def done(self, remark: str = "") -> None:
        """End the stage; its line stays on the screen."""
        self._finish_stage(remark)

    def above(self, text: str) -> bool:
        """Write text above the moving bar; return False, with nothing written, if there is none."""
        if self._task is None:
            self.close()  # text then goes below the finished bars
        if self._bars is None or self._console is None:
            return False
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)
        return True

    def close(self) -> None:
        """Stop drawing."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _open(self) -> Bars:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress, ProgressColumn

            class Stage(ProgressColumn):
                def render(self, task: Task) -> Text:
                    return _stage_line(task, console.width)

            console = self._console = Console(file=self._stream, force_terminal=True, highlight=False)
            self._bars = Progress(Stage(), console=console, auto_refresh=False, redirect_stdout=False)
            self._bars.start()
        return self._bars

    def _draw(self, now: float, remark: str = "") -> None:
        if self._bars is None or self._task is None:
            return
        seconds, self._drawn = now - self._started, now
        speed = f"{_short(self._count / seconds, self._unit)}/s" if self._count and seconds > 0 else ""
        if speed and self._total and self._count < self._total and seconds >= _QUICK:
            speed += f"  {_left(self._count, self._total, seconds)}"
        self._bars.update(
            self._task, completed=self._count, count=amount(self._count, self._unit), speed=remark or speed
        )
        self._bars.refresh()

    def _finish_stage(self, remark: str = "") -> None:
        if self._bars is None or self._task is None:
            return
        self._draw(time.monotonic(), clean(remark))
        if self._total is None:
            self._bars.update(self._task, total=1, completed=1)
            self._bars.refresh()
        self._task = None


def _stage_line(task: Task, width: int) -> Text:
    """Draw a stage in one line. On a narrow screen the bar is shortened, then the speed left out; never the count."""
    from rich.text import Text

    label, count = (14, 18) if width >= _WIDE else (10, 15)
    bar = min(20, max(8 if width >= _NARROW else 0, width - label - count - _SPEED_WIDTH - 12))
    total, done = task.total or 0, task.finished
    filled = bar * int(task.completed) // int(total) if total else 0
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"  {task.description:<{label}} ", "bold")
    line.append(f"{task.fields['count']:>{count}} ")
    line.append("━" * filled, "bar.finished" if done else "bar.complete")
    line.append("━" * (bar - filled) + " " * bool(bar), "bar.back")
    line.append(f"{task.percentage:>3.0f} %" if task.total is not None else "     ", "progress.percentage")
    room = width - line.cell_len - 1
    speed, _, left = task.fields["speed"].partition("  ")
    for text in (task.fields["speed"], left, speed):
        if text and len(text) <= room:
            return line.append(f" {text}", "dim")
    return line


def _left(count: int, total: int, seconds: float) -> str:
    """Return the estimated remaining time."""
    rest = round((total - count) * seconds / max(count, 1))
    hours, minutes = divmod(rest // 60, 60)
    return f"{hours}:{minutes:02}:{rest % 60:02} left" if hours else f"{minutes}:{rest % 60:02} left"


def _short(rate: float, unit: str) -> str:
    if unit == "bytes":
        return amount(rate, unit)
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:.1f}{letter} {unit}"
    return f"{rate:.0f} {unit}"
