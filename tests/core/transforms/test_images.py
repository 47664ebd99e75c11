from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.transforms.keyed import Resize, ToTensorImage


def batch(pixels: torch.Tensor, shape: tuple[int, ...] = (2,)) -> TensorDict:
    return TensorDict({"pixels": pixels, "next": {"pixels": pixels}}, shape)


IMAGES = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)


def test_whole_numbers_become_fractions_with_channels_first_in_root_and_next() -> None:
    found = ToTensorImage()(batch(IMAGES))
    expected = IMAGES.permute(0, 3, 1, 2) / 255
    for value in (found["pixels"], found["next", "pixels"]):
        assert value.dtype == torch.float32
        assert value.is_contiguous()
        assert torch.equal(value, expected)


@pytest.mark.parametrize(("from_int", "divisor"), [(None, 1), (True, 255), (False, 1)])
def test_floats_are_divided_only_if_told(from_int: bool | None, divisor: int) -> None:
    found = ToTensorImage(from_int, dtype=torch.float64)(batch(IMAGES.float()))["pixels"]
    assert torch.equal(found, IMAGES.permute(0, 3, 1, 2).double() / divisor)


def test_whole_numbers_may_stay_as_they_are() -> None:
    assert ToTensorImage(from_int=False)(batch(IMAGES))["pixels"].max() == IMAGES.max()


@pytest.mark.parametrize(("channels", "moved"), [(1, True), (3, True), (4, True), (7, False)])
def test_images_with_channels_first_already_are_told_by_the_last_dimension(channels: int, moved: bool) -> None:
    images = torch.zeros(2, 8, 9, channels, dtype=torch.uint8)
    found = ToTensorImage(shape_tolerant=True)(batch(images))["pixels"]
    assert found.shape == ((2, channels, 8, 9) if moved else (2, 8, 9, channels))


def test_one_image_may_get_a_batch_dimension() -> None:
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


def test_an_image_of_the_size_is_left_alone() -> None:
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
def test_what_is_no_image_is_refused(transform: Any) -> None:
    with pytest.raises(RuntimeError, match="an image of"):
        transform(TensorDict({"pixels": torch.zeros(2, 3)}, [2]))
    with pytest.raises(KeyError, match="pixels is not in the batch"):
        transform(TensorDict({"other": torch.zeros(2, 3)}, [2]))
