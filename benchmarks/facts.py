"""Measure the figures in the table of the README for rbtool and TorchRL, and write them to docs/facts.json.

    python benchmarks/facts.py [--table build/bench.json] [--only PART] [--write]

TorchRL has to be installed in the same environment. The parts are:

    speeds      rows of the table that `make bench` wrote
    boundaries  a ring that has wrapped around in the middle of an episode is saved and loaded into a new buffer, from
                which slices are drawn; a slice is wrong if its steps do not follow each other
    kills       SIGKILL at every change of the file system by a verb; `tests/crash/runner.py` examines the files left

`--only` runs the parts whose names contain PART; `--write` updates docs/facts.json and the table of the README.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from shared import peers
from tensordict import TensorDict

import rbtool

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / place) for place in ("docs/tools", "tests/standins")]

import facts_table  # noqa: E402
import struck_work  # noqa: E402

SLICES, OF = 1000, 32
KILLED = ("convert", "preprocess", "save-h5", "dump-flat")
SPEEDS = {
    ("RandomSampler LazyMemmapStorage 256",): "draw 256 of 1M steps in a memory map",
    ("extend 32", "extend 32, filling"): "write 32 steps into a memory map",
    ("slices 8 of 32, TorchRL",): "draw 8 slices of 32 steps, each inside an episode",
}
"""Rows of the table of speeds by their names in the README, which shows the row with the lowest ratio for each name."""


def speeds(table: Path) -> Iterator[facts_table.Fact]:
    """Return the facts that the table written by `make bench` contains."""
    claims = {claim["what"]: claim for claim in json.loads(table.read_text())["claims"]}
    for names, shown in SPEEDS.items():
        least = min((claims[name] for name in names), key=lambda claim: claim["found"])
        ours, theirs = least["ours"], least["theirs"]
        times = f"{theirs / ours:.{1 if theirs < 20 * ours else 0}f}×"
        yield facts_table.Fact(shown, duration(ours), f"{duration(theirs)} ({times})", "make bench")


def duration(microseconds: float) -> str:
    """Write a time in microseconds or milliseconds, with two digits at least."""
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.{1 if microseconds < 10_000 else 0}f} ms"


def wrong_slices(library: Any, draws: Any, folder: Path) -> int:
    """Count the wrong slices of 1,000, after a checkpoint of a wrapped ring: those with steps that do not follow."""
    size, longest = 1_000, 70

    def made() -> Any:
        sampler = draws.SliceSampler(slice_len=OF, end_key=("next", "done"))
        return library.ReplayBuffer(storage=library.LazyTensorStorage(size), sampler=sampler)

    written = made()
    numbers = torch.arange(size + size // 2 + 11)
    done = (numbers % longest == longest - 1)[:, None]
    steps = TensorDict({"step": numbers, "next": {"done": done}}, [len(numbers)])
    for start in range(0, len(numbers), 37):
        written.extend(steps[start : start + 37])
    written.dumps(folder)
    loaded = made()
    loaded.loads(folder)
    batch = loaded.sample(SLICES * OF)["step"].view(SLICES, OF)
    return int((batch.diff(dim=1) != 1).any(1).sum())


def kills(job: str, folder: Path) -> dict[str, int]:
    """Kill a verb at each of its file operations while it replaces an older result.

    The runner fails if anything but the older or the new result is left.
    """
    folder.mkdir()
    struck_work.prepare(folder)
    words = [sys.executable, ROOT / "tests/crash/runner.py", folder, job, "--over"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def measured(options: argparse.Namespace, folder: Path) -> Iterator[facts_table.Fact]:
    command = "python benchmarks/facts.py --only {}"
    if options.only in "speeds":
        yield from speeds(options.table)
    if options.only in "boundaries":
        ours, theirs = (
            wrong_slices(library, draws, folder / f"ring-{number}")
            for number, (library, draws) in enumerate([(rbtool, rbtool), (peers.buffers, peers.samplers)])
        )
        what = f"wrong slices, of {SLICES:,}: a full ring, saved and loaded"
        yield facts_table.Fact(what, f"{ours:,}", f"{theirs:,}", command.format("boundaries"))
    if options.only in "kills":
        struck = [kills(job, folder / job) for job in KILLED]
        total, old = (sum(counts[name] for counts in struck) for name in ("operations", "old"))
        what = f"killed {total:,} times while writing"
        ours = f"the old dataset {old:,} times, the new one {total - old:,}, never half"
        yield facts_table.Fact(what, ours, "not tested", command.format("kills"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=ROOT / "build/bench.json", help="what make bench wrote")
    parser.add_argument("--only", default="", help="speeds, boundaries or kills")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    facts = []
    with tempfile.TemporaryDirectory() as place:
        for fact in measured(options, Path(place)):
            facts.append(fact)
            print(*dataclasses.astuple(fact), sep="   ", flush=True)
    if options.write:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        made = {fact.command for fact in facts}
        kept = [fact for fact in facts_table.read().facts if fact.command not in made]  # with --only
        facts_table.write(facts_table.Facts(date, version("torch"), version("torchrl"), (*facts, *kept)))


if __name__ == "__main__":
    main()
