"""The suite of sources fails for every source that breaks one rule of the contract: one saboteur a rule."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from static_server import StaticServer

from rbtool.core.errors import DatasetNotFoundError, FormatError
from rbtool.core.format.converter import Catalogue, Ids, RemoteDataset, RemoteFile, Source
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


def broken(**methods: Callable[..., Any]) -> type[Source]:
    """The sound source with other methods."""
    return type("Broken", (SoundSource,), methods)


def lists(*ids: str) -> type[Source]:
    return broken(list_ids=lambda source: Ids(ids))


def describes(change: Callable[[RemoteDataset], RemoteDataset], found: str | None = None) -> type[Source]:
    """A source that changes what it looks up, or looks up another dataset than the one that it is asked for."""

    def look_up(source: SoundSource, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        return change(SoundSource.look_up(source, found or dataset_id, revision, totals))

    return broken(look_up=look_up)


def catalogues(change: Callable[[Catalogue], Catalogue], *, heard: bool = True) -> type[Source]:
    def list_catalogue(source: SoundSource, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        return change(SoundSource.list_catalogue(source, known, progress if heard else lambda done, total: None))

    return broken(list_catalogue=list_catalogue)


def fetches(
    choose: Callable[[Sequence[RemoteFile], Path], Sequence[RemoteFile]] = lambda files, folder: files,
    spoil: Callable[[Sequence[RemoteFile], Path], object] = lambda files, folder: None,
    heard: bool = True,
) -> type[Source]:
    """A source that downloads the files which `choose` returns, and then changes something in the folder."""

    def download(source: SoundSource, files: Any, folder: Path, progress: Any, note: Any) -> None:
        SoundSource.download(source, choose(files, folder), folder, progress if heard else lambda amount: None, note)
        spoil(files, folder)

    return broken(download=download)


def without_files(files: Sequence[RemoteFile], folder: Path) -> Sequence[RemoteFile]:
    for file in files:
        (folder / file.path).unlink(missing_ok=True)
    return files


def cut(files: Sequence[RemoteFile], folder: Path) -> None:
    for file in files:
        (folder / file.path).write_bytes((folder / file.path).read_bytes()[:-1])


def probe(source: SoundSource, path: str, addresses: Sequence[str], checksum: str | None = None) -> RemoteFile:
    found = SoundSource.probe(source, path, addresses, checksum)
    return replace(found, size=found.known_size + 1)


def fail(source: SoundSource) -> None:
    SoundSource.on_close(source)
    raise RuntimeError("cannot be closed")


def versioned(found: RemoteDataset) -> RemoteDataset:
    return replace(found, files=(replace(found.files[0], version=str(next(COUNTER))), *found.files[1:]))


def outside(found: RemoteDataset) -> RemoteDataset:
    return replace(found, files=tuple(replace(file, path=f"../{file.path}") for file in found.files))


SABOTEURS: dict[str, dict[str, type[Source]]] = {
    "test_ids_are_sorted_and_reproducible": {
        "an id twice": lists("a-v0", "a-v0"),
        "no ids": lists(),
        "other ids next time": broken(list_ids=lambda source: Ids(("a-v0", f"b-v{next(COUNTER)}"))),
    },
    "test_the_catalogue_has_the_same_ids": {
        "an entry too few": catalogues(lambda found: replace(found, entries=found.entries[:1])),
        "no progress": catalogues(lambda found: found, heard=False),
    },
    "test_an_unknown_id_is_refused": {"any id": describes(lambda found: replace(found, id="no-a-v0"), "a-v0")},
    "test_a_description_names_files_inside_its_folder": {
        "another dataset": describes(lambda found: found, "b-v0"),
        "no files": broken(addresses=lambda source, dataset_id: {}),
        "files outside": describes(outside),
        "a file twice": describes(lambda found: replace(found, files=(*found.files, found.files[0]))),
    },
    "test_a_description_is_reproducible": {"another version next time": describes(versioned)},
    "test_all_files_are_needed_without_a_choice": {
        "other files": broken(choose_files=lambda source, found, _: [replace(found.files[0], path="another")])
    },
    "test_files_are_fetched_once": {
        "another size": broken(probe=probe),
        "nothing": fetches(lambda files, folder: []),
        "a part": fetches(spoil=cut),
        "each time": fetches(without_files),
        "uncounted": fetches(heard=False),
        "another file": fetches(spoil=lambda files, folder: (folder / "index.html").write_text("")),
    },
    "test_a_file_of_another_size_is_fetched_again": {
        "damaged files": fetches(lambda files, folder: [file for file in files if not (folder / file.path).exists()])
    },
    "test_the_switch_that_forbids_the_network_is_honoured": {
        "though forbidden": broken(
            download=lambda source, files, folder, progress, note: fetch_files(
                files, folder, source.transport, progress=progress, note=note
            )
        )
    },
    "test_closing_twice_does_no_harm": {"an error": broken(on_close=fail)},
}
"""Sources by the test of the suite that finds what is wrong with them."""


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


@pytest.mark.parametrize(("test", "name"), [(test, name) for test, kinds in SABOTEURS.items() for name in kinds])
def test_the_suite_finds_a_saboteur(test: str, name: str, tmp_path: Path) -> None:
    assert test in failures(SABOTEURS[test][name], tmp_path)


def test_the_public_methods_are_final() -> None:
    for name in ("ids", "catalogue", "describe", "needed", "fetch", "close"):
        with pytest.raises(TypeError, match=rf"Broken overrides {name}\(\), which does the book-keeping"):
            broken(**{name: lambda self: None})


def test_answers_of_a_source_are_validated() -> None:
    with pytest.raises(FormatError, match="lists 'a-v0' twice"):
        lists("a-v0", "a-v0")().ids()
    another = SABOTEURS["test_a_description_names_files_inside_its_folder"]["another dataset"]
    with another() as source, pytest.raises(FormatError, match="answered with 'b-v0', expected 'a-v0'"):
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
