"""Slices in epochs: of every trajectory one before any comes again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey

from ..errors import SchemaError, UsageError
from ..storages.base import Storage
from .base import Index
from .slices import Anchor, SliceSampler
from .trajectories import TrajectoryTable
from .trajectory_epochs import SavedEpoch, TrajectoryEpoch
from .uniform import EpochSampler, Numbers


class SliceSamplerWithoutReplacement(EpochSampler, SliceSampler):
    """Draws one slice of each trajectory in epochs, from anywhere in it or at its `anchor`.

    With `strict_length=False` every trajectory is drawn once an epoch, a short one as a whole; with
    `strict_length=True` every one of at least the slice length. Only the last batch of an epoch has fewer slices (in
    TorchRL also those that meet short trajectories); `drop_last` leaves it out. `shuffle=False` draws in the order of
    time.

    A trajectory that starts during an epoch is drawn in it. One that is being written is drawn once, however long it
    grows; one that was overwritten is not. `ran_out` is True from the last batch of an epoch to the next batch. The
    other arguments and the output are those of `SliceSampler`.

    SchemaError (a RuntimeError) if no trajectory is long enough; UsageError (a ValueError) with `drop_last` for more
    slices than trajectories.

    Checkpoints hold the order of the remaining trajectories, numbered as in TorchRL: lane by lane, in the order of the
    rows of their last steps.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])}, [8]))
    >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, strict_length=False, shuffle=False, anchor="start")
    >>> [sampler.sample(storage, 4)[0][0].tolist() for _ in range(3)]
    [[0, 1, 4], [5, 6], [0, 1, 4]]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: bool | torch.device | str = False,
        pad_output: bool = False,
        anchor: Anchor = "any",
        batched: bool = False,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            use_gpu=use_gpu,
            anchor=anchor,
            batched=batched,
        )
        self.drop_last = drop_last
        self._epoch = TrajectoryEpoch(shuffle)
        self.reset()

    draw_rows = SliceSampler.draw_rows

    def reset(self) -> None:
        """Forget the epoch and the trajectory table."""
        super().reset()
        self._epoch.forget()
        self._followed: weakref.ref[Storage] | None = None
        self._slices = 0
        self._ran_out = False

    @property
    def shuffle(self) -> bool:
        """Whether the order is random."""
        return self._epoch.shuffle

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices of the next trajectories of the epoch, or of the remaining ones."""
        count, slice_len = self._measure(batch_size)
        table, epoch = self._table(storage), self._epoch
        if self._followed is not None and self._followed() is not storage:
            epoch.forget()  # the trajectories of another storage
        epoch.catch_up(table, storage.log.now, slice_len if self.strict_length else 1, self.generator)
        self._followed = weakref.ref(storage)
        fewest = count if self.drop_last else 1
        if epoch.eligible < fewest:
            self._refuse(table, slice_len, count)
        if not epoch.started or len(epoch) < fewest:
            epoch.begin(self.generator)
        lane, first, length = epoch.take(count)
        self._slices = count
        self._ran_out = len(epoch) < fewest
        if self._ran_out:
            epoch.begin(self.generator)
        start, taken = self._placed(first, length, slice_len)
        return self._assemble(storage, table, lane, start, taken, slice_len)

    def _refuse(self, table: TrajectoryTable, slice_len: int, count: int) -> None:
        found = self._epoch.eligible
        if not found:
            self._refuse_short(table, slice_len)
        raise UsageError(
            f"a batch of {count} slices was asked for, there are {found} trajectories and incomplete batches are left "
            "out",
            hint="ask for fewer, or take drop_last=False",
        )

    @property
    def remaining_batches(self) -> int:
        """How many batches of as many slices as in the last one are left of the epoch."""
        if not self._slices:
            return sys.maxsize
        left = len(self._epoch)
        return left // self._slices if self.drop_last else -(-left // self._slices)

    def epoch_batches(self, storage: Storage, batch_size: int) -> int:
        """Return how many batches an epoch of the present trajectories has."""
        count, slice_len = self._measure(batch_size)
        if not len(storage):
            return 0
        _, _, length = self._table(storage).runs()
        eligible = int((length >= (slice_len if self.strict_length else 1)).sum())
        return eligible // count if self.drop_last else -(-eligible // count)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate a loaded epoch with the rows."""
        self._epoch.turn(row, storage.shape[0])

    # State -----------------------------------------------------------------------------------------

    def _saved(self) -> SavedEpoch | None:
        """Return the epoch for the present rows."""
        storage = None if self._followed is None else self._followed()
        if storage is None or not len(storage):
            return self._epoch.saved(None, None)
        return self._epoch.saved(self._table(storage), storage.log.now)

    def save_state(self) -> dict[str, Any]:
        """Return the rest of the epoch and the arguments, under TorchRL's names and two of our own.

        `_sample_list` holds the remaining trajectories, int64, or None before the first draw, `_waiting` those that
        are not part of the epoch yet; `len_storage` is the number of all trajectories.
        """
        saved = self._saved()
        waiting = None if saved is None or not len(saved.waiting) else torch.from_numpy(saved.waiting)
        return {
            "len_storage": 0 if saved is None else saved.count,
            "_sample_list": None if saved is None else torch.from_numpy(saved.left),
            "drop_last": self.drop_last,
            "_ran_out": self._ran_out,
            "shuffle": self.shuffle,
            "_slices": self._slices,
            "_waiting": waiting,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state, also one of TorchRL; SchemaError for that of another sampler.

        If the next draw finds other trajectories, a new epoch starts.
        """
        self.require_state(state)
        count, left = int(state["len_storage"]), state["_sample_list"]
        saved = None
        if left is not None:
            waiting = state.get("_waiting")
            late = np.empty(0, np.int64) if waiting is None else _checked(waiting, count)
            saved = SavedEpoch(_checked(left, count), late, count)
            if len(np.unique([*saved.left, *late])) < len(saved.left) + len(late):
                raise SchemaError("_sample_list and _waiting name a trajectory twice")
        self.reset()
        self._epoch.load(saved)
        self._epoch.shuffle = bool(state.get("shuffle", self.shuffle))
        self.drop_last, self._ran_out = bool(state["drop_last"]), bool(state["_ran_out"])
        self._slices = int(state.get("_slices", 0))

    def __getstate__(self) -> dict[str, Any]:
        epoch = TrajectoryEpoch(self.shuffle)
        epoch.load(self._saved())
        return super().__getstate__() | {"_epoch": epoch, "_followed": None}


def _checked(numbers: Any, count: int) -> Numbers:
    if not isinstance(numbers, torch.Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise SchemaError("the trajectories that are left are not an int64 vector in the state")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise SchemaError(f"a trajectory outside of the {count} that the state counts is left")
    return numbers.numpy(force=True).copy()


SliceSampler.without_replacement = SliceSamplerWithoutReplacement
