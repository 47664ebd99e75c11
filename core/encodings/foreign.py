"""Whole episodes in the layouts of another library: what the leaf that reads and writes them offers to the rest."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..declarations import LEAVES, from_leaf
from ..errors import UsageError
from ..format.contracts import Array, StepReader
from ..format.open_files import OpenedReader
from ..progress import Progress
from ..ted.schema import Field, Key
from .compact import CompactForm, FilledStorage
from .h5 import Compression

OWN_FORM = "rbtool's own form, without compatible=True and --for torchrl, keeps everything"
"""The hint where a foreign layout cannot hold the rows."""


class ForeignReader(OpenedReader):
    """The valid rows of a storage that another library saved: lane after lane, in each lane the oldest first."""

    @property
    @abstractmethod
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""

    @property
    @abstractmethod
    def flagged(self) -> Array:
        """Of each episode, whether a flag ends it, and not the end of its lane alone."""


class ForeignForm:
    """The layouts of whole episodes of another library, flat, nested and H5.

    As it stands, this class is what holds without that leaf: no file is recognised, and none can be written.
    `options` are the arguments of the checkpointers: done_key, done_keys, reward_keys, shift_key, is_full_key.
    """

    def form_at(self, path: Path) -> CompactForm | None:
        """Return which of the layouts is at `path`, a folder or an HDF5 file; None if none is."""
        return None

    def find(self, path: Path) -> Path | None:
        """Where in the folder of a buffer or a storage, or at `path` itself, one of the layouts is; None if nowhere."""
        return None

    def open(
        self, path: Path, options: Mapping[str, Any] | None = None, held: Collection[Key] | None = None
    ) -> ForeignReader:
        """Open what `find` returned; of the done flags at the root, only those in `held` are given, None for all."""
        raise _absent()

    def done_key(self, options: Mapping[str, Any]) -> Key:
        """Return the key, below `next`, of the flag that ends episodes."""
        raise _absent()

    def bytes(self, fields: Sequence[Field], filled: FilledStorage, form: CompactForm, episodes: int) -> int:
        """Return the bytes of all rows; SchemaError for a leaf for which the layout has no place."""
        raise _absent()

    def write(
        self, source: StepReader, target: Path, form: CompactForm, filled: FilledStorage, options: Mapping[str, Any],
        progress: Progress, compression: Compression | None = None,
    ) -> None:  # fmt: skip
        """Write rows that fill a storage to `target`, a folder in a staging area or, for `h5`, a file in one.

        SchemaError for what the layout cannot hold; what was written until then is not a checkpoint.
        """
        raise _absent()


def _absent() -> UsageError:
    return UsageError(
        "TorchRL's layouts of whole episodes are not part of this installation of rbtool",
        hint="save in rbtool's own form, without compatible=True and --for torchrl",
    )


@functools.cache
def foreign_form() -> ForeignForm:
    """Return the layouts that this installation reads and writes; their module is imported with the first call."""
    form: ForeignForm = from_leaf("foreign_form")() if "foreign_form" in LEAVES else ForeignForm()
    return form
