"""Prompts with the text that follows them, as a tensorclass."""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from tensordict import TensorClass

from ..errors import keywords_of, suggests_keywords
from .loader import TokenizedDatasetLoader
from .tokenizers import LabelledPromptTokenizer

DEFAULT_DATASET = "CarperAI/openai_summarize_tldr"
_GPT2_EOS = 50256


class PromptData(TensorClass):
    """Tokens of prompts and the text that follows them, with batch size `[n]`; has the fields of TorchRL's class.

    - `input_ids`, `attention_mask`: int64 `[n, L]`; the mask is 0 at padding.
    - `prompt_rindex`: index of the prompt's last token, int64 `[n]`.
    - `labels`: what a model learns to predict, int64 `[n, L]`; -100 at padding.
    - `logits`, `loss`: for the outputs of a model; None at first.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt_rindex: torch.Tensor
    labels: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def mask_label(self, pad_token_id: int = _GPT2_EOS) -> Self:
        """Return the prompts alone: everything after the token at `prompt_rindex` becomes padding."""
        places = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        kept = (places <= self.prompt_rindex.unsqueeze(-1)) & self.attention_mask.bool()
        made: Self = type(self)(
            input_ids=torch.where(kept, self.input_ids, pad_token_id),
            attention_mask=kept.to(self.attention_mask.dtype),
            prompt_rindex=self.prompt_rindex,
            batch_size=self.batch_size,
        )
        return made

    @classmethod
    @suggests_keywords(*keywords_of(TokenizedDatasetLoader))
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | None = None,
        max_length: int = 550,
        root_dir: str | os.PathLike[str] | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        **options: Any,
    ) -> Self:
        """Tokenize a split with the columns `prompt` and `label`, or open its token cache.

        Texts longer than `max_length` tokens are left out. The tensors are mapped copy-on-write from the cache. For the
        arguments and `options`, such as `tokenizer`, see `TokenizedDatasetLoader`.
        """
        loader = TokenizedDatasetLoader(
            split, max_length, dataset_name or DEFAULT_DATASET, LabelledPromptTokenizer, root_dir=root_dir,
            from_disk=from_disk, num_workers=num_workers, **options,
        )  # fmt: skip
        found = loader.load()
        made: Self = cls.from_tensordict(found)
        return made
