"""Programs in the engine: one digest for any workers and chunks, provenance, and replay."""

from __future__ import annotations

import json

import numpy as np
import pytest

import rbtool
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.format.manifest import MANIFEST
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.preprocess.preprocess import preprocess, show_pipeline

OPERATIONS = {
    "filter": "length > 5", "where": "not truncated and observation[0] < 10", "cast": "observation=float64",
    "n_step": 3, "gamma": 0.9, "return_to_go": True, "normalize": ["observation", "reward:min-max"],
    "exclude": "nonterminal",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of 12 ragged episodes, one of a single step, and what the operations make of it."""
    folder = tmp_path_factory.mktemp("program")
    rbtool.convert("tests/data/minari/cartpole/scripted-v0", folder / "cartpole")
    preprocess(folder / "cartpole", dest=folder / "made", operations=OPERATIONS, num_workers=0)
    return folder


def digest(folder):
    with TedReader(folder) as reader:
        return reader.manifest.content_digest


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"num_workers": 0, "chunk_size": 17}])
def test_one_digest_however_it_is_run(folder, tmp_path, how):
    found = preprocess(folder / "cartpole", dest=tmp_path / "again", operations=OPERATIONS, **how)
    assert found.content_digest == digest(folder / "made")


def test_the_episodes_of_the_result(folder):
    with TedReader(folder / "cartpole") as reader:
        source = reader.episodes
    with TedReader(folder / "made") as reader:
        table, after = reader.episodes, reader.read(("next", "truncated"), 0, reader.manifest.steps)
    kept = source.length[source.length > 5]
    truncated = source.truncated[source.length > 5]
    assert table.length.tolist() == (kept - truncated).tolist()
    assert np.flatnonzero(after[:, 0]).tolist() == (table.start + table.length - 1)[truncated].tolist()


def test_the_result_is_sound(folder):
    report = rbtool.check(folder / "made")
    assert not [finding for finding in report.findings if finding.severity == "error"], report.findings


@pytest.mark.parametrize("place", ["", MANIFEST])
def test_a_replay_makes_the_same_with_the_same_constants(folder, tmp_path, place):
    found = preprocess(
        folder / "cartpole", dest=tmp_path / "again", replay=folder / "made" / place, replay_filters=True, num_workers=0
    )
    assert found.content_digest == digest(folder / "made")
    other = preprocess(
        folder / "cartpole", dest=tmp_path / "more", num_workers=0,
        operations={"episodes": "0:2", "normalize": "observation"},
    )  # fmt: skip
    rest = preprocess(folder / "cartpole", dest=tmp_path / "rest", replay=tmp_path / "more", num_workers=0)
    assert rest.arguments["operations"][0]["constants"] == other.arguments["constants"][0]
    assert rest.episodes == 12
    assert any("leaves out what chose episodes and rows: --episodes 0:2" in note for note in rest.notes)


def test_a_replay_repeats_what_chose_episodes_only_where_it_is_asked_to(folder, tmp_path):
    chosen = {"filter": "length > 20", "episodes": "0:9", "where": "observation[0] < 1", "select": "action"}
    once = preprocess(folder / "cartpole", dest=tmp_path / "made", operations=chosen, num_frames=90, num_workers=0)
    plain = preprocess(folder / "cartpole", dest=tmp_path / "plain", replay=tmp_path / "made", num_workers=0)
    assert (plain.episodes, [operation["name"] for operation in plain.arguments["operations"]]) == (12, ["select"])
    left = "--episodes 0:9, --filter length > 20, --where observation[0] < 1, --num-frames 90"
    assert sum(f"what chose episodes and rows: {left} (" in note for note in plain.notes) == 1
    assert plain.steps == rbtool.inspect(folder / "cartpole").steps > once.steps
    both = preprocess(
        folder / "cartpole", dest=tmp_path / "both", replay=tmp_path / "made", replay_filters=True, num_workers=0
    )
    assert (both.episodes, both.content_digest) == (once.episodes, once.content_digest)
    assert not any("leaves out" in note for note in both.notes)
    others = preprocess(
        folder / "cartpole", dest=tmp_path / "others", replay=tmp_path / "made", operations={"episodes": "9:"},
        num_workers=0,
    )  # fmt: skip
    assert others.episodes == 3
    assert show_pipeline(replay=tmp_path / "made").notes == plain.notes[:1]
    shown = show_pipeline(replay=tmp_path / "made", replay_filters=True)
    assert "filter" in shown.text
    assert "where" in shown.text
    assert shown.notes == ("a pipeline has no place for --num-frames 90, which the replay repeats: add it",)


def test_a_choice_of_episodes_alone_is_not_replayed(folder, tmp_path):
    preprocess(folder / "cartpole", dest=tmp_path / "made", operations={"episodes": "0:9"}, num_workers=0)
    with pytest.raises(UsageError, match="was made by choosing episodes and rows alone"):
        preprocess(folder / "cartpole", dest=tmp_path / "again", replay=tmp_path / "made", num_workers=0)
    with pytest.raises(UsageError, match="--replay-filters is about --replay"):
        preprocess(folder / "cartpole", dest=tmp_path / "x", operations={"select": "action"}, replay_filters=True)


def test_a_replay_can_be_shown_and_written_down(folder, tmp_path):
    shown = show_pipeline(replay=folder / "made", replay_filters=True)
    (tmp_path / "prep.toml").write_text(shown.text)
    found = preprocess(folder / "cartpole", dest=tmp_path / "again", pipeline=tmp_path / "prep.toml", num_workers=0)
    assert found.content_digest == digest(folder / "made")


def test_the_same_again_is_there_already(folder):
    found = preprocess(folder / "cartpole", dest=folder / "made", operations=OPERATIONS, num_workers=0)
    assert found.already_there


def test_constants_are_in_the_manifest_and_undo_it(folder, tmp_path):
    preprocess(folder / "cartpole", dest=tmp_path / "scaled", operations={"normalize": "observation"}, num_workers=0)
    document = json.loads((tmp_path / "scaled" / MANIFEST).read_text())
    part = document["provenance"][-1]["arguments"]["constants"][0][0]
    with TedReader(tmp_path / "scaled") as scaled, TedReader(folder / "cartpole") as source:
        values, steps = scaled.read(("observation",), 0, scaled.manifest.steps), source.manifest.steps
        expected = source.read(("observation",), 0, steps)
    np.testing.assert_allclose(values * part["scale"] + part["loc"], expected, rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_told_with_its_rows(folder, tmp_path):
    with pytest.raises(SchemaError, match=r"cast.*'observation' cannot be represented as int8"):
        preprocess(folder / "cartpole", dest=tmp_path / "x", operations={"cast": "observation=int8"}, num_workers=0)
    assert not (tmp_path / "x").exists()


def test_what_was_dropped_is_in_the_manifest(folder, tmp_path):
    preprocess(folder / "cartpole", dest=tmp_path / "few", operations={"select": "observation"}, num_workers=0)
    with TedReader(tmp_path / "few") as reader:
        assert [(item.key, item.why) for item in reader.manifest.dropped_keys] == [("action", "not selected")]


@pytest.mark.parametrize(
    ("of", "words"), [("cartpole", "was made by convert"), ("function", "only operations can be replayed")]
)
def test_what_was_not_made_by_operations_cannot_be_replayed(folder, tmp_path, of, words):
    if of == "function":
        preprocess(folder / "cartpole", lambda rows: rows, tmp_path / "function", num_workers=0)
    place = folder / "cartpole" if of == "cartpole" else tmp_path / "function"
    with pytest.raises(UsageError, match=words):
        preprocess(folder / "cartpole", dest=tmp_path / "x", replay=place, num_workers=0)
