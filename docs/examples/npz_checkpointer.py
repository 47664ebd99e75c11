"""A checkpointer that saves the rows of a storage of tensordicts as one file of NumPy arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rbtool import StorageCheckpointerBase


class NpzCheckpointer(StorageCheckpointerBase):
    """Saves one array for each entry, named by its keys, in the file `rows.npz`."""

    def write(self, rows: Any, folder: Path) -> None:
        arrays = {}
        for key, leaf in rows.items(include_nested=True, leaves_only=True):
            arrays["/".join(key) if isinstance(key, tuple) else key] = leaf.numpy()
        np.savez(folder / "rows.npz", batch_size=np.array(rows.batch_size), **arrays)

    def read(self, folder: Path) -> Any:
        with np.load(folder / "rows.npz") as file:
            rows = TensorDict({}, file["batch_size"].tolist())
            for name in file.files:
                if name != "batch_size":
                    rows.set(tuple(name.split("/")), torch.from_numpy(file[name]))
        return rows
