"""Exports to a Minari dataset, through Minari itself: `minari.MinariDataset(DEST + "/data")` opens it.

What was converted from Minari comes back value for value: observations, actions, rewards, flags (also a last step
without any), infos, seeds, options and attributes of episodes, spaces and metadata. Of other data observations,
actions, rewards and flags become Minari's own, what is known before and after every step goes to the infos. Images are
stored as they are, never as JPEG. (One thing does not come back: dots in the name of a text that stays the same through
every episode, or of an option, become groups. And two things look another way in HDF5: infos
that are missing are empty ones, `{}`, and nested ones are dicts of arrays where Arrow had arrays of dicts, which the
notes say.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.checkpoint.h5_file import LatchedFile
from ...core.errors import FormatError, OutOfSpaceError, SchemaError
from ...core.format import Dropped, Sink, fs, parse_json
from .export_episode import EpisodeColumns
from .export_spaces import space_of_fields, space_of_json
from .metadata import HDF5_FILE, METADATA_FILE
from .spaces import parse_space

__all__ = ["MinariSink"]

_DERIVED = frozenset(
    {"total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding", "observation_space",
     "action_space", "dataset_id"}
)  # fmt: skip
_GROUP = "is a dict of arrays there, the form of HDF5, where the source gave an array of dicts"
_ID = re.compile(r"(?:[-\w]+/)*[-\w.]+-v\d+")


class MinariSink(Sink):
    """Writes a folder with Minari's `data` inside, in HDF5; memory is bounded by an episode."""

    @classmethod
    def made(cls, path: Path) -> bool:
        """Tell by the names of the files."""
        try:
            files = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
        except OSError:
            return False
        return files == {f"data/{METADATA_FILE}", f"data/{HDF5_FILE}"}

    def prepare(self) -> None:
        """Find the spaces, and what goes where."""
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
            self.notes.append("episodes are renumbered from 0: Minari has no other numbers")

    def _require_continuity_known(self) -> None:
        if not len(self.chosen.rows):
            raise SchemaError("there is no episode here, and Minari opens no dataset without one")
        fields = {field.key for field in self.chosen.fields}
        if not any(key[0] == "observation" for key in fields) or not any(key[0] == "action" for key in fields):
            raise SchemaError("a Minari dataset has observations and actions, one of them is missing here")

    def _read_original(self) -> Mapping[str, Any]:
        """Minari's own metadata, of what came from there."""
        data = self.chosen.reader.documents().get(METADATA_FILE)
        found = parse_json(data, f"{METADATA_FILE} of the source") if data is not None else {}
        return found if isinstance(found, dict) else {}

    def _space(self, role: str) -> Any:
        original = self._original.get(f"{role}_space")
        if isinstance(original, str):
            return space_of_json(parse_space(original, f"{role}_space"), role)
        known = self.chosen.reader.manifest.spaces.get(role)
        if known is not None:
            with contextlib.suppress(FormatError):  # not every source says all of its spaces
                return space_of_json(known, role)
        self.notes.append(f"the {role} space is not known: one that holds every value of the type is written")
        return space_of_fields([field for field in self.chosen.fields if field.key[0] == role], role)

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Have Minari write episode after episode."""
        fs.make_folder(target / "data")
        with _minari_writing(target):
            self._write(target / "data", progress)
        for file in sorted(target.rglob("*")):
            if file.is_file():
                descriptor = fs.open_to_fill(file)
                try:
                    fs.fsync(descriptor, file)
                finally:
                    os.close(descriptor)

    def _write(self, folder: Path, progress: Callable[[int], None]) -> None:
        from minari.dataset.minari_storage import MinariStorage

        storage = MinariStorage.new(
            folder, self._spaces["observation"], self._spaces["action"], data_format="hdf5", jpeg_encoding=False
        )
        storage.update_metadata(self._metadata())
        attributes = [(number, found) for number, found in self._columns.attributes() if found]
        fs.remove(folder / HDF5_FILE)
        with LatchedFile(folder / HDF5_FILE) as file:
            # A write that fails inside libhdf5 ends the process when the file is closed: Minari gets, in place of
            # the path that it opens, a file that never fails and says later what did.
            storage._file_path = file
            storage.update_episodes(self._buffers(file, progress))
            if attributes:
                storage.update_episode_metadata([said for _, said in attributes], [number for number, _ in attributes])
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
    """Hold back Minari's advice, and turn what libhdf5 says of a full disk into OutOfSpaceError."""
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
