"""Time stamps that count frames: exact values, datasets without them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.processor import BlockColumn
from rbtool.core.robots.times import Retime
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.testing.operations import OperationTests, sample_block

DATA = Path(__file__).parents[2] / "data" / "lerobot" / "recent"


class TestRetime(OperationTests):
    def operation(self):
        return Retime(30)

    def rows(self):
        fields, block = sample_block()
        frames = np.concatenate([np.arange(length) for length in block.pieces.rows])
        block = replace(block, columns={**block.columns, ("frame",): BlockColumn("int64", frames)})
        return (*fields, Field(("frame",), "int64", (), "id")), block


def test_time_stamps_count_frames(tmp_path):
    made = rbtool.convert(DATA / "jitter_4ms", tmp_path / "made")
    assert any("LeRobot needs tolerance_s ≥ 0.0041, its default, 0.0001" in note for note in made.notes)
    result = rbtool.preprocess(made.path, dest=tmp_path / "out", operations={"retime": 30})
    with open_steps(result.path) as reader:
        frames, stamps = (reader.read((name,), 0, 34) for name in ("frame", "timestamp"))
        assert any("videos are kept" in note for note in reader.manifest.notes)
    pixels = rbtool.preprocess(made.path, dest=tmp_path / "pixels", operations={"crop": "observation.image.top=8x8"})
    with open_steps(pixels.path) as reader:
        assert not any("videos are kept" in note for note in reader.manifest.notes)
    assert stamps.dtype == np.float32
    assert np.array_equal(stamps, (frames / 30).astype(np.float32))
    out = rbtool.export(result.path, tmp_path / "lerobot", to="lerobot").path
    assert not any("tolerance_s" in note for note in rbtool.convert(out, tmp_path / "again").notes)


def test_the_stated_rate_is_that_of_the_time_stamps():
    documents = {"meta/info.json": b'{"fps": 30}', "meta/stats.json": b"{}"}
    assert Retime(30).documents(documents) == documents
    assert json.loads(Retime(20).documents(documents)["meta/info.json"]) == {"fps": 20}


@pytest.mark.parametrize(("fps", "message"), [
    (0, "--retime is 0"),
    (1e-300, "--retime is 1e-300, expected frames a second, 1e-06 to"),
    (30, "the number of each row in its episode"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(fps, message, tmp_path):
    write_walks(tmp_path / "walks", [(3, "terminated")])
    with pytest.raises(UsageError, match=message):
        rbtool.preprocess(tmp_path / "walks", dest=tmp_path / "out", operations={"retime": fps})
