"""`rbtool report`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


def test_the_page_is_printed_and_findings_are_counted(shell, folder):
    done = shell("rbtool report cartpole cartpole.h5 -o page.html", folder)
    assert (done.returncode, done.stdout) == (0, "page.html\n")
    assert "cartpole     4,864 steps  12 episodes  0 errors, 1 warning" in done.stderr
    assert (folder / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_counts_what_check_finds(shell, folder):
    memmap = folder / "cartpole" / "action.memmap"
    memmap.write_bytes(memmap.read_bytes()[:-8])
    done, checked = (
        shell(f"rbtool {words} --json", folder) for words in ("report cartpole -o page.html", "check cartpole")
    )
    assert done.returncode == checked.returncode == 3
    (dataset,) = json.loads(done.stdout)["datasets"]
    found = json.loads(checked.stdout)
    assert (dataset["errors"], dataset["warnings"]) == (found["errors"], found["warnings"])
    assert (folder / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("cartpole", 2, "--output is missing"),
        ("cartpole -o page.txt", 2, "expected .html"),
        ("cartpole -o cartpole/page.html", 2, "is inside the dataset"),
        ("cartpole -o prep.py/page.html", 2, "is a file"),
        ("nothing -o page.html", 4, "nothing not found"),
        ("minari/pendulum/random-v0 -o page.html", 2, "a TED dataset is needed"),
        ("cartpole -o /proc/page.html", 1, "no such file or directory"),
    ],
)  # fmt: skip
def test_impossible_reports_are_one_sentence(shell, folder, words, code, sentence):
    before = sorted(folder.rglob("*"))
    done = shell(f"rbtool report {words}", folder)
    assert (done.returncode, done.stdout) == (code, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert sentence in done.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_page_is_replaced_on_request_only(shell, folder):
    (folder / "page.html").write_text("<!DOCTYPE html>old")
    assert shell("rbtool report cartpole -o page.html", folder).returncode == 2
    assert (folder / "page.html").read_text() == "<!DOCTYPE html>old"


def test_a_stored_dataset_is_named_by_its_id(shell, folder):
    home = folder / "home"
    done = shell(f"rbtool report minari:cartpole/scripted-v0 --root {home} -o page.html -q", folder)
    assert (done.returncode, done.stdout) == (0, "page.html\n")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "<h1>minari:cartpole/scripted-v0</h1>" in page
    assert "rbtool report minari:cartpole/scripted-v0 -o page.html" in page


def test_a_dataset_that_cannot_be_opened_has_a_page(shell, folder):
    shutil.rmtree(folder / "cartpole" / ".rbtool" / "episodes")
    done = shell("rbtool report cartpole -o page.html", folder)
    assert done.returncode == 3
    assert "It cannot be opened" in Path(folder / "page.html").read_text(encoding="utf-8")
