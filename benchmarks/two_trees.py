"""Compare the speed of two checkouts, each with an environment of its own, row by row of `make bench`.

    python benchmarks/two_trees.py BEFORE AFTER [--turns 5] [--rows 100000] [--rounds 5] [--only PART] [--cpu]

The checkouts take turns, each turn in a new process, with the benchmark scripts of their own tree; rows that only one
of them has are left out. The ratio is the median of BEFORE divided by the median of AFTER: above 1, AFTER is faster.
The exit code is 1 if a ratio is below `--least`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

ROW = re.compile(r"(\S.*?) +ours +(\d+\.\d) µs")


def times(tree: Path, words: list[str]) -> dict[str, float]:
    """Run the table of a tree once; return the microseconds of each row."""
    command = [str(tree / ".venv/bin/python"), "benchmarks/table.py", *words]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return {name: float(taken) for name, taken in ROW.findall(done.stdout)}


def main() -> int:
    """Let both trees take turns, print a ratio for each row, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.95)
    options, words = parser.parse_known_args()
    found: dict[Path, dict[str, list[float]]] = {tree: defaultdict(list) for tree in (options.before, options.after)}
    for turn in range(options.turns):
        for tree in sorted(found, reverse=bool(turn % 2)):  # neither is always the first
            for name, taken in times(tree, words).items():
                found[tree][name].append(taken)
    slower = 0
    for name in found[options.before].keys() & found[options.after].keys():
        before, after = (median(rows[name]) for rows in found.values())
        slower += before / after < options.least
        print(f"{name:60} {before:10.1f} µs {after:10.1f} µs {before / after:6.2f}")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
