"""Sources of datasets that are files behind plain URLs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import DatasetNotFoundError, NetworkError, RbtoolError, UsageError
from ..format.sources import Advance, Note, RemoteDataset, RemoteFile, Source
from .fetch import fetch_files
from .http import HttpTransport
from .retries import retrying
from .transport import require_network


class HttpSource(Source):
    """Datasets whose files are behind http or https addresses, with or without checksums.

    A subclass implements `remote`, `list_ids` and `addresses`, and `checksums` where they are known. A file without
    a checksum is compared with the size that its server gives, and the manifest states that it is not verified by the
    remote. There are no revisions.
    """

    def __init__(self) -> None:
        self.transport = HttpTransport()

    @abstractmethod
    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the addresses of every file of a dataset, in the order in which to try them, by the file's path."""

    def checksums(self, dataset_id: str) -> Mapping[str, str]:
        """Return the checksums that are known (`sha256:…`) by the file's path; none by default."""
        return {}

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Ask the server of each file for its size and version."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        if dataset_id not in self.ids().ids:
            raise DatasetNotFoundError(f"{self.remote} has no dataset {dataset_id}")
        known = self.checksums(dataset_id)
        files = [
            self.probe(path, places, known.get(path)) for path, places in sorted(self.addresses(dataset_id).items())
        ]
        return RemoteDataset(dataset_id, f"{self.remote.rstrip('/')}/{dataset_id}", None, tuple(files))

    def probe(self, path: str, addresses: Sequence[str], checksum: str | None = None) -> RemoteFile:
        """Describe a file as the first of its servers that answers has it; the failure of the first, if none does."""
        failures: list[RbtoolError] = []
        for address in addresses:
            require_network(f"asking {urlsplit(address).hostname}")
            try:
                size, version = retrying(lambda address=address: self._ask(address))  # type: ignore[misc]
            except RbtoolError as error:
                failures.append(error)
                continue
            if size is None and checksum is not None:
                failures.append(NetworkError(f"{urlsplit(address).hostname} does not give the size of {path}"))
                continue
            return RemoteFile(path, size, checksum, tuple(addresses), None if checksum else version)
        raise failures[0] if failures else DatasetNotFoundError(f"{self.remote} has no address for {path}")

    def _ask(self, address: str) -> tuple[int | None, str | None]:
        with self.transport.open_version(address, 0) as answer:
            return answer.size, answer.version

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, a few at a time."""
        for host in {urlsplit(address).hostname for file in files for address in file.addresses}:
            require_network(f"fetching from {host}")
        fetch_files(files, folder, self.transport, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections."""
        self.transport.close()
