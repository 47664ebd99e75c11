"""The commands of the README and the guides run one after the other and print what the pages show."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import facts_table
import pytest
from hub import WRITER, UploadHub

ROOT = Path(__file__).parents[2]
GUIDES = ("first-steps", "data", "preprocess", "look", "split", "checkpoint", "export", "ci", "robots")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [(ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8") for guide in GUIDES]
BLOCKS = dict.fromkeys(re.findall(r"^```console\n(.*?)^```$", "".join([README, *PAGES]), re.MULTILINE | re.DOTALL))
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
OF_ROBOTS = re.findall(r"^```py\n(\w.*?)^```$", PAGES[-1], re.MULTILINE | re.DOTALL)  # on what its commands made
END = "--- end of"


def parts():
    """Every command of the console blocks with the output shown for it."""
    for block in BLOCKS:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


VARIES = {
    r"xxh3-128:[0-9a-f]{32}": "DIGEST",  # the last bits of a simulation differ from processor to processor
    r"@[0-9a-f]{40}\b": "@COMMIT",
    r"\d{4}-\d\d-\d\d": "DATE",
    r"\d+\.\d s\b": "SECONDS",
    r"(?<=episodes  )( ?)\d+(\.\d)? kB|(?<=datasets · )\d+ kB": r"\1SIZE",  # manifests hold paths and dates
    r"[\d,]+ batches/s · [\d,]+ steps/s · [\d.]+ [kMG]B/s": "SPEED",
    r"[\d.,]+ µs": "MICROSECONDS",
    r"[\d,]+ batches in": "BATCHES in",
    r"\b\d+ threads?": "THREADS",
}
"""The parts of the output that vary with machine and time; everything else has to be as the pages show it."""


def shape(text: str) -> str:
    """Replace the parts that vary by names."""
    for pattern, name in VARIES.items():
        text = re.sub(pattern, name, text)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the commands run, with the script of the guide for robots."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "examples/act.py", folder)
    return folder


@pytest.fixture(scope="module")
def environment(environment, folder):
    """The variables of a user whose home is the folder."""
    return environment | {"HOME": str(folder)}


@pytest.fixture(scope="module")
def outputs(folder, environment):
    """What the commands print in one shell."""
    with UploadHub(folder / ".hub") as hub:
        places = f"HF_ENDPOINT={hub.url} HF_TOKEN={WRITER} "
        commands = [f"{places if 'hf://' in command else ''}{command}" for command, _ in parts()]
        script = "set -o pipefail\n" + "".join(f"{command}\necho '{END}' $?\n" for command in commands)
        done = subprocess.run(
            ["bash"], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    return re.findall(rf"(.*?){END} (\d+)\n", done.stdout, re.DOTALL), done.stderr


def test_commands_print_what_the_pages_show(outputs, folder):
    found, said = outputs
    expected = [f"$ {command}\n{shape(output.replace('/home/me', str(folder)))}" for command, output in parts()]
    shown = [f"$ {command}\n{shape(out)}" for (command, _), (out, _) in zip(parts(), found, strict=True)]
    assert "".join(shown) == "".join(expected), said
    assert {code for _, code in found} == {"0"}
    assert "Warning" not in outputs[1]
    assert "rror" not in outputs[1]


def test_every_console_block_is_followed():
    pages = {page.stem for page in (ROOT / "docs").rglob("*.md") if "```console\n" in page.read_text(encoding="utf-8")}
    assert pages == set(GUIDES)


def test_every_verb_and_fact_is_shown():
    commands = " ".join(command for command, _ in parts())
    shown = ("download", "convert", "preprocess", "checkpoint", "inspect", "stats", "export", "sample", "check", "demo")
    for verb in ("list", "upload", *shown):
        assert f"rbtool {verb} " in commands or f"rbtool {verb}" in commands.split("\n")
    assert facts_table.shown(README) == facts_table.read().table()
    assert (len(PYTHON), len(OF_ROBOTS)) == (2, 3)


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
        [sys.executable, "-c", EACH_TWICE], input=json.dumps([*PYTHON, *OF_ROBOTS]), cwd=folder,
        env=environment | places, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown, printed = (
        re.findall(r"^step (\d+): mean return (\d+)$", text, re.MULTILINE) for text in (README, done.stdout)
    )
    assert [step for step, _ in printed] == 2 * [step for step, _ in shown]
    returns = [[int(value) for _, value in lines] for lines in (shown, printed[: len(shown)])]
    for first, *_, last in returns:  # the values between them differ from processor to processor
        assert first < 60 < 400 < last
