"""Check that a wheel holds every file of the package and no other: wheel_contents.py WHEEL."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import source_tree


def main(wheel: str) -> int:
    """Compare the wheel with the checkout."""
    expected = {f"rbtool/{file.relative_to(source_tree.ROOT).as_posix()}" for file in source_tree.package_files()}
    data = source_tree.project()["tool"]["setuptools"]["package-data"]
    expected |= {f"{package.replace('.', '/')}/{name}" for package, names in data.items() for name in names}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    for name in sorted(expected - found):
        print(f"{Path(wheel).name} lacks {name}: is its folder among the packages of pyproject.toml?")
    for name in sorted(found - expected):
        print(f"{Path(wheel).name} holds {name}, which is not part of the package")
    return 1 if found != expected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
