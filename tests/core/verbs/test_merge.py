"""`merge`: episodes, numbers, fields, text and documents of several datasets in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from damage import flip

import rbtool
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Manifest, Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.packed.builder import write_dataset
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import EndReason, runs_text
from rbtool.core.ted.schema import Field, role_of
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.merge import lossless_type, numbers_of_runs


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    write_walks(tmp_path / "a", [(4, "open"), (3, "terminated"), (1, "both")])
    write_walks(tmp_path / "b", [(2, "truncated"), (5, "terminated")], seed=1)
    return tmp_path / "a", tmp_path / "b"


def make(folder: Path, leaves: dict[str, tuple[str, tuple[int, ...]]], *, numbers=(0, 1), seed=0) -> Path:
    """Write a dataset with these leaves, by dotted key, and episodes of three and of two steps."""
    draw = np.random.default_rng(seed)
    keys = {tuple(name.split(".")): look for name, look in leaves.items()}
    fields = [Field(key, dtype, shape, role_of(key)) for key, (dtype, shape) in keys.items()]
    with DatasetBuilder(folder, fields) as builder:
        rows = []
        for number, length in zip(numbers, (3, 2), strict=True):
            columns = {one.key: (100 * draw.normal(size=(length, *one.shape))).astype(one.numpy) for one in fields}
            if ("episode",) in columns:
                columns["episode",][:] = number
            builder.append(columns)
            rows.append(EpisodeRow(number, length, 0.0, True, False, EndReason.TERMINATED))
        builder.finish(rows, Origin(Request("test", "test", "odd")))
    return folder


def scalars(folder: Path, *, numbers=(0, 1), seed=0, **dtypes: str) -> Path:
    """Write a dataset of scalar leaves with these dtypes."""
    return make(folder, {name: (dtype, ()) for name, dtype in dtypes.items()}, numbers=numbers, seed=seed)


def column(path: Path, name: str) -> np.ndarray:
    with open_steps(path) as reader:
        return reader.read(tuple(name.split(".")), 0, reader.manifest.steps).copy()


def names(path: Path) -> set[str]:
    with open_steps(path) as reader:
        return {field.name for field in reader.fields}


@pytest.mark.parametrize("layouts", [("ted", "ted"), ("packed", "ted"), ("packed", "packed")])
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_merge_keeps_rows_episode_tables_texts_and_spaces(two, tmp_path, layouts, layout):
    sources = [rbtool.convert(two[n], tmp_path / f"in{n}", layout=one).path for n, one in enumerate(layouts)]
    merged = rbtool.merge(sources, tmp_path / "m", layout=layout)
    assert (merged.layout, merged.steps, merged.episodes) == (layout, 15, 5)
    with open_steps(two[0]) as a, open_steps(two[1]) as b, open_steps(tmp_path / "m") as m:
        for field in m.fields:
            rows = np.concatenate([a.read(field.key, 0, 8), b.read(field.key, 0, 7)])
            expected = np.repeat(np.arange(5), [4, 3, 1, 2, 5]) if field.key == ("episode",) else rows
            assert m.read(field.key, 0, 15).tobytes() == expected.astype(rows.dtype).tobytes(), field
        assert m.episodes.episode.tolist() == [0, 1, 2, 3, 4]
        assert m.episodes.seed.tolist() == [*a.episodes.seed, *b.episodes.seed]
        assert m.episodes.end_reason.tolist() == [*a.episodes.end_reason, *b.episodes.end_reason]
        assert m.episodes.total_reward.tolist() == [*a.episodes.total_reward, *b.episodes.total_reward]
        assert m.episode_text == [*a.episode_text, *b.episode_text]
        assert m.manifest.spaces == a.manifest.spaces
        assert m.documents() == a.documents()
    assert rbtool.check(tmp_path / "m").errors == 0


def test_clashing_numbers_are_replaced_and_their_origin_recorded(two, tmp_path):
    merged = rbtool.merge(two, tmp_path / "m")
    assert merged.renumbered
    assert [(one.numbers, one.episodes) for one in merged.sources] == [("0:3", "0:3"), ("0:2", "3:5")]
    made = Manifest.load(tmp_path / "m").provenance[-1]
    assert made.verb == "merge"
    assert made.arguments["origin"] == [
        {"source": 0, "numbers": "0:3", "episodes": "0:3"},
        {"source": 1, "numbers": "0:2", "episodes": "3:5"},
    ]
    assert made.inputs == {f"content_digest.{n}": Manifest.load(path).content_digest for n, path in enumerate(two)}


def test_numbers_that_do_not_clash_are_kept(tmp_path):
    look = {"action": ("float32", (2,)), "episode": ("int64", ())}
    a, b = make(tmp_path / "a", look, numbers=(4, 2)), make(tmp_path / "b", look, numbers=(3, 9), seed=1)
    merged = rbtool.merge([a, b], tmp_path / "m")
    assert not merged.renumbered
    with open_steps(tmp_path / "m") as m:
        assert m.episodes.episode.tolist() == [4, 2, 3, 9]
        assert m.read(("episode",), 0, 10).tolist() == [4, 4, 4, 2, 2, 3, 3, 3, 9, 9]


def test_new_numbers_have_to_fit_into_their_dtype(tmp_path):
    look = {"episode": ("int8", (1,)), "action": ("float32", ())}
    a = make(tmp_path / "a", look)
    many = [a] * 65
    with pytest.raises(rbtool.SchemaError, match="int8 has no room"):
        rbtool.merge(many, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    rbtool.merge(many[:3], tmp_path / "m")
    assert column(tmp_path / "m", "episode").reshape(-1).tolist() == np.repeat(range(6), [3, 2] * 3).tolist()


A = {"action": ("float32", (2,)), "info.x": ("float32", ()), "wide": ("int32", (3,)), "episode": ("int64", ())}
B = {"action": ("float64", (2,)), "info.y": ("bool", (2,)), "wide": ("int32", (4,)), "episode": ("int64", ())}


@pytest.mark.parametrize("policy", ["error", "intersect", "union"])
def test_a_policy_names_the_differences_that_it_does_not_resolve(tmp_path, policy):
    a, b = make(tmp_path / "a", A), make(tmp_path / "b", B, numbers=(2, 3))
    with pytest.raises(rbtool.SchemaError) as caught:
        rbtool.merge([a, b], tmp_path / "m", schema=policy)
    text = str(caught.value)
    assert f"action: float32 [2] in {a}, float64 [2] in {b}" in text
    assert ("info.x: float32 [] in" in text) == (policy == "error")
    assert ("wide: int32 [3] in" in text) == (policy != "intersect")
    assert ("--schema intersect would leave out info.x, wide, info.y" in text) == (policy == "intersect")
    assert "--cast" in caught.value.hint
    assert not (tmp_path / "m").exists()


def test_intersect_keeps_common_fields_and_lists_the_others(tmp_path):
    a, b = make(tmp_path / "a", A), make(tmp_path / "b", B, numbers=(2, 3))
    merged = rbtool.merge([a, b], tmp_path / "m", schema="intersect", cast=True)
    assert [one["key"] for one in merged.dropped_keys] == ["info.x", "wide", "info.y"]
    assert merged.dropped_keys[0]["why"] == f"not in {b}"
    assert any("action becomes float64" in note for note in merged.notes)
    expected = np.concatenate([column(a, "action").astype(np.float64), column(b, "action")])
    assert column(tmp_path / "m", "action").tobytes() == expected.tobytes()


@pytest.mark.parametrize("keys", [("observation", "next.observation"), ("state.q",), ("obs", "next.obs")])
def test_a_merge_that_leaves_no_observation_is_refused(tmp_path, keys):
    common = {"action": ("float32", (2,)), "next.reward": ("float32", (1,)), "episode": ("int64", ())}
    a = make(tmp_path / "a", {**common, **dict.fromkeys(keys, ("float32", (11,)))})
    b = make(tmp_path / "b", {**common, **dict.fromkeys(keys, ("float64", (4,)))}, numbers=(2, 3))
    for dry_run in (True, False):
        with pytest.raises(rbtool.SchemaError, match="would have no observation") as caught:
            rbtool.merge([a, b], tmp_path / "m", schema="intersect", cast=True, dry_run=dry_run)
        assert f"{keys[0]}: float32 [11] in {a}, float64 [4] in {b}" in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_all_fields_that_differ_are_named(tmp_path):
    common = {"action": ("float32", (2,)), "episode": ("int64", ())}
    a = make(tmp_path / "a", {**common, **{f"info.x{number}": ("float32", ()) for number in range(12)}})
    with pytest.raises(rbtool.SchemaError, match="differ in 12 fields") as caught:
        rbtool.merge([a, make(tmp_path / "b", common, numbers=(2, 3))], tmp_path / "m")
    assert all(f"info.x{number}" in str(caught.value) for number in range(12))


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_union_fills_with_zeros_and_marks_them(tmp_path, layout):
    a = make(tmp_path / "a", {name: A[name] for name in ("action", "info.x", "episode")})
    b = make(tmp_path / "b", {"action": A["action"], "next.info.y": B["info.y"], "episode": A["episode"]}, seed=1)
    merged = rbtool.merge([a, b], tmp_path / "m", schema="union", layout=layout)
    assert column(tmp_path / "m", "info.x").tolist() == [*column(a, "info.x"), 0, 0, 0, 0, 0]
    assert column(tmp_path / "m", "mask.info.x").tolist() == [True] * 5 + [False] * 5
    assert column(tmp_path / "m", "next.info.y").tolist() == [[False, False]] * 5 + column(b, "next.info.y").tolist()
    assert column(tmp_path / "m", "next.mask.info.y").tolist() == [False] * 5 + [True] * 5
    assert any("zeros there, and mask.info.x is false" in note for note in merged.notes)


@pytest.fixture
def union(tmp_path) -> Path:
    """Five rows with `x`, five without: a merge with the policy `union`."""
    scalars(tmp_path / "with", y="int32", x="int32")
    scalars(tmp_path / "without", y="int32", numbers=(2, 3))
    rbtool.merge([tmp_path / "with", tmp_path / "without"], tmp_path / "union", schema="union")
    return tmp_path / "union"


@pytest.mark.parametrize("policy", ["union", "intersect"])
@pytest.mark.parametrize("first", [True, False])
def test_the_mask_of_a_union_is_continued_where_values_are(union, tmp_path, policy, first):
    more = scalars(tmp_path / "more", y="int32", x="int32", numbers=(4, 5), seed=1)
    sources = [union, more] if first else [more, union]
    rbtool.merge(sources, tmp_path / "m", schema=policy)
    mask, values = column(tmp_path / "m", "mask.x"), column(tmp_path / "m", "x")
    earlier, own = [True] * 5 + [False] * 5, [True] * 5
    assert mask.tolist() == (earlier + own if first else own + earlier)
    assert values[mask].tolist() == np.concatenate([column(one, "x")[:5] for one in sources]).tolist()
    assert not values[~mask].any()
    assert names(tmp_path / "m") == {"y", "x", "mask.x"}


def test_the_mask_of_a_union_is_false_where_values_are_missing_again(union, tmp_path):
    more = scalars(tmp_path / "more", y="int32", numbers=(4, 5), seed=1)
    rbtool.merge([union, more], tmp_path / "m", schema="union")
    assert column(tmp_path / "m", "mask.x").tolist() == [True] * 5 + [False] * 10
    left = rbtool.merge([union, more], tmp_path / "left", schema="intersect")
    assert [one["key"] for one in left.dropped_keys] == ["x", "mask.x"]
    with pytest.raises(rbtool.SchemaError, match=r"mask.x: bool \[\] in"):
        rbtool.merge([union, scalars(tmp_path / "x", y="int32", x="int32")], tmp_path / "error")


def test_a_field_in_the_place_of_a_mask_is_refused(tmp_path):
    a = scalars(tmp_path / "a", y="int32", x="int32", **{"mask.x": "bool"})
    b = scalars(tmp_path / "b", y="int32", numbers=(2, 3))
    with pytest.raises(rbtool.SchemaError, match=f"mask.x would be a mask, but is already a field of {a}") as caught:
        rbtool.merge([a, b], tmp_path / "m", schema="union")
    assert "--rename" in caught.value.hint


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("numbers", [(2, 3), (1, 2)])
def test_missing_episode_fields_are_filled_with_the_numbers(tmp_path, layout, numbers):
    a, b = scalars(tmp_path / "a", y="int32", episode="int64"), scalars(tmp_path / "b", y="int32", numbers=numbers)
    merged = rbtool.merge([a, b], tmp_path / "m", schema="union", layout=layout)
    assert column(tmp_path / "m", "episode").tolist() == [0] * 3 + [1] * 2 + [2] * 3 + [3] * 2
    assert f"episode is not in {b}: it is filled with the numbers of the episodes" in merged.notes
    assert not {name for name in names(tmp_path / "m") if "mask" in name}


def test_a_cast_needs_a_dtype_that_holds_all_values(tmp_path):
    a, b = scalars(tmp_path / "a", x="int64"), scalars(tmp_path / "b", x="float64", numbers=(2, 3))
    with pytest.raises(rbtool.SchemaError) as caught:
        rbtool.merge([a, b], tmp_path / "m", cast=True)
    assert "no dtype holds all values" in caught.value.hint


@pytest.mark.parametrize(
    ("types", "common"),
    [(("float32", "float64"), "float64"), (("int8", "uint8"), "int16"), (("int32", "float32"), "float64"),
     (("bfloat16", "float16"), "float32"), (("bool", "uint8"), "uint8"), (("int16", "float16"), "float32"),
     (("int64", "float32"), None), (("uint64", "int64"), None), (("int64", "complex128"), None),
     (("float32", "complex64"), "complex64"), (("bfloat16",), "bfloat16")],
)  # fmt: skip
def test_the_common_type_holds_every_value(types, common):
    assert lossless_type(types) == common


def test_a_field_and_a_group_of_one_name_are_refused(tmp_path):
    a = scalars(tmp_path / "a", x="int64", info="int64")
    b = scalars(tmp_path / "b", x="int64", **{"info.y": "int64"}, numbers=(2, 3))
    with pytest.raises(rbtool.SchemaError, match=f"'info' is a field in {a} and a group of fields in {b}"):
        rbtool.merge([a, b], tmp_path / "m", schema="union")


def test_next_rows_that_no_longer_follow_after_a_cast_are_marked(tmp_path):
    a = scalars(tmp_path / "a", s="float32", **{"next.s": "int8"})
    b = scalars(tmp_path / "b", s="float32", **{"next.s": "float32"}, numbers=(2, 3), seed=1)
    rbtool.merge([a, b], tmp_path / "m", cast=True)
    with open_steps(tmp_path / "m") as m:
        assert m.episodes.explicit_next.all()
    assert not [one for one in rbtool.check(tmp_path / "m").findings if "following row" in one.message][1:]
    rbtool.convert(tmp_path / "m", tmp_path / "packed", layout="packed")
    assert rbtool.diff(tmp_path / "m", tmp_path / "packed").equal


def test_documents_that_differ_are_kept_by_source(two, tmp_path):
    with open_steps(two[1]) as b:
        origin = Origin.of(b.manifest, {"metadata.json": b'{"total": 2}', "b.txt": b"b"})
        write_dataset(b, tmp_path / "other", "ted", origin)
    rbtool.merge([two[0], tmp_path / "other"], tmp_path / "m")
    with open_steps(tmp_path / "m") as m:
        assert m.documents() == {
            "0/metadata.json": b'{"total": 1}', "1/metadata.json": b'{"total": 2}', "1/b.txt": b"b"
        }  # fmt: skip


def test_a_merge_of_other_sources_is_not_already_there(two, tmp_path):
    first = rbtool.merge(two, tmp_path / "m")
    for sources in ((two[1], two[0]), (*two, two[0])):
        with pytest.raises(rbtool.UsageError, match="already exists"):
            rbtool.merge(sources, tmp_path / "m")
    assert rbtool.merge((two[1], two[0]), tmp_path / "m", force=True).content_digest != first.content_digest


def test_impossible_merges_are_refused_and_a_dry_run_tells_the_result(two, tmp_path):
    with pytest.raises(rbtool.UsageError, match="two or more"):
        rbtool.merge([two[0]], tmp_path / "m")
    with pytest.raises(rbtool.UsageError, match="no schema policy 'intersekt'; did you mean 'intersect'"):
        rbtool.merge(two, tmp_path / "m", schema="intersekt")
    with pytest.raises(rbtool.DatasetNotFoundError):
        rbtool.merge([two[0], tmp_path / "nowhere"], tmp_path / "m")
    planned = rbtool.merge(two, tmp_path / "m", dry_run=True)
    assert (planned.steps, planned.boundary["terminated"]) == (15, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_merge_of_equal_datasets_has_a_note(two, tmp_path):
    merged = rbtool.merge([two[0], two[0]], tmp_path / "m")
    assert merged.episodes == 6
    assert any("same content" in note for note in merged.notes)


def test_a_damaged_second_source_is_refused(two, tmp_path):
    flip(two[1] / "action.memmap", 5)
    with pytest.raises(rbtool.CorruptDataError):
        rbtool.merge(two, tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_provenance_has_the_steps_of_all_sources(two, tmp_path):
    for path in two:
        cast = {"cast": ["action=float64"]}
        rbtool.preprocess(path, dest=tmp_path / f"cast-{path.name}", operations=cast, num_workers=0)
    rbtool.merge([tmp_path / "cast-a", tmp_path / "cast-b"], tmp_path / "m")
    manifest = Manifest.load(tmp_path / "m")
    assert [step.verb for step in manifest.provenance].count("preprocess") == 2
    assert sum(manifest.provenance[-1].arguments["steps_of_each"]) <= len(manifest.provenance) - 1


def test_sums_over_n_steps_and_single_rewards_are_merged_only_on_request(two, tmp_path):
    rbtool.preprocess(
        two[0], dest=tmp_path / "n", num_workers=0,
        operations={"n_step": 2, "gamma": 0.9, "exclude": ["steps_to_next_obs", "next.original_reward"]},
    )  # fmt: skip
    rbtool.preprocess(two[1], dest=tmp_path / "p", operations={"cast": ["action=float32"]}, num_workers=0)
    with pytest.raises(rbtool.SchemaError, match="sum over n steps"):
        rbtool.merge([tmp_path / "n", tmp_path / "p"], tmp_path / "m")
    merged = rbtool.merge([tmp_path / "n", tmp_path / "p"], tmp_path / "m", schema="union")
    assert any("sum over n steps" in note for note in merged.notes)


def test_runs_of_numbers_are_read_back():
    for numbers in ([], [3], [0, 1, 2, 7, 5, 6], [9, 8]):
        assert numbers_of_runs(runs_text(numbers)).tolist() == numbers
    assert runs_text([0, 1, 2, 7, 5, 6]) == "0:3,7,5:7"


def test_checkpoints_are_merged(two, tmp_path):
    rbtool.checkpoint.save(two[0], tmp_path / "a.h5", form="h5")
    merged = rbtool.merge([tmp_path / "a.h5", two[1]], tmp_path / "m")
    assert (merged.content_digest, merged.episodes) == (rbtool.merge(two, tmp_path / "n").content_digest, 5)
