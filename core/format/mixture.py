"""Mixture files: TOML that names several datasets, their weights, and the policy for fields that differ.

`field_differences` finds these fields, for mixtures and for merged datasets.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, get_args

import numpy as np

from ..errors import FormatError, RbtoolError, UsageError, did_you_mean
from ..ted.schema import NEXT, Field, Key, key_name
from . import fs
from .documents import Check, decode, newer_version, toml_value
from .episodes import SCORE
from .files import read_regular
from .locate import find_dataset
from .manifest import Manifest
from .returns import return_field_of

SUFFIX = ".toml"
BY_SIZE = "size"
_FORMAT = "rbtool mix"
_VERSION = 1
_LARGEST = 1 << 20
"""Size limit of a mixture file in bytes: enough for a thousand datasets."""
_ID = re.compile(r"[a-z][a-z0-9_-]*:[^:\\\0][^\0]*")

_Weight: TypeAlias = Annotated[float, Check("a number from 0", lambda weight: weight >= 0 and math.isfinite(weight))]
_Temperature: TypeAlias = Annotated[float, Check("a number above 0", lambda value: value > 0 and math.isfinite(value))]
_Text: TypeAlias = Annotated[str, Check("text", lambda text: text and "\0" not in text)]
_Id: TypeAlias = Annotated[str, Check("source:id", _ID.fullmatch)]
_Weights: TypeAlias = Annotated[
    str, Check(f"{BY_SIZE!r} or a score like 'score.quality'", lambda name: name == BY_SIZE or name.startswith(SCORE))
]


Policy: TypeAlias = Literal["error", "intersect", "union"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A dataset or another mixture file, by `path` or by `id` (`source:id` of a stored dataset), and its weight.

    A relative path starts at the folder of the file that names it. `content_digest` is the digest of the content when
    the file was written; None takes any content.
    """

    path: _Text | None = None
    id: _Id | None = None
    weight: _Weight | None = None
    content_digest: _Text | None = None

    @property
    def name(self) -> str:
        """The name of the dataset in the file."""
        return self.path or self.id or ""

    def place(self, file: Path, root: str | os.PathLike[str] | None = None) -> Path:
        """Find the dataset that `file` refers to; DatasetNotFoundError, which names the file, if it does not exist."""
        try:
            if self.id is not None:
                return find_dataset(self.id, root)
            return find_dataset(self._path_from(Path(os.path.realpath(file)).parent), root)
        except RbtoolError as error:
            hint = error.hint if self.path is None else f"a relative path in it starts at {Path(file).parent}"
            raise type(error)(f"{file}: {error.message}", hint=hint) from error

    def _path_from(self, folder: Path) -> Path:
        """Resolve a relative path; `folder` must not contain links, so that `..` leads to its real parent."""
        path = fs.expanded(self.path or "")
        ups = next((number for number, part in enumerate(path.parts) if part != ".."), len(path.parts))
        for _ in range(ups):
            folder = folder.parent
        return folder.joinpath(*path.parts[ups:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The contents of a mixture file: the datasets, how often each is drawn, and the policy for fields that differ.

    `weights` is `"size"` to weight each dataset by its number of steps, or the name of a score to weight it by the
    sum of the score over its steps; with None the members have their own weights, equal ones if none has a weight.
    Weights are raised to `1 / temperature`.
    """

    dataset: tuple[Member, ...]
    schema: Policy = "error"
    weights: _Weights | None = None
    temperature: _Temperature = 1.0

    def p(self, sums: Sequence[float]) -> list[float] | str | None:
        """Return the weights for `ReplayBufferEnsemble`; `sums` are the sizes or sums of scores of the datasets."""
        if self.weights is not None:
            return self.weights if self.weights == BY_SIZE else list(sums)
        found = [member.weight for member in self.dataset if member.weight is not None]
        return found or None

    def shares(self, sums: Sequence[float]) -> list[float]:
        """Return the probability of each dataset; `sums` are the sizes or sums of scores of the datasets."""
        p = self.p(sums)
        weights = np.array(sums if p == BY_SIZE else p or [1.0] * len(sums), np.float64)
        logs = np.log(weights, out=np.full(len(weights), -np.inf), where=weights > 0) / self.temperature
        found = np.exp(logs - logs.max())
        return [float(share) for share in found / found.sum()]

    def text(self) -> str:
        """Return the text of the mixture file, which `read_mixture` reads. UsageError for a path that is not UTF-8."""
        head = {"format": _FORMAT, "version": _VERSION, "schema": self.schema, "weights": self.weights}
        head |= {"temperature": self.temperature} if self.temperature != 1.0 else {}
        tables = [_lines(head)]
        for member in self.dataset:
            entries = {name: getattr(member, name) for name in ("path", "id", "weight", "content_digest")}
            tables.append(f"[[dataset]]\n{_lines(entries)}")
        return "\n\n".join(tables) + "\n"


def _lines(entries: Mapping[str, Any]) -> str:
    return "\n".join(f"{name} = {toml_value(value)}" for name, value in entries.items() if value is not None)


def is_mixture(path: Path) -> bool:
    """Return whether `path` is a file with the name of a mixture file."""
    return path.suffix == SUFFIX and path.is_file()


def read_mixture(path: Path) -> Mixture:
    """Read a mixture file; FormatError, in one sentence that names the file, for anything else."""
    document = _document(path)
    if document.get("format") != _FORMAT:
        raise FormatError(
            f"{path} is not a mixture of datasets: it has no line format = {toml_value(_FORMAT)}",
            hint="write one with: rbtool mix A:0.5 B:0.5 DEST.toml",
        )
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{path} has {version!r} as version, expected {_VERSION}")
    if version > _VERSION:
        raise newer_version(str(path), version, _VERSION)
    _require_known(document, ("format", "version", *Mixture.__slots__), str(path))
    tables = document.get("dataset")
    if not isinstance(tables, list) or not tables:
        raise FormatError(f"{path} names no datasets, expected [[dataset]] tables")
    for number, table in enumerate(tables):
        if isinstance(table, dict):
            _require_known(table, Member.__slots__, f"{path}: dataset {number}")
    mixture = decode(Mixture, document, str(path))
    for number, member in enumerate(mixture.dataset):
        if (member.path is None) == (member.id is None):
            found = "both path and id" if member.path else "neither path nor id"
            raise FormatError(f"{path}: dataset {number} has {found}, expected one of them")
    _require_weights(mixture, str(path))
    return mixture


def _document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise FormatError(f"{path} has {path.stat().st_size:,} bytes: no mixture file is larger than {_LARGEST:,}")
        return tomllib.loads(read_regular(path).decode())
    except ValueError as error:
        if isinstance(error, RbtoolError):
            raise
        raise FormatError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise FormatError(f"{path} is not a mixture file: its values are nested too deeply") from None


def _require_known(entries: Iterable[str], known: Sequence[str], origin: str) -> None:
    for key in entries:
        if key not in known:
            raise FormatError(
                f"{origin} has {key!r}, which is unknown{did_you_mean(key, known)}",
                hint=f"known: {', '.join(known)}",
            )


def _require_weights(mixture: Mixture, origin: str) -> None:
    """Raise FormatError for weights of some datasets only, in addition to `weights`, or all 0."""
    given = [member.weight for member in mixture.dataset if member.weight is not None]
    if given and mixture.weights is not None:
        raise FormatError(
            f"{origin} has weights = {toml_value(mixture.weights)} and a weight of a dataset, expected one"
        )
    if given and len(given) < len(mixture.dataset):
        lacking = next(member.name for member in mixture.dataset if member.weight is None)
        raise FormatError(f"{origin} has no weight for {lacking}, and one for others, expected all or none")
    if given and not any(given):
        raise FormatError(f"{origin} has the weight 0 for every dataset, expected one above 0")


def refuse_mixture(path: Path) -> None:
    """Raise UsageError if `path` is a mixture file, where a single dataset is needed; FormatError for other TOML."""
    if is_mixture(path):
        _refuse(path, read_mixture(path))


def _refuse(path: Path, mixture: Mixture) -> NoReturn:
    names = ", ".join(member.name for member in mixture.dataset)
    raise UsageError(
        f"{path} is a mixture of {len(mixture.dataset)} datasets ({names}), expected one dataset",
        hint="name one of them, or make one dataset of them: rbtool merge A B DEST",
    )


# Fields that differ ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field whose type or shape differs between datasets: what each dataset has, `nothing` where it is missing."""

    key: str
    found: tuple[str, ...]

    def sentence(self, names: Sequence[str]) -> str:
        """State which dataset has what: `action: float32 [2] in A, float64 [2] in B`."""
        return f"{self.key}: {', '.join(f'{what} in {name}' for what, name in zip(self.found, names, strict=True))}"


def require_policy(schema: str) -> Policy:
    """Validate the name of a policy; UsageError for an unknown one."""
    for policy in get_args(Policy):
        if schema == policy:
            return schema  # type: ignore[return-value]
    raise UsageError(
        f"there is no schema policy {schema!r}{did_you_mean(schema, get_args(Policy))}",
        hint=f"choose from {', '.join(get_args(Policy))}",
    )


def field_differences(each: Sequence[Sequence[Field]]) -> dict[Key, FieldDifference]:
    """Return the fields, in order of appearance, that are not in all datasets with the same element type and shape.

    They are found by key and not by name: `("a.b",)` and `("a", "b")` are two fields with one name.
    """
    found = {}
    for key, fields in fields_by_key(each):
        looks = tuple("nothing" if one is None else f"{one.dtype} {list(one.shape)}" for one in fields)
        if len(set(looks)) > 1:
            found[key] = FieldDifference(key_name(key), looks)
    return found


def fields_by_key(each: Sequence[Sequence[Field]]) -> Iterator[tuple[Key, list[Field | None]]]:
    """Yield each key, in order of appearance, with its field in each dataset; None where it is missing."""
    known = [{leaf.key: leaf for leaf in fields} for fields in each]
    for key in dict.fromkeys(leaf.key for fields in each for leaf in fields):
        yield key, [fields.get(key) for fields in known]


def reward_meanings(manifests: Sequence[Manifest], names: Sequence[str]) -> list[str]:
    """Return the datasets whose rewards are sums over several steps, if the rewards of others are not."""
    named = [
        (name, None if (found := return_field_of(manifest)) is None else found.key)
        for manifest, name in zip(manifests, names, strict=True)
        if any(leaf.key == (NEXT, "reward") for leaf in manifest.fields)
    ]
    summed = [name for name, key in named if key != (NEXT, "reward")]
    if not summed or len(summed) == len(named):
        return []
    return [f"next.reward is a sum over n steps in {' and '.join(summed)}, and of one step in the others"]
