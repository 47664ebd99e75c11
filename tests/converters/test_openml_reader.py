"""OpenML's tables: downloaded from a stand-in of its interface, encoded as in a plain reading, damage refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from conversions import MirrorSourceTests, column
from static_server import Fault, StaticServer, mirror
from table_files import openml_server, plain_reading, tables

import rbtool
from rbtool.converters.openml.reader import DATASETS, ArffFile, OpenmlReader, OpenmlSource
from rbtool.core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from rbtool.core.format.memmap.reader import TedReader

DESCRIBED = "api/v1/json/data/1120"
FILE = "data/v1/download/6120"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StaticServer]:
    with mirror(openml_server(), "OPENML_URL", monkeypatch, tmp_path / "store", base="") as running:
        yield running


class TestSource(MirrorSourceTests):
    name, id, count = "openml", "magic", len(DATASETS)


@each("name", DATASETS)
def test_every_row_equals_a_plain_encoding(name: str, server: StaticServer) -> None:
    one = DATASETS[name]
    table = tables()[one.table]
    target = "occupation" if one.table == "adult" else table.target
    vectors, labels = plain_reading(table, one_hot=one.one_hot, target=target, complete=one.table == "adult")
    with TedReader(rbtool.download("openml", name).path) as reader:
        found, codes = column(reader, "observation"), column(reader, "y")
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, vectors, rtol=1e-13, atol=1e-13)
        assert codes.tolist() == labels.tolist()
        assert reader.episodes.length.tolist() == [1] * len(labels)
        assert reader.episodes.terminated.all()
        assert not any(field.key[0] == "next" and field.role == "observation" for field in reader.fields)
        encoding = json.loads(reader.documents()["encoding.json"])
    assert rbtool.check(f"openml:{name}").errors == 0
    others = [name for name in table.columns if name not in {target, table.target, "id"}]
    assert [one["name"] for one in encoding["columns"]] == others
    assert encoding["label"]["name"] == target


def test_the_documents_turn_numbers_back(server: StaticServer) -> None:
    with TedReader(rbtool.download("openml", "adult_num").path) as reader:
        rows, labels = column(reader, "observation"), column(reader, "y")
        encoding = json.loads(reader.documents()["encoding.json"])
        dropped = {item.key for item in reader.manifest.dropped_keys}
    kept = [row for row in tables()["adult"].rows if None not in row[:5]]
    age, work = encoding["columns"][0], encoding["columns"][1]
    assert np.allclose(rows[:, 0] * age["std"] + age["mean"], [row[0] for row in kept])
    assert [work["categories"][int(code)] for code in rows[:, 1]] == [row[1] for row in kept]
    assert [encoding["label"]["categories"][code] for code in labels] == [row[3] for row in kept]
    assert encoding["rows_left_out"] == 60 - len(kept)
    assert dropped == {"class"}


def test_a_file_with_another_md5_is_not_kept(server: StaticServer, tmp_path: Path) -> None:
    server.faults[FILE] = server.faults["other/MagicTelescope.arff"] = [Fault(corrupt=400)]
    with pytest.raises(CorruptDataError, match="md5"):
        rbtool.download("openml", "magic")
    assert not list((tmp_path / "store").rglob("*.arff"))


def test_without_a_size_the_md5_is_compared_in_the_end(server: StaticServer) -> None:
    places = (FILE, "other/MagicTelescope.arff")
    server.faults |= {path: [Fault(chunked=True)] for path in places}
    assert rbtool.download("openml", "magic").steps == 50
    server.faults |= {path: [Fault(chunked=True, corrupt=400)] for path in places}
    with pytest.raises(CorruptDataError, match="does not have the md5:"):
        rbtool.download("openml", "magic", force=True)


def test_the_second_address_serves_when_the_first_does_not(server: StaticServer) -> None:
    server.faults[FILE] = [Fault(status=404)]
    assert rbtool.download("openml", "magic").steps == 50


def test_what_is_not_there_is_not_found(server: StaticServer) -> None:
    with pytest.raises(DatasetNotFoundError, match="openml has no dataset 'shutle'") as raised:
        rbtool.download("openml", "shutle")
    assert "shuttle" in raised.value.hint
    server.faults["api/v1/json/data/list/data_name/shuttle/limit/2/data_version/1"] = [Fault(status=412)]
    with pytest.raises(DatasetNotFoundError, match="no table 'shuttle' in version 1"):
        rbtool.download("openml", "shuttle")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2"}, "describes 'MagicTelescope' in version '2'"),
        ({"md5_checksum": "abc"}, "states the md5 'abc'"),
        ({"default_target_attribute": "klass"}, "has no column 'klass' for the label"),
        ({"default_target_attribute": "a"}, "the label 'a' has numbers"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(
    change: dict[str, str], message: str, server: StaticServer
) -> None:
    described = json.loads(server.files[DESCRIBED])
    described["data_set_description"] |= change
    server.files[DESCRIBED] = json.dumps(described).encode()
    with pytest.raises(FormatError, match=message):
        rbtool.download("openml", "magic")
    for content in (b"[]", b"<html>", b'{"data_set_description": 3}'):
        server.files[DESCRIBED] = content
        with pytest.raises(FormatError):
            rbtool.download("openml", "magic")


def test_an_address_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENML_URL", "https://me:secret@host/x")
    with pytest.raises(UsageError) as raised:
        _ = OpenmlSource().remote
    assert "secret" not in str(raised.value)


def test_offline_nothing_is_asked(server: StaticServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    with pytest.raises(NetworkError, match="RBTOOL_OFFLINE"):
        rbtool.download("openml", "magic")
    assert server.asked == []


HEADER = "@relation r\n@attribute a numeric\n@attribute 'b c' {x,'y z'}\n@data\n"


def rows_of(path: Path, text: str) -> dict[str, list[float]]:
    path.write_text(text)
    found: dict[str, list[float]] = {"a": [], "b c": []}
    for block in ArffFile(path).blocks():
        for name, values in block.items():
            found[name] += values.tolist()
    return found


def test_arff_with_comments_blanks_and_quotes(tmp_path: Path) -> None:
    rows = "1.5, x\n% a comment\n\n-2,'y z'\n ?,?\n3 , 'x'\n"
    header = HEADER.replace("@relation", "% first\n@RELATION").replace("@data", "@DATA")
    found = rows_of(tmp_path / "a.arff", header + rows.replace("3 , 'x'", "3 ,x "))
    assert np.array_equal(found["a"], [1.5, -2, np.nan, 3], equal_nan=True)
    assert found["b c"] == [0, 1, -1, 0]


@each(
    ("text", "message"),
    [
        (HEADER + "1,z\n", "'b c' is 'z' in row 0, which is not among the 2 categories"),
        (HEADER + "one,x\n", "cannot be read"),
        (HEADER + "1\n", "Expected 2 columns, got 1"),
        (HEADER + "{0 1}\n", "cannot be read"),
        (HEADER[:40], "does not end in @data"),
        (HEADER.replace("numeric", "string") + "1,x\n", "is of type 'string'"),
        (HEADER.replace("{x,'y z'}", "{x,x}") + "1,x\n", "a category twice"),
        (HEADER.replace("'b c'", "a") + "1,x\n", "the attribute 'a' again"),
        ("@data\n1\n", "no @attribute"),
        ("a,b\n1,2\n", "is not an ARFF file"),
    ],
)
def test_arff_that_is_damaged_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RbtoolError, match=message):
        rows_of(tmp_path / "a.arff", text)


def test_the_stand_in_states_the_md5_of_its_files(server: StaticServer) -> None:
    described = json.loads(server.files[DESCRIBED])["data_set_description"]
    assert described["md5_checksum"] == hashlib.md5(server.files[FILE]).hexdigest()


def written(folder: Path, rows: int) -> OpenmlReader:
    """Write a table like covertype, with the description that comes with it."""
    draw = np.random.default_rng(0)
    described = {"data_set_description": {"default_target_attribute": "class", "name": "covertype"}}
    (folder / "description.json").write_text(json.dumps(described))
    with (folder / "covertype.arff").open("w") as file:
        names = [f"@attribute n{one} numeric" for one in range(10)]
        names += [f"@attribute b{one} {{0,1}}" for one in range(44)]
        file.write("\n".join(["@relation c", *names, "@attribute class {1,2,3,4,5,6,7}", "@data", ""]))
        for start in range(0, rows, 20_000):
            count = min(20_000, rows - start)
            numbers, flags = draw.integers(0, 3000, (count, 10)), draw.random((count, 44)) < 0.1
            labels = draw.integers(1, 8, (count, 1))
            np.savetxt(file, np.concatenate((numbers, flags, labels), 1), fmt="%d", delimiter=",")
    return OpenmlReader(folder, options={"id": "covertype"})


def test_blocks_of_rows_are_the_rows_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbtool.converters.openml.reader._BLOCK_BYTES", 4096)
    with written(tmp_path, 600) as reader:
        reader.facts()
        for numbers in ([], [0], [3, 4, 599], [599, 1, 1, 2], list(range(600))):
            blocks = list(reader.read_episodes(numbers))
            single = [piece for number in numbers[:50] for piece in reader.read_episode(number)]
            found = [(int(one), *rows) for block in blocks for one, *rows in _rows_of(block)]
            assert [one for one, *_ in found] == numbers
            for (number, row, label), piece in zip(found, single, strict=False):
                assert (number, row.tolist()) == (piece.episode, piece.columns["observation",][0].tolist())
                assert label == piece.columns["y",][0]
        assert len(blocks) > 10


def _rows_of(block: Any) -> Iterator[tuple[Any, Any, Any]]:
    assert block.stops.tolist() == list(range(1, len(block.episodes) + 1))
    return zip(block.episodes, block.columns["observation",], block.columns["y",], strict=True)


MEASURED = """
import sys
from pathlib import Path
from rbtool.converters.openml.reader import OpenmlReader
from rbtool.core.format.manifest import Request
from rbtool.core.verbs.convert import SourceConversion, choose_episodes
from rbtool.core.verbs.options import ConvertOptions
source, to = map(Path, sys.argv[1:])
with OpenmlReader(source, options={"id": "covertype"}) as reader:
    asked, request = ConvertOptions(source, to), Request("openml", "x", "covertype", origin="file")
    made = SourceConversion(asked, reader, choose_episodes(reader, None, asked), source, to, request, {}).run()
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # maxrss counts the parent, too
print(made["steps"], int(most.split()[1]) >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_table_as_long_as_covertype_converts_under_330_mib(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in", 581_012).close()
    words = [sys.executable, "-c", MEASURED, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    steps, mebibytes = map(int, done.stdout.split())
    assert steps == 581_012
    assert mebibytes < 330
