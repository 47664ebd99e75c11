"""Decodes frames of video files by their numbers, with PyAV.

Frames are exactly those that decoding from the start of the file would give. PyAV is only imported when a video is
opened. Each process keeps a few videos open between reads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import CorruptDataError, FormatError, RbtoolError, SchemaError, UsageError, not_installed
from ..format.contracts import Array, Closing
from ..format.files import FETCH_AGAIN, read_regular, require_regular
from ..format.manifest import VIDEOS
from ..format.videos import index_name, video_name

CHANNELS = 3
_GRAY = ("gray10le", "gray12le", "gray14le", "gray16le")
_MOST_PIXELS = 1 << 26


def require_pyav() -> Any:
    """Import PyAV; UsageError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise not_installed("video needs PyAV", "video", error) from error
    return av


@dataclass(frozen=True, slots=True)
class DepthCode:
    """How the 12-bit codes in a video of depths are converted to depths.

    Attributes:
        low: the depth of code 0, in metres.
        high: the depth of the largest code, in metres.
        shift: see `is_logarithmic`.
        is_logarithmic: whether equal steps of codes are equal steps of `log(depth + shift)` rather than of depths.
        is_in_millimetres: whether depths are uint16 in millimetres rather than float32 in metres.
    """

    low: float
    high: float
    shift: float
    is_logarithmic: bool
    is_in_millimetres: bool

    @property
    def table(self) -> Array:
        """The depth of each code `[4096]`: uint16 in millimetres, or float32 in metres."""
        low, high = (np.log(one + self.shift) if self.is_logarithmic else one for one in (self.low, self.high))
        found = np.linspace(low, high, _CODES)
        found = np.exp(found) - self.shift if self.is_logarithmic else found
        metres: Array = np.clip(found, self.low, self.high)
        return np.rint(metres * 1000).astype(np.uint16) if self.is_in_millimetres else metres.astype(np.float32)

    def depths(self, codes: Array) -> Array:
        """Return the depths of codes of any shape; CorruptDataError for codes of more than 12 bits."""
        if codes.size and int(codes.max()) >= _CODES:
            raise CorruptDataError(f"a video of depths has the code {int(codes.max())}, expected 12 bits")
        found: Array = self.table[codes]
        return found


_CODES = 1 << 12


@dataclass(frozen=True, slots=True)
class VideoIndex:
    """Where the frames of a video are. Frames are numbered in the order in which they are shown.

    Attributes:
        stamps: the time stamps of the frames, int64 `[frames]`, ascending.
        keys: the numbers of key frames, at which decoding can start, int64 `[k]`, ascending.
        key_times: the time stamps to which a decoder seeks for these frames, int64 `[k]`.
        unit: the unit of time stamps in seconds.
        depth: how frames are converted to depths; None for a video of images.
    """

    stamps: Array
    keys: Array
    key_times: Array
    unit: Fraction
    depth: DepthCode | None = None

    def __len__(self) -> int:
        return len(self.stamps)

    @property
    def times(self) -> Array:
        """The times of all frames in seconds after the first one, float64 `[frames]`."""
        times: Array = (self.stamps - self.stamps[0]) * float(self.unit)
        return times

    def frames_at(self, times: Array, fps: float, path: Path) -> Array:
        """Return the frames shown at these ascending times.

        Args:
            times: times in seconds.
            fps: frames per second.
            path: the file's name in messages.

        Returns:
            Frame numbers, int64 `[n]`.

        Raises:
            FormatError: no frame is within half a frame of a time, or two times have the same frame.
        """
        known, found = self.times, self.nearest(times)
        apart = np.abs(known[found] - times)
        bad = ~(apart < 0.5 / fps)
        bad[1:] |= found[1:] <= found[:-1]
        if bad.any():
            at = int(bad.argmax())
            raise FormatError(
                f"{path} has {len(known):,} frames up to {known[-1]:.3f} s, but no frame for row {at:,} "
                f"at {times[at]:.3f} s: the nearest is {apart[at]:.3f} s away, or belongs to another row"
            )
        return found

    def nearest(self, times: Array) -> Array:
        """Return the frame nearest to each time in seconds, int64 `[n]`; the earlier one of two at equal distance."""
        known = self.times
        after = np.clip(np.searchsorted(known, times), 1, max(1, len(known) - 1))
        before = after - 1
        after = np.minimum(after, len(known) - 1)
        found = np.where(np.abs(known[after] - times) < np.abs(known[before] - times), after, before)
        return found.astype(np.int64)

    def to_bytes(self) -> bytes:
        """Serialise the index: a version, sizes, the unit, and the arrays, all as int64, and the depths as float64."""
        depth = b"" if self.depth is None else np.array(astuple(self.depth), "<f8").tobytes()
        head = [1 if self.depth is None else 2, len(self.stamps), len(self.keys), *self.unit.as_integer_ratio()]
        return np.concatenate([np.array(head), self.stamps, self.keys, self.key_times]).astype("<i8").tobytes() + depth

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> VideoIndex:
        """Read the bytes of `to_bytes`; CorruptDataError, which names `origin`, if they are invalid."""
        numbers = np.frombuffer(data[: len(data) // 8 * 8], "<i8").astype(np.int64)
        version, frames, count, over, under = numbers[:5].tolist() if len(numbers) > 5 else (0,) * 5
        parts = np.split(numbers[5:], [frames, frames + count, frames + 2 * count]) if frames > 0 < count else []
        more = {1: 0, 2: len(fields(DepthCode))}.get(version, -1)
        if len(data) != 8 * (5 + frames + 2 * count + more) or not parts or min(over, under) <= 0:
            raise CorruptDataError(f"{origin} is not the index of a video", hint=FETCH_AGAIN)
        low, high, shift, *marks = parts[3].astype("<i8").view("<f8").tolist() or [0.0] * 5
        depth = DepthCode(low, high, shift, *map(bool, marks)) if more else None
        return cls(parts[0], parts[1], parts[2], Fraction(over, under), depth)


def look_over(container: Any, stream: Any, origin: str) -> VideoIndex:
    """Make the index of a video from its packets, without decoding; CorruptDataError names `origin`."""
    stamps, keys = [], []
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise CorruptDataError(f"{origin} has frames without a time stamp")
        stamps.append(packet.pts)
        if packet.is_keyframe:
            keys.append((packet.pts, packet.pts if packet.dts is None else packet.dts))
    times = np.unique(np.array(stamps, np.int64))
    if len(times) != len(stamps) or not keys:
        raise CorruptDataError(f"{origin} has several frames with one time stamp, or no key frame")
    pairs = np.array(sorted(keys), np.int64)
    starts = np.searchsorted(times, pairs[:, 0]).astype(np.int64)
    if starts[0]:  # frames before the first key frame cannot be decoded
        raise CorruptDataError(f"{origin} does not begin with a key frame")
    return VideoIndex(times, starts, pairs[:, 1].copy(), Fraction(stream.time_base))


class VideoFile(Closing):
    """A video file, with frames numbered from 0 in the order in which they are shown.

    Frames are RGB, uint8 `[height, width, 3]`, as from PyAV's `to_ndarray(format="rgb24")`. In videos with one channel
    of more than 8 bits, they are the values of this channel, uint16 `[height, width, 1]`. To read a frame, the decoder
    seeks to the nearest key frame before it, and decodes until it finds the time stamp of the frame:

        frames     0   1   2   3   4   5   6   7        key frames are 0 and 4
        read 6     seek to 4; decode 4, 5 and 6
        then 7     decoding continues, as no key frame lies in between

    A video must not be used by several threads at once.

    Args:
        path: the file.
        index: where the frames are; by default it is made from the packets, without decoding.
        threads: threads of the decoder; one is best for random access.

    Raises:
        DatasetNotFoundError: the file does not exist.
        FormatError: it is not a file, or has no video.
        CorruptDataError: it cannot be decoded.
        UsageError: PyAV is not installed, or lacks the codec.
    """

    def __init__(self, path: Path, index: VideoIndex | None = None, *, threads: int | None = None) -> None:
        self.path = path
        self._av = require_pyav()
        self._threads = threads
        self._reformatter = self._av.video.reformatter.VideoReformatter()
        require_regular(path)
        self._given = index
        self._container: Any = None
        self._decoded: Iterator[Any] = iter(())
        self._place = -1  # the frame decoded last
        self._frame: Any = None
        self._positioned = False  # whether the decoder continues behind `_place`; otherwise it has to seek first
        with self._damage():
            self._open()

    def _open(self) -> None:
        self._container = self._av.open(str(self.path), mode="r", metadata_errors="ignore")
        streams = self._container.streams.video
        if not streams:
            self.close()
            raise FormatError(f"{self.path} has no video")
        self._stream = streams[0]
        context = self._stream.codec_context
        if context is None:
            self.close()
            raise UsageError(
                f"{self.path} uses a codec for which the installed PyAV {self._av.__version__} has no decoder",
                hint="pip install --upgrade av",
            )
        if self._threads is not None:
            context.thread_count = self._threads
        self._form = context.pix_fmt if context.pix_fmt in _GRAY else "rgb24"
        self.dtype = np.dtype("<u2" if self._form in _GRAY else np.uint8)
        self.shape = (int(context.height), int(context.width), 1 if self._form in _GRAY else CHANNELS)
        if not 0 < self.shape[0] * self.shape[1] <= _MOST_PIXELS:
            self.close()
            raise CorruptDataError(f"{self.path} states images of {self.shape[1]} x {self.shape[0]} pixels")

    @property
    def stated_frames(self) -> int:
        """The number of frames that the header states; 0 if it states none."""
        return int(self._stream.frames)

    @property
    def index(self) -> VideoIndex:
        """Where the frames are."""
        if self._given is None:
            with self._damage():
                self._given = self._look_over()
        return self._given

    def _look_over(self) -> VideoIndex:
        self._positioned = False
        return look_over(self._container, self._stream, str(self.path))

    def __len__(self) -> int:
        return len(self.index)

    def read(self, frames: Array) -> Array:
        """Decode frames in any order, with repetitions: `[n, height, width, channels]`."""
        wanted = np.asarray(frames, np.int64).reshape(-1)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise UsageError(
                f"frames are {int(wanted.min())} to {int(wanted.max())}, expected below {len(self):,} in {self.path}"
            )
        images = np.empty((len(wanted), *self.shape), self.dtype)
        order = np.argsort(wanted, kind="stable")
        before = -1
        for place in order.tolist():
            if before >= 0 and wanted[before] == wanted[place]:
                images[place] = images[before]
            else:
                self._put_image(int(wanted[place]), images[place])
            before = place
        return images

    def _put_image(self, number: int, image: Array) -> None:
        """Decode a frame into `image`, `[height, width, channels]`."""
        with self._damage():
            if number != self._place or self._frame is None:
                self._frame = self._decode(number)
                self._place = number
            found = (self._frame.height, self._frame.width, self.shape[2])
            if found == self.shape:  # checked before memory is allocated
                plane = self._reformatter.reformat(self._frame, format=self._form).planes[0]
                rows = np.frombuffer(plane, self.dtype).reshape(found[0], -1)
                image.reshape(found[0], -1)[:] = rows[:, : found[1] * found[2]]
                return
        raise CorruptDataError(f"{self.path}: frame {number:,} is {list(found)}, expected {list(self.shape)}")

    def _decode(self, number: int) -> Any:
        """Decode one frame, from the present position or from the nearest key frame before it.

        If the frame is not found from there, decoding starts at earlier key frames.
        """
        stamps, starts = self.index.stamps, self.index.keys
        nearest = int(np.searchsorted(starts, number, side="right")) - 1
        if self._positioned and self._place <= number and starts[nearest] <= self._place + 1:
            frame = self._next_at(int(stamps[number]))
            if frame is not None:
                return frame
        for start in range(nearest, -1, -1):
            self._seek(start)
            frame = self._next_at(int(stamps[number]))
            if frame is not None:
                return frame
        raise CorruptDataError(f"{self.path}: frame {number:,} cannot be decoded", hint=FETCH_AGAIN)

    def _seek(self, start: int) -> None:
        self._place, self._frame, self._positioned = -1, None, True
        index = self.index
        stamp = int(index.key_times[start]) if start else min(int(index.key_times[0]), int(index.stamps[0]))
        self._container.seek(stamp, stream=self._stream)
        self._decoded = self._container.decode(self._stream)

    def _next_at(self, stamp: int) -> Any:
        """Decode up to the frame with a time stamp and return it; None if a later frame comes first."""
        for frame in self._decoded:
            if frame.pts == stamp:
                if frame.is_corrupt:
                    raise CorruptDataError(
                        f"{self.path}: the frame with the time stamp {stamp:,} is damaged", hint=FETCH_AGAIN
                    )
                return frame
            if frame.pts is not None and frame.pts > stamp:
                break
        self._positioned = False
        return None

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        """Convert PyAV's errors to CorruptDataError; the decoder then has to seek before the next frame."""
        try:
            yield
        except RbtoolError:
            raise
        except (self._av.FFmpegError, ValueError, RuntimeError, MemoryError, OverflowError) as error:
            self._positioned = False
            if isinstance(error, OSError) and isinstance(error, FileNotFoundError | PermissionError):
                raise
            reason = " ".join(str(error).split())[:200]
            raise CorruptDataError(
                f"{self.path} cannot be decoded, it is damaged or truncated: {reason}", hint=FETCH_AGAIN
            ) from error

    def close(self) -> None:
        self._decoded, self._frame, self._positioned = iter(()), None, False
        if self._container is not None:
            self._container.close()
            self._container = None


_State: TypeAlias = tuple[str, int, int, int]
DEFAULT_SIZE = 8
_IDS = 1 << 60


class _OpenVideos:
    """Open videos that are not in use, the most recently used last.

    A thread takes a video off the list while it uses it, so that no two threads use the same one.
    """

    def __init__(self) -> None:
        self.size = DEFAULT_SIZE
        self._lock = threading.Lock()
        self._idle: list[tuple[_State, VideoFile]] = []
        self._forked: list[VideoFile] = []

    def take(self, path: Path, index: Callable[[], VideoIndex | None]) -> tuple[_State, VideoFile]:
        state = _state_of(path)
        with self._lock:
            for place in range(len(self._idle) - 1, -1, -1):
                if self._idle[place][0] == state:
                    return self._idle.pop(place)
        return state, VideoFile(path, index(), threads=1)

    def give_back(self, state: _State, video: VideoFile) -> None:
        with self._lock:
            self._idle.append((state, video))
        self.shrink(self.size)

    def shrink(self, size: int) -> None:
        """Close the least recently used videos until only `size` are open."""
        with self._lock:
            more = max(0, len(self._idle) - size)
            closed, self._idle = self._idle[:more], self._idle[more:]
        for _, video in closed:
            video.close()

    def close_below(self, folder: str) -> None:
        with self._lock:
            closed = [video for state, video in self._idle if state[0].startswith(folder)]
            self._idle = [one for one in self._idle if not one[0][0].startswith(folder)]
        for video in closed:
            video.close()

    def after_fork(self) -> None:
        """Forget the parent's videos: the threads of their decoders do not exist in this process."""
        self._lock = threading.Lock()
        self._forked += [video for _, video in self._idle]
        self._idle = []


_videos = _OpenVideos()
os.register_at_fork(after_in_child=_videos.after_fork)


@contextlib.contextmanager
def open_video(path: Path, index: Callable[[], VideoIndex | None] = lambda: None) -> Iterator[VideoFile]:
    """Open a video, or use one that is still open. It stays open afterwards, unless an error is raised in the context.

    `index` returns the index of the video, or None.
    """
    state, video = _videos.take(path, index)
    try:
        yield video
    except BaseException:
        video.close()
        raise
    _videos.give_back(state, video)


def set_video_decoder_cache_size(maxsize: Any) -> None:
    """Set how many videos stay open in this process between reads; the default is 8.

    Args:
        maxsize: the number of videos, at least 0.

    Raises:
        UsageError: (a ValueError) the number is invalid.
    """
    if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 0:
        raise UsageError(f"maxsize is {maxsize!r}, expected a number of videos from 0")
    _videos.size = maxsize
    _videos.shrink(maxsize)


def clear_video_decoder_cache() -> None:
    """Close all videos that are kept open in this process."""
    _videos.shrink(0)


def close_videos_below(folder: Path) -> None:
    """Close the videos in a folder that this process keeps open and is not reading."""
    _videos.close_below(f"{folder}{os.sep}")


def _state_of(path: Path) -> _State:
    found = path.stat()
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


def referred_frames(folder: Path, references: Array) -> Array:
    """Decode the frames that rows of a dataset refer to, `[n, height, width, 3]`.

    `references` are video ids and frame numbers, int64 `[n, 2]`. Raises the errors of `kept_frames`.
    """
    if not len(references):
        return np.zeros((0, 1, 1, CHANNELS), np.uint8)
    changes = np.flatnonzero(np.diff(references[:, 0])) + 1
    runs = np.split(references, changes)
    return np.concatenate([kept_frames(folder, int(run[0, 0]), run[:, 1]) for run in runs])


def kept_frames(folder: Path, number: int, frames: Array) -> Array:
    """Decode frames of the video `number` in the dataset at `folder`, as `VideoFile.read` does, or to depths.

    Raises:
        SchemaError: the number is not a video id.
        CorruptDataError: a file is missing, damaged, or too short for its rows.
    """
    if not 0 < number < _IDS:
        raise SchemaError(f"{number} is not the id of a video")
    path = folder / f"{VIDEOS}{video_name(number)}"
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing: rows refer to its frames")
    index = folder / f"{VIDEOS}{index_name(number)}"
    with open_video(path, lambda: VideoIndex.from_bytes(read_regular(index), str(index))) as video:
        if len(frames) and not (frames.min() >= 0 and frames.max() < len(video)):
            raise CorruptDataError(f"{path} has {len(video):,} frames, but rows refer to frame {int(frames.max()):,}")
        codes, depth = video.read(frames), video.index.depth
        return codes if depth is None else depth.depths(codes)
