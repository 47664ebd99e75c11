"""`LeRobotExperienceReplay`: the documented constructor over a hub on loopback, and columns in memory."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hub import Hub
from lerobot_files import decoded, picture, plain_rows, write_video
from machine import Machine

from rbtool import LeRobotExperienceReplay, VideoClipRef, convert
from rbtool.converters.lerobot.replay import lerobot_columns_to_tensordict
from rbtool.core.errors import SchemaError, UsageError

DATA = Path(__file__).parents[1] / "data" / "lerobot"
NAME = "someone/toy"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(DATA / "v30", folder / NAME)
    with Hub(folder) as hub:
        yield Machine(hub, tmp_path_factory.mktemp("machine"))


def run(machine: Machine, script: str) -> list[str]:
    begin = "import json, numpy\nfrom rbtool import LeRobotExperienceReplay, load_dataset\n"
    return machine.python(begin + script).splitlines()


def test_steps_have_the_frames_and_texts_of_the_source(machine: Machine) -> None:
    lines = run(
        machine,
        f"""
data = LeRobotExperienceReplay({NAME!r}, batch_size=8, key_map={{"observation.state": "state"}})
rows = data[:]
numpy.save("images.npy", rows["observation", "image", "top"].numpy())
print(json.dumps([rows["info", "index"].tolist(), list(rows["language_instruction"]), rows["state"].tolist()]))
print(data.data_path.relative_to(data.root), data.sample()["next", "observation", "image", "top"].shape[1:])
other = LeRobotExperienceReplay({NAME!r}, download=False, decode_video=False, batch_size=4, num_slices=2)
batch = other.sample()
print(batch["video", "observation", "image", "top"].shape, batch["frame"].reshape(2, 2).diff(dim=1).tolist())
""",
    )
    index, words, state = json.loads(lines[0])
    rows = plain_rows(DATA / "v30")
    assert index == list(range(42))
    assert words == [row["task"] for row in rows]
    assert state == [row["observation.state"] for row in rows]
    images = np.load(machine.folder / "images.npy")
    assert np.array_equal(images, np.stack([row["observation.images.top"] for row in rows]).transpose(0, 3, 1, 2))
    assert lines[1:] == [f"{NAME} torch.Size([3, 48, 48])", "torch.Size([4, 2]) [[1], [1]]"]


def test_steps_have_the_texts_of_subtasks(tmp_path: Path) -> None:
    convert(DATA / "recent/subtasks_v05", tmp_path / "someone/apples")
    rows = LeRobotExperienceReplay("someone/apples", root=tmp_path, download=False)[:9]
    assert list(rows["subtask"]) == [f"{one} the apple" for one in ("approach", "grasp", "lift") for _ in range(3)]


def test_arguments_that_make_no_sense_are_refused(machine: Machine) -> None:
    lines = run(
        machine,
        f"""
for arguments in ({{"num_slices": 2, "slice_len": 3}}, {{"download": "no"}}, {{"slice_len": 2, "sampler": object()}}):
    try:
        LeRobotExperienceReplay({NAME!r}, **arguments)
    except ValueError as error:
        print(error)
try:
    LeRobotExperienceReplay("someone/else", download=False)
except FileNotFoundError as error:
    print(isinstance(error, RuntimeError), error)
""",
    )
    assert "expected one of them" in lines[0]
    assert "expected True, False or 'force'" in lines[1]
    assert "sampler is set" in lines[2]
    assert lines[3].startswith("True someone/else is not in")


def columns(**more: Any) -> dict[str, Any]:
    return {
        "observation.state": torch.arange(12.0).reshape(6, 2), "action": torch.arange(6.0).reshape(6, 1),
        "episode_index": torch.tensor([0, 0, 0, 1, 1, 1]), "frame_index": torch.tensor([0, 1, 2, 0, 1, 2]),
        "next.reward": np.arange(6, dtype=np.float32), "next.done": torch.tensor([0, 0, 1, 0, 0, 0]).bool(),
        "task": ["open"] * 3 + ["close"] * 3, **more,
    }  # fmt: skip


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "a.mp4", [picture(number) for number in range(6)], g="3")


def test_columns_have_the_documented_keys() -> None:
    rows = lerobot_columns_to_tensordict(columns(), key_map={"action": ("robot", "action")})
    assert rows.batch_size == (6,)
    assert rows["observation", "state"].shape == (6, 2)
    assert rows["robot", "action"].shape == (6, 1)
    assert rows["next", "reward"].shape == rows["next", "done"].shape == (6, 1)
    assert rows["frame"].tolist() == [0, 1, 2, 0, 1, 2]
    assert list(rows["language_instruction"]) == ["open"] * 3 + ["close"] * 3


@each(("given", "error"), [
    ({}, UsageError), ({"task": ["a", 3]}, UsageError), ({"a": 3}, UsageError), ({"a": torch.tensor(1)}, SchemaError),
    ({"a": torch.zeros(2), "b": torch.zeros(3)}, SchemaError),
    ({"task": ["a"], "language_instruction": ["b"]}, UsageError),
])  # fmt: skip
def test_columns_that_make_no_rows_are_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        lerobot_columns_to_tensordict(given)


def test_a_buffer_of_columns_has_texts_and_slices() -> None:
    buffer = LeRobotExperienceReplay.from_columns(columns(), batch_size=4, slice_len=2)
    for _ in range(10):
        batch = buffer.sample()
        assert batch["frame"].reshape(2, 2).diff(dim=1).tolist() == [[1], [1]]
        words = [("open", "close")[int(one)] for one in batch["episode"]]
        assert list(batch["language_instruction"]) == words
    assert buffer.repo_id == "local"
    with pytest.raises(UsageError, match="expected one of them"):
        LeRobotExperienceReplay.from_columns(columns(), num_slices=2, slice_len=2)


def test_a_buffer_of_columns_has_a_root_and_makes_nothing_there(tmp_path: Path) -> None:
    buffer = LeRobotExperienceReplay.from_columns(
        columns(), root=tmp_path / "root", batch_size=4, prefetch=2, pin_memory=False, writer=None, collate_fn=None
    )
    assert buffer.root == tmp_path / "root"
    assert buffer.sample().shape == (4,)
    assert not buffer.root.exists()
    with pytest.raises(TypeError, match="download"):
        LeRobotExperienceReplay.from_columns(columns(), download=False)


def test_rehydrated_rows_have_what_follows_in_the_episode() -> None:
    rows = LeRobotExperienceReplay.from_columns(columns(), rehydrate=True)[:]
    after = rows["next", "observation", "state"]
    expected = torch.tensor([[2.0, 3], [4, 5], [np.nan] * 2, [8, 9], [10, 11], [np.nan] * 2])
    assert torch.equal(after.nan_to_num(-1), expected.nan_to_num(-1))
    with pytest.raises(UsageError, match="episode_index"):
        LeRobotExperienceReplay.from_columns({"observation.state": torch.zeros(2)}, rehydrate=True)


def test_what_is_no_column_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'fps' is left out"):
        buffer = LeRobotExperienceReplay.from_columns(columns(fps=10))
    assert "fps" not in buffer[:].keys()  # noqa: SIM118  # of a tensordict


def test_clips_decode_the_frames_that_they_refer_to(video: Path) -> None:
    expected = torch.from_numpy(np.stack(decoded(video))).movedim(-1, -3)
    clip = VideoClipRef.from_file(video)
    assert clip.batch_size == (6,)
    assert torch.equal(clip.decode(), expected)
    order = torch.tensor([4, 0, 4])
    assert torch.equal(clip[order].decode(dtype=torch.float32), expected[order].float())
    assert torch.equal(clip.reshape(2, 3).decode()[1], expected[3:])
    assert torch.equal(torch.stack([clip[5], clip[1]]).decode(), expected[[5, 1]])
    assert torch.equal(pickle.loads(pickle.dumps(clip[2:4])).frames, expected[2:4])
    assert clip.source == str(video)
    assert (clip.auto_decode, clip.stream, clip.out_device, clip.out_dtype) == (False, None, None, None)
    options: dict[str, Any] = {"stream": 0, "auto_decode": True, "device": "cpu", "dtype": torch.float32}
    made_alike = (
        VideoClipRef.from_file(video, **options), VideoClipRef.from_files([video], [6], **options),
        VideoClipRef.from_timestamps(video, torch.arange(6) / 10, **options),
        VideoClipRef(video, stream=0, auto_decode=True, out_device="cpu", out_dtype=torch.float32),
    )  # fmt: skip
    for made in made_alike:
        assert made.frame_index.tolist() == list(range(6))
        assert (made.auto_decode, made.stream, made.out_device) == (True, 0, torch.device("cpu"))
        assert torch.equal(made[order].frames, expected[order].float())
    with pytest.raises(TypeError, match="colour"):
        VideoClipRef.from_file(video, colour=True)
    with pytest.raises(UsageError, match="stream is 1"):
        VideoClipRef.from_timestamps(video, [0.0], 10, stream=1)
    for fps in (10, None):  # None: the times are those in the file
        assert VideoClipRef.from_timestamps(video, [0.0, 0.31, 9.5], fps).frame_index.tolist()[:2] == [0, 3]
    assert VideoClipRef.from_timestamps(video, [9.5]).frame_index.tolist() == [5]


@each(
    ("given", "shape", "files"),
    [
        ({"frame_index": torch.arange(4)}, [4], [0, 0, 0, 0]),
        ({"frame_index": torch.arange(4, dtype=torch.int32).view(2, 2)}, [2, 2], [[0, 0], [0, 0]]),
        ({"frame_index": [3, 1]}, [2], [0, 0]),
        ({"frame_index": 3}, [], 0),
        ({"sources": ["a.mp4", "b.mp4"], "frame_index": torch.arange(2)}, [2], [0, 0]),
        ({"sources": ["a.mp4", "b.mp4"], "frame_index": torch.arange(2), "file_id": 1}, [2], [1, 1]),
        ({"sources": [Path("a.mp4"), "b.mp4"], "frame_index": [0, 1], "file_id": torch.tensor([0.0, 1])}, [2], [0, 1]),
    ],
)
def test_clips_are_made_of_paths_and_numbers(given: dict[str, Any], shape: list[int], files: Any) -> None:
    clip = VideoClipRef(**{"sources": "a.mp4"} | given)
    assert clip.batch_size == clip.frame_index.shape == torch.Size(shape)
    assert clip.frame_index.dtype == clip.file_id.dtype == torch.int64
    assert clip.file_id.tolist() == files
    assert clip.paths == clip.sources == tuple(str(one) for one in given.get("sources", ["a.mp4"]))
    copies = [clip.clone(), clip[...], torch.stack([clip, clip])[1], pickle.loads(pickle.dumps(clip)), clip.to("cpu")]
    for copy in copies:
        assert (copy.paths, copy.auto_decode, copy.batch_size) == (clip.paths, False, clip.batch_size)
        assert copy.frame_index.equal(clip.frame_index)
        assert bool((copy == clip).frame_index.all())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stream": 1}, "stream is 1"), ({"file_id": torch.zeros(3)}, r"file_id is \[3\]"),
        ({"sources": ["a", "b"], "frame_index": None}, "expected numbers of frames of 2 files"),
    ],
)  # fmt: skip
def test_clips_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        VideoClipRef(**{"sources": "a.mp4", "frame_index": torch.arange(4)} | given)


@pytest.mark.peer
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("frames_per_bin", [None, 1, 2, 3, 4])
def test_bins_and_clips_are_torchrls_exactly(frames_per_bin: int | None) -> None:
    theirs = pytest.importorskip("torchrl.data.video").VideoClipRef
    for count in range(1, 25):
        clip, other = (kind("a.mp4", frame_index=torch.arange(count)) for kind in (VideoClipRef, theirs))
        assert (clip.batch_size, clip.sources) == (other.batch_size, other.sources)
        for num_bins in range(1, count + 1):
            found, expected = (one.rebin(num_bins, frames_per_bin) for one in (clip, other))
            assert found.frame_index.tolist() == expected.frame_index.tolist()


@each(
    ("count", "arguments", "frames"),
    [
        (2, (1,), [0]), (5, (2,), [0, 3]),
        (8, (2,), [2, 6]), (8, (2, 2), [[0, 3], [4, 7]]), (8, (3,), [1, 4, 6]), (8, (3, 2), [[0, 2], [3, 4], [5, 7]]),
        (8, (2, 3), [[0, 2, 3], [4, 6, 7]]), (8, (3, 3), [[0, 1, 2], [3, 4, 4], [5, 6, 7]]), (8, (1, 1), [[0]]),
        (8, (1, 8), [list(range(8))]), (8, (8, 1), [[place] for place in range(8)]),
    ],
)  # fmt: skip
def test_bins_are_those_of_torchrl(count: int, arguments: tuple[int, ...], frames: list[Any]) -> None:
    named = dict(zip(("num_bins", "frames_per_bin"), arguments, strict=False))
    clip = VideoClipRef("a.mp4", torch.arange(count))
    assert clip.rebin(**named).frame_index.tolist() == frames
    assert VideoClipRef.from_file("a.mp4", num_frames=count, **named).frame_index.tolist() == frames
    halves = VideoClipRef.from_files(["a.mp4", "b.mp4"], num_frames_per_file=[count // 2, count - count // 2], **named)
    assert (halves.frame_index + halves.file_id * (count // 2)).tolist() == frames
    with pytest.raises(UsageError, match="expected num_bins with it"):
        VideoClipRef.from_file("a.mp4", 8, frames_per_bin=2)


@each(("times", "fps", "words"), [
    ([0.0], 0, "fps is 0"), ([0.0], -1.0, "fps is -1.0"), ([0.0], float("nan"), "fps is nan"), ([0.0], "10", "fps is"),
    ([float("nan")], 10, "seconds from 0"), ([-0.1], 10, "seconds from 0"), ([float("inf")], 10, "seconds from 0"),
])  # fmt: skip
def test_times_that_no_frame_has_are_refused(times: list[float], fps: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VideoClipRef.from_timestamps("a.mp4", times, fps)


def test_clips_of_several_files_and_bins(video: Path) -> None:
    other = write_video(video.with_name("b.mp4"), [picture(50 + number) for number in range(3)])
    clip = VideoClipRef.from_files([video, other])
    assert torch.bincount(clip.file_id).tolist() == [6, 3]
    expected = torch.from_numpy(np.stack([*decoded(video), *decoded(other)])).movedim(-1, -3)
    order = torch.tensor([8, 2, 6, 2])
    assert torch.equal(clip[order].decode(), expected[order])
    assert clip.rebin(3).frame_index.tolist() == [1, 4, 1]
    assert clip.rebin(3, 3).frame_index.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    for bins, count in ((0, None), (10, None), (2, 0)):
        with pytest.raises(UsageError):
            clip.rebin(bins, count)
    with pytest.raises(UsageError, match="expected one"):
        clip.source  # noqa: B018
    with pytest.raises(UsageError, match="a number for each"):
        VideoClipRef.from_files([video], [1, 2])


@pytest.mark.parametrize("decode", [True, False])
def test_a_buffer_of_columns_decodes_clips(decode: bool, video: Path) -> None:
    given = columns(**{"observation.images.top": VideoClipRef.from_file(video)})
    buffer = LeRobotExperienceReplay.from_columns(given, decode_video=decode)
    expected = torch.from_numpy(np.stack(decoded(video))).movedim(-1, -3)
    order = torch.tensor([3, 5, 0])
    found = buffer[order]["observation", "image", "top"]
    assert torch.equal(found if decode else found.decode(), expected[order])
