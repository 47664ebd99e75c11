"""What a dataset and its remote are compared by: checksums, or versions where the remote gives no checksum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import CheckFailed
from ..format import Manifest, RemoteDataset
from .source_conversion import fetched_checksums, unverified_versions

__all__ = ["compared_with", "require_unchanged", "unverified_note", "versions_of"]


def require_unchanged(manifest: Manifest, folder: Path, describe: Callable[[], RemoteDataset]) -> None:
    """Raise CheckFailed unless the remote has the very files that the dataset in `folder` was made from.

    `describe` asks the remote, and is not called for a dataset that nothing of a remote is recorded of.
    """
    made_from, versions = fetched_checksums(folder, manifest), unverified_versions(manifest)
    if not made_from:
        raise CheckFailed(
            f"{folder} was made from the local cache: it has no checksums of the remote",
            hint="add --force to fetch it again",
        )
    remote = describe()
    here = {path: checksum for path, checksum in made_from.items() if path not in versions} | versions
    there = {**remote.checksums, **versions_of(remote)}
    if here != there:
        raise CheckFailed(
            f"{remote.address} is not what {folder} was made from any more",
            hint="add --force, and no --frozen, to take the new one, or --revision for the old one",
        )
    unknown = sorted(path for path, version in there.items() if version is None)
    if unknown:
        raise CheckFailed(
            f"{remote.address} gives neither a checksum nor a version of {unknown[0]}: whether it is unchanged cannot "
            "be determined",
            hint="add --force, and no --frozen, to fetch it again",
        )


def compared_with(remote: RemoteDataset) -> str:
    """What the bytes were compared with."""
    kinds = sorted({checksum.partition(":")[0] for checksum in remote.checksums.values()})
    unverified = "read again, unverified by the remote" if len(remote.checksums) < len(remote.files) else ""
    verified = f"verified {' and '.join(kinds)}" if kinds or not unverified else ""
    return "; ".join(filter(None, (verified, unverified)))


def versions_of(remote: RemoteDataset) -> dict[str, str | None]:
    """The version of every file without a checksum, by its path."""
    return {file.path: file.version for file in remote.files if file.checksum is None}


def unverified_note(remote: RemoteDataset) -> str:
    """Say in a manifest which files were not verified by the remote."""
    paths = remote.unverified
    names = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
    return f"unverified by the remote: it gives no checksum of {len(paths)} of {len(remote.files)} files ({names})"
