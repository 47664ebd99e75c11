"""`check`: its list of rules, and findings of any number on the screen and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from robot_sets import DEFECTS, Kind, make, write

import rbtool
from rbtool.cli.check import lines
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.rules import Finding, known_rules
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.check import CheckResult


def test_the_rules_are_listed_as_their_table_has_them(shell: Any) -> None:
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


@pytest.mark.parametrize(
    ("words", "said"), [("--rules cartpole", "checks nothing"), ("", "missing argument 'DATASET...'")]
)
def test_rules_or_datasets_are_named(shell: Any, words: str, said: str) -> None:
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


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (11, 11), (12, 10), (5000, 10)])
def test_ten_findings_of_a_rule_are_shown_and_the_others_counted(count: int, shown: int) -> None:
    text = ["".join(getattr(cell, "text", cell) for cell in line) for line in lines(_result(count))]
    assert sum(": file" in line or "  file" in line for line in text) == shown
    assert [line for line in text if "more, which --json lists" in line] == (
        [f"error    TED013  digests        and {count - 10:,} more, which --json lists"] if count > 11 else []
    )
    assert text[-2].endswith("action never changes")
    assert text[-1].startswith("1 step in 1 episode")


def test_json_lists_every_bad_step_and_episode(shell: Any, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(10, "terminated")] * 2000)
    with TedReader(tmp_path / "walks") as reader:
        rewards = reader.read(("next", "reward"), 0, reader.manifest.steps)
    bad = np.arange(0, 20_000, 3)
    rewards[bad] = np.nan
    (tmp_path / "walks/next/reward.memmap").write_bytes(rewards.tobytes())
    done = shell(f"rbtool check {tmp_path}/walks --json")
    (found,) = [one for one in json.loads(done.stdout)["findings"] if one["rule"] == "TED007"]
    assert found["steps"] == [[step, step + 1] for step in bad.tolist()]
    assert found["episodes"] == sorted(set((bad // 10).tolist()))
    result = rbtool.check(tmp_path / "walks")
    (finding,) = [one for one in result.findings if one.rule == "TED007"]
    assert finding.steps == tuple((step, step + 1) for step in bad.tolist())
    assert finding.episodes == found["episodes"]


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """A dataset with an error in one episode, and a warning."""
    write_walks(tmp_path / "walks", [(10, "terminated")] * 3)
    with TedReader(tmp_path / "walks") as reader:
        rewards = reader.read(("next", "reward"), 0, reader.manifest.steps)
        actions = reader.read(("action",), 0, reader.manifest.steps)
    rewards[12], actions[:, 1] = np.nan, 3
    (tmp_path / "walks/next/reward.memmap").write_bytes(rewards.tobytes())
    (tmp_path / "walks/action.memmap").write_bytes(actions.tobytes())
    return tmp_path / "walks"


def test_findings_are_written_for_machines(shell: Any, walks: Path) -> None:
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
def test_junit_has_a_suite_a_dataset_and_fails_as_the_exit_code_does(
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
def test_forms_for_machines_have_the_errors_of_datasets(
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


def test_a_schema_describes_what_is_printed(shell: Any, walks: Path) -> None:
    schema = json.loads(shell("rbtool schema check").stdout)
    printed = json.loads(shell(f"rbtool check {walks} --json").stdout)
    assert set(schema["required"]) == set(schema["properties"]) == set(printed)
    finding = schema["properties"]["findings"]["items"]
    assert all(set(one) == set(finding["required"]) for one in printed["findings"])
    assert finding["properties"]["figure"]["anyOf"][-1] == {"type": "null"}
    assert shell("rbtool schema chek").returncode == 2


@pytest.mark.parametrize("name", ["idle start", "empty task", "short episode", "stuck joint"])
def test_the_command_that_a_finding_proposes_mends_it(shell: Any, tmp_path: Path, name: str) -> None:
    defect = DEFECTS[name]
    made = make(replace(defect.kind, cameras=0))
    defect.change(made)
    raw = write(made, tmp_path / "raw")
    (found,) = [one for one in rbtool.check(raw).findings if one.rule in defect.rules]
    command = found.mend.replace("STEP", f"{tmp_path}/step").replace("DEST", f"{tmp_path}/mended")
    done = shell(command.replace("TEXT", "'open the box'"))
    assert done.returncode == 0, done.stderr
    assert found.rule not in {one.rule for one in rbtool.check(tmp_path / "mended").findings}


def test_clean_lists_what_it_would_do_and_then_does_it(shell: Any, tmp_path: Path) -> None:
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


def test_a_baseline_of_several_datasets_is_compared_one_by_one(tmp_path: Path, shell: Any) -> None:
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
