"""record_rollout: writes rollouts of TorchRL's environments and collectors as datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from ..errors import SchemaError, UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import Array
from ..format.episodes import EpisodeRow
from ..format.manifest import Dropped, Manifest, Request
from ..format.memmap.builder import Origin, provenance_step
from ..format.packed.builder import row_builder
from ..format.packed.recording import SOURCE
from ..format.returns import episode_return
from ..format.staging import Staging
from ..storages.packed import array_of, missing_flags
from ..ted.episodes import EndReason, end_reason
from ..ted.schema import (
    EPISODE,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    key_name,
    numbers_rows,
    role_of,
    safe_part,
)

_MASKS: tuple[Key, ...] = (("collector", "mask"), ("mask",))
_TRAJECTORY: Key = ("collector", "traj_ids")
_MOST_DIMENSIONS = 3


@suggests_keywords()
def record_rollout(td: TensorDictBase, dest: str | os.PathLike[str]) -> Manifest:
    """Write a rollout of TorchRL as a new dataset in layout `packed`. torchrl need not be installed.

    Episodes end where `("next", "done")` is set, where `("collector", "traj_ids")` or `"episode"` changes, and before
    padding. Missing flags are derived from the others. An episode without an end is kept: its last step is marked
    truncated, and its end reason is `end_of_file`. Episodes have the numbers in the entry `"episode"`, or are numbered
    from 0 if there is none or if it gives two episodes the same number. Leaves that are not tensors, and an entry
    `"episode"` that does not number the episodes, are left out and listed in the manifest (`dropped_keys`).

    Args:
        td: a tensordict with 1 to 3 batch dimensions, of which the last is time: the result of `env.rollout(…)`, a
            batch of a collector, or the result of `split_trajectories`, whose padding is left out (`("collector",
            "mask")` or `"mask"`).
        dest: the folder of the dataset, which must be missing or empty.

    Returns:
        The manifest of the dataset.

    Raises:
        UsageError (a ValueError): `dest` is occupied.
        SchemaError (a RuntimeError): the data are not a rollout.
    """
    if not isinstance(td, TensorDictBase):
        raise SchemaError(f"expected a rollout as a tensordict, found a {type(td).__name__}")
    if not 1 <= td.batch_dims <= _MOST_DIMENSIONS:
        raise SchemaError(f"the rollout has the batch size {list(td.batch_size)}, expected 1 to 3 dimensions")
    place = fs.expanded(dest).absolute()
    rows, fields, dropped = _rows_of(td)
    episodes = list(rows.episodes())
    if not episodes:
        raise SchemaError("the rollout has no step")
    numbers = rows.numbers(episodes)
    if len({*numbers}) < len(numbers):
        dropped.append(Dropped(key_name(EPISODE), "it gives several episodes the same number"))
        numbers = [*range(len(episodes))]
    origin = Origin(
        Request(SOURCE, "a rollout", place.name, layout="packed"),
        (provenance_step("record_rollout", {"batch_size": list(td.batch_size)}, {}),),
        dropped_keys=tuple(dropped),
    )
    with Staging(place) as staging:
        table: list[EpisodeRow] = []
        with row_builder(staging.path, tuple(fields), "packed") as builder:
            for number, episode in zip(numbers, episodes, strict=True):
                columns = rows.columns(episode, number)
                builder.append(columns, np.arange(len(episode.rows)) == len(episode.rows) - 1)
                table.append(_table_row(columns, number, episode, fields))
            manifest = builder.finish(table, origin)
        if not staging.publish():
            raise UsageError(f"another process created {place} in the meantime", hint="choose another destination")
    return manifest


@dataclass(frozen=True, slots=True)
class _Episode:
    """The row numbers of one episode; `cut_off` says that the rollout stopped before the episode ended."""

    rows: Array
    cut_off: bool


@dataclass(frozen=True, slots=True)
class _RolloutRows:
    """All leaves of a rollout as arrays `[lanes * time, *shape]`.

    `kept`, bool `[lanes * time]`, is False at padding. `trajectory` has the trajectory number of each row, `episode`
    the given number of its episode, or is None. `time` is the number of rows of a lane.
    """

    arrays: dict[Key, Array]
    kept: Array
    trajectory: Array
    episode: Array | None
    time: int

    def episodes(self) -> Iterator[_Episode]:
        """Yield the episodes, lane by lane."""
        done: Array = np.asarray(self.arrays[NEXT_DONE].reshape(len(self.kept), -1).any(1))
        for start in range(0, len(self.kept), self.time) if self.time else ():
            rows = start + np.flatnonzero(self.kept[start : start + self.time])
            if not len(rows):
                continue
            last = done[rows]
            last[:-1] |= np.diff(rows) > 1
            for given in (self.trajectory, self.episode):
                if given is not None:
                    last[:-1] |= given[rows[1:]] != given[rows[:-1]]
            last[-1] = True
            for part in np.split(rows, np.flatnonzero(last)[:-1] + 1):
                yield _Episode(part, not done[part[-1]])

    def numbers(self, episodes: list[_Episode]) -> list[int]:
        """Return the given number of each episode, or those from 0 on."""
        if self.episode is None:
            return [*range(len(episodes))]
        return [int(self.episode[one.rows[0]]) for one in episodes]

    def columns(self, episode: _Episode, number: int) -> dict[Key, Array]:
        """Return the rows of an episode."""
        found = {key: array[episode.rows] for key, array in self.arrays.items()}
        if episode.cut_off:
            for key in (NEXT_DONE, NEXT_TRUNCATED):
                found[key][-1] = True
        found[EPISODE] = np.full(len(episode.rows), number, np.int64)
        return found


def _rows_of(td: TensorDictBase) -> tuple[_RolloutRows, list[Field], list[Dropped]]:
    arrays: dict[Key, Array] = {}
    types: dict[Key, str] = {}
    dropped = []
    lead = td.batch_dims
    if not td.batch_size.numel():
        raise SchemaError(f"the rollout has no step: its batch size is {list(td.batch_size)}")
    entries: Any = td.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf)  # typed as if never nested
    for name, value in entries:
        key = tuple(map(safe_part, (name,) if isinstance(name, str) else name))
        if not isinstance(value, torch.Tensor):
            dropped.append(Dropped(key_name(key), f"it is a {type(value).__name__}"))
            continue
        arrays[key] = array_of(value.reshape(-1, *value.shape[lead:]))
        types[key] = str(value.dtype).removeprefix("torch.")
    count = td.batch_size.numel()
    kept = np.ones(count, bool)
    for key in _MASKS:
        if key in arrays and arrays[key].dtype == np.bool_ and arrays[key].size == count:
            kept &= arrays.pop(key).reshape(-1)
    ids = arrays.get(_TRAJECTORY)
    trajectory = np.zeros(count, np.int64) if ids is None or ids.size != count else ids.reshape(-1)
    episode = arrays.pop(EPISODE, None)
    if episode is not None and not numbers_rows(episode):
        dropped.append(Dropped(key_name(EPISODE), "it is not one whole number for each step"))
        episode = None
    arrays |= missing_flags(arrays)
    fields = [Field(key, types.get(key, "bool"), array.shape[1:], role_of(key)) for key, array in arrays.items()]
    fields.append(Field(EPISODE, "int64", (), "id"))
    numbers = None if episode is None else episode.reshape(-1)
    return _RolloutRows(arrays, kept, trajectory, numbers, td.batch_size[-1]), fields, dropped


def _is_leaf(kind: type) -> bool:
    """Return whether values of this type are leaves: tensors, and tensordict's wrappers of other data."""
    return not issubclass(kind, TensorDictBase)


def _table_row(columns: dict[Key, Array], number: int, episode: _Episode, fields: list[Field]) -> EpisodeRow:
    terminated, truncated = (bool(np.any(columns[key][-1])) for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
    reason = EndReason.END_OF_FILE if episode.cut_off else end_reason(terminated, truncated)
    total = episode_return(columns, fields)
    return EpisodeRow(number, len(episode.rows), total, terminated, truncated, reason)
