"""Images: pixels are those of Pillow, forms come from headers, and damaged ones are errors."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import random
import sys

import numpy as np
import pytest
from damage import mutated
from PIL import Image

from rbtool.converters.files.images import ImageForm, decode_image, image_form, is_image, require_images, require_jpeg
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError

# 20 x 24 pixels, chroma halved, and the digest of what tf.io.decode_image of TensorFlow 2.21 makes of them
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAxNDQ0Hyc5PTgy"
    "PC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjL/wAARCAAUABgD"
    "ASIAAhEBAxEB/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUFBAQAAAF9AQIDAAQRBRIhMUEGE1FhByJxFDKB"
    "kaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVWV1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWGh4iJipKTlJWWl5iZ"
    "mqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi4+Tl5ufo6erx8vP09fb3+Pn6/8QAHwEAAwEBAQEBAQEBAQAAAAAAAAECAwQF"
    "BgcICQoL/8QAtREAAgECBAQDBAcFBAQAAQJ3AAECAxEEBSExBhJBUQdhcRMiMoEIFEKRobHBCSMzUvAVYnLRChYkNOEl8RcYGRomJygpKjU2Nzg5"
    "OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6goOEhYaHiImKkpOUlZaXmJmaoqOkpaanqKmqsrO0tba3uLm6wsPExcbHyMnK0tPU1dbX"
    "2Nna4uPk5ebn6Onq8vP09fb3+Pn6/9oADAMBAAIRAxEAPwCRI5nnVU247g0yWzu/JBWOJs9PmqC8byr1VRsEEDv6CqD3N1HAmJWPU9z/AFrw8TjJ"
    "qTUHZo51CvKrBwWjLy6fqs7KEhg5A5D0VU0fV9TNysfnyACNcDB9KK8SvisZGVuZfifRexqRbjKK0/rsOv4k/txRg87e5HaqwAa3TqOCPvH2oor0"
    "Mb/Gl8jy6TajS+Rl2aldWXa7jEQ4DGiiiubEfEvQ9irJ+0ep/9k="
)
OF_TENSORFLOW = "17f00f3f62519dd364ef6ee478b6d75fdc01e7230b17facc27d94ddf4cacd339"

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


def test_fast_jpeg_is_that_of_tensorflow() -> None:
    form = image_form(JPEG, "it")
    exact, fast = decode_image(JPEG, form, "it"), decode_image(JPEG, form, "it", require_jpeg("fast"))
    assert (fast.dtype, fast.shape, fast.flags.writeable) == (np.uint8, (20, 24, 3), True)
    assert hashlib.sha256(fast.tobytes()).hexdigest() == OF_TENSORFLOW
    assert 0 < np.abs(fast.astype(int) - exact).max() <= 7
    with Image.open(io.BytesIO(JPEG)) as image:
        assert exact.tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_fast_jpeg_of_other_modes(mode: str) -> None:
    with Image.open(io.BytesIO(JPEG)) as image:
        data = encoded(image.convert(mode), "JPEG")
    form = image_form(data, "it")
    assert decode_image(data, form, "it", "fast").shape == form.shape


def test_fast_jpeg_takes_what_pillow_takes() -> None:
    form = image_form(JPEG, "it")
    stray = JPEG[:-2] + b"\0\0\x11\x22" + JPEG[-2:]
    assert decode_image(stray, form, "it", "fast").tobytes() == decode_image(JPEG, form, "it", "fast").tobytes()
    with pytest.raises(CorruptDataError, match="damaged or was cut"):
        decode_image(JPEG[: len(JPEG) - 40], form, "it", "fast")


def test_another_way_to_decode_jpeg_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert require_jpeg(None) == "exact"
    with pytest.raises(UsageError, match="--jpeg is 'quick', expected exact or fast"):
        require_jpeg("quick")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(UsageError, match="needs the package simplejpeg") as caught:
        require_jpeg("fast")
    assert caught.value.hint == "pip install 'rbtool[jpeg]'"
