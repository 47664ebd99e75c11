"""Lays local Minari datasets out the way Minari's organisation on the hub, or its bucket, has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

__all__ = ["lay_out_bucket", "lay_out_hub"]


def lay_out_hub(datasets: Path, root: Path, organisation: str = "farama-minari") -> Path:
    """Make every top-level namespace a repository with the index that decides what exists; return `root`."""
    for namespace in sorted(path for path in datasets.iterdir() if path.is_dir()):
        repository = root / organisation / namespace.name
        shutil.copytree(namespace, repository)
        ids = sorted(
            f"{namespace.name}/{path.parent.parent.relative_to(repository).as_posix()}"
            for path in repository.rglob("data/metadata.json")
        )
        namespaces = sorted(
            {"/".join(name.split("/")[:depth]) for name in ids for depth in range(1, name.count("/") + 1)}
        )
        index = {"datasets": ids, "namespaces": namespaces}
        (repository / "namespace_metadata.json").write_text(json.dumps(index), encoding="utf-8")
    return root


def lay_out_bucket(datasets: Path, root: Path, bucket: str = "minari-remote") -> Path:
    """Copy all datasets into a bucket; return `root`."""
    shutil.copytree(datasets, root / bucket, ignore=shutil.ignore_patterns("README.md"))
    return root
