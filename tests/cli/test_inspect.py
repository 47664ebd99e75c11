"""How `inspect` shows provenance; `inspect` and `check` of several datasets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from damage import flip

import rbtool
from rbtool.cli.inspect import step_lines, summary_lines
from rbtool.core.format.manifest import Provenance
from rbtool.core.testing.datasets import write_walks


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks")
    write_walks(folder / "walks", [(10, "terminated"), (4, "truncated")])
    return folder


def _shown(lines: Any) -> list[str]:
    return ["".join(getattr(cell, "text", cell) for cell in line).rstrip() for line in lines]


def _made(arguments: dict[str, Any], width: int | None = None) -> list[str]:
    step = Provenance("preprocess", arguments, "0.1.0", {}, "2026-11-20T10:00:00+00:00")
    return _shown(step_lines(step, f"{'made':<9}", 9, width))


def test_operations_are_shown_with_parameters_and_constants(walks: Path) -> None:
    options = {"filter": ["length > 5"], "n-step": 3, "gamma": 0.5, "clip-reward": "-1:1", "normalize": ["action"]}
    rbtool.preprocess(walks / "walks", dest=walks / "made", operations=options, num_workers=0)
    result = rbtool.inspect(walks / "made")
    measured = result.provenance[-1].arguments["constants"][0][0]
    loc, scale = (" ".join(f"{value:.4g}" for value in measured[name]) for name in ("loc", "scale"))
    shown = _shown(summary_lines(result))
    start = next(n for n, line in enumerate(shown) if line.startswith("made     preprocess "))
    assert shown[start].startswith("made     preprocess chunk_size=")
    assert shown[start + 1 : -1] == [
        "         filter       condition='length > 5'", "         n-step       n=3 gamma=0.5",
        "         clip-reward  low=-1.0 high=1.0", "         normalize    key=action method=mean-std",
        f"           action: loc [{loc}] · scale [{scale}]",
    ]  # fmt: skip
    assert "next     n-step data: next.observation is up to 3 steps ahead" in shown


def test_provenance_is_shown_in_words_that_fit_the_screen() -> None:
    given = {
        "seed": 0, "none": None, "off": False, "on": True, "path": "my data", "parts": {"train": 0.8, "test": 0.2},
        "map": ["observation=a,b", "reward=r"], "keys": ["a", "b"], "empty": [],
    }  # fmt: skip
    (line,) = _made(given)
    words = "seed=0 on path='my data' parts=train=0.8,test=0.2 map='observation=a,b reward=r' keys=a,b"
    assert line == f"made     preprocess {words} · 2026-11-20 · rbtool 0.1.0"
    spec = {"id": "CartPole-v1", "entry_point": "a.b:C", "max_episode_steps": 9, "kwargs": {"sutton": True}}
    [line] = _made({"env": "CartPole-v1", "env_spec": spec, "seed": 0})
    assert "env=CartPole-v1 seed=0 max_episode_steps=9 kwargs=sutton=True ·" in line
    [line] = _made({"env": "CartPole-v1", "env_spec": spec | {"kwargs": {}}})
    assert "kwargs" not in line
    operations = [{"name": "where", "condition": "reward > 0 and not truncated and observation[3] < 0.5 or done"}]
    lines = _made({"operations": operations, "chunk_size": 4096, "num_frames": 1_000_000}, 60)
    assert max(map(len, lines)) <= 60
    assert "observation[3] < 0.5" in " ".join(" ".join(lines).split())


def test_constants_are_shown_at_their_normalizations() -> None:
    operations = [
        {"name": "normalize", "key": "a", "constants": [{"key": "a", "loc": [1.0], "scale": [2.0]}]},
        {"name": "normalize", "key": "b"},
    ]
    measured = [[{"key": "b", "loc": [3.0] * 20, "scale": [4.0] * 20}]]
    lines = _made({"operations": operations, "constants": measured})
    assert lines[1:] == [
        "         normalize  key=a",
        "           a: loc [1] · scale [2]",
        "         normalize  key=b",
        "           b: loc [ 3.000  3.000  3.000 … of 20] · scale [ 4.000  4.000  4.000 … of 20]",
    ]


def test_operations_in_another_form_do_not_stop_the_summary() -> None:
    for operations in ("cast", [1], [{"nam": "cast"}], {}):
        assert len(_made({"operations": operations, "constants": 5})) == 1


def test_notes_on_the_source_are_printed_once_and_kept(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "data" / "d4rl" / "hopper_random-v2.hdf5"
    read = rbtool.convert(file, tmp_path / "ted")
    assert sum("as D4RL publishes it has" in note for note in read.notes) == 1
    assert rbtool.inspect(tmp_path / "ted").notes == read.notes
    packed = rbtool.convert(tmp_path / "ted", tmp_path / "packed", layout="packed")
    cast = rbtool.preprocess(tmp_path / "ted", dest=tmp_path / "cast", operations={"cast": "action=float64"})
    saved = rbtool.checkpoint.save(tmp_path / "ted", tmp_path / "saved", form="flat")
    parts = rbtool.split(tmp_path / "ted", tmp_path / "parts", train=0.5, val=0.5)
    merged = rbtool.merge([tmp_path / "parts" / "train", tmp_path / "parts" / "val"], tmp_path / "merged")
    loaded = rbtool.checkpoint.load(tmp_path / "saved", tmp_path / "loaded")
    for result in (packed, cast, saved, parts, merged, loaded):
        assert not set(result.notes) & set(read.notes)
    for name in ("packed", "cast", "merged", "loaded"):
        assert set(read.notes) <= set(rbtool.inspect(tmp_path / name).notes)


# `inspect` and `check` of several datasets.


@pytest.fixture
def bad(folder):
    """The folder with `bad`, a copy of `cartpole` with a changed byte."""
    shutil.copytree(folder / "cartpole", folder / "bad")
    flip(folder / "bad" / "action.memmap", 0)
    return folder


def test_every_dataset_has_a_heading_even_after_a_failure(bad, shell):
    done = shell("rbtool check cartpole bad ghost cartpole.h5 -q; rbtool check cartpole bad ghost cartpole.h5", bad)
    assert done.returncode == 4
    first, *lines = done.stdout.splitlines()
    assert first == "bad"
    assert [line for line in lines if line in {"cartpole", "bad", "ghost", "cartpole.h5"}] == [
        "cartpole", "bad", "cartpole.h5",
    ]  # fmt: skip
    assert lines.count("") == 2
    assert "error: ghost not found\n" in done.stderr
    assert done.stderr.endswith("2 of 4 datasets failed: bad, ghost\n")


@pytest.mark.parametrize(
    ("names", "code"),
    [("cartpole cartpole.h5", 0), ("bad cartpole", 3), ("cartpole log.csv", 1), ("bad log.csv", 3), ("bad ghost", 4)],
)
def test_the_exit_code_is_the_highest_of_all(bad, shell, names, code):
    assert shell(f"rbtool check {names}", bad).returncode == code


@pytest.mark.parametrize("verb", ["check", "inspect"])
def test_the_document_has_one_of_each_dataset_by_name(shell, verb):
    single = json.loads(shell(f"rbtool {verb} cartpole --json").stdout)
    done = shell(f"rbtool {verb} cartpole ghost minari:cartpole/scripted-v0 cartpole --json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["kind"], document["verb"]) == (4, 1, "datasets", verb)
    found = document["datasets"]
    assert list(found) == ["cartpole", "ghost", "minari:cartpole/scripted-v0"]
    assert found["ghost"]["error"]["exit_code"] == 4
    assert {**found["cartpole"], "seconds": 0} == {**single, "seconds": 0}


def test_one_dataset_has_no_heading_and_errors_name_their_dataset(shell):
    assert json.loads(shell("rbtool check cartpole --json").stdout)["kind"] == "check"
    assert shell("rbtool inspect cartpole -q").stdout == "cartpole\n"
    done = shell("rbtool check ghost cartpole")
    assert done.stdout.splitlines()[0] == "cartpole"
    assert "failed" not in shell("rbtool check 'ghost*'").stderr
    done = shell("rbtool inspect cartpole log.csv --episode 99")
    assert done.returncode == 2
    assert "error: cartpole: episode 99 is not there" in done.stderr
    done = shell("rbtool check cartpole ''")
    assert (done.returncode, done.stdout) == (2, "")
    assert "one of the datasets is empty" in done.stderr


def test_a_quoted_pattern_is_expanded(shell):
    line = "rbtool inspect 'cart*' 'minari:*' 'nothing*' --json"
    done = shell(line)
    assert list(json.loads(done.stdout)["datasets"]) == [
        "cartpole", "cartpole.h5", "minari:cartpole/scripted-v0", "nothing*",
    ]  # fmt: skip
    assert done.returncode == 4
    assert "error: nothing* matches no dataset\n" in done.stderr
    assert list(json.loads(shell("rbtool check 'minari:*' --json").stdout)["datasets"]) == [
        "minari:cartpole/scripted-v0"
    ]


def test_a_name_with_characters_of_a_pattern_is_a_name(folder, shell):
    (folder / "cartpole").rename(folder / "a[1]*")
    assert shell("rbtool inspect 'a[1]*' -q", folder).stdout == "a[1]*\n"


def test_summaries_and_episodes_of_several_datasets_are_named(shell):
    lines = shell("rbtool inspect cartpole cartpole.h5").stdout.splitlines()
    assert [line.split("   ")[0] for line in lines if "4,864 steps" in line] == ["cartpole", "cartpole.h5"]
    assert lines[lines.index("") + 1].startswith("cartpole.h5   checkpoint")
    shown = shell("rbtool inspect cartpole cartpole.h5 --episode 3 --head 1").stdout.splitlines()
    assert [line for line in shown if line.startswith("cartpole")] == ["cartpole", "cartpole.h5"]
