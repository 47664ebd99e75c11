"""Tells, bit for bit, where two datasets or checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..format import FINAL, StepReader
from ..progress import Progress, Silent
from ..ted import Field, Key, key_name
from .rows import CHUNK_BYTES, differing_rows

__all__ = ["Difference", "compare_steps"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs: a leaf, a column of the episode table (`episodes.…`), or something about the whole.

    `first_step` is the first row that differs, `episode` the source's number of its episode, `count` how many rows
    (or episodes) differ.
    """

    key: str
    what: str
    count: int = 0
    first_step: int | None = None
    episode: int | None = None


def compare_steps(one: StepReader, other: StepReader, progress: Progress | None = None) -> list[Difference]:
    """Compare every leaf, the episode table and the text of episodes; memory stays bounded."""
    found = [*_fields(one, other), *_episodes(one, other), *_text(one, other)]
    if one.manifest.steps == other.manifest.steps:
        found = [*_rows(one, other, progress or Silent()), *found]
    return found


def _fields(one: StepReader, other: StepReader) -> Iterator[Difference]:
    if one.manifest.steps != other.manifest.steps:
        yield Difference("steps", f"{one.manifest.steps:,} against {other.manifest.steps:,}")
    here, there = _by_key(one), _by_key(other)
    for key in {**here, **there}:
        if _looks(here.get(key)) != _looks(there.get(key)):
            yield Difference(key_name(key), f"{_looks(here.get(key))} against {_looks(there.get(key))}")


def _by_key(reader: StepReader) -> dict[Key, Field]:
    return {leaf.key: leaf for leaf in reader.fields}


def _looks(leaf: Field | None) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype} {list(leaf.shape)}"


def _episodes(one: StepReader, other: StepReader) -> Iterator[Difference]:
    here, there = one.episodes, other.episodes
    if len(here) != len(there):
        yield Difference("episodes", f"{len(here):,} against {len(there):,}")
        return
    columns = there.columns() | {FINAL: there.final}
    for name, column in (here.columns() | {FINAL: here.final}).items():
        rows = differing_rows(column, columns[name])
        if len(rows):
            row = int(rows[0])
            what = f"{column[row]} against {columns[name][row]}"
            yield Difference(f"episodes.{name}", what, len(rows), int(here.start[row]), int(here.episode[row]))


def _text(one: StepReader, other: StepReader) -> Iterator[Difference]:
    here, there = (reader.episode_text or [{}] * len(reader.episodes) for reader in (one, other))
    rows = [row for row, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
    if rows:
        first, number = int(one.episodes.start[rows[0]]), int(one.episodes.episode[rows[0]])
        yield Difference("episodes_text", "text differs", len(rows), first, number)
    elif len(here) != len(there):
        yield Difference("episodes_text", f"text of {len(here):,} episodes against {len(there):,}")


def _rows(one: StepReader, other: StepReader, progress: Progress) -> Iterator[Difference]:
    there = _by_key(other)
    alike = [leaf for leaf in one.fields if _looks(leaf) == _looks(there.get(leaf.key))]
    counts, firsts = dict.fromkeys(alike, 0), dict.fromkeys(alike, -1)
    progress.start("comparing", one.manifest.steps, "steps")
    for start, stop in one.chunks(CHUNK_BYTES):
        for leaf in alike:
            rows = differing_rows(one.read(leaf.key, start, stop), other.read(leaf.key, start, stop))
            if len(rows):
                firsts[leaf] = start + int(rows[0]) if not counts[leaf] else firsts[leaf]
                counts[leaf] += len(rows)
        progress.advance(stop - start)
    progress.done()
    for leaf in alike:
        if counts[leaf]:
            first = firsts[leaf]
            episode = int(one.episodes.episode[one.episodes.index_of_step(np.array([first]))[0]])
            yield Difference(leaf.name, "rows differ", counts[leaf], first, episode)
