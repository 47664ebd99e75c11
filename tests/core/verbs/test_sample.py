from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rbtool
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


def test_the_rows_drawn_are_named_and_described(walks: Path) -> None:
    result, reader = rbtool.sample(walks, 50, seed=3), TedReader(walks)
    index = np.array(result.indices)
    assert (result.n, result.seed, len(index)) == (50, 3, 50)
    assert set(index) <= set(range(20))
    assert list(result.episodes) == reader.read(("episode",), 0, 20)[index].tolist()
    starts = dict(zip(reader.episodes.episode.tolist(), reader.episodes.start.tolist(), strict=True))
    assert [starts[episode] + step for episode, step in zip(result.episodes, result.steps, strict=True)] == list(index)
    fields = {field.key: field for field in result.fields}
    assert list(fields) == [field.name for field in reader.fields]
    observation = reader.read(("observation",), 0, 20)[index]
    found = fields["observation"]
    assert (found.dtype, found.shape, found.bytes) == ("float64", (50, 3), 50 * 24)
    assert (found.min, found.max) == (observation.min(), observation.max())
    assert found.mean == pytest.approx(observation.mean())
    done = fields["next.done"]
    assert (done.min, done.mean, done.max) == (None, None, None)
    assert done.true_fraction == reader.read(("next", "done"), 0, 20)[index].mean()


@pytest.mark.parametrize("form", ["flat", "nested", "h5", "ted"])
def test_every_layout_gives_the_same_sample(walks: Path, tmp_path: Path, form: str) -> None:
    with open_steps(walks) as reader:
        save_checkpoint(reader, tmp_path / "saved", form)
    one, other = rbtool.sample(walks, 30, seed=1), rbtool.sample(tmp_path / "saved", 30, seed=1)
    assert (one.indices, one.episodes, one.steps) == (other.indices, other.episodes, other.steps)
    assert sorted(one.fields, key=lambda field: field.key) == sorted(other.fields, key=lambda field: field.key)


def test_a_seed_decides_and_is_told(walks: Path) -> None:
    first = rbtool.sample(walks, 64)
    assert rbtool.sample(walks, 64, seed=first.seed).indices == first.indices
    assert rbtool.sample(walks, 64).indices != first.indices


def test_by_name_below_the_root(tmp_path: Path) -> None:
    write_walks(tmp_path / "minari" / "walks" / "test-v0", EPISODES)
    assert rbtool.sample("minari:walks/test-v0", root=tmp_path).n == 256


@pytest.mark.parametrize(
    ("n", "seed", "message"), [(0, 1, "-n is 0, expected"), (-2, 1, "-n is -2, expected"), (1, -1, "the seed is -1")]
)
def test_what_cannot_be_drawn(walks: Path, n: int, seed: int, message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.sample(walks, n, seed=seed)


def test_a_dataset_without_steps(written) -> None:
    empty = written({Field(("x",), "int8", (), "info"): np.empty(0, np.int8)}, [])
    with pytest.raises(rbtool.UsageError, match="has no steps: there is nothing to sample"):
        rbtool.sample(empty)


@pytest.mark.parametrize(
    ("dtype", "role", "values", "expected"),
    [
        ("float32", "info", [1.0, math.nan, 3.0], (1.0, 2.0, 3.0)),
        ("float32", "info", [math.nan] * 3, (None, None, None)),
        ("float16", "info", [math.inf, 1.0, 1.0], (1.0, math.inf, math.inf)),
        ("uint64", "info", [2**63, 2**63, 2**63], (2**63, 2.0**63, 2**63)),
        ("bfloat16", "info", [0x3F80, 0x4000, 0x4040], (1.0, 2.0, 3.0)),
        ("complex64", "info", [1j, 2j, 3j], (None, None, None)),
        ("uint8", "text", [65, 66, 67], (None, None, None)),
    ],
)
def test_odd_values_are_described(written, dtype: str, role, values: list, expected: tuple) -> None:
    field = Field(("x",), dtype, (3,), role)
    path = written({field: np.array([values] * 4).astype(field.numpy)}, [4])
    result = rbtool.sample(path, 8, seed=0)
    (found,) = result.fields
    assert (found.min, found.mean, found.max) == pytest.approx(expected)
    assert (found.shape, found.true_fraction) == ((8, 3), None)
    assert to_document(result)["kind"] == "sample"


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "slice"},
        {"sampler": "slice", "slice_len": 10},
        {"sampler": "prioritized", "priority": "nothing"},
        {"sampler": "prioritized", "priority": "next.done"},
    ],
)
def test_what_is_wrong_is_told_before_torch_is_loaded(walks: Path, options: dict) -> None:
    script = f"""
import sys
import rbtool
try:
    rbtool.sample({str(walks)!r}, **{options!r})
except rbtool.UsageError:
    print("torch" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"
