"""The same function, however the work is divided among workers: the same dataset."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.errors import RbtoolError, SchemaError
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.processor import Unit
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.preprocess import preprocess

EPISODES = [(1 + (7 * number) % 11, "terminated") for number in range(40)]
CUTS = [(65536, 0), (37, 0), (1, 2), (64, 3)]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walks") / "walks"
    write_walks(path, EPISODES)  # type: ignore[arg-type]
    return path


def noise(row: Any) -> Any:
    return row.set("noise", torch.rand(2) + random.random() + np.random.rand())  # noqa: NPY002


def rarely(row: Any) -> Any:
    return row.set("noise", torch.rand(()) if int(row["episode"]) % 13 == 12 else torch.zeros(()))


def crop(td: Any) -> Any:
    start = random.randrange(len(td))
    return td[start : start + 1 + int(torch.randint(0, 5, ()))]


def some(td: Any) -> Any:
    """Nothing of the first episodes, not even keys, then each third one twice, moved."""
    number = int(td["episode"][0])
    if number % 3 or number < 15:
        return td.select()[:0]
    return torch.cat([td, td]).set("moved", torch.rand(2 * len(td)))


@pytest.mark.parametrize(
    ("function", "unit"),
    [
        (noise, "row"),
        pytest.param(rarely, "row", marks=pytest.mark.slow),
        pytest.param(lambda row: row.set("x", row["action"] * 2), "row", marks=pytest.mark.slow),
        (crop, "episode"),
        pytest.param(some, "episode", marks=pytest.mark.slow),
    ],
)
def test_chunks_and_workers_change_nothing(
    walks: Path, tmp_path: Path, function: Callable[[Any], Any], unit: Unit
) -> None:
    results = [
        preprocess(walks, function, tmp_path / str(place), unit=unit, vmap=False if unit == "row" else None,
                   chunk_size=chunk_size, num_workers=workers)
        for place, (chunk_size, workers) in enumerate(CUTS)
    ]  # fmt: skip
    assert len({result.content_digest for result in results}) == 1
    other = preprocess(walks, function, tmp_path / "other", unit=unit, seed=1, num_workers=0)
    assert (other.content_digest == results[0].content_digest) is (function.__name__ == "<lambda>")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("unit", "change", "error", "message"),
    [
        ("row", lambda row: None, SchemaError, r"step 17\b.*episode 3\b.*it returned None"),
        ("row", lambda row: 1 / 0, RbtoolError, r"step 17\b.*episode 3\b.*ZeroDivisionError"),
        ("row", lambda row: row.set("action", row["action"].double()), SchemaError, r"step 17\b.*came out as float64"),
        ("episode", lambda td: None, SchemaError, r"steps 9 to 12\b.*episode 2\b.*it returned None"),
    ],
)
def test_the_message_names_the_row_and_the_episode(
    walks: Path,
    tmp_path: Path,
    unit: Unit,
    change: Callable[[Any], Any],
    error: type[Exception],
    message: str,
    workers: int,
) -> None:
    with open_steps(walks) as reader:
        first = float(reader.read(("action",), 17 if unit == "row" else 9, 18)[0, 0])

    def function(td: Any) -> Any:
        return change(td) if float(td["action"].flatten()[0]) == first else td

    with pytest.raises(error, match=message):
        preprocess(walks, function, tmp_path / "new", unit=unit, vmap=None, num_workers=workers, retries=0)
    assert not (tmp_path / "new").exists()
