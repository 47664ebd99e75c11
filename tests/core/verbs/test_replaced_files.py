"""What changes while a verb runs: sources that are replaced, folders swapped for links; and what is synced before."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from processes import run_forked

import rbtool
from rbtool.core.format import fs
from rbtool.core.format.staging import Staging
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.testing.datasets import write_walks

# A source that is replaced, and its old files removed, between any two file operations of a verb is read as one.

LAYOUTS = ("ted", "packed", "flat", "nested", "h5")
DATASETS = ("ted", "packed")
TORCHRL = ("torchrl-flat", "torchrl-nested", "torchrl-h5")
_VARYING = {"seconds", "path", "source", "provenance", "notes", "checkpoint", "dataset", "timing", "remembered"}
_OPERATIONS = frozenset({"open", "os.listdir", "os.scandir", "rbtool.fs", "mmap.__new__"})
_hooked: list[Callable[[Any], None]] = []
_process = os.getpid()


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _hooked and os.getpid() == _process and event in _OPERATIONS:
        _hooked[-1](arguments[1] if event == "rbtool.fs" else arguments[0])


sys.addaudithook(_hear)


def _heard(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    """Make an operation of a look at a file, which Python does not announce."""

    def heard(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if _hooked and os.getpid() == _process:
            _hooked[-1](path)
        return look(path, *arguments, **options)

    return heard


class Swap:
    """Exchanges `source` for the other data at its n-th file operation, and removes what lay there."""

    def __init__(self, source: Path, other: Path, at: int) -> None:
        self.source, self.other, self.at = source, other, at
        self.written = tuple(f"{source.parent}/{name}" for name in ("out-", ".out-"))
        self.reads: list[bool] = []
        """Of each operation, whether it may be one of the source; those of the result alone have its path."""
        self.looks = pytest.MonkeyPatch()

    def __enter__(self) -> Swap:
        for name in ("stat", "lstat"):
            self.looks.setattr(os, name, _heard(getattr(os, name)))
        _hooked.append(self.operation)
        return self

    def __exit__(self, *raised: object) -> None:
        _hooked.clear()
        self.looks.undo()

    def operation(self, path: Any) -> None:
        self.reads.append(not str(path).startswith(self.written))
        if len(self.reads) == self.at:
            _hooked.clear()
            assert fs.exchange(self.other, self.source)
            fs.remove(self.other)
            _hooked.append(self.operation)


def _same(td: Any) -> Any:
    return td


def _kept(result: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in _VARYING}


def _published(result: Any, out: Path) -> Any:
    with open_steps(out) as reader:
        reader.verify_files()
    return result.content_digest


def _exported(path: Path, out: Path) -> Any:
    result = rbtool.export(path, out, to="npz")
    return result.steps, out.read_bytes()


def _loaded(path: Path, out: Path) -> Any:
    buffer = rbtool.load_dataset(path, 8, seed=1)
    rows = buffer[:]
    return rows["action"].tolist(), rows["next", "reward"].tolist(), buffer.storage.episode_lengths().tolist()


def _preprocessed(path: Path, out: Path, **options: Any) -> Any:
    return _published(rbtool.preprocess(path, _same, out, chunk_size=20, **options), out)


VERBS: dict[str, tuple[tuple[str, ...], Callable[[Path, Path], Any]]] = {
    "inspect": (LAYOUTS, lambda path, out: _kept(rbtool.inspect(path, episode=0))),
    "check": (LAYOUTS, lambda path, out: _kept(rbtool.check(path))),
    "stats": (LAYOUTS, lambda path, out: _kept(rbtool.stats(path, root=out))),
    "sample": (LAYOUTS, lambda path, out: _kept(rbtool.sample(path, 7, seed=1))),
    "export": (LAYOUTS, _exported),
    "convert": (LAYOUTS, lambda path, out: _published(rbtool.convert(path, out, layout="packed"), out)),
    "convert-ted": (LAYOUTS, lambda path, out: _published(rbtool.convert(path, out), out)),
    "save": (LAYOUTS, lambda path, out: _published(rbtool.checkpoint.save(path, out, form="h5"), out)),
    "load": ((*LAYOUTS[2:], *TORCHRL, "tensors"), lambda path, out: _published(rbtool.checkpoint.load(path, out), out)),
    "load_dataset": (DATASETS, _loaded),
    "preprocess": ((*LAYOUTS, *TORCHRL), lambda path, out: _preprocessed(path, out, num_workers=0)),
    "preprocess-fork": (
        (*LAYOUTS, *TORCHRL),
        lambda path, out: _preprocessed(path, out, num_workers=2, start_method="fork"),
    ),
}
_AT_ONCE = {"inspect", "check", "sample", "load_dataset"}  # no file operation follows when all is open
CASES = [(verb, layout) for verb, (layouts, _) in VERBS.items() for layout in layouts]
EVERY_DAY = {
    ("inspect", "ted"), ("check", "packed"), ("stats", "flat"), ("sample", "packed"), ("export", "h5"),
    ("convert", "nested"), ("load_dataset", "ted"), ("preprocess", "packed"), ("preprocess-fork", "ted"),
    ("load", "tensors"), ("preprocess", "torchrl-flat"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Two datasets in a layout, which differ in all that can be seen."""
    folder = tmp_path_factory.mktemp("pair")
    write_walks(folder / "one-ted", [(30, "terminated"), (25, "truncated")], seed=1)
    write_walks(folder / "two-ted", [(12, "truncated"), (40, "open"), (3, "terminated")], seed=2)

    def make(layout: str) -> tuple[Path, Path]:
        for name in ("one", "two"):
            source, made = folder / f"{name}-ted", folder / f"{name}-{layout}"
            if not made.exists() and layout == "packed":
                rbtool.convert(source, made, layout="packed")
            elif not made.exists() and layout == "tensors":
                rows = rbtool.load_dataset(source)[:]
                storage = LazyTensorStorage(len(rows))
                storage.set(range(len(rows)), rows)
                storage.dumps(made)
            elif not made.exists() and layout in TORCHRL:
                rbtool.checkpoint.save(source, made, form=layout.removeprefix("torchrl-"), for_library="torchrl")
            elif not made.exists():
                rbtool.checkpoint.save(source, made, form=layout)
        return folder / f"one-{layout}", folder / f"two-{layout}"

    return make


def copied(source: Path, target: Path) -> Path:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return target


def swapped(pair: tuple[Path, Path], verb: str, folder: Path, at: int) -> tuple[Any, list[bool]]:
    """What the verb gives when the source is replaced at its n-th operation, and which of all are of the source."""
    source, other = copied(pair[0], folder / "source"), copied(pair[1], folder / "other")
    out = folder / f"out-{at}"
    with Swap(source, other, at) as swap:
        found = VERBS[verb][1](source, out)
    return found, swap.reads


def places_of(reads: list[bool], verb: str) -> list[int]:
    """The operations to replace the source at, counted from 1.

    What is there between two operations of the result alone, nobody asks: of a row of such operations the first is
    enough, but where workers read at the same time.
    """
    writes = [number for number, read in enumerate(reads, 1) if not read]
    first = {number for number in writes if number > 1 and reads[number - 2]}
    at_work = set(writes[::4]) if verb == "preprocess-fork" else set()
    return sorted({number for number, read in enumerate(reads, 1) if read} | first | at_work)


def require_one_of_both(
    pair: tuple[Path, Path], verb: str, folder: Path, count: int, number: int = 0
) -> Iterator[bool]:
    old, _ = swapped(pair, verb, folder, 0)
    new, _ = swapped(pair[::-1], verb, folder, -1)
    again, reads = swapped(pair, verb, folder, -2)  # the first time, modules are imported, too
    assert old == again != new
    places = places_of(reads[:-2], verb)
    step = max(1, len(places) // count) | 1  # odd: a look at a file and its opening often take turns
    for at in [*places[number % step :: step], len(reads) - 1]:
        found, _ = swapped(pair, verb, folder, at)
        assert found in (old, new), f"replaced at operation {at} of {len(reads)}"
        yield found == old


@pytest.mark.parametrize(("verb", "layout"), sorted(EVERY_DAY))
def test_a_verb_reads_one_of_both(pair: Callable[[str], tuple[Path, Path]], tmp_path, verb: str, layout: str) -> None:
    found = list(require_one_of_both(pair(layout), verb, tmp_path, 5, 3))
    assert found[-1] or verb in _AT_ONCE
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "verb", "layout"), [pytest.param(n, *case, id="-".join(case)) for n, case in enumerate(CASES)]
)
def test_a_verb_reads_one_of_both_wherever_it_is_replaced(pair, tmp_path, number, verb, layout) -> None:
    # not every place, but from another one in each case
    found = list(require_one_of_both(pair(layout), verb, tmp_path, 48, number))
    assert found[-1] or verb in _AT_ONCE


# A folder of the store that is replaced by a link in the last moment leads no removal and no rename out of it.
#
# Each job runs in a process of its own, with an audit hook that puts the link in the folder's place when the first
# change of the kind is announced: from then on every path through the folder leads outside.

JOB = """
import os, sys
from pathlib import Path

root, outside, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
folder, swapped = root / "minari" / "deep", []


def hook(event, arguments):
    if event != "rbtool.fs" or arguments[0] != at or swapped or "deep" not in arguments[1]:
        return
    swapped.append(arguments)
    for path in folder.iterdir():  # the names inside it are there outside, too
        (outside / path.name).mkdir(exist_ok=True)
        (outside / path.name / "precious").write_text(path.name)
    Path(sys.argv[4]).write_text("\\n".join(path.name for path in outside.iterdir()))
    os.rename(folder, root / "moved")
    os.symlink(outside, folder)


import rbtool
from rbtool.core.format.staging import Staging, remove_dataset, remove_leftover
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import cache

dataset = folder / "a-v0"
sys.addaudithook(hook)
try:
    {job}
except (rbtool.RbtoolError, OSError) as error:
    print(type(error).__name__, error)
print(swapped)
assert swapped
"""
REPLACE = """with Staging(dataset, replace=True, below=root) as staging:
        write_walks(staging.path, [(3, "terminated")])
        staging.publish()"""
FAIL = """with Staging(dataset, replace=True, below=root) as staging:
        write_walks(staging.path, [(3, "terminated")])"""
LEFTOVER = """cache.prune(root=root)"""
REMOVE = """cache.rm("minari:deep/a-v0", root=root)"""


@pytest.mark.parametrize(
    ("job", "at"),
    [
        (REPLACE, "rename"), (REPLACE, "exchange"), (REPLACE, "remove"), (FAIL, "remove"), (LEFTOVER, "remove"),
        (REMOVE, "rename"), (REMOVE, "remove"),
    ],
)  # fmt: skip
def test_what_a_new_link_leads_to_is_left_alone(job: str, at: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "mine"
    write_walks(root / "minari" / "deep" / "a-v0", [(4, "terminated")])
    leftover = root / "minari" / "deep" / ".a-v0.rbtool-new-01234567"
    if job == LEFTOVER:
        (leftover / "deep").mkdir(parents=True)
    outside.mkdir()
    ran = run_forked(JOB.replace("{job}", job), root, outside, at, tmp_path / "names")
    assert ran.returncode == 0, ran.stderr
    names = (tmp_path / "names").read_text().split("\n")
    assert names
    assert {path.relative_to(outside).as_posix() for path in outside.rglob("*")} == {
        *names, *(f"{name}/precious" for name in names)
    }, ran.stdout  # fmt: skip
    assert [(outside / name / "precious").read_text() for name in names] == names


# What a verb publishes is on the disk before: every file and folder of it.

TABLE = Path(__file__).parents[2] / "data" / "d4rl" / "hopper_random-v2.hdf5"
Job = Callable[[Path, Path], object]

JOBS: dict[str, Job] = {
    "convert": lambda data, dest: rbtool.convert(TABLE, dest),
    "convert with workers": lambda data, dest: rbtool.convert(TABLE, dest, num_workers=2),
    "convert to packed": lambda data, dest: rbtool.convert(TABLE, dest, layout="packed"),
    "repack": lambda data, dest: rbtool.convert(data, dest, layout="packed", compress=["observation=zstd"]),
    "preprocess": lambda data, dest: rbtool.preprocess(data, dest=dest, operations={"normalize": ["observation"]}),
    "split": lambda data, dest: rbtool.split(data, dest, train=0.5, val=0.5),
    "save": lambda data, dest: rbtool.checkpoint.save(data, dest, form="flat"),
    "save to one file": lambda data, dest: rbtool.checkpoint.save(data, dest.with_suffix(".h5"), form="h5"),
}


@pytest.mark.parametrize("job", JOBS)
def test_all_of_it_is_on_the_disk_before_it_is_published(job, tmp_path, unsynced, monkeypatch) -> None:
    write_walks(tmp_path / "data", [(40, "terminated"), (30, "open"), (9, "truncated"), (5, "both")])
    left: list[list[str]] = []
    publish = Staging._place_folder, Staging._place_file

    def looking(place: Callable[[Staging, Path], bool]) -> Callable[[Staging, Path], bool]:
        def placed(staging: Staging, built: Path) -> bool:
            left.append(unsynced(built))
            return place(staging, built)

        return placed

    monkeypatch.setattr(Staging, "_place_folder", looking(publish[0]))
    monkeypatch.setattr(Staging, "_place_file", looking(publish[1]))
    JOBS[job](tmp_path / "data", tmp_path / "made")
    assert left == [[]]
