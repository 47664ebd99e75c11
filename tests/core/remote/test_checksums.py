"""The checksums of remotes, beside git, hashlib and google_crc32c."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import google_crc32c
import pytest
from cases import each

from rbtool.core.errors import FormatError, UsageError
from rbtool.core.remote.transport import hasher, matches

DATA = bytes(range(256)) * 9_000  # more than two blocks
CHECKSUMS = {
    "sha256": hashlib.sha256(DATA).hexdigest(),
    "git-sha1": hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest(),
    "md5": hashlib.md5(DATA).hexdigest(),
    "crc32c": f"{google_crc32c.value(DATA):08x}",
}


every_checksum = each("checksum", [f"{name}:{digits}" for name, digits in CHECKSUMS.items()])


@every_checksum
@each("block", [1 << 20, 65_537, len(DATA)])
def test_blocks_of_any_size_give_the_checksum(checksum: str, block: int) -> None:
    checking = hasher(checksum, len(DATA))
    for start in range(0, len(DATA), block):
        assert not checking.matches()
        checking.update(memoryview(DATA)[start : start + block])
    assert checking.matches()
    assert checking.found == checksum


@every_checksum
def test_a_file_matches_its_checksum_and_size(checksum: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(DATA)
    assert matches(file, len(DATA), checksum)
    assert not matches(file, len(DATA) + 1, checksum)
    for at in (0, 1 << 20, len(DATA) - 1):
        file.write_bytes(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])
        assert not matches(file, len(DATA), checksum), at


def test_a_git_blob_and_an_empty_file_have_checksums(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a\nb\n")
    blob = subprocess.run(["git", "hash-object", "--no-filters", file], capture_output=True, text=True, check=True)
    assert matches(file, 4, f"git-sha1:{blob.stdout.strip()}")
    file = tmp_path / "empty"
    file.touch()
    assert matches(file, 0, "crc32c:00000000")
    assert not matches(file, 0, "crc32c:00000001")


@each(
    "checksum", ["", "sha256", "sha256:", "sha1:" + "0" * 40, "md5:" + "0" * 31, "md5:" + "A" * 32, "md5:" + "0" * 33]
)
def test_an_invalid_checksum_is_refused(checksum: str) -> None:
    with pytest.raises(FormatError, match="the checksum"):
        hasher(checksum, 1)


def test_crc32c_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(UsageError, match="google-crc32c") as raised:
        hasher("crc32c:00000000", 0)
    assert raised.value.hint == "pip install 'rbtool[gcp]'"
