"""What two datasets are compared by, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
