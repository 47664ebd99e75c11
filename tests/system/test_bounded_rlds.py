"""RLDS datasets of any size are converted in bounded memory: shards are streamed, a record at a time."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rlds_files import FLAGS, Spec, encoded, example, masked, write_dataset

from rbtool.core.open_steps import open_steps

SPEC: Spec = {
    **FLAGS, "observation": {"image": ("image", (128, 128, 3), "jpeg"), "state": ("tensor", "float32", (7,))},
    "action": ("tensor", "float32", (7,)), "reward": ("tensor", "float32", ()),
}  # fmt: skip
CAP = 400 << 20
"""Bytes of RLIMIT_DATA."""
CAPPED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.argv = ["rbtool", *sys.argv[2:]]
from rbtool.cli.app import main
main()
"""
GIGABYTES = float(os.environ.get("RLDS_GIGABYTES", "1"))
STEPS = 300


def large_record(number: int, frames: list[bytes], padding: int) -> bytes:
    """An episode of `STEPS` frames, each with bytes behind its image, as some cameras write them."""
    draw = np.random.default_rng(number)
    flags = {f"steps/{name}": np.zeros(STEPS, int) for name in FLAGS}
    flags["steps/is_first"][0] = flags["steps/is_last"][-1] = 1
    state = np.repeat(np.arange(STEPS, dtype="f4") + number, 7)
    return example({
        **flags, "steps/action": draw.normal(size=7 * STEPS).astype("f4"), "steps/reward": np.ones(STEPS, "f4"),
        "steps/observation/state": state,
        "steps/observation/image": [frames[(number + step) % len(frames)] + bytes(padding) for step in range(STEPS)],
    })  # fmt: skip


@pytest.mark.slow
def test_a_dataset_of_several_gigabytes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frames = [encoded(draw.integers(0, 256, (128, 128, 3), np.uint8), "jpeg") for _ in range(8)]
    padding = 100_000
    one = large_record(0, frames, padding)
    count = max(4, int(GIGABYTES * 1e9 / len(one)))
    folder = write_dataset(tmp_path / "1.0.0", {"train": [[one], [one]]}, SPEC)
    shards = sorted(folder.glob("*.tfrecord-*"))
    for index, shard in enumerate(shards):
        with shard.open("wb") as file:
            for number in range(index, count, 2):
                data = large_record(number, frames, padding)
                file.write(struct.pack("<Q", len(data)) + masked(struct.pack("<Q", len(data))) + data + masked(data))
    (folder / "dataset_info.json").unlink()
    command = [sys.executable, "-c", CAPPED, str(CAP), "convert", str(folder), str(tmp_path / "out"), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    order = [*range(0, count, 2), *range(1, count, 2)]
    with open_steps(tmp_path / "out") as reader:
        assert reader.manifest.steps == count * (STEPS - 1)  # the truncated last step has no next observation
        for place in (0, count // 2, count - 1):
            start = place * (STEPS - 1)
            states = reader.read(("observation", "state"), start, start + 5)[:, 0]
            assert states.tolist() == [order[place] + step for step in range(5)]
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest keeps the last folders, these are large
