"""Runs of the DQN Replay dataset as buffers."""

from __future__ import annotations

from typing import Any

from ...core.errors import UsageError, require_flags
from ...core.experience_replay import SourceExperienceReplay, SourceFolder, episode_of_steps
from ...core.format.converter import safe_id
from ...core.format.locate import reader_class, source_class
from ...core.options import PathLike
from ...core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from ...core.transforms.base import Compose
from ...core.transforms.windows import StoredFrameStack


class AtariDQNExperienceReplay(SourceExperienceReplay):
    """A run of the DQN Replay dataset as a buffer of TED steps; each frame is stored once, in layout `packed`.

    - `dataset_id`: one of `available_datasets`, like `Pong/1`.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `root`: the dataset is stored at `<root>/<dataset_id>`; the default is `atari` below the storage root.
    - `download`: whether to convert a run that is not stored yet from the folder `ATARI_DATASET_DIR`, or else to
      download it; `"force"` replaces a stored one. The published bucket is closed: the error names replacements.
    - `sampler`, `writer`, `transform`: as in `ReplayBuffer`; the default writer refuses to add anything.
    - `num_slices`, `slice_len`: set one of them to sample slices, each of consecutive steps of one episode.
      `strict_len` leaves out episodes that are shorter than a slice; otherwise these are sampled whole. With
      `replacement=False` each slice is drawn once per epoch.
    - `frame_stack`: the number of frames in an observation: the frame of the step and those before it in its episode,
      padded with zeros at the beginning, as agents for this data are trained. See `StoredFrameStack`; None leaves
      frames single.
    - `num_procs`, `mp_start_method`: accepted for compatibility, without effect.
    - `kwargs`: other arguments of `ReplayBuffer`, such as `collate_fn`, `pin_memory` and `prefetch`.

    Elements have `observation` and `("next", "observation")` (uint8 `[84, 84]`, or `[frame_stack, 84, 84]`), `action`
    (int32), `("next", "reward")` (float32 `[1]`), `("next", "terminated")`, `("next", "truncated")`, `("next", "done")`
    (bool `[1]`) and `episode`. `("next", "observation")` never belongs to another episode. Every batch is a copy.

    Raises DatasetNotFoundError (a FileNotFoundError) for a run that is not found, UsageError (a ValueError) for invalid
    arguments, and the errors of `rbtool.download`. Names and arguments follow TorchRL.
    """

    source = "atari"
    local_option = "ATARI_DATASET_DIR names a folder with files like Pong/1/replay_logs/$store$_observation_ckpt.0.gz"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        root: PathLike | None = None,
        download: bool | str = True,
        sampler: Any = None,
        writer: Any = None,
        transform: Any = None,
        num_procs: int = 0,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_len: bool = True,
        replacement: bool = True,
        mp_start_method: str = "fork",
        frame_stack: int | None = None,
        **kwargs: Any,
    ) -> None:
        require_flags(strict_len=strict_len, replacement=replacement)
        if num_slices is not None or slice_len is not None:
            if sampler is not None:
                raise UsageError(
                    "sampler is set, expected None with num_slices or slice_len, which make one", hint="leave one out"
                )
            kind = SliceSampler if replacement else SliceSamplerWithoutReplacement
            sampler = kind(num_slices=num_slices, slice_len=slice_len, strict_length=strict_len)
        if frame_stack is not None:
            stack = StoredFrameStack(frame_stack, "observation")
            transform = stack if transform is None else Compose(stack, transform)
        super().__init__(
            dataset_id,
            root=root,
            download=download,
            local=bool(download) and _is_only_in_cache(dataset_id, root, again=download == "force"),
            batch_size=batch_size,
            sampler=sampler,
            writer=writer,
            transform=transform,
            **kwargs,
        )

    @property
    def episodes(self) -> Any:
        """The episode number of each step, int64 `[steps]`; a terminal step belongs to the episode that it ends."""
        return episode_of_steps(self.data_path)


def _is_only_in_cache(dataset_id: str, root: PathLike | None, *, again: bool) -> bool:
    """Whether the files of a run are in the local folder, but not converted yet."""
    if not again and SourceFolder.below("atari", root).find(dataset_id) is not None:
        return False
    cache = source_class("atari").local_cache
    return cache is not None and reader_class("atari").recognises(cache.folder / safe_id(dataset_id))
