"""The table of rules agrees with the code of the rules."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import rbtool
from rbtool.core.format.checks import FOLDER_RULES, EpisodeTableRule
from rbtool.core.ted.rules import DATA_RULES, RULE_BY_ID, RULES
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import saved_buffers
from rbtool.core.verbs.check import VideoRule


def test_every_rule_has_one_entry_and_every_entry_a_rule() -> None:
    assert {one.rule for one in RULES if one.about == "rows"} == {rule.rule_id for rule in DATA_RULES}
    folder = {EpisodeTableRule.rule_id, VideoRule.rule_id, *(rule.rule_id for rule in FOLDER_RULES), "TED014"}
    assert {one.rule for one in RULES if one.about == "folder"} == folder
    used = set(re.findall(r"BUF\d{3}", inspect.getsource(saved_buffers)))
    assert {one.rule for one in RULES if one.about == "saved buffers"} == used
    assert len(RULE_BY_ID) == len(RULES) == len({one.name for one in RULES})


def test_the_order_is_that_of_the_ids() -> None:
    numbers = [(one.about == "saved buffers", one.rule) for one in RULES]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("rule", [*DATA_RULES, EpisodeTableRule, VideoRule], ids=lambda rule: rule.rule_id)
def test_a_rule_reports_the_severities_of_its_entry(rule: Any) -> None:
    named = re.findall(r'"(error|warning)"', inspect.getsource(rule))
    assert tuple(sorted(set(named))) == RULE_BY_ID[rule.rule_id].severities


def test_as_many_rules_as_the_table_has_run_on_a_dataset(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated")])
    assert rbtool.check(tmp_path / "walks").rules == sum(one.about != "saved buffers" for one in RULES)
