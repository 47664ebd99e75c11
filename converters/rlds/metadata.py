"""Features of episodes, such as those in `episode_metadata`: the texts of an episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import CorruptDataError, FormatError
from ...core.format.documents import dump_json
from ...core.format.manifest import Dropped
from .example import Example
from .features import Leaf
from .values import Strings

METADATA, _INVALID = "episode_metadata", "invalid"
NUMBER, SEED = "episode", "seed"
OWN = frozenset({f"{METADATA}/{NUMBER}", f"{METADATA}/{SEED}"})
"""What an export of rbtool has of each episode next to its texts."""
_LONGEST = 64 << 10
_SHOWN_VALUES = 1 << 13


@dataclass(slots=True)
class MetadataTexts:
    """Gives each feature of episodes its name, without `episode_metadata`, and its value as text: JSON for numbers.

    `dropped` cannot be kept, and `too_long` are those that some episode had too much of.
    """

    names: dict[str, Leaf] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    too_long: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> MetadataTexts:
        """Name these features."""
        made = cls()
        for leaf in leaves:
            why = leaf.why or _why_not(leaf)
            if why:
                made.dropped.append(Dropped(leaf.name, why))
                continue
            short = leaf.path[1:] if leaf.path[0] == METADATA and len(leaf.path) > 1 else leaf.path
            name = ".".join(short)
            while name in made.names:
                name += "_"
            made.names[name] = leaf
        return made

    def take(self, example: Example, what: str) -> bool:
        """Look at the features of an episode; return whether it is marked as invalid."""
        found = self.read(example, what)
        return any(
            found.get(name) == "true"
            for name, leaf in self.names.items()
            if leaf.path[-1] == _INVALID and leaf.dtype == "bool"
        )

    def read(self, example: Example, what: str) -> dict[str, str]:
        """Return the texts of an episode by name; `what` names it. CorruptDataError for a value of another kind."""
        texts = {}
        for name, leaf in self.names.items():
            try:
                text = _text(example, leaf)
            except CorruptDataError as error:
                raise CorruptDataError(f"{what}: {leaf.name!r}: {error.message}") from error
            if text is None:
                continue
            if len(text) > _LONGEST:
                self.too_long.setdefault(leaf.name, f"it has more than {_LONGEST:,} characters in {what}")
            else:
                texts[name] = text
        return texts


def stored_seed(example: Example) -> int | None:
    """Return the seed of an episode of an export of rbtool; None where it has none."""
    found = example.get(f"{METADATA}/{SEED}")
    text = found.read(0, 1)[0] if isinstance(found, Strings) and len(found) == 1 else b""
    return int(text) if text.isdigit() and len(text) <= 20 and int(text) < 1 << 64 else None


def _why_not(leaf: Leaf) -> str:
    if leaf.kind == "image":
        return "it is an image of an episode"
    if leaf.encoding != "none":
        return "it is an encoded tensor of an episode"
    if leaf.size > _SHOWN_VALUES:
        return f"it has {leaf.size:,} values an episode"
    return ""


def _text(example: Example, leaf: Leaf) -> str | None:
    """Return the value as text; None where the episode has none."""
    values = example.get(leaf.name)
    if values is None:
        return None
    if isinstance(values, Strings) != (leaf.kind == "text"):
        raise CorruptDataError("it is no text" if leaf.kind == "text" else "it is no number")
    if isinstance(values, Strings):
        if len(values) != 1:
            raise CorruptDataError(f"it has {len(values):,} texts, expected one")
        try:
            return values.read(0, 1)[0].decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"it is not UTF-8 text: {error.reason}") from error
    if len(values) > _SHOWN_VALUES:
        return " " * (_LONGEST + 1)
    size = math.prod(leaf.shape)
    if not leaf.nested and len(values) != size:
        raise CorruptDataError(f"it has {len(values):,} values, expected {size:,}")
    array = values.read(0, len(values), leaf.numpy)
    if leaf.nested and leaf.size > 0 and len(array) % leaf.size:
        raise FormatError(f"{leaf.name!r} has {len(array):,} values, which are no rows of {leaf.size:,}")
    shape = (-1, *leaf.shape) if leaf.nested else leaf.shape
    value = array.reshape(shape).tolist() if array.size else []
    return dump_json(value)
