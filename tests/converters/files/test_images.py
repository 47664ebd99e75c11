"""Images: pixels are those of Pillow, forms come from headers, and damaged ones are errors."""

from __future__ import annotations

import contextlib
import io
import random

import numpy as np
import pytest
from mutations import mutated
from PIL import Image

from rbtool.converters.files.images import ImageForm, decode_image, image_form, is_image, require_images
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError

DRAW = np.random.default_rng(3)
PIXELS = {
    "L": DRAW.integers(0, 256, (5, 7), np.uint8),
    "LA": DRAW.integers(0, 256, (5, 7, 2), np.uint8),
    "RGB": DRAW.integers(0, 256, (5, 7, 3), np.uint8),
    "RGBA": DRAW.integers(0, 256, (5, 7, 4), np.uint8),
    "I;16": DRAW.integers(0, 1 << 16, (5, 7), np.uint16),
}


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    image.save(held, kind)
    return held.getvalue()


@pytest.mark.parametrize("mode", PIXELS)
def test_pixels_are_those_that_were_written(mode: str) -> None:
    pixels = PIXELS[mode]
    data = encoded(Image.fromarray(pixels))
    form = image_form(data, "it")
    assert form == ImageForm(str(pixels.dtype), (5, 7, pixels.shape[2] if pixels.ndim == 3 else 1))
    found = decode_image(data, form, "it")
    assert is_image(data)
    assert (found.dtype, found.tobytes()) == (pixels.dtype, pixels.tobytes())
    assert found.flags.writeable


@pytest.mark.parametrize("mode", ["1", "P", "CMYK"])
def test_other_modes_become_plain_pixels(mode: str) -> None:
    image = Image.fromarray(PIXELS["RGB"]).convert(mode)
    data = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    form = image_form(data, "it")
    assert form.shape == (5, 7, 1 if mode == "1" else 3)
    with Image.open(io.BytesIO(data)) as again:
        plain = np.asarray(again.convert("L" if mode == "1" else "RGB"))
    assert decode_image(data, form, "it").tobytes() == plain.tobytes()


def test_another_form_a_cut_and_other_bytes_are_errors() -> None:
    data = encoded(Image.fromarray(PIXELS["RGB"]), "JPEG")
    form = image_form(data, "it")
    with pytest.raises(FormatError, match=r"x: the image is uint8 \[5, 7, 3\], expected uint8 \[5, 7, 4\]"):
        decode_image(data, ImageForm("uint8", (5, 7, 4)), "x")
    for broken in (data[:-20], b"", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(CorruptDataError, match="x: the image is damaged or was cut"):
            decode_image(broken, form, "x")
    assert not is_image(b"GIF89a")


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    data = bytearray(encoded(Image.new("L", (8, 8))))
    data[16:24] = (1 << 15).to_bytes(4, "big") * 2
    with pytest.raises(CorruptDataError):
        image_form(bytes(data), "x")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_mutations_give_pixels_or_our_errors(kind: str) -> None:
    chance, sound = random.Random(kind), encoded(Image.fromarray(PIXELS["RGB"]), kind)
    form = image_form(sound, "x")
    for _ in range(400):
        with contextlib.suppress(RbtoolError):
            assert decode_image(mutated(sound, chance), form, "x").shape == form.shape


def test_choices() -> None:
    assert [require_images(name) for name in (None, "decode", "keep", "skip")] == ["decode", "decode", "keep", "skip"]
    with pytest.raises(UsageError, match="--images is 'keep', expected decode or skip"):
        require_images("keep", known=("decode", "skip"))
