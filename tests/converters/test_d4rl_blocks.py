"""A D4RL file that is read in blocks gives, byte for byte, the dataset that its episodes one by one give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from d4rl_files import flat, random_episodes, write
from dataset_bytes import bytes_below

import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.format.reader import Reader

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


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("final_step", ["auto", "drop", "repeat"])
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
    source = write(tmp_path / "a.hdf5", columns)
    one, *others = both_ways(source, tmp_path, monkeypatch, episodes=episodes)
    assert others == [one, one]


def test_a_time_limit_without_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = flat(
        random_episodes([6, 6, 3, 6, 6, 2], ends=["timeout", "both", "terminal", "timeout", "timeout", "none"])
    )
    del columns["timeouts"]
    one, *others = both_ways(write(tmp_path / "a.hdf5", columns), tmp_path, monkeypatch, horizon=6)
    assert others == [one, one]


def test_ends_where_next_observations_do_not_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = flat(random_episodes([4, 5, 3, 6]), timeouts=False, following=True)
    one, *others = both_ways(write(tmp_path / "a.hdf5", columns), tmp_path, monkeypatch)
    assert others == [one, one]
    assert one["manifest"]["boundary"]["inferred"] == 1


def test_numbers_in_any_order_are_read_in_that_order(tmp_path: Path) -> None:
    source = write(tmp_path / "a.hdf5", flat(random_episodes([3, 2, 4, 2])))
    with D4rlReader(source, final_step="repeat") as reader:
        blocks = list(reader.blocks([3, 0, 2, 1]))
        expected = [piece.columns[("action",)] for number in (3, 0, 2, 1) for piece in reader.pieces([number])]
    assert [block.episodes.tolist() for block in blocks] == [[3], [0, 2], [1]]
    found = np.concatenate([block.columns[("action",)] for block in blocks])
    assert found.tobytes() == np.concatenate(expected).tobytes()
