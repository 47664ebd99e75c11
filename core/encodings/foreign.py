"""The contract for layouts of whole episodes of another library, which a leaf implements: TorchRL's.

Without this leaf, `ForeignForm` itself is used, which recognises no file and writes none.
"""

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
"""The hint for rows that a layout of another library cannot hold."""


class ForeignReader(OpenedReader):
    """The valid rows of a storage that another library saved: lane after lane, in each lane the oldest first."""

    @property
    @abstractmethod
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""

    @property
    @abstractmethod
    def flagged(self) -> Array:
        """Whether each episode ends with a flag, bool `[episodes]`; others end because their lane ends."""


class ForeignForm:
    """The layouts of whole episodes of another library: flat, nested and H5.

    The methods of this class apply if the leaf is not installed: no file is recognised, and writing raises UsageError.
    `options` are arguments of the checkpointers: done_key, done_keys, reward_keys, shift_key, is_full_key.
    """

    def form_at(self, path: Path) -> CompactForm | None:
        """Return which of the layouts is at `path`, a folder or an HDF5 file; None if none is."""
        return None

    def find(self, path: Path) -> Path | None:
        """Return the path of one of the layouts: `path`, or a place in the folder of a buffer or storage; else None."""
        return None

    def open(
        self, path: Path, options: Mapping[str, Any] | None = None, held: Collection[Key] | None = None
    ) -> ForeignReader:
        """Open a path that `find` has returned. Of the done flags at the root, only keys in `held` are returned.

        If `held` is None, all of them are.
        """
        raise _absent()

    def done_key(self, options: Mapping[str, Any]) -> Key:
        """Return the key, below `next`, of the flag that ends episodes."""
        raise _absent()

    def bytes(self, fields: Sequence[Field], filled: FilledStorage, form: CompactForm, episodes: int) -> int:
        """Return the bytes of all rows; SchemaError for a leaf that the layout cannot hold."""
        raise _absent()

    def write(
        self, source: StepReader, target: Path, form: CompactForm, filled: FilledStorage, options: Mapping[str, Any],
        progress: Progress, compression: Compression | None = None,
    ) -> None:  # fmt: skip
        """Write rows that fill a storage to `target`, a folder in a staging area or, for `h5`, a file in one.

        SchemaError for rows that the layout cannot hold; files that were written before are incomplete.
        """
        raise _absent()


def _absent() -> UsageError:
    return UsageError(
        "TorchRL's layouts of whole episodes are not part of this installation of rbtool",
        hint="save in rbtool's own form, without compatible=True and --for torchrl",
    )


@functools.cache
def foreign_form() -> ForeignForm:
    """Return the layouts that this installation supports; the first call imports their module."""
    form: ForeignForm = from_leaf("foreign_form")() if "foreign_form" in LEAVES else ForeignForm()
    return form
