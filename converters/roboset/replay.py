"""Datasets of RoboSet as buffers."""

from __future__ import annotations

import os
from typing import Unpack

from ...core.experience_replay import BufferArguments, SourceExperienceReplay, refuse_env_kwargs


class RobosetExperienceReplay(SourceExperienceReplay):
    """A dataset of RoboSet as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: an id of `available_datasets`, like `DAPG(expert)/door_v2d-v1`, which names exactly one folder, and
      no other folder whose name begins with it.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `root`: the dataset is stored at `<root>/<dataset_id>`; the default is `roboset` below the storage root.
    - `download`: whether to download a dataset that is not stored yet; `"force"` replaces a stored one.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches then have the shape
      `[batch, longest]`, with `"mask"` (bool), which is true at steps, and `"traj_ids"`.
    - Arguments for an environment are refused, since none is made.

    `("next", "observation")` and `("next", "info")` never belong to another episode, and are never zero unless the data
    are. The root has no flags, and an episode that `done` does not end is truncated. Episodes in the files of several
    seeds have different numbers in `"episode"`. Rows are read from the disk when first accessed; edits, of a batch or
    in place, stay in this process. A stored dataset is opened without the network.

    Raises DatasetNotFoundError (a FileNotFoundError) for an id that RoboSet does not have and for a dataset that is not
    stored and must not be downloaded, CorruptDataError for a damaged one, UsageError (a ValueError) for invalid
    arguments, and the errors of `rbtool.download`. Names and arguments follow TorchRL; values are as in the source.
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
