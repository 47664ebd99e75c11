"""Damage of every kind is found, and never comes out of a load as data."""

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rbtool import CorruptDataError, FormatError, RbtoolError
from rbtool.core.encodings.compact import Form
from rbtool.core.encodings.flat import FlatReader
from rbtool.core.encodings.h5_layout import H5Reader, block_bytes, read_block
from rbtool.core.encodings.save import load_checkpoint, save_checkpoint
from rbtool.core.format.manifest import has_manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, relist, write_plan

FORMS = ["ted", "flat", "nested", "h5"]
any_form = pytest.mark.parametrize("form", FORMS)
folder_forms = pytest.mark.parametrize("form", ["flat", "nested"])


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Few leaves, of every kind: the tests here write each of their files many times over."""
    few = {("x",), ("x.shape",), ("at_root", "wave"), ("mask",), ("info", "lap")}
    leaves = tuple(leaf for leaf in ODD_LEAVES if leaf.key in few)
    ends, jumps = ("open", "both", "open"), (False, True, False)
    plan = DatasetPlan((4, 3, 1), ends, jumps, leaves, root_flags="set", text=True, documents=True)
    write_plan(plan, tmp_path / "odd")
    return tmp_path / "odd"


def save(source: Path, target: Path, form: Form) -> Path:
    if form != "h5":
        target.mkdir()
    with open_steps(source) as reader:
        save_checkpoint(reader, target, form)
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
    return (
        [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    )


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
def test_any_changed_byte_is_found(odd: Path, tmp_path: Path, form: Form) -> None:
    saved = save(odd, tmp_path / "saved", form)
    verify(saved)
    for file, at, change in flips(saved):
        assert is_damaged(saved), f"byte {at} of {file} went from {change[0]} to {change[1]} unseen"
    verify(saved)


@any_form
def test_a_load_gives_the_data_that_were_saved_or_nothing(odd: Path, tmp_path: Path, form: Form) -> None:
    saved = save(odd, tmp_path / "saved", form)
    with open_steps(odd) as reader:
        digest, documents = reader.manifest.content_digest, reader.documents()
    refused = 0
    for number, _ in enumerate(itertools.islice(flips(saved), 0, None, 6)):
        target = tmp_path / f"loaded-{number}"
        target.mkdir()
        try:
            with open_steps(saved) as reader:
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
def test_files_of_another_size_are_found(odd: Path, tmp_path: Path, form: Form, change: str) -> None:
    saved = save(odd, tmp_path / "saved", form)
    for file in files_of(saved):
        sound = file.read_bytes()
        file.unlink()
        if change != "gone":
            file.write_bytes(sound[:-1] if change == "cut" else sound + b"\0")
        assert is_damaged(saved), file
        file.write_bytes(sound)
    verify(saved)


@folder_forms
@pytest.mark.parametrize(("one", "other"), [("done", "terminated"), ("mask", "done")])
def test_files_that_were_swapped_are_found(odd: Path, tmp_path: Path, form: Form, one: str, other: str) -> None:
    saved = save(odd, tmp_path / "saved", form)
    here, there = saved / f"{one}.memmap", saved / f"{other}.memmap"
    here_bytes, there_bytes = here.read_bytes(), there.read_bytes()
    here.write_bytes(there_bytes)
    there.write_bytes(here_bytes)
    with pytest.raises(CorruptDataError):
        verify(saved)


@folder_forms
def test_leaves_that_were_swapped_in_the_description_are_found(odd: Path, tmp_path: Path, form: Form) -> None:
    saved = save(odd, tmp_path / "saved", form)
    path = saved / "meta.json"
    text = path.read_text().replace('"x"', '"y"').replace('"mask"', '"x"').replace('"y"', '"mask"')
    assert len(text) == path.stat().st_size
    path.write_text(text)
    with pytest.raises(CorruptDataError, match="changed"):
        open_steps(saved)
    relist(saved)
    with pytest.raises(CorruptDataError, match=r"disagree on|bytes"):
        open_steps(saved)


def test_a_missing_table_of_shapes_is_found_at_once(odd: Path, tmp_path: Path) -> None:
    saved = save(odd, tmp_path / "saved", "nested")
    (saved / "mask.shape.memmap").unlink()
    with pytest.raises(CorruptDataError, match=r"mask\.shape\.memmap is missing"):
        open_steps(saved)


@pytest.mark.parametrize("form", ["ted", "flat", "nested"])
@pytest.mark.parametrize("name", ["mask.memmap", ".rbtool/episodes/return.memmap", ".rbtool/episodes_text.jsonl"])
def test_a_file_of_another_checkpoint_is_found(odd: Path, tmp_path: Path, form: Form, name: str) -> None:
    saved = save(odd, tmp_path / "saved", form)
    (saved / name).write_bytes((saved / name).read_bytes()[::-1])
    (tmp_path / "loaded").mkdir()
    with pytest.raises(CorruptDataError, match="changed"), open_steps(saved) as reader:
        load_checkpoint(reader, tmp_path / "loaded")


def test_explicit_episodes_that_cannot_be_are_found(tmp_path: Path) -> None:
    write_plan(DatasetPlan((3, 3), ("open", "open"), (True, True), ODD_LEAVES[:1]), tmp_path / "dataset")
    saved = save(tmp_path / "dataset", tmp_path / "saved", "flat")
    path = saved / "explicit_episodes.memmap"
    for numbers in ([1, 0], [0, 2], [-1, 0], [1, 1]):
        path.write_bytes(np.array(numbers, np.int64).tobytes())
        relist(saved)
        with pytest.raises(CorruptDataError, match="ascending"):
            open_steps(saved)


@any_form
def test_a_checkpoint_of_something_else_is_not_loaded(odd: Path, tmp_path: Path, form: Form) -> None:
    """The digest of the dataset, in the provenance, is what a load is held to."""
    target = tmp_path / "loaded"
    target.mkdir()
    with open_steps(save(odd, tmp_path / "saved", form)) as reader:
        *before, last = reader.manifest.provenance
        other = replace(last, inputs={"content_digest": "xxh3-128:0"})
        reader.manifest = replace(reader.manifest, provenance=(*before, other))
        with pytest.raises(CorruptDataError, match="does not restore the data that it was saved from"):
            load_checkpoint(reader, target)
    assert not has_manifest(target)


def test_readers_refuse_each_other_s_layout(odd: Path, tmp_path: Path) -> None:
    flat, h5 = save(odd, tmp_path / "flat", "flat"), save(odd, tmp_path / "saved.h5", "h5")
    with pytest.raises(FormatError, match="expected flat or nested"):
        FlatReader(odd)
    with pytest.raises(FormatError, match="expected ted"):
        TedReader(flat)
    manifest, block = read_block(h5)
    h5.write_bytes(block_bytes(replace(manifest, layout="flat"), block) + h5.read_bytes()[block:])
    with pytest.raises(FormatError, match="expected h5"):
        H5Reader(h5)


@folder_forms
def test_a_manifest_of_another_length_is_found(odd: Path, tmp_path: Path, form: Form) -> None:
    saved = save(odd, tmp_path / "saved", form)
    longer = saved / "mask.memmap"
    longer.write_bytes(longer.read_bytes() + b"\0")
    relist(saved)
    with pytest.raises(CorruptDataError, match=r"mask\.memmap has 9 bytes, expected 8"):
        open_steps(saved)
