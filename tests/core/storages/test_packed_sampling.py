"""Every sampler draws the same from a packed dataset as from the same one in layout `ted`, and from a recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.buffer import load_dataset
from rbtool.core.errors import SchemaError
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.format.ted.builder import Origin
from rbtool.core.format.ted.reader import TedReader
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.packed import PackedRecording, PackedStorage
from rbtool.core.testing.datasets import write_walks
from rbtool.core.testing.storages import same

EPISODES = [(9, "terminated"), (3, "truncated"), (1, "both"), (12, "open"), (4, "terminated")]
STEPS = 29
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "slices": lambda: SliceSampler(slice_len=3),
    "batched": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True, batched=True),
    "hanging over": lambda: SliceSampler(num_slices=4, span=True, strict_length=False, weight="step"),
    "slices by id": lambda: SliceSampler(slice_len=3, traj_key="episode"),
    "slices by flag": lambda: SliceSampler(slice_len=3, end_key=("next", "done")),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "prioritized": lambda: PrioritizedSampler(STEPS, 0.6, 0.4),
    "prioritized slices": lambda: PrioritizedSliceSampler(STEPS, 0.6, 0.4, slice_len=3),
}
GROWING = {name: make for name, make in SAMPLERS.items() if name not in {"slices by id", "slices by flag"}}


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both layouts."""
    work = tmp_path_factory.mktemp("walks")
    write_walks(work / "ted", EPISODES)  # type: ignore[arg-type]
    with TedReader(work / "ted") as reader:
        write_dataset(reader, work / "packed", "packed", Origin.of(reader.manifest, reader.documents()))
    return work


def drawn(path: Path, sampler: Sampler, seed: int, count: int = 5) -> list[Any]:
    """Batches of a dataset; what is prioritized learns its priorities between them."""
    buffer = load_dataset(path, 12, sampler=sampler, seed=seed)
    found = []
    for _ in range(count):
        batch = buffer.sample()
        found.append(batch)
        if isinstance(sampler, PrioritizedSampler):
            index = batch["index"].reshape(-1)
            buffer.update_priority(index, batch["next", "reward"].abs().reshape(-1) + index)
    return found


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_draws_the_same_from_either_layout(walks: Path, name: str, seed: int) -> None:
    ted, packed = (drawn(walks / layout, SAMPLERS[name](), seed) for layout in ("ted", "packed"))
    for one, other in zip(ted, packed, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert one.batch_size == other.batch_size
        assert same(one, other)
    assert not same(ted[0], ted[1])


def test_a_packed_dataset_lists_its_episodes(walks: Path) -> None:
    lengths = PackedStorage(walks / "packed").episode_lengths()
    assert lengths.tolist() == [length for length, _ in EPISODES]


def steps(first: int, count: int, *, done: bool) -> TensorDict:
    """Rows that count on; the last may end an episode."""
    number = torch.arange(first, first + count)
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[-1] = done
    after = {"reward": torch.ones(count, 1), "done": ends, "terminated": ends.clone(), "truncated": ends & False}
    return TensorDict({"number": number, "next": {"number": number + 1, **after}}, [count])


@pytest.mark.parametrize("name", GROWING)
def test_a_recording_gives_what_a_ring_in_memory_gives(tmp_path: Path, name: str) -> None:
    buffers = [
        TensorDictReplayBuffer(
            storage=storage, sampler=GROWING[name](), batch_size=12, generator=torch.Generator().manual_seed(3)
        )
        for storage in (PackedRecording(tmp_path / "recording", max_size=STEPS), LazyTensorStorage(STEPS))
    ]
    first = 0
    for count, done in ((3, False), (2, True), (1, True), (4, False), (7, True), (5, False), (7, False)):
        rows = steps(first, count, done=done)
        buffers[0].extend(rows.clone())
        buffers[1].extend(rows.set("episode", torch.full((count,), (first > 4) + (first > 5) + (first > 16))))
        first += count
        if name != "in order" or first >= 12:
            one, other = (buffer.sample() for buffer in buffers)
            assert same(one, other.select(*one.keys(True, True)))
    assert first == STEPS


def test_slices_of_a_recording_without_bounds_never_cross_episodes(tmp_path: Path) -> None:
    recording = PackedStorage.create(tmp_path / "recording")
    samplers = (SliceSampler(slice_len=4), PrioritizedSliceSampler(8, 0.6, 0.4, slice_len=4))
    buffers = [TensorDictReplayBuffer(storage=recording, sampler=one, batch_size=32) for one in samplers]
    episode_of: list[int] = []
    for turn in range(12):
        rows = steps(len(episode_of), 5, done=turn % 3 == 2)
        episode_of += [turn // 3] * 5
        buffers[0].extend(rows)
        for buffer in buffers:
            batch = buffer.sample()
            number = batch["number"].view(-1, 4)
            assert (number.diff(dim=1) == 1).all()
            assert batch["episode"].tolist() == [episode_of[one] for one in batch["number"].tolist()]
            assert (batch["episode"].view(-1, 4).diff(dim=1) == 0).all()
    assert recording.episode_lengths().tolist() == [15] * 4
    buffers[0].extend(steps(60, 5, done=False))
    assert recording.episode_lengths().tolist() == [15] * 4  # the fifth is under way
    recording.finish()
    assert recording.episode_lengths().tolist() == [15] * 4 + [5]
    assert PackedStorage(tmp_path / "recording").episode_lengths().tolist() == [15] * 4 + [5]
    assert buffers[0].sample()["number"].max() <= 64


def test_a_write_counts_in_the_log_and_a_refused_one_does_not(tmp_path: Path) -> None:
    recording = PackedRecording(tmp_path / "recording", max_size=100)
    recording.set(range(5), steps(0, 5, done=True))
    recording.set(5, steps(5, 1, done=False)[0])
    assert recording.log.now == (6, 6, 0)
    for place, rows in ((0, steps(0, 1, done=False)), (6, steps(6, 1, done=False).to(torch.float64))):
        with pytest.raises(SchemaError):
            recording.set(slice(place, place + 1), rows)
    assert recording.log.now == (6, 6, 0)
    recording.finish()
    assert recording.log.now.irregular == 1


def test_nothing_is_added_behind_an_episode_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = PackedRecording(tmp_path / "recording")
    recording.set(range(5), steps(0, 5, done=True))
    add = PackedRecorder.add_episode

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PackedRecorder, "add_episode", full)
    with pytest.raises(OSError, match="No space"):
        recording.set(range(5, 8), steps(5, 3, done=True))
    monkeypatch.setattr(PackedRecorder, "add_episode", add)
    assert len(recording) == 5
    assert recording[:]["number"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SchemaError, match="nothing can be added"):
        recording.set(range(5, 8), steps(5, 3, done=True))


def test_a_closed_recording_says_how_to_make_a_dataset_of_it(tmp_path: Path) -> None:
    recording = PackedRecording(tmp_path / "recording")
    recording.set(range(5), steps(0, 5, done=True))
    recording.close()
    with pytest.raises(SchemaError, match="is closed: nothing can be read") as raised:
        recording[0]
    assert "rbtool repair" in str(raised.value.hint)
