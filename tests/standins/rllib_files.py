"""RLlib files written by plain json and pyarrow, and a second reading of them that shares nothing with rbtool's."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def rows_of_episode(
    eps_id: Any, length: int, *, end: str = "terminated", seed: int = 0, flags: str = "dones", following: bool = True
) -> list[Row]:
    """Make the transitions of an episode that ends `terminated`, `truncated`, or without a flag (`none`)."""
    draw = np.random.default_rng(seed)
    observations = draw.normal(size=(length + 1, 3)).round(6).tolist()
    rows: list[Row] = []
    for step in range(length):
        last = step == length - 1
        row: Row = {
            "eps_id": eps_id, "t": step, "obs": observations[step], "actions": int(draw.integers(4)),
            "rewards": round(float(draw.normal()), 6), "infos": {}, "action_prob": round(float(draw.random()), 6),
        }  # fmt: skip
        if following:
            row["new_obs"] = observations[step + 1]
        if flags == "dones":
            row["dones"] = last and end != "none"
        else:
            row["terminateds"], row["truncateds"] = last and end == "terminated", last and end == "truncated"
        rows.append(row)
    return rows


def without(rows: Sequence[Row], *names: str) -> list[Row]:
    """Leave columns out."""
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def as_batch(rows: Sequence[Row], kind: str = "SampleBatch") -> Row:
    """Lay rows out as a SampleBatch."""
    return {"type": kind, **{name: [row[name] for row in rows] for name in rows[0]}}


def packed(values: Any, dtype: str = "float32") -> str:
    """Compress a column as RLlib does: base64 of an LZ4 frame of a pickled array."""
    data = pickle.dumps(np.asarray(values, dtype))
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(data)
    return base64.b64encode(sink.getvalue().to_pybytes()).decode()


def write_lines(path: Path, documents: Sequence[Row]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return path


def write_parquet(path: Path, rows: Sequence[Row], **options: Any) -> Path:
    """Write a Parquet file of transitions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(without(rows, "infos")), path, **options)
    return path


def plain_lines(path: Path) -> list[Row]:
    """Read transitions from lines, batches or transitions, in the order of the file."""
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        document = json.loads(line)
        if document.pop("type", None) is None:
            rows.append(document)
        else:
            count = len(document["rewards"])
            rows += [{name: values[at] for name, values in document.items()} for at in range(count)]
    return rows


def plain_parquet(paths: Sequence[Path]) -> list[Row]:
    """Read transitions from Parquet files, in the order of the files."""
    return [row for path in paths for row in pq.read_table(path).to_pylist()]
