"""What comes out of preprocess, and that nothing comes out of a source that is damaged or changes meanwhile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_datasets import write_shown
from tensordict import TensorDict

import rbtool
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import CorruptDataError
from rbtool.core.format.manifest import ENV_METADATA, Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import state_keys
from rbtool.core.testing.datasets import dataset_plans, write_plan, write_walks
from rbtool.core.testing.storages import same

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]
STEPS = 20


def run(source: Path, function, dest: Path, chunk_size: int = 7, **options):
    return rbtool.preprocess(source, function, dest, num_workers=0, chunk_size=chunk_size, **options)


def scaled(td):
    td["observation"] *= 2
    td["next", "observation"] = td["next", "observation"] * 2
    return td


def other_keys(td):
    return {"sum": td["observation"].sum(-1), "next": {"bits": td["action"].bfloat16(), "reward": td["next", "reward"]}}


def views(td):
    return td.select("episode").set("a", td["observation"][:, ::2]).set("b", td["action"][:, :1].expand(-1, 4))


@pytest.mark.parametrize("chunk_size", [1, 7, 20, 1000])
@pytest.mark.parametrize("function", [scaled, other_keys, views])
def test_chunks_give_what_the_whole_gives(walks: Path, tmp_path: Path, function, chunk_size: int) -> None:
    whole = TensorDict.load_memmap(walks).clone()
    result = run(walks, function, tmp_path / "made", chunk_size)
    assert same(TensorDict.load_memmap(tmp_path / "made"), TensorDict(function(whole), [STEPS]))
    assert (result.steps, result.episodes, result.path) == (STEPS, 4, tmp_path / "made")
    open_steps(tmp_path / "made").verify_files()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=dataset_plans().filter(lambda plan: plan.lengths), chunk_size=st.integers(1, 9))
def test_a_function_that_does_nothing_gives_the_same_content(plan, chunk_size: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("plans")
    plan = replace(plan, jumps=(False,) * len(plan.lengths))  # a jump would be declared in the result
    source = write_plan(plan, folder / "source")
    result = run(folder / "source", lambda td: td, folder / "made", chunk_size)
    made = Manifest.load(folder / "made")
    assert result.content_digest == made.content_digest == source.content_digest
    assert {field.key: field for field in made.fields} == {field.key: field for field in source.fields}
    assert (made.ranges, made.boundary) == (source.ranges, source.boundary)
    assert TedReader(folder / "made").documents() == TedReader(folder / "source").documents()


def shaken(td):
    """Change rewards, flags and observations here and there; the draws are seeded by the chunk."""
    rows = len(td)
    td["next", "reward"] *= torch.randn(rows, 1, dtype=td["next", "reward"].dtype)
    td["next", "terminated"] ^= torch.rand(rows, 1) < 0.2
    td["next", "truncated"] ^= torch.rand(rows, 1) < 0.2
    td["next", "done"] = td["next", "terminated"] | td["next", "truncated"]
    return td


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=dataset_plans(max_length=12).filter(lambda plan: plan.lengths), data=st.data())
def test_the_episode_table_agrees_with_the_rows(plan, data, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plans")
    write_plan(plan, folder / "source")
    steps = data.draw(st.integers(1, sum(plan.lengths)))
    kept = data.draw(st.booleans())

    def function(td):
        td = shaken(td)
        numbers = td["episode"] + torch.arange(len(td))
        return td if kept else td.set("number", numbers).set(("next", "number"), numbers + 1)

    run(folder / "source", function, folder / "made", data.draw(st.integers(1, 9)), num_frames=steps)
    reader = TedReader(folder / "made")
    for row, explicit in enumerate(reader.episodes.explicit_next.tolist()):
        start, length = int(reader.episodes.start[row]), int(reader.episodes.length[row])
        assert explicit == any(
            reader.read(("next", *key), start, start + length - 1).tobytes()
            != reader.read(key, start + 1, start + length).tobytes()
            for key in state_keys(reader.fields)
        )


def test_the_source_is_untouched_and_chunks_own_their_memory(walks: Path, tmp_path: Path) -> None:
    def wipe(td):
        for value in td.values(include_nested=True, leaves_only=True):
            value.zero_()
        return td

    run(walks, wipe, tmp_path / "made")
    TedReader(walks).verify_files()
    assert not TensorDict.load_memmap(tmp_path / "made")["next", "reward"].any()


def test_returns_and_ends_follow_the_function_and_reasons_stay_where_flags_do(walks: Path, tmp_path: Path) -> None:
    def function(td):
        td["next", "reward"] = torch.ones(len(td), 1, dtype=torch.bfloat16)
        td["next", "truncated"] |= td["episode"].eq(0).unsqueeze(-1)
        return td

    result = run(walks, function, tmp_path / "made", 4)
    table = open_steps(tmp_path / "made").episodes
    assert table.total_reward.tolist() == [6, 1, 9, 4]
    assert table.end_reason.tolist() == [EndReason.BOTH, EndReason.TRUNCATED, EndReason.END_OF_FILE, EndReason.BOTH]
    assert result.boundary == {
        "terminated": 0, "truncated": 1, "both": 2, "end_of_file": 1, "inferred": 0, "explicit_next": 0
    }  # fmt: skip
    assert [note.partition(" changes ")[2] for note in result.notes] == [
        "the element type of next.reward from float64 to bfloat16"
    ]


def test_without_reward_and_flags_the_table_is_that_of_the_source(walks: Path, tmp_path: Path) -> None:
    run(walks, lambda td: td.select("observation"), tmp_path / "made")
    before, after = (open_steps(path).episodes.columns() for path in (walks, tmp_path / "made"))
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("dtype", "shape"), [("int64", ()), ("int32", ()), ("uint8", (1,)), ("float32", ())])
def test_new_episode_numbers_are_in_the_rows(
    walks: Path, tmp_path: Path, dtype: str, shape: tuple[int, ...], whole: bool
) -> None:
    """Each episode is cut in two, numbered 0 and 1: other episodes have these numbers already."""

    def halved(td):
        half = torch.arange(len(td)) >= len(td) // 2
        td["episode"] = half.to(getattr(torch, dtype)).reshape(-1, *shape)
        return td if whole else td[: max(1, len(td) - 1)]

    run(walks, halved, tmp_path / "made", unit="episode")
    rows, reader = TensorDict.load_memmap(tmp_path / "made"), open_steps(tmp_path / "made")
    reader.verify_files()
    found, table = rows["episode"].reshape(-1), reader.episodes
    assert (rows["episode"].dtype, rows["episode"].shape[1:]) == (getattr(torch, dtype), shape)
    if dtype.startswith("float"):
        assert set(found.tolist()) == {0, 1}  # these are no episode numbers: they stay as they are
        return
    assert found.tolist() == np.repeat(table.episode, table.length).tolist()
    assert len(set(table.episode.tolist())) == len(table) > 4
    assert reader.manifest.ranges["episode",] == (int(found.min()), int(found.max()))


def test_an_element_type_without_room_for_new_episode_numbers_is_refused(walks: Path, tmp_path: Path) -> None:
    def full(td):
        td["episode"] = torch.full((len(td),), 127, dtype=torch.int8)
        return td

    first = run(walks, lambda td: td.set("episode", td["episode"] + 127), tmp_path / "high")
    assert first.episodes == 4
    with pytest.raises(rbtool.SchemaError, match="episode 131 needs a number of its own, and int8 has no room"):
        run(tmp_path / "high", full, tmp_path / "made")


def test_ends_without_a_flag_are_noted(walks: Path, tmp_path: Path) -> None:
    def function(td):
        td["next", "truncated"].zero_()
        return td

    result = run(walks, function, tmp_path / "made")
    assert "2 episodes end with neither terminated nor truncated" in result.notes[0]
    assert open_steps(tmp_path / "made").episodes.end_reason.tolist() == [0, 3, 3, 0]


@pytest.mark.parametrize(("steps", "lengths", "reason"), [(20, [6, 1, 9, 4], 2), (7, [6, 1], 1), (11, [6, 1, 4], 3)])
def test_only_the_first_steps_are_used(walks, tmp_path, steps: int, lengths: list[int], reason: int) -> None:
    ends = []

    def look(td):
        ends.extend((td["next", "truncated"] & td["next", "done"]).squeeze(-1).tolist())
        return td

    result = run(walks, look, tmp_path / "made", num_frames=steps)
    table = open_steps(tmp_path / "made").episodes
    assert (result.steps, table.length.tolist(), int(table.end_reason[-1])) == (steps, lengths, reason)
    assert len(ends) == steps
    assert ends[-1] == (steps != 6)
    assert len(open_steps(tmp_path / "made").episode_text or []) == len(lengths)
    whole = TensorDict.load_memmap(walks)[:steps]
    assert same(TensorDict.load_memmap(tmp_path / "made")["observation"], whole["observation"])
    assert float(table.total_reward[-1]) == pytest.approx(float(whole["next", "reward"][-lengths[-1] :].sum()))


def test_the_return_of_a_cut_episode_is_summed_again_even_without_reward(walks: Path, tmp_path: Path) -> None:
    run(walks, lambda td: td.select("action"), tmp_path / "made", num_frames=11)
    expected = TensorDict.load_memmap(walks)["next", "reward"][7:11].sum()
    assert float(open_steps(tmp_path / "made").episodes.total_reward[-1]) == pytest.approx(float(expected))


@pytest.mark.parametrize("unit", ["step", "row", "episode"])
def test_an_element_type_that_the_function_changes_is_noted(walks: Path, tmp_path: Path, unit: str) -> None:
    def function(td):
        td["observation"] = td["observation"].half()
        td["own"] = td["action"].double()
        return td

    note, _ = run(walks, function, tmp_path / "made", unit=unit).notes
    assert note.endswith("changes the element type of observation from float64 to float16")


def test_the_manifest_of_the_result_has_its_provenance(walks: Path, tmp_path: Path) -> None:
    prep = tmp_path / "prep.py"
    prep.write_text("def same(td): return td")
    run(walks, f"{prep}:same", tmp_path / "made", num_frames=9)
    source, made = Manifest.load(walks), Manifest.load(tmp_path / "made")
    step = made.provenance[-1]
    assert made.provenance[:-1] == source.provenance
    asked = {"function": "prep.py:same", "unit": "step", "chunk_size": 7, "num_frames": 9, "seed": 0}
    assert (step.verb, step.arguments) == ("preprocess", asked)
    assert step.inputs["content_digest"] == source.content_digest
    assert step.inputs["prep.py"].startswith("xxh3-128:")
    assert (made.request.source, made.request.id) == ("preprocess", source.request.id)
    assert made.request.asked == str(walks)


@pytest.mark.parametrize("changed", [False, True])
def test_a_space_is_kept_only_while_it_fits(tmp_path: Path, changed: bool) -> None:
    write_walks(tmp_path / "walks", EPISODES)
    manifest = Manifest.load(tmp_path / "walks")
    assert "observation" in manifest.spaces

    def function(td):
        return td.set("observation", td["observation"].float()) if changed else td

    result = run(tmp_path / "walks", function, tmp_path / "made")
    made = Manifest.load(tmp_path / "made")
    assert made.spaces == ({} if changed else manifest.spaces)
    assert result.notes[1:] == (("the observation space no longer fits the data: left out",) if changed else ())
    assert ("the element type of observation from" in "".join(result.notes)) is changed
    assert TedReader(tmp_path / "made").documents().keys() - {ENV_METADATA} == {"metadata.json"}


def test_fields_keep_their_roles_and_those_left_out_are_named(walks: Path, tmp_path: Path) -> None:
    run(walks, lambda td: td.set("goal", td["action"]), tmp_path / "made")
    roles = {field.name: field.role for field in Manifest.load(tmp_path / "made").fields}
    assert {name: roles[name] for name in ("action", "info.success", "next.reward", "goal")} == {
        "action": "action", "info.success": "info", "next.reward": "reward", "goal": "observation",
    }  # fmt: skip
    made = run(walks, lambda rows: rows.exclude("next"), tmp_path / "out")
    dropped = {entry["key"]: entry["why"] for entry in made.dropped_keys}
    assert sorted(dropped) == sorted(field.name for field in Manifest.load(walks).fields if field.key[0] == "next")
    assert all("leaves it out" in why for why in dropped.values())
    assert not run(walks, scaled, tmp_path / "whole").dropped_keys


def test_notes_of_the_source_are_kept_and_not_returned_again(tmp_path: Path) -> None:
    source = Manifest.load(write_shown(tmp_path / "shown"))
    left = {"exclude": "choice"}
    found = rbtool.preprocess(tmp_path / "shown", dest=tmp_path / "made", operations=left, num_workers=0)
    made = Manifest.load(tmp_path / "made")
    assert (found.notes, found.renamed_keys, [item["key"] for item in found.dropped_keys]) == ((), {}, ["choice"])
    assert (made.notes, made.renamed_keys) == (source.notes, source.renamed_keys) == (("plain",), {"plain": "plain"})
    assert made.dropped_keys[0] == source.dropped_keys[0]


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
def test_checkpoints_are_read_as_they_are(walks: Path, tmp_path: Path, form: str) -> None:
    saved = tmp_path / f"saved.{form}"
    with open_steps(walks) as reader:
        save_checkpoint(reader, saved, form)
    one, other = run(saved, scaled, tmp_path / "one"), run(walks, scaled, tmp_path / "other")
    assert one.content_digest == other.content_digest


def test_a_tensordict_folder_without_a_manifest_is_read(walks: Path, tmp_path: Path) -> None:
    TensorDict.load_memmap(walks).clone().memmap(tmp_path / "plain")
    result = run(tmp_path / "plain", scaled, tmp_path / "made")
    assert (result.steps, result.episodes) == (STEPS, 4)
    whole = scaled(TensorDict.load_memmap(walks).clone())
    assert same(TensorDict.load_memmap(tmp_path / "made")["observation"], whole["observation"])


def test_random_numbers_are_seeded_by_the_chunk_and_put_back(walks: Path, tmp_path: Path) -> None:
    import random

    def noise(td):
        draws = torch.rand(len(td)) + random.random() + np.random.rand()  # noqa: NPY002
        return {"noise": draws}

    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    found = [torch.rand(())]
    digests = {run(walks, noise, tmp_path / f"{number}").content_digest for number in range(2)}
    assert len(digests) == 1
    assert torch.equal(torch.stack([*found, torch.rand(())]), expected)
    assert TensorDict.load_memmap(tmp_path / "0")["noise"].unique().numel() == STEPS


# What is made of a source that is damaged, or that changes meanwhile, is not published, and not gone on with.


def require_alone(walks: Path) -> None:
    """Nothing was published beside the dataset."""
    assert sorted(entry.name for entry in walks.parent.iterdir()) == ["walks"]


@pytest.fixture
def many_walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES * 5)
    return tmp_path / "walks"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", [pytest.param("early", marks=pytest.mark.slow), "late"])
def test_a_source_that_changes_meanwhile_is_not_published(many_walks, tmp_path, workers: int, where: str) -> None:
    file = many_walks / "observation.memmap"
    place = 8 if where == "early" else file.stat().st_size - 8
    first = TedReader(many_walks).read(("observation",), 0, 1)[0, 0]

    def function(td):
        if td["observation"][0, 0].item() == first:
            with file.open("r+b") as opened:
                opened.seek(place)
                opened.write(b"changed!")
        return td

    with pytest.raises(rbtool.CorruptDataError, match=r"was changed (while it was read|after it was written)"):
        rbtool.preprocess(many_walks, function, tmp_path / "made", num_workers=workers, chunk_size=9)
    require_alone(many_walks)


def test_a_change_that_came_after_the_check_is_seen(many_walks: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TedReader, "verify_files", lambda self: None)

    def function(td):
        (many_walks / "action.memmap").touch()
        return td

    with pytest.raises(rbtool.CorruptDataError, match=r"walks was changed while it was read"):
        rbtool.preprocess(many_walks, function, tmp_path / "made", num_workers=0, chunk_size=9)
    require_alone(many_walks)


def test_damage_ends_the_run_as_soon_as_it_is_known(many_walks: Path, tmp_path: Path, monkeypatch) -> None:
    calls = []

    def verify(self):
        raise rbtool.CorruptDataError("damaged")

    def function(td):
        calls.append(len(td))
        return td

    monkeypatch.setattr(TedReader, "verify_files", verify)
    with pytest.raises(rbtool.CorruptDataError, match="damaged"):
        rbtool.preprocess(many_walks, function, tmp_path / "made", num_workers=0, chunk_size=1)
    assert len(calls) < 100
    require_alone(many_walks)


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_that_are_not_read_are_left_to_check(many_walks: Path, tmp_path: Path, workers: int) -> None:
    chosen = {"select": ["observation"]}
    rbtool.preprocess(many_walks, None, tmp_path / "sound", operations=chosen, num_workers=workers, chunk_size=9)
    damaged(many_walks / "action.memmap")
    rbtool.preprocess(many_walks, None, tmp_path / "made", operations=chosen, num_workers=workers, chunk_size=9)
    digests = [TedReader(tmp_path / name).manifest.content_digest for name in ("sound", "made")]
    assert digests[0] == digests[1]
    with TedReader(many_walks) as reader, pytest.raises(CorruptDataError):
        reader.verify_files()


@pytest.mark.parametrize("file", ["action.memmap", "next/reward.memmap", "next/terminated.memmap"])
@pytest.mark.parametrize("operations", [None, {"select": ["action"]}])
def test_damage_of_what_is_read_is_seen(many_walks: Path, tmp_path: Path, file: str, operations: object) -> None:
    damaged(many_walks / file)
    function = None if operations else lambda td: td
    with pytest.raises(rbtool.CorruptDataError, match="was changed after it was written"):
        rbtool.preprocess(many_walks, function, tmp_path / "made", operations=operations, num_workers=0)
    require_alone(many_walks)


def test_chunks_of_other_files_are_not_resumed(many_walks: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mended"

    def function(td):
        if td["episode"][0] > 10 and not mark.exists():
            raise OSError("the file server is away")
        return td

    def run(**options) -> None:
        rbtool.preprocess(many_walks, function, tmp_path / "made", num_workers=0, chunk_size=9, **options)

    with pytest.raises(rbtool.RbtoolError, match="file server"):
        run()
    mark.touch()
    os.utime(many_walks / "observation.memmap", ns=(0, 0))
    with pytest.raises(rbtool.UsageError, match=r"is another one: files of the source differ"):
        run(resume=True)
    run()
    assert TedReader(tmp_path / "made").manifest.content_digest == TedReader(many_walks).manifest.content_digest
