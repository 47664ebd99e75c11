"""Transforms of values and images, `in_keys` and `out_keys`, and `next` that is given for itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.transforms.base import Compose, Transform
from rbtool.core.transforms.keyed import (
    CatTensors,
    DecodeText,
    ExcludeTransform,
    Normalize,
    RenameTransform,
    Resize,
    SelectTransform,
    ToTensorImage,
)
from rbtool.core.transforms.returns import ReturnToGo
from rbtool.core.transforms.windows import FrameStack, NextStateReconstructor


def test_the_next_state_is_that_of_the_following_step_of_the_trajectory() -> None:
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


def test_next_states_stay_in_their_row_of_the_batch() -> None:
    batch = TensorDict({"x": torch.arange(6.0).reshape(2, 3), "episode": torch.zeros(2, 3)}, [2, 3])
    found = NextStateReconstructor(["x"], fill_value=-1)(batch)["next", "x"]
    assert found.tolist() == [[1, 2, -1], [4, 5, -1]]


def test_missing_signals_are_ignored_unless_strict() -> None:
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
        (lambda data: NextStateReconstructor("x")(data.exclude("episode")), RuntimeError, "marks the ends of traject"),
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
def test_values_and_keys_without_sense_are_refused(make: Any, error: type[Exception], words: str) -> None:
    data = TensorDict({"x": torch.arange(3.0), "episode": torch.zeros(3, dtype=torch.int64)}, [3])
    with pytest.raises(error, match=words):
        make(data)


def test_normalizing_includes_next_and_never_divides_by_zero() -> None:
    values = torch.tensor([[3.0, 5.0, 100.0], [1.0, 5.0, -100.0]])
    batch = TensorDict({"observation": values, "next": {"observation": values + 2}}, [2])
    loc, scale = torch.tensor([[1.0, 5.0, 0.0], [2.0, 0.0, 1.0]])
    transform = Normalize("observation", loc=loc, scale=scale, clip=10)
    found = transform(batch)
    assert found["observation"].tolist() == [[1, 0, 10], [0, 0, -10]]
    assert found["next", "observation"].tolist() == [[2, 2, 10], [1, 2, -10]]
    assert transform.inverse(torch.tensor([1.0, 0.0, 10.0])).tolist() == [3, 5, 10]
    assert torch.equal(batch["observation"], values)
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
    broken = TensorDict({"t": torch.full((1, 2), 255, dtype=torch.uint8), "t_length": torch.tensor([2])}, [1])
    with pytest.raises(ValueError, match="t is not UTF-8"):
        DecodeText()(broken)


def batch(pixels: torch.Tensor, shape: tuple[int, ...] = (2,)) -> TensorDict:
    return TensorDict({"pixels": pixels, "next": {"pixels": pixels}}, shape)


IMAGES = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)


def test_integer_images_become_fractions_with_channels_first() -> None:
    found = ToTensorImage()(batch(IMAGES))
    expected = IMAGES.permute(0, 3, 1, 2) / 255
    for value in (found["pixels"], found["next", "pixels"]):
        assert value.dtype == torch.float32
        assert value.is_contiguous()
        assert torch.equal(value, expected)


@pytest.mark.parametrize(("from_int", "divisor"), [(None, 1), (True, 255), (False, 1)])
def test_images_are_divided_by_default_only_if_they_are_integers(from_int: bool | None, divisor: int) -> None:
    found = ToTensorImage(from_int, dtype=torch.float64)(batch(IMAGES.float()))["pixels"]
    assert torch.equal(found, IMAGES.permute(0, 3, 1, 2).double() / divisor)
    assert ToTensorImage(from_int=False)(batch(IMAGES))["pixels"].max() == IMAGES.max()


@pytest.mark.parametrize(("channels", "moved"), [(1, True), (3, True), (4, True), (7, False)])
def test_images_with_channels_first_are_recognised_by_the_last_dimension(channels: int, moved: bool) -> None:
    images = torch.zeros(2, 8, 9, channels, dtype=torch.uint8)
    found = ToTensorImage(shape_tolerant=True)(batch(images))["pixels"]
    assert found.shape == ((2, channels, 8, 9) if moved else (2, 8, 9, channels))


def test_a_single_image_gets_a_batch_dimension_on_request() -> None:
    found = ToTensorImage(unsqueeze=True)(TensorDict({"pixels": IMAGES[0]}, []))["pixels"]
    assert found.shape == (1, 3, 4, 5)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_images_are_scaled_to_the_size_asked_for(mode: str, dtype: torch.dtype) -> None:
    images = torch.full((2, 3, 1, 16, 12), 200, dtype=dtype)
    found = Resize(8, 6, mode)(batch(images, (2, 3)))
    assert found["pixels"].shape == (2, 3, 1, 8, 6)
    assert found["pixels"].dtype == dtype
    assert torch.allclose(found["pixels"].double(), torch.tensor(200.0, dtype=torch.float64))
    assert torch.equal(found["next", "pixels"], found["pixels"])


def test_shrinking_is_smoothed() -> None:
    stripes = torch.tensor([0, 255], dtype=torch.uint8).repeat(8).expand(1, 1, 16, 16).contiguous()
    small = Resize(4)(batch(stripes, (1,)))["pixels"].double()
    assert float(small.std()) < 12  # without smoothing it would be 0 or 255 all over, or stripes again
    assert 110 < float(small.mean()) < 145


def test_scaling_agrees_with_the_mean_of_blocks() -> None:
    images = torch.rand(3, 1, 8, 8)
    found = Resize([4], interpolation="area")(batch(images, (3,)))["pixels"]
    expected = np.asarray(images).reshape(3, 1, 4, 2, 4, 2).mean((3, 5))
    assert np.allclose(np.asarray(found), expected, atol=1e-6)


def test_an_image_of_the_requested_size_is_not_changed() -> None:
    images = torch.rand(2, 1, 4, 5)
    assert torch.equal(Resize(4, 5)(batch(images))["pixels"], images)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Resize(0), "the size is 0"),
        (lambda: Resize([3, 4, 5]), "one number or two"),
        (lambda: Resize([3], 4), "one number or two"),
        (lambda: Resize(3, interpolation="cubic"), "'cubic', expected one of nearest"),
        (lambda: ToTensorImage(in_keys=["a"], out_keys=["b", "c"]), "1 in_keys, but 2 out_keys"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("transform", [Resize(3), ToTensorImage()])
def test_entries_that_are_no_images_are_refused(transform: Any) -> None:
    with pytest.raises(RuntimeError, match="an image of"):
        transform(TensorDict({"pixels": torch.zeros(2, 3)}, [2]))
    with pytest.raises(KeyError, match="pixels is not in the batch"):
        transform(TensorDict({"other": torch.zeros(2, 3)}, [2]))


def steps(count: int = 4) -> TensorDict:
    """Steps in TED: two observations, an action, and what follows."""
    number = torch.arange(count).float().unsqueeze(-1)
    observations = {"a": number, "b": torch.ones(count, 2), "info": {"c": torch.zeros(count)}}
    flags = {name: torch.zeros(count, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    following = observations | {"a": number + 1} | flags | {"reward": torch.ones(count, 1)}
    return TensorDict(observations | {"action": torch.ones(count, 3), "next": following}, [count])


def keys(data: Any) -> set[str]:
    return {".".join((key,) if isinstance(key, str) else key) for key in data.keys(True, True)}


def sampled(transform: Transform) -> Any:
    """Draw a batch of a buffer that has this transform."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=3, transform=transform)
    buffer.extend(steps())
    return buffer.sample()


ENDS = {"next.done", "next.terminated", "next.truncated", "next.reward", "index"}


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (SelectTransform("a"), {"a", "next.a"} | ENDS),
        (SelectTransform("a", "absent"), {"a", "next.a"} | ENDS),
        (SelectTransform(("info", "c"), keep_dones=False), {"info.c", "next.info.c", "next.reward", "index"}),
        (SelectTransform("info", keep_rewards=False), {"info.c", "next.info.c", "index"} | ENDS - {"next.reward"}),
        (SelectTransform(("next", "a"), keep_dones=False, keep_rewards=False), {"next.a", "index"}),
    ],
)
def test_selection_includes_next(transform: Transform, expected: set[str]) -> None:
    assert keys(sampled(transform)) == expected


@pytest.mark.parametrize(
    ("transform", "gone"),
    [
        (ExcludeTransform("a"), {"a", "next.a"}),
        (ExcludeTransform("a", "b", "absent"), {"a", "next.a", "b", "next.b"}),
        (ExcludeTransform(("next", "a")), {"next.a"}),
        (ExcludeTransform("info"), {"info.c", "next.info.c"}),
        (ExcludeTransform("a", inverse=True), {"a", "next.a"}),
    ],
)
def test_exclusion_includes_next(transform: Transform, gone: set[str]) -> None:
    assert keys(sampled(transform)) == (keys(steps()) | {"index"}) - gone


def test_inverse_exclusion_keeps_an_entry_out_of_the_storage() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=ExcludeTransform("a", inverse=True))
    data = steps()
    buffer.extend(data)
    assert "a" not in keys(buffer.storage[:])
    assert "a" in keys(data)


@pytest.mark.parametrize(
    ("transform", "so"),
    [
        (RenameTransform(["observaton"], ["seen"]), ", so it cannot be renamed to seen"),
        (CatTensors(["observaton", "action"], "all"), ", so it cannot be joined with others"),
        (Normalize(["observaton"]), ""),
    ],
)
def test_a_missing_entry_is_named_with_the_nearest(transform: Any, so: str) -> None:
    with pytest.raises(MissingKeyError) as caught:
        transform(TensorDict(observation=torch.zeros(2, 3), action=torch.zeros(2, 1), batch_size=[2]))
    assert str(caught.value) == f"observaton is not in the batch{so}; did you mean 'observation'?"
    assert caught.value.__notes__ == ["hint: it has observation, action"]


@pytest.mark.parametrize("create_copy", [False, True])
def test_renaming_includes_next(create_copy: bool) -> None:
    batch = sampled(RenameTransform(["a", ("info", "c")], ["x", "c"], create_copy=create_copy))
    assert {"x", "next.x", "c", "next.c"} <= keys(batch)
    assert ({"a", "next.a", "info.c"} <= keys(batch)) is create_copy
    assert torch.equal(batch["next", "x"], batch["x"] + 1)


def test_renaming_works_on_the_way_in() -> None:
    transform = RenameTransform(["b"], ["z"], in_keys_inv=["stored"], out_keys_inv=["a"])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=transform)
    buffer.extend(steps())
    assert {"stored", "next.stored"} <= keys(buffer.storage[:])
    assert "a" not in keys(buffer.storage[:])


def test_explicit_names_under_next_are_renamed_once() -> None:
    batch = RenameTransform(["a", ("next", "a")], ["x", ("next", "y")])(steps())
    assert {"x", "next.y"} <= keys(batch)
    assert "next.x" not in keys(batch)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((["a"], ["x", "y"]), ValueError, "1 in_keys and 2 out_keys"),
        ((["a", "b"], ["b", "c"]), ValueError, "b is in in_keys and in out_keys"),
        ((["a", "b"], ["x", "x"]), ValueError, "twice"),
        ((["a"], ["x"], ["y"]), ValueError, "both or neither"),
        (([7], ["x"]), ValueError, "the key is 7"),
    ],
)
def test_renamings_without_sense_are_refused(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RenameTransform(*arguments)


def test_a_missing_entry_is_a_key_error_unless_it_is_tolerated() -> None:
    transform = RenameTransform(["absent"], ["x"])
    with pytest.raises(KeyError, match="absent"):
        transform(steps())
    transform.missing_tolerance = True
    assert keys(transform(steps())) == keys(steps())


@pytest.mark.parametrize("sort", [True, False])
def test_joining_includes_next(sort: bool) -> None:
    batch = sampled(CatTensors(["b", "a"], out_key="observation", sort=sort))
    place = 0 if sort else 2
    assert batch["observation"].shape == (3, 3)
    assert torch.equal(batch["next", "observation"][:, place], batch["observation"][:, place] + 1)
    assert not {"a", "b", "next.a", "next.b"} & keys(batch)


def test_joined_parts_stay_on_request() -> None:
    assert {"a", "b", "next.a", "observation_vector"} <= keys(sampled(CatTensors(["a", "b"], del_keys=False)))


def test_parts_that_next_lacks_are_joined_at_the_root_only() -> None:
    batch = CatTensors(["a", "action"], out_key="both")(steps())
    assert "both" in keys(batch)
    assert {"next.a"} <= keys(batch)
    assert "next.both" not in keys(batch)


def test_a_part_without_the_dimension_gets_it_on_request() -> None:
    batch = CatTensors(["a", ("info", "c")], out_key="x", dim=-1, unsqueeze_if_oor=True)(steps())
    assert batch["x"].shape == (4, 2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: CatTensors()(steps()), ValueError, "no in_keys"),
        (lambda: CatTensors(["a", "absent"])(steps()), KeyError, "absent"),
        (lambda: CatTensors(["a", "b"], dim=0)(steps()), RuntimeError, "cannot be joined along dimension 0"),
        (lambda: SelectTransform("a")(torch.zeros(3)), RuntimeError, "needs a tensordict, found a Tensor"),
    ],
)
def test_joins_and_selections_without_sense_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    "transform", [SelectTransform("a"), ExcludeTransform("a"), RenameTransform(["a"], ["x"]), CatTensors(["a", "b"])]
)
def test_the_given_data_do_not_change(transform: Transform) -> None:
    data = steps()
    transform(data)
    assert keys(data) == keys(steps())
    assert (data == steps()).all()


def step(first: int) -> dict[str, Any]:
    return {
        "a": torch.full((2, 1), 1.0 + first),
        "b": torch.full((2, 2), 2.0 + first),
        "pixels": torch.full((2, 4, 5, 3), 10 + first, dtype=torch.uint8),
        "text": torch.full((2, 2), 65 + first, dtype=torch.uint8),
        "text_length": torch.tensor([1, 2], dtype=torch.int32),
    }


def batch_with_another_next() -> TensorDict:
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
def test_transforms_of_root_and_next_give_the_same_as_one_of_the_root(name: str, next_first: bool) -> None:
    make = PAIRS[name]
    alone = make(())(batch_with_another_next())
    places: list[tuple[str, ...]] = [(), ("next",)]
    found = Compose(*(make(at) for at in (places[::-1] if next_first else places)))(batch_with_another_next())
    assert set(found.keys(True, True)) == set(alone.keys(True, True))
    for key in alone.keys(True, True):
        one, two = found.get(key), alone.get(key)
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_transforms_of_root_and_next_can_be_added_one_by_one() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(batch_with_another_next().exclude("text", ("next", "text")))
    buffer.append_transform(ToTensorImage(in_keys=["pixels"])).append_transform(CatTensors(["a", "b"], out_key="o"))
    buffer.append_transform(CatTensors([("next", "a"), ("next", "b")], out_key=("next", "o")))
    buffer.insert_transform(0, ToTensorImage(in_keys=[("next", "pixels")]))
    found = buffer[:]
    assert found["pixels"].shape == found["next", "pixels"].shape == (2, 3, 4, 5)
    torch.testing.assert_close(found["next", "pixels"].unique(), torch.tensor([15 / 255]))
    assert found["next", "o"].tolist() == [[6, 7, 7]] * 2
    del buffer.transform.transforms[0]
    torch.testing.assert_close(buffer[:]["next", "pixels"].unique(), torch.tensor([15 / 255]))


def test_next_can_have_constants_of_its_own() -> None:
    found = Compose(Normalize("b", loc=1.0), Normalize(("next", "b"), loc=3.0))(batch_with_another_next())
    assert (found["b"].unique().item(), found["next", "b"].unique().item()) == (1, 4)


@pytest.mark.parametrize("next_first", [True, False])
def test_frames_of_next_are_stacked_once(next_first: bool) -> None:
    frames = torch.arange(6.0).view(1, 3, 2)
    data = TensorDict({"x": frames, "next": {"x": frames + 2}}, [1, 3])
    parts = [FrameStack(2, "x", dim=-1), FrameStack(2, ("next", "x"), dim=-1)]
    both, alone = Compose(*(parts[::-1] if next_first else parts))(data), parts[0](data)
    assert torch.equal(both["x"], alone["x"])
    assert torch.equal(both["next", "x"], alone["next", "x"])
