"""Resize: images of every layout and type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rbtool import Resize
from rbtool.core.errors import UsageError

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "float64", "int32"])
@pytest.mark.parametrize(
    ("shape", "to"),
    [((12, 10), (6, 5)), ((12, 10, 3), (6, 5, 3)), ((3, 12, 10), (3, 6, 5)), ((5, 4, 1), (6, 5, 1)), ((6, 5), (6, 5))],
)
def test_images_are_scaled_on_both_sides(rows, do, dtype, shape, to):
    values = {name: (RNG.random((4, *shape)) * 255).astype(dtype) for name in ("image", "next.image")}
    found = do(rows([3, 1], **values), resize="image=6x5")
    for name, images in values.items():
        assert (found[name].dtype, found[name].shape) == (np.dtype(dtype), (4, *to))
        assert found[name].min() >= images.min()
        assert found[name].max() <= images.max()


def test_it_is_the_transform_of_this_name(rows, do):
    images = RNG.integers(0, 256, (3, 3, 20, 16)).astype(np.uint8)
    found = do(rows([3], image=images), resize="image=8x12")["image"]
    assert np.array_equal(found, Resize((8, 12)).change(torch.from_numpy(images), ("image",), None).numpy())


def test_layouts_agree(rows, do):
    images = RNG.random((2, 20, 16, 3)).astype(np.float32)
    last = do(rows([2], image=images), resize="image=8x12:hwc")["image"]
    first = do(rows([2], image=np.moveaxis(images, 3, 1).copy()), resize="image=8x12:chw")["image"]
    assert np.array_equal(np.moveaxis(last, 3, 1), first)


def test_what_surrounds_an_image_never_matters(rows, do):
    images = RNG.integers(0, 256, (64, 30, 31, 3)).astype(np.uint8)
    together = do(rows([64], image=images), resize="image=7x9")["image"]
    alone = [do(rows([1], image=images[row : row + 1]), resize="image=7x9")["image"] for row in range(64)]
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize(
    ("shape", "resize", "words"),
    [
        ((8, 8), "image=8", "height x width like 84x84"),
        ((8, 8), "image=0x8", "height x width like 84x84"),
        ((8,), "image=8x8", r"its rows are \[8\]"),
        ((2, 8, 8, 3), "image=8x8", r"its rows are \[2, 8, 8, 3\]"),
        ((8, 8, 8), "image=4x4", r"which dimension of \[8, 8, 8\] has the channels is unclear"),
        ((3, 8, 3), "image=4x4", "is unclear"),
        ((8, 8, 8), "image=4x4:cwh", "expected hwc or chw; did you mean 'chw'"),
    ],
)
def test_what_cannot_be_resized(rows, do, shape, resize, words):
    with pytest.raises(UsageError, match=words):
        do(rows([2], image=np.zeros((2, *shape), np.uint8)), resize=resize)
