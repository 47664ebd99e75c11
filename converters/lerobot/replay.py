"""Datasets of LeRobot as buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from ...core.datasets.buffer import DatasetReplayBuffer
from ...core.datasets.lerobot_columns import (
    LANGUAGE,
    RestoredColumns,
    key_of_column,
    lerobot_columns_to_tensordict,
    stored_columns,
    with_next_observations,
)
from ...core.datasets.videos import with_frames
from ...core.errors import UsageError, warn_caller
from ...core.experience_replay import SourceExperienceReplay
from ...core.format.contracts import StepReader
from ...core.format.manifest import HIDDEN
from ...core.samplers.slices import SliceSampler
from ...core.storages.tensor import TensorStorage
from ...core.transforms.base import Compose
from ...core.transforms.keyed import RenameTransform
from .metadata import DatasetInfo, read_info, read_tasks


class LeRobotExperienceReplay(SourceExperienceReplay):
    """A dataset of LeRobot as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `repo_id`: the repository on the hub, `OWNER/NAME`.
    - `root`: the folder in which the dataset is at `<root>/<repo_id>`; `lerobot` below the storage root by default.
    - `download`: whether it is downloaded if it is not there; `"force"` downloads it again and replaces it.
    - `batch_size`: how many elements `sample()` and iteration give.
    - `num_slices` or `slice_len`: draws slices of episodes with a `SliceSampler`; `strict_length` is its argument.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: those of `ReplayBuffer`; the default
      writer refuses to add anything.
    - `key_map`: other keys for columns, by LeRobot's names, like `{"observation.state": "state"}`.
    - `decode_video`: whether batches have the frames of videos, uint8 `[*batch, 3, height, width]`. Without, they have
      references under `"video"`, and nothing is decoded.
    - `rehydrate`: accepted for compatibility, without effect: next observations are always there.

    Elements have `("observation", "state")`, `("observation", "image", NAME)`, `action`, `episode`, `frame`,
    `language_instruction` (text), and `("next", …)` with the observations after the step, which are never those of
    another episode. The last frame of an episode that no flag ends has none, so that it is no step of its own. The
    `index` of LeRobot is `("info", "index")`; `"index"` is that of the sampler. A stored dataset is opened without the
    network.

    `from_columns` makes a buffer of columns in memory.

    DatasetNotFoundError (a FileNotFoundError) for a repository that the hub does not have and for a dataset that is not
    there and may not be downloaded, CorruptDataError for one that is damaged, UsageError (a ValueError) for arguments
    that make no sense, and what `rbtool.download` raises. Names and form are those of TorchRL.
    """

    source = "lerobot"

    def __init__(
        self,
        repo_id: str,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool | str = True,
        batch_size: int | None = None,
        num_slices: int | None = None,
        slice_len: int | None = None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Any = None,
        key_map: Mapping[str, Any] | None = None,
        decode_video: bool = True,
        rehydrate: bool = False,
        strict_length: bool = True,
        pin_memory: bool = False,
        prefetch: int | None = None,
    ) -> None:
        self.repo_id = repo_id
        self.decode_video = decode_video
        self.rehydrate = rehydrate
        self._key_map = dict(key_map or {})
        sampler = _sampler(sampler, num_slices, slice_len, strict_length=strict_length)
        super().__init__(
            repo_id,
            root=root,
            download=download,
            split_trajs=False,
            local=False,
            batch_size=batch_size,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )

    def transform_for(self, reader: StepReader, transform: Any) -> Any:
        """Add texts, decode, and rename, before the transform of the user."""
        tasks = _tasks_of(reader.path)
        parts: list[Any] = [RestoredColumns({(("task_index",), LANGUAGE): tasks}, {})] if tasks else []
        if self._key_map:
            names = list(self._key_map)
            new = [key_of_column(name, self._key_map) for name in names]
            parts.append(RenameTransform([key_of_column(name) for name in names], new))
        parts += [] if transform is None else [transform]
        chain = Compose(*parts) if parts else None
        return with_frames(reader, chain, channels_first=True) if self.decode_video else chain

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        *,
        repo_id: str = "local",
        key_map: Mapping[str, Any] | None = None,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_length: bool = True,
        decode_video: bool = True,
        rehydrate: bool = False,
        sampler: Any = None,
        transform: Any = None,
        **arguments: Any,
    ) -> Self:
        """Make a buffer of columns in memory, as `lerobot_columns_to_tensordict` takes them; no folder is made.

        Texts are texts in batches, and frames of a `VideoClipRef` are decoded, or referred to without `decode_video`.
        With `rehydrate` rows have `("next", "observation", …)`: the following row where that continues the episode,
        else NaN, or 0 in types without. A column that is no sequence is left out, with a warning. The other arguments
        are those of the class.
        """
        usable = {name: column for name, column in columns.items() if _is_usable(name, column)}
        named = lerobot_columns_to_tensordict(usable, key_map=key_map)
        named = with_next_observations(named) if rehydrate else named
        rows, restored = stored_columns(named, decode=decode_video)
        buffer = cls.__new__(cls)
        buffer.repo_id = buffer.dataset_id = repo_id
        buffer.decode_video, buffer.rehydrate, buffer._key_map = decode_video, rehydrate, dict(key_map or {})
        chosen = _sampler(sampler, num_slices, slice_len, strict_length=strict_length)
        DatasetReplayBuffer.__init__(
            buffer,
            storage=TensorStorage(rows),
            sampler=chosen,
            transform=restored if transform is None else Compose(restored, transform),
            **arguments,
        )
        return buffer


def _sampler(sampler: Any, num_slices: int | None, slice_len: int | None, *, strict_length: bool) -> Any:
    if num_slices is not None and slice_len is not None:
        raise UsageError(f"num_slices is {num_slices} and slice_len is {slice_len}, expected one of them")
    if num_slices is None and slice_len is None:
        return sampler
    if sampler is not None:
        raise UsageError("sampler is set, expected None with num_slices or slice_len", hint="leave one out")
    return SliceSampler(num_slices=num_slices, slice_len=slice_len, traj_key="episode", strict_length=strict_length)


def _tasks_of(dataset: Path) -> dict[int, str]:
    """Return the texts of the tasks from the metadata that the dataset keeps."""
    root = dataset / HIDDEN / "source"
    if not (root / "meta").is_dir():
        return {}
    info: DatasetInfo = read_info(root)
    return read_tasks(info)


def _is_usable(name: str, column: Any) -> bool:
    usable = column is not None and hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping)
    if not usable:
        warn_caller(f"the column {name!r} is left out: it is a {type(column).__name__}")
    return usable
