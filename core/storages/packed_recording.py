"""A storage that records episodes to disk, in layout `packed`, and can be drawn from meanwhile."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_tensor_collection

from ..errors import SchemaError, UsageError
from ..format.contracts import Array
from ..format.manifest import Manifest
from ..format.packed.reader import PackedReader
from ..format.packed.recording import SYNC_SECONDS, PackedRecorder
from ..ted.schema import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, key_name, role_of
from .base import IndexedStorage
from .cursors import as_index, row_numbers, rows_of
from .dataset import tensor_of, tensordict_of
from .pytree import tree_spec_of
from .write_log import Change

_INDEX = ("index",)
_UNLIMITED = (1 << 63) - 1
_FEW = 4
_FLAGS = (NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED)


class PackedRecording(IndexedStorage):
    """Appends TED rows; whole episodes, as `("next", "done")` ends them, are written to files and survive a crash.

    Rows are added at the end, one or many at a time, by `set` or through a buffer. Those of the episode that is under
    way are held in memory; the death of the process loses them alone, and `rbtool repair` makes a dataset of the rest.
    The first episode that ends `sync_seconds` after the last sync brings all to the disk: a power failure loses at most
    those that ended in between. With 0 each episode is synced when it ends; `sync()`, `finish()`, `close()` and the
    checkpoint of a buffer sync, too. `finish` makes a dataset of all: an episode under way is marked as truncated at
    its last step. What is read are fresh copies; it can be read, and not written, when it is finished.

    The first rows decide keys, element types and shapes; `"index"`, which a buffer's writer adds, is left out, and
    without an `"episode"` the episodes are numbered from 0. Of the flags done, terminated and truncated under `next`
    those that are missing follow from the others, as done is terminated or truncated; `terminated` alone means that
    nothing was truncated. SchemaError (a RuntimeError) for rows whose flags leave open why an episode ends, for other
    keys, types or shapes later, for writes elsewhere than at the end, and beyond `max_size`; nothing has changed then.
    UsageError where something is at `path`, and for a `sync_seconds` below 0.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_size: int = _UNLIMITED,
        sync_seconds: float = SYNC_SECONDS,
        checkpointer: Any = None,
    ) -> None:
        super().__init__(max_size, checkpointer)
        if not sync_seconds >= 0:
            raise UsageError(f"sync_seconds is {sync_seconds}, expected a number from 0")
        self._sync_seconds = sync_seconds
        self.path = Path(path).absolute()
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(f"{self.path} already exists, a recording needs a new folder")
        self.device = torch.device("cpu")
        self._recorder: PackedRecorder | None = None
        self._source: PackedRecorder | PackedReader | None = None  # what rows on the disk are read from
        self._numbered = False
        self._held: list[dict[Key, Array]] = []  # rows of the episode under way
        self._held_rows = 0
        self._lengths: list[int] = []
        self._finished = False

    def __len__(self) -> int:
        return (self._recorder.steps if self._recorder else 0) + self._held_rows

    @property
    def episodes(self) -> int:
        """How many episodes have ended, and were written."""
        return len(self._recorder.commits) if self._recorder else 0

    def episode_lengths(self) -> NDArray[np.int64]:
        """List the lengths of the episodes that have ended; rows behind them are of the one under way."""
        return np.array(self._lengths, np.int64)

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice:
        """Append rows; `cursor` must name the ones behind the last."""
        if self._finished:
            raise SchemaError(f"the recording {self.path} is finished: nothing can be added")
        index = as_index(cursor, 1)
        single = isinstance(index, int)
        data = data.unsqueeze(0) if single and is_tensor_collection(data) else data
        columns = self._columns(data)
        count = len(columns[NEXT_DONE])
        if len(self) + count > self.max_size:
            raise SchemaError(
                f"{count:,} rows do not fit: {self.path} holds {len(self):,} of {self.max_size:,} (max_size) already",
                hint="give a larger max_size, or none",
            )
        rows = rows_of(index, len(self), self.max_size) if not isinstance(index, tuple) else None
        if rows != slice(len(self), len(self) + count):
            raise SchemaError(
                f"the write is at {_shown(cursor)}, expected at the end, row {len(self)}: rows are only added"
            )
        if self._recorder is None:
            self._begin(columns, data)
        if self._numbered:
            columns[EPISODE] = self._numbers_of(columns[NEXT_DONE])
        self._require_alike(columns)
        before = len(self)
        try:
            self._append(columns, count)
        except BaseException:  # a full disk leaves the episodes that came before
            self.log.wrote(slice(before, len(self)), self.max_size)
            raise
        return slice(before, before + count)

    def _columns(self, data: Any) -> dict[Key, Array]:
        if not isinstance(data, TensorDictBase):
            raise SchemaError(f"a recording takes tensordicts, found a {type(data).__name__}")
        found: dict[Key, Array] = {}
        structure = tree_spec_of(data)
        for path, value in zip(structure.paths(), structure.flatten(data), strict=True):
            if path != _INDEX:
                found[path] = array_of(value)
        return found | missing_flags(found)

    def _begin(self, columns: Mapping[Key, Array], data: TensorDictBase) -> None:
        """Take the first rows for what all look like."""
        kinds = {key: data.get(key, None) for key in columns}  # of flags that were filled in there is none
        types = {key: "bool" if kind is None else str(kind.dtype).removeprefix("torch.") for key, kind in kinds.items()}
        shapes = {key: array.shape[1:] for key, array in columns.items()}
        if EPISODE not in columns:
            types[EPISODE], shapes[EPISODE], self._numbered = "int64", (), True
        fields = [Field(key, types[key], shapes[key], role_of(key)) for key in types]
        self._recorder = self._source = PackedRecorder(self.path, fields, sync_seconds=self._sync_seconds)

    def _require_alike(self, columns: Mapping[Key, Array]) -> None:
        fields = {field.key: field for field in self._recorder.fields} if self._recorder else {}
        if columns.keys() != fields.keys():
            odd = ", ".join(sorted(key_name(key) for key in columns.keys() ^ fields.keys()))
            raise SchemaError(f"rows differ from the first ones in the keys {odd}")
        for key, field in fields.items():
            if columns[key].dtype != field.numpy or columns[key].shape[1:] != field.shape:
                found = f"{columns[key].dtype} {list(columns[key].shape[1:])}"
                raise SchemaError(f"{field.name} is {found}, expected {field.dtype} {list(field.shape)}")

    def _append(self, columns: Mapping[Key, Array], count: int) -> None:
        done = _ends(columns[NEXT_DONE])
        start = 0
        for stop in (*(np.flatnonzero(done) + 1).tolist(), count):
            if stop > start:
                self._held.append({key: array[start:stop].copy() for key, array in columns.items()})
                self._held_rows += stop - start
                if done[stop - 1]:
                    self._commit()
            start = stop

    def _commit(self, *, cut_off: bool = False) -> None:
        recorder = self._recorder
        if recorder is None or not self._held_rows:
            return
        columns = {key: np.concatenate([part[key] for part in self._held]) for key in self._held[0]}
        number = columns[EPISODE].reshape(-1)[:1]
        length, self._held, self._held_rows = self._held_rows, [], 0
        try:
            recorder.add_episode(columns, episode=int(number[0]) if len(number) else self.episodes, cut_off=cut_off)
        except BaseException:  # what the files hold beyond the last episode is for repair to cut
            self._finished = True
            raise
        self._lengths.append(length)

    def _numbers_of(self, done: Array) -> NDArray[np.int64]:
        """Number the episodes of rows by how many have ended before."""
        ended = np.cumsum(_ends(done), dtype=np.int64)
        return self.episodes + ended - _ends(done)

    def finish(self) -> Manifest:
        """Make a dataset of the recording; an episode under way ends there, truncated. SchemaError without any rows."""
        if self._recorder is None:
            raise SchemaError(f"nothing was recorded at {self.path}")
        if isinstance(self._source, PackedReader):
            raise SchemaError(f"the recording {self.path} is finished already")
        if self._source is None:
            raise SchemaError(f"the recording {self.path} is closed: nothing can be added", hint=self._way_out)
        if self._held_rows:
            for key in (NEXT_DONE, NEXT_TRUNCATED):
                self._held[-1][key][-1] = True
            self._commit(cut_off=True)
            self.mark_changed(Change(slice(len(self) - 1, len(self)), (NEXT_DONE, NEXT_TRUNCATED)))
        self._finished = True
        manifest = self._recorder.finish()
        self._source = PackedReader(self.path)
        return manifest

    def sync(self) -> None:
        """Wait until all episodes that have ended are on the disk."""
        if self._recorder is not None and not self._finished:
            self._recorder.sync()

    def close(self) -> None:
        """Stop recording without making a dataset; nothing can be read any more, the episode under way is lost."""
        try:
            self.sync()
        finally:
            self._finished = True
            self._source = None
            if self._recorder is not None:
                self._recorder.close()

    @property
    def _way_out(self) -> str:
        return f"make a dataset of it: rbtool repair {shlex.quote(str(self.path))}"

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read the rows at `index` into fresh tensors; IndexError for rows that are not there."""
        if self._recorder is None:
            raise SchemaError("the recording is empty: nothing was ever written to it", hint="write to it first")
        if self._source is None:
            raise SchemaError(
                f"the recording {self.path} is closed: nothing can be read of it",
                hint=self._way_out,
            )
        numbers = row_numbers(as_index(index, 1), len(self))
        unique, place = np.unique(numbers.reshape(-1), return_inverse=True)
        tensors = {}
        for field in self._recorder.fields:
            rows = self._read(field, unique)[place.reshape(-1)]
            tensors[field.key] = tensor_of(rows.reshape((*numbers.shape, *field.shape)), field)
        return tensordict_of(tensors, numbers.shape)

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index` alone; None where there is none."""
        fields = self._recorder.fields if self._recorder else ()
        field = next((field for field in fields if field.key == key), None)
        if field is None or self._source is None:
            return super().entry(key, index)  # which raises the error
        numbers = row_numbers(as_index(index, 1), len(self))
        unique, place = np.unique(numbers.reshape(-1), return_inverse=True)
        rows = self._read(field, unique)[place.reshape(-1)]
        return tensor_of(rows.reshape((*numbers.shape, *field.shape)), field)

    def _read(self, field: Field, rows: Array) -> Array:
        """Read sorted rows of one leaf, each run of neighbours at once."""
        found = np.empty((len(rows), *field.shape), field.numpy)
        assert self._recorder is not None, "get has looked"
        assert self._source is not None, "get has looked"
        safe = self._recorder.steps
        split = int(np.searchsorted(rows, safe))
        breaks = np.flatnonzero(np.diff(rows[:split]) != 1) + 1
        for run in np.split(np.arange(split), breaks) if split else ():
            found[run] = self._source.read(field.key, int(rows[run[0]]), int(rows[run[-1]]) + 1)
        if split < len(rows):
            held = np.concatenate([part[field.key] for part in self._held])
            found[split:] = held[rows[split:] - safe]
        return found

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Refuse: what was recorded stays."""
        raise SchemaError(f"{self.path} is a recording: rows are added to it, and none are changed")

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return how many rows there are; those of episodes that have ended are on the disk."""
        self.sync()
        return {"path": str(self.path), "_len": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state is of this very recording; SchemaError if not."""
        if (state.get("path"), state.get("_len")) != (str(self.path), len(self)):
            raise SchemaError(f"the state belongs to other rows than those of {self.path}")

    def clear_rows(self) -> None:
        """Refuse: what was recorded stays."""
        raise SchemaError(f"{self.path} is a recording: rows are added to it, and none are taken away")

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(f"the recording {self.path} cannot be sent to another process", hint="finish it first")


def _shown(cursor: Any) -> str:
    """Write where rows were to go; of many only the first and the last."""
    if isinstance(cursor, torch.Tensor) and cursor.dim() == 1 and cursor.dtype == torch.int64 and len(cursor) > _FEW:
        return f"rows {int(cursor[0])}, …, {int(cursor[-1])}"
    return str(cursor.tolist() if isinstance(cursor, torch.Tensor) else cursor)


def missing_flags(columns: Mapping[Key, Array]) -> dict[Key, Array]:
    """Make those of the flags done, terminated and truncated under `next` that are not there out of the others.

    SchemaError for flags that are not bool, differ in shape, or leave open why an episode ends.
    """
    found = {key: columns[key] for key in _FLAGS if key in columns}
    odd = next((key for key, flag in found.items() if flag.dtype != np.bool_), None)
    if odd is not None:
        raise SchemaError(f"{key_name(odd)!r} is {found[odd].dtype}, expected bool: it marks where episodes end")
    if len(found) < len(_FLAGS) and len({flag.shape for flag in found.values()}) > 1:
        raise SchemaError(f"the flags {_names(found)} differ in shape, so the one that is missing cannot be filled in")
    done, terminated, truncated = (found.get(key) for key in _FLAGS)
    if terminated is None and done is not None and truncated is not None:
        return {NEXT_TERMINATED: done & ~truncated}
    if terminated is None:
        raise SchemaError(
            f"the flags {_names(_FLAGS)} say where and why episodes end, {_names(found) or 'none'} was found; "
            f"needed is {key_name(NEXT_TERMINATED)!r}, or both others"
        )
    if truncated is None:
        truncated = np.zeros_like(terminated) if done is None else done & ~terminated
    return {NEXT_DONE: terminated | truncated, NEXT_TRUNCATED: truncated} | found


def _names(keys: Iterable[Key]) -> str:
    return ", ".join(repr(key_name(key)) for key in keys)


def array_of(value: torch.Tensor) -> Array:
    """The values of a tensor; of bfloat16 the bits, as uint16."""
    plain = value.detach().cpu().contiguous()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def _ends(done: Array) -> NDArray[np.bool_]:
    """Whether one of the flags of each row is set."""
    return np.asarray(done.reshape(len(done), -1).any(1))
