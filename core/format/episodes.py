"""The episode table: one row an episode, in storage order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..ted import BoundaryCounts, EndReason, Field, Final
from . import fs
from .decoding import decode
from .digest import FileRecord
from .leaf_writer import TreeWriter, record_file
from .manifest import HIDDEN
from .strict_json import dump_json, parse_json
from .tree import leaf_path, parse_node

__all__ = [
    "COLUMNS",
    "EPISODES",
    "EPISODES_TEXT",
    "FINAL",
    "EpisodeRow",
    "EpisodeTable",
    "column_types",
    "episode_text_bytes",
    "parse_episode_text",
    "write_episode_text",
]

EPISODES = f"{HIDDEN}/episodes"
EPISODES_TEXT = f"{HIDDEN}/episodes_text.jsonl"

COLUMNS: dict[str, str] = {
    "episode": "int64", "start": "int64", "length": "int64", "return": "float64",
    "terminated": "bool", "truncated": "bool", "end_reason": "uint8",
    "explicit_next": "bool", "explicit_start": "int64", "seed": "uint64", "has_seed": "bool",
}  # fmt: skip
"""Columns of the table and their element types."""

FINAL = "final"
"""The column that is stored only where the source of some episode has no observation after the last step."""
_LATER = {FINAL: "uint8"}


def column_types(table: EpisodeTable) -> dict[str, str]:
    """Columns that a table is stored with, and their element types."""
    return COLUMNS | (_LATER if table.final.any() else {})


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode: the source's number, its length in steps, the sum of its rewards, how it ends."""

    episode: int
    length: int
    total_reward: float
    terminated: bool
    truncated: bool
    end_reason: EndReason
    seed: int | None = None
    explicit_next: bool = False
    final: Final = Final.OBSERVED


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTable:
    """The columns as arrays `[episodes]`; `start` and `length` count rows of the storage.

    `final` holds numbers of `Final`, what is known of the observation after the last step.
    """

    episode: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]
    length: np.ndarray[Any, Any]
    total_reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    end_reason: np.ndarray[Any, Any]
    explicit_next: np.ndarray[Any, Any]
    explicit_start: np.ndarray[Any, Any]
    seed: np.ndarray[Any, Any]
    has_seed: np.ndarray[Any, Any]
    final: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.episode)

    @classmethod
    def from_rows(cls, rows: Sequence[EpisodeRow]) -> EpisodeTable:
        """Build the table of episodes stored one after the other from row 0."""
        lengths = np.array([row.length for row in rows], np.int64)
        return cls.from_columns(
            {
                "episode": [row.episode for row in rows],
                "start": np.cumsum(lengths) - lengths,
                "length": lengths,
                "return": [row.total_reward for row in rows],
                "terminated": [row.terminated for row in rows],
                "truncated": [row.truncated for row in rows],
                "end_reason": [int(row.end_reason) for row in rows],
                "explicit_next": [row.explicit_next for row in rows],
                "explicit_start": [-1] * len(rows),
                "seed": [row.seed or 0 for row in rows],
                "has_seed": [row.seed is not None for row in rows],
                FINAL: [int(row.final) for row in rows],
            }
        )

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> EpisodeTable:
        """Build the table from its columns under their names on disk; without `final`, all ends are observed."""
        arrays = {name: np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()}
        arrays[FINAL] = np.asarray(columns.get(FINAL, np.zeros(len(arrays["episode"]))), _LATER[FINAL])
        arrays["total_reward"] = arrays.pop("return")
        return cls(**arrays)

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns under their names on disk; `final` where not all ends are observed."""
        arrays = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: arrays["total_reward" if name == "return" else name] for name in column_types(self)}

    @property
    def steps(self) -> int:
        """Rows of all episodes together."""
        return int(self.length.sum())

    def counts(self) -> BoundaryCounts:
        """The boundary report."""
        by_reason = np.bincount(self.end_reason, minlength=len(EndReason))
        reasons = {reason.name.lower(): int(by_reason[reason]) for reason in EndReason}
        finals = np.bincount(self.final, minlength=len(Final))
        return BoundaryCounts(
            **reasons,
            explicit_next=int(self.explicit_next.sum()),
            final_repeated=int(finals[Final.REPEATED]),
            final_dropped=int(finals[Final.DROPPED]),
        )

    def index_of_step(self, steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Row numbers in this table of the episodes that hold these steps."""
        return np.searchsorted(self.start, steps, side="right") - 1

    def save(self, root: Path) -> list[FileRecord]:
        """Write the table into the dataset folder `root`."""
        writer = TreeWriter(root / EPISODES, column_fields(self), prefix=f"{EPISODES}/")
        try:
            writer.append({(name,): array for name, array in self.columns().items()})
            return writer.finish((len(self),))
        finally:
            writer.close()

    @classmethod
    def load(cls, read: Callable[[str], bytes], origin: str) -> EpisodeTable:
        """Read the table of the dataset folder `origin`; `read` returns the bytes of a file by its path there."""
        leaves = parse_node(read(f"{EPISODES}/meta.json"), f"{origin}/{EPISODES}/meta.json")
        columns = {}
        for name, dtype in (COLUMNS | _LATER).items():
            leaf = leaves.get(name)
            if leaf is None and name in _LATER:
                continue
            if leaf is None or leaf.dtype != dtype or len(leaf.shape) != 1:
                raise FormatError(f"{origin}/{EPISODES} has no column {name!r} of {dtype}")
            path = f"{EPISODES}/{leaf_path((name,))}"
            data = read(path) if leaf.shape[0] else b""
            if len(data) != leaf.shape[0] * np.dtype(dtype).itemsize:
                raise CorruptDataError(f"{origin}/{path} has {len(data):,} bytes, {leaf.shape[0]:,} rows are expected")
            columns[name] = np.frombuffer(data, dtype).copy()
        if FINAL in columns and columns[FINAL].size and columns[FINAL].max() >= Final.MISSING:
            raise CorruptDataError(f"{origin}/{EPISODES} has the number {columns[FINAL].max()} in {FINAL!r}")
        return cls.from_columns(columns)


def column_fields(table: EpisodeTable) -> list[Field]:
    """The columns of a table as fields."""
    return [Field((name,), dtype, (), "id") for name, dtype in column_types(table).items()]


def episode_text_bytes(rows: Iterable[Mapping[str, str]]) -> bytes:
    """Write the text that belongs to episodes, one JSON object a line in table order; no text, no bytes."""
    lines = [dump_json(dict(row), sort_keys=True) for row in rows]
    return ("\n".join(lines) + "\n").encode() if any(line != "{}" for line in lines) else b""


def parse_episode_text(data: bytes, origin: str) -> list[dict[str, str]]:
    """Undo `episode_text_bytes`; `origin` names the bytes in errors."""
    try:
        # Not splitlines(): it takes U+2028 and its like inside a text for the end of a line.
        lines = [line for line in data.decode().split("\n") if line]
        return [decode(dict[str, str], parse_json(line, origin), origin) for line in lines]
    except ValueError as error:  # a FormatError is one
        raise CorruptDataError(f"{origin} is not JSON lines: {error}") from error


def write_episode_text(root: Path, rows: Iterable[Mapping[str, str]]) -> list[FileRecord]:
    """Write the text that belongs to episodes into the dataset folder `root`; no text, no file."""
    data = episode_text_bytes(rows)
    if not data:
        return []
    fs.write_file(root / EPISODES_TEXT, data)
    return [record_file(root / EPISODES_TEXT, EPISODES_TEXT)]
