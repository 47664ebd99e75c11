"""Rows of images in every layout become pixels."""

from __future__ import annotations

import numpy as np
import pytest

from rbtool.core.report.pictures import as_bytes, looks_like_picture, picture_layout
from rbtool.core.ted.schema import Field

RGB = np.random.default_rng(0).integers(0, 256, (5, 11, 9, 3), np.uint8)
GREY = RGB[..., 0]
OPAQUE = np.full((5, 11, 9, 1), 255, np.uint8)


def newest(rows: np.ndarray) -> np.ndarray:
    layout = picture_layout(rows.shape[1:])
    assert layout is not None
    assert (layout.height, layout.width) == (11, 9)
    return layout.seen(rows[0]).newest(rows)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (RGB, RGB), (RGB.transpose(0, 3, 1, 2), RGB), (GREY, GREY), (GREY[..., None], GREY), (GREY[:, None], GREY),
        (np.stack([GREY[::-1]] * 3 + [GREY], 1), GREY),  # four grey frames
        (np.stack([GREY[::-1]] * 3 + [GREY], -1), GREY),
        (np.concatenate([RGB[::-1], RGB[::-1], RGB], -1), RGB),  # three RGB frames along the channels
        (np.concatenate([RGB[::-1], RGB], -1).transpose(0, 3, 1, 2), RGB),
        (np.stack([RGB[::-1], RGB], 1), RGB),  # in a dimension of their own
        (np.stack([RGB[::-1], RGB], 1).transpose(0, 1, 4, 2, 3), RGB),
        (np.concatenate([RGB, OPAQUE], -1), RGB),
        (np.concatenate([GREY[..., None], OPAQUE], -1), GREY),
    ],
)  # fmt: skip
def test_the_newest_frame_is_found_in_every_layout(rows: np.ndarray, expected: np.ndarray) -> None:
    assert np.array_equal(newest(rows), expected)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5, 6), (0, 4), (17, 64, 64), (2, 2, 64, 64)])
def test_other_shapes_are_no_pictures(shape: tuple[int, ...]) -> None:
    assert picture_layout(shape) is None


def test_bytes_are_kept_and_other_numbers_scaled() -> None:
    assert as_bytes(RGB, 0, 255) is RGB
    assert as_bytes(np.array([0.0, 0.5, 1.0, np.nan, np.inf, -np.inf]), 0, 1).tolist() == [0, 128, 255, 0, 255, 0]
    assert as_bytes(np.array([-1.0, 0.0, 1.0], np.float16), -1, 1).tolist() == [0, 128, 255]
    assert as_bytes(np.array([False, True]), 0, 1).tolist() == [0, 255]
    assert as_bytes(np.array([7, 7]), 7, 7).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "shape", "role", "expected"),
    [
        ("uint8", (64, 64, 3), "observation", True), ("uint8", (84, 84), "observation", True),
        ("float32", (3, 64, 64), "observation", True), ("float32", (28, 28), "observation", False),  # a matrix
        ("uint8", (7, 7, 3), "observation", False), ("uint8", (64, 64, 3), "action", False),
        ("int64", (64, 64, 3), "observation", False),
    ],
)  # fmt: skip
def test_pictures_are_recognised_by_dtype_shape_and_role(dtype: str, shape: tuple, role: str, expected: bool) -> None:
    assert looks_like_picture(Field(("x",), dtype, shape, role)) is expected
