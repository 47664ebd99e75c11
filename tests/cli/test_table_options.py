"""The options of tables, as people type them."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
import pytest

from rbtool.cli.help import _with_map_spread

ROWS = "obs_0,obs_1,act,r,terminals,timeouts\n0,1,2,3,0,0\n1,2,3,4,0,1\n5,6,7,8,0,0\n6,7,8,9,1,0\n"


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ("a b --map x=1 y=2 z=3 --ends q", "a b --map x=1 --map y=2 --map z=3 --ends q"),
        ("a b --map x=1 --map y=2 z=3", "a b --map x=1 --map y=2 --map z=3"),
        ("--map x=1 y=2 a b", "--map x=1 --map y=2 a b"),
        ("--map x=1 a=b/c.csv", "--map x=1 --map a=b/c.csv"),
        ("--map map.toml a b", "--map map.toml a b"),
        ("--map map.toml y=2", "--map map.toml y=2"),
        ("a b=c --ends x=1 y=2", "a b=c --ends x=1 y=2"),
        ("--map x=1 -- y=2", "--map x=1 -- y=2"),
        ("a --map", "a --map"),
    ],
)
def test_pairs_after_map(words: str, pairs: str) -> None:
    assert _with_map_spread(words.split()) == pairs.split()


def test_a_table_is_converted_with_one_map(shell: Any, tmp_path: Any) -> None:
    table, dest = tmp_path / "steps.csv", tmp_path / "made"
    table.write_text(ROWS)
    line = "--from table --map observation=obs_0,obs_1 action=act reward=r --ends terminals,timeouts -q"
    made = shell(f"rbtool convert {shlex.quote(str(table))} {shlex.quote(str(dest))} {line}")
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{dest}\n", "")


def test_a_table_of_objects_is_converted_with_trust(shell: Any, tmp_path: Any) -> None:
    table, dest = tmp_path / "steps.npz", tmp_path / "made"
    np.savez(table, obs=np.array([1, 2, 3], object), act=np.arange(3.0))
    line = f"rbtool convert {shlex.quote(str(table))} {shlex.quote(str(dest))} --from table --ends - -q"
    line += " --map observation=obs action=act"
    refused = shell(line)
    assert (refused.returncode, dest.exists()) == (2, False)
    assert "column 'obs' is a pickle of Python objects" in refused.stderr
    assert "--trust-pickle" in refused.stderr
    made = shell(f"{line} --trust-pickle")
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{dest}\n", "")


def test_an_option_that_a_format_does_not_have_has_its_name_with_dashes(shell: Any, tmp_path: Any) -> None:
    for option, value in (("--trust-pickle", ""), ("--filter-key", "train"), ("--episode-key", "e")):
        answer = shell(f"rbtool inspect ./minari/pendulum/random-v0 {option} {value}")
        assert answer.returncode == 2
        assert f"has no option {option}\n" in answer.stderr
