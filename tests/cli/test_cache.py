"""`rbtool cache`: what it shows, and that it removes nothing without consent."""

from __future__ import annotations

import datetime
import json

import pytest
from cases import each
from processes import QUESTION, type_line

from rbtool.cli.cache import last_use
from rbtool.core.format import fs
from rbtool.core.format.manifest import MANIFEST
from rbtool.core.remote.originals import Originals
from rbtool.core.testing.datasets import write_walks

STORED = "minari:cartpole/scripted-v0"
NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)


@pytest.fixture
def leftover(folder):
    """A folder that a killed process left in the store."""
    path = folder / "home" / "minari" / "cartpole" / ".scripted-v0.rbtool-new-01234567"
    write_walks(path, [(2, "open")])
    return path


@pytest.fixture
def asked(folder, environment, real):
    """Run a line of bash in a terminal and answer its question (None interrupts); return code and what was shown."""

    def run(line: str, answer: str | None) -> tuple[int, str]:
        places = {"RBTOOL_HOME": str(folder / "home"), "TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": "1"}
        code, shown = type_line(line, folder, environment | places | (real if answer is None else {}), answer)
        return code, shown.replace("\r", "")

    return run


def test_the_listing_shows_bytes_use_and_leftovers(folder, leftover, shell):
    done = shell("rbtool cache ls", folder)
    assert done.returncode == 0
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    assert done.stdout.splitlines()[0].split("  ")[0].rstrip() == "name"
    assert [(row[0], row[1].strip()) for row in rows[1:]] == [(STORED, "dataset"), (STORED, "leftover")]
    assert "just now" in done.stdout or "ago" in done.stdout
    assert done.stdout.endswith("prune removes it\n")
    found = json.loads(shell("rbtool cache ls --json", folder).stdout)
    assert (found["schema"], found["kind"], found["prunable_bytes"]) == (1, "cache ls", found["entries"][1]["bytes"])
    assert "1 dataset " in done.stderr
    assert "prune would free" in done.stderr


def test_quiet_lists_datasets_and_warns_of_problems(folder, leftover, shell):
    (folder / "home" / "minari" / "cartpole" / "scripted-v0" / MANIFEST).write_text("{")
    done = shell("rbtool cache ls -q", folder)
    assert done.stdout == f"{STORED}\n"
    assert done.stderr.startswith(f"warning: {STORED} cannot be read: ")


@pytest.mark.parametrize("verb", [f"rm {STORED}", "prune"])
@pytest.mark.parametrize("option", ["", "--json", "-q"])
def test_nothing_is_removed_without_a_terminal_or_yes(folder, leftover, shell, verb, option):
    done = shell(f"rbtool cache {verb} {option}", folder)
    assert done.returncode == 2
    assert "there is no terminal" in done.stderr
    assert "hint: add --yes" in done.stderr
    assert leftover.exists()
    assert (folder / "home" / "minari" / "cartpole" / "scripted-v0").exists()


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False),
                                              ("yep\n", False), ("\x04", False)])  # fmt: skip
def test_a_terminal_asks_one_question(folder, leftover, asked, answer, goes):
    code, shown = asked("rbtool cache prune", answer)
    assert shown.count("?") == 1
    assert "remove 1 leftover (" in shown
    assert leftover.exists() == (not goes)
    assert (code, "nothing was removed" in shown) == ((0, False) if goes else (1, True))


def test_an_interrupted_question_removes_nothing(folder, leftover, asked):
    code, shown = asked(f"rbtool cache rm {STORED}", None)
    assert (code, "error: interrupted" in shown) == (130, True)
    assert (folder / "home" / "minari" / "cartpole" / "scripted-v0").exists()
    code, shown = asked(f"rbtool cache rm {STORED} --json > out", "y\n")
    assert (code, "remove 1 dataset (" in shown) == (0, True)
    assert [entry["name"] for entry in json.loads((folder / "out").read_text())["removed"]] == [STORED]
    assert leftover.exists() is False  # what lay beside the dataset for the same place goes, too


def test_yes_asks_no_question(folder, leftover, asked):
    code, shown = asked("rbtool cache prune --yes", "")
    assert (code, QUESTION in shown, leftover.exists()) == (0, False, False)


def test_a_dry_run_needs_no_yes_and_removes_nothing(folder, leftover, shell):
    for verb, name in ((f"rm {STORED}", "dataset"), ("prune", "leftover")):
        done = shell(f"rbtool cache {verb} --dry-run", folder)
        assert done.returncode == 0
        assert f"  {name}  " in done.stdout
        assert "nothing was removed; this would remove 1 " in done.stderr
    assert leftover.exists()


def test_several_can_be_removed_in_a_pipe(folder, shell):
    write_walks(folder / "home" / "mine" / "a b", [(2, "open")])
    done = shell("rbtool cache ls -q | tr '\\n' '\\0' | xargs -0 rbtool cache rm --yes -q", folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{STORED}\nmine:a b\n", "")
    assert not shell("rbtool cache ls -q", folder).stdout


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("rm minari:nope-v0 --yes", 4, "minari:nope-v0 is not in "),
        ("rm ./cartpole --yes", 2, "./cartpole is not below the root "),
        ("rm '' --yes", 2, "one of the names is empty"),
        ("rm --yes", 2, "missing argument"),
        ("verify minari:nope-v0", 4, "minari:nope-v0 is not in "),
        ("ls --root prep.py", 2, "is not a folder"),
        ("prune --root prep.py --yes", 2, "is not a folder"),
    ],
)
def test_impossible_requests_are_refused(folder, shell, line, code, said):
    done = shell(f"rbtool cache {line}", folder)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert (folder / "home" / "minari" / "cartpole" / "scripted-v0").exists()


def test_verify_prints_a_line_per_problem_and_exits_with_3(folder, shell):
    assert shell("rbtool cache verify", folder).returncode == 0
    original = Originals(folder / "home", "minari", "pen-v1")
    fs.make_folder(original.folder)
    (original.folder / "fetched.json").write_text("{")
    (folder / "home" / "minari" / "cartpole" / "scripted-v0" / "action.memmap").write_bytes(b"")
    done = shell("rbtool cache verify", folder)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["damaged", STORED], ["damaged", "minari:pen-v1"]]
    assert lines[2].startswith("2 problems in 1 dataset · 1 original · ")
    assert shell("rbtool cache verify -q", folder).stdout == f"{STORED}\nminari:pen-v1\n"


def test_lines_fit_a_narrow_screen(folder, leftover, asked):
    code, shown = asked("stty cols 62; export COLUMNS=62; rbtool cache ls", "")
    assert code == 0
    assert max(len(line) for line in shown.splitlines() if str(folder) not in line) <= 62


@each(
    ("time", "said"),
    [
        ("2026-11-21T11:59:30+00:00", "just now"),
        ("2026-11-21T12:30:00+00:00", "just now"),  # a clock that is ahead
        ("2026-11-21T11:59:00+00:00", "1 minute ago"),
        ("2026-11-21T11:01:00+00:00", "59 minutes ago"),
        ("2026-11-21T10:00:01+00:00", "1 hour ago"),
        ("2026-11-20T12:00:00+00:00", "1 day ago"),
        ("2026-11-18T12:00:00+00:00", "3 days ago"),
        ("2026-09-21T12:00:00+00:00", "2026-09-21"),
        ("2020-01-02T03:04:05+00:00", "2020-01-02"),
    ],
)
def test_the_last_use_is_relative_to_now(time, said):
    assert last_use(time, NOW) == said
