"""Datasets of RoboSet as buffers."""

from __future__ import annotations

import os
from typing import Unpack

from ...core.experience_replay import BufferArguments, SourceExperienceReplay, refuse_env_kwargs


class RobosetExperienceReplay(SourceExperienceReplay):
    """A dataset of RoboSet as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: an id of `available_datasets`, like `DAPG(expert)/door_v2d-v1`: exactly one folder, never those
      whose names begin alike.
    - `batch_size`: how many elements `sample()` and iteration give.
    - `root`: the folder in which the dataset is at `<root>/<dataset_id>`; `roboset` below the storage root by default.
    - `download`: whether it is downloaded if it is not there; `"force"` downloads it again and replaces it.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches are then
      `[batch, longest]`, with `"mask"` (bool) where a step is and `"traj_ids"`.
    - Arguments for an environment are refused, since none is made.

    What is in `("next", "observation")` and `("next", "info")` never belongs to another episode, and is nowhere zero
    unless the data are. The root has no flags, and an episode that `done` does not end is truncated. Episodes of
    the files of several seeds have numbers of their own in `"episode"`. Rows are read from the disk when first touched;
    what is edited, in a batch or in place, stays in this process. A dataset that is stored is opened without the
    network.

    DatasetNotFoundError (a FileNotFoundError) for an id that RoboSet does not have and for a dataset that is not there
    and may not be downloaded, CorruptDataError for one that is damaged, UsageError (a ValueError) for arguments that
    make no sense, and what `rbtool.download` raises. Names and form follow TorchRL; the values are the
    source's.
    """

    source = "roboset"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool | str = True,
        split_trajs: bool = False,
        **buffer: Unpack[BufferArguments],
    ) -> None:
        refuse_env_kwargs(type(self), buffer, "files are")
        super().__init__(
            dataset_id,
            root=root,
            download=download,
            split_trajs=split_trajs,
            batch_size=batch_size,
            **buffer,
        )
