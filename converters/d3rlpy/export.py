"""Exports to an HDF5 file that d3rlpy 2 loads: `d3rlpy.dataset.ReplayBuffer.load(file, InfiniteBuffer())`.

    observations_N, actions_N, rewards_N, terminated_N    the arrays of episode N, and whether it is terminated
    observations_N_0, observations_N_1, …                 several arrays of observations, a tuple, in their order
    NAME_N                                                info.NAME: d3rlpy passes over them
    columns, num_episodes, version                        what there is

d3rlpy has no observation after the last step of an episode. Where it is not terminated, d3rlpy trains on all of its
steps but the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import h5py
import numpy as np

from ...core.ted.episodes import Final
from ...core.ted.schema import NEXT, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, field_named
from ..files.exports import leaves_of, only_leaf
from ..files.hdf5 import H5Sink

_VERSION = "2.1"
_OWN = ("observations", "actions", "rewards", "terminated")
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)


class D3rlpyExporter(H5Sink):
    """Writes the arrays of each episode; memory is bounded by an episode."""

    format = "d3rlpy"

    def prepare(self) -> None:
        """Refuse several arrays of actions, and find the name of every column."""
        self.refuse({"bfloat16"}, "HDF5")
        fields = self.chosen.fields
        observations = leaves_of(fields, "observation")
        self._columns = {"observations": observations, "actions": [only_leaf(fields, "action", "d3rlpy")]}
        self._columns["rewards"] = [field_named(fields, NEXT_REWARD)]
        for field in fields:
            name = field.key[-1]
            if field.key[:-1] == ("info",) and _NAME.fullmatch(name) and name not in _OWN:
                self._columns[name] = [field]
        placed = [field.key for group in self._columns.values() for field in group]
        after = [(NEXT, *field.key) for field in observations] if not self.chosen.table.explicit_next.any() else []
        self.place([*placed, NEXT_TERMINATED, NEXT_TRUNCATED], after)
        self.note_unnumbered()
        if len(observations) > 1:
            listed = ", ".join(field.name for field in observations)
            self.notes.append(f"observations are a tuple there, in this order: {listed}")
        self.note_both()
        if inside := self.flags_inside():
            self.notes.append(f"flags in {inside:,} steps inside episodes have no place there")
        table = self.chosen.table
        if (table.final == Final.OBSERVED).any():
            self.notes.append(
                "the observation after the last step of an episode has no place there: d3rlpy trains on all steps but "
                f"the last one of the {int((~table.terminated).sum()):,} episodes that are not terminated"
            )

    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write episode after episode."""
        h5.create_dataset("columns", data=[*self._columns, "terminated"], dtype=h5py.string_dtype())
        h5.create_dataset("num_episodes", data=len(self.chosen.rows))
        for position, terminated in enumerate(self.chosen.table.terminated.tolist()):
            for name, group in self._columns.items():
                of_tuple = len(group) > 1 or group[0].key == ("observation", "0")
                for number, field in enumerate(group):
                    rows, part = self.read(field.key, position), f"_{number}" if of_tuple else ""
                    h5.create_dataset(f"{name}_{position}{part}", data=_with_dimension(rows, field, name))
                    yield rows.nbytes
            h5.create_dataset(f"terminated_{position}", data=terminated)
            yield 2 * int(self.chosen.table.length[position])
        h5.create_dataset("version", data=_VERSION)


def _with_dimension(rows: np.ndarray[tuple[int, ...], np.dtype[np.generic]], field: Field, name: str) -> object:
    """Give single numbers a dimension, which d3rlpy's arrays have."""
    return rows.reshape(len(rows), 1) if name in _OWN and not field.shape else rows
