"""Datasets of Gen-DGRL as buffers."""

from __future__ import annotations

import os
from typing import Any

from ...core.experience_replay import SourceExperienceReplay


class GenDGRLExperienceReplay(SourceExperienceReplay):
    """A dataset of Gen-DGRL as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: one of `available_datasets`, like `bigfish-1M_E`: a game and a category.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `download`: whether to download a dataset that is not stored yet; `"force"` replaces a stored one.
    - `root`: the dataset is stored at `<root>/<dataset_id>`; the default is `gen_dgrl` below the storage root.
    - `kwargs`: other arguments of `ReplayBuffer`, such as `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`
      and `transform`; the default writer refuses to add anything.

    The files are pickles. A separate process without network reads arrays and plain containers from them, and nothing
    else.

    Elements have `observation` and `("next", "observation")` (uint8 `[3, 64, 64]`), `action`, `("next", "reward")`,
    `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` (bool `[1]`) and `episode`. There are as many
    as steps in the archive: none is cut or filled with zeros. The next observation of a last step is the stored one.

    Raises DatasetNotFoundError (a FileNotFoundError) for an id that Gen-DGRL does not have and for a dataset that is
    not stored and must not be downloaded, CorruptDataError for a damaged one, and the errors of `rbtool.download`.
    Names and arguments follow TorchRL; values are as in the source.
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
