"""Count the files of the code that a call or a command passes through on its way to the bytes.

    python benchmarks/walks.py [--files]

This measures how many files a person has to open to follow the code. Each function counts once, in the order in which
functions are first entered; code that runs while modules are imported does not count. `files` is the number of files
entered, in all threads. `returns` is how often the path comes back to a file that it has left before: 0 means that it
goes from one file to the next. `functions` is the number of functions.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from tensordict import TensorDict

import rbtool
from rbtool.cli.app import main as command_line

ROOT = Path(rbtool.__file__).parent
D4RL = ROOT / "tests/data/d4rl/hopper_random-v2.hdf5"


@dataclass
class Walk:
    """The files of this package that a call enters."""

    files: dict[str, None] = field(default_factory=dict)
    returns: int = 0
    _seen: set[CodeType] = field(default_factory=set)
    _here: str = ""
    _importing: dict[int, int] = field(default_factory=dict)

    def of(self, call: Callable[[], object]) -> Walk:
        """Call a function and record the functions that it enters."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return self

    @property
    def functions(self) -> int:
        """How many functions were entered."""
        return len(self._seen)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in {"call", "return"}:
            return
        code, thread = frame.f_code, threading.get_ident()
        if code.co_name == "<module>":
            self._importing[thread] = self._importing.get(thread, 0) + (1 if event == "call" else -1)
        elif event == "call" and not self._importing.get(thread) and code not in self._seen:
            path = Path(code.co_filename)
            if any(path.is_relative_to(ROOT / part) for part in ("cli", "converters", "core")):
                self._enter(code, path.relative_to(ROOT).as_posix(), main=threading.current_thread() is _MAIN)

    def _enter(self, code: CodeType, name: str, *, main: bool) -> None:
        self._seen.add(code)
        if main:
            self.returns += name in self.files and name != self._here
            self._here = name
        self.files[name] = None


_MAIN = threading.main_thread()


def command(*words: str) -> Callable[[], None]:
    """Return a call of the command line that shows nothing."""

    def run() -> None:
        before, sys.argv = sys.argv, ["rbtool", *words]
        try:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                command_line()
        finally:
            sys.argv = before

    return run


def main() -> None:
    """Print a line for each walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        buffer = rbtool.TensorDictReplayBuffer(
            storage=rbtool.LazyMemmapStorage(100, scratch_dir="./rows"), batch_size=8
        )
        buffer.extend(TensorDict({"observation": torch.zeros(100, 3)}, [100]))
        walks = {
            "rb.sample() on a memory map": buffer.sample,
            "rb.dumps()": lambda: buffer.dumps("./saved"),
            "rbtool convert of a D4RL file": command("convert", str(D4RL), "./dataset", "--no-progress"),
            "rbtool inspect": command("inspect", "./dataset"),
            "rbtool check": command("check", "./dataset", "--no-progress"),
        }
        print(f"{'walk':<32}{'files':>8}{'returns':>10}{'functions':>12}")
        for name, call in walks.items():
            walk = Walk().of(call)
            print(f"{name:<32}{len(walk.files):>8}{walk.returns:>10}{walk.functions:>12}")
            for path in walk.files if asked.files else ():
                print(f"    {path}")


if __name__ == "__main__":
    main()
