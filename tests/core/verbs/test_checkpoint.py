"""The verbs around checkpoints: what they publish, leave alone and refuse."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensordict import TensorDict

import rbtool
from rbtool import CorruptDataError, DatasetNotFoundError, FormatError, OutOfSpaceError, UsageError
from rbtool.core.encodings.compact import Form
from rbtool.core.format import fs
from rbtool.core.format.manifest import Manifest
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.staging import Staging
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import checkpoint

EPISODES = [(4, "terminated"), (1, "open"), (3, "both")]
FORMS: list[Form] = ["ted", "flat", "nested", "h5"]
any_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@any_form
def test_save_verify_load(walks: Path, tmp_path: Path, form: Form) -> None:
    saved = checkpoint.save(walks, tmp_path / "saved", form=form)
    assert (saved.path, saved.layout, saved.steps, saved.episodes) == (tmp_path / "saved", form, 8, 3)
    assert checkpoint.verify(tmp_path / "saved", walks).equal
    loaded = checkpoint.load(tmp_path / "saved", tmp_path / "loaded")
    assert loaded.content_digest == saved.dataset_digest == Manifest.load(walks).content_digest
    assert (loaded.form, loaded.layout) == (form, "ted")
    assert _names(tmp_path) == ["loaded", "saved", "walks"]


@any_form
def test_results_are_documents(walks: Path, tmp_path: Path, form: Form) -> None:
    results = [
        checkpoint.save(walks, tmp_path / "saved", form=form),
        checkpoint.load(tmp_path / "saved", tmp_path / "loaded"),
        checkpoint.verify(tmp_path / "saved", walks),
    ]
    documents = [json.loads(json.dumps(to_document(result), allow_nan=False)) for result in results]
    assert [document["kind"] for document in documents] == ["checkpoint save", "checkpoint load", "checkpoint verify"]
    assert documents[0]["bytes"] > 0


@any_form
def test_an_equal_one_is_already_there(walks: Path, tmp_path: Path, form: Form) -> None:
    first = checkpoint.save(walks, tmp_path / "saved", form=form)
    again = checkpoint.save(walks, tmp_path / "saved", form=form)
    assert again.already_there
    assert again.content_digest == first.content_digest
    checkpoint.load(tmp_path / "saved", tmp_path / "loaded")
    assert checkpoint.load(tmp_path / "saved", tmp_path / "loaded").already_there


def _other_form(walks: Path, dest: Path) -> None:
    checkpoint.save(walks, dest, form="nested")


def _other_data(walks: Path, dest: Path) -> None:
    write_walks(walks.with_name("more"), [(2, "open")])
    checkpoint.save(walks.with_name("more"), dest, form="h5")


def _other_compression(walks: Path, dest: Path) -> None:
    checkpoint.save(walks, dest, form="h5", compression="gzip")


@pytest.mark.parametrize("older", [_other_form, _other_data, _other_compression])
def test_another_one_is_replaced_only_with_force(
    walks: Path, tmp_path: Path, older: Callable[[Path, Path], None]
) -> None:
    older(walks, tmp_path / "saved")
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.save(walks, tmp_path / "saved", form="h5")
    assert not checkpoint.save(walks, tmp_path / "saved", form="h5", force=True).already_there
    assert checkpoint.verify(tmp_path / "saved", walks).equal


@any_form
def test_what_is_not_ours_is_left_alone(walks: Path, tmp_path: Path, form: Form) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(UsageError, match="left unchanged"):
        checkpoint.save(walks, tmp_path / "mine", form=form, force=True)
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"


@any_form
def test_a_dry_run_writes_nothing(walks: Path, tmp_path: Path, form: Form) -> None:
    before = _names(tmp_path)
    said = checkpoint.save(walks, tmp_path / "new/saved", form=form, dry_run=True)
    assert (said.dry_run, said.layout, said.steps, said.content_digest) == (True, form, 8, None)
    assert said.bytes > 0
    assert _names(tmp_path) == before


def test_a_dry_load_writes_nothing(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "saved", form="h5")
    said = checkpoint.load(tmp_path / "saved", tmp_path / "loaded", dry_run=True)
    assert (said.dry_run, said.content_digest) == (True, Manifest.load(walks).content_digest)
    assert not (tmp_path / "loaded").exists()


def test_a_dry_run_refuses_what_the_run_would(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "saved", form="ted")
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.save(walks, tmp_path / "saved", form="flat", dry_run=True)


@pytest.mark.parametrize("dest", ["walks", "walks/inside", "walks/.rbtool/saved.h5", "."])
def test_a_destination_that_overlaps_the_source_is_refused(walks: Path, dest: str) -> None:
    before = Manifest.load(walks)
    with pytest.raises(UsageError, match="overlap"):
        checkpoint.save(walks, walks.parent / dest, form="h5", force=True)
    assert Manifest.load(walks) == before


def test_a_link_to_the_source_overlaps_it_too(walks: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(walks)
    with pytest.raises(UsageError, match="overlap"):
        checkpoint.save(walks, tmp_path / "link", form="flat", force=True)


def test_unknown_forms_and_compression_are_refused(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint form 'zip'"):
        checkpoint.save(walks, tmp_path / "saved", form="zip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be compressed"):
        checkpoint.save(walks, tmp_path / "saved", form="flat", compression="gzip")
    with pytest.raises(UsageError, match="'zstd' is not known"):
        checkpoint.save(walks, tmp_path / "saved", form="h5", compression="zstd")


def test_a_plain_tensordict_is_not_saved(walks: Path, tmp_path: Path) -> None:
    TensorDict.load_memmap(walks).clone().memmap(tmp_path / "plain")
    with pytest.raises(FormatError, match="have no manifest"):
        checkpoint.save(tmp_path / "plain", tmp_path / "saved", form="flat")


def test_a_dataset_is_no_checkpoint(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a dataset, not a checkpoint"):
        checkpoint.load(walks, tmp_path / "loaded")
    with pytest.raises(UsageError, match="is a dataset, not a checkpoint"):
        checkpoint.verify(walks, walks)


def test_nothing_there_is_not_found(walks: Path, tmp_path: Path) -> None:
    for call in (
        lambda: checkpoint.save(tmp_path / "none", tmp_path / "saved", form="h5"),
        lambda: checkpoint.load(tmp_path / "none", tmp_path / "loaded"),
        lambda: checkpoint.verify(tmp_path / "none", walks),
    ):
        with pytest.raises(DatasetNotFoundError):
            call()


def test_a_dataset_is_found_by_its_id(tmp_path: Path) -> None:
    write_walks(tmp_path / "root/made/walk-v0", EPISODES)
    checkpoint.save("made:walk-v0", tmp_path / "saved", form="flat", root=tmp_path / "root")
    assert checkpoint.verify(tmp_path / "saved", "made:walk-v0", root=tmp_path / "root").equal


def test_a_checkpoint_is_saved_in_another_form(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "first", form="h5", compression="gzip")
    second = checkpoint.save(tmp_path / "first", tmp_path / "second", form="nested")
    assert second.dataset_digest == Manifest.load(walks).content_digest
    assert checkpoint.verify(tmp_path / "second", tmp_path / "first").equal


@any_form
def test_verify_tells_what_differs(walks: Path, tmp_path: Path, form: Form) -> None:
    checkpoint.save(walks, tmp_path / "saved", form=form)
    path = walks / "action.memmap"
    rows = np.fromfile(path, np.float32).reshape(-1, 2)
    rows[5] = 0
    path.write_bytes(rows.tobytes())
    found = checkpoint.verify(tmp_path / "saved", walks)
    assert not found.equal
    assert [dataclasses.astuple(difference) for difference in found.differences] == [("action", "rows differ", 1, 5, 2)]


@any_form
def test_a_damaged_checkpoint_gives_nothing(walks: Path, tmp_path: Path, form: Form) -> None:
    checkpoint.save(walks, tmp_path / "saved", form=form)
    path = tmp_path / "saved" if form == "h5" else tmp_path / "saved/action.memmap"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    for call in (
        lambda: checkpoint.verify(tmp_path / "saved", walks),
        lambda: checkpoint.load(tmp_path / "saved", tmp_path / "loaded"),
    ):
        with pytest.raises(CorruptDataError, match="saved"):
            call()
    assert _names(tmp_path) == ["saved", "walks"]


@any_form
def test_another_process_was_quicker(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    publish = Staging.publish

    def late(staging: Staging, name: str | None = None) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "publish", publish)
            checkpoint.save(walks, staging.destination, form=form)
        return publish(staging, name)

    monkeypatch.setattr(Staging, "publish", late)
    assert checkpoint.save(walks, tmp_path / "saved", form=form).already_there
    assert _names(tmp_path) == ["saved", "walks"]


def test_another_process_loaded_it_quicker(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Staging.publish

    def late(staging: Staging, name: str | None = None) -> bool:
        write_walks(staging.destination, EPISODES)
        return publish(staging, name)

    checkpoint.save(walks, tmp_path / "saved", form="h5")
    monkeypatch.setattr(Staging, "publish", late)
    assert checkpoint.load(tmp_path / "saved", tmp_path / "loaded").already_there


def test_a_damaged_one_in_the_way_is_not_taken_for_equal(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "saved", form="flat")
    (tmp_path / "saved/action.memmap").unlink()
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.save(walks, tmp_path / "saved", form="flat")
    assert not checkpoint.save(walks, tmp_path / "saved", form="flat", force=True).already_there


def test_another_process_put_something_else_there(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Staging.publish

    def late(staging: Staging, name: str | None = None) -> bool:
        write_walks(staging.destination, [(2, "open")])
        return publish(staging, name)

    monkeypatch.setattr(Staging, "publish", late)
    with pytest.raises(UsageError, match="another process"):
        checkpoint.save(walks, tmp_path / "saved", form="flat")
    assert Manifest.load(tmp_path / "saved").steps == 2


def test_too_little_space_is_known_before(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "free_space", lambda path: 100)
    checkpoint_size = TedReader(walks).manifest.bytes
    assert checkpoint_size > 100
    for form in FORMS:
        with pytest.raises(OutOfSpaceError, match="100 bytes free"):
            checkpoint.save(walks, tmp_path / "saved", form=form)
    assert _names(tmp_path) == ["walks"]


def test_the_public_name() -> None:
    assert rbtool.checkpoint.save is checkpoint.save


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_damaged_result_is_not_taken_for_a_finished_one(walks: Path, tmp_path: Path, verb: str) -> None:
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    checkpoint.save(walks, saved, form="ted")
    checkpoint.load(saved, loaded)
    (saved if verb == "save" else loaded).joinpath("observation.memmap").unlink()
    with pytest.raises(UsageError, match="already exists"):
        _ = checkpoint.save(walks, saved, form="ted") if verb == "save" else checkpoint.load(saved, loaded)


@pytest.mark.parametrize("form", ["ted", "flat", "nested", "h5"])
def test_save_waits_for_what_each_level_promises(form: Form, tmp_path: Path, synced: list[str]) -> None:
    write_walks(tmp_path / "walks", [(30, "terminated"), (20, "truncated")])
    synced.clear()
    rbtool.checkpoint.save(tmp_path / "walks", tmp_path / "none", form=form, durable="none")
    assert synced == []
    rbtool.checkpoint.save(tmp_path / "walks", tmp_path / "data", form=form, durable="data")
    assert "file" in synced
    assert "folder" not in synced
    assert rbtool.checkpoint.verify(tmp_path / "none", tmp_path / "walks").equal
