"""Datasets of LeRobot in which one file has changed bytes: rows, metadata, and videos."""

from __future__ import annotations

from pathlib import Path

import pytest
from damage import strike_in_folder
from lerobot_files import random_takes, write_dataset

from rbtool.converters.lerobot.reader import LerobotReader

DATA = Path(__file__).parents[1] / "data" / "lerobot"
CAMERA = "observation.images.top"
FILES = {
    "v21": [
        "meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl", "data/chunk-000/episode_000001.parquet",
        f"videos/chunk-000/{CAMERA}/episode_000001.mp4",
    ],
    "v30": [
        "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "data/chunk-000/file-000.parquet",
        f"videos/{CAMERA}/chunk-000/file-001.mp4",
    ],
}  # fmt: skip
"""Datasets, and which of their files are changed."""


@pytest.mark.parametrize("count", [8, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_mutations_of_one_file(name: str, count: int, tmp_path: Path) -> None:
    strike_in_folder(LerobotReader, DATA / name, FILES[name], tmp_path, count)


@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=pytest.mark.slow)])
def test_mutations_of_images_in_columns(count: int, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "made", random_takes((3, 2)), images="image")
    strike_in_folder(LerobotReader, folder, ["data/chunk-000/episode_000000.parquet"], tmp_path, count)
