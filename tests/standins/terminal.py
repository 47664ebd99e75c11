"""A pseudo-terminal that somebody sits at."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["QUESTION", "type_line"]

QUESTION = "[y/N] "


def type_line(line: str, folder: Path, environment: Mapping[str, str], answer: str | None = "") -> tuple[int, str]:
    """Run a line of bash with all its streams on a terminal; return its code and all that was shown.

    Where it asks a question, `answer` is typed, and None interrupts it.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, answered = b"", False
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
        if not answered and shown.endswith(QUESTION.encode()):
            answered = True
            process.send_signal(signal.SIGINT) if answer is None else os.write(ours, answer.encode())
    os.close(ours)
    assert answered == (QUESTION in shown.decode())
    return process.wait(), shown.decode()
