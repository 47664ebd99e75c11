"""Downloads D4RL's published files, or takes them from the cache of the d4rl package; never through d4rl itself."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...core.encodings.h5_layout import HDF5_SIGNATURE
from ...core.errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from ...core.format import fs
from ...core.format.documents import written_time
from ...core.format.reader import Reader
from ...core.format.sources import (
    Advance,
    Catalogue,
    CatalogueEntry,
    Ids,
    LocalCache,
    Note,
    RemoteDataset,
    RemoteFile,
    safe_id,
)
from ...core.remote.http import HttpSource
from ...core.remote.transport import require_network, retrying
from .datasets import D4rlDataset, dataset_named, not_in_cache, published

_URL = "D4RL_URL"
_SERVER = "rail.eecs.berkeley.edu/datasets/offline_rl"
_DEFAULT = (f"https://{_SERVER}", f"http://{_SERVER}")
_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.ASCII)  # no password: addresses are recorded


class D4rlCache(LocalCache):
    """The folder in which the d4rl package keeps what it downloaded: files by name, without any folders."""

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the file of a dataset; DatasetNotFoundError, with the nearest ids, for one that is not there."""
        dataset = dataset_named(safe_id(dataset_id))
        path = self.folder / dataset.file_name
        if not path.is_file():
            raise not_in_cache(dataset, self.folder, self.variable)
        return path

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Ids of all datasets whose file is there."""
        folder = self.folder
        return (dataset.id for dataset in published().values() if (folder / dataset.file_name).is_file())


class D4rlSource(HttpSource):
    """D4RL's server, or the mirrors that `D4RL_URL` names: base URLs (http or https) in the order in which to try them.

    Files whose size and sha256 are known must have both. Any other is opened, and must be HDF5 with D4RL's columns,
    before it is taken; the next mirror is asked where it is not.
    """

    name = "d4rl"
    namespaced = False
    local_cache = D4rlCache("d4rl", "D4RL_DATASET_DIR", "~/.d4rl/datasets")

    @property
    def bases(self) -> tuple[str, ...]:
        """The base URLs, without a slash at the end; UsageError if the variable has another form."""
        named = os.environ.get(_URL, "").replace(",", " ").split()
        for base in named:
            if not _ADDRESS.fullmatch(base):
                raise UsageError(
                    f"{_URL} has {re.sub('//[^/]*@', '//…@', base)!r}; base URLs like {_DEFAULT[0]} are expected",
                    hint=f"unset it for {_DEFAULT[0]}",
                )
        return tuple(base.rstrip("/") for base in named) or _DEFAULT

    @property
    def remote(self) -> str:
        """The first base URL."""
        return self.bases[0]

    def list_ids(self) -> Ids:
        """List the ids, which are part of this package: nothing is requested."""
        return Ids(tuple(published()))

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets with the sizes that are known; nothing is requested."""
        entries = tuple(CatalogueEntry(dataset.id, dataset.size) for dataset in published().values())
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries)

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the address of the file on each mirror."""
        dataset = dataset_named(dataset_id)
        return {dataset.file_name: [f"{base}/{dataset.file}" for base in self.bases]}

    def checksums(self, dataset_id: str) -> Mapping[str, str]:
        """Return the sha256 where it is known."""
        dataset = dataset_named(dataset_id)
        return {} if dataset.sha256 is None else {dataset.file_name: f"sha256:{dataset.sha256}"}

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Describe the file of a dataset; a server is asked only where size and sha256 are not known."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        dataset = dataset_named(dataset_id)
        ((path, addresses),) = self.addresses(dataset_id).items()
        checksum = self.checksums(dataset_id).get(path)
        if dataset.size is None or checksum is None:
            with _naming_replacement(dataset):
                file = self._described(path, addresses)
        else:
            file = RemoteFile(path, dataset.size, checksum, tuple(addresses))
        return RemoteDataset(dataset_id, addresses[0], None, (file,))

    def _described(self, path: str, addresses: Sequence[str]) -> RemoteFile:
        """Describe a file as the first mirror has it that sends HDF5, with that mirror and those after it."""
        failures: list[RbtoolError] = []
        for count, address in enumerate(addresses):
            require_network(f"asking {urlsplit(address).hostname}")
            try:
                size, version = retrying(lambda address=address: self._asked(path, address))  # type: ignore[misc]
            except RbtoolError as error:
                failures.append(error)
                continue
            return RemoteFile(path, size, None, tuple(addresses[count:]), version)
        raise failures[0]

    def _asked(self, path: str, address: str) -> tuple[int | None, str | None]:
        with self.transport.open_version(address, 0) as answer:
            head = b""
            while len(head) < len(HDF5_SIGNATURE) and (block := next(answer.blocks, b"")):
                head += block
            if not head.startswith(HDF5_SIGNATURE):
                raise _no_file(path, address, f"it begins with {head[:16]!r}")
            return answer.size, answer.version

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which states the time limit of episodes: the names of some files do not."""
        return {"id": dataset_id}

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`."""
        for file in files:
            dataset = _dataset_at(file)
            with _naming_replacement(dataset):
                if file.checksum is not None:
                    super().download([file], folder, progress, note)
                else:
                    self._download_unverified(file, folder, progress, note)

    def _download_unverified(self, file: RemoteFile, folder: Path, progress: Advance, note: Note) -> None:
        """Bring a file whose checksum is not known from the first mirror that has it and sends HDF5."""
        failures: list[RbtoolError] = []
        for address in file.addresses:
            received = 0

            def count(amount: int) -> None:
                nonlocal received
                received += amount
                progress(amount)

            try:
                super().download([replace(file, addresses=(address,))], folder, count, note)
                _require_readable(folder / file.path, address)
            except (FormatError, NetworkError, AuthorisationError, DatasetNotFoundError) as error:
                progress(-received)
                failures.append(error)
                if address != file.addresses[-1]:
                    note(f"{error.message}: the next mirror is asked")
                continue
            return
        raise failures[0]


def _require_readable(path: Path, address: str) -> None:
    """Open what came, and remove it if it is not D4RL's format."""
    from .file import D4rlFile  # h5py takes longer to load than a listing

    try:
        D4rlFile(path).close()
    except FormatError as error:
        fs.remove(path)
        raise _no_file(path.name, address, error.message) from error


def _no_file(name: str, address: str, why: str) -> CorruptDataError:
    return CorruptDataError(
        f"{urlsplit(address).hostname} sends no D4RL file as {name}, and nothing was kept: {why}",
        hint="try again later, or name another mirror: D4RL_URL=BASE",
    )


def _dataset_at(file: RemoteFile) -> D4rlDataset | None:
    """Return the dataset whose file this is, by the end of its address."""
    return next((one for one in published().values() if file.addresses[0].endswith(f"/{one.file}")), None)


@contextlib.contextmanager
def _naming_replacement(dataset: D4rlDataset | None) -> Iterator[None]:
    """Add to an error of the network what can be had instead of the dataset."""
    try:
        yield
    except (NetworkError, AuthorisationError, DatasetNotFoundError) as error:
        if dataset is not None and not error.hint:
            error.hint = (
                "D4RL's server is down at times: try later, or name a mirror (D4RL_URL=BASE); its successor, which was "
                f"collected again: {dataset.replacement}"
            )
        raise
