"""A loopback stand-in of OpenML's JSON interface with small tables, and a plain reading of them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from static_server import StaticServer

Array = np.ndarray[Any, Any]
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
