"""Downloads OGBench's published files, or takes them from where ogbench keeps them; never through ogbench itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...core.errors import DatasetNotFoundError
from ...core.format.converter import Ids, LocalCache, Reader, RemoteFile, safe_id
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource
from .datasets import VALIDATION, file_name, is_id, is_large, published

_SUFFIX = ".npz"


def file_names(dataset_id: str) -> tuple[str, str]:
    """Return the names of the file of a dataset and of its validation file."""
    name = file_name(dataset_id)
    return f"{name}{_SUFFIX}", f"{name}{VALIDATION}{_SUFFIX}"


class OgbenchCache(LocalCache):
    """The folder in which ogbench keeps what it downloaded: two files a dataset, without any folders."""

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the file of a dataset, next to which its validation file is; DatasetNotFoundError if one lacks."""
        safe_id(dataset_id)
        if not is_id(dataset_id):
            raise not_found(dataset_id, list(published()), self.source)
        for name in file_names(dataset_id):
            if not (self.folder / name).is_file():
                raise DatasetNotFoundError(
                    f"the local {self.source} cache {self.folder} has no dataset {dataset_id!r}: looked for {name}",
                    hint=f"rbtool download ogbench {dataset_id} fetches it; {self.variable} names the folder, if it is "
                    "another",
                )
        return self.folder / file_names(dataset_id)[0]

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Ids of all datasets of which both files are there."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if is_id(path.stem) and path.with_name(file_names(path.stem)[1]).is_file():
                yield path.stem


class OgbenchSource(MirrorSource):
    """OGBench's server, or the mirrors that `OGBENCH_URL` names: base URLs (http or https) in the order to try them.

    A dataset is two files. Each must have OGBench's columns, and the checksums that the archive states of them, before
    it is taken; the next mirror is asked where it has not. Ids that are not published are asked for if they have the
    form of one.
    """

    name = "ogbench"
    title = "OGBench"
    variable = "OGBENCH_URL"
    defaults = ("https://rail.eecs.berkeley.edu/datasets/ogbench",)
    signatures = (b"PK\x03\x04",)
    server_hint = "OGBench's server is down at times: try later, or name a mirror: OGBENCH_URL=BASE"
    local_cache = OgbenchCache("ogbench", "OGBENCH_DATASET_DIR", "~/.ogbench/data")

    def list_ids(self) -> Ids:
        """List the published ids, which are part of this package: nothing is requested."""
        return Ids(published())

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the addresses of both files on each mirror."""
        return {name: [f"{base}/{name}" for base in self.bases] for name in file_names(dataset_id)}

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Ask for size and version of both files."""
        if not is_id(dataset_id):
            raise not_found(dataset_id, list(published()), self.name)
        if is_large(dataset_id):
            raise DatasetNotFoundError(
                f"{dataset_id} is published as a folder of many files, which cannot be downloaded as one dataset",
                hint=f"fetch its files from {self.remote}/{dataset_id}, and convert each: rbtool convert FILE.npz DEST",
            )
        files: list[RemoteFile] = []
        for path, addresses in self.addresses(dataset_id).items():
            try:
                with self.explained():
                    files.append(self.described(path, addresses))
            except DatasetNotFoundError as error:
                if file_name(dataset_id) in published():
                    raise
                raise not_found(dataset_id, list(published()), self.name) from error
        return files

    def require_readable(self, path: Path) -> None:
        """Read a file; FormatError if it is not in OGBench's layout, or has not the checksums that it states."""
        from .file import OgbenchFile  # numpy takes longer to load than a listing

        with OgbenchFile(path) as file:
            file.verify()
