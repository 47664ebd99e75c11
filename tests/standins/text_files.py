"""Text datasets, a tokenizer and a language model, all made on the spot."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

__all__ = [
    "COMPARISONS", "EOS", "PAD", "TLDR", "lay_out_text_hub", "plain_rows", "saved_tldr", "tiny_model", "tiny_tokenizer",
    "write_parquet",
]  # fmt: skip

DATA = Path(__file__).parents[1] / "data" / "hf_rlhf"
TLDR = "CarperAI/openai_summarize_tldr"
COMPARISONS = "CarperAI/openai_summarize_comparisons"
SPLITS = ("train", "valid", "test")
UNKNOWN, PAD, EOS = 0, 1, 2


def saved_tldr(folder: Path) -> Path:
    """Unpack the dataset that the datasets library saved."""
    with zipfile.ZipFile(DATA / "openai_summarize_tldr.zip") as packed:
        packed.extractall(folder)
    return folder / "openai_summarize_tldr"


def plain_rows(path: Path, split: str) -> list[dict[str, str]]:
    """Read a split with pyarrow alone."""
    with pa.memory_map(str(path / split / "data-00000-of-00001.arrow")) as mapped, pa.ipc.open_stream(mapped) as stream:
        rows: list[dict[str, str]] = stream.read_all().to_pylist()
    return rows


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, row_group_size=7)


def lay_out_text_hub(root: Path, saved: Path) -> Path:
    """Make repositories as the hub has them; return `root`."""
    for split in SPLITS:
        rows = plain_rows(saved, split)
        for number, part in enumerate((rows[:20], rows[20:])):
            name = f"{split}-0000{number}-of-00002-0123456789abcdef.parquet"
            columns = {key: [row[key] for row in part] for key in ("prompt", "label")}
            write_parquet(root / TLDR / "data" / name, columns)
    (root / TLDR / "README.md").write_text("---\nlicense: mit\n---\n")
    for split, count in (("train", 12), ("valid1", 5)):
        pairs = {
            "prompt": [f"Summarise number {number}." for number in range(count)],
            "chosen": [f"this one is good in {number} ways" for number in range(count)],
            "rejected": [f"this other one is bad {number} times" for number in range(count)],
        }
        pairs["rejected"][1] = pairs["chosen"][1]
        pairs["rejected"][2] = "too short"
        write_parquet(root / COMPARISONS / "data" / f"{split}-00000-of-00001.parquet", pairs)
    for config in ("main", "socratic"):
        write_parquet(root / "someone/maths" / config / "train-00000-of-00001.parquet", {"question": [f"{config}?"]})
    (root / "someone/csv").mkdir()
    (root / "someone/csv/rows.csv").write_text("a\n1\n")
    return root


@functools.cache
def _trained() -> str:
    """Train a byte-level BPE on a few sentences; its tokens are those of single bytes and of frequent words."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<unk>", "<pad>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["the cat sat on the mat", "hello world, this is a text", "summarise this"], trainer)
    trained: str = made.to_str()
    return trained


def tiny_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of transformers; by default with a pad token of its own."""
    from transformers import PreTrainedTokenizerFast  # takes two seconds, and few test processes come to these tests

    named = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>", **options}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), **{name: value for name, value in named.items() if value}
    )


def tiny_model(seed: int = 0, places: int = 64, **options: Any) -> GPT2LMHeadModel:
    """Make a GPT-2 with random weights, of two layers and 16 numbers a token, for the tokens of `tiny_tokenizer`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    named = {"eos_token_id": EOS, "bos_token_id": EOS, "pad_token_id": PAD, **options}
    config = GPT2Config(
        vocab_size=320, n_positions=places, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5, **named
    )
    return GPT2LMHeadModel(config)
