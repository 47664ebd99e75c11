"""`inspect`: what is in a dataset, a checkpoint, or a raw dataset of a known format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..checkpoint import open_steps
from ..dataset import (
    HIDDEN,
    Dropped,
    EpisodeTable,
    FieldRange,
    Manifest,
    PackedSchema,
    Provenance,
    Reader,
    StepReader,
    find_dataset,
    known_root,
    open_source,
    returns_are_known,
    size_problems,
    table_with_returns,
)
from ..errors import UsageError
from ..stats import mean_of
from ..ted import BoundaryCounts, Field, Key, row_bytes, ted_fields
from .episode_view import EpisodeView, source_view, steps_view
from .readable import has_steps
from .results import Result

__all__ = ["FieldView", "InspectResult", "Spread", "inspect"]

_BINS = 10
_NO_RETURNS = (
    "there is no return: next.reward holds sums over n steps, and next.original_reward, the reward of every step, "
    "is not there"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Smallest, mean and largest of a number per episode, and how many episodes fall into each of ten equal bins."""

    min: float
    mean: float
    max: float
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, numbers: np.ndarray[Any, Any]) -> Spread | None:
        """Summarise one number an episode; None without episodes. NaN and infinite ones count in no bin."""
        if not len(numbers):
            return None
        finite = numbers[np.isfinite(numbers)]
        counts = _counts(finite.astype(np.float64)) if len(finite) else np.zeros(_BINS, int)
        return cls(
            min=numbers.min().item(),
            mean=mean_of(numbers),
            max=numbers.max().item(),
            histogram=tuple(counts.tolist()),
        )


def _counts(finite: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Count in equal bins; scaled, for the width of a bin may be beyond float64."""
    scaled = np.ldexp(finite, -int(np.frexp(np.abs(finite).max())[1]))
    return np.histogram(scaled, bins=_BINS)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldView:
    """One leaf: `shape` of a row, `bytes` of all its rows, `min` and `max` where they are recorded."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    role: str
    bytes: int
    min: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult(Result):
    """What there is. `type` is dataset, checkpoint or source (a raw dataset, not converted).

    `layouts` says of a dataset how many bytes its rows take in each layout (without compression in the one it is not
    in), and `bytes_saved` how many it saves beside layout `ted`. `first_episode` is the source's number of the first,
    None without any. `problems` name the files that are missing or have another size than the manifest says.
    """

    kind: ClassVar[str] = "inspect"
    name: str
    path: Path
    type: str
    layout: str
    steps: int
    episodes: int
    bytes: int
    layouts: Mapping[str, int]
    bytes_saved: int
    ends: BoundaryCounts
    length: Spread | None
    returns: Spread | None
    fields: tuple[FieldView, ...]
    spaces: Mapping[str, Any]
    renamed_keys: Mapping[str, str]
    dropped_keys: tuple[Dropped, ...]
    notes: tuple[str, ...]
    content_digest: str | None
    resolved_revision: str | None
    created_by: str | None
    provenance: tuple[Provenance, ...]
    episode: EpisodeView | None
    first_episode: int | None
    problems: tuple[str, ...] = ()


def inspect(
    dataset: str | os.PathLike[str],
    *,
    episode: int | None = None,
    head: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> InspectResult:
    """Summarise a dataset, a checkpoint, or a raw dataset in a known format.

    `dataset` is a path or `source:id`. Of what rbtool wrote only the manifest and the episode table are read, so
    the time does not grow with the data; of n-step data also the reward of every step, for `returns`. With `episode`,
    the source's number of one, its first `head` steps (all by default) and its last are shown too.

    Raises DatasetNotFoundError, FormatError, or UsageError for an episode that is not there and for the
    checkpoint of a buffer that is not one of steps.
    """
    if head is not None and head < 1:
        raise UsageError(f"--head is {head}, it must be 1 or more")
    if head is not None and episode is None:
        raise UsageError("--head says how many steps of an episode to show", hint="name the episode: --episode K")
    path = find_dataset(dataset, root)
    if has_steps(path, raw=True):
        with open_steps(path, damaged=True) as steps:
            return _of_steps(steps, root, episode, head)
    with open_source(path) as reader:
        return _of_source(reader, path, episode, head)


def _of_steps(
    reader: StepReader, root: str | os.PathLike[str] | None, episode: int | None, head: int | None
) -> InspectResult:
    manifest, table = reader.manifest, table_with_returns(reader)
    known, layouts = returns_are_known(manifest), _layouts(reader)
    return InspectResult(
        name=_name(reader.path, manifest, known_root(root)),
        path=reader.path,
        type=manifest.kind,
        layout=manifest.layout,
        steps=manifest.steps,
        episodes=len(table),
        bytes=manifest.bytes or sum(field.row_bytes for field in reader.fields) * manifest.steps,
        layouts=layouts,
        bytes_saved=max(0, layouts["ted"] - layouts[manifest.layout]) if manifest.layout in layouts else 0,
        ends=table.counts(),
        length=Spread.of(table.length),
        returns=Spread.of(table.total_reward) if known else None,
        fields=_fields(reader.fields, manifest.steps, manifest.ranges),
        spaces=manifest.spaces,
        renamed_keys=manifest.renamed_keys,
        dropped_keys=manifest.dropped_keys,
        notes=manifest.notes if known else (*manifest.notes, _NO_RETURNS),
        content_digest=manifest.content_digest if manifest.files else None,
        resolved_revision=manifest.resolved_revision,
        created_by=manifest.created_by if manifest.files else None,
        provenance=manifest.provenance,
        episode=None if episode is None else steps_view(reader, episode, head),
        first_episode=_first(table),
        problems=tuple(size_problems(reader)),
    )


def _layouts(reader: StepReader) -> dict[str, int]:
    """Bytes of the rows in each layout that a dataset can have."""
    manifest = reader.manifest
    if manifest.kind != "dataset":
        return {}
    found = {
        "ted": row_bytes(reader.fields) * manifest.steps,
        "packed": PackedSchema.of(reader.fields).size(manifest.steps, len(reader.episodes)),
    }
    if manifest.files:
        found[manifest.layout] = sum(file.size for file in manifest.files if not file.path.startswith(f"{HIDDEN}/"))
    return found


def _of_source(reader: Reader, path: Path, episode: int | None, head: int | None) -> InspectResult:
    facts, table = reader.facts(), reader.episode_table()
    return InspectResult(
        name=str(path),
        path=path,
        type="source",
        layout=facts.source,
        steps=table.steps,
        episodes=len(table),
        bytes=reader.size(),
        layouts={},
        bytes_saved=0,
        ends=table.counts(),
        length=Spread.of(table.length),
        returns=Spread.of(table.total_reward),
        fields=_fields(ted_fields(facts.fields), table.steps, {}),
        spaces=facts.spaces,
        renamed_keys=facts.renamed_keys,
        dropped_keys=facts.dropped_keys,
        notes=facts.notes,
        content_digest=None,
        resolved_revision=None,
        created_by=None,
        provenance=(),
        episode=None if episode is None else source_view(reader, table, episode, head),
        first_episode=_first(table),
    )


def _first(table: EpisodeTable) -> int | None:
    return int(table.episode[0]) if len(table) else None


def _fields(leaves: tuple[Field, ...], steps: int, ranges: Mapping[Key, FieldRange]) -> tuple[FieldView, ...]:
    views = []
    for leaf in leaves:
        low, high = ranges.get(leaf.key) or (None, None)
        views.append(
            FieldView(
                key=leaf.key,
                dtype=leaf.dtype,
                shape=leaf.shape,
                role=leaf.role,
                bytes=leaf.row_bytes * steps,
                min=low,
                max=high,
            )
        )
    return tuple(views)


def _name(path: Path, manifest: Manifest, root: Path | None) -> str:
    """Call a dataset below the root `source:id`, anything else by its path."""
    folder = Path(os.path.abspath(path))
    parts = folder.relative_to(root).parts if root is not None and folder.is_relative_to(root) else ()
    if manifest.kind == "dataset" and len(parts) > 1:
        source, *rest = parts
        return f"{source}:{'/'.join(rest)}"
    return str(path)
