"""What rbtool writes to disk, made on the spot: run this file to write the expected digests of it anew.

`make` writes every layout, form of checkpoint, recording and dump into a folder, which `golden_digests` sums up.
With `--keep` the results that readers have to open from now on are written anew as well.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from golden_digests import array_digest, digest_of, digests
from tensordict import TensorDict

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.verbs.checkpoint import load, save

DATA = Path(__file__).parents[1] / "data"
EXPECTED = DATA / "golden" / "digests.json"
KEPT = DATA / "golden" / "kept"
"""Small results of an earlier version, which readers still open."""
KEPT_ROWS = DATA / "golden" / "kept_rows.json"

ODD = DatasetPlan(
    lengths=(4, 3, 1, 1, 2, 5), endings=("terminated", "truncated", "both", "open", "terminated", "open"),
    jumps=(False, True, False, False, True, False), leaves=ODD_LEAVES, root_flags="set",
    text=True, documents=True, seed=5,
)  # fmt: skip
WALKS = [(9, "terminated"), (5, "truncated"), (1, "both"), (12, "open"), (6, "terminated")]
LOSSLESS = ("observation.camera=zstd:3", "observation.position=lz4", "next.reward=zstd:9")


# Making ------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Write everything into an existing, empty folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_datasets()
        make_checkpoints()
        make_recordings()
        make_preprocessed()
        make_storages()
        make_buffers()
    finally:
        os.chdir(before)


def make_datasets() -> None:
    """Write datasets in both layouts, from plans and from Minari."""
    write_plan(ODD, Path("odd"))
    write_walks(Path("walks"), WALKS)
    for name in ("odd", "walks"):
        rbtool.convert(name, f"{name}-packed", layout="packed")
    rbtool.convert("odd", "odd-compressed", layout="packed", compress=LOSSLESS)
    rbtool.convert("walks", "walks-compressed", layout="packed", compress=("observation=zstd",))
    rbtool.convert("odd-compressed", "odd-again")
    for source, name in (("cartpole/single-episode", "cart"), ("pendulum/random", "swing"), ("tuple/trunc", "tuple")):
        link = Path("source")  # so that the manifest names no path of this machine
        link.symlink_to(DATA / "minari" / f"{source}-v0")
        rbtool.convert(link, name, episodes="0:2")
        link.unlink()
    rbtool.export("walks", "exports/h5.h5", to="h5")
    rbtool.export("walks", "exports/npz.npz", to="npz")
    rbtool.export("walks", "exports/parquet", to="parquet")
    rbtool.export("cart", "exports/minari", to="minari")


def make_checkpoints() -> None:
    """Write checkpoints of datasets in every form, ours and TorchRL's, and datasets of them."""
    for name in ("odd", "walks"):
        for form in ("ted", "flat", "nested", "h5"):
            target = f"saved/{name}-{form}" + ".h5" * (form == "h5")
            save(name, target, form=form)
            load(target, f"loaded/{name}-{form}")
    save("walks-packed", "saved/packed-flat", form="flat")
    save("odd", "saved/odd-gzip.h5", form="h5", compression="gzip:4")
    save("walks", "saved/walks-lzf.h5", form="h5", compression="lzf")
    load("saved/walks-flat", "loaded/walks-packed", layout="packed", compress=("observation=zstd:3",))
    for form in ("flat", "nested", "h5"):
        save("walks", f"torchrl/{form}" + ".h5" * (form == "h5"), form=form, for_library="torchrl")


def make_recordings() -> None:
    """Write recordings: by the recorder and by the storage, finished and not."""
    with TedReader(Path("odd")) as reader:
        for name in ("finished", "unfinished"):
            recorder = PackedRecorder(Path("recorded") / name, reader.fields)
            table = reader.episodes
            for row, (start, length) in enumerate(zip(table.start.tolist(), table.length.tolist(), strict=True)):
                columns = {field.key: reader.read(field.key, start, start + length) for field in reader.fields}
                recorder.add_episode(columns, episode=int(table.episode[row]), seed=row or None, cut_off=row == 3)
            recorder.finish() if name == "finished" else recorder.close()
    shutil.copytree("recorded/unfinished", "recorded/repaired")
    rbtool.repair("recorded/repaired")
    for name in ("storage", "storage-closed"):
        recording = rbtool.PackedStorage.create(f"recorded/{name}")
        buffer = rbtool.TensorDictReplayBuffer(storage=recording, batch_size=4)
        buffer.extend(steps(23))
        recording.finish() if name == "storage" else recording.close()


def shift(rows: Any) -> Any:
    """Add one to the observations."""
    for part in (rows, rows["next"]):
        part["observation"] = part["observation"] + 1
    return rows


def failing(rows: Any) -> Any:
    """Fail at the third episode."""
    if int(rows["episode"][0]) == 2:
        raise ValueError("stop here")
    return rows


def make_preprocessed() -> None:
    """Write results of functions and of operations, and the journal of a run that failed."""
    for unit in ("step", "row", "episode"):
        rbtool.preprocess("walks", shift, f"made/{unit}", unit=unit, num_workers=0, chunk_size=8, vmap=False)
    chosen = {
        "episodes": "0:4",
        "filter": "length > 2",
        "select": ["observation", "action"],
        "cast": {"action": "float64"},
    }
    scaled = {"normalize": {"observation": "mean-std"}, "return_to_go": "rtg", "gamma": 0.9}
    for name, operations in (("chosen", chosen), ("scaled", scaled), ("n-step", {"n_step": 3, "gamma": 0.9})):
        rbtool.preprocess("walks", None, f"made/{name}", operations=operations, num_workers=0, chunk_size=8)
    rbtool.preprocess("walks", None, "made/replayed", replay="made/scaled", num_workers=0, chunk_size=8)
    rbtool.preprocess("odd", None, "made/joined", operations={"cat": {"both": ["observation.position", "action"]}},
                      num_workers=0, chunk_size=4)  # fmt: skip
    with contextlib.suppress(rbtool.RbtoolError):
        options: dict[str, Any] = {"num_workers": 0, "chunk_size": 1, "retries": 0, "resume": True}
        rbtool.preprocess("walks", failing, "made/failed", unit="episode", **options)


def steps(count: int, first: int = 0) -> TensorDict:
    """Steps of episodes of seven steps, all of them different, with nested keys and several element types."""
    numbers = torch.arange(first, first + count)
    done = (numbers % 7 == 6).unsqueeze(-1)
    state = torch.stack([numbers, numbers**2], -1).float()
    after = torch.where(done, -state, torch.stack([numbers + 1, (numbers + 1) ** 2], -1).float())
    return TensorDict(
        {
            "observation": state, "action": numbers.short(), "deep": {"inner": {"x": numbers.double()[:, None] / 3}},
            "next": TensorDict({"observation": after, "reward": numbers.float().unsqueeze(-1), "done": done,
                                "terminated": done, "truncated": torch.zeros_like(done)}, [count]),
        },
        [count],
    )  # fmt: skip


def lanes(count: int, first: int = 0) -> TensorDict:
    """The same in two lanes."""
    return torch.stack([steps(count, first), steps(count, first + 1000)], 1)


def _nest(count: int, first: int = 0) -> Any:
    rows = steps(count, first)
    return {"a.b": rows["observation"], "c": [rows["action"].to(torch.uint16), (rows["next", "done"],)]}


def _elements(count: int, first: int = 0) -> list[TensorDict]:
    return list(steps(count, first).unbind(0))


def _objects(count: int, first: int = 0) -> list[Any]:
    numbers = range(first, first + count)
    return [{"a": torch.full((i % 3 + 1,), i), "b": [torch.tensor(i / 7)], "c": steps(2, i)} for i in numbers]


ROOM = 20
TENSORS: Mapping[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "tensor": (lambda: rbtool.TensorStorage(steps(ROOM).clone().zero_()), steps),
    "lazy-tensor": (lambda: rbtool.LazyTensorStorage(ROOM), steps),
    "lazy-tensor-lanes": (lambda: rbtool.LazyTensorStorage(2 * ROOM, ndim=2), lanes),
    "lazy-tensor-nest": (lambda: rbtool.LazyTensorStorage(ROOM), _nest),
    "lazy-tensor-one": (lambda: rbtool.LazyTensorStorage(ROOM), lambda *place: steps(*place)["observation"]),
    "memmap": (lambda: rbtool.LazyMemmapStorage(ROOM), steps),
    "memmap-lanes": (lambda: rbtool.LazyMemmapStorage(2 * ROOM, ndim=2), lanes),
    "memmap-nest": (lambda: rbtool.LazyMemmapStorage(ROOM), _nest),
}
FILLS = {"part": (13,), "wrapped": (13, 11)}
FEW = 5
LISTS: Mapping[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "list": (lambda: rbtool.ListStorage(FEW), _elements),
    "list-objects": (lambda: rbtool.ListStorage(FEW), _objects),
    "lazy-stack": (lambda: rbtool.LazyStackStorage(FEW), _elements),
    "compressed": (lambda: rbtool.CompressedListStorage(FEW), _elements),
    "compressed-zlib": (lambda: rbtool.CompressedListStorage(FEW, codec="zlib"), _objects),
}


def make_storages() -> None:
    """Write dumps of every storage, at every fill level, and with every checkpointer of steps."""
    for name, (storage, rows) in TENSORS.items():
        for fill, counts in FILLS.items():
            made = filled(storage(), rows, counts).storage
            made.dumps(f"storages/{name}-{fill}")
            made.checkpointer = rbtool.TensorStorageCheckpointer(compatible=True)
            made.dumps(f"storages/{name}-{fill}-torchrl")
    for name, (storage, rows) in LISTS.items():
        filled(storage(), rows, (FEW - 1, FEW - 2)).storage.dumps(f"storages/{name}")
    forms = {
        "flat": rbtool.FlatStorageCheckpointer, "nested": rbtool.NestedStorageCheckpointer,
        "h5": rbtool.H5StorageCheckpointer,
    }  # fmt: skip
    for name, form, compatible in itertools.product(("lazy-tensor", "lazy-tensor-lanes"), forms, (False, True)):
        buffer = filled(TENSORS[name][0](), TENSORS[name][1], FILLS["wrapped"])
        buffer.storage.checkpointer = forms[form](compatible=compatible)
        buffer.dumps(f"dumps/{name}-{form}" + "-torchrl" * compatible)
    rows = filled(rbtool.ListStorage(ROOM), _elements, FILLS["wrapped"])
    rows.storage.checkpointer = rbtool.FlatStorageCheckpointer()
    rows.dumps("dumps/list-flat")
    filled(rbtool.LazyMemmapStorage(ROOM, scratch_dir="scratch"), steps, (13,))


def filled(storage: Any, rows: Callable[..., Any], counts: tuple[int, ...], **arguments: Any) -> Any:
    """Return a buffer on the storage, into which so many rows were written each time."""
    generator = torch.Generator().manual_seed(3)
    dim = {"dim_extend": 0} if storage.ndim > 1 else {}
    buffer = rbtool.ReplayBuffer(storage=storage, batch_size=4, generator=generator, **dim, **arguments)
    first = 0
    for count in counts:
        buffer.extend(rows(count, first))
        first += count
    return buffer


def make_buffers() -> None:
    """Write dumps of buffers with every sampler and every writer, after some batches were drawn."""
    done: dict[str, Any] = {"end_key": ("next", "done")}
    samplers: Mapping[str, Callable[[], Any]] = {
        "random": rbtool.RandomSampler,
        "without-replacement": rbtool.SamplerWithoutReplacement,
        "prioritized": lambda: rbtool.PrioritizedSampler(ROOM, 0.7, 0.5),
        "slice": lambda: rbtool.SliceSampler(slice_len=2, **done),
        "slice-without-replacement": lambda: rbtool.SliceSamplerWithoutReplacement(num_slices=2, **done),
        "prioritized-slice": lambda: rbtool.PrioritizedSliceSampler(ROOM, 0.7, 0.5, slice_len=2, **done),
    }
    for name, sampler in samplers.items():
        for fill in ("part", "wrapped"):
            buffer = filled(rbtool.LazyTensorStorage(ROOM), steps, FILLS[fill], sampler=sampler())
            if name.startswith("prioritized"):
                buffer.update_priority(torch.arange(5), torch.arange(1.0, 6.0))
            for _ in range(2):
                buffer.sample()
            buffer.dumps(f"buffers/{name}-{fill}")
    ahead = filled(rbtool.LazyTensorStorage(ROOM), steps, (13,), prefetch=2)
    ahead.sample()
    ahead.dumps("buffers/prefetch")
    writers = {
        "max-value": rbtool.TensorDictMaxValueWriter(rank_key=("next", "reward")),
        "round-robin": rbtool.RoundRobinWriter(),
        "numbered": rbtool.TensorDictRoundRobinWriter(),
    }
    for name, writer in writers.items():
        filled(rbtool.LazyTensorStorage(ROOM), steps, (13, 11), writer=writer).dumps(f"buffers/{name}")
    filled(rbtool.LazyTensorStorage(ROOM), steps, ()).dumps("buffers/empty")
    for name in ("walks", "walks-packed"):
        dataset = rbtool.load_dataset(name, batch_size=8, seed=4, sampler=rbtool.SliceSampler(slice_len=2))
        dataset.sample()
        dataset.dumps(f"buffers/{name}")


# What readers still open -------------------------------------------------------------------------------

DATASETS = (
    "walks", "walks-compressed", "saved/walks-flat", "saved/walks-nested", "saved/walks-lzf.h5", "recorded/storage",
)  # fmt: skip
BUFFERS = ("buffers/without-replacement-wrapped", "dumps/lazy-tensor-nested")
STORAGE = "storages/memmap-lanes-wrapped"


def kept_rows(folder: Path) -> dict[str, str]:
    """Open what an earlier version wrote; return digests of the rows, and of the batches that come next."""
    found = {}
    for name in DATASETS:
        with open_steps(folder / name) as reader:
            reader.verify_files()
            count = reader.manifest.steps
            arrays = {field.name: array_digest(reader.read(field.key, 0, count)) for field in reader.fields}
            found[name] = digest_of([count, reader.episodes.length.tolist(), arrays])
    for name in BUFFERS:
        sampler = rbtool.SamplerWithoutReplacement() if "without" in name else rbtool.RandomSampler()
        buffer = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(ROOM), sampler=sampler, batch_size=4)
        if "nested" in name:
            buffer.storage.checkpointer = rbtool.NestedStorageCheckpointer()
        buffer.loads(folder / name)
        found[name] = digest_of([_tensors(buffer[:]), [_tensors(buffer.sample()) for _ in range(4)]])
    storage = rbtool.LazyTensorStorage(2 * ROOM, ndim=2)
    storage.loads(folder / STORAGE)
    return found | {STORAGE: digest_of(_tensors(storage[:]))}


def _tensors(rows: TensorDict) -> Any:
    leaves = sorted(rows.items(include_nested=True, leaves_only=True), key=lambda item: str(item[0]))
    return {str(key): array_digest(value.numpy()) for key, value in leaves}


def rewrite(*, keep: bool) -> None:
    """Write the expected digests anew; with `keep` also the results that readers are to open from now on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        make(folder)
        EXPECTED.parent.mkdir(parents=True, exist_ok=True)
        EXPECTED.write_text(json.dumps(digests(folder), indent=0) + "\n")
        if keep:
            shutil.rmtree(KEPT, ignore_errors=True)
            for one in (*DATASETS, *BUFFERS, STORAGE):
                (KEPT / one).parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if (folder / one).is_dir() else shutil.copy)(folder / one, KEPT / one)
            KEPT_ROWS.write_text(json.dumps(kept_rows(KEPT), indent=1) + "\n")


if __name__ == "__main__":
    import golden  # by its name, which manifests hold for its functions

    golden.rewrite(keep="--keep" in sys.argv[1:])
