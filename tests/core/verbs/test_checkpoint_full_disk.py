"""A limit on the size of files stops a save wherever it strikes, and leaves everything usable."""

import json
from pathlib import Path

import pytest
from forked_scripts import run_forked

from rbtool.core.testing.datasets import write_walks

# In a process of its own: the limit would hit whatever pytest writes as well.
SCRIPT = """
import json, resource, sys
from pathlib import Path
import rbtool
from rbtool.core.verbs import checkpoint

work, form = Path(sys.argv[1]), sys.argv[2]
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
whole = checkpoint.save(work / "walks", work / "whole", form=form)
largest = max(path.stat().st_size for path in [work / "whole", *(work / "whole").rglob("*")] if path.is_file())
stopped = 0
for limit in [0, 1, 100, 4096, *(largest * part // 7 for part in range(1, 7)), largest - 1]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        checkpoint.save(work / "walks", work / "out" / "saved", form=form)
    except rbtool.OutOfSpaceError as error:
        stopped += error.exit_code == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list((work / "out").iterdir()) == [], limit
    again = checkpoint.save(work / "walks", work / "again", form=form, force=True)
    assert again.content_digest == whole.content_digest, limit
    assert checkpoint.verify(work / "again", work / "walks").equal
print(json.dumps(stopped))
"""


@pytest.mark.parametrize("form", ["flat", "h5"])
def test_a_limit_on_file_size(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "walks", [(3000, "terminated"), (2000, "truncated")])
    (tmp_path / "out").mkdir()
    done = run_forked(SCRIPT, tmp_path, form)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 11
