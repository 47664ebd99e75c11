"""Time the checkpointers next to TorchRL's, and next to a plain copy of the same bytes.

    python benchmarks/checkpointers.py [--rows 1000000] [--rounds 15] [--only PART] [--cpu]

TorchRL has to be installed in the same environment; without it, only rbtool's times are shown. Rows are 11 leaves of
758 bytes, in episodes of 300. `write` saves a buffer over an older checkpoint, as a training run does; `write unsynced`
does not wait for the disk, like TorchRL; `read` loads the checkpoint into a buffer that already holds rows, `read
fresh` into an empty one. The reference for a write is a copy of its files to another folder, with the same syncs; the
reference for a read copies the bytes of all rows from plain files into memory of the same kind. All take turns in one
process with one torch thread; the figures are medians in microseconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_forms import copy
from shared import peers
from shared.claims import Claim, Claims, Job, Part, Watch, main
from shared.rows import state_rows
from tensordict import TensorDict

import rbtool
from rbtool.core.format import fs

LENGTH = 300
KINDS = ("LazyTensorStorage", "LazyMemmapStorage")
FLAGS = ("done", "terminated", "truncated")
READS = {"Tensor": 20.0, "Flat": 3.0, "Nested": 3.0, "H5": 15.0}
"""The lower limits of TorchRL's time divided by rbtool's, for reading each form into an empty buffer."""
UNSYNCED = {"Flat": 1.5}
"""The same for writes with `durable="none"`: TorchRL syncs nothing."""


def episodes(steps: int, length: int) -> TensorDict:
    """Make rows of robot states in episodes of one length; each next observation is the following observation."""
    rows = state_rows(steps)
    rows["next", "observation"][:-1] = rows["observation"][1:]
    last = torch.arange(steps) % length == length - 1
    for flag in FLAGS:
        rows[flag].zero_()
        rows["next", flag] = (last & (flag != "terminated")).unsqueeze(-1)
    rows["next", "observation"][last] += 1
    rows["episode"] = torch.arange(steps) // length
    return rows


def buffer_of(library: Any, savers: Any, kind: str, form: str, steps: int, rows: TensorDict | None) -> Any:
    """Make a buffer with a checkpointer of a form, either empty, or full and wrapped around."""
    storage = getattr(library, kind)(steps)
    buffer = library.ReplayBuffer(storage=storage, batch_size=32)
    storage.checkpointer = getattr(savers, f"{form}StorageCheckpointer")()  # a buffer of TorchRL's takes its own, else
    if rows is not None:
        buffer.extend(rows)
        buffer.extend(rows[: steps // 100])
    return buffer


def plain_files(rows: TensorDict, folder: Path) -> list[tuple[Path, torch.Tensor]]:
    """Write every leaf to a file; return each file with a memory block of its size whose pages are already in use."""
    fs.make_folder(folder)
    found = []
    for number, leaf in enumerate(rows.values(True, True)):
        path = folder / str(number)
        leaf.contiguous().numpy().tofile(path)
        found.append((path, leaf.clone()))
    return found


def read_files(files: list[tuple[Path, torch.Tensor]], *, fresh: bool) -> None:
    """Read the files, all into new memory or all into memory that is already in use."""
    for path, used in files:
        memory = np.empty(used.numel() * used.element_size(), np.uint8) if fresh else used.view(-1).view(torch.uint8)
        with open(path, "rb", buffering=0) as file:
            file.readinto(memoryview(np.asarray(memory)))


def part(form: str) -> Part:
    """Make the part that measures one form."""

    def measured(rows: int, watch: Watch) -> Claims:
        data = episodes(rows, LENGTH)
        with tempfile.TemporaryDirectory() as place:
            work = Path(place)
            files = plain_files(data, work / "plain")
            for kind in KINDS:
                yield from of_kind(form, kind, data, files, work, watch)

    measured.__name__ = form.lower()
    return measured


def of_kind(
    form: str, kind: str, data: TensorDict, files: list[tuple[Path, torch.Tensor]], work: Path, watch: Watch
) -> Claims:
    """Measure one form of one kind of storage."""
    libraries = {"ours": (rbtool, rbtool)}
    if peers.buffers is not None:
        libraries["TorchRL"] = (peers.buffers, peers.checkpointers)
    make = {
        side: partial(buffer_of, library, savers, kind, form, len(data))
        for side, (library, savers) in libraries.items()
    }  # fmt: skip
    places = {side: work / f"{form}-{side}" for side in make}
    full = {side: made(data) for side, made in make.items()}
    for side, buffer in full.items():
        buffer.dumps(places[side])
    jobs: dict[str, Job] = {side: partial(buffer.dumps, places[side]) for side, buffer in full.items()}
    found = watch.medians(f"{form} write {kind}", jobs | {"copy": partial(copy_anew, places["ours"], work / "copy")})
    yield from Claim.of(f"{form} write {kind}, TorchRL", found)
    yield Claim(f"{form} write {kind}, ours : copy", found["ours"] / found["copy"], most=1.2)
    jobs["ours"] = partial(full["ours"].dumps, places["ours"], durable="none")
    found = watch.medians(f"{form} write unsynced {kind}", jobs)
    yield from Claim.of(f"{form} write unsynced {kind}, TorchRL", found, UNSYNCED.get(form))
    full["ours"].dumps(places["ours"])  # what was not synced is verified whenever it is read
    loads: dict[str, Job] = {side: partial(buffer.loads, places[side]) for side, buffer in full.items()}
    found = watch.medians(f"{form} read {kind}", loads | {"copy": partial(read_files, files, fresh=False)})
    yield from Claim.of(f"{form} read {kind}, TorchRL", found)
    fresh: dict[str, Job] = {side: partial(loaded, made, places[side]) for side, made in make.items()}
    found = watch.medians(f"{form} read fresh {kind}", fresh | {"copy": partial(read_files, files, fresh=True)})
    yield from Claim.of(f"{form} read fresh {kind}, TorchRL", found, READS[form])


def loaded(make: Callable[[TensorDict | None], Any], place: Path) -> Any:
    buffer = make(None)
    buffer.loads(place)
    return buffer


def copy_anew(source: Path, target: Path) -> None:
    copy(source, target.with_name("copy-new"))
    fs.remove(target)
    fs.rename(target.with_name("copy-new"), target)


PARTS = [part(form) for form in READS]

if __name__ == "__main__":
    main(__doc__, PARTS, rows=200_000, rounds=7)
