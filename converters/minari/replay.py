"""Datasets of Minari as buffers."""

from __future__ import annotations

import os
from typing import Unpack

from ...core.errors import require_flags
from ...core.experience_replay import BufferArguments, SourceExperienceReplay


class MinariExperienceReplay(SourceExperienceReplay):
    """A dataset of Minari as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: an id of `available_datasets`, like `D4RL/door/human-v2`. One without its version means the
      latest; a name from before there were namespaces, like `door-human-v1`, means the dataset that has the same
      words in its name today, with a warning.
    - `batch_size`: how many elements `sample()` and iteration give.
    - `root`: the folder in which the dataset is at `<root>/<dataset_id>`; `minari` below the storage root by default.
    - `download`: whether it is downloaded if it is not there; `"force"` downloads it again and replaces it.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches are then
      `[batch, longest]`, with `"mask"` (bool) where a step is and `"traj_ids"`. A trajectory ends with its episode
      and with `done`.
    - `load_from_local_minari`: take it from Minari's own cache (`MINARI_DATASETS_PATH`, else `~/.minari/datasets`)
      without any use of the network. What was made from it before is made again where the cache has changed.

    Rows are read from the disk when first touched; what is edited, in a batch or in place, stays in this process.
    A pickle reopens the dataset. A dataset that is stored is opened without the network.

    DatasetNotFoundError (a FileNotFoundError) for one that is not there and may not or cannot be downloaded,
    CorruptDataError for one that is damaged, UsageError (a ValueError) for arguments that make no sense, and what
    `rbtool.download` raises. Names and form follow TorchRL; the values are the source's.
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
