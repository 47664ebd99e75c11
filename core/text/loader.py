"""Text datasets as tokens: a split is tokenized once, stored as a token cache, memory-mapped, and read in batches.

    rows of text  ->  pre_tokenization_hook  ->  tokenizer_fn  ->  token cache  ->  tensordict
    (TextRows)        (optional)                 (1000 rows a call)   (a dataset)      (mapped)

The name of the folder of a token cache ends in a digest of everything that its content depends on (`TokenRequest`). A
change of the data, the tokenizer or the arguments therefore creates another cache, and never opens a stale one.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from ..buffers.replay_buffer import ReplayBuffer
from ..errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    MissingKeyError,
    SchemaError,
    UsageError,
    did_you_mean,
    keywords_of,
    refuse_misspelt,
    require_flags,
    require_number,
)
from ..format import fs
from ..format.contracts import Array, EpisodeBlock, StepReader
from ..format.documents import dump_json
from ..format.files import digest_bytes, digest_file, read_regular
from ..format.locate import dataset_folder, storage_root
from ..format.manifest import Manifest, Request
from ..format.memmap.builder import DatasetBuilder, Origin, provenance_step
from ..format.memmap.tree import TreeWriter
from ..format.returns import Ingest
from ..format.staging import Staging
from ..open_steps import open_dataset
from ..options import PathLike
from ..preprocess.functions import fingerprint_of
from ..results import existing_result
from ..samplers.uniform import SamplerWithoutReplacement
from ..storages.dataset import dataset_tensors
from ..storages.tensor import TensorStorage
from ..ted.episodes import Final
from ..ted.schema import Field, Key, Timing, dtype_name, ted_fields
from ..verbs.download import download
from ..writers.base import ImmutableDatasetWriter
from .tokenizers import VALID, Columns, TensorDictTokenizer, require_transformers

_BATCH = 1000
_DEFAULT_TOKENIZER = "gpt2"


class TokenizedDatasetLoader:
    """Tokenizes a split of a text dataset once, and maps the stored tokens from then on.

    The tokens are stored as a dataset, the token cache, at `tokens/DATASET/SPLIT-LENGTH@DIGEST` below the storage root.
    The digest covers the data, the tokenizer and all arguments; a change of any of these creates another cache.
    `rbtool inspect`, `check`, `sample` and `cache` work on token caches. A tokenizer without a pad token pads with its
    EOS token.

    Args:
        split: the name of the split. If it begins with "valid", only the first `valid_size` rows are used.
        max_length: tokens per row.
        dataset_name: `OWNER/NAME` on the hub, downloaded once as by `rbtool download hf-text`; with `from_disk` a
            folder written by `save_to_disk` of the datasets library.
        tokenizer_fn: called with the tokenizer and `max_length`; returns a callable that tokenizes a batch. Usually a
            class such as `TensorDictTokenizer`.
        pre_tokenization_hook: a function from the split, a `datasets.Dataset`, to another `datasets.Dataset`.
        root_dir: the storage root; by default the storage root of rbtool.
        num_workers: accepted for compatibility with TorchRL and ignored: fast tokenizers use all cores by themselves.
        tokenizer_class, tokenizer_model_name: the class and the name of the tokenizer to load with `from_pretrained`;
            by default `AutoTokenizer` and `"gpt2"`.
        tokenizer: a tokenizer that is already loaded, instead of these two.

    Raises:
        UsageError (a ValueError): an argument is invalid, or no row is left to store.
        DatasetNotFoundError (a FileNotFoundError): the dataset or the split does not exist.
        RbtoolError: transformers is needed and not installed, or the download fails.
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        dataset_name: PathLike,
        tokenizer_fn: Callable[[Any, int], TensorDictTokenizer],
        pre_tokenization_hook: Callable[[Any], Any] | None = None,
        root_dir: PathLike | None = None,
        from_disk: bool = False,
        valid_size: int = 2000,
        num_workers: int | None = None,
        tokenizer_class: Any = None,
        tokenizer_model_name: str | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        require_flags(from_disk=from_disk)
        if tokenizer is not None and (tokenizer_class is not None or tokenizer_model_name is not None):
            raise UsageError("both a tokenizer and a class or name to load one are set, expected one of them")
        self.split = split
        self.max_length = max_length
        self.dataset_name = dataset_name
        self.tokenizer_fn = tokenizer_fn
        self.pre_tokenization_hook = pre_tokenization_hook
        self.root = storage_root(root_dir)
        self.from_disk = from_disk
        self.valid_size = require_number("valid_size", valid_size, 1, "rows")
        self.num_workers = num_workers
        if tokenizer is None:
            tokenizer = self.make_tokenizer(tokenizer_class, tokenizer_model_name)
        self.tokenizer = _with_pad_token(tokenizer)
        self.path: Path | None = None
        """The folder of the token cache; None before `load`."""

    @staticmethod
    def make_tokenizer(tokenizer_class: Any = None, tokenizer_model_name: str | None = None) -> Any:
        """Load a tokenizer with `from_pretrained`, which may download it."""
        transformers = require_transformers("the tokenizer of a dataset")
        return (tokenizer_class or transformers.AutoTokenizer).from_pretrained(
            tokenizer_model_name or _DEFAULT_TOKENIZER
        )

    def load(self) -> TensorDict:
        """Return the tokens of all n rows, mapped from the token cache, batch size `[n]`.

        The first call writes the cache. The mapping is copy-on-write: edits of the tensors never reach the cache.
        """
        rows = self._rows()
        count = min(self.valid_size, rows.count) if self.split.startswith("valid") else rows.count
        hook = self.pre_tokenization_hook
        asked = TokenRequest(
            dataset=Path(rows.name).name if self.from_disk else rows.name, split=self.split,
            max_length=self.max_length, rows=count, data=rows.digest, tokenizer=tokenizer_digest(self.tokenizer),
            function=function_digest(self.tokenizer_fn), hook=None if hook is None else function_digest(hook),
        )  # fmt: skip
        self.path = asked.folder(self.root)
        if asked.existing(self.root) is None:
            write_token_cache(self._batches(rows, count), asked, self.root)
        tensors = dataset_tensors(self.path)
        made_by_ted = {"next", "episode"}
        return tensors.exclude(*made_by_ted)

    def _rows(self) -> TextRows:
        if self.from_disk:
            return RowsOnDisk(Path(self.dataset_name), self.split)
        found = download(_TEXT_SOURCE, os.fspath(self.dataset_name), root=self.root)  # does nothing if it is stored
        return StoredRows(found.path, found.id, self.split)

    def _batches(self, rows: TextRows, count: int) -> Iterator[Columns]:
        """Yield the tokenized rows in batches."""
        dataset = rows.dataset(count)
        if self.pre_tokenization_hook is not None:
            dataset = self.pre_tokenization_hook(dataset)
            if not hasattr(dataset, "column_names"):
                raise UsageError(
                    f"pre_tokenization_hook returned a {type(dataset).__name__}, expected a datasets.Dataset"
                )
        tokenize = self.tokenizer_fn(self.tokenizer, self.max_length)
        for start in range(0, len(dataset), _BATCH):
            yield _columns(tokenize, dataset[start : start + _BATCH])

    @staticmethod
    def dataset_to_tensordict(
        dataset: Any,
        data_dir: PathLike,
        prefix: str | Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        batch_dims: int = 1,
        valid_mask_key: str | None = None,
    ) -> TensorDict:
        """Write numeric columns of a `datasets.Dataset` as a memory-mapped tensordict, and return it mapped.

        Args:
            dataset: a `datasets.Dataset`, or anything with `column_names` and `dataset[:]`.
            data_dir: the folder to write; it must be missing or empty. It appears only when it is complete.
            prefix: the key below which the columns go.
            features: the columns to write; by default all.
            batch_dims: how many leading dimensions belong to the batch.
            valid_mask_key: a column of flags. Rows where it is false are left out, and the column is not written.

        Raises:
            SchemaError (a RuntimeError): a column does not hold numbers, its rows have different shapes, or the columns
                do not share the batch dimensions.
            MissingKeyError (a KeyError): a column does not exist.
            UsageError (a ValueError): no columns are left to write, `batch_dims` is less than 1, or `data_dir` exists.
        """
        require_number("batch_dims", batch_dims, 1, "dimensions")
        names = [name for name in (dataset.column_names if features is None else features) if name != valid_mask_key]
        columns = dataset[:]
        for name in (*names, *([] if valid_mask_key is None else [valid_mask_key])):
            if name not in columns:
                raise MissingKeyError(f"the dataset has no column {name!r}; it has {', '.join(dataset.column_names)}")
        if not names:
            raise UsageError("no columns to write, expected at least one in features")
        arrays = {name: _array(name, columns[name]) for name in names}
        if valid_mask_key is not None:
            kept = _mask(valid_mask_key, columns[valid_mask_key], len(dataset))
            arrays = {name: array[kept] for name, array in arrays.items()}
        batch = next(iter(arrays.values())).shape[:batch_dims]
        if any(array.shape[:batch_dims] != batch or array.ndim < batch_dims for array in arrays.values()):
            raise SchemaError(f"batch_dims is {batch_dims}, but the columns do not share that many dimensions")
        path = (prefix,) if isinstance(prefix, str) else tuple(prefix or ())
        _write_tree({(*path, name): array for name, array in arrays.items()}, batch, Path(data_dir))
        found = TensorDict.load_memmap(Path(data_dir))
        return TensorDict({path: found.get(path)}, batch_size=[]) if path else found


def _with_pad_token(tokenizer: Any) -> Any:
    """Return the tokenizer; if it has no pad token, a copy that pads with its EOS token."""
    if getattr(tokenizer, "pad_token", "") is not None or getattr(tokenizer, "eos_token", None) is None:
        return tokenizer
    found = copy.deepcopy(tokenizer)
    found.pad_token = found.eos_token
    return found


def _columns(tokenize: Any, sample: Mapping[str, Any]) -> Columns:
    """Tokenize a batch into arrays, with a `TensorDictTokenizer` or another callable that returns tensors or lists."""
    if isinstance(tokenize, TensorDictTokenizer):
        return tokenize.columns(sample)
    found = tokenize(sample)
    rows = dict(found.items()) if isinstance(found, TensorDictBase | Mapping) else {}
    valid = rows.pop(VALID, None)
    if not rows:
        raise SchemaError(f"tokenizer_fn returned a {type(found).__name__}, expected tensors by name")
    made = {name: _array(name, value) for name, value in rows.items()}
    counts = {name: len(column) if column.ndim else None for name, column in made.items()}
    count = next(iter(counts.values()))
    if count is None or {*counts.values()} != {count}:
        raise SchemaError(f"tokenizer_fn returned columns with different numbers of rows: {counts}")
    made[VALID] = np.ones(count, bool) if valid is None else _mask(VALID, valid, count)
    return made


def _array(name: str, values: Any) -> Array:
    try:
        found = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
    except TypeError as error:  # torch raises it for a type that NumPy lacks, such as bfloat16
        raise SchemaError(f"{name!r} has values of type {values.dtype}, which NumPy does not support") from error
    except ValueError as error:
        raise SchemaError(f"the rows of {name!r} have different shapes") from error
    if found.dtype.kind not in "biuf":
        raise SchemaError(f"{name!r} has values of {found.dtype}, expected numbers")
    return found


def _mask(name: str, values: Any, rows: int) -> Array:
    """Return which rows are valid, bool `[rows]`; SchemaError unless there is one value for each row."""
    found = _array(name, values)
    if found.size != rows:
        raise SchemaError(f"{name!r} has the shape {list(found.shape)}, expected one value for each of {rows:,} rows")
    return found.reshape(rows).astype(bool)


def _write_tree(arrays: Mapping[Key, Array], batch: tuple[int, ...], destination: Path) -> None:
    fields = [Field(key, dtype_name(array.dtype), array.shape[1:], "info") for key, array in arrays.items()]
    with Staging(fs.expanded(destination).absolute()) as staging:
        writer = TreeWriter(staging.path, fields, rows=batch[0])
        try:
            writer.append(arrays)
            writer.finish(batch)
        finally:
            writer.close()
        if not staging.publish():
            raise UsageError(f"{destination} already exists", hint="choose another data_dir")


_TEXT_SOURCE = "hf-text"
_SPLIT = ("split",)
_LENGTH = "_length"


class TextRows(ABC):
    """The rows of one split: the name of their dataset, the number of rows, and a digest of their content."""

    name: str
    count: int
    digest: str

    @abstractmethod
    def dataset(self, count: int) -> Any:
        """Return the first rows as a `datasets.Dataset`."""


class RowsOnDisk(TextRows):
    """A split in a folder that `save_to_disk` wrote."""

    def __init__(self, path: Path, split: str) -> None:
        import datasets

        if not path.is_dir():
            raise DatasetNotFoundError(f"no folder {path}, expected a dataset written by save_to_disk")
        try:
            found = datasets.load_from_disk(os.fspath(path))
        except (FileNotFoundError, ValueError, IndexError) as error:  # IndexError for a split without files
            raise FormatError(f"{path} was not written by save_to_disk of the datasets library: {error}") from error
        if isinstance(found, datasets.DatasetDict):
            _require_split(str(path), split, list(found))
            found = found[split]
        elif found.split is not None and str(found.split) != split:
            raise _no_split(str(path), split, [str(found.split)])
        self._found = found
        self.name, self.count = str(path), len(found)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """The digest of the files of the split."""
        files = sorted({Path(file["filename"]) for file in self._found.cache_files})
        return digest_bytes("\n".join(digest_file(file) for file in files).encode())

    def dataset(self, count: int) -> Any:
        return self._found.select(range(count))


class StoredRows(TextRows):
    """A split of a dataset that was downloaded from a hub."""

    def __init__(self, path: Path, name: str, split: str) -> None:
        self.name, self._path = name, path
        with open_dataset(path) as reader:
            names = json.loads(reader.documents()["splits.json"])["splits"]
            _require_split(f"{_TEXT_SOURCE}:{name}", split, names)
            self.digest = reader.manifest.content_digest
            steps = reader.manifest.steps
            numbers = reader.read(_SPLIT, 0, steps) if len(names) > 1 else np.zeros(steps, np.int64)
            self._rows = np.flatnonzero(numbers == names.index(split))
        self.count = len(self._rows)

    def dataset(self, count: int) -> Any:
        import datasets

        start = int(self._rows[0]) if count else 0  # the rows of a split are consecutive
        with open_dataset(self._path) as reader:
            return datasets.Dataset.from_dict(_text_columns(reader, start, start + count))


def _text_columns(reader: StepReader, start: int, stop: int) -> dict[str, Any]:
    """Return the columns of some rows, with the names that the source gave them; text as strings."""
    names = {there: name for name, there in reader.manifest.renamed_keys.items()}
    keys = {field.key for field in reader.fields}
    found: dict[str, Any] = {}
    for field in reader.fields:
        if len(field.key) > 1 or field.role not in ("text", "info") or field.key == _SPLIT:
            continue
        (name,) = field.key
        length = (name + _LENGTH,)
        if field.role == "text" and length in keys:
            rows, counts = reader.read(field.key, start, stop), reader.read(length, start, stop).tolist()
            try:
                found[names.get(name, name)] = [row[:n].tobytes().decode() for row, n in zip(rows, counts, strict=True)]
            except UnicodeDecodeError as error:
                raise CorruptDataError(f"{reader.path}: {name} is not UTF-8: {error}") from error
        elif field.role == "info":
            found[names.get(name, name)] = reader.read(field.key, start, stop)
    return found


def _require_split(where: str, split: str, there: list[str]) -> None:
    if not isinstance(split, str):
        raise UsageError(f"split is {split!r}, expected the name of a split")
    if split not in there:
        raise _no_split(where, split, there)


def _no_split(where: str, split: str, there: list[str]) -> DatasetNotFoundError:
    return DatasetNotFoundError(
        f"{where} has no split {split!r}{did_you_mean(split, there)}", hint=f"there are {', '.join(there)}"
    )


_TOKEN_SOURCE = "tokens"
_VERSION = 1
"""Part of the digest; increased when the tokenizers of rbtool produce other rows for the same text."""
_CALL_OPTIONS = ("truncation", "padding")
_LOCATIONS = ("name_or_path", "is_local", "local_files_only", "special_tokens_map_file", "tokenizer_file")


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Everything that the content of a token cache depends on; it names the folder of the cache.

    `data`, `tokenizer`, `function` (the class that tokenizes) and `hook` are digests.
    """

    dataset: str
    split: str
    max_length: int
    rows: int
    data: str
    tokenizer: str
    function: str
    hook: str | None

    @property
    def request(self) -> Request:
        """The request as it is written to the manifest."""
        options = {name: value for name, value in asdict(self).items() if name not in ("dataset", "split")}
        name = f"{self.dataset}/{self.split}-{self.max_length}"
        return Request(_TOKEN_SOURCE, f"{_TOKEN_SOURCE}:{name}", name, options={**options, "version": _VERSION})

    def folder(self, root: Path) -> Path:
        """Return the folder of the token cache below the storage root."""
        return dataset_folder(self.request, root)

    def existing(self, root: Path) -> Manifest | None:
        """Return the manifest of the token cache, None if it does not exist; UsageError if it is damaged."""
        return existing_result(self.folder(root), self.request)


def function_digest(function: Callable[..., Any]) -> str:
    """Return the name of a class of this package, which `_VERSION` covers, or a digest of the code of a function."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module.startswith(f"{__name__.rpartition('.')[0]}.") and "." not in name:
        return f"{module.rpartition('.')[2]}:{name}"
    return f"{name or type(function).__qualname__}:{fingerprint_of(function)}"


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer, made from the files that its `save_pretrained` writes.

    The options of its last call and the location that it was loaded from are left out, because they do not change the
    tokens. For a callable without `save_pretrained`, its code and its values are digested.
    """
    save = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        return function_digest(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        if not files:
            raise UsageError(f"save_pretrained of the {type(tokenizer).__name__} wrote no files, so it has no digest")
        parts = {path.relative_to(folder).as_posix(): digest_bytes(_stable(read_regular(path))) for path in files}
    kind = f"{type(tokenizer).__module__}:{type(tokenizer).__qualname__}"
    sides = [str(getattr(tokenizer, side, "")) for side in ("padding_side", "truncation_side")]
    return digest_bytes(dump_json({"files": parts, "class": kind, "sides": sides}).encode())


def _stable(data: bytes) -> bytes:
    """Return the bytes of a saved file without the entries that do not change tokens."""
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        if isinstance(document, dict):
            rest = {name: value for name, value in document.items() if name not in (*_CALL_OPTIONS, *_LOCATIONS)}
            return json.dumps(rest, sort_keys=True).encode()
    return data


def write_token_cache(batches: Iterable[Columns], asked: TokenRequest, root: Path) -> None:
    """Write a token cache below the root, atomically. If another process has written it meanwhile, that cache stays.

    UsageError if no row is valid, SchemaError if batches differ in their columns, types or shapes.
    """
    counter = _Complete(batches)
    rows = iter(counter)
    first = next(rows, None)
    if first is None:
        raise UsageError(
            f"all {counter.seen:,} texts of {asked.dataset} are longer than {asked.max_length:,} tokens, or empty"
            if counter.seen
            else f"{asked.dataset} has no texts in {asked.split}",
            hint="use a larger max_length" if counter.seen else "",
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
    """Iterates over the valid rows of batches, and counts rows seen and kept."""

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
        notes.append(f"{which} left out: empty, or longer than {asked.max_length:,} tokens")
    step = provenance_step(
        "tokenize", {"split": asked.split, "max_length": asked.max_length, "tokenizer": asked.tokenizer},
        {asked.dataset: asked.data},
    )  # fmt: skip
    return Origin(asked.request, (step,), notes=tuple(notes))


T = TypeVar("T")


def create_infinite_iterator(iterator: Iterable[T]) -> Iterator[T]:
    """Repeat an iterable forever; a replay buffer draws a new order each time.

    UsageError (a ValueError) if the iterable is empty or can be iterated over only once, because the loop would then
    never yield.
    """
    while True:
        element, empty = None, True
        for element in iterator:
            empty = False
            yield element
        if empty:
            raise UsageError(f"the {type(iterator).__name__} has no elements, or can be iterated over only once")


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: Any,
    device: torch.device | str,
    dataset_name: PathLike | None = None,
    infinite: bool = True,
    prefetch: int = 0,
    split: str = "train",
    root_dir: PathLike | None = None,
    from_disk: bool = False,
    num_workers: int | None = None,
    **options: Any,
) -> Any:
    """Return batches of a tokenized dataset in random order, on `device`.

    For the other arguments and `options`, such as `tokenizer`, see `TokenizedDatasetLoader`. UsageError (a ValueError)
    if `batch_size` is larger than the dataset.

    Args:
        batch_size: rows per batch. Each row is drawn once per epoch; the rows left for an incomplete batch are skipped.
        block_size: tokens per row.
        tensorclass_type: the class of the batches: `PromptData`, `PairwiseDataset`, or another with `from_dataset`.
        infinite: return an endless iterator over epochs; if False, a replay buffer whose iterators run one epoch each.
        prefetch: how many batches to prepare in advance.
    """
    if not hasattr(tensorclass_type, "from_dataset"):
        raise UsageError(f"tensorclass_type is {tensorclass_type!r}, expected a class with from_dataset")
    refuse_misspelt(get_dataloader, options, keywords_of(tensorclass_type.from_dataset))
    data = tensorclass_type.from_dataset(
        split=split, dataset_name=dataset_name, max_length=block_size, root_dir=root_dir, from_disk=from_disk,
        num_workers=num_workers, **options,
    )  # fmt: skip
    if batch_size > len(data):
        raise UsageError(f"batch_size is {batch_size:,}, and the dataset has {len(data):,} rows")

    buffer = ReplayBuffer(
        storage=TensorStorage(data),
        sampler=SamplerWithoutReplacement(drop_last=True),
        writer=ImmutableDatasetWriter(),
        collate_fn=lambda batch: batch.to(device),
        batch_size=batch_size,
        prefetch=prefetch or None,
    )
    return create_infinite_iterator(buffer) if infinite else buffer
