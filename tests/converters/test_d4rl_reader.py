"""`D4rlReader`: the contract of readers, every rule for the ends of episodes, and what a file holds besides rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from d4rl_files import Episode, after_final_step, flat, plain_rows, random_episodes, write

import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.format.contracts import Piece
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.reader import Reader
from rbtool.core.ted.episodes import EndReason, Final
from rbtool.core.testing.readers import ReaderTests

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
        self.file = write(tmp_path_factory.mktemp("d4rl") / "walk.hdf5", columns)

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


@pytest.mark.parametrize("following", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("packing", [{}, {"compression": "gzip", "chunks": True}, {"chunks": True, "shuffle": True}])
def test_every_row_equals_a_plain_reading(following: bool, dtype: str, packing: dict[str, Any], tmp_path: Path) -> None:
    columns = flat(random_episodes(LENGTHS, ends=ENDS, dtype=dtype), following=following)
    ends = np.flatnonzero(columns["terminals"] | columns["timeouts"])
    with converted(write(tmp_path / "a.hdf5", columns, **packing), tmp_path / "out") as reader:
        assert_equal_rows(reader, after_final_step(plain_rows(columns, ends.tolist())))
        final = Final.OBSERVED if following else Final.REPEATED
        assert reader.episodes.final[0] == final
        assert {field.key: field.dtype for field in reader.fields}[("observation",)] == dtype


def test_without_next_observations_a_truncated_last_step_ends_one_step_earlier(tmp_path: Path) -> None:
    episodes = random_episodes((3, 4, 1, 2), ends=("timeout", "terminal", "timeout", "none"))
    result = rbtool.convert(write(tmp_path / "a.hdf5", flat(episodes)), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.episode.tolist() == [0, 1, 3]
        assert reader.episodes.length.tolist() == [2, 4, 1]
        assert reader.episodes.final.tolist() == [Final.DROPPED, Final.REPEATED, Final.DROPPED]
    assert (result.boundary["final_repeated"], result.boundary["final_dropped"]) == (1, 2)
    assert any("episode 2 is left out: one step" in note for note in result.notes)
    assert any("the last 2 steps end without a flag" in note for note in result.notes)


def test_the_unfinished_tail_is_kept_whole_where_the_next_observation_is_known(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 4), ends=("terminal", "none")), following=True)
    with converted(write(tmp_path / "a.hdf5", columns), tmp_path / "out") as reader:
        assert reader.episodes.length.tolist() == [3, 4]
        assert reader.episodes.end_reason.tolist() == [EndReason.TERMINATED, EndReason.END_OF_FILE]


def test_next_observations_that_do_not_follow_are_data(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 4), ends=("terminal", "timeout")), following=True)
    columns["next_observations"][1] += 1
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert result.boundary["explicit_next"] == 1
    with TedReader(result.path) as reader:
        assert reader.read(("next", "observation"), 0, 8).tobytes() == columns["next_observations"].tobytes()
        assert reader.episodes.explicit_next.tolist() == [True, False]


def test_without_any_other_sign_episodes_end_where_next_observations_do_not_follow(tmp_path: Path) -> None:
    episodes = random_episodes((4, 1, 5, 3), ends=("timeout", "terminal", "timeout", "none"))
    columns = flat(episodes, timeouts=False, following=True)
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
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
    plain = write(tmp_path / "plain.hdf5", columns)
    odd = dict(columns, rewards=columns["rewards"][:, None])
    odd["terminals"], odd["timeouts"] = (
        columns["terminals"][:, None].astype("float32"),
        columns["timeouts"].astype("u1"),
    )
    one, other = converted(plain, tmp_path / "1"), converted(write(tmp_path / "odd.hdf5", odd), tmp_path / "2")
    assert one.manifest.content_digest == other.manifest.content_digest


def test_integers_images_and_foreign_byte_order_keep_their_values(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3), ends=("terminal", "timeout")))
    columns["actions"] = np.arange(7)
    columns["observations"] = np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3)
    columns["rewards"] = columns["rewards"].astype(">f8")
    with converted(write(tmp_path / "a.hdf5", columns), tmp_path / "out", final_step="repeat") as reader:
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
    file = write(tmp_path / "a.hdf5", columns)
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
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert {entry["key"]: entry["why"] for entry in result.dropped_keys} == {
        "goal": "infos/goal has its name", "part": "infos/part has its name", "whole/x": "infos/whole has its name"
    }  # fmt: skip
    with TedReader(result.path) as reader:
        found = columns_of(reader)
    for name in ("info.goal", "info.part.x", "info.whole"):
        assert found[name].tolist() == list(range(7))


def test_arrays_without_data_are_no_damage(tmp_path: Path) -> None:
    columns: dict[str, Any] = flat(random_episodes((4,), ends=("terminal",)))
    columns |= {"metadata/nothing": h5py.Empty("f4"), "infos/nothing": h5py.Empty("f4")}
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert [(entry["key"], entry["why"]) for entry in result.dropped_keys] == [("infos/nothing", "it has no data")]
    with TedReader(result.path) as reader:
        assert b'"nothing": null' in reader.documents()["metadata.json"]


def test_nan_rewards_are_kept_counted_and_found_by_check(tmp_path: Path) -> None:
    columns = flat(random_episodes((4, 3), ends=("terminal", "timeout")), following=True)
    columns["rewards"][2] = np.nan
    result = rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert "the reward is NaN in 1 of 7 steps (first: step 2)" in result.notes
    with TedReader(result.path) as reader:
        assert reader.read(("next", "reward"), 0, 7)[:, 0].tobytes() == columns["rewards"].tobytes()
    assert any(finding.rule == "TED007" for finding in rbtool.check(result.path).findings)


def test_chosen_episodes_in_any_order_of_blocks(tmp_path: Path) -> None:
    columns = flat(random_episodes(range(1, 30)), following=True)
    with small(write(tmp_path / "a.hdf5", columns)) as reader:
        starts = np.cumsum([0, *range(1, 30)])
        for number in (17, 3, 28, 0, 4):
            found: list[Piece] = list(reader.pieces([number]))
            rows = np.concatenate([piece.rows_before(("observation",)) for piece in found])
            assert rows.tobytes() == columns["observations"][starts[number] : starts[number + 1]].tobytes()


def one_episode(steps: int = 6) -> Episode:
    return random_episodes((steps,), ends=("terminal",))[0]


@pytest.mark.parametrize(
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
        rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mine.hdf5", "hopper_medium-v2.hdf5"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_truncated_file_names_the_sizes_and_how_to_fetch_it_again(name: str, share: float, tmp_path: Path) -> None:
    file = write(tmp_path / name, flat(random_episodes((400, 400))))
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
    with pytest.raises(CorruptDataError, match="is no HDF5 file") as caught:
        rbtool.convert(file, tmp_path / "out")
    assert "rbtool download d4rl hopper-medium-v2" in str(caught.value.hint)
    other = file.rename(tmp_path / "mine.hdf5")
    with pytest.raises(FormatError, match="unknown format; supported: " if content else "is an empty file") as refused:
        rbtool.convert(other, tmp_path / "out")
    assert "download d4rl" not in str(refused.value.hint)


def test_truth_values_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    columns = flat(random_episodes((3, 2)))
    columns["infos/flag"] = np.array([0, 1, 2, 0, 1], np.uint8).view(bool)
    path = write(tmp_path / "a.hdf5", columns)
    with h5py.File(path) as file:
        assert file["infos/flag"][:].view(np.uint8).tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(CorruptDataError, match=r"'info\.flag' has a truth value of 2, expected 0 or 1"):
        rbtool.convert(path, tmp_path / "out")
    assert "TED014" in {finding.rule for finding in rbtool.check(path).findings}


def test_external_links_and_virtual_data_are_refused(tmp_path: Path) -> None:
    other = write(tmp_path / "other.hdf5", flat([one_episode()]))
    file = write(tmp_path / "a.hdf5", {k: v for k, v in flat([one_episode()]).items() if k != "rewards"})
    with h5py.File(file, "r+") as opened:
        opened["rewards"] = h5py.ExternalLink(str(other), "rewards")
    with pytest.raises(CorruptDataError, match="is a link to another name or to another file"):
        rbtool.convert(file, tmp_path / "out")


def test_a_folder_of_many_files_is_no_dataset(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "both" / f"{name}.hdf5", flat([one_episode()]))
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
    found = rbtool.check(write(tmp_path / "a.hdf5", columns))
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
    whole = rbtool.convert(write(tmp_path / "whole.hdf5", columns), tmp_path / "whole")
    for cuts in ([], [3], [5, 5, 6], list(range(1, 12))):
        file = write(tmp_path / f"{len(cuts)}.hdf5", chunked(columns, cuts), compression="gzip")
        made = rbtool.convert(file, tmp_path / f"made{len(cuts)}")
        assert made.content_digest == whole.content_digest
        assert made.dropped_keys == ()


def test_chunks_that_differ_are_refused(tmp_path: Path) -> None:
    columns = chunked(flat(random_episodes([5, 4])), [4])
    wide = {**columns, "virtual/1/actions": np.zeros((5, 9), np.float32)}
    with pytest.raises(FormatError, match="chunks of '/virtual/0/actions' differ in their rows"):
        rbtool.convert(write(tmp_path / "a.hdf5", wide), tmp_path / "out")
    del columns["virtual/1/rewards"]
    with pytest.raises(FormatError, match="has no 'virtual/1/rewards'"):
        rbtool.convert(write(tmp_path / "b.hdf5", columns), tmp_path / "out")
    short = chunked(flat(random_episodes([5, 4])), [4])
    short["virtual/1/rewards"] = short["virtual/1/rewards"][:-1]
    with pytest.raises(FormatError, match="different numbers of rows"):
        rbtool.convert(write(tmp_path / "c.hdf5", short), tmp_path / "out")
    short["virtual/0/rewards"] = np.append(short["virtual/0/rewards"], np.float32(0))
    with pytest.raises(FormatError, match="different numbers of rows"):
        rbtool.convert(write(tmp_path / "d.hdf5", short), tmp_path / "out")
