"""A cache of statistics on disk, by the digest of the data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import RbtoolError
from ..format import Manifest, digest_bytes, dump_json, fs, load_json, plain
from .collect import FieldStats

__all__ = ["StatsStore"]

_VERSION = 4


class StatsStore:
    """Keeps the statistics of datasets in `<storage root>/.stats`, one file for each content and way to read it.

    An unreadable file, or one of another version, counts as missing; a read-only folder keeps nothing. Both only cost
    another pass over the data.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / ".stats"

    def load(self, manifest: Manifest, fractions: Sequence[float]) -> tuple[FieldStats, ...] | None:
        """Return the stored statistics of these contents, with quantiles at these fractions; None if there are none."""
        try:
            document = load_json(self._path(manifest))
            digest = document.pop("digest")
            if digest != digest_bytes(dump_json(document).encode()):
                return None
            if (document["version"], document["of"], document["fractions"]) != (
                _VERSION,
                _described(manifest),
                list(fractions),
            ):
                return None
            return tuple(_field_stats(entry) for entry in document["fields"])
        except (OSError, ValueError, KeyError, TypeError, RbtoolError):
            return None

    def save(self, manifest: Manifest, fractions: Sequence[float], fields: Sequence[FieldStats]) -> None:
        """Store the statistics of all leaves of these contents."""
        entries = [dataclasses.asdict(field) for field in fields]
        document = plain({
            "version": _VERSION, "of": _described(manifest), "fractions": list(fractions), "fields": entries,
        })  # fmt: skip
        document["digest"] = digest_bytes(dump_json(document).encode())
        with contextlib.suppress(OSError, RbtoolError):
            fs.replace_file_below(self._root, self._path(manifest), dump_json(document).encode())

    def _path(self, manifest: Manifest) -> Path:
        name = digest_bytes(dump_json(_described(manifest)).encode())
        return self._folder / f"{name.replace(':', '-')}.json"


def _described(manifest: Manifest) -> dict[str, Any]:
    """The input of the statistics: the bytes, and how the manifest interprets them."""
    leaves = [[list(field.key), field.dtype, list(field.shape), field.role] for field in manifest.fields]
    return {
        "content_digest": manifest.content_digest,
        "layout": manifest.layout,
        "steps": manifest.steps,
        "episodes": manifest.episodes,
        "fields": leaves,
    }


_TYPES = get_type_hints(FieldStats)
_FLOATS = ("mean", "std", "min", "max", "quantiles")


def _field_stats(entry: dict[str, Any]) -> FieldStats:
    """Decode an entry of a document; ValueError, KeyError or TypeError for an invalid one."""
    found = {name: _tuples(entry[name]) for name in _TYPES}
    for name in _FLOATS:
        found[name] = _floats(found[name])
    width = len(found["count"])
    for name in ("nan", "infinite", "mean", "std", "min", "max"):
        if len(found[name]) != width:
            raise ValueError(f"{name} has {len(found[name])} numbers, count has {width}")
    return FieldStats(**found)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _floats(value: Any) -> Any:
    """Decode numbers that are not finite, which strict JSON has as strings; field names may be such strings too."""
    if isinstance(value, tuple):
        return tuple(_floats(item) for item in value)
    return float(value) if isinstance(value, str) else value
