"""The buffer that everything else here is for."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from .persistence import Persistent

__all__ = ["ReplayBuffer"]


class ReplayBuffer(Persistent):
    """Keeps elements in a storage, writes them where a writer says, and gives batches of those a sampler chooses.

    Arguments, all by name:

    - `storage`: a `Storage`, or a callable that makes one; `ListStorage(1_000)` if there is none.
    - `sampler`, `writer`: likewise; `RandomSampler()` and `RoundRobinWriter()`.
    - `collate_fn`: makes a batch of what the storage gives; by default a stack of the elements of a list storage.
    - `pin_memory`: whether batches go to page-locked memory, for quick copies to an accelerator.
    - `prefetch`: how many batches are made ahead, in as many threads; needs `batch_size`. Indices are always drawn
      in the caller's thread, in the order of its calls: threads change no batch.
    - `transform`: a `Transform`, one of TorchRL's, a module or any callable, for batches on their way out (and for
      data on its way in, if it has `inv`). `transform_factory` makes one, when a part is first needed.
    - `batch_size`: how many elements `sample()` and iteration give.
    - `dim_extend`: the dimension of the user's data along which a storage of several dimensions grows; its last by
      default. The storage keeps it as dimension 0.
    - `checkpointer`: saves and loads the storage.
    - `generator`: what storage, sampler, writer and those transforms that ask for it draw from.
    - `shared`: whether several processes write. Any number may read, and forked or spawned children go on in the
      same ring, but only then may they write at the same time.
    - `compilable`: whether the default writer counts with plain ints, which other processes do not see.
    - `delayed_init`: whether the parts are made when one is first needed; so by default with `transform_factory`.

    Readers, threads as well as processes, get no half-written rows from `sample` and from indexing with numbers;
    ints and slices give views, which later writes show in.

    `DataLoader(buffer, batch_size=None)` yields the batches of the buffer, chosen by its sampler. Every worker has a
    random stream of its own: without a generator that of `torch.initial_seed()` there, with one a branch of it that
    depends on the number of the worker. Copies in other processes that were not started by a `DataLoader` draw the
    same as this one only where they were given a generator. UsageError (a ValueError) for arguments that contradict
    each other, WrongKindError (a TypeError) for a part that is none. Ideas and names are those of TorchRL.

    >>> import torch
    >>> from rbtool.core.storages import LazyTensorStorage
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> buffer.extend(torch.arange(10))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> buffer.sample().shape, len(buffer)
    (torch.Size([4]), 10)
    """


IterableDataset.register(ReplayBuffer)  # else a DataLoader asks for single rows, and passes over the sampler
