"""`checkpoint`: saving and loading of datasets, of buffers and for TorchRL."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from processes import run_forked
from tensordict import TensorDict

import rbtool
from rbtool import CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from rbtool.core.encodings.compact import Form
from rbtool.core.errors import SchemaError
from rbtool.core.format.manifest import Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import checkpoint
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect
from rbtool.core.verbs.sample import sample
from rbtool.core.writers.max_value import TensorDictMaxValueWriter

EPISODES = [(4, "terminated"), (1, "open"), (3, "both")]
FORMS: list[Form] = ["ted", "flat", "nested", "h5"]
any_form = pytest.mark.parametrize("form", FORMS)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@any_form
def test_a_saved_checkpoint_verifies_and_loads_as_the_dataset(walks: Path, tmp_path: Path, form: Form) -> None:
    saved = checkpoint.save(walks, tmp_path / "saved", form=form)
    assert (saved.path, saved.layout, saved.steps, saved.episodes) == (tmp_path / "saved", form, 8, 3)
    assert checkpoint.verify(tmp_path / "saved", walks).equal
    loaded = checkpoint.load(tmp_path / "saved", tmp_path / "loaded")
    assert loaded.content_digest == saved.dataset_digest == Manifest.load(walks).content_digest
    assert (loaded.form, loaded.layout) == (form, "ted")
    assert _names(tmp_path) == ["loaded", "saved", "walks"]
    again = checkpoint.save(walks, tmp_path / "saved", form=form)
    assert (again.already_there, again.content_digest) == (True, saved.content_digest)
    assert checkpoint.load(tmp_path / "saved", tmp_path / "loaded").already_there
    rbtool.score(walks, tmp_path / "scored")  # the content digest does not change
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.save(tmp_path / "scored", tmp_path / "saved", form=form)
    checkpoint.save(tmp_path / "scored", tmp_path / "scored-saved", form=form)
    assert checkpoint.save(tmp_path / "scored", tmp_path / "scored-saved", form=form).already_there
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.load(tmp_path / "scored-saved", tmp_path / "loaded")
    results = (saved, loaded, checkpoint.verify(tmp_path / "saved", walks))
    documents = [json.loads(json.dumps(to_document(result), allow_nan=False)) for result in results]
    assert [document["kind"] for document in documents] == ["checkpoint save", "checkpoint load", "checkpoint verify"]
    assert documents[0]["bytes"] > 0


def test_another_checkpoint_is_replaced_only_with_force(walks: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "more", [(2, "open")])
    for number, (dataset, options) in enumerate(
        [
            (walks, {"form": "nested"}),
            (tmp_path / "more", {"form": "h5"}),
            (walks, {"form": "h5", "compression": "gzip"}),
        ]
    ):
        dest = tmp_path / f"saved{number}"
        checkpoint.save(dataset, dest, **options)
        with pytest.raises(UsageError, match="already exists"):
            checkpoint.save(walks, dest, form="h5")
        assert not checkpoint.save(walks, dest, form="h5", force=True).already_there
        assert checkpoint.verify(dest, walks).equal


@any_form
def test_a_dry_run_tells_what_would_be_saved(walks: Path, tmp_path: Path, form: Form) -> None:
    planned = checkpoint.save(walks, tmp_path / "saved", form=form, dry_run=True)
    assert (planned.layout, planned.steps, planned.content_digest) == (form, 8, None)
    assert planned.bytes > 0
    checkpoint.save(walks, tmp_path / "saved", form=form)
    with pytest.raises(UsageError, match="already exists"):
        checkpoint.save(walks, tmp_path / "saved", form="nested" if form != "nested" else "flat", dry_run=True)
    loaded = checkpoint.load(tmp_path / "saved", tmp_path / "loaded", dry_run=True)
    assert (loaded.dry_run, loaded.content_digest) == (True, Manifest.load(walks).content_digest)
    assert _names(tmp_path) == ["saved", "walks"]


def test_unknown_forms_and_compression_are_refused(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="checkpoint form 'zip' not found"):
        checkpoint.save(walks, tmp_path / "saved", form="zip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be compressed"):
        checkpoint.save(walks, tmp_path / "saved", form="flat", compression="gzip")
    with pytest.raises(UsageError, match="'zstd' is not known"):
        checkpoint.save(walks, tmp_path / "saved", form="h5", compression="zstd")


def test_only_datasets_are_saved_and_only_checkpoints_loaded(walks: Path, tmp_path: Path) -> None:
    TensorDict.load_memmap(walks).clone().memmap(tmp_path / "plain")
    with pytest.raises(FormatError, match="have no manifest"):
        checkpoint.save(tmp_path / "plain", tmp_path / "saved", form="flat")
    for call in (lambda: checkpoint.load(walks, tmp_path / "loaded"), lambda: checkpoint.verify(walks, walks)):
        with pytest.raises(UsageError, match="is a dataset, not a checkpoint"):
            call()
    with pytest.raises(DatasetNotFoundError):
        checkpoint.verify(tmp_path / "none", walks)


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
def test_verify_names_rows_that_differ(walks: Path, tmp_path: Path, form: Form) -> None:
    checkpoint.save(walks, tmp_path / "saved", form=form)
    flip(walks / "action.memmap", 5 * 8)  # the first of two numbers in row 5
    found = checkpoint.verify(tmp_path / "saved", walks)
    assert not found.equal
    assert [dataclasses.astuple(difference) for difference in found.differences] == [("action", "rows differ", 1, 5, 2)]


@any_form
def test_a_damaged_checkpoint_is_neither_verified_nor_loaded(walks: Path, tmp_path: Path, form: Form) -> None:
    checkpoint.save(walks, tmp_path / "saved", form=form)
    flip(tmp_path / "saved" if form == "h5" else tmp_path / "saved/action.memmap", -3)
    for call in (
        lambda: checkpoint.verify(tmp_path / "saved", walks),
        lambda: checkpoint.load(tmp_path / "saved", tmp_path / "loaded"),
        lambda: convert(tmp_path / "saved", tmp_path / "loaded", layout="packed"),
    ):
        with pytest.raises(CorruptDataError, match="saved"):
            call()
    assert _names(tmp_path) == ["saved", "walks"]


@any_form
def test_save_syncs_what_its_durability_promises(form: Form, tmp_path: Path, synced: list[str]) -> None:
    write_walks(tmp_path / "walks", [(30, "terminated"), (20, "truncated")])
    synced.clear()
    checkpoint.save(tmp_path / "walks", tmp_path / "none", form=form, durable="none")
    assert synced == []
    checkpoint.save(tmp_path / "walks", tmp_path / "data", form=form, durable="data")
    assert "file" in synced
    assert "folder" not in synced
    assert checkpoint.verify(tmp_path / "none", tmp_path / "walks").equal


# The limit on the size of files is set in a process of its own: it would hit whatever pytest writes as well.
SCRIPT = """
import json, resource, sys
from pathlib import Path
import rbtool
from rbtool.core.verbs import checkpoint

work, form = Path(sys.argv[1]), sys.argv[2]
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
whole = checkpoint.save(work / "walks", work / "whole", form=form)
largest = max(path.stat().st_size for path in [work / "whole", *(work / "whole").rglob("*")] if path.is_file())
stopped = 0
for limit in [0, 1, 100, 4096, *(largest * part // 7 for part in range(1, 7)), largest - 1]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        checkpoint.save(work / "walks", work / "out" / "saved", form=form)
    except rbtool.OutOfSpaceError as error:
        stopped += error.exit_code == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list((work / "out").iterdir()) == [], limit
    again = checkpoint.save(work / "walks", work / "again", form=form, force=True)
    assert again.content_digest == whole.content_digest, limit
    assert checkpoint.verify(work / "again", work / "walks").equal
print(json.dumps(stopped))
"""


@pytest.mark.parametrize("form", ["flat", "h5"])
def test_a_save_that_hits_a_limit_on_file_size_leaves_nothing(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "walks", [(3000, "terminated"), (2000, "truncated")])
    (tmp_path / "out").mkdir()
    done = run_forked(SCRIPT, tmp_path, form)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 11


# `checkpoint load` and `convert` of what buffers saved: the steps become a dataset.

DATA = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
MAKERS: dict[str, Callable[[], Any]] = {
    "flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer,
    "tensors": lambda: None,
}  # fmt: skip
any_buffer_form = pytest.mark.parametrize("form", MAKERS)


def steps(rows: int = 10, ends: tuple[int, ...] = (3, 6), first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + rows)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[list(ends)] = True
    observation = torch.stack([numbers, -numbers], -1).double()
    after = {"observation": observation + torch.tensor([1.0, -1.0]) + 100 * done, "reward": numbers[:, None] / 2}
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    root = {"observation": observation, "action": numbers.int(), "done": torch.zeros_like(done)}
    return TensorDict({**root, "next": {**after, **flags}}, [rows])


def saved(folder: Path, form: str, data: TensorDict, capacity: int = 16, **how: Any) -> Path:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(capacity, checkpointer=MAKERS[form](), **how))
    buffer.extend(data)
    buffer.dumps(folder)
    return folder


def rows_of(path: Path) -> dict[str, np.ndarray]:
    with open_steps(path) as reader:
        return {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}


def place_in(folder: Path, place: str) -> Path:
    """The folder of a buffer, its `storage`, or the steps alone."""
    return next((folder / "storage").glob("*.h5"), folder / "storage") if place == "steps" else folder / place


@any_buffer_form
@pytest.mark.parametrize(("place", "verb"), [("", "load"), ("", "convert"), ("storage", "convert"), ("steps", "load")])
def test_the_checkpoint_of_a_buffer_becomes_a_dataset(form: str, place: str, verb: str, tmp_path: Path) -> None:
    source = place_in(saved(tmp_path / "buffer", form, steps()), place)
    run: Any = checkpoint.load if verb == "load" else convert
    tried = run(source, tmp_path / "dataset", dry_run=True)
    made = run(source, tmp_path / "dataset")
    assert (made.steps, made.episodes, made.boundary["end_of_file"]) == (10, 3, 1)
    assert tried.notes == made.notes == inspect(tmp_path / "dataset").notes
    assert "not finished ends truncated" in made.notes[-1]
    rows, expected = rows_of(tmp_path / "dataset"), steps()
    assert rows["next.done"][:, 0].nonzero()[0].tolist() == [3, 6, 9]
    assert rows["next.truncated"][:, 0].nonzero()[0].tolist() == [9]
    for name in ("observation", "action", "next.observation", "next.reward", "next.terminated", "done"):
        assert np.array_equal(rows[name], expected[tuple(name.split("."))].numpy())
    assert rows["episode"].tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert check(tmp_path / "dataset").findings == ()
    assert run(source, tmp_path / "dataset").already_there


@any_buffer_form
def test_rows_of_a_ring_are_loaded_from_the_oldest_on(form: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, checkpointer=MAKERS[form]()))
    buffer.extend(steps(8))
    buffer.extend(steps(3, (1,), first=8))
    buffer.dumps(tmp_path / "buffer")
    checkpoint.load(tmp_path / "buffer", tmp_path / "dataset")
    assert rows_of(tmp_path / "dataset")["action"].tolist() == [*range(3, 11)]
    assert checkpoint.verify(tmp_path / "buffer", tmp_path / "dataset").equal


@any_buffer_form
def test_lanes_are_loaded_one_after_the_other(form: str, tmp_path: Path) -> None:
    storage = LazyTensorStorage(12, ndim=2, checkpointer=MAKERS[form]())
    storage.set(range(4), torch.stack([steps(4, (1,)), steps(4, (3,), first=50)], 1))
    storage.dumps(tmp_path / "storage")
    loaded = checkpoint.load(tmp_path / "storage", tmp_path / "dataset")
    assert (loaded.episodes, rows_of(tmp_path / "dataset")["action"].tolist()) == (3, [0, 1, 2, 3, 50, 51, 52, 53])


@pytest.mark.parametrize("case", ["td_memmap_wrapped", "td_memmap_partly_7of16", "td_tensor_ndim2_wrapped"])
def test_checkpoints_of_torchrls_tensor_storages_become_datasets(case: str, tmp_path: Path) -> None:
    facts = json.loads((DATA / case / "case.json").read_text())
    loaded = checkpoint.load(DATA / case / "checkpoint", tmp_path / "dataset")
    expected = np.load(DATA / case / "expected.npz")["action"]
    lanes = expected[None] if facts["ndim"] == 1 else np.moveaxis(expected, 1, 0) if expected.shape[0] > 2 else expected
    ordered = lanes[:, np.array(facts["dim0_oldest_first"])].reshape(-1, 2)
    assert loaded.steps == facts["len"]
    assert np.array_equal(rows_of(tmp_path / "dataset")["action"], ordered)
    assert not [finding for finding in check(tmp_path / "dataset").findings if finding.rule != "TED010"]


@any_buffer_form
def test_missing_flags_are_derived_from_done(form: str, tmp_path: Path) -> None:
    data = steps().exclude(("next", "terminated"), ("next", "truncated"), "done")
    checkpoint.load(saved(tmp_path / "buffer", form, data), tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert rows["next.terminated"][:, 0].nonzero()[0].tolist() == [3, 6]
    assert rows["next.truncated"][:, 0].nonzero()[0].tolist() == [9]
    assert check(tmp_path / "dataset").findings == ()


def test_done_keys_of_the_checkpointer_end_episodes(tmp_path: Path) -> None:
    data = steps().exclude(("next", "terminated"), ("next", "truncated"), "done")
    data["next"].rename_key_("done", "over")
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, checkpointer=FlatStorageCheckpointer(done_keys=["over"])))
    buffer.extend(data)
    buffer.dumps(tmp_path / "buffer")
    checkpoint.load(tmp_path / "buffer", tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert rows["next.done"][:, 0].nonzero()[0].tolist() == [3, 6, 9]
    assert rows["next.over"][:, 0].nonzero()[0].tolist() == [3, 6]


def test_a_saved_buffer_becomes_a_packed_dataset(tmp_path: Path) -> None:
    source = saved(tmp_path / "buffer", "flat", steps())
    checkpoint.load(source, tmp_path / "packed", layout="packed")
    convert(source, tmp_path / "ted")
    before, after = rows_of(tmp_path / "ted"), rows_of(tmp_path / "packed")
    assert all(np.array_equal(rows, after[name]) for name, rows in before.items())


@any_buffer_form
def test_a_saved_buffer_is_not_saved_again(form: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "buffer", form, steps())
    with pytest.raises(UsageError, match="is a checkpoint of a buffer") as caught:
        checkpoint.save(source, tmp_path / "again", form="flat")
    assert "rbtool checkpoint load" in str(caught.value.hint)


@any_buffer_form
def test_a_flipped_bit_of_a_saved_buffer_is_found(form: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "buffer", form, steps())
    files = [file for name in ("*.h5", "segment-*", "observation.memmap") for file in (source / "storage").rglob(name)]
    flip(files[0], 40 if form != "h5" else -20)
    with pytest.raises(CorruptDataError):
        checkpoint.load(source, tmp_path / "dataset")
    assert not (tmp_path / "dataset").exists()


def test_rows_that_are_no_tensordicts_are_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(4))
    buffer.dumps(tmp_path / "buffer")
    with pytest.raises(SchemaError, match="steps of episodes need tensordicts"):
        checkpoint.load(tmp_path / "buffer", tmp_path / "dataset")


@pytest.mark.parametrize("verb", [checkpoint.load, convert])
def test_a_list_buffer_is_refused_as_a_buffer(verb: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend([1, 2])
    buffer.dumps(tmp_path / "buffer")
    with pytest.raises(UsageError, match="is the checkpoint of a replay buffer") as caught:
        verb(tmp_path / "buffer", tmp_path / "dataset")
    assert "rb.loads" in str(caught.value.hint)


@pytest.mark.parametrize("form", ["flat", "tensors"])
def test_rows_of_a_max_value_writer_are_refused(form: str, tmp_path: Path) -> None:
    storage, writer = LazyTensorStorage(10, checkpointer=MAKERS[form]()), TensorDictMaxValueWriter(("next", "reward"))
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer)
    buffer.extend(steps())
    buffer.dumps(tmp_path / "buffer")
    for place in ("buffer", "buffer/storage"):
        with pytest.raises(UsageError, match="no temporal order"):
            checkpoint.load(tmp_path / place, tmp_path / "dataset")


# `checkpoint save --for torchrl`, and `load`, `verify` and `inspect` of what TorchRL saved.
CASES = sorted(path.name for path in DATA.glob("*_*") if path.name[0] in "fnh")
TORCHRL_FORMS = ("flat", "nested", "h5")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = next((DATA.parent / "minari" / "pendulum").rglob("main_data.hdf5")).parents[1]
    return convert(source, tmp_path_factory.mktemp("dataset") / "pendulum").path


@pytest.mark.parametrize("form", TORCHRL_FORMS)
def test_a_dataset_goes_to_torchrls_layout_and_back(form: str, dataset: Path, tmp_path: Path) -> None:
    saved = checkpoint.save(dataset, tmp_path / "saved", form=form, for_library="torchrl")  # type: ignore[arg-type]
    assert (saved.layout, saved.content_digest, bool(saved.bytes)) == (form, None, True)
    assert any("episode table" in note for note in saved.notes)
    checkpoint.load(tmp_path / "saved", tmp_path / "again")
    before, after = rows_of(dataset), rows_of(tmp_path / "again")
    assert set(before) == set(after)
    assert all(np.array_equal(rows, after[name]) for name, rows in before.items())
    assert not check(tmp_path / "again").findings
    found = checkpoint.verify(tmp_path / "saved", dataset)
    assert (found.equal, found.differences) == (True, ())
    assert found.notes == ("TorchRL's layout has no place for episodes.seed, episodes.has_seed",)
    again = checkpoint.verify(tmp_path / "saved", tmp_path / "again")
    assert (again.equal, again.notes) == (True, ())


def test_h5_for_torchrl_is_a_file_if_the_destination_names_one(dataset: Path, tmp_path: Path) -> None:
    checkpoint.save(dataset, tmp_path / "one.h5", form="h5", for_library="torchrl", compression="gzip")
    checkpoint.save(dataset, tmp_path / "folder", form="h5", for_library="torchrl")
    assert (tmp_path / "one.h5").is_file()
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["checkpoint.h5"]
    assert checkpoint.verify(tmp_path / "one.h5", tmp_path / "folder" / "checkpoint.h5", root=tmp_path).equal


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_of_torchrl_becomes_a_dataset(case: str, tmp_path: Path) -> None:
    folder = DATA / case
    facts = json.loads((folder / "case.json").read_text())
    loaded = checkpoint.load(folder / "checkpoint", tmp_path / "dataset")
    assert (loaded.steps, loaded.form, loaded.layout) == (facts["len"], facts["kind"], "ted")
    assert not [finding for finding in check(tmp_path / "dataset").findings if finding.rule != "TED010"]
    assert checkpoint.verify(folder / "checkpoint", tmp_path / "dataset").equal
    assert checkpoint.load(folder / "checkpoint", tmp_path / "dataset").already_there
    lost = folder / "torchrl_loads.npz"
    expected = np.load(lost if lost.exists() else folder / "expected.npz")
    order = np.array(facts["dim0_oldest_first"])
    reward = np.moveaxis(expected["next/reward"], facts["ndim"] - 1, -2 if facts["ndim"] > 1 else 0)
    lanes = reward.reshape(-1, reward.shape[-2], 1) if facts["ndim"] > 1 else reward[None]
    found = rows_of(tmp_path / "dataset")["next.reward"]
    if facts["ndim"] < 3:
        assert np.array_equal(found, lanes[:, order].reshape(-1, 1))


def test_an_unfinished_episode_ends_truncated(tmp_path: Path) -> None:
    checkpoint.load(DATA / "flat_partly_7of16" / "checkpoint", tmp_path / "dataset")
    rows = rows_of(tmp_path / "dataset")
    assert (rows["next.done"][-1, 0], rows["next.truncated"][-1, 0], rows["next.terminated"][-1, 0]) == (1, 1, 0)
    assert inspect(tmp_path / "dataset").ends.end_of_file == 1


def test_inspect_and_sample_read_checkpoints_of_torchrl() -> None:
    place = DATA / "h5_wrapped" / "checkpoint"
    told = inspect(place)
    assert (told.type, told.layout, told.steps, told.episodes) == ("checkpoint", "h5", 16, 5)
    assert sample(place, 4, seed=0).n == 4


def test_a_checkpoint_for_torchrl_is_replaced_only_with_force(dataset: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    checkpoint.save(dataset, target, form="flat", for_library="torchrl")
    with pytest.raises(UsageError, match="already exists") as caught:
        checkpoint.save(dataset, target, form="nested", for_library="torchrl")
    assert "--force" in str(caught.value.hint)
    tried = checkpoint.save(dataset, target, form="nested", for_library="torchrl", force=True, dry_run=True)
    assert (tried.dry_run, checkpoint.verify(target, dataset).layout) == (True, "flat")
    checkpoint.save(dataset, target, form="nested", for_library="torchrl", force=True)
    assert checkpoint.verify(target, dataset).layout == "nested"
    for name in ("notes.txt", "notes.json", "mine.memmap"):
        (target / name).write_text("mine")
        with pytest.raises(UsageError, match=f"{name} is not part"):
            checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)
        (target / name).unlink()
    checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)


@pytest.mark.parametrize("case", ["flat_full", "nested_rich_wrapped"])
def test_a_buffer_that_torchrl_saved_is_replaced_when_asked(dataset: Path, tmp_path: Path, case: str) -> None:
    target = tmp_path / "saved"
    shutil.copytree(DATA / case / "checkpoint", target)
    (target / "storage" / "mine.memmap").write_text("mine")
    with pytest.raises(UsageError, match=r"mine\.memmap is not part"):
        checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)
    (target / "storage" / "mine.memmap").unlink()
    checkpoint.save(dataset, target, form="flat", for_library="torchrl", force=True)
    assert checkpoint.verify(target, dataset).layout == "flat"


def test_requests_that_torchrls_layout_cannot_meet_are_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the form ted is not written"):
        checkpoint.save(dataset, tmp_path / "x", form="ted", for_library="torchrl")
    with pytest.raises(UsageError, match="'numpy'"):
        checkpoint.save(dataset, tmp_path / "x", form="flat", for_library="numpy")  # type: ignore[arg-type]
    theirs = DATA / "flat_full" / "checkpoint"
    with pytest.raises(UsageError, match="TorchRL's layout") as caught:
        checkpoint.save(theirs, tmp_path / "x", form="flat")
    assert "checkpoint load" in str(caught.value.hint)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("leaf", "error"), [("next/observation", SchemaError), ("action", CorruptDataError)], ids=["a jump", "damage"]
)
def test_jumps_and_damage_are_not_saved_for_torchrl(leaf: str, error: type[Exception], tmp_path: Path) -> None:
    checkpoint.load(DATA / "flat_full" / "checkpoint", tmp_path / "made")
    flip(tmp_path / "made" / f"{leaf}.memmap", 0)
    with pytest.raises(error):
        checkpoint.save(tmp_path / "made", tmp_path / "x", form="flat", for_library="torchrl")
    assert not (tmp_path / "x").exists()


def test_a_cut_checkpoint_of_torchrl_is_refused(tmp_path: Path) -> None:
    copy = shutil.copytree(DATA / "flat_full" / "checkpoint", tmp_path / "copy")
    place = copy / "storage" / "action.memmap"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match="it was cut"):
        checkpoint.load(copy, tmp_path / "dataset")
    assert not (tmp_path / "dataset").exists()
