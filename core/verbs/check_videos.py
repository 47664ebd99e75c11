"""The rule of `check` about kept videos: rows refer to frames that are there and can be decoded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..encodings.video import VideoFile, VideoIndex, require_pyav
from ..errors import FormatError, RbtoolError, UsageError
from ..format.contracts import Array
from ..format.digest import read_regular
from ..format.videos import VideoContents, index_name, reference_keys, video_name
from ..progress import Progress, counted
from ..ted.rules import Finding, Places, Rows, Rule
from ..ted.schema import Field

_SAMPLED_FRAMES = 1_000
"""About how many frames are decoded of a dataset, unless all are."""
_AT_ONCE = 8
"""How many decoded frames are in memory."""


class VideoRule(Rule):
    """Rows refer to frames of kept videos that are there and can be decoded.

    `videos` are the files and their indexes by name, and `folder` is where others would be. Groups of frames that are
    decoded from one key frame are decoded whole: some of them, evenly spread, or with `full` all that rows refer to.
    """

    rule_id = "TED017"

    def __init__(
        self, fields: Sequence[Field], videos: VideoContents, folder: Path, progress: Progress, *, full: bool
    ) -> None:
        super().__init__(fields, 0)
        self._keys = reference_keys(fields)
        self._videos = videos
        self._folder = folder
        self._progress = progress
        self._full = full
        # Of each video, what episodes refer to: number, first and last frame.
        self._uses: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.notes: list[str] = []

    def see(self, rows: Rows) -> None:
        """Note which frames the episodes in these rows refer to; the id 0 is padding."""
        for key in self._keys:
            references = rows.columns[key].reshape(len(rows), 2)
            edges = (np.diff(references[:, 0]) != 0) | (np.diff(rows.episode) != 0)
            for run in np.split(np.arange(len(rows)), np.flatnonzero(edges) + 1):
                video, frames = int(references[run[0], 0]), references[run, 1]
                if video:
                    self._uses[video].append((int(rows.episode[run[0]]), int(frames.min()), int(frames.max())))

    def findings(self) -> list[Finding]:
        """Look for the frames in the indexes, and decode."""
        found: list[Finding] = []
        indexes: dict[int, VideoIndex] = {}
        parts = [np.empty((0, 3), np.int64)]
        for video, uses in self._uses.items():
            try:
                index = indexes[video] = self._index(video)
            except RbtoolError as error:
                found.append(self._finding(video, str(error)))
                continue
            odd = [use for use in uses if use[1] < 0 or use[2] >= len(index)]
            if odd:
                frame = odd[0][1] if odd[0][1] < 0 else odd[0][2]
                text = f"{self._place(video)} has {len(index):,} frames, rows refer to frame {frame:,}"
                found.append(self._finding(video, text, [(use[1], use[2] + 1) for use in odd]))
            else:
                parts.append(self._groups(video, index))
        groups = np.concatenate(parts)
        chosen = groups if self._full else _spread(groups)
        try:
            if len(chosen):
                require_pyav()
        except UsageError as error:
            self.notes.append(f"frames of kept videos were not decoded: {error}; {error.hint}")
            return found
        frames, total = _frames(chosen), _frames(groups)
        self._progress.start("decoding", frames, "frames")
        for part in np.split(chosen, np.flatnonzero(np.diff(chosen[:, 0])) + 1) if len(chosen) else ():
            found += self._decoded(int(part[0, 0]), indexes[int(part[0, 0])], part[:, 1:])
        self._progress.done()
        if frames < total:
            self.notes.append(
                f"{frames:,} of {counted(total, 'frame')} of kept videos were decoded; --full decodes all of them"
            )
        return found

    def _index(self, video: int) -> VideoIndex:
        """Read the index of a video; FormatError where the file or its index is missing or damaged."""
        path, index = self._place(video), self._videos.get(index_name(video))
        if not path.is_file() or index is None or (isinstance(index, Path) and not index.is_file()):
            missing = path if not path.is_file() else path.with_name(index_name(video))
            raise FormatError(f"{missing} is missing: rows refer to its frames")
        data = index if isinstance(index, bytes) else read_regular(index)
        return VideoIndex.from_bytes(data, str(path.with_name(index_name(video))))

    def _place(self, video: int) -> Path:
        """Where the file of a video is, or would be."""
        place = self._videos.get(video_name(video))
        return place if isinstance(place, Path) else self._folder / video_name(video)

    def _groups(self, video: int, index: VideoIndex) -> Array:
        """Return the groups of frames that rows refer to, int64 `[n, 3]`: the video, the first frame, the one after."""
        bounds, used = np.append(index.keys, len(index)), np.zeros(len(index) + 1, np.int64)
        for _, first, last in self._uses[video]:
            used[first] += 1
            used[last + 1] -= 1
        before = np.append(0, np.cumsum(np.cumsum(used[:-1]) > 0))
        some = before[bounds[1:]] > before[bounds[:-1]]
        return np.column_stack((np.full(some.sum(), video), bounds[:-1][some], bounds[1:][some]))

    def _decoded(self, video: int, index: VideoIndex, groups: Array) -> list[Finding]:
        """Decode groups of frames of a video; return a finding about those that cannot be decoded."""
        bad, problem = list[tuple[int, int]](), ""
        try:
            with VideoFile(self._place(video), index, threads=1) as opened:
                for start, stop in groups.tolist():
                    try:
                        for first in range(start, stop, _AT_ONCE):
                            opened.read(np.arange(first, min(first + _AT_ONCE, stop)))
                    except RbtoolError as error:
                        bad.append((start, stop))
                        problem = problem or str(error)
                    self._progress.advance(stop - start)
        except UsageError as error:  # no decoder of this codec
            self.notes.append(f"frames were not decoded: {error}; {error.hint}")
            return []
        except RbtoolError as error:
            return [self._finding(video, str(error))]
        return [self._finding(video, problem, bad)] if bad else []

    def _finding(self, video: int, message: str, groups: Sequence[tuple[int, int]] | None = None) -> Finding:
        """Report a video, with the episodes that refer to these groups of its frames, or to any."""
        episodes = {
            episode
            for episode, first, last in self._uses[video]
            if groups is None or any(first < stop and last >= start for start, stop in groups)
        }
        return replace(self.report("error", message), episodes=Places(np.array(sorted(episodes), np.int64)))


def _frames(groups: Array) -> int:
    return int((groups[:, 2] - groups[:, 1]).sum())


def _spread(groups: Array) -> Array:
    """Choose groups with about `_SAMPLED_FRAMES` frames, from the first to the last; all where there are no more."""
    total = _frames(groups)
    if total <= _SAMPLED_FRAMES:
        return groups
    count = max(2, len(groups) * _SAMPLED_FRAMES // total)
    return groups[np.unique(np.linspace(0, len(groups) - 1, count).round().astype(np.int64))]
