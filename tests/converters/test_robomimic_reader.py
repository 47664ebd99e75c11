"""`RobomimicReader`: the contract of readers, every variant of the layout, and what a file holds besides rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, column, converted, refused
from demonstration_files import Demo, after_final_step, plain_episodes, robomimic_demo, write_demos, write_groups

import rbtool
from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import Final

DATA = Path(__file__).parents[1] / "data" / "robomimic"
ISAAC = DATA / "isaac_stack_cube.hdf5"
LOW_DIM = DATA / "low_dim_v15.hdf5"


class TestReader(WrittenReaderTests):
    """A file with next observations."""

    kind, piece_bytes = RobomimicReader, 700

    def demo(self, number: int, length: int) -> Demo:
        return robomimic_demo(length, seed=number, success=number != 7)

    def write(self, folder: Path) -> Path:
        lengths = {10: 5, 2: 9, 0: 1, 7: 4}
        return write_demos(
            folder / "low_dim.hdf5", {number: self.demo(number, length) for number, length in lengths.items()}
        )


class TestReaderWithoutNextObservations(TestReader):
    """A file whose last observations are missing."""

    def demo(self, number: int, length: int) -> Demo:
        return robomimic_demo(length, seed=number, next_obs=False, success=number != 7)


class TestReaderOfLongerObservations(TestReader):
    """A file whose observations have a row more than steps."""

    def demo(self, number: int, length: int) -> Demo:
        return longer_demo(length, seed=number)


class TestReaderOfAFolder(TestReader):
    """A folder with one file, as a download is."""

    def source(self) -> Path:
        return self.path.parent


def episode_rows(reader: TedReader) -> dict[int, dict[str, Any]]:
    """The rows of every episode by its number."""
    table = reader.episodes
    spans = zip(table.episode.tolist(), table.start.tolist(), table.length.tolist(), strict=True)
    return {
        number: {field.name: reader.read(field.key, start, start + length) for field in reader.fields}
        for number, start, length in spans
    }


def assert_same(found: Mapping[str, Any], name: str, expected: Any) -> None:
    assert found[name].dtype == expected.dtype, name
    assert found[name].tobytes() == np.ascontiguousarray(expected).tobytes(), name


def test_next_obs_are_the_next_observations_row_by_row(tmp_path: Path) -> None:
    plain = plain_episodes(LOW_DIM, "data", "demo_")
    with converted(LOW_DIM, tmp_path / "out") as reader:
        found = episode_rows(reader)
        assert reader.episodes.final.tolist() == [Final.OBSERVED] * 6
        assert reader.episodes.terminated.tolist() == [True] * 6
    assert list(found) == list(plain)
    for number, rows in found.items():
        for key in ("object", "robot0_joint_pos", "agentview_image"):
            assert_same(rows, f"observation.{key}", plain[number][f"obs/{key}"])
            assert_same(rows, f"next.observation.{key}", plain[number][f"next_obs/{key}"])
        assert_same(rows, "action", plain[number]["actions"])
        assert_same(rows, "state", plain[number]["states"])
        assert_same(rows, "next.reward", plain[number]["rewards"])
        assert_same(rows, "next.info.dones", plain[number]["dones"])
        last = np.arange(len(rows["action"])) == len(rows["action"]) - 1
        assert_same(rows, "next.terminated", last)
        assert_same(rows, "next.done", last)
        assert not rows["next.truncated"].any()
    assert not reader.manifest.dropped_keys


@pytest.mark.parametrize("choice", ["auto", "drop", "repeat"])
def test_the_real_file_of_isaac_lab_row_by_row(choice: str, tmp_path: Path) -> None:
    """Its observations are those before steps, and its states those after them."""
    plain = plain_episodes(ISAAC, "data", "demo_")
    with converted(ISAAC, tmp_path / "out", final_step=choice) as reader:
        found = episode_rows(reader)
        assert "next.reward" not in {field.name for field in reader.fields}
    assert list(found) == list(plain) == [1, 12, 16]
    for number, rows in found.items():
        whole = plain[number]
        steps = {name: values for name, values in whole.items() if not name.startswith("initial_state/")}
        expected = after_final_step(steps, terminated=False, choice=choice)
        count = len(rows["action"])
        for name, values in whole.items():
            key = name.replace("/", ".").replace("obs.", "observation.", 1)
            if name.startswith("obs/"):
                assert_same(rows, key, expected[name])
                assert_same(rows, f"next.{key}", expected[f"next:{name}"])
            elif name.startswith("states/"):
                initial = whole[name.replace("states/", "initial_state/", 1)]
                key = key.replace("states.", "state.", 1)
                assert_same(rows, key, np.concatenate((initial, values))[:count])
                assert_same(rows, f"next.{key}", values[:count])
        assert_same(rows, "action", expected["actions"])
        assert rows["next.truncated"][:, 0].tolist() == [False] * (count - 1) + [True]
        assert not rows["next.terminated"].any()
    assert not reader.manifest.dropped_keys
    notes = "\n".join(reader.manifest.notes)
    for said in ("the file states 3,901 steps", "there are no rewards", "no dones", "3 of 3 with success"):
        assert said in notes


def test_states_of_isaac_lab_agree_with_the_observations_of_the_same_moment(tmp_path: Path) -> None:
    """Joint velocities are in both: what comes after a step in one is what comes after it in the other."""
    with converted(ISAAC, tmp_path / "out") as reader:
        for when in ("", "next."):
            one = column(reader, f"{when}observation.joint_vel")
            other = column(reader, f"{when}state.articulation.robot.joint_velocity")
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("choice", ["auto", "drop", "repeat"])
def test_without_next_obs_the_last_observation_is_missing(choice: str, tmp_path: Path) -> None:
    demos = {3: robomimic_demo(4, next_obs=False), 1: robomimic_demo(6, seed=1, next_obs=False, success=False)}
    with converted(write_demos(tmp_path / "a.hdf5", demos), tmp_path / "out", final_step=choice) as reader:
        found = episode_rows(reader)
    assert list(found) == [1, 3]
    for number, rows in found.items():
        expected = after_final_step(demos[number].columns, terminated=number == 3, choice=choice)
        for name, key in (("obs/hand", "observation.hand"), ("obs/scene/cubes", "observation.scene.cubes")):
            assert_same(rows, key, expected[name])
            assert_same(rows, f"next.{key}", expected[f"next:{name}"])
        for name, key in (("actions", "action"), ("states", "state"), ("rewards", "next.reward")):
            assert_same(rows, key, expected[name])


def test_a_raw_file_of_states_and_actions_is_read(tmp_path: Path) -> None:
    demo = robomimic_demo(5, obs=False, rewards=False)
    with converted(write_demos(tmp_path / "demo.hdf5", {0: demo}), tmp_path / "out") as reader:
        rows = episode_rows(reader)[0]
    assert_same(rows, "observation", demo.columns["states"][:4])
    assert_same(rows, "next.observation", demo.columns["states"][1:])
    assert any("the states are the observations" in note for note in reader.manifest.notes)


def ends_of(file: Path, **options: Any) -> tuple[list[bool], tuple[str, ...]]:
    with RobomimicReader(file, final_step="repeat", options=options) as reader:
        return reader.episode_table().terminated.tolist(), tuple(reader.facts().notes)


def test_dones_terminate_only_with_a_sparse_reward_or_success(tmp_path: Path) -> None:
    won, lost = robomimic_demo(4), robomimic_demo(4, success=False)
    with_success = replace(lost, attributes={"success": True})
    file = write_demos(tmp_path / "a.hdf5", {0: won, 1: lost, 2: with_success})
    found, notes = ends_of(file)
    assert found == [True, False, True]
    assert any("dones is set in the last step of 3 of 3 episodes, and 2 of them end terminated" in one for one in notes)
    assert any("the others end truncated" in one for one in notes)
    assert ends_of(file, ends="terminated")[0] == [True] * 3
    assert ends_of(file, ends="truncated")[0] == [False] * 3
    for demo, ends in ((won, "these end terminated, by"), (lost, "success: episodes end truncated")):
        (note,) = (one for one in ends_of(write_demos(tmp_path / f"{ends}.hdf5", {0: demo}))[1] if "dones is" in one)
        assert ends in note
        assert "others" not in note


def test_a_dense_reward_says_nothing_of_success(tmp_path: Path) -> None:
    demo = robomimic_demo(4)
    dense = Demo({**demo.columns, "rewards": np.array([0.2, 0.5, 0.9, 1.0])})
    assert ends_of(write_demos(tmp_path / "a.hdf5", {0: dense}))[0] == [False]


def test_dones_inside_an_episode_do_not_end_it(tmp_path: Path) -> None:
    demo = robomimic_demo(6)
    often = Demo({**demo.columns, "dones": np.array([0, 0, 1, 1, 1, 1])})
    with converted(write_demos(tmp_path / "a.hdf5", {0: often}), tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [6]
        assert column(reader, "next.terminated")[:, 0].tolist() == [False] * 5 + [True]
        assert column(reader, "next.info.dones").tolist() == [0, 0, 1, 1, 1, 1]
    assert any("dones is set in 3 steps inside episodes" in note for note in reader.manifest.notes)


def test_options_of_unknown_values_are_refused() -> None:
    refused(LOW_DIM, "--ends is 'now', expected terminated or truncated", UsageError, ends="now")
    refused(ISAAC, "--reward is 'one', expected zero", UsageError, reward="one")


def test_holes_in_the_numbers_stay_and_order_is_numeric(tmp_path: Path) -> None:
    demos = {number: robomimic_demo(2 + number % 3, seed=number) for number in (0, 1, 12, 2, 110, 13)}
    with converted(write_demos(tmp_path / "a.hdf5", demos), tmp_path / "out") as reader:
        assert reader.episodes.episode.tolist() == [0, 1, 2, 12, 13, 110]


def test_a_split_chooses_its_episodes_and_the_document_has_all(tmp_path: Path) -> None:
    with converted(LOW_DIM, tmp_path / "out", filter_key="valid") as reader:
        assert reader.episodes.episode.tolist() == [4, 5]
        masks = json.loads(reader.documents()["mask.json"])
    assert masks == {"train": [f"demo_{number}" for number in range(4)], "valid": ["demo_4", "demo_5"]}
    assert "only the episodes of the split 'valid' are read" in reader.manifest.notes
    whole = rbtool.convert(LOW_DIM, tmp_path / "whole")
    assert "splits are train (4), valid (2): --filter-key chooses one" in whole.notes
    assert whole.episodes == 6


def test_a_split_that_is_not_there_is_refused_with_those_that_are() -> None:
    message = r"has no split 'vaild'.*valid.*there are train, valid"
    refused(LOW_DIM, message, UsageError, filter_key="vaild")
    refused(ISAAC, "it has no mask", UsageError, filter_key="train")


def test_a_split_of_absent_episodes_is_refused_and_noted(tmp_path: Path) -> None:
    demos = {number: robomimic_demo(3, seed=number) for number in (0, 2)}
    file = write_demos(tmp_path / "a.hdf5", demos, masks={"train": ["demo_0", "demo_1"], "valid": ["demo_2"]})
    with RobomimicReader(file) as reader:
        assert "the split 'train' names demo_1, which the file does not have" in reader.facts().notes
    with RobomimicReader(file, options={"filter_key": "valid"}) as reader:
        assert list(reader.facts().episode_numbers) == [2]
    refused(file, "demo_1", filter_key="train")


def test_attributes_are_documents_seeds_and_text(tmp_path: Path) -> None:
    model = "<mujoco>" + "x" * 5000 + "</mujoco>"
    demos = {
        number: replace(
            robomimic_demo(3, seed=number),
            attributes={"model_file": model, "seed": 40 + number, "ep_meta": '{"lang": "lift"}', "num_samples": 9},
        )
        for number in (0, 1)
    }
    file = write_groups(
        tmp_path / "a.hdf5", {f"data/demo_{number}": demo for number, demo in demos.items()},
        attributes={"data": {"env_args": '{"env_name": "Lift"}', "total": 7}, "/": {"made": "here"}},
    )  # fmt: skip
    with converted(file, tmp_path / "out") as reader:
        documents, text = reader.documents(), reader.episode_text
        assert reader.episodes.seed.tolist() == [40, 41]
    assert documents["env_args.json"] == b'{"env_name": "Lift"}'
    assert documents["model_file/demo_0.xml"].decode() == model
    assert "model_file/demo_1.xml" not in documents
    stated = json.loads(documents["metadata.json"])
    assert stated == {"attributes": {"made": "here"}, "data": {"total": 7}, "env_args": {"env_name": "Lift"}}
    assert text == [{"ep_meta": '{"lang": "lift"}', "model_file": "model_file/demo_0.xml"}] * 2
    assert "num_samples is not the number of steps in 2 of 2 episodes" in reader.manifest.notes
    assert "the file states 7 steps, but its groups have 6" in reader.manifest.notes


def test_other_columns_are_infos_or_named(tmp_path: Path) -> None:
    demos = {}
    for number in (0, 1):
        demo = robomimic_demo(4, seed=number)
        more = {"action_dict/gripper": np.arange(4.0), "src_demo_inds": np.arange(2), "shape": np.arange(4)}
        demos[number] = Demo({**demo.columns, **more, **({"only_here": np.zeros(4)} if number else {})})
    file = write_demos(tmp_path / "a.hdf5", demos)
    with h5py.File(file, "r+") as opened:
        opened["data/note"], opened["extra/x"] = np.zeros(3), np.zeros(2)
    result = rbtool.convert(file, tmp_path / "out")
    with TedReader(result.path) as reader:
        assert column(reader, "info.action_dict.gripper")[:4].tolist() == [0, 1, 2, 3]
    assert result.renamed_keys == {"action_dict/gripper": "info.action_dict.gripper", "shape": "info.shape_"}
    why = {dropped["key"]: dropped["why"] for dropped in result.dropped_keys}
    assert why.keys() == {"src_demo_inds", "only_here", "data/note", "extra"}
    assert why["only_here"] == "1 of 2 episodes do not have it"
    assert why["src_demo_inds"] == "it has 2 rows in demo_0, which has 4 steps"


def test_empty_groups_are_left_out_and_named(tmp_path: Path) -> None:
    demos = {0: robomimic_demo(0), 1: robomimic_demo(3)}
    with converted(write_demos(tmp_path / "a.hdf5", demos), tmp_path / "out") as reader:
        assert reader.episodes.episode.tolist() == [1]
        assert "demo_0 has no steps: left out" in reader.manifest.notes


SOUND = dict(robomimic_demo(4, seed=9).columns)
HAND = SOUND["obs/hand"]


@each(
    ("changed", "message"),
    [
        ({"obs/hand": None, "next_obs/hand": None}, "has no 'next_obs/hand', which demo_0 and others have"),
        ({"obs/hand": HAND.astype("f4")}, r"has 'obs/hand' as float32 \[3\], and demo_0 and others as float64 \[3\]"),
        ({"obs/hand": HAND[:, :2]}, r"as float64 \[2\], and demo_0"),
        ({"obs/hand": HAND[:3]}, "demo_5: 'obs/hand' has 3 rows, and the episode has 4 steps"),
        ({"obs/more": HAND}, "has 'obs/more', which demo_0 and others do not have"),
        ({"rewards": SOUND["rewards"][:3]}, "'rewards' has 3 rows, and the episode has 4 steps"),
        ({"rewards": np.zeros((4, 2))}, r"'rewards' has rows of shape \[2\], expected one number"),
        ({"dones": SOUND["dones"] * 2}, "'dones' is 2 in step 3, expected 0 or 1"),
        ({"actions": None}, "has no 'actions'"),
    ],
)
def test_an_episode_that_does_not_fit_is_refused_once_asked_for(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    odd = Demo({name: values for name, values in (SOUND | changed).items() if values is not None})
    file = write_demos(tmp_path / "a.hdf5", {0: robomimic_demo(4), 1: robomimic_demo(3, seed=1), 5: odd})
    assert "demo_5" in refused(file, message).message
    assert rbtool.convert(file, tmp_path / "out", episodes="0:2").episodes == 2
    skipped = rbtool.convert(file, tmp_path / "skipped", skip_bad=True)
    assert skipped.episodes == 2
    assert any("episode 5 is left out" in note for note in skipped.notes)
    assert [one.episodes for one in rbtool.check(file).findings if one.rule == "TED014"] == [(5,)]


@each("content", [{"data/demo_0": Demo({"actions": np.zeros((3, 1))})}, {"data/demo_0": Demo({})}])
def test_groups_with_nothing_to_observe_are_refused(content: Mapping[str, Demo], tmp_path: Path) -> None:
    refused(write_groups(tmp_path / "a.hdf5", content), "")


def test_libero_76_a_truncated_file_names_the_sizes(tmp_path: Path) -> None:
    """LIBERO issue 76: downloads stop early, and h5py speaks of stored_eof."""
    data = ISAAC.read_bytes()
    (tmp_path / "a.hdf5").write_bytes(data[:100_000])
    with pytest.raises(CorruptDataError, match=f"has 100,000 bytes, and its header states {len(data):,}"):
        RobomimicReader(tmp_path / "a.hdf5")


def test_external_links_are_refused(tmp_path: Path) -> None:
    file = write_demos(tmp_path / "a.hdf5", {0: robomimic_demo(3)})
    write_demos(tmp_path / "b.hdf5", {0: robomimic_demo(3)})
    with h5py.File(file, "r+") as opened:
        opened["data/demo_1"] = h5py.ExternalLink(str(tmp_path / "b.hdf5"), "data/demo_0")
    with pytest.raises(CorruptDataError, match="is a link"):
        RobomimicReader(file)
    with h5py.File(tmp_path / "c.hdf5", "w") as opened:
        opened["data"] = h5py.ExternalLink(str(tmp_path / "b.hdf5"), "data")
    assert not RobomimicReader.recognises(tmp_path / "c.hdf5")


def longer_demo(steps: int, *, seed: int = 0, names: tuple[str, ...] = ("obs/hand", "obs/scene/cubes")) -> Demo:
    """A demonstration whose observations have the one after the last step as their last row."""
    columns = dict(robomimic_demo(steps, seed=seed).columns)
    for name in names:
        after = columns[f"next_{name}"]
        columns[name] = np.concatenate((columns[name], after[-1:]))
    return Demo({name: values for name, values in columns.items() if not name.startswith("next_obs")})


@pytest.mark.parametrize("choice", ["auto", "drop", "repeat"])
def test_a_row_more_than_steps_is_the_last_observation(choice: str, tmp_path: Path) -> None:
    lengths = {0: 1, 3: 6, 12: 4}
    demos = {number: longer_demo(steps, seed=number) for number, steps in lengths.items()}
    result = rbtool.convert(write_demos(tmp_path / "a.hdf5", demos), tmp_path / "out", final_step=choice)
    hands = [demo.columns["obs/hand"] for demo in demos.values()]
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [1, 6, 4]
        assert set(reader.episodes.final.tolist()) == {Final.OBSERVED}
        assert np.array_equal(column(reader, "observation.hand"), np.concatenate([rows[:-1] for rows in hands]))
        assert np.array_equal(column(reader, "next.observation.hand"), np.concatenate([rows[1:] for rows in hands]))
    assert "obs has a row more than steps: the last one is the observation after the last step" in result.notes


@each("rows", [2, 3, 5, 6])
@each("bad", [(0,), (0, 1), (0, 1, 3)])
def test_observations_of_another_length_are_the_fault_of_their_demonstration(
    rows: int, bad: tuple[int, ...], tmp_path: Path
) -> None:
    demos = {}
    for number in (0, 1, 3, 8):
        made = robomimic_demo(4, seed=number, next_obs=False)
        wrong = {"obs/hand": np.zeros((rows, 3))} if number in bad else {}
        demos[number] = Demo({**made.columns, **wrong}, made.attributes)
    file = write_demos(tmp_path / "a.hdf5", demos)
    message = f"'obs/hand' has {rows} rows, and the episode has 4 steps"
    refused(file, f"demo_0: {message}")
    result = rbtool.convert(file, tmp_path / "out", skip_bad=True)
    assert result.episodes == 4 - len(bad)
    with TedReader(result.path) as reader:
        assert not set(bad) & set(reader.episodes.episode.tolist())
        assert ("observation", "hand") in {field.key for field in reader.fields}
    alone = write_demos(tmp_path / "b.hdf5", {0: demos[0]})
    if rows != 5:
        refused(alone, message)


def test_some_observations_with_a_row_more_are_refused(tmp_path: Path) -> None:
    one = ("obs/hand",)
    file = write_demos(tmp_path / "a.hdf5", {0: longer_demo(4, names=one), 1: longer_demo(2, names=one)})
    refused(file, "has a row more than steps in every episode, but 'obs/scene/cubes'")
    longer = longer_demo(4, names=("obs/hand", "obs/scene/cubes"))
    both = Demo({**longer.columns, "next_obs/hand": np.zeros((4, 3))})
    refused(write_demos(tmp_path / "b.hdf5", {0: both}), "both have the observation after each step")
