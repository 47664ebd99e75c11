"""Datasets of D4RL as buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ...core.errors import UsageError, require_flags
from ...core.experience_replay import SourceExperienceReplay, refuse_env_kwargs


class D4RLExperienceReplay(SourceExperienceReplay):
    """A dataset of D4RL as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: one of the 179 ids of `available_datasets`, like `hopper-medium-v2`. An id without a version means
      the latest version.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches then have the shape
      `[batch, longest]`, with `"mask"` (bool), which is true at steps, and `"traj_ids"`.
    - `download`: whether to download a dataset that is not stored yet; `"force"` replaces a stored one.
    - `root`: the dataset is stored at `<root>/<dataset_id>`; the default is `d4rl` below the storage root.
    - `from_env`, `direct_download`: accepted for compatibility, without effect. The published file is read in every
      case, and neither gym nor d4rl is needed.
    - `use_truncated_as_done`: only True is supported. `("next", "done")` is always terminated or truncated; `("next",
      "terminated")` is the flag without time limits.
    - `terminate_on_end`: only None and False are supported. A last step that is not terminated and has no observation
      after it is left out; `rbtool.download("d4rl", ID, final_step="repeat")` keeps it in a separate dataset.
    - `env_kwargs`: refused, since no environment is made.

    `("next", "observation")` never belongs to another episode, and is never zero unless the data are. The root has
    neither a reward nor flags. Rows are read from the disk when first accessed; edits, of a batch or in place, stay in
    this process. A stored dataset is opened without the network.

    Raises DatasetNotFoundError (a FileNotFoundError) for an id that D4RL does not have and for a dataset that is not
    stored and must not be downloaded, CorruptDataError for a damaged one, UsageError (a ValueError) for invalid
    arguments, and the errors of `rbtool.download`. Names and arguments follow TorchRL; values are as in the source.
    """

    source = "d4rl"
    local_option = 'rbtool.download("d4rl", ID, local=True) takes it from the cache of the d4rl package'

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        download: bool | str = True,
        root: str | os.PathLike[str] | None = None,
        **env_kwargs: Any,
    ) -> None:
        refuse_env_kwargs(type(self), env_kwargs, "file is")
        require_flags(from_env=from_env, direct_download=direct_download or False)
        require_flags(use_truncated_as_done=use_truncated_as_done, terminate_on_end=terminate_on_end or False)
        if not use_truncated_as_done:
            raise UsageError(
                "use_truncated_as_done=False is not supported: done is always terminated or truncated",
                hint='use ("next", "terminated") for the flag without time limits',
            )
        if terminate_on_end:
            raise UsageError(
                "terminate_on_end=True is not supported: it pairs last steps with the start of another episode",
                hint=f"rbtool.download('d4rl', {dataset_id!r}, final_step='repeat') keeps them in another way",
            )
        super().__init__(
            dataset_id,
            root=root,
            download=download,
            split_trajs=split_trajs,
            batch_size=batch_size,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )
