"""Manifests, and names in them that would lead out of a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each

from rbtool import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError
from rbtool.core.format.documents import dump_json
from rbtool.core.format.episodes import episode_text_bytes, parse_episode_text
from rbtool.core.format.files import FileRecord, digest_bytes
from rbtool.core.format.manifest import FORMAT_VERSION, MANIFEST, Manifest, Request, is_canonical, is_inside
from rbtool.core.format.memmap.builder import write_documents
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_walks(tmp_path / "data", [(4, "truncated"), (1, "open")])
    return tmp_path / "data"


def test_a_manifest_is_read_as_it_was_written(folder: Path) -> None:
    manifest = Manifest.load(folder)
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())), "here") == manifest
    assert manifest.boundary.to_dict() == {
        "terminated": 0, "truncated": 1, "both": 0, "end_of_file": 1, "inferred": 0, "explicit_next": 0,
    }  # fmt: skip
    document = json.loads((folder / MANIFEST).read_text(), parse_constant=pytest.fail)  # strict JSON has no Infinity
    assert document["spaces"]["observation"]["low"] == "-inf"
    manifest = replace(manifest, request=Request("minari", "caf\udce9", "walks"))
    manifest.save(folder, at_once=True)
    assert b"caf\\udce9" in (folder / MANIFEST).read_bytes()
    assert Manifest.load(folder) == manifest
    assert is_canonical((folder / MANIFEST).read_bytes())


def test_a_changed_document_is_noticed(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"steps": 5', '"steps": 6'))
    with pytest.raises(CorruptDataError, match="changed after it was written"):
        Manifest.load(folder)
    (folder / MANIFEST).write_text(text.replace("\n ", "\n\t", 1))  # white space, too
    with TedReader(folder) as reader, pytest.raises(CorruptDataError, match=r"manifest\.json was changed"):
        reader.verify_files()


def test_a_newer_version_is_refused_with_the_way_out(folder: Path) -> None:
    document = json.loads((folder / MANIFEST).read_text()) | {"format_version": FORMAT_VERSION + 1}
    (folder / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(FormatError, match="has format version 2, this rbtool reads up to 1") as caught:
        Manifest.load(folder)
    assert "pip install --upgrade" in caught.value.hint


@each("text", ["", "{", "[]", "{}", '{"format_version": "1"}', "\x00\xff"])
def test_other_documents_are_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"manifest\.json"):
        Manifest.load(folder)


@each(
    ("name", "value", "said"),
    [
        ("steps", "5", "has '5' as steps, expected a whole number"),
        ("layout", "zip", "as layout, expected one of ted, packed"),
        ("request", {"source": 1, "asked": "", "id": ""}, "has 1 as request.source, expected text"),
        ("provenance", [{}], r"as provenance\[0\], expected an object with verb"),
        ("fields", [{"key": ["a"], "dtype": "int64", "shape": [], "role": "id"}] * 2, "a file of their own"),
        ("fields", [{"key": ["a"], "dtype": "int64", "shape": [], "role": "id"}], "expected an object with min"),
        ("files", [{"path": "a/../../b", "size": 0, "digest": ""}], "expected a path inside the folder"),
        ("files", [{"path": "/".join("a" * 2000), "size": 0, "digest": ""}], "expected a path inside the folder"),
        ("boundary", {"both": None}, "has None as boundary.both, expected a whole number"),
        ("renamed_keys", {"a": 1}, "has 1 as renamed_keys.a, expected text"),
        ("notes", "none", "as notes, expected a list"),
        ("spaces", [], "as spaces, expected an object"),
    ],
)
def test_a_document_of_other_types_is_refused_with_its_place(folder: Path, name: str, value: Any, said: str) -> None:
    document = Manifest.load(folder).to_dict() | {name: value}
    rest = {key: part for key, part in document.items() if key != "manifest_digest"}
    document["manifest_digest"] = digest_bytes(dump_json(rest, sort_keys=True).encode())
    with pytest.raises(FormatError, match=said):
        Manifest.from_dict(document, "manifest.json")


@each("key", [("observation", ""), ("info",) * 51, ("half \ud83d",)])
def test_a_field_that_could_not_be_read_again_is_refused(key: tuple[str, ...], folder: Path) -> None:
    manifest, before = Manifest.load(folder), (folder / MANIFEST).read_bytes()
    odd = replace(manifest, fields=(*manifest.fields, replace(manifest.fields[0], key=key)))
    with pytest.raises(SchemaError, match=r"the field .* cannot be stored"):
        odd.save(folder)
    assert (folder / MANIFEST).read_bytes() == before


def test_a_folder_without_one_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="is not an rbtool dataset"):
        Manifest.load(tmp_path)


def test_requests_are_equal_but_for_how_they_were_put() -> None:
    request = Request("minari", "door", "D4RL/door/human-v2")
    assert request.identity() == replace(request, asked="door-human-v1", origin="remote").identity()
    assert request.whole
    for change in ({"id": "x"}, {"revision": "r"}, {"episodes": "0:3"}, {"layout": "packed"}, {"source": "d4rl"}):
        assert replace(request, **change).identity() != request.identity()  # type: ignore[arg-type]
    assert not replace(request, episodes="0:3").whole


# Names that would lead out of a folder, and text that looks like something else.


def test_a_document_cannot_leave_its_folder(tmp_path: Path) -> None:
    for name in ("../up", "a/../../up", "/etc/passwd", "", ".", "a//b", "a/."):
        with pytest.raises(FormatError, match="leads out"):
            write_documents(tmp_path / "root", {name: b"x"})
    assert list(tmp_path.iterdir()) == []
    for name in ("a", "a/b.json", "..a", ".rbtool/manifest.json", "a..b/c"):
        assert is_inside(name)


def test_a_manifest_cannot_list_files_outside(folder: Path) -> None:
    outside = FileRecord(".rbtool/source/../../../../etc/hostname", 1, "xxh3-128:0")
    (folder / MANIFEST).write_bytes(replace(Manifest.load(folder), files=(outside,)).to_bytes())
    with pytest.raises(FormatError, match="expected a path inside the folder"):
        Manifest.load(folder)


@each("text", ["a\u2028b", "a\x85b", "a\nb", "a\r\nb", "a\x1cb", "é", ""])
def test_any_text_of_an_episode_comes_back(text: str) -> None:
    rows = [{"task": text}, {}, {"task": "more", "a": text}]
    assert parse_episode_text(episode_text_bytes(rows), "here") == rows
