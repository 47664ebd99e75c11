"""What all verbs that write keep to: destinations are replaced only on request, and never by half of a result."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from damage import flip

import rbtool
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, OutOfSpaceError, UsageError
from rbtool.core.format import fs
from rbtool.core.format.staging import Staging
from rbtool.core.testing.datasets import write_walks

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]
RAW = Path(__file__).parents[2] / "data" / "minari" / "tuple" / "trunc-v0"
Verb = Callable[..., Any]

VERBS: dict[str, Verb] = {
    "convert": lambda source, dest, **how: rbtool.convert(source, dest, layout="packed", **how),
    "convert raw": rbtool.convert,
    "preprocess": lambda source, dest, **how: rbtool.preprocess(
        source, None, dest, operations={"clip_reward": "-9:9"}, num_workers=0, **how
    ),
    "merge": lambda source, dest, **how: rbtool.merge([source, source], dest, **how),
    "split": lambda source, dest, **how: rbtool.split(source, dest, train=0.5, val=0.5, **how),
    "score": rbtool.score,
    "load": rbtool.checkpoint.load,
    "save": lambda source, dest, **how: rbtool.checkpoint.save(source, dest, form="nested", **how),
    "save h5": lambda source, dest, **how: rbtool.checkpoint.save(source, dest, form="h5", **how),
}
EXPORTS: dict[str, Verb] = {
    "export h5": lambda source, dest, **how: rbtool.export(source, dest, to="h5", **how),
    "export parquet": lambda source, dest, **how: rbtool.export(source, dest, to="parquet", **how),
}


@dataclass
class Work:
    """A verb with a source and a destination in an otherwise empty folder."""

    verb: Verb
    source: Path
    dest: Path

    def __call__(self, **how: Any) -> Any:
        return self.verb(self.source, self.dest, **how)

    def beside(self) -> list[str]:
        """The names in the folder, leftovers among them, but for the source."""
        return sorted(path.name for path in self.dest.parent.iterdir() if path != self.source)


def write_source(name: str, place: Path, seed: int = 0) -> Path:
    """Write what the verb of this name reads."""
    if name == "convert raw":
        return Path(shutil.copytree(RAW, place))
    write_walks(place, EPISODES, seed=seed)
    if name == "load":
        rbtool.checkpoint.save(place, place.with_name("saved"), form="flat")
        shutil.rmtree(place)
        place.with_name("saved").rename(place)
    return place


@pytest.fixture
def work(request: pytest.FixtureRequest, tmp_path: Path) -> Work:
    name = request.param
    (folder := tmp_path / "folder").mkdir()
    return Work((VERBS | EXPORTS)[name], write_source(name, folder / "source"), folder / "made")


every_verb = pytest.mark.parametrize("work", [*VERBS, *EXPORTS], indirect=True)


@every_verb
def test_a_dry_run_writes_nothing(work: Work) -> None:
    assert work(dry_run=True).dry_run
    assert work.beside() == []


@every_verb
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_foreign_files_are_never_replaced(work: Work, kind: str) -> None:
    mine = work.dest / "notes.txt" if kind == "folder" else work.dest
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    for force in (False, True):
        with pytest.raises(UsageError, match=r"left unchanged|already exists"):
            work(force=force)
    assert (mine.read_text(), work.beside()) == ("mine", ["made"])
    assert mine == work.dest or [*work.dest.iterdir()] == [mine]


@every_verb
@pytest.mark.parametrize("place", ["source", "source/inside", ".", "link"])
def test_a_destination_that_overlaps_the_source_is_refused(work: Work, place: str) -> None:
    folder = work.source.parent
    (folder / "link").symlink_to(work.source)
    before = sorted(folder.rglob("*"))
    work.dest = folder / place
    with pytest.raises(UsageError, match="overlap"):
        work(force=True)
    assert sorted(folder.rglob("*")) == before


@every_verb
def test_a_missing_source_is_not_found(work: Work) -> None:
    work.source = work.source.with_name("nothing")
    with pytest.raises(DatasetNotFoundError):
        work()
    assert not work.dest.exists()


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize(
    "work", [name for name in [*VERBS, *EXPORTS] if name not in ("convert raw", "load")], indirect=True
)
def test_a_damaged_source_is_refused_and_leaves_nothing(work: Work, layout: str) -> None:
    if layout == "packed":
        rbtool.convert(work.source, work.source.parent / "packed", layout=layout)
        shutil.rmtree(work.source)
        (work.source.parent / "packed").rename(work.source)
    flip(work.source / ("action.memmap" if layout == "ted" else "records.bin"), 5)
    with pytest.raises(CorruptDataError):
        work()
    assert work.beside() == []


@every_verb
def test_a_full_disk_is_noticed_before_anything_is_written(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "free_space", lambda path: 100)
    with pytest.raises(OutOfSpaceError, match="100 bytes free"):
        work()
    assert work.beside() == []


@pytest.mark.parametrize("work", VERBS, indirect=True)
def test_an_equal_result_is_already_there_unless_it_is_damaged(work: Work) -> None:
    work()
    made_at = work.dest.stat().st_ino
    assert work().already_there
    assert work(dry_run=True).already_there
    assert work.dest.stat().st_ino == made_at
    assert not work(force=True).already_there
    files = [work.dest, *work.dest.rglob("*.memmap"), *work.dest.rglob("records.bin")]
    file = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="already exists"):
        work()
    assert not work(force=True).already_there
    assert work().already_there
    assert work.beside() == ["made"]


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("name", VERBS)
def test_the_result_of_a_faster_process_is_taken_if_it_is_equal(name, equal, tmp_path, monkeypatch) -> None:
    source, dest, verb, publish = (
        write_source(name, tmp_path / "source"),
        tmp_path / "made",
        VERBS[name],
        Staging.publish,
    )
    write_walks(tmp_path / "other", [(3, "open"), (2, "terminated")])

    def publish_second(staging: Staging, *names: Any) -> bool:
        monkeypatch.undo()
        if equal:
            verb(source, dest)
        else:
            rbtool.convert(tmp_path / "other", dest)
        return publish(staging, *names)

    monkeypatch.setattr(Staging, "publish", publish_second)
    if equal:
        assert verb(source, dest).already_there
    else:
        with pytest.raises(UsageError, match=r"already exists|another process"):
            verb(source, dest)
        assert rbtool.inspect(dest).steps == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "other", "source"]
