"""A source that is replaced, and its old files removed, between any two file operations of a verb is read as one."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import rbtool
from rbtool.core.format import fs
from rbtool.core.open_steps import open_steps
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.testing.datasets import write_walks

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

    def __enter__(self) -> "Swap":
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
    ("load", "tensors"), ("preprocess", "torchrl-flat"), ("preprocess-fork", "torchrl-h5"),
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
def test_a_verb_reads_one_of_both(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, verb: str, layout: str
) -> None:
    found = list(require_one_of_both(pair(layout), verb, tmp_path, 5, 3))
    assert found[-1] or verb in _AT_ONCE
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "verb", "layout"), [pytest.param(n, *case, id="-".join(case)) for n, case in enumerate(CASES)]
)
def test_a_verb_reads_one_of_both_wherever_it_is_replaced(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, number: int, verb: str, layout: str
) -> None:
    # not every place, but from another one in each case
    found = list(require_one_of_both(pair(layout), verb, tmp_path, 48, number))
    assert found[-1] or verb in _AT_ONCE
