"""Time maps from tensordicts to tensordicts next to TorchRL's, in turns.

    python benchmarks/maps.py [--rounds 15] [--entries 4096 1000000] [--peer-python PYTHON]

TorchRL has to be installed in the same environment, or in that of PYTHON, which then runs TorchRL's part. In each round
the two sides run one after the other, with one torch thread each. The figures are medians of the time of one call in
microseconds; a call sets or gets 4,096 rows, with existing keys unless the row says "new". The last column is the ratio
to TorchRL. A key is a state of 8 float32 and an action, int64; a value is a next state, a reward and a flag.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from tensordict import TensorDict

ROWS = 4096


def keys(numbers: torch.Tensor) -> TensorDict:
    state = torch.stack([numbers % (7 + place) + numbers / 1e6 for place in range(8)], -1).float()
    return TensorDict(state=state, action=numbers, batch_size=len(numbers))


def values(numbers: torch.Tensor) -> TensorDict:
    numbers = numbers.float()
    following = {
        "state": numbers[:, None].expand(-1, 8).clone(),
        "reward": numbers[:, None],
        "done": numbers[:, None] > 0,
    }
    return TensorDict(next=TensorDict(following, batch_size=len(numbers)), batch_size=len(numbers))


class Side:
    """A map of one of the libraries with so many entries, and calls of it."""

    def __init__(self, library: Any, entries: int) -> None:
        room = entries + 40 * ROWS
        self.map = library.TensorDictMap.from_tensordict_pair(
            keys(torch.arange(1)),
            values(torch.arange(1)),
            in_keys=["state", "action"],
            max_size=room,
            hash_module=library.SipHash(),
        )
        for start in range(0, entries, ROWS):
            numbers = torch.arange(start, min(start + ROWS, entries))
            self.map[keys(numbers)] = values(numbers)
        self.entries = self.next = entries
        self.generator = torch.Generator().manual_seed(0)

    def times(self) -> dict[str, float]:
        """Time each call once, in microseconds."""
        chosen = torch.randperm(self.entries, generator=self.generator)[:ROWS]
        later = torch.arange(self.next, self.next + ROWS)
        known, replaced, new, fresh = keys(chosen), values(chosen), keys(later), values(later)
        self.next += ROWS
        taken = {}
        for name, key, value in (("set new", new, fresh), ("set", known, replaced), ("get", known, None)):
            started = time.perf_counter()
            if value is None:
                found = self.map[key]
            else:
                self.map[key] = value
            taken[name] = (time.perf_counter() - started) * 1e6
        assert (found["next", "reward"] == replaced["next", "reward"]).all()
        return taken


def serve(entries: int) -> None:
    """Run one round of TorchRL for every line on stdin, and print its times."""
    import torchrl.data

    torch.set_num_threads(1)
    side = Side(torchrl.data, entries)
    print("ready", file=sys.stderr, flush=True)
    for _ in sys.stdin:
        print("times " + json.dumps(side.times()), flush=True)


class Peer:
    """TorchRL's side, in a process of its own."""

    def __init__(self, python: str, entries: int) -> None:
        command = [python, __file__, "--serve", str(entries)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while (line := self.process.stderr.readline()) != "ready\n":  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"{python} has no TorchRL that can be imported")

    def times(self) -> dict[str, float]:
        self.process.stdin.write("\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        for line in self.process.stdout:  # type: ignore[union-attr]
            if line.startswith("times "):
                found: dict[str, float] = json.loads(line.removeprefix("times "))
                return found
        raise SystemExit("TorchRL's side ended")

    def close(self) -> None:
        self.process.communicate()


def compare(entries: int, rounds: int, python: str) -> None:
    import rbtool

    ours, peer = Side(rbtool, entries), Peer(python, entries)
    taken: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 2):
        here, there = ours.times(), peer.times()
        for name in here if number > 1 else ():
            taken.setdefault(name, []).append((here[name], there[name]))
    peer.close()
    for name, pairs in taken.items():
        here, there = (statistics.median(times) for times in zip(*pairs, strict=True))
        kept = "kept" if there / here >= 3 else "MISSED"
        what = f"{name}, {entries:,} entries"
        print(f"{what:32} ours {here:9.0f} µs  TorchRL {there:9.0f} µs  {there / here:6.1f} ×  promised ≥ 3 ×  {kept}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--entries", type=int, nargs="+", default=[ROWS, 1_000_000])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    torch.set_num_threads(1)
    for entries in options.entries:
        compare(entries, options.rounds, options.peer_python)


if __name__ == "__main__":
    main()
