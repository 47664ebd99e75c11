"""`export`: write a dataset, or some of its episodes, in the format of another tool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..declarations import declared, format_for
from ..errors import UsageError
from ..format import fs
from ..format.checks import SoundSteps, damage_explained, sound_steps
from ..format.converter import Chosen, Sink
from ..format.episodes import normal_form
from ..format.locate import find_dataset, require_apart, sink_class, sink_names
from ..format.manifest import has_manifest
from ..format.staging import Outcome, Publication, Staging
from ..open_steps import open_steps, whole_episodes
from ..options import takes
from ..results import Published, published_entries, seconds_since
from ..saved_steps import has_steps, rows_of_episodes
from .options import ExportOptions

_EXPORT = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult(Published):
    """The export at `path`, in the format `layout`, of the dataset at `source`."""

    kind: ClassVar[str] = "export"
    source: Path


@takes(ExportOptions)
def export(asked: ExportOptions) -> ExportResult:
    """Write a dataset, or some of its episodes, in the format of another tool.

    Dtypes are kept. Data that a format cannot represent is refused before anything is written, and fields that it has
    no place for are listed in the result. Each format is documented in its module below `rbtool.converters`.

    Args:
        dataset: a path or `source:id`. Its digests are verified first.
        dest: the file or folder to write.
        to: the name of the format; default: by the suffix of `dest`, `.h5` or `.hdf5`, `.npz`, `.parquet`.
        episodes: episodes by number, like `0:100,250`; default: all.
        root: where stored datasets are.
        fps: steps per second, for `lerobot` and `mcap`; default: as the source states.
        names: names for the components of vectors, for `lerobot`, like `action=x,y,grip`; default: the source's.
        robot_type: the robot, for `lerobot`; default: as the source states.
        modality: a `modality.json` that divides vectors for GR00T, for `lerobot`; default: the source's.
        skip_bad: write the sound episodes of a damaged dataset; notes name the others.
        force: replace `dest`, if it is an export in this format.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was written.

    Raises:
        DatasetNotFoundError, FormatError, CorruptDataError: the dataset does not exist, cannot be read, or is damaged.
            `dest` is unchanged after any error.
        SchemaError: the format cannot represent the data.
        UsageError: arguments make no sense, or the dataset is one of another library, or a saved buffer without steps.
        OutOfSpaceError: the disk has no room for the result.
    """
    started, progress = time.perf_counter(), asked.reporter
    to = asked.to or _format_of(os.fspath(asked.dest))
    kind = sink_class(to)
    source, destination = find_dataset(asked.dataset, asked.root), fs.expanded(asked.dest)
    require_apart(source, destination)
    has_steps(source)
    explained = damage_explained(source, can_skip=not asked.skip_bad)
    with explained, whole_episodes(open_steps(source, damaged=asked.skip_bad)) as opened:
        reader = sound_steps(opened) if asked.skip_bad else opened
        chosen = Chosen(reader, rows_of_episodes(reader, asked.episodes))
        given = {name: getattr(asked, name) for name in ("fps", "names", "robot_type", "modality")}
        sink = kind(chosen, destination.name, {name: one for name, one in given.items() if one not in (None, (), [])})
        sink.check()

        def build(staging: Staging) -> Outcome[None]:
            built = staging.path / _EXPORT
            progress.start(f"exporting to {to}", sink.size(), "bytes")
            sink.write(built, progress.advance)
            progress.done()
            files = (file for file in (built, *built.rglob("*")) if file.is_file())
            return Outcome(None, {"bytes": sum(file.stat().st_size for file in files)})

        publication = Publication[None](
            staging=_ExportStaging(destination, kind.made, replace=asked.force),
            needed=sink.size,
            dry_run=asked.dry_run,
            name=_EXPORT,
        )
        outcome = publication.prepare(lambda: Outcome(None, {"bytes": sink.size()}))
        if outcome is None:
            reader.verify_files()
            outcome = publication.publish(build)
        return ExportResult(**_entries(sink, destination, to, asked.episodes, started) | outcome.entries, source=source)


def _format_of(dest: str) -> str:
    """Return the format that writes the suffix of a destination; UsageError if there is none."""
    found = format_for(dest)
    if not found:
        suffixes = [suffix for one in declared() for suffix in one.suffixes]
        suffix = Path(dest).suffix
        known = suffix[1:].isalpha()
        unclear = f"{suffix} files are not written" if known else "the format to export is unclear"
        raise UsageError(
            f"{dest}: {unclear}; expected one of the suffixes {', '.join(suffixes)}, or --to",
            hint=f"add --to {', '.join(sink_names()[:-1])} or {sink_names()[-1]}",
        )
    return found


def _entries(sink: Sink, path: Path, to: str, episodes: str | None, started: float) -> dict[str, Any]:
    chosen = sink.chosen
    numbers = chosen.table.episode.tolist()
    whole = len(numbers) == len(chosen.reader.episodes)
    manifest = chosen.reader.manifest
    ranges = None if whole or episodes is None else normal_form(episodes)
    entries = published_entries(
        replace(manifest, request=replace(manifest.request, episodes=ranges or manifest.request.episodes)),
        path,
        started,
    )
    changes = {
        "layout": to, "steps": chosen.steps, "episodes": len(numbers), "content_digest": None,
        "boundary": chosen.table.counts().to_dict(), "renamed_keys": {},
        "notes": (*_damage(chosen), *sink.notes, *_scores(sink)),
        "dropped_keys": tuple(asdict(item) for item in sink.dropped), "seconds": seconds_since(started),
    }  # fmt: skip
    return entries | changes


def _damage(chosen: Chosen) -> tuple[str, ...]:
    return chosen.reader.damage if isinstance(chosen.reader, SoundSteps) else ()


def _scores(sink: Sink) -> tuple[str, ...]:
    said = "this format cannot store scores of episodes: rbtool score computes them again after a conversion"
    return (said,) if sink.chosen.table.scores and not sink.keeps_scores else ()


class _ExportStaging(Staging):
    """A staging folder that can replace an export in the same format, and nothing else."""

    def __init__(self, destination: Path, made: Callable[[Path], bool], *, replace: bool) -> None:
        super().__init__(destination, replace=replace)
        self._made = made

    def refuse_if_taken(self) -> None:
        path = self.destination
        around = next((folder for folder in (path, *path.parents) if has_manifest(folder)), None)
        if around is not None:
            raise UsageError(f"{path} is the dataset {around} or inside it", hint="choose another destination")
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return
        if not self.replace:
            raise UsageError(f"{path} already exists", hint="choose another destination, or add --force")
        if not self._made(path):
            raise UsageError(
                f"{path} already exists and is not an export in this format; left unchanged",
                hint="choose another destination",
            )

    def _place_folder(self, built: Path) -> bool:
        return self._place_file(built)

    def _place_file(self, built: Path) -> bool:
        """Move a file or folder to the destination, which may be an empty folder."""
        if self.destination.is_dir() and not any(self.destination.iterdir()):
            fs.remove_empty_folder(self.destination, within=self._parent)
        if self.replace and self.destination.exists():
            self._swap(built)
            return True
        return super()._place_file(built)
