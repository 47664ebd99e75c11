"""What is written to disk is what earlier versions wrote, byte for byte, and what they wrote is still read.

`python tests/tools/golden.py` writes the expected digests anew, after a change of a format that is meant.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import golden
import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand small files are written here, and no test pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_no_byte_on_disk_has_changed(tmp_path: Path) -> None:
    golden.make(tmp_path)
    found, expected = golden.digests(tmp_path), json.loads(golden.EXPECTED.read_text())
    missing, new = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    assert (missing, new) == ([], [])
    assert [name for name in expected if found[name] != expected[name]] == []


def test_files_of_earlier_versions_give_the_same_rows(tmp_path: Path) -> None:
    assert golden.kept_rows(golden.KEPT) == json.loads(golden.KEPT_ROWS.read_text())


def test_a_change_of_one_value_is_seen(tmp_path: Path) -> None:
    golden.write_walks(tmp_path / "walks", golden.WALKS)
    golden.save(tmp_path / "walks", tmp_path / "walks.h5", form="h5")
    before = golden.digests(tmp_path)
    for name in ("walks/observation.memmap", "walks/.rbtool/manifest.json"):
        path = tmp_path / name
        data = bytearray(path.read_bytes())
        at = data.index(b'"steps": 33') + 9 if name.endswith("json") else 0
        data[at] ^= 1
        path.write_bytes(data)
        after = golden.digests(tmp_path)
        assert [key for key in after if after[key] != before[key]] == [name]
        before = after
