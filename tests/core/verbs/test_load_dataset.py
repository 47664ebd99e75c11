"""What verbs write is opened by `load_dataset`, and draws what they draw."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import rbtool
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import UsageError
from rbtool.core.testing.datasets import write_walks

DOOR = "minari:D4RL/door/human-v2"
EPISODES = [(4, "open"), (1, "terminated"), (6, "both"), (2, "truncated")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage root with `minari:D4RL/door/human-v2`, which has these episodes; the network is forbidden."""
    write_walks(tmp_path / "home" / "minari" / "D4RL" / "door" / "human-v2", EPISODES)  # type: ignore[arg-type]
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "no minari"))
    return tmp_path / "home"


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """Four short episodes."""
    write_walks(tmp_path / "walks", EPISODES)  # type: ignore[arg-type]
    return tmp_path / "walks"


def test_it_draws_what_the_command_line_draws(home: Path) -> None:
    found = load_dataset(DOOR, seed=11).sample(20)["index"]
    assert found.tolist() == list(rbtool.sample(DOOR, 20, seed=11).indices)


def save_form(walks: Path, out: Path, form: str) -> Path:
    """Save a dataset in a form that is none of a dataset."""
    kind, _, layout = form.rpartition(" ")
    if kind == "export":
        return rbtool.export(walks, out / (f"x.{layout}" if layout != "parquet" else "x"), to=layout).path
    if kind == "storage":
        checkpointer = {"flat": rbtool.FlatStorageCheckpointer, "h5": rbtool.H5StorageCheckpointer}[layout]()
        rows = load_dataset(walks)[:]
        storage = rbtool.LazyTensorStorage(len(rows), checkpointer=checkpointer)
        storage.set(range(len(rows)), rows)
        storage.dumps(out / "x")
        return out / "x"
    return rbtool.checkpoint.save(walks, out / "x.h5", form=layout, for_library=kind or None).path


FORMS = [
    "ted", "flat", "nested", "h5", "torchrl flat", "torchrl nested", "torchrl h5", "storage flat", "storage h5",
    "export h5", "export npz", "export parquet",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_is_written_is_opened(walks: Path, tmp_path: Path, form: str) -> None:
    path, expected = save_form(walks, tmp_path, form), load_dataset(walks, 4, seed=0)
    buffer = load_dataset(path, 4, seed=0)
    whole = (
        buffer[:].select(*expected[:].keys(True, True)).clone()
    )  # of TorchRL's layouts, and of storages, with root flags
    assert (whole == expected[:]).all()
    drawn = expected.sample()
    assert (buffer.sample().select(*drawn.keys(True, True)) == drawn).all()
    again = pickle.loads(pickle.dumps(buffer))
    assert (again[:] == buffer[:]).all()
    lengths = buffer.storage.episode_lengths().tolist()
    assert lengths == expected.storage.episode_lengths().tolist()
    assert load_dataset(path, split_trajs=True)[:].shape == load_dataset(walks, split_trajs=True)[:].shape
    with pytest.raises(UsageError, match="is no dataset, and cannot be edited in place"):
        load_dataset(path, mode="r+")
    buffer[:].zero_()
    assert (load_dataset(path)[:] == again[:]).all()
    made = rbtool.convert(path, tmp_path / "made").path
    assert (load_dataset(made)[:].select(*whole.keys(True, True)) == whole).all()
    assert rbtool.check(path).errors == 0
    assert rbtool.inspect(path).steps == rbtool.inspect(walks).steps


@pytest.mark.parametrize("form", FORMS)
def test_verify_needs_digests(walks: Path, tmp_path: Path, form: str) -> None:
    path = save_form(walks, tmp_path, form)
    if form.startswith(("torchrl", "export")):
        with pytest.raises(UsageError, match="has no digests"):
            load_dataset(path, verify=True)
    else:
        assert len(load_dataset(path, verify=True)) == len(load_dataset(walks))


def test_rows_of_an_export_that_do_not_fit_into_memory(
    walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_form(walks, tmp_path, "export h5")
    monkeypatch.setattr("rbtool.core.datasets.storage.exceeds_memory", lambda size: True)
    with pytest.raises(UsageError, match="do not fit into memory") as caught:
        load_dataset(path)
    assert caught.value.hint == f"make a dataset of it: rbtool convert {path} DEST"
