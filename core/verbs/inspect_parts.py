"""What `inspect` returns for several datasets and for buffers: splits, mixtures, ensembles, and rows without steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..encodings.compact import BUFFER
from ..errors import CorruptDataError, FormatError
from ..format.documents import Count, decode, float_from_json, load_json
from ..format.manifest import has_manifest
from ..format.memmap.tree import read_tree
from ..format.mixture import is_mixture
from ..format.open_files import OpenFiles
from ..format.staging import PARTS_FILE
from ..open_steps import finished_manifest
from ..progress import counted
from ..results import Result
from .mix import MixResult, inspect_mixture
from .saved_buffers import SavedFolders, extent_of, saved_folders


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """A member of a saved ensemble, by number (`1.0` is member 0 of member 1): its elements, and its share of a batch.

    `weight` is that of the member in its ensemble: 1 where all are equal, None where it is its number of elements.
    `capacity` is None where the storage has no bound, or does not record it.
    """

    name: str
    path: Path
    elements: int
    capacity: int | None
    weight: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleResult(Result):
    """The checkpoint of an ensemble of buffers in the folder `path`."""

    kind: ClassVar[str] = "ensemble"
    path: Path
    batch_size: int | None
    elements: int
    members: tuple[MemberView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferResult(Result):
    """The checkpoint of a buffer, or of a storage, whose elements are not the steps of episodes.

    `capacity` is None where the storage has no bound, or does not record it, `batch_size` also for a storage.
    """

    kind: ClassVar[str] = "buffer"
    path: Path
    batch_size: int | None
    elements: int
    capacity: int | None

    @property
    def sentence(self) -> str:
        """What is saved, in words."""
        room = "" if self.capacity is None else f", room for {self.capacity:,}"
        batch = "" if self.batch_size is None else f", batches of {self.batch_size:,}"
        what = "a buffer" if (self.path / BUFFER).is_file() else "a storage"
        return f"the checkpoint of {what}: {counted(self.elements, 'element')}{room}{batch}"


def inspect_buffer(path: Path) -> BufferResult:
    """Describe the saved buffer or storage at `path`; CorruptDataError for one that is damaged."""
    whole = (path / BUFFER).is_file()
    document = decode(dict[str, Any], load_json(path / BUFFER), str(path / BUFFER), CorruptDataError) if whole else {}
    extent = extent_of(saved_folders(path).storage if whole else path)
    return BufferResult(path=path, batch_size=document.get("batch_size"), elements=extent.length, capacity=extent.most)


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


def inspect_several(
    path: Path, root: str | os.PathLike[str] | None = None
) -> MixResult | PartsResult | EnsembleResult | None:
    """Describe the mixture file, the folder of a split or the saved ensemble at `path`; None for anything else."""
    if is_mixture(path):
        return inspect_mixture(path, root)
    if (path / BUFFER).is_file() and (members := saved_folders(path).members):
        return _inspect_ensemble(path, members)
    return _inspect_parts(path) if (path / PARTS_FILE).is_file() and not has_manifest(path) else None


def _inspect_ensemble(path: Path, members: Sequence[SavedFolders]) -> EnsembleResult:
    found = tuple(view for weight, member in zip(_weights(path / "sampler", len(members)), members, strict=True)
                  for view in _member_views(member, weight))  # fmt: skip
    document = decode(dict[str, Any], load_json(path / BUFFER), str(path / BUFFER), CorruptDataError)
    return EnsembleResult(
        path=path, batch_size=document.get("batch_size"), elements=sum(one.elements for one in found), members=found
    )


def _member_views(member: SavedFolders, weight: float | None) -> Iterator[MemberView]:
    if not (inner := member.members):
        extent = extent_of(member.storage)
        yield MemberView(
            name=member.name, path=member.storage, elements=extent.length, capacity=extent.most, weight=weight
        )
    for own, one in zip(_weights(member.sampler, len(inner)), inner, strict=True):
        yield from _member_views(one, own)


def _weights(sampler: Path, count: int) -> list[float | None]:
    """Read the weights of the members of an ensemble; CorruptDataError for another number of them."""
    folder = sampler / "ensemble"
    if not (folder / "meta.json").is_file():
        return [1.0] * count
    with OpenFiles(folder) as files:
        leaves = read_tree(files)
        if ("by_size",) in leaves and any(files.read("by_size.memmap")):
            return [None] * count
        if ("p",) not in leaves:
            return [1.0] * count
        found = np.frombuffer(files.read("p.memmap"), np.float64)
    if len(found) != count:
        raise CorruptDataError(f"{folder} has the weights of {len(found)} members, there are {count}")
    return list(map(float, found))


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
