"""`--help`, habits of other tools, and options of tables."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cases import each

import rbtool
from rbtool.cli.help import _with_map_spread
from rbtool.cli.words import SECTIONS, in_order

VERBS = [
    "list", "download", "convert", "record", "preprocess", "clean", "merge", "split", "mix", "inspect", "stats", "plot",
    "frames", "report", "sample", "score", "diff", "check", "demo", "env", "migrate",
]  # fmt: skip
GROUPS = ["checkpoint", "cache"]
SUB_VERBS = [
    "checkpoint save", "checkpoint load", "checkpoint verify", "cache ls", "cache rm", "cache prune", "cache verify",
]  # fmt: skip
PAGES = ["", *GROUPS, *VERBS, *SUB_VERBS]
SLOW_TO_LOAD = {"h5py", "minari", "numpy", "pyarrow", "pydantic", "rich", "tensordict", "torch"}

SHOWN = """
import contextlib, io, json, sys
from rbtool.cli.start import main
shown = {{}}
for page in {pages!r}:
    sys.argv = ["rbtool", *page.split(), "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    found = sorted(set(sys.modules) & {slow!r})
    assert not found, (page, found)
    shown[page] = text.getvalue()
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def pages(variables):
    """The text of every page, from a process that must not import slow modules."""
    code = SHOWN.format(pages=PAGES, slow=SLOW_TO_LOAD)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_help_pages_end_with_examples(pages):
    for page, text in pages.items():
        head, _, examples = text.partition("\nExamples:\n")
        assert head.startswith(f"Usage: {f'rbtool {page}'.strip()} ")
        assert all(line.startswith("  ") for line in examples.splitlines()), page
        assert f"rbtool {page}".strip() in examples


@pytest.mark.parametrize("page", ["", *GROUPS])
def test_a_page_of_verbs_is_shown_without_one_and_cuts_no_description(page, environment, pages, shell):
    done = subprocess.run(
        f"rbtool {page} --help", shell=True, env=environment | {"COLUMNS": "60"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    titles = ["Commands"] if page else SECTIONS
    verbs = [done.stdout.partition(f"\n{title}:\n")[2].partition("\n\n")[0] for title in titles]
    assert all(text.endswith(".") for text in verbs)
    assert not [cut for cut in ("...", "…") for text in verbs if cut in text]
    done = shell(f"rbtool {page}")
    assert (done.returncode, done.stdout) == (0, pages[page])


def test_every_verb_has_the_same_common_options(pages):
    for page in (*VERBS, *SUB_VERBS):
        common = pages[page].partition("Options of every verb:\n")[2].partition("\n\n")[0]
        assert common in pages["list"], page
        for option in ("--json", "-q", "-v", "--debug", "--log-file", "--no-color", "-h"):
            assert option in common, page


def test_verbs_that_write_have_force_and_those_that_remove_have_yes(pages):
    writing = [
        "convert", "download", "preprocess", "clean", "merge", "mix", "split", "checkpoint save", "checkpoint load",
    ]  # fmt: skip
    assert [page for page in writing if "--dry-run" not in pages[page] or "--force" not in pages[page]] == []
    removing = ["cache rm", "cache prune"]
    assert [page for page in removing if "--dry-run" not in pages[page] or "--yes" not in pages[page]] == []


def test_the_version_and_the_exit_codes_are_shown(shell, pages):
    assert shell("rbtool --version").stdout == f"rbtool {rbtool.__version__}\n"
    assert shell("python -m rbtool --version").stdout == f"rbtool {rbtool.__version__}\n"
    codes = pages[""].partition("Exit codes:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in codes.splitlines()] == ["0", "1", "2", "3", "4", "5", "6", "129", "130", "143"]


# Habits of other tools.

ESCAPE = "\x1b"
WORDS = {"cache", "checkpoint"}


@each(
    ("typed", "parsed"),
    [
        ("", ""), ("inspect x --json", "inspect x --json"), ("--json inspect x", "inspect --json x"),
        ("-q --log-file f --root=d cache ls", "cache ls -q --log-file f --root=d"), ("--json", "--json"),
        ("--color always cache --help", "cache --color always --help"), ("--bogus inspect", "--bogus inspect"),
        ("help", "--help"), ("-v help inspect", "inspect --help"), ("help cache rm", "cache rm --help"),
        ("help show", "inspect --help"), ("help rm", "cache rm --help"), ("ls", "list"), ("-V", "-V"),
        ("--json show help", "inspect --json help"), ("rm x --yes", "cache rm x --yes"),
        ("list remote minari door", "list --remote minari door"), ("list remote", "list --remote"),
        ("ls --refresh remote minari", "list --refresh --remote minari"), ("list door remote", "list door remote"),
        ("check remote", "check remote"),
    ],
)  # fmt: skip
def test_words_are_reordered_for_the_parser(typed, parsed):
    assert in_order(typed.split(), WORDS) == parsed.split()


@each(("short", "verb"), [("-V", "--version"), ("help cache rm", "cache rm --help")])
def test_a_short_form_does_what_the_verb_does(short, verb, shell):
    done, other = shell(f"rbtool {short}"), shell(f"rbtool {verb}")
    assert (done.returncode, done.stdout) == (0, other.stdout)


def test_common_options_may_precede_the_verb(shell):
    expected = json.loads(shell("rbtool inspect cartpole --json").stdout)
    for line in ("--json show cartpole", "--json inspect cartpole", "show --json cartpole"):
        assert json.loads(shell(f"rbtool {line}").stdout) == expected


@each(
    ("option", "forcing", "coloured"),
    [
        ("--color always", {}, True), ("--color always", {"NO_COLOR": "1"}, True),
        ("--color auto", {"FORCE_COLOR": "1"}, True), ("--color auto", {}, False),
        ("--color never", {"FORCE_COLOR": "1"}, False), ("--color always --no-color", {}, False),
    ],
)  # fmt: skip
def test_options_force_and_forbid_colours(option, forcing, coloured, shell):
    assert (ESCAPE in shell(f"rbtool inspect cartpole {option}", **forcing).stdout) is coloured


def test_no_progress_writes_no_counts(folder, shell):
    done = shell("rbtool convert minari/tuple/trunc-v0 quiet-progress --no-progress", folder)
    assert (done.returncode, done.stdout) == (0, "quiet-progress\n")
    assert " done (" not in done.stderr
    assert "%" not in done.stderr
    assert "step" in done.stderr


# The options of tables.

ROWS = "obs_0,obs_1,act,r,terminals,timeouts\n0,1,2,3,0,0\n1,2,3,4,0,1\n5,6,7,8,0,0\n6,7,8,9,1,0\n"


@each(
    ("words", "pairs"),
    [
        ("a b --map x=1 y=2 z=3 --ends q", "a b --map x=1 --map y=2 --map z=3 --ends q"),
        ("a b --map x=1 --map y=2 z=3", "a b --map x=1 --map y=2 --map z=3"),
        ("--map x=1 y=2 a b", "--map x=1 --map y=2 a b"), ("--map x=1 a=b/c.csv", "--map x=1 --map a=b/c.csv"),
        ("--map map.toml a b", "--map map.toml a b"), ("--map map.toml y=2", "--map map.toml y=2"),
        ("a b=c --ends x=1 y=2", "a b=c --ends x=1 y=2"), ("--map x=1 -- y=2", "--map x=1 -- y=2"),
        ("a --map", "a --map"),
    ],
)  # fmt: skip
def test_pairs_after_map_are_maps(words: str, pairs: str) -> None:
    assert _with_map_spread(words.split()) == pairs.split()


def test_a_table_is_converted_with_one_map(shell: Any, tmp_path: Any) -> None:
    table, dest = tmp_path / "steps.csv", tmp_path / "made"
    table.write_text(ROWS)
    line = "--from table --map observation=obs_0,obs_1 action=act reward=r --ends terminals,timeouts -q"
    made = shell(f"rbtool convert {table} {dest} {line}")
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{dest}\n", "")


def test_a_table_of_objects_is_converted_with_trust(shell: Any, tmp_path: Any) -> None:
    table, dest = tmp_path / "steps.npz", tmp_path / "made"
    np.savez(table, obs=np.array([1, 2, 3], object), act=np.arange(3.0))
    line = f"rbtool convert {table} {dest} --from table --ends - -q --map observation=obs action=act"
    refused = shell(line)
    assert (refused.returncode, dest.exists()) == (2, False)
    assert "column 'obs' is a pickle of Python objects" in refused.stderr
    assert "--trust-pickle" in refused.stderr
    made = shell(f"{line} --trust-pickle")
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{dest}\n", "")


def test_an_option_that_a_format_lacks_is_named_with_dashes(shell: Any, tmp_path: Any) -> None:
    for option, value in (("--trust-pickle", ""), ("--filter-key", "train"), ("--episode-key", "e")):
        answer = shell(f"rbtool inspect ./minari/pendulum/random-v0 {option} {value}")
        assert answer.returncode == 2
        assert f"has no option {option}\n" in answer.stderr
