"""`mix`: write a file that names several datasets and their weights."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from ..datasets.mixtures import Opening, OpenMixture, open_mixture
from ..errors import RbtoolError, UsageError, suggests_keywords
from ..format import fs
from ..format.episodes import SCORE
from ..format.files import read_regular
from ..format.locate import find_dataset
from ..format.memmap.reader import TedReader
from ..format.mixture import BY_SIZE, SUFFIX, FieldDifference, Member, Mixture, is_mixture, read_mixture, require_policy
from ..format.packed.reader import PackedReader
from ..format.staging import Staging, sweep
from ..open_steps import is_steps
from ..options import PathLike
from ..results import Result, occupied_error, seconds_since

T = TypeVar("T")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedMember:
    """A member of a mixture, a dataset or another mixture; `share` is its share of the drawn steps, from 0 to 1.

    `datasets` is the number of datasets in it, 1 for a dataset.
    """

    name: str
    path: Path
    weight: float | None
    share: float
    steps: int
    episodes: int
    datasets: int
    content_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MixResult(Result):
    """The mixture file at `path`; `policy` states how the fields that differ, `differences`, are treated."""

    kind: ClassVar[str] = "mix"
    path: Path
    policy: str
    weights: str | None
    temperature: float
    steps: int
    episodes: int
    members: tuple[MixedMember, ...]
    differences: tuple[FieldDifference, ...]
    notes: tuple[str, ...]
    content_digest: str
    already_there: bool = False
    dry_run: bool = False
    seconds: float = 0.0


@suggests_keywords()
def mix(
    datasets: Sequence[PathLike],
    dest: PathLike,
    *,
    p: Sequence[float] | str | None = None,
    temperature: float = 1.0,
    schema: str = "error",
    root: PathLike | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> MixResult:
    """Write a mixture of datasets, which `load_dataset` opens as a `ReplayBufferEnsemble` without a copy of the data.

    The file names the datasets as `datasets` does; relative paths are rewritten relative to its folder, so that the
    file and the datasets can be moved together. It records the content digest of each dataset: `load_dataset` raises
    CorruptDataError for a dataset that was changed.

    Args:
        datasets: two or more, each a path or `source:id`, or another mixture.
        dest: the TOML file to write.
        p: the weights of the datasets, 0 or more; `"size"` for their numbers of steps; or the name of a score, like
            `"score.quality"`, for its sum over their steps. Default: equal weights.
        temperature: weights are raised to the power `1 / temperature`.
        schema: what to do with fields that only some datasets have: `error` refuses them, `intersect` leaves them out
            of batches, `union` fills them with zeros and adds a mask.
        root: where stored datasets are.
        force: replace the file, if it is a mixture.
        dry_run: do everything but writing.

    Returns:
        What was written. An equal mixture is left as it is, and `already_there` is True.

    Raises:
        UsageError: arguments make no sense. `dest` is unchanged after any error.
        DatasetNotFoundError: a dataset does not exist.
        SchemaError: fields differ.
        OutOfSpaceError: the disk is full.
    """
    started, policy = time.perf_counter(), require_policy(schema)
    destination = mixture_file(dest, datasets)
    if isinstance(datasets, str | os.PathLike) or len(datasets) < 2:
        one = "one dataset" if isinstance(datasets, str | os.PathLike) or datasets else "no dataset"
        raise UsageError(f"{one} to mix, expected two or more", hint="write: rbtool mix A:0.5 B:0.5 DEST.toml")
    weights = _require_weights(p, temperature, len(datasets))
    members = [_member(name, destination, root) for name in datasets]
    mixture = Mixture(
        dataset=tuple(replace(one, weight=weight) for one, weight in zip(members, weights, strict=True)),
        schema=policy, weights=p if isinstance(p, str) else None, temperature=float(temperature),
    )  # fmt: skip
    opening = Opening(_nothing, root)
    opened = opening.mixture(destination, mixture, Member(path=str(destination)), ())
    whole = replace(
        mixture,
        dataset=tuple(
            replace(one, content_digest=found.content_digest or None)
            for one, found in zip(mixture.dataset, opened.members, strict=True)
        ),
    )
    return _written(replace(opened, mixture=whole), force, dry_run, started)


def _nothing(reader: TedReader | PackedReader) -> None:
    return None


def mixture_file(dest: PathLike, datasets: Sequence[PathLike] | PathLike = ()) -> Path:
    """Return the path of the file to write; UsageError without its suffix, as if DEST.toml is not the last argument."""
    path = fs.expanded(dest).absolute()
    if path.suffix != SUFFIX:
        words = [] if isinstance(datasets, str | os.PathLike) else [os.fspath(one) for one in datasets]
        turned = len(words) > 1 and words[0].endswith(SUFFIX)
        line = shlex.join([*words[1:], os.fspath(dest), words[0]]) if turned else "A:0.5 B:0.5 DEST.toml"
        raise UsageError(
            f"the destination comes last, and {os.fspath(dest)} does not end in {SUFFIX} like a mixture file",
            hint=f"write: rbtool mix {line}",
        )
    return path


def _require_weights(p: Sequence[float] | str | None, temperature: float, count: int) -> list[float | None]:
    if isinstance(temperature, bool) or not 0 < temperature < float("inf"):
        raise UsageError(f"the temperature is {temperature}, expected a number above 0")
    if isinstance(p, str) and p != BY_SIZE and not p.startswith(SCORE):
        raise UsageError(f"the weights are {p!r}, expected numbers, {BY_SIZE!r} or a score like 'score.quality'")
    if p is None or isinstance(p, str):
        return [None] * count
    if len(p) != count:
        raise UsageError(f"p has {len(p)} weights, expected one for each of {count} datasets")
    for weight in p:
        if not 0 <= weight < float("inf"):
            raise UsageError(f"a weight is {weight:g}, expected a number from 0")
    if not any(p):
        raise UsageError("all weights are 0, expected one above 0")
    return [float(weight) for weight in p]


def _member(name: PathLike, destination: Path, root: PathLike | None) -> Member:
    """Return the entry for a dataset: its id, its absolute path, or its path relative to the folder of the file."""
    found = find_dataset(name, root)
    path = fs.expanded(name)
    if not path.exists():
        return Member(id=os.fspath(name))
    if path.is_absolute():
        return Member(path=os.fspath(name))
    # The last component is not resolved: it may be a link to the newest of several datasets.
    place = found.resolve() if found.name in {"", ".."} else found.parent.resolve() / found.name
    return Member(path=os.path.relpath(place, Path(os.path.realpath(destination)).parent))


def _written(opened: OpenMixture[None], force: bool, dry_run: bool, started: float) -> MixResult:
    destination, text = opened.path, opened.mixture.text()
    staging = _MixStaging(destination, replace=force)
    if _same(destination, text):
        if not dry_run:
            sweep(destination)  # leftovers of a run that was killed after it had published
        return described(opened, started, already_there=True)
    staging.refuse_if_taken()
    if not dry_run:
        with staging:
            fs.write_file(staging.path / destination.name, text.encode())
            if not staging.publish(destination.name) and not _same(destination, text):
                raise UsageError(f"{destination} was just created by another process", hint="add --force to replace it")
    return described(opened, started, dry_run=dry_run)


def _same(destination: Path, text: str) -> bool:
    return is_mixture(destination) and read_regular(destination) == text.encode()


class _MixStaging(Staging):
    """A staging folder that can replace a mixture file, and nothing else."""

    def refuse_if_taken(self) -> None:
        path = self.destination
        self._require_place()
        if not os.path.lexists(path):
            return
        try:
            read_mixture(path)
        except (RbtoolError, OSError):
            raise UsageError(
                f"{path} already exists and is not a mixture of datasets; left unchanged",
                hint="choose another destination",
            ) from None
        if not self.replace:
            raise occupied_error(path, "is another mixture")


def described(
    opened: OpenMixture[T], started: float, *, already_there: bool = False, dry_run: bool = False
) -> MixResult:
    """Describe an open mixture; `started` is the start of the verb (perf_counter)."""
    members = tuple(
        MixedMember(
            name=member.name, path=found.path, weight=member.weight, share=share, steps=found.steps,
            episodes=found.episodes, datasets=len(found.datasets), content_digest=found.content_digest,
        )
        for member, found, share in zip(opened.mixture.dataset, opened.members, opened.shares, strict=True)
    )  # fmt: skip
    digests = [one.content_digest for one in opened.datasets]
    notes = list(opened.reward_meanings)
    if len(set(digests)) < len(digests):
        notes.append("two of the datasets have the same content: their steps are drawn twice as often")
    return MixResult(
        path=opened.path, policy=opened.mixture.schema, weights=opened.mixture.weights,
        temperature=opened.mixture.temperature, steps=opened.steps, episodes=opened.episodes, members=members,
        differences=tuple(opened.differences.values()), notes=tuple(notes), content_digest=opened.content_digest,
        already_there=already_there, dry_run=dry_run, seconds=seconds_since(started),
    )  # fmt: skip


def inspect_mixture(path: Path, root: PathLike | None = None) -> MixResult:
    """Describe the mixture file at `path`; raises the errors of `open_mixture`."""
    started = time.perf_counter()
    return described(open_mixture(path, _nothing, root), started)


def weighted_names(words: Sequence[str], root: PathLike | None = None) -> tuple[list[str], list[float] | None]:
    """Split words like `A:0.5` into names and weights; the weights are None if no word has one.

    A word that is the name of a dataset as a whole, such as `openml:1464`, has no weight. Raises UsageError if a weight
    is not a number, or only some words have one.
    """
    pairs = [_weighted(word, root) for word in words]
    weights = [weight for _, weight in pairs if weight is not None]
    if weights and len(weights) < len(pairs):
        lacking = next(name for name, weight in pairs if weight is None)
        raise UsageError(f"{lacking} has no weight, but others have one, expected a weight for all or for none")
    return [name for name, _ in pairs], weights or None


def _weighted(word: str, root: PathLike | None) -> tuple[str, float | None]:
    name, colon, text = word.rpartition(":")
    is_number = _NUMBER.fullmatch(text.lower()) is not None
    if not colon or not name or _is_there(word, root):
        if name and is_number and _is_there(name, root):
            raise UsageError(
                f"{word} is ambiguous: it is a dataset, and so is {name}",
                hint=f"write {word}:1 for the first one; for the other one, change the folder or give its full path",
            )
        return word, None
    if is_number:
        return name, float(text)
    if _is_there(name, root):
        raise UsageError(f"the weight of {name} is {text!r}, expected a number")
    return word, None


def _is_there(name: str, root: PathLike | None) -> bool:
    try:
        path = find_dataset(name, root)
    except (RbtoolError, OSError, ValueError):
        return False
    return is_mixture(path) or is_steps(path)
