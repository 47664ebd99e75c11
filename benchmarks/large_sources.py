"""Measure the memory that conversions of large datasets take: 5 GB of each source that can be larger than memory.

    python benchmarks/large_sources.py [--gigabytes 5] [--workers 0] [--only openx,rlds] [--folder DIR] [--limit 400]

Each dataset repeats a few parts, so that generating it takes only a minute; `--gigabytes` counts decoded pixels. Memory
is the peak, over the converting process and its children, of the memory that is not backed by files (RssAnon and
RssShmem), minus the memory of a process with the same imports; in MiB, sampled 50 times a second. Exits with 1 if it is
more than `--limit`.
"""

from __future__ import annotations

import argparse
import io
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import atari
import lerobot
import numpy as np
import openx
import rlds

IDLE = "import rbtool.core.verbs.convert, rbtool.core.verbs.convert, time; time.sleep(60)"
CONVERT = """
import sys, rbtool
made = rbtool.convert(sys.argv[1], sys.argv[2], num_workers=int(sys.argv[3]), final_step="repeat", **eval(sys.argv[4]))
print(made.steps, made.bytes)
"""
TRUST = "dict(trust_pickle=True)"


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def make_openx(folder: Path, size: float) -> Path:
    """Episodes of 50 JPEG files of 256 x 256."""
    data, count = pickle.dumps(openx.episode(0, "JPEG", 256)), int(size / (50 * 256 * 256 * 3))
    (folder / "robots").mkdir()
    for first in range(0, count, 100):
        with tarfile.open(folder / "robots" / f"robots_{first // 100:05}.tar", "w") as archive:
            for number in range(first, min(count, first + 100)):
                add(archive, f"robots_{number:05}.data.pickle", data)
    return folder / "robots"


def make_rlds(folder: Path, size: float) -> Path:
    """Episodes of 100 JPEG files of 128 x 128."""
    return rlds.make_images(folder, int(size / (100 * 128 * 128 * 3)))


def make_lerobot(folder: Path, size: float) -> Path:
    """One video of all episodes, each of 200 frames of 240 x 320."""
    return lerobot.made(folder / "lerobot", int(size / (200 * 240 * 320 * 3)))


def make_dgrl(folder: Path, size: float) -> Path:
    """Episodes of 500 steps of 3 x 64 x 64 pixels."""
    draw, steps = np.random.default_rng(0), 500
    content = {
        "observations": draw.integers(0, 256, (steps + 1, 3, 64, 64), np.uint8),
        "actions": draw.integers(0, 15, (steps, 1)), "rewards": np.ones((steps, 1), "f4"),
        "dones": (np.arange(steps) == steps - 1).astype("f4"),
    }  # fmt: skip
    held = io.BytesIO()
    np.save(held, np.array(content, object), allow_pickle=True)
    with tarfile.open(folder / "bigfish.tar", "w") as archive:
        for number in range(int(size / (steps * 3 * 64 * 64))):
            add(archive, f"bigfish/20230329T{number:06d}_{number}_{steps}_{number + 7}_1.0.npy", held.getvalue())
    return folder / "bigfish.tar"


def make_atari(folder: Path, size: float) -> Path:
    """Checkpoints of 84 x 84 frames, those after the second with the same rows."""
    logs, count = folder / "Pong" / "1" / "replay_logs", 10
    rows = int(size / (count * 84 * 84))
    logs.parent.mkdir(parents=True)
    atari.build(logs, rows)
    for number in range(2, count):
        for path in logs.glob("*_ckpt.1.gz"):
            shutil.copy(path, path.with_name(path.name.replace("_ckpt.1.", f"_ckpt.{number}.")))
        atari.save(logs / f"add_count_ckpt.{number}.gz", (number + 1) * rows)
    return logs.parent


SOURCES: dict[str, tuple[Callable[[Path, float], Path], str]] = {
    "openx": (make_openx, TRUST), "rlds": (make_rlds, "{}"), "lerobot": (make_lerobot, 'dict(images="decode")'),
    "gen_dgrl": (make_dgrl, TRUST), "atari": (make_atari, "{}"),
}  # fmt: skip


def processes_below(number: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield number
    for task in Path(f"/proc/{number}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from processes_below(int(child))


def memory(number: int) -> float:
    """Return the memory of a process and its descendants that is not backed by files, in MiB."""
    found = 0
    try:
        for one in processes_below(number):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    except (OSError, ProcessLookupError):
        pass  # one ended while it was looked at
    return found / 1024


def idle() -> float:
    with subprocess.Popen([sys.executable, "-c", IDLE]) as process:
        time.sleep(10)
        found = memory(process.pid)
        process.kill()
    return found


def measured(source: Path, target: Path, workers: int, options: str) -> tuple[float, float, str]:
    """Convert; return the peak memory, the seconds, and the result."""
    words = [sys.executable, "-c", CONVERT, str(source), str(target), str(workers), options]
    started, most = time.perf_counter(), 0.0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, memory(process.pid))
            time.sleep(0.02)
        assert process.stdout is not None
        said = process.stdout.read().strip()
    assert process.returncode == 0
    return most, time.perf_counter() - started, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--only", default=",".join(SOURCES))
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=400)
    chosen = parser.parse_args()
    before, worst = idle(), 0.0
    print(f"memory in MiB above the {before:,.0f} of an idle process")
    for name in chosen.only.split(","):
        make, options = SOURCES[name]
        with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
            source = make(Path(scratch), chosen.gigabytes * 1e9)
            most, took, said = measured(source, Path(scratch) / "out", chosen.workers, options)
            shutil.rmtree(Path(scratch) / "out")
        steps, size = map(int, said.split())
        worst = max(worst, most - before)
        print(
            f"  {name:9} {most - before:6,.0f}   {steps:,} steps, {size / 1e9:.1f} GB written in {took:,.0f} s",
            flush=True,
        )
    return int(worst > chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
