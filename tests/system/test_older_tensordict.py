"""What rbtool writes opens in the oldest tensordict we promise, and the verbs that use tensordict run with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks

OLDER = Path(sys.prefix) / "older"
"""`make` installs the older tensordict here, beside the pinned one."""

READ = """
import json, sys, numpy as np, tensordict
data = tensordict.TensorDict.load_memmap(sys.argv[1])
np.savez(sys.argv[2], **{".".join(k) if isinstance(k, tuple) else k: v.numpy() for k, v in data.items(True, True)})
print(json.dumps([tensordict.__version__, *data.batch_size]))
"""

VERBS = """
import sys, rbtool, tensordict
assert tensordict.__version__.startswith("0.14."), tensordict.__version__
def double(rows):
    rows["observation"] = rows["observation"] * 2
    return rows
rbtool.preprocess(sys.argv[1], double, sys.argv[2], num_workers=0, chunk_size=5)
print(rbtool.sample(sys.argv[2], 4, seed=3).indices)
"""


def _run(code: str, *words: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(OLDER), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(7, "terminated"), (1, "truncated"), (4, "open")])
    return tmp_path / "walks"


def test_every_value_is_read(walks: Path, tmp_path: Path) -> None:
    version, steps = json.loads(_run(READ, walks, tmp_path / "read.npz"))
    assert version.startswith("0.14.")
    assert steps == 12
    with TedReader(walks) as reader, np.load(tmp_path / "read.npz") as found:
        assert set(found) == {field.name for field in reader.fields}
        for field in reader.fields:
            np.testing.assert_array_equal(found[field.name], reader.read(field.key, 0, 12))


def test_the_verbs_that_use_tensordict_give_the_same(walks: Path, tmp_path: Path) -> None:
    printed = _run(VERBS, walks, tmp_path / "older")

    def double(rows):  # type: ignore[no-untyped-def]
        rows["observation"] = rows["observation"] * 2
        return rows

    newer = rbtool.preprocess(walks, double, tmp_path / "newer", num_workers=0, chunk_size=5)
    assert TedReader(tmp_path / "older").manifest.content_digest == newer.content_digest
    assert printed.strip() == str(rbtool.sample(tmp_path / "newer", 4, seed=3).indices)
