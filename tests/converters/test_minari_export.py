"""Minari, rbtool and Minari again: equal value for value."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest
from cases import each
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minari import MinariDataset
from minari_oracle import (
    SPACES,
    assert_equals_minari,
    flat_columns,
    make_episode,
    minari_cache,
    minari_episodes,
    write_minari,
)

from rbtool.core.errors import SchemaError
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, PlannedLeaf, write_plan, write_walks
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.export import export

DATA = Path(__file__).parents[1] / "data" / "minari"
INFOS = ["number", "at_step", "text", "constant", "dotted", "a.c", "a", "nested", "pair", "dozen"]
ENDS = st.sampled_from([(False, True), (True, False), (True, True), (False, False)])


def make_infos(kinds: set[str], rows: int, draw: np.random.Generator) -> dict[str, Any]:
    made: dict[str, Any] = {
        "number": draw.integers(1 << 40, size=rows).tolist(), "at_step": draw.normal(size=(rows - 1, 3)),
        "text": [f"é{number}" for number in draw.integers(1 << 40, size=rows)], "constant": [f"all {rows}"] * rows,
        "dotted": {"a.b": ["dot"] * rows, "a": {"b": draw.normal(size=rows)}, "a.c": np.arange(rows)},
        "a.c": ["a name"] * rows, "a": {"c": ["a group"] * rows},
        "nested": {"deep": draw.normal(size=rows).tolist(), "shape": np.arange(rows)},
        "pair": (np.arange(rows) + 2, draw.normal(size=rows)),
        "dozen": tuple(np.arange(rows) + number for number in range(12)),
    }  # fmt: skip
    return {name: made[name] for name in sorted(kinds)}


def refused(source: Path, message: str) -> None:
    """Export to a folder beside the source; nothing is left of it."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(SchemaError, match=message):
        export(source, source.parent / "out", to="minari")
    assert sorted(source.parent.iterdir()) == before


def columns(value: Any) -> Any:
    return {} if value is None else flat_columns(value)


def assert_same_episodes(one: Path, other: Path) -> None:
    """What Minari reads of two datasets is equal, down to element types."""
    for first, second in zip(minari_episodes(one), minari_episodes(other), strict=True):
        for name in ("observations", "actions", "infos", "rewards", "terminations", "truncations"):
            found, expected = (columns(getattr(episode, name)) for episode in (second, first))
            assert found.keys() == expected.keys()
            for key, column in expected.items():
                if isinstance(column, list):
                    assert found[key] == column
                else:
                    assert found[key].dtype == column.dtype
                    np.testing.assert_array_equal(found[key], column)
    said = [list(MinariDataset(folder / "data").storage.get_episode_metadata(range(len(minari_episodes(one)))))
            for folder in (one, other)]  # fmt: skip
    assert said[0] == said[1]


@settings(max_examples=10, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(
    observations=SPACES, actions=SPACES, infos=st.sets(st.sampled_from(INFOS)),
    episodes=st.lists(st.tuples(st.integers(1, 5), ENDS, st.none() | st.integers(0, 2**63)), min_size=1, max_size=5),
    options=st.none() | st.just({"level": 3, "a.b": 1, "a": {"b": "é", "wide": 0.5}}), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_there_and_back(
    observations: Any, actions: Any, infos: set[str], episodes: Any, options: Any, seed: int
) -> None:
    draw, made = np.random.default_rng(seed), []
    for steps, (terminated, truncated), number in episodes:
        made.append(
            make_episode(
                observations, actions, steps, draw, seed=number, options=options,
                infos=make_infos(infos, steps + 1, draw),
                terminations=[False] * (steps - 1) + [terminated], truncations=[False] * (steps - 1) + [truncated],
            )
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folder = write_minari(root, "made/any-v0", observations, actions, made)
        whole = convert(folder, root / "ted")
        result = export(root / "ted", root / "again", to="minari")
        assert (result.dropped_keys, result.notes, result.layout) == ((), (), "minari")
        assert_same_episodes(folder, root / "again")
        assert convert(root / "again", root / "ted2").content_digest == whole.content_digest
        one, other = (MinariDataset(path / "data").storage.metadata for path in (folder, root / "again"))
        for name in ("dataset_size", "jpeg_encoding"):
            one.pop(name)
            other.pop(name)
        assert one == other


@pytest.mark.parametrize("name", ["D4RL/door/human-v2", "griddict/random-parquet-v0", "pixel/random-v0"])
def test_real_datasets(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "ted")
    export(tmp_path / "ted", tmp_path / "cache" / name, to="minari")
    assert assert_equals_minari(tmp_path / "ted", tmp_path / "cache" / name) > 0
    with minari_cache(tmp_path / "cache"):
        assert minari.load_dataset(name).total_episodes == Manifest.load(tmp_path / "ted").episodes


def test_some_episodes_are_numbered_anew(tmp_path: Path) -> None:
    convert(DATA / "cartpole/scripted-v0", tmp_path / "ted")
    result = export(tmp_path / "ted", tmp_path / "few", to="minari", episodes="2,5:7")
    assert (result.episodes, result.request["episodes"]) == (3, "2,5:7")
    assert result.notes == ("episodes are renumbered from 0, as Minari requires",)
    with TedReader(tmp_path / "ted") as reader:
        for position, row in enumerate((2, 5, 6)):
            start, length = int(reader.episodes.start[row]), int(reader.episodes.length[row])
            after = reader.read(("next", "observation"), start, start + length)
            found = minari_episodes(tmp_path / "few")[position]
            np.testing.assert_array_equal(found.observations[1:], after)


@each("infos", [{}, None])
def test_infos_without_any_are_empty(infos: dict[str, Any] | None, tmp_path: Path) -> None:
    box, draw = spaces.Box(0, 1, (2,)), np.random.default_rng(0)
    folder = write_minari(tmp_path, "made-v0", box, box, [make_episode(box, box, 2, draw, infos=infos)])
    convert(folder, tmp_path / "ted")
    assert export(tmp_path / "ted", tmp_path / "again", to="minari").notes == ()
    assert [episode.infos for episode in minari_episodes(tmp_path / "again")] == [{}]


@each(("data_format", "expected"), [("hdf5", []), ("arrow", ["infos/nested"]), ("parquet", ["infos/nested"])])
def test_nested_infos_are_dicts_of_arrays(data_format: str, expected: list[str], tmp_path: Path) -> None:
    box, draw = spaces.Box(0, 1, (2,)), np.random.default_rng(0)
    infos = {"plain": [1, 2, 3], "nested": {"deep": [1.0, 2.0, 3.0]}}
    made = [make_episode(box, box, 2, draw, infos=infos)]
    convert(write_minari(tmp_path, "made-v0", box, box, made, data_format=data_format), tmp_path / "ted")
    notes = export(tmp_path / "ted", tmp_path / "again", to="minari").notes
    assert [note.partition(" is a dict of arrays in the export")[0] for note in notes] == expected
    (episode,) = minari_episodes(tmp_path / "again")
    assert episode.infos["nested"]["deep"].tolist() == [1.0, 2.0, 3.0]


def test_attributes_of_episodes_come_back(tmp_path: Path) -> None:
    box = spaces.Box(0, 1, (2,))
    draw = np.random.default_rng(0)
    folder = write_minari(tmp_path, "made-v0", box, box, [make_episode(box, box, 2, draw) for _ in range(2)])
    MinariDataset(folder / "data").storage.update_episode_metadata([{"goal": [1, 2]}, {"note": "é", "a.b": 3}])
    convert(folder, tmp_path / "ted")
    export(tmp_path / "ted", tmp_path / "again", to="minari")
    said = list(MinariDataset(tmp_path / "again/data").storage.get_episode_metadata([0, 1]))
    assert said[0]["goal"].tolist() == [1, 2]
    assert (said[1]["note"], said[1]["a.b"]) == ("é", 3)


def test_data_of_another_origin(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated"), (1, "truncated"), (4, "open")])
    result = export(tmp_path / "walks", tmp_path / "My walks!", to="minari")
    assert [note.partition(":")[0] for note in result.notes][:2] == [
        "the observation space is not known", "the action space is not known",
    ]  # fmt: skip
    dataset = MinariDataset(tmp_path / "My walks!/data")
    assert dataset.observation_space == spaces.Box(-np.inf, np.inf, (3,), np.float64)
    with TedReader(tmp_path / "walks") as reader:
        episodes = minari_episodes(tmp_path / "My walks!")
        rewards = np.concatenate([episode.rewards for episode in episodes])
        np.testing.assert_array_equal(rewards, reader.read(("next", "reward"), 0, 8)[:, 0])
        success = np.concatenate([episode.infos["success"][1:] for episode in episodes])
        np.testing.assert_array_equal(success, reader.read(("next", "info", "success"), 0, 8))
    assert [bool(episode.truncations[-1]) for episode in episodes] == [False, True, False]


@each(
    ("leaves", "jump", "message"),
    [
        (ODD_LEAVES[:1], True, "differs from that before the next step"),
        (ODD_LEAVES[2:3], False, "bfloat16"),
        (ODD_LEAVES[3:4], False, "observations and actions"),
    ],
)
def test_what_minari_cannot_hold_is_refused(leaves: Any, jump: bool, message: str, tmp_path: Path) -> None:
    write_plan(DatasetPlan((4, 3), ("terminated", "open"), (jump, False), leaves), tmp_path / "odd")
    refused(tmp_path / "odd", message)


def test_what_has_no_place_is_named(tmp_path: Path) -> None:
    leaves = tuple(leaf for leaf in ODD_LEAVES if leaf.key in [("observation", "position"), ("mask",), ("info", "lap")])
    write_plan(DatasetPlan((4,), ("terminated",), (False,), leaves, root_flags="zero"), tmp_path / "odd")
    result = export(tmp_path / "odd", tmp_path / "out", to="minari")
    assert [one["key"] for one in result.dropped_keys] == ["mask", "done", "terminated", "truncated"]
    assert len(minari_episodes(tmp_path / "out")[0].infos["lap"]) == 4
    metadata = json.loads((tmp_path / "out/data/metadata.json").read_bytes())
    assert metadata["total_steps"] == 4


LEAF, WIDER = spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,))


@each(
    "names",
    [
        {"a.b": LEAF, "a": spaces.Dict({"b": WIDER})},
        {"a": spaces.Dict({"b": LEAF}), "a.b": LEAF},
        {"a.shape": LEAF, "a": spaces.Dict({"shape": LEAF})},
        {"shape": LEAF, "shape_": LEAF},
        {"a": spaces.Dict({"b.c": LEAF}), "a.b": spaces.Dict({"c": LEAF})},
    ],
)
def test_names_with_dots_are_not_groups(names: dict[str, spaces.Space[Any]], tmp_path: Path) -> None:
    space = spaces.Dict(names)
    made = make_episode(space, space, 3, np.random.default_rng(0))
    folder = write_minari(tmp_path, "made-v0", space, space, [made])
    convert(folder, tmp_path / "ted")
    assert export(tmp_path / "ted", tmp_path / "again", to="minari").notes == ()
    assert_same_episodes(folder, tmp_path / "again")


@each(
    ("observations", "infos", "message"),
    [
        ({"x/y": LEAF}, {}, "has the part 'x/y'"),
        (
            {"x": LEAF},
            {"a.shape_": np.arange(4), "a": {"shape": np.arange(4)}},
            r"two fields are called info\.a\.shape_",
        ),
        ({"x": LEAF}, {"a.b": np.arange(3), "a": {"b": np.arange(4)}}, r"two fields are called info\.a\.b"),
        (
            {"a.shape": LEAF, "a.shape_": LEAF, "a": spaces.Dict({"shape": LEAF})},
            {},
            r"two fields are called observation\.a\.shape_",
        ),
    ],
)
def test_names_that_minari_would_mix_up_are_refused(
    observations: Any, infos: Any, message: str, tmp_path: Path
) -> None:
    space = spaces.Dict(observations)
    made = make_episode(space, LEAF, 3, np.random.default_rng(0), infos=infos)
    # In HDF5 Minari itself writes a name with a slash as a group, and cannot read it
    stored = "parquet" if "x/y" in observations else "hdf5"
    convert(write_minari(tmp_path, "made-v0", space, LEAF, [made], data_format=stored), tmp_path / "ted")
    refused(tmp_path / "ted", message)


@each(
    ("key", "message"),
    [
        (("info", "task"), "info.task and task would both be at infos/task"),
        (("info", "task", "level"), "would both be at infos/task"),
        (("task",), "would both be at infos/task"),
        (("info", "x/y"), "has the part 'x/y'"),
        (("info", "."), r"has the part '\.'"),
    ],
)
def test_infos_with_one_place_are_refused(key: tuple[str, ...], message: str, tmp_path: Path) -> None:
    leaves = (ODD_LEAVES[0], PlannedLeaf(key, "int64", (), "after"))
    write_plan(DatasetPlan((4,), ("terminated",), (False,), leaves, text=True), tmp_path / "odd")
    refused(tmp_path / "odd", message)
