"""`bench`: libraries read what the dataset holds, or are refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rbtool
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.testing.datasets import write_walks

EPISODES = [(30, "truncated"), (1, "terminated"), (20, "truncated")]
QUICK: dict[str, Any] = {"batches": 2, "rounds": 2, "batch_size": 8, "chunk": 5}


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "walks"
    write_walks(folder, EPISODES)
    return folder


def changed(folder: Path, *replaced: str) -> str:
    """Return an interpreter in which the code of a library is another."""
    wrapper = folder / "python"
    wrapper.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "source = open(sys.argv[2]).read()\n"
        f"old, new = {replaced!r}\n"
        "assert old in source\n"
        "sys.argv = sys.argv[2:]\n"
        "sys.path.pop(0)\n"
        "exec(compile(source.replace(old, new), 'libraries', 'exec'))\n"
    )
    wrapper.chmod(0o755)
    return str(wrapper)


def test_libraries_are_compared_timed_and_ranked(walks: Path, tmp_path: Path) -> None:
    result = rbtool.bench(
        walks, libraries=["rbtool", "datasets"], folder=tmp_path / "forms", output=tmp_path / "bench.svg",
        **QUICK | {"rounds": 1},
    )  # fmt: skip
    assert (result.steps, result.episodes, result.keys) == (51, 3, ("action", "observation"))
    assert [one.name for one in result.libraries] == ["rbtool", "datasets"]
    for one in result.libraries:
        assert one.lacks == {}
        assert [*one.jobs] == ["frames", "chunks", "epoch", "resume"]
        assert all(job.seconds > 0 and job.memory > 0 for job in one.jobs.values())
        assert 0.5 < (one.jobs["epoch"].shuffled or 0) < 1.5
    for job in ("frames", "chunks", "epoch", "resume"):
        assert sorted(one.jobs[job].rank for one in result.libraries) == [1, 2]
    assert (tmp_path / "bench.svg").read_bytes().startswith(b"<?xml")
    [made] = (tmp_path / "forms").glob("*/datasets/seconds.json")
    before = made.stat().st_mtime_ns
    again = rbtool.bench(walks, libraries=["datasets"], folder=tmp_path / "forms", prepare=True)
    assert made.stat().st_mtime_ns == before
    assert (again.prepared_only, again.libraries[0].jobs) == (True, {})


@pytest.mark.parametrize(
    ("job", "old", "new", "message"),
    [
        ("frames", "(self._rows[index.tolist()])", "(self._rows[sorted(index.tolist())])", "reads frames that"),
        pytest.param(
            "chunks", "np.minimum(index[:, None]", "np.maximum(index[:, None]",
            "reads chunks that differ from|cannot do compared", marks=pytest.mark.slow,
        ),
        pytest.param(
            "epoch", ".iter(batch_size=size)", ".skip(1).iter(batch_size=size)", "does not have each row of the",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "resume", "(start or 0) * size", "0", "resumes an epoch with other rows",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_library_that_reads_something_else_is_refused(
    job: str, old: str, new: str, message: str, walks: Path, tmp_path: Path
) -> None:
    with pytest.raises((CorruptDataError, UsageError), match=message):
        rbtool.bench(walks, libraries=[f"datasets={changed(tmp_path, old, new)}"], jobs=[job], **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"libraries": ["dataset"]}, "library 'dataset' is unknown; did you mean 'datasets'"),
        ({"libraries": ["webdataset"]}, "this Python has no webdataset"),
        ({"libraries": ["datasets=/nowhere/python"]}, "/nowhere/python cannot be started"),
        ({"libraries": ["datasets=/bin/false"]}, "the process of datasets ended"),
        ({"jobs": ["frame"]}, "job 'frame' is unknown; did you mean 'frames'"),
        ({"output": "bench.txt"}, "bench.txt"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], message: str, walks: Path) -> None:
    with pytest.raises(UsageError, match=message):
        rbtool.bench(walks, **options, **QUICK)


def test_what_a_library_lacks_is_said_and_the_rest_timed(walks: Path, tmp_path: Path) -> None:
    python = changed(tmp_path, "self._columns.setdefault(key,", 'raise NotImplementedError("has no chunks")\n#')
    (one,) = rbtool.bench(walks, libraries=[f"datasets={python}"], jobs=["frames", "chunks"], **QUICK).libraries
    assert one.lacks == {"chunks": "has no chunks"}
    assert [*one.jobs] == ["frames"]


@pytest.mark.slow
def test_a_form_that_was_not_finished_is_made_again(walks: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"libraries": ["datasets"], "folder": tmp_path / "forms", "jobs": ["frames"], **QUICK}
    rbtool.bench(walks, **asked)
    [half] = (tmp_path / "forms").glob("*/datasets")
    (half / "seconds.json").unlink()
    (half.parent / "plain" / "lengths.npy").unlink()
    (half.parent / "plain" / "action.npy").write_text("half")
    shutil.rmtree(half / "rows")
    (half / "rows").write_text("half")
    (one,) = rbtool.bench(walks, **asked).libraries
    assert one.jobs["frames"].rate
    assert json.loads((half / "seconds.json").read_text()) == one.seconds
    assert np.isfinite(one.seconds)


@pytest.mark.slow
def test_a_folder_keeps_the_forms_of_several_datasets(walks: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_walks(other, EPISODES, seed=1)
    for dataset in (walks, other, walks):
        result = rbtool.bench(
            dataset, libraries=["rbtool", "datasets"], folder=tmp_path / "forms", jobs=["frames"], **QUICK
        )
        assert all(one.jobs["frames"].rate for one in result.libraries)
    assert len(list((tmp_path / "forms").iterdir())) == 2
