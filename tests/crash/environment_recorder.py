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

from rbtool.core.errors import FormatError
from rbtool.core.recording.environments import RecordEpisodes
from rbtool.core.verbs.check import repair

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


def main() -> None:
    """Strike at every K-th operation and print how many episodes were restored how often."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    counts: dict[str, int] = {}
    safe, at = options.work / "safe", 1
    record(options.work / "whole", safe)
    whole = Recorded(options.work / "whole")
    while True:
        out = options.work / f"out-{at}"
        out.mkdir()
        safe.write_bytes(b"")
        if not killed(lambda dest: record(dest, safe), out, out / "recording", at):
            break
        promised = safe.stat().st_size
        try:
            repair(out / "recording")
            found = require_beginning(whole, out / "recording", promised)
        except (FormatError, FileNotFoundError):
            assert promised == 0
            found = 0
        counts[str(found)] = counts.get(str(found), 0) + 1
        shutil.rmtree(out)
        at += options.every
    print(json.dumps({"operations": at, "restored": counts}))


if __name__ == "__main__":
    main()
