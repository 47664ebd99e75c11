"""Datasets written from arrays, and all that a report can show; what two datasets are compared by, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rbtool.core.format.contracts import Piece
from rbtool.core.format.manifest import Dropped, Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin, provenance_step
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import REWARD, Field, Timing, dtype_name, role_of, ted_fields


def write_fields(folder: Path, *episodes: Mapping[str, np.ndarray]) -> Path:
    """Write episodes by the dotted names of their fields, those of `state` T + 1 rows long; rewards count steps."""
    steps = [len(one["reward"]) for one in episodes]
    first = {tuple(name.split(".")): rows for name, rows in episodes[0].items()}
    fields = [
        (
            Field(key, dtype_name(rows.dtype), () if key == REWARD else rows.shape[1:], role_of(key)),
            "result" if key == REWARD else "state" if len(rows) > steps[0] else "step",
        )
        for key, rows in first.items()
    ]
    with DatasetBuilder(folder, ted_fields(fields)) as builder:
        ingest = Ingest(builder, fields)
        for number, (one, count) in enumerate(zip(episodes, steps, strict=True)):
            columns = {tuple(name.split(".")): rows for name, rows in one.items()}
            ended = np.arange(count) == count - 1
            ingest.add(Piece(number, columns, ended, ended & False, first=True, last=True, seed=None, text={}))
        origin = Origin(Request("made", "made", "made/v0"), (provenance_step("made", {}, {}),), spaces={}, documents={})
        builder.finish(ingest.table, origin, ingest.text)
    return folder


HOSTILE = (
    "<script>document.title='owned'</script><img src=https://evil.example/x onerror=document.title='owned'>"
    "\"'`&amp;</style></title>]]>--><a href=javascript:document.title='owned'>${x}\u202e\x1b[31m\ud800"
)
"""Text that is markup, script and control characters, and an address that would be requested."""
SPACE = {"type": "Box", "shape": [2], "dtype": "float32", "low": [-1.0, -1.0], "high": [1.0, 1.0]}
_NAME = HOSTILE.replace("/", "_").replace("\ud800", "")
_STEPS = 12


def write_shown(folder: Path, *, hostile: bool = False, episodes: int = 3) -> Path:
    """Write a dataset with images, vectors, NaN, a constant and two actions; of hostile names and texts on request."""
    name, text = (_NAME, HOSTILE.replace("\ud800", "")) if hostile else ("state", "plain")
    fields: tuple[tuple[Field, Timing], ...] = (
        (Field(("observation", name), "float32", (3,), "observation"), "state"),
        (Field(("observation", f"pixels{name[:40] if hostile else ''}"), "uint8", (16, 24, 3), "observation"), "state"),
        (Field(("action",), "float32", (2,), "action"), "step"),
        (Field(("choice",), "int64", (), "observation"), "step"),
        (Field(("reward",), "float32", (), "reward"), "result"),
    )
    steps = [provenance_step("convert", {"path": text, "episodes": None, "note": text}, {text: text})]
    steps += [provenance_step(text, {text: text}, {})] if hostile else []
    origin = Origin(
        Request("test", text, text), tuple(steps), spaces={"action": SPACE}, notes=(text,),
        renamed_keys={text: text}, dropped_keys=(Dropped(text, text),),
        documents={"metadata.json": b'{"author": "<script>document.title=1</script>", "license": "</script>"}'},
    )  # fmt: skip
    with DatasetBuilder(folder, ted_fields(fields)) as builder:
        ingest = Ingest(builder, fields)
        for number in range(episodes):
            ingest.add(_piece(number, [field for field, _ in fields]))
        builder.finish(ingest.table, origin, ingest.text)
    return folder


def _piece(number: int, fields: list[Field]) -> Piece:
    draw = np.random.default_rng(number)
    states = draw.normal(size=(_STEPS + 1, 3)).astype(np.float32)
    states[3, 0], states[:, 1] = np.nan, 0.5
    pixels = np.zeros((_STEPS + 1, 16, 24, 3), np.uint8)
    for step in range(_STEPS + 1):
        pixels[step, step, :, number % 3] = 255
    columns = {
        fields[0].key: states, fields[1].key: pixels,
        ("action",): draw.uniform(-1, 1, (_STEPS, 2)).astype(np.float32), ("choice",): draw.integers(0, 3, _STEPS),
        ("reward",): draw.normal(size=_STEPS).astype(np.float32),
    }  # fmt: skip
    flags = np.zeros((2, _STEPS), bool)
    flags[number % 2, -1] = True
    return Piece(number, columns, flags[0], flags[1], first=True, last=True)


def bytes_below(folder: Path) -> dict[str, Any]:
    """Every file with its bytes; the manifest without the time at which it was written."""
    found: dict[str, Any] = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    manifest = json.loads(found.pop(".rbtool/manifest.json"))
    del manifest["manifest_digest"]
    for step in manifest["provenance"]:
        del step["time"]
    return found | {"manifest": manifest}
