"""Every form: nothing is lost there and back, damage is found, and what is opened is what was saved."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError
from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.flat import FlatReader
from rbtool.core.encodings.h5 import H5Reader, block_bytes, read_block
from rbtool.core.encodings.save import VerifyingReader, load_checkpoint, save_checkpoint
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.manifest import MANIFEST, Manifest, has_manifest
from rbtool.core.format.memmap.reader import PlainReader, TedReader
from rbtool.core.open_steps import is_steps, open_steps
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, PlannedLeaf, dataset_plans, relist, write_plan

EPISODES = [(5, "terminated"), (4, "truncated")]
FORMS = ["ted", "flat", "nested", "h5"]
LEAVES = (PlannedLeaf(("observation",), "float64", (3,), "state"), PlannedLeaf(("info", "lap"), "int64", (), "after"))
any_form = pytest.mark.parametrize("form", FORMS)


def save(source: Path, target: Path, form: Form) -> Manifest:
    if form != "h5":
        target.mkdir()
    with open_steps(source) as reader:
        return save_checkpoint(reader, target, form)


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
@settings(max_examples=8, deadline=None)
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
@settings(max_examples=5, deadline=None)
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
def test_the_manifest_text_and_documents_are_carried_over(odd: Path, tmp_path: Path, form: Form) -> None:
    before, after = Manifest.load(odd), save(odd, tmp_path / "saved", form)
    for part in ("request", "steps", "episodes", "fields", "ranges", "spaces", "renamed_keys", "notes"):
        assert getattr(after, part) == getattr(before, part)
    assert (after.kind, after.layout) == ("checkpoint", form)
    assert [step.verb for step in after.provenance] == ["write_plan", "checkpoint save"]
    assert after.provenance[-1].inputs == {"content_digest": before.content_digest}
    assert after.boundary.explicit_next == (0 if form == "ted" else 2)
    assert (after.content_digest == before.content_digest) == (form == "ted")
    with open_steps(odd) as dataset, open_steps(tmp_path / "saved") as saved:
        assert saved.episode_text == dataset.episode_text
        assert saved.documents() == dataset.documents() != {}


@any_form
def test_reading_missing_leaves_or_rows_is_refused(odd: Path, tmp_path: Path, form: Form) -> None:
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


@pytest.mark.parametrize(("column", "change"), [("start", [0, 0, -1]), ("length", [-4, 4])])  # overlapping, and empty
def test_an_episode_table_that_makes_no_sense_is_refused(odd: Path, tmp_path: Path, column, change) -> None:
    path = odd / f".rbtool/episodes/{column}.memmap"
    numbers = np.fromfile(path, np.int64)
    numbers[: len(change)] += change
    path.write_bytes(numbers.tobytes())
    relist(odd)
    with pytest.raises(CorruptDataError, match="one after another"):
        save(odd, tmp_path / "saved", "flat")


@any_form
def test_rows_come_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    plan = DatasetPlan((7, 1, 1, 9, 2), ("open",) * 5, (False, True, False, True, False), LEAVES, seed=1)
    dataset = write_plan(plan, tmp_path / "dataset")
    monkeypatch.setattr("rbtool.core.encodings.compact.LEAF_BYTES", 40)
    monkeypatch.setattr("rbtool.core.encodings.output_files._BLOCK", 56)
    saved = save(tmp_path / "dataset", tmp_path / "saved", form)
    assert load(tmp_path / "saved", tmp_path / "loaded").content_digest == dataset.content_digest
    monkeypatch.undo()
    assert save(tmp_path / "dataset", tmp_path / "again", form).content_digest == saved.content_digest


@pytest.mark.parametrize(
    ("form", "reader"), [("ted", TedReader), ("flat", FlatReader), ("nested", FlatReader), ("h5", H5Reader)]
)
def test_a_form_is_recognised_by_its_content(odd: Path, tmp_path: Path, form: Form, reader: type) -> None:
    save(odd, tmp_path / "named anyhow", form)
    assert is_steps(tmp_path / "named anyhow")
    with open_steps(str(tmp_path / "named anyhow")) as found:
        assert type(found) is reader


def test_a_plain_tensordict_of_steps_opens_too(tmp_path: Path) -> None:
    TensorDict({"episode": torch.arange(3)}, [3]).memmap(tmp_path / "plain")
    assert is_steps(tmp_path / "plain")
    with open_steps(tmp_path / "plain") as reader:
        assert type(reader) is PlainReader


def test_a_flat_checkpoint_of_another_library_is_refused(tmp_path: Path) -> None:
    data = {"observation": torch.zeros(12, 2), "action": torch.zeros(10), "done": torch.zeros(10, 1, dtype=torch.bool)}
    TensorDict(data, []).memmap(tmp_path / "flat")
    with pytest.raises(FormatError, match="not one row a step"):
        open_steps(tmp_path / "flat")


def test_other_paths_are_not_opened(tmp_path: Path) -> None:
    assert not is_steps(tmp_path / "there")
    with pytest.raises(DatasetNotFoundError, match="not found"):
        open_steps(tmp_path / "there")
    with pytest.raises(DatasetNotFoundError, match="is an empty folder"):
        open_steps(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not is_steps(tmp_path)
    with pytest.raises(FormatError, match="is neither a dataset nor a checkpoint"):
        open_steps(tmp_path)
    for data in (b"", b"{}", b"text\n", b'{\n "format_version": '):
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(FormatError, match="file"):
            open_steps(tmp_path / "file")
    with h5py.File(tmp_path / "cut.h5", "w") as h5:
        h5["a"] = range(1000)
    os.truncate(tmp_path / "cut.h5", 1000)
    with pytest.raises(CorruptDataError, match="HDF5 cannot read the file"):
        open_steps(tmp_path / "cut.h5")


@each("layout", ["packed", "h5", "sideways"])
def test_layouts_that_are_no_folder_here_are_refused(odd: Path, layout: str) -> None:
    manifest = replace(Manifest.load(odd), layout=layout)
    (odd / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(FormatError, match=layout):
        open_steps(odd)


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "parts",
    [[], [(0, 3), (3, 4), (4, 9)], [(0, 5), (0, 5), (5, 9)], [(4, 9), (0, 4)], [(0, 8)], [(0, 3), (4, 9)]],
    ids=["never", "in order", "twice", "out of order", "the beginning only", "with a gap"],
)
def test_damage_is_found_however_the_rows_were_read(walks: Path, parts: list[tuple[int, int]]) -> None:
    path = walks / "next/observation.memmap"
    for at in (None, 0, path.stat().st_size - 1):
        if at is not None:
            change(path, at)
        with TedReader(walks) as source:
            reader = VerifyingReader(source)
            for part in parts:
                reader.read(("next", "observation"), *part)
            if at is None:
                reader.verify_files()
                continue
            with pytest.raises(CorruptDataError, match=r"observation\.memmap was changed"):
                reader.verify_files()
        change(path, at)


def test_damage_that_was_read_is_found_though_the_file_is_sound_again(walks: Path) -> None:
    with TedReader(walks) as source:
        change(walks / "action.memmap", 7)
        reader = VerifyingReader(source)
        reader.read(("action",), 0, 9)
        change(walks / "action.memmap", 7)
        with pytest.raises(CorruptDataError, match="changed"):
            reader.verify_files()


def test_a_file_that_is_longer_than_its_rows_is_found(walks: Path) -> None:
    with TedReader(walks) as source:
        reader = VerifyingReader(source)
        reader.read(("action",), 0, 9)
        with open(walks / "action.memmap", "ab") as file:
            file.write(b"more")
        with pytest.raises(CorruptDataError, match="76 bytes, the manifest states 72"):
            reader.verify_files()


# Damage of every kind is found, and never comes out of a load as data.

folder_forms = pytest.mark.parametrize("form", ["flat", "nested"])


@pytest.fixture
def odd_file(tmp_path: Path) -> Path:
    """Few leaves, of every kind: the tests here write each of their files many times over."""
    few = {("x",), ("x.shape",), ("at_root", "wave"), ("mask",), ("info", "lap")}
    leaves = tuple(leaf for leaf in ODD_LEAVES if leaf.key in few)
    ends, jumps = ("open", "both", "open"), (False, True, False)
    plan = DatasetPlan((4, 3, 1), ends, jumps, leaves, root_flags="set", text=True, documents=True)
    write_plan(plan, tmp_path / "odd")
    return tmp_path / "odd"


def saved(source: Path, target: Path, form: Form) -> Path:
    save(source, target, form)
    return target


def verify(path: Path) -> None:
    with open_steps(path) as reader:
        reader.verify_files()


def is_damaged(path: Path) -> bool:
    try:
        verify(path)
    except RbtoolError:
        return True
    return False


def files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)


def flips(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Change one byte after the other: both ends of every file and some places between; each is put back."""
    draw = np.random.default_rng(3)
    for file in files_of(path):
        sound = file.read_bytes()
        many = 150 if path.is_file() else 1
        for at in {0, len(sound) - 1, *draw.integers(0, len(sound), many).tolist()}:
            changed = sound[at] ^ int(draw.integers(1, 256))
            file.write_bytes(sound[:at] + bytes([changed]) + sound[at + 1 :])
            yield file, at, bytes([sound[at], changed])
        file.write_bytes(sound)


@any_form
def test_any_changed_byte_is_found(odd_file: Path, tmp_path: Path, form: Form) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    verify(there)
    for file, at, change in flips(there):
        assert is_damaged(there), f"byte {at} of {file} went from {change[0]} to {change[1]} unseen"
    verify(there)


@any_form
def test_a_load_gives_the_data_that_were_saved_or_nothing(odd_file: Path, tmp_path: Path, form: Form) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    with open_steps(odd_file) as reader:
        digest, documents = reader.manifest.content_digest, reader.documents()
    refused = 0
    for number, _ in enumerate(itertools.islice(flips(there), 0, None, 6)):
        target = tmp_path / f"loaded-{number}"
        target.mkdir()
        try:
            with open_steps(there) as reader:
                assert load_checkpoint(reader, target).content_digest == digest
            with open_steps(target) as loaded:
                loaded.verify_files()
                assert loaded.documents() == documents
        except RbtoolError:
            refused += 1
        shutil.rmtree(target)
    assert refused > number // 2


@any_form
@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
def test_files_of_another_size_are_found(odd_file: Path, tmp_path: Path, form: Form, change: str) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    for file in files_of(there):
        sound = file.read_bytes()
        file.unlink()
        if change != "gone":
            file.write_bytes(sound[:-1] if change == "cut" else sound + b"\0")
        assert is_damaged(there), file
        file.write_bytes(sound)
    verify(there)


@folder_forms
@pytest.mark.parametrize(("one", "other"), [("done", "terminated"), ("mask", "done")])
def test_files_that_were_swapped_are_found(odd_file: Path, tmp_path: Path, form: Form, one: str, other: str) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    first, second = there / f"{one}.memmap", there / f"{other}.memmap"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(CorruptDataError):
        verify(there)


@folder_forms
def test_leaves_that_were_swapped_in_the_description_are_found(odd_file: Path, tmp_path: Path, form: Form) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    path = there / "meta.json"
    text = path.read_text().replace('"x"', '"y"').replace('"mask"', '"x"').replace('"y"', '"mask"')
    assert len(text) == path.stat().st_size
    path.write_text(text)
    with pytest.raises(CorruptDataError, match="changed"):
        open_steps(there)
    relist(there)
    with pytest.raises(CorruptDataError, match=r"disagree on|bytes"):
        open_steps(there)


def test_a_missing_table_of_shapes_is_found_at_once(odd_file: Path, tmp_path: Path) -> None:
    there = saved(odd_file, tmp_path / "saved", "nested")
    (there / "mask.shape.memmap").unlink()
    with pytest.raises(CorruptDataError, match=r"mask\.shape\.memmap is missing"):
        open_steps(there)


@pytest.mark.parametrize("form", ["ted", "flat", "nested"])
@pytest.mark.parametrize("name", ["mask.memmap", ".rbtool/episodes/return.memmap", ".rbtool/episodes_text.jsonl"])
def test_a_file_of_another_checkpoint_is_found(odd_file: Path, tmp_path: Path, form: Form, name: str) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    (there / name).write_bytes((there / name).read_bytes()[::-1])
    (tmp_path / "loaded").mkdir()
    with pytest.raises(CorruptDataError, match="changed"), open_steps(there) as reader:
        load_checkpoint(reader, tmp_path / "loaded")


def test_explicit_episodes_that_cannot_be_are_found(tmp_path: Path) -> None:
    write_plan(DatasetPlan((3, 3), ("open", "open"), (True, True), ODD_LEAVES[:1]), tmp_path / "dataset")
    there = saved(tmp_path / "dataset", tmp_path / "saved", "flat")
    path = there / "explicit_episodes.memmap"
    for numbers in ([1, 0], [0, 2], [-1, 0], [1, 1]):
        path.write_bytes(np.array(numbers, np.int64).tobytes())
        relist(there)
        with pytest.raises(CorruptDataError, match="ascending"):
            open_steps(there)


@any_form
def test_a_checkpoint_of_other_data_is_not_loaded(odd_file: Path, tmp_path: Path, form: Form) -> None:
    """The digest of the dataset, in the provenance, is what a load is held to."""
    target = tmp_path / "loaded"
    target.mkdir()
    with open_steps(saved(odd_file, tmp_path / "saved", form)) as reader:
        *before, last = reader.manifest.provenance
        other = replace(last, inputs={"content_digest": "xxh3-128:0"})
        reader.manifest = replace(reader.manifest, provenance=(*before, other))
        with pytest.raises(CorruptDataError, match="does not restore the data that it was saved from"):
            load_checkpoint(reader, target)
    assert not has_manifest(target)


def test_readers_refuse_other_layouts(odd_file: Path, tmp_path: Path) -> None:
    flat, h5 = saved(odd_file, tmp_path / "flat", "flat"), saved(odd_file, tmp_path / "saved.h5", "h5")
    with pytest.raises(FormatError, match="expected flat or nested"):
        FlatReader(odd_file)
    with pytest.raises(FormatError, match="expected ted"):
        TedReader(flat)
    manifest, block = read_block(h5)
    h5.write_bytes(block_bytes(replace(manifest, layout="flat"), block) + h5.read_bytes()[block:])
    with pytest.raises(FormatError, match="expected h5"):
        H5Reader(h5)


@folder_forms
def test_a_manifest_of_another_length_is_found(odd_file: Path, tmp_path: Path, form: Form) -> None:
    there = saved(odd_file, tmp_path / "saved", form)
    longer = there / "mask.memmap"
    longer.write_bytes(longer.read_bytes() + b"\0")
    relist(there)
    with pytest.raises(CorruptDataError, match=r"mask\.memmap has 9 bytes, expected 8"):
        open_steps(there)
