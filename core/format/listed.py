"""The files that a manifest lists, open from the start; the small ones are compared with their digest every time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import CorruptDataError, DatasetNotFoundError
from .digest import FileRecord, digest_bytes
from .manifest import MANIFEST, Manifest, is_canonical
from .opened import OpenFiles
from .strict_json import parse_json

__all__ = ["ListedFiles", "changed"]


class ListedFiles(OpenFiles):
    """The dataset or checkpoint in the folder `root`: its manifest, and every file that it lists, open.

    Open it with `at`, so that all are of one generation. DatasetNotFoundError for a folder without a manifest; what is
    missing of the files is said where they are asked for.
    """

    _missing = "; the manifest lists it"

    def __init__(self, root: Path, opened: Mapping[str, int] | None = None) -> None:
        missing = DatasetNotFoundError(f"{root} is no rbtool dataset: it has no {MANIFEST}")
        try:
            super().__init__(root, opened)
        except (FileNotFoundError, NotADirectoryError):
            raise missing from None
        try:
            if self.size(MANIFEST) is None:
                raise missing
            self.manifest = Manifest.from_dict(
                parse_json(super().read(MANIFEST), str(root / MANIFEST)), str(root / MANIFEST)
            )
            self._files = {file.path: file for file in self.manifest.files}
            for name in self._files:
                self._opened(name)
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def listed_size(self, name: str) -> int | None:
        """Return the size of a file as it is listed; None if it is not."""
        file = self._files.get(name)
        return None if file is None else file.size

    def read(self, name: str) -> bytes:
        """Return the bytes of a small file; CorruptDataError unless they are those that were written."""
        path, file = self.root / name, self._files.get(name)
        if file is None:
            raise CorruptDataError(f"{path} is not listed in the manifest, which has to list it")
        problem = self.size_problem(file)
        if problem:
            raise CorruptDataError(problem)
        data = super().read(name)
        if digest_bytes(data) != file.digest:
            raise changed(path)
        return data

    def size_problem(self, file: FileRecord) -> str:
        """Say what is wrong with the size of a listed file; nothing where it is right."""
        path, found = self.root / file.path, self.size(file.path)
        if found is None:
            return f"{path} is missing; the manifest lists it"
        return f"{path} has {found:,} bytes, the manifest says {file.size:,}" if found != file.size else ""

    def problem(self, file: FileRecord) -> str:
        """Say what is wrong with a listed file, of which all bytes are read; nothing where it is as it was written."""
        if found := self.size_problem(file):
            return found
        return "" if self.digest(file.path) == file.digest else str(changed(self.root / file.path))

    def manifest_problem(self) -> str:
        """Say whether the manifest is not byte for byte as it was written."""
        return "" if is_canonical(super().read(MANIFEST)) else str(changed(self.root / MANIFEST))

    def check_sizes(self) -> None:
        """Raise CorruptDataError for the first listed file that is missing or has another size."""
        for file in self.manifest.files:
            if problem := self.size_problem(file):
                raise CorruptDataError(problem)

    def verify(self, files: Iterable[FileRecord]) -> None:
        """Raise CorruptDataError for the first of these listed files that is missing, cut or changed."""
        for file in files:
            if problem := self.problem(file):
                raise CorruptDataError(problem)


def changed(path: Path) -> CorruptDataError:
    """The error for a file whose bytes are not those that were written."""
    return CorruptDataError(f"{path} was changed after it was written: its digest does not match the manifest")
