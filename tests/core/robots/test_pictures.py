"""Pictures, stored or in kept videos: what is cropped, scaled and encoded is what was there, frame by frame."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import each
from made_datasets import write_fields
from waiting import HANG

import rbtool
from rbtool import Resize
from rbtool.core.encodings.video import VideoFile
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format import videos
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.syncing import NewFile
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.operations.program import ProgramProcessor, program_of
from rbtool.core.preprocess.processor import Block, BlockColumn, Context
from rbtool.core.robots.pictures import CropImages, EncodeImages, ResizeImages
from rbtool.core.ted.schema import Field, role_of
from rbtool.core.testing.operations import OperationTests, sample_block

RNG = np.random.default_rng(3)
CODECS = ("av1", "h264")


def with_pictures(rows, **pictures):
    """Add fields to the rows of an episode each."""
    fields, block = sample_block(rows)
    columns = {tuple(name.split("__")): BlockColumn(one.dtype.name, one) for name, one in pictures.items()}
    fields += tuple(Field(key, one.dtype, one.values.shape[1:], role_of(key)) for key, one in columns.items())
    return fields, Block({**block.columns, **columns}, block.pieces, block.first)


def do(fields, block, **operations):
    work = ProgramProcessor(program_of(operations), fields)
    found = work.load(Context(fields, EpisodeTable.from_rows([]), 0)).apply(block)
    foretold = {field.key: (field.dtype, field.shape) for field in work.fields}
    assert {key: (column.dtype, column.values.shape[1:]) for key, column in found.columns.items()} == foretold
    return {".".join(key): column.values for key, column in found.columns.items()}


class PictureTests(OperationTests):
    def rows(self):
        images = smooth(18, 34, 36)
        return with_pictures((5, 1, 7, 4), image=images[:-1], next__image=images[1:])


class TestCrop(PictureTests):
    def operation(self):
        return CropImages("image", "1,2,20x30")


class TestResize(PictureTests):
    def operation(self):
        return ResizeImages("image", "12x14", "hwc")


class TestEncode(PictureTests):
    def operation(self):
        return EncodeImages("h264", "image", 3)


def smooth(count, height, width):
    """Pictures that no codec spoils: a slope of brightness that moves."""
    rows, columns = np.mgrid[:height, :width]
    found = [np.stack([rows * 3 + 2 * k, columns * 2 + k, rows + columns], 2) for k in range(count)]
    return np.stack(found).clip(0, 255).astype(np.uint8)


def distance(one, other):
    """The mean difference of the pixels of each frame."""
    return np.abs(one.astype(float) - other.astype(float)).reshape(len(one), -1).mean(1)


# Sizes of stored pictures.


@each("dtype", ["uint8", "float32", "float16", "float64", "int32"])
@each(
    ("shape", "to"),
    [((12, 10), (6, 5)), ((12, 10, 3), (6, 5, 3)), ((3, 12, 10), (3, 6, 5)), ((7, 8, 1), (6, 5, 1)), ((6, 5), (6, 5))],
)
def test_images_are_cut_and_scaled_on_both_sides(dtype, shape, to):
    values = {name: (RNG.random((4, *shape)) * 255).astype(dtype) for name in ("image", "next__image")}
    made = with_pictures((3, 1), **values)
    scaled, cut = do(*made, resize="image=6x5"), do(*made, crop="image=0,0,6x5")
    for name, images in values.items():
        found, area = scaled[name.replace("__", ".")], cut[name.replace("__", ".")]
        assert (found.dtype, found.shape) == (np.dtype(dtype), (4, *to))
        assert found.min() >= images.min()
        assert found.max() <= images.max()
        assert np.array_equal(area, images[:, :, :6, :5] if shape[0] == 3 else images[:, :6, :5])


def test_resize_is_the_transform_in_any_layout():
    images = RNG.integers(0, 256, (3, 3, 20, 16)).astype(np.uint8)
    found = do(*with_pictures((3,), image=images), resize="image=8x12")["image"]
    assert np.array_equal(found, Resize((8, 12)).change(torch.from_numpy(images), ("image",), None).numpy())
    images = RNG.random((2, 20, 16, 3)).astype(np.float32)
    last = do(*with_pictures((2,), image=images), resize="image=8x12:hwc")["image"]
    first = do(*with_pictures((2,), image=np.moveaxis(images, 3, 1).copy()), resize="image=8x12:chw")["image"]
    assert np.array_equal(np.moveaxis(last, 3, 1), first)
    images = RNG.integers(0, 256, (64, 30, 31, 3)).astype(np.uint8)
    together = do(*with_pictures((64,), image=images), resize="image=7x9")["image"]
    alone = [do(*with_pictures((1,), image=images[row : row + 1]), resize="image=7x9")["image"] for row in range(64)]
    assert np.array_equal(together, np.concatenate(alone))


def test_an_area_is_central_by_default_and_is_scaled_afterwards():
    images = RNG.integers(0, 256, (2, 9, 12, 3)).astype(np.uint8)
    made = with_pictures((2,), image=images)
    assert np.array_equal(do(*made, crop="image=5x7")["image"], images[:, 2:7, 2:9])
    assert np.array_equal(do(*made, crop="image=3,1,6x7")["image"], images[:, 3:9, 1:8])
    both = do(*made, crop="image=3,1,6x7", resize="image=3x3")["image"]
    cut = with_pictures((2,), image=np.ascontiguousarray(images[:, 3:9, 1:8]))
    assert np.array_equal(both, do(*cut, resize="image=3x3")["image"])


@each(
    ("shape", "operations", "words"),
    [
        ((8, 8), {"resize": "image=8"}, "height x width like 84x84"),
        ((8, 8), {"resize": "image=0x8"}, "height x width like 84x84"),
        ((8, 8), {"crop": "image=1,8x8"}, "'1,8x8' is not an area"),
        ((8, 9), {"crop": "image=1,0,8x8"}, "1,0,8x8 is not within 8x9"),
        ((8, 9), {"crop": "image=10x4"}, "10x4 is not within 8x9"),
        ((8,), {"resize": "image=8x8"}, r"its rows are \[8\]"),
        ((2, 8, 8, 3), {"crop": "image=8x8"}, r"its rows are \[2, 8, 8, 3\]"),
        ((8, 8, 8), {"resize": "image=4x4"}, r"which dimension of \[8, 8, 8\] has the channels is unclear"),
        ((3, 8, 3), {"resize": "image=4x4"}, "is unclear"),
        ((8, 8, 8), {"crop": "image=4x4:cwh"}, "expected hwc or chw; did you mean 'chw'"),
        ((64, 64, 3), {"encode": "h265"}, "the codec is 'h265', expected av1 or h264; did you mean 'h264'"),
        ((8, 8), {"resize": "image=99999x99999"}, "99999x99999 is 9,999,800,001 pixels, expected at most 67,108,864"),
        ((64, 64, 3), {"encode": ["h264", "av1"]}, "the pictures image are encoded twice"),
        ((64, 64, 3), {"encode": "h264:x"}, "--encode is 'h264:x', expected CODEC"),
        ((64, 64, 3), {"encode": "h264:0"}, "0 frames apart, expected 1 to 1000"),
        ((64, 63, 3), {"encode": "h264"}, "its pictures are 64x63, but h264 needs an even number of pixels a side"),
        ((31, 63, 3), {"encode": "av1"}, "its pictures are 31x63, but av1 needs at least 32 pixels a side"),
        ((3, 64, 64), {"encode": "image=av1"}, r"its rows are uint8 \[3, 64, 64\], expected"),
        ((3, 64, 64), {"encode": "av1"}, "there are no pictures"),
    ],
)  # fmt: skip
def test_impossible_operations_are_refused_before_a_row_is_read(shape, operations, words):
    with pytest.raises(UsageError, match=words):
        do(*with_pictures((2,), image=np.zeros((2, *shape), np.uint8)), **operations)


# Videos.


def pictures_of(dataset):
    return rbtool.load_dataset(dataset)[:]["observation", "image"].numpy()


def require_similar(made, expected):
    """The pictures before and after each step are the same up to the losses of a codec, and all digests are right."""
    found, stored = rbtool.load_dataset(made)[:], rbtool.load_dataset(expected)[:]
    for key in (("observation", "image"), ("next", "observation", "image")):
        assert distance(found[key].numpy(), stored[key].numpy()).max() < 3, key
    assert rbtool.check(made, full=True).errors == 0


def preprocessed(source, dest, workers=0, **operations):
    return rbtool.preprocess(source, None, dest, operations=operations, num_workers=workers)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Episodes of 7, 1 and 20 steps, with pictures of 40 x 48 before and after each step."""
    images = smooth(31, 40, 48)
    parts = [images[:8], images[8:10], images[10:]]
    episodes = [{"reward": np.arange(len(part) - 1.0), "observation.image": part} for part in parts]
    return write_fields(tmp_path_factory.mktemp("pictures") / "stored", *episodes)


@pytest.fixture(scope="module")
def kept(stored):
    """The same as video."""
    preprocessed(stored, stored.parent / "kept", encode="h264")
    return stored.parent / "kept"


def references_of(dataset):
    with open_steps(dataset) as reader:
        keys = ("video", "observation", "image"), ("next", "video", "observation", "image")
        return [reader.read(key, 0, reader.manifest.steps) for key in keys]


def video_of(dataset, number):
    return dataset / f".rbtool/videos/{number:015x}.mp4"


@pytest.mark.parametrize("codec", CODECS)
def test_stored_pictures_become_a_video_of_each_episode(stored, codec, tmp_path):
    preprocessed(stored, tmp_path / "made", encode=codec)
    before, after = references_of(tmp_path / "made")
    assert before[:, 1].tolist() == [*range(7), 0, *range(20)]
    assert (after[:, 1] == before[:, 1] + 1).all()
    assert (after[:, 0] == before[:, 0]).all()
    for number, steps in zip(dict.fromkeys(before[:, 0].tolist()), (7, 1, 20), strict=True):
        with VideoFile(video_of(tmp_path / "made", number)) as video:
            assert video.index.times.tolist() == [float(k) for k in range(steps + 1)]  # one a second
            assert video.index.keys.tolist() == list(range(0, steps + 1, 2))
    require_similar(tmp_path / "made", stored)


def test_any_number_of_workers_writes_the_same_files(stored, kept, tmp_path):
    preprocessed(stored, tmp_path / "again", 2, encode="h264")
    files = [sorted((folder / ".rbtool/videos").iterdir()) for folder in (kept, tmp_path / "again")]
    assert len(files[0]) == 6
    assert [one.name for one in files[0]] == [one.name for one in files[1]]
    assert [one.read_bytes() for one in files[0]] == [one.read_bytes() for one in files[1]]


def test_only_pictures_that_differ_from_the_following_one_get_a_frame_of_their_own(tmp_path):
    images = smooth(6, 32, 32)
    after = images[[3, 4, 2]]  # of the first step another picture than that of the second step, of the last the same
    fields, block = with_pictures((3,), image=images[[0, 4, 2]], next__image=after)
    work = ProgramProcessor(program_of({"encode": "h264"}), fields)
    found = work.load(Context(fields, EpisodeTable.from_rows([]), 0)).apply(block)
    assert found.columns["video", "image"].values[:, 1].tolist() == [0, 2, 4]
    assert found.columns["next", "video", "image"].values[:, 1].tolist() == [1, 3, 4]
    [(name, data)] = [(name, data) for name, data in found.videos.items() if name.endswith(".mp4")]
    (tmp_path / name).write_bytes(data)
    with VideoFile(tmp_path / name) as video:
        assert distance(video.read(np.arange(5)), images[[0, 3, 4, 4, 2]]).max() < 3


@pytest.mark.parametrize("codec", CODECS)
def test_kept_videos_are_cut_scaled_and_encoded_again(kept, codec, tmp_path):
    preprocessed(kept, tmp_path / "pixels", crop="observation.image=2,4,36x40")
    cut = pictures_of(kept)[:, 2:38, 4:44]
    assert np.array_equal(pictures_of(tmp_path / "pixels"), cut)
    preprocessed(tmp_path / "pixels", tmp_path / "scaled", resize="observation.image=64x56")
    words = {"crop": "observation.image=2,4,36x40", "resize": "observation.image=64x56", "encode": f"{codec}:5"}
    preprocessed(kept, tmp_path / "encoded", 2, **words)
    assert pictures_of(tmp_path / "encoded").shape == (28, 64, 56, 3)
    require_similar(tmp_path / "encoded", tmp_path / "scaled")
    for number in np.unique(references_of(tmp_path / "encoded")[0][:, 0]).tolist():
        with VideoFile(video_of(tmp_path / "encoded", number)) as video:
            assert video.index.keys.tolist() == list(range(0, len(video), 5))


def test_each_piece_of_an_episode_is_a_video_whose_frames_keep_their_times(stored, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rbtool.core.robots.pictures.stated_fps", lambda reader: 12.5)
        preprocessed(stored, tmp_path / "fast", encode="h264")
    preprocessed(tmp_path / "fast", tmp_path / "cut", where="reward != 2 and reward != 3", encode="av1")
    before, _ = references_of(tmp_path / "cut")
    videos = dict.fromkeys(before[:, 0].tolist())
    for number, steps in zip(videos, (2, 3, 1, 2, 16), strict=True):
        with VideoFile(video_of(tmp_path / "cut", number)) as video:
            assert np.abs(video.index.times - np.arange(steps + 1) / 12.5).max() < 1e-12
    rows = rbtool.load_dataset(stored)[:]["next", "reward"].squeeze(-1)
    assert distance(pictures_of(tmp_path / "cut"), pictures_of(stored)[((rows != 2) & (rows != 3)).numpy()]).max() < 3


@pytest.mark.parametrize("codec", CODECS)
def test_encoding_leaves_the_scheduling_of_threads(stored, tmp_path, codec):
    def scheduling():
        return {os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()}

    before = scheduling()
    preprocessed(stored, tmp_path / "encoded", encode=codec)
    assert scheduling() == before == {os.sched_getscheduler(0)}


ENCODE = """
import hashlib, sys
from fractions import Fraction
import numpy as np
from rbtool.core.robots.pictures import EncodeImages, _encoded
noise = np.random.default_rng(0).normal(0, 20, (20, 240, 320, 3))
images = np.clip(noise + np.linspace(0, 255, 320)[:, None], 0, 255).astype(np.uint8)
for codec in sys.argv[1:]:
    video, _ = _encoded(iter([images]), images.shape[1:], EncodeImages(codec), np.arange(20), Fraction(1, 10))
    print(codec, hashlib.sha256(video).hexdigest())
"""


def test_encoded_videos_do_not_depend_on_freed_memory():
    # glibc fills memory with the number when it is freed, and with its complement when it is allocated.
    found = [
        subprocess.run(
            [sys.executable, "-c", ENCODE, *CODECS], env={**os.environ, "MALLOC_PERTURB_": filling}, check=True,
            capture_output=True, text=True, timeout=HANG,
        ).stdout
        for filling in ("0", "1")
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == len(CODECS)


@pytest.fixture
def noisy(tmp_path):
    """A dataset with a video of 20 frames, which is larger than a page, which other datasets can share."""
    images = RNG.integers(0, 256, (21, 64, 64, 3)).astype(np.uint8)
    stored = write_fields(tmp_path / "stored", {"reward": np.arange(20.0), "observation.image": images})
    return preprocessed(stored, tmp_path / "noisy", encode="h264").path


@pytest.mark.parametrize("links", [True, False])
def test_chosen_rows_share_the_files_of_videos(noisy, tmp_path, monkeypatch, links):
    names = {file.name for file in (noisy / ".rbtool/videos").iterdir()}
    written = []
    monkeypatch.setattr(videos, "NewFile", lambda path, **more: written.append(path.name) or NewFile(path, **more))

    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "another file system")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    chosen = preprocessed(noisy, tmp_path / "chosen", episodes="0", where="reward >= 5")
    assert set(written) == (set() if links else names)
    before, _ = references_of(tmp_path / "chosen")
    assert before[:, 1].tolist() == list(range(5, 20))
    one, other = (video_of(folder, int(before[0, 0])) for folder in (noisy, tmp_path / "chosen"))
    assert one.stat().st_size > 4096
    assert other.samefile(one) == links
    assert other.read_bytes() == one.read_bytes()
    assert not links or chosen.shared_bytes >= one.stat().st_size
    shutil.rmtree(noisy)
    assert rbtool.check(tmp_path / "chosen", full=True).errors == 0


def replace_video(video, data):
    video.unlink()
    video.write_bytes(data)
    video.chmod(0o444)


def test_a_video_that_changed_is_not_linked(noisy, tmp_path):
    video = video_of(noisy, int(references_of(noisy)[0][0, 0]))
    replace_video(video, video.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptDataError, match="chang"):
        preprocessed(noisy, tmp_path / "chosen", where="reward >= 5")
    assert not (tmp_path / "chosen").exists()


def test_a_damaged_video_is_not_encoded_again(kept, tmp_path):
    with pytest.raises(UsageError, match="is not within 40x48"):
        preprocessed(kept, tmp_path / "a", crop="observation.image=9,9,40x40")
    broken = preprocessed(kept, tmp_path / "broken", episodes="0").path
    [video] = (broken / ".rbtool/videos").glob("*.mp4")
    data = bytearray(video.read_bytes())
    data[len(data) // 2] ^= 1
    replace_video(video, data)
    with pytest.raises(CorruptDataError, match="is damaged: its digest does not match its name"):
        preprocessed(broken, tmp_path / "b", encode="av1")
    assert not (tmp_path / "b").exists()


def test_depths_do_not_become_bytes(tmp_path):
    source = Path(__file__).parents[2] / "data/lerobot/recent/depth_video_mm"
    made = rbtool.convert(source, tmp_path / "made").path
    for asked in ({"crop": ["observation.image.depth=2x2"]}, {"encode": ["h264"]}):
        with pytest.raises(UsageError, match=r"observation\.image\.depth is a kept video of depths"):
            preprocessed(made, tmp_path / "out", **asked)
    preprocessed(made, tmp_path / "out", encode=["observation.image.rgb=h264"])
