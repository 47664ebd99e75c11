"""What `--help` says, how it ends, and what is not loaded for it."""

from __future__ import annotations

import subprocess

import pytest

import rbtool

VERBS = [
    "list", "download", "convert", "record", "preprocess", "merge", "split", "mix", "inspect", "stats", "plot",
    "frames", "report", "sample", "diff", "check", "demo",
]  # fmt: skip
GROUPS = ["checkpoint", "cache"]
SUB_VERBS = [
    "checkpoint save", "checkpoint load", "checkpoint verify", "cache ls", "cache rm", "cache prune", "cache verify",
]  # fmt: skip
PAGES = ["", *GROUPS, *VERBS, *SUB_VERBS]
SLOW_TO_LOAD = {"h5py", "minari", "numpy", "pyarrow", "pydantic", "rich", "tensordict", "torch"}

LOADED = """
import sys
sys.argv = ["rbtool", *{words!r}]
from rbtool.cli.app import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(*sorted(set(sys.modules) & {slow!r}))
"""


@pytest.fixture(scope="module")
def pages(environment):
    """The text of every page."""
    found = {}
    for page in PAGES:
        line = f"rbtool {page} --help"
        done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        found[page] = done.stdout
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_help_page_ends_with_examples(page, pages):
    head, _, examples = pages[page].partition("\nExamples:\n")
    assert head.startswith(f"Usage: {f'rbtool {page}'.strip()} ")
    assert all(line.startswith("  ") for line in examples.splitlines())
    assert f"rbtool {page}".strip() in examples


@pytest.mark.parametrize("page", PAGES)
def test_a_help_page_loads_nothing_slow(page, shell, tmp_path):
    (tmp_path / "loaded.py").write_text(LOADED.format(words=[*page.split(), "--help"], slow=SLOW_TO_LOAD))
    done = shell(f"python {tmp_path}/loaded.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("page", ["", *GROUPS])
def test_no_description_of_a_verb_is_cut(page, environment):
    done = subprocess.run(
        f"rbtool {page} --help", shell=True, env=environment | {"COLUMNS": "60"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    verbs = done.stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    assert verbs.endswith(".")
    assert not [cut for cut in ("...", "…") if cut in verbs]


@pytest.mark.parametrize("page", ["", *GROUPS])
def test_without_a_verb_the_help_page_is_shown(page, pages, shell):
    done = shell(f"rbtool {page}")
    assert (done.returncode, done.stdout) == (0, pages[page])


@pytest.mark.parametrize("page", [*VERBS, *SUB_VERBS])
def test_every_verb_has_the_same_common_options(page, pages):
    common = pages[page].partition("Options of every verb:\n")[2].partition("\n\n")[0]
    assert common in pages["list"]
    assert all(option in common for option in ("--json", "-q", "-v", "--debug", "--log-file", "--no-color", "-h"))


@pytest.mark.parametrize(
    "page", ["convert", "download", "preprocess", "merge", "mix", "split", "checkpoint save", "checkpoint load"]
)
def test_verbs_that_write_can_be_tried_and_forced(page, pages):
    assert "--dry-run" in pages[page]
    assert "--force" in pages[page]


@pytest.mark.parametrize("page", ["cache rm", "cache prune"])
def test_verbs_that_remove_can_be_tried_and_need_a_yes(page, pages):
    assert "--dry-run" in pages[page]
    assert "--yes" in pages[page]


def test_the_exit_codes_are_listed(pages):
    codes = pages[""].partition("Exit codes:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in codes.splitlines()] == ["0", "1", "2", "3", "4", "5", "6", "129", "130", "143"]


def test_the_version_is_told(shell):
    assert shell("rbtool --version").stdout == f"rbtool {rbtool.__version__}\n"
    assert shell("python -m rbtool --version").stdout == f"rbtool {rbtool.__version__}\n"
