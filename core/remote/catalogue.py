"""Finds the dataset that a user names in a catalogue, and keeps catalogues on disk."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..errors import DatasetNotFoundError, FormatError, UsageError
from ..format import fs
from ..format.converter import Catalogue
from ..format.documents import decode, dump_json, load_json
from ..format.locate import Resolution

_VERSION = re.compile(r"-v(\d+)$")
_SHOWN = 8


def _has_version(name: str) -> bool:
    """Return whether a name ends in a version, like `-v2`."""
    return _VERSION.search(name) is not None


def is_complete(name: str, *, namespaced: bool = True) -> bool:
    """Return whether a name has a version and, if the ids have namespaces, a namespace; it is then taken literally."""
    return ("/" in name or not namespaced) and _has_version(name)


def _bare_name(name: str) -> str:
    """Return a name without its version."""
    return _VERSION.sub("", name)


def resolve(asked: str, ids: Sequence[str], source: str) -> Resolution:
    """Find the one dataset that `asked` means among the ids of a source's catalogue.

    The first of these that exists: the same id; the latest version, if `asked` has none; the dataset with the same
    words, such as `D4RL/door/human-v2` for `door-human-v1`, in the requested version or else the latest. UsageError if
    several datasets fit, DatasetNotFoundError with the nearest names if none does.
    """
    if asked in ids:
        return Resolution(asked, asked, "exact")
    if not _has_version(asked):
        versions = [name for name in ids if _bare_name(name) == asked]
        if versions:
            return Resolution(asked, _latest(versions), "latest")
    if is_complete(asked):
        raise not_found(asked, ids, source)
    families = _same_words(asked, ids)
    if not families:
        raise not_found(asked, ids, source)
    if len(families) > 1:
        raise UsageError(
            f"{asked!r} may mean any of {len(families)} datasets: {_listed(families)}", hint="name one of them in full"
        )
    versions = [name for name in ids if _bare_name(name) == families[0]]
    same = [name for name in versions if _version(name) == _version(asked) and _has_version(asked)]
    return Resolution(asked, same[0] if same else _latest(versions), "words")


def _nearest(asked: str, ids: Sequence[str]) -> list[str]:
    """Return names to suggest instead of `asked`: its other versions, or else similar names."""
    versions = [name for name in ids if _bare_name(name) == _bare_name(asked)]
    if versions:
        return sorted(versions, key=_version)
    families = sorted({_bare_name(name) for name in ids})
    near = difflib.get_close_matches(_bare_name(asked), families, n=3, cutoff=0.5)
    ends = {name.rpartition("/")[2]: name for name in families}
    near += [ends[name] for name in difflib.get_close_matches(_bare_name(asked), ends, n=3, cutoff=0.6)]
    return [_latest([name for name in ids if _bare_name(name) == family]) for family in dict.fromkeys(near)]


def not_found(asked: str, ids: Sequence[str], source: str) -> DatasetNotFoundError:
    """Return the error for a dataset that does not exist, with the nearest names."""
    near = _nearest(asked, ids)
    message = f"{source} has no dataset {asked!r}, among {len(ids):,}"
    hint = f"nearest: {_listed(near)}" if near else f"see what there is: rbtool list --remote {source}"
    return DatasetNotFoundError(message, hint=hint)


def _same_words(asked: str, ids: Iterable[str]) -> list[str]:
    """Return the families (names without version) whose words fit `asked` best; several if they fit equally well.

    Best are the same words without the first part of the namespace, which older names lack; then the same words with
    it; last, names with all words of `asked` and further ones.
    """
    wanted = Counter(_words(_bare_name(asked)))
    ranked: dict[int, set[str]] = {}
    for family in {_bare_name(name) for name in ids}:
        everything, below = Counter(_words(family)), Counter(_words(family.partition("/")[2]))
        if wanted in (below, everything):
            ranked.setdefault(0 if wanted == below else 1, set()).add(family)
        elif wanted and wanted <= everything:
            ranked.setdefault(2, set()).add(family)
    return sorted(ranked[min(ranked)]) if ranked else []


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^0-9a-z]+", name.lower()) if word]


def _version(name: str) -> int:
    found = _VERSION.search(name)
    return int(found[1]) if found else -1


def _latest(names: Iterable[str]) -> str:
    return max(names, key=_version)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class CatalogueFile:
    """The catalogue of a remote as it was last fetched, in `<root>/<source>/.catalogue/`."""

    def __init__(self, root: Path, source: str, key: str) -> None:
        name = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:16]
        self._root = root
        self.path = root / source / ".catalogue" / f"{name}.json"

    def load(self) -> Catalogue | None:
        """Read the catalogue; None if the file is missing or unreadable."""
        try:
            return decode(Catalogue, load_json(self.path), str(self.path))
        except (OSError, FormatError):
            return None

    def save(self, catalogue: Catalogue) -> None:
        """Replace the older catalogue."""
        text = dump_json({"format_version": 1, **asdict(catalogue)}, indent=1) + "\n"
        fs.replace_file_below(self._root, self.path, text.encode())


def catalogue_age(catalogue: Catalogue) -> float:
    """Return how many seconds ago a catalogue was fetched; never negative."""
    try:
        then = datetime.datetime.fromisoformat(catalogue.fetched)
    except ValueError:
        return float("inf")
    return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())
