"""`D4rlReader`: the contract of readers, every rule for the ends of episodes, and what a file holds besides rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from made_datasets import bytes_below
from table_files import Episode, after_final_step, flat, plain_rows, random_episodes, write_d4rl

import rbtool
from rbtool.cli.inspect import column_lines
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.format.contracts import Piece
from rbtool.core.format.converter import Reader
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final
from rbtool.core.ted.schema import REWARD
from rbtool.core.testing.readers import ReaderTests
from rbtool.core.verbs.inspect import ColumnsResult

LENGTHS = (5, 1, 7, 4, 3)
ENDS = ("terminal", "terminal", "timeout", "both", "none")


def small(path: Path, **arguments: Any) -> D4rlReader:
    return type("Small", (D4rlReader,), {"piece_bytes": 200})(path, **arguments)


class _Contract(ReaderTests):
    following = False

    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        columns = flat(random_episodes(LENGTHS, ends=ENDS), following=self.following)
        rows = len(columns["rewards"])
        columns["infos/qpos"] = np.arange(rows * 2, dtype=np.float64).reshape(rows, 2)
        self.file = write_d4rl(tmp_path_factory.mktemp("d4rl") / "walk.hdf5", columns)

    def source(self) -> Path:
        return self.file

    def reader(self) -> type[Reader]:
        return D4rlReader

    def with_small_pieces(self) -> Reader:
        return small(self.file)


class TestReader(_Contract):
    """A file without next observations."""


class TestReaderOfNextObservations(_Contract):
    """A file with next observations."""

    following = True


class TestReaderOfAFolder(_Contract):
    """A folder with one file, as a download is."""

    def source(self) -> Path:
        return self.file.parent

    def with_small_pieces(self) -> Reader:
        return small(self.file.parent)


def converted(path: Path, folder: Path, **arguments: Any) -> TedReader:
    return TedReader(rbtool.convert(path, folder, **arguments).path)


def columns_of(reader: TedReader) -> dict[str, Any]:
    return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


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
    import io

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
        found = columns_of(reader)
    for name in ("info.goal", "info.part.x", "info.whole"):
        assert found[name].tolist() == list(range(7))


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


def test_chosen_episodes_in_any_order_of_blocks(tmp_path: Path) -> None:
    columns = flat(random_episodes(range(1, 30)), following=True)
    with small(write_d4rl(tmp_path / "a.hdf5", columns)) as reader:
        starts = np.cumsum([0, *range(1, 30)])
        for number in (17, 3, 28, 0, 4):
            found: list[Piece] = list(reader.pieces([number]))
            rows = np.concatenate([piece.rows_before(("observation",)) for piece in found])
            assert rows.tobytes() == columns["observations"][starts[number] : starts[number + 1]].tobytes()


def one_episode(steps: int = 6) -> Episode:
    return random_episodes((steps,), ends=("terminal",))[0]


@each(
    ("change", "kind", "sentence"),
    [
        (lambda c: c.update(observations=c["observations"][:-1]), FormatError, "different numbers of rows"),
        (lambda c: c.update(observations=np.concatenate((c["observations"],) * 2)), FormatError, "observations 12"),
        (lambda c: c.update(timeouts=c["timeouts"][:3]), FormatError, "timeouts 3"),
        (lambda c: c.update(rewards=np.zeros((6, 2))), FormatError, r"rows of shape \[2\]"),
        (lambda c: c.update(terminals=np.full(6, 2)), FormatError, "terminals is 2 in row 0, expected 0 or 1"),
        (lambda c: c.update(actions=np.array([b"a"] * 6)), FormatError, "'actions' cannot be read as rows"),
        (lambda c: c.update(next_observations=np.zeros((6, 4))), FormatError, "next_observations"),
        (lambda c: c.update({name: values[:0] for name, values in c.items()}), FormatError, "has no steps"),
    ],
)
def test_columns_that_contradict_each_other_are_one_sentence(
    change: Any, kind: type[Exception], sentence: str, tmp_path: Path
) -> None:
    columns: dict[str, Any] = dict(flat([one_episode()]))
    change(columns)
    with pytest.raises(kind, match=sentence):
        rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@each("name", ["mine.hdf5", "hopper_medium-v2.hdf5"])
@each("share", [0.01, 0.5, 0.99])
def test_a_truncated_file_names_the_sizes_and_how_to_fetch_it_again(name: str, share: float, tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / name, flat(random_episodes((400, 400))))
    whole = file.read_bytes()
    cut = max(100, int(len(whole) * share))
    file.write_bytes(whole[:cut])
    with pytest.raises(CorruptDataError, match=f"it has {cut:,} bytes, and its header states {len(whole):,}") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert ("rbtool download d4rl hopper-medium-v2" in caught.value.hint) == name.startswith("hopper")
    with pytest.raises(CorruptDataError, match="truncated file"):
        rbtool.inspect(file)


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><html>404</html>"])
def test_a_published_name_without_hdf5_inside_names_the_command_that_fetches_it(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "hopper_medium-v2.hdf5"
    file.write_bytes(content)
    with pytest.raises(CorruptDataError, match="is not an HDF5 file") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert "rbtool download d4rl hopper-medium-v2" in str(caught.value.hint)
    other = file.rename(tmp_path / "mine.hdf5")
    with pytest.raises(FormatError, match="unknown format; supported: " if content else "is an empty file") as refused:
        rbtool.convert(other, tmp_path / "out")
    assert "download d4rl" not in str(refused.value.hint)


def test_truth_values_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 2)))
    columns["infos/flag"] = np.array([0, 1, 2, 0, 1], np.uint8).view(bool)
    path = write_d4rl(tmp_path / "a.hdf5", columns)
    with h5py.File(path) as file:
        assert file["infos/flag"][:].view(np.uint8).tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(CorruptDataError, match=r"'info\.flag' has a truth value of 2, expected 0 or 1"):
        rbtool.convert(path, tmp_path / "out")
    assert "TED014" in {finding.rule for finding in rbtool.check(path).findings}


def test_external_links_and_virtual_data_are_refused(tmp_path: Path) -> None:
    other = write_d4rl(tmp_path / "other.hdf5", flat([one_episode()]))
    file = write_d4rl(tmp_path / "a.hdf5", {k: v for k, v in flat([one_episode()]).items() if k != "rewards"})
    with h5py.File(file, "r+") as opened:
        opened["rewards"] = h5py.ExternalLink(str(other), "rewards")
    with pytest.raises(CorruptDataError, match="is a link to another name or to another file"):
        rbtool.convert(file, tmp_path / "out")


def test_a_folder_of_many_files_is_no_dataset(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_d4rl(tmp_path / "both" / f"{name}.hdf5", flat([one_episode()]))
    assert not D4rlReader.recognises(tmp_path / "both")
    with pytest.raises(FormatError, match="unknown format; supported: "):
        rbtool.convert(tmp_path / "both", tmp_path / "out")


def test_a_horizon_is_refused_where_the_format_has_no_such_option(tmp_path: Path) -> None:
    minari = Path(__file__).parents[1] / "data" / "minari" / "tuple" / "trunc-v0"
    for call in (rbtool.inspect, rbtool.check):
        with pytest.raises(UsageError, match="has no option --horizon"):
            call(minari, horizon=5)
    with pytest.raises(UsageError, match="has no option --horizon"):
        rbtool.convert(minari, tmp_path / "out", horizon=5)


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
    wide = {**columns, "virtual/1/actions": np.zeros((5, 9), np.float32)}
    with pytest.raises(FormatError, match="chunks of '/virtual/0/actions' differ in their rows"):
        rbtool.convert(write_d4rl(tmp_path / "a.hdf5", wide), tmp_path / "out")
    del columns["virtual/1/rewards"]
    with pytest.raises(FormatError, match="has no 'virtual/1/rewards'"):
        rbtool.convert(write_d4rl(tmp_path / "b.hdf5", columns), tmp_path / "out")
    short = chunked(flat(random_episodes([5, 4])), [4])
    short["virtual/1/rewards"] = short["virtual/1/rewards"][:-1]
    with pytest.raises(FormatError, match="different numbers of rows"):
        rbtool.convert(write_d4rl(tmp_path / "c.hdf5", short), tmp_path / "out")
    short["virtual/0/rewards"] = np.append(short["virtual/0/rewards"], np.float32(0))
    with pytest.raises(FormatError, match="different numbers of rows"):
        rbtool.convert(write_d4rl(tmp_path / "d.hdf5", short), tmp_path / "out")


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
    with D4rlReader(file) as reader:
        facts = reader.facts()
        assert (facts.id, list(facts.lengths or ())) == ("kitchen-partial-v0", [279, 279, 4])
        assert any("280 steps of kitchen-partial-v0" in note for note in facts.notes)
    with D4rlReader(file, options={"horizon": 5}, final_step="repeat") as reader:
        assert len(reader.facts().episode_numbers) == 113
    human = tmp_path / "pen-v0_demos_clipped.hdf5"
    write_d4rl(human, flat(episodes, timeouts=False))
    for name, longest in (("pen-human-v0", 100), ("pen-human-longhorizon-v0", 200)):
        with D4rlReader(human, options={"id": name}, final_step="repeat") as reader:
            assert max(reader.facts().lengths or ()) == longest


def test_a_time_limit_that_the_file_name_alone_states_is_named_as_such(tmp_path: Path) -> None:
    columns = flat(random_episodes((30, 30, 30), ends=("timeout",) * 3), timeouts=False, following=True)
    file = write_d4rl(tmp_path / "minigrid4rooms.hdf5", columns)
    with D4rlReader(file) as reader:
        notes = reader.facts().notes
    assert any(
        "minigrid-fourrooms-v0, which the file name states (--horizon N states another)" in note for note in notes
    )
    assert any("in 2 steps inside episodes (first: step 29)" in note for note in notes)
    for options in ({"horizon": 30}, {"id": "minigrid-fourrooms-v0"}):
        with D4rlReader(file, options=options) as reader:
            assert not any("file name" in note for note in reader.facts().notes)


def test_ids_of_the_same_file_with_another_time_limit_are_named(tmp_path: Path) -> None:
    columns = flat(random_episodes((300, 250), ends=("timeout", "timeout")), timeouts=False)
    file = write_d4rl(tmp_path / "door-v0_demos_clipped.hdf5", columns)
    sentence = "door-human-longhorizon-v0 is the same file with a time limit of 300 steps"
    with D4rlReader(file) as reader:
        assert sentence in reader.facts().notes
    with D4rlReader(file, options={"id": "door-human-v0"}) as reader:
        assert sentence not in reader.facts().notes


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
        found = (("observation",), ("next", "observation"), ("next", "terminated"), ("next", "truncated"))
        rows = {key: reader.read(key, 0, 15) for key in found}
        observations = np.concatenate([episode.observations[:-1] for episode in episodes])
        assert np.array_equal(rows[("observation",)], observations)
        after = [episode.observations[1:].copy() for episode in episodes]
        for episode, next_rows in zip(episodes, after, strict=True):
            next_rows[-1] = episode.observations[-1 if following else -2]
        assert np.array_equal(rows[("next", "observation")], np.concatenate(after))
        assert np.flatnonzero(rows[("next", "terminated")]).tolist() == [3, 7]
        assert np.flatnonzero(rows[("next", "truncated")]).tolist() == [6, 12, 14]
    assert result.notes[0].startswith("episodes end at episode_terminals, as d3rlpy 1 writes them")
    with pytest.raises(UsageError, match="has episode_terminals, which mark where episodes end"):
        rbtool.convert(file, tmp_path / "other", horizon=5)


def test_terminals_inside_episodes_of_d3rlpy_1_stay_flags(tmp_path: Path) -> None:
    columns = d3rlpy_1(flat(random_episodes((4, 3))))
    columns["terminals"][1] = 1
    with D4rlReader(write_d4rl(tmp_path / "a.hdf5", columns), final_step="repeat") as reader:
        facts = reader.facts()
    assert list(facts.lengths or ()) == [4, 3]
    assert "terminals are set in 1 steps inside episodes" in facts.notes


def test_episode_terminals_beside_timeouts_end_no_episode(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3, 5)))
    columns["episode_terminals"] = np.arange(12) % 2
    with D4rlReader(write_d4rl(tmp_path / "a.hdf5", columns), final_step="repeat") as reader:
        facts = reader.facts()
    assert list(facts.lengths or ()) == [4, 3, 5]
    assert "episodes end at timeouts, so episode_terminals are kept as info.episode_terminals" in facts.notes


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.zeros(6), "different numbers of rows"), (np.full(7, 0.5), "expected 0 or 1"), (np.zeros((7, 2)), "one nu")],
)
def test_episode_terminals_that_are_no_flags_are_refused(values: Any, message: str, tmp_path: Path) -> None:
    columns = {**d3rlpy_1(flat(random_episodes((4, 3)))), "episode_terminals": values}
    with pytest.raises(FormatError, match=message):
        rbtool.inspect(write_d4rl(tmp_path / "a.hdf5", columns))


def test_without_any_sign_at_all_the_horizon_is_asked_for(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    with pytest.raises(FormatError, match="neither timeouts nor next_observations") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert "--horizon N" in caught.value.hint
    assert not (tmp_path / "out").exists()
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


@pytest.mark.parametrize(("timeouts", "lengths"), [("absent", [700, 30]), ("unset", [730])])
def test_in_antmaze_terminals_end_no_episode_where_timeouts_are_missing(
    timeouts: str, lengths: list[int], tmp_path: Path
) -> None:
    columns = flat(random_episodes((700, 30), ends=("none", "none")), timeouts=timeouts == "unset")
    columns["terminals"][640:650] = True
    file = tmp_path / "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5"
    result = rbtool.convert(write_d4rl(file, columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == lengths
        assert reader.read(("next", "terminated"), 0, 730)[:, 0].tolist() == columns["terminals"].tolist()
        assert reader.read(("next", "truncated"), 699, 700)[0, 0] == (timeouts == "absent")
    assert any("terminals are set in 10 steps inside episodes" in note for note in result.notes)


def test_repeated_terminals_in_a_maze_of_another_name_without_any_timeout_are_reported(tmp_path: Path) -> None:
    columns = maze_columns()
    columns["timeouts"][:] = False
    with D4rlReader(write_d4rl(tmp_path / "a.hdf5", columns)) as reader:
        assert any("timeouts are never set" in note for note in reader.facts().notes)


def test_elsewhere_a_step_after_a_terminal_one_begins_an_episode(tmp_path: Path) -> None:
    with D4rlReader(write_d4rl(tmp_path / "a.hdf5", maze_columns(goals=False)), final_step="repeat") as reader:
        assert list(reader.facts().lengths or ()) == [4, 1, 1, 2, 4, 1, 1]


def test_another_horizon_is_another_dataset(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((6,)), timeouts=False))
    rbtool.convert(file, tmp_path / "out", horizon=3)
    assert rbtool.convert(file, tmp_path / "out", horizon=3).already_there
    with pytest.raises(UsageError, match="is dataset d4rl:a, horizon 3, not d4rl:a, horizon 2"):
        rbtool.convert(file, tmp_path / "out", horizon=2)


def test_a_horizon_beside_timeouts_is_refused(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((6,))))
    with pytest.raises(UsageError, match="has timeouts"):
        rbtool.convert(file, tmp_path / "out", horizon=3)
    with pytest.raises(UsageError, match="above 0"):
        rbtool.convert(
            write_d4rl(tmp_path / "b.hdf5", flat(random_episodes((6,)), timeouts=False)), tmp_path / "out", horizon=0
        )
    rbtool.convert(file, tmp_path / "out")
    with pytest.raises(UsageError, match="--horizon is about raw datasets"):
        rbtool.convert(tmp_path / "out", tmp_path / "again", horizon=3)


REAL = sorted((Path(__file__).parents[1] / "data" / "d4rl").glob("*.hdf5"))
HORIZONS = {"kitchen_like_no_timeouts": 280, "hopper_random_v0": 1000}


def both_ways(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[dict[str, Any]]:
    found = []
    for block_bytes in (None, 1 << 30, 900):
        with monkeypatch.context() as patch:
            if block_bytes is None:
                patch.setattr(D4rlReader, "read_episodes", Reader.read_episodes)
            else:
                patch.setattr(D4rlReader, "block_bytes", block_bytes)
            rbtool.convert(source, folder / f"by{block_bytes}", **arguments)
        found.append(bytes_below(folder / f"by{block_bytes}"))
    return found


@pytest.mark.parametrize(("layout", "final_step"), [("ted", "auto"), ("packed", "drop"), ("ted", "repeat")])
@pytest.mark.parametrize("source", REAL, ids=lambda path: path.stem)
def test_real_files(
    source: Path, final_step: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layout": layout, "final_step": final_step}
    with h5py.File(source) as file:
        if "timeouts" not in file and "next_observations" not in file:
            options["horizon"] = HORIZONS.get(source.stem, 100)
    one, *others = both_ways(source, tmp_path, monkeypatch, **options)
    assert others == [one, one]


@pytest.mark.parametrize("following", [False, True])
@pytest.mark.parametrize("episodes", [None, "0:9", "1,4:6,11,17:", "2"])
def test_chosen_episodes(
    episodes: str | None, following: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1, 7, 2, 1, 1, 30, 3, 9, 4, 1, 2, 8, 5, 1, 1, 6, 40, 2, 3, 5]
    kinds = [("terminal", "timeout", "both")[number % 3] for number in range(len(lengths) - 1)]
    columns = flat(random_episodes(lengths, ends=[*kinds, "none"]), following=following)
    if following:
        columns["next_observations"][20] += 1
    source = write_d4rl(tmp_path / "a.hdf5", columns)
    one, *others = both_ways(source, tmp_path, monkeypatch, episodes=episodes)
    assert others == [one, one]


def test_a_time_limit_without_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = flat(
        random_episodes([6, 6, 3, 6, 6, 2], ends=["timeout", "both", "terminal", "timeout", "timeout", "none"])
    )
    del columns["timeouts"]
    one, *others = both_ways(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path, monkeypatch, horizon=6)
    assert others == [one, one]


def test_ends_where_next_observations_do_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = flat(random_episodes([4, 5, 3, 6]), timeouts=False, following=True)
    one, *others = both_ways(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path, monkeypatch)
    assert others == [one, one]
    assert one["manifest"]["boundary"]["inferred"] == 1


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


def ends_of(episodes: list[Episode]) -> list[int]:
    return (np.cumsum([len(episode) for episode in episodes]) - 1).tolist()


def joined(pieces: list[Piece]) -> dict[str, bytes]:
    return {
        "observation": b"".join(piece.rows_before(("observation",)).tobytes() for piece in pieces),
        "next": b"".join(piece.rows_after(("observation",)).tobytes() for piece in pieces),
        "action": b"".join(piece.columns[("action",)].tobytes() for piece in pieces),
        "reward": b"".join(piece.columns[REWARD].tobytes() for piece in pieces),
        "terminated": b"".join(piece.terminated.tobytes() for piece in pieces),
    }


@given(
    episodes=episode_sets(), timeouts=st.booleans(), following=st.booleans(), piece=st.integers(1, 400),
    choice=st.sampled_from(["auto", "drop", "repeat"]), packed=st.booleans(),
)  # fmt: skip
def test_pieces_are_the_rows_that_were_written(
    episodes: list[Episode], timeouts: bool, following: bool, piece: int, choice: str, packed: bool
) -> None:
    columns = flat(episodes, timeouts=timeouts, following=following)
    options = {} if timeouts else {"horizon": HORIZON}
    expected = plain_rows(columns, ends_of(episodes))
    if choice == "auto":
        expected = after_final_step(expected)
    elif choice == "drop":
        expected = [row for row in expected if row["next"] is not None]
    else:
        expected = [{**row, "next": row["observation"] if row["next"] is None else row["next"]} for row in expected]
    with tempfile.TemporaryDirectory() as folder:
        packing = {"compression": "gzip", "chunks": True} if packed else {}
        file = write_d4rl(Path(folder) / "a.hdf5", columns, **packing)
        kind = type("Small", (D4rlReader,), {"piece_bytes": piece})
        with kind(file, final_step=choice, options=options) as reader:
            facts, pieces, table = reader.facts(), list(reader.pieces()), reader.episode_table()
    assert facts.steps == table.steps == len(expected)
    found = joined(pieces)
    assert (
        list(facts.episode_numbers) == table.episode.tolist() == list(dict.fromkeys(row["episode"] for row in expected))
    )
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


DATA = Path(__file__).parents[1] / "data" / "d4rl"


def rows(path: Path, key: str) -> np.ndarray:
    with TedReader(path) as reader:
        return reader.read(tuple(key.split(".")), 0, reader.manifest.steps)


def test_d4rl_77_antmaze_v0_is_reported_as_broken_and_v2_is_named(tmp_path: Path) -> None:
    columns = flat(random_episodes((6, 6), ends=("timeout", "timeout")))
    name = "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse"
    old = rbtool.convert(write_d4rl(tmp_path / f"{name}.hdf5", columns), tmp_path / "old")
    new = rbtool.convert(write_d4rl(tmp_path / f"{name}_fixed.hdf5", columns), tmp_path / "new")
    assert any("the v2 file has them repaired" in note for note in old.notes)
    assert not any("repaired" in note for note in new.notes)


def test_d4rl_145_the_next_observation_of_a_terminal_step_is_not_that_of_the_next_episode(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 5, 3), ends=("terminal", "terminal", "terminal")))
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    after = rows(result.path, "next.observation")
    for end in (3, 8):
        assert after[end].tobytes() == columns["observations"][end].tobytes()
        assert after[end].tobytes() != columns["observations"][end + 1].tobytes()
    assert result.steps == 12  # and the last row of the file is not dropped


def test_d4rl_162_timeouts_that_are_not_marked_are_reported(tmp_path: Path) -> None:
    columns = flat(random_episodes((1000, 1000, 7), ends=("timeout", "timeout", "terminal")), following=True)
    columns["timeouts"][999] = False
    result = rbtool.convert(write_d4rl(tmp_path / "hopper_medium_replay-v2.hdf5", columns), tmp_path / "out")
    assert any("1 episode has more than the 1,000 steps" in note for note in result.notes)
    assert result.boundary["explicit_next"] == 1  # the jump inside is kept as it is, and marked
    assert rows(result.path, "next.observation").tobytes() == columns["next_observations"].tobytes()


def test_d4rl_86_every_step_of_the_file_is_counted_once(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 1, 4, 1, 5), ends=("terminal",) * 4 + ("none",)), following=True)
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert (result.steps, result.episodes) == (14, 5)
    assert rows(result.path, "action").tobytes() == columns["actions"].tobytes()


def test_d4rl_137_adroit_timeouts_are_where_the_file_has_them(tmp_path: Path) -> None:
    columns = flat(random_episodes((200, 100, 30), ends=("timeout", "timeout", "timeout")))
    result = rbtool.convert(write_d4rl(tmp_path / "door-human-v1.hdf5", columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [200, 100, 30]
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * 3


@pytest.mark.parametrize("following", [False, True])
def test_d4rl_34_and_31_next_observations_are_those_of_the_same_episode(following: bool, tmp_path: Path) -> None:
    columns = flat(random_episodes((5, 4, 6), ends=("timeout", "terminal", "timeout")), following=following)
    expected = after_final_step(plain_rows(columns, [4, 8, 14]))
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    found = rows(result.path, "next.observation")
    assert [row.tobytes() for row in found] == [row["next"].tobytes() for row in expected]


def test_d4rl_85_one_step_episodes_of_maze2d_are_named_where_they_vanish(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 1, 1, 5), ends=("timeout",) * 4))
    file = write_d4rl(tmp_path / "a.hdf5", columns)
    result = rbtool.convert(file, tmp_path / "out")
    assert any("2 episodes (1, 2) are left out: one step" in note for note in result.notes)
    assert rbtool.convert(file, tmp_path / "all", final_step="repeat").episodes == 4


def test_d4rl_176_a_self_made_file_without_timeouts_says_what_is_missing(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "mine.hdf5", flat(random_episodes((4, 4)), timeouts=False))
    with pytest.raises(FormatError, match="neither timeouts nor next_observations"):
        rbtool.convert(file, tmp_path / "out")


def test_d4rl_199_terminals_near_the_goal_do_not_end_episodes(tmp_path: Path) -> None:
    columns = dict(flat(random_episodes((10,), ends=("timeout",))), **{"infos/goal": np.ones((10, 2))})
    columns["terminals"][4:9] = True
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat")
    assert result.episodes == 1
    assert rows(result.path, "next.terminated")[:, 0].tolist() == columns["terminals"].tolist()
    assert [finding.rule for finding in rbtool.check(result.path).findings] == ["TED006"]  # a warning


def test_d4rl_210_a_file_that_was_cut_names_sizes_and_the_command(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "halfcheetah_medium-v2.hdf5", flat(random_episodes((100, 100))))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 3])
    with pytest.raises(CorruptDataError, match=f"{size // 3:,} bytes, and its header states {size:,}") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert caught.value.hint == "fetch it again: rbtool download d4rl halfcheetah-medium-v2"


def test_corl_43_the_last_unterminated_episode_is_kept(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 6), ends=("terminal", "none")))
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4, 5]  # its last step has no observation after it
        assert reader.episodes.truncated.tolist() == [False, True]
    assert rbtool.convert(tmp_path / "a.hdf5", tmp_path / "all", final_step="repeat").steps == 10


def test_diffusion_policies_6_timeouts_end_episodes_too(tmp_path: Path) -> None:
    columns = flat(random_episodes((50,) * 20, ends=("timeout",) * 19 + ("terminal",)))
    columns["rewards"][:] = 1
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.max() == 50
        assert reader.episodes.total_reward.max() == 50


def test_minari_74_and_187_a_reward_is_that_of_the_action_in_its_row(tmp_path: Path) -> None:
    columns = flat(random_episodes((6,), ends=("terminal",)))
    columns["rewards"] = columns["actions"][:, 0].copy()
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert rows(result.path, "next.reward")[:, 0].tobytes() == rows(result.path, "action")[:, 0].tobytes()


def test_minari_199_observations_of_another_length_are_refused(tmp_path: Path) -> None:
    columns = flat(random_episodes((6,), ends=("terminal",)))
    columns["observations"] = np.concatenate((columns["observations"], columns["observations"][-1:]))
    with pytest.raises(FormatError, match=r"observations 7, actions 6"):
        rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")


def test_minari_286_the_time_limit_in_the_report_is_that_of_the_id(tmp_path: Path) -> None:
    columns = flat(random_episodes((50, 50), ends=("timeout", "timeout")), timeouts=False)
    result = rbtool.convert(
        write_d4rl(tmp_path / "minigrid4rooms.hdf5", columns), tmp_path / "out", final_step="repeat"
    )
    assert any("the time limit of 50 steps of minigrid-fourrooms-v0" in note for note in result.notes)
    assert result.episodes == 2


def test_tfds_the_end_of_an_episode_does_not_take_the_last_row_of_the_whole_file(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 4, 2), ends=("timeout", "timeout", "timeout")), following=True)
    result = rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    after = rows(result.path, "next.observation")
    for end in (2, 6, 8):
        assert after[end].tobytes() == columns["next_observations"][end].tobytes()


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
    import h5py

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
    for key, own in (("observation", "observation"), ("next.observation", "next"), ("action", "action")):
        assert rows(result.path, key).tobytes() == b"".join(row[own].tobytes() for row in expected)
    assert rows(result.path, "next.reward").tobytes() == b"".join(row["reward"].tobytes() for row in expected)
    assert rows(result.path, "episode").tolist() == [row["episode"] for row in expected]
    assert rbtool.check(result.path).errors == 0
