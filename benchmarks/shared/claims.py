"""Parts of a benchmark: each measures jobs that take turns, and states what it found next to what is promised."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version

Job = Callable[[], object]
LIBRARIES = ("torch", "tensordict", "torchrl", "cpprb", "numpy", "numba")
ROOT = Path(__file__).parents[2]
PATIENCE = 10_000.0
"""Microseconds that one turn of a job takes, or a single call."""
LONG, FEW = 2e6, 3
"""Where a call takes more microseconds than this, there are so many rounds at most."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio that was found, and what is promised of it: at least `least`, or at most `most`, or nothing.

    `ours` and `theirs` are the medians, in microseconds, that the ratio is of.
    """

    what: str
    found: float
    least: float | None = None
    most: float | None = None
    unit: str = "×"
    ours: float | None = None
    theirs: float | None = None

    @classmethod
    def of(
        cls, what: str, found: dict[str, float], least: float | None = None, peer: str = "TorchRL"
    ) -> Iterator[Claim]:
        """Yield the time of `peer` over that of `ours`; nothing where the peer is not installed."""
        if peer in found:
            yield cls(what, found[peer] / found["ours"], least=least, ours=found["ours"], theirs=found[peer])

    @property
    def kept(self) -> bool:
        """Whether the promise is kept."""
        low = self.least is None or self.found >= self.least
        return low and (self.most is None or self.found <= self.most)

    @property
    def promised(self) -> str:
        """What is promised, as text."""
        bounds = (("≥", self.least), ("≤", self.most))
        return next((f"{sign} {bound:g} {self.unit}" for sign, bound in bounds if bound is not None), "")


Claims = Iterator[Claim]


@dataclass(frozen=True, slots=True)
class Watch:
    """Measures jobs in so many rounds, by the clock of that name."""

    rounds: int
    clock: str = "perf_counter"

    def medians(self, part: str, jobs: dict[str, Job], *, before: Job = lambda: None) -> dict[str, float]:
        """Let the jobs take turns; print and return the median time of a call of each, in microseconds.

        A turn is several calls of a short job. `before` is called before every turn, and is not measured. Nor is the
        release of what the last call returned, or of what a turn left to the collector: buffers of TorchRL that were
        loaded are in cycles, and their 758 MB took 80 ms of the next turn, which was ours.
        """
        calls, rounds = {}, self.rounds
        for name, job in jobs.items():
            before()
            first = self._time_of(job, 1)  # warms it up too: it may order an epoch, or compile loops
            calls[name] = 1
            if first > LONG:
                rounds = min(rounds, FEW)
            else:
                before()
                calls[name] = max(1, int(PATIENCE / max(self._time_of(job, 2 if first < PATIENCE else 1), 1.0)))
        taken: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds):
            for name, job in jobs.items():
                before()
                taken[name].append(self._time_of(job, calls[name]))
                if calls[name] == 1:  # after short ones it would only empty the caches of the processor
                    gc.collect()
        found = {name: statistics.median(times) for name, times in taken.items()}
        for name, median in found.items():
            print(f"{part:36} {name:44} {median:11.1f} µs", flush=True)
        return found

    def _time_of(self, job: Job, calls: int) -> float:
        now = getattr(time, self.clock)
        started = now()
        for _ in range(calls - 1):
            job()
        made = job()
        taken = float(now() - started)
        del made
        return taken / calls * 1e6


Part = Callable[[int, Watch], Claims]


def show(claims: Sequence[Claim]) -> None:
    """Print a table of what was found and what is promised."""
    print()
    for claim in claims:
        verdict = ("kept" if claim.kept else "MISSED") if claim.promised else ""
        print(f"{claim.what:60} {claim.found:8.2f} {claim.unit}   {claim.promised:>9}   {verdict}".rstrip())


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    return {name: version(name) for name in LIBRARIES if find_spec(name) is not None}


def older(found: dict[str, str]) -> list[str]:
    """Name the peer's libraries that are older than those that this repository tests with, the newest at that time."""
    tested = (ROOT / "constraints.txt").read_text() + (ROOT / "Makefile").read_text()
    newest = {name: re.search(rf"\b{name}==([\d.]+)", tested) for name in ("tensordict", "torchrl")}
    return [
        f"{name} {found[name]} is older than {known[1]}, which may be faster: the ratios may flatter rbtool"
        for name, known in newest.items()
        if known is not None and name in found and Version(found[name]) < Version(known[1])
    ]


def document(claims: Sequence[Claim], rows: int) -> str:
    """Write claims as JSON, with what they were measured on."""
    found = [dataclasses.asdict(claim) | {"kept": claim.kept} for claim in claims]
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "rows": rows, "versions": versions()}
    return json.dumps(about | {"claims": found}, indent=1, ensure_ascii=False) + "\n"


def main(doc: str | None, parts: Sequence[Part], *, rows: int = 1_000_000, rounds: int = 15) -> None:
    """Run a script: parse its options, run the parts whose names hold `--only`, show what they claim."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", default="", help=f"parts: {', '.join(part.__name__ for part in parts)}")
    parser.add_argument("--cpu", action="store_true", help="count the time of the processor")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = versions()
    print(", ".join(f"{name} {number}" for name, number in found.items()))
    for warning in older(found):
        print(f"WARNING: {warning}")
    watch = Watch(options.rounds, "process_time" if options.cpu else "perf_counter")
    claims = [claim for part in parts if options.only in part.__name__ for claim in part(options.rows, watch)]
    show(claims)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(document(claims, options.rows))
