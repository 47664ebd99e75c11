"""Datasets of Gen-DGRL as buffers."""

from __future__ import annotations

import os
from typing import Any

from ...core.experience_replay import SourceExperienceReplay


class GenDGRLExperienceReplay(SourceExperienceReplay):
    """A dataset of Gen-DGRL as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: one of `available_datasets`, like `bigfish-1M_E`: a game and a category.
    - `batch_size`: how many elements `sample()` and iteration give.
    - `download`: whether it is downloaded if it is not there; `"force"` downloads it again and replaces it.
    - `root`: the folder in which the dataset is at `<root>/<dataset_id>`; `gen_dgrl` below the storage root by default.
    - `kwargs`: `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform` and the like of `ReplayBuffer`;
      the default writer refuses to add anything.

    The files are pickles. Arrays and plain containers are read from them, and nothing else, in a process of its own
    without network.

    Elements have `observation` and `("next", "observation")` (uint8 `[3, 64, 64]`), `action`, `("next", "reward")`,
    `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` (bool `[1]`) and `episode`. There are as many
    as the archive has: none is cut, and none is made of zeros. The next observation of a last step is the one stored.

    DatasetNotFoundError (a FileNotFoundError) for an id that Gen-DGRL does not have and for a dataset that is not there
    and may not be downloaded, CorruptDataError for one that is damaged, and what `rbtool.download` raises. Names and
    form follow TorchRL; the values are the source's.
    """

    source = "gen_dgrl"
    trusted = True

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        download: bool | str = True,
        root: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset_id, root=root, download=download, batch_size=batch_size, **kwargs)
