"""`repair`: restore a recording that was cut short."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import (
    CorruptDataError,
    DatasetNotFoundError,
    suggests_keywords,
)
from ..format import fs
from ..format.manifest import Manifest
from ..format.packed.recording import COMMITS
from ..format.staging import mend
from ..progress import Progress, Silent
from ..recording.repair import RecordingState, examine_recording, repair_recording, require_restorable
from ..results import Result, seconds_since
from ..ted.rules import RULE_BY_ID

_DIGESTS, _OPENS = RULE_BY_ID["TED013"].named, RULE_BY_ID["TED014"].named


# Repair ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult(Result):
    """The restored dataset at `path`: `steps` in `episodes`.

    `lost_episodes` were finished and are damaged, or follow a damaged one; `cut_bytes` belong to no valid episode. The
    files `remade` were damaged and could be rebuilt without loss. `repaired` is False if there was nothing to do or
    with `dry_run`.
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


@suggests_keywords()
def repair(
    path: str | os.PathLike[str],
    *,
    yes: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """Restore the longest valid prefix of a recording as a dataset.

    Every byte is compared with the digest that was recorded when its episode was finished. The unfinished episode is
    cut. A recording that is a valid dataset already is left as it is.

    Args:
        path: the folder of the recording.
        yes: discard finished episodes that are damaged, follow a damaged one, or are missing from the log.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was kept and what was discarded.

    Raises:
        DatasetNotFoundError: nothing is at `path`.
        FormatError: it is not a recording.
        CorruptDataError: episodes would be discarded without `yes`, none would be kept, or the contents cannot be
            determined.
        UsageError: another process records there.
    """
    started, folder, progress = time.perf_counter(), fs.expanded(path).absolute(), progress or Silent()
    mend(folder)
    if not folder.exists():
        raise DatasetNotFoundError(f"{folder} not found")
    progress.start("looking over", None, "episodes")
    state = examine_recording(folder, progress.advance)
    progress.done()
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
        seconds=seconds_since(started),
    )


def _loss(folder: Path, state: RecordingState) -> str:
    """Return a message that names the episodes that would be discarded, and the reason."""
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
