"""Where a source's own tools keep what they fetched, so that it can be used without the network."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DatasetNotFoundError, UsageError
from . import fs
from .locate import safe_id
from .reader import Reader

__all__ = ["LocalCache"]


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A source's cache: the environment variable that names it, and where it is without."""

    source: str
    variable: str
    default: str

    @property
    def folder(self) -> Path:
        """The folder that holds `<id>`."""
        try:
            return fs.expanded(os.environ.get(self.variable) or self.default).absolute()
        except UsageError as error:
            error.hint = f"set {self.variable}, or HOME"
            raise

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the folder of a dataset, or raise DatasetNotFoundError that names the folder searched."""
        path = self.folder / safe_id(dataset_id)
        if reader.recognises(path):
            return path
        raise DatasetNotFoundError(
            f"the local {self.source} cache {self.folder} has no dataset {dataset_id!r}: looked in {path}",
            hint=self._near(dataset_id, reader),
        )

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Ids of all datasets in the cache."""
        for folder, names, _ in os.walk(self.folder):
            names[:] = sorted(name for name in names if not name.startswith("."))
            path = Path(folder)
            if path != self.folder and reader.recognises(path):
                names.clear()
                yield path.relative_to(self.folder).as_posix()

    def _near(self, dataset_id: str, reader: type[Reader]) -> str:
        known = list(self.ids(reader))
        bare = re.sub(r"-v\d+$", "", dataset_id)
        versions = [name for name in known if re.fullmatch(re.escape(bare) + r"-v\d+", name)]
        near = versions or difflib.get_close_matches(dataset_id, known, n=3, cutoff=0.4)
        if near:
            return f"there {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
        return f"{self.variable} names the folder, if it is another; `rbtool convert PATH DEST` takes any path"
