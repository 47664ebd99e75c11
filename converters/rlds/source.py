"""Downloads the RLDS originals of Open X-Embodiment from public buckets, over https."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ...core.errors import AuthorisationError, DatasetNotFoundError, RbtoolError, UsageError
from ...core.format.converter import Advance, Ids, LocalCache, Note, RemoteDataset, RemoteFile, Source, safe_id
from ...core.remote.bucket import Bucket, BucketObject
from ...core.remote.fetch import fetch_files
from ...core.remote.transport import Transport

_VARIABLE = "RLDS_REMOTE"
_DEFAULTS = "gs://gresearch/robotics gs://gdm-robotics-open-x-embodiment"
_ADDRESS = re.compile(r"gs://(?P<bucket>[\w.-]+)(?:/(?P<prefix>[\w./-]*))?", re.ASCII)
_FEATURES = "features.json"


class BucketFolder(NamedTuple):
    """A folder of a bucket with datasets in it."""

    bucket: Bucket
    prefix: str

    @property
    def address(self) -> str:
        """Where it is, for people."""
        return f"gs://{self.bucket.name}/{self.prefix}".rstrip("/")


class RldsSource(Source):
    """The buckets of Open X-Embodiment, or those that `RLDS_REMOTE` names: `gs://BUCKET/FOLDER`, several with spaces.

    An id is the path of a version below the folder, like `bridge/0.1.0`: a folder with `features.json`. The first
    bucket that has it counts. Sizes and checksums come from the bucket. `--local` takes datasets from the folder of
    TensorFlow Datasets.
    """

    name = "rlds"
    local_cache = LocalCache("rlds", "TFDS_DATA_DIR", "~/tensorflow_datasets")

    @property
    def remote(self) -> str:
        """The buckets."""
        return os.environ.get(_VARIABLE) or _DEFAULTS

    @cached_property
    def _folders(self) -> list[BucketFolder]:
        found = []
        for address in self.remote.split():
            match = _ADDRESS.fullmatch(address)
            if match is None:
                raise UsageError(f"{_VARIABLE} is {address!r}, expected gs://BUCKET or gs://BUCKET/FOLDER")
            prefix = (match["prefix"] or "").strip("/")
            found.append(BucketFolder(Bucket(match["bucket"]), f"{prefix}/" if prefix else ""))
        return found

    def list_ids(self) -> Ids:
        """List the versions of all datasets: a request for every 1,000 files or so."""
        found: set[str] = set()
        closed: list[RbtoolError] = []
        for folder in self._folders:
            names = (one.name.removeprefix(folder.prefix) for one in _objects(folder, folder.prefix, closed))
            found |= {name.removesuffix(f"/{_FEATURES}") for name in names if name.endswith(f"/{_FEATURES}")}
        if not found:
            raise next(iter(closed), DatasetNotFoundError(f"{self.remote} has no datasets"))
        return Ids(tuple(sorted(found)), tuple(one.message for one in closed), unreachable=bool(closed))

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """List the files of a version in the first bucket that has it."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        closed: list[RbtoolError] = []
        for folder in self._folders:
            prefix = f"{folder.prefix}{safe_id(dataset_id)}/"
            files = _files(_objects(folder, prefix, closed), prefix)
            if any(file.path == _FEATURES for file in files):
                return RemoteDataset(dataset_id, f"{folder.address}/{dataset_id}", None, files)
        said = f"{self.remote} has no dataset {dataset_id!r}: no folder of that name has a {_FEATURES}"
        raise next(iter(closed), DatasetNotFoundError(said))

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, a few at a time; all are of one bucket."""
        transport: Transport = self._folders[0].bucket
        for one in self._folders:
            if files and files[0].addresses[0].startswith(f"gs://{one.bucket.name}/"):
                transport = one.bucket
        fetch_files(files, folder, transport, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        for folder in self.__dict__.get("_folders", ()):
            folder.bucket.close()


def _objects(folder: BucketFolder, prefix: str, closed: list[RbtoolError]) -> list[BucketObject]:
    """List objects; a bucket that is closed or gone has none, and its error is added to `closed`."""
    try:
        return folder.bucket.objects(prefix)
    except (AuthorisationError, DatasetNotFoundError) as error:
        closed.append(error)
        return []


def _files(objects: Sequence[BucketObject], prefix: str) -> tuple[RemoteFile, ...]:
    """Return the visible files directly in a folder."""
    found = [
        RemoteFile(one.name.removeprefix(prefix), one.size, one.checksum, (one.address,))
        for one in objects
        if not one.name.removeprefix(prefix).startswith(".") and "/" not in one.name.removeprefix(prefix)
    ]
    return tuple(sorted(found, key=lambda file: file.path))
