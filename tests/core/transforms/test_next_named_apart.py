"""Transforms of `next` that are given for themselves, as TorchRL needs them: each entry is changed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.keyed import CatTensors, DecodeText, Normalize, RenameTransform, Resize, ToTensorImage
from rbtool.core.transforms.windows import FrameStack


def step(first: int) -> dict[str, Any]:
    return {
        "a": torch.full((2, 1), 1.0 + first),
        "b": torch.full((2, 2), 2.0 + first),
        "pixels": torch.full((2, 4, 5, 3), 10 + first, dtype=torch.uint8),
        "text": torch.full((2, 2), 65 + first, dtype=torch.uint8),
        "text_length": torch.tensor([1, 2], dtype=torch.int32),
    }


def batch() -> TensorDict:
    return TensorDict(step(0) | {"next": step(5)}, [2])


PAIRS = {
    "cat": lambda at: CatTensors([(*at, "a"), (*at, "b")], out_key=(*at, "o")),
    "cat, parts kept": lambda at: CatTensors([(*at, "a"), (*at, "b")], out_key=(*at, "o"), del_keys=False),
    "rename": lambda at: RenameTransform([(*at, "a")], [(*at, "o")]),
    "normalize": lambda at: Normalize((*at, "b"), loc=1.0, scale=2.0),
    "image": lambda at: ToTensorImage(in_keys=[(*at, "pixels")]),
    "resize": lambda at: Resize(3, 2, in_keys=[(*at, "pixels")]),
    "text": lambda at: DecodeText([(*at, "text")]),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("next_first", [True, False])
def test_root_and_next_apart_are_as_the_root_alone(name: str, next_first: bool) -> None:
    make = PAIRS[name]
    alone = make(())(batch())
    places: list[tuple[str, ...]] = [(), ("next",)]
    found = Compose(*(make(at) for at in (places[::-1] if next_first else places)))(batch())
    assert set(found.keys(True, True)) == set(alone.keys(True, True))
    for key in alone.keys(True, True):
        one, two = found.get(key), alone.get(key)
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_they_are_told_apart_also_where_they_are_added_one_by_one() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(batch().exclude("text", ("next", "text")))
    buffer.append_transform(ToTensorImage(in_keys=["pixels"])).append_transform(CatTensors(["a", "b"], out_key="o"))
    buffer.append_transform(CatTensors([("next", "a"), ("next", "b")], out_key=("next", "o")))
    buffer.insert_transform(0, ToTensorImage(in_keys=[("next", "pixels")]))
    found = buffer[:]
    assert found["pixels"].shape == found["next", "pixels"].shape == (2, 3, 4, 5)
    torch.testing.assert_close(found["next", "pixels"].unique(), torch.tensor([15 / 255]))
    assert found["next", "o"].tolist() == [[6, 7, 7]] * 2
    del buffer.transform.transforms[0]
    torch.testing.assert_close(buffer[:]["next", "pixels"].unique(), torch.tensor([15 / 255]))


def test_other_constants_for_next_are_those_given() -> None:
    found = Compose(Normalize("b", loc=1.0), Normalize(("next", "b"), loc=3.0))(batch())
    assert (found["b"].unique().item(), found["next", "b"].unique().item()) == (1, 4)


@pytest.mark.parametrize("next_first", [True, False])
def test_frames_of_next_are_stacked_once(next_first: bool) -> None:
    data = TensorDict(
        {"x": torch.arange(6.0).view(1, 3, 2), "next": {"x": torch.arange(6.0).view(1, 3, 2) + 2}}, [1, 3]
    )
    parts = [FrameStack(2, "x", dim=-1), FrameStack(2, ("next", "x"), dim=-1)]
    both, alone = Compose(*(parts[::-1] if next_first else parts))(data), parts[0](data)
    assert torch.equal(both["x"], alone["x"])
    assert torch.equal(both["next", "x"], alone["next", "x"])
