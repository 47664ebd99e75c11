"""`repair`: a recording that was cut short becomes a dataset of all that is sound in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import CorruptDataError, DatasetNotFoundError
from ..format import (
    COMMITS,
    Manifest,
    RecordingState,
    examine_recording,
    fs,
    mend,
    repair_recording,
    require_restorable,
)
from ..progress import Progress, Silent
from .results import Result, seconds_since

__all__ = ["RepairResult", "repair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult(Result):
    """What was restored at `path`: `steps` in `episodes`.

    `lost_episodes` were finished once and are not sound any more, or come after one that is not; `cut_bytes` belonged
    to no sound episode. The files `remade` were damaged, and could be made again without loss. `repaired` is False
    where nothing was to be done, `dry_run` says that nothing was.
    """

    kind: ClassVar[str] = "repair"
    path: Path
    steps: int
    episodes: int
    lost_episodes: int
    cut_bytes: int
    remade: tuple[str, ...]
    repaired: bool
    dry_run: bool
    content_digest: str | None
    seconds: float


def repair(
    path: str | os.PathLike[str],
    *,
    yes: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """Restore the longest sound beginning of the recording at `path`, and make a dataset of it.

    Every byte is compared with the digest that was noted when its episode was finished. The episode that was under way
    is cut. Episodes that were finished once, and are damaged, come after a damaged one, or are not named by the log any
    more, are given up only with `yes`. A recording that is a sound dataset is left as it is.

    DatasetNotFoundError where nothing is, FormatError for what was not recorded, CorruptDataError where episodes would
    be given up, where none would be kept, and where it is not known any more what was recorded, UsageError while
    another process records there.
    """
    begun, folder, heard = time.perf_counter(), fs.expanded(path).absolute(), progress or Silent()
    mend(folder)
    if not folder.exists():
        raise DatasetNotFoundError(f"there is nothing at {folder}")
    heard.start("looking over", None, "episodes")
    state = examine_recording(folder, heard.advance)
    heard.done()
    require_restorable(folder, state)
    if state.lost and not yes and not dry_run:
        raise CorruptDataError(_loss(folder, state), hint="add --yes to keep what can be, and to give up the rest")
    digest = Manifest.load(folder).content_digest if state.sealed else None
    if not state.sealed and not dry_run:
        digest = repair_recording(folder, state).content_digest
    return RepairResult(
        path=folder,
        steps=state.commits[-1].steps if state.commits else 0,
        episodes=len(state.commits),
        lost_episodes=state.lost,
        cut_bytes=max(0, state.surplus),
        remade=state.damaged,
        repaired=not state.sealed and not dry_run,
        dry_run=dry_run,
        content_digest=digest,
        seconds=seconds_since(begun),
    )


def _loss(folder: Path, state: RecordingState) -> str:
    """Say what would be given up, and why."""
    least, total = "at least " * state.unlisted, len(state.commits) + state.lost
    reason = (
        f"{COMMITS} was cut, and nothing is left to compare the others with"
        if state.unlisted
        else f"{state.missing[0]} is missing"
        if state.missing
        else f"number {len(state.commits) + 1:,} is damaged"
    )
    return (
        f"{folder} has {least}{total:,} finished episode{'s' * (total > 1)}, of which the first {len(state.commits):,} "
        f"can be restored: {reason}"
    )
