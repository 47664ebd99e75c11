"""The time stamps of rows, as a robot should have recorded them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import UsageError
from ..format.contracts import Array, StepReader
from ..format.language import EVENTS, PERSISTENT, Said, parse_said, said_in_rows
from ..format.videos import at_rate
from ..preprocess.operations.base import (
    BoundOperation,
    Derivation,
    Discount,
    FieldChanges,
    Fields,
    LazyColumn,
    Operation,
    RowOperation,
    number_of,
)
from ..ted.schema import Field, is_floating

_FRAME, _STAMP = ("frame",), ("timestamp",)
_NEAR = 1e-4
"""How much later than its row, in seconds, what lasts may begin: time stamps are rounded."""


@dataclass(frozen=True)
class Retime(RowOperation):
    """Sets `timestamp` to `frame / fps`, in seconds: clocks of recorders jitter, and LeRobot compares with videos.

    The rate that metadata state becomes `fps`, so that time stamps and windows in seconds agree.
    """

    name: ClassVar[str] = "retime"
    fps: float

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(number_of(value, cls.name))]

    def __post_init__(self) -> None:
        if not 1e-6 <= self.fps <= 1e6:
            raise UsageError(f"--retime is {self.fps:g}, expected frames a second, 1e-06 to 1e+06")

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> Retime:
        """Raise UsageError where language is stated by time, and would be in other rows at the new time stamps."""
        keys, table = {field.key for field in reader.fields}, reader.episodes
        for place, text in enumerate(reader.episode_text or ()):
            events, lasting = (parse_said(text.get(name, "[]"), name) for name in (EVENTS, PERSISTENT))
            timed: Said = {at: said for at, said in events.items() if isinstance(at, tuple)}
            since = [one.get("timestamp") for said in lasting.values() for one in said if isinstance(one, dict)]
            begin = np.array([at for at in since if at is not None], np.float64)
            resampled = "resample" in [one.name for one in before] and events.keys() - {None}  # then it states times
            if not (timed or len(begin) or resampled):
                continue
            stays = False
            if {_FRAME, _STAMP} <= keys and not resampled:
                rows = int(table.start[place]), int(table.start[place] + table.length[place])
                frames, times = (reader.read(key, *rows).reshape(-1) for key in (_FRAME, _STAMP))
                stamps = np.asarray(frames, np.float64) / self.fps
                before_and_after = [
                    (said_in_rows(timed, frames, at), (at[:, None] + _NEAR >= begin).tolist()) for at in (times, stamps)
                ]
                stays = before_and_after[0] == before_and_after[1]
            if not stays:
                raise UsageError(
                    f"--retime {self.fps:g} would move the language of episode {table.episode[place]} to other rows: "
                    f"its {PERSISTENT if len(begin) else EVENTS} are stated by time, and time stamps change",
                    hint="run retime first, and resample on its result" if resampled else "",
                )
        return self

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return at_rate(documents, self.fps)

    def plan(self, fields: Fields) -> BoundOperation:
        if _FRAME not in fields or fields[_FRAME].shape:
            raise UsageError("--retime counts by frame, the number of each row in its episode, which is not there")
        known = fields.by_key.get(_STAMP)
        kept = known is not None and is_floating(known.dtype) and known.dtype != "bfloat16" and not known.shape
        field = known if known is not None and kept else Field(_STAMP, "float32", (), "info")

        def stamps(inputs: Sequence[LazyColumn]) -> Array:
            # Not cast here: what is too large for the type of the field is refused, not made infinite.
            found: Array = np.asarray(inputs[0].numbers, np.float64) / self.fps
            return found

        after = fields.replaced({_STAMP: field}, made=[] if known else [_STAMP])
        return FieldChanges(after, {_STAMP: Derivation((_FRAME,), stamps)})
