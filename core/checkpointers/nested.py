"""Saves the episodes of a storage as ragged tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from .episodes import EpisodeCheckpointer
from .folders import article
from .keys import KeyLike

__all__ = ["NestedStorageCheckpointer", "require_known"]

_NAMES = frozenset({"done_key", "shift_key", "is_full_key"})


class NestedStorageCheckpointer(EpisodeCheckpointer):
    """Saves what a `FlatStorageCheckpointer` saves, with the shapes of every episode beside each leaf.

    tensordict opens such a folder as ragged tensors `[episodes, rows, ...]`. `done_keys`, `reward_keys` and
    `compatible` are those of `FlatStorageCheckpointer`; other arguments (`done_key`, `shift_key`, `is_full_key`) name
    entries of TorchRL's layout and matter with `compatible=True` only.
    """

    form = "nested"

    def __init__(
        self,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        *,
        compatible: bool = False,
        **kwargs: Any,
    ) -> None:
        require_known(self, kwargs)
        super().__init__(done_keys, reward_keys, compatible=compatible, options=kwargs)


def require_known(checkpointer: EpisodeCheckpointer, kwargs: dict[str, Any]) -> None:
    """Raise UsageError for an argument that means nothing."""
    unknown = sorted(kwargs.keys() - _NAMES)
    if unknown:
        known = ", ".join(sorted(_NAMES))
        raise UsageError(f"{article(type(checkpointer).__name__)} has no argument {unknown[0]!r}; others are {known}")
