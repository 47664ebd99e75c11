"""An export format: a folder with one `.npy` file for each leaf."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rbtool.core.format import Sink

LEAVES = "leaves.txt"


class NpyFolder(Sink):
    @classmethod
    def made(cls, path: Path) -> bool:
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        return LEAVES in names and all(name == LEAVES or name.endswith(".npy") for name in names)

    def prepare(self) -> None:
        self.refuse({"bfloat16"}, "NumPy")

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        target.mkdir()
        for field in self.chosen.fields:
            shape = (self.chosen.steps, *field.shape)
            header = {"descr": np.lib.format.dtype_to_descr(field.numpy), "fortran_order": False, "shape": shape}
            with (target / f"{field.name.replace('/', '_')}.npy").open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for rows in self.chosen.chunks(field.key, field.row_bytes):
                    file.write(rows.tobytes())
                    progress(rows.nbytes)
                file.flush()
                os.fsync(file.fileno())
        (target / LEAVES).write_text("\n".join(field.name for field in self.chosen.fields), encoding="utf-8")
