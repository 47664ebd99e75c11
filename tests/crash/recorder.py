"""Kills what records or repairs at its n-th change of the file system, and compares what is left with the promises.

    python recorder.py WORK recorder|repair|environment [--every K]

The places to kill are the operations before which the files are others than before the operation before: between the
others nothing changes that a kill could leave. After the kill there must be a sound dataset that begins like an
undisturbed one and has at least the episodes that were promised by then, and at most one more.

- `recorder` records the episodes of the dataset `WORK/ted`; the `repair` after the kill is killed at operations of its
  own, too, and begun again.
- `repair` repairs a whole recording of `WORK/ted` whose log is cut and whose `recording.json` is changed.
- `environment` records an environment; two of its episodes bring longer texts or new infos, so that the recording is
  stored again and replaced.

Prints one JSON document: how many episodes were restored how often.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

import numpy as np
from gymnasium import spaces
from scripted_envs import Recorded, ScriptedEnv
from strikes import course_of, forked, kill

from rbtool.core.errors import FormatError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.recording.environments import RecordEpisodes
from rbtool.core.recording.repair import repair


def record_ted(dest: Path) -> None:
    """Record the dataset; the file `safe` next to the recording grows by a byte for each episode that is safe."""
    with (
        TedReader(dest.parents[1] / "ted") as reader,
        PackedRecorder(dest, reader.fields) as recorder,
        open(dest.with_name("safe"), "wb", buffering=0) as said,
    ):
        table = reader.episodes
        for row in range(len(table)):
            start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
            columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
            recorder.add_episode(columns, episode=int(table.episode[row]))
            said.write(b".")


def infos(episode: int, step: int) -> dict[str, Any]:
    """Longer texts in the second episode, another entry in the third."""
    return {"note": "x" * (1 + 9 * (episode > 0))} | ({"late": step} if episode == 2 else {})


def record_environment(dest: Path) -> None:
    """Record four episodes of an environment; `safe` grows by a byte for each that is written."""
    plan = ((2, "terminated"), (1, "truncated"), (3, "both"))
    env = ScriptedEnv(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), plan, infos)
    env.observation_space.seed(0)
    with RecordEpisodes(env, dest) as recording, open(dest.with_name("safe"), "wb", buffering=0) as said:
        for _ in range(4):
            recording.reset()
            while not any(recording.step(1)[2:4]):
                pass
            said.write(b".")


def damage(dest: Path) -> None:
    """Make a recording whose log is cut and whose `recording.json` is changed, and which has three safe episodes."""
    whole = dest.with_name("whole")
    record_ted(whole)
    shutil.copytree(whole, dest, ignore=shutil.ignore_patterns("manifest.json"))
    log, origin = dest / ".rbtool" / "commits.bin", dest / ".rbtool" / "recording.json"
    os.truncate(log, log.stat().st_size // 3 + 5)
    origin.write_bytes(origin.read_bytes().replace(b"action", b"abtion", 1))


KEPT = ("observation", "next.observation", "next.reward", "next.done", "info.note_length")
"""Columns that no later episode widens."""
JOBS = {"recorder": record_ted, "repair": repair, "environment": record_environment}


def begun(work: Path, name: str, out: str) -> Path:
    """Make the folder of a run, with what it needs; return where it records."""
    dest = work / out / "recording"
    dest.parent.mkdir()
    dest.with_name("safe").touch()  # a promise is a change of files, too
    if name == "repair":
        damage(dest)
    return dest


def killed(job: Any, dest: Path, at: int) -> bool:
    """Run a job in a child that is killed at operation `at`; tell whether it came so far."""
    status, _ = forked(job, dest.parent, dest, kill, at)
    return os.WIFSIGNALED(status)


def strike(work: Path, name: str, at: int, every: int, whole: Recorded) -> int:
    """Kill the job at operation `at`, then repair; return how many episodes were restored."""
    dest = begun(work, name, f"out-{at}")
    assert killed(JOBS[name], dest, at)
    promised, number = dest.with_name("safe").stat().st_size, 1
    try:
        while name == "recorder" and number < 200 and killed(repair, dest, number):
            number += 3 * every + 2
        repair(dest)
    except (FormatError, FileNotFoundError):  # nothing was promised yet
        assert promised == 0
        episodes = 0
    else:
        found = Recorded(dest)
        episodes, steps = found.manifest.episodes, found.manifest.steps
        assert promised <= episodes <= promised + 1, f"{promised} episodes were promised, {episodes} are there"
        assert found.table.length.tolist() == whole.table.length[:episodes].tolist()
        for column in KEPT if name == "environment" else whole.columns:
            assert found.columns[column].tobytes() == whole.columns[column][:steps].tobytes(), column
        if name == "environment" and episodes:
            assert found.manifest.request.asked == whole.manifest.request.asked
    shutil.rmtree(dest.parent)
    return episodes


def main() -> None:
    """Strike at every K-th change of files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    dest = begun(options.work, options.job, "undisturbed")
    course = course_of(JOBS[options.job], dest.parent, dest)
    assert course.status == 0
    whole = Recorded(dest if options.job == "environment" else options.work / "ted")
    counts = Counter(
        strike(options.work, options.job, at, options.every, whole) for at in course.changes[:: options.every]
    )
    print(json.dumps({"operations": course.operations, "changes": len(course.changes), "restored": counts}))


if __name__ == "__main__":
    main()
