"""Downloads D4RL's published files, or takes them from the cache of the d4rl package; never through d4rl itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ...core.encodings.h5 import HDF5_SIGNATURE
from ...core.format.converter import Catalogue, CatalogueEntry, Ids, LocalCache, Reader, RemoteFile, safe_id
from ...core.format.documents import written_time
from ...core.remote.http import MirrorSource, hint_on_failure
from .datasets import D4rlDataset, dataset_named, not_in_cache, published

_SERVER = "rail.eecs.berkeley.edu/datasets/offline_rl"


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


class D4rlSource(MirrorSource):
    """D4RL's server, or the mirrors that `D4RL_URL` names: base URLs (http or https) in the order in which to try them.

    Files whose size and sha256 are known must have both. Any other is opened, and must be HDF5 with D4RL's columns,
    before it is taken; the next mirror is asked where it is not.
    """

    name = "d4rl"
    title = "D4RL"
    bases_variable = "D4RL_URL"
    defaults = (f"https://{_SERVER}", f"http://{_SERVER}")
    signatures = (HDF5_SIGNATURE,)
    local_cache = D4rlCache("d4rl", "D4RL_DATASET_DIR", "~/.d4rl/datasets")

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

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Describe the file of a dataset; a server is asked only where size and sha256 are not known."""
        dataset = dataset_named(dataset_id)
        ((path, addresses),) = self.addresses(dataset_id).items()
        checksum = self.checksums(dataset_id).get(path)
        if dataset.size is None or checksum is None:
            with hint_on_failure(_replacement_hint(dataset)):
                return [self.described(path, addresses)]
        return [RemoteFile(path, dataset.size, checksum, tuple(addresses))]

    def explained(self, file: RemoteFile | None = None) -> AbstractContextManager[None]:
        """Name what can be had instead of the dataset to which a file belongs, by the end of its address."""
        address = "" if file is None else file.addresses[0]
        dataset = next((one for one in published().values() if address.endswith(f"/{one.file}")), None)
        return hint_on_failure("" if dataset is None else _replacement_hint(dataset))

    def require_readable(self, path: Path) -> None:
        """Open a file; FormatError if it is not D4RL's format."""
        from .reader import D4rlFile  # h5py takes longer to load than a listing

        D4rlFile(path).close()


def _replacement_hint(dataset: D4rlDataset) -> str:
    return (
        "D4RL's server is down at times: try later, or name a mirror (D4RL_URL=BASE); its successor, which was "
        f"collected again: {dataset.replacement}"
    )
