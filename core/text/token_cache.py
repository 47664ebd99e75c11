"""Writes token caches: datasets whose rows are tokenized texts, each an episode of one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ..errors import SchemaError, UsageError
from ..format.contracts import EpisodeBlock
from ..format.memmap.builder import DatasetBuilder, Origin, provenance_step
from ..format.returns import Ingest
from ..format.staging import Staging
from ..ted.episodes import Final
from ..ted.schema import Field, Timing, dtype_name, ted_fields
from .identity import TokenRequest
from .tokenizers import VALID, Columns


def write_token_cache(batches: Iterable[Columns], asked: TokenRequest, root: Path) -> None:
    """Write a token cache below the root, where it is there whole or not at all; one that came meanwhile stays.

    UsageError where no row is complete, SchemaError for batches that are not alike.
    """
    counter = _Complete(batches)
    rows = iter(counter)
    first = next(rows, None)
    if first is None:
        raise UsageError(
            f"none of {counter.seen:,} texts of {asked.dataset} ends within {asked.max_length:,} tokens"
            if counter.seen
            else f"{asked.dataset} has no texts in {asked.split}",
            hint="a larger max_length leaves fewer out" if counter.seen else "",
        )
    fields: list[tuple[Field, Timing]] = [
        (Field((name,), dtype_name(column.dtype), column.shape[1:], "info"), "step") for name, column in first.items()
    ]
    with Staging(asked.folder(root), below=root) as staging:
        with DatasetBuilder(staging.path, ted_fields(fields)) as builder:
            ingest = Ingest(builder, fields)
            ingest.run(_blocks(first, rows))
            builder.finish(ingest.table, _origin(asked, counter), ingest.text)
        staging.publish()


class _Complete:
    """The rows of batches that are complete; counts all."""

    def __init__(self, batches: Iterable[Columns]) -> None:
        self._batches = batches
        self.seen = self.kept = 0

    def __iter__(self) -> Iterator[Columns]:
        for columns in self._batches:
            valid = columns.pop(VALID)
            self.seen += len(valid)
            self.kept += int(valid.sum())
            if valid.any():
                yield {name: column[valid] for name, column in columns.items()}


def _blocks(first: Columns, rest: Iterator[Columns]) -> Iterator[EpisodeBlock]:
    form = {name: (column.dtype, column.shape[1:]) for name, column in first.items()}
    start = 0
    for columns in itertools.chain([first], rest):
        if {name: (column.dtype, column.shape[1:]) for name, column in columns.items()} != form:
            raise SchemaError("the tokenizer returned rows of several shapes or types, expected one of each")
        count = len(next(iter(columns.values())))
        yield EpisodeBlock(
            np.arange(start, start + count), np.arange(1, count + 1),
            {(name,): column for name, column in columns.items()}, np.ones(count, bool), np.zeros(count, bool),
            np.full(count, Final.OBSERVED, np.uint8),
        )  # fmt: skip
        start += count


def _origin(asked: TokenRequest, counter: _Complete) -> Origin:
    left_out = counter.seen - counter.kept
    notes = [f"tokens of {asked.dataset}, split {asked.split}: every row is an episode of one step"]
    if left_out:
        which = "1 text is" if left_out == 1 else f"{left_out:,} texts are"
        notes.append(f"{which} left out: without tokens, or not at their end within {asked.max_length:,}")
    step = provenance_step(
        "tokenize", {"split": asked.split, "max_length": asked.max_length, "tokenizer": asked.tokenizer},
        {asked.dataset: asked.data},
    )  # fmt: skip
    return Origin(asked.request, (step,), notes=tuple(notes))
