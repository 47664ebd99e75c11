"""Layout `h5`: everything in one HDF5 file, one dataset a leaf, the manifest in front."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from ..format import FileRecord, Manifest, StepReader, column_types, digest_bytes, episode_text_bytes, fs
from ..format.mapped import digest_mapped
from ..progress import Progress
from ..ted import file_stem
from .compact import write_compact
from .compression import Compression
from .filled import FilledStorage
from .h5_file import LatchedFile
from .h5_names import DATA, EPISODES, SOURCE, STORAGE, TEXT
from .h5_sink import H5Sink
from .layout import CompactLayout
from .user_block import block_bytes, block_size

__all__ = ["write_h5"]

Seal = Callable[[FileRecord, int, tuple[FileRecord, ...]], Manifest]
"""Makes the manifest from the record of the data, the number of explicit episodes and the records of small parts."""


def write_h5(
    source: StepReader,
    path: Path,
    compression: Compression,
    filled: FilledStorage,
    seal: Seal,
    progress: Progress,
) -> Manifest:
    """Write the rows of a dataset, a checkpoint or a storage, which is `filled` with them, into one new file.

    Episodes, text and documents go there, too.
    """
    rest, types = _rest(source, filled), column_types(source.episodes)
    parts = tuple(FileRecord(name, len(data), digest_bytes(data)) for name, data in rest.items())
    block = block_size(seal(FileRecord(DATA, 1 << 62, "xxh3-128:" + "0" * 32), source.manifest.episodes, parts))
    with LatchedFile(path) as file:
        # Chunks are written whole and once: a cache of them would only cost memory, for every leaf.
        with h5py.File(file, "w", userblock_size=block, rdcc_nbytes=0) as h5:
            with H5Sink(h5, file, compression) as sink:
                explicit = write_compact(source, CompactLayout.of(source.fields, "h5"), sink, progress)
                sink.finish()
            for name, data in rest.items():
                if name.startswith(f"{EPISODES}/"):
                    dtype = types[name.removeprefix(f"{EPISODES}/")]
                    sink.put_array(name, np.frombuffer(data, dtype))
                else:
                    sink.put_bytes(name, data)
        file.check()
        size = path.stat().st_size - block
        manifest = seal(FileRecord(DATA, size, digest_mapped(file.descriptor, path, block)), len(explicit), parts)
        fs.pwrite(file.descriptor, memoryview(block_bytes(manifest, block)), 0, path)
        fs.fsync(file.descriptor, path)
    return manifest


def _rest(source: StepReader, filled: FilledStorage) -> dict[str, bytes]:
    """The bytes of everything but the rows, by name."""
    columns, types = source.episodes.columns(), column_types(source.episodes)
    rest = {f"{EPISODES}/{name}": np.asarray(columns[name], dtype).tobytes() for name, dtype in types.items()}
    text = episode_text_bytes(source.episode_text or ())
    if text:
        rest[TEXT] = text
    rest |= {f"{SOURCE}/{file_stem(name)}": data for name, data in source.documents().items()}
    return rest | {STORAGE: filled.to_bytes()}
