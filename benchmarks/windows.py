"""Time batches of chunks of 16 actions with one image per row, next to the lerobot package if it is available.

    python benchmarks/windows.py [FOLDER] [--peer PYTHON]    a LeRobot v3.0 dataset with videos; one is made by default

`--peer` is an interpreter with the lerobot package, or a script that runs a file with one. Both sides read shuffled
batches of 32 rows of the same dataset through a loader with 0 and with 2 workers, and take turns; figures are medians
with one torch thread each. The chunks and masks of 64 rows are compared first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot import made  # the benchmark next to this one

import rbtool

_BATCH, _CHUNK, _ROUNDS, _BATCHES, _COMPARED = 32, 16, 5, 8, 64
_PEER = """
import json, sys, time, torch
torch.set_num_threads(1)
from lerobot.datasets.lerobot_dataset import LeRobotDataset
if __name__ == "__main__":
    root, backend, batch, chunk = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    fps = json.load(open(root + "/meta/info.json"))["fps"]
    windows = {"action": [step / fps for step in range(chunk)]}
    data = LeRobotDataset("local/data", root=root, video_backend=backend, delta_timestamps=windows)
    for line in sys.stdin:
        asked = json.loads(line)
        if "rows" in asked:
            items = [data[row] for row in asked["rows"]]
            print(json.dumps([[item["action"].tolist(), item["action_is_pad"].tolist()] for item in items]), flush=True)
            continue
        batches = iter(torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=asked["workers"]))
        next(batches)
        started = time.perf_counter()
        for _ in range(asked["batches"]):
            next(batches)
        print(json.dumps(time.perf_counter() - started), flush=True)
        del batches
"""


class Peer:
    """The lerobot package in a process of its own."""

    def __init__(self, command: list[str], raw: Path, backend: str) -> None:
        self._script = Path(tempfile.mkdtemp()) / "peer.py"
        self._script.write_text(_PEER)
        words = [*command, str(self._script), str(raw), backend, str(_BATCH), str(_CHUNK)]
        self._process = subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **question: Any) -> Any:
        """Send a request, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.terminate()


def compare(dataset: Path, peer: Peer) -> None:
    """Exit with 1 if a chunk or a mask of some anchors differs."""
    buffer = rbtool.load_dataset(dataset, windows={"action": (0, _CHUNK)}, decode_video=False)
    anchors = np.random.default_rng(0).choice(len(buffer), _COMPARED, replace=False)
    batch = buffer[torch.from_numpy(anchors)]
    for row, (values, missing) in enumerate(peer.ask(rows=anchors.tolist())):
        chunk = batch["action"][row].reshape(np.shape(values))
        if batch["is_pad", "action"][row].tolist() != missing or chunk.tolist() != values:
            sys.exit(f"the window of row {anchors[row]} differs")


def timed(batches: Any, workers: int) -> float:
    """Return the seconds that some batches take, after the first one; workers end before the other side starts."""
    loader = iter(rbtool.TorchLoader(batches, num_workers=workers))
    next(loader)
    started = time.perf_counter()
    for _ in range(_BATCHES):
        next(loader)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--peer", type=shlex.split)
    parser.add_argument("--backend", default="pyav")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        raw = given.folder or made(Path(place) / "raw")
        dataset = rbtool.convert(raw, Path(place) / "kept", final_step="repeat").path
        peer = Peer(given.peer, raw, given.backend) if given.peer else None
        if peer is not None:
            compare(dataset, peer)
        batches = rbtool.torch_dataset(dataset, _BATCH, seed=0, windows={"action": (0, _CHUNK)})
        for workers in (0, 2):
            own, ratios = [], []
            for _ in range(_ROUNDS):
                own.append(timed(batches, workers))
                if peer is not None:
                    ratios.append(peer.ask(workers=workers, batches=_BATCHES) / own[-1])
            said = f", {statistics.median(ratios):.1f} x lerobot ({given.backend})" if ratios else ""
            print(f"{workers} workers   {statistics.median(own) / _BATCHES * 1e3:.1f} ms a batch{said}", flush=True)
        if peer is not None:
            peer.close()


if __name__ == "__main__":
    main()
