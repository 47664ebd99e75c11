"""What is missing from infos, or cannot be a file's name, is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces

from rbtool.converters.minari_arrow_forms import at
from rbtool.core.errors import FormatError
from rbtool.core.testing.minari import make_episode, write_minari
from rbtool.core.verbs.convert import ConvertResult, convert

SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def converted(folder: Path, infos: list[dict[str, Any]], data_format: str) -> ConvertResult:
    draw = np.random.default_rng(3)
    episodes = [make_episode(SPACE, SPACE, 3, draw, infos=info) for info in infos]
    source = write_minari(folder / "source", "made/holes-v0", SPACE, SPACE, episodes, data_format=data_format)
    return convert(source, folder / "made")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize("values", [[None, 1.0, 2.0, 3.0], [0, None, 2, 3]])
def test_nulls_that_become_nan_are_noted(values: list[Any], data_format: str, tmp_path: Path) -> None:
    made = converted(tmp_path, [{"x": values}, {"x": values}], data_format)
    assert "info.x has no value in some rows of 2 of 2 episodes: NaN there" in made.notes


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_name_too_long_for_a_file_is_dropped_and_named(data_format: str, tmp_path: Path) -> None:
    made = converted(tmp_path, [{"x" * 250: [1.0] * 4, "short": [1.0] * 4}], data_format)
    assert [(item["key"], item["why"]) for item in made.dropped_keys] == [
        (f"info.{'x' * 250}", "its name has more than the 240 bytes that a file's name has room for")
    ]


def test_a_column_that_is_there_twice_is_refused() -> None:
    column = pa.StructArray.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["x", "x"])
    with pytest.raises(FormatError, match="'x' is there twice"):
        at(column, ("x",))
