"""Metadata of Minari datasets (files, id, totals, spaces, and TorchRL's document made of them) and of namespaces.

Gymnasium spaces are JSON in a string inside JSON, with `Infinity` literals:
`{"type": "Box", "dtype", "shape", "low", "high"}`, `Discrete`, `MultiDiscrete`, `MultiBinary`, `Text`, and the
nesting `Dict` and `Tuple` with their `subspaces`. They are read without gymnasium.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ...core.errors import FormatError, UsageError
from ...core.format.converter import safe_id
from ...core.format.documents import load_json, parse_json, plain
from ...core.format.files import no_match, read_regular
from ...core.format.manifest import require_space

Space: TypeAlias = dict[str, Any]
SpacePath: TypeAlias = tuple[str | int, ...]
"""Names of Dict entries and indices of Tuple elements, from the root of the space to a leaf."""

SPACE_TYPES = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")
_ENTRIES = {
    "Box": ("dtype", "shape", "low", "high"), "Discrete": ("n",), "MultiDiscrete": ("nvec",), "MultiBinary": ("n",),
    "Dict": ("subspaces",), "Tuple": ("subspaces",),
}  # fmt: skip
_SMALLEST_IMAGE = 32  # the smallest side of what Minari treats as an image


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """One leaf of a space: its kind and the form of a row. The file may have another element type than the space."""

    path: SpacePath
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]


def parse_space(document: Any, name: str) -> Space:
    """Read a space from JSON, as text or parsed; raise FormatError for an invalid one."""
    where = f"{name} in metadata.json"
    space = parse_json(document, where) if isinstance(document, str) else document
    require_space(space, where)
    try:
        list(space_leaves(space))
    except FormatError as error:
        raise FormatError(f"{where} {error}") from error
    return dict(space)


def space_leaves(space: Mapping[str, Any] | None, path: SpacePath = ()) -> Iterator[SpaceLeaf]:
    """Yield the leaves of a space, in its order."""
    if space is None:
        raise FormatError("has a subspace that is null")
    kind = str(space.get("type"))
    missing = [entry for entry in _ENTRIES.get(kind, ()) if space.get(entry) is None]
    if missing:
        raise FormatError(f"has a space of type {kind} without {missing[0]!r}")
    if kind == "Dict":
        for name, child in space["subspaces"].items():
            yield from space_leaves(child, (*path, name))
    elif kind == "Tuple":
        for number, child in enumerate(space["subspaces"]):
            yield from space_leaves(child, (*path, number))
    elif kind == "Text":
        yield SpaceLeaf(path, "text", "uint8", ())
    elif kind in _LEAVES:
        yield _LEAVES[kind](space, path)
    else:
        raise FormatError(f"has a space of type {kind!r}; known: {', '.join(SPACE_TYPES)}")


def _box(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    shape = tuple(int(size) for size in space["shape"])
    return SpaceLeaf(path, "image" if _is_image(space, shape) else "array", str(space["dtype"]), shape)


def _is_image(space: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    return (
        len(shape) in (2, 3)
        and min(shape[:2]) >= _SMALLEST_IMAGE
        and space["dtype"] == "uint8"
        and bool(np.all(np.asarray(space["low"]) == 0))
        and bool(np.all(np.asarray(space["high"]) == 255))
    )


def _multi_discrete(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    return SpaceLeaf(path, "array", str(space.get("dtype") or "int64"), np.shape(space["nvec"]))


def _multi_binary(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    sizes = space["n"] if isinstance(space["n"], list) else [space["n"]]
    return SpaceLeaf(path, "array", "int8", tuple(int(size) for size in sizes))


def _discrete(space: Mapping[str, Any], path: SpacePath) -> SpaceLeaf:
    int(space["n"])
    return SpaceLeaf(path, "array", str(space.get("dtype") or "int64"), ())


_LEAVES = {"Box": _box, "Discrete": _discrete, "MultiBinary": _multi_binary, "MultiDiscrete": _multi_discrete}


def strict_space(space: Mapping[str, Any]) -> Space:
    """Return the space as strict JSON, with uniform bounds as a single number."""
    strict = dict(space)
    for bound in ("low", "high"):
        if bound in space:
            strict[bound] = _one_if_uniform(space[bound])
    children = space.get("subspaces")
    if isinstance(children, Mapping):
        strict["subspaces"] = {name: strict_space(child) for name, child in children.items()}
    elif children is not None:
        strict["subspaces"] = [strict_space(child) for child in children]
    return dict(plain(strict))


def _one_if_uniform(bound: Any) -> Any:
    """Collapse nested lists that repeat one number, as the bounds of an image do 100,000 times."""
    values = np.asarray(bound)
    if not values.size or not (values == values.flat[0]).all():
        return bound
    while isinstance(bound, list):
        bound = bound[0]
    return bound


METADATA_FILE = "metadata.json"
NAMESPACE_FILE = "namespace_metadata.json"
HDF5_FILE = "main_data.hdf5"
FORMATS = ("hdf5", "arrow", "parquet")
_INDEX_NAMES = 50_000
_VERSIONED = re.compile(r".*-v\d+")
_TYPICAL = frozenset({"total_episodes", "total_steps", "data_format", "dataset_id", "minari_version", "action_space"})


def data_folder(path: Path) -> Path:
    """Return the folder with the files: `path/data`, or `path` itself if only that has them."""
    inner = path / "data"
    return inner if _holds_data(inner) or not _holds_data(path) else path


def _holds_data(folder: Path) -> bool:
    return (folder / METADATA_FILE).is_file() or (folder / HDF5_FILE).is_file()


def looks_like_minari(path: Path) -> bool:
    """Return whether this folder has Minari's files, sound or not; raises OSError only if the disk fails."""
    try:
        folder = data_folder(path)
        if (folder / HDF5_FILE).is_file():
            return True
        document = load_json(folder / METADATA_FILE)
        return isinstance(document, dict) and len(_TYPICAL & document.keys()) > 1
    except (OSError, FormatError) as error:
        return no_match(error)


@dataclass(frozen=True, slots=True)
class MinariMetadata:
    """The contents of `metadata.json`, checked as far as possible without the data.

    Totals and spaces are None if an old file does not have them.
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
        """Read the metadata of the dataset at `path`, or raise FormatError for an invalid entry."""
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
        """Return the known spaces, by their names in a manifest."""
        spaces = {"observation": self.observation_space, "action": self.action_space}
        return {name: space for name, space in spaces.items() if space is not None}

    def documents(self) -> dict[str, bytes]:
        """Return the bytes of the metadata files: the dataset's own and, if it exists, its namespace's."""
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
        raise FormatError(f"{path} holds a JSON {type(document).__name__}, expected an object")
    return raw, document


def _text(document: Mapping[str, Any], name: str, default: str) -> str:
    value = document.get(name, default)
    if not isinstance(value, str) or not value:
        raise FormatError(f"{name} in metadata.json is {value!r}, expected a name")
    return value


def _count(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise FormatError(f"{name} in metadata.json is {value!r}, expected a whole number that is not negative")
    return value


def _space(document: Mapping[str, Any], name: str) -> Space | None:
    return parse_space(document[name], name) if document.get(name) is not None else None


def _format(folder: Path, document: Mapping[str, Any]) -> str:
    """Return the storage format in the metadata, compared with the files; very old metadata do not state it."""
    named, found = document.get("data_format"), _formats_found(folder)
    if named is not None and named not in FORMATS:
        raise FormatError(
            f"data_format in metadata.json is {named!r}; known: {', '.join(FORMATS)}",
            hint="a newer rbtool may know it: pip install --upgrade rbtool",
        )
    if named is None:
        return found[0] if found else "hdf5"
    if found and named not in found:
        raise FormatError(
            f"data_format in metadata.json is {named!r}, but the files in {folder} are {' and '.join(found)}",
            hint="copy or fetch the dataset again, whole",
        )
    return str(named)


def _formats_found(folder: Path) -> list[str]:
    """Return the formats of the files in the folder; only one episode is examined."""
    found = ["hdf5"] if (folder / HDF5_FILE).is_file() else []
    episode = next((child for child in sorted(folder.glob("[0-9]*")) if any(child.glob("part-*"))), None)
    suffixes = {part.suffix[1:] for part in episode.glob("part-*")} if episode else set()
    return [*found, *(name for name in FORMATS[1:] if name in suffixes)]


def ids_in(repository: str, index: bytes | None) -> tuple[list[str], list[str]]:
    """Return the ids in a repository, from its index or, if it has none, from its name; and problems of the index."""
    name = repository.partition("/")[2]
    if index is None:
        if _VERSIONED.fullmatch(name):
            return [name], []
        return [], [f"hf://{repository} has no {NAMESPACE_FILE}, and its name is not that of a dataset"]
    origin = f"{NAMESPACE_FILE} of hf://{repository}"
    listed = _listed(index, origin)
    ids = {entry for entry in listed if is_dataset_id(entry) and f"{entry}/".startswith(f"{name}/")}
    strange = (entry for entry in listed if not isinstance(entry, str) or entry not in ids)
    problems = [
        f"{origin} lists {entry!r:.80}, which cannot be a dataset in it" for entry in itertools.islice(strange, 3)
    ]
    return sorted(ids), problems


def _listed(raw: bytes, origin: str) -> list[Any]:
    """Read the datasets that a namespace's index lists."""
    document = parse_json(raw, origin)
    listed = document.get("datasets") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise FormatError(f"{origin} has no list of datasets")
    if len(listed) > _INDEX_NAMES:
        raise FormatError(f"{origin} lists {len(listed):,} datasets, expected {_INDEX_NAMES:,} at most")
    return listed


def is_dataset_id(name: object) -> bool:
    """Return whether the name of a dataset in a remote can be an id: safe as a path, and printable."""
    if not isinstance(name, str) or not name.isprintable() or " " in name:
        return False
    try:
        return bool(safe_id(name))
    except UsageError:
        return False


def totals_in(raw: bytes) -> tuple[int | None, int | None]:
    """Read the steps and episodes from `metadata.json`; None for missing or invalid ones."""
    try:
        document = parse_json(raw, METADATA_FILE)
    except FormatError:
        document = None
    found = [document.get(name) if isinstance(document, dict) else None for name in ("total_steps", "total_episodes")]
    steps, episodes = (value if type(value) is int and value >= 0 else None for value in found)
    return steps, episodes


_DATASET_ID = re.compile(r"(?:(?P<namespace>.+)/)?(?P<name>[^/]+?)(?:-v(?P<version>\d+))?")
_ENV_ID = re.compile(r"(?:(?P<namespace>[\w:-]+)/)?(?P<name>[\w:.-]+?)(?:-v(?P<version>\d+))?")


def env_metadata(metadata: MinariMetadata) -> dict[str, Any] | None:
    """Return TorchRL's `env_metadata.json`, or None if its types of specs cannot express the spaces.

    It contains a relative path, so that the document is the same on every machine.
    """
    spaces = [_torchrl_space(space) for space in (metadata.observation_space, metadata.action_space)]
    if None in spaces:
        return None
    document = metadata.document
    named = _DATASET_ID.fullmatch(metadata.id)
    parts = named.groupdict() if named else {"namespace": None, "name": metadata.id, "version": None}
    return {
        "env_spec": _env_spec(document.get("env_spec")),
        "total_episodes": metadata.total_episodes,
        "total_steps": metadata.total_steps,
        "dataset_id": metadata.id,
        "combined_datasets": document.get("combined_datasets", []),
        "observation_space": spaces[0],
        "action_space": spaces[1],
        "data_path": "data",
        "minari_version": document.get("minari_version"),
        "namespace": parts["namespace"],
        "dataset_name": parts["name"],
        "version": _number(parts["version"]),
    }


def _env_spec(text: Any) -> dict[str, Any] | None:
    """Return the environment's specification with its id split into parts, as in gymnasium's dataclass."""
    try:
        spec = parse_json(text, "env_spec") if isinstance(text, str) else text
    except FormatError:
        return None
    if not isinstance(spec, dict):
        return None
    named = _ENV_ID.fullmatch(str(spec.get("id", "")))
    if named is None:
        return spec
    return {**spec, "namespace": named["namespace"], "name": named["name"], "version": _number(named["version"])}


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _torchrl_space(space: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a Box, a Discrete from 0 on, or a Dict of these as TorchRL writes them; None for other spaces."""
    if space is None:
        return None
    if space["type"] == "Box":
        return {name: space[name] for name in ("type", "low", "high", "dtype", "shape")}
    if space["type"] == "Discrete" and not space.get("start"):
        return {"type": "Discrete", "n": space["n"], "dtype": space.get("dtype", "int64"), "shape": []}
    if space["type"] == "Dict":
        children = {name: _torchrl_space(child) for name, child in space["subspaces"].items()}
        if all(children[name] or child["type"] == "Text" for name, child in space["subspaces"].items()):
            return {"type": "Dict", "subspaces": children}
    return None
