"""`cache ls` and `verify`: what is below the root, when it was last used, and whether it is sound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import rbtool
from rbtool.core.format import fs
from rbtool.core.format.manifest import HIDDEN, MANIFEST
from rbtool.core.format.staging import Staging, lock_folder
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks

DOOR, CART = "minari:D4RL/door/human-v2", "minari:cart-v0"
LONG_AGO = 1_600_000_000


def _bytes(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["minari/D4RL", "."])
def test_leftover_files_are_listed_and_pruned(store, place):
    path = store.root / place / ".saved.h5.rbtool-new-01234567"
    path.write_bytes(b"abc")
    (found,) = [entry for entry in rbtool.cache.ls(root=store.root).entries if entry.what == "leftover"]
    assert (found.path, found.bytes, found.prunable) == (path, 3, True)
    assert [entry.path for entry in rbtool.cache.prune(root=store.root).removed] == [path]
    assert not path.exists()


def test_a_leftover_file_that_a_process_works_on_stays(store):
    path = store.root / "minari" / ".saved.h5.rbtool-new-01234567"
    path.write_bytes(b"abc")
    descriptor = lock_folder(path)
    assert [entry.in_use for entry in rbtool.cache.ls(root=store.root).entries if entry.path == path] == [True]
    assert not rbtool.cache.prune(root=store.root).removed
    os.close(descriptor)
    assert path.exists()


def test_a_file_that_a_cut_swap_moved_aside_comes_back(store):
    (store.root / "minari" / ".saved.h5.rbtool-old-01234567").write_bytes(b"abc")
    rbtool.cache.ls(root=store.root)
    assert (store.root / "minari" / "saved.h5").read_bytes() == b"abc"


@pytest.mark.parametrize(("age", "prunable"), [(3600, True), (0, False)])
def test_a_half_written_record_of_statistics_is_a_leftover(store, age, prunable):
    path = store.root / ".stats" / ".xxh3-128-01.json.4711.new"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    os.utime(path, (time.time() - age,) * 2)
    shown = {entry.path: entry for entry in rbtool.cache.ls(root=store.root).entries}
    assert (shown[path].what, shown[path].bytes, shown[path].prunable) == ("leftover", 3, prunable)
    assert bool(rbtool.cache.prune(root=store.root).removed) == prunable


def test_all_that_is_there_is_listed_with_its_bytes(store):
    kept, part = store.original("D4RL/door/human-v2", kept=True), store.original("pen-v1", kept=False)
    left, listing = store.leftover(), store.listing(days=0)
    assert store.shown() == [
        ("minari:", "listing"), (DOOR, "dataset"), (DOOR, "original"), (DOOR, "leftover"), (CART, "dataset"),
        ("minari:pen-v1", "partial"),
    ]  # fmt: skip
    found = rbtool.cache.ls(root=store.root)
    paths = [listing, store.door, kept.folder, left, store.cart, part.folder]
    assert [entry.path for entry in found.entries] == paths
    assert [entry.bytes for entry in found.entries] == [2, *(_bytes(path) for path in paths[1:])]
    assert found.bytes["dataset"] == _bytes(store.door) + _bytes(store.cart)
    assert found.prunable_bytes == _bytes(left) + _bytes(part.folder)
    assert found.free_bytes > 0


def test_a_root_that_is_not_there_is_empty(tmp_path):
    found = to_document(rbtool.cache.ls(root=tmp_path / "none"))
    assert (found["kind"], found["entries"], found["bytes"], found["prunable_bytes"]) == ("cache ls", [], {}, 0)
    assert not rbtool.cache.prune(root=tmp_path / "none").removed
    with pytest.raises(rbtool.DatasetNotFoundError, match="there is no folder"):
        rbtool.cache.verify(root=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("verb", ["ls", "prune", "verify"])
def test_a_root_that_is_a_file_is_refused(tmp_path, verb):
    (tmp_path / "file").write_text("")
    with pytest.raises(rbtool.UsageError, match="not a folder"):
        getattr(rbtool.cache, verb)(root=tmp_path / "file")


def test_links_are_not_followed(store, tmp_path):
    elsewhere = type(store)(tmp_path / "elsewhere")
    elsewhere.original("pen-v1", kept=True)
    elsewhere.listing(days=90)
    before = store.shown()
    (store.root / "linked").symlink_to(elsewhere.root / "minari")
    (store.root / "minari" / "far-v0").symlink_to(elsewhere.cart)
    (store.root / "minari" / ".originals").symlink_to(elsewhere.root / "minari" / ".originals")
    (store.root / "minari" / ".catalogue").symlink_to(elsewhere.root / "minari" / ".catalogue")
    (store.root / "minari" / ".far-v1.rbtool-new-01234567").symlink_to(elsewhere.cart)
    assert store.shown() == before


@pytest.mark.parametrize("damage", [b"{", b'{"format_version": 99}', b"\xff"])
def test_what_cannot_be_read_is_listed_with_why(store, damage):
    (store.cart / MANIFEST).write_bytes(damage)
    (store.original("pen-v1", kept=True).folder / "fetched.json").write_bytes(damage)
    broken = [entry for entry in rbtool.cache.ls(root=store.root).entries if entry.problem]
    assert [(entry.name, entry.what) for entry in broken] == [(CART, "dataset"), ("minari:pen-v1", "original")]
    assert not any(entry.prunable for entry in broken)
    assert broken[0].bytes == _bytes(store.cart)


def test_checkpoints_are_told_from_datasets(store):
    rbtool.checkpoint.save(store.cart, store.root / "saved" / "cart", form="flat")
    assert ("saved:cart", "checkpoint") in store.shown()


def test_a_swap_that_was_cut_leaves_a_dataset_and_no_leftover(store):
    store.cart.rename(store.root / "minari" / ".cart-v0.rbtool-old-01234567")
    assert store.shown() == [(DOOR, "dataset"), (CART, "dataset")]
    assert store.cart.exists()


def test_work_under_way_is_in_use(store):
    with Staging(store.root / "minari" / "new-v0") as staging:
        descriptor = lock_folder(store.original("pen-v1", kept=False).folder)
        found = {entry.path: entry for entry in rbtool.cache.ls(root=store.root).entries if entry.in_use}
        os.close(descriptor)
    assert [entry.name for entry in found.values()] == ["minari:new-v0", "minari:pen-v1"]
    assert staging.path in found
    assert not any(entry.prunable for entry in found.values())


# Last use --------------------------------------------------------------------------------------------


def _age(dataset):
    os.utime(dataset / HIDDEN, (LONG_AGO, LONG_AGO))


@pytest.mark.parametrize("verb", ["inspect", "check"])
@pytest.mark.parametrize("by_path", [False, True])
def test_a_verb_that_reads_leaves_the_time_and_nothing_else(store, verb, by_path):
    _age(store.cart)
    before, began = store.state(), time.time()
    getattr(rbtool, verb)(store.cart if by_path else CART, root=store.root)
    assert (store.cart / HIDDEN).stat().st_mtime > began - 1
    assert store.state() == before


def test_looking_at_the_cache_is_no_use(store):
    _age(store.cart)
    rbtool.list(root=store.root)
    rbtool.cache.verify(root=store.root)
    rbtool.cache.rm("minari:*", root=store.root, dry_run=True)
    rbtool.cache.ls(root=store.root)
    used = {entry.name: entry.last_used for entry in rbtool.cache.ls(root=store.root).entries}
    assert used[CART] == "2020-09-13T12:26:40+00:00"
    assert used[DOOR] > "2026"


@pytest.mark.parametrize("place", ["beside/mine", "root"])
def test_what_is_not_below_the_root_keeps_its_time(tmp_path, place):
    write_walks(tmp_path / place, [(2, "open")])
    _age(tmp_path / place)
    rbtool.inspect(tmp_path / place, root=tmp_path / "root")
    assert (tmp_path / place / HIDDEN).stat().st_mtime == LONG_AGO


def test_a_disk_that_cannot_be_written_to_can_be_read(store, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(30, os.strerror(30), str(path))

    monkeypatch.setattr(fs, "touch", refuse)
    assert rbtool.inspect(CART, root=store.root).steps == 2


# verify ----------------------------------------------------------------------------------------------


class Watch:
    """Remembers what it was told."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        self.told = (label, total, unit)
        self.count = 0

    def advance(self, amount: int) -> None:
        self.count += amount

    def done(self, remark: str = "") -> None:
        self.over = True


def test_sound_datasets_and_originals_are_found_sound(store):
    original, watch = store.original("pen-v1", kept=True), Watch()
    store.original("half-v1", kept=False)
    found = rbtool.cache.verify(root=store.root, progress=watch)
    total = sum(map(_bytes, (store.door, store.cart, original.folder)))
    assert (found.datasets, found.originals, found.bytes, found.problems) == (2, 1, total, ())
    assert (watch.told, watch.count, watch.over) == (("verifying", total, "bytes"), total, True)


def _flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _add(path, data):
    path.write_bytes(path.read_bytes() + data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda cart: _flip(cart / "action.memmap"), "action.memmap was changed"),
        (lambda cart: (cart / "action.memmap").write_bytes(b""), "has 0 bytes"),
        (lambda cart: (cart / "action.memmap").unlink(), "is missing"),
        (lambda cart: (cart / MANIFEST).write_bytes(b"{"), "manifest.json"),
        (
            lambda cart: (cart / MANIFEST).write_bytes((cart / MANIFEST).read_bytes() + b" "),
            "manifest.json was changed",
        ),
    ],
)
def test_damage_is_named(store, damage, said):
    damage(store.cart)
    (problem,) = rbtool.cache.verify(root=store.root).problems
    assert (problem.name, problem.path) == (CART, store.cart)
    assert said in problem.message


def test_every_damaged_file_is_named(store):
    for name in ("action.memmap", "observation.memmap"):
        _flip(store.cart / name)
    _flip(store.original("pen-v1", kept=True).files / "data" / "main.bin")
    problems = rbtool.cache.verify(root=store.root).problems
    assert [problem.name for problem in problems] == [CART, CART, "minari:pen-v1"]
    assert "checksum" in problems[2].message


@pytest.mark.parametrize(("names", "count"), [((CART,), 1), (("minari:D4RL/*", CART), 2), (("*",), 2)])
def test_some_can_be_verified(store, names, count):
    assert rbtool.cache.verify(*names, root=store.root).datasets == count


def test_what_is_not_there_cannot_be_verified(store):
    with pytest.raises(rbtool.DatasetNotFoundError, match="nope-v0"):
        rbtool.cache.verify("minari:nope-v0", root=store.root)
