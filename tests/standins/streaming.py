"""Streams as JSON: as a script in a process of its own, which the hub's client needs, and as functions.

    python streaming.py '[{"dataset": "hf://org/name", "root": "/tmp/root"}, …]'

prints, for each, the steps of its batches and a digest of all their other entries, or the error. With `download` the
dataset of a source is downloaded first, and read from this disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import run_command

import rbtool
from rbtool.converters.lerobot import metadata
from rbtool.converters.openx import shards as archives
from rbtool.core.remote import shards

shards.SHARD_BYTES, metadata.SHARD_BYTES, archives.PIECE_BYTES = 4000, 1, 4096
SLICES = {"num_slices": 2, "strict_length": False}


def batches_of(
    dataset: str,
    *,
    root: str | None = None,
    slices: bool = False,
    seed: int = 0,
    limit: int | None = None,
    skip: int = 0,
    cache_size: int | str | None = None,
    window: int = 4,
    batch_size: int = 16,
    **reading: Any,
) -> dict[str, Any]:
    """Take the batches of an epoch; `skip` of them in a stream that another one, with its state, continues."""
    kind = rbtool.StreamSliceSampler if slices else rbtool.StreamSampler
    options: dict[str, Any] = {"root": root, "streaming": True, "cache_size": cache_size, **reading}

    def opened(seed: int) -> Any:
        sampler = kind(window=window, **(SLICES if slices else {}))
        return rbtool.load_dataset(dataset, batch_size, sampler=sampler, seed=seed, **options)

    buffer = opened(seed)
    if skip:
        for _ in itertools.islice(buffer, skip):
            pass
        state, buffer = buffer.state_dict(), opened(seed + 1)
        buffer.load_state_dict(state)
    found, episodes, hasher = [], set(), hashlib.sha256()
    for batch in itertools.islice(buffer, limit):
        found.append(batch["index"].flatten().tolist())
        episodes |= set(batch["episode"].flatten().tolist())
        for key, value in sorted(batch.exclude("index").items(True, True), key=lambda item: str(item[0])):
            if (lengths := batch.get(_length_key(key), None)) is not None:
                value = value[:, : lengths.max()]  # texts are as wide as the widest of their shards
            hasher.update(f"{key} {value.dtype} {list(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return {
        "steps": found,
        "episodes": len(episodes),
        "digest": hasher.hexdigest(),
        "shards": len(buffer.storage.shards),
    }


def _length_key(key: Any) -> Any:
    return f"{key}_length" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_length")


def environment_of(hub: Any, folder: Path) -> dict[str, str]:
    """The variables of a process that reads from a stand-in hub, with its cache below a folder."""
    return {**hub.environment(folder / "home"), "RBTOOL_HOME": str(folder / "root"), "RBTOOL_RETRIES": "3:0.01"}


def in_process(environment: Mapping[str, str], *asked: Mapping[str, Any]) -> list[Any]:
    """Take the batches of several streams in a process with these variables, which is forked from a ready one."""
    answers: list[Any] = json.loads(run_command(environment, "stream", json.dumps(asked)).stdout)
    return answers


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(KeyError):
        asked["root"] = str(asked["root"])
    try:
        if (options := asked.pop("download", None)) is not None:
            asked["dataset"] = str(rbtool.download(*asked["dataset"].split(":"), **options).path)
        return batches_of(**asked)
    except rbtool.RbtoolError as error:
        return {"error": type(error).__name__, "message": str(error), "hint": error.hint}


def main() -> None:
    """Print the answers to the first argument."""
    print(json.dumps([_answer(asked) for asked in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
