"""Images are held to their space before they take memory."""

from __future__ import annotations

import io
import resource

import pytest
from PIL import Image

from rbtool import FormatError
from rbtool.converters.minari.reader import decode_images


def _jpeg(*size: int, mode: str = "RGB") -> bytes:
    made = io.BytesIO()
    Image.new(mode, size).save(made, "JPEG")
    return made.getvalue()


def test_an_image_larger_than_its_space_is_not_decoded() -> None:
    large = bytearray(_jpeg(64, 64))
    frame = large.index(b"\xff\xc0")
    large[frame + 5 : frame + 9] = (9_000).to_bytes(2) * 2  # height and width: 243 MB decoded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=r"has shape \[9000, 9000, 3\], its space says \[64, 64, 3\]"):
        decode_images([bytes(large)], (64, 64, 3), "'observations' of episode 0", 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(("mode", "shape"), [("RGB", (5, 7, 3)), ("L", (5, 7)), ("CMYK", (5, 7, 4))])
def test_images_of_their_space_are_decoded(mode: str, shape: tuple[int, ...]) -> None:
    assert decode_images([_jpeg(7, 5, mode=mode)] * 9, shape, "images", 0).shape == (9, *shape)
