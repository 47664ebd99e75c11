"""A folder of the store that is replaced by a link in the last moment leads no removal and no rename out of it.

Each job runs in a process of its own, with an audit hook that puts the link in the folder's place when the first
change of the kind is announced: from then on every path through the folder leads outside.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rbtool.core.testing.datasets import write_walks

JOB = """
import os, sys
from pathlib import Path

root, outside, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
folder, swapped = root / "minari" / "deep", []


def hook(event, arguments):
    if event != "rbtool.fs" or arguments[0] != at or swapped or "deep" not in arguments[1]:
        return
    swapped.append(arguments)
    for path in folder.iterdir():  # the names inside it are there outside, too
        (outside / path.name).mkdir(exist_ok=True)
        (outside / path.name / "precious").write_text(path.name)
    Path(sys.argv[4]).write_text("\\n".join(path.name for path in outside.iterdir()))
    os.rename(folder, root / "moved")
    os.symlink(outside, folder)


import rbtool
from rbtool.core.format.staging import Staging, remove_dataset, remove_leftover
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import cache

dataset = folder / "a-v0"
sys.addaudithook(hook)
try:
    {job}
except (rbtool.RbtoolError, OSError) as error:
    print(type(error).__name__, error)
print(swapped)
assert swapped
"""
REPLACE = """with Staging(dataset, replace=True, below=root) as staging:
        write_walks(staging.path, [(3, "terminated")])
        staging.publish()"""
FAIL = """with Staging(dataset, replace=True, below=root) as staging:
        write_walks(staging.path, [(3, "terminated")])"""
LEFTOVER = """cache.prune(root=root)"""
REMOVE = """cache.rm("minari:deep/a-v0", root=root)"""


@pytest.mark.parametrize(
    ("job", "at"),
    [
        (REPLACE, "rename"), (REPLACE, "exchange"), (REPLACE, "remove"), (FAIL, "remove"), (LEFTOVER, "remove"),
        (REMOVE, "rename"), (REMOVE, "remove"),
    ],
)  # fmt: skip
def test_what_a_new_link_leads_to_is_left_alone(job: str, at: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "mine"
    write_walks(root / "minari" / "deep" / "a-v0", [(4, "terminated")])
    leftover = root / "minari" / "deep" / ".a-v0.rbtool-new-01234567"
    if job == LEFTOVER:
        (leftover / "deep").mkdir(parents=True)
    outside.mkdir()
    arguments = [str(root), str(outside), at, str(tmp_path / "names")]
    ran = subprocess.run(
        [sys.executable, "-c", JOB.replace("{job}", job), *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    names = (tmp_path / "names").read_text().split("\n")
    assert names
    assert {path.relative_to(outside).as_posix() for path in outside.rglob("*")} == {
        *names, *(f"{name}/precious" for name in names)
    }, ran.stdout  # fmt: skip
    assert [(outside / name / "precious").read_text() for name in names] == names
