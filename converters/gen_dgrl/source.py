"""Downloads the archives of Gen-DGRL, or takes them from a folder of copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...core.errors import DatasetNotFoundError, FormatError
from ...core.format.converter import Ids, LocalCache, Reader, safe_id
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource
from .datasets import SUFFIX, published

_VARIABLE = "GEN_DGRL_URL"


class GenDgrlCache(LocalCache):
    """A folder with archives at their published paths: `.tar.xz`, `.tar`, or the folder of an unpacked one."""

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the archive of a dataset; DatasetNotFoundError for one that is not there."""
        path = _path_of(safe_id(dataset_id))
        found = self._copy(path)
        if found is None:
            raise DatasetNotFoundError(
                f"the local {self.source} folder {self.folder} has no dataset {dataset_id!r}: looked for "
                f"{self.folder / path}, for a .tar and for a folder",
                hint=f"{self.variable} names the folder, if it is another",
            )
        return found

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Ids of all datasets whose archive is there."""
        return (name for name, path in published().items() if self._copy(path) is not None)

    def _copy(self, path: str) -> Path | None:
        packed = self.folder / path
        plain = packed.with_name(packed.name.removesuffix(SUFFIX))
        if packed.is_file():
            return packed
        archive = plain.with_name(f"{plain.name}.tar")
        return archive if archive.is_file() else plain if plain.is_dir() else None


class GenDgrlSource(MirrorSource):
    """Gen-DGRL's server, or the mirrors that `GEN_DGRL_URL` names: base URLs (http or https) in the order to try them.

    A dataset is one archive, which must begin as xz does and have an episode, before it is taken.
    """

    name = "gen_dgrl"
    title = "Gen-DGRL"
    variable = _VARIABLE
    defaults = ("https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed",)
    signatures = (b"\xfd7zXZ\x00",)
    server_hint = f"Gen-DGRL's server may be down: try later, or name a mirror: {_VARIABLE}=BASE"
    pickled = True
    local_cache = GenDgrlCache("gen_dgrl", "GEN_DGRL_DATASET_DIR", "~/gen_dgrl")

    def list_ids(self) -> Ids:
        """List the 128 ids, which are part of this package: nothing is requested."""
        return Ids(tuple(published()))

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the address of the archive on each mirror."""
        path = _path_of(dataset_id)
        return {path.rpartition("/")[2]: [f"{base}/{path}" for base in self.bases]}

    def require_readable(self, path: Path) -> None:
        """Look at the first members; FormatError if none of them is an episode."""
        from .reader import GenDgrlReader  # numpy takes longer to load than a listing

        if not GenDgrlReader.recognises(path):
            raise FormatError("it is no archive of episodes")


def _path_of(dataset_id: str) -> str:
    path = published().get(dataset_id)
    if path is None:
        raise not_found(dataset_id, list(published()), "gen_dgrl")
    return path
