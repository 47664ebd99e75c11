"""The verbs of `cache`: what is below the root, when it was last used, whether it is sound, and what is removed."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import pytest
from damage import flip

import rbtool
from rbtool.core.format import fs
from rbtool.core.format.locate import find_dataset
from rbtool.core.format.manifest import HIDDEN, MANIFEST
from rbtool.core.format.staging import Staging, lock_folder
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks

DOOR, CART = "minari:D4RL/door/human-v2", "minari:cart-v0"
LONG_AGO = 1_600_000_000


def _bytes(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def ls(store):
    return rbtool.cache.ls(root=store.root)


def prune(store, **options):
    return rbtool.cache.prune(root=store.root, **options)


def rm(store, *names, **options):
    return rbtool.cache.rm(*names, root=store.root, **options)


def verify(store, *names, **options):
    return rbtool.cache.verify(*names, root=store.root, **options)


@pytest.mark.parametrize("place", ["minari/D4RL", "."])
def test_leftover_files_are_listed_and_pruned(store, place):
    path = store.root / place / ".saved.h5.rbtool-new-01234567"
    path.write_bytes(b"abc")
    (found,) = [entry for entry in ls(store).entries if entry.what == "leftover"]
    assert (found.path, found.bytes, found.prunable) == (path, 3, True)
    assert [entry.path for entry in prune(store).removed] == [path]
    assert not path.exists()


def test_a_leftover_file_that_a_process_works_on_stays(store):
    path = store.root / "minari" / ".saved.h5.rbtool-new-01234567"
    path.write_bytes(b"abc")
    descriptor = lock_folder(path)
    assert [entry.in_use for entry in ls(store).entries if entry.path == path] == [True]
    assert not prune(store).removed
    os.close(descriptor)
    assert path.exists()


def test_an_interrupted_swap_restores_the_old_dataset(store):
    store.cart.rename(store.root / "minari" / ".cart-v0.rbtool-old-01234567")
    assert store.shown() == [(DOOR, "dataset"), (CART, "dataset")]
    assert store.cart.exists()
    (store.root / "minari" / ".saved.h5.rbtool-old-01234567").write_bytes(b"abc")
    ls(store)
    assert (store.root / "minari" / "saved.h5").read_bytes() == b"abc"


@pytest.mark.parametrize(("age", "prunable"), [(3600, True), (0, False)])
def test_a_half_written_record_of_statistics_is_a_leftover(store, age, prunable):
    path = store.root / ".stats" / ".xxh3-128-01.json.4711.new"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    os.utime(path, (time.time() - age,) * 2)
    shown = {entry.path: entry for entry in ls(store).entries}
    assert (shown[path].what, shown[path].bytes, shown[path].prunable) == ("leftover", 3, prunable)
    assert bool(prune(store).removed) == prunable


def test_ls_lists_everything_with_its_bytes(store):
    kept, part = store.original("D4RL/door/human-v2", kept=True), store.original("pen-v1", kept=False)
    left, listing = store.leftover(), store.listing(days=0)
    assert store.shown() == [
        ("minari:", "listing"), (DOOR, "dataset"), (DOOR, "original"), (DOOR, "leftover"), (CART, "dataset"),
        ("minari:pen-v1", "partial"),
    ]  # fmt: skip
    found = ls(store)
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
    with pytest.raises(rbtool.DatasetNotFoundError, match="not found: it cannot be verified"):
        rbtool.cache.verify(root=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for verb in (rbtool.cache.ls, rbtool.cache.prune, rbtool.cache.verify):
        with pytest.raises(rbtool.UsageError, match="not a folder"):
            verb(root=tmp_path / "file")


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
def test_unreadable_datasets_are_listed_with_the_problem(store, damage):
    (store.cart / MANIFEST).write_bytes(damage)
    (store.original("pen-v1", kept=True).folder / "fetched.json").write_bytes(damage)
    broken = [entry for entry in ls(store).entries if entry.problem]
    assert [(entry.name, entry.what) for entry in broken] == [(CART, "dataset"), ("minari:pen-v1", "original")]
    assert not any(entry.prunable for entry in broken)
    assert broken[0].bytes == _bytes(store.cart)


def test_checkpoints_are_told_from_datasets(store):
    rbtool.checkpoint.save(store.cart, store.root / "saved" / "cart", form="flat")
    assert ("saved:cart", "checkpoint") in store.shown()


def test_a_running_process_keeps_its_folders_in_use(store):
    with Staging(store.root / "minari" / "new-v0") as staging:
        descriptor = lock_folder(store.original("pen-v1", kept=False).folder)
        found = {entry.path: entry for entry in ls(store).entries if entry.in_use}
        os.close(descriptor)
    assert [entry.name for entry in found.values()] == ["minari:new-v0", "minari:pen-v1"]
    assert staging.path in found
    assert not any(entry.prunable for entry in found.values())


def _age(dataset):
    os.utime(dataset / HIDDEN, (LONG_AGO, LONG_AGO))


@pytest.mark.parametrize("verb", ["inspect", "check"])
@pytest.mark.parametrize("by_path", [False, True])
def test_reading_a_dataset_changes_only_the_time_of_its_last_use(store, verb, by_path):
    _age(store.cart)
    before, began = store.state(), time.time()
    getattr(rbtool, verb)(store.cart if by_path else CART, root=store.root)
    assert (store.cart / HIDDEN).stat().st_mtime > began - 1
    assert store.state() == before


def test_verbs_of_the_cache_do_not_count_as_a_use(store):
    _age(store.cart)
    rbtool.list(root=store.root)
    verify(store)
    rm(store, "minari:*", dry_run=True)
    ls(store)
    used = {entry.name: entry.last_used for entry in ls(store).entries}
    assert used[CART] == "2020-09-13T12:26:40+00:00"
    assert used[DOOR] > "2026"


@pytest.mark.parametrize("place", ["beside/mine", "root"])
def test_a_dataset_outside_the_root_keeps_its_time(tmp_path, place):
    write_walks(tmp_path / place, [(2, "open")])
    _age(tmp_path / place)
    rbtool.inspect(tmp_path / place, root=tmp_path / "root")
    assert (tmp_path / place / HIDDEN).stat().st_mtime == LONG_AGO


def test_a_read_only_disk_can_be_read(store, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(30, os.strerror(30), str(path))

    monkeypatch.setattr(fs, "touch", refuse)
    assert rbtool.inspect(CART, root=store.root).steps == 2


def test_verify_finds_sound_datasets_and_originals(store, heard):
    original = store.original("pen-v1", kept=True)
    store.original("half-v1", kept=False)
    found = verify(store, progress=heard)
    total = sum(map(_bytes, (store.door, store.cart, original.folder)))
    assert (found.datasets, found.originals, found.bytes, found.problems) == (2, 1, total, ())
    assert (heard.started, sum(heard.advances), heard.ended) == ([("verifying", total, "bytes")], total, 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda cart: flip(cart / "action.memmap", -1), "action.memmap was changed"),
        (lambda cart: (cart / "action.memmap").write_bytes(b""), "has 0 bytes"),
        (lambda cart: (cart / "action.memmap").unlink(), "is missing"),
        (lambda cart: (cart / MANIFEST).write_bytes(b"{"), "manifest.json"),
        (lambda cart: (cart / MANIFEST).write_text(f"{(cart / MANIFEST).read_text()} "), "manifest.json was changed"),
    ],
)
def test_verify_names_damage(store, damage, said):
    damage(store.cart)
    (problem,) = verify(store).problems
    assert (problem.name, problem.path) == (CART, store.cart)
    assert said in problem.message


def test_verify_names_every_damaged_file(store):
    for name in ("action.memmap", "observation.memmap"):
        flip(store.cart / name, -1)
    flip(store.original("pen-v1", kept=True).files / "data" / "main.bin", -1)
    problems = verify(store).problems
    assert [problem.name for problem in problems] == [CART, CART, "minari:pen-v1"]
    assert "checksum" in problems[2].message


def test_verify_takes_names_and_patterns(store):
    for names, count in (((CART,), 1), (("minari:D4RL/*", CART), 2), (("*",), 2)):
        assert verify(store, *names).datasets == count


def test_missing_datasets_are_neither_verified_nor_removed(store):
    with pytest.raises(rbtool.DatasetNotFoundError, match="nope-v0"):
        verify(store, "minari:nope-v0")
    with pytest.raises(rbtool.UsageError, match="no dataset named"):
        rm(store)
    assert not prune(store, confirm=lambda plan: pytest.fail("asked")).removed


@pytest.mark.parametrize("name", [DOOR, "{door}", "minari/D4RL/door/human-v2", "minari/D4RL/../D4RL/door/human-v2/",
                                  "minari:D4RL/*", "*door*"])  # fmt: skip
def test_rm_removes_a_dataset_and_its_empty_folders(store, monkeypatch, name):
    monkeypatch.chdir(store.root)
    size = sum(entry.bytes for entry in ls(store).entries if entry.name == DOOR)
    done = rm(store, name.format(door=store.door))
    assert ([entry.name for entry in done.removed], done.bytes, done.dry_run) == ([DOOR], size, False)
    assert _names(store.root / "minari") == ["cart-v0"]


def test_rm_works_in_a_root_behind_a_link(store, tmp_path):
    (tmp_path / "link").symlink_to(store.root)
    rbtool.cache.rm(CART, store.door, root=tmp_path / "link")
    assert _names(store.root) == ["minari"]
    assert _names(store.root / "minari") == []


def test_rm_removes_damaged_datasets_and_leaves_foreign_files(store):
    (store.cart / MANIFEST).write_bytes(b"{")
    rm(store, CART)
    assert not store.cart.exists()
    (store.root / "minari" / "D4RL" / "notes.txt").write_text("mine")
    rm(store, DOOR)
    assert _names(store.root / "minari" / "D4RL") == ["notes.txt"]


def test_rm_removes_the_original_with_its_dataset(store):
    store.original("cart-v0", kept=True)
    store.original("pen-v1", kept=True)
    done = rm(store, CART)
    assert [entry.what for entry in done.removed] == ["dataset", "original"]
    assert store.shown() == [(DOOR, "dataset"), ("minari:pen-v1", "original")]
    rm(store, "minari:pen-v1")
    assert _names(store.root / "minari") == ["D4RL"]


def test_rm_keeps_an_original_until_its_last_dataset_is_removed(store):
    store.original("walks/test-v0", kept=True, source="walks")  # what all of these say that they were made from
    write_walks(store.root / "walks" / "some@01234567", [(2, "open")])
    for name in ("minari:*", "walks:some@01234567"):
        assert ("walks:walks/test-v0", "original") in store.shown()
        rm(store, name)
    assert store.shown() == []


@pytest.mark.parametrize("refuse", ["dry run", "no"])
def test_nothing_is_removed_without_consent(store, refuse):
    before, heard = store.state(), []
    ask = {"dry_run": True} if refuse == "dry run" else {"confirm": lambda plan: bool(heard.append(plan))}
    done = rm(store, "*", **ask)
    assert [entry.name for entry in done.removed] == [DOOR, CART]
    assert done.dry_run
    assert store.state() == before
    assert [plan.bytes for plan in heard] == ([] if refuse == "dry run" else [done.bytes])
    store.leftover()
    before = store.state()
    ask = {"dry_run": True} if refuse == "dry run" else {"confirm": lambda plan: False}
    done = prune(store, **ask)
    assert ([entry.what for entry in done.removed], done.dry_run) == (["leftover"], True)
    assert store.state() == before


def _dataset(place):
    write_walks(place, [(2, "open")])
    return place


def _written(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    return path


def _linked(path, target):
    path.symlink_to(target)
    return path


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda root, tmp_path: _written(root / "minari/cart-v0/thesis.tex") and CART, "thesis.tex is not part of the"),
        (lambda root, tmp_path: _dataset(tmp_path / "mine"), "is not below the root"),
        (
            lambda root, tmp_path: _linked(root / "minari/x", _dataset(tmp_path / "mine")),
            "not a dataset or an original",
        ),
        (lambda root, tmp_path: _linked(root / "x", _dataset(tmp_path / "x/y").parent) / "y", "is not below the root"),
        (lambda root, tmp_path: _written(root / "photos/cat.jpg").parent, "not a dataset or an original"),
        (lambda root, tmp_path: _dataset(root / "minari/.cart-v0.rbtool-new-01234567"), "not a dataset or an original"),
        (lambda root, tmp_path: root, "is not below the root"),
        (lambda root, tmp_path: root / "minari", "not a dataset or an original"),
        (lambda root, tmp_path: root / "minari/cart-v0/.rbtool", "not a dataset or an original"),
        (lambda root, tmp_path: "", "a name is empty"),
    ],
)
def test_rm_refuses_foreign_places_and_removes_nothing(store, tmp_path, prepare, said):
    name = prepare(store.root, tmp_path)
    before = store.state()
    with pytest.raises(rbtool.UsageError, match=said):
        rm(store, DOOR, name)
    assert store.state() == before


def test_rm_of_a_missing_name_removes_nothing(store):
    before = store.state()
    for name in ("minari:nope-v0", "nope*", "minari:D4RL/door", "./nope"):
        with pytest.raises(rbtool.DatasetNotFoundError, match=r"nope|door"):
            rm(store, CART, name)
    assert store.state() == before


@pytest.mark.parametrize("which", ["dataset", "original"])
def test_rm_refuses_what_another_process_uses(store, which):
    folder = store.cart if which == "dataset" else store.original("cart-v0", kept=True).folder
    descriptor = lock_folder(folder)
    with pytest.raises(rbtool.UsageError, match=r"in use by another process|another process is fetching"):
        rm(store, DOOR, CART)
    os.close(descriptor)
    assert store.door.exists()
    rm(store, DOOR, CART)


def test_rm_removes_older_copies_that_were_set_aside(store):
    store.leftover("minari", ".cart-v0.rbtool-old-01234567")
    rm(store, CART)
    with pytest.raises(rbtool.DatasetNotFoundError):
        find_dataset(CART, store.root)
    assert _names(store.root / "minari") == ["D4RL"]


def removed_up_to(root: Path, at: int) -> int:
    """Remove the dataset in a child that dies at its n-th change of the file system; return its exit status."""
    child = os.fork()
    if not child:
        numbers = itertools.count(1)

        def strike(event: str, arguments: object) -> None:
            changes = event in ("rbtool.fs", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
            if changes and next(numbers) == at:
                os._exit(9)

        try:
            sys.addaudithook(strike)
            rbtool.cache.rm(CART, root=root)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_killed_rm_leaves_the_dataset_or_a_leftover(store):
    store.original("cart-v0", kept=True)
    ended, at = 9, 0
    while ended == 9:
        at += 1
        ended = removed_up_to(store.root, at)
        if store.cart.exists():
            assert not verify(store).problems
        else:
            kinds = {what for name, what in store.shown() if name == CART}
            assert kinds <= {"original", "leftover"}
            assert "dataset" not in kinds
            prune(store)
            assert not [name for name, what in store.shown() if what == "leftover"]
            write_walks(store.cart, [(2, "open")])
    assert ended == 0
    assert at > 10


def test_prune_removes_leftovers_parts_and_old_listings(store):
    gone = [store.leftover(), store.leftover("minari", ".gone-v0.rbtool-new-01234567"),
            store.original("half-v1", kept=False).folder, store.listing(days=31)]  # fmt: skip
    store.original("pen-v1", kept=True)
    size = ls(store).prunable_bytes
    done = prune(store)
    assert {entry.path for entry in done.removed} == set(gone)
    assert (done.bytes, done.dry_run) == (size, False)
    assert store.shown() == [(DOOR, "dataset"), (CART, "dataset"), ("minari:pen-v1", "original")]
    assert _names(store.root / "minari") == [".originals", "D4RL", "cart-v0"]


def test_prune_keeps_everything_else(store):
    store.original("pen-v1", kept=True)
    (store.original("odd-v1", kept=True).folder / "fetched.json").write_text("{")
    store.listing(days=29)
    store.cart.rename(store.root / "minari" / ".cart-v0.rbtool-old-01234567")  # a swap that was cut
    with Staging(store.root / "minari" / "new-v0"):
        descriptor = lock_folder(store.original("half-v1", kept=False).folder)
        before = store.shown()
        assert not prune(store).removed
        assert store.shown() == before
        os.close(descriptor)
    assert (CART, "dataset") in before


def test_prune_keeps_what_came_into_use_during_the_question(store):
    half, left = store.original("half-v1", kept=False), store.leftover()
    held = []

    def think(plan):
        held.append(lock_folder(half.folder))
        return True

    done = prune(store, confirm=think)
    os.close(held[0])
    assert [entry.path for entry in done.removed] == [left]
    assert half.folder.exists()


def test_prune_reports_what_it_cannot_remove(store, monkeypatch):
    store.leftover()

    def refuse(path, **folders):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(fs, "remove", refuse)
    with pytest.raises(PermissionError):
        prune(store)


def test_prune_removes_half_written_files_after_a_while(store):
    path = store.root / "minari" / "..names.json.123.new"
    path.write_text("{")
    assert path not in [entry.path for entry in prune(store, dry_run=True).removed]
    os.utime(path, (0, 0))
    prune(store)
    assert not path.exists()
