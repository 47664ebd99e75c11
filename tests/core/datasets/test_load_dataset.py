"""`load_dataset`: exact, the same for the same seed, plain about what it does not open; registered names."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rbtool
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.declarations import declared, source_example
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from rbtool.core.format import fs
from rbtool.core.format.locate import KnownNames, Resolution, last_use
from rbtool.core.format.manifest import MANIFEST
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.reader import PackedReader
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.testing.datasets import WALK_FIELDS, walk_pieces, write_mixture, write_packed, write_pieces
from rbtool.core.writers.base import ImmutableDatasetWriter

DOOR = "minari:D4RL/door/human-v2"


def drawn(dataset: Any, count: int = 6, **arguments: Any) -> list[Any]:
    buffer = load_dataset(dataset, 5, **arguments)
    return [buffer.sample() for _ in range(count)]


def test_a_dataset_is_found_by_name_path_and_root(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, at = load_dataset(DOOR, 8), load_dataset(home / "minari/D4RL/door/human-v2", 8)
    assert (len(named), len(at)) == (13, 13)
    assert (named[:] == at[:]).all()
    batch = named.sample()
    assert batch.batch_size == (8,)
    assert (batch.exclude("index") == named[batch["index"]]).all()
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "empty"))
    with pytest.raises(DatasetNotFoundError):
        load_dataset(DOOR)
    assert len(load_dataset(DOOR, root=home)) == 13


@pytest.mark.parametrize("arguments", [{}, {"prefetch": 3}, {"sampler": SamplerWithoutReplacement}])
def test_the_same_seed_gives_the_same_batches(walks: Path, arguments: dict[str, Any]) -> None:
    one, again, other = (drawn(walks, seed=seed, **arguments) for seed in (1, 1, 2))
    assert all((left == right).all() for left, right in zip(one, again, strict=True))
    assert [batch["index"].tolist() for batch in one] != [batch["index"].tolist() for batch in other]


def test_prefetching_and_epochs_change_no_batch(walks: Path) -> None:
    plain, ahead = drawn(walks, seed=5), drawn(walks, seed=5, prefetch=4)
    assert [batch["index"].tolist() for batch in plain] == [batch["index"].tolist() for batch in ahead]
    buffer = load_dataset(walks, 4, sampler=SamplerWithoutReplacement(), seed=0)
    assert sorted(row for batch in buffer for row in batch["index"].tolist()) == list(range(13))
    buffer = load_dataset(walks, 4, transform=lambda batch: batch.set("sum", batch["observation"].sum(-1)))
    batch = buffer.sample()
    assert torch.equal(batch["sum"], batch["observation"].sum(-1))


def test_a_buffer_without_a_seed_has_a_generator_of_its_own(walks: Path) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, other = (load_dataset(walks) for _ in range(2))
    assert one.sample(200)["index"].tolist() != other.sample(200)["index"].tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_restored_buffer_continues_with_the_same_thousand_indices(walks: Path, prefetch: int | None) -> None:
    buffer, other = (load_dataset(walks, 10, seed=seed, prefetch=prefetch) for seed in (3, 4))
    buffer.sample()
    other.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    for _ in range(100):
        assert torch.equal(other.sample()["index"], buffer.sample()["index"])


def test_a_dataset_cannot_be_extended(walks: Path) -> None:
    buffer = load_dataset(walks)
    rows = buffer[:2].clone()
    assert type(buffer.writer) is ImmutableDatasetWriter
    for write in (lambda: buffer.extend(rows), lambda: buffer.add(rows[0]), buffer.empty):
        with pytest.raises(RuntimeError, match="doesn't allow writing"):
            write()
    assert len(buffer) == 13


def test_whole_trajectories_are_sampled_with_a_mask(walks: Path) -> None:
    buffer = load_dataset(walks, 3, split_trajs=True, seed=0)
    batch, info = buffer.sample(return_info=True)
    assert (batch.batch_size, batch["mask"].shape, info["index"].shape) == ((3, 6), (3, 6), (3,))
    assert torch.equal(batch["index"], info["index"].unsqueeze(1).expand(3, 6))
    assert (batch.exclude("index") == buffer[info["index"]]).all()


def test_edits_reach_the_disk_in_mode_r_plus(walks: Path) -> None:
    load_dataset(walks, mode="r+").set_("episode", torch.full((13,), 5))
    assert (load_dataset(walks)[:]["episode"] == 5).all()


@pytest.mark.usefixtures("two_sources")
def test_a_name_that_a_download_resolved_is_found(home: Path) -> None:
    (home / "minari").rename(home / "shelf")
    with pytest.raises(DatasetNotFoundError):
        load_dataset("shelf:door-human-v1")
    KnownNames(home, "shelf").put(Resolution("door-human-v1", "D4RL/door/human-v2", "words"))
    assert len(load_dataset("shelf:door-human-v1")) == 13


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("shelf:D4RL/pen/human-v2", "is not in", "rbtool download shelf D4RL/pen/human-v2"),
        ("no/such/place", "not found", f"{source_example()}:ID"),
        ("unknown:x", "is not in", "known: "),
    ],
)
@pytest.mark.parametrize("argument", ["dataset", "dataset_id"])
@pytest.mark.usefixtures("two_sources")
def test_a_missing_dataset_is_not_found_and_the_hint_helps(
    home: Path, name: str, said: str, hint: str, argument: str
) -> None:
    with pytest.raises(FileNotFoundError, match=said) as caught:
        load_dataset(**{argument: name})
    assert isinstance(caught.value, DatasetNotFoundError)
    assert isinstance(caught.value, ValueError) != name.startswith("shelf:")
    assert hint in caught.value.hint


def test_the_dataset_has_a_second_name_as_an_argument(walks: Path) -> None:
    assert len(load_dataset(dataset_id=walks, seed=0)) == 13
    with pytest.raises(TypeError, match="dataset"):
        load_dataset(walks, dataset_id=walks)
    with pytest.raises(ValueError):
        load_dataset(dataset_id="")


def test_the_checkpoint_of_a_storage_is_refused_with_a_hint(walks: Path, tmp_path: Path) -> None:
    rows = load_dataset(walks)[:]
    storage = rbtool.LazyTensorStorage(len(rows))
    storage.set(range(len(rows)), rows)
    storage.dumps(tmp_path / "saved")
    with pytest.raises(UsageError, match="is the checkpoint of a storage") as caught:
        load_dataset(tmp_path / "saved")
    assert "storage.loads(path)" in caught.value.hint


def test_folders_and_files_that_are_no_datasets_are_named(walks: Path, tmp_path: Path) -> None:
    load_dataset(walks).dumps(tmp_path / "saved")
    with pytest.raises(UsageError, match="checkpoint of a buffer") as caught:
        load_dataset(tmp_path / "saved")
    assert "loads(path)" in caught.value.hint
    load_dataset(walks)[:].memmap(str(tmp_path / "plain"))
    with pytest.raises(UsageError, match="tensordict folder") as caught:
        load_dataset(tmp_path / "plain")
    assert "load_memmap" in caught.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetNotFoundError, match="is an empty folder"):
        load_dataset(tmp_path / "empty")
    (tmp_path / "file").write_bytes(b"hello")
    with pytest.raises(FormatError):
        load_dataset(tmp_path / "file")


@pytest.mark.parametrize("damage", [b"{", b"[1]", b'{"format_version": 99}', None])
def test_a_damaged_manifest_is_refused(walks: Path, damage: bytes | None) -> None:
    fs.remove(walks / MANIFEST)
    if damage is not None:
        (walks / MANIFEST).write_bytes(damage)
    with pytest.raises(FormatError) as caught:
        load_dataset(walks)
    assert damage is not None or isinstance(caught.value, CorruptDataError)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("batch_size", "8"), ("batch_size", True), ("seed", -1), ("seed", 1 << 64), ("mode", "w"),
     ("prefetch", 2)],
)  # fmt: skip
def test_arguments_without_sense_are_refused(walks: Path, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name.replace("_", "[_ ]")):
        load_dataset(walks, **{name: value})


def test_opening_a_dataset_counts_as_a_use(home: Path) -> None:
    folder = home / "minari/D4RL/door/human-v2"
    os.utime(folder / ".rbtool", (1e9, 1e9))
    load_dataset(DOOR)
    assert (last_use(folder) or 0) > 1e9


@pytest.mark.parametrize(("layout", "reader"), [("ted", TedReader), ("packed", PackedReader)])
def test_the_verified_files_are_the_sampled_ones(layout, reader, walks, tmp_path, monkeypatch) -> None:
    first, second, place = tmp_path / "first", tmp_path / "second", tmp_path / "place"
    rbtool.preprocess(walks, lambda rows: rows.set("action", -rows["action"]), tmp_path / "other", num_workers=0)
    for source, copy in ((walks, first), (tmp_path / "other", second)):
        if layout == "packed":
            write_packed(source, copy)
        else:
            shutil.copytree(source, copy)
    expected = load_dataset(first)[:]
    first.rename(place)
    verify = reader.verify_files

    def verify_and_replace(self: Any) -> None:
        verify(self)
        place.rename(first)
        second.rename(place)

    monkeypatch.setattr(reader, "verify_files", verify_and_replace)
    assert (load_dataset(place, verify=True)[:] == expected).all()


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbtool.core.datasets.load_dataset._registered", {})


def loader(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    return arguments, options


@pytest.mark.parametrize("dataset", [loader, f"{__name__}:loader"])
def test_a_registered_loader_gets_the_name_and_the_arguments(dataset: Any) -> None:
    rbtool.register_dataset(" Mine ", dataset)
    assert rbtool.load_dataset("mine:a:b", 32, seed=3, own="x") == (("a:b", 32), {"seed": 3, "own": "x"})
    assert rbtool.load_dataset(dataset="MINE:a") == rbtool.load_dataset(dataset_id="MINE:a") == (("a",), {})


def test_other_names_are_looked_up_as_before() -> None:
    rbtool.register_dataset("mine", loader)
    with pytest.raises(rbtool.DatasetNotFoundError, match="not found"):
        rbtool.load_dataset("mine")
    with pytest.raises(rbtool.DatasetNotFoundError, match="yours:a"):
        rbtool.load_dataset("yours:a")


def test_steps_of_a_mixture_have_the_texts_of_all_its_datasets(walks: Path, tmp_path: Path) -> None:
    pieces = walk_pieces([(9, "truncated"), (4, "terminated")])
    told = (replace(one, text={**one.text, "language_instruction": "pick"}) for one in pieces)
    write_pieces(tmp_path / "told", WALK_FIELDS, told)
    write_mixture(tmp_path / "both.toml", tmp_path / "told", walks)
    buffer = load_dataset(tmp_path / "both.toml", 16, seed=0, texts=True)
    for opened in (buffer, pickle.loads(pickle.dumps(buffer))):
        batch = opened.sample()
        told_or_not = [("pick", "")[member] for member in batch["source_id"].tolist()]
        assert set(told_or_not) == {"pick", ""}
        assert list(batch["language_instruction"]) == told_or_not
        assert list(batch["task"]) == [f"walk {episode} é" for episode in batch["episode"].tolist()]


@pytest.mark.parametrize("taken", ["mine", "hf", *(one.name.upper() for one in declared())])
def test_a_prefix_that_is_taken_is_replaced_only_if_asked_for(taken: str) -> None:
    rbtool.register_dataset("mine", loader)
    with pytest.raises(KeyError, match="is taken"):
        rbtool.register_dataset(taken, dict)
    rbtool.register_dataset(taken, lambda name: name, replace=True)
    assert rbtool.load_dataset(f"{taken}:x") == "x"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, loader), TypeError), (("", loader), ValueError), ((" ", loader), ValueError),
        (("a:b", loader), ValueError), (("a", 3), TypeError), (("a", "no place"), ValueError),
    ],
)  # fmt: skip
def test_registrations_without_sense_are_refused(arguments: tuple[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        rbtool.register_dataset(*arguments)


@pytest.mark.parametrize("place", ["no_such_module:x", f"{__name__}:no_such_name", f"{__name__}:__doc__"])
def test_a_registered_place_that_cannot_be_called_is_refused(place: str) -> None:
    rbtool.register_dataset("mine", place)
    with pytest.raises(rbtool.RbtoolError, match="the registered dataset"):
        rbtool.load_dataset("mine:x")
