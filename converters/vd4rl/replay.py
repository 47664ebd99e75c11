"""Datasets of V-D4RL as buffers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Unpack

from ...core.errors import UsageError, require_flags
from ...core.experience_replay import BufferArguments, SourceExperienceReplay, refuse_env_kwargs
from ...core.transforms.base import Compose
from ...core.transforms.keyed import Resize, ToTensorImage


class VD4RLExperienceReplay(SourceExperienceReplay):
    """A dataset of V-D4RL as a buffer of TED steps with pixels; one that is not stored yet is downloaded first.

    - `dataset_id`: one of `available_datasets`, like `main/walker_walk/random/64px`: the whole path of one folder.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `root`: the dataset is stored at `<root>/<dataset_id>`; the default is `vd4rl` below the storage root.
    - `download`: whether to download a dataset that is not stored yet; `"force"` replaces a stored one.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches then have the shape
      `[batch, longest]`, with `"mask"` (bool), which is true at steps, and `"traj_ids"`.
    - `totensor`: whether `ToTensorImage` is applied after `transform`, so that `pixels` are float32 `[..., 3, H, W]`
      from 0 to 1 for either stored layout. Otherwise `pixels` are uint8 as stored: `[..., 64, 64, 3]` or
      `[..., 3, 84, 84]`.
    - `image_size`: the side of the images in batches, or height and width; `Resize` is applied last. It needs
      `totensor`.
    - `num_workers`: accepted for compatibility, without effect: files are fetched by threads.
    - Arguments for an environment are refused, since none is made.

    Elements have `pixels` and `("next", "pixels")`, which never belongs to another episode, `action`, `is_init` (set
    in the first step of an episode), `("next", "reward")` and `("next", "discount")`, and `("state", NAME)` for stored
    states of the environment. `("next", "done")` is terminated or truncated; an episode without a termination is
    truncated. Edits, of a batch or in place, stay in this process. A stored dataset is opened without the network.

    Raises DatasetNotFoundError (a FileNotFoundError) for an id that V-D4RL does not have and for a dataset that is not
    stored and must not be downloaded, CorruptDataError for a damaged one, UsageError (a ValueError) for invalid
    arguments, and the errors of `rbtool.download`. Names and arguments follow TorchRL; values are as in the source.
    """

    source = "vd4rl"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool | str = True,
        split_trajs: bool = False,
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        num_workers: int = 0,
        **buffer: Unpack[BufferArguments],
    ) -> None:
        refuse_env_kwargs(type(self), buffer, "files are")
        require_flags(totensor=totensor)
        if image_size is not None and not totensor:
            raise UsageError(
                f"image_size={image_size!r} needs totensor=True, which brings images to [channels, height, width]",
                hint="or pass Resize among the transforms yourself",
            )
        transform = buffer.pop("transform", None)
        parts = [] if transform is None else [transform]
        parts += [ToTensorImage(shape_tolerant=True)] if totensor else []
        parts += [Resize(image_size)] if image_size is not None else []
        super().__init__(
            dataset_id,
            root=root,
            download=download,
            split_trajs=split_trajs,
            batch_size=batch_size,
            transform=Compose(*parts) if len(parts) > 1 else parts[0] if parts else None,
            **buffer,
        )
