"""Decodes PNG, JPEG and TIFF images: the shape from the header, and pixels `[height, width, channels]`."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from ...core.errors import CorruptDataError, FormatError, UsageError
from ...core.format.contracts import Array

if TYPE_CHECKING:
    from PIL.Image import Image


Images: TypeAlias = Literal["decode", "keep", "skip"]
"""What a reader does with images and videos: decode them to pixels, keep the files as they are, or leave them out."""
Jpeg: TypeAlias = Literal["exact", "fast"]
"""How JPEG is decoded: `exact` as Pillow does, or `fast` as TensorFlow does by default, which rounds differently."""
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
_KINDS = ("PNG", "JPEG", "TIFF")
_MOST_PIXELS = 1 << 24
_FAST_LIBRARY = "simplejpeg"
_MODES = {
    "1": ("L", "uint8", 1), "L": ("L", "uint8", 1), "LA": ("LA", "uint8", 2), "RGB": ("RGB", "uint8", 3),
    "RGBA": ("RGBA", "uint8", 4), "P": ("RGB", "uint8", 3), "PA": ("RGBA", "uint8", 4), "CMYK": ("RGB", "uint8", 3),
    "I;16": ("I;16", "uint16", 1), "I;16B": ("I;16", "uint16", 1), "I": ("I", "uint16", 1),
    "F": ("F", "float32", 1),
}  # fmt: skip
"""Pillow's mode of a file, and for it the mode to decode to, the element type and the number of channels."""


@dataclass(frozen=True, slots=True)
class ImageForm:
    """Element type and shape of the pixels of an image: `[height, width, channels]`."""

    dtype: str
    shape: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def require_images(choice: object, *, known: Iterable[Images] = get_args(Images)) -> Images:
    """Return the option `images`, the first of `known` for None; UsageError unless it is in `known`."""
    names = tuple(known)
    for name in names:
        if choice in (name, None):
            return name
    raise UsageError(f"--images is {str(choice)!r}, expected {' or '.join(names)}")


def require_jpeg(choice: object) -> Jpeg:
    """Return the option `jpeg`, `exact` for None.

    Raises UsageError unless it is `exact` or `fast`, and for `fast` if its library is not installed.
    """
    for name in get_args(Jpeg):
        if choice in (name, None):
            break
    else:
        raise UsageError(f"--jpeg is {str(choice)!r}, expected {' or '.join(get_args(Jpeg))}")
    if name == "fast":
        try:
            importlib.import_module(_FAST_LIBRARY)
        except ImportError as error:
            raise UsageError(
                f"--jpeg fast needs the package {_FAST_LIBRARY}, which is not installed",
                hint="pip install 'rbtool[jpeg]'",
            ) from error
        return "fast"
    return "exact"


def is_image(data: bytes) -> bool:
    """Return whether bytes begin with the signature of PNG or JPEG."""
    return data.startswith(_SIGNATURES)


def image_form(data: bytes, what: str) -> ImageForm:
    """Return the form of an image from its header; CorruptDataError for a damaged one, which `what` names."""
    try:
        with _opened(data) as image:
            return _form(image, what)
    except (CorruptDataError, FormatError):
        raise
    except Exception as error:  # Pillow's decoders raise exceptions of any type for damaged files
        raise _damaged(error, what) from error


def decode_image(data: bytes, form: ImageForm, what: str, jpeg: Jpeg = "exact") -> Array:
    """Decode an image.

    Args:
        data: the bytes of the file.
        form: the expected element type and shape.
        what: the name of the image in messages.
        jpeg: how to decode JPEG. Images in CMYK are always decoded by Pillow.

    Returns:
        A fresh array `[height, width, channels]` in C order.

    Raises:
        FormatError: the image has another form. No memory was allocated for its pixels.
        CorruptDataError: the image is damaged or cut.
    """
    try:
        with _opened(data) as image:
            found = _form(image, what)
            if found != form:
                raise FormatError(f"{what}: the image is {found}, expected {form}")
            mode = _MODES[image.mode][0]
            if jpeg == "fast" and image.format == "JPEG" and mode == image.mode:
                return _decoded_fast(data, image).reshape(form.shape)
            pixels = np.array(image if image.mode == mode else image.convert(mode))
    except (CorruptDataError, FormatError):
        raise
    except Exception as error:  # as above
        raise _damaged(error, what) from error
    return pixels.astype(form.dtype, copy=False).reshape(form.shape)


def _decoded_fast(data: bytes, image: Image) -> Array:
    """Decode with the fast integer transform and smooth chroma, bit for bit as TensorFlow does by default."""
    library = importlib.import_module(_FAST_LIBRARY)
    form = {"colorspace": "GRAY" if image.mode == "L" else "RGB", "fastdct": True, "fastupsample": False}
    try:
        pixels: Array = library.decode_jpeg(data, **form)
    except ValueError:
        image.load()  # raises an error for a cut file, which the next line would fill up in silence
        pixels = library.decode_jpeg(data, **form, strict=False)  # accepts flaws such as stray bytes before a marker
    return pixels


def _opened(data: bytes) -> Image:
    from PIL import Image  # needed only where there are images

    return Image.open(io.BytesIO(data), formats=_KINDS)


def _form(image: Image, what: str) -> ImageForm:
    if image.width * image.height > _MOST_PIXELS:
        raise CorruptDataError(f"{what}: the image has {image.width:,} x {image.height:,} pixels, which is too many")
    if image.mode not in _MODES:
        raise FormatError(f"{what}: the image has pixels of the kind {image.mode!r}, which is not supported")
    _, dtype, channels = _MODES[image.mode]
    return ImageForm(dtype, (image.height, image.width, channels))


def _damaged(error: Any, what: str) -> CorruptDataError:
    reason = " ".join(str(error).partition("<")[0].split())[:100] or type(error).__name__
    return CorruptDataError(f"{what}: the image is damaged or was cut: {reason}")
