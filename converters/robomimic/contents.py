"""What a robomimic file holds apart from rows: attributes, models of the simulator, and splits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...core.errors import FormatError, UsageError, did_you_mean
from ...core.format.documents import dump_json, parse_json
from ...core.format.manifest import Dropped
from ..files.columns import column_name
from ..files.hdf5 import GroupFile, StoredGroup, plain_value, text_of_name

DATA = b"data"
MASK = b"mask"
DEMO = re.compile(rb"demo_(0|[1-9]\d{0,17})")
_ENVIRONMENT = "env_args"
_MODEL = "model_file"
_SHORT = 1 << 10
_FEW_NUMBERS = 16
_MOST_DOCUMENTS = 64 << 20
_NAME = re.compile(r"[\w-]{1,100}", re.ASCII)
_SHOWN = 10


class FileAttributes:
    """Attributes of the file and of `data`: `documents` has them, and the environment as the file has it.

    `total` is the number of steps that the file claims, None where it claims none.
    """

    def __init__(self, file: GroupFile) -> None:
        self.documents: dict[str, bytes] = {}
        self.dropped: list[Dropped] = []
        document: dict[str, Any] = {}
        for name in (b"/", DATA):
            where = name.decode()
            found = self._values(file.group(name, "the file" if where == "/" else repr(where)), where)
            if found:
                document["attributes" if where == "/" else where] = found
        inside = document.get(DATA.decode(), {})
        self.total = _count(inside.get("total"))
        environment = inside.pop(_ENVIRONMENT, None)
        if environment is not None:
            self.documents[f"{_ENVIRONMENT}.json"] = str(environment).encode()
            document[_ENVIRONMENT] = _parsed(environment)
        if document:
            self.documents["metadata.json"] = (dump_json(document, indent=1) + "\n").encode()

    def _values(self, group: StoredGroup, where: str) -> dict[str, Any]:
        found = {}
        for name in group.attribute_names():
            value = group.attribute(name)
            if isinstance(value, np.ndarray) and value.size > _FEW_NUMBERS:
                self.dropped.append(Dropped(f"{where}@{name}", "it is an attribute with many values"))
            else:
                found[name] = plain_value(value)
        return found


class DemoAttributes:
    """Attributes of demonstrations: short ones are text of the episode, long ones documents that equal ones share."""

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.dropped: dict[str, str] = {}
        self.seed: int | None = None
        self._by_content: dict[tuple[str, bytes], str] = {}
        self._taken = 0

    def take(self, demo: str, group: StoredGroup) -> tuple[dict[str, str], int | None, int | None]:
        """Return the text of a demonstration, its seed, and how many steps `num_samples` claims."""
        text: dict[str, str] = {}
        seed = claimed = None
        for name in group.attribute_names():
            value = group.attribute(name)
            if isinstance(value, np.ndarray) and value.size > _FEW_NUMBERS:
                self.dropped.setdefault(name, "it is an attribute with many values")
                continue
            plain = plain_value(value)
            if name == "num_samples" and _count(plain) is not None:
                claimed = _count(plain)
            elif name == "seed" and isinstance(plain, int) and not isinstance(plain, bool):
                seed = plain
            else:
                self._put(text, demo, name, plain)
        return text, seed, claimed

    def _put(self, text: dict[str, str], demo: str, name: str, value: Any) -> None:
        written = value if isinstance(value, str) else dump_json(value)
        if len(written) <= _SHORT and name != _MODEL:
            text[name] = written
            return
        data = written.encode("utf-8", "backslashreplace")
        known = (name, hashlib.sha256(data).digest())
        if known not in self._by_content:
            if not _NAME.fullmatch(name):
                self.dropped.setdefault(name, "it is a long attribute whose name cannot be that of a file")
                return
            self._taken += len(data)
            if self._taken > _MOST_DOCUMENTS:
                self.dropped.setdefault(
                    name, f"long attributes of some episodes: more than {_MOST_DOCUMENTS >> 20} MiB"
                )
                return
            suffix = "xml" if name == _MODEL else "txt"
            self._by_content[known] = f"{name}/{demo}.{suffix}"
            self.documents[self._by_content[known]] = data
        text[name] = self._by_content[known]


class Splits:
    """The splits of a file, below `mask`: names of demonstrations by the name of the split."""

    def __init__(self, file: GroupFile) -> None:
        self.path = file.path
        self.demos: dict[str, list[str]] = {}
        self.dropped: list[Dropped] = []
        if not file.has_group(MASK):
            return
        group = file.group(MASK, "'mask'")
        for path, column in sorted(group.columns().items()):
            if column.form.kind != "text":
                why = column.form.why or "it does not hold names of demonstrations"
                self.dropped.append(Dropped(f"mask/{column_name(path)}", why))
                continue
            names = group.strings(path, 0, column.rows)
            self.demos[column_name(path)] = [_name(name, column_name(path)) for name in names]

    def document(self) -> dict[str, bytes]:
        """The splits as a document, if there are any."""
        return {"mask.json": (dump_json(self.demos, indent=1) + "\n").encode()} if self.demos else {}

    def choose(self, key: str, known: Mapping[str, int]) -> list[int]:
        """Return the numbers of a split; UsageError for one that is not there, FormatError for absent episodes."""
        names = self.demos.get(key)
        if names is None:
            there = f"there are {', '.join(self.demos)}" if self.demos else "it has no mask"
            raise UsageError(
                f"{self.path} has no split {key!r}{did_you_mean(key, self.demos)}: {there}",
                hint="leave out --filter-key",
            )
        absent = [name for name in names if name not in known]
        if absent:
            raise FormatError(
                f"{self.path}: the split {key!r} names {listed(absent)}, which the file does not have",
                hint="choose the episodes that are there: --episodes A:B,C",
            )
        return sorted({known[name] for name in names})

    def notes(self, known: Mapping[str, int]) -> Iterable[str]:
        """Sentences on splits: which there are, and those that name absent demonstrations."""
        if self.demos:
            counts = ", ".join(f"{key} ({len(names):,})" for key, names in self.demos.items())
            yield f"splits are {counts}: --filter-key chooses one"
        for key, names in self.demos.items():
            absent = [name for name in names if name not in known]
            if absent:
                yield f"the split {key!r} names {listed(absent)}, which the file does not have"


def listed(names: list[str]) -> str:
    """Write out some names."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def _name(value: bytes, key: str) -> str:
    return text_of_name(value.rstrip(b"\0"), f"the split {key!r}")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _parsed(value: Any) -> Any:
    try:
        return parse_json(str(value).encode(), _ENVIRONMENT)
    except FormatError:
        return value
