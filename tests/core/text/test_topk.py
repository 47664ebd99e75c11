"""The best answers to each prompt are written."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each
from tensordict import TensorDict, TensorDictBase, lazy_stack

from rbtool import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TopKRewardSelector
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError, WrongKindError
from rbtool.core.format.contracts import FinalMethodError
from rbtool.core.testing.transforms import TransformTests


def row(reward: float, prompt: Any = "p", *, tokens: int = 1, done: bool = True) -> TensorDict:
    """One row, as TorchRL's language models write it: a reward for each token."""
    return TensorDict({
        "next": {"done": torch.full((1, 1), done), "reward": torch.full((tokens, 1), reward)},
        "text": {"prompt": prompt},
    })  # fmt: skip


def buffer(total: int, best: int, storage: Any = LazyStackStorage, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(100), transform=TopKRewardSelector(total, best, **options), batch_size=2)


def rewards(rb: ReplayBuffer) -> list[float]:
    return [float(rb[place]["next", "reward"].double().mean()) for place in range(len(rb))]


def test_the_example_of_torchrl() -> None:
    rb = buffer(5, 3)
    data = lazy_stack([row(float(i), f"Prompt {i // 5}", tokens=i + 5) for i in range(50)])
    for pair in data.chunk(25):
        rb.extend(pair)
    assert (len(rb), rb.write_count, rewards(rb)[:4]) == (20, 20, [4, 3, 9, 8])


@each("one_by_one", [True, False])
@each(
    ("total", "best", "scores", "expected"),
    [
        (3, 2, [1, 2, 3], [3]), (4, 3, [1, 2, 3, 4], [4, 3]), (5, 5, [1, 2, 3, 4, 5], [5, 4]),
        (5, 3, [3, 1, 2, 5, 4], [5, 4]), (4, 2, [1, 1, 2, 2], [2, 2]), (4, 2, [1, 2, 2, 2], []),
        (3, 2, [1, 1, 1], []), (3, 2, [1, math.nan, 3], []), (1, 1, [1], []), (3, 0, [1, 2, 3], []),
        (3, 2, [1, 2, 5, 2, 1], [5, 5, 5]), (3, 2, [1, 2], []),
    ],
)  # fmt: skip
def test_what_is_above_the_lower_median_is_written(
    total: int, best: int, scores: list[float], expected: list[float], one_by_one: bool
) -> None:
    rb = buffer(total, best)
    rows = [row(float(score)) for score in scores]
    for part in [[one] for one in rows] if one_by_one else [rows]:
        index = rb.extend(lazy_stack(part))
    assert rewards(rb) == expected
    if not expected:
        assert index.shape == (0, 1)


def test_every_dialogue_is_compared_once_if_asked() -> None:
    rb = buffer(3, 2, clear_after_selection=True)
    rb.extend(lazy_stack([row(float(score)) for score in [1, 2, 5, 2, 1, 4]]))
    assert rewards(rb) == [5, 4]


def test_prompts_are_compared_among_themselves() -> None:
    rb = buffer(3, 2)
    rb.extend(lazy_stack([row(float(s), p) for s, p in [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (4, "b"), (3, "a")]]))
    assert [(rb[place]["text", "prompt"], reward) for place, reward in enumerate(rewards(rb))] == [("b", 4), ("a", 3)]


def dense(scores: list[float], *batch: int, done: list[bool] | None = None) -> TensorDict:
    size = batch or (len(scores),)
    flags = torch.tensor(done or [True] * len(scores))
    steps = {"reward": torch.tensor(scores, dtype=torch.float32).reshape(*size, 1), "done": flags.reshape(*size, 1)}
    text = TensorDict({"prompt": "p"}, batch_size=size)
    return TensorDict({"next": TensorDict(steps, batch_size=size), "text": text}, batch_size=size)


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage, LazyTensorStorage])
def test_dense_rows(storage: Any) -> None:
    rb = buffer(4, 2, storage)
    assert rb.extend(dense([1, 2, 4, 3])).flatten().tolist() == [0, 1]
    assert rewards(rb) == [4, 3]
    assert rb.sample()["next", "reward"].shape == (2, 1)
    again = buffer(4, 2, storage)
    again.extend(dense([1, 2, 4, 3], 2, 2))
    assert rewards(again) == [4, 3]


def test_a_dialogue_of_several_rows_ends_where_done_is_set() -> None:
    rb = buffer(2, 1)
    done = [False, False, True, False, True]
    rb.extend(dense([1, 2, 3, 4, 5], done=done))
    assert rewards(rb) == [4, 5]  # means of 2 and 4.5
    lanes = buffer(2, 2)
    lanes.extend(lazy_stack([dense([5, 4], done=[False, True]), dense([1, 2, 3], done=[False, False, True])]))
    assert rewards(lanes) == [5, 4]
    with pytest.raises(SchemaError, match="does not end a dialogue"):
        rb.extend(dense([1, 2], done=[True, False]))


def test_one_row_at_a_time() -> None:
    rb = buffer(3, 1)
    index = [rb.add(row(score)) for score in (1.0, 3.0, 2.0)]
    assert ([one.numel() for one in index[:2]], int(index[2]), rewards(rb)) == ([0, 0], 0, [3])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (row(1).exclude("text"), MissingKeyError), (row(1).exclude(("next", "reward")), MissingKeyError),
        (row(1, torch.tensor(3)), WrongKindError), (row(1, done=False), SchemaError),
    ],
)  # fmt: skip
def test_refused_data_change_nothing(data: TensorDict, error: type[Exception]) -> None:
    rb = buffer(2, 1)
    rb.extend(lazy_stack([row(1.0)]))
    with pytest.raises(error):
        rb.extend(lazy_stack([row(5.0), data]))
    rb.extend(lazy_stack([row(2.0)]))
    assert rewards(rb) == [2]  # 5 does not wait


def test_data_of_other_kinds_are_refused() -> None:
    for data in (torch.ones(2), row(1)):
        with pytest.raises(SchemaError):
            TopKRewardSelector(2, 1).inv(data)


def test_what_waits_is_not_changed_by_its_owner() -> None:
    rb = buffer(2, 1)
    data = dense([5])
    rb.extend(data)
    data["next", "reward"].zero_()
    rb.extend(dense([1]))
    assert rewards(rb) == [5]


@pytest.mark.parametrize(("total", "best"), [(2, 3), (0, 0), (2, -1), (1.5, 1)])
def test_wrong_arguments(total: Any, best: Any) -> None:
    with pytest.raises(UsageError):
        TopKRewardSelector(total, best)


class Longest(TopKRewardSelector):
    """Scores a dialogue by its number of rewards."""

    def aggregate(self, rewards: torch.Tensor) -> float:
        return float(len(rewards))


def test_the_score_is_a_hook() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(10), transform=Longest(2, 1))
    rb.extend(lazy_stack([row(1.0, tokens=3), row(9.0)]))
    assert rewards(rb) == [1]
    with pytest.raises(FinalMethodError, match="_aggregate_rewards"):
        type("Old", (TopKRewardSelector,), {"_aggregate_rewards": None})


def test_selections_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "rbtool.text"):
        for verbose in (True, False):
            buffer(2, 1, verbose=verbose).extend(lazy_stack([row(1.0), row(2.0)]))
    assert [record.getMessage() for record in caplog.records] == ["1 of 2 dialogues are written for the prompt 'p'"]


# State ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state", "pickle", "copy", "folder"])
def test_what_waits_is_part_of_the_state(way: str, tmp_path: Path) -> None:
    rb, other = buffer(3, 2), buffer(3, 2)
    rb.extend(lazy_stack([row(5.0, tokens=2), row(1.0, tokens=3), row(7.0, "q")]))
    if way == "state":
        other.load_state_dict(rb.state_dict())
    elif way == "folder":
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        selector = pickle.loads(pickle.dumps(rb.transform[0])) if way == "pickle" else copy.deepcopy(rb.transform[0])
        other = ReplayBuffer(storage=LazyStackStorage(10), transform=selector)
    other.extend(lazy_stack([row(2.0)]))
    assert rewards(other) == [5]
    assert other[0]["text", "prompt"] == "p"


def test_a_state_without_what_waits_is_torchrls() -> None:
    selector = TopKRewardSelector(2, 1)
    selector.inv(lazy_stack([row(1.0)]))
    selector.load_state_dict({})
    assert selector.inv(lazy_stack([row(2.0)])) is None


def test_empty_forgets_what_waits_and_rows_are_replaced_as_they_are() -> None:
    rb = buffer(2, 1)
    rb.extend(lazy_stack([row(1.0), row(5.0)]))
    rb[0] = row(3.0, done=False)
    assert rewards(rb) == [3]
    rb.empty()
    assert rb.extend(lazy_stack([row(7.0)])).shape == (0, 1)


def test_other_processes_do_not_see_what_waits() -> None:
    with pytest.raises(SchemaError, match="state with every write"):
        ReplayBuffer(storage=LazyTensorStorage(10), transform=TopKRewardSelector(2, 1), shared=True)


class TestTopKRewardSelector(TransformTests):
    def transform(self) -> TopKRewardSelector:
        return TopKRewardSelector(2, 1)

    def batch(self) -> TensorDictBase:
        return dense([1, 2, 4, 3])
