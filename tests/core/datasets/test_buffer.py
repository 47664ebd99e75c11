"""Buffers on datasets: `preprocess` as TorchRL documents it, and the bar that it shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.datasets.buffer import DatasetReplayBuffer, ProgressBar
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import RbtoolError, SchemaError, UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage


@pytest.mark.parametrize("arguments", [{"num_chunks": 3}, {"chunksize": 5}, {"chunksize": 0}, {}])
def test_the_example_of_the_data_page(walks: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    seen: list[int] = []

    def func(data: Any) -> Any:
        seen.append(data.numel() if data.ndim else 0)
        return data.set("obs_norm", data.get("observation").norm(dim=-1))

    buffer = load_dataset(walks)
    storage = buffer.preprocess(func, num_workers=0, dest=tmp_path / "new", **arguments)
    assert isinstance(storage, TensorStorage)
    assert torch.equal(storage[:]["obs_norm"], buffer[:]["observation"].norm(dim=-1))
    expected = {"num_chunks": [5, 5, 3], "chunksize": [5, 5, 3]}.get(next(iter(arguments), ""))
    assert set(seen) == ({0} if not expected or not arguments.get("chunksize", 1) else set(expected))


def double(row: Any) -> Any:
    return {"a": row["action"] * 2, "drawn": torch.tensor(random.random())}


def drawn(buffer: Any, dest: Path, **arguments: Any) -> Any:
    return buffer.preprocess(double, dest=dest, **arguments)[:]


def test_random_numbers_come_of_the_generator_and_not_of_the_workers(walks: Path, tmp_path: Path) -> None:
    buffer = load_dataset(walks)
    one, again, two, plain = (
        drawn(buffer, tmp_path / str(place), **arguments)
        for place, arguments in enumerate(
            [
                {"num_workers": 0, "generator": torch.Generator().manual_seed(1)},
                {"num_workers": 2, "generator": torch.Generator().manual_seed(1), "mp_start_method": "fork"},
                {"num_workers": 0, "generator": torch.Generator().manual_seed(2)},
                {"num_workers": 0},
            ]
        )
    )
    assert torch.equal(one["drawn"], again["drawn"])
    assert len({tuple(result["drawn"].tolist()) for result in (one, two, plain)}) == 3
    assert len(set(one["drawn"].tolist())) == 13


def test_the_first_frames(walks: Path, tmp_path: Path) -> None:
    buffer = load_dataset(walks)
    for frames, expected in ((6, 6), (1000, 13)):
        storage = buffer.preprocess(lambda row: row, num_workers=0, num_frames=frames, dest=tmp_path / str(frames))
        assert (len(storage), Manifest.load(tmp_path / str(frames)).steps) == (expected, expected)
    assert buffer.preprocess(lambda r: r, num_workers=0, num_frames=6, dest=tmp_path / "c")[5][
        "next", "truncated"
    ].all()


def test_a_bar_on_stderr(walks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_dataset(walks).preprocess(lambda td: td, num_workers=0, chunksize=3, pbar=True, dest=tmp_path / "a")
    out, err = capsys.readouterr()
    assert out == ""
    assert "preprocessing: 100%" in err
    assert "13/13" in err
    load_dataset(walks).preprocess(lambda td: td, num_workers=0, dest=tmp_path / "b")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 1}, RuntimeError, "dim is 1, expected 0"),
        ({"pool": object()}, ValueError, "pool is set"),
        ({"chunksize": 2, "num_chunks": 2}, ValueError, "both set"),
        ({"chunksize": -1}, ValueError, "chunksize is -1, expected a number from 0"),
        ({"num_chunks": 0}, ValueError, "num_chunks is 0, expected a number from 1"),
        ({"worker_threads": 0}, ValueError, "worker_threads is 0"),
        ({"max_tasks_per_child": True}, ValueError, "max_tasks_per_child is True"),
        ({"num_frames": 0}, ValueError, "num_frames is 0"),
        ({"num_workers": -1}, ValueError, "-1"),
        ({"mp_start_method": "threads"}, ValueError, "threads"),
        ({"fn": lambda row: 1 / 0}, RbtoolError, "ZeroDivisionError"),
        ({"fn": lambda row: None}, SchemaError, "it returned None"),
    ],
)
def test_what_makes_no_sense_leaves_nothing_behind(
    walks: Path, tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        load_dataset(walks).preprocess(**{"fn": double, "num_workers": 0, "dest": tmp_path / "new", **arguments})
    assert sorted(tmp_path.iterdir()) == before


def test_arguments_that_change_nothing(walks: Path, tmp_path: Path) -> None:
    storage = load_dataset(walks).preprocess(
        double, 0, 0, max_tasks_per_child=1, worker_threads=3, index_with_generator=True, dest=tmp_path / "new"
    )
    assert len(storage) == 13


def test_other_storages(walks: Path, tmp_path: Path) -> None:
    rows = load_dataset(walks)[:]
    listed: Any = DatasetReplayBuffer(storage=ListStorage(4))
    with pytest.raises(RuntimeError, match="holds a ListStorage, expected a TensorStorage"):
        listed.preprocess(double, dest=tmp_path / "new")
    padded: Any = load_dataset(walks, split_trajs=True)
    with pytest.raises(UsageError, match="whole trajectories"):
        padded.preprocess(double, dest=tmp_path / "new")
    edited: Any = load_dataset(walks)
    edited.storage[0:2] = rows[2:4]
    with pytest.raises(SchemaError, match="written over in this process"):
        edited.preprocess(double, dest=tmp_path / "new")


@pytest.mark.parametrize("make", [TensorStorage, lambda rows: LazyMemmapStorage(20)])
def test_rows_that_are_in_no_dataset_yet(walks: Path, tmp_path: Path, make: Callable[[Any], Any]) -> None:
    rows: Any = TensorDict(load_dataset(walks)[:].to_dict(), [13])
    storage = make(rows)
    if not len(storage):
        storage.set(range(13), rows)
    result = DatasetReplayBuffer(storage=storage).preprocess(double, num_workers=0, dest=tmp_path / "new")
    assert torch.equal(result[:]["a"], rows["action"] * 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new", "walks"]


@pytest.mark.parametrize("split_trajs", [False, True])
def test_functions_on_datasets_take_a_buffer_for_its_dataset(walks: Path, tmp_path: Path, split_trajs: bool) -> None:
    buffer = load_dataset(walks, split_trajs=split_trajs)
    result = rbtool.preprocess(buffer, lambda td: td[:2], tmp_path / "new", unit="episode", num_workers=0)
    assert (result.source, result.steps, result.episodes) == (walks, 7, 4)
    with pytest.raises(SchemaError, match="the rows of a ListStorage are in no dataset on disk"):
        rbtool.preprocess(DatasetReplayBuffer(storage=ListStorage(4)), double, tmp_path / "other")


def test_no_name_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start("reading \x9b2J", 2, "steps")
    bar.advance(2)
    bar.note("left out: a\x1b[31m\u202eb")
    bar.done("\x1b[2J")
    shown = capsys.readouterr().err
    assert r"left out: a\x1b[31m\u202eb" in shown
    assert not any(sign in shown for sign in ("\x9b", "\u202e", "\x1b[2J"))
