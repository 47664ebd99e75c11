"""Tables of OpenML as buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ...core.datasets.storage import SelectedEntries
from ...core.experience_replay import SourceExperienceReplay
from ...core.samplers.uniform import SamplerWithoutReplacement
from ...core.ted.schema import Key
from .reader import LABEL, OBSERVATION, dataset_named


class _TableRows(SelectedEntries):
    """The vectors and labels of a dataset, without the entries about episodes."""

    entries: ClassVar[Mapping[Key, Key]] = {("X",): OBSERVATION, ("y",): LABEL}


class OpenMLExperienceReplay(SourceExperienceReplay):
    """A table of OpenML for contextual bandits, with entries `"X"` and `"y"`; one that is not stored is downloaded.

    - `name`: `adult_num`, `adult_onehot`, `mushroom_num`, `mushroom_onehot`, `covertype`, `shuttle` or `magic`.
    - `batch_size`: the number of elements that `sample()` and iteration return.
    - `root`: the dataset is stored at `<root>/<name>`; the default is `openml` below the storage root.
    - `sampler`: `SamplerWithoutReplacement()` by default.
    - `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: as in `ReplayBuffer`; the default writer refuses
      to add anything.

    `"X"` is float64 `[N, F]`. Columns of numbers are scaled to mean 0 and standard deviation 1; columns of categories
    become codes in the order of their text, or, with `_onehot`, one column for each category. `"y"` is int64 `[N]`, the
    code of the label. The adult tables leave out rows with a missing value and predict the occupation. Edits stay in
    this process.

    Raises UnknownTableError (a RuntimeError) for another name, and the errors of `rbtool.download`. Names and arguments
    follow TorchRL.
    """

    source = "openml"
    storage_class = _TableRows

    def __init__(
        self,
        name: str,
        batch_size: int | None,
        root: str | os.PathLike[str] | None = None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
    ) -> None:
        super().__init__(
            dataset_named(name).id,
            root=root,
            download=True,
            batch_size=batch_size,
            sampler=SamplerWithoutReplacement() if sampler is None else sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )
        self.max_outcome_val = int(self.storage[:]["y"].max())
