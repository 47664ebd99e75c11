"""Memory while LeRobot's videos and images are converted: bounded, however long an episode is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lerobot_files
import numpy as np
import pytest
from lerobot_files import random_takes, write_dataset

import rbtool

MEASURED = """
import sys
import rbtool
from pathlib import Path
made = rbtool.convert(sys.argv[1], sys.argv[2], images=sys.argv[3], final_step="repeat")
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(made.steps, made.bytes >> 20, int(most.split()[1]) >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(("images", "choice"), [("video", "decode"), ("video", "keep"), ("image", "decode")])
def test_a_large_dataset_converts_under_400_mib(
    images: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_files, "SIZE", (480, 640))
    monkeypatch.setattr(lerobot_files, "picture", _noisy)
    source = write_dataset(tmp_path / "d", random_takes((700, 500)), version="v3.0", images=images)
    words = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out"), choice]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    steps, size, mebibytes = map(int, done.stdout.split())
    assert steps == 1_200
    assert (size > 1_000) == (choice == "decode")
    assert mebibytes < 400
    assert rbtool.check(tmp_path / "out").errors == 0


def _noisy(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    image = np.zeros((480, 640, 3), np.uint8)
    image[..., 0] = (np.arange(640) + number) % 256
    image[::7, :, 1] = number % 256
    image[64 : 64 + 96, number % 500 : number % 500 + 96] = np.random.default_rng(number).integers(0, 255, (96, 96, 3))
    return image
