"""stdout carries the result and nothing else; pipes may close at any time."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
from cases import each
from rich.progress import Task, TaskID

import rbtool
from rbtool.cli import output as output_module
from rbtool.cli.output import LineProgress, Output
from rbtool.core.testing.datasets import write_walks

ESCAPE = "\x1b"


@pytest.fixture(scope="session")
def crowd(tmp_path_factory):
    """A root with so many datasets that their names do not fit into a pipe's buffer."""
    root = tmp_path_factory.mktemp("crowd")
    write_walks(root / "walks" / "first-v0", [(2, "open")])
    for number in range(180):
        name = root / "walks" / ("long-" * 45) / f"{'long-' * 45}{number:04}-v0"
        shutil.copytree(root / "walks" / "first-v0" / ".rbtool", name / ".rbtool")
    return root


@pytest.mark.parametrize(
    "line",
    ["rbtool list -q | head -1", "rbtool list | head -c 10", "rbtool list --json | true", "rbtool list -v | head -1"],
)
def test_a_reader_of_a_large_output_may_go_away(line, crowd, shell, real):
    done = shell(line, RBTOOL_HOME=str(crowd), **real)
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "rbtool sample cartpole -n 5000 --json | head -c 10",
        "{real}rbtool --help | true",
        "{real}rbtool check --help | true",
        "rbtool inspect cartpole --episode 0 | head -1",
        "rbtool convert minari/tuple/trunc-v0 there -v 2>&1 | true",
        "rbtool convert minari/tuple/trunc-v0 there 2> >(true)",
    ],
)
def test_a_pipe_that_closes_is_no_failure(line, folder, shell, real):
    done = shell(line.removeprefix("{real}"), folder, **(real if line.startswith("{real}") else {}))
    assert (done.returncode, done.stderr) == (0, "")


@each(
    ("line", "code"),
    [
        ("list >&-", 0),
        ("list >&- 2>&- <&-", 0),
        ("--help >&-", 0),
        ("inspect nothing 2>&-", 4),
        ("list --json 2>&-", 0),
    ],
)
def test_streams_may_be_closed(line, code, shell, real):
    done = shell(f"rbtool {line}", **real)
    assert done.returncode == code
    assert "rror" not in done.stderr


def test_messages_never_get_into_data_if_streams_are_closed(folder, shell, real):
    assert shell("rbtool convert minari/tuple/trunc-v0 there >&- 2>&- <&-", folder, **real).returncode == 0
    assert rbtool.check(folder / "there").errors == 0


@pytest.mark.parametrize(
    ("place", "pattern", "told"),
    [
        ("nothing", "", "no datasets in the store: no folder {root}"),
        ("empty", "", "no datasets in the store: none below {root}"),
        ("empty", "door", "0 datasets below {root} with a name like door"),
    ],
)
def test_an_empty_store_is_explained(place, pattern, told, shell, tmp_path):
    (tmp_path / "empty").mkdir()
    done = shell(f"rbtool list {pattern} --root {tmp_path}/{place}")
    assert (done.returncode, done.stdout) == (0, "")
    first, second = done.stderr.splitlines()
    assert first == told.format(root=tmp_path / place)
    assert "named by their path, as in rbtool inspect" in second


def test_differences_are_listed_by_side(folder, shell):
    shell("rbtool convert minari/cartpole/scripted-v0 few --episodes 0:2", folder)
    few = rbtool.inspect(folder / "few").steps
    done = shell("rbtool checkpoint verify cartpole.h5 few", folder)
    assert done.returncode == 3
    assert f"differs  steps: checkpoint 4,864, dataset {few:,}\n" in done.stdout
    assert "differs  text of episodes: checkpoint " in done.stdout
    assert "episodes_text" not in done.stdout


def test_a_conversion_goes_on_after_its_reader_has_gone(folder, shell):
    shell("rbtool convert minari/tuple/trunc-v0 there -v 2>&1 | true", folder)
    assert rbtool.inspect(folder / "there").steps == 48


def test_a_closed_pipe_does_not_hide_a_failed_check(folder, shell):
    leaf = folder / "cartpole" / "action.memmap"
    leaf.write_bytes(bytes(leaf.stat().st_size))
    assert shell("rbtool check cartpole | true", folder).returncode == 3


def test_output_of_verbs_can_be_piped(folder, shell):
    line = 'rbtool inspect "$(rbtool download minari cartpole/scripted-v0 --local -q)" --json | jq .steps'
    assert shell(line).stdout == "4864\n"
    line = "rbtool list -q | xargs -I{} rbtool checkpoint save {} saved.h5 --as h5 -q"
    assert shell(line, folder).stdout == "saved.h5\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("rbtool convert minari/tuple/trunc-v0 there", "there\n"),
        ("rbtool convert minari/tuple/trunc-v0 there -q", "there\n"),
        ("rbtool preprocess cartpole --fn prep.py:normalise --dest there --num-workers 0", "there\n"),
        ("rbtool checkpoint save cartpole there --as flat", "there\n"),
        ("rbtool checkpoint save cartpole there --as h5 --for torchrl", "there\n"),
        ("rbtool checkpoint load cartpole.h5 there", "there\n"),
        ("rbtool download minari tuple/trunc-v0 --local", "{}/home/minari/tuple/trunc-v0\n"),
        ("rbtool inspect cartpole -q", "cartpole\n"),
        ("rbtool list -q", "minari:cartpole/scripted-v0\n"),
        ("rbtool check cartpole -q", "EPI004\n"),  # episodes of one step
        ("rbtool checkpoint verify cartpole.h5 cartpole -q", ""),
    ],
)
def test_stdout_has_the_result_alone(line, shown, folder, shell):
    done = shell(line, folder)
    assert (done.returncode, done.stdout) == (0, shown.format(folder))
    assert ESCAPE not in done.stderr
    assert (done.stderr == "") == (" -q" in line)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("rbtool convert minari/tuple/trunc-v0 there", "convert"),
        ("rbtool download minari tuple/trunc-v0 --local", "download"),
        ("rbtool preprocess cartpole --fn prep.py:normalise --dest there --num-workers 0", "preprocess"),
        ("rbtool checkpoint save cartpole there --as flat", "checkpoint save"),
        ("rbtool checkpoint load cartpole.h5 there", "checkpoint load"),
        ("rbtool checkpoint verify cartpole.h5 cartpole", "checkpoint verify"),
        ("rbtool inspect cartpole --episode 1 --head 2", "inspect"),
        ("rbtool check cartpole", "check"),
        ("rbtool sample cartpole -n 3", "sample"),
        ("rbtool list", "list"),
    ],
)
def test_every_verb_has_a_strict_document(line, kind, folder, shell):
    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")

    done = shell(f"{line} --json", folder)
    document = json.loads(done.stdout, parse_constant=refuse)
    assert list(document)[:2] == ["schema", "kind"]
    assert (document["schema"], document["kind"]) == (1, kind)


@pytest.mark.parametrize("form", ["convert minari/tuple/trunc-v0 there", "checkpoint load cartpole.h5 there"])
def test_a_dry_run_writes_nothing(form, folder, shell):
    done = shell(f"rbtool {form} --dry-run", folder)
    assert (done.returncode, done.stdout) == (0, "there\n")
    assert "nothing was written" in done.stderr
    assert not (folder / "there").exists()


def test_variables_force_and_forbid_colours(shell):
    on = {"FORCE_COLOR": "1"}
    for variables, coloured in (
        ({}, False), (on, True), ({"CLICOLOR_FORCE": "1"}, True), ({"FORCE_COLOR": "0"}, False),
        (on | {"NO_COLOR": "1"}, False),
    ):  # fmt: skip
        assert (ESCAPE in shell("rbtool inspect cartpole", **variables).stdout) is coloured, variables


def test_an_ascii_stdout_gets_ascii_charts(shell, real):
    done = shell("rbtool inspect cartpole", PYTHONIOENCODING="ascii", **real)
    assert done.returncode == 0, done.stderr
    assert "|" in done.stdout
    assert done.stdout.isascii()


def test_a_file_name_that_is_not_utf8_is_written_as_its_bytes(folder, shell):
    (folder / "caf\udce9").symlink_to(folder / "cartpole")  # not UTF-8
    done = shell('name=$(rbtool inspect caf* -q) && test -d "$name" && rbtool inspect caf* --json | jq .steps', folder)
    assert done.stdout == "4864\n"


def test_control_characters_of_data_do_not_reach_the_terminal(folder, shell):
    shutil.copytree(folder / "cartpole", folder / "home" / "minari" / "a\x1b[31mb")
    assert ESCAPE not in shell("rbtool list", folder).stdout
    assert r"a\x1b[31mb" in shell("rbtool list", folder, FORCE_COLOR="1").stdout


STEERING = "a\x1b[31m\x9b2J\u202eb\nerror: c\x7f"


@pytest.mark.parametrize("line", ["list", "list -q", "list --json", "cache ls", "cache ls --json", "inspect */*/a* -q"])
def test_control_characters_in_names_are_escaped(line, folder, shell):
    shutil.copytree(folder / "cartpole", folder / "home" / "minari" / STEERING)
    done = shell(f"rbtool {line}", folder)
    assert done.returncode == 0, done.stderr
    for said in (done.stdout, done.stderr):
        assert not set("\x1b\x9b\u202e\x7f") & set(said)
        assert not any(part.startswith("error: c") for part in said.splitlines())


def test_a_document_has_names_unchanged(folder, shell):
    shutil.copytree(folder / "cartpole", folder / "home" / "minari" / STEERING)
    names = [entry["name"] for entry in json.loads(shell("rbtool list --json", folder).stdout)["datasets"]]
    assert f"minari:{STEERING}" in names


@pytest.mark.parametrize("options", ["", "--debug", "-v", "--json"])
def test_control_characters_in_errors_and_logs_are_escaped(options, folder, shell):
    done = shell(f"rbtool inspect $'./n\\x1b[31m\\u009b2J\\u202e\\x7f' {options} --log-file log", folder)
    assert done.returncode == 4
    for said in (done.stdout, done.stderr, (folder / "log").read_text()):
        assert not set("\x1b\x9b\u202e\x7f") & set(said)


def test_a_note_is_one_line(capsys):
    with Output().progress() as progress:
        progress.note(f"left out: {STEERING}")
    assert capsys.readouterr().err == r"left out: a\x1b[31m\x9b2J\u202eb\nerror: c\x7f" + "\n"


def test_a_quiet_list_warns_of_unreadable_datasets(folder, shell):
    manifest = folder / "home" / "minari" / "broken" / ".rbtool" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{")
    done = shell("rbtool list -q", folder)
    assert done.stdout == "minari:cartpole/scripted-v0\n"
    assert "warning: minari:broken cannot be read" in done.stderr
    assert "minari:broken" in shell("rbtool list", folder).stdout


def test_verbose_adds_messages_on_stderr(shell):
    done = shell("rbtool list -q -v")
    assert "exit code 0 after" in done.stderr
    assert done.stdout == shell("rbtool list -q").stdout


def test_output_can_be_written_to_memory(monkeypatch):
    gathered = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in gathered.items():
        monkeypatch.setattr(sys, name, stream)
    output = Output(as_json=True)
    output.warn("caf\u00e9")
    output.fail({"message": "it failed", "hint": "", "type": "UsageError", "exit_code": 2})
    assert gathered["stderr"].getvalue() == "warning: caf\u00e9\nerror: it failed\n"
    assert json.loads(gathered["stdout"].getvalue())["error"]["exit_code"] == 2


# Progress in a log.


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(output_module, "time", clock)
    return clock


def test_slow_work_has_a_line_at_each_tenth(clock):
    progress = LineProgress((lines := []).append, lines.append)
    progress.start("converting", 1000, "steps")
    clock.now = 5
    for _ in range(1000):
        progress.advance(1)
    progress.done()
    assert [line.partition(" (")[0] for line in lines] == [f"converting {n}0 %" for n in range(1, 11)]
    assert lines[0] == "converting 10 % (100 of 1,000 steps, 20 steps/s, 0:45 left)"
    assert lines[-1] == "converting 100 % (1,000 of 1,000 steps)"


@each(
    ("stage", "advances", "expected"),
    [
        (("converting", 100_000, "steps"), [(3600, 10_000)],
         ["converting 10 % (10,000 of 100,000 steps, 3 steps/s, 9:00:00 left)"]),
        (("converting", 1000, "steps"), [(0, 100)] * 10, ["converting 100 % (1,000 of 1,000 steps)"]),
        (("hashing", 50_000_000, "bytes"), [(2, 20_000_000), (2, 30_000_000)],
         ["hashing 40 % (20.0 MB of 50.0 MB, 10.0 MB/s, 0:03 left)", "hashing 100 % (50.0 MB of 50.0 MB)"]),
        (("converting", 0, "steps"), [(0, 0)], []),
        (("looking over", None, "episodes"), [(0, 1)], ["looked over 1 episode"]),
        (("looking over", None, "episodes"), [(0, 4)], ["looked over 4 episodes"]),
        (("reading", None, "episodes"), [(0, 1)], ["reading done (1 episode)"]),
        (("reading", None, "steps"), [(0, 1234)], ["reading done (1,234 steps)"]),
    ],
)  # fmt: skip
def test_a_log_has_few_lines_of_a_stage(stage, advances, expected, clock):
    lines, clock.now = [], 0
    progress = LineProgress(lines.append, lines.append)
    progress.start(*stage)
    for now, amount in advances:
        clock.now = now
        progress.advance(amount)
    progress.done()
    assert lines == expected


def test_each_stage_is_counted_separately(clock):
    progress = LineProgress((lines := []).append, lines.append)
    for label in ("one", "two"):
        progress.start(label, 2, "steps")
        progress.advance(2)
        progress.done("all well")
    progress.note("a word")
    assert lines == [
        "one 100 % (2 of 2 steps)", "one done (all well)", "two 100 % (2 of 2 steps)", "two done (all well)", "a word",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, "  converting                 2.5 MB ━━━━━━━━━━━━━━━━━━━━  50 % 12.1 MB/s  0:03 left"),
        (80, "  converting          2.5 MB ━━━━━━━━━━━━━━━━━  50 % 12.1 MB/s  0:03 left"),
        (60, "  converting          2.5 MB ━━━━━━━━  50 % 0:03 left"),
        (48, "  converting          2.5 MB ━━━━━━━━  50 %"),
        (40, "  converting          2.5 MB  50 %"),
    ],
)
def test_a_narrow_terminal_keeps_percent_and_size(width, shown):
    fields = {"count": "2.5 MB", "speed": "12.1 MB/s  0:03 left"}
    task = Task(TaskID(0), "converting", 5_000_000, 2_500_000, _get_time=time.monotonic, fields=fields)
    assert output_module._stage_line(task, width).plain == shown
    assert len(shown) <= width
