"""Images as OpenVLA sees them: against NumPy loops and Pillow, and what is refused."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from rbtool import OpenVLAImagePreprocessor

BACKENDS = ["torch_reference", "torchvision", "pil"]
Pixels = NDArray[np.float64]


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def jpeg(image: torch.Tensor, quality: int = 95) -> Pixels:
    stored = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(stored, "JPEG", quality=quality, subsampling=2)
    return np.asarray(Image.open(stored), np.float64)


def lanczos(distance: float) -> float:
    if not distance:
        return 1.0
    angle = math.pi * distance
    return 3 * math.sin(angle) * math.sin(angle / 3) / angle**2 if abs(distance) < 3 else 0.0


def resized_rows(rows: Pixels, size: int) -> Pixels:
    """Resize the first axis, sample by sample."""
    made = np.zeros((size, *rows.shape[1:]))
    ratio = len(rows) / size
    for number in range(size):
        centre = (number + 0.5) * ratio - 0.5
        weights = [lanczos((place - centre) / max(ratio, 1)) for place in range(len(rows))]
        made[number] = sum(weight * row for weight, row in zip(weights, rows, strict=True)) / sum(weights)
    return made


def enlarged_rows(rows: Pixels) -> Pixels:
    """Sample the middle sqrt(0.9) of the first axis as often as it has entries."""
    side, last = math.sqrt(0.9), len(rows) - 1
    made = np.zeros_like(rows)
    for number in range(len(rows)):
        place = last * ((1 - side) / 2 + side * number / last)
        below = int(place)
        made[number] = rows[below] + (place - below) * (rows[min(below + 1, last)] - rows[below])
    return made


def both_ways(change: Any, pixels: Pixels, *size: int) -> Pixels:
    made: Pixels = change(change(pixels, *size).swapaxes(0, 1), *size).swapaxes(0, 1)
    return made


def assert_rounded(found: torch.Tensor, exact: Pixels) -> None:
    """Compare with exact values that were rounded; at a half either neighbour is right."""
    whole = np.clip(np.rint(exact), 0, 255)
    clear = np.abs(exact - np.floor(exact) - 0.5) > 1e-3
    difference = np.abs(found.permute(1, 2, 0).numpy() - whole)
    assert difference.max() <= 1
    assert not difference[clear].any()


@settings(max_examples=25, deadline=None)
@given(height=st.integers(1, 40), width=st.integers(1, 40), size=st.integers(1, 30), quality=st.integers(1, 100))
def test_the_reference_is_jpeg_and_lanczos(height: int, width: int, size: int, quality: int) -> None:
    image = images(3, height, width, seed=height * width)
    found = OpenVLAImagePreprocessor(size=size, jpeg_quality=quality)(image)
    assert_rounded(found, both_ways(resized_rows, jpeg(image, quality), size))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_crop_enlarges_the_centre(backend: str) -> None:
    image = images(3, 24, 32)
    small = OpenVLAImagePreprocessor(size=17, backend=backend)(image)
    found = OpenVLAImagePreprocessor(size=17, backend=backend, center_crop=True)(image)
    exact = both_ways(enlarged_rows, small.permute(1, 2, 0).numpy().astype(np.float64))
    assert_rounded(found, exact * 255.5 / 255 - 0.5)  # whole numbers are cut there, not rounded


def test_pillow_is_pillow() -> None:
    image = images(3, 30, 20)
    plain = Image.fromarray(jpeg(image).astype(np.uint8)).resize((8, 8), Image.Resampling.LANCZOS)
    found = OpenVLAImagePreprocessor(size=8, backend="pil")(image)
    assert np.array_equal(found.permute(1, 2, 0), plain)


def test_backends_agree_on_smooth_images() -> None:
    ramp = torch.linspace(0, 255, 96).to(torch.uint8).expand(3, 64, 96)
    made = [OpenVLAImagePreprocessor(size=32, backend=backend)(ramp).int() for backend in BACKENDS]
    assert max(int((one - made[0]).abs().max()) for one in made) <= 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("crop", [False, True])
def test_one_colour_stays_that_colour(backend: str, crop: bool) -> None:
    prepare = OpenVLAImagePreprocessor(size=19, backend=backend, center_crop=crop)
    for value in (0, 128, 255):
        assert prepare(torch.full((1, 3, 40, 25), value, dtype=torch.uint8)).unique().tolist() == [value]


@pytest.mark.parametrize("batch", [(), (2,), (0,), (2, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_of_any_shape(batch: tuple[int, ...], channels: int) -> None:
    given = images(*batch, channels, 9, 12)
    found = OpenVLAImagePreprocessor(size=5)(given)
    assert found.shape == (*batch, 3, 5, 5)
    assert found.dtype == torch.uint8
    alone = [OpenVLAImagePreprocessor(size=5)(one) for one in given.reshape(-1, channels, 9, 12)]
    assert all(map(torch.equal, found.reshape(-1, 3, 5, 5), alone))


def test_the_normalization_may_be_done_several_times() -> None:
    given, statistics = images(2, 3, 9, 12), ([[0.5, 0.4, 0.3], [0.0, 0.0, 0.0]], [[0.2, 0.3, 0.4], [1.0, 1.0, 1.0]])
    plain = OpenVLAImagePreprocessor(size=5)(given) / 255
    found = OpenVLAImagePreprocessor(size=5, mean=statistics[0], std=statistics[1])(given)
    mean, std = (torch.tensor(one[0]).reshape(3, 1, 1) for one in statistics)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.cat([(plain - mean) / std, plain], 1))
    first = OpenVLAImagePreprocessor(size=5, mean=statistics[0][0], std=torch.tensor(statistics[1][0]))(given)
    assert torch.equal(first, found[:, :3])


@pytest.mark.parametrize("change", [lambda x: x / 255, lambda x: x.double(), lambda x: x.long()])
def test_floats_and_other_integers_are_the_same_image(change: Any) -> None:
    given = images(3, 9, 12)
    prepare = OpenVLAImagePreprocessor(size=5)
    assert torch.equal(prepare(change(given)), prepare(given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(5, 5), "expected .*height, width"),
        (torch.zeros(5, 5, 3), "expected .*height, width"),
        (torch.zeros(3, 0, 5), "expected .*height, width"),
        (torch.zeros(3, 5, 5, dtype=torch.bool), "bool"),
        (torch.full((3, 5, 5), math.nan), "not from 0 to 255"),
        (torch.full((3, 5, 5), -1), "not from 0 to 255"),
        (torch.full((3, 5, 5), 256), "not from 0 to 255"),
        (np.zeros((3, 5, 5)), "ndarray"),
    ],
)
def test_what_is_no_image_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenVLAImagePreprocessor()(given)


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0}, {"size": 2.5}, {"jpeg_quality": 0}, {"jpeg_quality": 101}, {"backend": "tensorflow"},
        {"mean": [0.5] * 3}, {"std": [0.5] * 3}, {"mean": [0.5] * 2, "std": [1.0] * 2}, {"mean": "x", "std": "x"},
        {"mean": [0.5] * 3, "std": [[0.5] * 3]}, {"mean": [0.5] * 3, "std": [0.0] * 3},
        {"mean": [math.nan] * 3, "std": [1.0] * 3},
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        OpenVLAImagePreprocessor(**arguments)
