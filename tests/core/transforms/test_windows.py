from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.transforms.windows import FrameStack, RandomCropTensorDict


def rows(count: int, length: int) -> TensorDict:
    return TensorDict({"step": torch.arange(length).expand(count, length).contiguous()}, [count, length])


def vectors(count: int, length: int) -> TensorDict:
    return TensorDict({"o": torch.zeros(count, length, 4)}, [count, length])


def seeded(transform: Any, seed: int = 0) -> Any:
    transform.generator = torch.Generator().manual_seed(seed)
    return transform


def test_every_start_is_drawn_equally_often_the_last_included() -> None:
    found = seeded(RandomCropTensorDict(3))(rows(6000, 8))["step"]
    assert found.shape == (6000, 3)
    assert bool((found[:, 1:] == found[:, :-1] + 1).all())
    counts = Counter(found[:, 0].tolist())
    assert set(counts) == set(range(6))
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5  # chi-square of 5, one in a thousand


def test_the_whole_length_may_be_asked_for() -> None:
    assert torch.equal(RandomCropTensorDict(8)(rows(3, 8))["step"], rows(3, 8)["step"])


def test_windows_lie_in_the_steps_that_are_real() -> None:
    data = rows(500, 8)
    lengths = torch.randint(3, 9, (500,), generator=torch.Generator().manual_seed(1))
    data["mask"] = torch.arange(8) < lengths.unsqueeze(1)
    found = seeded(RandomCropTensorDict(3, mask_key="mask"))(data)
    assert bool(found["mask"].all())
    assert bool((found["step"][:, -1] == lengths - 1).any())


def test_time_may_be_another_dimension() -> None:
    data = TensorDict({"x": torch.arange(24).reshape(4, 3, 2)}, [4, 3])
    found = seeded(RandomCropTensorDict(2, sample_dim=-2))(data)["x"]
    assert found.shape == (2, 3, 2)
    assert bool((found[1] == found[0] + 6).all())


def test_the_buffers_generator_decides() -> None:
    def batches(seed: int) -> list[Any]:
        buffer = ReplayBuffer(
            storage=TensorStorage(rows(20, 9)),
            transform=RandomCropTensorDict(4),
            batch_size=5,
            generator=torch.Generator().manual_seed(seed),
        )
        return [buffer.sample()["step"] for _ in range(3)]

    assert torch.equal(torch.stack(batches(1)), torch.stack(batches(1)))
    assert not torch.equal(torch.stack(batches(1)), torch.stack(batches(2)))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: RandomCropTensorDict(9)(rows(2, 8)),
            RuntimeError,
            "sub_seq_len is 9, expected at most .* 8",
        ),
        (lambda: RandomCropTensorDict(2, mask_key="m")(rows(2, 8)), KeyError, "m is not in the batch"),
        (lambda: RandomCropTensorDict(2, -3)(rows(2, 8)), RuntimeError, r"shape \[2, 8\]"),
        (lambda: RandomCropTensorDict(0), ValueError, "sub_seq_len is 0"),
        (lambda: FrameStack(0), ValueError, "n is 0"),
        (lambda: FrameStack(2, dim=1), ValueError, "below 0"),
        (lambda: FrameStack(2, padding="mirror"), ValueError, "'mirror', expected one of same, constant"),  # type: ignore[arg-type]
        (lambda: FrameStack(2, "step", dim=-1)(rows(2, 3)), RuntimeError, r"shape \[\], .* no dimension dim=-1"),
        (lambda: FrameStack(3, ["o"])(vectors(2, 3)), RuntimeError, r"o has frames of the shape \[4\], .* dim=-3"),
        (lambda: FrameStack(2, "step")(rows(2, 3)[0]), RuntimeError, "along the time of a batch"),
        (lambda: FrameStack(2, "step", dim=-1, done_key="doen")(rows(2, 3)), KeyError, "doen is not in the batch"),
    ],
)
def test_bad_input_is_told(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_dimension_from_the_front_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="sample_dim is 1"):
        RandomCropTensorDict(2, 1)


def video(ends: list[int], length: int = 6) -> TensorDict:
    """Frames 10, 11, … with ends inside, two rows of them; a frame is one number `[1, 1, 1]`."""
    frames = torch.arange(10, 10 + length).float().view(1, length, 1, 1, 1).repeat(2, 1, 1, 1, 1)
    done = torch.zeros(2, length, 1, dtype=torch.bool)
    done[:, ends] = True
    following = torch.where(done[..., None, None], 90.0, frames + 1)
    return TensorDict({"pixels": frames, "next": {"pixels": following, "done": done}}, [2, length])


@pytest.mark.parametrize(("padding", "first"), [("same", 10), ("constant", -1)])
def test_frames_are_stacked_and_next_is_one_ahead(padding: Any, first: int) -> None:
    found = FrameStack(3, padding=padding, padding_value=-1)(video([2]))
    stacks = found["pixels"][0, ..., 0, 0].int().tolist()
    after = found["next", "pixels"][1, ..., 0, 0].int().tolist()
    begin = 13 if padding == "same" else -1
    assert stacks == [
        [first, first, 10], [first, 10, 11], [10, 11, 12], [begin, begin, 13], [begin, 13, 14], [13, 14, 15],
    ]  # fmt: skip
    assert after == [
        [first, 10, 11], [10, 11, 12], [11, 12, 90], [begin, 13, 14], [13, 14, 15], [14, 15, 16],
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_a_stack_has_as_many_frames_as_asked_for(n: int) -> None:
    found = FrameStack(n, out_keys="stack")(video([]))
    assert found["stack"].shape == found["next", "stack"].shape == (2, 6, n, 1, 1)
    assert torch.equal(found["stack"][:, :, -1:], found["pixels"])
