"""What the trunk knows of TorchRL's layouts: where they are, opening them, writing them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..encodings.compact import BUFFER, STORAGE_FOLDER, CompactForm, FilledStorage
from ..encodings.foreign import ForeignForm
from ..encodings.h5 import Compression, begins_as_h5
from ..errors import FormatError, RbtoolError, UsageError
from ..format.contracts import StepReader
from ..format.documents import load_json
from ..format.manifest import has_manifest
from ..format.memmap.tree import read_tree
from ..format.open_files import OpenFiles
from ..progress import Progress
from ..ted.schema import Field, Key
from .layout import STORAGE_SHAPE, TorchrlKeys
from .reader import TorchrlReader
from .writer import TorchrlPlan, write_torchrl


class TorchrlForm(ForeignForm):
    """TorchRL's flat, nested and H5 layouts of whole episodes."""

    def form_at(self, path: Path) -> CompactForm | None:
        try:
            if path.is_file():
                return "h5" if _is_h5(path) else None
            if has_manifest(path) or not (path / "meta.json").is_file():
                return None
            document = load_json(path / "meta.json")
        except UsageError:
            raise  # the file is in use
        except (RbtoolError, OSError):
            return None
        if not isinstance(document, dict) or STORAGE_SHAPE not in document:
            return None
        return "nested" if _is_nested(path) else "flat"

    def find(self, path: Path) -> Path | None:
        if self.form_at(path) is not None:
            return path
        if not path.is_dir() or has_manifest(path):
            return None
        folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
        if folder != path and self.form_at(folder) is not None:
            return folder
        files = sorted(folder.glob("*.h5")) if folder.is_dir() else []
        return files[0] if len(files) == 1 and self.form_at(files[0]) == "h5" else None

    def open(
        self, path: Path, options: Mapping[str, Any] | None = None, held: Collection[Key] | None = None
    ) -> TorchrlReader:
        form, keys = self.form_at(path), TorchrlKeys.of(options or {})
        if form is None:
            raise FormatError(f"{path} is not in TorchRL's flat, nested or H5 layout")
        return TorchrlReader(path, form, keys, frozenset() if held is None else frozenset(keys.dones).difference(held))

    def done_key(self, options: Mapping[str, Any]) -> Key:
        return TorchrlKeys.of(options).done

    def bytes(self, fields: Sequence[Field], filled: FilledStorage, form: CompactForm, episodes: int) -> int:
        return TorchrlPlan.of(fields, filled, TorchrlKeys(), form).bytes(episodes)

    def write(
        self, source: StepReader, target: Path, form: CompactForm, filled: FilledStorage, options: Mapping[str, Any],
        progress: Progress, compression: Compression | None = None,
    ) -> None:  # fmt: skip
        write_torchrl(source, target, form, filled, TorchrlKeys.of(options), progress, compression)


def _is_nested(folder: Path) -> bool:
    """Whether the leaves are ragged; a damaged folder raises where it is read."""
    try:
        with OpenFiles(folder) as files:
            return any(leaf.nested for leaf in read_tree(files, exact=False).values())
    except (RbtoolError, OSError):
        return False


def _is_h5(path: Path) -> bool:
    """Whether a file is HDF5 in TorchRL's layout. A file of ours has a manifest in front of the HDF5 data."""
    if not begins_as_h5(path):
        return False
    from ..encodings.hdf5_files import root_members  # loads h5py, which is needed for such files alone

    try:
        return STORAGE_SHAPE in root_members(path)
    except (OSError, RuntimeError, ValueError):
        return False
