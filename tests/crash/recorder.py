"""Kills a recorder at its n-th change of the file system, repairs what is left, and compares it with what was promised.

    python recorder.py WORK [--every K] [--damaged]

The places to kill are the operations before which the files are others than before the operation before: between the
others nothing changes that a kill could leave.

WORK holds `ted/`, a dataset whose episodes are recorded. The recorder says of each episode when it is safe; after the
kill, and after a `repair` that is killed at each of its own operations too, there must be a sound dataset that begins
like `ted` and has at least those episodes, and at most one more. With `--damaged` it is a whole recording, with its log
cut and its `recording.json` changed, whose repair is killed at each operation and then begun again. Prints one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from strikes import Job, course_of, forked, kill

from rbtool.core.errors import FormatError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.recording.repair import repair


def record(ted: Path, dest: Path, safe: Path) -> None:
    """Record all episodes; `safe` grows by a byte for each that is safe."""
    with (
        TedReader(ted) as reader,
        PackedRecorder(dest, reader.fields) as recorder,
        open(safe, "wb", buffering=0) as said,
    ):
        table = reader.episodes
        for row in range(len(table)):
            start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
            columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
            recorder.add_episode(columns, episode=int(table.episode[row]))
            said.write(b".")


def killed(job: Job, out: Path, dest: Path, at: int) -> bool:
    """Run a job in a child that is killed at operation `at`; tell whether it came so far."""
    status, _ = forked(job, out, dest, kill, at)
    return os.WIFSIGNALED(status)


def require_beginning(ted: Path, dest: Path, promised: int) -> int:
    """Compare what was restored with the beginning of `ted`; return how many episodes there are."""
    with TedReader(ted) as expected, open_steps(dest) as found:
        found.verify_files()
        episodes, steps = found.manifest.episodes, found.manifest.steps
        assert promised <= episodes <= promised + 1, f"{promised} episodes were promised, {episodes} are there"
        assert found.episodes.length.tolist() == expected.episodes.length[:episodes].tolist()
        for field in expected.fields:
            rows = (reader.read(field.key, 0, steps).tobytes() for reader in (expected, found))
            assert len(set(rows)) == 1, field
        return episodes


def recording(work: Path, out: Path) -> tuple[Job, Path, Path]:
    """What records into a new folder, where, and the file that grows by a byte for each episode that is safe."""
    out.mkdir()
    safe = out / "safe"  # a promise is a change of files, too
    safe.touch()
    return lambda dest: record(work / "ted", dest, safe), out / "recording", safe


def strike(work: Path, at: int, every: int) -> int:
    """Kill the recorder at operation `at`, then repair."""
    out = work / f"out-{at}"
    job, dest, safe = recording(work, out)
    assert killed(job, out, dest, at)
    promised = safe.stat().st_size
    number = 1
    try:
        while number < 200 and killed(lambda dest: repair(dest), out, dest, number):
            number += 3 * every + 2
        repair(dest)
    except (FormatError, FileNotFoundError):  # nothing was promised yet
        assert promised == 0
        shutil.rmtree(out)
        return 0
    found = require_beginning(work / "ted", dest, promised)
    shutil.rmtree(out)
    return found


def damaged(work: Path, out: Path) -> Path:
    """Put a recording whose log is cut and whose `recording.json` is changed into a new folder."""
    dest = out / "recording"
    record(work / "ted", out / "whole", work / "safe")
    shutil.copytree(out / "whole", dest, ignore=shutil.ignore_patterns("manifest.json"))
    log, origin = dest / ".rbtool" / "commits.bin", dest / ".rbtool" / "recording.json"
    os.truncate(log, log.stat().st_size // 3 + 5)
    origin.write_bytes(origin.read_bytes().replace(b"action", b"abtion", 1))
    return dest


def strike_repair(work: Path, at: int, _: int) -> int:
    """Kill the repair of a damaged recording at operation `at`, and begin it again."""
    out = work / f"out-{at}"
    dest = damaged(work, out)
    assert killed(lambda dest: repair(dest), out, dest, at)
    repair(dest)
    found = require_beginning(work / "ted", dest, promised=3)
    shutil.rmtree(out)
    return found


def main() -> None:
    """Strike at every K-th change of files and print how many episodes were restored how often."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--damaged", action="store_true")
    options = parser.parse_args()
    struck = strike_repair if options.damaged else strike
    whole = options.work / "undisturbed"
    if options.damaged:
        course = course_of(lambda dest: repair(dest), whole, damaged(options.work, whole))
    else:
        job, dest, _ = recording(options.work, whole)
        course = course_of(job, whole, dest)
    assert course.status == 0
    counts: dict[str, int] = {}
    for at in course.changes[:: options.every]:
        found = str(struck(options.work, at, options.every))
        counts[found] = counts.get(found, 0) + 1
    print(json.dumps({"operations": course.operations, "changes": len(course.changes), "restored": counts}))


if __name__ == "__main__":
    main()
