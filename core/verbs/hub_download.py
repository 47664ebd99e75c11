"""Download of a dataset that was uploaded to a Hugging Face hub: the same files, verified, without a conversion."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import (
    CheckFailed,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from ..format import fs
from ..format.documents import parse_json, written_time
from ..format.hub_address import HUB, HubAddress, Transfer, add_transfer, is_hub_address, transfers_of
from ..format.locate import dataset_folder, source_names
from ..format.manifest import MANIFEST, TRANSFERS, Manifest, has_manifest, is_canonical
from ..format.open_files import ListedFiles
from ..format.sources import RemoteDataset, RemoteFile
from ..format.staging import Staging, mend, remove_at_once, sweep
from ..open_steps import open_steps
from ..progress import Progress, readable_size
from ..remote.checksums import matches
from ..remote.fetch import fetch_files
from ..remote.hub import Hub, HubFile, hub_endpoint
from ..remote.originals import Originals
from ..remote.transport import read_small
from ..results import occupied_error, published_entries, seconds_since
from .remote_download import Fetch

_MANIFEST_BYTES = 64 << 20
_DATASET = "dataset"
"""The name of the folder while it is put in place."""


def hub_address(source: str, dataset_id: str | None, revision: str | None) -> HubAddress | None:
    """Return the address in what `download` is called with: `hf://OWNER/NAME`, or `hf` and that; None for none."""
    if not (is_hub_address(source) or source.partition(":")[0] == HUB):
        return None
    if dataset_id is None:
        return HubAddress.parse(source, revision)
    if source != HUB:
        raise UsageError(f"{source} names the dataset, and so does {dataset_id}", hint="leave one out")
    return HubAddress.parse(dataset_id, revision)


@dataclass(frozen=True, kw_only=True)
class HubDownload:
    """One download; `run` uses the network only for what is not stored."""

    hub: Hub
    address: HubAddress
    root: Path
    force: bool
    dry_run: bool
    frozen: bool
    progress: Progress

    def run(self) -> dict[str, Any]:
        """Return the entries of a `DownloadResult`."""
        started = time.perf_counter()
        if self.frozen and self.force:
            raise UsageError("--frozen keeps the stored one and --force replaces it", hint="leave one out")
        there = self._existing()
        if self.frozen:
            self._require_unchanged(there)
        if there is not None:
            self._tidy()
            return self._entries(*there, started) | {"already_there": True}
        self._staging().refuse_if_taken()
        if self.dry_run:
            remote, manifest = self._describe()
            return self._entries(manifest, remote.address, started) | {"fetch": self._fetch_ahead(remote)}
        return self._fetch(started)

    @property
    def _folder(self) -> Path:
        return dataset_folder(self.address.request, self.root)

    @property
    def _originals(self) -> Originals:
        return Originals(self.root, HUB, self._folder.relative_to(self.root / HUB).as_posix())

    def _staging(self) -> Staging:
        return Staging(self._folder, replace=self.force, below=self.root)

    def _entries(self, manifest: Manifest, origin: str, started: float) -> dict[str, Any]:
        return published_entries(manifest, self._folder, started) | {
            "source": HUB, "id": self.address.repository, "asked": str(self.address), "resolved": "exact",
            "fetched_from": origin, "dry_run": self.dry_run,
        }  # fmt: skip

    # What is stored ------------------------------------------------------------------------------------

    def _existing(self) -> tuple[Manifest, str] | None:
        """Return the manifest of what is stored, and where it came from; None if nothing is, or it is replaced.

        UsageError where something else is stored, or it is damaged.
        """
        if self.force:
            return None
        if not self.dry_run:
            mend(self._folder)
        if not has_manifest(self._folder):
            return None
        origin = next((one for one in reversed(transfers_of(self._folder)) if self._is_ours(one)), None)
        if origin is None:
            raise occupied_error(self._folder, f"is not recorded as a download of {self.address}")
        if origin.hub != hub_endpoint():
            self.progress.note(f"{self._folder} was downloaded from {origin.hub}, not from {hub_endpoint()}")
        try:
            with ListedFiles.at(self._folder) as files:
                files.check_sizes()
                return files.manifest, f"{origin.address}@{origin.commit}"
        except RbtoolError as error:
            raise occupied_error(self._folder, f"is damaged ({error})") from error

    def _tidy(self) -> None:
        """Remove what a process left that was killed when the dataset was in its place."""
        fetched = self._originals.folder
        aside = fetched.parent.with_name(fetched.name)
        with contextlib.suppress(OSError, UsageError):  # such as a disk that cannot be written to
            if not self.dry_run:
                sweep(self._folder, below=self.root)
                remove_at_once(fetched, near=aside, below=self.root)
                sweep(aside, below=self.root)

    def _is_ours(self, transfer: Transfer) -> bool:
        asked = "download", f"hf://{self.address.repository}", self.address.revision
        return (transfer.verb, transfer.address, transfer.revision) == asked

    def _require_unchanged(self, there: tuple[Manifest, str] | None) -> None:
        """Raise CheckFailed unless the hub has, in the revision that is asked for, the files that are stored."""
        if there is None:
            raise DatasetNotFoundError(
                f"--frozen compares the hub with what is stored, and {self._folder} is not there",
                hint="leave out --frozen to fetch it",
            )
        commit = self.hub.commit(self.address.repository, self.address.revision)
        tree = {file.path: file for file in self.hub.tree(self.address.repository, commit)}
        for path in (MANIFEST, *(file.path for file in there[0].files)):
            remote = tree.get(path)
            if remote is None or not matches(self._folder / path, remote.size, remote.checksum):
                raise CheckFailed(
                    f"{self.address} is not what {self._folder} is any more: {path} differs at {commit[:7]}",
                    hint="add --force, and no --frozen, to take the new one, or --revision for the old one",
                )

    # What is there -------------------------------------------------------------------------------------

    def _describe(self) -> tuple[RemoteDataset, Manifest]:
        """Ask for the files of the dataset, by its manifest; FormatError where that makes no sense."""
        name = self.address.repository
        commit = self.hub.commit(name, self.address.revision)
        tree = {file.path: file for file in self.hub.tree(name, commit)}
        listed = tree.get(MANIFEST)
        if listed is None:
            raise _not_a_dataset(self.address, tree)
        place, origin = self.hub.address(name, commit, MANIFEST), f"{MANIFEST} of {self.address.at(commit)}"
        data = read_small(self.hub, place, limit=_MANIFEST_BYTES, size=listed.size, checksum=listed.checksum)
        manifest = Manifest.from_dict(parse_json(data, origin), origin)
        if manifest.kind != "dataset":
            raise FormatError(f"{self.address.at(commit)} is a {manifest.kind}, expected a dataset")
        if not is_canonical(data):
            raise CorruptDataError(f"{origin} was changed after it was written")
        for record in manifest.files:
            found = tree.get(record.path)
            if found is None or found.size != record.size or record.path in (MANIFEST, TRANSFERS):
                have = "is not there" if found is None else f"has {found.size:,} bytes there"
                raise CorruptDataError(
                    f"{self.address.at(commit)} is not whole: {record.path} {have}, and the manifest lists "
                    f"{record.size:,} bytes"
                )
        files = tuple(self._remote(tree[path], commit) for path in (MANIFEST, *(one.path for one in manifest.files)))
        return RemoteDataset(self._originals.id, self.address.at(commit), commit, files), manifest

    def _remote(self, file: HubFile, commit: str) -> RemoteFile:
        place = self.hub.address(self.address.repository, commit, file.path)
        return RemoteFile(file.path, file.size, file.checksum, (place,))

    def _fetch_ahead(self, remote: RemoteDataset) -> Fetch:
        present = self._originals.present(remote)
        fs.require_space(self.root, max(0, remote.bytes - present))
        return Fetch(len(remote.files), remote.bytes, present, fs.free_space(self.root))

    # Fetching ------------------------------------------------------------------------------------------

    def _fetch(self, started: float) -> dict[str, Any]:
        originals = self._originals
        waiting = f"another process is fetching {self.address}: waiting for it"
        with originals.lock(lambda: self.progress.note(waiting)):
            there = self._existing()  # the previous holder of the lock may have fetched it
            if there is not None:
                return self._entries(*there, started) | {"already_there": True}
            remote, manifest = self._describe()
            fetch = self._bring(remote, originals)
            self._verify(originals, remote)
            self._publish(originals, remote, manifest)
            originals.discard(self.progress.note)
        entries = self._entries(manifest, remote.address, started)
        return entries | {"fetch": fetch, "seconds": seconds_since(started)}

    def _bring(self, remote: RemoteDataset, originals: Originals) -> Fetch:
        """Fetch what is missing, compared with the checksums of the hub."""
        fetch = self._fetch_ahead(remote)
        originals.begin(remote, remote.paths, kept=False)
        there = f", {readable_size(fetch.bytes_present)} of it is there already" if fetch.bytes_present else ""
        self.progress.note(
            f"{fetch.files:,} files, {readable_size(fetch.bytes)}, from {self.address.at(str(remote.revision)[:7])}"
            f"{there}; {readable_size(fetch.bytes_free)} free"
        )
        self.progress.start("fetching", remote.bytes, "bytes")
        try:
            fetch_files(
                remote.files, originals.files, self.hub, progress=self.progress.advance, note=self.progress.note
            )
        except NetworkError as error:
            if originals.has_any():
                error.hint = error.hint or "run it again: what came so far is kept"
            raise
        self.progress.done()
        return fetch

    def _verify(self, originals: Originals, remote: RemoteDataset) -> None:
        """Compare all files with the digests in the manifest; where one does not match, nothing is kept."""
        try:
            with ListedFiles.at(originals.files) as files:
                self.progress.start("verifying", files.manifest.bytes, "bytes")
                for record in files.manifest.files:
                    files.verify([record])
                    self.progress.advance(record.size)
            open_steps(originals.files).close()
        except FormatError as error:
            originals.remove()
            raise CorruptDataError(
                f"{remote.address} is not what its manifest states, and nothing was kept: {error.message}"
            ) from error
        self.progress.done()

    def _publish(self, originals: Originals, remote: RemoteDataset, manifest: Manifest) -> None:
        transfer = Transfer(
            "download", f"hf://{self.address.repository}", self.address.revision, str(remote.revision), hub_endpoint(),
            manifest.content_digest, written_time(),
        )  # fmt: skip
        add_transfer(originals.files, transfer)
        with self._staging() as staging:
            with (
                fs.folder_below(self.root, originals.folder) as within,
                fs.folder_below(self.root, staging.path) as into,
            ):
                fs.rename(originals.files, staging.path / _DATASET, within=within, into=into)
            if not staging.publish(_DATASET):
                raise occupied_error(self._folder, "was put there meanwhile")


def _not_a_dataset(address: HubAddress, tree: Mapping[str, HubFile]) -> FormatError:
    """Return the error for a repository without a manifest, which names what it looks like."""
    looks, hint = _look_of(address.repository, tree)
    return FormatError(f"{address} is no dataset that rbtool upload made: it has no {MANIFEST}{looks}", hint=hint)


def _look_of(repository: str, tree: Mapping[str, HubFile]) -> tuple[str, str]:
    ends = {path.rpartition(".")[2].lower() for path in tree}
    if "meta/info.json" in tree:
        known = "lerobot" in source_names()
        return ", and looks like a dataset of LeRobot", f"rbtool download lerobot {repository}" if known else ""
    if any(path.endswith(("main_data.hdf5", "namespace_metadata.json")) for path in tree):
        return (
            ", and looks like datasets of Minari",
            f"MINARI_REMOTE=hf://{repository.partition('/')[0]} is their place",
        )
    if "tar" in ends:
        return ", and looks like shards in tar archives", "rbtool list --formats names what is converted"
    if ends & {"parquet", "arrow", "hdf5", "h5", "npz", "csv", "tfrecord"}:
        return ", and has files of data", "fetch it with the hub's own client, and convert it: rbtool convert PATH DEST"
    return "", "the files of the repository are those of something else"
