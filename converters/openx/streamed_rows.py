"""The TED rows of streamed episodes: the first one decides about the form of all."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import numpy as np

from ...core.datasets.streams.episodes import RawEpisode
from ...core.encodings.archives import ArchiveMember
from ...core.errors import FormatError
from ...core.format.contracts import Array, Closing
from ...core.format.reader import FinalStep
from ...core.format.rlds_steps import IS_INIT, LastStep, RldsLast
from ...core.ted.schema import EPISODE, NEXT, REWARD, Field, Key, Timing
from .rows import EpisodeUnpickler, read_rows
from .steps import Episode
from .survey import EpisodeSurvey, FoundEpisode, keys_of

_NUMBER = re.compile(r"(\d{1,15})\D*")
_SHARD_EPISODES = 1 << 32


@dataclass(frozen=True, slots=True)
class StreamedEpisode:
    """An episode that is open: `length` TED steps of the `stored` ones; after the last there may be no observation."""

    opener: StreamedRows
    episode: Episode
    number: int
    length: int
    stored: int
    terminated: bool
    truncated: bool

    @property
    def what(self) -> str:
        """What names it in errors."""
        return self.episode.what

    def rows(self, start: int, stop: int) -> dict[Key, Array]:
        """Return the TED rows `[start, stop)`."""
        return self.opener.rows(self, start, stop)


class StreamedRows(Closing):
    """Opens episodes one at a time, and gives their rows. Not for several threads.

    `choice` and `final_step` are as for the reader; `last` is what `decide` found.
    """

    def __init__(self, *, images: bool, choice: RldsLast, final_step: FinalStep) -> None:
        self._survey = EpisodeSurvey(images=images)
        self._choice: RldsLast = choice
        self._final_step = final_step
        self._unpickler = EpisodeUnpickler()
        self._fields: tuple[tuple[Field, Timing], ...] = ()
        self._single: dict[Key, str] = {}
        self.last: LastStep | None = None

    def look_at(self, raw: RawEpisode) -> FoundEpisode:
        """Take the form of an episode; FormatError for one that is not like the first."""
        return self._look(raw)[1]

    def decide(self) -> None:
        """Decide about last steps, by the episodes that were looked at."""
        self.last = self._survey.last.decide(self._choice)

    def open(self, raw: RawEpisode) -> StreamedEpisode | None:
        """Unpickle an episode and look at its values; None for one without a step."""
        episode, found = self._look(raw)
        if self.last is None:
            self.decide()
        assert self.last is not None
        observed = self.last.observed(is_last=found.is_last)
        repeats = self._final_step == "repeat" or (self._final_step == "auto" and found.is_terminal)
        length = found.length - (observed or not repeats)
        if length < 1:
            return None
        dropped = not observed and not repeats
        return StreamedEpisode(
            self, episode, _number_of(raw), length, found.length, found.is_terminal and not dropped,
            dropped or (found.is_last and not found.is_terminal),
        )  # fmt: skip

    def _look(self, raw: RawEpisode) -> tuple[Episode, FoundEpisode]:
        what = f"shard {raw.shard}: {raw.name}"
        episode = self._unpickler.load(io.BytesIO(raw.data), len(raw.data), what)
        with self._unpickler.explained(what):
            found = self._survey.look_at(episode, raw.shard, ArchiveMember(raw.name, 0, len(raw.data)))
        if found.length:
            self._keep_forms()
        return episode, found

    def _keep_forms(self) -> None:
        """Take the fields as they are now: only texts may become longer, and numbers keep their type."""
        fields, _ = self._survey.fields()
        for field, _ in fields:
            before = self._single.setdefault(field.key, field.dtype)
            if before != field.dtype:
                raise FormatError(
                    f"{'.'.join(field.key)} was {before} in all episodes before, which does not hold all values here"
                )
        self._fields = fields

    def rows(self, one: StreamedEpisode, start: int, stop: int) -> dict[Key, Array]:
        """Return the TED rows `[start, stop)` of the episode that was opened last."""
        columns = list(self._survey.columns.values())
        fields = {field.key: field for field, _ in self._fields}
        count, ends = stop - start, stop == one.length
        with self._unpickler.explained(one.episode.what):
            held = read_rows(one.episode, columns, fields, (start, min(stop + 1, one.stored)))
        if len(next(iter(held.values()))) == count:  # no observation follows the last step
            held = {key: np.concatenate((rows, rows[-1:])) for key, rows in held.items()}
        timings = {field.key: timing for field, timing in self._fields}
        found: dict[Key, Array] = {}
        for key in (key for column in columns for key in keys_of(column)):
            rows = held[key]
            if timings[key] != "result":
                found[key] = rows[:count]
            if timings[key] != "step":
                after = rows[1:] if timings[key] == "state" else rows[:count]
                found[NEXT, *key] = after.reshape(count, 1) if key == REWARD else after
        flags = np.zeros((4, count, 1), bool)
        flags[0, 0], flags[1, -1], flags[2, -1] = start == 0, ends and one.terminated, ends and one.truncated
        flags[3] = flags[1] | flags[2]
        for name, rows in zip(("terminated", "truncated", "done"), flags[1:], strict=True):
            found[NEXT, name] = rows
        return found | {IS_INIT: flags[0], EPISODE: np.full(count, one.number, np.int64)}

    @property
    def is_decided(self) -> bool:
        """Whether it is known what last steps are."""
        return self.last is not None

    @property
    def text_keys(self) -> frozenset[Key]:
        """The keys of text and of its lengths, also those under `next`."""
        columns = self._survey.columns.values()
        keys = {key for one in columns if one.form.kind == "text" for key in keys_of(one)}
        return frozenset(keys | {(NEXT, *key) for key in keys})

    @property
    def is_here(self) -> bool:
        """Whether an episode that is open can be read: not in a fork."""
        return self._unpickler.is_here

    def close(self) -> None:
        """End the process that unpickles."""
        self._unpickler.close()


def _number_of(raw: RawEpisode) -> int:
    """Return the number that the name of an episode ends in; else one that no other episode has."""
    found = _NUMBER.fullmatch(raw.name.rpartition("_")[2])
    return raw.shard * _SHARD_EPISODES + raw.place if found is None else int(found[1])
