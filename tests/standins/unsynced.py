"""Which files were changed since they were synced; the fixture `synced_states` notes the syncs."""

from __future__ import annotations

from pathlib import Path


def unsynced(built: Path, synced: dict[int, tuple[int, int]]) -> list[str]:
    """What is there and was changed since it was synced."""
    found = []
    for path in [built, *built.rglob("*")]:
        here = path.stat()
        if synced.get(here.st_ino) != (here.st_size, here.st_mtime_ns):
            found.append(str(path.relative_to(built)))
    return found
