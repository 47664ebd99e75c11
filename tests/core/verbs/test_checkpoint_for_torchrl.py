"""`checkpoint save --for torchrl`, and `load`, `verify` and `inspect` of what TorchRL saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rbtool.core.errors import CorruptDataError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.verbs import checkpoint
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect
from rbtool.core.verbs.sample import sample

ROOT = Path(__file__).parents[2] / "data"
CASES = sorted(path.name for path in (ROOT / "torchrl_checkpoints").glob("*_*") if path.name[0] in "fnh")
FORMS = ("flat", "nested", "h5")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = next((ROOT / "minari" / "pendulum").rglob("main_data.hdf5")).parents[1]
    return convert(source, tmp_path_factory.mktemp("dataset") / "pendulum").path


def rows_of(path: Path) -> dict[str, np.ndarray]:
    with open_steps(path) as reader:
        return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_goes_out_and_comes_back(form: str, dataset: Path, tmp_path: Path) -> None:
    saved = checkpoint.save(dataset, tmp_path / "saved", form=form, for_library="torchrl")  # type: ignore[arg-type]
    assert (saved.layout, saved.content_digest, bool(saved.bytes)) == (form, None, True)
    assert any("episode table" in note for note in saved.notes)
    checkpoint.load(tmp_path / "saved", tmp_path / "again")
    before, after = rows_of(dataset), rows_of(tmp_path / "again")
    assert set(before) == set(after)
    assert all(np.array_equal(rows, after[name]) for name, rows in before.items())
    assert not check(tmp_path / "again").findings
    found = checkpoint.verify(tmp_path / "saved", dataset)
    assert (found.equal, found.differences) == (True, ())
    assert found.notes == ("TorchRL's layout has no place for episodes.seed, episodes.has_seed",)
    again = checkpoint.verify(tmp_path / "saved", tmp_path / "again")
    assert (again.equal, again.notes) == (True, ())


def test_a_file_is_written_where_one_is_named(dataset: Path, tmp_path: Path) -> None:
    checkpoint.save(dataset, tmp_path / "one.h5", form="h5", for_library="torchrl", compression="gzip")
    checkpoint.save(dataset, tmp_path / "folder", form="h5", for_library="torchrl")
    assert (tmp_path / "one.h5").is_file()
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["checkpoint.h5"]
    assert checkpoint.verify(tmp_path / "one.h5", tmp_path / "folder" / "checkpoint.h5", root=tmp_path).equal


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_of_torchrl_becomes_a_dataset(case: str, tmp_path: Path) -> None:
    folder = ROOT / "torchrl_checkpoints" / case
    facts = json.loads((folder / "case.json").read_text())
    loaded = checkpoint.load(folder / "checkpoint", tmp_path / "dataset")
    assert (loaded.steps, loaded.form, loaded.layout) == (facts["len"], facts["kind"], "ted")
    assert not [finding for finding in check(tmp_path / "dataset").findings if finding.rule != "TED010"]
    assert checkpoint.verify(folder / "checkpoint", tmp_path / "dataset").equal
    assert checkpoint.load(folder / "checkpoint", tmp_path / "dataset").already_there
    lost = folder / "torchrl_loads.npz"
    expected = np.load(lost if lost.exists() else folder / "expected.npz")
    order = np.array(facts["dim0_oldest_first"])
    reward = np.moveaxis(expected["next/reward"], facts["ndim"] - 1, -2 if facts["ndim"] > 1 else 0)
    lanes = reward.reshape(-1, reward.shape[-2], 1) if facts["ndim"] > 1 else reward[None]
    found = rows_of(tmp_path / "dataset")["next.reward"]
    if facts["ndim"] < 3:
        assert np.array_equal(found, lanes[:, order].reshape(-1, 1))


def test_an_unfinished_episode_ends_truncated(tmp_path: Path) -> None:
    checkpoint.load(ROOT / "torchrl_checkpoints" / "flat_partly_7of16" / "checkpoint", tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert (rows["next.done"][-1, 0], rows["next.truncated"][-1, 0], rows["next.terminated"][-1, 0]) == (1, 1, 0)
    assert inspect(tmp_path / "dataset").ends.end_of_file == 1


def test_inspect_and_sample_read_them_too() -> None:
    place = ROOT / "torchrl_checkpoints" / "h5_wrapped" / "checkpoint"
    told = inspect(place)
    assert (told.type, told.layout, told.steps, told.episodes) == ("checkpoint", "h5", 16, 5)
    assert sample(place, 4, seed=0).n == 4


def test_what_is_there_stays_without_force(dataset: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    checkpoint.save(dataset, target, form="flat", for_library="torchrl")
    with pytest.raises(UsageError, match="already exists") as caught:
        checkpoint.save(dataset, target, form="nested", for_library="torchrl")
    assert "--force" in str(caught.value.hint)
    tried = checkpoint.save(dataset, target, form="nested", for_library="torchrl", force=True, dry_run=True)
    assert (tried.dry_run, checkpoint.verify(target, dataset).layout) == (True, "flat")
    checkpoint.save(dataset, target, form="nested", for_library="torchrl", force=True)
    assert checkpoint.verify(target, dataset).layout == "nested"
    for name in ("notes.txt", "notes.json", "mine.memmap"):
        (target / name).write_text("mine")
        with pytest.raises(UsageError, match=f"{name} is not part"):
            checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)
        (target / name).unlink()
    checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)


@pytest.mark.parametrize("case", ["flat_full", "nested_rich_wrapped"])
def test_a_buffer_that_torchrl_saved_is_replaced_when_asked(dataset: Path, tmp_path: Path, case: str) -> None:
    target = tmp_path / "saved"
    shutil.copytree(ROOT / "torchrl_checkpoints" / case / "checkpoint", target)
    (target / "storage" / "mine.memmap").write_text("mine")
    with pytest.raises(UsageError, match=r"mine\.memmap is not part"):
        checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)
    (target / "storage" / "mine.memmap").unlink()
    checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)
    assert checkpoint.verify(target, dataset).layout == "flat"


def test_requests_that_make_no_sense_are_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="whole episodes"):
        checkpoint.save(dataset, tmp_path / "x", form="ted", for_library="torchrl")
    with pytest.raises(UsageError, match="'numpy'"):
        checkpoint.save(dataset, tmp_path / "x", form="flat", for_library="numpy")  # type: ignore[arg-type]
    theirs = ROOT / "torchrl_checkpoints" / "flat_full" / "checkpoint"
    with pytest.raises(UsageError, match="TorchRL's layout") as caught:
        checkpoint.save(theirs, tmp_path / "x", form="flat")
    assert "checkpoint load" in str(caught.value.hint)
    assert not (tmp_path / "x").exists()


def test_what_the_layout_cannot_hold_is_refused(dataset: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled"
    checkpoint.load(ROOT / "torchrl_checkpoints" / "flat_full" / "checkpoint", shuffled)
    place = shuffled / "next" / "observation.memmap"
    place.write_bytes(place.read_bytes()[::-1])
    with pytest.raises((SchemaError, CorruptDataError)):
        checkpoint.save(shuffled, tmp_path / "x", form="flat", for_library="torchrl")
    assert not (tmp_path / "x").exists()


def test_a_cut_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT / "torchrl_checkpoints" / "flat_full" / "checkpoint", tmp_path / "copy")
    place = copy / "storage" / "action.memmap"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match="it was cut"):
        checkpoint.load(copy, tmp_path / "dataset")
    assert not (tmp_path / "dataset").exists()
