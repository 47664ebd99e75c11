"""Time `rbtool.convert` on a robot log (MCAP, CDR) next to a plain loop over mcap's reader that keeps the same values.

    python benchmarks/logs.py [--gigabytes 2] [--episodes 8] [--rounds 3] [--folder DIR] [--limit 1.0]

The log has joints and commands at 200 Hz, raw pictures of 320 x 240 at 30 Hz, and a laser topic that is not mapped. The
plain loop decodes with mcap-ros2-support, holds the latest values at 30 steps per second and writes them to one file.
Rounds are interleaved: the plain loop, the same with an fsync at its end, our reader alone (which verifies checksums
and writes nothing), and conversions with one process and with two, which also write digests and wait for the disk.

Prints medians in seconds; `waits`, the part of it that a conversion waits for the disk at its end; `ratios`, the
speed-up over the plain loop; `synced`, the speed-up over the loop with an fsync; `unsynced`, the ratios without the
waits; the CPU time including child processes, and the peak memory of this process. Exits with 1 if a ratio of a
conversion is below its limit: `--limit` with one process, 1.6 times that with two.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from mcap.reader import make_reader
from mcap.writer import Writer
from mcap_ros2.decoder import DecoderFactory
from rosbags.typesys import Stores, get_typestore

import rbtool
from rbtool.converters.logs.reader import LogReader
from rbtool.core.format import fs

NS = 10**9
HEIGHT, WIDTH, FPS, RATE = 240, 320, 30, 200
MAP = {
    "observation.state": "/joint_states.position",
    "action": "/command.data",
    "observation.image": "/camera/image_raw",
}


def build(path: Path, size: int, episodes: int) -> int:
    """Write a log of about `size` bytes, with 5 s of silence between episodes; return its duration in seconds."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    draw = np.random.default_rng(0)
    kinds = store.types
    layout = kinds["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
    names = [f"joint_{number}" for number in range(7)]
    noise = draw.integers(0, 256, (8, HEIGHT * WIDTH * 3), dtype=np.uint8)
    seconds = max(1, round(size / episodes / (FPS * HEIGHT * WIDTH * 3)))

    def header(at: int) -> Any:
        stamp = kinds["builtin_interfaces/msg/Time"](sec=at // NS, nanosec=at % NS)
        return kinds["std_msgs/msg/Header"](stamp=stamp, frame_id="base")

    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="benchmark")
        channels = {}
        for topic, kind in (
            ("/joint_states", "sensor_msgs/msg/JointState"), ("/command", "std_msgs/msg/Float64MultiArray"),
            ("/camera/image_raw", "sensor_msgs/msg/Image"), ("/scan", "std_msgs/msg/Float64MultiArray"),
        ):  # fmt: skip
            text, _ = store.generate_msgdef(kind, ros_version=2)
            schema = writer.register_schema(kind, "ros2msg", text.encode())
            channels[topic] = kind, writer.register_channel(topic, "cdr", schema)

        def add(topic: str, at: int, message: Any) -> None:
            kind, channel = channels[topic]
            writer.add_message(channel, at, bytes(store.serialize_cdr(message, kind)), at)

        values = draw.normal(size=(1024, 7))
        for episode in range(episodes):
            begin = 1_700_000_000 * NS + episode * (seconds + 5) * NS
            for tick in range(seconds * RATE):
                at = begin + tick * NS // RATE
                row = values[tick % 1024]
                none = np.zeros(0)
                joints = kinds["sensor_msgs/msg/JointState"](
                    header=header(at), name=names, position=row, velocity=none, effort=none
                )
                add("/joint_states", at, joints)
                add("/command", at + 1000, kinds["std_msgs/msg/Float64MultiArray"](layout=layout, data=row))
                if tick * FPS // RATE != (tick - 1) * FPS // RATE:
                    picture = kinds["sensor_msgs/msg/Image"](
                        header=header(at), height=HEIGHT, width=WIDTH, encoding="rgb8", is_bigendian=0, step=WIDTH * 3,
                        data=noise[tick % 8],
                    )  # fmt: skip
                    add("/camera/image_raw", at + 2000, picture)
                if tick % 10 == 0:
                    scan = kinds["std_msgs/msg/Float64MultiArray"](layout=layout, data=np.tile(row, 100))
                    add("/scan", at + 3000, scan)
        writer.finish()
    return seconds * episodes


class Waits:
    """Measures how long this process waits for fsync; overlapping calls count once."""

    def __init__(self) -> None:
        self.seconds = self._since = 0.0
        self._open: set[tuple[int, str]] = set()
        self._lock = threading.Lock()
        sys.addaudithook(self._take)

    def _take(self, event: str, given: tuple[Any, ...]) -> None:
        if event != "rbtool.fs" or given[0] != "fsync":
            return
        now, call = time.perf_counter(), (threading.get_ident(), given[1])
        with self._lock:
            if not self._open:
                self._since = now
            self._open ^= {call}
            if not self._open:
                self.seconds += now - self._since


def read_plainly(source: Path, target: Path, *, synced: bool) -> float:
    """Decode the topics with mcap's reader, and write the latest values at each step; return the seconds."""
    started = time.perf_counter()
    topics = {text.partition(".")[0]: key for key, text in MAP.items()}
    newest: dict[str, Any] = {}
    step = 0
    with source.open("rb") as file, fs.created(target) as made:
        reader = make_reader(file, decoder_factories=[DecoderFactory()])
        for _, channel, message, decoded in reader.iter_decoded_messages(topics=list(topics)):
            if message.log_time >= step and len(newest) == len(topics):
                for topic, one in newest.items():
                    field = one.position if topic == "/joint_states" else one.data
                    made.write(field if isinstance(field, bytes) else np.asarray(field).tobytes())
                step = message.log_time + NS // FPS
            newest[channel.topic] = decoded
        if synced:
            made.flush()
            fs.fsync(made.fileno(), target)
    return time.perf_counter() - started


def convert(source: Path, target: Path, workers: int) -> float:
    """Convert the log; return the seconds."""
    started = time.perf_counter()
    rbtool.convert(source, target, map=MAP, fps=float(FPS), episodes_by="gap:2s", layout="packed", num_workers=workers)
    return time.perf_counter() - started


def read(source: Path) -> float:
    """Read the aligned steps without writing them; return the seconds."""
    started = time.perf_counter()
    pairs = [f"{key}={text}" for key, text in MAP.items()]
    with LogReader(source, options={"map": pairs, "fps": float(FPS), "episodes_by": "gap:2s"}) as reader:
        for _ in reader.pieces():
            pass
    return time.perf_counter() - started


def processor_seconds() -> float:
    """Return the CPU time so far, of this process and of children that have ended, in seconds."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--limit", type=float, default=1.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        seconds = build(folder / "run.mcap", round(asked.gigabytes * 1e9), asked.episodes)
        plain, synced, alone = "plain loop", "plain loop, synced", "reader alone"
        workers = {"one process": 0, "two processes": 2}
        names = (plain, synced, alone, *workers)
        found: dict[str, list[float]] = {name: [] for name in names}
        waited: dict[str, list[float]] = {name: [] for name in (synced, *workers)}
        processor = dict.fromkeys(names, 0.0)
        waits = Waits()
        convert(folder / "run.mcap", folder / "made", 0)  # what is compiled and imported is not timed
        shutil.rmtree(folder / "made")
        for _ in range(asked.rounds):
            for what in names:
                before, waits.seconds = processor_seconds(), 0.0
                if what in (plain, synced):
                    found[what].append(read_plainly(folder / "run.mcap", folder / "plain", synced=what == synced))
                    (folder / "plain").unlink()  # before the system writes it while others are timed
                elif what == alone:
                    found[what].append(read(folder / "run.mcap"))
                else:
                    found[what].append(convert(folder / "run.mcap", folder / "made", workers[what]))
                    shutil.rmtree(folder / "made")
                processor[what] += (processor_seconds() - before) / asked.rounds
                if what in waited:
                    waited[what].append(waits.seconds)
        size = (folder / "run.mcap").stat().st_size
    medians = {what: statistics.median(times) for what, times in found.items()}
    waiting = {what: statistics.median(times) for what, times in waited.items()}
    ratios = {what: medians[plain] / medians[what] for what in (alone, *workers)}
    about = {
        "bytes": size, "seconds of log": seconds, "medians": medians, "waits": waiting, "ratios": ratios,
        "synced": {what: medians[synced] / medians[what] for what in workers},
        "unsynced": {what: medians[plain] / (medians[what] - waiting[what]) for what in workers},
        "processor": processor, "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip
    print(json.dumps(about, indent=1))
    return int(ratios["one process"] < asked.limit or ratios["two processes"] < 1.6 * asked.limit)


if __name__ == "__main__":
    sys.exit(main())
