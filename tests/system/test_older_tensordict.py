"""What rbtool writes opens in the oldest tensordict we promise, and the verbs that use tensordict run with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks

OLDER = Path(sys.prefix) / "older"
"""`make` installs the older tensordict here, beside the pinned one."""

READ = """
import json, sys, numpy as np, rbtool, tensordict
walks, read, dest = sys.argv[1:]
data = tensordict.TensorDict.load_memmap(walks)
np.savez(read, **{".".join(k) if isinstance(k, tuple) else k: v.numpy() for k, v in data.items(True, True)})
def double(rows):
    rows["observation"] = rows["observation"] * 2
    return rows
rbtool.preprocess(walks, double, dest, num_workers=0, chunk_size=5)
print(json.dumps([tensordict.__version__, *data.batch_size, rbtool.sample(dest, 4, seed=3).indices]))
"""


def test_every_value_is_read_and_the_verbs_that_use_tensordict_give_the_same(tmp_path: Path) -> None:
    walks = tmp_path / "walks"
    write_walks(walks, [(7, "terminated"), (1, "truncated"), (4, "open")])
    environment = {**os.environ, "PYTHONPATH": str(OLDER), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", READ, walks, tmp_path / "read.npz", tmp_path / "older"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version, steps, indices = json.loads(done.stdout)
    assert version.startswith("0.14.")
    assert steps == 12
    with TedReader(walks) as reader, np.load(tmp_path / "read.npz") as found:
        assert set(found) == {field.name for field in reader.fields}
        for field in reader.fields:
            np.testing.assert_array_equal(found[field.name], reader.read(field.key, 0, 12))

    def double(rows):  # type: ignore[no-untyped-def]
        rows["observation"] = rows["observation"] * 2
        return rows

    newer = rbtool.preprocess(walks, double, tmp_path / "newer", num_workers=0, chunk_size=5)
    assert TedReader(tmp_path / "older").manifest.content_digest == newer.content_digest
    assert tuple(indices) == rbtool.sample(tmp_path / "newer", 4, seed=3).indices
