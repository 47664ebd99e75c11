"""Frames of videos in any order: equal to decoding from the start, for several codecs and kinds of groups."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from lerobot_files import decoded, picture, write_video

from rbtool.core.encodings.video import VideoFile, VideoIndex
from rbtool.core.errors import CorruptDataError, FormatError, UsageError

DATA = Path(__file__).parents[2] / "data" / "lerobot"
FRAMES = 41
CODECS = [
    ("libx264", {"g": "250"}),
    ("libx264", {"g": "7", "bf": "3"}),
    ("libx264", {"x264-params": "open-gop=1:keyint=8:bframes=3"}),
    ("libx264", {"x264-params": "intra-refresh=1:keyint=12"}),
    ("mpeg4", {"g": "6", "bf": "2"}),
    ("libvpx-vp9", {"g": "9"}),
]


@pytest.mark.parametrize(("codec", "options"), CODECS)
def test_any_order_equals_decoding_from_the_start(codec: str, options: dict[str, str], tmp_path: Path) -> None:
    pictures = [picture(3 * number) for number in range(FRAMES)]
    path = write_video(tmp_path / "v.mp4", pictures, codec=codec, **options)
    expected, chance = decoded(path), random.Random(0)
    order = [chance.randrange(FRAMES) for _ in range(60)] + list(range(FRAMES)) + list(range(FRAMES))[::-1]
    with VideoFile(path) as video:
        assert len(video) == video.stated_frames == FRAMES
        for number in order:
            assert np.array_equal(video.read(np.array([number]))[0], expected[number])
        batch = np.array(order)
        assert np.array_equal(video.read(batch), np.stack(expected)[batch])


def test_frames_of_a_real_video_in_av1() -> None:
    (path,) = (DATA / "g1").rglob("*.mp4")
    expected, order = decoded(path), np.random.default_rng(0).permutation(40)
    with VideoFile(path) as video:
        for number in order:
            assert np.array_equal(video.read(np.array([number]))[0], expected[number])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_video(tmp_path / "v.mp4", [picture(number) for number in range(12)], g="4")


def test_frames_are_found_by_times_and_refused_if_not_there(path: Path) -> None:
    with VideoFile(path) as video:
        assert video.index.times == pytest.approx(np.arange(12) / 10)
        assert video.index.frames_at(np.array([0.2, 0.3]), 10, path).tolist() == [2, 3]
        assert video.index.frames_at(np.array([0.24, 0.26]), 10, path).tolist() == [2, 3]
        assert video.index.frames_at(np.array([0.1, 0.5, 1.1]), 10, path).tolist() == [1, 5, 11]
        for times in ([1.2], [0.1, 0.12], [-0.06], [np.nan]):
            with pytest.raises(FormatError, match="but no frame for row"):
                video.index.frames_at(np.array(times), 10, path)
    with VideoFile(path) as video:
        for number in (-1, 12):
            with pytest.raises(UsageError, match="below 12 in"):
                video.read(np.array([0, number]))
        assert video.read(np.array([], np.int64)).shape == (0, 32, 48, 3)
    video = VideoFile(path)
    video.close()
    video.close()


def test_an_index_is_read_again_and_nothing_else_is_taken_for_one(path: Path) -> None:
    with VideoFile(path) as video:
        index, expected = video.index, video.read(np.arange(12))
    data = index.to_bytes()
    again = VideoIndex.from_bytes(data, "v.index")
    assert again.unit == index.unit
    with VideoFile(path, again) as video:
        assert np.array_equal(video.read(np.arange(12)[::-1]), expected[::-1])
    units = [data[:24] + struct.pack("<2q", *unit) + data[40:] for unit in ((1, 0), (0, 1), (-1, 10))]
    for other in (b"", data[:-8], data + b"0", bytes(len(data)), b"\xff" * len(data), *units):
        with pytest.raises(CorruptDataError, match=r"v\.index is not the index of a video"):
            VideoIndex.from_bytes(other, "v.index")


def test_a_video_without_its_end_is_damaged(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptDataError, match=r"v\.mp4 cannot be decoded"):
        VideoFile(path)


def test_a_file_that_is_no_video_is_damage(tmp_path: Path) -> None:
    for name in ("README.md", "v21/data/chunk-000/episode_000000.parquet"):
        copy = shutil.copy(DATA / name, tmp_path / "v.mp4")
        with pytest.raises(CorruptDataError, match="cannot be decoded"):
            VideoFile(Path(copy))
