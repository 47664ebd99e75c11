"""`inspect` and `check` of several datasets: headings, documents, patterns, and the highest exit code."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture(scope="module")
def environment(forked):
    """Commands are forked: there are many of them."""
    return forked


@pytest.fixture
def bad(folder):
    """The folder with `bad`, a copy of `cartpole` with a changed byte."""
    shutil.copytree(folder / "cartpole", folder / "bad")
    path = folder / "bad" / "action.memmap"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    return folder


def test_each_dataset_has_its_heading_and_a_failure_hides_none(bad, shell):
    done = shell("rbtool check cartpole bad ghost cartpole.h5 -q; rbtool check cartpole bad ghost cartpole.h5", bad)
    assert done.returncode == 4
    first, *lines = done.stdout.splitlines()
    assert first == "bad"
    assert [line for line in lines if line in {"cartpole", "bad", "ghost", "cartpole.h5"}] == [
        "cartpole", "bad", "cartpole.h5",
    ]  # fmt: skip
    assert lines.count("") == 2
    assert "error: there is nothing at ghost\n" in done.stderr
    assert done.stderr.endswith("2 of 4 datasets failed: bad, ghost\n")


@pytest.mark.parametrize(
    ("names", "code"),
    [("cartpole cartpole.h5", 0), ("bad cartpole", 3), ("cartpole log.csv", 1), ("bad log.csv", 3), ("bad ghost", 4)],
)
def test_the_exit_code_is_the_highest(bad, shell, names, code):
    assert shell(f"rbtool check {names}", bad).returncode == code


@pytest.mark.parametrize("verb", ["check", "inspect"])
def test_the_document_has_that_of_each_by_its_name(shell, verb):
    single = json.loads(shell(f"rbtool {verb} cartpole --json").stdout)
    done = shell(f"rbtool {verb} cartpole ghost minari:cartpole/scripted-v0 cartpole --json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["kind"], document["verb"]) == (4, 1, "datasets", verb)
    found = document["datasets"]
    assert list(found) == ["cartpole", "ghost", "minari:cartpole/scripted-v0"]
    assert found["ghost"]["error"]["exit_code"] == 4
    assert {**found["cartpole"], "seconds": 0} == {**single, "seconds": 0}


def test_nothing_is_above_the_first_that_can_be_shown(shell):
    done = shell("rbtool check ghost cartpole")
    assert done.stdout.splitlines()[0] == "cartpole"
    assert "failed" not in shell("rbtool check 'ghost*'").stderr


def test_one_dataset_keeps_its_form(shell):
    assert json.loads(shell("rbtool check cartpole --json").stdout)["kind"] == "check"
    assert shell("rbtool inspect cartpole -q").stdout == "cartpole\n"


def test_a_pattern_in_quotes_is_expanded_and_has_the_form_of_several(shell):
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


def test_a_name_with_the_letters_of_a_pattern_is_a_name(folder, shell):
    (folder / "cartpole").rename(folder / "a[1]*")
    assert shell("rbtool inspect 'a[1]*' -q", folder).stdout == "a[1]*\n"


def test_summaries_follow_each_other_and_episodes_are_named(shell):
    lines = shell("rbtool inspect cartpole cartpole.h5").stdout.splitlines()
    assert [line.split("   ")[0] for line in lines if "4,864 steps" in line] == ["cartpole", "cartpole.h5"]
    assert lines[lines.index("") + 1].startswith("cartpole.h5   checkpoint")
    shown = shell("rbtool inspect cartpole cartpole.h5 --episode 3 --head 1").stdout.splitlines()
    assert [line for line in shown if line.startswith("cartpole")] == ["cartpole", "cartpole.h5"]


def test_an_error_that_does_not_name_its_dataset_gets_the_name(shell):
    done = shell("rbtool inspect cartpole log.csv --episode 99")
    assert done.returncode == 2
    assert "error: cartpole: episode 99 is not there" in done.stderr


def test_an_empty_word_among_others_is_refused(shell):
    done = shell("rbtool check cartpole ''")
    assert (done.returncode, done.stdout) == (2, "")
    assert "one of the datasets is empty" in done.stderr
