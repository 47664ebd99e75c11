"""The tensorclasses of text, and batches of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from text_files import PAD, saved_tldr, tiny_tokenizer

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.text.batches import create_infinite_iterator, get_dataloader
from rbtool.core.text.prompts import PromptData
from rbtool.core.text.rewards import PairwiseDataset, RewardData

LENGTH = 1100
GIVEN = Path(__file__).parents[2] / "data/hf_rlhf/tldr_batch/_tensordict"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tldr(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


def test_a_batch_of_torchrl_is_prompts_of_ours() -> None:
    batch = PromptData.from_tensordict(TensorDict.load_memmap(GIVEN))
    assert batch.input_ids.shape == (16, 33)
    masked = batch.mask_label()
    kept = torch.arange(33) <= batch.prompt_rindex.unsqueeze(1)
    assert torch.equal(masked.input_ids, torch.where(kept, batch.input_ids, 50256))
    assert torch.equal(masked.attention_mask, kept.long() * batch.attention_mask)
    assert (masked.labels, masked.batch_size) == (None, batch.batch_size)


def test_masking_a_label_keeps_the_whole_prompt_and_no_more() -> None:
    ids = torch.tensor([[PAD, 7, 8, 9], [5, 6, 7, PAD]])
    batch = PromptData(
        input_ids=ids, attention_mask=(ids != PAD).long(), prompt_rindex=torch.tensor([2, 0]), batch_size=[2]
    )
    masked = batch.mask_label(pad_token_id=PAD)
    assert masked.input_ids.tolist() == [[PAD, 7, 8, PAD], [5, PAD, PAD, PAD]]
    assert masked.attention_mask.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.input_ids.tolist() == ids.tolist()


def test_tensorclasses_index_stack_and_move_as_one() -> None:
    one = RewardData(input_ids=torch.zeros(3, 4), attention_mask=torch.ones(3, 4), batch_size=[3])
    pairs = PairwiseDataset(chosen_data=one, rejected_data=one.clone(), batch_size=[3])
    joined = torch.cat([pairs, pairs[:1]])
    assert isinstance(joined[1:].rejected_data, RewardData)
    assert joined.rejected_data.input_ids.shape == (4, 4)
    assert joined.to("cpu").chosen_data.end_scores is None


def test_every_row_comes_once_an_epoch(saved: Path, root: Path) -> None:
    data = PromptData.from_dataset("train", saved, LENGTH, root, from_disk=True, tokenizer=tiny_tokenizer())
    rows = {tuple(row) for row in data.input_ids.tolist()}
    assert len(rows) == len(data)
    loader = get_dataloader(
        10, LENGTH, PromptData, "cpu", saved, infinite=False, root_dir=root, from_disk=True, tokenizer=tiny_tokenizer()
    )
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(data) // 10
        drawn = [tuple(row) for batch in batches for row in batch.input_ids.tolist()]
        assert len(set(drawn)) == len(drawn) == len(batches) * 10
        assert set(drawn) <= rows


def test_endless_batches_are_of_the_class_on_the_device(saved: Path, root: Path) -> None:
    batches = get_dataloader(
        8, LENGTH, PromptData, torch.device("cpu"), saved, prefetch=2, split="valid", root_dir=root, from_disk=True,
        tokenizer=tiny_tokenizer(),
    )  # fmt: skip
    drawn = list(itertools.islice(batches, 15))
    assert {(type(batch), batch.batch_size, batch.device) for batch in drawn} == {
        (PromptData, torch.Size([8]), torch.device("cpu"))
    }
    drawn[0].input_ids.zero_()
    stored = PromptData.from_dataset("valid", saved, LENGTH, root, from_disk=True, tokenizer=tiny_tokenizer())
    assert stored.input_ids.sum(1).min() > 0


def test_a_batch_larger_than_the_dataset_is_refused(saved: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="batch_size is 1,000, and the dataset has"):
        get_dataloader(
            1000, LENGTH, PromptData, "cpu", saved, root_dir=root, from_disk=True, tokenizer=tiny_tokenizer()
        )


def test_a_class_without_a_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="RewardData'>, expected a class with from_dataset"):
        get_dataloader(2, LENGTH, RewardData, "cpu")


def test_an_infinite_iterator_begins_again() -> None:
    assert list(itertools.islice(create_infinite_iterator([1, 2, 3]), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]
    for exhausted in ([], iter(())):
        with pytest.raises(UsageError, match="has no elements"):
            next(create_infinite_iterator(exhausted))
    once = create_infinite_iterator(iter([1]))
    assert next(once) == 1
    with pytest.raises(UsageError, match="only once"):
        next(once)


def test_the_names_are_at_the_top() -> None:
    names = (
        "AdaptiveKLController", "ConstantKLController", "PairwiseDataset", "PromptData", "PromptTensorDictTokenizer",
        "RewardData", "RolloutFromModel", "TensorDictTokenizer", "TokenizedDatasetLoader", "create_infinite_iterator",
        "get_dataloader",
    )  # fmt: skip
    assert all(getattr(rbtool, name).__name__ == name for name in names)
