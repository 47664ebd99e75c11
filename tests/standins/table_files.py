"""Tables of steps written by plain libraries, and read without rbtool: D4RL, files of any kind, OGBench and OpenML."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from static_server import StaticServer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Episode:
    """Steps of an episode as they happened: `observations` has a row more than there are steps."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: bool
    timed_out: bool

    def __len__(self) -> int:
        return len(self.rewards)


def random_episodes(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    width: int = 3,
    actions: int = 2,
    dtype: str = "float32",
    ends: Sequence[str] | None = None,
) -> list[Episode]:
    """Make episodes whose ends are `terminal`, `timeout`, `both` or `none` (allowed for the last)."""
    draw = np.random.default_rng(seed)
    kinds = ends or [("terminal", "timeout")[number % 2] for number in range(len(lengths))]
    return [
        Episode(
            draw.normal(size=(length + 1, width)).astype(dtype),
            draw.normal(size=(length, actions)).astype(dtype),
            draw.normal(size=length).astype(dtype),
            kind in ("terminal", "both"),
            kind in ("timeout", "both"),
        )
        for length, kind in zip(lengths, kinds, strict=True)
    ]


def flat(episodes: Sequence[Episode], *, timeouts: bool = True, following: bool = False) -> dict[str, Array]:
    """Lay episodes out as D4RL does: one row a step, and no row for the observation after the last one."""
    columns = {
        "observations": np.concatenate([episode.observations[:-1] for episode in episodes]),
        "actions": np.concatenate([episode.actions for episode in episodes]),
        "rewards": np.concatenate([episode.rewards for episode in episodes]),
        "terminals": np.concatenate([_at_end(len(episode), episode.terminated) for episode in episodes]),
    }
    if timeouts:
        columns["timeouts"] = np.concatenate([_at_end(len(episode), episode.timed_out) for episode in episodes])
    if following:
        columns["next_observations"] = np.concatenate([episode.observations[1:] for episode in episodes])
    return columns


def _at_end(length: int, value: bool) -> Array:
    flags = np.zeros(length, bool)
    flags[-1] = value
    return flags


def write_d4rl(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Write columns by their path in the file; `options` are those of h5py for arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            array = np.ndim(values) > 0 and not isinstance(values, str | bytes)
            file.create_dataset(name, data=values, **(options if array else {}))
    return path


def plain_rows(columns: dict[str, Array], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Read a file step by step, in the slowest and plainest way: `ends` are the rows that end an episode.

    `next` is None where the file has no observation after a step.
    """
    rows, episode, begin = [], 0, 0
    for row in range(len(columns["rewards"])):
        last = row in ends or row == len(columns["rewards"]) - 1
        following = columns["observations"][row + 1] if not last else None
        if "next_observations" in columns:
            following = columns["next_observations"][row]
        rows.append(
            {
                "episode": episode, "step": row - begin, "last": last, "next": following,
                "observation": columns["observations"][row], "action": columns["actions"][row],
                "reward": columns["rewards"][row], "terminated": bool(columns["terminals"][row]),
                "timeout": bool(columns["timeouts"][row]) if "timeouts" in columns else None,
            }
        )  # fmt: skip
        if last:
            episode, begin = episode + 1, row + 1
    return rows


def after_final_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `--final-step auto` keeps of plain rows: unfinished last steps end one step earlier, or repeat."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["next"] is not None:
            kept.append(dict(row))
        elif row["terminated"]:
            kept.append({**row, "next": row["observation"]})
        elif kept and kept[-1]["episode"] == row["episode"]:
            kept[-1] = {**kept[-1], "last": True, "cut": True}
    return kept


NAMES = {
    "observations": "obs", "actions": "act", "rewards": "r", "terminals": "dead", "timeouts": "late",
    "next_observations": "obs_after",
}  # fmt: skip
"""What the columns of `flat` are called here: no reader finds them by name."""


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


def random_ogbench(
    lengths: Sequence[int], *, seed: int = 0, unfinished: bool = False, visual: bool = False, flags: str = "float32"
) -> dict[str, Array]:
    """Make trajectories of these numbers of steps: each has a row more, the last one marked."""
    draw = np.random.default_rng(seed)
    rows = sum(lengths) + len(lengths)
    terminals = np.zeros(rows, flags)
    terminals[np.cumsum([length + 1 for length in lengths]) - 1] = 1
    if unfinished:
        terminals[-1] = 0
    observations = draw.integers(0, 256, (rows, 8, 8, 3), np.uint8) if visual else draw.normal(size=(rows, 3))
    return {
        "observations": observations if visual else observations.astype("float32"),
        "actions": draw.integers(0, 9, rows).astype("int32") if visual else draw.normal(size=(rows, 2)).astype("f4"),
        "terminals": terminals,
        "qpos": draw.normal(size=(rows, 4)).astype("float32"),
        "qvel": draw.normal(size=(rows, 4)).astype("float32"),
    }


def compact(columns: dict[str, Array]) -> dict[str, Array]:
    """The same trajectories as `ogbench.load_dataset(compact_dataset=True)` returns them."""
    last = columns["terminals"].astype("float32")
    terminals = [max(row, after) for row, after in zip(last, [*last[1:], 1], strict=True)]
    return columns | {"terminals": np.array(terminals, "f4"), "valids": 1 - last}


def write_ogbench(path: Path, columns: dict[str, Any], *, packed: bool = True) -> Path:
    """Write columns as ogbench does, or uncompressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (np.savez_compressed if packed else np.savez)(path, **columns)
    return path


def plain_ogbench(columns: dict[str, Array], first: int = 0) -> list[dict[str, Any]]:
    """Read a file step by step, in the slowest and plainest way; `first` is the number of the first episode."""
    rows, episode, step = [], first, 0
    terminals = columns["terminals"].reshape(-1)
    for row in range(len(terminals)):
        if terminals[row]:
            if step:
                rows[-1]["last"] = rows[-1]["flagged"] = True
            episode, step = episode + 1, 0
            continue
        if row == len(terminals) - 1:  # the recording stops: this row is the last observation
            if step:
                rows[-1]["last"] = True
            continue
        rows.append(
            {
                "episode": episode, "step": step, "last": False, "flagged": False, "action": columns["actions"][row],
                "observation": columns["observations"][row], "next.observation": columns["observations"][row + 1],
                "info.qpos": columns["qpos"][row], "next.info.qpos": columns["qpos"][row + 1],
            }
        )  # fmt: skip
        step += 1
    return rows


Cell = float | str | None


@dataclass(frozen=True)
class Table:
    """A table as OpenML has it: `columns` maps names to the categories declared, or None for numbers."""

    name: str
    version: int
    number: int
    columns: Mapping[str, tuple[str, ...] | None]
    rows: list[list[Cell]]
    target: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def arff(self) -> bytes:
        """Write the table as OpenML does: comments, quotes where a value has blanks, `?` for what is missing."""
        lines = ["% a comment", f"@RELATION {self.name}", ""]
        for name, categories in self.columns.items():
            kind = "NUMERIC" if categories is None else "{" + ",".join(map(_quoted, categories)) + "}"
            lines.append(f"@ATTRIBUTE {_quoted(name)} {kind}")
        lines += ["", "@DATA"]
        lines += [",".join("?" if cell is None else _quoted(cell) for cell in row) for row in self.rows]
        return ("\n".join(lines) + "\n").encode()

    def files(self, base: str) -> dict[str, bytes]:
        """The answers of the interface, and the file, by path."""
        content = self.arff()
        description = {
            "id": str(self.number), "name": self.name, "version": str(self.version), "format": "ARFF",
            "licence": "Public", "file_id": str(self.number + 5000), "default_target_attribute": self.target,
            "url": f"{base}other/{self.name}.arff", "md5_checksum": hashlib.md5(content).hexdigest(), **self.more,
        }  # fmt: skip
        listed = {"did": self.number, "name": self.name, "version": self.version, "status": "active", "format": "ARFF"}
        listing = f"api/v1/json/data/list/data_name/{self.name}/limit/2/data_version/{self.version}"
        return {
            listing: json.dumps({"data": {"dataset": [listed]}}).encode(),
            f"api/v1/json/data/{self.number}": json.dumps({"data_set_description": description}).encode(),
            f"data/v1/download/{self.number + 5000}": content,
            f"other/{self.name}.arff": content,
        }


def _quoted(cell: float | str) -> str:
    if isinstance(cell, str):
        escaped = cell.replace("'", "\\'")
        return f"'{escaped}'" if set(cell) & set(" ,'\"%{}") else cell
    return repr(cell)


def tables() -> dict[str, Table]:
    """Small tables of the names, versions and kinds of columns of the real ones."""
    chance = random.Random(3)
    jobs = ("Sales", "Craft repair", "Adm-clerical", "Prof's, other")
    adult = Table(
        "adult", 1, 179,
        {"age": None, "workclass": ("Private", "State-gov"), "hours per week": None, "occupation": jobs,
         "sex": ("Male", "Female"), "class": (">50K", "<=50K")},
        [
            [float(chance.randint(17, 90)), chance.choice(["Private", "State-gov", None]), float(chance.randint(1, 99)),
             chance.choice([*jobs, None]), chance.choice(["Male", "Female"]), chance.choice([">50K", "<=50K"])]
            for _ in range(60)
        ],
        "class",
    )  # fmt: skip
    mushroom = Table(
        "mushroom", 1, 24,
        {"cap": ("x", "b", "s"), "stalk-root": ("e", "c", "b", "r"), "class": ("p", "e")},
        [
            [chance.choice("xbs"), chance.choice(["e", "c", "b", None]), chance.choice("pe")]
            for _ in range(40)
        ],
        "class",
    )  # fmt: skip
    numbers = {
        name: Table(
            name, version, number, {"id": None, "a": None, "b": None, "class:": ("1", "2", "10")},
            [[float(row), chance.gauss(5, 3), 4.25, chance.choice(["1", "2", "10"])] for row in range(50)],
            "class:", {"row_id_attribute": "id"},
        )
        for name, version, number in (("covertype", 3, 1596), ("shuttle", 1, 40685), ("MagicTelescope", 1, 1120))
    }  # fmt: skip
    return {"adult": adult, "mushroom": mushroom, **numbers}


def plain_reading(table: Table, *, one_hot: bool, target: str, complete: bool) -> tuple[Array, Array]:
    """Encode a table in the plainest way: `X` and `y` of all rows that are kept."""
    names = list(table.columns)
    ignored = {table.target, target, table.more.get("row_id_attribute")}
    used = [name for name in names if name not in {table.target, table.more.get("row_id_attribute")} or name == target]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    if complete:
        rows = [row for row in rows if all(row[name] is not None for name in used)]
    vectors: list[Array] = []
    for name in names:
        if name in ignored:
            continue
        values = [row[name] for row in rows]
        if table.columns[name] is None:
            numbers = np.array(values, float)
            spread = numbers.std() or 1.0
            vectors.append(((numbers - numbers.mean()) / spread)[:, None])
            continue
        known = sorted({str(value) for value in values if value is not None})
        order: list[Cell] = [*known, *([None] if None in values else [])]
        codes = [order.index(value) for value in values]
        if one_hot:
            vectors.append(np.array([[float(code == at) for at in range(len(order))] for code in codes]))
        else:
            vectors.append(np.array(codes, float)[:, None])
    labels = sorted({str(row[target]) for row in rows})
    return np.concatenate(vectors, 1), np.array([labels.index(str(row[target])) for row in rows])


def openml_server() -> StaticServer:
    """A server of all tables; `OPENML_URL` is its `address("")`."""
    server = StaticServer({})
    for table in tables().values():
        server.files |= table.files(server.address(""))
    return server
