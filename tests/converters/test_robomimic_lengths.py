"""Robomimic's observations with another number of rows than steps: one more in all demonstrations, or odd ones."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from group_files import Demo, robomimic_demo, write_demos

import rbtool
from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.core.errors import FormatError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.reader import Reader
from rbtool.core.ted.episodes import Final
from rbtool.core.testing.readers import ReaderTests


class TestReaderOfLongerObservations(ReaderTests):
    """A file whose observations have a row more than steps."""

    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        demos = {number: longer_demo(length, seed=number) for number, length in {10: 5, 2: 9, 0: 1, 7: 4}.items()}
        self.file = write_demos(tmp_path_factory.mktemp("robomimic") / "low_dim.hdf5", demos)

    def source(self) -> Path:
        return self.file

    def reader(self) -> type[Reader]:
        return RobomimicReader

    def with_small_pieces(self) -> Reader:
        return type("Small", (RobomimicReader,), {"piece_bytes": 700})(self.file)


def longer_demo(steps: int, *, seed: int = 0, names: tuple[str, ...] = ("obs/hand", "obs/scene/cubes")) -> Demo:
    """A demonstration whose observations have the one after the last step as their last row."""
    columns = dict(robomimic_demo(steps, seed=seed).columns)
    for name in names:
        after = columns[f"next_{name}"]
        columns[name] = np.concatenate((columns[name], after[-1:]))
    return Demo({name: values for name, values in columns.items() if not name.startswith("next_obs")})


@pytest.mark.parametrize("choice", ["auto", "drop", "repeat"])
def test_a_row_more_than_steps_is_the_last_observation(choice: str, tmp_path: Path) -> None:
    lengths = {0: 1, 3: 6, 12: 4}
    file = write_demos(
        tmp_path / "a.hdf5", {number: longer_demo(steps, seed=number) for number, steps in lengths.items()}
    )
    result = rbtool.convert(file, tmp_path / "out", final_step=choice)
    with TedReader(result.path) as reader:
        assert reader.episodes.length.tolist() == [1, 6, 4]
        assert set(reader.episodes.final.tolist()) == {Final.OBSERVED}
        start = 0
        for number, steps in lengths.items():
            with h5py.File(file) as plain:
                stored = plain[f"data/demo_{number}/obs/hand"][()]
            assert np.array_equal(reader.read(("observation", "hand"), start, start + steps), stored[:-1])
            assert np.array_equal(reader.read(("next", "observation", "hand"), start, start + steps), stored[1:])
            start += steps
    assert "obs has a row more than steps: the last one is the observation after the last step" in result.notes


@pytest.mark.parametrize("rows", [2, 3, 5, 6])
@pytest.mark.parametrize("bad", [(0,), (0, 1), (0, 1, 3)])
def test_observations_of_another_length_are_the_fault_of_their_demonstration(
    rows: int, bad: tuple[int, ...], tmp_path: Path
) -> None:
    demos = {}
    for number in (0, 1, 3, 8):
        made = robomimic_demo(4, seed=number, next_obs=False)
        wrong = {"obs/hand": np.zeros((rows, 3))} if number in bad else {}
        demos[number] = Demo({**made.columns, **wrong}, made.attributes)
    file = write_demos(tmp_path / "a.hdf5", demos)
    with pytest.raises(FormatError, match=f"demo_0: 'obs/hand' has {rows} rows, and the episode has 4 steps"):
        rbtool.convert(file, tmp_path / "out")
    result = rbtool.convert(file, tmp_path / "out", skip_bad=True)
    assert result.episodes == 4 - len(bad)
    with TedReader(result.path) as reader:
        assert not set(bad) & set(reader.episodes.episode.tolist())
        assert ("observation", "hand") in {field.key for field in reader.fields}
    alone = write_demos(tmp_path / "b.hdf5", {0: demos[0]})
    if rows != 5:
        with pytest.raises(FormatError, match=f"'obs/hand' has {rows} rows, and the episode has 4 steps"):
            rbtool.convert(alone, tmp_path / "alone")


def test_some_observations_with_a_row_more_are_refused(tmp_path: Path) -> None:
    one = ("obs/hand",)
    file = write_demos(tmp_path / "a.hdf5", {0: longer_demo(4, names=one), 1: longer_demo(2, names=one)})
    with pytest.raises(FormatError, match="has a row more than steps in every episode, and 'obs/scene/cubes'"):
        rbtool.convert(file, tmp_path / "out")
    longer = longer_demo(4, names=("obs/hand", "obs/scene/cubes"))
    both = Demo({**longer.columns, "next_obs/hand": np.zeros((4, 3))})
    with pytest.raises(FormatError, match="both state what came after each step"):
        rbtool.convert(write_demos(tmp_path / "b.hdf5", {0: both}), tmp_path / "out")
