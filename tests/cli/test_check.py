"""`check`: its list of rules, findings on the screen and for machines, and the commands that mend them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from cases import each
from robot_sets import DEFECTS, Kind, make, write

import rbtool
from rbtool.cli.check import lines
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.rules import Finding, known_rules
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.check import CheckResult


def test_rules_lists_the_table_of_rules(shell: Any) -> None:
    rules = known_rules()
    shown = shell("rbtool check --rules").stdout.splitlines()
    assert [line.split()[0] for line in shown] == [one.rule for one in rules]
    assert all(one.name in line and one.checks in line for one, line in zip(rules, shown, strict=True))
    document = json.loads(shell("rbtool check --rules --json").stdout)
    assert (document["kind"], len(document["rules"])) == ("rules", len(rules))
    for one, entry in zip(rules, document["rules"], strict=True):
        told = {"rule": one.rule, "name": one.name, "about": one.about, "severities": [*one.severities]}
        assert entry == entry | told | {"checks": one.checks}
    assert shell("rbtool check --rules -q").stdout.split() == [one.rule for one in rules]


def test_rules_take_no_dataset_and_check_needs_one(shell: Any) -> None:
    for words, said in (("--rules cartpole", "checks nothing"), ("", "missing argument 'DATASET...'")):
        done = shell(f"rbtool check {words}")
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


def _result(count: int) -> CheckResult:
    findings = [Finding("TED013", "digests", "error", f"file {number}") for number in range(count)]
    findings.append(Finding("TED009", "zero variance", "warning", "action never changes"))
    return CheckResult(
        path=Path("x"), steps=1, episodes=1, findings=tuple(findings), rules=15, skipped=(), errors=count, warnings=1,
        seconds=0.1,
    )  # fmt: skip


@each(("count", "shown"), [(1, 1), (11, 11), (12, 10), (5000, 10)])
def test_ten_findings_of_a_rule_are_shown_and_more_are_counted(count: int, shown: int) -> None:
    text = ["".join(getattr(cell, "text", cell) for cell in line) for line in lines(_result(count))]
    assert sum(": file" in line or "  file" in line for line in text) == shown
    assert [line for line in text if "more, which --json lists" in line] == (
        [f"error    TED013  digests        and {count - 10:,} more, which --json lists"] if count > 11 else []
    )
    assert text[-2].endswith("action never changes")
    assert text[-1].startswith("1 step in 1 episode")


def put(folder: Path, name: str, index: Any, value: float) -> None:
    """Change values of a leaf in place."""
    key = tuple(name.split("."))
    with TedReader(folder) as reader:
        rows = reader.read(key, 0, reader.manifest.steps)
    rows[index] = value
    (folder / f"{name.replace('.', '/')}.memmap").write_bytes(rows.tobytes())


def test_json_lists_every_bad_step_and_episode(shell: Any, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(10, "terminated")] * 2000)
    bad = np.arange(0, 20_000, 3)
    put(tmp_path / "walks", "next.reward", bad, np.nan)
    done = shell(f"rbtool check {tmp_path}/walks --json")
    (found,) = [one for one in json.loads(done.stdout)["findings"] if one["rule"] == "TED007"]
    assert found["steps"] == [[step, step + 1] for step in bad.tolist()]
    assert found["episodes"] == sorted(set((bad // 10).tolist()))


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """A dataset with an error in one episode, and a warning."""
    write_walks(tmp_path / "walks", [(10, "terminated")] * 3)
    put(tmp_path / "walks", "next.reward", 12, np.nan)
    put(tmp_path / "walks", "action", (slice(None), 1), 3)
    return tmp_path / "walks"


def test_findings_have_the_same_rules_in_every_form(shell: Any, walks: Path) -> None:
    found = json.loads(shell(f"rbtool check {walks} --json").stdout)["findings"]
    rules = [one["rule"] for one in found]
    assert {"TED007", "TED009"} <= set(rules)
    assert json.loads(shell(f"rbtool check {walks} --format json").stdout)["findings"] == found
    done = shell(f"rbtool check {walks} --format sarif")
    assert done.returncode == 3
    (run,) = json.loads(done.stdout)["runs"]
    assert [one["ruleId"] for one in run["results"]] == rules
    assert {one["id"] for one in run["tool"]["driver"]["rules"]} == set(rules)
    assert [one["level"] for one in run["results"]] == [one["severity"] for one in found]
    lines = shell(f"rbtool check {walks} --format github").stdout.splitlines()
    assert [line.split(",title=")[1].split()[0] for line in lines] == rules
    assert all(line.startswith(f"::{one['severity']} file={walks}") for line, one in zip(lines, found, strict=True))
    table = [line for line in shell(f"rbtool check {walks} --format markdown").stdout.splitlines() if line[:2] == "| "]
    assert [line.split(" | ")[1] for line in table[1:]] == rules


@pytest.mark.parametrize(("option", "failures"), [("", {"error"}), ("--fail-on warn", {"error", "warning"})])
def test_junit_has_a_suite_per_dataset_and_fails_with_the_exit_code(
    shell: Any, walks: Path, option: str, failures: set[str]
) -> None:
    write_walks(walks.parent / "sound", [(10, "terminated")] * 3)
    done = shell(f"rbtool check {walks} {walks.parent}/sound --format junit {option}")
    bad, good = ElementTree.fromstring(done.stdout)
    assert (bad.get("name"), good.get("failures"), len(good)) == (str(walks), "0", 1)
    assert {one.get("type") for one in bad.iter("failure")} == failures
    assert int(bad.get("failures", "")) == len([*bad.iter("failure")])
    assert int(bad.get("tests", "")) == len(bad)


def _errors_of_junit(text: str) -> list[str]:
    return [one.get("message", "") for one in ElementTree.fromstring(text).iter("error")]


def _errors_of_sarif(text: str) -> list[str]:
    ((invocation,),) = (run["invocations"] for run in json.loads(text)["runs"])
    assert not invocation["executionSuccessful"]
    return [one["message"]["text"] for one in invocation["toolExecutionNotifications"]]


@pytest.mark.parametrize("names", ["missing", "missing {walks}", "miss*", "{walks} miss*"])
@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("junit", _errors_of_junit), ("sarif", _errors_of_sarif),
        ("github", lambda text: [line for line in text.splitlines() if "title=rbtool check::" in line]),
        ("markdown", lambda text: re.findall("^not checked: .*", text, re.MULTILINE)),
    ],
)  # fmt: skip
def test_forms_for_machines_report_datasets_that_cannot_be_checked(
    shell: Any, walks: Path, names: str, form: str, read: Any
) -> None:
    done = shell(f"rbtool check {names.format(walks=walks)} --format {form}")
    (found,) = read(done.stdout)
    said = "not found" if "missing" in names else "matches no dataset"
    assert said in found
    assert (done.returncode, said in done.stderr) == (4, True)


def test_two_forms_at_once_are_refused(shell: Any, walks: Path) -> None:
    done = shell(f"rbtool check {walks} --format junit --json")
    assert (done.returncode, json.loads(done.stdout)["error"]["message"]) == (
        2, "--format junit and --json are two forms",
    )  # fmt: skip


def test_the_schema_describes_the_document(shell: Any, walks: Path) -> None:
    schema = json.loads(shell("rbtool schema check").stdout)
    printed = json.loads(shell(f"rbtool check {walks} --json").stdout)
    assert set(schema["required"]) == set(schema["properties"]) == set(printed)
    finding = schema["properties"]["findings"]["items"]
    assert all(set(one) == set(finding["required"]) for one in printed["findings"])
    assert finding["properties"]["figure"]["anyOf"][-1] == {"type": "null"}
    assert shell("rbtool schema chek").returncode == 2


@pytest.mark.parametrize("name", ["idle start", "empty task", "short episode", "stuck joint"])
def test_the_proposed_command_mends_the_finding(shell: Any, tmp_path: Path, name: str) -> None:
    defect = DEFECTS[name]
    made = make(replace(defect.kind, cameras=0))
    defect.change(made)
    raw = write(made, tmp_path / "raw")
    (found,) = [one for one in rbtool.check(raw).findings if one.rule in defect.rules]
    command = found.mend.replace("STEP", f"{tmp_path}/step").replace("DEST", f"{tmp_path}/mended")
    done = shell(command.replace("TEXT", "'open the box'"))
    assert done.returncode == 0, done.stderr
    assert found.rule not in {one.rule for one in rbtool.check(tmp_path / "mended").findings}


def test_clean_does_what_its_dry_run_lists(shell: Any, tmp_path: Path) -> None:
    made = make(Kind(cameras=0))
    DEFECTS["duplicate"].change(made)
    made.episodes[6].task = ""
    raw, ready = write(made, tmp_path / "raw"), tmp_path / "ready"
    planned = shell(f"rbtool clean {raw} {ready} --dry-run")
    rows = [line.split()[:2] for line in planned.stdout.splitlines()]
    assert (planned.returncode, rows) == (0, [["drop", "EPI001"], ["left", "MET003"]])
    assert "--drop task leaves them out" in planned.stdout
    assert "nothing was written" in planned.stderr
    assert not ready.exists()
    assert shell(f"rbtool clean {raw} {ready} --dry-run -q").stdout == f"{ready}\n"
    done = shell(f"rbtool clean {raw} {ready}")
    assert (done.returncode, done.stdout) == (0, f"{ready}\n")
    assert [line.split()[:2] for line in done.stderr.splitlines() if line[:4] in ("drop", "left")] == rows
    found = json.loads(shell(f"rbtool clean {raw} {ready} --json").stdout)
    assert (found["kind"], found["already_there"], found["dropped"]) == ("clean", True, {"EPI001": [5]})
    assert [one["rule"] for one in found["remaining"]] == ["MET003"]
    assert shell(f"rbtool clean {raw} {ready} --drop task").returncode == 2
    assert shell(f"rbtool clean {raw} {ready} --drop task,duplicate --force -q").returncode == 0
    assert rbtool.check(ready).findings == ()
    assert shell(f"rbtool clean {tmp_path}/nothing {ready}").returncode == 4


def test_a_baseline_of_several_datasets_is_compared_by_dataset(tmp_path: Path, shell: Any) -> None:
    made = make(Kind(cameras=0))
    DEFECTS["stuck joint"].change(made)
    stuck, other = write(made, tmp_path / "stuck"), write(make(Kind(cameras=0, seed=3)), tmp_path / "other")
    path = tmp_path / "reviewed.json"
    path.write_text(shell(f"rbtool check {stuck} {other} --json").stdout)
    assert [len(rbtool.check(one, baseline=path).findings) for one in (stuck, other)] == [0, 0]
    document = json.loads(path.read_text())
    document["datasets"] = {"elsewhere": document["datasets"][str(stuck)] | {"path": "elsewhere"}}
    path.write_text(json.dumps(document))
    assert len(rbtool.check(stuck, baseline=path).findings) == 1
