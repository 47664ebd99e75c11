"""Exports to a flat HDF5 file in the layout of D4RL's v2 files.

    observations, actions, rewards, next_observations    rows of all episodes, one after another
    terminals, timeouts                                  next.terminated and next.truncated
    infos/NAME                                           info.NAME, of the same row
    metadata/…                                           the metadata of a dataset that was converted from D4RL

`next_observations` are left out if the source had none and all last steps were kept by `--final-step repeat`. If the
recording stops inside the last episode, that episode has no flag in its last row, as in D4RL's files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from ...core.errors import FormatError
from ...core.format.documents import parse_json
from ...core.ted.episodes import EndReason
from ...core.ted.schema import NEXT, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Key, field_named, file_stem
from ..files.exports import OUTCOMES, only_leaf
from ..files.hdf5 import H5Sink

_METADATA = "metadata/"
_SUFFIX = ".npy"


class D4rlExporter(H5Sink):
    """Writes a flat HDF5 file with next observations."""

    format = "d4rl"

    def prepare(self) -> None:
        """Choose the name of every column; raise SchemaError for several arrays of observations or actions."""
        self.refuse({"bfloat16"}, "HDF5")
        observation, action = (only_leaf(self.chosen.fields, role, "D4RL") for role in ("observation", "action"))
        self._names: dict[str, Key] = {
            "observations": observation.key, "actions": action.key, "rewards": NEXT_REWARD,
            "terminals": NEXT_TERMINATED, "timeouts": NEXT_TRUNCATED,
        }  # fmt: skip
        after: Key = (NEXT, *observation.key)
        if not self.is_without_ends:
            self._names["next_observations"] = after
            self.note_repeated()
        for key in OUTCOMES:
            field_named(self.chosen.fields, key)
        paths = {name: path for path, name in self.chosen.reader.manifest.renamed_keys.items()}
        for field in self.chosen.fields:
            if field.key[0] == "info":
                usual = "/".join(("infos", *map(file_stem, field.key[1:])))
                self._names.setdefault(paths.get(field.name, usual), field.key)
        self.place(self._names.values(), [after])
        self.note_unnumbered()
        if inside := self.flags_inside():
            self.notes.append(
                f"flags are set in {inside:,} steps inside episodes: D4RL ends an episode at each of them"
            )

    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write column after column."""
        for name, key in self._names.items():
            yield from self.column(h5, name, key, single=key in OUTCOMES)
        table = self.chosen.table
        if table.end_reason[-1:] == EndReason.END_OF_FILE:
            h5["timeouts"][-1] = False
        if self.chosen.reader.manifest.request.source == self.format:
            self._write_metadata(h5)

    def _write_metadata(self, h5: h5py.File) -> None:
        """Write the metadata that the reader of D4RL's files kept as documents."""
        for name, data in self.chosen.reader.documents().items():
            if name == "metadata.json":
                document = parse_json(data, name)
                if not isinstance(document, dict):
                    raise FormatError(f"{name} of the source is not an object")
                h5.attrs.update(document.pop("attributes", {}))
                _write_values(h5, _METADATA.rstrip("/"), document)
            elif name.startswith(_METADATA) and name.endswith(_SUFFIX):
                h5[name.removesuffix(_SUFFIX)] = np.load(io.BytesIO(data), allow_pickle=False)


def _write_values(h5: h5py.File, path: str, value: Any) -> None:
    """Write each value of a document to a dataset at its path; null becomes an empty dataset."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _write_values(h5, f"{path}/{name.rstrip('/')}", inner)
    elif value is None:
        h5[path] = h5py.Empty("f4")
    elif path not in h5:
        h5[path] = value
