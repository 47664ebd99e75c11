"""`D4rlReader`: the contract of readers, every rule for the ends of episodes, and what a file holds besides rows."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from conversions import WrittenReaderTests, bytes_of, column, columns_of, converted, refused, with_options
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from made_datasets import bytes_below
from table_files import Episode, after_final_step, flat, plain_rows, random_episodes, write_d4rl

import rbtool
from rbtool.cli.inspect import column_lines
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.format.converter import Reader
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final
from rbtool.core.verbs.inspect import ColumnsResult

DATA = Path(__file__).parents[1] / "data" / "d4rl"

LENGTHS = (5, 1, 7, 4, 3)
ENDS = ("terminal", "terminal", "timeout", "both", "none")


class TestReader(WrittenReaderTests):
    """A file without next observations."""

    kind = D4rlReader
    following = False

    def write(self, folder: Path) -> Path:
        columns = flat(random_episodes(LENGTHS, ends=ENDS), following=self.following)
        columns["infos/qpos"] = np.arange(2.0 * len(columns["rewards"])).reshape(-1, 2)
        return write_d4rl(folder / "walk.hdf5", columns)


class TestReaderOfNextObservations(TestReader):
    following = True


class TestReaderOfAFolder(TestReader):
    """A folder with one file, as a download is."""

    def source(self) -> Path:
        return self.path.parent


def lengths_and_notes(path: Path, **options: Any) -> tuple[list[int], str]:
    """The lengths of the episodes, and all notes, if last steps are kept."""
    with D4rlReader(path, options=options, final_step="repeat") as reader:
        facts = reader.facts()
    return list(facts.lengths or ()), "\n".join(facts.notes)


def assert_equal_rows(reader: TedReader, expected: list[dict[str, Any]]) -> None:
    """Compare a dataset row by row with plain rows after `after_final_step`."""
    found = columns_of(reader)
    assert reader.manifest.steps == len(expected)
    episodes: dict[int, int] = {}
    for at, row in enumerate(expected):
        episodes[row["episode"]] = at
        assert found["observation"][at].tobytes() == row["observation"].tobytes()
        assert found["next.observation"][at].tobytes() == row["next"].tobytes()
        assert found["action"][at].tobytes() == row["action"].tobytes()
        assert found["next.reward"][at, 0].tobytes() == row["reward"].tobytes()
        assert found["episode"][at] == row["episode"]
        assert found["next.terminated"][at, 0] == row["terminated"]
        ends_cut = row.get("cut", False) or (row["last"] and not row["terminated"])
        assert found["next.truncated"][at, 0] == (bool(row["timeout"]) or ends_cut)
    assert reader.episodes.episode.tolist() == list(episodes)
    stops = (reader.episodes.start + reader.episodes.length - 1).tolist()
    assert stops == list(episodes.values())


@each(
    ("following", "dtype", "packing"),
    [
        (False, "float32", {}), (True, "float64", {}),
        (True, "float32", {"compression": "gzip", "chunks": True}),
        (False, "float64", {"chunks": True, "shuffle": True}),
    ],
)  # fmt: skip
def test_every_row_equals_a_plain_reading(following: bool, dtype: str, packing: dict[str, Any], tmp_path: Path) -> None:
    columns = flat(random_episodes(LENGTHS, ends=ENDS, dtype=dtype), following=following)
    ends = np.flatnonzero(columns["terminals"] | columns["timeouts"])
    with converted(write_d4rl(tmp_path / "a.hdf5", columns, **packing), tmp_path / "out") as reader:
        assert_equal_rows(reader, after_final_step(plain_rows(columns, ends.tolist())))
        final = Final.OBSERVED if following else Final.REPEATED
        assert reader.episodes.final[0] == final
        assert {field.key: field.dtype for field in reader.fields}[("observation",)] == dtype


def test_without_next_observations_a_truncated_last_step_ends_one_step_earlier(tmp_path: Path) -> None:
    episodes = random_episodes((3, 4, 1, 2), ends=("timeout", "terminal", "timeout", "none"))
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", flat(episodes)), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.episode.tolist() == [0, 1, 3]
        assert reader.episodes.length.tolist() == [2, 4, 1]
        assert reader.episodes.final.tolist() == [Final.DROPPED, Final.REPEATED, Final.DROPPED]
    assert (result.boundary["final_repeated"], result.boundary["final_dropped"]) == (1, 2)
    assert any("episode 2 is left out: one step" in note for note in result.notes)
    assert any("the last 2 steps end without a flag" in note for note in result.notes)


def test_the_unfinished_tail_is_kept_whole_where_the_next_observation_is_known(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 4), ends=("terminal", "none")), following=True)
    with converted(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [3, 4]
        assert reader.episodes.end_reason.tolist() == [EndReason.TERMINATED, EndReason.END_OF_FILE]


def test_next_observations_that_do_not_follow_are_data(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 4), ends=("terminal", "timeout")), following=True)
    columns["next_observations"][1] += 1
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert result.boundary["explicit_next"] == 1
    with TedReader(result.path) as reader:
        assert reader.read(("next", "observation"), 0, 8).tobytes() == columns["next_observations"].tobytes()
        assert reader.episodes.explicit_next.tolist() == [True, False]


def test_without_any_other_sign_episodes_end_where_next_observations_do_not_follow(tmp_path: Path) -> None:
    episodes = random_episodes((4, 1, 5, 3), ends=("timeout", "terminal", "timeout", "none"))
    columns = flat(episodes, timeouts=False, following=True)
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 1, 5, 3]
        reasons = [EndReason.INFERRED, EndReason.TERMINATED, EndReason.INFERRED, EndReason.END_OF_FILE]
        assert reader.episodes.end_reason.tolist() == reasons
        assert reader.episodes.truncated.tolist() == [True, False, True, True]
        assert_equal_rows(reader, after_final_step(plain_rows(columns, [3, 4, 9])))
    assert (result.boundary["inferred"], result.boundary["explicit_next"]) == (2, 0)
    assert rbtool.check(result.path).errors == 0


def test_rewards_and_flags_of_shape_n_1_are_squeezed_and_numbers_are_flags(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3), ends=("terminal", "timeout")))
    plain = write_d4rl(tmp_path / "plain.hdf5", columns)
    odd = dict(columns, rewards=columns["rewards"][:, None])
    odd["terminals"], odd["timeouts"] = (
        columns["terminals"][:, None].astype("float32"),
        columns["timeouts"].astype("u1"),
    )
    one, other = converted(plain, tmp_path / "1"), converted(write_d4rl(tmp_path / "odd.hdf5", odd), tmp_path / "2")
    assert one.manifest.content_digest == other.manifest.content_digest


def test_integers_images_and_foreign_byte_order_keep_their_values(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3), ends=("terminal", "timeout")))
    columns["actions"] = np.arange(7)
    columns["observations"] = np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3)
    columns["rewards"] = columns["rewards"].astype(">f8")
    with converted(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat") as reader:
        found = columns_of(reader)
        assert (found["action"].dtype, found["action"].tolist()) == (np.int64, list(range(7)))
        assert found["observation"].tobytes() == columns["observations"].tobytes()
        assert found["next.reward"].dtype == np.float64
        assert found["next.reward"][:, 0].tolist() == columns["rewards"].tolist()


def test_infos_are_of_their_row_and_metadata_are_documents(tmp_path: Path) -> None:
    columns: dict[str, Any] = dict(flat(random_episodes((4, 3), ends=("terminal", "timeout")), following=True))
    columns |= {
        "infos/qpos": np.arange(14.0).reshape(7, 2), "infos/sensors/touch": np.arange(7),
        "orientations": np.arange(7) + 1, "infos/short": np.arange(6), "infos/names": np.array([b"x"] * 7),
        "metadata/algorithm": "SAC", "metadata/iteration": 3, "metadata/rates": np.array([0.5, np.inf]),
        "metadata/policy/fc0/weight": np.arange(70.0).reshape(7, 10),
    }  # fmt: skip
    file = write_d4rl(tmp_path / "a.hdf5", columns)
    with h5py.File(file, "r+") as opened:
        opened.attrs["env"] = "Hopper-v2"
    result = rbtool.convert(file, tmp_path / "out")
    with TedReader(result.path) as reader:
        found, documents = columns_of(reader), reader.documents()
    assert found["info.qpos"].tobytes() == columns["infos/qpos"].tobytes()
    assert found["info.sensors.touch"].tolist() == list(range(7))
    assert found["info.orientations"].tolist() == list(range(1, 8))
    assert result.renamed_keys == {"orientations": "info.orientations"}
    assert {dropped["key"] for dropped in result.dropped_keys} == {"infos/short", "infos/names"}
    assert b'"algorithm": "SAC"' in documents["metadata.json"]
    assert b'"env": "Hopper-v2"' in documents["metadata.json"]
    assert b'"inf"' in documents["metadata.json"]
    assert not any(name.startswith("metadata") for name in found)
    weight = np.load(io.BytesIO(documents["metadata/policy/fc0/weight.npy"]), allow_pickle=False)
    assert weight.tobytes() == columns["metadata/policy/fc0/weight"].tobytes()


def test_a_column_that_has_the_name_of_an_info_is_left_out_and_named(tmp_path: Path) -> None:
    columns: dict[str, Any] = flat(random_episodes((4, 3), ends=("terminal", "timeout")), following=True)
    columns |= {"goal": np.zeros(7), "infos/goal": np.arange(7), "part": np.zeros(7), "infos/part/x": np.arange(7)}
    columns |= {"whole/x": np.zeros(7), "infos/whole": np.arange(7)}
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert {entry["key"]: entry["why"] for entry in result.dropped_keys} == {
        "goal": "infos/goal has the same name", "part": "infos/part has the same name",
        "whole/x": "infos/whole has the same name",
    }  # fmt: skip
    with TedReader(result.path) as reader:
        for name in ("info.goal", "info.part.x", "info.whole"):
            assert column(reader, name).tolist() == list(range(7))


def test_arrays_without_data_are_no_damage(tmp_path: Path) -> None:
    columns: dict[str, Any] = flat(random_episodes((4,), ends=("terminal",)))
    columns |= {"metadata/nothing": h5py.Empty("f4"), "infos/nothing": h5py.Empty("f4")}
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert [(entry["key"], entry["why"]) for entry in result.dropped_keys] == [("infos/nothing", "it has no data")]
    with TedReader(result.path) as reader:
        assert b'"nothing": null' in reader.documents()["metadata.json"]


def test_nan_rewards_are_kept_counted_and_found_by_check(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3), ends=("terminal", "timeout")), following=True)
    columns["rewards"][2] = np.nan
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert "the reward is NaN in 1 of 7 steps (first: step 2)" in result.notes
    with TedReader(result.path) as reader:
        assert reader.read(("next", "reward"), 0, 7)[:, 0].tobytes() == columns["rewards"].tobytes()
    assert any(finding.rule == "TED007" for finding in rbtool.check(result.path).findings)


def test_chosen_episodes_are_read_in_any_order(tmp_path: Path) -> None:
    columns = flat(random_episodes(range(1, 30)), following=True)
    starts = np.cumsum([0, *range(1, 30)])
    with with_options(D4rlReader, 200)(write_d4rl(tmp_path / "a.hdf5", columns)) as reader:
        for number in (17, 3, 28, 0, 4):
            rows = bytes_of(reader.pieces([number]))["observation"]
            assert rows == columns["observations"][starts[number] : starts[number + 1]].tobytes()


ONE = flat(random_episodes((6,), ends=("terminal",)))


@each(
    ("changed", "message"),
    [
        ({"observations": ONE["observations"][:-1]}, "different numbers of rows"),
        ({"observations": np.zeros((7, 3))}, "observations 7, actions 6"),  # Minari issue 199
        ({"observations": np.zeros((12, 3))}, "observations 12"),
        ({"timeouts": ONE["timeouts"][:3]}, "timeouts 3"),
        ({"rewards": np.zeros((6, 2))}, r"rows of shape \[2\]"),
        ({"terminals": np.full(6, 2)}, "terminals is 2 in row 0, expected 0 or 1"),
        ({"actions": np.array([b"a"] * 6)}, "'actions' cannot be read as rows"),
        ({"next_observations": np.zeros((6, 4))}, "next_observations"),
        ({name: values[:0] for name, values in ONE.items()}, "has no steps"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write_d4rl(tmp_path / "a.hdf5", ONE | changed), message)


@each("name", ["mine.hdf5", "hopper_medium-v2.hdf5"])
@each("share", [0.01, 0.5, 0.99])
def test_a_truncated_file_names_the_sizes_and_how_to_fetch_it_again(name: str, share: float, tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / name, flat(random_episodes((400, 400))))
    whole = file.read_bytes()
    cut = max(100, int(len(whole) * share))
    file.write_bytes(whole[:cut])
    error = refused(file, f"it has {cut:,} bytes, and its header states {len(whole):,}", CorruptDataError)
    command = "fetch it again: rbtool download d4rl hopper-medium-v2"
    assert (error.hint == command) == name.startswith("hopper")
    with pytest.raises(CorruptDataError, match="truncated file"):
        rbtool.inspect(file)


@each("content", [b"", b"<!DOCTYPE html><html>404</html>"])
def test_a_published_name_without_hdf5_inside_names_the_command_that_fetches_it(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "hopper_medium-v2.hdf5"
    file.write_bytes(content)
    assert "rbtool download d4rl hopper-medium-v2" in refused(file, "is not an HDF5 file", CorruptDataError).hint
    message = "unknown format; supported: " if content else "is an empty file"
    assert "download d4rl" not in str(refused(file.rename(tmp_path / "mine.hdf5"), message).hint)


def test_truth_values_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 2)))
    columns["infos/flag"] = np.array([0, 1, 2, 0, 1], np.uint8).view(bool)
    path = write_d4rl(tmp_path / "a.hdf5", columns)
    with h5py.File(path) as file:
        assert file["infos/flag"][:].view(np.uint8).tolist() == [0, 1, 2, 0, 1]
    refused(path, r"'info\.flag' has a truth value of 2, expected 0 or 1", CorruptDataError)
    assert "TED014" in {finding.rule for finding in rbtool.check(path).findings}


def test_external_links_are_refused(tmp_path: Path) -> None:
    other = write_d4rl(tmp_path / "other.hdf5", ONE)
    file = write_d4rl(tmp_path / "a.hdf5", {name: values for name, values in ONE.items() if name != "rewards"})
    with h5py.File(file, "r+") as opened:
        opened["rewards"] = h5py.ExternalLink(str(other), "rewards")
    refused(file, "is a link to another name or to another file", CorruptDataError)


def test_a_folder_of_many_files_is_no_dataset(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_d4rl(tmp_path / "both" / f"{name}.hdf5", ONE)
    assert not D4rlReader.recognises(tmp_path / "both")
    refused(tmp_path / "both", "unknown format; supported: ")


def test_a_horizon_is_refused_where_the_format_has_no_such_option(tmp_path: Path) -> None:
    minari = DATA.parent / "minari" / "tuple" / "trunc-v0"
    for verb in (rbtool.inspect, rbtool.check):
        with pytest.raises(UsageError, match="has no option --horizon"):
            verb(minari, horizon=5)
    refused(minari, "has no option --horizon", UsageError, horizon=5)


def test_check_of_a_raw_file_lists_the_episodes_of_each_problem(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3, 5), ends=("terminal", "timeout", "terminal")), following=True)
    columns["rewards"][5] = np.nan
    columns["next_observations"][9] += 1
    found = rbtool.check(write_d4rl(tmp_path / "a.hdf5", columns))
    assert {finding.rule: finding.episodes for finding in found.findings} == {"TED004": (2,), "TED007": (1,)}
    assert (found.steps, found.episodes, found.errors, found.warnings) == (12, 3, 1, 1)
    assert (found.boundary["terminated"], found.boundary["truncated"], found.boundary["explicit_next"]) == (2, 1, 1)


def test_check_of_a_damaged_raw_file_names_the_episodes_that_cannot_be_read(tmp_path: Path) -> None:
    columns = flat(random_episodes((900, 900, 900), ends=("timeout",) * 3, width=64), following=True)
    file = tmp_path / "a.hdf5"
    with h5py.File(file, "w") as opened:
        for name, values in columns.items():
            packed = {"chunks": (300, *values.shape[1:]), "fletcher32": True} if values.ndim > 1 else {}
            opened.create_dataset(name, data=values, **packed)
        place = opened["actions"].id.get_chunk_info(4).byte_offset
    data = bytearray(file.read_bytes())
    data[place + 10] ^= 1
    file.write_bytes(data)
    small = with_options(D4rlReader, 200)
    with small(file) as reader, pytest.raises(CorruptDataError, match=r"'actions' in .* cannot be read"):
        list(reader.pieces())
    found = rbtool.check(file)
    assert any(finding.rule == "TED014" and 1 in finding.episodes for finding in found.findings)


def chunked(columns: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
    """Lay columns out in groups of rows; group 10 follows group 9."""
    bounds = [0, *cuts, len(columns["rewards"])]
    return {
        f"virtual/{number}/{name}": values[bounds[number] : bounds[number + 1]]
        for number in range(len(bounds) - 1)
        for name, values in columns.items()
    }


def test_rows_in_chunks_are_one_table(tmp_path: Path) -> None:
    columns = flat(random_episodes([5, 1, 7, 4, 6], ends=["terminal", "timeout", "both", "timeout", "none"]))
    whole = rbtool.convert(write_d4rl(tmp_path / "whole.hdf5", columns), tmp_path / "whole")
    for cuts in ([], [3], [5, 5, 6], list(range(1, 12))):
        file = write_d4rl(tmp_path / f"{len(cuts)}.hdf5", chunked(columns, cuts), compression="gzip")
        made = rbtool.convert(file, tmp_path / f"made{len(cuts)}")
        assert made.content_digest == whole.content_digest
        assert made.dropped_keys == ()


def test_chunks_that_differ_are_refused(tmp_path: Path) -> None:
    columns = chunked(flat(random_episodes([5, 4])), [4])
    first, last = columns["virtual/0/rewards"], columns["virtual/1/rewards"]
    for changed, message in (
        ({"virtual/1/actions": np.zeros((5, 9), np.float32)}, "chunks of '/virtual/0/actions' differ in their rows"),
        ({"virtual/1/rewards": last[:-1]}, "different numbers of rows"),
        ({"virtual/1/rewards": last[:-1], "virtual/0/rewards": np.append(first, first[:1])}, "different numbers of"),
    ):
        refused(write_d4rl(tmp_path / "a.hdf5", columns | changed), message)
    del columns["virtual/1/rewards"]
    refused(write_d4rl(tmp_path / "b.hdf5", columns), "has no 'virtual/1/rewards'")


@pytest.mark.parametrize("following", [False, True])
def test_without_timeouts_the_horizon_ends_episodes(following: bool, tmp_path: Path) -> None:
    episodes = random_episodes((4, 2, 4, 4, 3), ends=("timeout", "terminal", "both", "timeout", "none"))
    columns = flat(episodes, timeouts=False, following=following)
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out", horizon=4, final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 2, 4, 4, 3]
        reasons = [EndReason.TRUNCATED, EndReason.TERMINATED, EndReason.TERMINATED, EndReason.TRUNCATED]
        assert reader.episodes.end_reason.tolist() == [*reasons, EndReason.END_OF_FILE]
    assert result.notes[0] == "there are no timeouts: episodes end at terminals and at the time limit of 4 steps"
    assert result.request["options"] == {"horizon": 4}


def test_the_name_of_a_published_file_states_its_horizon(tmp_path: Path) -> None:
    episodes = random_episodes((280, 280, 5), ends=("timeout", "timeout", "none"))
    file = tmp_path / "kitchen_microwave_kettle_light_slider-v0.hdf5"
    write_d4rl(file, flat(episodes, timeouts=False))
    lengths, notes = lengths_and_notes(file)
    assert lengths == [280, 280, 5]
    assert "280 steps of kitchen-partial-v0" in notes
    assert len(lengths_and_notes(file, horizon=5)[0]) == 113
    human = write_d4rl(tmp_path / "pen-v0_demos_clipped.hdf5", flat(episodes, timeouts=False))
    for name, longest in (("pen-human-v0", 100), ("pen-human-longhorizon-v0", 200)):
        assert max(lengths_and_notes(human, id=name)[0]) == longest


def test_a_time_limit_that_the_file_name_alone_states_is_named_as_such(tmp_path: Path) -> None:
    columns = flat(random_episodes((30, 30, 30), ends=("timeout",) * 3), timeouts=False, following=True)
    file = write_d4rl(tmp_path / "minigrid4rooms.hdf5", columns)
    notes = lengths_and_notes(file)[1]
    assert "minigrid-fourrooms-v0, which the file name states (--horizon N states another)" in notes
    assert "in 2 steps inside episodes (first: step 29)" in notes
    for options in ({"horizon": 30}, {"id": "minigrid-fourrooms-v0"}):
        assert "file name" not in lengths_and_notes(file, **options)[1]


def test_ids_of_the_same_file_with_another_time_limit_are_named(tmp_path: Path) -> None:
    columns = flat(random_episodes((300, 250), ends=("timeout", "timeout")), timeouts=False)
    file = write_d4rl(tmp_path / "door-v0_demos_clipped.hdf5", columns)
    sentence = "door-human-longhorizon-v0 is the same file with a time limit of 300 steps"
    assert sentence in lengths_and_notes(file)[1]
    assert sentence not in lengths_and_notes(file, id="door-human-v0")[1]


def d3rlpy_1(columns: dict[str, Any]) -> dict[str, Any]:
    """The layout of d3rlpy 1: `episode_terminals` in place of `timeouts`, of the element types that it writes."""
    ends = columns["terminals"] | columns.pop("timeouts")
    return {
        **columns, "terminals": columns["terminals"].astype("float32"), "episode_terminals": ends.astype("float32"),
        "discrete_action": False, "version": "1.0",
    }  # fmt: skip


@each("name", ["a.hdf5", "hopper_medium-v2.hdf5", "Ant_maze_u-maze_v2.hdf5"])
@each("following", [False, True])
def test_episode_terminals_are_the_ends_of_files_of_d3rlpy_1(name: str, following: bool, tmp_path: Path) -> None:
    episodes = random_episodes((4, 3, 1, 5, 2), ends=("terminal", "timeout", "terminal", "timeout", "none"))
    file = write_d4rl(tmp_path / name, d3rlpy_1(flat(episodes, following=following)))
    result = rbtool.convert(file, tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 3, 1, 5, 2]
        reasons = [EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.TERMINATED, EndReason.TRUNCATED]
        assert reader.episodes.end_reason.tolist() == [*reasons, EndReason.END_OF_FILE]
        observations = np.concatenate([episode.observations[:-1] for episode in episodes])
        assert np.array_equal(column(reader, "observation"), observations)
        after = [episode.observations[1:].copy() for episode in episodes]
        for episode, next_rows in zip(episodes, after, strict=True):
            next_rows[-1] = episode.observations[-1 if following else -2]
        assert np.array_equal(column(reader, "next.observation"), np.concatenate(after))
        assert np.flatnonzero(column(reader, "next.terminated")).tolist() == [3, 7]
        assert np.flatnonzero(column(reader, "next.truncated")).tolist() == [6, 12, 14]
    assert result.notes[0].startswith("episodes end at episode_terminals, as d3rlpy 1 writes them")
    refused(file, "has episode_terminals, which mark where episodes end", UsageError, horizon=5)


def test_terminals_inside_episodes_of_d3rlpy_1_stay_flags(tmp_path: Path) -> None:
    columns = d3rlpy_1(flat(random_episodes((4, 3))))
    columns["terminals"][1] = 1
    lengths, notes = lengths_and_notes(write_d4rl(tmp_path / "a.hdf5", columns))
    assert lengths == [4, 3]
    assert "terminals are set in 1 steps inside episodes" in notes


def test_episode_terminals_beside_timeouts_end_no_episode(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3, 5)))
    columns["episode_terminals"] = np.arange(12) % 2
    lengths, notes = lengths_and_notes(write_d4rl(tmp_path / "a.hdf5", columns))
    assert lengths == [4, 3, 5]
    assert "episodes end at timeouts, so episode_terminals are kept as info.episode_terminals" in notes


@each(
    ("values", "message"),
    [(np.zeros(6), "different numbers of rows"), (np.full(7, 0.5), "expected 0 or 1"), (np.zeros((7, 2)), "one nu")],
)
def test_episode_terminals_that_are_no_flags_are_refused(values: Any, message: str, tmp_path: Path) -> None:
    columns = {**d3rlpy_1(flat(random_episodes((4, 3)))), "episode_terminals": values}
    with pytest.raises(FormatError, match=message):
        rbtool.inspect(write_d4rl(tmp_path / "a.hdf5", columns))


def test_without_any_sign_at_all_the_horizon_is_asked_for(tmp_path: Path) -> None:
    """D4RL issue 176."""
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    assert "--horizon N" in refused(file, "neither timeouts nor next_observations").hint
    assert rbtool.inspect(file, horizon=4).episodes == 2


@pytest.mark.parametrize("inside", [False, True])
def test_inspect_shows_the_keys_of_a_file_that_needs_the_horizon(inside: bool, tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    for found in (rbtool.inspect(tmp_path if inside else file), rbtool.inspect(file, format="d4rl")):
        assert isinstance(found, ColumnsResult)
        assert {one.name: one.rows for one in found.columns} == dict.fromkeys(
            ("observations", "actions", "rewards", "terminals"), 8
        )
        assert "it is not known where an episode reaches its time limit" in found.doubts[0]
        assert (found.format, dict(found.options)) == ("d4rl", {"horizon": "N"})
        assert found.command.endswith("DEST --from d4rl --horizon N")
    with pytest.raises(FormatError, match="neither timeouts"):
        rbtool.inspect(file, episode=0)
    text = " ".join(str(cell) for line in column_lines(found, None) for cell in line)
    assert "HDF5 file of format d4rl" in text


def test_what_else_is_in_a_folder_is_named(tmp_path: Path) -> None:
    write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((4, 4))))
    assert not [note for note in rbtool.inspect(tmp_path).notes if "not read" in note]
    (tmp_path / "README.md").touch()
    (tmp_path / ".hidden").touch()
    assert "another entry of the folder is not read: README.md" in rbtool.inspect(tmp_path).notes
    for number in range(3):
        (tmp_path / f"b{number}").mkdir()
    notes = rbtool.inspect(tmp_path).notes
    assert "4 other entries of the folder are not read: README.md, b0, b1, …" in notes
    assert not [note for note in rbtool.inspect(tmp_path / "a.hdf5").notes if "not read" in note]


def maze_columns(goals: bool = True) -> dict[str, Any]:
    """Two episodes that go on for a while after the goal: `terminals` mark every step near it."""
    columns = flat(random_episodes((8, 6), ends=("timeout", "timeout")))
    columns["terminals"] = np.isin(np.arange(14), (3, 4, 5, 7, 11, 12))
    if goals:
        columns["infos/goal"] = np.zeros((14, 2))
    return columns


@pytest.mark.parametrize(
    ("name", "goals"),
    [("a.hdf5", True), ("Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5", False)],
)
def test_in_antmaze_timeouts_alone_end_episodes_and_terminals_stay_flags(
    name: str, goals: bool, tmp_path: Path
) -> None:
    columns = maze_columns(goals)
    result = rbtool.convert(write_d4rl(tmp_path / name, columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [8, 6]
        assert reader.read(("next", "terminated"), 0, 14)[:, 0].tolist() == columns["terminals"].tolist()
        assert reader.read(("next", "observation"), 0, 7).tobytes() == columns["observations"][1:8].tobytes()
    assert any("terminals are set in 5 steps inside episodes" in note for note in result.notes)


@each(("timeouts", "lengths"), [("absent", [700, 30]), ("unset", [730])])
def test_in_antmaze_terminals_end_no_episode_where_timeouts_are_missing(
    timeouts: str, lengths: list[int], tmp_path: Path
) -> None:
    columns = flat(random_episodes((700, 30), ends=("none", "none")), timeouts=timeouts == "unset")
    columns["terminals"][640:650] = True
    file = tmp_path / "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5"
    result = rbtool.convert(write_d4rl(file, columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == lengths
        assert column(reader, "next.terminated")[:, 0].tolist() == columns["terminals"].tolist()
        assert column(reader, "next.truncated")[699, 0] == (timeouts == "absent")
    assert any("terminals are set in 10 steps inside episodes" in note for note in result.notes)


def test_repeated_terminals_in_a_maze_of_another_name_without_any_timeout_are_reported(tmp_path: Path) -> None:
    columns = maze_columns()
    columns["timeouts"][:] = False
    assert "timeouts are never set" in lengths_and_notes(write_d4rl(tmp_path / "a.hdf5", columns))[1]


def test_elsewhere_a_step_after_a_terminal_one_begins_an_episode(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", maze_columns(goals=False))
    assert lengths_and_notes(file)[0] == [4, 1, 1, 2, 4, 1, 1]


def test_another_horizon_is_another_dataset(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((6,)), timeouts=False))
    rbtool.convert(file, tmp_path / "out", horizon=3)
    assert rbtool.convert(file, tmp_path / "out", horizon=3).already_there
    with pytest.raises(UsageError, match="is dataset d4rl:a, horizon 3, not d4rl:a, horizon 2"):
        rbtool.convert(file, tmp_path / "out", horizon=2)


def test_a_horizon_beside_timeouts_is_refused(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((6,))))
    refused(file, "has timeouts", UsageError, horizon=3)
    bare = write_d4rl(tmp_path / "b.hdf5", flat(random_episodes((6,)), timeouts=False))
    refused(bare, "above 0", UsageError, horizon=0)
    rbtool.convert(file, tmp_path / "out")
    refused(tmp_path / "out", "--horizon is about raw datasets", UsageError, horizon=3)


HORIZONS = {"kitchen_like_no_timeouts": 280, "hopper_random_v0": 1000}


def blocks_of_any_size(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    """Convert episode by episode, in one block, and in small blocks: the same files each time, which are returned."""
    found = []
    for block_bytes in (None, 1 << 30, 900):
        with monkeypatch.context() as patch:
            if block_bytes is None:
                patch.setattr(D4rlReader, "read_episodes", Reader.read_episodes)
            else:
                patch.setattr(D4rlReader, "block_bytes", block_bytes)
            rbtool.convert(source, folder / f"by{block_bytes}", **arguments)
        found.append(bytes_below(folder / f"by{block_bytes}"))
    assert found[1:] == found[:1] * 2
    return found[0]


@pytest.mark.parametrize(("layout", "final_step"), [("ted", "auto"), ("packed", "drop"), ("ted", "repeat")])
@pytest.mark.parametrize("source", sorted(DATA.glob("*.hdf5")), ids=lambda path: path.stem)
def test_real_files_are_the_same_in_blocks_of_any_size(
    source: Path, final_step: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layout": layout, "final_step": final_step}
    with h5py.File(source) as file:
        if "timeouts" not in file and "next_observations" not in file:
            options["horizon"] = HORIZONS.get(source.stem, 100)
    blocks_of_any_size(source, tmp_path, monkeypatch, **options)


@pytest.mark.parametrize("following", [False, True])
@pytest.mark.parametrize("episodes", [None, "0:9", "1,4:6,11,17:", "2"])
def test_chosen_episodes_are_the_same_in_blocks_of_any_size(
    episodes: str | None, following: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1, 7, 2, 1, 1, 30, 3, 9, 4, 1, 2, 8, 5, 1, 1, 6, 40, 2, 3, 5]
    kinds = [("terminal", "timeout", "both")[number % 3] for number in range(len(lengths) - 1)]
    columns = flat(random_episodes(lengths, ends=[*kinds, "none"]), following=following)
    if following:
        columns["next_observations"][20] += 1
    blocks_of_any_size(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path, monkeypatch, episodes=episodes)


def test_inferred_ends_are_the_same_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ["timeout", "both", "terminal", "timeout", "timeout", "none"]
    columns = flat(random_episodes([6, 6, 3, 6, 6, 2], ends=ends), timeouts=False)
    blocks_of_any_size(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "horizon", monkeypatch, horizon=6)
    columns = flat(random_episodes([4, 5, 3, 6]), timeouts=False, following=True)
    found = blocks_of_any_size(write_d4rl(tmp_path / "b.hdf5", columns), tmp_path / "next", monkeypatch)
    assert found["manifest"]["boundary"]["inferred"] == 1


def test_numbers_in_any_order_are_read_in_that_order(tmp_path: Path) -> None:
    source = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes([3, 2, 4, 2])))
    with D4rlReader(source, final_step="repeat") as reader:
        blocks = list(reader.blocks([3, 0, 2, 1]))
        expected = [piece.columns[("action",)] for number in (3, 0, 2, 1) for piece in reader.pieces([number])]
    assert [block.episodes.tolist() for block in blocks] == [[3], [0, 2], [1]]
    found = np.concatenate([block.columns[("action",)] for block in blocks])
    assert found.tobytes() == np.concatenate(expected).tobytes()


DTYPES = st.sampled_from(["float32", "float64"])
HORIZON = 6


@st.composite
def episode_sets(draw: st.DrawFn) -> list[Episode]:
    """Episodes of up to six steps, with any numbers in them; only the last may be without an end."""
    dtype, shape = draw(DTYPES), draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    lengths = draw(st.lists(st.integers(1, HORIZON), min_size=1, max_size=8))
    found = []
    for number, length in enumerate(lengths):
        last = number == len(lengths) - 1
        full = length == HORIZON
        kinds = ["terminal", *(["timeout", "both"] if full else []), *(["none"] if last and not full else [])]
        kind = draw(st.sampled_from(kinds))
        numbers = npst.arrays(dtype, (length + 1, *shape), elements=st.floats(-8, 8, width=32))
        found.append(
            Episode(
                draw(numbers), draw(npst.arrays("float32", (length, 2), elements=st.floats(-1, 1, width=32))),
                draw(npst.arrays(dtype, length, elements=st.floats(width=32, allow_nan=False))),
                kind in ("terminal", "both"), kind in ("timeout", "both"),
            )
        )  # fmt: skip
    return found


@given(
    episodes=episode_sets(), timeouts=st.booleans(), following=st.booleans(), piece=st.integers(1, 400),
    choice=st.sampled_from(["auto", "drop", "repeat"]), packed=st.booleans(),
)  # fmt: skip
def test_pieces_are_the_rows_that_were_written(
    episodes: list[Episode], timeouts: bool, following: bool, piece: int, choice: str, packed: bool
) -> None:
    columns = flat(episodes, timeouts=timeouts, following=following)
    options = {} if timeouts else {"horizon": HORIZON}
    expected = plain_rows(columns, (np.cumsum([len(episode) for episode in episodes]) - 1).tolist())
    if choice == "auto":
        expected = after_final_step(expected)
    elif choice == "drop":
        expected = [row for row in expected if row["next"] is not None]
    else:
        expected = [{**row, "next": row["observation"] if row["next"] is None else row["next"]} for row in expected]
    packing = {"compression": "gzip", "chunks": True} if packed else {}
    with tempfile.TemporaryDirectory() as folder:
        file = write_d4rl(Path(folder) / "a.hdf5", columns, **packing)
        with with_options(D4rlReader, piece)(file, final_step=choice, options=options) as reader:
            facts, found, table = reader.facts(), bytes_of(reader.pieces()), reader.episode_table()
    assert facts.steps == table.steps == len(expected)
    numbers = list(dict.fromkeys(row["episode"] for row in expected))
    assert list(facts.episode_numbers) == table.episode.tolist() == numbers
    for name in ("observation", "next", "action", "reward"):
        assert found[name] == b"".join(np.asarray(row[name]).tobytes() for row in expected), name
    assert found["terminated"] == b"".join(np.bool_(row["terminated"]).tobytes() for row in expected)


@settings(max_examples=15)
@given(episodes=episode_sets())
def test_a_conversion_keeps_every_episode_with_its_end(episodes: list[Episode]) -> None:
    columns = flat(episodes, following=True)
    with tempfile.TemporaryDirectory() as folder:
        result = rbtool.convert(write_d4rl(Path(folder) / "a.hdf5", columns), Path(folder) / "out")
        with TedReader(result.path) as reader:
            table, steps = reader.episodes, reader.manifest.steps
            for name, key in (("observations", ("observation",)), ("next_observations", ("next", "observation"))):
                assert reader.read(key, 0, steps).tobytes() == columns[name].tobytes()
            assert table.length.tolist() == [len(episode) for episode in episodes]
            assert table.terminated.tolist() == [episode.terminated for episode in episodes]
            ended = [episode.timed_out or not episode.terminated for episode in episodes]
            assert table.truncated.tolist() == ended


def test_d4rl_77_antmaze_v0_is_reported_as_broken_and_v2_is_named(tmp_path: Path) -> None:
    columns = flat(random_episodes((6, 6), ends=("timeout", "timeout")))
    name = "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse"
    assert "the v2 file has them repaired" in lengths_and_notes(write_d4rl(tmp_path / f"{name}.hdf5", columns))[1]
    assert "repaired" not in lengths_and_notes(write_d4rl(tmp_path / f"{name}_fixed.hdf5", columns))[1]


def test_d4rl_145_the_next_observation_of_a_terminal_step_is_not_that_of_the_next_episode(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 5, 3), ends=("terminal", "terminal", "terminal")))
    with converted(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out") as reader:
        after = column(reader, "next.observation")
        assert reader.manifest.steps == 12  # and the last row of the file is not dropped
    for end in (3, 8):
        assert after[end].tobytes() == columns["observations"][end].tobytes()
        assert after[end].tobytes() != columns["observations"][end + 1].tobytes()


def test_d4rl_162_timeouts_that_are_not_marked_are_reported(tmp_path: Path) -> None:
    columns = flat(random_episodes((1000, 1000, 7), ends=("timeout", "timeout", "terminal")), following=True)
    columns["timeouts"][999] = False
    result = rbtool.convert(write_d4rl(tmp_path / "hopper_medium_replay-v2.hdf5", columns), tmp_path / "out")
    assert any("1 episode has more than the 1,000 steps" in note for note in result.notes)
    assert result.boundary["explicit_next"] == 1  # the jump inside is kept as it is, and marked
    with TedReader(result.path) as reader:
        assert column(reader, "next.observation").tobytes() == columns["next_observations"].tobytes()


def test_d4rl_137_adroit_timeouts_are_where_the_file_has_them(tmp_path: Path) -> None:
    columns = flat(random_episodes((200, 100, 30), ends=("timeout", "timeout", "timeout")))
    file = write_d4rl(tmp_path / "door-human-v1.hdf5", columns)
    with converted(file, tmp_path / "out", final_step="repeat") as reader:
        assert reader.episodes.length.tolist() == [200, 100, 30]
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * 3


def test_d4rl_85_one_step_episodes_of_maze2d_are_named_where_they_vanish(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 1, 1, 5), ends=("timeout",) * 4))
    file = write_d4rl(tmp_path / "a.hdf5", columns)
    result = rbtool.convert(file, tmp_path / "out")
    assert any("2 episodes (1, 2) are left out: one step" in note for note in result.notes)
    assert rbtool.convert(file, tmp_path / "all", final_step="repeat").episodes == 4


def test_d4rl_199_terminals_near_the_goal_do_not_end_episodes(tmp_path: Path) -> None:
    columns = dict(flat(random_episodes((10,), ends=("timeout",))), **{"infos/goal": np.ones((10, 2))})
    columns["terminals"][4:9] = True
    with converted(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat") as reader:
        assert reader.episodes.length.tolist() == [10]
        assert column(reader, "next.terminated")[:, 0].tolist() == columns["terminals"].tolist()
    assert [finding.rule for finding in rbtool.check(tmp_path / "out").findings] == ["TED006"]  # a warning


def test_corl_43_the_last_unterminated_episode_is_kept(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 6), ends=("terminal", "none")))
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 5]  # its last step has no observation after it
        assert reader.episodes.truncated.tolist() == [False, True]
    assert rbtool.convert(tmp_path / "a.hdf5", tmp_path / "all", final_step="repeat").steps == 10


def test_minari_74_and_187_a_reward_is_that_of_the_action_in_its_row(tmp_path: Path) -> None:
    columns = flat(random_episodes((6,), ends=("terminal",)))
    columns["rewards"] = columns["actions"][:, 0].copy()
    with converted(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out") as reader:
        assert column(reader, "next.reward")[:, 0].tobytes() == column(reader, "action")[:, 0].tobytes()


def test_minari_286_the_time_limit_in_the_report_is_that_of_the_id(tmp_path: Path) -> None:
    columns = flat(random_episodes((50, 50), ends=("timeout", "timeout")), timeouts=False)
    lengths, notes = lengths_and_notes(write_d4rl(tmp_path / "minigrid4rooms.hdf5", columns))
    assert lengths == [50, 50]
    assert "the time limit of 50 steps of minigrid-fourrooms-v0" in notes


@each(
    ("name", "options", "episodes", "steps", "ends"),
    [
        ("door_demos", {"horizon": 40}, 3, 117, {"truncated": 3, "final_dropped": 3}),
        ("hopper_random-v2", {}, 20, 466, {"terminated": 18, "truncated": 1, "end_of_file": 1}),
        ("hopper_random_v0", {"horizon": 1000}, 8, 171, {"terminated": 8, "final_repeated": 8}),
        ("kitchen_like_no_timeouts", {"horizon": 30}, 5, 145, {"truncated": 5, "final_dropped": 5}),
        ("antmaze_like_goal", {}, 5, 113, {"terminated": 5, "final_repeated": 5}),
    ],
)
def test_real_and_generated_files_equal_a_plain_reading(
    name: str, options: dict[str, int], episodes: int, steps: int, ends: dict[str, int], tmp_path: Path
) -> None:
    with h5py.File(DATA / f"{name}.hdf5") as file:
        names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
        columns = {one: file[one][()] for one in names if one in file}
    result = rbtool.convert(DATA / f"{name}.hdf5", tmp_path / "out", **options)
    assert (result.episodes, result.steps) == (episodes, steps)
    assert {key: count for key, count in result.boundary.items() if count} == ends
    last = columns["terminals"] | columns.get("timeouts", np.zeros(len(columns["rewards"]), bool))
    length = options.get("horizon", len(last) + 1)
    since = 0
    for row in range(len(last)):
        since += 1
        last[row] |= since == length
        since = 0 if last[row] else since
    expected = after_final_step(plain_rows(columns, np.flatnonzero(last).tolist()))
    with TedReader(result.path) as reader:
        for key, own in (("observation", "observation"), ("next.observation", "next"), ("action", "action"),
                         ("next.reward", "reward")):  # fmt: skip
            assert column(reader, key).tobytes() == b"".join(row[own].tobytes() for row in expected)
        assert column(reader, "episode").tolist() == [row["episode"] for row in expected]
    assert rbtool.check(result.path).errors == 0
