from __future__ import annotations

import os

import pytest

from rbtool.core.dataset import Manifest, Request
from rbtool.core.errors import UsageError
from rbtool.core.preprocess import Plan
from rbtool.core.ted import Field


def manifest(steps: int, row_bytes: int = 64) -> Manifest:
    field = Field(("x",), "uint8", (row_bytes,), "observation")
    return Manifest("dataset", "ted", Request("t", "t", "t"), steps, 1, (field,), (), "", "test")


@pytest.mark.parametrize(
    ("row_bytes", "size"), [(64, 65536), (1 << 10, 16384), (1 << 20, 16), (1 << 25, 1), (0, 65536)]
)
def test_the_chunk_size_depends_on_the_row_alone(row_bytes: int, size: int) -> None:
    sizes = {Plan.of(manifest(10**6, row_bytes), workers, None, None).chunk_size for workers in (None, 0, 1, 7)}
    assert sizes == {size}


@pytest.mark.parametrize(("cores", "chunks", "workers"), [(1, 100, 0), (4, 100, 4), (4, 3, 3), (4, 1, 0)])
def test_a_worker_a_core_but_no_more_than_chunks(
    monkeypatch: pytest.MonkeyPatch, cores: int, chunks: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert Plan.of(manifest(chunks * 10), None, 10, None).workers == workers


def test_workers_asked_for_are_given_as_far_as_there_are_chunks() -> None:
    assert [Plan.of(manifest(30), workers, 10, None).workers for workers in (0, 1, 3, 9)] == [0, 1, 3, 3]


def test_chunks_cover_the_steps_once() -> None:
    assert Plan.of(manifest(25), 0, 10, None).chunks() == [(0, 10), (10, 20), (20, 25)]
    assert Plan.of(manifest(25), 0, 10, 20).chunks() == [(0, 10), (10, 20)]


@pytest.mark.parametrize(
    ("steps", "given", "message"),
    [
        (0, (None, None, None), "no steps: there is nothing"),
        (25, (-1, None, None), "-1 workers asked for"),
        (25, (None, 0, None), "chunks of 0 steps asked for"),
        (25, (None, None, 26), r"26 steps asked for \(num_frames\), the dataset has 25"),
        (25, (None, None, 0), "0 steps asked for"),
        (25, (None, None, -5), "-5 steps asked for"),
    ],
)
def test_what_cannot_be(steps: int, given: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan.of(manifest(steps), *given)
