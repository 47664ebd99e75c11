"""`check`: its list of rules, and findings of any number on the screen and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    assert all(one.name in line and line.endswith(one.checks) for one, line in zip(rules, shown, strict=True))
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
