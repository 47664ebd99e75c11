"""What goes wrong while a function works on a chunk, in a form that crosses process borders."""

from __future__ import annotations

import traceback

__all__ = ["ChunkFailed", "FunctionFailed", "ResultRefused", "WorkerTrace", "WorkerTrouble", "error_text"]


class FunctionFailed(Exception):
    """The user's function raised: what in one line, and its traceback."""

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text, trace)
        self.text = text
        self.trace = trace

    @classmethod
    def of(cls, error: BaseException) -> FunctionFailed:
        """Describe what the function raised."""
        return cls(error_text(error), "".join(traceback.format_exception(error)))


class WorkerTrouble(FunctionFailed):
    """A worker failed elsewhere than in the user's function, or ended before it was done."""


class ResultRefused(Exception):
    """What the user's function returned cannot be stored; the message says why."""


class ChunkFailed(Exception):
    """Something went wrong on the steps `[start, stop)`; the cause says what."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.start = start
        self.stop = stop


class WorkerTrace(Exception):
    """Carries the traceback of another process as text, to be the cause of an error in this one."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


def error_text(error: BaseException) -> str:
    """Name an error in one line: its type and the first line of its message."""
    kind = type(error).__name__
    if isinstance(error, KeyError) and isinstance(error.__context__, KeyError):
        error = error.__context__  # tensordict adds a list of its keys, which need not fit in a line
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    first = lines[0] if len(lines[0]) <= 300 else f"{lines[0][:300]}…"
    return f"{kind} {first}" if isinstance(error, KeyError) else f"{kind}: {first}"
