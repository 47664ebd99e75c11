"""`frames`: videos and sheets hold the images of the rows, in their order and at their time."""

from __future__ import annotations

import sys
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from lerobot_files import CAMERA, plain_rows, random_takes, write_dataset
from made_datasets import write_fields
from PIL import Image

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.verbs.frames import frames, write_gif, write_mp4

COUNT = 13
ROWS, COLUMNS = np.mgrid[:17, :23].astype(np.uint8)
PIXELS = np.stack([np.stack([ROWS * 9, COLUMNS * 9, np.full_like(ROWS, 15 * t)], -1) for t in range(COUNT)])
"""Frames of an odd size, smooth enough for a video, all different."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rewards = np.zeros(COUNT - 1)
    fields = {
        "pixels": PIXELS,
        "first": PIXELS.transpose(0, 3, 1, 2),
        "unit": (PIXELS / 255).astype(np.float32).transpose(0, 3, 1, 2),
        "signed": (PIXELS / 127.5 - 1).astype(np.float32),
        "grey": PIXELS[..., 2].copy(),
        "depth": PIXELS[..., 2].astype(np.uint16) * 100,
        "stacked": np.stack([PIXELS[..., 1], PIXELS[..., 0]], 1),
        "state": np.zeros((COUNT, 3)),
    }
    other = {name: rows[:3] for name, rows in fields.items()}
    folder = tmp_path_factory.mktemp("made") / "made"
    return write_fields(folder, {"reward": rewards, **fields}, {"reward": rewards[:2], **other})


def decoded(path: Path) -> tuple[list[np.ndarray], list[float]]:
    with av.open(str(path)) as container:
        found = [(one.to_ndarray(format="rgb24"), float(one.time)) for one in container.decode(video=0)]
    return [image for image, _ in found], [time for _, time in found]


def gif(path: Path) -> tuple[np.ndarray, list[int]]:
    with Image.open(path) as picture:
        images, times = [], []
        for number in range(picture.n_frames):
            picture.seek(number)
            times.append(picture.info["duration"])
            images.append(np.asarray(picture.convert("RGB")))
    return np.stack(images), times


def png(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


@pytest.mark.parametrize("field", ["pixels", "first", "unit", "signed"])
def test_a_video_has_every_frame_in_order_and_at_its_time(made: Path, tmp_path: Path, field: str) -> None:
    result = frames(made, tmp_path / "a.mp4", episode=0, field=field, fps=20)
    images, times = decoded(tmp_path / "a.mp4")
    assert result.steps == tuple(range(COUNT))
    assert images[0].shape == (18, 24, 3)
    assert np.abs(np.stack(images)[:, :17, :23].astype(int) - PIXELS).mean() < 6
    assert [int(image[..., 2].mean() / 15 + 0.5) for image in images] == [*range(COUNT)]
    assert times == pytest.approx(np.arange(COUNT) / 20)


def test_a_gif_has_every_grey_frame_bit_for_bit(made: Path, tmp_path: Path) -> None:
    frames(made, tmp_path / "a.gif", episode=0, field="grey", fps=30)
    images, times = gif(tmp_path / "a.gif")
    assert np.array_equal(images, np.repeat(PIXELS[..., 2][..., None], 3, -1))
    assert abs(sum(times) - COUNT * 1000 / 30) <= 10
    assert set(times) == {30, 40}


def test_a_gif_of_few_colours_has_them_exactly(made: Path, tmp_path: Path) -> None:
    frames(made, tmp_path / "a.gif", episode=0, field="pixels", steps="2:4", scale=3)
    images, _ = gif(tmp_path / "a.gif")
    assert images.shape == (2, 51, 69, 3)
    assert np.abs(images[:, ::3, ::3].astype(int) - PIXELS[2:4]).max() <= 16


def test_a_single_step_is_written_as_it_is(made: Path, tmp_path: Path) -> None:
    for step in (0, 5, COUNT - 1):
        frames(made, tmp_path / "a.png", episode=0, field="pixels", steps=str(step), force=True)
        assert np.array_equal(png(tmp_path / "a.png"), PIXELS[step])


def test_a_stack_shows_its_newest_frame_with_a_note(made: Path, tmp_path: Path) -> None:
    result = frames(made, tmp_path / "a.png", episode=1, field="stacked", steps="1")
    assert np.array_equal(png(tmp_path / "a.png"), PIXELS[1, ..., 0])
    assert result.notes == ("stacked has 2 frames per step: the newest is shown",)


def test_other_numbers_are_scaled_with_a_note(made: Path, tmp_path: Path) -> None:
    result = frames(made, tmp_path / "a.png", episode=0, field="depth", steps="12")
    assert png(tmp_path / "a.png").max() == 0
    assert result.notes == ("depth has values from 1.8e+04, shown as black, to 1.8e+04, shown as white",)
    frames(made, tmp_path / "a.gif", episode=0, field="depth")
    assert np.array_equal(gif(tmp_path / "a.gif")[0][:, 0, 0, 0], np.rint(np.arange(13) * 255 / 12))


def test_a_sheet_has_each_frame_with_pixels_repeated(made: Path, tmp_path: Path) -> None:
    result = frames(made, tmp_path / "a.png", episode=1, field="pixels")
    page = png(tmp_path / "a.png")
    for place, left in enumerate(range(6, 6 + 3 * (23 * 5 + 6), 23 * 5 + 6)):
        assert np.array_equal(page[6 : 6 + 85 : 5, left : left + 115 : 5], PIXELS[place])
    assert (result.steps, result.fps) == ((0, 1, 2), None)


def test_a_sheet_of_a_long_episode_has_evenly_spaced_frames(tmp_path: Path) -> None:
    images = np.zeros((501, 8, 8), np.uint8)
    made = write_fields(tmp_path / "long", {"reward": np.zeros(500), "pixels": images})
    result = frames(made, tmp_path / "a.png", episode=0)
    assert (len(result.steps), result.steps[0], result.steps[-1]) == (40, 0, 500)
    assert set(np.diff(result.steps)) == {12, 13}
    assert result.notes == ("40 of 501 frames are on the sheet; --steps A:B chooses others",)


def test_depths_of_kept_videos_are_scaled_to_their_range(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "data/lerobot/recent/depth_video_mm"
    kept = rbtool.convert(source, tmp_path / "kept").path
    result = frames(kept, field="observation.image.depth", episode=0, output=tmp_path / "far.png")
    assert any("values from 10, shown as black, to 1e+04, shown as white" in note for note in result.notes)


def test_frames_of_kept_videos_are_decoded(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "source", random_takes((6, 1, 4)))
    rbtool.convert(source, tmp_path / "kept")
    rows = [row for row in plain_rows(source) if row["episode_index"] == 2]
    result = frames(tmp_path / "kept", tmp_path / "a.png", episode=2, steps="3")
    assert result.field == "observation.image.top"
    assert np.array_equal(png(tmp_path / "a.png"), rows[3][CAMERA])
    assert frames(tmp_path / "kept", tmp_path / "a.gif", episode=2).steps == (0, 1, 2, 3)  # none after the last


def test_blocks_do_not_change_the_frames(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames(made, tmp_path / "a.gif", episode=0, field="pixels")
    monkeypatch.setattr("rbtool.core.verbs.frames._BLOCK_BYTES", PIXELS[0].nbytes * 2)
    frames(made, tmp_path / "b.gif", episode=0, field="pixels")
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


@pytest.mark.parametrize("write", [write_gif, write_mp4])
def test_memory_does_not_grow_with_the_length(tmp_path: Path, write) -> None:
    frame = np.zeros((128, 128), np.uint8)
    tracemalloc.start()
    write(tmp_path / "a", (frame + number % 7 for number in range(400)), Fraction(30))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 << 20  # the frames are 6.5 MB as grey ones, 20 MB as RGB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": "pixls"}, "did you mean 'pixels'"), ({"field": "state"}, "state holds no images"),
        ({"episode": 9}, "episode 9 is not there"), ({"steps": "99"}, "frames of the steps 0 to 12"),
        ({"steps": "5:5"}, "frames of the steps 0 to 12"), ({"steps": "x"}, "is not understood"),
        ({"fps": 0}, "--fps is 0"), ({"fps": float("nan")}, "--fps is nan"),
        ({"fps": 60}, "expected at most 50 for a GIF"), ({"scale": 0}, "--scale is 0"),
        ({"output": "a.avi"}, r"ends in \.avi"),
    ],
)  # fmt: skip
def test_impossible_frames_are_refused_and_not_written(made, tmp_path, options: dict, message: str) -> None:
    given = {"episode": 0, **options}
    with pytest.raises(UsageError, match=message):
        frames(made, tmp_path / given.pop("output", "a.gif"), **given)
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_without_images_is_refused(tmp_path: Path) -> None:
    made = write_fields(tmp_path / "made", {"reward": np.zeros(3), "state": np.zeros((4, 2))})
    with pytest.raises(UsageError, match="has no images") as caught:
        frames(made, tmp_path / "a.png", episode=0)
    assert "rbtool plot" in caught.value.hint


def test_a_missing_pyav_is_named(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match="PyAV") as caught:
        frames(made, tmp_path / "a.mp4", episode=0)
    assert caught.value.hint == "pip install 'rbtool[video]'"
    frames(made, tmp_path / "a.gif", episode=1)
    rbtool.frames(made, tmp_path / "a.png", episode=1)


def test_a_file_is_replaced_only_with_force(made: Path, tmp_path: Path) -> None:
    for suffix in ("mp4", "gif", "png"):
        place = tmp_path / f"a.{suffix}"
        frames(made, place, episode=1, field="pixels")
        before = place.read_bytes()
        with pytest.raises(UsageError, match="already exists"):
            frames(made, place, episode=1, field="first", scale=2)
        assert place.read_bytes() == before
        frames(made, place, episode=1, field="first", scale=2, force=True)
        assert place.read_bytes() != before


def test_a_failure_leaves_the_old_file(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames(made, tmp_path / "a.mp4", episode=1, field="pixels")
    before = (tmp_path / "a.mp4").read_bytes()
    monkeypatch.setattr("rbtool.core.verbs.frames.enlarged", lambda frame, scale: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        frames(made, tmp_path / "a.mp4", episode=1, field="pixels", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == before
