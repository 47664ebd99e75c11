"""Tokenized datasets: each is tokenized once, and its token cache is opened from then on."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from ..errors import MissingKeyError, SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array
from ..format.locate import storage_root
from ..format.memmap.tree import TreeWriter
from ..format.staging import Staging
from ..storages.dataset import dataset_tensors
from ..ted.schema import Field, Key, dtype_name
from ..transforms.keyed import require_count
from .identity import TokenRequest, function_digest, tokenizer_digest
from .sources import TextRows, rows_on_disk, stored_rows
from .token_cache import write_token_cache
from .tokenizers import VALID, Columns, TensorDictTokenizer
from .transformers_extra import require_transformers

_BATCH = 1000
_DEFAULT_TOKENIZER = "gpt2"


class TokenizedDatasetLoader:
    """Tokenizes a split of a dataset of text, and keeps the result as a dataset of its own, the token cache.

    - `split`: the name of the split; of one whose name begins with "valid", the first `valid_size` rows are taken.
    - `max_length`: tokens a row.
    - `dataset_name`: `OWNER/NAME` on the hub, which is downloaded once by `rbtool download hf-text`; with `from_disk`
      the folder that `save_to_disk` of the datasets library wrote.
    - `tokenizer_fn`: the class that tokenizes, such as `TensorDictTokenizer`; it is called with the tokenizer and
      `max_length`.
    - `pre_tokenization_hook`: a function that takes the split as a `datasets.Dataset` and returns one.
    - `root_dir`: the storage root, by default that of rbtool.
    - `tokenizer_class`, `tokenizer_model_name`: the class of transformers and the name that its `from_pretrained`
      takes, by default `AutoTokenizer` and `gpt2`. `tokenizer` is one that already exists.
    - `num_workers`: kept for callers of TorchRL, and without effect: fast tokenizers use all cores by themselves.

    A tokenizer without a pad token pads with its EOS token. Token caches are at `tokens/DATASET/SPLIT-LENGTH@DIGEST`
    below the root, where the digest is that of the data, the tokenizer and all arguments: a change of any of these
    makes another one. `rbtool inspect`, `check`, `sample` and `cache` work on them.

    UsageError (a ValueError) for arguments that make no sense and where no row is left, DatasetNotFoundError (a
    FileNotFoundError) for a dataset or a split that is not there, RbtoolError where transformers is needed and not
    installed, and what the download raises.
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        dataset_name: str | os.PathLike[str],
        tokenizer_fn: Callable[[Any, int], TensorDictTokenizer],
        pre_tokenization_hook: Callable[[Any], Any] | None = None,
        root_dir: str | os.PathLike[str] | None = None,
        from_disk: bool = False,
        valid_size: int = 2000,
        num_workers: int | None = None,
        tokenizer_class: Any = None,
        tokenizer_model_name: str | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        if tokenizer is not None and (tokenizer_class is not None or tokenizer_model_name is not None):
            raise UsageError("tokenizer is set, and a name or class to make one, expected one of them")
        self.split = split
        self.max_length = max_length
        self.dataset_name = dataset_name
        self.tokenizer_fn = tokenizer_fn
        self.pre_tokenization_hook = pre_tokenization_hook
        self.root = storage_root(root_dir)
        self.from_disk = from_disk
        self.valid_size = require_count("valid_size", valid_size, "rows")
        self.num_workers = num_workers
        if tokenizer is None:
            tokenizer = self.make_tokenizer(tokenizer_class, tokenizer_model_name)
        self.tokenizer = _with_pad_token(tokenizer)
        self.path: Path | None = None
        """The folder of the token cache, once it was loaded."""

    @staticmethod
    def make_tokenizer(tokenizer_class: Any = None, tokenizer_model_name: str | None = None) -> Any:
        """Make a tokenizer with `from_pretrained` of a class of transformers, which may fetch it."""
        transformers = require_transformers("the tokenizer of a dataset")
        return (tokenizer_class or transformers.AutoTokenizer).from_pretrained(
            tokenizer_model_name or _DEFAULT_TOKENIZER
        )

    def load(self) -> TensorDict:
        """Return the tokens of all rows, batch size `[n]`: mapped from the token cache, which is made where it lacks.

        Edits stay in this process.
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
            return rows_on_disk(Path(self.dataset_name), self.split)
        return stored_rows(os.fspath(self.dataset_name), self.split, self.root)

    def _batches(self, rows: TextRows, count: int) -> Iterator[Columns]:
        """Tokenize the rows, some at a time."""
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
        data_dir: str | os.PathLike[str],
        prefix: str | Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        batch_dims: int = 1,
        valid_mask_key: str | None = None,
    ) -> TensorDict:
        """Write columns of a `datasets.Dataset` of numbers as a memory-mapped tensordict to `data_dir`, and map that.

        `features` names the columns, by default all; `prefix` is the key that they go below; `batch_dims` is how many
        of their dimensions are of the batch. Rows whose column `valid_mask_key` is false are left out, with that
        column. At `data_dir` there may be nothing, or an empty folder; it is there whole, or not at all.

        SchemaError (a RuntimeError) for columns of other than numbers, or of unequal rows; MissingKeyError (a KeyError)
        for columns that are not there; UsageError (a ValueError) for no columns, and for less than one dimension.
        """
        require_count("batch_dims", batch_dims, "dimensions")
        asked = dataset.column_names if features is None else features
        names = [name for name in asked if name != valid_mask_key]
        columns = dataset[:]
        for name in (*names, *([] if valid_mask_key is None else [valid_mask_key])):
            if name not in columns:
                raise MissingKeyError(f"the dataset has no column {name!r}; it has {', '.join(dataset.column_names)}")
        if not names:
            raise UsageError("there are no columns to write, expected at least one in features")
        arrays = {name: _array(name, columns[name]) for name in names}
        if valid_mask_key is not None:
            kept = _mask(valid_mask_key, columns[valid_mask_key], len(dataset))
            arrays = {name: array[kept] for name, array in arrays.items()}
        batch = next(iter(arrays.values())).shape[:batch_dims]
        if any(array.shape[:batch_dims] != batch or array.ndim < batch_dims for array in arrays.values()):
            raise SchemaError(
                f"the columns have not {batch_dims} dimensions in common, which is what batch_dims states"
            )
        path = (prefix,) if isinstance(prefix, str) else tuple(prefix or ())
        _write_tree({(*path, name): array for name, array in arrays.items()}, batch, Path(data_dir))
        found = TensorDict.load_memmap(Path(data_dir))
        return TensorDict({path: found.get(path)}, batch_size=[]) if path else found


def _with_pad_token(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy that pads with the EOS token where it has no pad token."""
    if getattr(tokenizer, "pad_token", "") is not None or getattr(tokenizer, "eos_token", None) is None:
        return tokenizer
    found = copy.deepcopy(tokenizer)
    found.pad_token = found.eos_token
    return found


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


def _array(name: str, values: Any) -> Array:
    try:
        found = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
    except TypeError as error:  # of torch for a type that NumPy lacks
        raise SchemaError(f"{name!r} has values of {values.dtype}, which NumPy does not have") from error
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


def _columns(tokenize: Any, sample: Mapping[str, Any]) -> Columns:
    """The arrays that a tokenizer makes of a batch; of any callable that returns tensors or lists, too."""
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
        raise SchemaError(f"tokenizer_fn returned columns of other numbers of rows: {counts}")
    made[VALID] = np.ones(count, bool) if valid is None else _mask(VALID, valid, count)
    return made
