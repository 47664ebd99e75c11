"""What only a terminal shows, in a real pseudo-terminal: colours, moving bars, the next command."""

from __future__ import annotations

import re

import pytest
from loopback import Fault
from processes import type_line

ESCAPE = "\x1b["
BAR = "━"


@pytest.fixture
def terminal(folder, environment):
    """Run a line of bash with stdout and stderr on a pseudo-terminal; return its code and all that was shown."""

    def run(line: str, columns: int = 100, **variables: str) -> tuple[int, str]:
        places = {"RBTOOL_HOME": str(folder / "home"), "TERM": "xterm-256color", "COLUMNS": str(columns)}
        return type_line(line, folder, environment | places | variables)

    return run


def test_a_bar_moves_in_a_terminal(terminal, real):
    code, shown = terminal("rbtool convert minari/cartpole/scripted-v0 there", **real)
    assert code == 0
    for part in (BAR, "converting", "100 %", "try: rbtool inspect there"):
        assert part in shown


def test_the_result_in_a_pipe_stays_bare_while_the_bar_moves(terminal, folder):
    code, shown = terminal("rbtool convert minari/cartpole/scripted-v0 there > out")
    assert code == 0
    assert BAR in shown
    assert (folder / "out").read_text() == "there\n"


def test_no_bar_goes_into_a_log(terminal, folder):
    code, shown = terminal("rbtool convert minari/cartpole/scripted-v0 there 2> log")
    assert (code, shown) == (0, "there\r\n")
    log = (folder / "log").read_text()
    assert ESCAPE not in log
    assert "converting 100 % (4,864 of 4,864 steps)\n" in log


@pytest.mark.parametrize("forbidding", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_variables_forbid_colours_and_bars(terminal, forbidding):
    code, shown = terminal("rbtool convert minari/cartpole/scripted-v0 there; rbtool inspect there", **forbidding)
    assert code == 0
    assert ESCAPE not in shown
    assert "converting 100 %" in shown


def test_bytes_that_are_not_utf8_are_escaped(terminal, folder):
    (folder / "caf\udc9b31m").symlink_to(folder / "cartpole")
    code, shown = terminal("rbtool inspect caf* -q")
    assert (code, shown) == (0, "caf\\x9b31m\r\n")


def test_options_forbid_colours_and_messages(terminal, real):
    assert ESCAPE in terminal("rbtool inspect cartpole", **real)[1]
    assert ESCAPE not in terminal("rbtool inspect cartpole --no-color")[1]
    assert terminal("rbtool convert minari/cartpole/scripted-v0 there -q") == (0, "there\r\n")


def test_lines_fit_a_narrow_terminal(terminal):
    code, shown = terminal("rbtool --help; rbtool list; rbtool inspect cartpole --episode 0 --head 2", 60, NO_COLOR="1")
    assert code == 0
    lines = shown.replace("\r", "").splitlines()  # of which a single word, such as a long path, cannot be folded
    assert max(len(line) for line in lines if "below" not in line and " " in line.strip()) <= 80
    code, shown = terminal("rbtool inspect minari/tuple/trunc-v0", 50, NO_COLOR="1")
    lines = shown.replace("\r", "").splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 50
    assert "         [-1, 1])" in lines
    assert "kB" not in {line.strip() for line in lines}
    code, shown = terminal("rbtool inspect cartpole --episode 0 --head 2", 40, NO_COLOR="1")
    assert code == 0
    starts = [line for line in shown.replace("\r", "").splitlines() if line.startswith(("t = ", "…"))]
    assert starts[:3] == ["t = 0", "t = 1", "…"]
    assert len(starts) == 4


def test_results_fit_the_terminal_and_stay_whole_in_a_pipe(terminal, folder):
    slices = "sample cartpole --sampler slice --slice-len 32 --seed 0"
    lines = ("inspect cartpole", "stats cartpole", slices, "check bad")
    damage = "cp -r cartpole bad; printf x >> bad/observation.memmap; printf x >> bad/action.memmap"
    code, shown = terminal(f"{damage}; " + "; ".join(f"rbtool {line} 2> log" for line in lines), 60, NO_COLOR="1")
    assert code == 3
    lines_shown = [line for line in shown.replace("\r", "").splitlines() if "path=" not in line]  # a word, however long
    assert max(map(len, lines_shown)) <= 60
    table = shown.partition("field ")[2].partition("steps ·")[0]
    assert "…" not in table
    assert all(f" {head}" in table for head in ("dtype", "mean", "std", "min", "q1", "q50", "q99", "max"))
    terminal("rbtool stats cartpole > out; rbtool check bad > found", 60)
    assert max(map(len, (folder / "found").read_text().splitlines())) > 80
    assert "float64" in (folder / "out").read_text()


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_a_narrow_bar_is_one_line(terminal, columns):
    code, shown = terminal("rbtool convert minari/cartpole/scripted-v0 there", columns)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rpartition("\r")[2] for line in shown.split("\r\n")]
    (bar,) = [line for line in lines if "100 %" in line]
    assert (code, len(bar) <= columns) == (0, True)
    assert re.match(rf"  converting +4,864 steps {BAR}+ 100 %", bar)
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("line", ["list", "cache ls"])
def test_a_narrow_listing_keeps_its_columns(terminal, line):
    wide, narrow = (
        terminal(f"rbtool {line}", columns, NO_COLOR="1")[1].partition("1 dataset")[0] for columns in (120, 40)
    )
    assert max(map(len, narrow.splitlines())) <= 40 < max(map(len, wide.splitlines()))
    assert narrow.split() == wide.split()


def test_the_first_episode_of_the_dataset_is_proposed(terminal):
    convert = "rbtool convert minari/cartpole/scripted-v0 'a part' --episodes 3:5 -q"
    code, shown = terminal(f"{convert}; rbtool inspect 'a part'")
    assert code == 0
    assert "try: rbtool inspect 'a part' --episode 3 --head 5" in shown


def test_an_error_ends_the_bar(terminal):
    line = "rbtool preprocess cartpole --fn prep.py:normalise --dest there --num-workers 0 --chunk-size 100"
    broken = "printf 'def normalise(rows):\\n    assert rows[\"episode\"].max() < 9\\n    return rows\\n' > prep.py"
    code, shown = terminal(f"{broken}; {line}")
    assert code == 1
    assert shown.rstrip().splitlines()[-1].startswith(("\x1b[1;31merror: ", "\x1b[36mhint: "))
    assert "Traceback" not in shown


LISTINGS = {
    60: """
dataset                      steps  episodes    size  layout
    created
minari:cartpole/scripted-v0  4,864        12  292 kB  ted
    DATE
1 dataset below ROOT
try: rbtool inspect minari:cartpole/scripted-v0
""",
    80: """
dataset                      steps  episodes    size  layout  created
minari:cartpole/scripted-v0  4,864        12  292 kB  ted     DATE
1 dataset below ROOT
try: rbtool inspect minari:cartpole/scripted-v0
""",
}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_listing_is_a_table_with_the_names_of_its_columns(terminal, columns, tmp_path):
    (tmp_path / "r").symlink_to("work/home")  # a short name, which fits every screen
    code, shown = terminal(f"rbtool list --root {tmp_path}/r", columns, NO_COLOR="1")
    shown = re.sub(r"\d{4}-\d\d-\d\d", "DATE", shown).replace("\r", "")
    joined = re.sub(rf"below\s+{re.escape(str(tmp_path))}/r", "below ROOT", shown)
    assert (code, joined) == (0, LISTINGS[min(columns, 80)].lstrip())


def test_a_source_searched_in_the_store_is_proposed_with_remote(terminal, tmp_path):
    shown = terminal(f"rbtool list d4rl --root {tmp_path}", NO_COLOR="1")[1]
    assert shown.endswith("try: rbtool list --remote d4rl\r\n")


def test_waiting_for_a_slow_server_is_announced(shell, hub, tmp_path) -> None:
    # The first answer never comes, and is announced, given up and asked for again.
    for quiet, seconds, announced in (("", "slow:1000", True), ("-q", "slow:1.5", False)):
        hub.faults.append(Fault("GET /api/", seconds))
        done = shell(f"rbtool list --remote minari --refresh --root {tmp_path} {quiet}", RBTOOL_TIMEOUT="3")
        assert done.returncode == 0
        assert ("no answer from the server for 1.5 s; still waiting" in done.stderr) is announced
