"""Compare the parsing of TFRecords of Examples with the PyPI package tfrecord, and conversion with and without workers.

    pip install tfrecord
    python benchmarks/rlds.py [--rounds 9] [--workers 2] [--episodes 40] [--layout packed]
                              [--folder DIR] [--limit 1.4]

Four files are parsed: `images`, episodes of 10 steps with four JPEG files of 3 kB and an embedding of 512 floats each;
`long` and `short`, episodes of 1,000 and of 50 steps of 25 floats and three flags; `integers`, records of 30,000
integers. Both sides return all values of all lists, as arrays and byte strings. rbtool compares both checksums of every
record, tfrecord none; the second ratio leaves out the time of the checksums. Rounds are interleaved; the figures are
medians and minima in microseconds per record. Exits with 1 if rbtool is less than `--limit` times as fast for one of
the files, judged by the minima, because medians scatter on a busy machine. The compiled loops are imported first, which
takes 0.4 s, and 2 s the first time; the reader uses them for 512 MiB of records and more.

Measured: 1.6 (`images`), 2.1 (`long`), 2.6 to 2.9 (`short`) and 4.2 (`integers`) times as fast; without checksums 1.9
to 2.1, 3.3 to 3.5, 2.7 to 3.1 and 4.4 times. A factor of three is out of reach for two files. It would leave 17
microseconds for an image record, but reading takes 3, the checksum 5, and creating its 50 byte strings, which are
Python objects, 10. It would leave 12 microseconds for a long record, but reading it and comparing its checksum takes 7
in a bare loop, finding the lists 1.4, and creating 8 arrays 4. These do not help an image record (in microseconds): a
memory map (8.9 to 9.7 for reading and checksum, 9.2 without a map), the processor's CRC-32C instruction in three
streams (4.6 instead of 4.8 by the library), and a second thread that reads and compares, because the library holds the
interpreter lock. Views instead of byte strings save 4, but image decoders then copy them.

The CPU time for 10,000 images shows what is possible on two cores. One process takes 2.4 s. In layout `ted`, two
workers and this process together take 2.4 s, 0.2 s of it in this process. In layout `packed` they take 3.7 s, 1.1 s of
it in this process, which copies the rows of all workers in order.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import rbtool
from rbtool.converters.rlds.example import ExampleParser, Strings, example_bytes, framed
from rbtool.converters.rlds.shards import TfRecordShard, masked_crc

DRAW = np.random.default_rng(0)
FLOAT, WHOLE = np.dtype(np.float32), np.dtype(np.int64)


def jpeg(size: int) -> bytes:
    held = io.BytesIO()
    Image.fromarray(DRAW.integers(0, 256, (size, size, 3), np.uint8)).save(held, "JPEG")
    return held.getvalue()


def episode(steps: int, features: Mapping[str, Any]) -> bytes:
    marks = np.arange(steps)
    flags = {"is_first": marks == 0, "is_last": marks == steps - 1, "is_terminal": marks < 0}
    lists = {**flags, "reward": np.ones(steps, np.float32), "discount": np.ones(steps, np.float32), **features}
    return example_bytes({f"steps/{name}": values for name, values in lists.items()})


def numbers(steps: int) -> bytes:
    observation, action = (DRAW.normal(size=width * steps).astype(np.float32) for width in (17, 6))
    return episode(steps, {"observation": observation, "action": action})


def images() -> bytes:
    frame, embedding = jpeg(64), DRAW.normal(size=5120).astype(np.float32)
    cameras = {f"observation/image_{number}": [frame] * 10 for number in range(4)}
    return episode(10, {**cameras, "language_embedding": embedding, "language_instruction": [b"put it there"] * 10})


def write(path: Path, records: list[bytes]) -> Path:
    path.write_bytes(b"".join(bytes(part) for record in records for part in framed(record)))
    return path


def parse(path: Path) -> int:
    """Take all values out of all records; return how many lists there are."""
    count, parser = 0, ExampleParser(is_compiled=True)
    with TfRecordShard(path) as shard:
        for _, data in shard.records():
            assert isinstance(data, bytes)
            record = parser.parse(data)
            made = {}
            for name in record.names:
                values = record.get(name)
                if values is not None:
                    made[name] = values.read(0, len(values)) if isinstance(values, Strings) else values.values
            count += len(made)
    return count


def checksums(path: Path) -> float:
    """Return the least seconds that comparing the checksums of a file takes."""
    with TfRecordShard(path) as shard:
        held = [data for _, data in shard.records() if isinstance(data, bytes)]
    return min(seconds(lambda: [masked_crc(data) for data in held]) for _ in range(5))


def parse_with_tfrecord(path: Path) -> int:
    from tfrecord.reader import tfrecord_loader

    return sum(map(len, tfrecord_loader(str(path), None, None)))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare_parsers(folder: Path, rounds: int) -> float:
    """Print the figures of each file; return the least ratio of the minima."""
    files = {
        "images": write(folder / "images", [images() for _ in range(100)]),
        "long": write(folder / "long", [numbers(1000) for _ in range(200)]),
        "short": write(folder / "short", [numbers(50) for _ in range(1000)]),
        "integers": write(folder / "integers", [episode(100, {"pixels": DRAW.integers(0, 256, 30_000)})] * 50),
    }
    counts, least = {"images": 100, "long": 200, "short": 1000, "integers": 50}, float("inf")
    for name, path in files.items():
        assert parse(path) == parse_with_tfrecord(path)
        found: list[tuple[float, float]] = [
            (seconds(lambda path=path: parse(path)), seconds(lambda path=path: parse_with_tfrecord(path)))  # type: ignore[misc]
            for _ in range(rounds)
        ]
        ours, other = ([took[side] * 1e6 / counts[name] for took in found] for side in (0, 1))
        ratio, parsing = min(other) / min(ours), min(ours) - checksums(path) * 1e6 / counts[name]
        least = min(least, ratio)
        print(
            f"  {name:10} rbtool {statistics.median(ours):7.1f} ({min(ours):6.1f})   tfrecord "
            f"{statistics.median(other):7.1f} ({min(other):6.1f})   {ratio:.2f} times as fast, "
            f"{min(other) / parsing:.2f} without checksums"
        )
    return least


def make_images(folder: Path, episodes: int) -> Path:
    """Write episodes of 100 JPEG files of 128 x 128 in two shards; return their folder."""
    source, frame = folder / "1.0.0", jpeg(128)
    source.mkdir()
    records = [
        episode(100, {"observation/image": [frame] * 100, "action": DRAW.normal(size=300).astype(np.float32)})
        for _ in range(min(40, episodes))
    ]
    for shard in range(2):
        name = source / f"toy-train.tfrecord-{shard:05}-of-00002"
        write(name, [records[number % len(records)] for number in range(shard, episodes, 2)])
    (source / "features.json").write_text(_FEATURES)
    return source


def compare_workers(folder: Path, episodes: int, layout: str, rounds: int, workers: int) -> None:
    """Print how long a conversion of JPEG images takes, in this process and by workers."""
    source = make_images(folder, episodes)
    took: dict[int, list[float]] = {0: [], workers: []}
    for _ in range(rounds):
        for count in took:
            took[count].append(
                seconds(lambda count=count: rbtool.convert(source, folder / "out", layout=layout, num_workers=count))  # type: ignore[misc]
            )
            shutil.rmtree(folder / "out")
    one, several = (statistics.median(times) for times in took.values())
    images, ratio = 100 * episodes, one / several
    print(f"  {images:,} images, one process {one:.2f} s, {workers} {several:.2f} s: {ratio:.2f} times as fast")


def _tensor(dtype: str, size: str = "") -> str:
    shape = f'{{"dimensions": ["{size}"]}}' if size else "{}"
    return f'{{"pythonClassName": "T", "tensor": {{"shape": {shape}, "dtype": "{dtype}", "encoding": "none"}}}}'


def _features(parts: Mapping[str, str]) -> str:
    inner = ", ".join(f'"{name}": {part}' for name, part in parts.items())
    return f'{{"pythonClassName": "F", "featuresDict": {{"features": {{{inner}}}}}}}'


_IMAGE = '{"pythonClassName": "I", "image": {"shape": {"dimensions": ["128", "128", "3"]}, "encodingFormat": "jpeg"}}'
_STEP = _features(
    {
        **dict.fromkeys(("is_first", "is_last", "is_terminal"), _tensor("bool")),
        **dict.fromkeys(("reward", "discount"), _tensor("float32")),
        "action": _tensor("float32", "3"),
        "observation": _features({"image": _IMAGE}),
    }
)
_FEATURES = _features({"steps": f'{{"pythonClassName": "D", "sequence": {{"feature": {_STEP}, "length": "-1"}}}}'})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--episodes", type=int, default=40, help="of 100 images each, converted with workers and without"
    )
    parser.add_argument("--layout", choices=("ted", "packed"), default="packed", help="of what is converted")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--limit", type=float, default=1.4)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        least = chosen.limit
        if importlib.util.find_spec("tfrecord") is None:
            print("parsing is not compared: pip install tfrecord")
        else:
            print(f"microseconds a record, median (minimum) of {chosen.rounds} rounds")
            least = compare_parsers(Path(scratch), chosen.rounds)
        compare_workers(Path(scratch), chosen.episodes, chosen.layout, min(3, chosen.rounds), chosen.workers)
    return int(least < chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
