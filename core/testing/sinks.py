"""The test suite for export formats. To run it, subclass `SinkTests` and implement its abstract methods."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from ..errors import SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array
from ..format.converter import Chosen, Sink
from ..format.memmap.reader import TedReader
from ..ted.schema import Key
from .datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from .rows import error_of

ROWS = (0, 2, 3)
"""The chosen episodes, with a gap between them."""


class SinkTests(ABC):
    """The contract of `Sink`, on three of the four episodes of a dataset with floats, integers and flags."""

    file_name = "export"
    """Name of the exported file or folder."""

    @abstractmethod
    def sink(self) -> type[Sink]:
        """Return the class of the sink."""

    @abstractmethod
    def read(self, path: Path, key: Key) -> Array:
        """Read all rows of one leaf of an export, `[steps, *shape]`, in the dtype that the format stores."""

    def chosen(self, folder: Path) -> Chosen:
        """Write a dataset below `folder` and choose its episodes `ROWS`."""
        write_walks(folder / "walks", [(3, "terminated"), (2, "truncated"), (4, "open"), (1, "both")])
        return Chosen(TedReader(folder / "walks"), np.array(ROWS))

    def exported(self, chosen: Chosen, folder: Path) -> tuple[Path, list[int]]:
        """Export to a new folder; return the path of the export, and the progress."""
        fs.make_folder(folder)
        progress: list[int] = []
        self.sink()(chosen, "test").write(folder / self.file_name, progress.append)
        return folder / self.file_name, progress

    def test_every_leaf_has_the_rows_of_the_chosen_episodes(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            path, _ = self.exported(Chosen(reader, np.array(ROWS)), tmp_path / "out")
            table = reader.episodes
            spans = [(int(table.start[row]), int(table.start[row] + table.length[row])) for row in ROWS]
            for field in reader.fields:
                expected = np.concatenate([reader.read(field.key, *span) for span in spans])
                found = self.read(path, field.key)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape), field.name
                assert found.tobytes() == expected.tobytes(), field.name

    def test_progress_adds_up_to_the_size(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            chosen = Chosen(reader, np.array(ROWS))
            _, progress = self.exported(chosen, tmp_path / "out")
            assert sum(progress) == self.sink()(chosen, "test").size()
            assert min(progress) >= 0

    def test_it_recognises_its_exports_and_nothing_else(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            path, _ = self.exported(Chosen(reader, np.array(ROWS)), tmp_path / "out")
        fs.write_file(tmp_path / "file", b"\0\xff{")
        fs.make_folder(tmp_path / "folder")
        assert self.sink().made(path)
        for other in ("file", "folder", "walks", "nothing"):
            assert not self.sink().made(tmp_path / other), other

    def test_a_folder_with_a_file_of_others_is_no_export(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            path, _ = self.exported(Chosen(reader, np.array(ROWS)), tmp_path / "out")
        if path.is_dir():
            fs.write_file(path / "notes.txt", b"mine")
            assert not self.sink().made(path)

    def test_it_only_writes_the_target(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            path, _ = self.exported(Chosen(reader, np.array(ROWS)), tmp_path / "out")
            reader.verify_files()
        assert [entry.name for entry in path.parent.iterdir()] == [self.file_name]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "walks"]

    def test_every_file_is_closed(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            path, _ = self.exported(Chosen(reader, np.array(ROWS)), tmp_path / "out")
            assert [name for name in _open_files() if name.startswith(str(path))] == []

    def test_an_existing_target_is_unchanged(self, tmp_path: Path) -> None:
        fs.write_file(tmp_path / "there", b"mine")
        with self.chosen(tmp_path).reader as reader:
            sink = self.sink()(Chosen(reader, np.array(ROWS)), "test")
            assert isinstance(error_of(lambda: sink.write(tmp_path / "there", lambda size: None)), UsageError)
        assert (tmp_path / "there").read_bytes() == b"mine"

    def test_data_of_any_type_are_stored_or_refused_before_anything_is_written(self, tmp_path: Path) -> None:
        for number, leaf in enumerate(ODD_LEAVES):
            plan = DatasetPlan((3, 2), ("terminated", "truncated"), (False, True), (leaf,))
            write_plan(plan, tmp_path / str(number))
            with TedReader(tmp_path / str(number)) as reader:
                sink = self.sink()(Chosen(reader, np.array([0, 1])), "test")
                refused = error_of(sink.check)
                assert refused is None or isinstance(refused, SchemaError), leaf.key
                if refused is None:
                    path, _ = self.exported(Chosen(reader, np.array([0, 1])), tmp_path / f"out-{number}")
                    assert self.sink().made(path), leaf.key


def _open_files() -> list[str]:
    """Return the files that this process has open; empty on systems without `/proc`."""
    found = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return found
