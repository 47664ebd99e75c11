"""Compare `TensorDictTokenizer` and `PromptTensorDictTokenizer` with TorchRL's and with a plain call of transformers.

    python benchmarks/text.py [--rows 10000] [--rounds 5]

Texts are posts of the test data with their words in another order, tokenized to at most 550 tokens by a byte-level BPE
of 8,000 tokens that is trained on the spot. Sides take turns in one process; the figures are medians in microseconds,
and the other side's time divided by rbtool's. All sides must return the same tokens, which is checked first. Without
TorchRL (`pip install torchrl`) transformers alone is compared.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import torch
from shared import peers
from shared.claims import Claim, Claims, Watch, main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import rbtool

DATA = Path(__file__).parents[1] / "tests/data/hf_rlhf/openai_summarize_tldr.zip"
LENGTH = 550
Call = Callable[[], Any]


def posts() -> list[str]:
    """Read the posts of the test data."""
    with TemporaryDirectory() as folder, zipfile.ZipFile(DATA) as packed:
        packed.extractall(folder)
        found: list[str] = []
        for file in sorted(Path(folder).rglob("*.arrow")):
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                found += stream.read_all().column("prompt").to_pylist()
    return found


def trained(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer that pads with its EOS token, as GPT-2's is used."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def shuffled(texts: list[str], count: int) -> list[str]:
    """Make texts from shuffled words of other texts."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        words = texts[number % len(texts)].split(" ")
        draw.shuffle(words)
        found.append(" ".join(words))
    return found


def jobs(tokenizer: Any, texts: list[str], length: int) -> dict[str, dict[str, Call]]:
    """The sides of each comparison."""
    sample = {"text": texts, "prompt": texts, "label": [" A short summary of it."] * len(texts)}
    plain = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
    joined = [prompt + label for prompt, label in zip(sample["prompt"], sample["label"], strict=True)]
    found: dict[str, dict[str, Call]] = {
        "TensorDictTokenizer": {
            "ours": lambda: rbtool.TensorDictTokenizer(tokenizer, length)(sample),
            "transformers": lambda: tokenizer(texts, **plain),
        },
        "PromptTensorDictTokenizer": {
            "ours": lambda: rbtool.PromptTensorDictTokenizer(tokenizer, length)(sample),
            "transformers": lambda: (tokenizer(joined, **plain), tokenizer(texts))[0],
        },
    }
    for name in found if peers.buffers is not None else ():
        found[name]["TorchRL"] = lambda name=name: getattr(peers.buffers, name)(tokenizer, length)(sample)
    return found


def tokenizers(rows: int, watch: Watch) -> Claims:
    """Both tokenizers, over so many texts."""
    originals = posts()
    tokenizer, texts = trained(originals), shuffled(originals, rows)
    for name, sides in jobs(tokenizer, texts, LENGTH).items():
        made = {side: call() for side, call in sides.items()}
        if not all(torch.equal(one["input_ids"], made["ours"]["input_ids"]) for one in made.values()):
            raise SystemExit(f"{name}: the tokens differ")
        found = watch.medians(name, sides)
        yield from Claim.of(f"{name}, TorchRL", found, 1)
        yield from Claim.of(f"{name}, transformers", found, peer="transformers")


if __name__ == "__main__":
    main(__doc__, (tokenizers,), rows=10_000, rounds=5)
