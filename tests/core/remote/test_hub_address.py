"""Addresses on a hub, and what is recorded of transfers."""

from __future__ import annotations

import pytest
from cases import each

from rbtool import UsageError
from rbtool.core.format.manifest import TRANSFERS
from rbtool.core.remote.hub_address import HubAddress, Transfer, add_transfer, transfers_of


def transfer(commit="0" * 40):
    return Transfer("upload", "hf://me/walks", None, commit, "https://hub", "xxh3-128:0", "2026-01-01T00:00:00+00:00")


@each(
    ("text", "repository", "revision"),
    [
        ("hf://me/walks", "me/walks", None), ("hf:me/walks", "me/walks", None), ("me/walks", "me/walks", None),
        ("hf://Me-1/w.a_l-ks@v1.0", "Me-1/w.a_l-ks", "v1.0"), ("hf://me/walks@refs/pr/5", "me/walks", "refs/pr/5"),
    ],
)  # fmt: skip
def test_an_address_is_read(text, repository, revision):
    assert HubAddress.parse(text) == (repository, revision)


def test_an_address_is_written_as_it_is_read():
    address = HubAddress.parse("hf://me/walks@v2")
    assert HubAddress.parse(str(address)) == address
    assert address.at("abc") == "hf://me/walks@abc"
    assert HubAddress.parse("hf://me/walks@v1", "v1").revision == "v1"
    with pytest.raises(UsageError, match="two revisions"):
        HubAddress.parse("hf://me/walks@v1", "v2")


@each(
    "text",
    [
        "", "hf://", "hf:///", "hf://me", "hf://me/", "hf:///walks", "hf://me//walks", "hf://me/walks/", "hf://me/a/b",
        "hf://./walks", "hf://me/..", "hf://me/.hidden", "hf://me/a..b", "hf://me/a--b", "hf://me/-a", "hf://me/a.",
        "hf://me/wal ks", "hf://me/wal\nks", "hf://me/wälks", "hf://me/walks@", "hf://me/walks@ ", "hf://me/walks@../x",
        "hf://me/walks@a..b", "hf://me/walks@/a", "hf://me/walks@a/", "hf://me/walks@-a", "hf://me/walks@a@b",
        "hf://me/walks?x=1", "hf://user:pw@host/me/walks", f"hf://me/{'a' * 96}", "hf://datasets/me/walks",
    ],
)  # fmt: skip
def test_an_invalid_address_is_refused(text):
    with pytest.raises(UsageError):
        HubAddress.parse(text)


def test_a_record_outlives_lines_that_were_cut(tmp_path):
    (tmp_path / ".rbtool").mkdir()
    add_transfer(tmp_path, transfer("1" * 40))
    with (tmp_path / TRANSFERS).open("ab") as file:
        file.write(b'{"verb": "uplo')
    add_transfer(tmp_path, transfer("2" * 40))
    assert [one.commit[0] for one in transfers_of(tmp_path)] == ["1", "2"]


@each("content", [b"", b"\0\xff\n", b"[1]\n", b"{}\n", b'{"verb": 3}\n', b"\n\n"])
def test_a_record_that_makes_no_sense_counts_for_nothing(tmp_path, content):
    (tmp_path / ".rbtool").mkdir()
    (tmp_path / TRANSFERS).write_bytes(content)
    assert transfers_of(tmp_path) == []
    add_transfer(tmp_path, transfer())
    assert transfers_of(tmp_path) == [transfer()]
