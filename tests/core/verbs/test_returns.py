"""The return of n-step data is the sum of the rewards of single steps, wherever it is shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.format.episodes import EPISODES
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Field, role_of
from rbtool.core.testing.datasets import relist, write_walks

WALKS = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]
N_STEP = {"n_step": 3, "gamma": 1.0}
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Apply operations to the walks, or to the dataset called `source`."""
    write_walks(tmp_path / "walks", WALKS)

    def make(source: str = "walks", dest: str = "made", num_frames: int | None = None, **operations: object) -> Path:
        options: Any = {"operations": operations, "num_workers": 0, "chunk_size": 7, "num_frames": num_frames}
        return rbtool.preprocess(tmp_path / source, None, tmp_path / dest, **options).path

    return make


def returns(path: Path) -> list[float]:
    with open_steps(path) as reader:
        return reader.episodes.total_reward.tolist()


def with_old_table(path: Path) -> Path:
    """Rewrite the episode table with sums of overlapping rewards, as rbtool 0.1 wrote them."""
    with open_steps(path) as reader:
        table, rewards = reader.episodes, reader.read(("next", "reward"), 0, reader.manifest.steps).reshape(-1)
    sums = [rewards[a : a + n].sum() for a, n in zip(table.start, table.length, strict=True)]
    shutil.rmtree(path / EPISODES)
    replace(table, total_reward=np.array(sums)).save(path)
    relist(path)
    return path


@pytest.mark.parametrize(
    "operations",
    [
        N_STEP, N_STEP | {"exclude": "steps_to_next_obs"}, N_STEP | {"clip_reward": "-0.1:0.1"},
        {"n_step": 1, "gamma": 1},
    ],
)  # fmt: skip
def test_the_table_of_n_step_data_holds_the_returns_of_its_source(made: Made, tmp_path: Path, operations: dict) -> None:
    path = made(**N_STEP | operations)
    assert returns(path) == returns(tmp_path / "walks")
    assert rbtool.check(path).errors == 0


def test_episodes_over_several_tasks_and_a_cut_one_have_their_returns(made: Made, tmp_path: Path) -> None:
    path, plain = made(num_frames=12, **N_STEP), made(dest="plain", num_frames=12, clip_reward="-9:9")
    assert returns(path) == pytest.approx(returns(plain))
    again = made("made", "again", num_frames=10, rename="action=move")
    assert returns(again) == pytest.approx(returns(made("plain", "cut", num_frames=10, rename="action=move")))


def test_old_tables_are_corrected_wherever_returns_are_shown(made: Made, tmp_path: Path) -> None:
    truth, old = returns(tmp_path / "walks"), with_old_table(made(**N_STEP))
    assert returns(old) != truth
    found = rbtool.inspect(old, episode=2)
    assert (found.returns.min, found.returns.max) == (min(truth), max(truth))
    assert found.episode.total_reward == truth[2]
    best = int(np.argmax(truth))
    kept = made("made", "kept", filter=f"return >= {truth[best] - 1e-9}")
    with open_steps(kept) as reader:
        assert reader.episodes.episode.tolist() == [best]
    rbtool.export(old, tmp_path / "out.npz", to="npz")
    with np.load(tmp_path / "out.npz") as file:
        assert file["episodes.return"].tolist() == truth
    findings = rbtool.check(old).findings
    assert [finding.rule for finding in findings if finding.severity == "error"] == ["TED010"]
    for layout in ("ted", "packed"):
        rbtool.convert(old, tmp_path / layout, layout=layout)
        assert returns(tmp_path / layout) == truth
        assert rbtool.check(tmp_path / layout).errors == 0


def test_a_checkpoint_of_an_old_table_keeps_its_digest(made: Made, tmp_path: Path) -> None:
    old = with_old_table(made(**N_STEP))
    rbtool.checkpoint.save(old, tmp_path / "flat", form="flat")
    loaded = rbtool.checkpoint.load(tmp_path / "flat", tmp_path / "loaded")
    assert loaded.content_digest == Manifest.load(old).content_digest
    assert rbtool.inspect(tmp_path / "flat").returns == rbtool.inspect(tmp_path / "walks").returns


@pytest.mark.parametrize("gone", ["next.original_reward", "next.original_reward,steps_to_next_obs"])
def test_without_the_rewards_of_single_steps_there_is_no_return(made: Made, tmp_path: Path, gone: str) -> None:
    made(**N_STEP)
    path = made("made", "bare", exclude=gone)
    result = rbtool.inspect(path, episode=0)
    assert result.returns is None
    assert result.episode.total_reward is None
    assert "no return" in " ".join(result.notes)
    with pytest.raises(UsageError, match="return, but no episode has one"):
        made("bare", "kept", filter="return > 0")
    assert rbtool.check(path).errors == 0
    if "steps" not in gone:
        with pytest.raises(UsageError, match="sums over n steps"):
            made("bare", "to_go", return_to_go=True)


def test_a_folder_without_a_manifest_has_the_returns_of_single_steps(made: Made, tmp_path: Path) -> None:
    truth = returns(tmp_path / "walks")
    TensorDict.load_memmap(made(**N_STEP)).memmap(tmp_path / "plain", copy_existing=True)
    assert rbtool.inspect(tmp_path / "plain").returns.max == max(truth)


def test_a_buffer_of_n_step_transitions_saves_their_returns(tmp_path: Path) -> None:
    reward = torch.arange(6.0).view(6, 1)
    done = torch.tensor([0, 0, 1, 0, 0, 1]).bool().view(6, 1)
    data = TensorDict({"observation": torch.arange(6.0), "next": {"observation": torch.arange(6.0), "reward": reward,
                       "done": done}}, [6])  # fmt: skip
    buffer = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(6), batch_size=2)
    buffer.extend(rbtool.MultiStep(gamma=1.0, n_steps=3)(data))
    buffer.dumps(tmp_path / "buffer")
    rbtool.convert(tmp_path / "buffer", tmp_path / "made")
    assert returns(tmp_path / "made") == [3.0, 12.0]


def test_a_recording_of_n_step_transitions_keeps_their_returns(tmp_path: Path) -> None:
    columns = {
        ("next", "reward"): np.array([[3.0], [2.0]]), ("next", "original_reward"): np.array([[1.0], [2.0]]),
        ("next", "done"): np.array([[False], [True]]), ("steps_to_next_obs",): np.array([2, 1]),
    }  # fmt: skip
    fields = [Field(key, rows.dtype.name, rows.shape[1:], role_of(key)) for key, rows in columns.items()]
    with PackedRecorder(tmp_path / "recorded", fields) as recorder:
        recorder.add_episode(columns, episode=0)
    assert returns(tmp_path / "recorded") == [3.0]
