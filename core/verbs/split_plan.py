"""Which episode goes to which part of a split: groups that stay together, shares, and the order of assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from ..errors import UsageError, did_you_mean
from ..format.contracts import Array, StepReader
from ..format.digest import bytes_of
from ..format.returns import return_field_of, sum_rewards
from ..ted.schema import EPISODE, Field, key_called, key_name

Shares: TypeAlias = Mapping[str, float]
"""The fraction of the episodes that each part gets, by the name of the part."""

PARTS = ("train", "val", "test")
_NEAR = 1e-9


def require_shares(train: float | None, val: float | None, test: float | None) -> dict[str, float]:
    """Validate the fractions of a split: two or more parts, each above 0, that add up to 1. UsageError otherwise."""
    given = {name: share for name, share in zip(PARTS, (train, val, test), strict=True) if share is not None}
    for name, share in given.items():
        if not 0 < share < 1:
            raise UsageError(
                f"--{name} is {share:g}, expected a fraction above 0 and below 1",
                hint=f"leave --{name} out for a split without that part" if share == 0 else "",
            )
    if len(given) < 2:
        found = f"--{next(iter(given))} is the only fraction" if given else "there is no fraction"
        raise UsageError(
            f"{found}, expected two parts or more", hint="write: rbtool split DATASET --train 0.8 --val 0.2"
        )
    total = sum(Fraction(repr(float(share))) for share in given.values())
    if abs(float(total) - 1) > _NEAR:
        shown = " + ".join(f"{share:g}" for share in given.values())
        raise UsageError(f"the fractions {shown} add up to {float(total):g}, expected 1")
    return given


@dataclass(frozen=True, slots=True)
class Groups:
    """Episodes that stay together: the group of each episode, int64 `[episodes]`, numbered by first appearance."""

    of_episode: Array
    what: str = "episode"

    @property
    def sizes(self) -> Array:
        """Episodes of each group, int64 `[groups]`."""
        return np.bincount(self.of_episode)


def groups_by(reader: StepReader, by: str, identical: Array | None = None) -> Groups:
    """Group the episodes: each alone (`episode`), those with the same rows (`content`), or by a key.

    A key is a field, of which each episode has one value, then a key of the episodes' text, then `seed`. UsageError
    for a key that is not there, that changes within an episode, or that some episode lacks.
    """
    table = reader.episodes
    fields = {field.key: field for field in reader.fields}
    if by == EPISODE[0]:
        return Groups(np.arange(len(table)))
    key = key_called(by, fields)
    if key is not None:
        return Groups(_values_of_field(reader, fields[key]), by)
    if by == "content" and identical is not None:
        return Groups(_numbered(identical.tolist()), by)
    texts = reader.episode_text or []
    if any(by in text for text in texts):
        _require_all([by in text for text in texts], table.episode, f"no text {by!r}")
        return Groups(_numbered([text[by] for text in texts]), by)
    if by == "seed" and table.has_seed.any():
        _require_all(table.has_seed.tolist(), table.episode, "no seed")
        return Groups(_numbered(table.seed.tolist()), by)
    known = list(
        dict.fromkeys([*map(key_name, fields), *(name for text in texts for name in text), "episode", "content"])
    )
    known += ["seed"] if table.has_seed.any() and "seed" not in known else []
    raise UsageError(
        f"--by {by!r} names no field, no text of the episodes and no entry of the episode table"
        f"{did_you_mean(by, known)}",
        hint=f"choose from {', '.join(known)}",
    )


def _require_all(there: Sequence[bool], numbers: Array, lacking: str) -> None:
    if not all(there):
        number = int(numbers[list(there).index(False)])
        raise UsageError(f"episode {number} has {lacking}: it belongs to no group")


def _numbered(values: Sequence[object]) -> Array:
    names: dict[object, int] = {}
    return np.array([names.setdefault(value, len(names)) for value in values], np.int64).reshape(len(values))


def _values_of_field(reader: StepReader, field: Field) -> Array:
    """Number the value of each episode in a field; values are compared bit for bit."""
    table, width = reader.episodes, field.row_bytes
    values: list[bytes] = [b""] * len(table)
    if not width:
        return _numbered(values)
    for start, stop in reader.chunks():
        rows = np.frombuffer(bytes_of(reader.view(field.key, start, stop)), np.uint8).reshape(stop - start, width)
        which = table.index_of_step(np.arange(start, stop))
        first = np.flatnonzero(np.diff(which, prepend=-1))
        for row in first.tolist():
            if which[row] != which[0] or table.start[which[row]] >= start:
                values[which[row]] = rows[row].tobytes()
        heads = np.frombuffer(b"".join(values[episode] for episode in which[first]), np.uint8).reshape(-1, width)
        same = (rows == np.repeat(heads, np.diff(first, append=len(which)), axis=0)).all(1)
        if not same.all():
            number = int(table.episode[which[int((~same).argmax())]])
            raise UsageError(
                f"{field.name} changes within episode {number}: a key to split by has one value in an episode"
            )
    return _numbered(values)


def episode_returns_of(reader: StepReader) -> Array:
    """The return of every episode, float64 `[episodes]`; UsageError where the dataset has none."""
    if return_field_of(reader.manifest) is None:
        raise UsageError("the dataset has no return: no field holds one reward a step", hint="leave --stratify out")
    return sum_rewards(reader, reader.episodes.start, reader.episodes.length)


def targets(shares: Shares, episodes: int) -> list[int]:
    """Divide so many episodes by the shares, by largest remainder; UsageError for a part that would be empty."""
    exact = [Fraction(repr(float(share))) * episodes for share in shares.values()]
    counts = [int(part) for part in exact]
    rest = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for part in rest[: episodes - sum(counts)]:
        counts[part] += 1
    for (name, share), count in zip(shares.items(), counts, strict=True):
        if not count:
            raise UsageError(
                f"the part {name} would be empty: {share:g} of {episodes} episode{'' if episodes == 1 else 's'}",
                hint="give it a larger fraction" if episodes >= len(counts) else "split into fewer parts",
            )
    return counts


def assign(groups: Groups, shares: Shares, *, seed: int, in_order: bool = False, returns: Array | None = None) -> Array:
    """Return the part of each episode, int64 `[episodes]`, as a position in `shares`.

    Groups are taken in a random order (by `seed`), each by the part that is furthest behind its share, so that the
    parts have their numbers of episodes as nearly as the groups allow. `in_order` fills one part after the other
    instead. With `returns`, float64 `[episodes]`, groups of similar mean return are spread over all parts.
    UsageError where there are fewer groups than parts.
    """
    sizes = groups.sizes
    wanted = targets(shares, int(sizes.sum()))
    if len(sizes) < len(wanted):
        raise UsageError(
            f"{len(sizes)} group{'' if len(sizes) == 1 else 's'} by {groups.what} cannot fill {len(wanted)} parts",
            hint="split into fewer parts, or by something else",
        )
    draws = np.random.Philox(key=seed).random_raw(len(sizes))  # raw draws are the same in every version of NumPy
    if in_order:
        order = np.arange(len(sizes))
    elif returns is None:
        order = np.argsort(draws, kind="stable")
    else:
        means = np.bincount(groups.of_episode, weights=returns) / sizes
        ranks = np.argsort(np.lexsort((draws, means)))
        stratum = ranks // round(1 / min(shares.values()))
        order = np.lexsort((draws, stratum))
    part_of_group = _filled(sizes[order], wanted, in_order=in_order)
    found = np.empty(len(sizes), np.int64)
    found[order] = part_of_group
    return np.asarray(found[groups.of_episode])


def _filled(sizes: Array, wanted: Sequence[int], *, in_order: bool) -> list[int]:
    """Choose a part for each group in turn; no part stays empty."""
    total, seen = sum(wanted), 0
    have = [0] * len(wanted)
    found: list[int] = []
    for place, size in enumerate(sizes.tolist()):
        seen += size
        empty = [part for part, count in enumerate(have) if not count]
        if len(empty) >= len(sizes) - place:
            part = empty[0]
        elif in_order:
            part = next(part for part, count in enumerate(have) if count < wanted[part])
        else:
            below = [part for part, count in enumerate(have) if count < wanted[part]]
            part = max(below, key=lambda part: (wanted[part] * seen / total - have[part], wanted[part], -part))
        have[part] += size
        found.append(part)
    return found
