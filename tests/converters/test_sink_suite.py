"""The contract tests of export formats: sound formats pass them, and each rule catches a format that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from npy_folder import LEAVES, NpyFolder

from rbtool.converters.export.h5 import H5Exporter
from rbtool.converters.export.parquet import ParquetExporter
from rbtool.converters.export.reader import NpzExporter
from rbtool.core.errors import CorruptDataError
from rbtool.core.format.converter import Sink
from rbtool.core.ted.schema import Key, key_name
from rbtool.core.testing.sinks import SinkTests


class TestNpyFolder(SinkTests):
    def sink(self) -> type[Sink]:
        return NpyFolder

    def read(self, path: Path, key: Key) -> Any:
        return np.load(path / f"{key_name(key).replace('/', '_')}.npy")


class TestH5(SinkTests):
    file_name = "export.h5"

    def sink(self) -> type[Sink]:
        return H5Exporter

    def read(self, path: Path, key: Key) -> Any:
        with h5py.File(path) as file:
            return file["steps/" + "/".join(key)][()]


class TestNpz(SinkTests):
    file_name = "export.npz"

    def sink(self) -> type[Sink]:
        return NpzExporter

    def read(self, path: Path, key: Key) -> Any:
        with np.load(path, allow_pickle=False) as file:
            return file[".".join(key)]


class TestParquet(SinkTests):
    def sink(self) -> type[Sink]:
        return ParquetExporter

    def read(self, path: Path, key: Key) -> Any:
        column = pq.read_table(path / "steps.parquet")[".".join(key)].combine_chunks()
        rows, width = len(column), 1
        while pa.types.is_list(column.type):
            column = column.flatten()
            width = len(column) // rows
        one = key[-1] in {"episode", "success"}
        return column.to_numpy(zero_copy_only=False).reshape((rows,) if one else (rows, width))


def writing(change: Callable[[Any, Path], object]) -> type[NpyFolder]:
    """A format that changes something after it wrote its files."""

    def write_rows(self: NpyFolder, target: Path, progress: Callable[[int], None]) -> None:
        NpyFolder.write_rows(self, target, progress)
        change(self, target)

    return type("Saboteur", (NpyFolder,), {"write_rows": write_rows})


def changing(change: Callable[[Any], Any]) -> type[NpyFolder]:
    """A format that stores other actions than it is given."""
    return writing(lambda self, target: np.save(target / "action.npy", change(np.load(target / "action.npy"))))


def write_every_episode(self: NpyFolder, target: Path) -> None:
    reader = self.chosen.reader
    np.save(target / "action.npy", reader.read(("action",), 0, reader.manifest.steps))


def edit_the_source(self: NpyFolder, target: Path) -> None:
    leaf = self.chosen.reader.path / "action.memmap"
    leaf.write_bytes(bytes(leaf.stat().st_size))


class ReportsNoProgress(NpyFolder):
    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        super().write_rows(target, lambda size: progress(0))


class TakesAnyFolder(NpyFolder):
    @classmethod
    def made(cls, path: Path) -> bool:
        return path.is_dir()


class RaisesOnOtherFiles(NpyFolder):
    @classmethod
    def made(cls, path: Path) -> bool:
        return LEAVES in {entry.name for entry in path.iterdir()}


class TakesFilesOfOthers(NpyFolder):
    @classmethod
    def made(cls, path: Path) -> bool:
        return (path / LEAVES).is_file()


class FailsWithAnotherError(NpyFolder):
    def prepare(self) -> None:
        if any(field.dtype == "bfloat16" for field in self.chosen.fields):
            raise TypeError("bfloat16")


KEPT: list[Any] = []
ROWS = "test_every_leaf_has_the_rows_of_the_chosen_episodes"
OWN = "test_it_recognises_its_exports_and_nothing_else"
SABOTEURS: dict[str, tuple[type[Sink], str, type[BaseException]]] = {
    "drops the last row": (changing(lambda rows: rows[:-1]), ROWS, AssertionError),
    "reverses the rows": (changing(lambda rows: rows[::-1]), ROWS, AssertionError),
    "changes the type": (changing(lambda rows: rows.astype(np.float64)), ROWS, AssertionError),
    "writes every episode": (writing(write_every_episode), ROWS, AssertionError),
    "reports no progress": (ReportsNoProgress, "test_progress_adds_up_to_the_size", AssertionError),
    "takes any folder": (TakesAnyFolder, OWN, AssertionError),
    "raises on other files": (RaisesOnOtherFiles, OWN, NotADirectoryError),
    "takes files of others": (
        TakesFilesOfOthers, "test_a_folder_with_a_file_of_others_is_no_export", AssertionError
    ),
    "leaves a file behind": (
        writing(lambda self, target: target.with_name("leftover").write_bytes(b"")), "test_it_only_writes_the_target",
        AssertionError,
    ),
    "edits the source": (writing(edit_the_source), "test_it_only_writes_the_target", CorruptDataError),
    "leaves a file open": (
        writing(lambda self, target: KEPT.append((target / LEAVES).open("rb"))), "test_every_file_is_closed",
        AssertionError,
    ),
    "fails with another error": (
        FailsWithAnotherError, "test_data_of_any_type_are_stored_or_refused_before_anything_is_written", AssertionError
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SABOTEURS)
def test_a_format_that_breaks_a_rule_fails(name: str, tmp_path: Path) -> None:
    saboteur, test, error = SABOTEURS[name]

    class Suite(TestNpyFolder):
        __test__ = False

        def sink(self) -> type[Sink]:
            return saboteur

    try:
        with pytest.raises(error):
            getattr(Suite(), test)(tmp_path)
    finally:
        while KEPT:
            KEPT.pop().close()
