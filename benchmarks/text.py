"""Compare `TensorDictTokenizer` and `PromptTensorDictTokenizer` with TorchRL's and with a plain call of transformers.

    python benchmarks/text.py [--texts 10000] [--max-length 550] [--rounds 5] [--limit 1.0]

Texts are posts of the test data with their words in another order, tokenized by a byte-level BPE of 8,000 tokens that
is trained on the spot. Sides are interleaved in one process; the figures are medians in seconds and their ratio to
ours. All sides have the same tokens, which is compared first. Exits with 1 if a ratio to TorchRL is below the limit.
Without TorchRL (`pip install torchrl`) transformers alone is compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import rbtool

try:
    from torchrl import data as peer
except ImportError:
    peer = None

DATA = Path(__file__).parents[1] / "tests/data/hf_rlhf/openai_summarize_tldr.zip"
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
    """Make texts of the words of others."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        words = texts[number % len(texts)].split(" ")
        draw.shuffle(words)
        found.append(" ".join(words))
    return found


def medians(sides: dict[str, Call], rounds: int) -> dict[str, float]:
    """Time all sides in turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def jobs(tokenizer: Any, texts: list[str], length: int) -> dict[str, dict[str, Call]]:
    """The sides of each comparison."""
    sample = {"text": texts, "prompt": texts, "label": [" A short summary of it."] * len(texts)}
    plain = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
    joined = [prompt + label for prompt, label in zip(sample["prompt"], sample["label"], strict=True)]
    found: dict[str, dict[str, Call]] = {
        "TensorDictTokenizer": {
            "rbtool": lambda: rbtool.TensorDictTokenizer(tokenizer, length)(sample),
            "transformers": lambda: tokenizer(texts, **plain),
        },
        "PromptTensorDictTokenizer": {
            "rbtool": lambda: rbtool.PromptTensorDictTokenizer(tokenizer, length)(sample),
            "transformers": lambda: (tokenizer(joined, **plain), tokenizer(texts))[0],
        },
    }
    for name in found if peer is not None else ():
        found[name]["TorchRL"] = lambda name=name: getattr(peer, name)(tokenizer, length)(sample)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--max-length", type=int, default=550)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.0)
    options = parser.parse_args()
    originals = posts()
    tokenizer, texts, slow = trained(originals), shuffled(originals, options.texts), False
    for name, sides in jobs(tokenizer, texts, options.max_length).items():
        made = {side: call() for side, call in sides.items()}
        if not all(torch.equal(one["input_ids"], made["rbtool"]["input_ids"]) for one in made.values()):
            raise SystemExit(f"{name}: the tokens differ")
        found = medians(sides, options.rounds)
        for side, seconds in found.items():
            print(f"{name:26} {side:13} {seconds:7.3f} s   {seconds / found['rbtool']:5.2f} x")
        slow |= found.get("TorchRL", float("inf")) / found["rbtool"] < options.limit
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
