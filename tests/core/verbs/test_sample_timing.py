from __future__ import annotations

import math
from pathlib import Path

import pytest

import rbtool
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import sample
from rbtool.core.verbs.sample import checked_seconds, timed


class Clock:
    """In the place of the module `time`: passes by `pace` whenever it is looked at, and as far as a test moves it."""

    def __init__(self, pace: float) -> None:
        self.now, self.pace = 0.0, pace

    def perf_counter(self) -> float:
        self.now += self.pace
        return self.now


def test_the_first_batches_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(0.0), list[int]()
    monkeypatch.setattr(sample, "time", clock)

    def draw() -> int:
        clock.now += 0.001 if calls else 0.05
        calls.append(1)
        return 7

    timing = timed(draw, 0.02, step_bytes=10.0, threads=3)
    assert timing.batches == 20
    assert len(calls) > timing.batches
    assert timing.median_us == pytest.approx(1000)
    assert timing.p95_us == pytest.approx(1000)
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
def test_batches_of_a_dataset_are_timed(tmp_path: Path, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_walks(tmp_path / "walks", [(6, "open"), (4, "terminated")])
    plain = rbtool.sample(tmp_path / "walks", 5, sampler=sampler, seed=2)
    monkeypatch.setattr(sample, "time", Clock(0.001))
    result = rbtool.sample(tmp_path / "walks", 5, sampler=sampler, seed=2, time=True, seconds=0.05)
    assert plain.timing is None
    assert result.indices == plain.indices  # the batch shown is the first, and those timed come after it
    assert result.timing is not None
    assert result.timing.seconds <= 0.1
    row_bytes = sum(field.bytes for field in result.fields) / 5
    assert result.timing.bytes_per_second == pytest.approx(result.timing.steps_per_second * row_bytes)
