"""Compact rows: where they lie, and what is filled in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool import CorruptDataError
from rbtool.core.encodings.compact import CompactForm, CompactLayout, FilledStorage
from rbtool.core.format.memmap.tree import leaf_path
from rbtool.core.ted.schema import Key
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, dataset_plans

forms = st.sampled_from(["flat", "nested", "h5"])


def places(form: CompactForm) -> dict[Key, Key]:
    plan = DatasetPlan((), (), (), ODD_LEAVES, root_flags="set")
    layout = CompactLayout.of(plan.fields(), form)
    kinds = (layout.states, layout.steps, layout.at_root)
    return {key: field.key for kind in kinds for key, field in kind.items()}


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (("observation", "position"), ("observation", "position")),
        (("mask",), ("mask",)),
        (("next", "reward"), ("reward",)),
        (("next", "done"), ("done",)),
        (("done",), ("at_root", "done")),
        (("next", "info", "lap"), ("next", "info", "lap")),
        (("sensor",), ("sensor",)),
        (("next", "sensor"), ("next", "sensor")),
        (("at_root", "wave"), ("at_root_", "wave")),
        (("explicit_next",), ("explicit_next_",)),
        (("explicit_episodes_",), ("explicit_episodes__",)),
        (("reward", "shaped"), ("reward_", "shaped")),
        (("agents", "reward"), ("agents", "reward")),
        (("x",), ("x",)),
        (("x.shape",), ("x.shape_",)),
    ],
)
def test_where_a_leaf_goes(key: Key, place: Key) -> None:
    assert [places(form)[key] for form in ("flat", "nested", "h5")] == [place] * 3


def test_names_that_only_one_file_keeps_go_aside() -> None:
    assert places("flat")["episodes", "start"] == ("episodes", "start")
    assert places("h5")["episodes", "start"] == ("episodes_", "start")
    assert places("h5")["source", "é"] == ("source_", "é")
    plan = DatasetPlan((), (), (), ())
    field = plan.fields()[0]
    layout = CompactLayout.of([type(field)(("next",), "int8", (), "info")], "flat")
    assert layout.steps["next",].key == ("next_",)


@given(dataset_plans(), forms)
def test_every_field_is_stored_once_in_a_place_of_its_own(plan: DatasetPlan, form: CompactForm) -> None:
    layout = CompactLayout.of(plan.fields(), form)
    stored = layout.stored(with_explicit=True)
    paths = [leaf_path(field.key) for field in stored]
    tables = [leaf_path(field.key, ".shape.memmap") for field in stored]
    assert len({*paths, *tables}) == 2 * len(stored)
    layout = CompactLayout.of(plan.fields(), form)
    states = {key for state in layout.states for key in (state, ("next", *state))}
    assert states | layout.steps.keys() | layout.at_root.keys() == {field.key for field in plan.fields()}


@pytest.mark.parametrize(
    ("filled", "oldest", "last_row"),
    [
        (FilledStorage((5,), 8, 5), 0, 4), (FilledStorage((5,), 8, 2), 0, 1), (FilledStorage((8,), 8, 3), 3, 2),
        (FilledStorage((8,), 8, 0), 0, 7), (FilledStorage((8,), 8, None), 0, None),
        (FilledStorage((0,), 8, 0), 0, None), (FilledStorage((4, 2), 8, 1), 1, 0), (FilledStorage.of_dataset(6), 0, 5),
        (FilledStorage.of_dataset(0), 0, None),
    ],
)  # fmt: skip
def test_the_ring_begins_at_its_oldest_row(filled: FilledStorage, oldest: int, last_row: int | None) -> None:
    assert (filled.oldest, filled.last_row) == (oldest, last_row)
    assert FilledStorage.from_document(json.loads(filled.to_bytes()), filled.length, "here") == filled


@pytest.mark.parametrize(
    "change",
    [{"len": 4}, {"shape": [6]}, {"shape": []}, {"shape": "5"}, {"capacity": 4}, {"cursor": 6}, {"cursor": -1},
     {"cursor": True}, {"capacity": None}],
)  # fmt: skip
def test_contradictory_facts_are_refused(change: dict[str, object]) -> None:
    document = json.loads(FilledStorage((5,), 8, 5).to_bytes()) | change
    with pytest.raises(CorruptDataError, match=r"^here"):
        FilledStorage.from_document(document, 5, "here")


def test_a_document_is_an_object() -> None:
    with pytest.raises(CorruptDataError, match="here does not describe a storage"):
        FilledStorage.from_document([], 5, "here")
