"""The figures of a report agree with numpy for all rows, episodes and layouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import rbtool
from rbtool.core.format.checks import SoundSteps
from rbtool.core.format.contracts import StepReader
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.open_steps import open_steps
from rbtool.core.progress import Silent
from rbtool.core.report import figures
from rbtool.core.report.figures import BINS, FRACTIONS, MOST_VALUES, Distribution, FieldFigures, Figures, measure
from rbtool.core.stats import QUANTILE_ERROR
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import Field, as_numbers
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, Ending, dataset_plans, relist, write_plan, write_walks

Array = np.ndarray[Any, Any]


def columns_of(reader: StepReader, figures: FieldFigures) -> Array:
    """The columns that are described: `[rows, width]`, or all numbers in one."""
    field = figures.field
    rows = as_numbers(reader.read(field.key, 0, reader.manifest.steps), field.dtype)
    return rows.reshape(-1, 1) if figures.pooled else rows.reshape(len(rows), math.prod(field.shape))


def require_equal_to_numpy(found: Distribution, values: Array) -> None:
    """Compare a distribution with what numpy computes of all values at once."""
    finite = values[np.isfinite(values)]
    numbers = finite.astype(np.float64)
    assert (found.count, found.nan, found.infinite) == (len(finite), np.isnan(values).sum(), np.isinf(values).sum())
    if not len(finite):
        assert (found.mean, found.std, found.min, found.max, found.histogram) == (None,) * 5
        return
    assert (found.min, found.max) == (finite.min().item(), finite.max().item())
    assert found.constant == (len(np.unique(finite)) == 1)
    np.testing.assert_allclose([found.mean, found.std], [numbers.mean(), numbers.std()], rtol=1e-9, atol=1e-12)
    expected = np.quantile(numbers, FRACTIONS, method="linear" if found.exact else "lower")
    np.testing.assert_allclose(found.quantiles, expected, rtol=1e-15 if found.exact else QUANTILE_ERROR)
    assert found.histogram is not None
    ends = float(finite.min()), float(finite.max())
    assert (found.histogram.low, found.histogram.high, sum(found.histogram.counts)) == (*ends, len(finite))
    if ends[1] - ends[0] > 1e-10 * max(map(abs, ends)):  # numpy makes no 40 bins of less
        assert found.histogram.counts == tuple(np.histogram(numbers, BINS, ends)[0].tolist())
    unique, counts = np.unique(finite, return_counts=True)
    few = finite.dtype.kind in "biu" and len(unique) <= MOST_VALUES
    assert found.values == (tuple(zip(unique.tolist(), counts.tolist(), strict=True)) if few else ())


def correlation_of(values: Array, starts: Array, lengths: Array, returns: Array) -> float | None:
    """Numpy's correlation of the mean of each episode with its return; None where it is not defined."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        parts = [values[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        means = np.array([part.mean(dtype=np.float64) for part in parts])
        there = np.isfinite(means) & np.isfinite(returns)
        means, returns = means[there], returns[there]
        if any(len(one) < 2 or not np.ptp(one) > 1e-9 * np.abs(one).max() for one in (means, returns)):
            return None
        found = float(np.corrcoef(means, returns)[0, 1])
        return found if np.isfinite(found) else None


def following_of(reader: StepReader, key: tuple[str, ...]) -> tuple[int, int]:
    """How many steps are before the last of their episode, and how many of them lead to the row after them."""
    table, steps = reader.episodes, reader.manifest.steps
    root, after = (reader.read(one, 0, steps) for one in (key, ("next", *key)))
    inside = np.ones(steps, bool)
    inside[table.start + table.length - 1] = False
    rows = np.flatnonzero(inside)
    return len(rows), sum(after[row].tobytes() == root[row + 1].tobytes() for row in rows.tolist())


def require_all(reader: StepReader, figures: Figures) -> None:
    """Compare all figures of a dataset."""
    assert figures.episodes is not None
    table = figures.episodes.table
    for field in figures.fields:
        columns = columns_of(reader, field)
        assert len(field.columns) == columns.shape[1]
        for place, found in enumerate(field.columns):
            require_equal_to_numpy(found, columns[:, place])
        rows = columns.reshape(reader.manifest.steps, -1) if field.pooled else columns
        for place, known in enumerate(field.correlations):
            values = rows if field.pooled else rows[:, place]
            require_close(known, correlation_of(values, table.start, table.length, table.total_reward))
    for followed in figures.followed:
        assert (followed.steps, followed.following) == following_of(reader, followed.key)
    require_equal_to_numpy(figures.episodes.length, table.length)


def require_close(found: float | None, expected: float | None) -> None:
    """Compare two correlations, unless numpy's is undefined because all episodes agree up to rounding."""
    if expected is not None:
        assert found is not None
        assert abs(found - expected) < 1e-6


RAGGED: list[tuple[int, Ending]] = [(3, "terminated"), (1, "truncated"), (40, "both"), (1, "terminated"), (9, "open")]
BLOCK = 97


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make episodes and histograms cross the borders of blocks."""
    monkeypatch.setattr(figures, "_BLOCK_BYTES", BLOCK)


def measured(path: Path) -> Figures:
    with open_steps(path) as reader:
        return measure(reader, Silent())


def field_of(found: Figures, name: str) -> FieldFigures:
    return next(one for one in found.fields if one.field.name == name)


def written(path: Path, columns: Mapping[Field, np.ndarray], lengths: Sequence[int], **spaces: object) -> Path:
    """Write columns as a dataset with episodes of these lengths."""
    with DatasetBuilder(path, list(columns)) as builder:
        builder.append({field.key: values for field, values in columns.items()})
        rows = [EpisodeRow(n, length, float(n), True, False, EndReason.TERMINATED) for n, length in enumerate(lengths)]
        builder.finish(rows, Origin(Request("test", "test", "odd"), spaces=spaces))
    return path


@settings(max_examples=25)
@given(plan=dataset_plans())
def test_figures_of_odd_data_agree_with_numpy(plan: DatasetPlan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "data"
    write_plan(plan, path)
    with open_steps(path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_BLOCK_BYTES", BLOCK)
        require_all(reader, measure(reader, Silent()))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("episodes", [[], [(1, "open")], [(1, "terminated")] * 5, RAGGED, [(500, "truncated")]])
@pytest.mark.parametrize("layout", ["ted", "packed", "h5"])
def test_every_layout_has_the_same_figures(tmp_path: Path, episodes: list[tuple[int, Ending]], layout: str) -> None:
    path = tmp_path / "data"
    write_walks(path, episodes)
    if layout == "packed":
        rbtool.convert(path, tmp_path / "other", layout="packed")
    elif layout == "h5":
        rbtool.checkpoint.save(path, tmp_path / "other", form="h5")
    with open_steps(path if layout == "ted" else tmp_path / "other") as reader:
        found = measure(reader, Silent())
        require_all(reader, found)
    assert len(found.fields) == 7
    assert [one.key for one in found.followed] == [("info", "success"), ("observation",)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "int64"])
def test_fields_too_large_for_memory_have_only_approximate_quantiles(tmp_path, monkeypatch, small_blocks, dtype):
    monkeypatch.setattr(figures, "_HELD_BYTES", 0)
    rows = np.random.default_rng(0).normal(size=(400, 3)) * [1, 20, 1000]
    field = Field(("observation",), dtype, (3,), "observation")
    path = written(tmp_path / "data", {field: rows.astype(dtype)}, [399, 1])
    with open_steps(path) as reader:
        found = measure(reader, Silent())
        require_all(reader, found)
    assert not any(column.exact for column in found.fields[0].columns)


def test_nan_and_infinite_values_are_counted_and_constants_marked(tmp_path: Path) -> None:
    rows = np.array([[1.5, np.nan, 2.0], [1.5, np.inf, np.nan], [1.5, -np.inf, 3.0]])
    path = written(tmp_path / "data", {Field(("observation",), "float64", (3,), "observation"): rows}, [2, 1])
    first, second, third = measured(path).fields[0].columns
    assert (first.constant, first.histogram and sum(first.histogram.counts)) == (True, 3)
    assert (second.count, second.nan, second.infinite, second.constant) == (0, 1, 2, False)
    assert (third.count, third.nan, third.min, third.max) == (2, 1, 2.0, 3.0)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "int64", "float32"])
def test_images_and_wide_fields_are_pooled(tmp_path: Path, small_blocks: None, dtype: str) -> None:
    shape = (16, 16, 3)
    rows = np.random.default_rng(1).integers(-100, 100, (7, *shape)).astype(dtype)
    field = Field(("pixels",), dtype, shape, "observation")
    with open_steps(written(tmp_path / "data", {field: rows}, [3, 1, 3])) as reader:
        found = measure(reader, Silent())
        require_all(reader, found)
    assert (found.fields[0].pooled, found.fields[0].label(0)) == (True, "pixels")


def test_columns_are_named_by_their_place(tmp_path: Path) -> None:
    field = Field(("pose",), "float32", (2, 3), "observation")
    found = measured(written(tmp_path / "data", {field: np.zeros((4, 2, 3), np.float32)}, [4])).fields[0]
    assert [found.label(place) for place in (0, 5)] == ["pose[0, 0]", "pose[1, 2]"]


def test_histograms_reach_the_extremes_of_float64(tmp_path: Path) -> None:
    rows = np.array([-1.7e308, -1e308, 0.0, 1.7e308])
    path = written(tmp_path / "data", {Field(("x",), "float64", (), "observation"): rows}, [4])
    found = measured(path).fields[0].columns[0].histogram
    assert found is not None
    assert (found.low, found.high, sum(found.counts), found.counts[0], found.counts[-1]) == (-1.7e308, 1.7e308, 4, 1, 1)


def test_actions_are_compared_with_their_space(tmp_path: Path) -> None:
    rows = np.array([[-1.0, 0.5], [1.0, 2.5], [0.25, -3.0], [-1.0, 0.0]], np.float32)
    field = Field(("action",), "float32", (2,), "action")
    space = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0, -2.0], "high": [1.0, 2.0]}
    first, second = measured(written(tmp_path / "data", {field: rows}, [4], action=space)).fields[0].columns
    assert (first.at_low, first.at_high) == (2, 1)
    assert first.bounded is not None
    assert second.bounded is not None
    assert first.bounded.counts == tuple(np.histogram(rows[:, 0], figures.BINS, (-1, 1))[0].tolist())
    assert (second.bounded.below, second.bounded.above, sum(second.bounded.counts)) == (1, 1, 2)


def test_correlations_with_the_return_agree_with_numpy(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", RAGGED)
    with open_steps(tmp_path / "walks") as reader:
        table, rows = reader.episodes, reader.read(("observation",), 0, 54)
        found = field_of(measure(reader, Silent()), "observation").correlations
        expected = [correlation_of(rows[:, n], table.start, table.length, table.total_reward) for n in range(3)]
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_curve_of_returns_keeps_every_extreme(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(1, "terminated"), (2, "truncated")] * 1000)
    found = measured(tmp_path / "walks").episodes
    assert found is not None
    assert found.curve is not None
    assert found.returns is not None
    returns = found.table.total_reward
    require_equal_to_numpy(found.returns, returns)
    assert len(found.curve.mean) == 400
    parts = np.split(returns, found.curve.first[1:])
    assert np.array_equal(found.curve.low, [part.min() for part in parts])
    assert np.array_equal(found.curve.high, [part.max() for part in parts])
    assert found.curve.mean == pytest.approx([part.mean() for part in parts])


@pytest.mark.parametrize(("operations", "known"), [({}, True), ({"exclude": ["next.original_reward"]}, False)])
def test_sums_over_n_steps_are_not_returns(tmp_path, operations, known) -> None:
    write_walks(tmp_path / "walks", RAGGED)
    made = {"n_step": 3, "gamma": 1.0, **operations}
    rbtool.preprocess(tmp_path / "walks", None, tmp_path / "n", operations=made, num_workers=0)
    before, after = (measured(tmp_path / name).episodes for name in ("walks", "n"))
    assert before is not None
    assert after is not None
    assert (after.returns == before.returns, not after.no_returns) == (known, known)


def test_next_observations_that_jump_do_not_follow(tmp_path: Path) -> None:
    plan = DatasetPlan((6, 3), ("terminated", "open"), (True, False), ODD_LEAVES[:1])
    write_plan(plan, tmp_path / "data")
    (found,) = measured(tmp_path / "data").followed
    assert (found.steps, found.following) == (7, 6)


def test_chosen_episodes_have_figures_of_their_own(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", RAGGED)
    with open_steps(tmp_path / "walks") as reader:
        chosen: StepReader = SoundSteps(reader, np.array([0, 2]))
        require_all(chosen, measure(chosen, Silent()))


def cut(path: Path) -> None:
    (path / "action.memmap").write_bytes((path / "action.memmap").read_bytes()[:-1])


def lost(path: Path) -> None:
    (path / "action.memmap").unlink()


@pytest.mark.parametrize(("damage", "rows"), [(cut, 53), (lost, 0)])
def test_what_can_be_read_of_a_damaged_dataset_is_described(tmp_path, damage, rows) -> None:
    write_walks(tmp_path / "walks", RAGGED)
    damage(tmp_path / "walks")
    with open_steps(tmp_path / "walks", damaged=True) as reader:
        found = measure(reader, Silent())
    action, observation = field_of(found, "action"), field_of(found, "observation")
    assert (action.rows, bool(action.lost)) == (rows, not rows)
    assert observation.rows == 54


def test_without_a_sound_episode_table_the_fields_have_figures(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", RAGGED)
    relist(tmp_path / "walks", episodes=4)
    found = measured(tmp_path / "walks")
    assert (found.episodes, len(found.fields), found.followed) == (None, 7, ())
    assert "5 episodes" in found.lost
