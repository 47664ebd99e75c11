"""The table of verbs, and the rewriting of arguments that allows `rbtool --json VERB` and `rbtool help VERB`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb, defined in the module of its name.

    Attributes:
        group: the purpose of a group of verbs, such as `cache`; "" for a single verb.
        short: a short name that other tools use for it. For a group, it stands for the verb of that name in the group:
            `rm` for `cache rm`.
    """

    group: str = ""
    short: str = ""


SECTIONS: dict[str, dict[str, Verb]] = {
    "Get": {
        "list": Verb(short="ls"),
        "download": Verb(),
        "convert": Verb(),
        "record": Verb(),
        "demo": Verb(),
    },
    "Make": {
        "preprocess": Verb(),
        "clean": Verb(),
        "merge": Verb(),
        "split": Verb(),
        "mix": Verb(),
        "checkpoint": Verb(group="Save, load and verify checkpoints of datasets."),
    },
    "Look": {
        "inspect": Verb(short="show"),
        "stats": Verb(),
        "plot": Verb(),
        "frames": Verb(),
        "report": Verb(),
        "sample": Verb(),
    },
    "Check": {
        "check": Verb(),
        "score": Verb(),
        "bench": Verb(),
        "diff": Verb(),
        "repair": Verb(),
        "cache": Verb(group="See, verify and remove what is stored.", short="rm"),
        "env": Verb(),
        "schema": Verb(),
    },
    "Train and share": {
        "export": Verb(),
        "upload": Verb(),
        "migrate": Verb(),
    },
}
"""The verbs, in the sections and the order of the help page. A verb is registered by its line here alone."""

VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}
GROUPS = frozenset(name for name, verb in VERBS.items() if verb.group)
SHORT_NAMES = {
    verb.short: (name, verb.short) if verb.group else (name,)
    for name, verb in sorted(VERBS.items(), key=lambda item: item[1].short)
    if verb.short
}

_SWITCHES = frozenset(
    {"--json", "-q", "--quiet", "-v", "--verbose", "--debug", "--no-color", "--no-progress", "--offline"}
)
_VALUED = frozenset({"--color", "--log-file", "--root"})


def in_order(words: Sequence[str], groups: Collection[str]) -> list[str]:
    """Return the words with common options moved behind the verb; verbs in `groups` have a second verb.

    Users of git or docker type `rbtool --json inspect DATASET` and `rbtool help inspect`, users of Minari
    `rbtool list remote minari`.
    """
    options, rest = _split(words)
    if not rest:
        return list(words)
    if rest[0] == "help":
        return [*_verb(rest[1:2]), *rest[2:], "--help"]
    path, rest = _verb(rest[:1]), rest[1:]
    if path == ["list"] and next((word for word in rest if not word.startswith("-")), "") == "remote":
        rest[rest.index("remote")] = "--remote"
    if len(path) == 1 and path[0] in groups and rest and not rest[0].startswith("-"):
        path, rest = [*path, rest[0]], rest[1:]
    return [*path, *options, *rest]


def _verb(name: Sequence[str]) -> list[str]:
    return [word for short in name for word in SHORT_NAMES.get(short, (short,))]


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the common options at the start, with their values."""
    start = 0
    while start < len(words):
        name, equals, _ = words[start].partition("=")
        if words[start] not in _SWITCHES and name not in _VALUED:
            break
        start += 2 if name in _VALUED and not equals else 1
    return list(words[:start]), list(words[start:])
