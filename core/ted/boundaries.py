"""How episodes end, and how many did so in which way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

__all__ = ["BoundaryCounts", "EndReason", "Final", "end_reason"]


class EndReason(IntEnum):
    """Why an episode ends at its last step, according to the source."""

    TERMINATED = 0
    TRUNCATED = 1
    BOTH = 2
    END_OF_FILE = 3
    """Neither flag was set: the recording stops there. TED marks such a step truncated."""
    INFERRED = 4
    """The source has no flag; a discontinuity showed the end."""


class Final(IntEnum):
    """Where the observation after the last step of an episode comes from."""

    OBSERVED = 0
    REPEATED = 1
    """The source has none; the last one it has is repeated there."""
    DROPPED = 2
    """The source has none after its last step; that step is left out, and the one before it is the truncated end."""
    MISSING = 3
    """The source has none, and it is not replaced yet: only the pieces of a reader have this value."""


def end_reason(terminated: bool, truncated: bool) -> EndReason:
    """Name the end of an episode from the flags of its last step."""
    if terminated:
        return EndReason.BOTH if truncated else EndReason.TERMINATED
    return EndReason.TRUNCATED if truncated else EndReason.END_OF_FILE


@dataclass(frozen=True, slots=True)
class BoundaryCounts:
    """The boundary report: episodes by the way they end, and those whose next rows are stored in full.

    `final_repeated` and `final_dropped` count the episodes whose source has no observation after the last step.
    """

    terminated: int = 0
    truncated: int = 0
    both: int = 0
    end_of_file: int = 0
    inferred: int = 0
    explicit_next: int = 0
    final_repeated: int = 0
    final_dropped: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name; those of final steps only where there are any."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: count for name, count in counts.items() if count or not name.startswith("final_")}
