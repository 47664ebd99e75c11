"""Saves the episodes of a storage with each observation once."""

from __future__ import annotations

from collections.abc import Sequence

from ..storages import PackedRecording, register_checkpointer
from .episodes import EpisodeCheckpointer
from .keys import KeyLike

__all__ = ["FlatStorageCheckpointer"]


class FlatStorageCheckpointer(EpisodeCheckpointer):
    """Saves each observation of an episode once: a leaf has as many rows as steps, an observation one more an episode.

    Everything comes back bit for bit, into any capacity that holds it: root done flags and root rewards, keys that are
    only below `next`, the last cursor; also the next observations of an episode in which they do not follow, which are
    stored in full. `done_keys` (default: done, terminated, truncated) end episodes, and `reward_keys` (default:
    reward) are the other results below `next`; both are texts or tuples of texts, with or without `next`.

    `compatible=True` writes TorchRL's layout, which loses some of that, and raises SchemaError where it cannot hold
    the data. Both are recognised when they are loaded. The idea and the names are those of TorchRL.
    """

    form = "flat"

    def __init__(
        self,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        *,
        compatible: bool = False,
    ) -> None:
        super().__init__(done_keys, reward_keys, compatible=compatible)


register_checkpointer(PackedRecording, FlatStorageCheckpointer)
