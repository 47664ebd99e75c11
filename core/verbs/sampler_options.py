"""Options of the samplers of `sample`, validated before torch is imported, and the samplers made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..format.contracts import StepReader
from ..format.episodes import EpisodeTable
from ..ted.schema import Field, as_numbers, key_called, key_name, unknown_field

if TYPE_CHECKING:
    from ..samplers.base import Sampler

_DEFAULT_BATCH = 256
ALPHA, BETA = 0.6, 0.4
"""Exponents of the priorities and of the weights, as in Schaul et al. (2015), proportional variant."""

_WORDS = {"weight": ("episode", "step"), "anchor": ("any", "start", "end")}

_EPOCHS = frozenset({"drop_last", "shuffle"})
_SLICES = frozenset({"slice_len", "num_slices", "anchor", "strict", "pad", "batched"})
_PRIORITIES = frozenset({"alpha", "beta", "priority"})
SAMPLERS: Mapping[str, frozenset[str]] = {
    "random": frozenset(),
    "without-replacement": _EPOCHS,
    "slice": _SLICES | {"weight"},
    "slice-without-replacement": _SLICES | _EPOCHS,
    "prioritized": _PRIORITIES,
    "prioritized-slice": _SLICES | _PRIORITIES,
}
"""The options of each sampler, by the name of the sampler on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """The name of a sampler and its options; None, and False for a switch, mean not given.

    Raises UsageError for an unknown sampler, an option that the sampler does not take, and values out of range.
    """

    sampler: str = "random"
    slice_len: int | None = None
    num_slices: int | None = None
    weight: str | None = None
    anchor: str | None = None
    strict: bool | None = None
    pad: bool = False
    batched: bool = False
    drop_last: bool = False
    shuffle: bool | None = None
    alpha: float | None = None
    beta: float | None = None
    priority: str | None = None

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UsageError(f"the sampler is {self.sampler!r}, expected one of {', '.join(SAMPLERS)}")
        for name, value in self.given().items():
            if name not in SAMPLERS[self.sampler]:
                others = [sampler for sampler, known in SAMPLERS.items() if name in known]
                raise UsageError(
                    f"{_flag(name, value)} is no option of the sampler {self.sampler}",
                    hint=f"it is for {', '.join(others)}",
                )
        self._check_values()

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sampler"}
        return {name: value for name, value in values.items() if value is not None and not _left(name, value)}

    def _check_values(self) -> None:
        for name in ("slice_len", "num_slices"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{_flag(name)} is {number}, expected 1 or more")
        for name in ("alpha", "beta"):
            number = getattr(self, name)
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{_flag(name)} is {number}, expected a finite number from 0")
        for name, words in _WORDS.items():
            word = getattr(self, name)
            if word is not None and word not in words:
                raise UsageError(f"{_flag(name)} is {word!r}, expected one of {', '.join(words)}")
        if self.strict and self.pad:
            raise UsageError(
                "--strict and --pad are both set, expected one: --strict leaves short episodes out, --pad fills them up"
            )
        if self.in_slices and self.slice_len is None and self.num_slices is None:
            raise UsageError(
                f"the sampler {self.sampler} needs --slice-len or --num-slices",
                hint="add --slice-len L or --num-slices K",
            )

    @property
    def in_slices(self) -> bool:
        """Whether the sampler draws slices."""
        return "slice_len" in SAMPLERS[self.sampler]

    @property
    def strict_length(self) -> bool:
        """Whether episodes shorter than a slice are left out."""
        return not self.pad if self.strict is None else self.strict

    def batch_size(self, n: int | None) -> int:
        """Return the number of steps of a batch; UsageError if it does not match the slices."""
        length, count = self.slice_len, self.num_slices
        if n is None:
            n = length * count if length and count else _default_for(length or count or 1)
        if n < 1:
            raise UsageError(f"-n is {n}, expected at least 1")
        if length and count and length * count != n:
            raise UsageError(
                f"-n {n}: {count} slices of {length} steps are {length * count}",
                hint=f"-n {length * count}, or leave out -n or one of the others",
            )
        part, what = (length, "the length of a slice") if length else (count, "the number of slices")
        if part and n % part:
            raise UsageError(
                f"a batch is {n} steps, expected a multiple of {what}, {part}",
                hint=f"-n {max(1, round(n / part)) * part}",
            )
        return n

    def steps_of_a_slice(self, batch_size: int) -> int:
        """Return the number of steps of a slice."""
        return self.slice_len or batch_size // (self.num_slices or 1)

    def check_lengths(self, lengths: np.ndarray[Any, Any], batch_size: int) -> None:
        """Raise UsageError if every episode is shorter than a slice and short ones are left out."""
        wanted = self.steps_of_a_slice(batch_size)
        if not self.in_slices or not self.strict_length or wanted <= lengths.max():
            return
        raise UsageError(
            f"slices are {wanted} steps, expected at most {lengths.max():,}: the longest of {len(lengths):,} episodes",
            hint="--pad takes shorter ones and fills them up, --no-strict takes them whole",
        )


def _default_for(part: int) -> int:
    """Return the multiple of `part` that is nearest to the default batch."""
    return max(1, round(_DEFAULT_BATCH / part)) * part


def _left(name: str, value: Any) -> bool:
    """Return whether a switch has its default."""
    return name in {"pad", "batched", "drop_last"} and value is False


def _flag(name: str, value: Any = None) -> str:
    no = "no-" if value is False and name in {"shuffle", "strict"} else ""
    return f"--{no}{name.replace('_', '-')}"


_CHUNK = 1 << 20


def make_sampler(options: SamplerOptions, reader: StepReader) -> Sampler:
    """Make the sampler for the steps of `reader`."""
    # These imports load torch, which takes seconds: an invalid request fails before.
    if options.sampler == "random":
        from ..samplers.uniform import RandomSampler

        return RandomSampler()
    epochs: dict[str, Any] = {"drop_last": options.drop_last, "shuffle": options.shuffle is not False}
    if options.sampler == "without-replacement":
        from ..samplers.uniform import SamplerWithoutReplacement

        return SamplerWithoutReplacement(**epochs)
    priorities = (
        reader.manifest.steps,
        ALPHA if options.alpha is None else options.alpha,
        BETA if options.beta is None else options.beta,
    )
    if options.sampler == "prioritized":
        from ..samplers.prioritized import PrioritizedSampler

        return PrioritizedSampler(*priorities)
    slices = _slice_arguments(options) | _ends(reader.episodes)
    if options.sampler == "slice":
        from ..samplers.slices import SliceSampler

        return SliceSampler(**slices)
    if options.sampler == "slice-without-replacement":
        from ..samplers.slices import SliceSamplerWithoutReplacement

        slices.pop("cache_values")  # it always caches
        return SliceSamplerWithoutReplacement(**slices, **epochs)
    from ..samplers.prioritized_slices import PrioritizedSliceSampler

    return PrioritizedSliceSampler(*priorities, **slices)


def _slice_arguments(options: SamplerOptions) -> dict[str, Any]:
    size = {"num_slices": options.num_slices} if options.slice_len is None else {"slice_len": options.slice_len}
    given = options.given()
    passed: dict[str, Any] = {name: given[name] for name in ("weight", "anchor", "batched") if name in given}
    return {**size, **passed, "strict_length": options.strict_length, **({"pad_output": True} if options.pad else {})}


def _ends(table: EpisodeTable) -> dict[str, Any]:
    """Return the `ends` of trajectories from the episode table; they equal those that a sampler finds in the rows."""
    import torch

    ends = np.zeros(table.steps, bool)
    ends[(table.start + table.length)[table.length > 0] - 1] = True
    return {"ends": torch.from_numpy(ends), "cache_values": True}


def priority_field(reader: StepReader, name: str) -> Field:
    """Return the leaf of the initial priorities; UsageError if it does not exist or does not hold real numbers."""
    fields = {field.key: field for field in reader.fields}
    key = key_called(name, fields)
    if key is None:
        raise unknown_field(name, map(key_name, fields))
    field = fields[key]
    if field.role == "text" or field.dtype == "bool" or "complex" in field.dtype or 0 in field.shape:
        what = "text" if field.role == "text" else f"{field.dtype} {list(field.shape)}"
        raise UsageError(f"--priority is {name!r}, which is {what}, expected real numbers")
    return field


def initial_priorities(reader: StepReader, field: Field) -> np.ndarray[Any, Any]:
    """Return the largest absolute value of a leaf per step, float64 `[steps]`; UsageError if one is not finite."""
    steps = reader.manifest.steps
    found = np.empty(steps)
    rows = max(1, min(_CHUNK, (8 << 20) // max(1, field.row_bytes)))
    for start in range(0, steps, rows):
        stop = min(start + rows, steps)
        values = as_numbers(reader.read(field.key, start, stop), field.dtype).astype(np.float64)
        found[start:stop] = np.abs(values).reshape(stop - start, -1).max(1)
    odd = np.flatnonzero(~np.isfinite(found))
    if len(odd):
        raise UsageError(
            f"--priority is {field.name!r}, which is {found[odd[0]]} at step {odd[0]:,} and not finite at "
            f"{len(odd):,} of {steps:,} steps: priorities are finite numbers"
        )
    return found
