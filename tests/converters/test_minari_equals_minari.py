"""Every dataset in tests/data/minari and one of every kind of space and info, value for value as Minari reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from gymnasium import spaces
from minari_oracle import assert_equals_minari, make_episode, write_minari

from rbtool.converters.minari.reader import MinariReader
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.verbs.convert import convert

DATA = Path(__file__).parents[1] / "data" / "minari"
FOLDERS = sorted(path.parent.parent for path in DATA.rglob("metadata.json") if path.parent.name == "data")
FORMATS = ("hdf5", "arrow", "parquet")
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (3,), np.float64)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(DATA).as_posix())
@pytest.mark.parametrize("piece_bytes", [16 << 20, 20_000])
def test_every_sample_dataset(folder: Path, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MinariReader, "piece_bytes", piece_bytes)
    convert(folder, tmp_path / "ted")
    assert assert_equals_minari(tmp_path / "ted", folder) > 0


def test_the_sample_datasets_are_all_there() -> None:
    assert len(FOLDERS) == 9


BOXES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)  # fmt: skip
SPACES: dict[str, spaces.Space[Any]] = {
    **{f"box {dtype}": spaces.Box(0, 1, (3,), np.dtype(dtype).type) for dtype in BOXES},
    "box of no dimension": spaces.Box(-np.inf, np.inf, (), np.float32),
    "box of two": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "discrete": spaces.Discrete(5, start=-2),
    "discrete int32": spaces.Discrete(5, dtype=np.int32),
    "multi discrete": spaces.MultiDiscrete([3, 4, 5]),
    "multi discrete of two": spaces.MultiDiscrete([[3, 4], [5, 6]], dtype=np.int32),
    "multi binary": spaces.MultiBinary(7),
    "multi binary of two": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(12, min_length=0, charset="abcé→漢𝄞 "),
    "dict": spaces.Dict(a=OBSERVATIONS, b=spaces.Dict(c=spaces.Discrete(3), t=spaces.Text(4))),
    "tuple": spaces.Tuple([OBSERVATIONS, spaces.Tuple([spaces.MultiBinary(2), spaces.Text(3)])]),
    "tuple in dict in tuple": spaces.Tuple([spaces.Dict(x=spaces.Tuple([spaces.Discrete(9)])), OBSERVATIONS]),
    "small image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
}
IMAGES: dict[str, spaces.Space[Any]] = {
    "colour": spaces.Box(0, 255, (40, 36, 3), np.uint8),
    "grey": spaces.Box(0, 255, (33, 32), np.uint8),
    "inside": spaces.Dict(n=spaces.Tuple([spaces.Box(0, 255, (32, 32, 3), np.uint8), spaces.Discrete(3)])),
}


def write(
    root: Path, observations: spaces.Space[Any], actions: spaces.Space[Any], lengths: list[int], **how: Any
) -> Path:
    draw = np.random.default_rng(7)
    episodes = [make_episode(observations, actions, steps, draw) for steps in lengths]
    return write_minari(root, "made/here-v0", observations, actions, episodes, **how)


# Arrow and Parquet hold the same tables: each of them has every other space.
@pytest.mark.parametrize(
    ("name", "data_format"),
    [(name, one) for number, name in enumerate(SPACES) for one in ("hdf5", ("arrow", "parquet")[number % 2])],
)
def test_every_space(name: str, data_format: str, tmp_path: Path) -> None:
    folder = write(tmp_path, SPACES[name], SPACES[name], [4, 1, 9], data_format=data_format)
    convert(folder, tmp_path / "ted")
    assert assert_equals_minari(tmp_path / "ted", folder) > 0


@each("data_format", FORMATS)
@each("jpeg_encoding", [True, False])
@each("name", IMAGES)
def test_images(name: str, jpeg_encoding: bool, data_format: str, tmp_path: Path) -> None:
    how = {"data_format": data_format, "jpeg_encoding": jpeg_encoding}
    folder = write(tmp_path, IMAGES[name], ACTIONS, [3, 12], **how)
    convert(folder, tmp_path / "ted")
    assert assert_equals_minari(tmp_path / "ted", folder) > 0


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("lengths", [[1], [1] * 13, [5] * 12 + [2]], ids=["one step", "13 of one", "13"])
def test_episodes_in_the_order_of_their_numbers(lengths: list[int], data_format: str, tmp_path: Path) -> None:
    folder = write(tmp_path, OBSERVATIONS, ACTIONS, lengths, data_format=data_format)
    convert(folder, tmp_path / "ted")
    assert_equals_minari(tmp_path / "ted", folder)
    with TedReader(tmp_path / "ted") as reader:
        assert reader.episodes.episode.tolist() == list(range(len(lengths)))
        assert reader.episodes.length.tolist() == lengths
