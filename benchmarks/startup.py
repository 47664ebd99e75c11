"""Time `--help`, a shell completion, and `inspect` of a million steps.

    python benchmarks/startup.py

Each command runs in a new process, as in a shell. The rounds interleave the commands with a bare `python -c pass`, so
that noise of the machine affects both. The limits are 0.2 s for `--help`, 0.15 s for a completion and 0.4 s for
`inspect`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rbtool.core.testing.datasets import write_walks

ROUNDS = 15


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "walks"
        manifest = write_walks(data, [(1000, "truncated")] * 1000)
        rbtool = str(Path(sys.executable).with_name("rbtool"))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "rbtool --help": [rbtool, "--help"],
            "rbtool inspect --help": [rbtool, "inspect", "--help"],
            f"rbtool inspect ({manifest.steps:,} steps)": [rbtool, "inspect", str(data)],
            f"rbtool inspect --json ({manifest.steps:,} steps)": [rbtool, "inspect", str(data), "--json"],
            "rbtool inspect --episode 500 --head 3": [rbtool, "inspect", str(data), "--episode", "500", "--head", "3"],
        }
        completions = {f"{line}<TAB>": line for line in ("rbtool ", "rbtool inspect ", f"rbtool stats {data} --field ")}
        commands |= {name: [rbtool] for name in completions}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                asked = {"_RBTOOL_COMPLETE": "bash", "_RBTOOL_LINE": completions[name]} if name in completions else {}
                null, environment = subprocess.DEVNULL, os.environ | asked
                started = time.perf_counter()
                subprocess.run(command, check=True, stdout=null, stderr=null, env=environment)
                seconds[name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        print(f"{name:40} median {statistics.median(times):.3f} s   best {min(times):.3f} s")


if __name__ == "__main__":
    main()
