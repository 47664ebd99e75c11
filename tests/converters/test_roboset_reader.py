"""`RobosetReader`: the contract of readers, files of several seeds, what `done` means, and odd trials."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from cases import each
from conversions import WrittenReaderTests, column, columns_of, converted, refused
from demonstration_files import Demo, after_final_step, plain_episodes, roboset_trial, write_groups, write_trials

import rbtool
from rbtool.converters.roboset.reader import RobosetReader
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import Final

DOOR = Path(__file__).parents[1] / "data" / "roboset" / "DAPG(expert)" / "door_v2d-v1"
SEEDS = [DOOR / f"door_v2d-v1_seed{seed}.h5" for seed in (0, 1)]
NAMES = {"observations": "observation", "env_infos/time": "info.time", "env_infos/obs_dict/qp": "info.obs_dict.qp"}


class TestReaderOfAFolder(WrittenReaderTests):
    """Two files with the same numbers of trials."""

    kind, piece_bytes = RobosetReader, 700

    def write(self, folder: Path) -> Path:
        for seed, lengths in ((2, {0: 5, 10: 3, 2: 9}), (10, {0: 1, 1: 6})):
            trials = {
                number: roboset_trial(length, seed=seed + number, done=number > 0) for number, length in lengths.items()
            }
            write_trials(folder / "door" / f"door_seed{seed}.h5", trials)
        return folder / "door"


class TestReader(TestReaderOfAFolder):
    """One file."""

    def source(self) -> Path:
        return self.path / "door_seed2.h5"


@each("choice", ["auto", "drop", "repeat"])
@each("ends", [None, "truncated"])
def test_every_row_of_both_seeds_equals_a_plain_reading(choice: str, ends: str | None, tmp_path: Path) -> None:
    result = rbtool.convert(DOOR, tmp_path / "out", final_step=choice, ends=ends)
    plain = [episode for file in SEEDS for episode in plain_episodes(file, "/", "Trial").values()]
    with TedReader(result.path) as reader:
        assert reader.episodes.episode.tolist() == list(range(15))
        assert reader.episodes.seed.tolist() == [0] * 11 + [1] * 4
        spans = zip(reader.episodes.start.tolist(), reader.episodes.length.tolist(), strict=True)
        for (start, length), columns in zip(spans, plain, strict=True):
            rows = {field.name: reader.read(field.key, start, start + length) for field in reader.fields}
            expected = after_final_step(columns, terminated=ends is None, choice=choice)
            for name, key in NAMES.items():
                assert rows[key].tobytes() == expected[name].tobytes(), key
                assert rows[f"next.{key}"].tobytes() == expected[f"next:{name}"].tobytes(), key
            assert rows["action"].tobytes() == expected["actions"].tobytes()
            assert rows["next.reward"].tobytes() == expected["rewards"].tobytes()
            last = np.arange(len(rows["action"])) == len(rows["action"]) - 1
            terminated = last & (ends is None and choice != "drop")
            assert rows["next.terminated"][:, 0].tolist() == terminated.tolist()
            assert rows["next.truncated"][:, 0].tolist() == (last & ~terminated).tolist()


def test_trials_are_in_numeric_order(tmp_path: Path) -> None:
    """Groups are listed as Trial0, Trial1, Trial10, Trial2."""
    with converted(SEEDS[0], tmp_path / "out") as reader:
        assert reader.episodes.episode.tolist() == list(range(11))
        with h5py.File(SEEDS[0]) as file:
            assert reader.episodes.length.tolist() == [len(file[f"Trial{number}/actions"]) for number in range(11)]


def test_holes_in_the_numbers_of_one_file_stay(tmp_path: Path) -> None:
    file = write_trials(tmp_path / "a.h5", {number: roboset_trial(3, seed=number) for number in (60, 7, 101)})
    with RobosetReader(file) as reader:
        assert list(reader.facts().episode_numbers) == [7, 60, 101]


def test_episodes_of_several_files_have_numbers_of_their_own(tmp_path: Path) -> None:
    result = rbtool.convert(DOOR, tmp_path / "out")
    assert any("seed0.h5 has episodes 0..10, door_v2d-v1_seed1.h5 has episodes 11..14" in one for one in result.notes)
    with TedReader(result.path) as reader:
        listed, text = json.loads(reader.documents()["episodes.json"]), reader.episode_text
    assert listed[11] == {"episode": 11, "file": "door_v2d-v1_seed1.h5", "trial": 0}
    assert text is not None
    assert text[11] == {"file": "door_v2d-v1_seed1.h5", "trial": "0"}


def test_files_are_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    for seed in (10, 9, 1):
        write_trials(tmp_path / "d" / f"a_seed{seed}.h5", {0: roboset_trial(2 + seed, seed=seed)})
    with RobosetReader(tmp_path / "d") as reader:
        assert reader.facts().lengths == [2, 10, 11]  # without the last step of each
        assert reader.episode_table().seed.tolist() == [1, 9, 10]


def test_files_with_the_same_contents_are_named(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_trials(tmp_path / "d" / f"a_seed{seed}.h5", {0: roboset_trial(4, seed=seed)})
    with RobosetReader(tmp_path / "d") as reader:
        assert not any("same contents" in note for note in reader.facts().notes)
    shutil.copy(tmp_path / "d" / "a_seed1.h5", tmp_path / "d" / "a_seed3.h5")
    with RobosetReader(tmp_path / "d") as reader:
        notes = [note for note in reader.facts().notes if "same contents" in note]
    assert notes == ["1 file has the same contents as another, and all of them are converted: a_seed1.h5 = a_seed3.h5"]


def test_done_nowhere_is_the_end_of_the_group_truncated(tmp_path: Path) -> None:
    file = write_trials(tmp_path / "a.h5", {0: roboset_trial(4), 1: roboset_trial(1, seed=1)})
    result = rbtool.convert(file, tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.truncated.tolist() == [True]
        assert reader.episodes.final.tolist() == [Final.DROPPED]
        assert reader.episodes.length.tolist() == [3]
    assert "done is never set at the end of an episode: episodes end truncated" in result.notes
    assert any("episode 1 is left out: one step" in note for note in result.notes)


def test_done_inside_a_trial_stays_a_flag(tmp_path: Path) -> None:
    trial = roboset_trial(5)
    odd = Demo({**trial.columns, "done": np.array([0, 1, 0, 0, 1], bool)})
    result = rbtool.convert(write_trials(tmp_path / "a.h5", {0: odd}), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [5]
        assert column(reader, "next.terminated")[:, 0].tolist() == [False, True, False, False, True]
    assert "done is set in 1 step inside episodes, and stays a flag there" in result.notes


@each(("ends", "taken"), [(None, "terminated"), ("truncated", "truncated")])
def test_notes_count_done_in_the_steps_that_are_kept(ends: str | None, taken: str, tmp_path: Path) -> None:
    trials = [Demo({**roboset_trial(3).columns, "done": np.array(flags, bool)}) for flags in ([0, 1, 0], [0, 0, 0])]
    file = write_trials(tmp_path / "a.h5", dict(enumerate(trials)))
    result = rbtool.convert(file, tmp_path / "out", ends=ends)
    with TedReader(result.path) as reader:
        assert reader.episodes.terminated.tolist() == [ends is None, False]
        assert reader.episodes.truncated.tolist() == [True, True]
    assert result.notes[0].startswith(f"done is set in the last step of 1 of 2 episodes: those end {taken}")
    assert ("1 of them is also truncated: the step after is left out" in result.notes) == (ends is None)
    assert not any("inside episodes" in note for note in result.notes)
    kept = rbtool.convert(file, tmp_path / "kept", ends=ends, final_step="repeat").notes
    assert kept[0] == "done is never set at the end of an episode: episodes end truncated"
    assert kept[1] == "done is set in 1 step inside episodes, and stays a flag there"


def test_done_in_a_last_step_that_is_left_out_is_named(tmp_path: Path) -> None:
    file = write_trials(tmp_path / "a.h5", {0: roboset_trial(3, done=True)})
    notes = rbtool.convert(file, tmp_path / "out", final_step="drop").notes
    assert "done is never set at the end of an episode: episodes end truncated" in notes
    assert "done is set in 1 last step that --final-step leaves out" in notes


def test_time_and_user_cmd_keep_their_names_and_others_are_infos(tmp_path: Path) -> None:
    trial = roboset_trial(4, done=True)
    more = {
        "time": np.arange(4.0) / 10, "user_cmd": np.arange(8).reshape(4, 2), "qvel": np.arange(4), "name": np.arange(3),
    }  # fmt: skip
    trials = {number: Demo({**trial.columns, **more}) for number in (0, 1)}
    result = rbtool.convert(write_trials(tmp_path / "a.h5", trials), tmp_path / "out")
    with TedReader(result.path) as reader:
        rows = {name: values[4:] for name, values in columns_of(reader).items()}
    assert rows["time"].tolist() == more["time"].tolist()
    assert rows["user_cmd"].tolist() == more["user_cmd"].tolist()
    assert rows["info.qvel"].tolist() == [0, 1, 2, 3]
    assert rows["info.time"].tolist() == [0, 1, 2, 3]
    assert result.renamed_keys == {"qvel": "info.qvel"}
    assert [one["key"] for one in result.dropped_keys] == ["name"]


def test_a_name_that_an_info_has_is_left_out_and_named(tmp_path: Path) -> None:
    trial = roboset_trial(4)
    odd = Demo({**trial.columns, "obs_dict": np.zeros(4), "env_infos/extra": np.ones(4), "extra/x": np.zeros(4)})
    result = rbtool.convert(write_trials(tmp_path / "a.h5", {0: odd}), tmp_path / "out")
    assert {one["key"]: one["why"] for one in result.dropped_keys} == {
        "obs_dict": "env_infos/obs_dict has the same name", "extra/x": "env_infos/extra/x has the same name"
    }  # fmt: skip


@each(("name", "change", "sentence"), [
    ("actions", lambda rows: rows[:3], "'observations' has 4 rows, and the episode has 3 steps"),
    ("rewards", lambda rows: rows[:3], "'rewards' has 3 rows, and the episode has 4 steps"),
    ("rewards", lambda rows: np.zeros((4, 2)), r"'rewards' has rows of shape \[2\]"),
    ("done", lambda rows: np.full(4, 3), "'done' is 3 in step 0, expected 0 or 1"),
    ("observations", lambda rows: rows.astype("f4"), r"as float32 \[4\], and Trial0 of a.h5 and others as float64"),
])  # fmt: skip
def test_a_trial_that_does_not_fit_is_refused_once_asked_for(
    name: str, change: Any, sentence: str, tmp_path: Path
) -> None:
    trials = {number: roboset_trial(4, seed=number) for number in (0, 1, 3)}
    columns = dict(trials[3].columns)
    trials[3] = Demo({**columns, name: change(columns[name])})
    file = write_trials(tmp_path / "a.h5", trials)
    error = refused(file, sentence)
    assert "Trial3 of a.h5" in error.message
    assert error.hint == "choose the others: --episodes A:B,C"
    assert rbtool.convert(file, tmp_path / "out", skip_bad=True).episodes == 2


def test_a_folder_with_another_file_among_them_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DOOR, tmp_path / "door")
    write_groups(tmp_path / "door" / "other.h5", {"episode_0": roboset_trial(3)})
    refused(tmp_path / "door", r"other.h5 has no groups TrialN")


def test_files_in_folders_inside_are_another_dataset(tmp_path: Path) -> None:
    """RoboSet's tasks are folders side by side: those above them are never taken for one dataset."""
    shutil.copytree(DOOR, tmp_path / "DAPG(expert)" / "door_v2d-v1")
    assert not RobosetReader.recognises(tmp_path / "DAPG(expert)")


def test_a_cut_file_among_several_is_named(tmp_path: Path) -> None:
    shutil.copytree(DOOR, tmp_path / "door")
    cut = tmp_path / "door" / SEEDS[1].name
    cut.write_bytes(SEEDS[1].read_bytes()[:20_000])
    refused(tmp_path / "door", r"seed1.h5 was cut: it has 20,000 bytes", CorruptDataError)


def test_ends_of_another_word_is_refused() -> None:
    refused(DOOR, "expected terminated or truncated", UsageError, ends="never")


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    """A file is open while it is read, and no other."""
    for number in range(40):
        write_trials(tmp_path / "d" / f"a_seed{number}.h5", {number: roboset_trial(2, seed=number)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())  # earlier tests may have files open
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
    try:
        with RobosetReader(tmp_path / "d") as reader:
            assert sum(map(len, reader.pieces())) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
