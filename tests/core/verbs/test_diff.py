"""`diff`: equal data are equal in any layout, and every kind of difference is found and named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rbtool
from rbtool.core.format.checks import SoundSteps
from rbtool.core.format.contracts import PassedSteps, StepReader
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.memmap.builder import Origin
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.merge import MergedSchema, MergedSteps

EPISODES = [(4, "open"), (3, "terminated"), (1, "both"), (2, "truncated"), (5, "terminated")]


def rewritten(view: StepReader, dest: Path, documents: dict[str, bytes] | None = None) -> Path:
    write_dataset(view, dest, "ted", Origin.of(view.manifest, view.documents() if documents is None else documents))
    return dest


def chosen(source: Path, rows: list[int], dest: Path) -> Path:
    with open_steps(source) as reader:
        return rewritten(SoundSteps(reader, np.array(rows)), dest)


class Changed(PassedSteps):
    """A dataset with other values of one field in some steps."""

    def __init__(self, source, key=("observation",), steps=(), by=0.0, **columns):
        super().__init__(source)
        self._key, self._steps, self._by, self._columns = key, steps, by, columns

    @property
    def episodes(self) -> EpisodeTable:
        return EpisodeTable.from_columns(self.source.episodes.columns() | self._columns)

    def read(self, key, start, stop):
        rows = self.source.read(key, start, stop)
        if key == self._key:
            for step in self._steps:
                if start <= step < stop:
                    rows[step - start] += self._by
        return rows


def changed(source: Path, dest: Path, **how) -> Path:
    with open_steps(source) as reader:
        return rewritten(Changed(reader, **how), dest)


@pytest.mark.parametrize("layout", ["ted", "packed", "flat", "nested", "h5"])
def test_equal_data_are_equal_in_every_layout(walks, tmp_path, layout):
    other = tmp_path / "other"
    if layout in {"ted", "packed"}:
        rbtool.convert(walks, other, layout=layout)
    else:
        rbtool.checkpoint.save(walks, other, form=layout)
    found = rbtool.diff(walks, other)
    assert found.equal
    assert (found.same, found.steps, found.episodes) == (5, (15, 15), (5, 5))
    assert (found.fields, found.values, found.changed, found.entries, found.only_a, found.only_b) == ((),) * 6


def test_episodes_are_matched_by_content_and_their_order_counts(walks, tmp_path):
    found = rbtool.diff(walks, chosen(walks, [3, 0, 4], tmp_path / "some"))
    assert (found.equal, found.reordered, found.renumbered, found.changed) == (False, True, 0, ())
    assert (found.same, found.only_a, found.only_b) == (3, (1, 2), ())
    other = chosen(walks, [4, 3, 2, 1, 0], tmp_path / "reversed")
    assert not rbtool.diff(walks, other).equal
    assert rbtool.diff(walks, other, ignore_order=True).equal
    rbtool.merge([walks, walks], tmp_path / "twice")
    tail = chosen(tmp_path / "twice", [5, 6, 7, 8, 9], tmp_path / "tail")
    found = rbtool.diff(walks, tail)
    assert (found.equal, found.same, found.renumbered, found.reordered) == (False, 5, 5, False)
    assert rbtool.diff(walks, tail, ignore_order=True).equal


def test_values_are_compared_within_tolerances(walks, tmp_path):
    other = changed(walks, tmp_path / "other", steps=(1, 2, 9), by=1e-3)
    found = rbtool.diff(walks, other)
    assert not found.equal
    assert [(one.a, one.b, one.what) for one in found.changed] == [
        (0, 0, ("observation",)), (3, 3, ("observation",))
    ]  # fmt: skip
    (value,) = found.values
    assert (value.key, value.steps, value.episodes) == ("observation", 3, 2)
    assert value.largest == pytest.approx(1e-3)
    close = rbtool.diff(walks, other, atol=2e-3)
    assert close.equal
    assert (close.same, close.close) == (3, 2)
    assert not rbtool.diff(walks, other, atol=1e-4).equal


def test_nan_of_equal_bits_are_equal_and_within_no_tolerance(walks, tmp_path):
    zero = changed(walks, tmp_path / "zero", key=("action",), steps=(0,), by=np.float32(np.nan))
    minus = shutil.copytree(zero, tmp_path / "minus")
    assert rbtool.diff(zero, minus).equal
    found = rbtool.diff(walks, zero, atol=1e30)
    assert [one.key for one in found.values] == ["action"]
    assert found.values[0].largest is None


def test_infinite_values_are_within_no_tolerance_of_others(walks, tmp_path):
    infinite = changed(walks, tmp_path / "infinite", key=("action",), steps=(1,), by=np.float32(np.inf))
    opposite = changed(walks, tmp_path / "opposite", key=("action",), steps=(1,), by=np.float32(-np.inf))
    for a, b in [(walks, infinite), (infinite, walks), (infinite, opposite)]:
        found = rbtool.diff(a, b, rtol=1e-3, atol=1e-3)
        assert not found.equal
        assert [(one.key, one.steps, one.largest) for one in found.values] == [("action", 1, None)]
    same = changed(infinite, tmp_path / "same", steps=(2,), by=1e-6)
    assert rbtool.diff(infinite, same, rtol=1e-3, atol=1e-3).equal


def test_fields_that_differ_are_named_and_compared_across_dtypes(walks, tmp_path):
    with open_steps(walks) as reader:
        kept = [one for one in reader.fields if one.key != ("info", "success")]
        fields = tuple(replace(one, dtype="float64") if one.key == ("action",) else one for one in kept)
        view = MergedSteps([reader], MergedSchema(fields), replace(reader.manifest, fields=fields))
        rewritten(view, tmp_path / "wide")
    found = rbtool.diff(walks, tmp_path / "wide")
    assert {(one.key, one.found) for one in found.fields} == {
        ("action", ("float32 [2]", "float64 [2]")), ("info.success", ("int32 []", "nothing")),
    }  # fmt: skip
    assert not found.equal
    assert found.same == 5
    assert not found.values


def test_lengths_and_table_entries_are_compared(walks, tmp_path):
    columns = {"seed": np.arange(5) + 70, "end_reason": np.full(5, 4)}
    other = changed(walks, tmp_path / "other", **columns)
    found = rbtool.diff(walks, other)
    assert not found.equal
    assert found.entries == (
        "end reason in 5 episodes: end of file and inferred in episode 0", "seed in 5 episodes"
    )  # fmt: skip
    write_walks(tmp_path / "longer", [(5, "open"), *EPISODES[1:]], seed=5)
    found = rbtool.diff(walks, tmp_path / "longer")
    assert (found.changed[0].what, found.changed[0].lengths) == (("length",), (4, 5))


def test_text_and_spaces_are_compared(walks, tmp_path):
    with open_steps(walks) as reader:
        origin = replace(Origin.of(reader.manifest, {}), spaces={})

        class Plain(PassedSteps):
            episode_text = None

        write_dataset(Plain(reader), tmp_path / "plain", "ted", origin)
    found = rbtool.diff(walks, tmp_path / "plain")
    assert found.entries == ("text in 5 episodes", "space observation")


def test_impossible_tolerances_are_refused(walks):
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(rbtool.UsageError, match="--rtol is"):
            rbtool.diff(walks, walks, rtol=tolerance)


@pytest.mark.parametrize("types", [("int64", "int64"), ("uint64", "uint64"), ("uint64", "int64")])
def test_large_integers_are_not_within_a_tolerance_of_their_neighbours(written, tmp_path, types):
    for name, dtype, ids in (("a", types[0], [2**60, 5]), ("b", types[1], [2**60 + 1, 5])):
        written({Field(("id",), dtype, (), "info"): np.array(ids, dtype)}, [2]).rename(tmp_path / name)
    result = rbtool.diff(tmp_path / "a", tmp_path / "b", atol=0.5)
    assert not result.equal
    assert [(one.steps, one.largest) for one in result.values] == [(1, 1.0)]
    assert not rbtool.diff(tmp_path / "a", tmp_path / "b", atol=1).values
