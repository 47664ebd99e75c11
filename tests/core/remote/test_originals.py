"""Folders of fetched files: recorded, locked, checked, removed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from waiting import HANG

from rbtool.core.errors import FormatError
from rbtool.core.format.sources import RemoteDataset, RemoteFile
from rbtool.core.remote.originals import Originals, stored_originals

DATA = b"some bytes"
SHA = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
DATASET = RemoteDataset("a/b-v0", "hf://x/a@1", "1", (RemoteFile("data/one", len(DATA), SHA, ("http://x/one",)),))


@pytest.fixture
def originals(tmp_path):
    found = Originals(tmp_path, "minari", "a/b-v0")
    with found.lock(lambda: None):
        found.begin(DATASET, ["data/one"], kept=False)
    (found.files / "data").mkdir(parents=True)
    (found.files / "data/one").write_bytes(DATA)
    return found


def test_what_was_begun_is_recorded(originals, tmp_path):
    record = originals.record()
    assert record is not None
    assert (record.id, record.address, record.revision, record.kept) == ("a/b-v0", "hf://x/a@1", "1", False)
    assert [(file.path, file.size, file.checksum) for file in record.files] == [("data/one", len(DATA), SHA)]
    assert [(found.source, found.id) for found in stored_originals(tmp_path)] == [("minari", "a/b-v0")]


def test_a_folder_that_stays_empty_goes(tmp_path):
    found = Originals(tmp_path, "minari", "a/b-v0")
    with found.lock(lambda: None):
        assert found.folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_goes_and_what_is_next_to_it_stays(tmp_path):
    (tmp_path / "minari/kept").mkdir(parents=True)
    with Originals(tmp_path, "minari", "a/b-v0").lock(lambda: None):
        pass
    assert [path.name for path in (tmp_path / "minari").iterdir()] == ["kept"]


def test_what_was_kept_once_stays_kept(originals):
    for kept, expected in ((False, False), (True, True), (False, True)):
        originals.begin(DATASET, [], kept=kept)
        assert originals.record().kept is expected


def test_nothing_is_there_before_it_is_begun(tmp_path):
    found = Originals(tmp_path, "minari", "a/b-v0")
    assert (found.record(), found.bytes(), list(found.problems())) == (None, 0, [])
    assert list(stored_originals(tmp_path)) == []


def test_changed_bytes_are_a_problem(originals):
    assert list(originals.problems()) == []
    (originals.files / "data/one").write_bytes(DATA[::-1])
    (problem,) = originals.problems()
    assert SHA in problem


@pytest.mark.parametrize("kept", [False, True])
def test_missing_files_are_a_problem_of_what_was_kept(originals, kept):
    originals.begin(DATASET, [], kept=kept)
    (originals.files / "data/one").unlink()
    assert len(list(originals.problems())) == kept


@pytest.mark.parametrize(
    "document", ["{", "[]", '{"files": []}', '{"files": [{"path": "../up", "size": 1, "checksum": "md5:0"}]}']
)
def test_a_damaged_record_is_a_format_error(originals, document):
    (originals.folder / "fetched.json").write_text(document)
    with pytest.raises(FormatError):
        originals.record()


def test_a_record_cannot_lead_out_of_its_folder(originals):
    path = originals.folder / "fetched.json"
    path.write_text(path.read_text().replace("data/one", "../../one"))
    with pytest.raises(FormatError, match="outside"):
        originals.record()


def test_parts_count_as_present(originals):
    assert originals.present(DATASET) == len(DATA)
    (originals.files / "data/one").rename(originals.files / "data/one.part")
    os.truncate(originals.files / "data/one.part", 4)
    assert originals.present(DATASET) == 4


def test_files_of_an_older_state_go(originals):
    for name in ("data/old", "data/one.part", "data/2/gone"):
        path = originals.files / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    originals.begin(DATASET, ["data/one"], kept=False)
    assert sorted(path.name for path in originals.files.rglob("*")) == ["data", "one", "one.part"]


def test_what_the_remote_has_changed_is_neither_kept_nor_asked_for(originals):
    originals.begin(DATASET, [], kept=True)
    newer = replace(DATASET, files=(replace(DATASET.files[0], checksum="md5:0"), *DATASET.files[1:]))
    originals.begin(newer, [], kept=False)
    record = originals.record()
    assert (record.kept, record.asked, list(originals.problems())) == (True, (), [])
    assert not (originals.files / "data/one").exists()


def test_only_the_files_of_a_request_are_seen(originals):
    with originals.only(["data/one"]) as folder:
        assert folder == originals.files
    (originals.files / "data/2").mkdir()
    (originals.files / "data/2/other").write_bytes(b"x")
    with originals.only(["data/one"]) as folder:
        assert [path.name for path in folder.rglob("*")] == ["data", "one"]
        assert (folder / "data/one").read_bytes() == DATA
    assert not folder.exists()


@pytest.fixture
def other(originals):
    """Another process that wants the folder: it prints `waiting`, then, once it has it, whether it is there."""
    code = (
        "import sys, pathlib\n"
        "from rbtool.core.remote.originals import Originals\n"
        "originals = Originals(pathlib.Path(sys.argv[1]), 'minari', 'a/b-v0')\n"
        "with originals.lock(lambda: print('waiting', flush=True)):\n"
        "    print(originals.folder.is_dir(), flush=True)\n"
    )

    def start() -> subprocess.Popen[str]:
        root = originals.folder.parents[2]
        return subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True)

    return start


def test_one_process_at_a_time(originals, other):
    with originals.lock(lambda: None):
        process = other()
        assert process.stdout.readline() == "waiting\n"
    assert process.communicate(timeout=HANG)[0] == "True\n"


def test_whoever_waited_for_a_folder_that_is_gone_has_a_new_one(originals, other):
    with originals.lock(lambda: None):
        process = other()
        assert process.stdout.readline() == "waiting\n"
        originals.remove()
    assert process.communicate(timeout=HANG)[0] == "True\n"


def test_what_has_come_is_more_than_the_record_of_it(originals):
    assert originals.has_any()
    (originals.files / "data/one").write_bytes(b"")
    assert not originals.has_any()
