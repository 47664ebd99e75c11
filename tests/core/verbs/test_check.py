"""Every rule on damaged and sound datasets, and what every open compares with its digest."""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from damage import flip, flips
from tensordict import TensorDict

import rbtool
from rbtool import CorruptDataError, RbtoolError, UsageError
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.errors import FormatError
from rbtool.core.format import open_files
from rbtool.core.format.checks import FOLDER_RULES, EpisodeTableRule, rows_of
from rbtool.core.format.episodes import EPISODES as TABLE
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.memmap.tree import leaf_path
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.ted.rules import DATA_RULES, RULE_BY_ID, RULES, ContinuityRule, SchemaRule, SingletonRule
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, relist, write_packed, write_plan, write_walks
from rbtool.core.verbs import saved_buffers
from rbtool.core.verbs.check import VideoRule
from rbtool.core.verbs.convert import convert

EPISODES = [(10, "terminated"), (10, "truncated"), (10, "both"), (1, "open")]
Change = Callable[[np.ndarray], None]  # type: ignore[type-arg]


def _edit(folder: Path, name: str, change: Change) -> None:
    """Change the array of a leaf in place, behind the manifest's back."""
    key = tuple(name.split("."))
    with TedReader(folder) as reader:
        array = reader.read(key, 0, reader.manifest.steps)
    change(array)
    (folder / leaf_path(key)).write_bytes(array.tobytes())


def _edit_table(folder: Path, column: str, row: int, value: Any) -> None:
    path = folder / TABLE / f"{column}.memmap"
    array = np.frombuffer(path.read_bytes(), TedReader(folder).episodes.columns()[column].dtype).copy()
    array[row] = value
    path.write_bytes(array.tobytes())
    relist(folder)


def _put_byte(index: int, value: int) -> Change:
    return lambda array: array.view(np.uint8).__setitem__(index, value)


def _put(index: Any, value: Any) -> Change:
    return lambda array: array.__setitem__(index, value)


def _found(folder: Path) -> dict[str, str]:
    """Messages of the rules about data, by rule and severity; that the digests differ is not news."""
    return {f"{f.rule} {f.severity}": f.message for f in rbtool.check(folder).findings if f.rule != "TED013"}


def test_a_sound_dataset_breaks_no_rule(walks: Path) -> None:
    result = rbtool.check(walks)
    assert result.findings == ()
    assert (result.steps, result.episodes, result.rules, result.skipped) == (31, 4, 36, ())
    assert not result.failed("warn")


@pytest.mark.parametrize(
    ("leaf", "change", "rule", "message"),
    [
        ("next.done", _put(4, True), "TED003 error", r"1 of 31 steps: .* \(first: step 4, episode 0\)"),
        ("next.observation", _put(14, 0.5), "TED004 error", r"1 of 31 .* next.observation .*step 14, episode 1"),
        ("observation", _put((25, 2), np.nan), "TED004 error", r"next.observation is not .*step 24, episode 2"),
        ("next.done", _put(19, False), "TED006 error", r"1 episode ends without done .*step 19, episode 1"),
        ("next.done", _put(3, True), "TED006 warning", r"1 of 31 steps is done inside .*step 3, episode 0"),
        ("next.reward", _put(7, np.nan), "TED007 error", r"next.reward is NaN .* 1 of 31 steps .*step 7, episode 0"),
        ("next.reward", _put(7, -np.inf), "TED007 error", "next.reward is NaN or infinite"),
        ("next.done", _put_byte(9, 3), "TED016 error", r"byte other than 0 and 1 in 1 of 31 .*step 9, episode 0"),
        ("action", _put(slice(None), 0), "TED008 warning", "action is zero everywhere"),
        ("action", _put((slice(None), 1), 3), "TED009 warning", r"action\[1\] never changes"),
        ("episode", _put(12, 5), "TED010 error", r"the row of step 12, episode 1 says it belongs to episode 5"),
        ("next.reward", _put(0, 99.0), "TED010 error", r"episode 0 returns .*, the table states"),
        ("next.terminated", _put(9, False), "TED010 error", r"terminated of step 9, episode 0 differs"),
    ],
)
def test_a_rule_names_the_step_that_breaks_it(walks: Path, leaf: str, change: Change, rule: str, message: str) -> None:
    _edit(walks, leaf, change)
    found = _found(walks)[rule]
    assert re.search(message, found), found


def test_chunks_do_not_change_what_is_found(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _edit(walks, "next.observation", _put([3, 14, 22], 0.5))
    whole = _found(walks)
    monkeypatch.setattr(TedReader, "chunks", lambda self, size=0: ((a, min(a + 4, 31)) for a in range(0, 31, 4)))
    assert _found(walks) == whole
    assert "3 of 31 steps" in whole["TED004 error"]


def test_a_declared_discontinuity_is_only_a_warning(walks: Path) -> None:
    _edit(walks, "next.observation", _put(14, 0.5))
    _edit_table(walks, "explicit_next", 1, True)
    found = _found(walks)
    assert "TED004 error" not in found
    assert "as the episode table states" in found["TED004 warning"]


def test_the_next_observation_of_n_step_data_need_not_follow(walks: Path) -> None:
    _edit(walks, "next.observation", _put(14, 0.5))
    _edit_table(walks, "explicit_next", 1, True)
    with TedReader(walks) as reader:
        ahead = Field(("steps_to_next_obs",), "int64", (), "info")
        plain, n_step = (ContinuityRule(fields, 31) for fields in (reader.fields, (*reader.fields, ahead)))
        for rule in (plain, n_step):
            rule.see(rows_of(reader, 0, 31))
    assert [finding.severity for finding in plain.findings()] == ["warning"]
    assert n_step.findings() == []


@pytest.mark.parametrize("done", [(9,), ()])
@pytest.mark.parametrize("kind", [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer])
def test_the_unfinished_episode_of_a_buffer_is_no_error(kind, done, tmp_path) -> None:
    flag = torch.zeros(10, 1, dtype=torch.bool)
    flag[list(done)] = True
    seen, draw = torch.randn(11, 2), torch.randn(10, 1)
    after = {"observation": seen[1:], "reward": draw, "done": flag, "terminated": flag, "truncated": flag & False}
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, checkpointer=kind()))
    buffer.extend(TensorDict({"observation": seen[:-1], "action": -draw, "next": after}, [10]))
    buffer.dumps(tmp_path / "buffer")
    (place,) = (*(tmp_path / "buffer" / "storage").glob("*.h5"),) or (tmp_path / "buffer" / "storage",)
    result = rbtool.check(place)
    assert (result.errors, result.unfinished) == (0, 9 not in done)
    assert result.findings == ()


def test_an_unfinished_recording_names_the_command_that_repairs_it(tmp_path: Path, walks: Path) -> None:
    with TedReader(walks) as reader:
        PackedRecorder(tmp_path / "recording", reader.fields).close()
    (finding,) = rbtool.check(tmp_path / "recording").findings
    assert (finding.rule, f"rbtool repair {tmp_path / 'recording'}" in finding.message) == ("TED014", True)


def test_one_episode_cut_in_two_is_found(tmp_path: Path, walks: Path) -> None:
    with TedReader(walks) as reader:
        first = {name: reader.read(name, 10, 11) for name in (("observation",), ("info", "success"))}
    _edit(walks, "next.observation", _put(9, first[("observation",)][0]))
    assert "TED005 warning" not in _found(walks)
    _edit(walks, "next.info.success", _put(9, first[("info", "success")][0]))
    assert "step 9, episode 0" in _found(walks)["TED005 warning"]


def test_data_that_were_never_written_are_an_error(walks: Path) -> None:
    for leaf in ("observation", "next.observation", "action"):
        _edit(walks, leaf, _put(slice(None), 0))
    assert "never written" in _found(walks)["TED008 error"]


@pytest.mark.parametrize(("column", "value"), [("length", 9), ("start", 3), ("length", 0)])
def test_a_table_that_does_not_add_up_is_an_error(walks: Path, column: str, value: int) -> None:
    _edit_table(walks, column, 1, value)
    assert "TED010 error" in _found(walks)


def test_missing_leaves_and_missing_singletons_are_errors(walks: Path) -> None:
    kept = [field for field in Manifest.load(walks).fields if field.name not in {"next.truncated", "action"}]
    kept = [replace(field, shape=()) if field.name == "next.reward" else field for field in kept]
    relist(walks, fields=tuple(kept))
    for name in ("next/truncated.memmap", "action.memmap"):
        (walks / name).unlink()
    rules = {(f.rule, f.message) for f in rbtool.check(walks).findings}
    assert ("TED011", f"{walks / 'action.memmap'} is missing, expected 248 bytes") in rules
    messages = [f.message for rule in (SchemaRule, SingletonRule) for f in rule(kept, 31).findings()]
    assert messages == [
        "there is no 'next.truncated'",
        "there are no actions: no field is 'action'",
        "'next.reward' has rows of shape [], expected a trailing 1",
    ]
    odd = [replace(field, dtype="complex64") if field.name == "next.reward" else field for field in kept]
    assert "'next.reward' is complex64, expected real numbers" in [f.message for f in SchemaRule(odd, 31).findings()]


def test_cut_files_stop_the_rules_that_read_rows(walks: Path) -> None:
    path = walks / "observation.memmap"
    path.write_bytes(path.read_bytes()[:-8])
    result = rbtool.check(walks)
    assert {finding.rule for finding in result.findings} == {"TED011", "TED012"}
    assert len(result.skipped) == 13
    assert result.failed()


def test_changed_documents_and_manifests_are_found_by_their_digests(walks: Path) -> None:
    path = walks / ".rbtool" / "source" / "metadata.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    [finding] = rbtool.check(walks).findings
    assert (finding.rule, finding.severity) == ("TED013", "error")
    assert "metadata.json was changed" in finding.message
    path = walks / ".rbtool" / "manifest.json"
    path.write_text(path.read_text().replace('"steps": 31', '"steps": 30'))
    [finding] = rbtool.check(walks).findings
    assert finding.rule == "TED014"
    assert "was changed after it was written" in finding.message


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
def test_check_finds_nothing_in_a_checkpoint_until_it_is_cut(walks: Path, tmp_path: Path, form: str) -> None:
    rbtool.checkpoint.save(walks, tmp_path / "saved", form=form)
    assert rbtool.check(tmp_path / "saved").findings == ()
    cut = tmp_path / "saved" / "observation.memmap" if form != "h5" else tmp_path / "saved"
    cut.write_bytes(cut.read_bytes()[:-8])
    result = rbtool.check(tmp_path / "saved")
    whole = [("TED014", ())] if form == "h5" else [("TED012", ()), ("TED014", (3,))]
    assert [(finding.rule, finding.episodes) for finding in result.findings] == whole
    assert (result.errors, result.rules, len(result.skipped)) == ((1, 1, 16) if form == "h5" else (2, 36, 0))
    assert result.failed()


@pytest.mark.parametrize(
    ("leaf", "change", "rule", "steps", "episodes"),
    [
        ("next.done", _put([4, 5, 22], True), "TED003", ((4, 6), (22, 23)), (0, 2)),
        ("next.observation", _put([0, 14, 15], 0.5), "TED004", ((0, 1), (14, 16)), (0, 1)),
        ("next.reward", _put([7, 8, 9, 10, 30], np.nan), "TED007", ((7, 11), (30, 31)), (0, 1, 3)),
        ("episode", _put([12, 13, 29], 5), "TED010", ((12, 14), (29, 30)), (1, 2)),
        ("next.reward", _put([0, 25], 99.0), "TED010", ((9, 10), (29, 30)), (0, 2)),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_every_bad_step_and_episode_is_listed(
    walks: Path, monkeypatch: pytest.MonkeyPatch, leaf: str, change: Change, rule: str, steps: Any, episodes: Any,
    chunk: int,
) -> None:  # fmt: skip
    _edit(walks, leaf, change)
    monkeypatch.setattr(TedReader, "chunks", lambda reader: ((n, min(n + chunk, 31)) for n in range(0, 31, chunk)))
    found = {finding.rule: finding for finding in rbtool.check(walks).findings if finding.severity == "error"}
    assert (found[rule].steps, found[rule].episodes) == (steps, episodes)
    document = json.loads(json.dumps(to_document(rbtool.check(walks))))
    assert [list(part) for part in steps] in [finding["steps"] for finding in document["findings"]]


def test_values_outside_their_spaces_are_a_warning(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(10, "terminated"), (5, "truncated")])
    box = {"type": "Box", "shape": [2], "dtype": "float32", "low": 1e6, "high": 2e6}
    relist(tmp_path / "walks", spaces={"action": box})
    found = [finding for finding in rbtool.check(tmp_path / "walks").findings if finding.rule == "TED015"]
    assert [(one.severity, one.steps, one.episodes) for one in found] == [("warning", ((0, 15),), (0, 1))]


def test_one_changed_byte_anywhere_in_a_packed_dataset_is_found(tmp_path: Path) -> None:
    plan = DatasetPlan(
        (5, 1, 7, 3), ("terminated", "open", "truncated", "both"), (False, False, True, False), ODD_LEAVES,
        root_flags="set", text=True, documents=True,
    )  # fmt: skip
    write_plan(plan, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        fields = [field for field in reader.fields if field.row_bytes and field.key[0] != "next"][::2]
    packed = tmp_path / "packed"
    write_packed(tmp_path / "ted", packed, *(f"{field.name}=zstd" for field in fields))
    files = [path for path in sorted(packed.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 20
    for number, path in enumerate(files):
        sound = flip(path, number * 7919 % path.stat().st_size, 4)
        with contextlib.suppress(FormatError):  # raised, unless the file is opened for the check
            assert rbtool.check(packed).failed(), path
        path.write_bytes(sound)
    found, others = (rbtool.check(path).findings for path in (packed, tmp_path / "ted"))
    assert [replace(one, mend="") for one in found] == [replace(one, mend="") for one in others]


def test_the_table_lists_the_rules_of_the_code(tmp_path: Path) -> None:
    assert {one.rule for one in RULES if one.about == "rows"} == {rule.rule_id for rule in DATA_RULES}
    folder = {EpisodeTableRule.rule_id, VideoRule.rule_id, *(rule.rule_id for rule in FOLDER_RULES), "TED014"}
    assert {one.rule for one in RULES if one.about == "folder"} == folder
    used = set(re.findall(r"BUF\d{3}", inspect.getsource(saved_buffers)))
    assert {one.rule for one in RULES if one.about == "saved buffers"} == used
    assert len(RULE_BY_ID) == len(RULES) == len({one.name for one in RULES})
    numbers = [(one.about == "saved buffers", one.rule) for one in RULES]
    assert numbers == sorted(numbers)
    write_walks(tmp_path / "walks", [(3, "terminated")])
    assert rbtool.check(tmp_path / "walks", profile="form").rules == sum(one.about != "saved buffers" for one in RULES)


@pytest.mark.parametrize("rule", [*DATA_RULES, EpisodeTableRule, VideoRule], ids=lambda rule: rule.rule_id)
def test_the_table_lists_the_severities_of_each_rule(rule: Any) -> None:
    named = re.findall(r'"(error|warning)"', inspect.getsource(rule))
    assert tuple(sorted(set(named))) == RULE_BY_ID[rule.rule_id].severities


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("verb", [rbtool.inspect, rbtool.check, rbtool.stats, rbtool.load_dataset])
def test_a_file_that_cannot_be_opened_is_not_called_missing(walks, number: int, verb, monkeypatch) -> None:
    opened = open_files.open_regular

    def failing(name: Any, **options: Any) -> int:
        if str(name).endswith("action.memmap"):
            raise OSError(number, os.strerror(number), str(name))
        return opened(name, **options)

    monkeypatch.setattr(open_files, "open_regular", failing)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        verb(walks)
    assert (caught.value.errno, caught.value.filename) == (number, str(walks / "action.memmap"))


def test_an_hdf5_root_that_is_no_group_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w", libver="earliest") as h5:
        h5["plain"], h5["text"] = np.arange(3.0), ["a", "b", "c"]
    data = bytearray(path.read_bytes())
    assert data[112:114] == b"\x11\0"  # the message of the root that makes it a group
    data[112:114] = b"\0\0"
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="unable to determine object type"):
        rbtool.convert(path, tmp_path / "out", format="table", map=["observation=plain"], ends="-")
    with pytest.raises(CorruptDataError):
        rbtool.inspect(path)


# What describes the rows is small, and compared with its digest whenever a dataset is opened.
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
        rbtool.checkpoint.save(folder / "ted", folder / form, form=form)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_description_of_the_rows_is_found_at_open(folder: Path, form: str) -> None:
    files = [*(folder / form / ".rbtool/episodes").iterdir(), *(folder / form).rglob("*.json")]
    small = [one for one in files if one.parent.name not in {"source", ".rbtool"} and one.name != "env_metadata.json"]
    assert len(small) >= 13
    for path in small:
        sound = flip(path, path.stat().st_size // 2)
        with pytest.raises(CorruptDataError, match=f"{path.name} was changed"):
            open_steps(folder / form)
        path.write_bytes(sound)
    open_steps(folder / form).close()


@pytest.mark.parametrize("form", ["ted", "packed"])
def test_a_damaged_episode_table_is_refused_by_every_verb(folder: Path, form: str) -> None:
    flip(folder / form / ".rbtool/episodes/return.memmap", 0)
    flip(folder / form / ".rbtool/episodes/seed.memmap", 0)
    for verb in (rbtool.inspect, rbtool.sample, rbtool.load_dataset, rbtool.stats):
        with pytest.raises(CorruptDataError, match=r"return\.memmap was changed"):
            verb(folder / form)  # type: ignore[operator]
    found = {finding.rule: finding.message for finding in rbtool.check(folder / form).findings}
    assert ["return" in found["TED014"], "seed" in found["TED013"]] == [True, True]


@pytest.mark.parametrize("form", ["ted", "packed", "flat", "nested"])
@pytest.mark.parametrize("name", [".rbtool/episodes_text.jsonl", ".rbtool/source/raw.bin", "env_metadata.json"])
def test_damaged_text_and_source_documents_are_found_where_they_are_used(folder, form: str, name: str) -> None:
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


def test_statistics_of_equal_bytes_with_other_dtypes_are_not_reused(tmp_path: Path) -> None:
    write_plan(replace(PLAN, text=False), tmp_path / "honest")
    shutil.copytree(tmp_path / "honest", tmp_path / "other")
    fields = Manifest.load(tmp_path / "other").fields
    other = (replace(field, dtype="int32") if field.dtype == "float32" else field for field in fields)
    relist(tmp_path / "other", fields=tuple(other))
    expected = rbtool.stats(tmp_path / "honest", root=tmp_path / "empty").fields
    assert rbtool.stats(tmp_path / "other", root=tmp_path).fields != expected
    found = rbtool.stats(tmp_path / "honest", root=tmp_path)
    assert (found.remembered, found.fields) == (False, expected)
    assert rbtool.stats(tmp_path / "honest", root=tmp_path).remembered


def test_damaged_remembered_statistics_are_taken_anew(tmp_path: Path) -> None:
    write_plan(replace(PLAN, text=False), tmp_path / "data")
    expected = rbtool.stats(tmp_path / "data", root=tmp_path).fields
    (path,) = (tmp_path / ".stats").iterdir()
    digits = np.flatnonzero(np.frombuffer(path.read_bytes(), np.uint8) == ord("3"))
    for at in digits[:10].tolist():
        sound = flip(path, at)
        assert rbtool.stats(tmp_path / "data", root=tmp_path).fields == expected
        path.write_bytes(sound)


@pytest.mark.parametrize("form", ["ted", "packed"])
def test_verify_compares_data_with_their_digests(folder: Path, form: str) -> None:
    data = folder / form / ("action.memmap" if form == "ted" else "records.bin")
    rbtool.load_dataset(folder / form, verify=True)
    assert rbtool.sample(folder / form, 2, seed=0, verify=True) == rbtool.sample(folder / form, 2, seed=0)
    flip(data, 0)
    rbtool.load_dataset(folder / form)
    rbtool.sample(folder / form, 2)
    for verb in (rbtool.load_dataset, rbtool.sample):
        with pytest.raises(CorruptDataError, match=f"{data.name} was changed"):
            verb(folder / form, verify=True)  # type: ignore[operator]


def test_a_folder_without_digests_cannot_be_verified(folder: Path) -> None:
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
