"""Writes the episodes of environments into a recording, whose leaves widen where an episode needs it."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import SchemaError, UsageError
from ..format import fs
from ..format.documents import dump_json, parse_json
from ..format.manifest import Dropped, Manifest, has_manifest
from ..format.packed.recording import PackedRecorder, RecordedOrigin, unfinished_recording
from ..format.packed.repair import continued
from ..format.staging import mend, new_sibling, sweep
from ..ted.schema import NEXT, Key
from .forms import entries_renamed, form_of, renaming
from .layout import RawEpisode, RowLayout, fit_infos


class EpisodeWriter:
    """Appends episodes to a recording at `dest`; each is safe from the death of the process when `add` returns.

    With `resume`, an unfinished recording there is continued. UsageError where something else is at `dest`.
    """

    def __init__(self, dest: Path, origin: RecordedOrigin, *, sync_seconds: float, resume: bool = False) -> None:
        self.dest = dest
        self._origin, self._sync_seconds = origin, sync_seconds
        self._recorder: PackedRecorder | None = None
        self._layout: RowLayout | None = None
        self._dropped = {one.key: one.why for one in origin.dropped_keys}
        self._made = False
        self._next = 0
        self.is_closed = False
        mend(dest)
        sweep(dest)  # of a process that died while it stored a recording again
        occupied = dest.exists() and (not dest.is_dir() or any(dest.iterdir()))
        if occupied and resume:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._origin = RecordedOrigin.load(dest)
                self._dropped = {one.key: one.why for one in self._origin.dropped_keys}
                _require_same(self._origin, origin, dest)
            self._recorder = continued(dest, sync_seconds=sync_seconds)
            if self._origin is origin and not self.episodes:  # it was stopped before it was stated
                origin.save(dest)
            self._next = max(self.numbers, default=-1) + 1
        elif occupied:
            raise _occupied(dest)
        elif not dest.exists():
            fs.make_folder(dest)  # that it cannot be made is found before an environment runs for hours
            self._made = True

    def describe(self, arguments: Mapping[str, Any]) -> None:
        """Add arguments to the provenance."""
        self._origin = replace(self._origin, arguments={**self._origin.arguments, **arguments})
        if self._recorder is not None:
            self._origin.save(self.dest)

    @property
    def episodes(self) -> int:
        """How many episodes are written."""
        return len(self._recorder.commits) if self._recorder is not None else 0

    @property
    def steps(self) -> int:
        """How many steps those have."""
        return self._recorder.steps if self._recorder is not None else 0

    @property
    def numbers(self) -> list[int]:
        """The numbers of the episodes that are written."""
        return [commit.row.episode for commit in self._recorder.commits] if self._recorder is not None else []

    def add(
        self,
        raw: RawEpisode,
        number: int | None = None,
        dropped: Mapping[str, str] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Write an episode; its number is by default that after the highest.

        `dropped` names infos that it lacks, with the reasons, and `renamed` infos that have another name in it.
        """
        if self.is_closed:
            raise UsageError(f"the recording {self.dest} is closed: nothing can be added")
        recorder = self._recorder
        ranges = recorder.rows.ranges if recorder is not None else {}
        layout = self._layout
        if layout is None:
            layout = RowLayout(raw.leaves)
            if recorder is not None:
                layout = RowLayout.of_fields(recorder.fields, raw.leaves, str(self.dest))
                several = frozenset(entries_renamed(self._origin.renamed_keys, layout.infos))
                layout = replace(layout, several=several)
        before, stated = layout, dict[str, str]()
        layout = layout.separated(raw.infos)
        if layout.several:
            moved = layout.moved(before)
            stated = self._renamings(before, layout, raw)
            raw.infos = layout.named(raw.infos)
            ranges = {_moved(key, moved): found for key, found in ranges.items()}
        lost = dict(dropped or {}) | fit_infos(layout, raw, ranges)
        names = dict(renamed or {}) | {entry: name for entry, name in stated.items() if name not in lost}
        grown = layout.grown(raw, ranges, first=recorder is None)
        noted = bool(lost.keys() - self._dropped.keys() or names.keys() - self._origin.renamed_keys.keys())
        if recorder is None:
            recorder = PackedRecorder(self.dest, grown.fields(), sync_seconds=self._sync_seconds)
            self._recorder = recorder
            self._origin.save(self.dest)
        elif grown is not before:
            if noted:  # the names of leaves are stated where they are
                self._note(lost, names)
            recorder, noted = self._rewritten(recorder, before, grown), False
        self._layout = grown
        if noted:
            self._note(lost, names)
        states, steps = grown.columns(raw, self._next if number is None else number)
        number = int(steps[("episode",)][0])
        recorder.add_states(states, steps, episode=number, seed=raw.seed, cut_off=raw.cut_off)
        self._next = max(self._next, number + 1)

    def _renamings(self, before: RowLayout, layout: RowLayout, raw: RawEpisode) -> dict[str, str]:
        """State where the forms of entries are, those of this episode and those of earlier ones that get a name now."""
        forms = [(key, form_of(one)) for key, one in raw.infos.items()]
        forms += [(key, leaf.form) for key, leaf in before.infos.items()]
        return dict(renaming(key, form) for key, form in forms if key in layout.several)

    def _note(self, dropped: Mapping[str, str], renamed: Mapping[str, str]) -> None:
        self._dropped = dict(dropped) | self._dropped
        named = tuple(Dropped(key, why) for key, why in sorted(self._dropped.items()))
        names = {**self._origin.renamed_keys, **renamed}
        self._origin = replace(self._origin, dropped_keys=named, renamed_keys=dict(sorted(names.items())))
        self._origin.save(self.dest)

    def _rewritten(self, old: PackedRecorder, layout: RowLayout, grown: RowLayout) -> PackedRecorder:
        """Store all episodes with other leaves, and put that in the place of the recording at one instant."""
        built = new_sibling(self.dest)
        new = PackedRecorder(built, grown.fields(), sync_seconds=math.inf)
        try:
            self._origin.save(built)
            moved = grown.moved(layout)
            for stored in old.episodes():
                raw, row = layout.raw(stored), stored.commit.row
                raw.infos = {moved.get(key, key): one for key, one in raw.infos.items()}
                states, steps = grown.columns(raw, row.episode)
                new.add_states(states, steps, episode=row.episode, seed=row.seed, cut_off=raw.cut_off)
            new.sync()
            aside = _put_in_place(built, self.dest)
        except BaseException:
            with contextlib.suppress(OSError):  # the next process that opens the recording sweeps it
                new.close()
                fs.remove(built)
            raise
        self._recorder, self._layout = new, grown  # before anything can fail: the old recorder's files are not at dest
        new.moved(self.dest, self._sync_seconds)
        old.close()
        fs.sync_folder(self.dest.parent)
        with contextlib.suppress(OSError):  # the next process that opens the recording sweeps it
            fs.remove(aside)
        return new

    def sync(self) -> None:
        """Wait until all episodes are on the disk."""
        if self._recorder is not None and not self.is_closed:
            self._recorder.sync()

    def finish(self) -> Manifest:
        """Make a dataset of the recording. SchemaError where nothing was recorded."""
        if self.is_closed:
            raise UsageError(f"the recording {self.dest} is closed already")
        if self._recorder is None or not self.episodes:
            self.close()
            raise SchemaError(f"nothing was recorded at {self.dest}: no episode has a step")
        manifest = self._recorder.finish()
        self.is_closed = True
        return manifest

    def close(self) -> None:
        """Stop without making a dataset; the episodes stay, and nothing stays where there are none."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._recorder is not None:
            try:
                self._recorder.sync()
            finally:
                self._recorder.close()
        elif self._made:
            with contextlib.suppress(OSError):
                fs.remove_empty_folder(self.dest)


def _moved(key: Key, moved: Mapping[Key, Key]) -> Key:
    """The key of a leaf, root or next, after infos were moved."""
    return (NEXT, *moved.get(key[1:], key[1:])) if key[0] == NEXT else moved.get(key, key)


def _occupied(dest: Path) -> UsageError:
    unfinished = dest.is_dir() and not has_manifest(dest) and unfinished_recording(dest) is not None
    if not unfinished:
        return UsageError(f"{dest} exists already; recordings need a new folder", hint="choose another destination")
    return UsageError(
        f"{dest} has a recording that was not finished",
        hint=f"continue it with resume (--resume), or finish it: rbtool repair {shlex.quote(str(dest))}",
    )


def _put_in_place(built: Path, dest: Path) -> Path:
    """Put a folder in the place of another one; return where that is now. After an error all is as before."""
    if fs.exchange(built, dest):
        return built
    aside = new_sibling(dest, aside=True)
    fs.rename(dest, aside)
    try:
        fs.rename(built, dest)
    except BaseException:
        fs.rename(aside, dest)
        raise
    return aside


def _require_same(recorded: RecordedOrigin, found: RecordedOrigin, dest: Path) -> None:
    """Raise where another environment, or one of other spaces, would continue a recording."""
    if recorded.asked != found.asked:
        raise UsageError(f"{dest} has episodes of {recorded.asked}, expected the same instead of {found.asked}")
    spaces = parse_json(dump_json(dict(found.spaces)), "the spaces")
    for name in sorted(recorded.spaces.keys() | spaces.keys()):
        if recorded.spaces.get(name) != spaces.get(name):
            raise SchemaError(
                f"{dest} was recorded with another {name} space, expected the same to continue it",
                hint="record each space to a dataset of its own",
            )
