"""`preprocess`: what it refuses, programs in the engine, and hindsight relabelling."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable
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
from rbtool.core.preprocess.preprocess import preprocess, show_pipeline
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import dataset_plans, write_plan, write_walks

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


def on_the_second_chunk(change):
    """Return a function that passes every chunk through `change` whose first step is of episode 2."""
    return lambda td: change(td) if int(td["episode"][0]) == 2 else td


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
        (lambda td: None, SchemaError, "on {}: it returned None"),
        (lambda td: td[:3].exclude("episode"), SchemaError, "on {}: it returned 3 rows for 7 steps without"),
        (lambda td: td.exclude("action"), SchemaError, "on {}: the result lacks action; every chunk must"),
        (lambda td: td.set("new", td["action"]), SchemaError, "on {}: the result has besides new; every"),
        (
            lambda td: td.set("action", td["action"].double()),
            SchemaError,
            "on {}: 'action' came out as float64 [2], the",
        ),
        (lambda td: td.set("action", td["action"][:, :1]), SchemaError, "on {}: 'action' came out as float32 [1], the"),
    ],
)
def test_an_error_of_the_function_names_the_steps_and_episodes(walks, tmp_path: Path, change, kind, message) -> None:
    with pytest.raises(kind) as caught:
        run(walks, on_the_second_chunk(change), tmp_path / "made")
    assert type(caught.value) is kind
    assert message.format("steps 7 to 13 (episode 2)") in str(caught.value)
    assert "\n" not in str(caught.value)
    resumable = kind is rbtool.RbtoolError  # a wrong result would be wrong again
    assert ("1 of 3 chunks is kept: add --resume" in caught.value.hint) == resumable
    assert len(leftovers(walks)) == resumable
    assert shown(walks) == ["walks"]
    TedReader(walks).verify_files()


def test_an_error_in_the_first_chunk_names_its_episodes_and_keeps_the_cause(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(rbtool.RbtoolError, match=r"on steps 0 to 6 \(episodes 0 to 1\): ValueError") as caught:
        run(walks, raise_value_error, tmp_path / "made")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(rbtool.RbtoolError, match=r"on step 0 \(episode 0\): "):
        run(walks, raise_value_error, tmp_path / "made", chunk_size=1)


def test_an_interrupt_keeps_only_finished_chunks(walks: Path, tmp_path: Path) -> None:
    def interrupt(td):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(walks, interrupt, tmp_path / "made")
    assert beside(walks) == ["walks"]
    with pytest.raises(KeyboardInterrupt) as caught:
        run(walks, on_the_second_chunk(interrupt), tmp_path / "made")
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
def test_numbers_out_of_range_are_refused(walks: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(walks, same, tmp_path / "made", **options)
    assert beside(walks) == ["walks"]


def test_a_source_is_looked_up_below_the_root(tmp_path: Path) -> None:
    write_walks(tmp_path / "root" / "minari" / "walks" / "test-v0", EPISODES)
    result = rbtool.preprocess("minari:walks/test-v0", same, tmp_path / "made", num_workers=0, root=tmp_path / "root")
    assert (result.steps, result.source) == (20, tmp_path / "root" / "minari" / "walks" / "test-v0")
    assert Manifest.load(tmp_path / "made").request.asked == "minari:walks/test-v0"


def test_unpicklable_functions_run_in_one_process_only(walks: Path, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(td):
        with lock:
            return td

    with pytest.raises(UsageError, match="cannot be sent to worker processes") as caught:
        run(walks, locked, tmp_path / "made", num_workers=2, start_method="spawn")
    assert "num_workers=0" in caught.value.hint
    assert run(walks, locked, tmp_path / "made").steps == 20


def test_force_replaces_a_dataset_only_by_a_whole_one(walks: Path, tmp_path: Path) -> None:
    first = run(walks, same, tmp_path / "made")
    with pytest.raises(UsageError, match="already exists"):  # a function in memory is never known to be equal
        run(walks, same, tmp_path / "made")
    with pytest.raises(rbtool.RbtoolError):
        run(walks, raise_value_error, tmp_path / "made", force=True)
    assert digest(tmp_path / "made") == first.content_digest
    second = run(walks, lambda td: td.select("action"), tmp_path / "made", force=True)
    assert digest(tmp_path / "made") == second.content_digest != first.content_digest
    assert beside(walks) == ["made", "walks"]


def test_an_equal_request_is_already_there(walks: Path, tmp_path: Path) -> None:
    (prep := tmp_path / "prep.py").write_text("def f(td): return td")
    first = run(walks, f"{prep}:f", tmp_path / "made")
    made_at = (tmp_path / "made").stat().st_ino
    again = run(walks, f"{prep}:f", tmp_path / "made", num_workers=None)
    assert (first.already_there, again.already_there, again.content_digest) == (False, True, first.content_digest)
    assert (tmp_path / "made").stat().st_ino == made_at
    assert not run(walks, f"{prep}:f", tmp_path / "made", force=True).already_there
    for change in ({"chunk_size": 8}, {"num_frames": 20}):
        with pytest.raises(UsageError, match="already exists"):
            run(walks, f"{prep}:f", tmp_path / "made", **change)
    prep.write_text("def f(td): return dict(td)")
    with pytest.raises(UsageError, match="already exists"):
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
    with pytest.raises(UsageError, match="already exists"):
        run(walks, f"{tmp_path}/prep.py:f", tmp_path / "made")
    again = run(walks, f"{tmp_path}/prep.py:f", tmp_path / "made", force=True)
    assert again.content_digest != first.content_digest
    assert not {"helper", "pack", "pack.deep"} & sys.modules.keys()


def test_each_function_imports_the_modules_beside_its_own_file(walks: Path, tmp_path: Path) -> None:
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
    def function(td):
        return {"a": td["action"].double(), "b": {"c": td["episode"]}}

    result = run(walks, function, tmp_path / "deep" / "made", dry_run=True, num_frames=8)
    assert (result.dry_run, result.steps, result.episodes, result.bytes) == (True, 8, 3, 8 * 24)
    assert result.notes[0].startswith("counted before ")
    assert result.notes[1:] == ("a: float64 [2]", "b.c: int64 []")
    assert beside(walks) == ["walks"]
    run(walks, same, tmp_path / "made")
    with pytest.raises(UsageError, match="already exists"):
        run(walks, same, tmp_path / "made", dry_run=True)


def test_what_a_function_prints_goes_to_stderr(walks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def chatty(td):
        print("seen", len(td))
        return td

    run(walks, chatty, tmp_path / "made")
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", ["seen 7", "seen 7", "seen 6"])


def test_torch_uses_one_thread_and_gets_its_own_number_back(walks: Path, tmp_path: Path) -> None:
    before, path, seen = torch.get_num_threads(), list(sys.path), []
    torch.set_num_threads(3)
    try:
        run(walks, lambda td: seen.append(torch.get_num_threads()) or td, tmp_path / "made")
        with pytest.raises(UsageError, match="has no function"):
            run(walks, "math:nothing", tmp_path / "other")
        assert (set(seen), torch.get_num_threads(), sys.path) == ({1}, 3, path)
    finally:
        torch.set_num_threads(before)


def test_a_full_disk_is_reported_while_writing(walks: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("pwrite", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(rbtool.OutOfSpaceError, match="no space is left"):
                run(walks, same, tmp_path / "made")
        assert shown(walks) == ["walks"]


def test_a_source_that_is_replaced_during_a_run_is_read_to_its_end(walks: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "other", EPISODES, seed=1)
    whole = run(walks, same, tmp_path / "whole").content_digest

    def swap(td):
        if (tmp_path / "other").exists():
            fs.remove(walks)
            (tmp_path / "other").rename(walks)
        return td

    assert run(walks, swap, tmp_path / "made").content_digest == whole
    assert beside(walks) == ["made", "walks", "whole"]


def test_progress_and_document_report_every_step(walks: Path, tmp_path: Path, heard: Any) -> None:
    document = to_document(run(walks, same, tmp_path / "made", progress=heard))
    assert (heard.started, heard.advances) == ([("preprocessing", 20, "steps")], [7, 7, 6])
    assert (heard.notes, heard.ended) == ([], 1)
    expected = {
        "kind": "preprocess", "source": str(walks), "path": str(tmp_path / "made"), "chunk_size": 7, "num_workers": 0,
        "steps": 20,
    }  # fmt: skip
    assert document.items() >= expected.items()
    assert document["function"].endswith("test_preprocess:same")


def test_the_result_of_another_plain_folder_is_not_already_there(tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text("def f(rows): return rows")
    function = f"{tmp_path}/prep.py:f"
    for name, value in (("one", 1.0), ("two", 2.0)):
        done = torch.tensor([[False], [True]])
        rows = {"observation": torch.full((2, 3), value), "next": {"done": done, "terminated": done}}
        TensorDict(rows, [2]).memmap(tmp_path / name)
    assert run(tmp_path / "one", function, tmp_path / "made").steps == 2
    assert run(tmp_path / "one", function, tmp_path / "made").already_there
    with pytest.raises(UsageError, match="already exists"):
        run(tmp_path / "two", function, tmp_path / "made")


@settings(max_examples=12)
@given(plan=dataset_plans(max_length=12).filter(lambda plan: plan.lengths), data=st.data())
def test_the_episode_table_agrees_with_whatever_flags_a_function_sets(plan, data, tmp_path_factory) -> None:
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
    """A dataset of 12 episodes of different lengths, one of a single step, and what the operations make of it."""
    folder = tmp_path_factory.mktemp("program")
    rbtool.convert("tests/data/minari/cartpole/scripted-v0", folder / "cartpole")
    preprocess(folder / "cartpole", dest=folder / "made", operations=OPERATIONS, num_workers=0)
    return folder


@pytest.fixture
def process(folder, tmp_path):
    """Preprocess `cartpole` to a folder of this name, in one process."""
    return lambda name, **options: preprocess(folder / "cartpole", dest=tmp_path / name, **{"num_workers": 0} | options)


def digest(folder):
    return Manifest.load(folder).content_digest


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"chunk_size": 17}])
def test_workers_and_chunks_do_not_change_the_digest(folder, process, how):
    assert process("again", operations=OPERATIONS, **how).content_digest == digest(folder / "made")


def test_operations_make_a_sound_dataset_once(folder):
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
def test_a_replay_makes_the_same_with_the_same_constants(folder, process, tmp_path, place):
    found = process("again", replay=folder / "made" / place, replay_filters=True)
    assert found.content_digest == digest(folder / "made")
    other = process("more", operations={"episodes": "0:2", "normalize": "observation"})
    rest = process("rest", replay=tmp_path / "more")
    assert rest.arguments["operations"][0]["constants"] == other.arguments["constants"][0]
    assert rest.episodes == 12
    assert any("leaves out the choice of episodes and rows: --episodes 0:2" in note for note in rest.notes)


def test_a_replay_repeats_the_choice_of_episodes_and_rows_only_on_request(folder, process, tmp_path):
    chosen = {"filter": "length > 20", "episodes": "0:9", "where": "observation[0] < 1", "select": "action"}
    once = process("made", operations=chosen, num_frames=90)
    plain = process("plain", replay=tmp_path / "made")
    assert (plain.episodes, [operation["name"] for operation in plain.arguments["operations"]]) == (12, ["select"])
    left = "--episodes 0:9, --filter length > 20, --where observation[0] < 1, --num-frames 90"
    assert sum(f"the choice of episodes and rows: {left} (" in note for note in plain.notes) == 1
    assert plain.steps == rbtool.inspect(folder / "cartpole").steps > once.steps
    both = process("both", replay=tmp_path / "made", replay_filters=True)
    assert (both.episodes, both.content_digest) == (once.episodes, once.content_digest)
    assert not any("leaves out" in note for note in both.notes)
    assert process("others", replay=tmp_path / "made", operations={"episodes": "9:"}).episodes == 3
    assert show_pipeline(replay=tmp_path / "made").notes == plain.notes[:1]
    shown = show_pipeline(replay=tmp_path / "made", replay_filters=True)
    assert "filter" in shown.text
    assert "where" in shown.text
    assert shown.notes == ("a pipeline has no place for --num-frames 90, which the replay repeats: add it",)


def test_a_replay_of_a_choice_alone_is_refused(process, tmp_path):
    process("made", operations={"episodes": "0:9"})
    with pytest.raises(UsageError, match="was made only by choosing episodes and rows"):
        process("again", replay=tmp_path / "made")
    with pytest.raises(UsageError, match="--replay-filters needs --replay"):
        process("x", operations={"select": "action"}, replay_filters=True)


def test_the_pipeline_of_a_replay_makes_the_same(folder, process, tmp_path):
    (tmp_path / "prep.toml").write_text(show_pipeline(replay=folder / "made", replay_filters=True).text)
    assert process("again", pipeline=tmp_path / "prep.toml").content_digest == digest(folder / "made")


def test_provenance_has_dropped_fields_and_constants(folder, process, tmp_path):
    process("few", operations={"select": "observation"})
    dropped = Manifest.load(tmp_path / "few").dropped_keys
    assert [(item.key, item.why) for item in dropped] == [("action", "not selected")]
    process("scaled", operations={"normalize": "observation"})
    document = json.loads((tmp_path / "scaled" / MANIFEST).read_text())
    part = document["provenance"][-1]["arguments"]["constants"][0][0]
    with TedReader(tmp_path / "scaled") as scaled, TedReader(folder / "cartpole") as source:
        values, expected = (reader.read(("observation",), 0, reader.manifest.steps) for reader in (scaled, source))
    np.testing.assert_allclose(values * part["scale"] + part["loc"], expected, rtol=1e-4, atol=1e-6)


def test_a_cast_that_cannot_represent_the_values_is_refused(process, tmp_path):
    with pytest.raises(SchemaError, match=r"cast.*'observation' cannot be represented as int8"):
        process("x", operations={"cast": "observation=int8"})
    assert not (tmp_path / "x").exists()


def test_a_dataset_that_operations_did_not_make_cannot_be_replayed(folder, process, tmp_path):
    preprocess(folder / "cartpole", lambda rows: rows, tmp_path / "function", num_workers=0)
    refused = {folder / "cartpole": "was made by convert", tmp_path / "function": "only operations can be replayed"}
    for place, words in refused.items():
        with pytest.raises(UsageError, match=words):
            process("x", replay=place)


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
    """The start and stop of the episode of every step."""
    stops = np.cumsum(LENGTHS).tolist()
    return [(stop - length, stop) for stop, length in zip(stops, LENGTHS, strict=True) for _ in range(length)]


Relabel = Callable[..., Any]


@pytest.fixture
def relabel(goals: Path, tmp_path: Path) -> Relabel:
    """Relabel `goals` with a function of `her.py`, in one process, to `out`."""

    def run(function: str = "relabel", source: Path = goals / "source", dest: str = "out", **options: Any) -> Any:
        return rbtool.preprocess(source, f"{goals}/her.py:{function}", tmp_path / dest, **{"num_workers": 0} | options)

    return run


@pytest.mark.parametrize(
    ("hindsight", "ratio"), [("future", 0.8), ("final:1", 1.0), ("episode:0.5", 0.5), ("final:0", 0)]
)
def test_relabelled_goals_are_later_achievements_of_the_episode(
    hindsight: str, ratio: float, relabel: Relabel, goals: Path
) -> None:
    result = relabel(hindsight=hindsight)
    assert rbtool.check(result.path).errors == 0
    before, rows = (rbtool.load_dataset(path).storage[:] for path in (goals / "source", result.path))
    chosen = rows["observation", "desired_goal"].flatten().int().tolist()
    assert rows["next", "observation", "desired_goal"].equal(rows["observation", "desired_goal"])
    count = 0
    for number, (goal, (start, stop)) in enumerate(zip(chosen, bounds(), strict=True)):
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
    assert (count == ratio * len(chosen)) if ratio in (0, 1) else (0 < count < len(chosen))
    assert rows.exclude("next", ("observation", "desired_goal"), "index", "episode").keys() == {"observation"}


def test_relabelling_depends_on_the_seed_alone_and_is_in_the_provenance(relabel: Relabel, tmp_path: Path) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"num_workers": 2, "chunk_size": 3}, {"seed": 5})
    first, again, other = (
        relabel(dest=str(number), hindsight="future", **options).content_digest for number, options in enumerate(ways)
    )
    assert first == again != other
    last = json.loads((tmp_path / "0" / MANIFEST).read_text())["provenance"][-1]
    assert last["arguments"]["hindsight"] == {
        "strategy": "future", "her_ratio": 0.8, "goal_key": "observation.desired_goal",
        "achieved_goal_key": "next.observation.achieved_goal",
    }  # fmt: skip
    assert "her.py" in last["inputs"]


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_the_achieved_goal_is_read_before_or_after_the_step(layout: Any, relabel, goals: Path, tmp_path: Path) -> None:
    rbtool.convert(goals / "source", tmp_path / "in", layout=layout)
    for more, after in (({"achieved_goal_key": "observation.achieved_goal"}, 0), ({}, 1)):
        hindsight = {"strategy": "final", "her_ratio": 1, **more}
        result = relabel(source=tmp_path / "in", dest=f"out{after}", hindsight=hindsight, num_workers=None)
        found = rbtool.load_dataset(result.path).storage[:]["observation", "desired_goal"].flatten().tolist()
        assert found == [stop - 1 + after for _, stop in bounds()]


def test_a_dataset_without_the_achieved_goal_names_the_one_before_the_step(relabel, goals, tmp_path: Path) -> None:
    rbtool.preprocess(
        goals / "source", dest=tmp_path / "in", operations={"exclude": ["next.observation.achieved_goal"]}
    )
    message = r"no 'next\.observation\.achieved_goal', the goal that a step achieved"
    with pytest.raises(UsageError, match=message) as raised:
        relabel(source=tmp_path / "in", hindsight="final")
    assert "--achieved-goal-key observation.achieved_goal" in str(raised.value.hint)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_reaches_its_goal_ends_the_episode(num_workers: int, relabel: Relabel) -> None:
    result = relabel("even", hindsight="final:1", num_workers=num_workers)
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
def test_wrong_arguments_of_hindsight_are_refused(fn: str | None, options: Any, words: str, goals, tmp_path) -> None:
    function = None if fn is None else f"{goals}/her.py:{fn}"
    with pytest.raises(UsageError, match=words):
        rbtool.preprocess(goals / "source", function, tmp_path / "out", **{"hindsight": "future"} | options)
    assert not (tmp_path / "out").exists()


def test_a_function_that_returns_no_terminations_is_refused(relabel: Relabel) -> None:
    with pytest.raises(rbtool.RbtoolError, match=r"her.py:rewards failed on step .*depends on the goal"):
        relabel("rewards", hindsight="final")
