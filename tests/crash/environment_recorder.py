"""Kills the recorder of an environment at its n-th change of the file system, then repairs and compares.

    python environment_recorder.py WORK [--every K]

Two episodes bring longer texts or new infos, so that the recording is stored again and replaced. After each kill there
must be a recording that begins like an undisturbed one and has at least the episodes that were written by then, and at
most one more. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

import numpy as np
from gymnasium import spaces
from recorder import killed
from scripted_envs import Recorded, ScriptedEnv
from strikes import course_of

from rbtool.core.errors import FormatError
from rbtool.core.recording.environments import RecordEpisodes
from rbtool.core.recording.repair import repair

EPISODES = 4
PLAN = ((2, "terminated"), (1, "truncated"), (3, "both"))


def infos(episode: int, step: int) -> dict[str, Any]:
    """Longer texts in the second episode, another entry in the third."""
    return {"note": "x" * (1 + 9 * (episode > 0))} | ({"late": step} if episode == 2 else {})


def record(dest: Path, safe: Path) -> None:
    """Record all episodes; `safe` grows by a byte for each that is written."""
    env = ScriptedEnv(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), PLAN, infos)
    env.observation_space.seed(0)
    with RecordEpisodes(env, dest) as recording, open(safe, "wb", buffering=0) as said:
        for _ in range(EPISODES):
            recording.reset()
            while not any(recording.step(1)[2:4]):
                pass
            said.write(b".")


def require_beginning(whole: Recorded, dest: Path, promised: int) -> int:
    """Compare what was restored with the beginning of the whole; return how many episodes there are."""
    found = Recorded(dest)
    episodes, steps = found.manifest.episodes, found.manifest.steps
    assert promised <= episodes <= promised + 1, f"{promised} episodes were promised, {episodes} are there"
    assert found.table.length.tolist() == whole.table.length[:episodes].tolist()
    for name in ("observation", "next.observation", "next.reward", "next.done", "info.note_length"):
        assert found.columns[name].tobytes() == whole.columns[name][:steps].tobytes(), name
    assert not episodes or found.manifest.request.asked == whole.manifest.request.asked
    return episodes


def recording(dest: Path) -> None:
    """Record into a folder that has the file of promises too: they are changes of files."""
    record(dest, dest.with_name("safe"))


def main() -> None:
    """Strike at every K-th change of files and print how many episodes were restored how often."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    undisturbed = options.work / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "safe").touch()
    counts: dict[str, int] = {}
    course = course_of(recording, undisturbed, undisturbed / "recording")
    assert course.status == 0
    whole = Recorded(undisturbed / "recording")
    for at in course.changes[:: options.every]:
        out = options.work / f"out-{at}"
        out.mkdir()
        safe = out / "safe"
        safe.touch()
        assert killed(recording, out, out / "recording", at)
        promised = safe.stat().st_size
        try:
            repair(out / "recording")
            found = require_beginning(whole, out / "recording", promised)
        except (FormatError, FileNotFoundError):
            assert promised == 0
            found = 0
        counts[str(found)] = counts.get(str(found), 0) + 1
        shutil.rmtree(out)
    print(json.dumps({"operations": course.operations, "changes": len(course.changes), "restored": counts}))


if __name__ == "__main__":
    main()
