"""Infos of any kind are recorded, or named with the reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_envs import Recorded, ScriptedEnv, run, same

import rbtool

BOX = spaces.Box(-1, 1, (2,), np.float32)


def record(dest: Path, rows: list[list[dict[str, Any]]], **options: Any) -> Recorded:
    """Record episodes whose rows have these infos."""
    plan = [(len(infos) - 1, "terminated") for infos in rows]
    env = ScriptedEnv(BOX, spaces.Discrete(2), plan, lambda episode, step: rows[episode][step])
    with rbtool.RecordEpisodes(env, dest, **options) as recording:
        run(recording, len(rows))
    return Recorded(dest)


def found(recorded: Recorded, name: str, episode: int) -> list[Any]:
    """The values of an entry in all rows of an episode, None where there is none."""
    columns = recorded.episode(episode)

    def at(prefix: str, row: int) -> Any:
        if f"{prefix}info.{name}" not in columns:
            return None
        mask = columns.get(f"{prefix}info.{name}_present")
        if mask is not None and not mask[row]:
            return None
        value, length = columns[f"{prefix}info.{name}"][row], columns.get(f"{prefix}info.{name}_length")
        return value if length is None else value[: length[row]].tobytes().decode()

    count = len(columns["observation"])
    return [at("", 0), *(at("next.", row) for row in range(count))]


def in_any_form(recorded: Recorded, name: str, episode: int) -> list[Any]:
    """The values of an entry in all rows of an episode, under the names of its forms if it has several."""
    rows = zip(*(found(recorded, name + form, episode) for form in ("", "_text", "_number", "_2")), strict=True)
    return [next((value for value in row if value is not None), None) for row in rows]


def test_where_an_entry_is_decides_where_it_is_stored(tmp_path: Path) -> None:
    rows = [{"all": 0, "some": 1.5}, {"all": 1, "steps": True}, {"all": 2, "steps": False, "some": 2.5}]
    recorded = record(tmp_path / "d", [rows])
    names = {name for name in recorded.columns if "info" in name}
    assert names == {
        "info.all", "next.info.all", "next.info.steps", "info.some", "info.some_present", "next.info.some",
        "next.info.some_present",
    }  # fmt: skip
    assert found(recorded, "all", 0) == [0, 1, 2]
    assert found(recorded, "steps", 0) == [None, True, False]
    assert found(recorded, "some", 0) == [1.5, None, 2.5]


KEPT = {
    "numbers": [1, 2, 3],
    "floats": [0.5, float("nan"), -0.0],
    "flags": [True, False, True],
    "typed": [np.float32(1), np.float32(2), np.float32(3)],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3)] * 3,
    "text": ["", "wörld", "longer than the others"],
    "lists": [[1, 2], [3, 4], [5, 6]],
    "nested": [{"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"b": 3}}],
}


@pytest.mark.parametrize("name", KEPT)
def test_values_that_are_kept(tmp_path: Path, name: str) -> None:
    recorded = record(tmp_path / "d", [[{"it": value} for value in KEPT[name]]] * 2)
    assert recorded.manifest.dropped_keys == ()
    for episode in (0, 1):
        if name == "nested":
            assert found(recorded, "it.a.b", episode) == [1, 2, 3]
        else:
            assert all(same(one, value) for one, value in zip(found(recorded, "it", episode), KEPT[name], strict=True))


DROPPED = {
    "objects": ([object()] * 2, "it is a object"),
    "large": ([1 << 70] * 2, "its numbers need more than 64 bits"),
    "words": ([np.array(["a"])] * 2, "it has elements of type <U1"),
    "dates": ([np.datetime64("2020")] * 2, "it has elements of type datetime64"),
    "mixed": (["text", 3], "in some steps: int64 [] where it is text in others"),
    "shapes": ([np.zeros(2), np.zeros(3)], "in some steps: float64 [3] where it is float64 [2] in others"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_values_that_are_not_kept_are_named(tmp_path: Path, name: str) -> None:
    values, why = DROPPED[name]
    recorded = record(tmp_path / "d", [[{"it": value, "kept": 1} for value in values]])
    [dropped] = recorded.manifest.dropped_keys
    assert dropped.key == "info.it"
    assert dropped.why.startswith(why)
    assert found(recorded, "kept", 0) == [1, 1]


def test_types_that_one_type_holds_are_widened(tmp_path: Path) -> None:
    recorded = record(tmp_path / "d", [[{"it": 1}, {"it": 2}], [{"it": 0.5}, {"it": 3}], [{"it": np.float32(0.1)}] * 2])
    assert found(recorded, "it", 0) + found(recorded, "it", 1) == [1.0, 2.0, 0.5, 3.0]
    assert found(recorded, "it", 2) == [np.float64(np.float32(0.1))] * 2
    assert recorded.columns["info.it"].dtype == np.float64


@pytest.mark.parametrize("large", [(1 << 53) + 1, -(1 << 53) - 1])
def test_types_that_no_type_holds_are_named(tmp_path: Path, large: int) -> None:
    recorded = record(tmp_path / "d", [[{"it": large}, {"it": 2}], [{"it": 0.5}, {"it": 3.5}]])
    assert found(recorded, "it", 0) == [large, 2]
    assert found(recorded, "it", 1) == [None, None]
    [dropped] = recorded.manifest.dropped_keys
    assert dropped.why == "in some episodes: no type holds its float64 and its int64 numbers"


def test_shapes_kinds_and_names_that_differ_between_episodes(tmp_path: Path) -> None:
    first = {"a": np.zeros(2), "b": "text", "c": {"d": 1}, "e": 5, "f_present": True}
    second = {"a": np.zeros(3), "b": 4, "c": 3, "e": {"g": 1}, "b_length": 5, "f_present": False}
    recorded = record(tmp_path / "d", [[first] * 3, [second] * 2])
    assert not recorded.manifest.dropped_keys
    assert recorded.manifest.renamed_keys == {
        "info.a (shape 2)": "info.a_2", "info.a (shape 3)": "info.a_3", "info.b (text)": "info.b_text",
        "info.b (number)": "info.b_number", "info.c (number)": "info.c_number", "info.e (number)": "info.e_number",
        "info.f_present": "info.f_present_",
    }  # fmt: skip
    assert found(recorded, "b_text", 0) == ["text"] * 3
    assert found(recorded, "b_number", 1) == [4] * 2
    assert found(recorded, "b_length", 1) == [5] * 2
    assert [found(recorded, "e_number", episode) for episode in (0, 1)] == [[5] * 3, [None] * 2]
    assert found(recorded, "e.g", 1) == [1] * 2
    assert recorded.columns["info.f_present_"].tolist() == [True, True, False]


def test_lengths_of_a_text_that_are_another_entry(tmp_path: Path) -> None:
    number, both = {"x_length": 7}, {"x_length": 8, "x": "text"}
    recorded = record(tmp_path / "d", [[number] * 3, [both] * 2, [{"x": "longer"}] * 2])
    assert [found(recorded, "x_length", episode) for episode in range(3)] == [[7] * 3, [8] * 2, [None] * 2]
    assert [found(recorded, "x_text", episode) for episode in (1, 2)] == [["text"] * 2, ["longer"] * 2]
    assert recorded.manifest.renamed_keys == {"info.x (text)": "info.x_text"}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_dict_with_the_name_of_the_lengths_of_a_text(tmp_path: Path, order: tuple[int, ...]) -> None:
    infos: list[Any] = [{"x_length": {"a": 3}}, {"x": "abc"}, {"x_length": {"a": 4}, "x": "d"}]
    recorded = record(tmp_path / "d", [[infos[one]] * 2 for one in order])
    assert [found(recorded, "x_text", order.index(one))[0] for one in range(3)] == [None, "abc", "d"]
    assert [found(recorded, "x_length.a", order.index(one))[0] for one in range(3)] == [3, None, 4]
    assert recorded.manifest.renamed_keys == {"info.x (text)": "info.x_text"}


def test_forms_beyond_the_sixteenth_are_named(tmp_path: Path) -> None:
    recorded = record(tmp_path / "d", [[{"it": np.zeros(size)}] * 2 for size in range(1, 19)])
    assert len(recorded.manifest.renamed_keys) == 16
    assert [one.key for one in recorded.manifest.dropped_keys] == ["info.it_17", "info.it_18"]
    assert "16 other forms" in recorded.manifest.dropped_keys[0].why


def test_a_recording_that_is_continued_keeps_the_names_of_forms(tmp_path: Path) -> None:
    rows: list[Any] = [{"it": np.zeros(2)}, {"it": np.ones(3)}, {"it": "text"}, {"it": np.ones(2)}]

    def part(first: int, stop: int, *, resume: bool) -> None:
        env = ScriptedEnv(BOX, spaces.Discrete(2), [(1, "terminated")] * 2, lambda one, _: rows[first + one])
        recording = rbtool.RecordEpisodes(env, tmp_path / "d", resume=resume)
        run(recording, stop - first)
        recording.finish() if stop == len(rows) else recording.close()

    part(0, 2, resume=False)
    part(2, 4, resume=True)
    recorded = Recorded(tmp_path / "d")
    assert [found(recorded, "it_2", episode)[0] is None for episode in range(4)] == [False, True, True, False]
    assert found(recorded, "it_text", 2) == ["text"] * 2
    assert not recorded.manifest.dropped_keys


def test_names_that_are_stored_otherwise_are_stated(tmp_path: Path) -> None:
    infos = {"shape": {"device": 1, "b": 2}, "f_present": True, "kept": 3}
    recorded = record(tmp_path / "d", [[{"kept": 1}] * 2, [infos] * 3])
    assert recorded.manifest.renamed_keys == {
        "info.shape": "info.shape_", "info.shape_.device": "info.shape_.device_", "info.f_present": "info.f_present_",
    }  # fmt: skip
    assert found(recorded, "shape_.device_", 1) == [1, 1, 1]


def test_infos_can_be_left_out(tmp_path: Path) -> None:
    recorded = record(tmp_path / "d", [[{"it": 1}] * 3], infos=False)
    assert not [name for name in recorded.columns if "info" in name]


VALUES = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.floats(allow_subnormal=False),
    st.booleans(),
    st.text(max_size=6).filter(lambda text: text.isascii()),
    st.lists(st.integers(0, 3), min_size=2, max_size=2).map(np.array),
)
ROWS = st.dictionaries(st.sampled_from("abc"), VALUES)


@settings(max_examples=15)
@given(infos=st.lists(st.lists(ROWS, min_size=2, max_size=4), min_size=1, max_size=4))
def test_every_value_is_there_or_named(
    tmp_path_factory: pytest.TempPathFactory, infos: list[list[dict[str, Any]]]
) -> None:
    recorded = record(tmp_path_factory.mktemp("infos") / "d", infos)
    named = {one.key for one in recorded.manifest.dropped_keys}
    for episode, rows in enumerate(infos):
        for name in "abc":
            values = in_any_form(recorded, name, episode)
            for row, value in zip(rows, values, strict=True):
                given_value = row.get(name)
                if value is None:
                    forms = {f"info.{name}{form}" for form in ("", "_text", "_number", "_2")}
                    assert given_value is None or forms & named
                else:
                    assert given_value is not None
                    assert np.array_equal(value, given_value, equal_nan=isinstance(given_value, float))


@settings(max_examples=10)
@given(values=st.lists(VALUES.filter(lambda value: value is not None), min_size=2, max_size=4), data=st.data())
def test_the_order_of_episodes_changes_no_name(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(values))))
    one, other = (
        record(tmp_path_factory.mktemp("infos") / "d", [[{"a": values[place]}] * 2 for place in places])
        for places in (range(len(values)), order)
    )
    kinds = {type(value) for value in values}
    assert one.manifest.renamed_keys == other.manifest.renamed_keys
    if bool not in kinds or kinds <= {bool, str}:  # true and 1 are of one form, and no type holds both
        assert one.columns.keys() == other.columns.keys()
