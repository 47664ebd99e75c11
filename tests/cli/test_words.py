"""Habits of other tools: `help VERB`, options before the verb, short names of verbs, `--color`, `--offline`."""

from __future__ import annotations

import json

import pytest

from rbtool.cli.words import in_order

ESCAPE = "\x1b"
GROUPS = {"cache", "checkpoint"}


@pytest.mark.parametrize(
    ("typed", "parsed"),
    [
        ("", ""),
        ("inspect x --json", "inspect x --json"),
        ("--json inspect x", "inspect --json x"),
        ("-q --log-file f --root=d cache ls", "cache ls -q --log-file f --root=d"),
        ("--color always cache --help", "cache --color always --help"),
        ("--json", "--json"),
        ("--bogus inspect", "--bogus inspect"),
        ("help", "--help"),
        ("-v help inspect", "inspect --help"),
        ("help cache rm", "cache rm --help"),
        ("help show", "inspect --help"),
        ("help rm", "cache rm --help"),
        ("ls", "list"),
        ("--json show help", "inspect --json help"),
        ("rm x --yes", "cache rm x --yes"),
        ("-V", "-V"),
        ("list remote minari door", "list --remote minari door"),
        ("ls --refresh remote minari", "list --refresh --remote minari"),
        ("list remote", "list --remote"),
        ("list door remote", "list door remote"),
        ("check remote", "check remote"),
    ],
)
def test_words_are_put_in_the_order_of_the_parser(typed, parsed):
    assert in_order(typed.split(), GROUPS) == parsed.split()


@pytest.mark.parametrize(("short", "verb"), [("-V", "--version"), ("help cache rm", "cache rm --help")])
def test_a_short_form_does_what_the_verb_does(short, verb, shell):
    done, other = shell(f"rbtool {short}"), shell(f"rbtool {verb}")
    assert (done.returncode, done.stdout) == (0, other.stdout)


@pytest.mark.parametrize("line", ["--json show cartpole", "--json inspect cartpole", "show --json cartpole"])
def test_options_of_every_verb_may_stand_before_it(line, shell):
    assert json.loads(shell(f"rbtool {line}").stdout) == json.loads(shell("rbtool inspect cartpole --json").stdout)


def test_help_for_an_unknown_verb_names_a_near_one(shell):
    done = shell("rbtool help inspct")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, "error: no such command 'inspct'. Did you mean 'inspect'?",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "forcing", "coloured"),
    [
        ("--color always", {}, True),
        ("--color always", {"NO_COLOR": "1"}, True),
        ("--color auto", {"FORCE_COLOR": "1"}, True),
        ("--color auto", {}, False),
        ("--color never", {"FORCE_COLOR": "1"}, False),
        ("--color always --no-color", {}, False),
    ],
)
def test_colour_is_chosen(option, forcing, coloured, shell):
    assert (ESCAPE in shell(f"rbtool inspect cartpole {option}", **forcing).stdout) is coloured


def test_an_unknown_colour_is_refused(shell):
    done = shell("rbtool list --color sometimes")
    assert done.returncode == 2
    assert "'sometimes' is not one of auto, always, never" in done.stderr


def test_without_progress_the_result_is_the_same_and_no_count_is_written(shell):
    done = shell("rbtool convert minari/tuple/trunc-v0 quiet-progress --no-progress")
    assert (done.returncode, done.stdout) == (0, "quiet-progress\n")
    assert " done (" not in done.stderr
    assert "%" not in done.stderr
    assert "step" in done.stderr


def test_offline_makes_no_request(shell):
    done = shell("rbtool download minari nobody/there-v0 --offline")
    assert done.returncode == 5
    assert "RBTOOL_OFFLINE=1 forbids" in done.stderr
    assert "--offline" in done.stderr
