"""`OpenMLExperienceReplay`: the documented constructor over a stand-in of OpenML."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from static_server import StaticServer, mirror
from table_files import openml_server, plain_reading, tables

import rbtool
from rbtool import OpenMLExperienceReplay
from rbtool.core.errors import UsageError


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StaticServer]:
    with mirror(openml_server(), "OPENML_URL", monkeypatch, tmp_path / "store", base="") as running:
        yield running


def test_it_has_vectors_and_labels_and_nothing_else() -> None:
    data = OpenMLExperienceReplay("adult_onehot", 8)
    vectors, labels = plain_reading(tables()["adult"], one_hot=True, target="occupation", complete=True)
    rows = data[:]
    assert set(rows.keys(include_nested=True)) == {"X", "y"}
    assert (rows["X"].dtype, rows["y"].dtype) == (torch.float64, torch.int64)
    np.testing.assert_allclose(rows["X"].numpy(), vectors, rtol=1e-13, atol=1e-13)
    assert rows["y"].tolist() == labels.tolist()
    assert data.max_outcome_val == max(labels) == 3
    assert len(pickle.loads(pickle.dumps(data))) == len(labels)


def test_the_default_sampler_gives_each_row_once() -> None:
    data = OpenMLExperienceReplay("magic", 10)
    assert isinstance(data.sampler, rbtool.SamplerWithoutReplacement)
    drawn = torch.cat([data.sample()["X"] for _ in range(5)])
    assert sorted(drawn[:, 0].tolist()) == sorted(data[:]["X"][:, 0].tolist())


def test_nothing_can_be_added_and_edits_stay_in_memory() -> None:
    data = OpenMLExperienceReplay("shuttle", 4)
    with pytest.raises(RuntimeError):
        data.extend(data[:])
    data[:]["X"].zero_()
    assert bool((OpenMLExperienceReplay("shuttle", 4)[:]["X"][:, 0] != 0).any())


def test_it_is_opened_again_without_the_network(server: StaticServer, monkeypatch: pytest.MonkeyPatch) -> None:
    OpenMLExperienceReplay("covertype", 4)
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    server.asked.clear()
    assert len(OpenMLExperienceReplay("covertype", 4)) == 50
    assert set(rbtool.load_dataset("openml:covertype")[:].keys()) >= {"observation", "y"}
    assert server.asked == []


def test_another_name_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="did you mean 'adult_num'"):
        OpenMLExperienceReplay("adult_nmu", 4)
    with pytest.raises(UsageError):
        OpenMLExperienceReplay("magic", "four")  # type: ignore[arg-type]


def test_the_arguments_are_those_documented() -> None:
    assert list(inspect.signature(OpenMLExperienceReplay).parameters) == [
        "name", "batch_size", "root", "sampler", "writer", "collate_fn", "pin_memory", "prefetch", "transform",
    ]  # fmt: skip
