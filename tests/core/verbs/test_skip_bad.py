"""`--skip-bad`: the sound episodes of a damaged dataset, and the names of the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from damage import flip

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.format.checks import UNVERIFIED
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.memmap.tree import leaf_path
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks

EPISODES = [(10, "terminated"), (10, "truncated"), (4, "both"), (1, "open")]
Damage = Callable[[Path], object]


def cut(folder: Path) -> None:
    os.truncate(folder / "observation.memmap", 22 * 24 + 7)


def edited(*edits: tuple[str, int, float]) -> Damage:
    def damage(folder: Path) -> None:
        for name, row, value in edits:
            key = tuple(name.split("."))
            with TedReader(folder) as reader:
                array = reader.read(key, 0, reader.manifest.steps)
            array[row] = value
            (folder / leaf_path(key)).write_bytes(array.tobytes())

    return damage


def converted(walks: Path, dest: Path, **options: Any) -> Any:
    return rbtool.convert(walks, dest, **options)


def packed(walks: Path, dest: Path, **options: Any) -> Any:
    return rbtool.convert(walks, dest, layout="packed", **options)


def preprocessed(walks: Path, dest: Path, **options: Any) -> Any:
    return rbtool.preprocess(walks, None, dest, operations={"clip_reward": "-9:9"}, **{"num_workers": 0} | options)


DAMAGED = [
    (cut, [0, 1]),
    (edited(("next.observation", 3, 0.5)), [1, 2, 3]),
    (edited(("next.reward", 12, 9.0), ("next.done", 20, True)), [0, 3]),
]


@pytest.mark.parametrize("make", [converted, packed, preprocessed])
@pytest.mark.parametrize(("damage", "sound"), DAMAGED)
def test_sound_episodes_are_kept_and_damaged_ones_named(walks, tmp_path, make, damage, sound) -> None:
    with open_steps(walks) as reader:
        before, table = reader.read(("observation",), 0, 25), reader.episodes
    damage(walks)
    with pytest.raises(CorruptDataError) as caught:
        make(walks, tmp_path / "made")
    assert caught.value.hint.endswith("; --skip-bad takes the sound episodes, if there are any")
    result = make(walks, tmp_path / "made", skip_bad=True)
    bad = ", ".join(str(number) for number in range(4) if number not in sound)
    assert any(f"{4 - len(sound)} of 4 episodes are damaged and left out: {bad}" in note for note in result.notes)
    with open_steps(tmp_path / "made") as reader:
        assert reader.episodes.episode.tolist() == sound
        assert reader.episodes.seed.tolist() == [number + 7 for number in sound]
        assert reader.episode_text == [{"task": f"walk {number} é"} for number in sound]
        rows = np.concatenate([np.arange(table.start[n], table.start[n] + table.length[n]) for n in sound])
        assert np.array_equal(reader.read(("observation",), 0, len(rows)), before[rows])
        assert np.array_equal(reader.episodes.total_reward, table.total_reward[sound])
    assert rbtool.check(tmp_path / "made").errors == 0


@pytest.mark.parametrize("make", [converted, packed, preprocessed])
def test_notes_name_each_damaged_file_once(walks: Path, tmp_path: Path, make: Callable[..., Any]) -> None:
    cut(walks)
    os.truncate(walks / "next" / "reward.memmap", 21 * 8)
    edited(("action", 2, 7.0))(walks)
    result = make(walks, tmp_path / "made", skip_bad=True)
    for name in ("observation.memmap", "next/reward.memmap", "action.memmap"):
        named = [note for note in result.notes if str(walks / name) in note]
        assert len(named) == 1, named


@pytest.mark.parametrize(("damage", "sound"), DAMAGED)
def test_an_export_keeps_the_sound_episodes(walks: Path, tmp_path: Path, damage: Damage, sound: list[int]) -> None:
    damage(walks)
    result = rbtool.export(walks, tmp_path / "out.npz", to="npz", skip_bad=True)
    with np.load(tmp_path / "out.npz") as file:
        assert file["episodes.episode"].tolist() == sound
    assert any("are damaged and left out" in note for note in result.notes)
    some = rbtool.export(walks, tmp_path / "few.npz", to="npz", skip_bad=True, episodes="0:4")
    assert some.episodes == len(sound)


def test_workers_keep_the_same_episodes(walks: Path, tmp_path: Path) -> None:
    cut(walks)
    alone = preprocessed(walks, tmp_path / "alone", skip_bad=True, chunk_size=5)
    both = preprocessed(walks, tmp_path / "both", skip_bad=True, chunk_size=5, num_workers=2)
    assert (both.content_digest, both.episodes) == (alone.content_digest, 2)


def test_a_cut_file_of_explicit_next_rows_costs_the_episodes_behind_the_cut(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(8, "terminated"), (9, "truncated"), (6, "terminated")])
    rbtool.preprocess(tmp_path / "walks", None, tmp_path / "far", operations={"n_step": 2, "gamma": 0.9}, num_workers=0)
    packed(tmp_path / "far", tmp_path / "packed")
    file = tmp_path / "packed" / "explicit_next.bin"
    os.truncate(file, file.stat().st_size * 16 // 23)
    (finding,) = rbtool.check(tmp_path / "packed").findings
    assert (finding.steps, finding.episodes) == (((16, 23),), (1, 2))
    assert converted(tmp_path / "packed", tmp_path / "made", skip_bad=True).episodes == 1


def test_skip_bad_changes_nothing_of_a_sound_dataset(walks: Path, tmp_path: Path) -> None:
    made = converted(walks, tmp_path / "made", skip_bad=True)
    assert (made.notes, made.content_digest) == ((), converted(walks, tmp_path / "plain").content_digest)


def test_a_dataset_without_sound_episodes_is_refused(walks: Path, tmp_path: Path) -> None:
    os.truncate(walks / "observation.memmap", 9 * 24)
    with pytest.raises(CorruptDataError, match="has no episode that is sound") as caught:
        converted(walks, tmp_path / "made", skip_bad=True)
    assert caught.value.hint == f"see what is damaged: rbtool check {walks}"
    assert not (tmp_path / "made").exists()
    folder = Path(shutil.copytree(MINARI, tmp_path / "raw"))
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        for group in file.values():
            del group["rewards"]
    with pytest.raises(CorruptDataError, match="has no episode that is sound: episode 0"):
        converted(folder, tmp_path / "made", skip_bad=True)
    assert not (tmp_path / "made").exists()


def test_a_cut_packed_dataset_keeps_the_episodes_before_the_cut(walks: Path, tmp_path: Path) -> None:
    source, made = tmp_path / "packed", tmp_path / "made"
    packed(walks, source)
    records = source / "records.bin"
    os.truncate(records, records.stat().st_size * 21 // 29)  # of 25 steps and 4 last observations
    result = rbtool.check(source)
    found = [(finding.steps, finding.episodes) for finding in result.findings if finding.rule == "TED012"]
    assert (found, result.errors) == ([(((19, 25),), (1, 2, 3))], 1)
    assert rbtool.inspect(source).problems == (result.findings[0].message,)
    with pytest.raises(CorruptDataError, match="the manifest states"):
        preprocessed(source, made)
    notes = preprocessed(source, made, skip_bad=True, chunk_size=5).notes
    assert any("3 of 4 episodes are damaged and left out: 1, 2, 3" in note for note in notes)
    assert rbtool.check(made).errors == 0


@pytest.mark.parametrize("is_cut", [True, False])
def test_every_episode_of_a_damaged_chunk_is_left_out(walks: Path, tmp_path: Path, is_cut: bool) -> None:
    packed(walks, tmp_path / "packed", compress=["observation=zstd"])
    file = tmp_path / "packed" / "fields" / "observation.zstd"
    os.truncate(file, file.stat().st_size - 1) if is_cut else overwrite(file, 0, bytes([file.read_bytes()[0] ^ 0xFF]))
    findings = rbtool.check(tmp_path / "packed").findings
    assert [finding.episodes for finding in findings if finding.episodes] == [(0, 1, 2, 3)]
    with pytest.raises(CorruptDataError, match=r"has no episode that is sound: .*observation") as caught:
        converted(tmp_path / "packed", tmp_path / "made", skip_bad=True)
    assert caught.value.hint.startswith("see what is damaged: rbtool check ")


def test_a_conversion_of_sound_episodes_is_not_one_of_all(walks: Path, tmp_path: Path) -> None:
    whole = (walks / "observation.memmap").read_bytes()
    cut(walks)
    converted(walks, tmp_path / "made", skip_bad=True)
    assert converted(walks, tmp_path / "made", skip_bad=True).already_there
    (walks / "observation.memmap").write_bytes(whole)
    with pytest.raises(UsageError, match="has 20 of its steps, not 25"):
        converted(walks, tmp_path / "made")


def in_layout(walks: Path, dest: Path, form: str) -> Path:
    """Write the same rows in another layout; `packed zstd` compresses the observation."""
    if form == "recording":
        with TedReader(walks) as reader, PackedRecorder(dest, reader.fields) as recorder:
            table = reader.episodes
            for number, (start, length) in enumerate(zip(table.start.tolist(), table.length.tolist(), strict=True)):
                rows = {field.key: reader.read(field.key, start, start + length) for field in reader.fields}
                recorder.add_episode(rows, episode=number)
    elif form.startswith("packed"):
        _, _, method = form.partition(" ")
        rbtool.convert(walks, dest, layout="packed", compress=[f"observation={method}"] if method else [])
    else:
        rbtool.checkpoint.save(walks, dest, form=form)
    return dest


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def take(folder: Path, dest: Path, sound: list[int], walks: Path) -> Any:
    """Convert the sound episodes, and compare what was taken with the rows that were written."""
    result = rbtool.convert(folder, dest, skip_bad=True)
    with open_steps(dest) as made, open_steps(walks) as whole:
        table = whole.episodes
        assert made.episodes.episode.tolist() == sound
        rows = np.concatenate([np.arange(table.start[n], table.start[n] + table.length[n]) for n in sound])
        for field in made.fields:
            assert np.array_equal(made.read(field.key, 0, len(rows)), whole.read(field.key, 0, 25)[rows]), field.name
    return result


def bad_in_check(folder: Path) -> set[int]:
    findings = to_document(rbtool.check(folder))["findings"]
    return {number for finding in findings if finding["severity"] == "error" for number in finding["episodes"]}


@pytest.mark.parametrize("how", ["cut", "zeros"])
@pytest.mark.parametrize("form", ["packed zstd", "packed lz4"])
def test_unreadable_chunks_cost_only_their_episodes(walks, tmp_path, monkeypatch, form: str, how: str) -> None:
    monkeypatch.setattr("rbtool.core.format.packed.schema._CHUNK_BYTES", 100)  # four records
    folder = in_layout(walks, tmp_path / "form", form)
    data = next((folder / "fields").glob("observation.*[!x]"))
    offsets = np.fromfile(f"{data}.index", "<u8").tolist()
    if how == "cut":
        os.truncate(data, offsets[-1] - 1)
    else:
        overwrite(data, offsets[3], bytes(offsets[4] - offsets[3]))  # records 12 to 15
    bad = {3} if how == "cut" else {1}
    with pytest.raises(CorruptDataError):
        rbtool.convert(folder, tmp_path / "made")
    result = take(folder, tmp_path / "made", sorted({0, 1, 2, 3} - bad), walks)
    assert f"1 of 4 episodes are damaged and left out: {min(bad)}" in result.notes
    assert bad_in_check(folder) == bad
    assert len(rbtool.inspect(folder).problems) == (how == "cut")


CUT = {"packed": "records.bin", "flat": "observation.memmap", "nested": "action.memmap", "ted": "action.memmap"}


@pytest.mark.parametrize("form", CUT)
def test_a_cut_file_of_any_layout_costs_the_episodes_behind_the_cut(walks: Path, tmp_path: Path, form: str) -> None:
    folder = walks if form == "ted" else in_layout(walks, tmp_path / "form", form)
    before = shutil.copytree(walks, tmp_path / "before")
    file = folder / CUT[form]
    os.truncate(file, file.stat().st_size * 7 // 10)
    (problem,) = rbtool.inspect(folder).problems
    assert problem.startswith(f"{file} has")
    result = take(folder, tmp_path / "made", [0], before)
    assert "3 of 4 episodes are damaged and left out: 1, 2, 3" in result.notes
    assert bad_in_check(folder) == {1, 2, 3}
    with pytest.raises(UsageError, match="already exists"):
        rbtool.convert(before, tmp_path / "made")


def test_workers_and_exports_read_the_sound_episodes_of_a_packed_dataset(walks: Path, tmp_path: Path) -> None:
    folder = in_layout(walks, tmp_path / "form", "packed")
    os.truncate(folder / "records.bin", (folder / "records.bin").stat().st_size * 7 // 10)
    assert preprocessed(folder, tmp_path / "both", chunk_size=5, skip_bad=True, num_workers=2).episodes == 1
    assert rbtool.export(folder, tmp_path / "out.npz", to="npz", skip_bad=True).episodes == 1


@pytest.mark.parametrize("form", ["ted", "packed", "flat", "nested", "h5"])
def test_a_note_says_that_values_of_single_episodes_are_not_verified(walks: Path, tmp_path: Path, form: str) -> None:
    folder = walks if form == "ted" else in_layout(walks, tmp_path / "form", form)
    with TedReader(walks) as reader:
        action = reader.read(("action",), 12, 13).tobytes()
    for file in [folder] if form == "h5" else [path for path in folder.rglob("*") if path.is_file()]:
        if (at := file.read_bytes().find(action)) >= 0 and ".rbtool" not in file.parts:
            flip(file, at)
    found = rbtool.check(folder)
    assert found.errors
    assert any("there are no digests of single episodes" in note for note in found.notes)
    result = to_document(rbtool.convert(folder, tmp_path / "made", skip_bad=True))
    assert result["episodes"] == 4
    assert UNVERIFIED in result["notes"]
    (note,) = rbtool.check(tmp_path / "made").notes
    assert "made from a damaged dataset with --skip-bad" in note
    rbtool.convert(tmp_path / "made", tmp_path / "again", layout="packed")
    assert UNVERIFIED in rbtool.inspect(tmp_path / "again").notes
    assert rbtool.check(tmp_path / "again").notes == (note,)


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_recording_verifies_every_episode_by_its_own_digest(walks: Path, tmp_path: Path, how: str) -> None:
    folder = in_layout(walks, tmp_path / "form", "recording")
    records = folder / "records.bin"
    sound, bad = records.read_bytes(), {1} if how == "flip" else {2, 3}
    if how == "cut":
        os.truncate(records, len(sound) * 23 // 29)
    else:
        with TedReader(walks) as reader:
            flip(records, sound.index(reader.read(("action",), 12, 13).tobytes()))
    result = take(folder, tmp_path / "made", sorted({0, 1, 2, 3} - bad), walks)
    assert UNVERIFIED not in result.notes
    assert (rbtool.check(folder).notes, bad_in_check(folder)) == ((), bad)
    assert rbtool.check(tmp_path / "made").notes == ()


def test_a_result_of_skip_bad_is_not_already_there_for_the_whole(walks: Path, tmp_path: Path) -> None:
    shutil.copytree(walks, tmp_path / "before")
    overwrite(walks / "action.memmap", 0, b"\xff")  # all episodes are taken
    for make in (converted, preprocessed):
        assert make(walks, tmp_path / make.__name__, skip_bad=True).episodes == 4
    shutil.rmtree(walks)
    shutil.copytree(tmp_path / "before", walks)
    for make in (converted, preprocessed):
        with pytest.raises(UsageError, match="already exists"):
            make(walks, tmp_path / make.__name__)
        assert make(walks, tmp_path / make.__name__, force=True).notes == ()


def test_a_result_with_other_sound_episodes_is_not_already_there(walks: Path, tmp_path: Path) -> None:
    sound = (walks / "next" / "reward.memmap").read_bytes()
    for damage in (edited(("next.reward", 3, 0.5)), edited(("next.reward", 13, 0.5))):
        damage(walks)
        made = converted(walks, tmp_path / str(damage), skip_bad=True)
        assert (made.steps, converted(walks, tmp_path / str(damage), skip_bad=True).already_there) == (15, True)
        (walks / "next" / "reward.memmap").write_bytes(sound)
    edited(("next.reward", 3, 0.5))(walks)
    with pytest.raises(UsageError, match="while other files of the dataset were damaged"):
        converted(walks, tmp_path / str(damage), skip_bad=True)


MINARI = Path("tests/data/minari/cartpole/scripted-v0")


def damaged_minari(tmp_path: Path) -> Path:
    """A dataset of Minari in which episode 3 lacks an observation and episode 7 its rewards."""
    folder = Path(shutil.copytree(MINARI, tmp_path / "raw"))
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        rows = file["episode_3/observations"][:-1]
        del file["episode_3/observations"]
        file["episode_3/observations"] = rows
        del file["episode_7/rewards"]
    return folder


def test_sound_episodes_of_a_raw_dataset_are_converted(tmp_path: Path) -> None:
    raw, whole = damaged_minari(tmp_path), rbtool.inspect(MINARI)
    with pytest.raises(FormatError) as caught:
        converted(raw, tmp_path / "made")
    assert caught.value.hint == "add --skip-bad to convert the episodes that are sound"
    result = converted(raw, tmp_path / "made", skip_bad=True)
    assert result.episodes == whole.episodes - 2
    left = [note for note in result.notes if "is left out" in note]
    assert [note.partition(":")[0] for note in left] == ["episode 3 is left out", "episode 7 is left out"]
    numbers = [number for number in range(whole.episodes) if number not in (3, 7)]
    with open_steps(result.path) as reader:
        assert reader.episodes.episode.tolist() == numbers
    chosen = ",".join(map(str, numbers))
    plain = converted(MINARI, tmp_path / "chosen", episodes=chosen)
    assert result.content_digest == plain.content_digest
    assert result.request["options"] == {"skip_bad": True}
    assert converted(raw, tmp_path / "made", skip_bad=True).already_there
    with pytest.raises(UsageError, match="already exists and is dataset"):
        converted(MINARI, tmp_path / "made")


def test_skip_bad_notes_only_chosen_episodes(tmp_path: Path) -> None:
    raw = damaged_minari(tmp_path)
    result = converted(raw, tmp_path / "made", skip_bad=True, episodes="2:5")
    assert (result.episodes, [note for note in result.notes if "7" in note.partition(":")[0]]) == (2, [])
    sound = converted(raw, tmp_path / "sound", skip_bad=True, episodes="4:7")
    assert (sound.episodes, [note for note in sound.notes if "left out" in note]) == (3, [])


def test_check_lists_the_damaged_episodes_of_a_raw_dataset(tmp_path: Path) -> None:
    result = rbtool.check(damaged_minari(tmp_path))
    document = to_document(result)
    found = {tuple(finding["episodes"]): finding["message"] for finding in document["findings"]}
    assert sorted(found) == [(3,), (7,)]
    assert "episode 3" in found[3,]
    assert result.episodes == rbtool.inspect(MINARI).episodes - 2
    assert sum(document["boundary"][kind] for kind in ("terminated", "truncated")) == result.episodes


def test_nan_rewards_of_a_raw_dataset_cost_their_episodes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MINARI, tmp_path / "raw"))
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        for name in ("episode_2", "episode_9"):
            file[name]["rewards"][3] = np.nan
    (error,) = [one for one in rbtool.check(folder).findings if one.severity == "error"]
    assert (error.rule, error.episodes) == ("TED007", (2, 9))
    result = converted(folder, tmp_path / "made", skip_bad=True)
    assert result.episodes == rbtool.inspect(MINARI).episodes - 2
    assert rbtool.check(result.path).errors == 0
