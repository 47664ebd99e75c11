"""`convert --engine ray`: workers of a cluster write the bytes that one process writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from d4rl_files import flat, random_episodes, write
from local_ray import two_cores

import rbtool

LENGTHS = [3, 1, 9, 4, 1, 30, 2, 5, 6, 40] * 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source.hdf5", flat(random_episodes(LENGTHS)))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of two cores."""
    with two_cores() as ray:
        yield ray


def test_a_missing_ray_is_an_error_with_its_installation(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(rbtool.UsageError, match="not installed") as caught:
        rbtool.convert(source, tmp_path / "made", num_workers=2, engine="ray")
    assert caught.value.hint == "pip install 'rbtool[ray]'"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("engine", "message"), [("ray", "needs workers"), ("spark", "is not known")])
def test_an_engine_without_sense_is_refused(source: Path, tmp_path: Path, engine: str, message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.convert(source, tmp_path / "made", engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_the_bytes_are_those_of_one_process(ray: Any, source: Path, layout: str, tmp_path: Path) -> None:
    expected = rbtool.convert(source, tmp_path / "one", layout=layout).content_digest
    for workers in (1, 2):
        made = rbtool.convert(source, tmp_path / f"{workers}", layout=layout, num_workers=workers, engine="ray")
        assert made.content_digest == expected
        assert not rbtool.check(made.path).findings
