"""Time an epoch of a stream from a hub on loopback against one from the same dataset on this disk.

    python benchmarks/streams.py [--episodes 200] [--rounds 3] [--rate 100]

The dataset has images of 64 x 64 x 3 bytes; the server sends `--rate` MB in a second (0: as fast as it can), and the
cache is empty at the start of each epoch. Both sides take turns, after an epoch that is not timed; the figures are
medians, and the ratio of their speeds: at least 0.8 is wanted where reading is not faster than the network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

COMMIT = "0" * 40
STEPS = 100


class _Handler(BaseHTTPRequestHandler):
    """Answers what a stream asks a hub: the commit, the files, and ranges of them."""

    protocol_version = "HTTP/1.1"
    folder: Path
    rate: float
    pace = threading.Lock()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "/revision/" in path:
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT}).encode())
        elif "/tree/" in path:
            files = [one for one in sorted(self.folder.rglob("*")) if one.is_file()]
            self._answer(json.dumps([self._entry(one) for one in files]).encode())
        else:
            self._send_file(self.folder / path.split(f"/resolve/{COMMIT}/")[1])

    def _entry(self, file: Path) -> dict[str, Any]:
        data = file.read_bytes()
        name = sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "path": file.relative_to(self.folder).as_posix(), "size": len(data), "oid": name}

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, file: Path) -> None:
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        first, last = int(wanted[1]), min(int(wanted[2] or size), size - 1)
        self.send_response(206)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        with file.open("rb") as opened:
            opened.seek(first)
            left = last + 1 - first
            while left:
                block = opened.read(min(left, 1 << 20))
                self.wfile.write(block)
                left -= len(block)
                if self.rate:
                    with self.pace:
                        time.sleep(len(block) / self.rate)


def serve(folder: Path, rate: float, port: Any) -> None:
    """Serve a dataset in a process of its own."""
    _Handler.folder, _Handler.rate = folder, rate
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    port.put(server.server_address[1])
    server.serve_forever()


def make(folder: Path, episodes: int) -> Path:
    """Make a dataset of images."""
    import rbtool

    rng, raw = np.random.default_rng(0), folder / "raw"
    raw.mkdir()
    for number in range(episodes):
        flags = np.arange(STEPS + 1) == STEPS
        np.savez(
            raw / f"{number:06d}.npz", image=rng.integers(0, 256, (STEPS + 1, 64, 64, 3), np.uint8),
            action=rng.random((STEPS + 1, 6), np.float32), reward=rng.random(STEPS + 1, np.float32),
            is_first=flags[::-1], is_last=flags, is_terminal=flags, discount=np.ones(STEPS + 1, np.float32),
        )  # fmt: skip
    path = rbtool.convert(raw, folder / "dataset", format="vd4rl").path
    shutil.rmtree(raw)
    return path


def epoch(dataset: str, root: Path) -> float:
    """Take all batches; return the seconds."""
    import rbtool

    shutil.rmtree(root, ignore_errors=True)
    buffer = rbtool.load_dataset(dataset, 256, streaming=True, seed=0, root=root)
    started = time.perf_counter()
    for _ in buffer:
        pass
    return time.perf_counter() - started


def main() -> None:
    """Make the dataset, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("episodes", 200), ("rounds", 3), ("rate", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = make(folder, given.episodes)
        size = sum(file.stat().st_size for file in dataset.rglob("*") if file.is_file())
        port: Any = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve, args=(dataset, given.rate * 1e6, port), daemon=True)
        server.start()
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{port.get()}"
        found: dict[str, list[float]] = {"this disk": [], "hub": []}
        epoch(str(dataset), folder / "root")
        for _ in range(given.rounds):
            found["this disk"].append(epoch(str(dataset), folder / "root"))
            found["hub"].append(epoch("hf://org/name", folder / "root"))
        server.terminate()
    print(f"{size / 1e6:.0f} MB, {given.episodes * STEPS:,} steps, server of {given.rate} MB/s")
    times = {side: statistics.median(one) for side, one in found.items()}
    for side, seconds in times.items():
        print(f"  {side:10} {seconds:6.2f} s  {size / 1e6 / seconds:6.0f} MB/s")
    print(f"  hub / this disk: {times['this disk'] / times['hub']:.2f} of the speed")


if __name__ == "__main__":
    main()
