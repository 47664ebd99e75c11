"""TensorFlow Datasets opens exports, and what it writes is read with the values that it reads itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rbtool
from rbtool.core.open_steps import open_steps

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def tfds() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    pytest.importorskip("tensorflow")
    return pytest.importorskip("tensorflow_datasets")


def leaves(step: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in step.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def episodes_of(builder: Any) -> list[list[dict[tuple[str, ...], Any]]]:
    episodes = builder.as_dataset(split="train", shuffle_files=False)
    return [[dict(leaves(step)) for step in one["steps"].as_numpy_iterator()] for one in episodes]


def assert_equal(path: Path, episodes: list[list[dict[tuple[str, ...], Any]]]) -> None:
    """Every row is what TensorFlow Datasets gives for the step, and every next one that of the step after."""
    with open_steps(path) as reader:
        keys = {field.key for field in reader.fields}
        assert reader.episodes.length.tolist() == [len(steps) - 1 for steps in episodes]
        for start, steps in zip(reader.episodes.start.tolist(), episodes, strict=True):
            for row, (step, after) in enumerate(pairwise(steps), start=start):
                for key, value in step.items():
                    if key in (("is_first",), ("is_last",), ("is_terminal",)):
                        continue
                    late = key in (("reward",), ("discount",))
                    found = {("next", *key): value} if late else {key: value, ("next", *key): after[key]}
                    for place, expected in found.items():
                        if place in keys:
                            assert_value(reader.read(place, row, row + 1)[0], expected)
                assert reader.read(("next", "terminated"), row, row + 1)[0, 0] == after[("is_terminal",)]


def assert_value(found: Any, expected: Any) -> None:
    if isinstance(expected, bytes):
        assert bytes(found).rstrip(b"\0") == expected
    else:
        assert found.dtype == np.asarray(expected).dtype
        assert found.tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("name", ["cartpole/scripted-v0", "pixel/random-v0", "pendulum/random-v0"])
def test_exports_are_opened(tfds: Any, name: str, tmp_path: Path) -> None:
    rbtool.convert(DATA / "minari" / name, tmp_path / "ted", episodes="0:3")
    rbtool.export(tmp_path / "ted", tmp_path / "out", to="rlds")
    builder = tfds.builder_from_directory(tmp_path / "out")
    assert builder.info.splits["train"].num_examples == 3
    assert_equal(tmp_path / "ted", episodes_of(builder))


def test_a_prepared_dataset_is_read_as_it_is(tfds: Any, tmp_path: Path) -> None:
    kinds = tfds.features

    class Toy(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = tfds.core.Path(tmp_path)

        def _info(self) -> Any:
            observation = {
                "image": kinds.Image(shape=(16, 12, 3), encoding_format="png"),
                "depth": kinds.Image(shape=(8, 6, 1), dtype=np.uint16, encoding_format="png"),
                "range": kinds.Image(shape=(8, 6, 1), dtype=np.float32, encoding_format="png"),
                "ids": kinds.Tensor(shape=(3, 2), dtype=np.uint8), "task": kinds.Text(),
            }  # fmt: skip
            steps = {
                **dict.fromkeys(("is_first", "is_last", "is_terminal"), kinds.Scalar(dtype=np.bool_)),
                "observation": kinds.FeaturesDict(observation), "reward": kinds.Scalar(dtype=np.float32),
                "action": kinds.Tensor(shape=(3,), dtype=np.float32), "label": kinds.ClassLabel(num_classes=5),
                "packed": kinds.Tensor(shape=(5, 2), dtype=np.int32, encoding="zlib"),
                "raw": kinds.Tensor(shape=(3,), dtype=np.float64, encoding="bytes"),
            }  # fmt: skip
            top = kinds.FeaturesDict({"steps": kinds.Dataset(steps)})
            return tfds.core.DatasetInfo(builder=self, features=top, disable_shuffling=True)

        def _split_generators(self, manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for number in range(5):
                yield number, {"steps": list(made_steps(number))}

    builder = Toy(data_dir=tmp_path / "made", file_format="tfrecord")
    builder.download_and_prepare()
    result = rbtool.convert(Path(builder.data_dir), tmp_path / "out")
    assert any("zeros in 5 of 5 episodes" in note for note in result.notes)
    assert_equal(result.path, episodes_of(builder))


def made_steps(number: int) -> Iterator[dict[str, Any]]:
    draw, length = np.random.default_rng(number), 10 + number
    for step in range(length):
        last = step == length - 1
        yield {
            "observation": {
                "image": draw.integers(0, 256, (16, 12, 3), np.uint8),
                "depth": draw.integers(0, 1 << 16, (8, 6, 1)).astype(np.uint16),
                "range": draw.normal(size=(8, 6, 1)).astype(np.float32),
                "ids": draw.integers(0, 256, (3, 2), np.uint8), "task": f"task {number} é",
            },
            "action": np.zeros(3, np.float32) if last else draw.normal(size=3).astype(np.float32),
            "reward": np.float32(0 if last else draw.normal()), "label": int(draw.integers(0, 5)),
            "packed": draw.integers(-(1 << 31), 1 << 31, (5, 2)).astype(np.int32), "raw": draw.normal(size=3),
            "is_first": step == 0, "is_last": last, "is_terminal": last and number % 2 == 0,
        }  # fmt: skip
