"""Verbs on datasets in layout `packed`, and `load_dataset` of what verbs write."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rbtool
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.encodings.compact import compare_steps
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.preprocess import preprocess
from rbtool.core.testing.datasets import relist, write_walks
from rbtool.core.verbs import checkpoint
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.download import download
from rbtool.core.verbs.inspect import inspect
from rbtool.core.verbs.list import list_datasets
from rbtool.core.verbs.sample import sample

DATA = Path(__file__).parents[2] / "data" / "minari"
CARTPOLE = DATA / "cartpole" / "scripted-v0"


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(6, "terminated"), (1, "open"), (4, "truncated")])
    convert(tmp_path / "walks", tmp_path / "packed", layout="packed")
    return tmp_path / "walks"


def differences(one: Path, other: Path) -> list[object]:
    with open_steps(one) as here, open_steps(other) as there:
        there.verify_files()
        return [*compare_steps(here, there)]


@pytest.mark.parametrize("compress", [[], ["observation=zstd:1", "action=lz4"]])
def test_a_dataset_is_packed_and_unpacked(walks: Path, tmp_path: Path, compress: list[str]) -> None:
    packed = convert(walks, tmp_path / "small", layout="packed", compress=compress)
    assert (packed.layout, packed.steps, packed.request["layout"]) == ("packed", 11, "packed")
    assert differences(walks, tmp_path / "small") == []
    back = convert(tmp_path / "small", tmp_path / "back")
    assert back.content_digest == Manifest.load(walks).content_digest
    assert [step.verb for step in Manifest.load(tmp_path / "back").provenance][-2:] == ["convert", "convert"]
    assert convert(walks, tmp_path / "small", layout="packed", compress=compress[::-1]).already_there


def test_a_raw_dataset_is_converted_to_packed_at_once(tmp_path: Path) -> None:
    ted = convert(CARTPOLE, tmp_path / "ted")
    planned = convert(CARTPOLE, tmp_path / "packed", layout="packed", dry_run=True)
    packed = convert(CARTPOLE, tmp_path / "packed", layout="packed")
    assert (planned.layout, packed.layout) == ("packed", "packed")
    assert 0.9 < planned.bytes / packed.bytes < 1.1
    assert packed.bytes < 0.85 * ted.bytes
    assert differences(tmp_path / "ted", tmp_path / "packed") == []
    assert convert(CARTPOLE, tmp_path / "packed", layout="packed").already_there


def test_a_download_takes_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(DATA))
    root = tmp_path / "root"
    ted = download("minari", "cartpole/scripted-v0", local=True, root=root)
    packed = download("minari", "cartpole/scripted-v0", local=True, root=root, layout="packed")
    assert packed.path.name.startswith("scripted-v0@")
    assert differences(ted.path, packed.path) == []
    assert download("minari", "cartpole/scripted-v0", local=True, root=root, layout="packed").already_there
    assert [entry.layout for entry in list_datasets(root=root).datasets] == ["ted", "packed"]


def test_check_sample_and_inspect_agree_on_both_layouts(walks: Path, tmp_path: Path) -> None:
    assert check(tmp_path / "packed").findings == check(walks).findings
    one, other = sample(walks, 20, seed=1), sample(tmp_path / "packed", 20, seed=1)
    assert (one.indices, one.fields, one.episodes) == (other.indices, other.fields, other.episodes)
    ted, packed = inspect(walks, episode=1), inspect(tmp_path / "packed", episode=1)
    assert (ted.layout, packed.layout, ted.bytes_saved) == ("ted", "packed", 0)
    assert packed.layouts["ted"] == sum(field.bytes for field in packed.fields)
    files = [path for path in (tmp_path / "packed").glob("*") if path.is_file()]
    assert packed.layouts["packed"] == sum(path.stat().st_size for path in files)
    assert packed.bytes_saved == max(0, packed.layouts["ted"] - packed.layouts["packed"])
    assert (packed.fields, packed.episode, packed.ends) == (ted.fields, ted.episode, ted.ends)


def edit_schema(packed: Path, change: dict[str, object], entry: dict[str, object]) -> None:
    """Change `schema.json` and its first field, and make the manifest agree."""
    document = json.loads((packed / "schema.json").read_text())
    document |= change
    document["fields"][0] |= entry
    (packed / "schema.json").write_text(json.dumps(document))
    relist(packed)


@pytest.mark.parametrize(
    ("change", "entry", "match"),
    [
        ({"version": 2}, {}, "has version 2, this rbtool reads up to 1"),
        ({}, {"codec": "brotli:3"}, "the codec 'brotli:3' is unknown; known: zstd"),
        ({"format": "another"}, {}, "its format is 'another'"),
        ({}, {"dtype": "float99"}, "expected the key, the type and the shape of a leaf"),
    ],
)
def test_a_schema_of_another_version_is_refused(walks, tmp_path, change, entry, match) -> None:
    edit_schema(tmp_path / "packed", change, entry)
    result = check(tmp_path / "packed")
    (finding,) = result.findings
    assert (finding.rule, finding.severity, result.failed()) == ("TED014", "error", True)
    assert re.search(match, finding.message)
    with pytest.raises(FormatError, match=match):
        convert(tmp_path / "packed", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_check_finds_changed_white_space_in_a_manifest(walks: Path, tmp_path: Path, layout: str) -> None:
    path = walks if layout == "ted" else tmp_path / "packed"
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes().rstrip())
    assert [finding.rule for finding in check(path).findings] == ["TED013"]


def test_check_refuses_a_folder_that_is_no_dataset(walks: Path, tmp_path: Path) -> None:
    (walks / MANIFEST).write_text("{}")
    (tmp_path / "plain").mkdir()
    for path, kind in ((walks, FormatError), (tmp_path / "plain", (FormatError, DatasetNotFoundError))):
        with pytest.raises(kind):
            check(path)


@pytest.mark.parametrize("form", ["ted", "flat", "nested", "h5"])
def test_a_checkpoint_of_a_packed_dataset_restores_ted(walks: Path, tmp_path: Path, form: Any) -> None:
    saved = checkpoint.save(tmp_path / "packed", tmp_path / "saved", form=form)
    assert saved.dataset_digest == Manifest.load(walks).content_digest
    assert checkpoint.verify(tmp_path / "saved", walks).equal
    assert checkpoint.verify(tmp_path / "saved", tmp_path / "packed").equal
    assert checkpoint.load(tmp_path / "saved", tmp_path / "loaded").content_digest == saved.dataset_digest


@pytest.mark.parametrize("workers", [0, 2])
def test_preprocess_makes_the_same_of_either_layout(walks: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "prep.py").write_text("def same(rows): return rows")
    one, other = (
        preprocess(path, f"{tmp_path}/prep.py:same", tmp_path / f"made-{path.name}", num_workers=workers)
        for path in (walks, tmp_path / "packed")
    )
    assert one.content_digest == other.content_digest


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layout": "parquet"}, "no dataset layout 'parquet'"),
        ({"compress": ["observation=zstd"]}, "layout ted has no compressed fields"),
        ({"layout": "packed", "compress": ["observation"]}, "names no method"),
        ({"layout": "packed", "compress": ["pixels=zstd"]}, "field 'pixels' not found"),
        ({"layout": "packed", "compress": ["observation=gzip"]}, "codec 'gzip' is unknown"),
        ({"layout": "packed", "compress": ["next.observation=zstd"]}, "is stored with 'observation'"),
        ({"layout": "packed", "compress": ["observation=zstd", "observation=lz4"]}, "twice"),
        ({"episodes": "0:2"}, "--episodes is about raw datasets of other libraries"),
    ],
)
def test_impossible_layouts_and_compressions_are_refused(walks: Path, tmp_path: Path, options: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        convert(walks, tmp_path / "dest", **options)
    assert not (tmp_path / "dest").exists()


def test_another_compression_is_another_dataset(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was compressed in another way"):
        convert(walks, tmp_path / "packed", layout="packed", compress=["observation=zstd"])
    assert convert(walks, tmp_path / "packed", layout="packed", compress=["observation=zstd"], force=True).steps == 11
    write_walks(tmp_path / "other", [(3, "open")], seed=5)
    with pytest.raises(UsageError, match="was made from another dataset"):
        convert(tmp_path / "other", tmp_path / "packed", layout="packed", compress=["observation=zstd"])


def test_a_result_of_preprocess_is_not_taken_for_a_conversion(walks: Path, tmp_path: Path) -> None:
    once, some = tmp_path / "once", tmp_path / "some"
    preprocess(walks, None, once, operations={"clip_reward": "-1:1"}, num_workers=0)
    preprocess(once, None, some, operations={"episodes": "0:1"}, num_workers=0)
    with pytest.raises(UsageError, match="was made from the same dataset by preprocess"):
        convert(once, some)
    assert convert(once, some, force=True).episodes == 3
    assert convert(once, some).already_there


@pytest.mark.parametrize(
    ("form", "compress"),
    [("ted", []), ("flat", ["observation=zstd:1"]), ("nested", []), ("h5", ["observation=zstd:1"]), ("h5", [])],
)
def test_a_checkpoint_becomes_packed_at_once(walks: Path, tmp_path: Path, form: Any, compress: list[str]) -> None:
    saved = checkpoint.save(walks, tmp_path / "saved", form=form).path
    options: dict[str, Any] = {"layout": "packed", "compress": compress}
    afterwards = convert(checkpoint.load(saved, tmp_path / "ted").path, tmp_path / "two steps", **options)
    planned = checkpoint.load(saved, tmp_path / "loaded", dry_run=True, **options)
    assert (planned.layout, planned.dry_run, (tmp_path / "loaded").exists()) == ("packed", True, False)
    loaded, converted = (
        checkpoint.load(saved, tmp_path / "loaded", **options),
        convert(saved, tmp_path / "b", **options),
    )
    assert loaded.content_digest == converted.content_digest == afterwards.content_digest
    assert (loaded.form, loaded.layout, converted.layout) == (form, "packed", "packed")
    assert differences(walks, loaded.path) == []
    assert checkpoint.load(saved, loaded.path, **options).already_there
    assert convert(saved, tmp_path / "back").content_digest == Manifest.load(walks).content_digest


def test_a_checkpoint_of_torchrl_becomes_packed_at_once(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "theirs.h5", form="h5", for_library="torchrl")
    ted = checkpoint.load(tmp_path / "theirs.h5", tmp_path / "ted")
    packed = checkpoint.load(tmp_path / "theirs.h5", tmp_path / "small", layout="packed")
    assert packed.content_digest == convert(ted.path, tmp_path / "again", layout="packed").content_digest
    assert checkpoint.load(tmp_path / "theirs.h5", tmp_path / "small", layout="packed").already_there


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_checkpoint_that_restores_other_data_is_refused(walks: Path, tmp_path: Path, layout: str) -> None:
    """The manifest is sound in itself, but names another dataset."""
    checkpoint.save(walks, tmp_path / "saved", form="flat")
    manifest = Manifest.load(tmp_path / "saved")
    last = replace(manifest.provenance[-1], inputs={"content_digest": "xxh3-128:" + "0" * 32})
    (tmp_path / "saved" / MANIFEST).unlink()
    replace(manifest, provenance=(*manifest.provenance[:-1], last)).save(tmp_path / "saved")
    with pytest.raises(CorruptDataError, match="does not restore the data that was saved"):
        convert(tmp_path / "saved", tmp_path / "dest", layout=layout)
    assert not (tmp_path / "dest").exists()


def test_a_tensordict_folder_becomes_a_dataset(walks: Path, tmp_path: Path) -> None:
    shutil.rmtree(walks / ".rbtool")
    made = convert(walks, tmp_path / "dest", layout="packed")
    assert (made.steps, made.episodes) == (11, 3)


def test_a_dataset_in_the_other_layout_is_not_already_there(walks: Path, tmp_path: Path) -> None:
    convert(CARTPOLE, tmp_path / "plain")
    digest = Manifest.load(tmp_path / "plain").content_digest
    with pytest.raises(UsageError, match=r"already exists and is dataset \S+, not \S+, layout packed"):
        convert(CARTPOLE, tmp_path / "plain", layout="packed")
    assert Manifest.load(tmp_path / "plain").content_digest == digest


@pytest.mark.parametrize("text", ["[1]", "3", "{}", '{"a":', '{"format": "rbtool packed", "byte_order": "little"}'])
def test_a_broken_schema_is_one_sentence(walks: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "packed" / "schema.json").write_text(text)
    with pytest.raises((FormatError, CorruptDataError), match=r"schema\.json") as raised:
        convert(tmp_path / "packed", tmp_path / "back")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "back").exists()


# `load_dataset` opens all that verbs write.

EPISODES = [(4, "open"), (1, "terminated"), (6, "both"), (2, "truncated")]


@pytest.fixture
def four_walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


def save_form(four_walks: Path, out: Path, form: str) -> Path:
    """Write a dataset as a checkpoint, a saved storage or an export."""
    kind, _, layout = form.rpartition(" ")
    if kind == "export":
        return rbtool.export(four_walks, out / (f"x.{layout}" if layout != "parquet" else "x"), to=layout).path
    if kind == "storage":
        checkpointer = {"flat": rbtool.FlatStorageCheckpointer, "h5": rbtool.H5StorageCheckpointer}[layout]()
        rows = load_dataset(four_walks)[:]
        storage = rbtool.LazyTensorStorage(len(rows), checkpointer=checkpointer)
        storage.set(range(len(rows)), rows)
        storage.dumps(out / "x")
        return out / "x"
    return rbtool.checkpoint.save(four_walks, out / "x.h5", form=layout, for_library=kind or None).path


FORMS = [
    "ted", "flat", "nested", "h5", "torchrl flat", "torchrl nested", "torchrl h5", "storage flat", "storage h5",
    "export h5", "export npz", "export parquet",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_load_dataset_opens_every_form(four_walks: Path, tmp_path: Path, form: str) -> None:
    path, expected = save_form(four_walks, tmp_path, form), load_dataset(four_walks, 4, seed=0)
    buffer = load_dataset(path, 4, seed=0)
    whole = buffer[:].select(*expected[:].keys(True, True)).clone()  # without the root flags of some forms
    assert (whole == expected[:]).all()
    drawn = expected.sample()
    assert (buffer.sample().select(*drawn.keys(True, True)) == drawn).all()
    again = pickle.loads(pickle.dumps(buffer))
    assert (again[:] == buffer[:]).all()
    assert buffer.storage.episode_lengths().tolist() == expected.storage.episode_lengths().tolist()
    assert load_dataset(path, split_trajs=True)[:].shape == load_dataset(four_walks, split_trajs=True)[:].shape
    with pytest.raises(UsageError, match="is not a dataset, and cannot be edited in place"):
        load_dataset(path, mode="r+")
    buffer[:].zero_()
    assert (load_dataset(path)[:] == again[:]).all()
    made = rbtool.convert(path, tmp_path / "made").path
    assert (load_dataset(made)[:].select(*whole.keys(True, True)) == whole).all()
    assert rbtool.check(path).errors == 0
    assert rbtool.inspect(path).steps == rbtool.inspect(four_walks).steps


@pytest.mark.parametrize("form", FORMS)
def test_load_dataset_verifies_forms_with_digests(four_walks: Path, tmp_path: Path, form: str) -> None:
    path = save_form(four_walks, tmp_path, form)
    if form.startswith(("torchrl", "export")):
        with pytest.raises(UsageError, match="has no digests"):
            load_dataset(path, verify=True)
    else:
        assert len(load_dataset(path, verify=True)) == len(load_dataset(four_walks))


def test_an_export_that_does_not_fit_into_memory_is_refused(four_walks: Path, tmp_path: Path, monkeypatch) -> None:
    path = save_form(four_walks, tmp_path, "export h5")
    monkeypatch.setattr("rbtool.core.datasets.storage.exceeds_memory", lambda size: True)
    with pytest.raises(UsageError, match="do not fit into memory") as caught:
        load_dataset(path)
    assert caught.value.hint == f"make a dataset of it: rbtool convert {path} DEST"
