"""Entries of the infos that have another form in some episodes: each form is a leaf, with a name that states it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ..ted.schema import Key, key_name, length_key
from .infos import RecordedInfo

MOST_FORMS = 16
"""Leaves of one entry: every new form stores the recording again."""
_FORM = r"text|number|\d+(?:x\d+)*"
_RENAMED = re.compile(rf"(?P<entry>.+) \((?:shape )?(?P<form>{_FORM})\)")


def form_name(shape: tuple[int, ...], text: bool) -> str:
    """Name the form of an entry: `text`, `number`, or the shape, such as `2x3`."""
    return "text" if text else "x".join(map(str, shape)) or "number"


def form_of(column: RecordedInfo) -> str:
    """Name the form of a column."""
    return form_name(column.values.shape[1:], column.lengths is not None)


def named_by_form(key: Key, form: str) -> Key:
    """The key of a leaf for one form of an entry that has several."""
    return (*key[:-1], f"{key[-1]}_{form}")


def forms_there(key: Key, names: Iterable[Key]) -> int:
    """Count the leaves of an entry that has several forms."""
    pattern = re.compile(rf"{re.escape(key[-1])}_(?:{_FORM})")
    return sum(name[:-1] == key[:-1] and pattern.fullmatch(name[-1]) is not None for name in names)


def entries_of_many_forms(known: Mapping[Key, str], infos: Mapping[Key, RecordedInfo]) -> set[Key]:
    """Find the entries of an episode, and of those that are known, whose leaves need names by their forms.

    These have another form than the known one, are a value here and a dict there, or are a text and have a name whose
    lengths have that of another entry. `known` maps the entries of earlier episodes to their forms. What is found does
    not depend on the order of the episodes.
    """
    found = {key: form_of(column) for key, column in infos.items()}
    if all(known.get(key) == form for key, form in found.items()):
        return set()
    several = {key for key, form in found.items() if known.get(key, form) != form}
    every = {**known, **found}
    dicts = {key[:depth] for key in every for depth in range(1, len(key))}
    several |= every.keys() & dicts
    texts = {key for forms in (known, found) for key, form in forms.items() if form == "text"}
    return several | {key for key in texts if length_key(key) in dicts or length_key(key) in every}


def renaming(key: Key, form: str) -> tuple[str, str]:
    """Return how the manifest states, under `renamed_keys`, where one form of an entry is."""
    shown = form if form in {"text", "number"} else f"shape {form}"
    return f"{key_name(key)} ({shown})", key_name(named_by_form(key, form))


def entries_renamed(renamed: Mapping[str, str], names: Iterable[Key]) -> Iterator[Key]:
    """Yield the entries that have leaves by form, of a recording with leaves of these names: undoes `renaming`."""
    by_name = {key_name(name): name for name in names}
    for stated, name in renamed.items():
        found, leaf = _RENAMED.fullmatch(stated), by_name.get(name)
        if found is not None and leaf is not None and leaf[-1].endswith(f"_{found['form']}"):
            entry = (*leaf[:-1], leaf[-1].removesuffix(f"_{found['form']}"))
            if key_name(entry) == found["entry"]:
                yield entry
