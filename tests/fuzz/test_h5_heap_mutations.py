"""HDF5 files whose heaps of text are damaged: reading one takes bounded time and memory, whatever the reader."""

from __future__ import annotations

import mmap
import os
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from damage import LONGEST
from demonstration_files import robomimic_demo, roboset_trial
from waiting import HANG

from rbtool.converters.d3rlpy.reader import D3rlpyReader
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.converters.minari.reader import MinariReader
from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.converters.roboset.reader import RobosetReader
from rbtool.converters.table.reader import TableReader, overview
from rbtool.converters.tianshou.reader import TianshouReader
from rbtool.core.errors import RbtoolError
from rbtool.core.format.converter import Reader
from rbtool.core.format.files import understood

DATA = Path(__file__).parents[1] / "data"
MOST_MEMORY = 600 << 20
TEXT = {f"note{number}": f"text {number} " * number for number in range(1, 13)}
TABLE = {"map": ["observation=x", "action=x", "reward=r"], "ends": "last", "episode_key": "said"}


def robomimic(path: Path, **how: Any) -> None:
    with h5py.File(path, "w", **how) as file:
        data = file.create_group("data")
        data.attrs["env_args"] = '{"env_name": "Lift", "kind": [1, 2]}'
        for number in range(2):
            group = data.create_group(f"demo_{number}")
            group.attrs.update({"num_samples": 3, "model_file": "<model>" * (600 + number), **TEXT})
            for column, values in robomimic_demo(3, seed=number).columns.items():
                group[column] = values
        file["mask/train"] = np.array(["demo_0", "demo_1"], h5py.string_dtype())


def roboset(path: Path, **how: Any) -> None:
    with h5py.File(path, "w", **how) as file:
        for number in range(2):
            group = file.create_group(f"Trial{number}")
            group.attrs.update({"user": "somebody", "words": np.array(["a", "bc"], h5py.string_dtype()), **TEXT})
            for column, values in roboset_trial(3, seed=number).columns.items():
                group[column] = values


def d4rl(path: Path, **how: Any) -> None:
    with h5py.File(path, "w", **how) as file:
        file.attrs.update(TEXT)
        for name in ("observations", "actions", "next_observations"):
            file[name] = np.arange(12.0).reshape(6, 2)
        file["rewards"], file["terminals"] = np.arange(6.0), np.arange(6) % 3 == 2
        file["timeouts"] = np.zeros(6, bool)
        file["metadata/algorithm"], file["metadata/words"] = "SAC", ["a", "bc", "def"]
        file.create_dataset("metadata/empty", (2,), h5py.string_dtype(), fillvalue="nothing")


def table(path: Path, **how: Any) -> None:
    with h5py.File(path, "w", **how) as file:
        file["x"], file["r"] = np.arange(12.0).reshape(6, 2), np.arange(6.0)
        file["last"] = np.arange(6) % 3 == 2
        file["said"] = [f"word {number}" * 9 for number in (1, 1, 1, 2, 2, 2)]
        file.create_dataset("chunked", data=["a", "bc"] * 3, dtype=h5py.string_dtype(), chunks=(2,))


def sample(source: str) -> Callable[..., None]:
    def copy(path: Path) -> None:
        shutil.copyfile(DATA / source, path)

    return copy


EARLIEST, LATEST = {"libver": "earliest"}, {"libver": "latest", "track_order": True}
FILES: dict[str, tuple[type[Reader], Callable[..., None], dict[str, Any], dict[str, Any]]] = {
    "robomimic": (RobomimicReader, robomimic, EARLIEST, {}),
    "robomimic-latest": (RobomimicReader, robomimic, LATEST, {}),
    "roboset": (RobosetReader, roboset, EARLIEST, {}),
    "roboset-latest": (RobosetReader, roboset, LATEST, {}),
    "d4rl": (D4rlReader, d4rl, EARLIEST, {}),
    "d4rl-latest": (D4rlReader, d4rl, LATEST, {}),
    "table": (TableReader, table, EARLIEST, TABLE),
    "table-latest": (TableReader, table, LATEST, TABLE),
    "d3rlpy": (D3rlpyReader, sample("d3rlpy/vector.h5"), {}, {}),
    "tianshou": (TianshouReader, sample("tianshou/objects.hdf5"), {}, {}),
    "low_dim": (RobomimicReader, sample("robomimic/low_dim_v15.hdf5"), {}, {}),
    "isaac": (RobomimicReader, sample("robomimic/isaac_stack_cube.hdf5"), {}, {}),
}  # fmt: skip
MINARI = DATA / "minari" / "griddict" / "random-infos-v0"


def heaps(data: bytes) -> Iterator[int]:
    at = -1
    while (at := data.find(b"GCOL", at + 1)) >= 0:
        yield at


def sizes_and_numbers(data: bytes) -> Iterator[int]:
    """Yield the bytes of each heap that are not text: its head, and that of each object."""
    for heap in heaps(data):
        size, place = struct.unpack_from("<Q", data, heap + 8)[0], 16
        yield from range(heap, heap + 16)
        while place + 16 <= size:
            number, length = struct.unpack_from("<H6xQ", data, heap + place)
            yield from range(heap + place, heap + place + 16)
            place += 16 + -(-length // 8) * 8 if number else length


def references(data: bytes) -> Iterator[int]:
    """Yield the bytes of what leads to a heap: the length of a text, the place of its heap and its number there."""
    for heap in heaps(data):
        at = -1
        while (at := data.find(struct.pack("<Q", heap), at + 1)) >= 0:
            yield from range(max(0, at - 4), at + 12)


def damaged(data: bytes, count: int | None) -> list[tuple[int, int]]:
    """Choose places and bytes to put there: all of them where `count` is None."""
    found = [
        (at, byte)
        for at in dict.fromkeys([*sizes_and_numbers(data), *references(data)])
        for byte in {0, 255, data[at] ^ 1, data[at] ^ 128} - {data[at]}
    ]
    return found if count is None else random.Random(count).sample(found, min(count, len(found)))


def read_all(kind: type[Reader], path: Path, options: dict[str, Any]) -> None:
    if kind is TableReader:
        with understood(path):
            overview(path)
    if kind.recognises(path) or kind is TableReader:
        with kind(path, options=options) as reader:
            assert sum(map(len, reader.pieces())) == reader.facts().steps


def in_a_process(task: Callable[[mmap.mmap], None]) -> None:
    """Run a task in a process that ends: a call of libhdf5 that does not cannot be interrupted."""
    reached = mmap.mmap(-1, 8)
    child = os.fork()
    if not child:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # that of the parent, in kilobytes
            task(reached)
            os._exit(0 if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY >> 10 else 3)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    last, since, had = b"", time.monotonic(), 0.0
    process = psutil.Process(child)
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        times = process.cpu_times()  # an ended process has them until it is waited for
        used = times.user + times.system
        if reached[:] != last:
            last, since, had = reached[:], time.monotonic(), used
        elif used - had > LONGEST or time.monotonic() - since > HANG:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError(f"mutation {struct.unpack('<q', last)} does not end")
        time.sleep(0.005)
    assert ended[1] == 0, (os.waitstatus_to_exitcode(ended[1]), struct.unpack("<q", reached[:]))


def strike(kind: type[Reader], file: Path, path: Path, options: dict[str, Any], count: int | None) -> None:
    """Read `path`, of which `file` is damaged again and again."""
    data = file.read_bytes()
    changes = damaged(data, count)
    assert changes

    def task(reached: mmap.mmap) -> None:
        refused = 0
        for number, (at, byte) in enumerate(changes):
            reached[:] = struct.pack("<q", number)
            file.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
            try:
                read_all(kind, path, options)
            except RbtoolError as error:
                refused += "\n" not in error.message
        assert refused > len(changes) // 10, refused

    read_all(kind, path, options)
    in_a_process(task)


@pytest.mark.parametrize("count", [25, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_no_damaged_heap_keeps_a_reader_busy(name: str, count: int | None, tmp_path: Path) -> None:
    kind, make, how, options = FILES[name]
    make(tmp_path / "a.hdf5", **how)
    assert any(heaps((tmp_path / "a.hdf5").read_bytes()))
    strike(kind, tmp_path / "a.hdf5", tmp_path / "a.hdf5", options, count)


@pytest.mark.parametrize("count", [8, pytest.param(3_000, marks=pytest.mark.slow)])
def test_no_damaged_heap_of_minari_keeps_its_reader_busy(count: int, tmp_path: Path) -> None:
    place = Path(shutil.copytree(MINARI, tmp_path / MINARI.name))
    strike(MinariReader, place / "data" / "main_data.hdf5", place, {}, count)
