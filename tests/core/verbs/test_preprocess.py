"""`preprocess`: what it refuses, programs in the engine, and hindsight relabelling."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import rbtool
from rbtool import UsageError
from rbtool.core.errors import SchemaError
from rbtool.core.format import fs
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.staging import Staging
from rbtool.core.preprocess.preprocess import preprocess, show_pipeline
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import dataset_plans, write_plan, write_walks

# What preprocess refuses, and that a refusal leaves everything as it was. One process.

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]


def run(source: Path, function, dest: Path, **options):
    return rbtool.preprocess(source, function, dest, **{"num_workers": 0, "chunk_size": 7} | options)


def same(td):
    return td


def beside(dest: Path) -> list[str]:
    return sorted(entry.name for entry in dest.parent.iterdir())


def shown(dest: Path) -> list[str]:
    return [name for name in beside(dest) if not name.startswith(".")]


def leftovers(dest: Path) -> list[str]:
    return [name for name in beside(dest) if name.startswith(".made.rbtool-new-")]


def on_rows(change, first: int = 7):
    """Make a function that returns every chunk as it is but the second one."""

    def function(td):
        return change(td) if int(td["episode"][0]) == 2 else td

    return function


def raise_value_error(td):
    raise ValueError("singular matrix\nmore")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (raise_value_error, rbtool.RbtoolError, "failed on {}: ValueError: singular matrix"),
        (
            lambda td: td["observatoin"],
            rbtool.RbtoolError,
            "failed on {}: KeyError 'observatoin'. Fields here: action, ",
        ),
        (
            lambda td: td["next", "rewrad"],
            rbtool.RbtoolError,
            "failed on {}: KeyError 'rewrad'. Fields here: next.done, ",
        ),
        (lambda td: sys.exit(3), rbtool.RbtoolError, "failed on {}: SystemExit: 3"),
        (lambda td: None, rbtool.SchemaError, "on {}: it returned None"),
        (lambda td: td[:3].exclude("episode"), rbtool.SchemaError, "on {}: it returned 3 rows for 7 steps without"),
        (lambda td: td.exclude("action"), rbtool.SchemaError, "on {}: the result lacks action; every chunk must"),
        (lambda td: td.set("new", td["action"]), rbtool.SchemaError, "on {}: the result has besides new; every"),
        (
            lambda td: td.set("action", td["action"].double()),
            rbtool.SchemaError,
            "on {}: 'action' came out as float64 [2], the first chunk had float32 [2]",
        ),
        (
            lambda td: td.set("action", td["action"][:, :1]),
            rbtool.SchemaError,
            "on {}: 'action' came out as float32 [1], the first chunk had float32 [2]",
        ),
    ],
)
def test_a_function_that_fails_on_some_rows_is_told_which(walks: Path, tmp_path: Path, change, kind, message) -> None:
    with pytest.raises(rbtool.RbtoolError) as caught:
        run(walks, on_rows(change), tmp_path / "made")
    assert type(caught.value) is kind
    assert message.format("steps 7 to 13 (episode 2)") in str(caught.value)
    assert "\n" not in str(caught.value)
    kept = kind is rbtool.RbtoolError  # only what may go well another time is worth going on with
    assert ("1 of 3 chunks is kept: add --resume" in caught.value.hint) == kept
    assert len(leftovers(walks)) == kept
    assert shown(walks) == ["walks"]
    TedReader(walks).verify_files()


def test_the_first_chunk_names_its_episodes_and_the_cause_is_kept(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(rbtool.RbtoolError, match=r"on steps 0 to 6 \(episodes 0 to 1\): ValueError") as caught:
        run(walks, raise_value_error, tmp_path / "made")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(rbtool.RbtoolError, match=r"on step 0 \(episode 0\): "):
        run(walks, raise_value_error, tmp_path / "made", chunk_size=1)


def test_an_interrupt_leaves_what_can_be_resumed_and_nothing_else(walks: Path, tmp_path: Path) -> None:
    def interrupt(td):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(walks, interrupt, tmp_path / "made")
    assert beside(walks) == ["walks"]
    with pytest.raises(KeyboardInterrupt) as caught:
        run(walks, on_rows(interrupt), tmp_path / "made")
    assert caught.value.__notes__ == ["hint: 1 of 3 chunks is kept: add --resume to continue from there"]
    assert (shown(walks), len(leftovers(walks))) == (["walks"], 1)
    run(walks, same, tmp_path / "made")
    assert beside(walks) == ["made", "walks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers is -1"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"num_frames": 21}, "num_frames is 21, expected 1 to 20"),
        ({"num_frames": 0}, "num_frames is 0, expected 1 to 20"),
    ],
)
def test_numbers_that_make_no_sense(walks: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        run(walks, same, tmp_path / "made", **options)
    assert beside(walks) == ["walks"]


@pytest.mark.parametrize("dest", ["walks", "walks/made", "."])
def test_source_and_destination_lie_apart(walks: Path, tmp_path: Path, dest: str) -> None:
    with pytest.raises(rbtool.UsageError, match="overlap"):
        run(walks, same, tmp_path / dest, force=True)


def test_a_source_is_found_below_the_root_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(rbtool.DatasetNotFoundError):
        run(tmp_path / "nothing", same, tmp_path / "made")
    write_walks(tmp_path / "root" / "minari" / "walks" / "test-v0", EPISODES)
    result = rbtool.preprocess("minari:walks/test-v0", same, tmp_path / "made", num_workers=0, root=tmp_path / "root")
    assert (result.steps, result.source) == (20, tmp_path / "root" / "minari" / "walks" / "test-v0")
    assert Manifest.load(tmp_path / "made").request.asked == "minari:walks/test-v0"


def test_unpicklable_functions_run_in_one_process_only(walks: Path, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(td):
        with lock:
            return td

    with pytest.raises(rbtool.UsageError, match="cannot be sent to worker processes") as caught:
        run(walks, locked, tmp_path / "made", num_workers=2, start_method="spawn")
    assert "num_workers=0" in caught.value.hint
    assert run(walks, locked, tmp_path / "made").steps == 20


def test_what_is_there_is_kept_unless_forced(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(rbtool.UsageError, match="left unchanged"):
        run(walks, same, tmp_path / "notes", force=True)
    first = run(walks, same, tmp_path / "made")
    with pytest.raises(rbtool.UsageError, match="already exists"):
        run(walks, same, tmp_path / "made")
    with pytest.raises(rbtool.RbtoolError):
        run(walks, raise_value_error, tmp_path / "made", force=True)
    assert Manifest.load(tmp_path / "made").content_digest == first.content_digest
    second = run(walks, lambda td: td.select("action"), tmp_path / "made", force=True)
    assert Manifest.load(tmp_path / "made").content_digest == second.content_digest != first.content_digest
    assert beside(walks) == ["made", "notes", "walks"]


def test_the_same_file_on_the_same_data_is_done_once(walks: Path, tmp_path: Path) -> None:
    prep = tmp_path / "prep.py"
    prep.write_text("def f(td): return td")
    first = run(walks, f"{prep}:f", tmp_path / "made")
    made_at = (tmp_path / "made").stat().st_ino
    again = run(walks, f"{prep}:f", tmp_path / "made", num_workers=None)
    assert (first.already_there, again.already_there, again.content_digest) == (False, True, first.content_digest)
    assert (tmp_path / "made").stat().st_ino == made_at
    assert not run(walks, f"{prep}:f", tmp_path / "made", force=True).already_there
    for change in ({"chunk_size": 8}, {"num_frames": 20}):
        with pytest.raises(rbtool.UsageError, match="already exists"):
            run(walks, f"{prep}:f", tmp_path / "made", **change)
    prep.write_text("def f(td): return dict(td)")
    with pytest.raises(rbtool.UsageError, match="already exists"):
        run(walks, f"{prep}:f", tmp_path / "made")


@pytest.mark.parametrize("changed", ["helper.py", "pack/__init__.py", "pack/deep.py"])
def test_a_changed_module_beside_the_file_is_a_changed_function(walks: Path, tmp_path: Path, changed: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "prep.py").write_text("from helper import OFFSET\ndef f(td): return td.set('a', td['action'] + OFFSET)")
    (tmp_path / "helper.py").write_text("import pack.deep\nOFFSET = 1 + pack.OFFSET + pack.deep.OFFSET")
    for name in ("pack/__init__.py", "pack/deep.py"):
        (tmp_path / name).write_text("OFFSET = 0")
    first = run(walks, f"{tmp_path}/prep.py:f", tmp_path / "made")
    assert run(walks, f"{tmp_path}/prep.py:f", tmp_path / "made").already_there
    text = (tmp_path / changed).read_text()
    (tmp_path / changed).write_text(f"{text} + 100")
    with pytest.raises(rbtool.UsageError, match="already exists"):
        run(walks, f"{tmp_path}/prep.py:f", tmp_path / "made")
    again = run(walks, f"{tmp_path}/prep.py:f", tmp_path / "made", force=True)
    assert again.content_digest != first.content_digest
    assert not {"helper", "pack", "pack.deep"} & sys.modules.keys()


def test_modules_of_one_name_beside_two_files_are_told_apart(walks: Path, tmp_path: Path) -> None:
    seen: list[object] = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"NAME = {folder!r}")
        (tmp_path / folder / "prep.py").write_text("import helper\ndef f(td): raise ValueError(helper.NAME)")
        with pytest.raises(rbtool.RbtoolError) as caught:
            run(walks, f"{tmp_path}/{folder}/prep.py:f", tmp_path / "made")
        seen.append(str(caught.value).rpartition(" ")[2])
    assert seen == ["one", "two"]


def test_a_dry_run_shows_the_fields_and_writes_nothing(walks: Path, tmp_path: Path) -> None:
    function = lambda td: {"a": td["action"].double(), "b": {"c": td["episode"]}}  # noqa: E731
    result = run(walks, function, tmp_path / "deep" / "made", dry_run=True, num_frames=8)
    assert (result.dry_run, result.steps, result.episodes, result.bytes) == (True, 8, 3, 8 * 24)
    assert result.notes[0].startswith("counted before ")
    assert result.notes[1:] == ("a: float64 [2]", "b.c: int64 []")
    assert beside(walks) == ["walks"]
    run(walks, same, tmp_path / "made")
    with pytest.raises(rbtool.UsageError, match="already exists"):
        run(walks, same, tmp_path / "made", dry_run=True)


def test_what_a_function_prints_is_no_result(walks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def chatty(td):
        print("seen", len(td))
        return td

    run(walks, chatty, tmp_path / "made")
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", ["seen 7", "seen 7", "seen 6"])


def test_torch_has_one_thread_inside_and_what_it_had_outside(walks: Path, tmp_path: Path) -> None:
    before, path, seen = torch.get_num_threads(), list(sys.path), []
    torch.set_num_threads(3)
    try:
        run(walks, lambda td: seen.append(torch.get_num_threads()) or td, tmp_path / "made")
        with pytest.raises(rbtool.UsageError, match="has no function"):
            run(walks, "math:nothing", tmp_path / "other")
        assert (set(seen), torch.get_num_threads(), sys.path) == ({1}, 3, path)
    finally:
        torch.set_num_threads(before)


def test_want_of_space_is_seen_before_and_while_writing(walks: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("pwrite", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(rbtool.OutOfSpaceError, match="no space is left"):
                run(walks, same, tmp_path / "made")
        assert shown(walks) == ["walks"]
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(rbtool.OutOfSpaceError, match="100 bytes free"):
        run(walks, same, tmp_path / "made")


def test_a_source_replaced_in_the_meantime_is_read_to_its_end(walks: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "other", EPISODES, seed=1)
    whole = run(walks, same, tmp_path / "whole").content_digest

    def swap(td):
        if (tmp_path / "other").exists():
            fs.remove(walks)
            (tmp_path / "other").rename(walks)
        return td

    assert run(walks, swap, tmp_path / "made").content_digest == whole
    assert beside(walks) == ["made", "walks", "whole"]


@pytest.mark.parametrize("equal", [True, False])
def test_who_comes_second_takes_what_is_equal(walks: Path, tmp_path: Path, monkeypatch, equal: bool) -> None:
    publish = Staging.publish

    def slow(staging: Staging, name: str | None = None) -> bool:
        monkeypatch.setattr(Staging, "publish", publish)
        run(walks, same if equal else lambda td: td.select("action"), tmp_path / "made")
        return publish(staging, name)

    monkeypatch.setattr(Staging, "publish", slow)
    if equal:
        assert run(walks, same, tmp_path / "made").content_digest == Manifest.load(tmp_path / "made").content_digest
    else:
        with pytest.raises(rbtool.UsageError, match="was just created by another process"):
            run(walks, same, tmp_path / "made")
    assert beside(walks) == ["made", "walks"]


def test_progress_hears_every_step(walks: Path, tmp_path: Path) -> None:
    heard: list[object] = []

    class Hear:
        def start(self, label: str, total: int | None, unit: str) -> None:
            heard.append((label, total, unit))

        def advance(self, amount: int) -> None:
            heard.append(amount)

        def done(self, remark: str = "") -> None:
            heard.append("done")

        def note(self, text: str) -> None:
            heard.append(text)

    run(walks, same, tmp_path / "made", progress=Hear())
    assert heard == [("preprocessing", 20, "steps"), 7, 7, 6, "done"]


def test_the_document(walks: Path, tmp_path: Path) -> None:
    document = to_document(run(walks, same, tmp_path / "made"))
    assert (document["kind"], document["source"], document["path"]) == (
        "preprocess",
        str(walks),
        str(tmp_path / "made"),
    )
    assert (document["chunk_size"], document["num_workers"], document["steps"]) == (7, 0, 20)
    assert document["function"].endswith("test_preprocess:same")


def test_a_damaged_result_is_not_taken_for_a_finished_one(walks: Path, tmp_path: Path) -> None:
    prep = tmp_path / "prep.py"
    prep.write_text("def f(rows):\n    return rows\n")
    run(walks, f"{prep}:f", tmp_path / "made")
    (tmp_path / "made" / "observation.memmap").unlink()
    with pytest.raises(rbtool.UsageError, match="already exists"):
        run(walks, f"{prep}:f", tmp_path / "made")


def test_one_plain_folder_is_not_taken_for_another(tmp_path: Path) -> None:
    prep = tmp_path / "prep.py"
    prep.write_text("def f(rows):\n    return rows\n")
    for name, value in (("one", 1.0), ("two", 2.0)):
        done = torch.tensor([[False], [True]])
        rows = {"observation": torch.full((2, 3), value), "next": {"done": done, "terminated": done}}
        TensorDict(rows, [2]).memmap(tmp_path / name)
    assert run(tmp_path / "one", f"{prep}:f", tmp_path / "made").steps == 2
    assert run(tmp_path / "one", f"{prep}:f", tmp_path / "made").already_there
    with pytest.raises(rbtool.UsageError, match="already exists"):
        run(tmp_path / "two", f"{prep}:f", tmp_path / "made")


@settings(max_examples=12)
@given(plan=dataset_plans(max_length=12).filter(lambda plan: plan.lengths), data=st.data())
def test_check_finds_the_episode_table_right_whatever_flags_a_function_sets(plan, data, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("plans")
    write_plan(plan, folder / "source")

    def function(td: Any) -> Any:
        rows = len(td)
        td["next", "reward"] *= torch.randn(rows, 1, dtype=td["next", "reward"].dtype)
        td["next", "terminated"] ^= torch.rand(rows, 1) < 0.2
        td["next", "truncated"] ^= torch.rand(rows, 1) < 0.2
        td["next", "done"] = td["next", "terminated"] | td["next", "truncated"]
        return td

    chunk, steps = data.draw(st.integers(1, 9)), data.draw(st.integers(1, sum(plan.lengths)))
    rbtool.preprocess(folder / "source", function, folder / "made", num_workers=0, chunk_size=chunk, num_frames=steps)
    wrong = [found for found in rbtool.check(folder / "made").findings if found.rule in ("TED004", "TED010", "TED011")]
    assert [found for found in wrong if found.severity == "error"] == []


# Programs in the engine: one digest for any workers and chunks, provenance, and replay.

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


def test_a_program_makes_a_sound_result_once(folder):
    with TedReader(folder / "cartpole") as reader:
        source = reader.episodes
    with TedReader(folder / "made") as reader:
        table, after = reader.episodes, reader.read(("next", "truncated"), 0, reader.manifest.steps)
    kept = source.length[source.length > 5]
    truncated = source.truncated[source.length > 5]
    assert table.length.tolist() == (kept - truncated).tolist()
    assert np.flatnonzero(after[:, 0]).tolist() == (table.start + table.length - 1)[truncated].tolist()
    report = rbtool.check(folder / "made")
    assert not [finding for finding in report.findings if finding.severity == "error"], report.findings
    found = preprocess(folder / "cartpole", dest=folder / "made", operations=OPERATIONS, num_workers=0)
    assert found.already_there


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
    assert any("leaves out the choice of episodes and rows: --episodes 0:2" in note for note in rest.notes)


def test_a_replay_repeats_what_chose_episodes_only_where_it_is_asked_to(folder, tmp_path):
    chosen = {"filter": "length > 20", "episodes": "0:9", "where": "observation[0] < 1", "select": "action"}
    once = preprocess(folder / "cartpole", dest=tmp_path / "made", operations=chosen, num_frames=90, num_workers=0)
    plain = preprocess(folder / "cartpole", dest=tmp_path / "plain", replay=tmp_path / "made", num_workers=0)
    assert (plain.episodes, [operation["name"] for operation in plain.arguments["operations"]]) == (12, ["select"])
    left = "--episodes 0:9, --filter length > 20, --where observation[0] < 1, --num-frames 90"
    assert sum(f"the choice of episodes and rows: {left} (" in note for note in plain.notes) == 1
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


def test_replays_are_shown_and_refused_for_choices_alone(folder, tmp_path):
    preprocess(folder / "cartpole", dest=tmp_path / "made", operations={"episodes": "0:9"}, num_workers=0)
    with pytest.raises(UsageError, match="was made only by choosing episodes and rows"):
        preprocess(folder / "cartpole", dest=tmp_path / "again", replay=tmp_path / "made", num_workers=0)
    with pytest.raises(UsageError, match="--replay-filters needs --replay"):
        preprocess(folder / "cartpole", dest=tmp_path / "x", operations={"select": "action"}, replay_filters=True)
    shown = show_pipeline(replay=folder / "made", replay_filters=True)
    (tmp_path / "prep.toml").write_text(shown.text)
    found = preprocess(folder / "cartpole", dest=tmp_path / "again", pipeline=tmp_path / "prep.toml", num_workers=0)
    assert found.content_digest == digest(folder / "made")


def test_what_a_program_drops_scales_or_cannot_hold_is_told(folder, tmp_path):
    preprocess(folder / "cartpole", dest=tmp_path / "few", operations={"select": "observation"}, num_workers=0)
    with TedReader(tmp_path / "few") as reader:
        assert [(item.key, item.why) for item in reader.manifest.dropped_keys] == [("action", "not selected")]
    preprocess(folder / "cartpole", dest=tmp_path / "scaled", operations={"normalize": "observation"}, num_workers=0)
    document = json.loads((tmp_path / "scaled" / MANIFEST).read_text())
    part = document["provenance"][-1]["arguments"]["constants"][0][0]
    with TedReader(tmp_path / "scaled") as scaled, TedReader(folder / "cartpole") as source:
        values, steps = scaled.read(("observation",), 0, scaled.manifest.steps), source.manifest.steps
        expected = source.read(("observation",), 0, steps)
    np.testing.assert_allclose(values * part["scale"] + part["loc"], expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(SchemaError, match=r"cast.*'observation' cannot be represented as int8"):
        preprocess(folder / "cartpole", dest=tmp_path / "x", operations={"cast": "observation=int8"}, num_workers=0)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("of", "words"), [("cartpole", "was made by convert"), ("function", "only operations can be replayed")]
)
def test_what_was_not_made_by_operations_cannot_be_replayed(folder, tmp_path, of, words):
    if of == "function":
        preprocess(folder / "cartpole", lambda rows: rows, tmp_path / "function", num_workers=0)
    place = folder / "cartpole" if of == "cartpole" else tmp_path / "function"
    with pytest.raises(UsageError, match=words):
        preprocess(folder / "cartpole", dest=tmp_path / "x", replay=place, num_workers=0)


# Hindsight relabelling of stored datasets, against the rows of the source, one by one.

LENGTHS = (1, 5, 2, 9, 1, 4)
FILE = """
import torch

def relabel(rows):
    goal, achieved = rows["observation", "desired_goal"], rows["next", "observation", "achieved_goal"]
    reached = (goal == achieved).all(-1, keepdim=True)
    return reached.float() - 1, reached

def rewards(rows):
    return relabel(rows)[0]

def even(rows):
    number = rows["observation", "achieved_goal"]
    return number, number % 2 == 0
"""


@pytest.fixture(scope="module")
def goals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes whose achieved goal is the number of the step; the goal of all is -1, it ends each other one."""
    steps = sum(LENGTHS)
    number = torch.arange(float(steps)).unsqueeze(-1)
    last = torch.zeros(steps, 1, dtype=torch.bool)
    last[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    episode = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    terminated = last & (episode % 2 == 0).unsqueeze(-1)

    def observation(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"achieved_goal": numbers, "desired_goal": torch.full_like(numbers, -1)}

    flags = {"done": last, "terminated": terminated, "truncated": last & ~terminated}
    after = {"observation": observation(number + 1), "reward": torch.full((steps, 1), -1.0), **flags}
    rows = TensorDict({"observation": observation(number), "episode": episode, "next": after}, [steps])
    folder = tmp_path_factory.mktemp("hindsight")
    (folder / "her.py").write_text(FILE)
    buffer = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(steps))
    buffer.extend(rows)
    buffer.dumps(folder / "buffer")
    rbtool.convert(folder / "buffer", folder / "source")
    return folder


def bounds() -> list[tuple[int, int]]:
    stops = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [(stop - length, stop) for stop, length in zip(stops, LENGTHS, strict=True) for _ in range(length)]


@pytest.mark.parametrize(
    ("hindsight", "ratio"), [("future", 0.8), ("final:1", 1.0), ("episode:0.5", 0.5), ("final:0", 0)]
)
def test_goals_rewards_and_ends(hindsight: str, ratio: float, goals: Path, tmp_path: Path) -> None:
    result = rbtool.preprocess(
        goals / "source", f"{goals}/her.py:relabel", tmp_path / "out", hindsight=hindsight, num_workers=0
    )
    assert rbtool.check(result.path).errors == 0
    before, rows = (rbtool.load_dataset(path).storage[:] for path in (goals / "source", result.path))
    goals = rows["observation", "desired_goal"].flatten().int().tolist()
    assert rows["next", "observation", "desired_goal"].equal(rows["observation", "desired_goal"])
    count = 0
    for number, (goal, (start, stop)) in enumerate(zip(goals, bounds(), strict=True)):
        truncated, ended = (bool(before["next", name][number]) for name in ("truncated", "done"))
        if goal == -1:
            assert (rows["next"][number] == before["next"][number]).all()
            continue
        count += 1
        legal = {"future": range(number + 1, stop + 1), "final:1": [stop], "episode:0.5": range(start + 1, stop + 1)}
        assert goal in legal[hindsight]
        hit = goal == number + 1
        assert float(rows["next", "reward"][number]) == hit - 1
        assert bool(rows["next", "terminated"][number]) is hit
        assert bool(rows["next", "truncated"][number]) is (truncated or (ended and not hit))
        assert bool(rows["next", "done"][number]) is (ended or hit)
    assert (count == ratio * len(goals)) if ratio in (0, 1) else (0 < count < len(goals))
    assert rows.exclude("next", ("observation", "desired_goal"), "index", "episode").keys() == {"observation"}


def test_the_result_depends_on_the_seed_alone_and_is_described(goals: Path, tmp_path: Path) -> None:
    digests = []
    for number, options in enumerate(({"num_workers": 0}, {"num_workers": 2, "chunk_size": 3}, {"seed": 5})):
        options = {"num_workers": 0} | options
        result = rbtool.preprocess(
            goals / "source", f"{goals}/her.py:relabel", tmp_path / str(number), hindsight="future", **options
        )
        digests.append(result.content_digest)
    assert digests[0] == digests[1] != digests[2]
    manifest = json.loads((tmp_path / "0/.rbtool/manifest.json").read_text())
    last = manifest["provenance"][-1]
    assert last["arguments"]["hindsight"] == {
        "strategy": "future", "her_ratio": 0.8, "goal_key": "observation.desired_goal",
        "achieved_goal_key": "next.observation.achieved_goal",
    }  # fmt: skip
    assert "her.py" in last["inputs"]


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_what_was_achieved_before_a_step_is_its_goal_on_request(layout: Any, goals: Path, tmp_path: Path) -> None:
    rbtool.convert(goals / "source", tmp_path / "in", layout=layout)
    for more, after in (({"achieved_goal_key": "observation.achieved_goal"}, 0), ({}, 1)):
        result = rbtool.preprocess(
            tmp_path / "in", f"{goals}/her.py:relabel", tmp_path / f"out{after}",
            hindsight={"strategy": "final", "her_ratio": 1, **more},
        )  # fmt: skip
        found = rbtool.load_dataset(result.path).storage[:]["observation", "desired_goal"].flatten().tolist()
        assert found == [stop - 1 + after for _, stop in bounds()]


def test_without_what_a_step_achieves_the_field_before_it_is_named(goals: Path, tmp_path: Path) -> None:
    rbtool.preprocess(
        goals / "source", dest=tmp_path / "in", operations={"exclude": ["next.observation.achieved_goal"]}
    )
    with pytest.raises(
        UsageError, match=r"no 'next\.observation\.achieved_goal', the goal that a step achieved"
    ) as raised:
        rbtool.preprocess(tmp_path / "in", f"{goals}/her.py:relabel", tmp_path / "out", hindsight="final")
    assert "--achieved-goal-key observation.achieved_goal" in str(raised.value.hint)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_reaches_its_goal_ends_an_episode_also_where_the_next_one_has_the_same(
    num_workers: int, goals: Path, tmp_path: Path
) -> None:
    result = rbtool.preprocess(
        goals / "source", f"{goals}/her.py:even", tmp_path / "out", hindsight="final:1", num_workers=num_workers
    )
    rows = rbtool.load_dataset(result.path).storage[:]
    ends = [number % 2 == 0 or number + 1 == stop for number, (_, stop) in enumerate(bounds())]
    assert rows["next", "done"].flatten().tolist() == ends
    assert [*(rows["episode"].diff() != 0).tolist(), True] == ends
    assert result.episodes == len(set(rows["episode"].tolist())) == sum(ends)
    assert not [one for one in rbtool.check(result.path).findings if one.rule == "TED006"]


@pytest.mark.parametrize(
    ("fn", "options", "words"),
    [
        (None, {}, "needs a function"),
        ("relabel", {"hindsight": "random"}, "future, final, episode"),
        ("relabel", {"hindsight": "future:2"}, "from 0 to 1"),
        ("relabel", {"hindsight": "future:much"}, "future:0.8"),
        ("relabel", {"hindsight": {"ratio": 1}}, "mapping of strategy"),
        ("relabel", {"hindsight": {"strategy": "final", "goal_key": "desired"}}, "field 'desired' not found"),
        ("relabel", {"operations": {"select": ["observation"]}}, "hindsight and operations"),
        ("relabel", {"unit": "row"}, "whole episodes"),
    ],
)
def test_bad_arguments(fn: str | None, options: Any, words: str, goals: Path, tmp_path: Path) -> None:
    function = None if fn is None else f"{goals}/her.py:{fn}"
    with pytest.raises(UsageError, match=words):
        rbtool.preprocess(goals / "source", function, tmp_path / "out", **{"hindsight": "future"} | options)
    assert not (tmp_path / "out").exists()


def test_terminations_are_not_optional(goals: Path, tmp_path: Path) -> None:
    with pytest.raises(rbtool.RbtoolError, match=r"her.py:rewards failed on step .*depends on the goal"):
        rbtool.preprocess(
            goals / "source", f"{goals}/her.py:rewards", tmp_path / "out", hindsight="final", num_workers=0
        )
