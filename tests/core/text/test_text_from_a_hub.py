"""Text that comes from a hub on loopback: tokens, with and without the network, and the examples of the guide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from download_machine import Machine
from forked_scripts import Interpreter
from hub import Hub
from text_files import lay_out_text_hub, plain_rows, saved_tldr, tiny_model, tiny_tokenizer

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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tldr(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def python(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Interpreter]]:
    """A machine whose folder has a tokenizer and a model of the name gpt2."""
    with Hub(lay_out_text_hub(tmp_path_factory.mktemp("hub"), saved)) as hub:
        machine = Machine(hub, tmp_path_factory.mktemp("machine"))
        tiny_tokenizer(pad_token="").save_pretrained(machine.folder / "gpt2")
        tiny_model(places=1024, pad_token_id=None).save_pretrained(machine.folder / "gpt2")
        running = Interpreter("rbtool.core.text.prompts", "transformers", "datasets", environment=machine.variables)
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
    assert len(blocks) == 3
    for block in blocks:
        run(python, block)
