"""Complaints of users of other tools that concern tables, each as a test; the threads are named in the docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_files import column_map, flat, named, random_episodes, write_csv, write_h5, write_npz, write_parquet

import rbtool
from rbtool.core.errors import FormatError
from rbtool.core.format.memmap.reader import TedReader

STEPS = (3, 4, 2)
OPTIONS: dict[str, Any] = {"format": "table", "map": column_map("hdf5"), "ends": "dead,late"}


def rows_in(path: Path) -> dict[str, Any]:
    with TedReader(path) as reader:
        return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


def test_next_observations_are_never_those_of_another_episode(tmp_path: Path) -> None:
    """D4RL issue 145: at a terminal the next observation was the first one of the following episode."""
    columns = flat(random_episodes(STEPS, ends=("terminal",) * 3))
    found = rows_in(rbtool.convert(write_h5(tmp_path / "a", named(columns)), tmp_path / "out", **OPTIONS).path)
    first = columns["observations"][np.cumsum(STEPS)[:-1]]
    last = np.cumsum(STEPS) - 1
    assert np.array_equal(found["next.observation"][last], columns["observations"][last])
    assert not any((row == other).all() for row in found["next.observation"][last] for other in first)


def test_the_last_unfinished_episode_is_kept(tmp_path: Path) -> None:
    """CORL issue 43: the last episode, which no flag ends, was thrown away."""
    columns = named(flat(random_episodes(STEPS, ends=("terminal", "terminal", "none")), following=True))
    options = OPTIONS | {"map": column_map("hdf5", following=True)}
    result = rbtool.convert(write_h5(tmp_path / "a", columns), tmp_path / "out", **options)
    assert (result.steps, result.episodes, result.boundary["end_of_file"]) == (9, 3, 1)
    assert any("the last 2 rows end without a flag: an unfinished episode" in note for note in result.notes)


def test_time_limits_that_are_not_named_are_reported(tmp_path: Path) -> None:
    """Diffusion-Policies-for-Offline-RL issue 6: with `terminals` alone, an episode had 768,445 steps."""
    columns = named(flat(random_episodes((50,) * 6, ends=("timeout",) * 6)))
    path = write_h5(tmp_path / "a", columns)
    assert rbtool.convert(path, tmp_path / "both", **OPTIONS).episodes == 6
    one = rbtool.convert(path, tmp_path / "one", **(OPTIONS | {"ends": "dead"}))
    assert (one.episodes, [item["key"] for item in one.dropped_keys]) == (1, ["late"])
    assert any("--ends -,dead" in note for note in one.notes)


def test_the_reward_belongs_to_the_action_of_its_row(tmp_path: Path) -> None:
    """Minari issue 74: is r_0 what a_0 brought? The reward of a row is under `next` of the same row."""
    columns = named(flat(random_episodes(STEPS), following=True))
    options = OPTIONS | {"map": column_map("hdf5", following=True)}
    found = rows_in(rbtool.convert(write_h5(tmp_path / "a", columns), tmp_path / "out", **options).path)
    assert np.array_equal(found["next.reward"][:, 0], columns["r"])
    assert np.array_equal(found["action"], columns["act"])


@pytest.mark.parametrize("more", [1, -1])
def test_columns_of_other_lengths_are_refused_with_their_lengths(more: int, tmp_path: Path) -> None:
    """Minari issue 199 (N observations for N+1) and v-d4rl issue 12 (501 flags, 500 images): an IndexError later on."""
    columns = named(flat(random_episodes(STEPS)))
    columns["obs"] = np.zeros((9 + more, 3), np.float32)
    with pytest.raises(FormatError, match=rf"act 9, obs {9 + more}, r 9"):
        rbtool.convert(write_npz(tmp_path / "a", columns), tmp_path / "out", **OPTIONS)


def test_a_table_of_rows_becomes_episodes(tmp_path: Path) -> None:
    """ray issue 50390: tabular data could not be turned into episodes."""
    table = {"patient": np.repeat([11, 12], (2, 3)), "heart_rate": np.arange(5.0), "dose": np.arange(5)}
    path = write_csv(tmp_path / "a", table)
    pairs = ["observation=heart_rate action=dose"]
    result = rbtool.convert(
        path, tmp_path / "out", format="table", map=pairs, episode_key="patient", final_step="repeat"
    )
    with TedReader(result.path) as reader:
        assert reader.episodes.episode.tolist() == [11, 12]
        assert reader.episodes.length.tolist() == [2, 3]


def test_a_saved_map_names_nested_keys(tmp_path: Path) -> None:
    """any4lerobot and others: every layout had its own converter script."""
    columns = {
        "obs/proprio": np.ones((3, 2)),
        "obs/a/b": np.ones((3, 1)),
        "u": np.ones((3, 1)),
        "end": np.array([0, 0, 1]),
    }
    (tmp_path / "map.toml").write_text('action = "u"\n[observation]\nstate = "obs/proprio"\n"x.y" = "obs/a/b"\n')
    path = write_h5(tmp_path / "a", columns)
    found = rbtool.convert(path, tmp_path / "out", format="table", map=[str(tmp_path / "map.toml")], ends="end")
    assert {"observation.state", "observation.x.y", "next.observation.state"} <= set(rows_in(found.path))


def test_a_path_is_enough_and_the_network_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRL issue 3067 and datacollective issue 102: files that are there were asked for at the hub."""
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    path = write_parquet(tmp_path / "a", named(flat(random_episodes(STEPS))))
    assert rbtool.convert(path, tmp_path / "out", **OPTIONS).episodes > 0


def test_no_other_library_is_needed_to_read_a_table(tmp_path: Path) -> None:
    """D4RL issues 80 and 155, rlds issue 14: a simulator or TensorFlow was needed to read arrays."""
    columns, lines = named(flat(random_episodes(STEPS))), ["import sys, rbtool"]
    for write in (write_h5, write_csv, write_parquet, write_npz):
        path = write(tmp_path / "a", columns)
        pairs = column_map("csv" if path.suffix == ".csv" else "hdf5")
        options = f"format='table', ends='dead,late', map={pairs!r}"
        lines.append(f"rbtool.convert({str(path)!r}, {str(tmp_path / path.suffix)!r}, {options})")
    lines.append("print({'torch', 'sklearn', 'gymnasium', 'tensorflow', 'minari'} & set(sys.modules))")
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["a/b/c", "x y", "Größe", "shape", "..", "a%b", 'say "x"'])
def test_odd_names_of_columns_are_kept_apart_or_renamed(name: str, tmp_path: Path) -> None:
    """tensordict issue 1440: a key `a/b/c` broke the memory map."""
    columns = {"obs": np.ones((3, 2)), name: np.arange(3), "end": np.array([0, 0, 1])}
    path = write_parquet(tmp_path / "a", columns)
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    pairs = [f'observation=obs info.odd="{quoted}"']
    found = rows_in(rbtool.convert(path, tmp_path / "out", format="table", map=pairs, ends="end").path)
    assert found["info.odd"].tolist() == [0, 1, 2]
