"""`RldsExporter`: the contract of export formats, and datasets that come back from our reader and a plain one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from rlds_files import METADATA, PLAIN, RICH, plain_records, random_episode, record, write_dataset

import rbtool
from rbtool.converters.rlds.example import packed_varints
from rbtool.converters.rlds.export import RldsExporter
from rbtool.core.errors import SchemaError
from rbtool.core.format.converter import Sink
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Key
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.testing.sinks import SinkTests

MINARI = Path(__file__).parents[1] / "data" / "minari"


def described(folder: Path) -> dict[str, Any]:
    """The leaves of the steps by name, as `features.json` describes them."""
    found: dict[str, Any] = {}

    def walk(node: Any, name: str) -> None:
        if "featuresDict" in node:
            for part, inner in node["featuresDict"]["features"].items():
                walk(inner, f"{name}/{part}")
        elif "sequence" in node:
            walk(node["sequence"]["feature"], name)
        else:
            found[name[1:]] = node

    walk(json.loads((folder / "features.json").read_text()), "")
    return found


def plain(folder: Path, name: str) -> list[Any]:
    """The rows of a feature of each episode, read without rbtool."""
    leaf = described(folder)[name]
    found: list[Any] = []
    for file in sorted(folder.glob("*.tfrecord-*")):
        for lists in plain_records(file):
            values, steps = lists[name], len(lists["steps/is_first"])
            if "text" in leaf:
                found.append([one.decode() for one in values])
            elif "image" in leaf:
                found.append(np.stack([np.asarray(Image.open(io.BytesIO(one))) for one in values]))
            else:
                tensor = leaf["tensor"]
                shape = tuple(int(length) for length in tensor["shape"].get("dimensions", ()))
                if tensor["encoding"] == "bytes":
                    values = np.stack([np.frombuffer(one, tensor["dtype"]) for one in values])
                found.append(np.asarray(values).astype(tensor["dtype"]).reshape(steps, *shape))
    return found


class TestExporter(SinkTests):
    def sink(self) -> type[Sink]:
        return RldsExporter

    def read(self, path: Path, key: Key) -> Any:
        """Rows of a leaf of TED, out of what a plain reading finds."""
        if key == ("episode",):
            numbers = [
                lists["episode_metadata/episode"] for file in path.glob("*.tfrecord-*") for lists in plain_records(file)
            ]
            steps = [len(one) - 1 for one in plain(path, "steps/is_first")]
            return np.concatenate([np.repeat(number, count) for number, count in zip(numbers, steps, strict=True)])
        before, inner = key[0] != "next", key[1:] if key[0] == "next" else key
        flags = {name: plain(path, f"steps/{name}") for name in ("is_terminal", "truncated", "is_last")}
        unfinished = [not one[-1] for one in flags["is_last"]]
        terminated = [one[1:, None] for one in flags["is_terminal"]]
        truncated = [one[1:, None].copy() for one in flags["truncated"]]
        for one, late in zip(truncated, unfinished, strict=True):
            one[-1] |= late
        if inner in (("terminated",), ("truncated",), ("done",)):
            both = {"terminated": terminated, "truncated": truncated}
            both["done"] = [one | other for one, other in zip(terminated, truncated, strict=True)]
            return np.concatenate(both[inner[0]])
        rows = plain(path, "steps/" + "/".join(inner))
        if inner == ("reward",):
            return np.concatenate([one[:-1, None] for one in rows])
        return np.concatenate([one[:-1] if before else one[1:] for one in rows])


def there_and_back(source: Path, folder: Path, **options: Any) -> None:
    """Convert, export, convert again: the same content. Again from that: the same bytes."""
    first = rbtool.convert(source, folder / "one", layout="ted", **options)
    result = rbtool.export(first.path, folder / "exported", to="rlds")
    assert (result.dropped_keys, result.layout) == ((), "rlds")
    again = rbtool.convert(result.path, folder / "two", layout="ted")
    differs = rbtool.diff(first.path, again.path)
    second = rbtool.export(again.path, folder / "other" / "exported", to="rlds")
    for file in result.path.iterdir():
        assert (second.path / file.name).read_bytes() == file.read_bytes()
    third = rbtool.convert(second.path, folder / "three", layout="ted")
    assert third.content_digest == again.content_digest
    columns = []
    for path in (first.path, again.path):
        with open_steps(path) as reader:
            rows = {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}
            columns.append({name: (array.dtype, array.shape, array.tobytes()) for name, array in rows.items()})
            columns[-1].pop("episode")
            columns[-1].pop("is_init", None)
    assert columns[0] == columns[1], differs


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(2, 6), min_size=1, max_size=4), seed=st.integers(0, 99), last=st.booleans())
def test_rlds_comes_back(lengths: list[int], seed: int, last: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("there")
    episodes = [random_episode(length, RICH, seed=seed + place) for place, length in enumerate(lengths)]
    records = [record(RICH, one, METADATA) for one in episodes]
    source = write_dataset(folder / "1.0.0", {"train": [records]}, RICH, METADATA)
    there_and_back(source, folder, rlds_last="observation" if last else "step", final_step="repeat")


@pytest.mark.parametrize("name", ["cartpole/scripted-v0", "tuple/trunc-v0", "pixel/random-v0"])
def test_other_datasets_come_back(name: str, tmp_path: Path) -> None:
    there_and_back(MINARI / name, tmp_path)


def test_images_become_png_and_other_types_bytes(tmp_path: Path) -> None:
    rbtool.convert(MINARI / "pixel/random-v0", tmp_path / "ted")
    rbtool.export(tmp_path / "ted", tmp_path / "out", to="rlds")
    leaves = described(tmp_path / "out")
    assert leaves["steps/observation"]["image"]["encodingFormat"] == "png"
    with open_steps(tmp_path / "ted") as reader:
        expected = reader.read(("observation",), 0, reader.manifest.steps)
    assert (
        np.concatenate([one[:-1] for one in plain(tmp_path / "out", "steps/observation")]).tobytes()
        == expected.tobytes()
    )
    assert leaves["steps/reward"]["tensor"] == {"shape": {}, "dtype": "float64", "encoding": "bytes"}


def test_ends_texts_and_seeds_are_kept(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated"), (1, "truncated"), (4, "open"), (2, "both")])
    rbtool.export(tmp_path / "walks", tmp_path / "out", to="rlds")
    rbtool.convert(tmp_path / "out", tmp_path / "back")
    tables = []
    for path in (tmp_path / "walks", tmp_path / "back"):
        with open_steps(path) as reader:
            tables.append((reader.episodes.end_reason.tolist(), reader.episodes.seed.tolist(), reader.episode_text))
    assert tables[0] == tables[1]


def test_sequences_of_any_length_are_ragged_again(tmp_path: Path) -> None:
    spec = {**RICH, "wide": ("sequence", ("tensor", "float64", ()), -1), "on": ("sequence", ("tensor", "bool", ()), -1)}
    records = [record(spec, random_episode(length, spec, seed=length)) for length in (4, 2, 6)]
    source = write_dataset(tmp_path / "1.0.0", {"train": [records]}, spec)
    rbtool.convert(source, tmp_path / "ted", rlds_last="observation")
    result = rbtool.export(tmp_path / "ted", tmp_path / "out", to="rlds")
    assert result.notes == ()
    features = json.loads((tmp_path / "out" / "features.json").read_text())["featuresDict"]["features"]
    steps = features["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    assert steps["points"]["sequence"]["length"] == "-1"
    assert "points_length" not in steps
    before, after = (
        [one for file in sorted(folder.glob("*.tfrecord-*")) for one in plain_records(file)]
        for folder in (source, tmp_path / "out")
    )
    for one, other in zip(before, after, strict=True):
        ragged = {name: values for name, values in one.items() if "ragged" in name and "pair" not in name}
        assert len(ragged) == 8
        for name, values in ragged.items():
            np.testing.assert_array_equal(other[name], values)


def add_one(steps: Any) -> Any:
    for side in (steps, steps["next"]):
        side["taps"] += 1
    return steps


@pytest.mark.parametrize(
    "change", [{"operations": {"exclude": "taps_length"}}, {"operations": {"rename": "taps_length=n"}}, {"fn": add_one}]
)
def test_sequences_that_need_their_padding_are_noted(change: Any, tmp_path: Path) -> None:
    spec = {**PLAIN, "taps": ("sequence", ("tensor", "int32", ()), -1)}
    records = [record(spec, random_episode(5, spec, seed=seed)) for seed in range(2)]
    rbtool.convert(
        write_dataset(tmp_path / "1.0.0", {"train": [records]}, spec), tmp_path / "ted", rlds_last="observation"
    )
    rbtool.preprocess(tmp_path / "ted", dest=tmp_path / "changed", **change)
    result = rbtool.export(tmp_path / "changed", tmp_path / "out", to="rlds")
    assert [note.partition(" to ")[0] for note in result.notes] == ["taps stays padded"]
    with open_steps(tmp_path / "changed") as reader:
        expected = reader.read(("taps",), 0, reader.manifest.steps)
    np.testing.assert_array_equal(np.concatenate([one[:-1] for one in plain(tmp_path / "out", "steps/taps")]), expected)


def test_next_rows_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    plan = DatasetPlan((3, 2), ("terminated", "truncated"), (False, True), ODD_LEAVES[:1])
    write_plan(plan, tmp_path / "odd")
    with pytest.raises(SchemaError, match=r"observation\.position after a step .* RLDS stores only one"):
        rbtool.export(tmp_path / "odd", tmp_path / "out", to="rlds")
    assert not (tmp_path / "out").exists()


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300), max_size=40))
def test_varints_are_those_of_protobuf(numbers: list[int]) -> None:
    expected = bytearray()
    for number in numbers:
        left = number & 0xFFFFFFFFFFFFFFFF
        while left >= 0x80:
            expected.append(left & 0x7F | 0x80)
            left >>= 7
        expected.append(left)
    assert packed_varints(np.array(numbers, np.int64)) == bytes(expected)
