"""Batches of tokenized datasets for training loops."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from ..buffers.replay_buffer import ReplayBuffer
from ..errors import UsageError, keywords_of, refuse_misspelt
from ..samplers.uniform import SamplerWithoutReplacement
from ..storages.tensor import TensorStorage
from ..writers.base import ImmutableDatasetWriter

T = TypeVar("T")


def create_infinite_iterator(iterator: Iterable[T]) -> Iterator[T]:
    """Repeat an iterable forever; a replay buffer draws a new order each time.

    UsageError (a ValueError) if the iterable is empty or can be iterated over only once: the loop would never yield.
    """
    while True:
        element, empty = None, True
        for element in iterator:
            empty = False
            yield element
        if empty:
            raise UsageError(f"the {type(iterator).__name__} has no elements, or can be iterated over only once")


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: Any,
    device: torch.device | str,
    dataset_name: str | None = None,
    infinite: bool = True,
    prefetch: int = 0,
    split: str = "train",
    root_dir: str | os.PathLike[str] | None = None,
    from_disk: bool = False,
    num_workers: int | None = None,
    **options: Any,
) -> Any:
    """Return batches of a tokenized dataset in random order, on `device`.

    For the other arguments and `options`, such as `tokenizer`, see `TokenizedDatasetLoader`. UsageError (a ValueError)
    if `batch_size` is larger than the dataset.

    Args:
        batch_size: rows per batch. Each row comes once per epoch; rows that do not fill a last batch are skipped.
        block_size: tokens per row.
        tensorclass_type: the class of the batches: `PromptData`, `PairwiseDataset`, or another with `from_dataset`.
        infinite: return an endless iterator over epochs; if False, a replay buffer whose iterators run one epoch each.
        prefetch: how many batches to prepare in advance.
    """
    if not hasattr(tensorclass_type, "from_dataset"):
        raise UsageError(f"tensorclass_type is {tensorclass_type!r}, expected a class with from_dataset")
    refuse_misspelt(get_dataloader, options, keywords_of(tensorclass_type.from_dataset))
    data = tensorclass_type.from_dataset(
        split=split, dataset_name=dataset_name, max_length=block_size, root_dir=root_dir, from_disk=from_disk,
        num_workers=num_workers, **options,
    )  # fmt: skip
    if batch_size > len(data):
        raise UsageError(f"batch_size is {batch_size:,}, and the dataset has {len(data):,} rows")

    buffer = ReplayBuffer(
        storage=TensorStorage(data),
        sampler=SamplerWithoutReplacement(drop_last=True),
        writer=ImmutableDatasetWriter(),
        collate_fn=lambda batch: batch.to(device),
        batch_size=batch_size,
        prefetch=prefetch or None,
    )
    return create_infinite_iterator(buffer) if infinite else buffer
