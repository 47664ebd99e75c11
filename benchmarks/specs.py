"""Time specs next to TorchRL's: rand, is_in, project and encode of every kind.

    python benchmarks/specs.py [--rounds 15] [--only PART]

TorchRL has to be installed in the same environment; without it, only rbtool's times are shown. Everything runs in one
process with one torch thread, and the sides take turns. Figures are medians of the time of one call in microseconds,
for a single value and for a batch of 256; `ratio` is TorchRL's time divided by rbtool's. `--only` runs the specs whose
names contain PART. The last line lists the ratios below their limit: 1, and 1.5 for nested specs.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import rbtool

try:
    import torchrl.data as torchrl
except ImportError:
    torchrl = None

MASK = torch.tensor([True, False, True, True, True])
CALLS = 30

SPECS: dict[str, Callable[[Any], Any]] = {
    "bounded": lambda of: of.Bounded(-1, 1, (17,)),
    "bounded int64": lambda of: of.Bounded(-3, 3, (17,), dtype=torch.int64),
    "unbounded": lambda of: of.Unbounded((17,)),
    "unbounded uint8": lambda of: of.Unbounded((3, 64, 64), dtype=torch.uint8),
    "categorical": lambda of: of.Categorical(5),
    "categorical masked": lambda of: of.Categorical(5, mask=MASK),
    "multi categorical": lambda of: of.MultiCategorical([3, 4, 5]),
    "binary": lambda of: of.Binary(8),
    "one-hot": lambda of: of.OneHot(5),
    "multi one-hot": lambda of: of.MultiOneHot([3, 4, 5]),
    "composite": lambda of: of.Composite(
        observation=of.Bounded(-1, 1, (17,)),
        action=of.Bounded(-1, 1, (6,)),
        next=of.Composite(reward=of.Unbounded((1,)), done=of.Categorical(2, (1,), dtype=torch.bool)),
    ),
}


def outside(name: str, value: Any) -> Callable[[], Any]:
    """Return a function that makes values to project, most of which are outside of the spec."""
    if name == "composite":
        return lambda: value.apply(lambda leaf: leaf.clone() if leaf.dtype is torch.bool else leaf * 5)
    return lambda: torch.ones_like(value) if value.dtype is torch.bool else value * 5


def calls(name: str, of: Any, batch: tuple[int, ...], member: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, of one side; `member` is the value that both sides get."""
    spec = SPECS[name](of)
    array, wild = spec.to_numpy(spec.rand()), outside(name, member)
    timed = {
        "rand": lambda: spec.rand(batch),
        "is_in": lambda: spec.is_in(member),
        "project": lambda: spec.project(wild()),
    }
    return timed if batch else {**timed, "encode": lambda: spec.encode(array)}


def microseconds(call: Callable[[], Any]) -> float:
    """Return the mean time of several calls."""
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def rows(only: str, rounds: int) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield spec, batch, call, and the medians of both sides; NaN for a peer that is absent or fails."""
    for name in (name for name in SPECS if only in name):
        for batch in ((), (256,)):
            member = SPECS[name](rbtool).rand(batch)
            ours = calls(name, rbtool, batch, member)
            theirs = calls(name, torchrl, batch, member) if torchrl else {}
            for call, function in ours.items():
                sides = [function, *([theirs[call]] if call in theirs else [])]
                try:
                    times = [[microseconds(side) for side in sides] for _ in range(rounds)]
                except (RuntimeError, IndexError):  # masked categories out of range cannot be projected by the peer
                    times = [[microseconds(function)] for _ in range(rounds)]
                found = [statistics.median(column) for column in zip(*times, strict=True)]
                yield name, str(list(batch)), call, found[0], found[1] if len(found) > 1 else float("nan")


def main() -> None:
    """Print a line for each spec, batch and call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    below = []
    print(f"{'spec':20s} {'batch':8s} {'call':8s} {'ours':>10s} {'peer':>10s} {'ratio':>7s}")
    for name, batch, call, ours, theirs in rows(options.only, options.rounds):
        ratio = theirs / ours
        print(f"{name:20s} {batch:8s} {call:8s} {ours:10.1f} {theirs:10.1f} {ratio:7.2f}", flush=True)
        if ratio < (1.5 if name == "composite" else 1):
            below.append(f"{name} {batch} {call} {ratio:.2f}")
    print("below what is promised: " + (", ".join(below) or "none"))


if __name__ == "__main__":
    main()
