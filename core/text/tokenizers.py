"""Tokenizers of text in dictionaries and tensordicts: one call for a whole batch, padded in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from ..errors import MissingKeyError, RbtoolError, UsageError, require_flags
from ..format.contracts import Array
from ..transforms.keyed import require_count

Columns: TypeAlias = dict[str, Array]
_PADDING = ("max_length", "longest", "do_not_pad")
VALID = "valid_sample"
"""The column that states which samples are complete."""
PASSED_OVER = -100
"""The label that losses of transformers pass over."""


class TensorDictTokenizer:
    """Turns the text under `key` of a dictionary, or of a tensordict, into tokens.

    - `tokenizer`: one of transformers, or a callable that takes texts and options as those do.
    - `max_length`: the number of tokens of a row; longer texts are cut there, unless `truncation` is off.
    - `padding`: `max_length`; `longest`, or True, for the longest text of the batch; False where all have one length.
      The side is that of the tokenizer.
    - `return_tensordict`: whether calls return a tensordict, on `device`, in place of a dictionary of lists.

    A call with one text returns `input_ids` and `attention_mask`, int64 `[max_length]`, batch size `[]`; with a list of
    n texts `[n, max_length]` and `[n]`. The tokens are those of `tokenizer(texts, padding=…, truncation=…)`.

    UsageError (a ValueError) for a tokenizer without a pad token where rows are padded, for text without tokens, for
    text that is too long where it is not cut, and for arguments that make no sense. MissingKeyError (a KeyError) where
    there is no `key`. Names and form are those of TorchRL.
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
        self.max_length = require_count("max_length", max_length, "tokens")
        self.key = key
        self.padding = ("longest" if padding else "do_not_pad") if isinstance(padding, bool) else padding
        self.truncation = truncation
        self.return_tensordict = return_tensordict
        self.device = None if device is None else torch.device(device)
        if self.padding != "do_not_pad" and self.pad_token_id is None:
            raise UsageError(
                f"the {type(tokenizer).__name__} has no pad token, with which rows are padded",
                hint="name one, for example tokenizer.pad_token = tokenizer.eos_token",
            )

    @property
    def pad_token_id(self) -> int | None:
        """The number of the pad token."""
        found: int | None = getattr(self.tokenizer, "pad_token_id", None)
        return found

    @property
    def cuts(self) -> bool:
        """Whether texts that are too long are cut."""
        return self.truncation not in (False, "do_not_truncate")

    def __call__(self, sample: Any) -> TensorDict | dict[str, Any]:
        """Tokenize the text of a sample, or of several that are in lists."""
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
        """Raise UsageError for a text without tokens; takes the column that states so."""
        valid = columns.pop(VALID)
        if not valid.all():
            raise _empty(self.key, int(np.flatnonzero(~valid)[0]))

    def columns(self, sample: Any) -> Columns:
        """Tokenize the texts of several samples into arrays of one row each; `valid_sample` is False without tokens."""
        rows = self.ragged(self.texts(sample, self.key))
        return {**self.padded(rows), VALID: rows.lengths > 0}

    def texts(self, sample: Any, key: str) -> list[str]:
        """Return the texts under a key; one that is alone is a list of one."""
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
            raise MissingKeyError(f"there is no {key!r} in the sample; it has {known or 'nothing'}") from error
        return found.tolist() if hasattr(found, "tolist") else found

    def ragged(self, texts: Sequence[str]) -> RaggedTokens:
        """Tokenize texts without padding, in one call; UsageError for one that is too long where it is not cut."""
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
        """Where rows have tokens and no padding, bool `[n, width]`."""
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
                f"the texts have {lengths.min():,} to {longest:,} tokens, and without padding rows have one length",
                hint="padding='longest' pads them",
            )
        return longest


@dataclass(frozen=True, slots=True)
class RaggedTokens:
    """Tokens of texts, a list each, and how many, int64 `[n]`."""

    ids: list[list[int]]
    lengths: Array


class PromptTensorDictTokenizer(TensorDictTokenizer):
    """Turns prompts with their labels, the text that follows, into tokens of both together.

    The prompt is under `key`, the label under `"label"`. Apart from `input_ids` and `attention_mask` of the joined text
    there are:

    - `prompt_rindex`, int64 `[n]`: the place of the last token of the prompt. Where the end of a prompt and the start
      of its label become one token, that token belongs to the label.
    - `valid_sample`, bool `[n]`: whether the text ends within `max_length`: there is room behind it, or it ends with
      the EOS token, and its prompt has a token.

    UsageError (a ValueError) for an empty prompt, and as for `TensorDictTokenizer`.
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
            raise UsageError(f"there are {len(prompts):,} prompts and {len(labels):,} labels, expected as many")
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
    """As `PromptTensorDictTokenizer`, with `labels`, int64 `[n, max_length]`: what a model learns to predict.

    They are the tokens of the text and, where padding begins with the EOS token, that one; -100, which losses of
    transformers pass over, elsewhere.
    """

    def columns(self, sample: Any) -> Columns:
        found = super().columns(sample)
        ids, real = found["input_ids"], found["attention_mask"].astype(bool)
        if not self.pads_left and self.pad_token_id == getattr(self.tokenizer, "eos_token_id", None):
            real[:, 1:] |= real[:, :-1]
        found["labels"] = np.where(real, ids, PASSED_OVER)
        return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    if other[: len(one)] == one:
        return len(one)
    return next(at for at, (left, right) in enumerate(zip([*one, -1], [*other, -2], strict=False)) if left != right)


def _empty(key: str, at: int) -> UsageError:
    return UsageError(f"{key} is empty at {at}: there is no token in it", hint="leave out samples without text")


def require_transformers(user: str) -> Any:
    """Import transformers for `user`, which messages name; RbtoolError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise RbtoolError(
            f"{user} needs transformers, which is not installed here ({error})", hint="pip install 'rbtool[text]'"
        ) from error
    return transformers
