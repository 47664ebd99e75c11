"""Remembers what was computed, by the digest of what it was computed from."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from ..dataset import dump_json, fs, load_json
from ..errors import RbtoolError
from .collect import FieldStats

__all__ = ["StatsStore"]

_VERSION = 2
_DIGEST = re.compile(r"[a-z0-9-]+:[0-9a-f]{16,}")


class StatsStore:
    """Keeps the statistics of datasets in `<storage root>/.stats`, one file a content digest.

    What cannot be read or was written in another way counts as not there, and a folder that cannot be written to
    keeps nothing: it only costs a pass over the data.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / ".stats"

    def load(self, digest: str, fractions: Sequence[float]) -> tuple[FieldStats, ...] | None:
        """Return what is remembered of these contents, with quantiles at these fractions; None if there is nothing."""
        try:
            document = load_json(self._path(digest))
            if (document["version"], document["fractions"]) != (_VERSION, list(fractions)):
                return None
            return tuple(_field_stats(entry) for entry in document["fields"])
        except (OSError, ValueError, KeyError, TypeError, RbtoolError):
            return None

    def save(self, digest: str, fractions: Sequence[float], fields: Sequence[FieldStats]) -> None:
        """Remember the statistics of all leaves of these contents."""
        entries = [dataclasses.asdict(field) for field in fields]
        document = {"version": _VERSION, "content_digest": digest, "fractions": list(fractions), "fields": entries}
        with contextlib.suppress(OSError, RbtoolError):
            fs.make_folder(self._folder)
            fs.replace_file(self._path(digest), dump_json(document).encode())

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self._folder / f"{digest.replace(':', '-')}.json"


_TYPES = get_type_hints(FieldStats)


def _field_stats(entry: dict[str, Any]) -> FieldStats:
    """Make the entry of a document what it was; ValueError, KeyError or TypeError for what it cannot have been."""
    found = {name: _tuples(entry[name]) for name in _TYPES}
    width = len(found["count"])
    for name in ("nan", "infinite", "mean", "std", "min", "max"):
        if len(found[name]) != width:
            raise ValueError(f"{name} has {len(found[name])} numbers, count has {width}")
    return FieldStats(**found)


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return float(value) if value in ("inf", "-inf", "nan") else value
