"""The time stamps of rows, as a robot should have recorded them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import UsageError
from ..format.contracts import Array
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
