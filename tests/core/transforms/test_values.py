from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.errors import SchemaError
from rbtool.core.transforms.keyed import DecodeText, Normalize
from rbtool.core.transforms.returns import MultiStep, ReturnToGo
from rbtool.core.transforms.windows import NextStateReconstructor


def test_next_is_the_step_behind_where_that_continues() -> None:
    batch = TensorDict(
        {
            "observation": torch.tensor([0.0, 1.0, 2.0, 9.0, 20.0, 21.0]).unsqueeze(-1),
            "episode": torch.tensor([0, 0, 0, 0, 1, 1]),
            "step_count": torch.tensor([0, 1, 2, 7, 0, 1]),
            "next": {"done": torch.tensor([False, True, False, False, False, False]).unsqueeze(-1)},
        },
        [6],
    )
    found = NextStateReconstructor("observation")(batch)["next", "observation"].flatten()
    nan = math.nan  # an end, a gap in the count, another episode, the end of the batch
    assert torch.equal(found.isnan(), torch.tensor([1.0, nan, nan, nan, 21.0, nan]).isnan())
    assert found[[0, 4]].tolist() == [1, 21]


def test_rows_are_shifted_each_for_itself() -> None:
    batch = TensorDict({"x": torch.arange(6.0).reshape(2, 3), "episode": torch.zeros(2, 3)}, [2, 3])
    found = NextStateReconstructor(["x"], fill_value=-1)(batch)["next", "x"]
    assert found.tolist() == [[1, 2, -1], [4, 5, -1]]


def test_without_strict_what_is_not_there_is_not_compared() -> None:
    batch = TensorDict({"x": torch.arange(3.0), "next": {"done": torch.tensor([True, False, False])}}, [3])
    found = NextStateReconstructor("x", "ids", fill_value=-1, strict=False)(batch)["next", "x"]
    assert found.tolist() == [-1, 2, -1]
    found = NextStateReconstructor("x", fill_value=-1, strict=False)(batch.exclude("next"))["next", "x"]
    assert found.tolist() == [1, 2, -1]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda data: NextStateReconstructor("absent", "episode")(data), KeyError, "absent"),
        (lambda data: NextStateReconstructor("x", "ids")(data), KeyError, "ids"),
        (lambda data: NextStateReconstructor("episode")(data), TypeError, "int64, which cannot hold nan"),
        (
            lambda data: NextStateReconstructor("x")(data.exclude("episode")),
            RuntimeError,
            "marks the ends of trajectories",
        ),
        (lambda data: ReturnToGo()(data), KeyError, "next.reward"),
        (lambda data: ReturnToGo(reward_key="episode")(data), RuntimeError, "a type of floats"),
        (lambda data: ReturnToGo(gamma=1.5), ValueError, "the discount is 1.5"),
        (lambda data: Normalize("x", loc=math.nan), ValueError, "loc is not finite in 1 of 1"),
        (lambda data: Normalize("x", scale=torch.tensor([1.0, -2.0])), ValueError, "scale is -2.0"),
        (lambda data: Normalize("x", clip=0), ValueError, "clip is 0"),
        (lambda data: Normalize("x", loc=torch.zeros(2))(data), RuntimeError, r"rows of \[\], which loc \[2\]"),
        (lambda data: DecodeText("x")(data), KeyError, "x_length is not in the batch"),
    ],
)
def test_bad_input_is_told(make: Any, error: type[Exception], words: str) -> None:
    data = TensorDict({"x": torch.arange(3.0), "episode": torch.zeros(3, dtype=torch.int64)}, [3])
    with pytest.raises(error, match=words):
        make(data)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_the_return_to_go_is_the_discounted_sum_to_the_end(gamma: float) -> None:
    rewards = [1.0, 2.0, 3.0, 4.0, 5.0]
    done = torch.tensor([False, False, True, False, False])
    batch = TensorDict({"next": {"reward": torch.tensor(rewards).view(1, 5, 1), "done": done.view(1, 5, 1)}}, [1, 5])
    found = ReturnToGo(gamma)(batch)["return_to_go"].flatten().tolist()
    pieces = [rewards[start:stop] for start, stop in ((0, 3), (1, 3), (2, 3), (3, 5), (4, 5))]
    assert found == pytest.approx(
        [sum(gamma**power * reward for power, reward in enumerate(piece)) for piece in pieces]
    )


def test_padded_steps_count_nothing() -> None:
    batch = TensorDict(
        {"next": {"reward": torch.ones(1, 4, 1)}, "mask": torch.tensor([[True, True, False, False]])}, [1, 4]
    )
    assert ReturnToGo()(batch)["return_to_go"].flatten().tolist() == [2, 1, 0, 0]


def test_normalizing_moves_next_along_and_divides_by_no_zero() -> None:
    values = torch.tensor([[3.0, 5.0, 100.0], [1.0, 5.0, -100.0]])
    batch = TensorDict({"observation": values, "next": {"observation": values + 2}}, [2])
    transform = Normalize(
        "observation", loc=torch.tensor([1.0, 5.0, 0.0]), scale=torch.tensor([2.0, 0.0, 1.0]), clip=10
    )
    found = transform(batch)
    assert found["observation"].tolist() == [[1, 0, 10], [0, 0, -10]]
    assert found["next", "observation"].tolist() == [[2, 2, 10], [1, 2, -10]]
    assert transform.inverse(torch.tensor([1.0, 0.0, 10.0])).tolist() == [3, 5, 10]
    assert torch.equal(batch["observation"], values)


def test_whole_numbers_are_normalized_as_floats() -> None:
    found = Normalize("x", loc=1, scale=2)(TensorDict({"x": torch.tensor([1, 4])}, [2]))["x"]
    assert found.tolist() == [0, 1.5]


def test_text_comes_back_as_strings() -> None:
    strings = ["go", "", "größer", "a\x00b"]
    width = max(len(text.encode()) for text in strings)
    rows = torch.tensor([[*text.encode(), *[0] * (width - len(text.encode()))] for text in strings], dtype=torch.uint8)
    lengths = torch.tensor([len(text.encode()) for text in strings], dtype=torch.int32)
    entries = {"mission": rows, "mission_length": lengths}
    batch = TensorDict(entries | {"next": entries, "x": torch.zeros(4)}, [4])
    for transform in (DecodeText(), DecodeText("mission")):
        found = transform(batch)
        assert found["mission"] == found["next", "mission"] == strings
        assert "mission_length" not in found.keys(True, True)
        assert ("next", "mission_length") not in found.keys(True, True)
    assert DecodeText()(batch.reshape(2, 2))["mission"] == [strings[:2], strings[2:]]


def test_bytes_that_are_no_text_are_told() -> None:
    batch = TensorDict({"t": torch.full((1, 2), 255, dtype=torch.uint8), "t_length": torch.tensor([2])}, [1])
    with pytest.raises(ValueError, match="t is not UTF-8"):
        DecodeText()(batch)


def test_returns_of_n_step_transitions_count_every_reward_once() -> None:
    done = torch.tensor([0, 0, 1, 0, 1]).bool().view(5, 1)
    after = {"observation": torch.arange(5.0), "reward": torch.arange(5.0).view(5, 1) + 1, "done": done}
    data = TensorDict({"observation": torch.arange(5.0), "next": after}, [5])
    windows = MultiStep(gamma=1.0, n_steps=3)(data)
    assert ReturnToGo()(windows)["return_to_go"].view(-1).tolist() == [6, 5, 3, 9, 5]
    assert torch.equal(ReturnToGo()(windows)["return_to_go"], ReturnToGo()(data)["return_to_go"])
    with pytest.raises(SchemaError, match=r"next\.reward holds sums over n steps, but next\.original_reward"):
        ReturnToGo()(windows.exclude(("next", "original_reward")))
