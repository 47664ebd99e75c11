"""The README tells the truth: its commands run, one after the other, and show what it shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = dict.fromkeys(re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
END = "--- end of"


def parts():
    """Every command of the console blocks with the output shown for it."""
    for block in BLOCKS:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def shape(text: str) -> list[str]:
    """A text without its numbers: the last digits of a simulation differ from processor to processor."""
    text = re.sub(r"xxh3-128:[0-9a-f]{32}", "DIGEST", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█][▁▂▃▄▅▆▇█ ]*", "▁", text)
    text = re.sub(r"-?\d[\d,]*(\.\d+)?(e[+-]\d+)?", "#", text)
    text = re.sub(r"# [kMGT]?B/s", "# B/s", text).replace("# threads", "# thread")  # of how fast a machine is
    return re.sub(r"\[\s+", "[", text).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the README is followed."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def environment(forked, folder):
    """The README is followed by somebody whose home is the folder."""
    return forked | {"HOME": str(folder)}


@pytest.fixture(scope="module")
def outputs(folder, environment):
    """What the commands of the README print when they are typed into one shell."""
    script = "set -o pipefail\n" + "".join(f"{command}\necho '{END}' $?\n" for command, _ in parts())
    done = subprocess.run(
        ["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return re.findall(rf"(.*?){END} (\d+)\n", done.stdout, re.DOTALL), done.stderr


def test_the_commands_show_what_the_readme_shows(outputs, folder):
    found, said = outputs
    expected = [(command, shape(output.replace("/home/me", str(folder))), "0") for command, output in parts()]
    typed = [command for command, _ in parts()]
    assert [(c, shape(out), code) for c, (out, code) in zip(typed, found, strict=True)] == expected, said


def test_the_commands_say_nothing_unexpected(outputs):
    assert "Warning" not in outputs[1]
    assert "rror" not in outputs[1]


def test_every_verb_is_shown():
    commands = " ".join(command for command, _ in parts())
    shown = ("download", "convert", "preprocess", "checkpoint", "inspect", "stats", "export", "sample", "check", "demo")
    for verb in ("list", *shown):
        assert f"rbtool {verb} " in commands or f"rbtool {verb}" in commands.split("\n")


EACH_TWICE = """
import json, sys
for number, source in enumerate(json.load(sys.stdin)):
    for go in "once", "again":
        try:
            exec(compile(source, f"example {number}", "exec"), {"__name__": "__main__"})
        except BaseException as error:
            raise SystemExit(f"example {number} {go}:\\n{source}") from error
"""


def test_the_python_examples_run_and_run_again(outputs, folder, environment):
    places = {
        "MINARI_DATASETS_PATH": str(folder / "rbtool-demo/minari"), "RBTOOL_HOME": str(folder / "rbtool-demo/store"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", EACH_TWICE], input=json.dumps(PYTHON), cwd=folder, env=environment | places,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_there_are_python_examples():
    assert len(PYTHON) == 5
