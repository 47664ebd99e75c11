"""Opens mixture files: their datasets and nested mixtures, and the fields in which these differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..format.documents import dump_json
from ..format.episodes import EpisodeTable
from ..format.files import digest_bytes
from ..format.manifest import Manifest
from ..format.memmap.reader import TedReader
from ..format.mixture import (
    BY_SIZE,
    FieldDifference,
    Member,
    Mixture,
    field_differences,
    is_mixture,
    read_mixture,
    reward_meanings,
)
from ..format.packed.reader import PackedReader
from ..open_steps import open_dataset
from ..ted.schema import Field, Key

if TYPE_CHECKING:
    from ..buffers.ensemble import ReplayBufferEnsemble
    from ..buffers.replay_buffer import ReplayBuffer


T = TypeVar("T")
Use: TypeAlias = Callable[[TedReader | PackedReader], T]

_MASK = "schema_mask"  # the group of masks in batches of an ensemble with the policy "union"
_DEEPEST = 16
_MOST = 1000
"""Limit on the datasets of a mixture, counted as often as they are named, as nested mixtures can multiply them."""
_FEW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDataset(Generic[T]):
    """A dataset of an open mixture, with `made`, the result of a function that was called while it was open."""

    member: Member
    path: Path
    manifest: Manifest
    table: EpisodeTable
    made: T

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.manifest.steps

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return self.manifest.episodes

    def sum_of(self, weights: str) -> float:
        """Return the number of its steps (`size`), or the sum of a score over them; UsageError without that score."""
        if weights == BY_SIZE:
            return self.steps
        try:
            return float(self.table.score(weights) @ self.table.length)
        except UsageError as error:
            raise UsageError(f"{self.path}: {error.message}", hint=error.hint) from error

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of its batches."""
        return self.manifest.fields

    @property
    def content_digest(self) -> str:
        """The digest of its content."""
        return self.manifest.content_digest

    @property
    def datasets(self) -> tuple[MixedDataset[T], ...]:
        """The dataset itself, as a tuple."""
        return (self,)


@dataclass(frozen=True, kw_only=True)
class OpenMixture(Generic[T]):
    """A mixture with its members, datasets or mixtures, in order. `member` is its entry in an outer mixture."""

    path: Path
    mixture: Mixture
    members: tuple[MixedDataset[T] | OpenMixture[T], ...]
    member: Member = field(default_factory=Member)

    @cached_property
    def steps(self) -> int:
        """Number of steps of all datasets."""
        return sum(member.steps for member in self.members)

    @cached_property
    def episodes(self) -> int:
        """Number of episodes of all datasets."""
        return sum(member.episodes for member in self.members)

    @cached_property
    def datasets(self) -> tuple[MixedDataset[T], ...]:
        """All datasets, including the datasets of mixtures inside the mixture, in the order of `source_id`."""
        return tuple(one for member in self.members for one in member.datasets)

    @cached_property
    def _sums(self) -> list[float]:
        sums = [member.sum_of(self.mixture.weights or BY_SIZE) for member in self.members]
        if not any(sums):
            raise UsageError(f"{self.mixture.weights} is 0 in all datasets of {self.path}, expected one above 0")
        return sums

    def sum_of(self, weights: str) -> float:
        """Return the sum over all datasets, as `MixedDataset.sum_of` has it."""
        return sum(member.sum_of(weights) for member in self.members)

    @property
    def shares(self) -> list[float]:
        """The probability of each member."""
        return self.mixture.shares(self._sums)

    @property
    def dataset_shares(self) -> list[float]:
        """The probability of each of `datasets`."""
        return [
            share * inner
            for member, share in zip(self.members, self.shares, strict=True)
            for inner in (member.dataset_shares if isinstance(member, OpenMixture) else [1.0])
        ]

    def ensemble(self, buffer_of: Callable[[T], ReplayBuffer], **arguments: Any) -> ReplayBufferEnsemble:
        """Make an ensemble of the buffers of the datasets; `arguments` are further arguments of the ensemble."""
        from ..buffers.ensemble import ReplayBufferEnsemble  # lazy: imports torch

        members = [
            one.ensemble(buffer_of) if isinstance(one, OpenMixture) else buffer_of(one.made) for one in self.members
        ]
        mixture = self.mixture
        alike = mixture.schema == "error" and not self.differences  # then batches need not be compared
        return ReplayBufferEnsemble(
            *members, p=mixture.p(self._sums), temperature=mixture.temperature, batch="exact",
            schema=None if alike else mixture.schema, **arguments,
        )  # fmt: skip

    @cached_property
    def differences(self) -> dict[Key, FieldDifference]:
        """The fields that differ between members; masks of inner mixtures only count with the policy `error`."""
        if self.mixture.schema == "error":
            return field_differences([member.fields for member in self.members])
        return field_differences([_without_masks(member.fields) for member in self.members])

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields of batches: those that all members have, or with the policy `union` all fields and masks."""
        known = {one.key: one for member in self.members for one in member.fields}
        if self.mixture.schema == "error":
            return tuple(known.values())
        found = _without_masks(tuple(known.values()))
        if self.mixture.schema == "intersect":
            found = [one for one in found if one.key not in self.differences]
        masked = [one.key for one in found if one.key in self.differences or (_MASK, *one.key) in known]
        return (*found, *(Field((_MASK, *key), "bool", (), "info") for key in masked))

    @cached_property
    def content_digest(self) -> str:
        """The digest of the contents, weights and policy, without paths."""
        mixture = self.mixture
        weights = [member.weight for member in mixture.dataset]
        facts = [mixture.schema, mixture.weights, mixture.temperature, weights]
        contents = [member.content_digest for member in self.members]
        return digest_bytes(dump_json([facts, contents]).encode())

    @property
    def reward_meanings(self) -> list[str]:
        """Sentences on datasets whose rewards are sums over several steps, while others have plain rewards."""
        datasets = self.datasets
        return reward_meanings([one.manifest for one in datasets], [one.member.name for one in datasets])

    def require_alike(self) -> None:
        """Raise SchemaError for fields that differ, unless the policy resolves them."""
        names = [member.member.name for member in self.members]
        clashing = [one for one in self.differences.values() if self.mixture.schema == "error" or _clashes(one)]
        lines = self.reward_meanings if self.mixture.schema == "error" else []
        lines += [one.sentence(names) for one in clashing]
        if not lines:
            return
        more = f"; and {len(lines) - _FEW} more" if len(lines) > _FEW else ""
        hint = "--schema intersect keeps what all have, --schema union keeps all and marks what is missing"
        if any(map(_clashes, clashing)):
            hint = "make them alike: rbtool preprocess --cast, --select or --exclude"
        raise SchemaError(
            f"the datasets of {self.path} differ in {len(lines)} field{'' if len(lines) == 1 else 's'}: "
            f"{'; '.join(lines[:_FEW])}{more}",
            hint=hint,
        )


def _without_masks(fields: Sequence[Field]) -> list[Field]:
    """Return the fields without the masks that a mixture with the policy `union` adds to its batches."""
    return [one for one in fields if one.key[0] != _MASK or (one.dtype, one.shape) != ("bool", ())]


def _clashes(difference: FieldDifference) -> bool:
    return len({found for found in difference.found if found != "nothing"}) > 1


def open_mixture(path: Path, use: Use[T], root: str | os.PathLike[str] | None = None) -> OpenMixture[T]:
    """Open all datasets of a mixture file, one after the other, and call `use` with the reader of each.

    Raises FormatError for a file that is not a mixture or contains itself, DatasetNotFoundError for a missing dataset,
    CorruptDataError if the content of a dataset has changed since the file was written, UsageError for a dataset
    without steps, and SchemaError for fields that differ.
    """
    return Opening(use, root).mixture(path, read_mixture(path), Member(path=str(path)), ())


@dataclass
class Opening(Generic[T]):
    """Opens a mixture and the mixtures in it."""

    use: Use[T]
    root: str | os.PathLike[str] | None
    opened: int = 0

    def mixture(self, path: Path, mixture: Mixture, member: Member, above: Sequence[Path]) -> OpenMixture[T]:
        here = (*above, Path(os.path.realpath(path)))
        if here[-1] in above:
            chain = " → ".join(one.name for one in here[here.index(here[-1]) :])
            raise FormatError(f"{path} contains itself: {chain}", hint="remove it from one of these files")
        if len(here) > _DEEPEST:
            raise FormatError(f"{path} is nested in {_DEEPEST} other mixtures, expected fewer")
        found = OpenMixture(
            path=path, mixture=mixture, member=member,
            members=tuple(self.member(one, path, here) for one in mixture.dataset),
        )  # fmt: skip
        found.require_alike()
        return found

    def member(self, member: Member, file: Path, above: Sequence[Path]) -> MixedDataset[T] | OpenMixture[T]:
        place = member.place(file, self.root)
        self.opened += 1
        if self.opened > _MOST:
            raise FormatError(f"{above[0]} has more than {_MOST:,} datasets, with those of the mixtures in it")
        found = (
            self.mixture(place, read_mixture(place), member, above)
            if is_mixture(place)
            else self.dataset(place, member)
        )
        if member.content_digest not in {None, found.content_digest}:
            raise CorruptDataError(
                f"{member.name} changed since {file} was written: its digest is {found.content_digest}, expected "
                f"{member.content_digest}",
                hint="write the file again with rbtool mix … --force, or remove content_digest to take any content",
            )
        return found

    def dataset(self, place: Path, member: Member) -> MixedDataset[T]:
        with open_dataset(place) as reader:
            if not reader.manifest.steps:
                raise UsageError(f"{place} has no steps: there is nothing to draw from it")
            return MixedDataset(
                member=member, path=place, manifest=reader.manifest, table=reader.episodes, made=self.use(reader)
            )  # fmt: skip
