"""Members of tar archives, written by plain tarfile."""

from __future__ import annotations

import io
import tarfile
from typing import Any


def add(archive: tarfile.TarFile, name: str, data: bytes, **header: Any) -> None:
    """Append a file; `header` are attributes of its entry, such as `type`."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in header.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))
