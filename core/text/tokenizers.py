"""Tokenizers of text in dictionaries and tensordicts. A batch is tokenized in one call, and padded in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from ..errors import MissingKeyError, RbtoolError, UsageError, not_installed, require_flags, require_number
from ..format.contracts import Array

Columns: TypeAlias = dict[str, Array]
_PADDING = ("max_length", "longest", "do_not_pad")
VALID = "valid_sample"
"""The column that marks valid samples: those that have tokens and, for prompts with labels, were not cut."""
IGNORED_LABEL = -100
"""The label that the losses of transformers ignore."""


class TensorDictTokenizer:
    """Turns the text under a key of a dictionary or tensordict into tokens.

    A call with one text returns `input_ids` and `attention_mask`, int64 `[max_length]`, batch size `[]`; a call with a
    list of n texts returns `[n, max_length]`, batch size `[n]`. The tokens equal `tokenizer(texts, padding=…,
    truncation=…)`. The class has the arguments of TorchRL's.

    Args:
        tokenizer: a tokenizer of transformers, or a callable that takes the same texts and options.
        max_length: tokens per row. Longer texts are cut there, unless `truncation` is off.
        key: the key of the text in a sample.
        padding: `"max_length"` pads to that length, `"longest"` or True to the longest text of the batch. Without
            padding (False), all texts must have the same number of tokens. The tokenizer's `padding_side` is used.
        truncation: whether texts longer than `max_length` are cut (True) or refused (False).
        return_tensordict: return a tensordict on `device`; if False, a dictionary of lists.

    Raises:
        UsageError (a ValueError): rows are padded and the tokenizer has no pad token; a text is empty, or too long
            without truncation; an argument is invalid.
        MissingKeyError (a KeyError): the sample has no `key`.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        key: str = "text",
        padding: bool | str = "max_length",
        truncation: bool | str = True,
        return_tensordict: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        require_flags(return_tensordict=return_tensordict)
        if not isinstance(padding, bool) and padding not in _PADDING:
            raise UsageError(f"padding is {padding!r}; known: True, False, {', '.join(_PADDING)}")
        if not callable(tokenizer):
            raise UsageError(f"expected a tokenizer, found a {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        self.max_length = require_number("max_length", max_length, 1, "tokens")
        self.key = key
        self.padding = ("longest" if padding else "do_not_pad") if isinstance(padding, bool) else padding
        self.truncation = truncation
        self.return_tensordict = return_tensordict
        self.device = None if device is None else torch.device(device)
        if self.padding != "do_not_pad" and self.pad_token_id is None:
            raise UsageError(
                f"the {type(tokenizer).__name__} has no pad token, and padding is {self.padding!r}",
                hint="set one, for example tokenizer.pad_token = tokenizer.eos_token",
            )

    @property
    def pad_token_id(self) -> int | None:
        """The id of the pad token; None if the tokenizer has no pad token."""
        found: int | None = getattr(self.tokenizer, "pad_token_id", None)
        return found

    @property
    def cuts(self) -> bool:
        """Whether texts that are too long are cut."""
        return self.truncation not in (False, "do_not_truncate")

    def __call__(self, sample: Any) -> TensorDict | dict[str, Any]:
        """Tokenize the text of one sample, or the texts of a batch of samples."""
        given = self._given(sample, self.key)
        single = isinstance(given, str)
        columns = self.columns(sample)
        self._require_valid(columns)
        if self.return_tensordict:
            tensors = {name: torch.from_numpy(rows)[0 if single else slice(None)] for name, rows in columns.items()}
            found = TensorDict(tensors, batch_size=[] if single else [len(given)])
            return found if self.device is None else found.to(self.device)
        return {name: (rows[0] if single else rows).tolist() for name, rows in columns.items()}

    def _require_valid(self, columns: Columns) -> None:
        """Remove the column `valid_sample`; UsageError for a text without tokens."""
        valid = columns.pop(VALID)
        if not valid.all():
            raise _empty(self.key, int(np.flatnonzero(~valid)[0]))

    def columns(self, sample: Any) -> Columns:
        """Tokenize a batch of samples into arrays, one row each; `valid_sample` is False for a text without tokens."""
        rows = self.ragged(self.texts(sample, self.key))
        return {**self.padded(rows), VALID: rows.lengths > 0}

    def texts(self, sample: Any, key: str) -> list[str]:
        """Return the texts under a key as a list; a single text becomes a list of one."""
        given = self._given(sample, key)
        if not isinstance(given, str | list | tuple) and not hasattr(given, "__iter__"):
            raise UsageError(f"{key} is {given!r:.40}, expected text")
        texts = [given] if isinstance(given, str) else list(given)
        wrong = next((at for at, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise UsageError(f"{key} has {texts[wrong]!r:.40} at {wrong}, expected text")
        return texts

    @staticmethod
    def _given(sample: Any, key: str) -> Any:
        try:
            found = sample[key]
        except (KeyError, TypeError) as error:
            known = ", ".join(map(str, sample.keys())) if hasattr(sample, "keys") else f"a {type(sample).__name__}"
            raise MissingKeyError(f"no {key!r} in the sample; it has {known or 'nothing'}") from error
        return found.tolist() if hasattr(found, "tolist") else found

    def ragged(self, texts: Sequence[str]) -> RaggedTokens:
        """Tokenize texts in one call, without padding; UsageError if truncation is off and a text is too long."""
        options: dict[str, Any] = {"max_length": self.max_length} if self.cuts else {}
        ids: list[list[int]] = (
            self.tokenizer(
                list(texts), padding=False, truncation=self.truncation, return_attention_mask=False,
                return_token_type_ids=False, **options,
            )["input_ids"]
            if texts
            else []
        )  # fmt: skip
        found = RaggedTokens(ids, np.fromiter(map(len, ids), np.int64, len(ids)))
        if len(ids) and found.lengths.max() > self.max_length:
            at = int(found.lengths.argmax())
            raise UsageError(
                f"text {at} has {found.lengths[at]:,} tokens, expected at most {self.max_length:,}",
                hint="truncation=True cuts it, max_length=N makes room",
            )
        return found

    def padded(self, rows: RaggedTokens) -> Columns:
        """Pad rows to `input_ids` and `attention_mask`, int64 `[n, width]`."""
        width = self._width(rows.lengths)
        real = self.real(rows.lengths, width)
        ids = np.full((len(rows.ids), width), self.pad_token_id or 0, np.int64)
        ids[real] = np.fromiter(itertools.chain.from_iterable(rows.ids), np.int64, int(rows.lengths.sum()))
        return {"input_ids": ids, "attention_mask": real.astype(np.int64)}

    def real(self, lengths: Array, width: int) -> Array:
        """Return the mask of tokens that are not padding, bool `[n, width]`."""
        places = np.arange(width)
        return np.asarray(places >= width - lengths[:, None] if self.pads_left else places < lengths[:, None])

    @property
    def pads_left(self) -> bool:
        """Whether padding comes before the text."""
        return bool(getattr(self.tokenizer, "padding_side", "right") == "left")

    def _width(self, lengths: Array) -> int:
        if self.padding == "max_length":
            return self.max_length
        longest = int(lengths.max(initial=0))
        if self.padding == "do_not_pad" and (lengths != longest).any():
            raise UsageError(
                f"the texts have {lengths.min():,} to {longest:,} tokens, expected the same number without padding",
                hint="padding='longest' pads them",
            )
        return longest


@dataclass(frozen=True, slots=True)
class RaggedTokens:
    """The tokens of n texts before padding: a list for each, and their lengths, int64 `[n]`."""

    ids: list[list[int]]
    lengths: Array


class PromptTensorDictTokenizer(TensorDictTokenizer):
    """Tokenizes prompts together with their labels. The label is the text that follows a prompt.

    The prompt is under `key`, the label under `"label"`. Arguments and errors are as for `TensorDictTokenizer`; an
    empty prompt is also a UsageError. Besides `input_ids` and `attention_mask` of the joined text, a call returns

    - `prompt_rindex`, int64 `[n]`: the index of the prompt's last token. A token that spans the end of the prompt and
      the start of the label belongs to the label.
    - `valid_sample`, bool `[n]`: whether the prompt has a token and the text was not cut. A text counts as not cut if
      it is shorter than `max_length` or ends with the EOS token.
    """

    label_key = "label"

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        key: str = "prompt",
        padding: bool | str = "max_length",
        truncation: bool | str = True,
        return_tensordict: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, key, padding, truncation, return_tensordict, device)

    def _require_valid(self, columns: Columns) -> None:
        if (columns["prompt_rindex"] < 0).any():
            raise _empty(self.key, int((columns["prompt_rindex"] < 0).argmax()))

    def columns(self, sample: Any) -> Columns:
        """Tokenize prompts and labels into arrays of one row each."""
        prompts, labels = self.texts(sample, self.key), self.texts(sample, self.label_key)
        if len(prompts) != len(labels):
            raise UsageError(
                f"found {len(prompts):,} prompts and {len(labels):,} labels, expected a label for each prompt"
            )
        joined = self.ragged([prompt + label for prompt, label in zip(prompts, labels, strict=True)])
        alone = self.ragged(prompts)
        shared = np.fromiter(map(_common, alone.ids, joined.ids), np.int64, len(prompts))
        found = self.padded(joined)
        before = found["input_ids"].shape[1] - joined.lengths if self.pads_left else 0
        found["prompt_rindex"] = np.where(shared > 0, before + shared - 1, -1)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        ends = np.fromiter((bool(ids) and ids[-1] == eos for ids in joined.ids), bool, len(prompts))
        found[VALID] = (shared > 0) & ((joined.lengths < self.max_length) | ends)
        return found


class LabelledPromptTokenizer(PromptTensorDictTokenizer):
    """A `PromptTensorDictTokenizer` that adds `labels`, int64 `[n, max_length]`: the tokens that a model is trained on.

    Labels are the tokens of the text and -100 at padding, which the losses of transformers ignore. If the tokenizer
    pads with its EOS token, the first pad token is kept as a label, so that the model learns to end a text.
    """

    def columns(self, sample: Any) -> Columns:
        found = super().columns(sample)
        ids, real = found["input_ids"], found["attention_mask"].astype(bool)
        if not self.pads_left and self.pad_token_id == getattr(self.tokenizer, "eos_token_id", None):
            real[:, 1:] |= real[:, :-1]
        found["labels"] = np.where(real, ids, IGNORED_LABEL)
        return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    if other[: len(one)] == one:
        return len(one)
    return next(at for at, (left, right) in enumerate(zip([*one, -1], [*other, -2], strict=False)) if left != right)


def _empty(key: str, at: int) -> UsageError:
    return UsageError(f"{key} is empty at {at}: it has no tokens", hint="leave out samples without text")


def require_transformers(user: str) -> Any:
    """Import transformers, which the extra `text` installs; RbtoolError, which names `user`, if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise not_installed(f"{user} needs transformers", "text", error, RbtoolError) from error
    return transformers
