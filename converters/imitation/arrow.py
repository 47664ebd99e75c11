"""imitation's folders: a Hugging Face dataset, Arrow or Parquet files with a trajectory a row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array
from ...core.format.digest import open_regular
from ...core.format.documents import load_json
from ...core.format.manifest import Dropped
from ..files.arrow import require_bounded_parquet
from ..files.column_reader import EpisodeColumn
from .trajectories import ACTS, INFOS, OBS, REWS, TERMINAL, TIME_LIMIT, Trajectories, field_of

STATE = "state.json"
"""What `save_to_disk` of the datasets library writes next to the Arrow files."""
REQUIRED = (OBS, ACTS, TERMINAL)
_Limit: TypeAlias = Literal["yes", "no", "absent", "unknown"]
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def looks_like_folder(path: Path) -> bool:
    """Return whether a folder, or a file in it, has imitation's columns; raises OSError and what pyarrow raises."""
    files = arrow_files(path)
    return bool(files) and _Part(files[0]).names >= set(REQUIRED)


def arrow_files(path: Path) -> list[Path]:
    """List the Arrow or Parquet files of a dataset, in its order; none for anything else."""
    if path.is_file():
        return [path] if path.suffix in (".parquet", ".arrow") else []
    if not path.is_dir():
        return []
    if (path / STATE).is_file():
        state = load_json(path / STATE)
        listed = state.get("_data_files") if isinstance(state, dict) else None
        found = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        names = [name for name in found if isinstance(name, str) and Path(name).name == name]
        if not names or len(names) < len(found):
            raise FormatError(f"{path / STATE} does not list Arrow files of the folder")
        return [path / name for name in names]
    return sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))


class _Part:
    """One file: its rows are read a trajectory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os.fdopen(open_regular(path), "rb") as file:
            self._is_parquet = file.read(4) == b"PAR1"
        if self._is_parquet:
            require_bounded_parquet(path)
            self._parquet = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
            self.schema = self._parquet.schema_arrow
        else:
            with pa.memory_map(str(path)) as mapped:
                self.schema = pa.ipc.open_stream(mapped).schema
        self.names = set(self.schema.names)

    def batches(self, names: list[str]) -> Iterator[Any]:
        """Yield the rows in batches, of a single one in Parquet files: trajectories have any length."""
        if self._is_parquet:
            yield from self._parquet.iter_batches(batch_size=1, columns=names, use_threads=False)
            return
        with pa.memory_map(str(self.path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            for batch in stream:
                batch.validate()
                for row in range(batch.num_rows):
                    yield batch.slice(row, 1)


class FolderTrajectories(Trajectories):
    """The files of a dataset, open. A trajectory is in memory whole, and no other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = arrow_files(path)
        self._parts = [_Part(file) for file in self._files]
        names = self._parts[0].names
        for part in self._parts:
            if part.names != names or not names >= set(REQUIRED):
                raise FormatError(
                    f"{part.path} has the columns {', '.join(sorted(part.names))}, expected {', '.join(REQUIRED)}"
                )
        self._names = [name for name in (OBS, ACTS, REWS) if name in names]
        known = {*REQUIRED, REWS, INFOS}
        dropped = [Dropped(name, "imitation's datasets have no such column") for name in names - known]
        self.dropped = (
            [*dropped, Dropped(INFOS, "it is text of jsonpickle, a value a step")] if INFOS in names else dropped
        )
        self._stops: list[int] = []
        self._forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._look_over(INFOS in names)
        self._rows: Iterator[Any] = iter(())
        self._next = 0
        self._held: dict[str, Array] = {}
        self._number = -1
        self.columns = []
        for name in self._names:
            field, timing = field_of(path, name, *self._forms[name])
            self.columns.append(EpisodeColumn(field, timing, partial(self._read, name)))

    def _look_over(self, has_infos: bool) -> None:
        """Read every trajectory once, for its length and flags."""
        self.lengths, self.terminal = [], []
        limits: list[_Limit] = []
        for row in self._all([*self._names, TERMINAL, *([INFOS] if has_infos else [])]):
            number = len(self.lengths)
            arrays = {name: self._array(row, name, number) for name in self._names}
            for name, array in arrays.items():
                form = array.dtype, array.shape[1:]
                if len(array) and self._forms.setdefault(name, form) != form:
                    raise FormatError(f"{self.path}: {name} of trajectory {number} have another form than those before")
            steps = len(arrays[ACTS])
            if len(arrays[OBS]) != steps + 1 or (REWS in arrays and len(arrays[REWS]) != steps):
                counts = ", ".join(f"{len(array):,} {name}" for name, array in arrays.items())
                raise FormatError(f"{self.path}: trajectory {number} has {counts}, expected a row more of {OBS}")
            flag = row.column(TERMINAL)[0].as_py()
            if not isinstance(flag, bool):
                raise FormatError(f"{self.path}: terminal of trajectory {number} is {flag!r}, expected true or false")
            self.lengths.append(steps)
            self.terminal.append(flag)
            limits.append(_limit_of(row.column(INFOS)) if has_infos else "unknown")
        if not self.lengths or ACTS not in self._forms:
            raise FormatError(f"{self.path} has no steps")
        if "unknown" not in limits and not {"yes", "no"}.isdisjoint(limits):
            self.limits = [one == "yes" for one in limits]

    def _all(self, names: list[str]) -> Iterator[Any]:
        for part in self._parts:
            yield from part.batches(names)

    def _array(self, row: Any, name: str, number: int) -> Array:
        """Return a column of one trajectory `[rows, *shape]`."""
        values = row.column(name)
        what = f"{self.path}: {name} of trajectory {number}"
        if values.null_count or not any(test(values.type) for test in _LISTS):
            raise FormatError(f"{what} is no list")
        values = values.flatten()
        rows, shape = len(values), list[int]()
        while any(test(values.type) for test in _LISTS):
            lengths = pc.unique(pc.list_value_length(values)).to_pylist()
            if len(lengths) > 1 or None in lengths:
                raise FormatError(f"{what} has rows of different shapes")
            shape.append(int(lengths[0]) if lengths else 0)
            values = values.flatten()
        if not any(test(values.type) for test in _NUMBERS):
            raise FormatError(f"{what} has elements of type {values.type}, which are no numbers")
        if values.null_count:
            raise FormatError(f"{what} has missing values (null)")
        array: Array = values.to_numpy(zero_copy_only=False)
        return array.reshape(rows, *shape)

    def _read(self, name: str, number: int, start: int, stop: int) -> Array:
        if self._number != number:
            self._go_to(number)
        return self._held[name][start:stop]

    def _go_to(self, number: int) -> None:
        if self._next > number or not self._next:
            self._rows, self._next = self._all(self._names), 0
        row = None
        while self._next <= number:
            row = next(self._rows, None)
            self._next += 1
        if row is None:
            raise CorruptDataError(f"{self.path} has become shorter while it was read")
        self._held = {name: self._array(row, name, number) for name in self._names}
        self._number = number

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        self._held, self._rows = {}, iter(())


def _limit_of(infos: Any) -> _Limit:
    """Return whether the infos of the last step mark the time limit, as far as they can be read.

    Old versions of gym state it only in a step that reaches the limit: it is `absent` in the others.
    """
    values = infos.flatten()
    if not len(values):
        return "absent"
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return "unknown"
    try:
        info = json.loads(values[len(values) - 1].as_py() or "")
    except (ValueError, RecursionError):
        return "unknown"
    if not isinstance(info, dict):
        return "unknown"
    found = info.get(TIME_LIMIT, "absent")
    return "absent" if found == "absent" else "unknown" if not isinstance(found, bool) else "yes" if found else "no"
