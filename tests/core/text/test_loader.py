"""Datasets of text as token caches, the tensorclasses made from them, and batches; one of the datasets is on a hub."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from hub import Hub
from machine import Machine
from processes import Interpreter
from tensordict import TensorDict
from text_files import PAD, lay_out_text_hub, plain_rows, saved_tldr, tiny_model, tiny_tokenizer

import rbtool
from rbtool.core.errors import DatasetNotFoundError, FormatError, MissingKeyError, SchemaError, UsageError
from rbtool.core.format.manifest import Manifest
from rbtool.core.text.loader import TokenizedDatasetLoader, create_infinite_iterator, get_dataloader
from rbtool.core.text.rewards import PairwiseDataset, RewardData
from rbtool.core.text.rollouts import PromptData, get_prompt_dataloader_tldr
from rbtool.core.text.tokenizers import PromptTensorDictTokenizer, TensorDictTokenizer

LENGTH, SHORT = 1300, 1100


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tldr(tmp_path_factory.mktemp("saved"))


def loader(saved: Path, root: Path, split: str = "train", **options: Any) -> TokenizedDatasetLoader:
    named = {"max_length": LENGTH, "tokenizer_fn": PromptTensorDictTokenizer, "tokenizer": tiny_tokenizer(), **options}
    return TokenizedDatasetLoader(split, dataset_name=saved, root_dir=root, from_disk=True, **named)


def cache(saved: Path, root: Path, **options: Any) -> Path:
    """Load a split; return where its tokens are."""
    made = loader(saved, root, **options)
    made.load()
    assert made.path is not None
    return made.path


def test_rows_are_those_of_plain_calls(saved: Path, tmp_path: Path) -> None:
    found = loader(saved, tmp_path).load()
    tokenizer, rows = tiny_tokenizer(), plain_rows(saved, "train")
    texts = [row["prompt"] + row["label"] for row in rows]
    kept = [at for at, text in enumerate(texts) if len(tokenizer(text)["input_ids"]) < LENGTH]
    expected = tokenizer([texts[at] for at in kept], padding="max_length", max_length=LENGTH, return_tensors="pt")
    assert 10 < len(kept) < 50
    assert set(found.keys()) == {"input_ids", "attention_mask", "prompt_rindex"}
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    ends = [len(tokenizer(rows[at]["prompt"])["input_ids"]) - 1 for at in kept]
    assert found["prompt_rindex"].tolist() == ends


def test_a_token_cache_is_a_dataset(saved: Path, tmp_path: Path) -> None:
    path, found = cache(saved, tmp_path), loader(saved, tmp_path).load()
    count = len(found)
    assert path.parent == tmp_path / "tokens/openai_summarize_tldr"
    assert path.name.startswith("train-1300@")
    manifest = Manifest.load(path)
    assert (manifest.steps, manifest.episodes, manifest.boundary.terminated) == (count, count, count)
    assert f"{50 - count} texts are left out" in manifest.notes[1]
    assert manifest.provenance[0].verb == "tokenize"
    assert rbtool.check(path).errors == 0
    assert rbtool.sample(path, 4).steps
    assert torch.equal(TensorDict.load_memmap(path)["input_ids"], found["input_ids"])


def test_a_second_load_tokenizes_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader(saved, tmp_path).load().clone()
    monkeypatch.setattr(TensorDictTokenizer, "ragged", None)
    assert torch.equal(loader(saved, tmp_path).load()["input_ids"], first["input_ids"])


def last_tokens(count: int) -> type[PromptTensorDictTokenizer]:
    """A tokenizer that keeps the last tokens of each row."""

    class Last(PromptTensorDictTokenizer):
        def columns(self, sample: Any) -> Any:
            found = super().columns(sample)
            return {name: value[:, -count:] if value.ndim > 1 else value for name, value in found.items()}

    return Last


def test_a_class_that_tokenizes_otherwise_makes_another_cache(saved: Path, tmp_path: Path) -> None:
    for count in (3, 4, 3):
        assert loader(saved, tmp_path, tokenizer_fn=last_tokens(count)).load()["input_ids"].shape[1] == count
    assert len(list((tmp_path / "tokens/openai_summarize_tldr").iterdir())) == 2


def test_edits_stay_in_this_process(saved: Path, tmp_path: Path) -> None:
    made = loader(saved, tmp_path)
    made.load()["input_ids"].zero_()
    assert loader(saved, tmp_path).load()["input_ids"].any()
    assert rbtool.check(made.path).errors == 0


def shouted(dataset: Any) -> Any:
    columns = dataset[:]
    return datasets.Dataset.from_dict({name: [text.upper() for text in texts] for name, texts in columns.items()})


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 1400}, {"split": "test"},
        {"pre_tokenization_hook": shouted}, {"pre_tokenization_hook": lambda data: data},
        {"tokenizer_fn": type("Own", (PromptTensorDictTokenizer,), {})},
        {"tokenizer": tiny_tokenizer(pad_token="<eos>")}, {"tokenizer": tiny_tokenizer(padding_side="left")},
    ],
)  # fmt: skip
def test_another_request_is_another_cache(change: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    one, other = cache(saved, tmp_path), cache(saved, tmp_path, **change)
    assert one != other == cache(saved, tmp_path, **change)


def test_the_last_call_of_a_tokenizer_changes_no_name(saved: Path, tmp_path: Path) -> None:
    used = tiny_tokenizer()
    used("hello", padding="max_length", max_length=3, truncation=True)
    assert cache(saved, tmp_path) == cache(saved, tmp_path, tokenizer=used)


def test_other_data_of_the_same_name_is_another_cache(tmp_path: Path) -> None:
    places = [tmp_path / words / "mine" for words in ("one", "two")]
    for place in places:
        datasets.Dataset.from_dict({"text": [f"{place.parent.name} text"]}).save_to_disk(place)
    one, two = (cache(place, tmp_path, tokenizer_fn=TensorDictTokenizer) for place in places)
    assert one != two


def test_a_hook_changes_the_text(saved: Path, tmp_path: Path) -> None:
    found = loader(saved, tmp_path, max_length=2600, pre_tokenization_hook=shouted).load()
    row = plain_rows(saved, "train")[0]
    expected = tiny_tokenizer()((row["prompt"] + row["label"]).upper())["input_ids"]
    assert found["input_ids"][0, : len(expected)].tolist() == expected


@pytest.mark.parametrize(("size", "rows"), [(7, 7), (2000, 50)])
def test_validation_splits_are_cut_and_may_be_small(size: int, rows: int, saved: Path, tmp_path: Path) -> None:
    assert len(loader(saved, tmp_path, "valid", max_length=2600, valid_size=size).load()) == rows
    assert len(loader(saved, tmp_path, "test", max_length=2600, valid_size=size).load()) == 50


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(saved: Path, tmp_path: Path) -> None:
    given = tiny_tokenizer(pad_token="")
    found = loader(saved, tmp_path, tokenizer=given).load()
    assert given.pad_token is None
    assert torch.equal(
        found["input_ids"], loader(saved, tmp_path, tokenizer=tiny_tokenizer(pad_token="<eos>")).load()["input_ids"]
    )


def test_any_function_may_tokenize(saved: Path, tmp_path: Path) -> None:
    def lengths(tokenizer: Any, max_length: int) -> Any:
        return lambda sample: {"length": [len(text) for text in sample["prompt"]]}

    found = loader(saved, tmp_path, tokenizer_fn=lengths).load()
    assert found["length"].tolist() == [len(row["prompt"]) for row in plain_rows(saved, "train")]


@pytest.mark.parametrize("valid", [[1, 0, 1], [[True], [False], [True]], torch.tensor([1.0, 0.0, 2.0])])
def test_a_function_may_mark_what_is_valid(valid: Any, saved: Path, tmp_path: Path) -> None:
    def marked(tokenizer: Any, max_length: int) -> Any:
        return lambda sample: {"number": torch.arange(3), "valid_sample": valid}

    found = loader(saved, tmp_path, "valid", tokenizer_fn=marked, valid_size=3).load()
    assert found["number"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"a": [1, 2, 3], "b": [1, 2]}, "columns with different numbers of rows: {'a': 3, 'b': 2}"),
        ({"a": 3}, "{'a': None}"), ({"a": [1, 2], "valid_sample": [True]}, r"'valid_sample' has the shape \[1\]"),
        ({"valid_sample": [True]}, "expected tensors by name"), (None, "returned a NoneType"),
        ({"a": torch.zeros(3, dtype=torch.bfloat16)}, "torch.bfloat16, which NumPy does not support"),
    ],
)  # fmt: skip
def test_what_is_no_columns_is_refused(returned: Any, message: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=message):
        loader(saved, tmp_path, tokenizer_fn=lambda tokenizer, length: lambda sample: returned).load()
    assert not list(tmp_path.rglob("*@*"))


@pytest.mark.parametrize("returned", [None, [1, 2]])
def test_a_hook_that_returns_no_dataset_is_refused(returned: Any, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pre_tokenization_hook returned a"):
        loader(saved, tmp_path, pre_tokenization_hook=lambda dataset: returned).load()


def test_splits_and_folders_that_are_not_there(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="no split 'vaild'; did you mean 'valid'") as caught:
        loader(saved, tmp_path, "vaild").load()
    assert "train" in caught.value.hint
    with pytest.raises(DatasetNotFoundError, match="no folder"):
        loader(tmp_path / "nothing", tmp_path).load()
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match="was not written by save_to_disk"):
        loader(tmp_path / "folder", tmp_path).load()


def test_a_split_of_which_no_text_fits_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="all 50 texts of openai_summarize_tldr are longer than 5 tokens"):
        loader(saved, tmp_path, max_length=5).load()
    assert list(tmp_path.rglob("*")) == []


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "mine")
    refused = "mine (was not written by save_to_disk|has no texts in train)"  # datasets 4.0 writes a shard without rows
    with pytest.raises((FormatError, UsageError), match=refused):
        loader(tmp_path / "mine", tmp_path, tokenizer_fn=TensorDictTokenizer).load()


def test_a_failure_in_between_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    for kind, error in ((PromptTensorDictTokenizer, RuntimeError), (TensorDictTokenizer, MissingKeyError)):
        failing = type("Failing", (kind,), {"columns": mock.Mock(side_effect=error("no"))})
        with pytest.raises(error, match="no"):
            loader(saved, tmp_path, tokenizer_fn=failing).load()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_damaged_cache_is_refused(saved: Path, tmp_path: Path) -> None:
    file = cache(saved, tmp_path) / "input_ids.memmap"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UsageError, match="is damaged"):
        loader(saved, tmp_path).load()


def test_texts_without_tokens_are_left_out(tmp_path: Path) -> None:
    columns = {"prompt": ["hello", "", "x"], "label": [" world", "y", ""]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk(tmp_path / "mine")
    found = PromptData.from_dataset("train", tmp_path / "mine", 8, tmp_path, from_disk=True, tokenizer=tiny_tokenizer())
    assert found.attention_mask.sum(1).tolist() == [2, 1]
    assert found.labels is not None
    assert found.labels[0].tolist() == [*found.input_ids[0, :2].tolist(), *[-100] * 6]


def test_pairs_stay_together(tmp_path: Path) -> None:
    columns = {
        "prompt": ["p"] * 5,
        "chosen": ["one good text of words", "short", "same words here and there", "a b c d e", "v w x y z"],
        "rejected": ["one bad text of words", "a b c d e", "same words here and there", "f g h i j", "too short"],
    }
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "pairs")
    tokenizer = tiny_tokenizer()
    found = PairwiseDataset.from_dataset("train", tmp_path / "pairs", 24, tmp_path, from_disk=True, tokenizer=tokenizer)
    for data, name in ((found.chosen_data, "chosen"), (found.rejected_data, "rejected")):
        texts = [f"p\n{columns[name][at]}" for at in (0, 3)]
        expected = tokenizer(texts, padding="max_length", max_length=24, truncation=True, return_tensors="pt")
        assert torch.equal(data.input_ids, expected["input_ids"])
        assert torch.equal(data.attention_mask, expected["attention_mask"])


def test_pairs_need_their_columns(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingKeyError, match="no column 'chosen'; it has prompt, label"):
        PairwiseDataset.from_dataset("train", saved, 24, tmp_path, from_disk=True, tokenizer=tiny_tokenizer())


def test_columns_of_numbers_become_a_mapped_tensordict(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict(
        {"tokens": [[1, 2], [3, 4], [5, 6]], "size": [1, 2, 3], "ok": [True, False, True]}
    )
    make = TokenizedDatasetLoader.dataset_to_tensordict
    found = make(data, tmp_path / "a", prefix=("some", "place"), features=["tokens"], valid_mask_key="ok")
    assert found.batch_size == ()
    assert found["some", "place", "tokens"].tolist() == [[1, 2], [5, 6]]
    assert set(make(data, tmp_path / "b", valid_mask_key="ok").keys()) == {"tokens", "size"}
    assert make(data, tmp_path / "c", features=["tokens"], batch_dims=2).batch_size == (3, 2)
    assert TensorDict.load_memmap(tmp_path / "b")["size"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        ({"a": [[1], [1, 2]]}, {}, SchemaError, "rows of 'a' have different shapes"),
        ({"a": ["x"]}, {}, SchemaError, "expected numbers"),
        ({"a": [1]}, {"batch_dims": 2}, SchemaError, "do not share that many dimensions"),
        ({"a": [1]}, {"batch_dims": 0}, UsageError, "batch_dims is 0"),
        ({"a": [1]}, {"features": ["b"]}, MissingKeyError, "no column 'b'; it has a"),
        ({"a": [1]}, {"valid_mask_key": "b"}, MissingKeyError, "no column 'b'; it has a"),
        ({"a": [1], "b": [[1, 0]]}, {"valid_mask_key": "b"}, SchemaError, r"'b' has the shape \[1, 2\]"),
        ({"a": [1]}, {"features": []}, UsageError, "no columns to write"),
        ({"a": [1]}, {"valid_mask_key": "a"}, UsageError, "no columns to write"),
    ],
)  # fmt: skip
def test_columns_that_are_no_tensor_are_refused(
    columns: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    data = datasets.Dataset.from_dict(columns)
    with pytest.raises(error, match=message):
        TokenizedDatasetLoader.dataset_to_tensordict(data, tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_two_ways_to_name_a_tokenizer_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected one of them"):
        loader(saved, tmp_path, tokenizer_model_name="gpt2")
    with pytest.raises(UsageError, match="valid_size is 0"):
        loader(saved, tmp_path, valid_size=0)


def test_a_tokenizer_is_made_by_name(saved: Path, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "named")
    named = loader(saved, tmp_path, tokenizer=None, tokenizer_model_name=str(tmp_path / "named"))
    given = loader(saved, tmp_path)
    assert np.array_equal(named.load()["input_ids"], given.load()["input_ids"])


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(rbtool.RbtoolError, match="needs transformers, which is not installed here") as caught:
        TokenizedDatasetLoader("train", 4, "x", TensorDictTokenizer)
    assert caught.value.hint == "pip install 'rbtool[text]'"


GUIDE = Path(__file__).parents[3] / "docs/guides/text.md"
SCRIPT = """
import json, rbtool
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("gpt2")
prompts = rbtool.PromptData.from_dataset("valid", max_length=2600, tokenizer=tokenizer)
pairs = rbtool.PairwiseDataset.from_dataset("train", max_length=64, tokenizer=tokenizer)
batches = rbtool.get_dataloader(4, 2600, rbtool.PromptData, "cpu", split="test", tokenizer=tokenizer)
try:
    rbtool.PairwiseDataset.from_dataset("valid", max_length=64, tokenizer=tokenizer)
except FileNotFoundError as error:
    print(error, error.hint)
print(json.dumps([tokenizer.batch_decode(one, skip_special_tokens=True) for one in
      (prompts.input_ids, pairs.chosen_data.input_ids, pairs.rejected_data.input_ids, next(batches).input_ids)]))
"""


@pytest.fixture(scope="module")
def python(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Interpreter]]:
    """A machine whose folder has a tokenizer and a model of the name gpt2."""
    with Hub(lay_out_text_hub(tmp_path_factory.mktemp("hub"), saved)) as hub:
        machine = Machine(hub, tmp_path_factory.mktemp("machine"))
        tiny_tokenizer(pad_token="").save_pretrained(machine.folder / "gpt2")
        tiny_model(places=1024, pad_token_id=None).save_pretrained(machine.folder / "gpt2")
        running = Interpreter("rbtool.core.text.rollouts", "transformers", "datasets", environment=machine.variables)
        yield machine, running
        running.close()


def run(python: tuple[Machine, Interpreter], script: str, **more: str) -> list[str]:
    machine, interpreter = python
    ran = interpreter.run(script, cwd=machine.folder, environment={**machine.variables, **more})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.slow
def test_tokens_from_a_hub_then_without_the_network(python: tuple[Machine, Interpreter], saved: Path) -> None:
    for more in ({}, {"RBTOOL_OFFLINE": "1"}):
        error, decoded = run(python, SCRIPT, **more)
        assert "no split 'valid'; did you mean 'valid1'? there are train, valid1" in error
        prompts, chosen, rejected, batch = json.loads(decoded)
        assert prompts == [row["prompt"] + row["label"] for row in plain_rows(saved, "valid")]
        kept = [0, *range(3, 12)]
        assert chosen == [f"Summarise number {at}.\nthis one is good in {at} ways" for at in kept]
        assert rejected == [f"Summarise number {at}.\nthis other one is bad {at} times" for at in kept]
        assert set(batch) <= {row["prompt"] + row["label"] for row in plain_rows(saved, "test")}
    listed = {one["name"].partition("@")[0] for one in python[0].json("list")["datasets"]}
    assert "tokens:CarperAI/openai_summarize_tldr/valid-2600" in listed


def test_the_examples_of_the_guide(python: tuple[Machine, Interpreter]) -> None:
    blocks = re.findall(r"```py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        run(python, block)


GIVEN = Path(__file__).parents[2] / "data/hf_rlhf/tldr_batch/_tensordict"


@pytest.fixture(scope="module")
def source(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments that name the dataset on this disk and its tokenizer."""
    root = tmp_path_factory.mktemp("root")
    return {"dataset_name": saved, "root_dir": root, "from_disk": True, "tokenizer": tiny_tokenizer()}


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


def test_every_row_comes_once_an_epoch(source: dict[str, Any]) -> None:
    data = PromptData.from_dataset("train", max_length=SHORT, **source)
    rows = {tuple(row) for row in data.input_ids.tolist()}
    assert len(rows) == len(data)
    loader = get_dataloader(10, SHORT, PromptData, "cpu", infinite=False, **source)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(data) // 10
        drawn = [tuple(row) for batch in batches for row in batch.input_ids.tolist()]
        assert len(set(drawn)) == len(drawn) == len(batches) * 10
        assert set(drawn) <= rows


def test_endless_batches_are_of_the_class_on_the_device(source: dict[str, Any]) -> None:
    batches = get_dataloader(8, SHORT, PromptData, torch.device("cpu"), prefetch=2, split="valid", **source)
    drawn = list(itertools.islice(batches, 15))
    assert {(type(batch), batch.batch_size, batch.device) for batch in drawn} == {
        (PromptData, torch.Size([8]), torch.device("cpu"))
    }
    drawn[0].input_ids.zero_()
    stored = PromptData.from_dataset("valid", max_length=SHORT, **source)
    assert stored.input_ids.sum(1).min() > 0


def test_prompts_have_a_shorter_call(source: dict[str, Any]) -> None:
    batch = next(get_prompt_dataloader_tldr(8, SHORT, "cpu", split="valid", **source))
    assert (type(batch), batch.input_ids.shape) == (PromptData, (8, SHORT))


def test_a_batch_larger_than_the_dataset_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch_size is 1,000, and the dataset has"):
        get_dataloader(1000, SHORT, PromptData, "cpu", **source)


def test_a_class_without_a_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="RewardData'>, expected a class with from_dataset"):
        get_dataloader(2, SHORT, RewardData, "cpu")


def test_an_infinite_iterator_begins_again() -> None:
    assert list(itertools.islice(create_infinite_iterator([1, 2, 3]), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]
    for exhausted in ([], iter(())):
        with pytest.raises(UsageError, match="has no elements"):
            next(create_infinite_iterator(exhausted))
    once = create_infinite_iterator(iter([1]))
    assert next(once) == 1
    with pytest.raises(UsageError, match="only once"):
        next(once)
