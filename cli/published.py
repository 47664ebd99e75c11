"""Render the results of writing verbs: the path on stdout, the rest on stderr."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .output import Output
from .text import Line, Styled, counted, size

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.verbs.results import Published

__all__ = ["ends", "not_following", "short_name", "show_published", "without_final"]

_EXPLICIT = "explicit_next"
_REPEATED, _DROPPED = "final_repeated", "final_dropped"
_OTHERS = frozenset({_EXPLICIT, _REPEATED, _DROPPED})


def show_published(out: Output, result: Published, named: str | None = None, next_command: str | None = None) -> None:
    """Print the path as the user `named` it; summarise contents, omissions and the next command on stderr."""
    for line in _summary(result):
        out.summary(*line)
    path = named or str(result.path)
    try:
        out.show(result, [path], lambda width: [[path]])
    except OSError:
        if not result.dry_run:
            out.warn(f"{path} is there and whole, but stdout could not take its name")
        raise
    if not result.dry_run:
        out.suggest(next_command or f"rbtool inspect {shlex.quote(named) if named else short_name(result.path)}")


def _summary(result: Published) -> list[Line]:
    state = "nothing was written; this would be " if result.dry_run else ""
    state = "already there: " if result.already_there else state
    facts = [f"{counted(result.steps, 'step')} in {counted(result.episodes, 'episode')}"]
    facts += [size(result.bytes)] if result.bytes else []
    facts += [f"ends: {ends(result.boundary)}"] if result.episodes and result.boundary else []
    lines: list[Line] = [[Styled(state, "yellow"), " · ".join(facts)]]
    if apart := not_following(result.boundary):
        lines.append([f"next: {apart}"])
    if apart := without_final(result.boundary):
        lines.append([f"final: {apart} (--final-step)"])
    lines += [[f"renamed: {before} → {after}"] for before, after in result.renamed_keys.items()]
    lines += [[Styled("left out: ", "yellow"), f"{key['key']} ({key['why']})"] for key in result.dropped_keys]
    lines += [[f"note: {note}"] for note in result.notes]
    return lines


def ends(boundary: Mapping[str, int]) -> str:
    """Format the counts of how episodes end, without zeros."""
    names = {"end_of_file": "end of file (made truncated)"}
    found = [f"{count:,} {names.get(key, key)}" for key, count in boundary.items() if count and key not in _OTHERS]
    return " · ".join(found) or "none"


def not_following(boundary: Mapping[str, int], *, n_step: bool = False) -> str:
    """Format the number of episodes whose `next` is not the row that follows; "" for none."""
    count = boundary.get(_EXPLICIT, 0)
    ahead = "n steps ahead (steps_to_next_obs), " if n_step else ""
    return f"{ahead}in {counted(count, 'episode')} not the row that follows" if count else ""


def without_final(boundary: Mapping[str, int]) -> str:
    """Format what was done with last steps without a next observation; "" if there are none."""
    repeated, dropped = boundary.get(_REPEATED, 0), boundary.get(_DROPPED, 0)
    kept = f"the last observation is repeated in {counted(repeated, 'episode')}" if repeated else ""
    left = f"the last step is left out of {counted(dropped, 'episode')}" if dropped else ""
    return " · ".join(filter(None, (kept, left)))


def short_name(path: Path) -> str:
    """Return the shortest name of a dataset, quoted for the shell: `source:id`, or a path."""
    from ..core.format import known_root

    root, full = known_root(), os.path.abspath(path)
    if root and os.path.commonpath([root, full]) == str(root) and full.count(os.sep) > str(root).count(os.sep) + 1:
        source, _, name = os.path.relpath(full, root).partition(os.sep)
        return shlex.quote(f"{source}:{name}")
    near = os.path.relpath(full)
    return shlex.quote(full if near.startswith("..") else near)
