"""Hindsight relabelling of stored datasets, against the rows of the source, one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import UsageError

LENGTHS = (1, 5, 2, 9, 1, 4)
FILE = """
import torch

def relabel(rows):
    goal, achieved = rows["observation", "desired_goal"], rows["next", "observation", "achieved_goal"]
    reached = (goal == achieved).all(-1, keepdim=True)
    return reached.float() - 1, reached

def rewards(rows):
    return relabel(rows)[0]

def even(rows):
    number = rows["observation", "achieved_goal"]
    return number, number % 2 == 0
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes whose achieved goal is the number of the step; the goal of all is -1, it ends each other one."""
    steps = sum(LENGTHS)
    number = torch.arange(float(steps)).unsqueeze(-1)
    last = torch.zeros(steps, 1, dtype=torch.bool)
    last[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    episode = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    terminated = last & (episode % 2 == 0).unsqueeze(-1)

    def observation(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"achieved_goal": numbers, "desired_goal": torch.full_like(numbers, -1)}

    flags = {"done": last, "terminated": terminated, "truncated": last & ~terminated}
    after = {"observation": observation(number + 1), "reward": torch.full((steps, 1), -1.0), **flags}
    rows = TensorDict({"observation": observation(number), "episode": episode, "next": after}, [steps])
    folder = tmp_path_factory.mktemp("hindsight")
    (folder / "her.py").write_text(FILE)
    buffer = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(steps))
    buffer.extend(rows)
    buffer.dumps(folder / "buffer")
    rbtool.convert(folder / "buffer", folder / "source")
    return folder


def bounds() -> list[tuple[int, int]]:
    stops = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [(stop - length, stop) for stop, length in zip(stops, LENGTHS, strict=True) for _ in range(length)]


@pytest.mark.parametrize(
    ("hindsight", "ratio"), [("future", 0.8), ("final:1", 1.0), ("episode:0.5", 0.5), ("final:0", 0)]
)
def test_goals_rewards_and_ends(hindsight: str, ratio: float, source: Path, tmp_path: Path) -> None:
    result = rbtool.preprocess(
        source / "source", f"{source}/her.py:relabel", tmp_path / "out", hindsight=hindsight, num_workers=0
    )
    assert rbtool.check(result.path).errors == 0
    before, rows = (rbtool.load_dataset(path).storage[:] for path in (source / "source", result.path))
    goals = rows["observation", "desired_goal"].flatten().int().tolist()
    assert rows["next", "observation", "desired_goal"].equal(rows["observation", "desired_goal"])
    count = 0
    for number, (goal, (start, stop)) in enumerate(zip(goals, bounds(), strict=True)):
        truncated, ended = (bool(before["next", name][number]) for name in ("truncated", "done"))
        if goal == -1:
            assert (rows["next"][number] == before["next"][number]).all()
            continue
        count += 1
        legal = {"future": range(number + 1, stop + 1), "final:1": [stop], "episode:0.5": range(start + 1, stop + 1)}
        assert goal in legal[hindsight]
        hit = goal == number + 1
        assert float(rows["next", "reward"][number]) == hit - 1
        assert bool(rows["next", "terminated"][number]) is hit
        assert bool(rows["next", "truncated"][number]) is (truncated or (ended and not hit))
        assert bool(rows["next", "done"][number]) is (ended or hit)
    assert (count == ratio * len(goals)) if ratio in (0, 1) else (0 < count < len(goals))
    assert rows.exclude("next", ("observation", "desired_goal"), "index", "episode").keys() == {"observation"}


def test_the_result_depends_on_the_seed_alone_and_is_described(source: Path, tmp_path: Path) -> None:
    digests = []
    for number, options in enumerate(({"num_workers": 0}, {"num_workers": 2, "chunk_size": 3}, {"seed": 5})):
        options = {"num_workers": 0} | options
        result = rbtool.preprocess(
            source / "source", f"{source}/her.py:relabel", tmp_path / str(number), hindsight="future", **options
        )
        digests.append(result.content_digest)
    assert digests[0] == digests[1] != digests[2]
    manifest = json.loads((tmp_path / "0/.rbtool/manifest.json").read_text())
    last = manifest["provenance"][-1]
    assert last["arguments"]["hindsight"] == {
        "strategy": "future", "her_ratio": 0.8, "goal_key": "observation.desired_goal",
        "achieved_goal_key": "next.observation.achieved_goal",
    }  # fmt: skip
    assert "her.py" in last["inputs"]


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_what_was_achieved_before_a_step_is_its_goal_on_request(layout: Any, source: Path, tmp_path: Path) -> None:
    rbtool.convert(source / "source", tmp_path / "in", layout=layout)
    for more, after in (({"achieved_goal_key": "observation.achieved_goal"}, 0), ({}, 1)):
        result = rbtool.preprocess(
            tmp_path / "in", f"{source}/her.py:relabel", tmp_path / f"out{after}",
            hindsight={"strategy": "final", "her_ratio": 1, **more},
        )  # fmt: skip
        goals = rbtool.load_dataset(result.path).storage[:]["observation", "desired_goal"].flatten().tolist()
        assert goals == [stop - 1 + after for _, stop in bounds()]


def test_without_what_a_step_achieves_the_field_before_it_is_named(source: Path, tmp_path: Path) -> None:
    rbtool.preprocess(
        source / "source", dest=tmp_path / "in", operations={"exclude": ["next.observation.achieved_goal"]}
    )
    with pytest.raises(UsageError, match=r"'next\.observation\.achieved_goal', what a step achieves, is not") as raised:
        rbtool.preprocess(tmp_path / "in", f"{source}/her.py:relabel", tmp_path / "out", hindsight="final")
    assert "--achieved-goal-key observation.achieved_goal" in str(raised.value.hint)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_reaches_its_goal_ends_an_episode_also_where_the_next_one_has_the_same(
    num_workers: int, source: Path, tmp_path: Path
) -> None:
    result = rbtool.preprocess(
        source / "source", f"{source}/her.py:even", tmp_path / "out", hindsight="final:1", num_workers=num_workers
    )
    rows = rbtool.load_dataset(result.path).storage[:]
    ends = [number % 2 == 0 or number + 1 == stop for number, (_, stop) in enumerate(bounds())]
    assert rows["next", "done"].flatten().tolist() == ends
    assert [*(rows["episode"].diff() != 0).tolist(), True] == ends
    assert result.episodes == len(set(rows["episode"].tolist())) == sum(ends)
    assert not [one for one in rbtool.check(result.path).findings if one.rule == "TED006"]


@pytest.mark.parametrize(
    ("fn", "options", "words"),
    [
        (None, {}, "needs a function"),
        ("relabel", {"hindsight": "random"}, "future, final, episode"),
        ("relabel", {"hindsight": "future:2"}, "from 0 to 1"),
        ("relabel", {"hindsight": "future:much"}, "future:0.8"),
        ("relabel", {"hindsight": {"ratio": 1}}, "mapping of strategy"),
        ("relabel", {"hindsight": {"strategy": "final", "goal_key": "desired"}}, "field 'desired' not found"),
        ("relabel", {"operations": {"select": ["observation"]}}, "hindsight and operations"),
        ("relabel", {"unit": "row"}, "whole episodes"),
    ],
)
def test_bad_arguments(fn: str | None, options: Any, words: str, source: Path, tmp_path: Path) -> None:
    function = None if fn is None else f"{source}/her.py:{fn}"
    with pytest.raises(UsageError, match=words):
        rbtool.preprocess(source / "source", function, tmp_path / "out", **{"hindsight": "future"} | options)
    assert not (tmp_path / "out").exists()


def test_terminations_are_not_optional(source: Path, tmp_path: Path) -> None:
    with pytest.raises(rbtool.RbtoolError, match=r"her.py:rewards failed on step .*depends on the goal"):
        rbtool.preprocess(
            source / "source", f"{source}/her.py:rewards", tmp_path / "out", hindsight="final", num_workers=0
        )
