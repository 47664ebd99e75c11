"""Time limits in infos of imitation's files as old versions of gym state them, and files of one trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from demonstration_files import imitation_table, random_episodes, write_dataset_folder, write_imitation

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason

LIMIT = "TimeLimit.truncated"


@pytest.mark.parametrize("limit", [True, np.True_])
def test_a_step_of_an_npz_file_without_the_key_has_not_reached_the_limit(limit: Any, tmp_path: Path) -> None:
    infos: list[Any] = [{} for _ in range(12)]
    infos[8] = {LIMIT: limit}
    infos[5] = {LIMIT: limit}  # inside a trajectory, which it does not end
    path = write_imitation(tmp_path / "a.npz", random_episodes((5, 4, 3), ["terminated"] * 3), infos)
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert not result.dropped_keys
    with TedReader(result.path) as reader:
        reasons = [EndReason.TERMINATED, EndReason.TRUNCATED, EndReason.TERMINATED]
        assert reader.episodes.end_reason.tolist() == reasons
        name = next(field.key for field in reader.fields if field.name.startswith("next.info."))
        assert np.flatnonzero(reader.read(name, 0, 12)).tolist() == [5, 8]


@pytest.mark.parametrize(("odd", "believed"), [("{}", True), ("no JSON", False), (f'{{"{LIMIT}": 1}}', False)])
def test_a_trajectory_of_a_folder_without_the_key_has_not_reached_the_limit(
    odd: str, believed: bool, tmp_path: Path
) -> None:
    table = imitation_table(random_episodes((2, 3, 1), ["terminated"] * 3))
    infos = [["{}", f'{{"{LIMIT}": true}}'], ["{}", "{}", odd], ["{}"]]
    at = table.schema.get_field_index("infos")
    table = table.set_column(at, "infos", pa.array(infos, pa.list_(pa.string())))
    result = rbtool.convert(write_dataset_folder(tmp_path / "d", table), tmp_path / "out")
    with TedReader(result.path) as reader:
        assert reader.episodes.truncated.tolist() == [believed, False, False]
    assert any("--ends truncated" in note for note in result.notes) == (not believed)


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_a_file_of_one_trajectory_has_empty_indices_of_any_type(dtype: str, tmp_path: Path) -> None:
    path = write_imitation(tmp_path / "a.npz", random_episodes((5,)), indices=np.array([], dtype))
    with TedReader(rbtool.convert(path, tmp_path / "out").path) as reader:
        assert reader.episodes.length.tolist() == [5]


def test_limits_of_an_npz_file_that_are_no_flags_are_not_believed(tmp_path: Path) -> None:
    infos = [{LIMIT: True}, {LIMIT: "yes"}, {}]
    path = write_imitation(tmp_path / "a.npz", random_episodes((1, 2), ["terminated"] * 2), infos)
    result = rbtool.convert(path, tmp_path / "out", trust_pickle=True)
    assert any("--ends truncated" in note for note in result.notes)
    assert [one["key"] for one in result.dropped_keys] == [f"infos.{LIMIT}"]
