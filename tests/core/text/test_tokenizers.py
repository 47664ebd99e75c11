"""Tokenizers of samples against plain calls of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from text_files import EOS, PAD, tiny_tokenizer

from rbtool.core.errors import MissingKeyError, UsageError
from rbtool.core.text.tokenizers import LabelledPromptTokenizer, PromptTensorDictTokenizer, TensorDictTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXTS = ["hello world", "the cat sat on the mat, and the mat sat on the cat", "é → ü", "x"]
SIDES = [{}, {"padding_side": "left"}, {"truncation_side": "left"}]


def plain(tokenizer: PreTrainedTokenizerFast, texts: str | list[str], **options: Any) -> dict[str, torch.Tensor]:
    return dict(tokenizer(texts, return_tensors="pt", **options))


@each("padding", ["max_length", "longest", True])
@each("sides", SIDES)
@each("length", [1, 5, 12, 64])
def test_tokens_are_those_of_a_plain_call(padding: Any, sides: dict[str, str], length: int) -> None:
    tokenizer = tiny_tokenizer(**sides)
    found = TensorDictTokenizer(tokenizer, length, padding=padding)({"text": TEXTS})
    expected = plain(tokenizer, TEXTS, padding=padding, truncation=True, max_length=length)
    assert found.batch_size == (4,)
    assert set(found.keys()) == {"input_ids", "attention_mask"}
    for name, value in found.items():
        assert value.dtype == torch.int64
        assert torch.equal(value, expected[name])


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=8), st.integers(1, 20))
def test_any_text_gives_the_tokens_of_a_plain_call(texts: list[str], length: int) -> None:
    tokenizer = tiny_tokenizer()
    found = TensorDictTokenizer(tokenizer, length)({"text": texts})
    expected = plain(tokenizer, texts, padding="max_length", truncation=True, max_length=length)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"])


def test_special_tokens_are_kept() -> None:
    tokenizer = tiny_tokenizer(bos_token="<eos>")
    tokenizer.add_bos_token = True
    found = TensorDictTokenizer(tokenizer, 8)({"text": TEXTS})
    assert torch.equal(
        found["input_ids"], plain(tokenizer, TEXTS, padding="max_length", truncation=True, max_length=8)["input_ids"]
    )


def test_one_text_has_no_batch_dimension() -> None:
    tokenizer = tiny_tokenizer()
    found = TensorDictTokenizer(tokenizer, 9, key="words")({"words": TEXTS[0]})
    assert (found.batch_size, found["input_ids"].shape) == ((), (9,))
    lists = TensorDictTokenizer(tokenizer, 9, return_tensordict=False)({"text": TEXTS[0]})
    assert lists == tokenizer(TEXTS[0], padding="max_length", max_length=9, truncation=True).data


def test_samples_may_be_tensordicts() -> None:
    sample = TensorDict({"text": NonTensorStack(*TEXTS)}, batch_size=[4])
    tokenize = TensorDictTokenizer(tiny_tokenizer(), 9, device="cpu")
    found = tokenize(sample)
    assert found.device == torch.device("cpu")
    assert torch.equal(found["input_ids"], tokenize({"text": TEXTS})["input_ids"])


def test_no_texts_give_no_rows() -> None:
    assert TensorDictTokenizer(tiny_tokenizer(), 9)({"text": []})["input_ids"].shape == (0, 9)


def test_a_tokenizer_without_a_pad_token_pads_nothing() -> None:
    tokenizer = tiny_tokenizer(pad_token="")
    with pytest.raises(UsageError, match="has no pad token, and padding is") as caught:
        TensorDictTokenizer(tokenizer, 9)
    assert "tokenizer.pad_token = tokenizer.eos_token" in caught.value.hint
    found = TensorDictTokenizer(tokenizer, 9, padding=False)({"text": ["hello", "hello"]})
    assert found["attention_mask"].all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length": True}, "max_length is True"),
        ({"max_length": 4, "padding": "always"}, "padding is 'always'"),
        ({"max_length": 4, "tokenizer": "gpt2"}, "found a str"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TensorDictTokenizer(**{"tokenizer": tiny_tokenizer(), **arguments})


@pytest.mark.parametrize(
    ("options", "sample", "message"),
    [
        ({}, {"text": ["a", ""]}, "text is empty at 1"),
        ({}, {"text": ["a", 3]}, "text has 3 at 1, expected text"),
        ({}, {"text": None}, "text is None, expected text"),
        ({"truncation": False}, {"text": ["a", "the cat sat on the mat"]}, "text 1 has .* tokens, expected at most 4"),
        ({"padding": False}, {"text": ["a", "the cat"]}, "the texts have 1 to 2 tokens"),
    ],
)
def test_text_that_fits_no_row_is_refused(options: dict[str, Any], sample: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TensorDictTokenizer(tiny_tokenizer(), 4, **options)(sample)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(MissingKeyError, match="no 'text' in the sample; it has words"):
        TensorDictTokenizer(tiny_tokenizer(), 4)({"words": "a"})


def test_prompts_are_joined_with_their_labels() -> None:
    tokenizer = tiny_tokenizer()
    sample = {"prompt": ["hello", "the cat"], "label": [" world", " sat on the mat"]}
    found = PromptTensorDictTokenizer(tokenizer, 12)(sample)
    joined = [one + other for one, other in zip(sample["prompt"], sample["label"], strict=True)]
    expected = plain(tokenizer, joined, padding="max_length", truncation=True, max_length=12)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    assert found["prompt_rindex"].tolist() == [len(tokenizer(text)["input_ids"]) - 1 for text in sample["prompt"]]
    assert found["valid_sample"].tolist() == [True, True]
    single = PromptTensorDictTokenizer(tokenizer, 12)({key: texts[0] for key, texts in sample.items()})
    assert (single.batch_size, int(single["prompt_rindex"])) == ((), int(found["prompt_rindex"][0]))


@given(st.text("ab cé", min_size=1, max_size=12), st.text("ab cé", max_size=12), st.booleans())
def test_the_prompt_ends_before_the_first_token_of_the_label(prompt: str, label: str, left: bool) -> None:
    tokenizer = tiny_tokenizer(padding_side="left" if left else "right")
    found = PromptTensorDictTokenizer(tokenizer, 64).columns({"prompt": prompt, "label": label})
    alone, joined = tokenizer(prompt)["input_ids"], tokenizer(prompt + label)["input_ids"]
    same = [one == other for one, other in zip(alone, joined, strict=False)]
    count = same.index(False) if False in same else len(same)
    start = (64 - len(joined)) * left
    assert found["prompt_rindex"].tolist() == [start + count - 1 if count else -1]
    assert found["input_ids"][0, start : start + count].tolist() == alone[:count]


def test_a_token_across_the_boundary_is_of_the_label() -> None:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer("hello wor")["input_ids"]) > len(tokenizer("hello")["input_ids"])
    found = PromptTensorDictTokenizer(tokenizer, 12)({"prompt": "hello wor", "label": "ld"})
    kept = found["input_ids"][: int(found["prompt_rindex"]) + 1]
    assert tokenizer.decode(kept) == "hello"


@pytest.mark.parametrize(
    ("pad", "length", "label", "valid"),
    [
        ("<pad>", 4, " world", True), ("<eos>", 4, " world", True), ("<pad>", 2, " world", False),
        ("<pad>", 2, "<eos>", True), ("<pad>", 1, " world", False),
    ],
)  # fmt: skip
def test_a_sample_is_valid_if_its_text_ends(pad: str, length: int, label: str, valid: bool) -> None:
    tokenizer = tiny_tokenizer(pad_token=pad)
    found = PromptTensorDictTokenizer(tokenizer, length)({"prompt": "hello", "label": label})
    assert bool(found["valid_sample"]) is valid


def test_empty_prompts_and_uneven_columns_are_refused() -> None:
    tokenize = PromptTensorDictTokenizer(tiny_tokenizer(), 4)
    with pytest.raises(UsageError, match="prompt is empty at 1"):
        tokenize({"prompt": ["a", ""], "label": ["b", "c"]})
    with pytest.raises(UsageError, match="2 prompts and 1 labels"):
        tokenize({"prompt": ["a", "b"], "label": ["b"]})


@pytest.mark.parametrize(("pad", "end"), [("<pad>", -100), ("<eos>", EOS)])
def test_labels_leave_out_padding_but_for_the_end(pad: str, end: int) -> None:
    found = LabelledPromptTokenizer(tiny_tokenizer(pad_token=pad), 6)({"prompt": "hello", "label": " world"})
    assert found["labels"].tolist() == [*found["input_ids"][:2].tolist(), end, -100, -100, -100]
    assert found["input_ids"][2:].tolist() == [PAD if pad == "<pad>" else EOS] * 4
