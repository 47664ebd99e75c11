"""What says of a recording what is in it lies there twice: one changed or missing file costs nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rbtool.core.encodings.rows import compare_steps
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan
from rbtool.core.verbs.repair import repair

PLAN = DatasetPlan(
    (5, 1, 7, 3), ("terminated", "both", "truncated", "both"), (False, False, True, False), ODD_LEAVES, "set"
)
LOG, COPY, FIELDS, SCHEMA = ".rbtool/commits.bin", ".rbtool/commits_copy.bin", ".rbtool/recording.json", "schema.json"
EPISODES = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows in layout `ted`, and four episodes of them recorded, of which no dataset was made."""
    work = tmp_path_factory.mktemp("recorded")
    write_plan(PLAN, work / "ted")
    with TedReader(work / "ted") as reader:
        recorder = PackedRecorder(work / "recording", reader.fields)
        table = reader.episodes
        for row in range(EPISODES):
            start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
            columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
            seed = int(table.seed[row]) if table.has_seed[row] else None
            recorder.add_episode(columns, episode=int(table.episode[row]), seed=seed)
        recorder.close()
    return work


@pytest.fixture
def recording(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original / "recording", tmp_path / "recording")
    return tmp_path / "recording"


def damage(path: Path, how: str) -> None:
    """Remove a file, empty it, cut its end, or change a byte at a part of its length."""
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    else:
        data[int(len(data) * float(how))] ^= 1
        path.write_bytes(data)


def differences(original: Path, recording: Path) -> list[object]:
    with TedReader(original / "ted") as expected, open_steps(recording) as found:
        found.verify_files()
        return [*compare_steps(expected, found)]


HARM = ("missing", "empty", "cut", *(str(number / 23) for number in (0, 5, 11, 16, 22)))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", [LOG, COPY, FIELDS, SCHEMA])
def test_one_damaged_file_costs_nothing(original: Path, recording: Path, name: str, sealed: bool) -> None:
    if sealed:
        repair(recording)
    for how in HARM:
        copy = recording.with_name(how)
        shutil.copytree(recording, copy)
        damage(copy / name, how)
        result = repair(copy)
        assert (result.episodes, result.lost_episodes, result.repaired) == (EPISODES, 0, True), how
        if name != COPY or how[0].isdigit():  # the copy may end early
            assert result.remade == (name,), how
        assert differences(original, copy) == [], how
        assert not repair(copy).repaired


@pytest.mark.parametrize("how", ["missing", "cut", "0.5"])
def test_what_was_recorded_is_not_guessed(recording: Path, how: str) -> None:
    for name in (FIELDS, SCHEMA):
        damage(recording / name, how)
    before = {path: path.read_bytes() for path in recording.rglob("*") if path.is_file()}
    with pytest.raises(CorruptDataError, match=r"does not say what was recorded: \S+json and \S+json are both"):
        repair(recording, yes=True)
    assert before == {path: path.read_bytes() for path in recording.rglob("*") if path.is_file()}


def test_the_files_of_another_recording_are_not_taken_for_ours(original: Path, recording: Path) -> None:
    write_plan(DatasetPlan((2,), ("both",), (False,), ODD_LEAVES[:3]), recording.parent / "other-ted")
    with TedReader(recording.parent / "other-ted") as reader:
        PackedRecorder(recording.parent / "other", reader.fields).close()
    shutil.copy(recording.parent / "other" / FIELDS, recording / FIELDS)
    assert repair(recording).remade == (FIELDS,)
    assert differences(original, recording) == []
    for name in (FIELDS, SCHEMA):
        shutil.copy(recording.parent / "other" / name, recording / name)
    with pytest.raises(CorruptDataError, match="of another recording"):
        repair(recording)


def test_a_newer_recording_is_refused(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rbtool.core.format.packed import recording as writing
    from rbtool.core.format.packed.repair import read_fields

    fields = read_fields(recording, None).fields
    with monkeypatch.context() as patch:
        patch.setattr(writing, "RECORDING_VERSION", 2)
        (recording / FIELDS).write_bytes(writing.fields_bytes(fields))
    with pytest.raises(FormatError, match="has version 2, this rbtool reads up to 1"):
        repair(recording)


# The log ---------------------------------------------------------------------------------------------


def cut_logs(recording: Path, records: float) -> None:
    for name in (LOG, COPY):
        size = (recording / name).stat().st_size // EPISODES
        os.truncate(recording / name, int(size * records))


@pytest.mark.parametrize("records", [0.5, 1.5, 3.5])
def test_a_torn_record_promised_nothing(recording: Path, records: float) -> None:
    """Its episode was under way; the rows of later ones cannot be there."""
    kept = int(records)
    named = repair(shutil.copytree(recording, recording.with_name("whole")), dry_run=True)
    cut_logs(recording, records)
    with open(recording / "records.bin", "rb+") as file:  # as many records as there were when it was torn
        lengths = PLAN.lengths[: kept + 1]
        file.truncate((sum(lengths) + len(lengths)) * (file.seek(0, 2) // (sum(PLAN.lengths) + EPISODES)))
    result = repair(recording)
    assert (result.episodes, result.lost_episodes, result.repaired) == (kept, 0, True)
    assert named.episodes == EPISODES


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("records", "total"), [(0, 3), (1, 3), (2, 3), (1.5, 3), (3, 4)])
def test_finished_episodes_that_no_log_names_are_not_cut_unasked(
    recording: Path, records: float, total: int, sealed: bool
) -> None:
    if sealed:
        repair(recording)
        total = EPISODES
    cut_logs(recording, records)
    before = {path: path.read_bytes() for path in recording.rglob("*") if path.is_file()}
    if total > 3 and not sealed:  # the last may be the one that was under way
        assert repair(recording).episodes == 3
        return
    for name in ((), (LOG, COPY)):
        for gone in name:
            (recording / gone).unlink()
            before.pop(recording / gone)
            records = 0
        message = (
            f"has at least {total} finished episodes, of which the first {int(records)} can be restored: \\S+ was cut"
            if int(records)
            else f"not one of at least {total} finished episodes can be restored, because .* do not name them"
        )
        with pytest.raises(CorruptDataError, match=message) as caught:
            repair(recording, yes=not int(records))
        assert ("--yes" in caught.value.hint) == bool(int(records))
        assert before == {path: path.read_bytes() for path in recording.rglob("*") if path.is_file()}


def test_finished_episodes_that_no_log_names_are_given_up_when_asked(recording: Path) -> None:
    cut_logs(recording, 1)
    result = repair(recording, yes=True)
    assert (result.episodes, result.lost_episodes, result.repaired) == (1, 2, True)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("ask", [{}, {"yes": True}, {"dry_run": True}])
def test_a_missing_data_file_is_named_and_nothing_is_cut(recording: Path, ask: dict[str, bool], sealed: bool) -> None:
    if sealed:
        repair(recording)
    (recording / "records.bin").unlink()
    before = {path: path.read_bytes() for path in recording.rglob("*") if path.is_file()}
    message = f"records.bin is missing: not one of {EPISODES} finished episodes can be restored"
    with pytest.raises(CorruptDataError, match=message) as caught:
        repair(recording, **ask)
    assert "--yes" not in caught.value.hint
    assert before == {path: path.read_bytes() for path in recording.rglob("*") if path.is_file()}


def test_a_missing_folder_of_data_files_is_named(tmp_path: Path) -> None:
    leaves = (
        *(Field((name,), "uint8", (5000,), "state") for name in ("left", "right")),
        Field(("next", "done"), "bool", (1,), "done"),
    )
    with PackedRecorder(tmp_path / "recording", leaves) as recorder:
        recorder.add_episode({leaf.key: np.ones((3, *leaf.shape), leaf.numpy) for leaf in leaves}, episode=0)
    shutil.rmtree(tmp_path / "recording" / "fields")
    with pytest.raises(
        CorruptDataError, match=r"fields/left\.\S+ is missing: not one of 1 finished episode can"
    ) as caught:
        repair(tmp_path / "recording", yes=True)
    assert "fields/right." in caught.value.hint


def test_without_its_log_and_a_data_file_it_is_not_emptied(recording: Path) -> None:
    for name in (LOG, COPY, "records.bin"):
        (recording / name).unlink()
    with pytest.raises(CorruptDataError, match=r"records.bin is missing: every episode needs it"):
        repair(recording, yes=True)


def test_a_missing_file_of_explicit_rows_costs_only_what_is_in_it(recording: Path) -> None:
    (recording / "explicit_next.bin").unlink()
    with pytest.raises(CorruptDataError, match=r"of which the first 2 can be restored: explicit_next.bin is missing"):
        repair(recording)
    result = repair(recording, yes=True)
    assert (result.episodes, result.lost_episodes, result.repaired) == (2, 2, True)


def test_a_first_episode_that_is_damaged_leaves_nothing_to_cut_to(recording: Path) -> None:
    damage(recording / "records.bin", "0")
    with pytest.raises(
        CorruptDataError, match="can be restored, because the first one is damaged; nothing was changed"
    ):
        repair(recording, yes=True)


def test_an_episode_that_could_not_be_written_is_not_built_upon(original: Path, tmp_path: Path) -> None:
    with TedReader(original / "ted") as reader:
        recorder = PackedRecorder(tmp_path / "recording", reader.fields)
        columns = {field.key: reader.read(field.key, 0, 5) for field in reader.fields}
        recorder.add_episode(columns, episode=0)
        with pytest.raises(SchemaError, match="other leaves"):
            recorder.add_episode({("action",): np.zeros((2, 2), np.float32)}, episode=1)
        recorder.rows.files._records._file.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            recorder.add_episode(columns, episode=1)
        for go_on in (recorder.finish, lambda: recorder.add_episode(columns, episode=1)):
            with pytest.raises(SchemaError, match="stopped in the middle of an episode"):
                go_on()
        recorder.close()
    assert repair(tmp_path / "recording").episodes == 1
