"""`sample`: a random batch of a dataset, as a buffer would give it."""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..checkpoint import is_steps, open_steps
from ..dataset import StepReader, TedReader, find_dataset, reader_class, reader_names
from ..errors import UsageError
from ..ted import Field, as_numbers, key_name
from .results import Result

if TYPE_CHECKING:
    import torch

    from ..storages import Storage

__all__ = ["SampleResult", "SampledField", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledField:
    """One leaf of the batch: its whole shape, its bytes, and what its values are like.

    `min`, `mean` and `max` leave NaN out; they are None for flags, text and complex numbers. `true_fraction` is
    how much of a flag is set, None for anything else.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    true_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult(Result):
    """`n` steps drawn with replacement: storage rows, the source's number of their episodes, steps within those."""

    kind: ClassVar[str] = "sample"
    path: Path
    n: int
    seed: int
    indices: tuple[int, ...]
    episodes: tuple[int, ...]
    steps: tuple[int, ...]
    fields: tuple[SampledField, ...]


def sample(
    dataset: str | os.PathLike[str],
    n: int = 256,
    *,
    seed: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> SampleResult:
    """Draw `n` steps of a dataset or a checkpoint (a path or `source:id`) uniformly, with replacement.

    The same seed draws the same steps; without one a fresh seed is drawn and reported. Only the rows drawn are read.
    Raises UsageError for `n` below 1, a seed that is no number from 0 to 2^64 - 1, a dataset without steps, and a
    raw dataset.
    """
    if n < 1:
        raise UsageError(f"a sample of {n} steps was asked for, at least 1 is needed")
    seed = secrets.randbits(63) if seed is None else seed
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"the seed {seed} was given, a number of 64 bits without sign is expected")
    path = find_dataset(dataset, root)
    _refuse_raw(path)
    with open_steps(path) as reader:
        if not reader.manifest.steps:
            raise UsageError(f"{reader.path} has no steps: there is nothing to sample")
        import torch  # not before: it takes seconds, and what is wrong with the request is told at once

        from ..samplers import RandomSampler

        storage, sampler = _storage(reader), RandomSampler()
        sampler._rng = torch.Generator().manual_seed(seed)
        index, _ = sampler.sample(storage, n)
        batch = storage.get(index)
        rows = np.asarray(index)
        which = reader.episodes.index_of_step(rows)
        return SampleResult(
            path=reader.path,
            n=n,
            seed=seed,
            indices=tuple(rows.tolist()),
            episodes=tuple(reader.episodes.episode[which].tolist()),
            steps=tuple((rows - reader.episodes.start[which]).tolist()),
            fields=tuple(_sampled(field, batch.get(field.key)) for field in reader.fields),
        )


def _refuse_raw(path: Path) -> None:
    """Say what to do with a dataset in the format of another library."""
    if is_steps(path):
        return
    form = next((name for name in reader_names() if reader_class(name).recognises(path)), None)
    if form is not None:
        raise UsageError(
            f"{path} is a raw {form} dataset, and steps are drawn from datasets in TED",
            hint=f"convert it first: rbtool convert {shlex.quote(str(path))} DEST",
        )


def _storage(reader: StepReader) -> Storage:
    """Map the leaves where they lie as tensors; else read the rows out of whatever holds them."""
    from ..storages import StepStorage, TensorStorage, dataset_tensors

    if isinstance(reader, TedReader):
        return TensorStorage(dataset_tensors(reader.path, copy_on_write=False))
    return StepStorage(reader)


def _sampled(field: Field, values: torch.Tensor) -> SampledField:
    import torch

    shape, size = tuple(values.shape), values.numel() * values.element_size()
    known: dict[str, Any] = {"key": key_name(field.key), "dtype": field.dtype, "shape": shape, "bytes": size}
    bits = values.view(torch.uint16) if field.dtype == "bfloat16" else values
    numbers = as_numbers(bits.numpy(), field.dtype)
    if not numbers.size or "complex" in field.dtype or field.role == "text":
        return SampledField(**known)
    if field.dtype == "bool":
        return SampledField(**known, true_fraction=float(numbers.mean()))
    numbers = numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers
    if not numbers.size:
        return SampledField(**known)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values have an infinite or undefined mean
        mean = float(numbers.mean(dtype=np.float64))
    return SampledField(**known, min=numbers.min().item(), mean=mean, max=numbers.max().item())
