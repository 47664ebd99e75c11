"""Uploads to a hub and downloads from one are killed at each request, and at each change of files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rbtool.core.testing.datasets import write_walks

SCRIPT = Path(__file__).with_name("hub_transfers.py")


def struck(work: Path, *words: str) -> int:
    """Run the script; how often it struck."""
    write_walks(work / "walks", [(40, "terminated"), (1, "truncated"), (70, "open"), (9, "both")])
    done = subprocess.run([sys.executable, SCRIPT, work, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: int = json.loads(done.stdout)["struck"]
    return found


@pytest.mark.parametrize(
    ("verb", "where", "every", "least"),
    [("download", "operations", 299, 2)],
)
def test_a_few_kills(tmp_path, verb, where, every, least):
    assert struck(tmp_path, verb, where, "--every", str(every)) >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "where", "every", "least"),
    [
        ("upload", "requests", 1, 80),
        ("upload", "operations", 1, 3),
        ("download", "requests", 1, 25),
        ("download", "operations", 5, 100),
        ("stream", "operations", 7, 90),
    ],
)
def test_kills_everywhere(tmp_path, verb, where, every, least):
    assert struck(tmp_path, verb, where, "--every", str(every)) >= least
