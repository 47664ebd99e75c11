"""Where the episodes of a recording come from: a document that any process finds which makes the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ...errors import FormatError
from .. import fs
from ..documents import Check, decode, document_digest, dump_json, load_json
from ..manifest import SOURCE_DOCUMENTS, Dropped, Request, is_space
from ..ted.builder import Origin, provenance_step

ORIGIN = f"{SOURCE_DOCUMENTS}recorded.json"
"""Metadata, so that it is no part of the content digest."""
SOURCE = "recording"

_Space = Annotated[Any, Check("the document of a space", is_space)]


@dataclass(frozen=True, slots=True)
class RecordedOrigin:
    """What the manifest of a recording will state: the environment's id, its spaces, and what was not kept.

    `arguments` are those of the step of the provenance, such as the environment's spec and the first seed.
    """

    asked: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    spaces: Mapping[str, _Space] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    dropped_keys: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Write the document; there is the old one or the new one at any instant."""
        document: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        document["dropped_keys"] = [{"key": one.key, "why": one.why} for one in self.dropped_keys]
        document["digest"] = document_digest(document, "digest")
        fs.make_folder((folder / ORIGIN).parent)
        fs.replace_file(folder / ORIGIN, (dump_json(document, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> RecordedOrigin:
        """Read the document of a recording; FormatError for one that was changed, FileNotFoundError for none."""
        document = load_json(folder / ORIGIN)
        if not isinstance(document, dict) or document.get("digest") != document_digest(document, "digest"):
            raise FormatError(f"{folder / ORIGIN} was changed after it was written: its digest does not match")
        return decode(cls, document, str(folder / ORIGIN))


def origin_of(folder: Path) -> Origin:
    """Return where the episodes recorded in a folder come from; a note states it where that is damaged."""
    request = Request(SOURCE, str(folder), folder.name, layout="packed")
    try:
        found = RecordedOrigin.load(folder)
    except FileNotFoundError:
        return Origin(request, (provenance_step("record", {}, {}),))
    except FormatError as error:
        return Origin(request, (provenance_step("record", {}, {}),), notes=(str(error),))
    return Origin(
        replace(request, asked=found.asked), (provenance_step("record", found.arguments, {}),), spaces=found.spaces,
        renamed_keys=found.renamed_keys, dropped_keys=found.dropped_keys, notes=found.notes,
    )  # fmt: skip
