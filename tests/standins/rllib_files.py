"""RLlib files written by plain json and pyarrow, and a second reading of them that shares nothing with rbtool's."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
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


def entries(data: Any, lookback: int = 0) -> dict[str, Any]:
    """A part of an episode of the new API stack."""
    return {"data": data, "lookback": lookback, "finalized": False, "space": None}


def packed_episode(rows: Sequence[Row], *, repeats: int = 0, first: int = 0, **extra: Any) -> bytes:
    """Pack transitions as a piece of an episode whose first `repeats` rows repeat the end of the piece before it."""
    column = {name: [row[name] for row in rows] for name in rows[0]}
    episode = {
        "id_": str(rows[0]["eps_id"]), "agent_id": None, "module_id": None,
        "observations": entries([*column["obs"], column["new_obs"][-1]], repeats),
        "actions": entries(column["actions"], repeats), "rewards": entries(column["rewards"], repeats),
        "infos": entries([{}] * (len(rows) + 1), repeats),
        "extra_model_outputs": {"action_prob": entries(column["action_prob"], repeats)},
        "is_terminated": rows[-1]["terminateds"], "is_truncated": rows[-1]["truncateds"],
        "t_started": first, "t": first + len(rows) - repeats, "custom_data": {},
    } | extra  # fmt: skip
    return bytes(msgpack.packb(episode, default=_as_msgpack_numpy))


def _as_msgpack_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = b"O" if value.dtype.hasobject else b""
        data = pickle.dumps(value) if kind else value.tobytes()
        return {b"nd": True, b"type": value.dtype.str, b"kind": kind, b"shape": value.shape, b"data": data}
    return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}


def write_items(path: Path, items: Sequence[bytes]) -> Path:
    """Write packed episodes as `ray.data.from_items` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"item": pa.array(items, pa.binary())}), path, row_group_size=2)
    return path


def tensors(rows: np.ndarray[Any, Any], *, stated: str | bytes | None = None) -> tuple[pa.Field, pa.Array]:
    """A column of tensors as Ray writes it: lists, and the shape of a row in the metadata of the field."""
    flat = pa.array(rows.reshape(len(rows), -1).tolist(), pa.large_list(pa.from_numpy_dtype(rows.dtype)))
    return extended("ray.data.arrow_tensor_v2", stated or json.dumps(rows.shape[1:]), flat)


def extended(name: str, about: str | bytes, values: pa.Array) -> tuple[pa.Field, pa.Array]:
    """A column of an extension type that pyarrow does not know."""
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": about}
    return pa.field("", values.type, metadata=metadata), values


def write_extended(path: Path, columns: dict[str, Any]) -> Path:
    """Write columns to Parquet: lists, arrays of Arrow, or what `extended` returns."""
    made = {
        name: one if isinstance(one, tuple) else (pa.field("", pa.array(one).type), pa.array(one))
        for name, one in columns.items()
    }
    fields = [field.with_name(name) for name, (field, _) in made.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_arrays([array for _, array in made.values()], schema=pa.schema(fields)), path)
    return path
