"""The tasks of episodes: set, renamed, and what is said where there is no such task or episode."""

from __future__ import annotations

import json

import pytest

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.preprocess.operations.program import program_of
from rbtool.core.robots.tasks import RenameTask, SetTask
from rbtool.core.testing.datasets import write_walks
from rbtool.core.testing.operations import OperationTests

TEXTS = [
    {"language_instruction": "pick", "scene": "kitchen"}, {}, {"language_instructions": '["pick", "place"]'},
    {"language_instruction": "place"},
]  # fmt: skip


class TestSetTask(OperationTests):
    def operation(self):
        return SetTask("0:2", "pick the cube")


class TestRenameTask(OperationTests):
    def operation(self):
        return RenameTask("pick", "pick the cube")


def told(texts=TEXTS, **operations):
    for operation in program_of(operations).on_rows:
        texts = operation.texts(range(len(texts)), texts)
    return texts


def test_a_task_is_set_for_the_episodes_that_are_named():
    found = told(task=["0:2=lift = high", "3=fold"])
    assert found[:2] == [
        {"language_instruction": "lift = high", "scene": "kitchen"},
        {"language_instruction": "lift = high"},
    ]
    assert found[2:] == [TEXTS[2], {"language_instruction": "fold"}]


def test_a_task_is_renamed_wherever_it_is():
    found = told(rename_task="pick=place")
    assert found[0] == {"language_instruction": "place", "scene": "kitchen"}
    assert found[1] == {}
    assert json.loads(found[2]["language_instructions"]) == ["place", "place"]  # rows go by the order
    assert found[3] == TEXTS[3]


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"task": "0:2"}, "--task '0:2' is not understood"),
        ({"task": "2:1=pick"}, "--task '2:1' holds no episode"),
        ({"task": "9=pick"}, "--task asks for episode 9, which is not there"),
        ({"rename_task": "pik=place"}, "no episode has the task 'pik'; did you mean 'pick'"),
    ],
)
def test_what_is_not_there_is_told(operations, words):
    with pytest.raises(UsageError, match=words):
        told(**operations)


def test_a_dataset_gets_tasks_and_keeps_them_when_rows_are_dropped(tmp_path):
    write_walks(tmp_path / "a", [(length, "terminated") for length in (3, 4, 2)])
    rbtool.preprocess(tmp_path / "a", None, tmp_path / "b", operations={"task": ["0:2=pick", "2=place"]}, num_workers=0)
    chosen = {"episodes": "1:", "where": "observation[0] > -9", "rename_task": "place=put down"}
    rbtool.preprocess(tmp_path / "b", None, tmp_path / "c", operations=chosen, num_workers=0)
    lines = (tmp_path / "c/.rbtool/episodes_text.jsonl").read_text().splitlines()
    assert [json.loads(line)["language_instruction"] for line in lines] == ["pick", "put down"]
    with pytest.raises(UsageError, match="no episode has the task 'pick'"):
        rbtool.preprocess(tmp_path / "a", None, tmp_path / "d", operations={"rename_task": "pick=x"}, num_workers=0)
    assert not (tmp_path / "d").exists()
