"""Readers of sources that are streamed in parts: what is decided by all episodes is the same in each part."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import ClassVar

from .reader import Reader


class PartsReader(Reader, ABC):
    """A reader of a source of which a stream reads one part after the other.

    A subclass may implement `shard_starts`, `evidence` and `settled`, with `settled_names`.
    """

    settled_names: ClassVar[frozenset[str]] = frozenset()
    """Names of the options whose default, `auto`, is decided by all episodes: parts of a dataset could differ."""

    def shard_starts(self) -> Sequence[int] | None:
        """Return the first episode of each part in which a stream of the source reads it; None where it has none.

        Called after the survey; the numbers ascend, and need not be those of episodes.
        """
        return None

    def evidence(self) -> Mapping[str, int]:
        """Return counts that decide about the options of `settled_names`; those of several parts are added up."""
        return {}

    @classmethod
    def settled(cls, evidence: Mapping[str, int]) -> tuple[dict[str, str], bool]:
        """Return the options that such counts decide for, and whether more of them would hardly change that."""
        return {}, True
