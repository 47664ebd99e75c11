"""Pairs of texts with the preference of people, as tensorclasses for training reward models."""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from tensordict import TensorClass

from ..errors import MissingKeyError, keywords_of, suggests_keywords
from .loader import TokenizedDatasetLoader
from .tokenizers import VALID, Columns, TensorDictTokenizer

DEFAULT_DATASET = "CarperAI/openai_summarize_comparisons"
_FEWEST_WORDS = 5
_WHICH = ("chosen", "rejected")
_NAMES = ("input_ids", "attention_mask")


class RewardData(TensorClass):
    """Tokens of texts, batch size `[n]`, and the outputs of a reward model for them.

    - `input_ids`, `attention_mask`: int64 `[n, L]`; the mask is 0 at padding.
    - `rewards`: a reward for each token, `[n, L, 1]` or `[n, L]`; None at first.
    - `end_scores`: a score for each whole text; None at first.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rewards: torch.Tensor | None = None
    end_scores: torch.Tensor | None = None


class PairwiseDataset(TensorClass):
    """Pairs of texts, batch size `[n]`: people preferred the one in `chosen_data` to the one in `rejected_data`.

    Both are `RewardData`. It has the fields of TorchRL's class.
    """

    chosen_data: RewardData
    rejected_data: RewardData

    @classmethod
    @suggests_keywords(*keywords_of(TokenizedDatasetLoader))
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | os.PathLike[str] | None = None,
        max_length: int = 550,
        root_dir: str | os.PathLike[str] | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        **options: Any,
    ) -> Self:
        """Tokenize a split with the columns `prompt`, `chosen` and `rejected`, or open its token cache.

        Each text is the prompt, a line feed, and the chosen or rejected text. Pairs of equal texts, and pairs in which
        one text has fewer than 5 words, are left out. The tensors are mapped copy-on-write from the cache. For the
        arguments and `options`, such as `tokenizer`, see `TokenizedDatasetLoader`.
        """
        loader = TokenizedDatasetLoader(
            split, max_length, dataset_name or DEFAULT_DATASET, _PairTokenizer, comparable_pairs, root_dir=root_dir,
            from_disk=from_disk, num_workers=num_workers, **options,
        )  # fmt: skip
        found = loader.load()
        size = found.batch_size
        chosen, rejected = (
            RewardData(**{name: found[f"{which}_{name}"] for name in _NAMES}, batch_size=size) for which in _WHICH
        )
        made: Self = cls(chosen_data=chosen, rejected_data=rejected, batch_size=size)
        return made


def comparable_pairs(dataset: Any) -> Any:
    """Keep the rows whose two texts differ and have at least 5 words, and put the prompt before each text.

    MissingKeyError (a KeyError) if the dataset lacks one of the columns `prompt`, `chosen` and `rejected`.
    """
    import datasets

    missing = [name for name in ("prompt", *_WHICH) if name not in dataset.column_names]
    if missing:
        raise MissingKeyError(f"the dataset has no column {missing[0]!r}; it has {', '.join(dataset.column_names)}")
    columns = dataset[:]
    rows = zip(columns["prompt"], *(columns[which] for which in _WHICH), strict=True)
    kept = [row for row in rows if row[1] != row[2] and min(len(text.split()) for text in row[1:]) >= _FEWEST_WORDS]
    texts = {which: [f"{row[0]}\n{row[at]}" for row in kept] for at, which in enumerate(_WHICH, 1)}
    return datasets.Dataset.from_dict(texts)


class _PairTokenizer(TensorDictTokenizer):
    """Tokenizes pairs of texts, `chosen_input_ids` and so on; a sample is valid if both texts have tokens."""

    def columns(self, sample: Any) -> Columns:
        found: Columns = {}
        for which in _WHICH:
            rows = self.ragged(self.texts(sample, which))
            found |= {f"{which}_{name}": column for name, column in self.padded(rows).items()}
            found[VALID] = found.get(VALID, True) & (rows.lengths > 0)
        return found
