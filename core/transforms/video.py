"""Decodes frames of the videos that a dataset keeps, when a batch leaves the buffer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..encodings.video import kept_frames
from ..errors import SchemaError, require_flags
from ..format.contracts import StepReader
from ..format.videos import image_key, reference_keys
from ..ted.schema import Field, Numbers
from .base import Compose, Transform, divided
from .keyed import Path as KeyPath
from .keyed import as_keys, require_tensordict

_MOST_THREADS = 8


class DecodeVideo(Transform):
    """Replaces references to frames of videos by the frames: `("video", *key)` becomes `key`.

    A reference with id 0 is padding and becomes zeros. The frames are the same as if each video was decoded from its
    start. Several threads decode files, and a few files stay open in each process.

    Args:
        path: the folder of the dataset that keeps the videos.
        in_keys: the references, at the root and under `next`, int64 `[*batch, 2]`: id of a file, number of a frame.
            Missing ones are skipped.
        channels_first: whether frames are uint8 `[*batch, 3, height, width]` instead of `[*batch, height, width, 3]`.
            Depths have one channel: uint16 in millimetres, or float32 in metres.

    Raises:
        CorruptDataError: a video is missing or damaged.
        SchemaError: (a RuntimeError) a reference is invalid.
        UsageError: PyAV is not installed.
    """

    reads_in_keys_only = True

    def __init__(self, path: str | os.PathLike[str], in_keys: Any, *, channels_first: bool = False) -> None:
        require_flags(channels_first=channels_first)
        super().__init__()
        self.path = Path(path).absolute()
        self.in_keys = as_keys(in_keys)
        self.channels_first = channels_first

    @property
    def out_keys(self) -> list[KeyPath]:
        """The frames."""
        return [image_key(key) for key in self.in_keys]

    def forward(self, data: Any) -> Any:
        batch = require_tensordict(data, self)
        images = {key: image_key(key) for key in self.in_keys if batch.get(key, None) is not None}
        references = {key: self._checked(batch.get(key), key) for key in images}
        frames = self._decoded({key: one.reshape(-1, 2) for key, one in references.items()})
        decoded = batch.exclude(*images).filter_empty_()
        for key, image in images.items():
            rows = torch.from_numpy(frames[key]).reshape(*references[key].shape[:-1], *frames[key].shape[1:])
            decoded.set(image, rows.movedim(-1, -3).contiguous() if self.channels_first else rows)
        return decoded

    @staticmethod
    def _checked(references: Any, key: KeyPath) -> Numbers:
        if not isinstance(references, torch.Tensor) or references.dtype != torch.int64 or references.shape[-1:] != (2,):
            raise SchemaError(f"{'.'.join(key)} does not refer to frames, expected int64 [..., 2]")
        found: Numbers = references.numpy(force=True)
        return found

    def _decoded(self, references: Mapping[KeyPath, Numbers]) -> dict[KeyPath, NDArray[Any]]:
        """Decode the frames for all keys, each file once."""
        found: dict[KeyPath, NDArray[Any]] = {}
        jobs: dict[int, list[tuple[KeyPath, Numbers]]] = {}
        for key, rows in references.items():
            for number in np.unique(rows[:, 0]).tolist():
                if number:
                    jobs.setdefault(number, []).append((key, np.flatnonzero(rows[:, 0] == number)))

        def decode(number: int) -> list[tuple[KeyPath, Numbers, NDArray[Any]]]:
            parts = jobs[number]
            frames = np.concatenate([references[key][places, 1] for key, places in parts])
            images = kept_frames(self.path, number, frames)
            cuts = np.cumsum([len(places) for _, places in parts])[:-1]
            return [(key, places, part) for (key, places), part in zip(parts, np.split(images, cuts), strict=True)]

        if len(jobs) > 1:
            with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1, _MOST_THREADS)) as pool:
                done = list(pool.map(decode, jobs))
        else:
            done = [decode(number) for number in jobs]
        for key, places, images in (part for parts in done for part in parts):
            if key not in found:
                found[key] = np.zeros((len(references[key]), *images.shape[1:]), images.dtype)
            if images.shape[1:] != found[key].shape[1:]:
                raise SchemaError(f"{'.'.join(key)}: videos have frames of {list(images.shape[1:])} and of "
                                  f"{list(found[key].shape[1:])}")  # fmt: skip
            found[key][places] = images
        return {key: found.get(key, np.zeros((len(rows), 0, 0, 3), np.uint8)) for key, rows in references.items()}


def with_frames(reader: StepReader, transform: Any, *, channels_first: bool = False) -> Any:
    """Put a transform that decodes the frames of kept videos in front of `transform`, which may be None.

    Transforms that look back stay in front of it. For a dataset without kept videos, return `transform` unchanged.
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
    """Make the transform that decodes the frames that fields refer to, from videos in a folder; None without fields."""
    keys = reference_keys(fields)
    return DecodeVideo(folder, keys) if keys else None
