"""`stats`: what the values of a dataset are like."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..checkpoint import VerifyingReader, open_steps
from ..errors import UsageError
from ..format import StepReader, TedReader, find_dataset, known_root
from ..progress import Progress, Silent
from ..stats import QUANTILE_ERROR, FieldStats, StatsStore, collect_stats, described_fields
from ..ted import Field, key_name, unknown_field
from .results import Result, seconds_since
from .saved_steps import has_steps

__all__ = ["FRACTIONS", "StatsResult", "stats"]

FRACTIONS = (0.01, 0.02, 0.1, 0.5, 0.9, 0.98, 0.99)
"""The quantiles that are taken unless others are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsResult(Result):
    """The statistics of each leaf; `fractions` say which quantiles its `quantiles` are.

    A quantile is off by no more than `quantile_error` of its value. `content_digest` is None where no digests are
    recorded, as in a checkpoint that TorchRL wrote. `remembered` says that no row was read, because
    the statistics of the same contents were taken before.
    """

    kind: ClassVar[str] = "stats"
    path: Path
    content_digest: str | None
    steps: int
    episodes: int
    fractions: tuple[float, ...]
    quantile_error: float
    fields: tuple[FieldStats, ...]
    remembered: bool
    seconds: float


def stats(
    dataset: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    quantiles: Sequence[float] = FRACTIONS,
    root: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> StatsResult:
    """Take count, mean, deviation, extremes and quantiles of every leaf of a dataset or a checkpoint.

    `dataset` is a path or `source:id`. Every row is read once, in bounded memory; text, ids and complex numbers are
    left out, and states count at the root only. `fields` names leaves, or groups of them, as `inspect` does, or
    without their `next.` where that is clear. The statistics of whole datasets at the usual quantiles are remembered in
    the storage root by content digest.

    CorruptDataError for rows that do not match the manifest. UsageError for a field that is not there or of
    which there are no statistics, a quantile outside of [0, 1], a dataset without steps, and a raw dataset.
    """
    begun = time.perf_counter()
    fractions = tuple(quantiles)
    if not fractions or not all(0 <= fraction <= 1 for fraction in fractions):
        raise UsageError(f"the quantiles {list(fractions)} were asked for, numbers from 0 to 1 are expected")
    path = find_dataset(dataset, root)
    has_steps(path)
    with open_steps(path) as reader:
        manifest = reader.manifest
        if not manifest.steps:
            raise UsageError(f"{reader.path} has no steps: there is nothing to take statistics of")
        wanted = _wanted(reader, fields)
        found, remembered = _taken(reader, wanted, fractions, known_root(root), progress or Silent())
        return StatsResult(
            path=reader.path,
            content_digest=manifest.content_digest if reader.has_digests else None,
            steps=manifest.steps,
            episodes=len(reader.episodes),
            fractions=fractions,
            quantile_error=QUANTILE_ERROR,
            fields=found,
            remembered=remembered,
            seconds=seconds_since(begun),
        )


def _wanted(reader: StepReader, names: Sequence[str] | None) -> set[str]:
    """Choose leaves by name; the name of a group chooses all of it."""
    known = {field.name for field in described_fields(reader.fields)}
    if names is None:
        return known
    chosen: set[str] = set()
    for name in names:
        of_it = _named(name, known) or _named(f"next.{name}", known)
        if not of_it:
            raise _not_described(name, reader.fields, known)
        chosen |= of_it
    return chosen


def _named(name: str, known: set[str]) -> set[str]:
    return {leaf for leaf in known if leaf == name or leaf.startswith(f"{name}.")}


def _not_described(name: str, fields: Sequence[Field], known: set[str]) -> UsageError:
    """Say of a field why it is not among the `known` ones."""
    root = name.removeprefix("next.")
    if root != name and _named(root, known) and _named(name, {field.name for field in fields}):
        hint = f"ask for {root}, which holds the same rows but for the last one of each episode"
        return UsageError(f"the field {name!r} is described by {root!r}", hint=hint)
    if _named(name, {field.name for field in fields}):
        said = f"the field {name!r} is none that numbers can be said of"
        return UsageError(said, hint=f"there are {', '.join(sorted(known))}")
    return unknown_field(name, known)


def _taken(
    reader: StepReader, wanted: set[str], fractions: tuple[float, ...], root: Path | None, progress: Progress
) -> tuple[tuple[FieldStats, ...], bool]:
    store = StatsStore(root) if root is not None and reader.has_digests else None
    known = store.load(reader.manifest, fractions) if store else None
    if known is not None and wanted <= {key_name(field.key) for field in known}:
        return tuple(field for field in known if key_name(field.key) in wanted), True
    every = described_fields(reader.fields)
    chosen = [field for field in every if key_name(field.key) in wanted]
    worth_remembering = len(chosen) == len(every) and fractions == FRACTIONS and store is not None
    found = _collected(reader, chosen, fractions, progress, verified=worth_remembering)
    if worth_remembering and store:
        store.save(reader.manifest, fractions, found)
    return found, False


def _collected(
    reader: StepReader, fields: Sequence[Field], fractions: Sequence[float], progress: Progress, *, verified: bool
) -> tuple[FieldStats, ...]:
    """Take the statistics of contents that are verified: where that costs nothing, and where it is asked for."""
    if isinstance(reader, TedReader):
        read = VerifyingReader(reader)
        found = collect_stats(read, fields, fractions, progress)
        read.verify_read()
        return found
    found = collect_stats(reader, fields, fractions, progress)
    if verified:
        reader.verify_files()
    return found
