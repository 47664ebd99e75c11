"""Verbs on datasets in layout `packed`, and `load_dataset` of what verbs write."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

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

# The verbs on datasets in layout `packed`: they do what they do on `ted`.

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
def test_a_dataset_goes_to_packed_and_back(walks: Path, tmp_path: Path, compress: list[str]) -> None:
    packed = convert(walks, tmp_path / "small", layout="packed", compress=compress)
    assert (packed.layout, packed.steps, packed.request["layout"]) == ("packed", 11, "packed")
    assert differences(walks, tmp_path / "small") == []
    back = convert(tmp_path / "small", tmp_path / "back")
    assert back.content_digest == Manifest.load(walks).content_digest
    assert [step.verb for step in Manifest.load(tmp_path / "back").provenance][-2:] == ["convert", "convert"]
    assert convert(walks, tmp_path / "small", layout="packed", compress=compress[::-1]).already_there


def test_a_foreign_dataset_becomes_packed_at_once(tmp_path: Path) -> None:
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


def test_check_sample_and_inspect_find_the_same_in_either_layout(walks: Path, tmp_path: Path) -> None:
    assert check(tmp_path / "packed").findings == check(walks).findings
    one, other = sample(walks, 20, seed=1), sample(tmp_path / "packed", 20, seed=1)
    assert (one.indices, one.fields, one.episodes) == (other.indices, other.fields, other.episodes)
    ted, packed = inspect(walks, episode=1), inspect(tmp_path / "packed", episode=1)
    assert (ted.layout, packed.layout, ted.bytes_saved) == ("ted", "packed", 0)
    assert packed.layouts["ted"] == sum(field.bytes for field in packed.fields)
    assert packed.layouts["packed"] == sum(
        path.stat().st_size for path in (tmp_path / "packed").glob("*") if path.is_file()
    )
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
def test_check_finds_what_this_version_cannot_read(walks, tmp_path, change, entry, match) -> None:
    edit_schema(tmp_path / "packed", change, entry)
    result = check(tmp_path / "packed")
    (finding,) = result.findings
    assert (finding.rule, finding.severity, result.failed()) == ("TED014", "error", True)
    assert re.search(match, finding.message)
    with pytest.raises(FormatError, match=match):
        convert(tmp_path / "packed", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_check_finds_white_space_that_was_changed(walks: Path, tmp_path: Path, layout: str) -> None:
    path = walks if layout == "ted" else tmp_path / "packed"
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes().rstrip())
    assert [finding.rule for finding in check(path).findings] == ["TED013"]


def test_what_is_no_dataset_cannot_be_checked(walks: Path, tmp_path: Path) -> None:
    (walks / MANIFEST).write_text("{}")
    (tmp_path / "plain").mkdir()
    for path, kind in ((walks, FormatError), (tmp_path / "plain", (FormatError, DatasetNotFoundError))):
        with pytest.raises(kind):
            check(path)


@pytest.mark.parametrize("form", ["ted", "flat", "nested", "h5"])
def test_a_checkpoint_of_it_is_that_of_ted(walks: Path, tmp_path: Path, form: str) -> None:
    saved = checkpoint.save(tmp_path / "packed", tmp_path / "saved", form=form)  # type: ignore[arg-type]
    assert saved.dataset_digest == Manifest.load(walks).content_digest
    assert checkpoint.verify(tmp_path / "saved", walks).equal
    assert checkpoint.verify(tmp_path / "saved", tmp_path / "packed").equal
    assert checkpoint.load(tmp_path / "saved", tmp_path / "loaded").content_digest == saved.dataset_digest


@pytest.mark.parametrize("workers", [0, 2])
def test_preprocessing_gives_the_same(walks: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "prep.py").write_text("def same(rows):\n    return rows\n")
    function = f"{tmp_path / 'prep.py'}:same"
    one, other = (
        preprocess(path, function, tmp_path / f"made-{path.name}", num_workers=workers)
        for path in (walks, tmp_path / "packed")
    )
    assert one.content_digest == other.content_digest


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_damaged_source_is_refused_and_the_destination_untouched(walks: Path, tmp_path: Path, layout: str) -> None:
    source = walks if layout == "ted" else tmp_path / "packed"
    file = source / ("action.memmap" if layout == "ted" else "records.bin")
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptDataError, match="was changed after it was written"):
        convert(source, tmp_path / "dest", layout="packed")
    assert not (tmp_path / "dest").exists()
    assert not list(tmp_path.glob(".*rbtool-new*"))


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
def test_what_cannot_be_asked_for(walks: Path, tmp_path: Path, options: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        convert(walks, tmp_path / "dest", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "dest").exists()


def test_another_compression_is_another_dataset(walks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was compressed in another way"):
        convert(walks, tmp_path / "packed", layout="packed", compress=["observation=zstd"])
    assert convert(walks, tmp_path / "packed", layout="packed", compress=["observation=zstd"], force=True).steps == 11
    write_walks(tmp_path / "other", [(3, "open")], seed=5)
    with pytest.raises(UsageError, match="was made from another dataset"):
        convert(tmp_path / "other", tmp_path / "packed", layout="packed", compress=["observation=zstd"])


def test_what_preprocess_made_of_the_same_dataset_is_no_conversion(walks: Path, tmp_path: Path) -> None:
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
def test_a_checkpoint_becomes_packed_at_once(walks: Path, tmp_path: Path, form: str, compress: list[str]) -> None:
    checkpoint.save(walks, tmp_path / "saved", form=form)  # type: ignore[arg-type]
    options: dict[str, object] = {"layout": "packed", "compress": compress}
    afterwards = convert(checkpoint.load(tmp_path / "saved", tmp_path / "ted").path, tmp_path / "two steps", **options)  # type: ignore[arg-type]
    planned = checkpoint.load(tmp_path / "saved", tmp_path / "loaded", dry_run=True, **options)  # type: ignore[arg-type]
    assert (planned.layout, planned.dry_run, (tmp_path / "loaded").exists()) == ("packed", True, False)
    loaded = checkpoint.load(tmp_path / "saved", tmp_path / "loaded", **options)  # type: ignore[arg-type]
    converted = convert(tmp_path / "saved", tmp_path / "converted", **options)  # type: ignore[arg-type]
    assert loaded.content_digest == converted.content_digest == afterwards.content_digest
    assert (loaded.form, loaded.layout, converted.layout) == (form, "packed", "packed")
    assert differences(walks, tmp_path / "loaded") == []
    assert checkpoint.load(tmp_path / "saved", tmp_path / "loaded", **options).already_there  # type: ignore[arg-type]
    assert convert(tmp_path / "saved", tmp_path / "back").content_digest == Manifest.load(walks).content_digest


def test_a_checkpoint_of_torchrl_becomes_packed_at_once(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "theirs.h5", form="h5", for_library="torchrl")
    ted = checkpoint.load(tmp_path / "theirs.h5", tmp_path / "ted")
    packed = checkpoint.load(tmp_path / "theirs.h5", tmp_path / "small", layout="packed")
    assert packed.content_digest == convert(ted.path, tmp_path / "again", layout="packed").content_digest
    assert checkpoint.load(tmp_path / "theirs.h5", tmp_path / "small", layout="packed").already_there


def test_a_damaged_checkpoint_leaves_nothing(walks: Path, tmp_path: Path) -> None:
    checkpoint.save(walks, tmp_path / "saved", form="flat")
    data = bytearray((tmp_path / "saved" / "observation.memmap").read_bytes())
    data[5] ^= 1
    (tmp_path / "saved" / "observation.memmap").write_bytes(data)
    for call in (checkpoint.load, convert):
        with pytest.raises(CorruptDataError, match="changed after it was written"):
            call(tmp_path / "saved", tmp_path / "dest", layout="packed")
    assert not (tmp_path / "dest").exists()
    with pytest.raises(UsageError, match="layout ted has no compressed fields"):
        checkpoint.load(tmp_path / "saved", tmp_path / "dest", compress=["observation=zstd"])


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_rows_of_another_dataset_than_was_saved_are_refused(walks: Path, tmp_path: Path, layout: str) -> None:
    """A manifest that is sound in itself, but names another dataset."""
    checkpoint.save(walks, tmp_path / "saved", form="flat")
    manifest = Manifest.load(tmp_path / "saved")
    last = replace(manifest.provenance[-1], inputs={"content_digest": "xxh3-128:" + "0" * 32})
    (tmp_path / "saved" / MANIFEST).unlink()
    replace(manifest, provenance=(*manifest.provenance[:-1], last)).save(tmp_path / "saved")
    with pytest.raises(CorruptDataError, match="does not restore the data that was saved"):
        convert(tmp_path / "saved", tmp_path / "dest", layout=layout)
    assert not (tmp_path / "dest").exists()


def test_a_tensordict_folder_becomes_a_dataset(walks: Path, tmp_path: Path) -> None:
    for path in sorted((walks / ".rbtool").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (walks / ".rbtool").rmdir()
    made = convert(walks, tmp_path / "dest", layout="packed")
    assert (made.steps, made.episodes) == (11, 3)


def test_a_dataset_in_the_other_layout_is_not_replaced_unasked(walks: Path, tmp_path: Path) -> None:
    convert(CARTPOLE, tmp_path / "plain")
    digest = Manifest.load(tmp_path / "plain").content_digest
    with pytest.raises(UsageError, match=r"already exists and is dataset \S+, not \S+, layout packed"):
        convert(CARTPOLE, tmp_path / "plain", layout="packed")
    assert Manifest.load(tmp_path / "plain").content_digest == digest


@pytest.mark.parametrize("text", ["[1]", "3", "{}", '{"a":', '{"format": "rbtool packed", "byte_order": "little"}'])
def test_a_schema_that_is_none_is_said_in_one_sentence(walks: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "packed" / "schema.json").write_text(text)
    with pytest.raises((FormatError, CorruptDataError), match=r"schema\.json") as raised:
        convert(tmp_path / "packed", tmp_path / "back")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "back").exists()


# What verbs write is opened by `load_dataset`, and draws what they draw.

DOOR = "minari:D4RL/door/human-v2"
EPISODES = [(4, "open"), (1, "terminated"), (6, "both"), (2, "truncated")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage root with `minari:D4RL/door/human-v2`, which has these episodes; the network is forbidden."""
    write_walks(tmp_path / "home" / "minari" / "D4RL" / "door" / "human-v2", EPISODES)  # type: ignore[arg-type]
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "no minari"))
    return tmp_path / "home"


@pytest.fixture
def two_walks(tmp_path: Path) -> Path:
    """Four short episodes."""
    write_walks(tmp_path / "walks", EPISODES)  # type: ignore[arg-type]
    return tmp_path / "walks"


def test_it_draws_what_the_command_line_draws(home: Path) -> None:
    found = load_dataset(DOOR, seed=11).sample(20)["index"]
    assert found.tolist() == list(rbtool.sample(DOOR, 20, seed=11).indices)


def save_form(two_walks: Path, out: Path, form: str) -> Path:
    """Save a dataset in a form that is none of a dataset."""
    kind, _, layout = form.rpartition(" ")
    if kind == "export":
        return rbtool.export(two_walks, out / (f"x.{layout}" if layout != "parquet" else "x"), to=layout).path
    if kind == "storage":
        checkpointer = {"flat": rbtool.FlatStorageCheckpointer, "h5": rbtool.H5StorageCheckpointer}[layout]()
        rows = load_dataset(two_walks)[:]
        storage = rbtool.LazyTensorStorage(len(rows), checkpointer=checkpointer)
        storage.set(range(len(rows)), rows)
        storage.dumps(out / "x")
        return out / "x"
    return rbtool.checkpoint.save(two_walks, out / "x.h5", form=layout, for_library=kind or None).path


FORMS = [
    "ted", "flat", "nested", "h5", "torchrl flat", "torchrl nested", "torchrl h5", "storage flat", "storage h5",
    "export h5", "export npz", "export parquet",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_is_written_is_opened(two_walks: Path, tmp_path: Path, form: str) -> None:
    path, expected = save_form(two_walks, tmp_path, form), load_dataset(two_walks, 4, seed=0)
    buffer = load_dataset(path, 4, seed=0)
    whole = (
        buffer[:].select(*expected[:].keys(True, True)).clone()
    )  # of TorchRL's layouts, and of storages, with root flags
    assert (whole == expected[:]).all()
    drawn = expected.sample()
    assert (buffer.sample().select(*drawn.keys(True, True)) == drawn).all()
    again = pickle.loads(pickle.dumps(buffer))
    assert (again[:] == buffer[:]).all()
    lengths = buffer.storage.episode_lengths().tolist()
    assert lengths == expected.storage.episode_lengths().tolist()
    assert load_dataset(path, split_trajs=True)[:].shape == load_dataset(two_walks, split_trajs=True)[:].shape
    with pytest.raises(UsageError, match="is not a dataset, and cannot be edited in place"):
        load_dataset(path, mode="r+")
    buffer[:].zero_()
    assert (load_dataset(path)[:] == again[:]).all()
    made = rbtool.convert(path, tmp_path / "made").path
    assert (load_dataset(made)[:].select(*whole.keys(True, True)) == whole).all()
    assert rbtool.check(path).errors == 0
    assert rbtool.inspect(path).steps == rbtool.inspect(two_walks).steps


@pytest.mark.parametrize("form", FORMS)
def test_verify_needs_digests(two_walks: Path, tmp_path: Path, form: str) -> None:
    path = save_form(two_walks, tmp_path, form)
    if form.startswith(("torchrl", "export")):
        with pytest.raises(UsageError, match="has no digests"):
            load_dataset(path, verify=True)
    else:
        assert len(load_dataset(path, verify=True)) == len(load_dataset(two_walks))


def test_rows_of_an_export_that_do_not_fit_into_memory(two_walks: Path, tmp_path: Path, monkeypatch) -> None:
    path = save_form(two_walks, tmp_path, "export h5")
    monkeypatch.setattr("rbtool.core.datasets.storage.exceeds_memory", lambda size: True)
    with pytest.raises(UsageError, match="do not fit into memory") as caught:
        load_dataset(path)
    assert caught.value.hint == f"make a dataset of it: rbtool convert {path} DEST"
