"""Datasets of Minari as buffers."""

from __future__ import annotations

import os
from typing import Unpack

from ...core.errors import require_flags
from ...core.experience_replay import BufferArguments, SourceExperienceReplay


class MinariExperienceReplay(SourceExperienceReplay):
    """A dataset of Minari as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: an id of `available_datasets`, like `D4RL/door/human-v2`. An id without a version means the latest
      version. An old id without a namespace, like `door-human-v1`, is resolved, with a warning, to the dataset whose
      name has the same words today.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `root`: the dataset is stored at `<root>/<dataset_id>`; the default is `minari` below the storage root.
    - `download`: whether to download a dataset that is not stored yet; `"force"` replaces a stored one.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches then have the shape
      `[batch, longest]`, with `"mask"` (bool), which is true at steps, and `"traj_ids"`. A trajectory ends with its
      episode and with `done`.
    - `load_from_local_minari`: whether to convert the dataset from Minari's own cache (`MINARI_DATASETS_PATH`, else
      `~/.minari/datasets`), without the network. It is converted again if the cache has changed since.

    Rows are read from the disk when first accessed; edits, of a batch or in place, stay in this process. Unpickling
    reopens the dataset. A stored dataset is opened without the network.

    Raises DatasetNotFoundError (a FileNotFoundError) for a dataset that is not stored and must not or cannot be
    downloaded, CorruptDataError for a damaged one, UsageError (a ValueError) for invalid arguments, and the errors of
    `rbtool.download`. Names and arguments follow TorchRL; values are as in the source.
    """

    source = "minari"
    local_option = "load_from_local_minari=True takes it from Minari's own cache"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool | str = True,
        split_trajs: bool = False,
        load_from_local_minari: bool = False,
        **buffer: Unpack[BufferArguments],
    ) -> None:
        require_flags(load_from_local_minari=load_from_local_minari)
        super().__init__(
            dataset_id,
            root=root,
            download=download,
            split_trajs=split_trajs,
            local=load_from_local_minari,
            batch_size=batch_size,
            **buffer,
        )
