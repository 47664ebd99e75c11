"""What is small and describes the rest is compared with its digest at every open."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damage import flip, flips

import rbtool
from rbtool import CorruptDataError, RbtoolError, UsageError
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, relist, write_plan
from rbtool.core.verbs.convert import convert

FORMS = ["ted", "packed", "recording", "flat", "nested"]
PLAN = DatasetPlan((4, 3), ("open", "both"), (False, True), ODD_LEAVES[:2], text=True, documents=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset in every form."""
    folder = tmp_path_factory.mktemp("made")
    write_plan(PLAN, folder / "ted")
    convert(folder / "ted", folder / "packed", layout="packed")
    with TedReader(folder / "ted") as reader, PackedRecorder(folder / "recording", reader.fields) as recorder:
        for number, (start, stop) in enumerate([(0, 4), (4, 7)]):
            rows = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
            recorder.add_episode(rows, episode=number)
    for form in ("flat", "nested", "h5"):
        target = folder / form
        if form != "h5":
            target.mkdir()
        with open_steps(folder / "ted") as reader:
            save_checkpoint(reader, target, form)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_description_of_the_rows_is_found_at_open(folder: Path, form: str) -> None:
    small = [*(folder / form / ".rbtool/episodes").iterdir(), *(folder / form).rglob("*.json")]
    small = [
        path for path in small if path.parent.name not in {"source", ".rbtool"} and path.name != "env_metadata.json"
    ]
    assert len(small) >= 13
    for path in small:
        sound = flip(path, path.stat().st_size // 2)
        with pytest.raises(CorruptDataError, match=f"{path.name} was changed"):
            open_steps(folder / form)
        path.write_bytes(sound)
    open_steps(folder / form).close()


@pytest.mark.parametrize("form", ["ted", "packed"])
def test_no_verb_believes_a_damaged_episode_table(folder: Path, form: str) -> None:
    flip(folder / form / ".rbtool/episodes/return.memmap", 0)
    flip(folder / form / ".rbtool/episodes/seed.memmap", 0)
    for verb in (rbtool.inspect, rbtool.sample, rbtool.load_dataset, rbtool.stats):
        with pytest.raises(CorruptDataError, match=r"return\.memmap was changed"):
            verb(folder / form)  # type: ignore[operator]
    found = {finding.rule: finding.message for finding in rbtool.check(folder / form).findings}
    assert ["return" in found["TED014"], "seed" in found["TED013"]] == [True, True]


@pytest.mark.parametrize("form", ["ted", "packed", "flat", "nested"])
@pytest.mark.parametrize("name", [".rbtool/episodes_text.jsonl", ".rbtool/source/raw.bin", "env_metadata.json"])
def test_damaged_text_and_source_documents_are_found_where_they_are_used(folder: Path, form: str, name: str) -> None:
    flip(folder / form / name, 0)
    with open_steps(folder / form) as reader, pytest.raises(CorruptDataError, match="was changed"):
        _ = reader.episode_text, reader.documents()


@pytest.mark.parametrize(
    "part", ["episodes/length.memmap", "episodes/seed.memmap", "episodes_text.jsonl", "source/raw.bin"]
)
def test_a_damaged_small_part_of_one_file_is_found_where_it_is_used(folder: Path, part: str) -> None:
    path = folder / "h5"
    flip(path, path.read_bytes().rindex((folder / "ted" / ".rbtool" / part).read_bytes()))
    with open_steps(path) as reader, pytest.raises(CorruptDataError, match="was changed"):
        _ = reader.episodes, reader.episode_text, reader.documents()


@pytest.mark.parametrize("form", FORMS)
def test_a_content_digest_that_is_not_that_of_the_files_is_refused(folder: Path, form: str) -> None:
    relist(folder / form, content_digest="xxh3-128:" + "0" * 32)
    with pytest.raises(CorruptDataError, match="but its listed files give"):
        open_steps(folder / form)
    assert [finding.rule for finding in rbtool.check(folder / form).findings] == ["TED014"]


def test_a_file_that_is_listed_twice_is_refused(folder: Path) -> None:
    manifest = Manifest.load(folder / "ted")
    relist(folder / "ted", files=(*manifest.files, manifest.files[0]))
    with pytest.raises(CorruptDataError, match="lists a file twice"):
        open_steps(folder / "ted")


def test_a_leaf_without_a_listed_file_is_refused(folder: Path) -> None:
    files = [file for file in Manifest.load(folder / "ted").files if file.path != "action.memmap"]
    (folder / "ted" / "action.memmap").rename(folder / "kept")
    relist(folder / "ted")
    (folder / "kept").rename(folder / "ted" / "action.memmap")
    assert Manifest.load(folder / "ted").files == tuple(files)
    with pytest.raises(CorruptDataError, match=r"lists 0 bytes of action\.memmap"):
        open_steps(folder / "ted")


def test_statistics_of_the_same_bytes_read_otherwise_are_not_taken_for_the_dataset_s(tmp_path: Path) -> None:
    write_plan(replace(PLAN, text=False), tmp_path / "honest")
    shutil.copytree(tmp_path / "honest", tmp_path / "other")
    fields = [
        replace(field, dtype="int32") if field.dtype == "float32" else field
        for field in Manifest.load(tmp_path / "other").fields
    ]
    relist(tmp_path / "other", fields=tuple(fields))
    expected = rbtool.stats(tmp_path / "honest", root=tmp_path / "empty").fields
    assert rbtool.stats(tmp_path / "other", root=tmp_path).fields != expected
    found = rbtool.stats(tmp_path / "honest", root=tmp_path)
    assert (found.remembered, found.fields) == (False, expected)
    assert rbtool.stats(tmp_path / "honest", root=tmp_path).remembered


def test_damaged_remembered_statistics_are_not_believed(tmp_path: Path) -> None:
    write_plan(replace(PLAN, text=False), tmp_path / "data")
    expected = rbtool.stats(tmp_path / "data", root=tmp_path).fields
    (path,) = (tmp_path / ".stats").iterdir()
    digits = np.flatnonzero(np.frombuffer(path.read_bytes(), np.uint8) == ord("3"))
    for at in digits[:10].tolist():
        sound = flip(path, at)
        assert rbtool.stats(tmp_path / "data", root=tmp_path).fields == expected
        path.write_bytes(sound)


@pytest.mark.parametrize("form", ["ted", "packed"])
def test_data_are_compared_with_their_digests_where_that_is_asked_for(folder: Path, form: str) -> None:
    data = folder / form / ("action.memmap" if form == "ted" else "records.bin")
    rbtool.load_dataset(folder / form, verify=True)
    assert rbtool.sample(folder / form, 2, seed=0, verify=True) == rbtool.sample(folder / form, 2, seed=0)
    flip(data, 0)
    rbtool.load_dataset(folder / form)
    rbtool.sample(folder / form, 2)
    for verb in (rbtool.load_dataset, rbtool.sample):
        with pytest.raises(CorruptDataError, match=f"{data.name} was changed"):
            verb(folder / form, verify=True)  # type: ignore[operator]


def test_what_has_no_digests_cannot_be_verified(folder: Path) -> None:
    shutil.rmtree(folder / "ted" / ".rbtool")
    rbtool.sample(folder / "ted", 2)
    with pytest.raises(UsageError, match="has no digests"):
        rbtool.sample(folder / "ted", 2, verify=True)


def is_found(path: Path) -> bool:
    try:
        with open_steps(path) as reader:
            reader.verify_files()
    except RbtoolError:
        return True
    return False


@pytest.mark.parametrize("form", ["packed", "recording"])
def test_a_flip_in_any_file_of_a_dataset_is_found(folder: Path, form: str) -> None:
    for file, at in flips(folder / form, places=1):
        assert is_found(folder / form), (file, at)
    assert not is_found(folder / form)


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, "h5"])
def test_many_flips_in_any_file_of_a_dataset_are_found(folder: Path, form: str) -> None:
    for file, at in flips(folder / form, places=300 if form == "h5" else 24):
        assert is_found(folder / form), (file, at)
    assert not is_found(folder / form)
