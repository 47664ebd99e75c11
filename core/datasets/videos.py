"""Videos that a dataset keeps, decoded in the batches of its buffer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..format.contracts import StepReader
from ..format.videos import reference_keys
from ..ted.schema import Field
from ..transforms.base import Compose, divided
from ..transforms.video import DecodeVideo


def with_frames(reader: StepReader, transform: Any, *, channels_first: bool = False) -> Any:
    """Return `transform`, which may be None, with one in front that decodes the frames of kept videos.

    Transforms that look back stay first. The same transform for a dataset that keeps no videos.
    """
    keys = reference_keys(reader.fields)
    if not keys:
        return transform
    decode = DecodeVideo(reader.path, keys, channels_first=channels_first)
    if transform is None:
        return decode
    looking_back, others = divided(transform)
    return Compose(*looking_back, decode, *others)


def frames_below(folder: Path, fields: Iterable[Field]) -> DecodeVideo | None:
    """Return what decodes the frames that fields refer to, of the videos below a folder; None for no such fields."""
    keys = reference_keys(fields)
    return DecodeVideo(folder, keys) if keys else None
