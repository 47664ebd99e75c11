"""Saves the episodes of a storage as one HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..encodings import Compression, H5Reader
from ..errors import UsageError
from ..format import is_inside
from .episodes import EpisodeCheckpointer
from .keys import KeyLike
from .nested import require_known

__all__ = ["H5StorageCheckpointer"]

_SUFFIX = ".h5"


class H5StorageCheckpointer(EpisodeCheckpointer):
    """Saves what a `FlatStorageCheckpointer` saves as one HDF5 file, one dataset a leaf.

    The file is `path` itself if that ends in `.h5`, else `checkpoint_file` in the folder `path`. `h5_kwargs` go to the
    making of every dataset: `compression` ("gzip" or "lzf"), `compression_opts`, `shuffle`, `fletcher32` and
    `chunks=True` (else UsageError). Other arguments are those of `NestedStorageCheckpointer`.
    """

    form = "h5"

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        h5_kwargs: Mapping[str, Any] | None = None,
        compatible: bool = False,
        **kwargs: Any,
    ) -> None:
        require_known(self, kwargs)
        if not is_inside(checkpoint_file) or "/" in checkpoint_file:
            raise UsageError(f"checkpoint_file is {checkpoint_file!r}; the name of a file is expected")
        options = {"checkpoint_file": checkpoint_file, "h5_kwargs": h5_kwargs, **kwargs}
        super().__init__(done_keys, reward_keys, compatible=compatible, options=options)
        self.checkpoint_file = checkpoint_file
        self._chosen = Compression() if compatible else Compression.from_h5_kwargs(h5_kwargs)

    def _file_name(self, path: str | os.PathLike[str]) -> str | None:
        file = Path(path)
        return file.name if file.suffix == _SUFFIX and not file.is_dir() else None

    def _built(self, folder: Path, name: str | None) -> Path:
        return folder / (name or self.checkpoint_file)

    def _open(self, place: Path) -> H5Reader:
        return H5Reader(place)

    @property
    def _compression(self) -> Compression:
        return self._chosen
