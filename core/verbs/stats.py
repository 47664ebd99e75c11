"""`stats`: statistics of the fields of a dataset or a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..encodings.save import VerifyingReader
from ..errors import UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import StepReader
from ..format.documents import json_file
from ..format.locate import find_dataset, known_root, require_apart, sink_class
from ..format.memmap.reader import TedReader
from ..open_steps import open_steps
from ..options import PathLike
from ..progress import Progress, Silent
from ..results import Result, seconds_since
from ..saved_steps import has_steps
from ..stats import QUANTILE_ERROR, FieldStats, StatsStore, collect_stats, described_fields
from ..ted.schema import NEXT, Field, Key, key_called, key_name, unknown_field

FRACTIONS = (0.01, 0.02, 0.1, 0.5, 0.9, 0.98, 0.99)
"""The default quantiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsResult(Result):
    """The statistics of each leaf; `fractions` are the positions of its `quantiles`, from 0 to 1.

    Quantiles are lower quantiles: of n values, the one at rank `fraction * (n - 1)`, rounded down. Their relative error
    is at most `quantile_error`, and 0 at the fractions 0 and 1. `content_digest` is None without recorded digests, as
    in a checkpoint that TorchRL wrote. `remembered` is True if the result comes from the cache and no row was read.
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
    written: Path | None = None
    """The file with LeRobot's statistics. For a LeRobot folder, it is the only result, and `fields` is empty."""


@suggests_keywords()
def stats(
    dataset: PathLike,
    *,
    fields: Sequence[str] | None = None,
    quantiles: Sequence[float] = FRACTIONS,
    write_lerobot: PathLike | None = None,
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> StatsResult:
    """Compute count, mean, standard deviation, extremes and quantiles of every leaf of a dataset or a checkpoint.

    Every row is read once, in bounded memory. Text, ids and complex numbers are left out, and of a state only the root
    is described, not the field under `next`. The statistics of all fields at the default quantiles are cached below the
    storage root, and computed again when a file of the dataset has changed.

    Args:
        dataset: a path or `source:id`.
        fields: names of leaves or groups, as `inspect` shows them; `next.` may be left out if that is unambiguous.
            Default: all.
        quantiles: fractions from 0 to 1.
        write_lerobot: a new file for a `stats.json` of LeRobot 0.5 or later, exact over all rows. `dataset` may then be
            a LeRobot folder, which is not changed.
        root: where stored datasets are.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The statistics of each leaf.

    Raises:
        CorruptDataError: rows do not match the manifest.
        UsageError: a field is unknown or has no statistics, a quantile is outside of [0, 1], the dataset has no steps
            or is one of another library, or `write_lerobot` exists already or is inside the dataset.
    """
    started = time.perf_counter()
    fractions = tuple(quantiles)
    if not fractions or not all(0 <= fraction <= 1 for fraction in fractions):
        raise UsageError(f"quantiles {list(fractions)}: expected numbers from 0 to 1")
    path = find_dataset(dataset, root)
    is_ours = has_steps(path, raw=write_lerobot is not None)
    target, steps, episodes = None, 0, 0
    document: dict[str, Any] = {}
    if write_lerobot is not None:
        target = fs.expanded(write_lerobot)
        require_apart(path, target)
        if os.path.lexists(target):
            raise UsageError(f"{target} already exists", hint="choose another file")
        steps, episodes, document = sink_class("lerobot").statistics_of(path)
    if not is_ours:
        _write(target, document)
        known: dict[str, Any] = {
            "path": path,
            "steps": steps,
            "episodes": episodes,
            "fractions": fractions,
            "written": target,
        }
        known |= {"content_digest": None, "quantile_error": QUANTILE_ERROR, "fields": (), "remembered": False}
        return StatsResult(**known, seconds=seconds_since(started))
    with open_steps(path) as reader:
        manifest = reader.manifest
        if not manifest.steps:
            raise UsageError(f"{reader.path} has no steps to take statistics of")
        wanted = _wanted(reader, fields)
        found, remembered = _cached_or_computed(reader, wanted, fractions, known_root(root), progress or Silent())
        _write(target, document)
        return StatsResult(
            path=reader.path,
            content_digest=manifest.content_digest if manifest.files else None,
            steps=manifest.steps,
            episodes=len(reader.episodes),
            fractions=fractions,
            quantile_error=QUANTILE_ERROR,
            fields=found,
            remembered=remembered,
            seconds=seconds_since(started),
            written=target,
        )


def _write(target: Path | None, document: dict[str, Any]) -> None:
    if target is not None:
        fs.make_folder(target.parent)
        fs.replace_file(target, json_file(document))


def _wanted(reader: StepReader, names: Sequence[str] | None) -> set[Key]:
    """Return the leaves of the given names; the name of a group selects all its leaves."""
    known = [field.key for field in described_fields(reader.fields)]
    if names is None:
        return set(known)
    chosen: set[Key] = set()
    for name in names:
        of_it = _named(name, known) or _named(f"{NEXT}.{name}", known)
        if not of_it:
            raise _not_described(name, reader.fields, known)
        chosen |= of_it
    return chosen


def _named(name: str, keys: Sequence[Key]) -> set[Key]:
    """Return the leaf that a name means, or all leaves of a group; UsageError if it means two."""
    found = key_called(name, keys, groups=True)
    return set() if found is None else {key for key in keys if key[: len(found)] == found}


def _not_described(name: str, fields: Sequence[Field], known: Sequence[Key]) -> UsageError:
    """Return the error for a field that has no statistics of its own."""
    root, there = name.removeprefix(f"{NEXT}."), _named(name, [field.key for field in fields])
    if there and root != name and _named(root, known):
        hint = f"use {root}, which has the same rows except the last one of each episode"
        return UsageError(f"the field {name!r} is described by {root!r}", hint=hint)
    names = sorted(map(key_name, known))
    if there:
        return UsageError(f"the field {name!r} has no statistics", hint=f"there are {', '.join(names)}")
    return unknown_field(name, names)


def _cached_or_computed(
    reader: StepReader, wanted: set[Key], fractions: tuple[float, ...], root: Path | None, progress: Progress
) -> tuple[tuple[FieldStats, ...], bool]:
    store = StatsStore(root) if root is not None and reader.manifest.files else None
    files = reader.files_state()
    known = store.load(reader.manifest, files, fractions) if store else None
    if known is not None and wanted <= {field.key for field in known}:
        return tuple(field for field in known if field.key in wanted), True
    every = described_fields(reader.fields)
    chosen = [field for field in every if field.key in wanted]
    found = _collected(reader, chosen, fractions, progress)
    if store and len(chosen) == len(every) and fractions == FRACTIONS:
        store.save(reader.manifest, files, fractions, found)
    return found, False


def _collected(
    reader: StepReader, fields: Sequence[Field], fractions: Sequence[float], progress: Progress
) -> tuple[FieldStats, ...]:
    """Compute statistics, and verify the files that were read; for layout `ted`, in the same pass."""
    if isinstance(reader, TedReader):
        read = VerifyingReader(reader)
        found = collect_stats(read, fields, fractions, progress)
        read.verify_read()
        return found
    found = collect_stats(reader, fields, fractions, progress)
    reader.verify_leaves({field.key for field in fields})
    return found
