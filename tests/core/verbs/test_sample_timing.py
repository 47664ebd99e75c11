from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

import rbtool
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.sample_result import checked_seconds, timed


def test_the_first_batches_are_left_out() -> None:
    calls = []

    def draw() -> int:
        time.sleep(0.05 if not calls else 0.001)
        calls.append(1)
        return 7

    timing = timed(draw, 0.02, step_bytes=10.0, threads=3)
    assert timing.batches >= 10
    assert len(calls) > timing.batches
    assert 900 < timing.median_us <= timing.p95_us
    assert timing.p95_us < 45_000
    assert timing.batches_per_second == pytest.approx(timing.batches / timing.seconds, rel=1e-2)
    assert timing.steps_per_second == pytest.approx(7 * timing.batches_per_second)
    assert timing.bytes_per_second == pytest.approx(10 * timing.steps_per_second)
    assert timing.threads == 3


@pytest.mark.parametrize(("seconds", "asked", "limit"), [(None, False, None), (None, True, 2.0), (0.5, True, 0.5)])
def test_for_how_long(seconds, asked, limit) -> None:
    assert checked_seconds(seconds, asked=asked) == limit


@pytest.mark.parametrize(
    ("seconds", "asked", "message"),
    [
        (1.0, False, "--seconds needs --time"),
        (0.0, True, "--seconds is 0.0, expected a time above 0"),
        (math.nan, True, "--seconds is nan"),
        (math.inf, True, "--seconds is inf"),
    ],
)
def test_times_that_are_none(seconds, asked, message) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        checked_seconds(seconds, asked=asked)


@pytest.mark.parametrize("sampler", ["random", "without-replacement"])
def test_batches_of_a_dataset_are_timed(tmp_path: Path, sampler: str) -> None:
    write_walks(tmp_path / "walks", [(6, "open"), (4, "terminated")])
    plain = rbtool.sample(tmp_path / "walks", 5, sampler=sampler, seed=2)
    result = rbtool.sample(tmp_path / "walks", 5, sampler=sampler, seed=2, time=True, seconds=0.05)
    assert plain.timing is None
    assert result.indices == plain.indices  # the batch shown is the first, and those timed come after it
    assert result.timing is not None
    assert result.timing.seconds <= 0.1
    row_bytes = sum(field.bytes for field in result.fields) / 5
    assert result.timing.bytes_per_second == pytest.approx(result.timing.steps_per_second * row_bytes)
