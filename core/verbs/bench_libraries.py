"""The libraries that `bench` compares, each in its own process: `python -P bench_libraries.py NAME`.

The Python of that process needs numpy and the library, but not rbtool, so that libraries that cannot be installed
together can be compared. The process reads requests and writes answers as lines of JSON (`answers`). It returns only
digests of what it reads, so that the comparison costs the same for all libraries.

A library gets the rows as npy files: `KEY.npy` for each key, with the rows of all episodes in order along the first
axis, and `lengths.npy`. `prepare` converts them, without loss, to the library's own file format.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

Batch: TypeAlias = Mapping[str, Any]
"""Arrays or tensors by key, with rows along the first axis."""

ROW = "row_number"
"""An extra key, int64, that `prepare` stores as well: the number of a row in the dataset."""


def following(stops: Any, index: Any, steps: int) -> Any:
    """Return the numbers of `steps` consecutive rows from each row in `index` on, int64 `[rows, steps]`.

    They are clamped at the last row of the episode. `stops` has the row after the end of each episode, in order.
    """
    last = stops[np.searchsorted(stops, index, side="right")] - 1
    return np.minimum(index[:, None] + np.arange(steps), last[:, None])


class Library:
    """One library: how it stores a dataset, and how it reads it.

    A method that the library does not support raises NotImplementedError with the reason.

    Args:
        folder: the folder that `prepare` wrote.
        types: the dtype and the shape of a row for each key that is read.
        lengths: the lengths of the episodes, int64 `[episodes]`.

    Attributes:
        name: the name of the library on the command line.
        package: the distribution whose version is reported.
        form: the format that `prepare` writes; "" if the dataset itself is read.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    form: ClassVar[str]

    def __init__(self, folder: Path, types: Mapping[str, tuple[str, list[int]]], lengths: Any) -> None:
        self.folder, self.types, self.keys = folder, types, list(types)
        self.stops = np.cumsum(lengths)
        self.count = int(self.stops[-1])
        self.open()

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write the rows in the library's file format."""
        raise NotImplementedError

    def open(self) -> None:
        """Open what `prepare` wrote."""

    def rows(self, index: Any) -> Batch:
        """Return all keys of the rows `index`, in that order."""
        raise NotImplementedError("has no access to single rows")

    def chunks(self, index: Any, steps: int, action: str, image: str) -> Batch:
        """Return the `steps` actions from each row on, clamped at the end of its episode, and the image of the row."""
        raise NotImplementedError("has no access to single rows")

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Yield all rows once in a random order, in batches of `size`; with `start`, resume from that `state`."""
        raise NotImplementedError("has no epochs")

    def state(self, batches: int) -> Any:
        """Return the state, as JSON, from which the epoch continues after its first `batches` batches."""
        raise NotImplementedError("cannot resume in the middle of an epoch")


class Rbtool(Library):
    """rbtool: the dataset itself, in its layout."""

    name, package, form = "rbtool", "rbtool", ""

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write nothing: the dataset is read as it is."""

    @property
    def _rbtool(self) -> Any:
        return importlib.import_module("rbtool")  # by name: this file runs as a script, without a package

    def open(self) -> None:
        """Open the buffer."""
        rbtool = self._rbtool
        self._key = {key: tuple(key.split(".")) for key in self.keys}
        self._buffer: Any = rbtool.load_dataset(self.folder)
        self._windows: Any = None
        self._loader: Any = None

    def _batch(self, found: Any) -> Batch:
        return {key: found[path] for key, path in self._key.items()}

    def _numbered(self, found: Any) -> Batch:
        return {**self._batch(found), ROW: found["index"]}

    def rows(self, index: Any) -> Batch:
        """Read rows of the buffer."""
        import torch

        return self._batch(self._buffer[torch.from_numpy(index)])

    def chunks(self, index: Any, steps: int, action: str, image: str) -> Batch:
        """Read rows of a buffer with windows."""
        rbtool = self._rbtool
        import torch

        if self._windows is None:
            self._windows = rbtool.load_dataset(self.folder, windows={action: (0, steps)})
        found = self._windows[torch.from_numpy(index)]
        return {action: found[self._key[action]], image: found[self._key[image]]}

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Read the batches of a loader."""
        rbtool = self._rbtool
        self._loader = rbtool.TorchLoader(rbtool.torch_dataset(self.folder, size, seed=seed))
        if start is not None:
            self._loader.load_state_dict(start)
        return map(self._numbered, self._loader)

    def state(self, batches: int) -> Any:
        """Return the state of the loader."""
        return self._loader.state_dict()


class Torchrl(Library):
    """TorchRL: a memory-mapped buffer, saved by `dumps`."""

    name, package, form = "torchrl", "torchrl", "LazyMemmapStorage"

    @staticmethod
    def _buffer(count: int, size: int | None = None, sampler: Any = None) -> Any:
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        return TensorDictReplayBuffer(storage=LazyMemmapStorage(count), sampler=sampler, batch_size=size)

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Extend a buffer and save it."""
        import torch
        from tensordict import TensorDict

        count = int(np.sum(lengths))
        buffer = cls._buffer(count)
        for start in range(0, count, 4096):
            rows = {key: torch.from_numpy(np.array(array[start : start + 4096])) for key, array in plain.items()}
            buffer.extend(TensorDict(rows, [min(4096, count - start)]))
        buffer.dumps(folder)

    def _loaded(self, size: int | None = None, sampler: Any = None) -> Any:
        buffer = self._buffer(self.count, size, sampler)
        buffer.storage.loads(self.folder / "storage")
        return buffer

    def open(self) -> None:
        """Load the storage."""
        self._rows = self._loaded()[:]
        self._epoch: Any = None

    def rows(self, index: Any) -> Batch:
        """Index the memory-mapped rows."""
        import torch

        found = self._rows[torch.from_numpy(index)]
        return {key: found[key] for key in self.keys}

    def chunks(self, index: Any, steps: int, action: str, image: str) -> Batch:
        """Index the memory-mapped entries."""
        import torch

        rows = torch.from_numpy(following(self.stops, index, steps))
        return {action: self._rows[action][rows], image: self._rows[image][torch.from_numpy(index)]}

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Sample without replacement."""
        import torch
        from torchrl.data import SamplerWithoutReplacement

        torch.manual_seed(seed)
        self._epoch = self._loaded(size, SamplerWithoutReplacement())
        done = 0
        if start is not None:
            done, state = pickle.loads(base64.b64decode(start))  # what this class pickled
            self._epoch.sampler.load_state_dict(state)
        for _ in range(done, -(-self.count // size)):
            found = self._epoch.sample()
            yield {key: found[key] for key in (*self.keys, ROW)}

    def state(self, batches: int) -> Any:
        """Return the state of the sampler."""
        return base64.b64encode(pickle.dumps((batches, self._epoch.sampler.state_dict()))).decode()


class Datasets(Library):
    """Hugging Face datasets: Arrow files, memory-mapped."""

    name, package, form = "datasets", "datasets", "Arrow files of save_to_disk"

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write the rows in blocks."""
        import datasets

        kinds = (datasets.Array2D, datasets.Array3D, datasets.Array4D, datasets.Array5D)
        features = {}
        for key, array in plain.items():
            value = datasets.Value(str(array.dtype))
            shape, name = array.shape[1:], str(array.dtype)
            one = datasets.List(value, length=shape[0]) if len(shape) == 1 else value
            features[key] = kinds[len(shape) - 2](shape, name) if len(shape) > 1 else one

        def blocks() -> Iterator[dict[str, Any]]:
            for start in range(0, int(np.sum(lengths)), 256):
                rows = {key: array[start : start + 256] for key, array in plain.items()}
                for row in range(len(rows[ROW])):
                    yield {key: values[row] for key, values in rows.items()}

        with tempfile.TemporaryDirectory(dir=folder) as cache:
            made = datasets.Dataset.from_generator(blocks, features=datasets.Features(features), cache_dir=cache)
            made.save_to_disk(str(folder / "rows"))

    def open(self) -> None:
        """Open the files."""
        import datasets

        datasets.disable_progress_bars()
        # Not format "numpy", which turns float64 into float32 and uint8 into int64.
        self._rows: Any = datasets.load_from_disk(str(self.folder / "rows")).with_format("arrow")
        self._columns: dict[str, Any] = {}

    def _arrays(self, table: Any) -> Batch:
        found = {}
        for key in table.column_names:
            column = table[key].combine_chunks()
            column = getattr(column, "storage", column)
            while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
                column = column.flatten()
            found[key] = column.to_numpy().reshape(len(table), *self.types.get(key, ("", []))[1])
        return found

    def rows(self, index: Any) -> Batch:
        """Index a list of rows."""
        return self._arrays(self._rows[index.tolist()])

    def chunks(self, index: Any, steps: int, action: str, image: str) -> Batch:
        """Index columns by themselves."""
        for key in (action, image):
            self._columns.setdefault(key, self._rows.select_columns([key]))
        rows = following(self.stops, index, steps)
        actions = self._arrays(self._columns[action][rows.reshape(-1).tolist()])[action]
        images = self._arrays(self._columns[image][index.tolist()])
        return {action: actions.reshape(*rows.shape, *actions.shape[1:]), **images}

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Shuffle the indices; `skip` resumes where an epoch stopped."""
        rows = self._rows.shuffle(seed=seed, keep_in_memory=True)
        return map(self._arrays, rows.skip((start or 0) * size).iter(batch_size=size))

    def state(self, batches: int) -> Any:
        """Return the number of batches."""
        return batches


class Webdataset(Library):
    """WebDataset: tar files of 1,000 rows, shuffled by files and in a buffer of 1,000 rows."""

    name, package, form = "webdataset", "webdataset", "tar files of npy members"

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write a member for each key of a row."""
        import webdataset

        with webdataset.ShardWriter(str(folder / "%05d.tar"), maxcount=1000, verbose=0) as writer:
            for row in range(int(np.sum(lengths))):
                values = {f"{key}.npy": np.asarray(array[row]) for key, array in plain.items()}
                writer.write({"__key__": f"{row:09d}"} | values)

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Shuffle files, and rows in a buffer."""
        import webdataset

        files = sorted(map(str, self.folder.glob("*.tar")))
        rows = webdataset.WebDataset(files, shardshuffle=len(files), seed=seed).shuffle(1000, seed=seed).decode()
        for batch in rows.batched(size, collation_fn=list):
            yield {key: np.stack([row[f"{key}.npy"] for row in batch]) for key in (*self.keys, ROW)}


class Grain(Library):
    """Grain over ArrayRecord files: one of images, one of all other keys."""

    name, package, form = "grain", "grain", "ArrayRecord files"

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write a record for each row: the bytes of its keys, concatenated."""
        from array_record.python.array_record_module import ArrayRecordWriter

        for name, keys in cls._files({key: array.ndim - 1 for key, array in plain.items()}).items():
            writer = ArrayRecordWriter(str(folder / name), "group_size:1,uncompressed")
            for row in range(int(np.sum(lengths))):
                writer.write(b"".join(plain[key][row].tobytes() for key in keys))
            writer.close()

    @staticmethod
    def _files(dimensions: Mapping[str, int]) -> dict[str, list[str]]:
        images = [key for key, count in dimensions.items() if count > 2]
        return {"images.array_record": images, "others.array_record": [key for key in dimensions if key not in images]}

    def open(self) -> None:
        """Open the files."""
        import grain

        self._forms = {key: (np.dtype(kind), shape) for key, (kind, shape) in self.types.items()}
        self._forms[ROW] = np.dtype(np.int64), []
        self._sources = {
            name: (keys, grain.sources.ArrayRecordDataSource(str(self.folder / name)))
            for name, keys in self._files({key: len(shape) for key, (_, shape) in self._forms.items()}).items()
            if keys
        }
        self._iterator: Any = None

    def _parsed(self, records: Sequence[bytes], keys: Sequence[str]) -> Batch:
        found, start = {}, 0
        for key in keys:
            dtype, shape = self._forms[key]
            stop = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            joined = b"".join(record[start:stop] for record in records)
            found[key] = np.frombuffer(joined, dtype).reshape(len(records), *shape)
            start = stop
        return found

    def rows(self, index: Any) -> Batch:
        """Read the records of some rows at once."""
        found: dict[str, Any] = {}
        for keys, source in self._sources.values():
            found |= self._parsed(source.__getitems__(index.tolist()), keys)
        return found

    def chunks(self, index: Any, steps: int, action: str, image: str) -> Batch:
        """Read the records of actions and of images from the files that have them."""
        rows, found = following(self.stops, index, steps), {}
        for keys, source in self._sources.values():
            if action in keys:
                actions = self._parsed(source.__getitems__(rows.reshape(-1).tolist()), keys)[action]
                found[action] = actions.reshape(*rows.shape, *actions.shape[1:])
            if image in keys:
                found[image] = self._parsed(source.__getitems__(index.tolist()), keys)[image]
        return found

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Shuffle row numbers, and read the rows of a batch at once."""
        import grain

        numbers = grain.MapDataset.range(self.count).seed(seed).shuffle().batch(size).map(self.rows)
        self._iterator = iter(numbers.to_iter_dataset())
        if start is not None:
            self._iterator.set_state(start)
        return self._iterator  # type: ignore[no-any-return]

    def state(self, batches: int) -> Any:
        """Return the state of the iterator."""
        return self._iterator.get_state()


class Mosaic(Library):
    """MosaicML's streaming: MDS shards, in this folder."""

    name, package, form = "mosaicml-streaming", "mosaicml-streaming", "MDS shards"

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write a sample for each row."""
        from streaming import MDSWriter

        columns = {}
        for key, array in plain.items():
            shape = ",".join(map(str, array.shape[1:] or (1,)))
            columns[key] = f"ndarray:{'uint8' if array.dtype == bool else array.dtype}:{shape}"
        with MDSWriter(out=str(folder / "rows"), columns=columns) as writer:
            for row in range(int(np.sum(lengths))):
                values = {key: np.atleast_1d(array[row]) for key, array in plain.items()}
                writer.write({key: one.view(np.uint8) if one.dtype == bool else one for key, one in values.items()})

    def open(self) -> None:
        """Open the shards."""
        from streaming import StreamingDataset

        # `clean_stale_shared_memory` is not called, because it also removes the shared memory of running jobs. What
        # an ended process has left does no harm: new names skip those in use.
        self._rows: Any = StreamingDataset(local=str(self.folder / "rows"), batch_size=1)
        self._loader: Any = None

    def _stacked(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        shapes = {key: shape for key, (_, shape) in self.types.items()} | {ROW: []}
        return {key: np.stack([row[key] for row in rows]).reshape(len(rows), *shapes[key]) for key in shapes}

    def rows(self, index: Any) -> Batch:
        """Read samples one by one."""
        return self._stacked([self._rows[row] for row in index.tolist()])

    def chunks(self, index: Any, steps: int, action: str, image: str) -> Batch:
        """Read whole samples: there is no access to columns."""
        rows = following(self.stops, index, steps)
        actions = self.rows(rows.reshape(-1))[action]
        return {action: actions.reshape(*rows.shape, *actions.shape[1:]), image: self.rows(index)[image]}

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Read the batches of a loader."""
        from streaming import StreamingDataLoader, StreamingDataset

        local, nodes = str(self.folder / "rows"), 1  # several nodes repeat samples, to get the same number each
        rows = StreamingDataset(
            local=local, shuffle=True, shuffle_seed=seed, batch_size=size, num_canonical_nodes=nodes
        )
        return self._begun(StreamingDataLoader(rows, batch_size=size, collate_fn=self._stacked), start)

    def _begun(self, loader: Any, start: Any) -> Iterator[Batch]:
        """Return the batches of a loader, which resumes from `start` if that is given."""
        self._loader = loader
        if start is not None:
            loader.load_state_dict(start)
        return iter(loader)

    def state(self, batches: int) -> Any:
        """Return the state of the loader."""
        return self._loader.state_dict()


class Litdata(Mosaic):
    """litdata: chunks of 64 MB, in this folder."""

    name, package, form = "litdata", "litdata", "chunks of 64 MB"

    @classmethod
    def prepare(cls, plain: Mapping[str, Any], lengths: Any, folder: Path) -> None:
        """Write an item for each row."""
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder / "rows"), chunk_bytes="64MB")
        for row in range(int(np.sum(lengths))):
            writer[row] = {key: np.array(np.atleast_1d(array[row])) for key, array in plain.items()}
        writer.done()
        writer.merge()

    def open(self) -> None:
        """Open the chunks."""
        from litdata import StreamingDataset

        self._rows: Any = StreamingDataset(str(self.folder / "rows"))
        self._loader: Any = None

    def epoch(self, seed: int, size: int, start: Any = None) -> Iterator[Batch]:
        """Read the batches of a loader."""
        from litdata import StreamingDataLoader, StreamingDataset

        rows = StreamingDataset(str(self.folder / "rows"), shuffle=True, seed=seed)
        return self._begun(StreamingDataLoader(rows, batch_size=size, collate_fn=self._stacked), start)


LIBRARIES: dict[str, type[Library]] = {
    one.name: one for one in (Rbtool, Torchrl, Datasets, Webdataset, Grain, Mosaic, Litdata)
}

# Answers ---------------------------------------------------------------------------------------------


def row_digests(batch: Batch, types: Mapping[str, tuple[str, list[int]]]) -> list[bytes]:
    """Return a digest of each row: of the bytes of the keys in `types`, in their order.

    Values are converted to the dtype in `types` first, if that loses nothing: some libraries return uint8 as int64.
    """
    arrays = [_typed(np.asarray(batch[key]), np.dtype(kind)) for key, (kind, _) in types.items()]
    return [
        hashlib.blake2b(b"".join(array[row].tobytes() for array in arrays), digest_size=8).digest()
        for row in range(len(arrays[0]))
    ]


def _typed(array: Any, dtype: Any) -> Any:
    typed = np.ascontiguousarray(array, dtype)
    return typed if np.array_equal(typed, array, equal_nan=dtype.kind in "fc") else np.ascontiguousarray(array)


def joined(digests: Sequence[bytes]) -> str:
    """Return one digest of several digests, which depends on their order."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


class Reading:
    """The requests that a process answers: reads batches and epochs of a library, and digests or times them."""

    def __init__(self, library: Library, action: str, image: str) -> None:
        self._library, self._of = library, (action, image)

    def _read(self, job: str, index: Any, steps: int) -> Batch:
        return self._library.rows(index) if job == "frames" else self._library.chunks(index, steps, *self._of)

    def compared(self, job: str, index: list[int], steps: int) -> Any:
        """Return the digest of one batch."""
        batch = self._read(job, np.array(index), steps)
        types = self._library.types
        return joined(row_digests(batch, types if job == "frames" else {key: types[key] for key in self._of}))

    def timed(self, job: str, indexes: list[list[int]], steps: int) -> Any:
        """Read batches, the first of them untimed; return the measurements of a `Clock`."""
        first, *others = [np.array(index) for index in indexes]
        self._read(job, first, steps)
        started = Clock()
        for index in others:
            self._read(job, index, steps)
        return started.took() | {"rows": sum(map(len, others))}

    def epoch(self, seed: int, size: int, most: int, stop: int | None = None, start: Any = None) -> Any:
        """Read an epoch, or `stop` batches of it; return a digest of the rows, their order, and the state."""
        rows: list[bytes] = []
        order: list[int] = []
        batches = 0
        for batch in self._library.epoch(seed, size, start):
            rows += row_digests(batch, self._library.types)
            order += np.asarray(batch[ROW]).reshape(-1).tolist()
            batches += 1
            if batches == stop or len(order) > most:
                break
        return {
            "content": joined(sorted(rows)),
            "order": order,
            "state": None if stop is None else self._library.state(batches),
        }

    def timed_epoch(self, seed: int, size: int, most: int) -> Any:
        """Read up to `most` batches of an epoch; return the measurements and the number of rows."""
        started, rows = Clock(), 0
        for batch in islice(self._library.epoch(seed, size), most):
            rows += len(batch[ROW])
        return started.took() | {"rows": rows}

    def timed_resume(self, seed: int, size: int, state: Any) -> Any:
        """Resume an epoch from a state; return the measurements until the first batch."""
        started = Clock()
        next(self._library.epoch(seed, size, state))
        return started.took()


class Clock:
    """Measures wall time, processor time and bytes read since its construction."""

    def __init__(self) -> None:
        self._read = _about_process()[0]
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def took(self) -> dict[str, Any]:
        """Return the measurements, and the anonymous memory of this process in bytes."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        read, memory = _about_process()
        return {"wall": wall, "cpu": cpu, "memory": memory, "read": read - self._read}


def _about_process() -> tuple[int, int]:
    """Return the bytes that this process has read, and its anonymous memory; (0, 0) on systems without `/proc`."""
    try:
        with open("/proc/self/io", encoding="ascii") as io, open("/proc/self/status", encoding="utf-8") as status:
            found = dict(line.split(":", 1) for line in (*io, *status))
        return int(found["rchar"]), int(found["RssAnon"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0, 0


def answers(name: str) -> None:
    """Answer the requests on standard input, one per line, until it ends."""
    library, reading, replies = LIBRARIES[name], None, sys.stdout
    for line in sys.stdin:
        do, *asked = json.loads(line)
        try:
            with redirect_stdout(sys.stderr):  # libraries print
                if do == "versions":
                    found: Any = _versions(library.package)
                elif do == "prepare":
                    files, lengths, folder = asked
                    plain = {key: np.load(path, mmap_mode="r") for key, path in files.items()}
                    started = time.perf_counter()
                    library.prepare(plain, np.load(lengths), Path(folder))
                    found = time.perf_counter() - started
                elif do == "open":
                    _one_thread()
                    folder, types, lengths, *keys = asked
                    reading, found = Reading(library(Path(folder), types, np.load(lengths)), *keys), None
                else:
                    found = getattr(reading, do)(*asked)
            answer = {"found": found}
        except NotImplementedError as error:
            answer = {"lacks": str(error)}
        except Exception as error:  # the other side reports it with the name of the library
            answer = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _versions(package: str) -> dict[str, str]:
    try:
        return {"python": sys.version.split()[0], package: importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _one_thread() -> None:
    """Limit torch, if it is installed, to one thread, so that all libraries have equally many."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    answers(sys.argv[1])
