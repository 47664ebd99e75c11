"""Time an epoch of a stream from a web server on loopback next to one from the same dataset on this disk.

    python benchmarks/streams.py [--episodes 200] [--rounds 3] [--rate 100] [--latency 0 10 50 200]

The dataset has images of 64 x 64 x 3 bytes. The server waits `--latency` ms before each answer and after each
connection, and sends `--rate` MB per second over all connections (0: no limit). The cache is empty at the start of each
epoch. `--work` adds that many ms of computing without the interpreter lock after each batch, as in a training loop.
Both sides take turns, after an epoch that is not timed. The figures are medians, and the ratio of the speeds, which
should be at least 0.8 if reading is not faster than the network. Memory is the peak of RssAnon and RssShmem minus their
value at the start.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

STEPS = 100
_BLOCK = 256 << 10


class _Handler(BaseHTTPRequestHandler):
    """Serves ranges of files, with a latency and at a limited rate."""

    protocol_version = "HTTP/1.1"
    folder: Path
    rate: float
    latency: Any
    pace = threading.Lock()
    free_at = 0.0

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def setup(self) -> None:
        time.sleep(self.latency.value)
        super().setup()

    def do_GET(self) -> None:
        time.sleep(self.latency.value)
        file = self.folder / unquote(self.path).removeprefix("/dataset/")
        if not file.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = file.stat().st_size
        asked = self.headers.get("Range")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "bytes=0-")
        assert wanted is not None
        first, last = int(wanted[1]), min(int(wanted[2] or size), size - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", f'"{size}"')
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        self.wfile.flush()
        with file.open("rb") as opened:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), opened.fileno(), first, min(_BLOCK, last + 1 - first))
                self._wait(min(_BLOCK, last + 1 - first))

    def _wait(self, size: int) -> None:
        if self.rate:
            with self.pace:
                at = max(time.monotonic(), _Handler.free_at)
                _Handler.free_at = at + size / self.rate
            time.sleep(max(0.0, at - time.monotonic()))


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().server_bind()


def serve(folder: Path, rate: float, latency: Any, port: Any) -> None:
    """Serve a dataset in a process of its own; `latency` are shared seconds."""
    _Handler.folder, _Handler.rate, _Handler.latency = folder, rate, latency
    server = _Server(("127.0.0.1", 0), _Handler)
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


def memory() -> int:
    """Return the anonymous and shared memory of this process in bytes."""
    stated = Path("/proc/self/status").read_text()
    return sum(int(kilobytes) << 10 for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", stated))


def epoch(dataset: str, root: Path, work: float) -> tuple[float, int]:
    """Read all batches; return the seconds, and by how many bytes the memory grew at the peak."""
    import rbtool

    shutil.rmtree(root, ignore_errors=True)
    before = most = memory()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = max(most, memory())

    watching = threading.Thread(target=watch)
    watching.start()
    started = time.perf_counter()
    for _ in rbtool.load_dataset(dataset, 256, streaming=True, seed=0, root=root):
        time.sleep(work)
    seconds = time.perf_counter() - started
    ended.set()
    watching.join()
    return seconds, most - before


def main() -> None:
    """Make the dataset, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("episodes", 200), ("rounds", 3), ("rate", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", type=float, default=0)
    parser.add_argument("--latency", type=int, nargs="+", default=[0, 10, 50, 200])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = make(folder, given.episodes)
        size = sum(file.stat().st_size for file in dataset.rglob("*") if file.is_file())
        print(f"{size / 1e6:.0f} MB, {given.episodes * STEPS:,} steps, {given.rate} MB/s, {given.work:g} ms of work")
        port: Any = multiprocessing.Queue()
        latency: Any = multiprocessing.Value("d", 0.0)
        server = multiprocessing.Process(target=serve, args=(dataset, given.rate * 1e6, latency, port), daemon=True)
        server.start()
        address = f"http://127.0.0.1:{port.get()}/dataset"
        places = {"this disk": (str(dataset), 0)} | {f"{ms} ms": (address, ms) for ms in given.latency}
        found: dict[str, list[tuple[float, int]]] = {place: [] for place in places}
        epoch(str(dataset), folder / "root", 0)
        for _ in range(given.rounds):
            for place, (where, milliseconds) in places.items():
                latency.value = milliseconds / 1000
                found[place].append(epoch(where, folder / "root", given.work / 1000))
        server.terminate()
        for place, times in found.items():
            seconds, local = (statistics.median(one[0] for one in of) for of in (times, found["this disk"]))
            most = max(one[1] for one in times)
            speed = size / 1e6 / seconds
            print(
                f"  {place:10} {seconds:6.2f} s {speed:6.0f} MB/s {local / seconds:6.2f} {most / 1e6:6.0f} MB of memory"
            )


if __name__ == "__main__":
    main()
