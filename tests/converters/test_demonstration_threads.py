"""A test for each report of `user-needs` that concerns RLlib, imitation, d3rlpy, Stable-Baselines3 and DAPG files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from demonstration_files import random_episodes, ring, write_d3rlpy, write_imitation
from rllib_files import as_batch, rows_of_episode, write_lines

import rbtool
from rbtool.core.errors import FormatError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data"
LIBRARIES = ("d3rlpy", "gym", "imitation", "ray", "stable_baselines3", "torch")


def test_cleanrl_460_the_observation_after_a_truncation_is_never_that_after_the_reset(tmp_path: Path) -> None:
    """A buffer that saves memory holds the reset observation after the last step of an episode."""
    episodes = random_episodes((4, 4, 4))
    np.savez(tmp_path / "a.npz", **ring([episodes], 20, memory=True))
    with TedReader(rbtool.convert(tmp_path / "a.npz", tmp_path / "out").path) as reader:
        after = reader.read(("next", "observation"), 0, reader.manifest.steps)
        starts = {one.observations[0].tobytes() for one in episodes}
        assert not starts & {row.tobytes() for row in after}
        assert reader.episodes.final.tolist() == [Final.REPEATED, Final.DROPPED, Final.OBSERVED]


def test_d4rl_145_last_steps_of_d3rlpy_episodes_have_no_observation_of_the_next(tmp_path: Path) -> None:
    episodes = random_episodes((4, 3, 5), ("terminated", "truncated", "terminated"))
    with TedReader(rbtool.convert(write_d3rlpy(tmp_path / "a.h5", episodes), tmp_path / "out").path) as reader:
        after = reader.read(("next", "observation"), 0, reader.manifest.steps)
        assert after[3].tobytes() == episodes[0].observations[3].tobytes()  # repeated: no target bootstraps from it
        assert after[5].tobytes() == episodes[1].observations[2].tobytes()
        assert reader.episodes.length.tolist() == [4, 2, 5]


def test_minari_199_counts_of_observations_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    episodes = random_episodes((4, 3))
    rows = np.concatenate([one.observations[:-1] for one in episodes])
    with pytest.raises(FormatError, match="have 9 observations, obs has 7 rows"):
        rbtool.convert(write_imitation(tmp_path / "a.npz", episodes, obs=rows), tmp_path / "out")


def test_corl_43_the_last_unfinished_episode_is_kept(tmp_path: Path) -> None:
    lines = [as_batch(rows_of_episode(1, 5)), as_batch(rows_of_episode(2, 3, end="none"))]
    with TedReader(rbtool.convert(write_lines(tmp_path / "a.json", lines), tmp_path / "out").path) as reader:
        assert reader.episodes.length.tolist() == [5, 3]
        assert reader.episodes.end_reason.tolist() == [EndReason.TERMINATED, EndReason.END_OF_FILE]


def test_ray_50390_rows_of_a_table_become_episodes(tmp_path: Path) -> None:
    """A transition a line, rows of two episodes in turns, no order but `t`."""
    pairs = zip(rows_of_episode(1, 4, seed=1), rows_of_episode(2, 4, seed=2), strict=True)
    rows = [row for pair in pairs for row in pair]
    with TedReader(rbtool.convert(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "out").path) as reader:
        assert reader.episodes.length.tolist() == [4, 4]
        assert reader.read(("info", "t"), 0, 8).tolist() == [0, 1, 2, 3] * 2
        assert reader.episodes.explicit_next.tolist() == [False, False]


def test_d4rl_80_and_rlds_14_no_library_of_the_format_is_imported(tmp_path: Path) -> None:
    code = f"""
import sys, rbtool
for name in ("rllib/cartpole_small.json", "imitation/cartpole_expert_4.npz", "d3rlpy/vector.h5", "sb3/full.npz"):
    rbtool.convert({str(DATA)!r} + "/" + name, {str(tmp_path)!r} + "/" + name.replace("/", "-"))
rbtool.convert({str(DATA)!r} + "/dapg/door-v0_demos_3.pickle", {str(tmp_path / "dapg")!r}, trust_pickle=True)
print(*(name for name in {LIBRARIES!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
