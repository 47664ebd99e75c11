"""Windows of LeRobot's datasets against the rule of its own loader: every anchor, in loaders, mixtures and streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from lerobot_files import FPS, decoded, random_takes, write_dataset

import rbtool
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError
from rbtool.core.storages.dataset import Pages
from rbtool.core.testing.datasets import write_walks
from rbtool.core.transforms import video
from rbtool.core.transforms.keyed import EpisodeTexts
from rbtool.core.transforms.windows import Windows

LENGTHS = (7, 1, 12, 2, 5)
STEPS = sum(LENGTHS)


def reference(values: Any, offsets: Sequence[int], pad: str = "clamp") -> tuple[Any, Any]:
    """The rule of LeRobot, for every anchor of episodes of `LENGTHS`."""
    rows, missing, start = [], [], 0
    for length in LENGTHS:
        for anchor in range(start, start + length):
            wanted = [anchor + offset for offset in offsets]
            rows.append([min(max(row, start), start + length - 1) for row in wanted])
            missing.append([not start <= row < start + length for row in wanted])
        start += length
    found, missing = np.asarray(values)[np.array(rows)], np.array(missing)
    if pad == "zero":
        found[missing] = 0
    return found, missing


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("robot") / "raw", random_takes(LENGTHS))


@pytest.fixture(scope="module")
def robot(source: Path, request: pytest.FixtureRequest) -> Path:
    layout = getattr(request, "param", "packed")
    there = source.parent / layout
    if not there.exists():
        rbtool.convert(source, there, layout=layout, final_step="repeat")
    return there


@pytest.fixture(scope="module")
def truth(source: Path) -> dict[Any, Any]:
    """The values of every row, by key, without rbtool."""
    takes = random_takes(LENGTHS)
    names = {"observation.state": ("observation", "state"), "action": ("action",)}
    found = {key: np.concatenate([take.columns[name] for take in takes]) for name, key in names.items()}
    videos = sorted((source / "videos").rglob("*.mp4"))
    found["observation", "image", "top"] = np.stack([frame for path in videos for frame in decoded(path)])
    found["next", "reward"] = np.concatenate([take.columns["next.reward"] for take in takes])[:, None]
    return found


BOTH = pytest.mark.parametrize("robot", ["packed", "ted"], indirect=True)
WINDOWS = {"action": (0, 16), "observation.image": (-1, 1), ("next", "reward"): [2, -3], "observation.state": (3, 4)}
STEPS_OF = {
    ("action",): range(16), ("observation", "image", "top"): [-1, 0], ("next", "reward"): [2, -3],
    ("observation", "state"): [3],
}  # fmt: skip


def require_true(batch: Any, truth: Any, pad: str = "clamp", index: Any = None) -> None:
    """Compare the windows of a batch, of all keys, with the reference."""
    rows = (batch["index"] if index is None else index).tolist()
    for key, offsets in STEPS_OF.items():
        values, missing = reference(truth[key], offsets, pad)
        found = batch[key]
        assert found.shape == (len(rows), *values.shape[1:])
        assert np.array_equal(found.numpy(), values[rows])
        assert batch["is_pad", *key].dtype == torch.bool
        assert np.array_equal(batch["is_pad", *key].numpy(), missing[rows])


@BOTH
@pytest.mark.parametrize("pad", ["clamp", "zero"])
def test_every_anchor_of_a_dataset(robot: Path, truth: Any, pad: Any) -> None:
    buffer = rbtool.load_dataset(robot, transform=Windows(WINDOWS, pad=pad))
    batch = buffer[:]
    assert len(batch) == STEPS
    require_true(batch, truth, pad, torch.arange(STEPS))
    assert batch["episode"].tolist() == np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist()


@BOTH
@pytest.mark.parametrize(
    "sampler",
    [rbtool.RandomSampler, rbtool.SamplerWithoutReplacement, lambda: rbtool.PrioritizedSampler(STEPS, 0.6, 0.4)],
)
def test_samplers_of_a_dataset(robot: Path, truth: Any, sampler: Any) -> None:
    buffer = rbtool.load_dataset(robot, 8, sampler=sampler(), seed=0, windows=WINDOWS)
    plain = rbtool.load_dataset(robot, 8, sampler=sampler(), seed=0)
    for _ in range(4):
        batch, other = buffer.sample(), plain.sample()
        require_true(batch, truth)
        for key in ("index", "episode", "timestamp", ("next", "done"), ("observation", "pose", "arm")):
            assert torch.equal(batch[key], other[key])


def test_next_observations_are_there_if_they_are_asked_for(robot: Path, truth: Any) -> None:
    batch = rbtool.load_dataset(robot, windows={"action": (0, 2)})[:]
    assert set(batch["next"].keys(True, True)) == {"reward", "done", "terminated", "truncated"}
    assert batch["observation", "state"].shape == (STEPS, 3)
    batch = rbtool.load_dataset(robot, windows={"next.observation": (0, 1)})[:]
    assert batch["next", "observation", "image", "top"].shape[:2] == (STEPS, 1)
    plain = rbtool.load_dataset(robot)[:]
    assert torch.equal(batch["next", "observation", "state"].squeeze(1), plain["next", "observation", "state"])
    assert torch.equal(
        batch["next", "observation", "image", "top"].squeeze(1), plain["next", "observation", "image", "top"]
    )
    assert bool(batch["is_pad", "next", "observation", "state"].logical_not().all())


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_and_their_resumption(robot: Path, truth: Any, workers: int) -> None:
    loader = rbtool.TorchLoader(rbtool.torch_dataset(robot, 4, seed=0, windows=WINDOWS), num_workers=workers)
    epoch = list(loader)
    assert sorted(row for batch in epoch for row in batch["index"].tolist()) == list(range(STEPS))
    for batch in epoch:
        require_true(batch, truth)
    loader.set_epoch(0)
    begun = iter(loader)
    for _ in range(3):
        next(begun)
    state = loader.state_dict()
    del begun
    other = rbtool.torch_dataset(robot, 4, seed=9, windows=WINDOWS)
    resumed = rbtool.TorchLoader(other, num_workers=2 - workers)
    resumed.load_state_dict(state)
    for batch, expected in zip(resumed, epoch[3:], strict=True):
        assert bool((batch == expected).all())


def test_a_mixture(robot: Path, truth: Any, tmp_path: Path) -> None:
    mixture = tmp_path / "both.toml"
    rbtool.mix([robot, robot.parent / "packed"], mixture)
    buffer = rbtool.load_dataset(mixture, 8, seed=0, windows=WINDOWS)
    for _ in range(4):
        batch = buffer.sample()
        require_true(batch, truth, index=batch["index", "index"])
    for batch in rbtool.TorchLoader(
        rbtool.torch_dataset(mixture, 8, seed=0, windows=WINDOWS, batches=3), num_workers=2
    ):
        require_true(batch, truth, index=batch["index", "index"])


@BOTH
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream(robot: Path, truth: Any, shuffle: bool) -> None:
    def opened() -> Any:
        sampler = rbtool.StreamSampler(shuffle=shuffle)
        return rbtool.load_dataset(robot, 4, sampler=sampler, streaming=True, windows=WINDOWS, seed=0)

    stream, epoch = opened(), []
    for batch in stream:
        require_true(batch, truth)
        epoch.append(batch)
    assert sorted(row for batch in epoch for row in batch["index"].tolist()) == list(range(STEPS))
    first, resumed = opened(), opened()
    for _ in range(3):
        first.sample()
    resumed.load_state_dict(first.state_dict())
    for expected in epoch[3:]:
        assert bool((resumed.sample() == expected).all())


def test_a_stream_in_workers(robot: Path, truth: Any) -> None:
    stream = rbtool.load_dataset(robot, 4, streaming=True, windows=WINDOWS)
    batches = list(torch.utils.data.DataLoader(rbtool.StreamDataset(stream, seed=0), batch_size=None, num_workers=2))
    assert sorted(row for batch in batches for row in batch["index"].tolist()) == list(range(STEPS))
    for batch in batches:
        require_true(batch, truth)


def test_only_the_frames_of_windows_are_decoded(robot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    kept = video.kept_frames
    monkeypatch.setattr(
        video, "kept_frames", lambda folder, number, frames: asked.append(len(frames)) or kept(folder, number, frames)
    )

    def frames(windows: Any, pad: Any = "clamp") -> int:
        asked.clear()
        rbtool.load_dataset(robot, transform=None if windows is None else Windows(windows, pad=pad))[:]
        return sum(asked)

    assert frames(None) == 2 * STEPS
    assert frames({"action": (0, 16)}) == STEPS
    assert frames({"observation.image": (-1, 1)}) == 2 * STEPS
    assert frames({"observation.image": (-1, 1)}, "zero") == 2 * STEPS - len(LENGTHS)  # a reference to nothing is black
    assert frames({"next.observation.image": (0, 1)}) == 2 * STEPS


def test_files_larger_than_memory_are_read_where_windows_are(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is advised of the rows of one leaf: of an image not those of all actions of a chunk."""
    rbtool.convert(source, tmp_path / "raw", layout="ted", images="decode", final_step="repeat")
    buffer = rbtool.ReplayBuffer(
        storage=DatasetStorage(tmp_path / "raw", larger_than_memory=True), batch_size=6,
        transform=Windows({"action": (0, 16)}), writer=rbtool.ImmutableDatasetWriter(),
    )  # fmt: skip
    seen: dict[int, int] = {}
    monkeypatch.setattr(
        Pages, "expect", lambda _, starts, width: seen.update({width: seen.get(width, 0) + len(starts)})
    )
    batch = buffer.sample()
    assert batch["observation", "image", "top"].shape == (6, 32, 48, 3)
    assert seen[32 * 48 * 3] == 6  # the image of each anchor, and no next image
    assert seen[8] >= 6 * 16  # actions
    whole = dict(seen)
    rbtool.ReplayBuffer(
        storage=buffer.storage, batch_size=6, writer=rbtool.ImmutableDatasetWriter(),
        transform=Windows({"observation.image": (0, 1), "action": (0, 1)}),
    ).sample()  # fmt: skip
    assert seen[32 * 48 * 3] - whole[32 * 48 * 3] == 6


def test_seconds_are_those_of_the_dataset(robot: Path, tmp_path: Path) -> None:
    seconds = {"action": [step / FPS for step in (-2, 0, 3)], "observation.state": "0s:0.3s"}
    steps = {"action": [-2, 0, 3], "observation.state": (0, 3)}
    assert bool((rbtool.load_dataset(robot, windows=seconds)[:] == rbtool.load_dataset(robot, windows=steps)[:]).all())
    streams = [rbtool.load_dataset(robot, 4, windows=one, streaming=True, seed=0) for one in (seconds, steps)]
    for one, other in zip(*streams, strict=True):
        assert bool((one == other).all())


def test_added_rows_have_windows_as_those_of_the_dataset(robot: Path) -> None:
    transform = Windows({"action": (0, 3)})
    buffer = rbtool.OfflineToOnlineReplayBuffer(robot, online_capacity=40, batch_size=8, transform=transform)
    buffer.extend(rbtool.load_dataset(robot)[:])
    batch = buffer.sample()
    assert batch["action"].shape == (8, 3, 2)
    assert set(batch["source_id"].tolist()) == {0, 1}


def test_the_mask_can_have_another_name(robot: Path) -> None:
    named = rbtool.RenameTransform([("is_pad", "action")], ["action_is_pad"])
    batch = rbtool.load_dataset(robot, 4, windows={"action": (0, 5)}, transform=named).sample()
    assert batch["action_is_pad"].shape == (4, 5)


def test_what_has_no_windows_says_so(robot: Path, tmp_path: Path) -> None:
    windows = {"action": (0, 2)}
    with pytest.raises(MissingKeyError, match="actoin is not in the data"):
        rbtool.load_dataset(robot, 4, windows={"actoin": (0, 2)})
    with pytest.raises(UsageError, match="split_trajs"):
        rbtool.load_dataset(robot, 4, windows=windows, split_trajs=True)
    write_walks(walks := tmp_path / "walks", [(5, "terminated")])
    with pytest.raises(UsageError, match="steps per second is unknown"):
        rbtool.load_dataset(walks, 4, windows={"observation": "0s:1s"}, streaming=True)
    with pytest.raises(UsageError, match="windows is set, expected in the buffer"):
        rbtool.torch_dataset(rbtool.load_dataset(robot, 4), windows=windows)
    with pytest.raises(UsageError, match="expected as a transform"):
        rbtool.OfflineToOnlineReplayBuffer(robot, online_capacity=9, batch_size=4, windows=windows)
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        rbtool.load_dataset(robot, 4, transform=[lambda batch: batch, Windows(windows)]).sample()
    with pytest.raises(SchemaError, match="only a buffer can provide"):
        rbtool.ReplayBufferEnsemble(rbtool.load_dataset(robot), transform=Windows(windows), batch_size=4).sample()


def test_columns_in_memory() -> None:
    columns = {"action": torch.arange(6.0), "episode_index": torch.tensor([0, 0, 0, 1, 1, 1]), "task": ["a"] * 6}
    buffer = rbtool.LeRobotExperienceReplay.from_columns(columns, transform=Windows({"action": (0, 2)}))
    batch = buffer[:]
    assert batch["action"].tolist() == [[0, 1], [1, 2], [2, 2], [3, 4], [4, 5], [5, 5]]
    assert list(batch["language_instruction"]) == ["a"] * 6


def test_batches_have_the_task_and_the_language_of_their_rows(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data/lerobot/recent/two_cameras_language"
    made = rbtool.convert(source, tmp_path / "made").path
    names = {row["task_index"]: row["task"] for row in pq.read_table(source / "meta/tasks.parquet").to_pylist()}
    told = pq.read_table(next(source.glob("data/*/*.parquet"))).to_pylist()
    options: dict[str, Any] = {"texts": True, "windows": {"action": (0, 4)}}

    def require_told(batch: Any, rows: Any) -> None:
        assert list(batch["language_instruction"]) == [names[told[row]["task_index"]] for row in rows]
        for name in ("language_persistent", "language_events"):
            assert list(batch[name]) == [told[row][name] for row in rows]

    require_told(rbtool.load_dataset(made, decode_video=False, **options)[:], range(len(told)))
    for workers in (0, 2):
        batches = rbtool.torch_dataset(made, batch_size=5, seed=3, **options)
        batch = next(iter(rbtool.TorchLoader(batches, num_workers=workers)))
        require_told(batch, batch["index"].tolist())
    (stream,) = rbtool.load_dataset(str(made), len(told), streaming=True, seed=0, **options)
    require_told(stream, stream["index"].tolist())
    rbtool.mix([made, made], tmp_path / "both.toml")
    batch = rbtool.load_dataset(tmp_path / "both.toml", 20, seed=0, decode_video=False, **options).sample()
    require_told(batch, batch["index", "index"].tolist())
    plain = rbtool.load_dataset(made, decode_video=False)[:]
    assert "language_instruction" not in plain.keys()  # noqa: SIM118  # of a tensordict
    tasks = rbtool.preprocess(made, dest=tmp_path / "tasks", operations={"task": "0=fold"}, num_workers=0).path
    cut = rbtool.preprocess(tasks, dest=tmp_path / "cut", operations={"where": ["frame >= 3"]}, num_workers=0).path
    rows = rbtool.load_dataset(cut, texts=True, decode_video=False)[:]
    kept = [row for row in told if row["frame_index"] >= 3]
    assert list(rows["language_events"]) == [row["language_events"] for row in kept]
    expected = ["fold" if not row["episode_index"] else names[row["task_index"]] for row in kept]
    assert list(rows["language_instruction"]) == expected
    with pytest.raises(UsageError, match="texts and split_trajs"):
        rbtool.load_dataset(made, texts=True, split_trajs=True)


def test_texts_of_steps_and_of_several_tasks_are_strings(tmp_path: Path) -> None:
    takes = random_takes((4, 3))
    takes[0].tasks = ["open", "open", "close", "open"]
    made = rbtool.convert(write_dataset(tmp_path / "d", takes, images="none"), tmp_path / "made", final_step="repeat")
    batch = rbtool.load_dataset(made.path, batch_size=30, seed=0, texts=True).sample()
    everything = [task for take in takes for task in take.tasks]
    assert list(batch["language_instruction"]) == [everything[row] for row in batch["index"].tolist()]
    without = rbtool.load_dataset(made.path)[:].exclude("task_index")
    with pytest.raises(MissingKeyError, match="task_index is not in the batch"):
        EpisodeTexts({0: {"language_instructions": '{"0": "open"}'}})(without)
    with pytest.raises(SchemaError, match="steps of episode 1, whose texts are unknown"):
        EpisodeTexts({0: {"language_instruction": "open"}})(without)
    slices = rbtool.load_dataset(made.path, 6, sampler=rbtool.SliceSampler(slice_len=3), seed=0, texts=True).sample()
    assert list(slices["language_instruction"]) == [everything[row] for row in slices["index"].flatten()]
