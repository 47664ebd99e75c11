"""What was learnt from a remote and need not be asked again: which id words mean, and the catalogue."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import FormatError, UsageError
from ..format import Catalogue, decode, dump_json, fs, load_json, safe_id
from .names import Resolution

__all__ = ["CatalogueFile", "KnownNames", "catalogue_age"]


class _Known(NamedTuple):
    id: str
    how: Literal["exact", "latest", "words"]


class KnownNames:
    """What words were found to mean, in `<root>/<source>/.names.json`. A damaged file is taken as empty."""

    def __init__(self, root: Path, source: str) -> None:
        self._root = root
        self.path = root / source / ".names.json"

    def get(self, asked: str) -> Resolution | None:
        """Return what `asked` was found to mean, if it was."""
        try:
            found = decode(_Known, self._read().get(asked), str(self.path))
            return Resolution(asked, safe_id(found.id), found.how)
        except (FormatError, UsageError):
            return None

    def put(self, found: Resolution) -> None:
        """Remember what words mean."""
        if self.get(found.asked) != found:
            names = dict(sorted({**self._read(), found.asked: {"id": found.id, "how": found.how}}.items()))
            fs.replace_file_below(self._root, self.path, (dump_json(names, indent=1) + "\n").encode())

    def _read(self) -> dict[str, Any]:
        try:
            found = load_json(self.path)
        except (OSError, FormatError):
            return {}
        return found if isinstance(found, dict) else {}


class CatalogueFile:
    """The catalogue of a remote as it was last fetched, in `<root>/<source>/.catalogue/`."""

    def __init__(self, root: Path, source: str, key: str) -> None:
        name = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:16]
        self._root = root
        self.path = root / source / ".catalogue" / f"{name}.json"

    def load(self) -> Catalogue | None:
        """Read it; None where there is none that can be read."""
        try:
            return decode(Catalogue, load_json(self.path), str(self.path))
        except (OSError, FormatError):
            return None

    def save(self, catalogue: Catalogue) -> None:
        """Put it in place of the older one."""
        text = dump_json({"format_version": 1, **asdict(catalogue)}, indent=1) + "\n"
        fs.replace_file_below(self._root, self.path, text.encode())


def catalogue_age(catalogue: Catalogue) -> float:
    """Return how many seconds ago a catalogue was fetched; never negative."""
    try:
        then = datetime.datetime.fromisoformat(catalogue.fetched)
    except ValueError:
        return float("inf")
    return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())
