"""`rbtool migrate` on the screen, in a pipe and in CI."""

from __future__ import annotations

import json

import pytest

CODE = "from torchrl.data import SliceSampler, StoreStorage\n"


@pytest.fixture
def place(tmp_path):
    """A folder with a file to change, one that needs nothing, and one that is not Python."""
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "other.py").write_text("import torch\n")
    (tmp_path / "bad.py").write_text("import torchrl.data\n)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("code.py --check -q", 3, "code.py\n"),
        (". --check -q", 3, "code.py\n"),
        (". --dry-run -q", 1, "code.py\n"),
        ("other.py --check", 0, ""),
        ("code.py --diff", 0, "--- code.py\n+++ code.py\n@@ -1 +1,2 @@\n" + f"-{CODE}"
         "+from rbtool import SliceSampler\n+from torchrl.data import StoreStorage\n"),
        ("nothing.py", 4, ""),
    ],
)  # fmt: skip
def test_what_is_printed_and_the_exit_code(words, code, shown, place, shell):
    done = shell(f"rbtool migrate {words}", place)
    assert (done.returncode, done.stdout) == (code, shown)
    assert ("bad.py is left unchanged: line 2" in done.stderr) == words.startswith(".")
    assert (place / "code.py").read_text() == CODE


def test_the_list_and_the_document(place, shell):
    document = json.loads(shell("rbtool migrate . --dry-run --json", place).stdout)
    assert (document["kind"], document["examined"], document["changed"]) == ("migrate", 3, 1)
    assert [(file["path"], bool(file["error"])) for file in document["files"]] == [("bad.py", True), ("code.py", False)]
    done = shell("rbtool migrate code.py", place)
    first, *rest = (line.split(maxsplit=2) for line in done.stdout.splitlines())
    assert (done.returncode, first) == (0, ["code.py", "changed", "SliceSampler"])
    assert [row[:2] for row in rest] == [["code.py:1", "stays"], ["code.py:1", "differs"]]
    assert done.stderr.splitlines()[-1] == "1 of 1 file changed, 1 name moved"
    assert shell("rbtool migrate code.py --check", place).returncode == 0
