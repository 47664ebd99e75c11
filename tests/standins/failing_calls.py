"""Commands whose calls of the system fail, as on a broken disk or with a file server in trouble.

The calls are those of the C library: a shim in C, which the tests compile, is loaded before it. All that a command does
with files goes through it, also what HDF5 and Arrow do; a thread that is in the kernel, or a map, does not.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from forked_commands import folder_of_commands

__all__ = ["FailingCall", "commands_with_failing_calls"]

_SOURCE = Path(__file__).with_suffix(".c")


class FailingCall(NamedTuple):
    """Calls of a kind (`read`, `fsync`, …) on paths that contain `path`, which fail with the error of that name.

    They fail from the `nth` on, counted from 1; `once` states that only that one does.
    """

    call: str
    error: str
    path: str | Path
    nth: int = 1
    once: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """What a command has to find in its environment."""
        code = getattr(errno, self.error)
        return {"FAILING_CALLS": f"{self.call}:{code}:{'=' * self.once}{self.nth}:{self.path}"}


@functools.cache
def commands_with_failing_calls() -> Path:
    """Return a folder to put in front of PATH; the test is skipped where there is no compiler, or no such loader."""
    compiler = shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("a compiler and the loader of Linux have calls fail")
    library = Path(tempfile.mkdtemp()) / "failing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
    return folder_of_commands(str(library))
