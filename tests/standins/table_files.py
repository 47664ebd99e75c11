"""Tables of steps in every kind of file, written by plain libraries, and what a map makes of them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Array = np.ndarray[Any, Any]
NAMES = {
    "observations": "obs", "actions": "act", "rewards": "r", "terminals": "dead", "timeouts": "late",
    "next_observations": "obs_after",
}  # fmt: skip
"""What the columns of `d4rl_files.flat` are called here: no reader finds them by name."""


def named(columns: dict[str, Array], **more: Array) -> dict[str, Array]:
    """The columns of a D4RL file under other names."""
    return {NAMES[name]: values for name, values in columns.items()} | more


def write_h5(path: Path, columns: dict[str, Array]) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values.tolist() if values.dtype.kind in "OU" else values)
    return path.with_suffix(".h5")


def write_npz(path: Path, columns: dict[str, Array]) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), **columns)  # type: ignore[arg-type]
    return path.with_suffix(".npz")


def write_npy(path: Path, columns: dict[str, Array]) -> Path:
    for name, values in columns.items():
        file = path / f"{name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, values)
    return path


def write_parquet(path: Path, columns: dict[str, Array], group: int = 7) -> Path:
    made = {name: values.tolist() if values.dtype.kind in "OU" else _arrow(values) for name, values in columns.items()}
    pq.write_table(pa.table(made), path.with_suffix(".parquet"), row_group_size=group)
    return path.with_suffix(".parquet")


def _arrow(values: Array) -> Any:
    if values.ndim == 1:
        return pa.array(values)
    inner = _arrow(values.reshape(-1, *values.shape[2:]))
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), inner)


def write_csv(path: Path, columns: dict[str, Array]) -> Path:
    """Write a vector as numbered columns, `NAME_0`, `NAME_1` and so on."""
    flat: dict[str, Array] = {}
    for name, values in columns.items():
        if values.ndim == 1:
            flat[name] = values
            continue
        rows = values.reshape(len(values), -1)
        flat |= {f"{name}_{at}": rows[:, at] for at in range(rows.shape[1])}
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(flat)
        writer.writerows(zip(*(map(_text, values) for values in flat.values()), strict=True))
    return path.with_suffix(".csv")


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | np.bool_ | np.integer) else repr(float(value))


WRITERS: dict[str, Callable[[Path, dict[str, Array]], Path]] = {
    "hdf5": write_h5, "npz": write_npz, "npy": write_npy, "parquet": write_parquet, "csv": write_csv,
}  # fmt: skip
BINARY = ("hdf5", "npz", "npy", "parquet")


def column_map(kind: str, *, following: bool = False) -> list[str]:
    """The map of `named` columns in a kind of file."""
    numbered = "_*" if kind == "csv" else ""
    after = f"obs_after{numbered}"
    return [f"observation=obs{numbered} action=act{numbered}", "reward=r", *([f"next.observation={after}"] * following)]
