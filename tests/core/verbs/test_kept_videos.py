"""Videos that a dataset keeps: batches contain their decoded frames, in any order and process."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from lerobot_files import CAMERA, plain_rows, random_takes, write_dataset
from torch.utils.data import DataLoader

import rbtool
from rbtool.core.encodings.video import clear_video_decoder_cache, set_video_decoder_cache_size
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.videos import reference_keys, video_name
from rbtool.core.open_steps import open_steps
from rbtool.core.verbs import check

DATA = Path(__file__).parents[2] / "data" / "lerobot"
IMAGE = ("observation", "image", "top")
STEPS = 20


@pytest.fixture(scope="module", params=["v2.1", "v3.0"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("kept") / "d", random_takes((6, 1, 4, 9)), version=request.param)


@pytest.fixture(scope="module")
def kept(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = "ted" if source.parent.name.endswith("0") else "packed"
    return rbtool.convert(source, tmp_path_factory.mktemp("out") / "kept", layout=layout).path


@pytest.fixture
def own(kept: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(kept, tmp_path / "own"))


def frames_and_next(source: Path) -> tuple[Any, Any]:
    """Return the frame of each row and the frame after it, which at the end of an episode is the row's own."""
    rows = plain_rows(source)
    images = np.stack([row[CAMERA] for row in rows])
    numbers = np.array([row["episode_index"] for row in rows])
    after = np.arange(1, len(rows) + 1)
    after[[*(np.flatnonzero(np.diff(numbers))), len(rows) - 1]] -= 1
    return images, images[after]


def assert_right(batch: Any, source: Path, rows: Any) -> None:
    images, after = frames_and_next(source)
    assert torch.equal(batch[IMAGE], torch.from_numpy(images[rows]))
    assert torch.equal(batch["next"][IMAGE], torch.from_numpy(after[rows]))
    assert not [key for key in batch.keys(True) if "video" in key]


def test_rows_in_any_order_have_their_frames_even_after_pickling(source: Path, kept: Path) -> None:
    buffer, draw = rbtool.load_dataset(kept), np.random.default_rng(0)
    assert len(buffer) == STEPS
    for _ in range(20):
        rows = draw.integers(0, STEPS, 7)
        assert_right(buffer[torch.from_numpy(rows)], source, rows)
    assert_right(buffer[:], source, np.arange(STEPS))
    assert_right(buffer[3], source, 3)
    buffer = pickle.loads(pickle.dumps(rbtool.load_dataset(kept)))
    assert_right(buffer[5:8], source, np.arange(5, 8))


@pytest.mark.parametrize("slices", [False, True])
def test_batches_of_a_stream_have_their_frames(source: Path, kept: Path, slices: bool) -> None:
    sampler = rbtool.StreamSliceSampler(slice_len=3) if slices else rbtool.StreamSampler()
    steps = 0
    for batch in rbtool.load_dataset(kept, 6, streaming=True, sampler=sampler, seed=0):
        assert_right(batch.exclude(("next", "truncated")), source, batch["index"].flatten().numpy())
        steps += len(batch)
    assert steps == (9 if slices else STEPS)


def test_frames_of_a_stream_are_stacked(source: Path, kept: Path) -> None:
    frames = rbtool.StoredFrameStack(2, IMAGE, dim=-1)
    images, _ = frames_and_next(source)
    numbers = np.array([row["episode_index"] for row in plain_rows(source)])
    for batch in rbtool.load_dataset(kept, 6, streaming=True, transform=frames, seed=0):
        rows = batch["index"].numpy()
        begins = (rows == 0) | (numbers[rows] != numbers[rows - 1])
        before = np.where(begins[:, None, None, None], 0, images[rows - 1])
        assert np.array_equal(batch[IMAGE].numpy(), np.concatenate([before, images[rows]], -1))


def test_kept_and_decoded_datasets_give_equal_batches(source: Path, kept: Path, tmp_path: Path) -> None:
    decoded = rbtool.convert(source, tmp_path / "decoded", images="decode").path
    one, other = (rbtool.load_dataset(path, 5, seed=3) for path in (kept, decoded))
    for _ in range(5):
        batch, expected = one.sample(), other.sample()
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        assert (batch == expected).all()


def test_any_number_of_open_videos_is_enough(source: Path, kept: Path) -> None:
    buffer, draw = rbtool.load_dataset(kept), np.random.default_rng(1)
    try:
        for size in (0, 1, 3):
            set_video_decoder_cache_size(maxsize=size)
            rows = draw.integers(0, STEPS, 30)
            assert_right(buffer[torch.from_numpy(rows)], source, rows)
    finally:
        set_video_decoder_cache_size(8)
    with pytest.raises(UsageError, match="number of videos from 0"):
        set_video_decoder_cache_size(-1)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_loader_decode_the_same_frames(method: str, source: Path, kept: Path) -> None:
    dataset = rbtool.torch_dataset(kept, batch_size=4, sampler=rbtool.SamplerWithoutReplacement(), seed=0)
    next(iter(dataset))  # the parent has videos open, which a fork must leave alone
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    batches = [(batch, batch["info", "index"].numpy()) for batch in loader]
    assert sorted(np.concatenate([rows for _, rows in batches]).tolist()) == list(range(STEPS))
    for batch, rows in batches:
        assert_right(batch, source, rows)


def test_a_fork_decodes_videos_that_its_parent_has_open(source: Path, kept: Path) -> None:
    buffer = rbtool.load_dataset(kept)
    assert_right(buffer[:4], source, np.arange(4))
    child = os.fork()
    if not child:
        try:
            assert_right(buffer[2:9], source, np.arange(2, 9))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert_right(buffer[4:6], source, np.arange(4, 6))


def test_load_dataset_gives_references_or_padded_trajectories_on_request(kept: Path, source: Path) -> None:
    batch = rbtool.load_dataset(kept, decode_video=False)[:]
    assert batch["video", *IMAGE].shape == (STEPS, 2)
    assert ("observation", "state") in batch.keys(True)
    assert IMAGE not in batch.keys(True)
    batch = rbtool.load_dataset(kept, split_trajs=True)[:]
    images, _ = frames_and_next(source)
    assert torch.equal(batch[IMAGE][batch["mask"]], torch.from_numpy(images))
    assert not batch[IMAGE][~batch["mask"]].any()


@pytest.mark.parametrize("av", [True, False], ids=["with PyAV", "without"])
def test_sample_shows_frames_or_references_without_statistics(kept: Path, monkeypatch, av: bool) -> None:
    if not av:
        monkeypatch.setitem(sys.modules, "av", None)
    found = {one.key: one for one in rbtool.sample(kept, 8, seed=0).fields}
    image = "observation.image.top"
    assert {name for name in found if name.endswith(image)} == (
        {image, f"next.{image}"} if av else {f"video.{image}", f"next.video.{image}"}
    )
    if av:
        frames = rbtool.load_dataset(kept, 8, seed=0).sample()[IMAGE]
        assert (found[image].dtype, found[image].shape) == ("uint8", frames.shape)
        assert found[image].mean == pytest.approx(frames.float().mean().item())
    for one in () if av else (found[f"video.{image}"], found[f"next.video.{image}"]):
        assert (one.dtype, one.shape, one.min, one.mean, one.max) == ("int64", (8, 2), None, None, None)
    assert found["observation.state"].mean is not None


def test_a_changed_video_is_found_by_its_digest(own: Path) -> None:
    assert rbtool.load_dataset(own, verify=True)[:][IMAGE].any()
    video = next((own / ".rbtool/videos").glob("*.mp4"))
    flip(video, video.stat().st_size // 2)
    with pytest.raises(CorruptDataError, match=video.name):
        rbtool.load_dataset(own, verify=True)
    assert rbtool.check(own).errors


def damage_last_group(video: Path) -> None:
    """Overwrite the data of the last frames, in a video of several groups of four."""
    data = video.read_bytes()
    stop = data.index(b"moov") - 4
    video.chmod(0o644)
    video.write_bytes(data[: stop - 60] + b"\x55" * 60 + data[stop:])


def errors_of(result: Any) -> list[tuple[str, list[int]]]:
    return [(one.rule, list(one.episodes)) for one in result.findings if one.severity == "error"]


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_check_finds_frames_that_cannot_be_decoded(layout: str, tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", random_takes((3, 9)))
    damage_last_group(source / f"videos/chunk-000/{CAMERA}/episode_000001.mp4")
    made = rbtool.convert(source, tmp_path / "out", layout=layout).path
    buffer = rbtool.load_dataset(made, verify=True)
    assert buffer[:3][IMAGE].any()
    with pytest.raises(CorruptDataError, match="damaged"):
        buffer[:]
    other = rbtool.convert(write_dataset(tmp_path / "e", random_takes((3,), seed=1)), tmp_path / "other").path
    mixed = rbtool.mix([made, other], tmp_path / "mix.toml").path
    for dataset in (source, made, mixed):
        result = rbtool.check(dataset)
        assert errors_of(result) == [("TED017", [1])], result.findings
        assert "damaged" in next(one.message for one in result.findings if one.rule == "TED017")
    assert str(made / ".rbtool/videos") in rbtool.check(made).findings[0].message


def test_check_decodes_some_groups_of_frames_or_all_with_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_dataset(tmp_path / "d", random_takes((12, 12, 12)))
    damage_last_group(source / f"videos/chunk-000/{CAMERA}/episode_000001.mp4")
    made = rbtool.convert(source, tmp_path / "out").path
    assert not [note for note in rbtool.check(made).notes if "decoded" in note]
    monkeypatch.setattr(check, "_SAMPLED_FRAMES", 8)
    monkeypatch.setattr(check, "_SAMPLED_PIXELS", 0)
    result = rbtool.check(made)
    assert errors_of(result) == []
    assert "8 of 36 frames of kept videos were decoded; --full decodes all of them" in result.notes
    result = rbtool.check(made, full=True)
    assert errors_of(result) == [("TED017", [1])]
    assert not [note for note in result.notes if "--full" in note]


def test_check_notes_that_nothing_is_decoded_without_pyav(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    result = rbtool.check(kept)
    assert result.errors == 0
    assert [note for note in result.notes if "frames of kept videos were not decoded: video needs PyAV" in note]


@pytest.mark.parametrize(
    ("reference", "message"), [((5, 0), "is missing: rows refer to its frames"), ((0, 99), "rows refer to frame 99")]
)
def test_check_finds_references_to_missing_frames(own, tmp_path, reference, message) -> None:
    def refer(rows: Any) -> Any:
        video, frame = reference
        references, last = rows["video", *IMAGE], rows["episode"] == 2
        references[last] = torch.tensor([video or int(references[last][0, 0]), frame])
        return rows

    made = rbtool.preprocess(own, refer, tmp_path / "made", unit="step", chunk_size=20).path
    found = [one for one in rbtool.check(made).findings if one.rule == "TED017"]
    assert [(list(one.episodes), message in one.message) for one in found] == [([2], True)]


def test_a_missing_video_is_named(own: Path) -> None:
    buffer = rbtool.load_dataset(own)
    clear_video_decoder_cache()
    for video in (own / ".rbtool/videos").glob("*.mp4"):
        video.unlink()
    with pytest.raises(CorruptDataError, match=r"\.mp4 is missing: rows refer to its frames"):
        buffer[:2]


def test_only_the_videos_of_chosen_episodes_are_kept(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", random_takes((3, 4, 5)))
    kept = rbtool.convert(source, tmp_path / "out", episodes="1").path
    assert len(list((kept / ".rbtool/videos").glob("*.mp4"))) == 1


def test_verbs_that_keep_rows_keep_the_videos(source: Path, kept: Path, tmp_path: Path) -> None:
    ted = rbtool.convert(kept, tmp_path / "ted", layout="ted").path
    saved = rbtool.checkpoint.save(kept, tmp_path / "saved", form="flat").path
    for made in (
        rbtool.convert(ted, tmp_path / "packed", layout="packed"),
        rbtool.checkpoint.load(saved, tmp_path / "loaded"),
        rbtool.preprocess(kept, dest=tmp_path / "clipped", operations={"clip-reward": "-9:9"}),
    ):
        assert_right(rbtool.load_dataset(made.path, verify=True)[:], source, np.arange(STEPS))


def videos_in(reader: StepReader) -> set[int]:
    """The ids of the videos that rows refer to."""
    return {
        int(one) for key in reference_keys(reader.fields) for one in reader.read(key, 0, reader.manifest.steps)[:, 0]
    }


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"operations": {"episodes": "1:3"}}, 2),
        ({"operations": {"filter": ["length >= 4"]}}, 2),
        ({"operations": {"exclude": ["video"]}}, 0),
    ],
)
def test_preprocess_copies_the_videos_of_rows_that_stay(given: dict[str, Any], count: int, tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", random_takes((3, 4, 5)))
    kept = rbtool.convert(source, tmp_path / "kept").path
    made = rbtool.preprocess(kept, dest=tmp_path / "made", **given).path
    found = list((made / ".rbtool/videos").glob("*.mp4")) if (made / ".rbtool/videos").exists() else []
    assert len(found) == count
    with open_steps(made) as reader:
        assert len(videos_in(reader)) == count
        assert {video_name(number) for number in videos_in(reader)} == {path.name for path in found}
    assert len(rbtool.load_dataset(made, verify=True)[:]) == rbtool.inspect(made).steps


def test_parts_and_merged_datasets_have_their_videos(source: Path, kept: Path, tmp_path: Path) -> None:
    parts = rbtool.split(kept, tmp_path / "parts", train=0.5, val=0.5, seed=1).parts
    for part in parts:
        with open_steps(part.path) as reader:
            assert len(list((part.path / ".rbtool/videos").glob("*.mp4"))) == len(videos_in(reader))
    merged = rbtool.merge([part.path for part in parts], tmp_path / "merged").path
    batch = rbtool.load_dataset(merged, verify=True)[:]
    images, _ = frames_and_next(source)
    index = batch["info", "index"].numpy()
    assert sorted(index.tolist()) == list(range(STEPS))
    assert torch.equal(batch[IMAGE], torch.from_numpy(images[index]))


def test_cameras_whose_files_differ_in_size_have_their_frames(tmp_path: Path) -> None:
    with open_steps(rbtool.convert(DATA / "g1", tmp_path / "g1").path) as reader:
        assert reference_keys(reader.fields) == [
            ("video", "observation", "image", "cam_high"), ("next", "video", "observation", "image", "cam_high"),
        ]  # fmt: skip
    rows = plain_rows(DATA / "g1")
    order = np.random.default_rng(0).permutation(39)
    batch = rbtool.load_dataset(tmp_path / "g1")[torch.from_numpy(order)]
    expected = np.stack([rows[row]["observation.images.cam_high"] for row in order])
    assert torch.equal(batch["observation", "image", "cam_high"], torch.from_numpy(expected))


def test_forms_that_cannot_hold_videos_refuse_them(kept: Path, tmp_path: Path) -> None:
    for save in (
        lambda out: rbtool.checkpoint.save(kept, out, form="h5"),
        lambda out: rbtool.checkpoint.save(kept, out, form="flat", for_library="torchrl"),
        lambda out: rbtool.export(kept, out, to="npz"),
    ):
        with pytest.raises(UsageError, match="images in videos that are kept"):
            save(tmp_path / "out")
    assert not list(tmp_path.iterdir())
