"""Exports to a Minari dataset, written by Minari itself: `minari.MinariDataset(DEST + "/data")` opens it.

Data converted from Minari are exported value for value: observations, actions, rewards, flags (also a last step
without any), infos, seeds, options and attributes of episodes, spaces and metadata. From other data, observations,
actions, rewards and flags become Minari's own, and fields with a value before and after every step become infos.
Images are stored as arrays, never as JPEG.

Two things differ from a Minari source. Missing infos become empty ones, `{}`. Nested infos become dicts of arrays if
the source was an Arrow dataset, which has arrays of dicts; the notes list them. Episode texts from other sources have
dotted names, whose parts become groups.

A field is written at the path of its key, part by part. The export is refused if a dotted name in the dataset's
metadata may mean either of two fields, or if a part has a slash, which means a group in HDF5.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.output_files import LatchedFile
from ...core.errors import FormatError, OutOfSpaceError, SchemaError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Chosen, Sink
from ...core.format.documents import parse_json
from ...core.format.manifest import Dropped
from ...core.ted.episodes import EndReason
from ...core.ted.schema import (
    ACTION,
    EPISODE,
    FLAGS,
    NEXT,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    Key,
    key_name,
    state_keys,
)
from ..files.exports import ExportColumn, columns_of, decoded, space_of_fields, space_of_json
from .metadata import HDF5_FILE, METADATA_FILE, parse_space

_DERIVED = frozenset(
    {"total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding", "observation_space",
     "action_space", "dataset_id"}
)  # fmt: skip
_GROUP = "is a dict of arrays in the export, the form of HDF5, but an array of dicts in the source"
_ID = re.compile(r"(?:[-\w]+/)*[-\w.]+-v\d+")


class MinariExporter(Sink):
    """Writes a folder with Minari's `data` inside, in HDF5; memory is bounded by an episode."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the folder has exactly the files of an export."""
        try:
            files = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
        except OSError:
            return False
        return files == {f"data/{METADATA_FILE}", f"data/{HDF5_FILE}"}

    def prepare(self) -> None:
        """Choose the spaces, and the path of each field."""
        self.refuse({"bfloat16"}, "Minari")
        self._require_continuity_known()
        manifest = self.chosen.reader.manifest
        self._original = self._read_original()
        self._spaces = {role: self._space(role) for role in ("observation", "action")}
        self._columns = EpisodeColumns(self.chosen, self._spaces, manifest.renamed_keys, manifest.notes)
        self.dropped += [Dropped(key, why) for key, why in self._columns.dropped.items()]
        self.notes += self._columns.notes
        if self._original.get("data_format", "hdf5") != "hdf5":
            self.notes += [f"infos/{name} {_GROUP}" for name in self._columns.info_groups]
        numbers = self.chosen.table.episode.tolist()
        if numbers != list(range(len(numbers))):
            self.notes.append("episodes are renumbered from 0, as Minari requires")

    def _require_continuity_known(self) -> None:
        if not len(self.chosen.rows):
            raise SchemaError("there is no episode to write, and Minari does not open a dataset without episodes")
        fields = {field.key for field in self.chosen.fields}
        if not any(key[0] == "observation" for key in fields) or not any(key[0] == "action" for key in fields):
            raise SchemaError("a Minari dataset needs observations and actions, but one of them is missing")

    def _read_original(self) -> Mapping[str, Any]:
        """Return the metadata of Minari if the data were converted from Minari, else {}."""
        data = self.chosen.reader.documents().get(METADATA_FILE)
        found = parse_json(data, f"{METADATA_FILE} of the source") if data is not None else {}
        return found if isinstance(found, dict) else {}

    def _space(self, role: str) -> Any:
        original = self._original.get(f"{role}_space")
        if isinstance(original, str):
            return space_of_json(parse_space(original, f"{role}_space"), role)
        known = self.chosen.reader.manifest.spaces.get(role)
        if known is not None:
            with contextlib.suppress(FormatError):  # a manifest may have a space that Minari does not support
                return space_of_json(known, role)
        self.notes.append(f"the {role} space is not known: a space of all values of the type is written")
        return space_of_fields([field for field in self.chosen.fields if field.key[0] == role], role)

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write episode after episode through Minari."""
        fs.make_folder(target / "data")
        with _minari_writing(target):
            self._write(target / "data", progress)
        for file in sorted(target.rglob("*")):
            if file.is_file():
                descriptor = fs.open_to_fill(file)
                try:
                    fs.fsync(descriptor, file)
                finally:
                    fs.close(descriptor, file)

    def _write(self, folder: Path, progress: Callable[[int], None]) -> None:
        from minari.dataset.minari_storage import MinariStorage

        storage = MinariStorage.new(
            folder, self._spaces["observation"], self._spaces["action"], data_format="hdf5", jpeg_encoding=False
        )
        storage.update_metadata(self._metadata())
        attributes = [(number, found) for number, found in self._columns.attributes() if found]
        fs.remove(folder / HDF5_FILE)
        with LatchedFile(folder / HDF5_FILE) as file:
            # A write that fails inside libhdf5 aborts the process when the file is closed. So Minari gets a file object
            # in place of a path, which keeps the first error for `check` to raise. Minari has no public way to pass it.
            storage._file_path = file
            storage.update_episodes(self._buffers(file, progress))
            if attributes:
                storage.update_episode_metadata(
                    [values for _, values in attributes], [number for number, _ in attributes]
                )
            file.check()

    def _buffers(self, file: LatchedFile, progress: Callable[[int], None]) -> Iterator[Any]:
        from minari.data_collector import EpisodeBuffer

        row_bytes = self.size() // max(1, self.chosen.steps)
        for position in range(len(self.chosen.rows)):
            yield EpisodeBuffer(**self._columns.episode(position))
            file.check()
            progress(int(self.chosen.table.length[position]) * row_bytes)

    def _metadata(self) -> dict[str, Any]:
        import minari

        metadata = {name: value for name, value in self._original.items() if name not in _DERIVED}
        for name in ("author", "author_email"):
            if isinstance(metadata.get(name), list):
                metadata[name] = set(metadata[name])  # Minari wants a set here and writes a list
            elif name in metadata:
                metadata[name] = {str(metadata[name])}
        metadata.setdefault("minari_version", minari.__version__)
        metadata["dataset_id"] = self._id()
        return metadata

    def _id(self) -> str:
        known = self._original.get("dataset_id") or self.chosen.reader.manifest.request.id
        if isinstance(known, str) and _ID.fullmatch(known):
            return known
        name = re.sub(r"[^-\w]+", "-", self.name).strip("-") or "dataset"
        return name if re.search(r"-v\d+$", name) else f"{name}-v0"


@contextlib.contextmanager
def _minari_writing(target: Path) -> Iterator[None]:
    """Suppress Minari's warnings, and turn libhdf5's errors on a full disk into OutOfSpaceError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OSError as error:
        if isinstance(error, OutOfSpaceError):
            raise
        full = fs.out_of_space(error) or re.search(r"errno = (\d+)", str(error))
        codes = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        if full is True or (isinstance(full, re.Match) and int(full[1]) in codes):
            raise OutOfSpaceError(
                f"no space is left for {target}: {fs.free_space(target):,} bytes are free there",
                hint="free some space and run it again",
            ) from error
        raise


_MADE_ROWS = re.compile(r"(.+) (has no value at reset|is missing) in (\d+) of (\d+) episodes: .*", re.DOTALL)
"""Matches a note of the conversion about rows of infos that it filled in."""

_FAMILY = {REWARD, *FLAGS}
_OF_EPISODES = ("options", "attributes")


class EpisodeColumns:
    """Converts episodes of TED to the arguments of Minari's `EpisodeBuffer`.

    `dropped` has the reason for each key that Minari has no place for; `notes` lists differences from the source.
    """

    def __init__(
        self, chosen: Chosen, spaces: Mapping[str, Any], renamed: Mapping[str, str], conversion_notes: Sequence[str]
    ) -> None:
        self._chosen = chosen
        self._spaces = spaces
        self._renamed = renamed
        self._columns = {column.field.key: column for column in columns_of(chosen.fields)}
        # Only texts have names with slashes, see `_text_path`.
        self._original = {after: before for before, after in renamed.items() if "/" not in before}
        self._states = {key for key in state_keys(chosen.fields) if key in self._columns}
        self.dropped: dict[str, str] = {}
        self.notes: list[str] = []
        self._late = set(self._after_steps(conversion_notes))
        names = Counter(map(key_name, self._columns))
        for name in sorted({*self._late, *self._original}):
            if names[name] > 1:
                raise _two_leaves(name)
        self._used: set[Key] = {EPISODE, NEXT_REWARD, *((NEXT, *flag) for flag in FLAGS)}
        for role in ("observation", "action"):
            self._claim(spaces[role], (role,), (role,))
        for key in (NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED):
            self._require(key)
        self._infos = list(self._find_infos())
        self._text_paths = {name: self._text_path(name) for name in sorted({*itertools.chain(*chosen.text or ())})}
        infos = [(path, key_name(key)) for path, key in self._infos]
        _require_places("infos", infos + [(path[1:], name) for name, path in self._of_texts("infos")])
        _require_places("options", [(path[1:], name) for name, path in self._of_texts("options")])

    def _after_steps(self, conversion_notes: Sequence[str]) -> Iterator[str]:
        """Yield the names of the columns that had no value at reset in any episode of the source."""
        for match in filter(None, map(_MADE_ROWS.fullmatch, conversion_notes)):
            name, what, some, every = match.groups()
            if what != "is missing" and some == every:
                yield name
            else:
                self.notes.append(f"{match[0]}, and are written as such")

    def _claim(self, space: Any, role: Key, path: Key) -> None:
        """Find the key of every leaf of a space; SchemaError if it is missing, or an observation has no next one."""
        children = _children(space)
        if children is not None:
            for name, child in children:
                self._claim(child, role, (*path, name))
            return
        _require_places(f"{role[0]}s", [(path[1:], key_name(path))])
        key = self._stored(path)
        self._require(key)
        if key in self._used:
            raise _two_leaves(key_name(key))
        if role == ("observation",) and key not in self._states:
            raise SchemaError(f"{key_name(key)} has no observation after each step, which Minari needs")
        self._used.add(key)

    def _stored(self, path: Key) -> Key:
        """Return the key of a leaf of a space, which may have been renamed by appending "_" to parts."""
        name = self._renamed.get(key_name(path))
        keys = itertools.product(*((part, part + "_") for part in path)) if name is not None else ()
        return next((key for key in keys if key_name(key) == name and key in self._columns), path)

    def _require(self, key: Key) -> None:
        if key not in self._columns:
            raise SchemaError(f"there is no {key_name(key)}, which a Minari dataset needs")

    def _find_infos(self) -> Iterator[tuple[Key, Key]]:
        """Yield the path in the infos and the key of every field that becomes an info."""
        for key in self._columns:
            after = (NEXT, *key)
            if key in self._used or (key[0] == NEXT and key[1:] in self._states):
                continue
            if key[0] == NEXT and key[1:] not in self._columns and key[1:] not in _FAMILY:
                yield self._info_path(key[1:]), key
            elif key in self._states:
                yield self._info_path(key), key
            else:
                why = "it is known only before the step" if after not in self._columns else "before and after differ"
                self.dropped[key_name(key)] = f"Minari has no place for it: {why}"

    def _info_path(self, key: Key) -> Key:
        name = key_name(key)
        before = self._original.get(name, name)
        # Renaming appends "_" to a part; dotted names alone are ambiguous, as a part may have a dot itself.
        plain = itertools.product(*((part, part.removesuffix("_")) for part in key))
        path = next((path for path in plain if key_name(path) == before), key)
        if path[0] != "info":
            self.notes.append(f"{name} is written to infos/{'/'.join(path)}")
            return path
        return path[1:]

    def _text_path(self, name: str) -> Key:
        """Return the path of an episode text in the file, which begins with `infos`, `options` or `attributes`.

        It is the path in the source if the dataset states it, else the parts of the dotted name.
        """
        for before, after in self._renamed.items():
            path = tuple(before.split("/"))
            dotted = key_name(("info", *path[1:]) if path[0] == "infos" else path)
            if after == name and len(path) > 1 and after.rstrip("_") == dotted.rstrip("_"):
                return path if path[0] in (*_OF_EPISODES, "infos") else ("infos", *path)
        top, *rest = name.split(".")
        if rest and top in _OF_EPISODES:
            return (top, *rest)
        return ("infos", *rest) if rest and top == "info" else ("infos", top, *rest)

    def _of_texts(self, top: str) -> list[tuple[str, Key]]:
        return [(name, path) for name, path in self._text_paths.items() if path[0] == top]

    @property
    def info_groups(self) -> list[str]:
        """The names of infos that are groups of columns."""
        return sorted({path[0] for path, _ in self._infos if len(path) > 1})

    def episode(self, position: int) -> dict[str, Any]:
        """Return the columns of an episode; SchemaError if a state after a step differs from that before the next."""
        start, stop = self._chosen.episode(position)
        table = self._chosen.table
        terminated, truncated = (self._flag(key, start, stop) for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
        if table.end_reason[position] == EndReason.END_OF_FILE:
            truncated = truncated.copy()
            truncated[-1] = False
        observations = self._of_space(self._spaces["observation"], ("observation",), start, stop)
        return {
            "seed": int(table.seed[position]) if table.has_seed[position] else None,
            "options": self._texts(position, "options") or None,
            "observations": observations,
            "actions": self._of_space(self._spaces["action"], ACTION, start, stop),
            "rewards": self._chosen.reader.read(NEXT_REWARD, start, stop).reshape(stop - start),
            "terminations": terminated,
            "truncations": truncated,
            "infos": self._info_columns(position, start, stop),
        }

    def attributes(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the attributes of each episode, with its number in the export."""
        for position in range(len(self._chosen.rows)):
            yield position, self._texts(position, "attributes")

    def _flag(self, key: Key, start: int, stop: int) -> Array:
        return self._chosen.reader.read(key, start, stop).reshape(stop - start).astype(bool)

    def _of_space(self, space: Any, path: Key, start: int, stop: int) -> Any:
        children = _children(space)
        if children is None:
            key = self._stored(path)
            return self._state(key, start, stop) if key in self._states else self._read(key, start, stop)
        parts = {name: self._of_space(child, (*path, name), start, stop) for name, child in children}
        return tuple(parts.values()) if _is_tuple(space) else parts

    def _read(self, key: Key, start: int, stop: int) -> Any:
        column: ExportColumn = self._columns[key]
        rows = self._chosen.reader.read(key, start, stop)
        if column.length is None:
            return rows
        lengths = self._chosen.reader.read(column.length.key, start, stop)
        return decoded(rows, lengths, key_name(key))

    def _state(self, key: Key, start: int, stop: int) -> Any:
        before, after = self._read(key, start, stop), self._read((NEXT, *key), start, stop)
        if _bits(before[1:]) != _bits(after[:-1]):
            raise SchemaError(
                f"{key_name(key)} after a step differs from that before the next step of the episode, and Minari "
                "stores only one of them",
                hint="export to h5, npz or parquet, which keep both",
            )
        return [*before, after[-1]] if isinstance(before, list) else np.concatenate((before, after[-1:]))

    def _info_columns(self, position: int, start: int, stop: int) -> dict[str, Any]:
        flat: dict[Key, Any] = {}
        for path, key in self._infos:
            if key[0] == NEXT:
                flat[path] = self._read(key, start, stop)
            elif key_name(key) in self._late:
                flat[path] = self._read((NEXT, *key), start, stop)
            else:
                flat[path] = self._state(key, start, stop)
        texts = self._chosen.text[position] if self._chosen.text else {}
        for name, path in self._of_texts("infos"):
            if name in texts:
                flat[path[1:]] = [texts[name]] * (stop - start + 1)
        return _nested(flat)

    def _texts(self, position: int, top: str) -> dict[str, Any]:
        """Return the texts of an episode at `options`, nested, or at `attributes`."""
        texts = self._chosen.text[position] if self._chosen.text else {}
        found = {path[1:]: json.loads(texts[name]) for name, path in self._of_texts(top) if name in texts}
        return _nested(found) if top == "options" else {"/".join(path): value for path, value in found.items()}


def _children(space: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a Dict or Tuple space with the names of their keys; None for other spaces."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return [(str(number), child) for number, child in enumerate(space.spaces)]
    return None


def _is_tuple(space: Any) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Tuple)


def _two_leaves(name: str) -> SchemaError:
    return SchemaError(
        f"two fields are called {name}, and it is not known which of them the dataset's metadata are about",
        hint="export to h5, which keeps them apart",
    )


def _require_places(top: str, paths: Iterable[tuple[Key, str]]) -> None:
    """Raise SchemaError for a path that HDF5 cannot have, and for two paths that are equal or nested."""
    taken: dict[Key, str] = {}
    for path, name in paths:
        for part in path:
            if "/" in part or "\0" in part or part in ("", "."):
                raise SchemaError(f"{name!r} has the part {part!r}, which names in a Minari dataset cannot have")
        taken_by = next((other for place, other in taken.items() if path[: len(place)] == place[: len(path)]), None)
        if taken_by is not None:
            raise SchemaError(f"{taken_by} and {name} would both be at {'/'.join((top, *path))} in a Minari dataset")
        taken[path] = name


def _bits(rows: Any) -> Any:
    """Return rows as bytes, which compare NaN as equal to NaN."""
    return rows if isinstance(rows, list) else np.ascontiguousarray(rows).tobytes()


def _nested(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """Nest values by their paths; a group with the names 0, 1, … becomes a tuple."""
    nest: dict[str, Any] = {}
    for path, value in flat.items():
        inner = nest
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return {name: _tuples(value) for name, value in nest.items()}


def _tuples(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {name: _tuples(part) for name, part in value.items()}
    numbers = [str(number) for number in range(len(parts))]
    return tuple(parts[number] for number in numbers) if parts.keys() == set(numbers) else parts
