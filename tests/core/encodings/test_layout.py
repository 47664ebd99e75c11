import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.encodings.compact import CompactForm, CompactLayout
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


def test_names_that_only_one_file_keeps_for_itself() -> None:
    assert places("flat")["episodes", "start"] == ("episodes", "start")
    assert places("h5")["episodes", "start"] == ("episodes_", "start")
    assert places("h5")["source", "é"] == ("source_", "é")


@given(dataset_plans(), forms)
def test_no_two_leaves_share_a_place(plan: DatasetPlan, form: CompactForm) -> None:
    layout = CompactLayout.of(plan.fields(), form)
    stored = layout.stored(with_explicit=True)
    paths = [leaf_path(field.key) for field in stored]
    tables = [leaf_path(field.key, ".shape.memmap") for field in stored]
    assert len({*paths, *tables}) == 2 * len(stored)


@given(dataset_plans(), forms)
def test_every_field_is_stored_once(plan: DatasetPlan, form: CompactForm) -> None:
    layout = CompactLayout.of(plan.fields(), form)
    states = {key for state in layout.states for key in (state, ("next", *state))}
    assert states | layout.steps.keys() | layout.at_root.keys() == {field.key for field in plan.fields()}


def test_a_leaf_called_next_goes_aside() -> None:
    plan = DatasetPlan((), (), (), ())
    field = plan.fields()[0]
    layout = CompactLayout.of([type(field)(("next",), "int8", (), "info")], "flat")
    assert layout.steps["next",].key == ("next_",)
