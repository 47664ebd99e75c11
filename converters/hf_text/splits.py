"""Which files are which split: in repositories of Parquet files, and in folders that the datasets library saved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeGuard

from ...core.errors import FormatError
from ...core.format.documents import load_json

STATE = "state.json"
"""What `save_to_disk` writes next to the Arrow files of a split."""
INFO = "dataset_info.json"
SPLITS = "dataset_dict.json"
"""What `save_to_disk` writes next to the folders of several splits."""
_SHARD = re.compile(r"(?P<split>.+?)-\d+-of-\d+(-[0-9a-f]+)?")
_DATA = "data"
_FIRST = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Split:
    """A split of a dataset: its name and its files, in their order; `config` is the folder of its configuration."""

    config: str
    name: str
    files: tuple[str, ...]

    @property
    def id(self) -> str:
        """How the split is named behind the repository."""
        return f"{self.config}:{self.name}" if self.config else self.name


def splits_among(paths: Iterable[str]) -> list[Split]:
    """Group the Parquet files of a repository into splits, by the names that the hub gives them.

    `data/train-00000-of-00002-0123abcd.parquet` is of the split `train`, and so is `train.parquet`; another folder than
    `data` is a configuration. Training data come first, then validation and test data.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(paths):
        place = PurePosixPath(path)
        if place.suffix.lower() != ".parquet" or any(part.startswith(".") for part in place.parts):
            continue
        shard = _SHARD.fullmatch(place.stem)
        folder = place.parent.as_posix()
        config = "" if folder in (".", _DATA) else folder.removeprefix(f"{_DATA}/")
        found.setdefault((config, shard["split"] if shard else place.stem), []).append(path)
    splits = [Split(config, name, tuple(files)) for (config, name), files in found.items()]
    return sorted(splits, key=lambda split: (split.config, *order_of(split.name)))


def order_of(split: str) -> tuple[int, str]:
    """The place of a split among the others."""
    return next((at for at, start in enumerate(_FIRST) if split.startswith(start)), len(_FIRST)), split


def chosen(splits: Sequence[Split], wanted: str) -> list[Split]:
    """Choose the splits that `wanted` names: a configuration, a split, both as `CONFIG:SPLIT`, or "" for all."""
    return [split for split in splits if wanted in ("", split.config, split.id)]


def saved_splits(path: Path) -> list[tuple[str, list[Path]]]:
    """List the splits of a folder that `save_to_disk` wrote, each with its Arrow files; one that is alone has no name.

    None of either for another folder; FormatError for one whose lists name no files of it.
    """
    if (path / SPLITS).is_file():
        listed = load_json(path / SPLITS)
        names = listed.get("splits") if isinstance(listed, dict) else None
        if not isinstance(names, list) or not all(_is_name(name) for name in names):
            raise FormatError(f"{path / SPLITS} does not list the splits of the folder")
        return [(name, _arrow_files(path / name)) for name in sorted(names, key=order_of)]
    if (path / STATE).is_file() and (path / INFO).is_file():
        return [("", _arrow_files(path))]
    return []


def _arrow_files(folder: Path) -> list[Path]:
    state = load_json(folder / STATE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    stated = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    names = [name for name in stated if _is_name(name)]
    if not names or len(names) < len(stated):
        raise FormatError(f"{folder / STATE} does not list Arrow files of the folder")
    return [folder / name for name in names]


def _is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name
