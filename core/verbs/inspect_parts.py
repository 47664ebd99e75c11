"""What `inspect` returns for several datasets: the parts of a split, or the datasets of a mixture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import FormatError
from ..format.documents import Count, decode, float_from_json, load_json
from ..format.manifest import has_manifest
from ..format.mixture import is_mixture
from ..format.staging import PARTS_FILE
from ..opening import finished_manifest
from .mix import MixResult, inspect_mixture
from .results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """A part of a split. `problem` states what is wrong with it: missing, damaged or changed; None for nothing."""

    name: str
    path: Path
    steps: int
    episodes: int
    mean_return: float | None
    content_digest: str
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsResult(Result):
    """The parts of the dataset with the digest `content_digest`, in the folder `path`, and how they were drawn."""

    kind: ClassVar[str] = "parts"
    path: Path
    by: str
    seed: int | None
    in_order: bool
    stratify: str | None
    steps: int
    episodes: int
    duplicates: int
    parts: tuple[PartView, ...]
    content_digest: str


@dataclass(frozen=True)
class _Made:
    name: str
    steps: Count
    episodes: Count
    content_digest: str


@dataclass(frozen=True)
class _Arguments:
    by: str
    seed: int | None
    in_order: bool
    stratify: str | None


@dataclass(frozen=True)
class _Split:
    content_digest: str
    arguments: _Arguments
    duplicates: Count
    mean_returns: tuple[float | str | None, ...]
    made: tuple[_Made, ...]


def inspect_several(path: Path, root: str | os.PathLike[str] | None = None) -> MixResult | PartsResult | None:
    """Describe the mixture file or the folder of a split at `path`; None for anything else."""
    if is_mixture(path):
        return inspect_mixture(path, root)
    return _inspect_parts(path) if (path / PARTS_FILE).is_file() and not has_manifest(path) else None


def _inspect_parts(folder: Path) -> PartsResult:
    """Read `split.json` in a folder, and compare the parts with it; FormatError for what `split` did not write."""
    origin = str(folder / PARTS_FILE)
    document: Mapping[str, Any] = load_json(folder / PARTS_FILE)
    found = decode(_Split, document, origin)
    if len(found.mean_returns) != len(found.made) or any(Path(one.name).name != one.name for one in found.made):
        raise FormatError(f"{origin} does not list the parts as split does")
    parts = tuple(
        _part(folder, one, float_from_json(mean)) for one, mean in zip(found.made, found.mean_returns, strict=True)
    )
    asked = found.arguments
    return PartsResult(
        path=folder, by=asked.by, seed=asked.seed, in_order=asked.in_order, stratify=asked.stratify,
        steps=sum(part.steps for part in parts), episodes=sum(part.episodes for part in parts),
        duplicates=found.duplicates, parts=parts, content_digest=found.content_digest,
    )  # fmt: skip


def _part(folder: Path, made: _Made, mean: float | None) -> PartView:
    path = folder / made.name
    manifest = finished_manifest(path)
    problem = None
    if manifest is None:
        problem = "damaged" if path.exists() else "missing"
    elif manifest.content_digest != made.content_digest:
        problem = "changed since the split"
    return PartView(
        name=made.name, path=path, steps=made.steps, episodes=made.episodes,
        mean_return=None if mean is None or math.isnan(mean) else mean, content_digest=made.content_digest,
        problem=problem,
    )  # fmt: skip
