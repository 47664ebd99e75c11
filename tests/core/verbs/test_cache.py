"""The verbs of `cache`: what is below the root, when it was last used, whether it is sound, and what goes."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import pytest

import rbtool
from rbtool.core.format import fs
from rbtool.core.format.locate import find_dataset
from rbtool.core.format.manifest import HIDDEN, MANIFEST
from rbtool.core.format.staging import Staging, lock_folder
from rbtool.core.results import to_document
from rbtool.core.testing.datasets import write_walks

# `cache ls` and `verify`: what is below the root, when it was last used, and whether it is sound.

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


def test_a_swap_that_was_cut_leaves_what_was_there(store):
    store.cart.rename(store.root / "minari" / ".cart-v0.rbtool-old-01234567")
    assert store.shown() == [(DOOR, "dataset"), (CART, "dataset")]
    assert store.cart.exists()
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
    with pytest.raises(rbtool.DatasetNotFoundError, match="not found: it cannot be verified"):
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


def test_what_is_not_there_is_neither_verified_nor_removed(store):
    with pytest.raises(rbtool.DatasetNotFoundError, match="nope-v0"):
        rbtool.cache.verify("minari:nope-v0", root=store.root)
    with pytest.raises(rbtool.UsageError, match="no dataset named"):
        rbtool.cache.rm(root=store.root)
    assert not rbtool.cache.prune(root=store.root, confirm=lambda plan: pytest.fail("asked")).removed


# `cache rm` and `prune`: what was named goes, and nothing that somebody may want.


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


# rm --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DOOR, "{door}", "minari/D4RL/door/human-v2", "minari/D4RL/../D4RL/door/human-v2/",
                                  "minari:D4RL/*", "*door*"])  # fmt: skip
def test_a_dataset_goes_with_its_empty_folders(store, monkeypatch, name):
    monkeypatch.chdir(store.root)
    size = sum(entry.bytes for entry in rbtool.cache.ls(root=store.root).entries if entry.name == DOOR)
    done = rbtool.cache.rm(name.format(door=store.door), root=store.root)
    assert ([entry.name for entry in done.removed], done.bytes, done.dry_run) == ([DOOR], size, False)
    assert _names(store.root / "minari") == ["cart-v0"]


def test_a_root_behind_a_link_is_as_good(store, tmp_path):
    (tmp_path / "link").symlink_to(store.root)
    rbtool.cache.rm(CART, store.door, root=tmp_path / "link")
    assert _names(store.root) == ["minari"]
    assert _names(store.root / "minari") == []


def test_removal_takes_what_is_damaged_and_leaves_what_is_not_ours(store):
    (store.cart / MANIFEST).write_bytes(b"{")
    rbtool.cache.rm(CART, root=store.root)
    assert not store.cart.exists()
    (store.root / "minari" / "D4RL" / "notes.txt").write_text("mine")
    rbtool.cache.rm(DOOR, root=store.root)
    assert _names(store.root / "minari" / "D4RL") == ["notes.txt"]


def test_an_original_goes_with_its_dataset(store):
    store.original("cart-v0", kept=True)
    store.original("pen-v1", kept=True)
    done = rbtool.cache.rm(CART, root=store.root)
    assert [entry.what for entry in done.removed] == ["dataset", "original"]
    assert store.shown() == [(DOOR, "dataset"), ("minari:pen-v1", "original")]
    rbtool.cache.rm("minari:pen-v1", root=store.root)
    assert _names(store.root / "minari") == ["D4RL"]


def test_an_original_stays_until_the_last_dataset_made_from_it_goes(store):
    store.original("walks/test-v0", kept=True, source="walks")  # what all of these say that they were made from
    write_walks(store.root / "walks" / "some@01234567", [(2, "open")])
    for name in ("minari:*", "walks:some@01234567"):
        assert ("walks:walks/test-v0", "original") in store.shown()
        rbtool.cache.rm(name, root=store.root)
    assert store.shown() == []


@pytest.mark.parametrize("refuse", ["dry run", "no"])
def test_nothing_goes_without_a_yes(store, refuse):
    before, heard = store.state(), []
    ask = {"dry_run": True} if refuse == "dry run" else {"confirm": lambda plan: bool(heard.append(plan))}
    done = rbtool.cache.rm("*", root=store.root, **ask)
    assert [entry.name for entry in done.removed] == [DOOR, CART]
    assert done.dry_run
    assert store.state() == before
    assert [plan.bytes for plan in heard] == ([] if refuse == "dry run" else [done.bytes])
    store.leftover()
    before = store.state()
    ask = {"dry_run": True} if refuse == "dry run" else {"confirm": lambda plan: False}
    done = rbtool.cache.prune(root=store.root, **ask)
    assert ([entry.what for entry in done.removed], done.dry_run) == (["leftover"], True)
    assert store.state() == before


def _foreign(store, tmp_path):
    (store.cart / "thesis.tex").write_text("ten years")
    return CART


def _outside(store, tmp_path):
    write_walks(tmp_path / "mine", [(2, "open")])
    return tmp_path / "mine"


def _link(store, tmp_path):
    (store.root / "minari" / "link-v0").symlink_to(_outside(store, tmp_path))
    return store.root / "minari" / "link-v0"


def _through_a_link(store, tmp_path):
    write_walks(tmp_path / "more" / "mine-v0", [(2, "open")])
    (store.root / "linked").symlink_to(tmp_path / "more")
    return store.root / "linked" / "mine-v0"


def _not_ours(store, tmp_path):
    (store.root / "photos").mkdir()
    (store.root / "photos" / "cat.jpg").write_text("meow")
    return store.root / "photos"


REFUSED = [
    (_foreign, "thesis.tex is not part of the dataset"),
    (_outside, "is not below the root"),
    (_link, "not a dataset or an original"),
    (_through_a_link, "is not below the root"),
    (_not_ours, "not a dataset or an original"),
    (lambda store, tmp_path: store.leftover(), "not a dataset or an original"),
    (lambda store, tmp_path: store.root, "is not below the root"),
    (lambda store, tmp_path: store.root / "minari", "not a dataset or an original"),
    (lambda store, tmp_path: store.door / ".rbtool", "not a dataset or an original"),
    (lambda store, tmp_path: "", "a name is empty"),
]


@pytest.mark.parametrize(("prepare", "said"), REFUSED)
def test_what_must_stay_is_refused_and_nothing_goes(store, tmp_path, prepare, said):
    name = prepare(store, tmp_path)
    before = store.state()
    with pytest.raises(rbtool.UsageError, match=said):
        rbtool.cache.rm(DOOR, name, root=store.root)
    assert store.state() == before


@pytest.mark.parametrize("name", ["minari:nope-v0", "nope*", "minari:D4RL/door", "./nope"])
def test_what_is_not_there_is_not_found(store, name):
    before = store.state()
    with pytest.raises(rbtool.DatasetNotFoundError, match=r"nope|door"):
        rbtool.cache.rm(CART, name, root=store.root)
    assert store.state() == before


@pytest.mark.parametrize("which", ["dataset", "original"])
def test_what_is_in_use_is_refused(store, which):
    folder = store.cart if which == "dataset" else store.original("cart-v0", kept=True).folder
    descriptor = lock_folder(folder)
    with pytest.raises(rbtool.UsageError, match=r"in use by another process|another process is fetching"):
        rbtool.cache.rm(DOOR, CART, root=store.root)
    os.close(descriptor)
    assert store.door.exists()
    rbtool.cache.rm(DOOR, CART, root=store.root)


def test_an_older_dataset_that_was_set_aside_does_not_come_back(store):
    store.leftover("minari", ".cart-v0.rbtool-old-01234567")
    rbtool.cache.rm(CART, root=store.root)
    with pytest.raises(rbtool.DatasetNotFoundError):
        find_dataset(CART, store.root)
    assert _names(store.root / "minari") == ["D4RL"]


def removed_up_to(root: Path, at: int) -> int:
    """Remove the dataset in a child that dies at its n-th change of the file system; its exit status."""
    child = os.fork()
    if not child:
        numbers = itertools.count(1)

        def strike(event: str, arguments: object) -> None:
            changes = event in ("rbtool.fs", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
            if changes and next(numbers) == at:
                os._exit(9)

        try:
            sys.addaudithook(strike)
            rbtool.cache.rm("minari:cart-v0", root=root)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_cut_at_any_point_it_leaves_the_dataset_or_a_leftover(store):
    store.original("cart-v0", kept=True)
    ended, at = 9, 0
    while ended == 9:
        at += 1
        ended = removed_up_to(store.root, at)
        if store.cart.exists():
            assert not rbtool.cache.verify(root=store.root).problems
        else:
            kinds = {what for name, what in store.shown() if name == CART}
            assert kinds <= {"original", "leftover"}
            assert "dataset" not in kinds
            rbtool.cache.prune(root=store.root)
            assert not [name for name, what in store.shown() if what == "leftover"]
            write_walks(store.cart, [(2, "open")])
    assert ended == 0
    assert at > 10


# prune -----------------------------------------------------------------------------------------------


def test_what_nobody_wants_goes(store):
    gone = [store.leftover(), store.leftover("minari", ".gone-v0.rbtool-new-01234567"),
            store.original("half-v1", kept=False).folder, store.listing(days=31)]  # fmt: skip
    store.original("pen-v1", kept=True)
    size = rbtool.cache.ls(root=store.root).prunable_bytes
    done = rbtool.cache.prune(root=store.root)
    assert {entry.path for entry in done.removed} == set(gone)
    assert (done.bytes, done.dry_run) == (size, False)
    assert store.shown() == [(DOOR, "dataset"), (CART, "dataset"), ("minari:pen-v1", "original")]
    assert _names(store.root / "minari") == [".originals", "D4RL", "cart-v0"]


def test_what_somebody_may_want_stays(store):
    store.original("pen-v1", kept=True)
    (store.original("odd-v1", kept=True).folder / "fetched.json").write_text("{")
    store.listing(days=29)
    store.cart.rename(store.root / "minari" / ".cart-v0.rbtool-old-01234567")  # a swap that was cut
    with Staging(store.root / "minari" / "new-v0"):
        descriptor = lock_folder(store.original("half-v1", kept=False).folder)
        before = store.shown()
        assert not rbtool.cache.prune(root=store.root).removed
        assert store.shown() == before
        os.close(descriptor)
    assert (CART, "dataset") in before


def test_what_came_into_use_during_the_question_stays(store):
    half, left = store.original("half-v1", kept=False), store.leftover()
    held = []

    def think(plan):
        held.append(lock_folder(half.folder))
        return True

    done = rbtool.cache.prune(root=store.root, confirm=think)
    os.close(held[0])
    assert [entry.path for entry in done.removed] == [left]
    assert half.folder.exists()


def test_what_cannot_be_removed_is_told(store, monkeypatch):
    store.leftover()

    def refuse(path, **folders):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(fs, "remove", refuse)
    with pytest.raises(PermissionError):
        rbtool.cache.prune(root=store.root)


def test_what_was_half_written_goes_after_a_while(store):
    path = store.root / "minari" / "..names.json.123.new"
    path.write_text("{")
    assert path not in [entry.path for entry in rbtool.cache.prune(root=store.root, dry_run=True).removed]
    os.utime(path, (0, 0))
    rbtool.cache.prune(root=store.root)
    assert not path.exists()
