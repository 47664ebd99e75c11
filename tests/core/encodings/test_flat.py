"""What lies in the files of the forms that are folders."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import DatasetPlan, write_plan

FIELDS = [
    Field(("observation",), "int64", (), "observation"),
    Field(("action",), "float32", (), "action"),
    Field(("next", "observation"), "int64", (), "observation"),
    Field(("next", "done"), "bool", (1,), "done"),
]


def write(folder: Path, after: list[int]) -> None:
    """Two episodes, of 3 and 2 steps."""
    rows = [EpisodeRow(n, length, 0.0, True, False, EndReason.TERMINATED) for n, length in ((7, 3), (8, 2))]
    columns = {
        ("observation",): np.array([0, 1, 2, 10, 11]),
        ("action",): np.arange(5, dtype=np.float32),
        ("next", "observation"): np.array(after),
        ("next", "done"): np.array([0, 0, 1, 0, 1], bool)[:, None],
    }
    with DatasetBuilder(folder, FIELDS) as builder:
        builder.append(columns)
        builder.finish(rows, Origin(Request("here", "here", "here/two-v0")))


def save(source: Path, target: Path, form: Form) -> Path:
    if form != "h5":
        target.mkdir()
    with open_steps(source) as reader:
        save_checkpoint(reader, target, form)
    return target


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_each_observation_is_stored_once(tmp_path: Path, form: Form) -> None:
    write(tmp_path / "dataset", after=[1, 2, 3, 11, 12])
    saved = save(tmp_path / "dataset", tmp_path / "saved", form)
    assert np.fromfile(saved / "observation.memmap", np.int64).tolist() == [0, 1, 2, 3, 10, 11, 12]
    assert np.fromfile(saved / "done.memmap", bool).tolist() == [False, False, True, False, True]
    assert np.fromfile(saved / "action.memmap", np.float32).tolist() == [0, 1, 2, 3, 4]
    assert not [path for path in saved.iterdir() if path.name.startswith(("explicit", "next"))]
    if form == "flat":
        assert json.loads((saved / "storage_metadata.json").read_text()) == {
            "metadata": {}, "is_pytree": False, "len": 5, "cursor": 0, "capacity": 5, "shape": [5],
        }  # fmt: skip
    write(tmp_path / "border", after=[1, 2, 10, 11, 0])  # a border between episodes is no break
    assert not (save(tmp_path / "border", tmp_path / "again", form) / "explicit_episodes.memmap").exists()


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_next_rows_that_do_not_follow_are_stored_in_full(tmp_path: Path, form: Form) -> None:
    write(tmp_path / "dataset", after=[1, 2, 3, 99, 12])
    saved = save(tmp_path / "dataset", tmp_path / "saved", form)
    assert np.fromfile(saved / "observation.memmap", np.int64).tolist() == [0, 1, 2, 3, 10, 11, 12]
    assert np.fromfile(saved / "explicit_next/observation.memmap", np.int64).tolist() == [99, 12]
    assert np.fromfile(saved / "explicit_episodes.memmap", np.int64).tolist() == [1]
    with open_steps(saved) as reader:
        assert reader.read(("next", "observation"), 1, 5).tolist() == [2, 3, 99, 12]


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
def test_root_flags_and_reward_are_stored_unless_they_are_zero(tmp_path: Path, form: Form) -> None:
    stored = {}
    for flags, reward in (("absent", "set"), ("zero", "zero"), ("set", "absent")):
        plan = DatasetPlan((3,), ("open",), (False,), (), root_flags=flags, root_reward=reward, seed=2)
        source = tmp_path / f"{flags}-{reward}"
        write_plan(plan, source)
        with open_steps(save(source, tmp_path / f"saved-{flags}", form)) as reader, TedReader(source) as dataset:
            stored[flags] = sum(file.size for file in reader.manifest.files if "at_root" in file.path)
            for field in dataset.fields:
                assert reader.read(field.key, 0, 3).tobytes() == dataset.read(field.key, 0, 3).tobytes()
    if form != "h5":
        assert stored["zero"] == 0
        assert stored["absent"] > 3 * 8
        assert stored["set"] > 3 * 3


def test_a_root_reward_of_minus_zero_is_stored(tmp_path: Path) -> None:
    fields = [*FIELDS, Field(("reward",), "float32", (1,), "reward")]
    columns = {field.key: np.zeros((1, *field.shape), field.numpy) for field in fields}
    columns["reward",][:] = -0.0
    with DatasetBuilder(tmp_path / "dataset", fields) as builder:
        builder.append(columns)
        builder.finish([EpisodeRow(0, 1, 0.0, True, False, EndReason.TERMINATED)], Origin(Request("a", "a", "a/a")))
    with open_steps(save(tmp_path / "dataset", tmp_path / "saved", "flat")) as reader:
        assert np.signbit(reader.read(("reward",), 0, 1)).all()


def test_tensordict_opens_a_flat_checkpoint(odd: Path, tmp_path: Path) -> None:
    saved = TensorDict.load_memmap(save(odd, tmp_path / "saved", "flat"))
    with TedReader(odd) as dataset:
        lengths = dataset.episodes.length
        position = dataset.read(("observation", "position"), 0, 16)
        lap = dataset.read(("next", "info", "lap"), 0, 16)
    assert saved.batch_size == torch.Size([])
    assert saved["observation", "position"].shape == (16 + 6, 3)
    first = saved["observation", "position"][: lengths[0]].numpy()
    np.testing.assert_array_equal(first, position[: lengths[0]])
    np.testing.assert_array_equal(saved["next", "info", "lap"].numpy(), lap)
    assert saved["explicit_episodes"].tolist() == [1, 4]
    assert saved["observation", "brain"].dtype == torch.bfloat16


def test_tensordict_opens_a_nested_checkpoint_as_ragged_episodes(odd: Path, tmp_path: Path) -> None:
    saved = TensorDict.load_memmap(save(odd, tmp_path / "saved", "nested"))
    assert saved.batch_size == torch.Size([6])
    with TedReader(odd) as dataset:
        table = dataset.episodes
        columns = {key: dataset.read(key, 0, 16) for key in (("mask",), ("agents", "reward"), ("next", "reward"))}
        after = dataset.read(("next", "x"), 0, 16)
    for row, (start, length) in enumerate(zip(table.start, table.length, strict=True)):
        steps = slice(start, start + length)
        np.testing.assert_array_equal(saved["mask"].unbind(0)[row].numpy(), columns["mask",][steps])
        np.testing.assert_array_equal(saved["reward"].unbind(0)[row].numpy(), columns["next", "reward"][steps])
        rewards = saved["agents", "reward"].unbind(0)[row].numpy()
        np.testing.assert_array_equal(rewards[:-1], columns["agents", "reward"][steps])
        explicit = saved["explicit_next", "x"]
        expected = after[steps] if row in (1, 4) else after[:0]
        np.testing.assert_array_equal(explicit.unbind(0)[row].numpy(), expected)


def test_tensordict_opens_the_copy(odd: Path, tmp_path: Path) -> None:
    copy, dataset = TensorDict.load_memmap(save(odd, tmp_path / "saved", "ted")), TensorDict.load_memmap(odd)
    one, other = (set(data.keys(include_nested=True, leaves_only=True)) for data in (copy, dataset))
    assert one == other
    assert (copy["x.shape"].numpy() == dataset["x.shape"].numpy()).all()


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_tensordict_opens_a_checkpoint_of_no_episodes(tmp_path: Path, form: Form) -> None:
    with DatasetBuilder(tmp_path / "dataset", FIELDS) as builder:
        builder.finish([], Origin(Request("here", "here", "here/none-v0")))
    TensorDict.load_memmap(save(tmp_path / "dataset", tmp_path / "saved", form))
