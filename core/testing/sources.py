"""The test suite for sources. To run it, subclass `SourceTests` and implement `source`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..errors import DatasetNotFoundError, NetworkError
from ..format import fs
from ..format.converter import RemoteDataset, Source
from ..format.manifest import is_inside
from .rows import error_of


class SourceTests(ABC):
    """The contract of `Source`, on a remote with at least one dataset, for instance on a loopback server."""

    @abstractmethod
    def source(self) -> Source:
        """Return a new source."""

    def first(self, source: Source) -> RemoteDataset:
        """Describe the first dataset of the remote."""
        return source.describe(source.ids().ids[0])

    def test_it_has_a_name_and_a_remote(self) -> None:
        with self.source() as source:
            assert source.name.replace("-", "_").isidentifier()
            assert source.remote
            assert source.key

    def test_ids_are_sorted_and_reproducible(self) -> None:
        with self.source() as source:
            found = source.ids()
            assert found.ids
            assert list(found.ids) == sorted(set(found.ids))
            assert source.ids().ids == found.ids

    def test_the_catalogue_has_the_same_ids(self) -> None:
        seen: list[tuple[int, int]] = []
        with self.source() as source:
            found = source.catalogue(progress=lambda done, total: seen.append((done, total)))
            assert tuple(entry.id for entry in found.entries) == source.ids().ids
            assert seen[-1] == (len(found.entries), len(found.entries))
            assert source.catalogue(found).entries == found.entries

    def test_a_description_names_files_inside_its_folder(self) -> None:
        with self.source() as source:
            found = self.first(source)
        assert found.files
        assert len(set(found.paths)) == len(found.files)
        for file in found.files:
            assert is_inside(file.path)
            assert file.addresses
            assert file.size is None or file.size >= 0
            assert file.checksum is None or file.size is not None

    def test_a_description_is_reproducible(self) -> None:
        with self.source() as one, self.source() as other:
            assert self.first(one) == self.first(other)

    def test_an_unknown_id_is_refused(self) -> None:
        with self.source() as source:
            absent = f"no-{source.ids().ids[0]}"
            assert isinstance(error_of(lambda: source.describe(absent)), DatasetNotFoundError)

    def test_all_files_are_needed_without_a_choice(self) -> None:
        with self.source() as source:
            found = self.first(source)
            assert list(source.needed(found, None)) == list(found.files)
            assert {file.path for file in source.needed(found, [(0, None)])} <= set(found.paths)

    def test_files_are_fetched_once(self, tmp_path: Path) -> None:
        counted: list[int] = []
        with self.source() as source:
            found = self.first(source)
            source.fetch(found.files, tmp_path, progress=counted.append)
            times = {path: (tmp_path / path).stat().st_mtime_ns for path in found.paths}
            size = sum((tmp_path / path).stat().st_size for path in found.paths)
            assert sum(counted) == size
            if all(file.size is not None for file in found.files):
                source.fetch(found.files, tmp_path)
                assert {path: (tmp_path / path).stat().st_mtime_ns for path in found.paths} == times
        there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
        assert there == set(found.paths)

    def test_a_file_of_another_size_is_fetched_again(self, tmp_path: Path) -> None:
        with self.source() as source:
            found = self.first(source)
            source.fetch(found.files, tmp_path / "sound")
            for path in found.paths:
                fs.make_folder((tmp_path / "damaged" / path).parent)
                fs.write_file(tmp_path / "damaged" / path, (tmp_path / "sound" / path).read_bytes()[:-1])
            source.fetch(found.files, tmp_path / "damaged")
        for path in found.paths:
            assert (tmp_path / "damaged" / path).read_bytes() == (tmp_path / "sound" / path).read_bytes()

    def test_the_switch_that_forbids_the_network_is_honoured(self, tmp_path: Path, monkeypatch: Any) -> None:
        with self.source() as source:
            found = self.first(source)
            monkeypatch.setenv("RBTOOL_OFFLINE", "1")
            error = error_of(lambda: source.fetch(found.files, tmp_path))
            assert isinstance(error, NetworkError)
            assert "RBTOOL_OFFLINE" in str(error)

    def test_closing_twice_does_no_harm(self) -> None:
        source = self.source()
        source.close()
        source.close()
