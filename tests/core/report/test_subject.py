"""The episodes and images that a report shows."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from lerobot_files import random_takes, write_dataset
from made_datasets import write_fields, write_shown
from PIL import Image

import rbtool
from rbtool.core.format.contracts import StepReader
from rbtool.core.open_steps import open_steps
from rbtool.core.progress import Silent
from rbtool.core.report import subject
from rbtool.core.report.figures import is_image, measure
from rbtool.core.report.subject import (
    Sheet,
    ShownEpisode,
    as_rgb,
    chosen_episodes,
    image_sources,
    sheet_of,
    show_episodes,
)
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import Ending, write_walks

WALKS: list[tuple[int, Ending]] = [(6, "terminated"), (1, "truncated"), (90, "open"), (4, "both"), (2, "terminated")]


def shown(reader: StepReader, most: int = 6, frame_bytes: int = 0) -> list[ShownEpisode]:
    return show_episodes(reader, measure(reader, Silent()), image_sources(reader), most, frame_bytes)


def test_the_best_worst_and_median_episodes_are_chosen(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    with open_steps(tmp_path / "walks") as reader:
        table = reader.episodes
        found = chosen_episodes(table, 6, returns=True)
        without = chosen_episodes(table, 6, returns=False)
    rows = {reason: row for row, why in found for reason in why.split(", ")}
    returns = table.total_reward
    assert returns[rows["median return"]] == np.median(returns)
    assert (rows["highest return"], rows["lowest return"]) == (returns.argmax(), returns.argmin())
    assert (rows["longest"], rows["first"], rows["last"]) == (2, 0, 4)
    assert without == [(2, "longest"), (0, "first"), (4, "last")]
    assert len({row for row, _ in found}) == len(found)


def test_no_more_episodes_are_chosen_than_asked_for(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    with open_steps(tmp_path / "walks") as reader:
        for most in (1, 2, 6):
            assert len(chosen_episodes(reader.episodes, most, returns=True)) <= most


@pytest.mark.parametrize(
    ("limit", "most", "left_out"), [(500, 8, ""), (7, 1, "2 observation columns, 1 action column")]
)
def test_traces_have_the_rows_of_the_episode(tmp_path: Path, monkeypatch, limit: int, most: int, left_out: str) -> None:
    monkeypatch.setattr(subject, "_STEPS", limit)
    monkeypatch.setattr(subject, "_TOGETHER", 40)
    monkeypatch.setattr(subject, "_COLUMNS", most)
    write_walks(tmp_path / "walks", WALKS)
    with open_steps(tmp_path / "walks") as reader:
        found = shown(reader)
        table = reader.episodes
        for one in found:
            assert (one.steps[0], one.steps[-1], one.length) == (0, one.length - 1, table.length[one.row])
            assert set(np.diff(one.steps[:-1])) <= {one.stride}
            rows = table.start[one.row] + one.steps
            kept = [
                reader.read(key, 0, 103)[rows].reshape(len(rows), -1)[:, :most]
                for key in (("observation",), ("action",), ("next", "reward"))
            ]
            assert np.array_equal(np.stack([trace.values for trace in one.traces], 1), np.concatenate(kept, 1))
            assert one.left_out == left_out
            assert one.total == table.total_reward[one.row]
    assert max(len(one.steps) for one in found) <= limit + 1


def test_frames_belong_to_their_steps(tmp_path: Path) -> None:
    write_shown(tmp_path / "shown")
    with open_steps(tmp_path / "shown") as reader:
        found = shown(reader, frame_bytes=1 << 20)
    assert all(one.frames is not None and one.frames.count == len(one.frame_steps) == 12 for one in found)
    pixels = DRAW.integers(0, 256, (9, 16, 16, 3)).astype(np.uint8)
    path = write_fields(tmp_path / "data", {"pixels": pixels, "reward": np.zeros(8)})
    with open_steps(path) as reader:
        (source,) = image_sources(reader)
        found = source.frames([0, 5, 7])
    assert np.array_equal(found, pixels[[0, 5, 7]])


def test_damaged_episodes_are_not_shown(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    path = tmp_path / "walks" / "action.memmap"
    path.write_bytes(path.read_bytes()[: 7 * 8])
    with open_steps(tmp_path / "walks", damaged=True) as reader:
        assert {one.row for one in shown(reader)} == {0, 1}


DRAW = np.random.default_rng(0)


def opened(sheet: Sheet) -> np.ndarray:
    """The pixels of a sheet, `[height, width, 3]`."""
    form, _, data = sheet.data.partition(";base64,")
    assert form in {"data:image/png", "data:image/jpeg"}
    return np.array(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((16, 16), "uint8", True), ((16, 24, 3), "uint8", True), ((4, 84, 84), "uint8", True),
        ((3, 16, 16), "float32", True), ((16,), "uint8", False), ((4, 4, 3), "uint8", False),
        ((16, 16), "float32", False), ((16, 16), "int64", False),
    ],
)  # fmt: skip
def test_images_are_found_by_type_and_shape(shape: tuple[int, ...], dtype: str, expected: bool) -> None:
    assert is_image(Field(("pixels",), dtype, shape, "observation")) == expected
    assert not is_image(Field(("next", "pixels"), dtype, shape, "observation"))
    assert not is_image(Field(("action",), dtype, shape, "action"))


def test_pixels_of_every_layout_become_rgb() -> None:
    rgb = DRAW.integers(1, 255, (2, 8, 9, 3)).astype(np.uint8)
    assert np.array_equal(as_rgb(rgb), rgb)
    assert np.array_equal(as_rgb(np.moveaxis(rgb, 3, 1)), rgb)
    assert np.array_equal(as_rgb(np.concatenate([rgb, np.full((2, 8, 9, 1), 255, np.uint8)], 3)), rgb)
    assert np.array_equal(as_rgb(rgb / 255), rgb)
    assert np.array_equal(as_rgb(rgb.astype(np.float32)), rgb)
    stack = DRAW.integers(0, 255, (2, 4, 12, 12)).astype(np.uint8)
    assert np.array_equal(as_rgb(stack), np.repeat(stack[:, -1, :, :, None], 3, axis=3))
    depths = np.linspace(0, 5000, 12 * 12).astype(np.uint16).reshape(1, 12, 12, 1)
    assert (as_rgb(depths).min(), as_rgb(depths).max(), len(np.unique(as_rgb(depths)))) == (0, 255, 144)


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_small_frames_are_not_scaled(columns: int) -> None:
    frames = np.zeros((5, 12, 10, 3), np.uint8)
    frames += np.arange(5, dtype=np.uint8)[:, None, None, None] * 50
    sheet = sheet_of(frames, columns, 1 << 20)
    pixels = opened(sheet)
    assert (sheet.count, sheet.columns, sheet.width, sheet.height) == (5, min(columns, 5), 10, 12)
    for number in range(5):
        row, column = divmod(number, columns)
        assert (pixels[12 * row : 12 * row + 12, 10 * column : 10 * column + 10] == 50 * number).all()


@pytest.mark.parametrize("most", [200_000, 20_000])
def test_sheets_keep_within_their_bytes(most: int) -> None:
    noise = DRAW.integers(0, 256, (24, 200, 300, 3)).astype(np.uint8)
    sheet = sheet_of(noise, 8, most, gap=2)
    assert len(sheet.data) <= most
    assert opened(sheet).shape[:2] == (3 * (sheet.height + 2) - 2, 8 * (sheet.width + 2) - 2)


@pytest.mark.slow
def test_frames_of_kept_videos_are_shown(tmp_path: Path) -> None:
    write_dataset(tmp_path / "takes", random_takes([6, 5]), images="video")
    rbtool.convert(tmp_path / "takes", tmp_path / "kept", images="keep")
    with open_steps(tmp_path / "kept") as reader:
        sources = image_sources(reader)
        found = sources[0].frames([0, 3, 8])
    dataset = rbtool.load_dataset(tmp_path / "kept")
    key = tuple(sources[0].name.split("."))
    for row, frame in zip((0, 3, 8), found, strict=True):
        assert np.array_equal(dataset[row][key].numpy(), frame)
    written = rbtool.report(tmp_path / "kept", tmp_path / "page.html").path.read_text(encoding="utf-8")
    assert written.count('<img src="data:image/') == len(sources)
