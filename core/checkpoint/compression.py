"""How the leaves of an H5 checkpoint are compressed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..ted import Field

__all__ = ["Compression"]

_CHUNK_BYTES = 1 << 19
_FORM = re.compile(r"(?P<method>gzip|lzf)(?::(?P<level>[1-9]))?")
_DEFAULT_LEVEL = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """A method HDF5 has everywhere, `gzip` with a level or `lzf`; both after the bytes of like weight are brought
    together (`shuffle`). No method, no compression."""

    method: str | None = None
    level: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> Compression:
        """Read `gzip`, `gzip:1` to `gzip:9`, `lzf` or `none`; raise UsageError for anything else."""
        if text in {None, "none"}:
            return cls()
        match = _FORM.fullmatch(text or "")
        if match is None or (match["method"] == "lzf" and match["level"]):
            raise UsageError(f"--compression {text!r} is not known", hint="take gzip, gzip:1 to gzip:9, lzf or none")
        level = int(match["level"] or _DEFAULT_LEVEL) if match["method"] == "gzip" else None
        return cls(match["method"], level)

    def __str__(self) -> str:
        return "none" if self.method is None else self.method + (f":{self.level}" if self.level else "")

    def chunk_rows(self, leaf: Field) -> int:
        """Rows of one chunk: about half a megabyte."""
        return max(1, _CHUNK_BYTES // max(1, leaf.row_bytes))

    def options(self, leaf: Field, rows: int) -> dict[str, Any]:
        """Keyword arguments for `create_dataset`; data without elements cannot be in chunks."""
        if self.method is None or not rows or not math.prod(leaf.shape):
            return {}
        chunks = (min(rows, self.chunk_rows(leaf)), *leaf.shape)
        return {"chunks": chunks, "compression": self.method, "compression_opts": self.level, "shuffle": True}
