"""RLlib's rows that may not follow each other: which are joined, and which cuts are named."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from demonstration_files import Row, as_batch, packed, rows_of_episode, without, write_lines, write_parquet

import rbtool
from rbtool.converters.rllib.reader import RllibReader
from rbtool.core.errors import CorruptDataError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason


def lengths_of(path: Path, final_step: str = "repeat") -> list[int]:
    with RllibReader(path, final_step=final_step) as reader:
        facts = reader.facts()
        assert sum(map(len, reader.pieces())) == facts.steps
        return [int(length) for length in reader.episode_table().length]


def bare(rows: list[Row]) -> list[Row]:
    return without(rows, "t", "new_obs")


def ends_of(path: Path, folder: Path) -> tuple[list[int], list[EndReason], str]:
    """Convert with the last steps kept, and return lengths, end reasons and notes; no observation is of two rows."""
    result = rbtool.convert(path, folder, final_step="repeat")
    with TedReader(result.path) as reader:
        reasons = [EndReason(one) for one in reader.episodes.end_reason.tolist()]
        return reader.episodes.length.tolist(), reasons, "; ".join(result.notes)


@pytest.mark.parametrize("ids", ["equal", "none"])
@pytest.mark.parametrize("place", ["files", "batches"])
def test_rows_of_different_batches_that_nothing_shows_to_follow_are_not_joined(
    ids: str, place: str, tmp_path: Path
) -> None:
    one, other = rows_of_episode(0, 3, seed=1, end="none"), rows_of_episode(0, 4, seed=2)
    parts = [bare(part) if ids == "equal" else without(part, "t", "new_obs", "eps_id") for part in (one, other)]
    if place == "files":
        for number, part in enumerate(parts):
            write_lines(tmp_path / "d" / f"worker_{number}.json", part)
    else:
        write_lines(tmp_path / "d" / "worker_0.json", [as_batch(part) for part in parts])
    lengths, reasons, notes = ends_of(tmp_path / "d", tmp_path / "out")
    assert lengths == [3, 4]
    separate = ids == "none" and place == "files"
    assert reasons == [EndReason.END_OF_FILE if separate else EndReason.INFERRED, EndReason.TERMINATED]
    assert ("1 episode without a flag is cut at the end of a batch or file" in notes) == (not separate)
    with TedReader(tmp_path / "out") as reader:
        after = [row["obs"] for part in (one, other) for row in (*part[1:], part[-1])]
        assert reader.read(("next", "observation"), 0, 7).tolist() == after


def test_transitions_of_an_id_that_take_turns_in_a_file_are_joined_in_its_order(tmp_path: Path) -> None:
    pairs = zip(rows_of_episode(0, 3, seed=1), rows_of_episode(1, 3, seed=2), strict=True)
    path = write_lines(tmp_path / "a.json", bare([row for pair in pairs for row in pair]))
    assert lengths_of(path, final_step="repeat") == [3, 3]


@pytest.mark.parametrize("place", ["batches", "one batch"])
def test_without_ids_next_observations_that_do_not_follow_are_cuts(place: str, tmp_path: Path) -> None:
    parts = [rows_of_episode(0, 3, seed=1, end="none"), rows_of_episode(0, 5, seed=2)]
    rows = [without(part, "eps_id", "t") for part in (parts[0], parts[1][:2], parts[1][2:])]
    batches = (
        [as_batch(part) for part in rows] if place == "batches" else [as_batch([row for one in rows for row in one])]
    )
    lengths, reasons, notes = ends_of(write_lines(tmp_path / "a.json", batches), tmp_path / "out")
    assert lengths == [3, 5]
    assert reasons == [EndReason.INFERRED, EndReason.TERMINATED]
    assert "the next rows do not continue 1 episode without a flag" in notes


def test_nested_observations_show_that_batches_follow(tmp_path: Path) -> None:
    rows = without(rows_of_episode(0, 6), "t")
    nested = [{**row, "obs": {"x": row["obs"]}, "new_obs": {"x": row["new_obs"]}} for row in rows]
    for number, part in enumerate((nested[:2], nested[2:])):
        write_lines(tmp_path / "d" / f"{number}.json", part)
    assert lengths_of(tmp_path / "d") == [6]


def with_damage(path: Path, line: int) -> Path:
    """Cut a line of a file in its middle."""
    lines = path.read_text().splitlines()
    lines[line] = lines[line][: len(lines[line]) // 2]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("line", [-1, 1])
def test_a_damaged_line_is_left_out_with_skip_bad_alone(line: int, tmp_path: Path) -> None:
    parts = [rows_of_episode(number, 4, seed=number) for number in range(4)]
    write_lines(tmp_path / "d" / "0.json", [as_batch(part) for part in parts[:3]])
    write_lines(tmp_path / "d" / "1.json", [as_batch(parts[3])])
    with_damage(tmp_path / "d" / "0.json", line)
    with pytest.raises(CorruptDataError, match="is not JSON") as raised:
        rbtool.convert(tmp_path / "d", tmp_path / "no")
    assert "--skip-bad" in raised.value.hint
    result = rbtool.convert(tmp_path / "d", tmp_path / "out", skip_bad=True)
    assert any("1 line is damaged and left out" in note for note in result.notes)
    del parts[range(3)[line]]
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4] * 3
        observations = [row["obs"] for part in parts for row in part]
        assert reader.read(("observation",), 0, 12).tolist() == observations


@pytest.mark.parametrize("names", [(), ("t",), ("new_obs",), ("t", "new_obs"), ("t", "new_obs", "eps_id"), ("eps_id",)])
def test_transitions_around_a_damaged_line_are_not_joined(names: tuple[str, ...], tmp_path: Path) -> None:
    rows = rows_of_episode(0, 6)
    path = with_damage(write_lines(tmp_path / "a.json", without(rows, *names)), 2)
    result = rbtool.convert(path, tmp_path / "out", skip_bad=True, final_step="repeat")
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [2, 3]
        follows = reader.read(("next", "observation"), 1, 2).tolist()
        assert follows == [rows[1 if "new_obs" in names else 2]["obs"]]


@pytest.mark.parametrize("batches", [True, False])
def test_a_damaged_compressed_column_is_left_out_with_skip_bad_alone(batches: bool, tmp_path: Path) -> None:
    parts = [rows_of_episode(number, 4, seed=number) for number in range(3)]
    if batches:
        lines = [as_batch(part) | {"obs": packed([row["obs"] for row in part])} for part in parts]
    else:
        lines = [row | {"obs": packed(row["obs"])} for part in parts for row in part]
    at = 1 if batches else 6
    lines[at]["obs"] = lines[at]["obs"][: len(lines[at]["obs"]) // 8 * 4]
    path = write_lines(tmp_path / "a.json", lines)
    with pytest.raises(CorruptDataError) as raised:
        rbtool.convert(path, tmp_path / "no", trust_pickle=True)
    assert "--skip-bad" in raised.value.hint
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True, skip_bad=True, final_step="repeat")
    assert any("1 line is damaged and left out" in note for note in result.notes)
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == ([4, 4] if batches else [4, 2, 1, 4])


def test_a_damaged_row_group_is_left_out_with_skip_bad_alone(tmp_path: Path) -> None:
    parts = [rows_of_episode(number, 4, seed=number) for number in range(4)]
    path = write_parquet(
        tmp_path / "d" / "0.parquet", [row for part in parts[:3] for row in part], row_group_size=4, compression="gzip"
    )
    write_parquet(tmp_path / "d" / "1.parquet", parts[3])
    group = pq.read_metadata(path).row_group(1)
    data = bytearray(path.read_bytes())
    for column in map(group.column, range(group.num_columns)):
        end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
        data[end - 16 : end] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(CorruptDataError) as raised:
        rbtool.convert(tmp_path / "d", tmp_path / "no")
    assert "row group 1" in raised.value.message
    assert "--skip-bad" in raised.value.hint
    result = rbtool.convert(tmp_path / "d", tmp_path / "out", skip_bad=True)
    assert any("1 row group is damaged and left out" in note for note in result.notes)
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [4] * 3
        observations = [row["obs"] for part in (parts[0], *parts[2:]) for row in part]
        assert reader.read(("observation",), 0, 12).tolist() == observations


def test_a_parquet_file_that_was_cut_is_left_out_with_skip_bad_alone(tmp_path: Path) -> None:
    for number in range(3):
        path = write_parquet(tmp_path / "d" / f"{number}.parquet", rows_of_episode(number, 4, seed=number))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptDataError) as raised:
        rbtool.convert(tmp_path / "d", tmp_path / "no")
    assert "2.parquet" in raised.value.message
    result = rbtool.convert(tmp_path / "d", tmp_path / "out", skip_bad=True)
    assert any("1 file is damaged and left out" in note for note in result.notes)
    assert (result.episodes, result.steps) == (2, 8)
