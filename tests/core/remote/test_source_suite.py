"""The suite of sources fails for every source that breaks one rule of the contract: one saboteur a rule."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from static_server import StaticServer

from rbtool.core.errors import DatasetNotFoundError, FormatError
from rbtool.core.format.converter import Catalogue, Ids, RemoteDataset, RemoteFile, Source
from rbtool.core.format.episodes import EpisodeRanges
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpSource
from rbtool.core.testing.sources import SourceTests

FILES = {"a-v0/one.bin": b"one" * 100, "a-v0/deep/two.bin": b"two" * 200, "b-v0/one.bin": b"1"}
COUNTER = itertools.count()


class SoundSource(HttpSource):
    """Two datasets behind plain URLs."""

    name = "sound"
    remote = "overwritten"

    def list_ids(self) -> Ids:
        return Ids(("a-v0", "b-v0"))

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        paths = [path for path in FILES if path.startswith(f"{dataset_id}/")]
        return {path.partition("/")[2]: [f"{self.remote}{path}"] for path in paths}


class ListsTwice(SoundSource):
    def list_ids(self) -> Ids:
        return Ids(("a-v0", "a-v0"))


class ListsNothing(SoundSource):
    def list_ids(self) -> Ids:
        return Ids(())


class ListsOthersNextTime(SoundSource):
    def list_ids(self) -> Ids:
        return Ids(("a-v0", f"b-v{next(COUNTER)}"))


class LeavesOutOfTheCatalogue(SoundSource):
    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        found = super().list_catalogue(known, progress)
        return replace(found, entries=found.entries[:1])


class HasNoProgress(SoundSource):
    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        return super().list_catalogue(known, lambda done, total: None)


class DescribesWhatIsNotThere(SoundSource):
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        return replace(super().look_up("a-v0", revision, totals), id=dataset_id)


class DescribesAnother(SoundSource):
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        return super().look_up("b-v0", revision, totals)


class DescribesWithoutFiles(SoundSource):
    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        return {}


class LeadsOutOfTheFolder(SoundSource):
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        found = super().look_up(dataset_id, revision, totals)
        return replace(found, files=tuple(replace(file, path=f"../{file.path}") for file in found.files))


class DescribesADirectory(SoundSource):
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        found = super().look_up(dataset_id, revision, totals)
        return replace(found, files=(*found.files, found.files[0]))


class DescribesOtherwiseNextTime(SoundSource):
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        found = super().look_up(dataset_id, revision, totals)
        return replace(found, files=(replace(found.files[0], version=str(next(COUNTER))), *found.files[1:]))


class AnnouncesAnotherSize(SoundSource):
    def probe(self, path: str, addresses: Sequence[str], checksum: str | None = None) -> RemoteFile:
        found = super().probe(path, addresses, checksum)
        return replace(found, size=found.known_size + 1)


class NeedsOthers(SoundSource):
    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        return [replace(dataset.files[0], path="another")]


class BringsNothing(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        progress(sum(file.known_size for file in files))


class BringsHalf(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        super().download(files, folder, progress, note)
        for file in files:
            (folder / file.path).write_bytes((folder / file.path).read_bytes()[:-1])


class KeepsWhatIsDamaged(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        absent = [file for file in files if not (folder / file.path).exists()]
        super().download(absent, folder, progress, note)


class FetchesEachTime(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        for file in files:
            (folder / file.path).unlink(missing_ok=True)
        super().download(files, folder, progress, note)


class CountsNothing(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        super().download(files, folder, lambda amount: None, note)


class LeavesOthersBehind(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        super().download(files, folder, progress, note)
        (folder / "index.html").write_text("")


class IgnoresTheSwitch(SoundSource):
    def download(self, files, folder, progress, note) -> None:  # type: ignore[no-untyped-def]
        fetch_files(files, folder, self.transport, progress=progress, note=note)


class FailsWhenClosed(SoundSource):
    def on_close(self) -> None:
        super().on_close()
        raise RuntimeError("cannot be closed")


SABOTEURS = list(SoundSource.__subclasses__())


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StaticServer]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("RBTOOL_RETRIES", "1:0")
    with StaticServer(FILES) as running:
        monkeypatch.setattr(SoundSource, "remote", running.address(""))
        yield running


def failures(kind: type[Source], folder: Path) -> list[str]:
    """Names of the tests of the suite that fail for a source."""

    class Suite(SourceTests):
        def source(self) -> Source:
            return kind()

    failed = []
    for name, test in inspect.getmembers(Suite, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        wanted = inspect.signature(test).parameters
        (folder / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            given = {"tmp_path": folder / name, "monkeypatch": patch}
            try:
                test(Suite(), **{key: value for key, value in given.items() if key in wanted})
            except Exception:
                failed.append(name)
    return failed


def test_a_sound_source_passes(tmp_path: Path) -> None:
    assert failures(SoundSource, tmp_path) == []


@pytest.mark.parametrize("kind", SABOTEURS, ids=lambda kind: kind.__name__)
def test_a_saboteur_fails(kind: type[Source], tmp_path: Path) -> None:
    assert failures(kind, tmp_path)


@pytest.mark.parametrize("name", ["ids", "catalogue", "describe", "needed", "fetch", "close"])
def test_the_public_methods_are_final(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Bad overrides {name}\(\), which does the book-keeping"):
        type("Bad", (SoundSource,), {name: lambda self: None})


def test_what_a_source_says_is_validated() -> None:
    with pytest.raises(FormatError, match="lists 'a-v0' twice"):
        ListsTwice().ids()
    with DescribesAnother() as source, pytest.raises(FormatError, match="answered with 'b-v0', expected 'a-v0'"):
        source.describe("a-v0")
    with SoundSource() as source, pytest.raises(DatasetNotFoundError, match="has no dataset c-v0"):
        source.describe("c-v0")


def test_checksums_that_are_known_are_verified(server: StaticServer, tmp_path: Path) -> None:
    class Known(SoundSource):
        def checksums(self, dataset_id: str) -> Mapping[str, str]:
            return {"one.bin": "md5:" + "0" * 32}

    with Known() as source:
        found = source.describe("b-v0")
        assert (found.unverified, found.files[0].size) == ((), 1)
        with pytest.raises(FormatError, match="is not what was announced"):
            source.fetch(found.files, tmp_path)


def test_the_first_server_that_answers_gives_size_and_version(server: StaticServer) -> None:
    with SoundSource() as source:
        found = source.probe("one.bin", [server.address("nothing"), server.address("a-v0/one.bin")])
        assert (found.size, found.version, found.checksum) == (300, None, None)
        with pytest.raises(DatasetNotFoundError, match="does not have"):
            source.probe("one.bin", [server.address("nothing")])
