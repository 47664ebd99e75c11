"""`convert`: what it publishes, when it leaves things alone, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from minari_oracle import assert_equals_minari
from tensordict import TensorDict

from rbtool.core.errors import DatasetNotFoundError, FormatError, OutOfSpaceError, UsageError
from rbtool.core.format import fs
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import checkpoint
from rbtool.core.verbs.convert import convert

DATA = Path(__file__).parents[2] / "data" / "minari"
CARTPOLE = DATA / "cartpole" / "scripted-v0"


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_the_result_describes_the_dataset(tmp_path: Path, heard: Any) -> None:
    result = convert(CARTPOLE, tmp_path / "ted", progress=heard)
    assert (heard.started, heard.notes) == ([("converting", 4864, "steps")], [])
    assert (sum(heard.advances), heard.ended) == (4864, 1)
    assert (result.kind, result.path, result.source) == ("convert", tmp_path / "ted", CARTPOLE)
    assert (result.steps, result.episodes, result.layout) == (4864, 12, "ted")
    assert result.bytes == sum(record.size for record in Manifest.load(tmp_path / "ted").files)
    assert (sum(result.boundary.values()), result.boundary["end_of_file"]) == (12, 0)
    assert (result.already_there, result.dry_run) == (False, False)
    assert json.loads(json.dumps(to_document(result), allow_nan=False))["kind"] == "convert"


def test_the_manifest_records_source_and_episodes(tmp_path: Path) -> None:
    convert(CARTPOLE, tmp_path / "ted", episodes="2,0:2")
    manifest = Manifest.load(tmp_path / "ted")
    assert (manifest.request.source, manifest.request.id) == ("minari", "cartpole/scripted-v0")
    assert (manifest.request.episodes, manifest.request.origin) == ("0:3", "file")
    (step,) = manifest.provenance
    assert (step.verb, dict(step.arguments)) == ("convert", {"path": str(CARTPOLE), "episodes": "0:3"})
    assert sorted(step.inputs) == ["main_data.hdf5", "metadata.json"]
    assert manifest.resolved_revision
    assert manifest.spaces["action"] == {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}


def test_documents_of_the_source_are_kept(tmp_path: Path) -> None:
    convert(CARTPOLE, tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        documents = reader.documents()
        reader.verify_files()
    assert documents["metadata.json"] == (CARTPOLE / "data" / "metadata.json").read_bytes()
    assert json.loads(documents["env_metadata.json"])["env_spec"]["id"] == "CartPole-v1"


def test_tensordict_opens_the_result(tmp_path: Path) -> None:
    convert(DATA / "griddict" / "random-infos-v0", tmp_path / "ted")
    loaded = TensorDict.load_memmap(tmp_path / "ted")
    assert loaded.batch_size == (181,)
    assert loaded["next", "observation", "agent", "pos"].shape == (181, 2)


def test_an_equal_source_is_already_there(tmp_path: Path) -> None:
    first = convert(CARTPOLE, tmp_path / "ted")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = convert(CARTPOLE, tmp_path / "ted")
    assert second.already_there
    assert second.content_digest == first.content_digest
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    first = convert(CARTPOLE, tmp_path / "one")
    copy = shutil.copytree(CARTPOLE, tmp_path / "copy")
    assert convert(copy / "data", tmp_path / "two").content_digest == first.content_digest
    assert convert(copy, tmp_path / "one").already_there


@pytest.mark.parametrize("episodes", [None, ":", "0:"])
def test_a_choice_of_all_episodes_is_no_choice(episodes: str | None, tmp_path: Path) -> None:
    convert(CARTPOLE, tmp_path / "ted")
    assert convert(CARTPOLE, tmp_path / "ted", episodes=episodes).already_there


def test_chosen_episodes_are_converted(tmp_path: Path) -> None:
    result = convert(CARTPOLE, tmp_path / "ted", episodes="10:12,3")
    assert (result.episodes, result.steps) == (3, 17 + 500 + 500)
    assert assert_equals_minari(tmp_path / "ted", CARTPOLE, [3, 10, 11]) > 0


@pytest.mark.parametrize(
    ("episodes", "sentence"),
    [
        ("12", "asks for episode 12, which is not there"), ("a", "is not understood"), ("", "is not"),
        ("5:5", "holds no"),
    ],
)  # fmt: skip
def test_impossible_episodes_are_refused(episodes: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        convert(CARTPOLE, tmp_path / "ted", episodes=episodes)
    assert list(tmp_path.iterdir()) == []


def _other_source(source: Path, dest: Path) -> str:
    convert(DATA / "pendulum" / "random-v0", dest, force=True)
    return "is dataset minari:pendulum/random-v0, not minari:cartpole/scripted-v0"


def _other_episodes(source: Path, dest: Path) -> str:
    convert(source, dest, episodes="0:2", force=True)
    return "is dataset minari:cartpole/scripted-v0, episodes 0:2, not minari:cartpole/scripted-v0"


def _changed_source(source: Path, dest: Path) -> str:
    path = source / "data" / "metadata.json"
    path.write_text(path.read_text().replace("scripted", "SCRIPTED").replace("cartpole/SCRIPTED", "cartpole/scripted"))
    return "was made from another state of the source"


def _missing_file(source: Path, dest: Path) -> str:
    (dest / "action.memmap").unlink()
    return f"is damaged ({dest / 'action.memmap'} is missing"


def _cut_file(source: Path, dest: Path) -> str:
    os.truncate(dest / "next" / "reward.memmap", 100)
    return f"is damaged ({dest / 'next' / 'reward.memmap'} has 100 bytes, the manifest states"


def _changed_manifest(source: Path, dest: Path) -> str:
    path = dest / ".rbtool" / "manifest.json"
    path.write_text(path.read_text().replace("4864", "4865"))
    return "is damaged ("


DIFFERENCES = (_other_source, _other_episodes, _changed_source, _missing_file, _cut_file, _changed_manifest)


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_different_dataset_is_replaced_only_with_force(change: object, tmp_path: Path) -> None:
    source, dest = shutil.copytree(CARTPOLE, tmp_path / "source"), tmp_path / "ted"
    convert(source, dest)
    why = change(source, dest)  # type: ignore[operator]
    before = tree(dest)
    with pytest.raises(UsageError) as caught:
        convert(source, dest)
    assert caught.value.message.startswith(f"{dest} already exists and {why}")
    assert caught.value.hint == "add --force to replace it"
    assert tree(dest) == before
    assert not convert(source, dest, force=True).already_there
    assert assert_equals_minari(dest, CARTPOLE) > 0


@pytest.mark.parametrize("place", ["", "data", "data/inside", "inside", "..", "link/inside"])
def test_a_destination_that_overlaps_a_raw_source_is_refused(place: str, tmp_path: Path) -> None:
    source = shutil.copytree(CARTPOLE, tmp_path / "deep" / "source")
    (tmp_path / "deep" / "source" / "link").symlink_to(source / "data")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="overlap"):
        convert(source, source / place, force=True)
    assert tree(tmp_path) == before


def test_a_dry_run_tells_what_would_be_made(tmp_path: Path) -> None:
    dry = convert(CARTPOLE, tmp_path / "deep" / "ted", dry_run=True, episodes="3:8")
    assert list(tmp_path.iterdir()) == []
    wet = convert(CARTPOLE, tmp_path / "deep" / "ted", episodes="3:8")
    assert (dry.dry_run, dry.content_digest) == (True, None)
    assert (dry.steps, dry.episodes, dry.boundary) == (wet.steps, wet.episodes, wet.boundary)
    assert abs(dry.bytes - wet.bytes) < 8192
    again = convert(CARTPOLE, tmp_path / "deep" / "ted", dry_run=True, episodes="3:8")
    assert (again.already_there, again.dry_run) == (True, True)
    with pytest.raises(UsageError, match="already exists"):
        convert(CARTPOLE, tmp_path / "deep" / "ted", dry_run=True)


def test_missing_space_and_unknown_sources_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(OutOfSpaceError, match=r"1,000 bytes free, \d+,\d+ are needed"):
        convert(CARTPOLE, tmp_path / "ted")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DatasetNotFoundError, match="not found"):
        convert(tmp_path / "no", tmp_path / "ted")
    with pytest.raises(DatasetNotFoundError, match="is an empty folder"):
        convert(tmp_path, tmp_path / "ted")
    (tmp_path / "notes.txt").write_text("no rows")
    with pytest.raises(FormatError, match="unknown format; supported: "):
        convert(tmp_path, tmp_path / "ted")


def test_an_interrupt_leaves_the_old_dataset(tmp_path: Path, heard: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    write_walks(tmp_path / "ted", [(3, "open")])
    before, heard.meanwhile = tree(tmp_path), interrupt
    with pytest.raises(KeyboardInterrupt):
        convert(CARTPOLE, tmp_path / "ted", force=True, progress=heard)
    assert tree(tmp_path) == before


def test_a_source_without_episodes_becomes_an_empty_dataset(tmp_path: Path) -> None:
    from gymnasium import spaces
    from minari_oracle import write_minari

    source = write_minari(tmp_path, "made/none-v0", spaces.Box(0, 1, (3,)), spaces.Discrete(2), [])
    result = convert(source, tmp_path / "ted")
    assert (result.steps, result.episodes) == (0, 0)
    with TedReader(tmp_path / "ted") as reader:
        assert reader.read(("next", "observation"), 0, 0).shape == (0, 3)
    assert TensorDict.load_memmap(tmp_path / "ted").batch_size == (0,)


def test_a_slow_survey_of_the_source_is_shown(tmp_path: Path, heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbtool.core.verbs.convert._SOON", 0.0)
    convert(CARTPOLE, tmp_path / "ted", progress=heard)
    assert heard.started == [("looking over", None, "episodes"), ("converting", 4864, "steps")]
    assert (sum(heard.advances), heard.ended) == (12 + 4864, 2)


@pytest.mark.parametrize("same", [True, False])
def test_a_dataset_that_appears_before_the_first_write_is_respected(same: bool, tmp_path: Path, monkeypatch) -> None:
    source, dest = CARTPOLE if same else DATA / "pendulum" / "random-v0", tmp_path / "ted"

    def quicker(folder: Path, needed: int) -> None:
        monkeypatch.undo()
        convert(source, dest)

    monkeypatch.setattr(fs, "require_space", quicker)
    if same:
        assert convert(CARTPOLE, dest).already_there
    else:
        with pytest.raises(UsageError, match="already exists and is dataset minari:pendulum"):
            convert(CARTPOLE, dest)
    assert assert_equals_minari(dest, source) > 0


def test_a_checkpoint_at_the_destination_is_refused_as_one(tmp_path: Path) -> None:
    made = convert(CARTPOLE, tmp_path / "dataset")
    checkpoint.save(made.path, tmp_path / "saved", form="flat")
    with pytest.raises(UsageError, match=r"saved already exists and is a checkpoint of minari:\S+, not a dataset"):
        convert(CARTPOLE, tmp_path / "saved")


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_episodes": 2}, {"episodes": "0:2"}),
        ({"max_episodes": 2, "episodes": "3:"}, {"episodes": "3:5"}),
        ({"max_episodes": 2, "skip_bad": True}, {"episodes": "0:2"}),
        ({"max_episodes": 1000}, {}),
    ],
)
def test_max_episodes_takes_the_first_of_the_selected_episodes(given, same, tmp_path) -> None:
    first = convert(CARTPOLE, tmp_path / "first", **given)
    assert first.content_digest == convert(CARTPOLE, tmp_path / "same", **same).content_digest
    manifest = Manifest.load(tmp_path / "first")
    assert manifest.request.options["max_episodes"] == given["max_episodes"]
    assert manifest.provenance[-1].arguments["max_episodes"] == given["max_episodes"]
    assert convert(CARTPOLE, tmp_path / "first", **given).already_there


def test_impossible_max_episodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max-episodes is 0"):
        convert(CARTPOLE, tmp_path / "ted", max_episodes=0)
    convert(CARTPOLE, tmp_path / "ted")
    with pytest.raises(UsageError, match="already exists"):
        convert(CARTPOLE, tmp_path / "ted", max_episodes=1)
    with pytest.raises(UsageError, match="about raw datasets"):  # preprocess chooses episodes of TED
        convert(tmp_path / "ted", tmp_path / "again", max_episodes=1)
    assert not (tmp_path / "again").exists()
