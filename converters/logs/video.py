"""Video in logs: topics whose messages are packets of H.264 or H.265 with one frame each, decoded or kept as files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.video import VideoFile, require_pyav
from ...core.errors import FormatError, RbtoolError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.files import digest_file
from ...core.format.videos import index_name, video_id, video_name
from ..files.images import ImageForm
from .messages import changed_size, damaged

VIDEO_FORMATS = {"h264": "h264", "libx264": "h264", "h264_nvenc": "h264", "h265": "hevc", "hevc": "hevc"}
"""FFmpeg's name of a codec by the names that messages use."""
_CLOCK = 90_000
"""Ticks per second of the time stamps in a kept video, the usual number for video."""
_PROBED = 64
"""Number of frames at the beginning of a video that are decoded to check that they come in the order of the packets."""


@dataclass(frozen=True, slots=True)
class Packets:
    """The packets of a topic with video.

    Attributes:
        codec: FFmpeg's name of the codec.
        packet: returns the bytes of a message by its number, with start codes (Annex B).
        count: the number of messages.
        what: the name of the topic in errors.
    """

    codec: str
    packet: Callable[[int], bytes]
    count: int
    what: str

    def first_key_frame(self) -> int:
        """Return the number of the first packet at which decoding can begin; `count` if there is none."""
        return next((number for number in range(self.count) if self.is_begin(number)), self.count)

    def is_begin(self, number: int) -> bool:
        """Return whether decoding can begin at a packet: it has a key frame and the parameter sets for it."""
        data = self.packet(number)
        return _is_key_frame(data, self.codec) and bool(_parameters(data, self.codec))

    def require_in_order(self, first: int) -> None:
        """Raise FormatError unless frames are shown in the order of the packets; `first` is the first key frame.

        With B-frames the frame in a message would not be the picture of its time. Only the first frames are decoded
        here; for later packets, `require_no_b_frames` reads the slice headers of H.264, and `decode` the parameter sets
        of H.265.
        """
        last = min(self.count, first + _PROBED)
        shown = [at for at, _ in _decoded(self, range(first, last))]
        if shown == list(range(first, last)):
            return
        if sorted(shown) == list(range(first, last)):
            raise _b_frames(self.what)
        lost = next(at for at in range(first, last) if at not in shown)
        damaged(self.what, f"packet {lost:,} is not a whole frame of {self.codec}")

    def keep(self, first: int, logs: Array, form: ImageForm, folder: Path) -> KeptVideo:
        """Write the packets from key frame `first` on to an MP4 file, without encoding them again.

        Args:
            first: the number of the first packet.
            logs: the ascending times of all messages in nanoseconds, int64 `[count]`.
            form: the expected form of all frames.
            folder: the folder for the file.

        Raises:
            FormatError: a frame has another form.
            CorruptDataError: the packets cannot be written, or do not have one frame each.
        """
        av = require_pyav()
        numbers = np.arange(first, self.count)
        stamps = (logs[first:] - logs[first]) // 1000 * _CLOCK // 10**6
        stamps = np.maximum.accumulate(stamps - numbers) + numbers  # strictly ascending: at least one tick apart
        path, unit = folder / f"{len(list(folder.iterdir()))}.part", Fraction(1, _CLOCK)
        head = self.packet(first)
        known = {_parameters(head, self.codec)}
        try:
            with (
                av.open(io.BytesIO(head), format=self.codec) as given,
                fs.created(path) as made,
                av.open(made, "w", format="mp4", options={"fflags": "+bitexact"}) as out,
            ):
                stream = out.add_stream_from_template(given.streams.video[0])
                stream.time_base = unit
                for number, stamp in zip(numbers.tolist(), stamps.tolist(), strict=True):
                    data = self.packet(number)
                    packet = av.Packet(data)
                    packet.pts = packet.dts = stamp
                    packet.time_base, packet.stream = unit, stream
                    packet.is_keyframe = _is_key_frame(data, self.codec)
                    if packet.is_keyframe and (stated := _parameters(data, self.codec)) and stated not in known:
                        self._require_form(number, form)
                        known.add(stated)
                    out.mux(packet)
        except RbtoolError:
            raise
        except (av.error.FFmpegError, ValueError) as error:
            damaged(self.what, error)
        with VideoFile(path) as video:
            index, shape = video.index, video.shape
        if not np.array_equal(index.stamps - index.stamps[0], stamps - stamps[0]):
            damaged(self.what, f"{len(stamps):,} packets have {len(index):,} frames")
        if shape != form.shape:
            raise changed_size(self.what, ImageForm("uint8", shape), form)
        number = video_id(digest_file(path))
        target = folder / video_name(number)
        fs.rename(path, target)
        return KeptVideo(number, first, target, index.to_bytes())

    def decode(self, context: Any, packet: Any) -> list[Any]:
        """Decode a packet; FormatError if the parameter sets of H.265 allow frames to be reordered."""
        frames: list[Any] = context.decode(packet)
        if self.codec == "hevc" and context.has_b_frames:
            raise _b_frames(self.what)
        return frames

    def _require_form(self, number: int, form: ImageForm) -> None:
        """Raise FormatError if a key frame has another form."""
        _, pixels = next(_decoded(self, (number,)), (number, None))
        if pixels is None:
            damaged(self.what, f"packet {number:,} has no picture")
        found = ImageForm("uint8", pixels.shape)
        if found != form:
            raise changed_size(self.what, found, form)


@dataclass(frozen=True, slots=True)
class KeptVideo:
    """A file with the packets of a topic: its id, the number of the message in frame 0, its path and its index."""

    number: int
    first: int
    path: Path
    index: bytes

    @property
    def contents(self) -> dict[str, Path | bytes]:
        """The file and its index by their names in a dataset."""
        return {video_name(self.number): self.path, index_name(self.number): self.index}


def _units(packet: bytes) -> Iterator[tuple[int, int]]:
    """Yield the offset of each NAL unit of a packet, after its start code, and the first byte of the unit."""
    at = packet.find(b"\0\0\1")
    while 0 <= at < len(packet) - 3:
        yield at + 3, packet[at + 3]
        at = packet.find(b"\0\0\1", at + 3)


def _is_key_frame(packet: bytes, codec: str) -> bool:
    """Return whether a packet of H.264 or H.265 has a key frame: it can be decoded without earlier packets."""
    return any(
        (kind & 0x1F == 5) if codec == "h264" else (16 <= (kind >> 1) & 0x3F <= 21) for _, kind in _units(packet)
    )


def require_no_b_frames(packet: bytes, codec: str, what: str) -> None:
    """Raise FormatError for a packet of H.264 whose picture is a B-frame.

    A slice header begins with two Exp-Golomb numbers: the first macroblock, 0, as the bit 1, and the type of the slice,
    1 or 6 for B, as 010 or 00111.
    """
    at = next((at for at, kind in _units(packet) if kind & 0x1F in {1, 5}), None) if codec == "h264" else None
    head = packet[at + 1 : at + 2] if at is not None else b""
    if head and (head[0] & 0xF0 == 0xA0 or head[0] & 0xFC == 0x9C):
        raise _b_frames(what)


def _b_frames(what: str) -> FormatError:
    return FormatError(
        f"{what}: its video has B-frames, which are not shown in the order of their messages",
        hint="record video without B-frames, as foxglove.CompressedVideo requires",
    )


def _parameters(packet: bytes, codec: str) -> bytes:
    """Return the sequence parameter sets in a packet, which state the form of the pictures; b"" if it has none."""
    starts = [*_units(packet), (len(packet) + 3, 0)]
    sets = ((kind & 0x1F == 7) if codec == "h264" else ((kind >> 1) & 0x3F == 33) for _, kind in starts)
    return b"".join(
        packet[at : after - 3].rstrip(b"\0")
        for (at, _), (after, _), is_set in zip(starts, starts[1:], sets, strict=False)
        if is_set
    )


def _decoder(codec: str) -> Any:
    context = require_pyav().CodecContext.create(codec, "r")
    context.thread_count = 1
    return context


def _decoded(packets: Packets, numbers: Sequence[int]) -> Iterator[tuple[int, Array]]:
    """Decode packets that begin with a key frame; yield their numbers and pixels in the order of presentation."""
    av, context = require_pyav(), _decoder(packets.codec)
    try:
        for number in (*numbers, None):
            packet = None if number is None else av.Packet(packets.packet(number))
            if packet is not None:
                packet.pts = packet.dts = number
            for frame in packets.decode(context, packet):
                yield int(frame.pts), frame.to_ndarray(format="rgb24")
    except RbtoolError:
        raise
    except (av.error.FFmpegError, ValueError, TypeError) as error:
        damaged(packets.what, error)


class VideoDecoder:
    """Decodes single frames of a video, in ascending order without repetition, else from the last key frame before."""

    def __init__(self, packets: Packets) -> None:
        self.packets = packets
        self._context: Any = None
        self._next = 0
        self._frames: dict[int, Array] = {}

    def frame(self, number: int) -> Array:
        """Return the pixels `[height, width, 3]` of the frame of a packet."""
        if number not in self._frames:
            if self._context is None or number < self._next:
                self._restart(number)
            while number not in self._frames:
                self._feed(number)
        return self._frames[number]

    def _restart(self, number: int) -> None:
        start = next((at for at in range(number, -1, -1) if self.packets.is_begin(at)), None)
        if start is None:
            raise FormatError(
                f"{self.packets.what}: no key frame comes before packet {number:,}, which cannot be decoded without "
                "one",
                hint="begin the episodes after the first key frame, or leave the topic out of the map",
            )
        self._context = _decoder(self.packets.codec)
        self._context.flags |= require_pyav().codec.context.Flags.low_delay
        self._next, self._frames = start, {}

    def _feed(self, number: int) -> None:
        av = require_pyav()
        packet = av.Packet(self.packets.packet(self._next))
        packet.pts = packet.dts = self._next
        self._next += 1
        try:
            decoded = self.packets.decode(self._context, packet)
            if self._next > number and all(frame.pts != number for frame in decoded):
                decoded += self._context.decode(None)
                self._context = None
            pixels = {int(frame.pts): frame.to_ndarray(format="rgb24") for frame in decoded if frame.pts is not None}
        except RbtoolError:
            raise
        except (av.error.FFmpegError, ValueError) as error:
            damaged(self.packets.what, error)
        self._frames = {at: found for at, found in (self._frames | pixels).items() if at >= number - 1}
        if self._context is None and number not in self._frames:
            damaged(self.packets.what, f"packet {number:,} has no picture")
