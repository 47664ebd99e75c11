"""What a Minari dataset says of itself: where its files are, its id, its totals, its spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import FormatError
from ...core.format import load_json, parse_json, read_regular
from .spaces import Space, parse_space

__all__ = ["HDF5_FILE", "METADATA_FILE", "MinariMetadata", "data_folder", "looks_like_minari"]

METADATA_FILE = "metadata.json"
NAMESPACE_FILE = "namespace_metadata.json"
HDF5_FILE = "main_data.hdf5"
FORMATS = ("hdf5", "arrow", "parquet")
_TELLING = frozenset({"total_episodes", "total_steps", "data_format", "dataset_id", "minari_version", "action_space"})


def data_folder(path: Path) -> Path:
    """Folder with the files: `path/data`, or `path` itself where the files lie there."""
    inner = path / "data"
    return inner if _holds_data(inner) or not _holds_data(path) else path


def _holds_data(folder: Path) -> bool:
    return (folder / METADATA_FILE).is_file() or (folder / HDF5_FILE).is_file()


def looks_like_minari(path: Path) -> bool:
    """Tell whether Minari's files are in this folder, sound or not; never raises."""
    try:
        folder = data_folder(path)
        if (folder / HDF5_FILE).is_file():
            return True
        document = load_json(folder / METADATA_FILE)
        return isinstance(document, dict) and len(_TELLING & document.keys()) > 1
    except (OSError, FormatError):
        return False


@dataclass(frozen=True, slots=True)
class MinariMetadata:
    """`metadata.json`, read and checked as far as it goes without the data.

    Totals and spaces are None where an old file does not have them.
    """

    folder: Path
    raw: bytes
    document: Mapping[str, Any]
    id: str
    data_format: str
    total_episodes: int | None
    total_steps: int | None
    observation_space: Space | None
    action_space: Space | None

    @classmethod
    def load(cls, path: Path) -> MinariMetadata:
        """Read the metadata of the dataset at `path`, or raise FormatError that says what is odd."""
        folder = data_folder(path)
        raw, document = _read(folder / METADATA_FILE)
        return cls(
            folder=folder,
            raw=raw,
            document=document,
            id=_text(document, "dataset_id", path.parent.name if path == folder else path.name),
            data_format=_format(folder, document),
            total_episodes=_count(document, "total_episodes"),
            total_steps=_count(document, "total_steps"),
            observation_space=_space(document, "observation_space"),
            action_space=_space(document, "action_space"),
        )

    def spaces(self) -> dict[str, Space]:
        """The spaces there are, under the names the manifest gives them."""
        spaces = {"observation": self.observation_space, "action": self.action_space}
        return {name: space for name, space in spaces.items() if space is not None}

    def documents(self) -> dict[str, bytes]:
        """The metadata files as they are: the dataset's own and, if there is one, its namespace's."""
        documents = {METADATA_FILE: self.raw}
        namespace = self.folder.parent.parent / NAMESPACE_FILE
        if self.folder.name == "data" and namespace.is_file():
            documents[NAMESPACE_FILE] = read_regular(namespace)
        return documents


def _read(path: Path) -> tuple[bytes, Mapping[str, Any]]:
    if not path.is_file():
        raise FormatError(
            f"{path} is missing: without it the data cannot be read",
            hint="copy or fetch the dataset again, whole",
        )
    raw = read_regular(path)
    document = parse_json(raw, str(path))
    if not isinstance(document, dict):
        raise FormatError(f"{path} holds a JSON {type(document).__name__}, an object is expected")
    return raw, document


def _text(document: Mapping[str, Any], name: str, default: str) -> str:
    value = document.get(name, default)
    if not isinstance(value, str) or not value:
        raise FormatError(f"{name} in metadata.json is {value!r}, a name is expected")
    return value


def _count(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise FormatError(f"{name} in metadata.json is {value!r}, a number of them is expected")
    return value


def _space(document: Mapping[str, Any], name: str) -> Space | None:
    return parse_space(document[name], name) if document.get(name) is not None else None


def _format(folder: Path, document: Mapping[str, Any]) -> str:
    """The storage format: what the metadata says, held against the files; very old metadata do not say."""
    said, found = document.get("data_format"), _formats_found(folder)
    if said is not None and said not in FORMATS:
        raise FormatError(
            f"data_format in metadata.json is {said!r}; known are {', '.join(FORMATS)}",
            hint="a newer rbtool may know it: pip install --upgrade rbtool",
        )
    if said is None:
        return found[0] if found else "hdf5"
    if found and said not in found:
        raise FormatError(
            f"data_format in metadata.json is {said!r}, the files in {folder} are {' and '.join(found)}",
            hint="copy or fetch the dataset again, whole",
        )
    return str(said)


def _formats_found(folder: Path) -> list[str]:
    """Formats of which the folder holds files; one episode is enough to tell."""
    found = ["hdf5"] if (folder / HDF5_FILE).is_file() else []
    episode = next((child for child in sorted(folder.glob("[0-9]*")) if any(child.glob("part-*"))), None)
    suffixes = {part.suffix[1:] for part in episode.glob("part-*")} if episode else set()
    return [*found, *(name for name in FORMATS[1:] if name in suffixes)]
