"""Takes chunks of one dataset through the function, in this process: read, call, check, write."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..checkpoint import open_steps
from ..dataset import Array, RowFiles, range_of
from ..errors import CorruptDataError
from ..ted import NEXT, NEXT_DONE, NEXT_TRUNCATED, Field, Key, key_name, role_of, state_keys
from ..ted.checks.following import rows_equal
from .failures import FunctionFailed, ResultRefused
from .job import Finished, Job
from .tensors import chunk_of, columns_of

__all__ = ["ChunkRunner"]


class ChunkRunner:
    """Runs chunks. The first one defines the result's fields; all others must fit them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._function = job.function.load()
        self._reader = open_steps(job.source)
        if self._reader.manifest.content_digest != job.content_digest:
            raise CorruptDataError(f"{job.source} was replaced while it was read", hint="run it again")
        self._source = {field.key: field for field in self._reader.fields}
        self._fields: tuple[Field, ...] = ()
        self._states: list[Key] = []
        self._held: tuple[int, dict[Key, Array]] | None = None
        self._files: RowFiles | None = None

    def schema(self, start: int, stop: int) -> tuple[Field, ...]:
        """Run one chunk to see what comes out; its rows are kept until `run` asks for them."""
        found = self._compute(start, stop)
        roles = {key: field.role for key, field in self._source.items()}
        self._fields = tuple(
            Field(key, name, array.shape[1:], roles.get(key) or role_of(key)) for key, (name, array) in found.items()
        )
        self._held = start, {key: array for key, (_, array) in found.items()}
        return self._fields

    def open(self, folder: Path, fields: Sequence[Field]) -> None:
        """Prepare to write rows of these fields into the files in `folder`."""
        self._fields = tuple(fields)
        self._states = state_keys(fields)
        self._files = RowFiles(folder, fields)

    def run(self, start: int, stop: int) -> Finished:
        """Take the steps `[start, stop)` through the function and write what comes out in their place."""
        assert self._files is not None, "open comes first"
        columns = self._columns(start, stop)
        self._files.write(columns, start)
        ranges = {field.key: range_of(columns[field.key], field) for field in self._fields}
        follows = np.ones(stop - start - 1, bool)
        for key in self._states:
            follows &= rows_equal(columns[NEXT, *key][:-1], columns[key][1:])
        return Finished(ranges, np.packbits(follows))

    def _columns(self, start: int, stop: int) -> dict[Key, Array]:
        if self._held is not None and self._held[0] == start:
            columns, self._held = self._held[1], None
            return columns
        found = self._compute(start, stop)
        self._check(found)
        return {field.key: found[field.key][1] for field in self._fields}

    def _compute(self, start: int, stop: int) -> dict[Key, tuple[str, Array]]:
        columns = {key: self._reader.read(key, start, stop) for key in self._source}
        if self._job.cut and stop == self._job.steps:
            for key in (NEXT_TRUNCATED, NEXT_DONE):
                if key in columns:
                    columns[key][-1] = True
        chunk = chunk_of(columns, self._source, stop - start)
        try:
            with _same_random_numbers(start), contextlib.redirect_stdout(sys.stderr):
                result = self._function(chunk)
        except (Exception, SystemExit) as error:
            raise FunctionFailed.of(error) from error
        return columns_of(result, stop - start)

    def _check(self, found: Mapping[Key, tuple[str, Array]]) -> None:
        expected = {field.key: field for field in self._fields}
        for text, keys in (("lacks", expected.keys() - found.keys()), ("has besides", found.keys() - expected.keys())):
            if keys:
                names = ", ".join(sorted(map(key_name, keys)))
                raise ResultRefused(f"the result {text} {names}; every chunk must have the keys of the first")
        for key, (name, array) in found.items():
            field = expected[key]
            if (name, array.shape[1:]) != (field.dtype, field.shape):
                raise ResultRefused(
                    f"{field.name!r} came out as {name} {list(array.shape[1:])}, "
                    f"the first chunk had {field.dtype} {list(field.shape)}"
                )

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
        if self._files is not None:
            self._files.close()


@contextlib.contextmanager
def _same_random_numbers(seed: int) -> Iterator[None]:
    """Seed the global generators by the chunk, so that the result does not depend on who runs which one."""
    # A user's function draws from the global generators, NumPy's legacy one too.
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
