"""What holds for every form: nothing is lost on the way there and back."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool import CorruptDataError, SchemaError
from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.h5_layout import Compression
from rbtool.core.encodings.save import load_checkpoint, save_checkpoint
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, dataset_plans, relist, write_plan

FORMS = ["ted", "flat", "nested", "h5"]
LEAVES = (PlannedLeaf(("observation",), "float64", (3,), "state"), PlannedLeaf(("info", "lap"), "int64", (), "after"))
any_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of small files are written here, and no test of this module interrupts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def save(source: Path, target: Path, form: Form, compression: str | None = None) -> Manifest:
    if form != "h5":
        target.mkdir()
    with open_steps(source) as reader:
        return save_checkpoint(reader, target, form, compression=Compression.parse(compression))


def load(source: Path, target: Path) -> Manifest:
    target.mkdir()
    with open_steps(source) as reader:
        return load_checkpoint(reader, target)


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, whose provenance tells the way."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != MANIFEST}


def assert_same_rows(one: StepReader, other: StepReader, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for field in one.fields:
        for start, stop in np.sort(draw.integers(0, one.manifest.steps + 1, (4, 2)), 1).tolist():
            here, there = (reader.read(field.key, start, stop) for reader in (one, other))
            assert (here.dtype, here.shape, here.tobytes()) == (there.dtype, there.shape, there.tobytes()), field


@any_form
@given(plan=dataset_plans())
@settings(max_examples=25, deadline=None)
def test_there_and_back(form: Form, plan: DatasetPlan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        dataset = write_plan(plan, work / "dataset")
        save(work / "dataset", work / "saved", form)
        with open_steps(work / "dataset") as rows, open_steps(work / "saved") as saved:
            assert_same_rows(rows, saved, plan.seed)
        loaded = load(work / "saved", work / "loaded")
        assert files(work / "loaded") == files(work / "dataset")
        assert (loaded.content_digest, loaded.ranges, loaded.fields) == (
            dataset.content_digest, dataset.ranges, dataset.fields,
        )  # fmt: skip


@given(plan=dataset_plans(), forms=st.permutations(FORMS))
@settings(max_examples=10, deadline=None)
def test_from_form_to_form(plan: DatasetPlan, forms: list[Form]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_plan(plan, work / "start")
        for form, before in zip(forms, ["start", *forms], strict=False):
            through = save(work / before, work / form, form)
            assert through.content_digest == save(work / "start", work / f"{form}-straight", form).content_digest
        load(work / forms[-1], work / "end")
        assert files(work / "end") == files(work / "start")


@any_form
def test_the_manifest_is_carried_over(odd: Path, tmp_path: Path, form: Form) -> None:
    before, after = Manifest.load(odd), save(odd, tmp_path / "saved", form)
    for part in ("request", "steps", "episodes", "fields", "ranges", "spaces", "renamed_keys", "notes"):
        assert getattr(after, part) == getattr(before, part)
    assert (after.kind, after.layout) == ("checkpoint", form)
    assert [step.verb for step in after.provenance] == ["write_plan", "checkpoint save"]
    assert after.provenance[-1].inputs == {"content_digest": before.content_digest}
    assert after.boundary.explicit_next == (0 if form == "ted" else 2)


def test_a_copy_in_form_ted_has_the_digest_of_the_dataset(odd: Path, tmp_path: Path) -> None:
    assert save(odd, tmp_path / "saved", "ted").content_digest == Manifest.load(odd).content_digest


@any_form
def test_text_and_documents_are_carried_over(odd: Path, tmp_path: Path, form: Form) -> None:
    save(odd, tmp_path / "saved", form)
    with open_steps(odd) as dataset, open_steps(tmp_path / "saved") as saved:
        assert saved.episode_text == dataset.episode_text
        assert saved.documents() == dataset.documents() != {}


@any_form
def test_what_is_not_there_cannot_be_read(odd: Path, tmp_path: Path, form: Form) -> None:
    save(odd, tmp_path / "saved", form)
    with open_steps(tmp_path / "saved") as saved:
        for key, start, stop in ((("absent",), 0, 1), (("action",), 0, 17), (("action",), 3, 2)):
            with pytest.raises(SchemaError):
                saved.read(key, start, stop)


@any_form
@pytest.mark.parametrize("name", ["action.memmap", "next/info/solved.memmap", ".rbtool/episodes/seed.memmap",
                                  ".rbtool/source/raw.bin"])  # fmt: skip
def test_a_damaged_dataset_is_not_saved(odd: Path, tmp_path: Path, form: Form, name: str) -> None:
    path = odd / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(CorruptDataError, match="changed after it was written"):
        save(odd, tmp_path / "saved", form)


def _lengths_that_overlap(folder: Path) -> None:
    path = folder / ".rbtool/episodes/start.memmap"
    starts = np.fromfile(path, np.int64)
    starts[2] -= 1
    path.write_bytes(starts.tobytes())
    relist(folder)


def _no_length(folder: Path) -> None:
    path = folder / ".rbtool/episodes/length.memmap"
    lengths = np.fromfile(path, np.int64)
    lengths[:2] = 0, lengths[:2].sum()
    path.write_bytes(lengths.tobytes())
    relist(folder)


@pytest.mark.parametrize("damage", [_lengths_that_overlap, _no_length])
def test_an_episode_table_that_makes_no_sense_is_refused(
    odd: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(odd)
    with pytest.raises(CorruptDataError, match="one after another"):
        save(odd, tmp_path / "saved", "flat")


@any_form
def test_rows_come_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    plan = DatasetPlan((7, 1, 1, 9, 2), ("open",) * 5, (False, True, False, True, False), LEAVES, seed=1)
    dataset = write_plan(plan, tmp_path / "dataset")
    monkeypatch.setattr("rbtool.core.encodings.rows.LEAF_BYTES", 40)
    monkeypatch.setattr("rbtool.core.encodings.output_files._BLOCK", 56)
    saved = save(tmp_path / "dataset", tmp_path / "saved", form)
    assert load(tmp_path / "saved", tmp_path / "loaded").content_digest == dataset.content_digest
    monkeypatch.undo()
    assert save(tmp_path / "dataset", tmp_path / "again", form).content_digest == saved.content_digest
