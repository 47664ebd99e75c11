"""`rbtool plot` in a real pseudo-terminal: whole screens, which are in `tests/data/screens`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from processes import type_line

from rbtool.core.format.memmap.reader import TedReader

SCREENS = Path(__file__).parents[1] / "data" / "screens"
TRACES = "--field observation[2:4] --field reward --episodes 1,2"
MIX = (
    "rbtool preprocess cartpole --episodes :2 --dest few &> made && rbtool mix cartpole:0.7 few:0.3 mix.toml &> made"
    " && rbtool plot mix.toml"
)
LINES = {"plot": "rbtool plot cartpole", "plot-field": f"rbtool plot cartpole {TRACES}", "plot-mix": MIX}


@pytest.fixture
def terminal(folder, environment):
    """Run a line of bash on a pseudo-terminal, with messages in a file; return its code and the screen."""

    def run(line: str, columns: int, **variables: str) -> tuple[int, str]:
        places = {"RBTOOL_HOME": str(folder / "home"), "TERM": "xterm-256color", "COLUMNS": str(columns)}
        code, shown = type_line(f"{line} 2> log", folder, environment | places | variables)
        return code, shown.replace("\r", "")

    return run


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", LINES)
def test_screens_of_every_width_are_the_stored_ones(terminal, name, columns):
    code, screen = terminal(LINES[name], columns, NO_COLOR="1")
    assert code == 0
    assert screen == (SCREENS / f"{name}-{columns}.txt").read_text(encoding="utf-8")
    assert max(map(len, screen.splitlines())) <= columns


def test_colours_change_nothing_else(terminal):
    screen = terminal(LINES["plot"], 80)[1]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen)
    assert "\x1b[36m" in screen
    assert plain == (SCREENS / "plot-80.txt").read_text(encoding="utf-8")


def test_a_tiny_screen_has_charts_of_20_columns(terminal):
    for columns in (1, 12, 20):
        code, screen = terminal(LINES["plot"], columns, NO_COLOR="1")
        assert (code, screen.count("└─────────")) == (0, 4)


def test_a_pipe_gets_80_columns(terminal, folder):
    terminal("rbtool plot cartpole > out", 60)
    assert (folder / "out").read_text() == (SCREENS / "plot-80.txt").read_text(encoding="utf-8")


def test_a_terminal_without_unicode_gets_ascii(terminal, variables):
    real = {"PATH": variables["PATH"], "PYTHONIOENCODING": "ascii"}
    code, screen = terminal("rbtool plot cartpole", 80, NO_COLOR="1", **real)
    assert (code, screen.isascii(), "?" in screen) == (0, True, False)
    assert screen == (SCREENS / "plot-80-ascii.txt").read_text(encoding="ascii")


def test_json_has_the_numbers_that_are_plotted(shell, folder):
    document = json.loads(shell(f"rbtool plot cartpole {TRACES} --json", folder).stdout)
    with TedReader(folder / "cartpole") as reader:
        start, length = int(reader.episodes.start[2]), int(reader.episodes.length[2])
        rows = reader.read(("observation",), start, start + length)
    line = document["charts"][0]["series"][1]
    assert (document["kind"], document["episodes"], line["name"]) == ("plot", [1, 2], "episode 2")
    assert np.array_equal(line["y"], rows[:, 2].astype(float))


def test_a_picture_is_written_and_named(shell, folder):
    done = shell("rbtool plot cartpole -o returns.svg", folder)
    assert (done.returncode, done.stdout) == (0, "returns.svg\n")
    assert (folder / "returns.svg").read_text().count("<text") > 20
    again = shell("rbtool plot cartpole -o returns.svg", folder)
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force" in again.stderr


def test_an_unknown_field_of_frames_is_a_usage_error(shell, folder):
    done = shell("rbtool frames push --episode 0 --field pixls -o a.gif --json", folder)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_code"]) == (2, 2)
    assert "did you mean 'pixels'?" in error["message"]


def test_frames_are_written_and_named(shell, folder):
    done = shell("rbtool frames push --episode 0 -o sheet.png", folder)
    assert (done.returncode, done.stdout) == (0, "sheet.png\n")
    assert "pixels of episode 0: 9 frames of 32 × 24" in done.stderr
    assert (folder / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_images_proposes_frames(shell, folder):
    done = shell("rbtool plot push --field pixels", folder)
    assert done.returncode == 2
    assert "rbtool frames push --episode K --field pixels -o frames.png" in done.stderr
