"""Does the same with the histories of rbtool and of TorchRL, and prints as JSON how often, and what differs.

Where rbtool does better on purpose, such as conversations of different lengths that grow, nothing is compared.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rbtool

sys.path.append(str(Path(__file__).parents[2] / "standins"))
from text_files import tiny_tokenizer

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from torchrl.data import History  # noqa: E402

compared, different = 0, []


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, as plain objects, or the error that it raises."""
    try:
        return plain(call())
    except Exception as error:
        return error


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, rbtool.History | History):
        return [list(value.shape), value.tolist()]
    if hasattr(value, "batch_size"):
        if value.ndim:
            return [plain(row) for row in value.unbind(0)]
        return {key: value[key].tolist() for key in sorted(value.keys())}
    return [plain(one) for one in value] if isinstance(value, list) else value


def same(call: Callable[..., Any], *arguments: Any) -> None:
    """Call a function with the class of each library, and these arguments."""
    global compared
    compared += 1
    ours, theirs = (outcome(lambda kind=kind: call(kind, *arguments)) for kind in (rbtool.History, History))
    if isinstance(ours, Exception) and isinstance(theirs, Exception) and isinstance(ours, type(theirs)):
        return
    if isinstance(ours, Exception) or isinstance(theirs, Exception) or ours != theirs:
        different.append(f"{call.__name__}{arguments}: {ours!r} and {theirs!r}")


def write(kind: Any, messages: Any, ask: dict[str, Any]) -> Any:
    return kind.from_chats(messages).apply_chat_template(**ask)


def write_alone(kind: Any, ask: dict[str, Any]) -> Any:
    return kind.from_chats(SHORT)[0].apply_chat_template(**ask)


def read(kind: Any, text: Any, ask: dict[str, Any]) -> Any:
    return kind.from_text(text, **ask)


def make(kind: Any, chats: Any) -> Any:
    return kind.from_chats(chats)


def grow(kind: Any, first: Any, second: Any, way: str, how: dict[str, Any]) -> Any:
    return getattr(first(kind), way)(second(kind), **how)


SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"}]
LONG = [{"role": "system", "content": "S"}, *SHORT, {"role": "user", "content": "B"}]
CALLS = [
    *SHORT[:1],
    {"role": "assistant", "content": "so", "tool_calls": [{"name": "f", "arguments": {"a": 'é"'}}]},
    {"role": "tool", "content": "R1"},
    {"role": "tool", "content": "R2"},
]
CHATS: list[Any] = [SHORT, LONG, [*SHORT, {"role": "<none>", "content": ""}], [SHORT, LONG]]
NAMES = ("chatml_format", "qwen", "dialogpt", "falcon", "deepseek", "llama")
OPTIONS: list[dict[str, Any]] = [
    {}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True},
    {"continue_final_message": True}, {"tokenize": True}, {"return_tensors": "pt"},
    {"tokenize": True, "return_dict": True}, {"return_assistant_tokens_mask": True},
    {"return_assistant_tokens_mask": True, "padding": "max_length", "max_length": 30, "truncation": True},
    {"return_assistant_tokens_mask": True, "return_dict": False}, {"tokenize": False, "return_tensors": "pt"},
]  # fmt: skip
OWN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def named(name: str, **options: Any) -> Any:
    tokenizer = tiny_tokenizer(bos_token="<bos>", **options)
    tokenizer.name_or_path = name
    return tokenizer


def templates() -> None:
    tokenizer = named("none")
    for messages, name, options in itertools.product(CHATS, NAMES, OPTIONS):
        same(write, messages, {"tokenizer": tokenizer, "chat_template_name": name, **options})
    for messages in CHATS:
        for name in ("Qwen/Qwen2.5", "microsoft/DialoGPT", "x/falcon-7b", "DeepSeek-R1", "meta/Llama", "gpt2"):
            same(write, messages, {"tokenizer": named(name)})
        same(write, messages, {"tokenizer": named("none", chat_template=OWN)})
        ask = {"tokenizer": tokenizer, "chat_template": OWN}
        same(write, messages, {**ask, "return_assistant_tokens_mask": True})
    for name in ("chatml_format", "qwen", "llama", "unknown"):
        same(write, CALLS, {"tokenizer": tokenizer, "chat_template_name": name})
    for options in ({}, {"tokenize": True}, {"tokenize": True, "return_dict": True}):
        same(write_alone, {"tokenizer": tokenizer, **options})


TEXTS = {
    "chatml_format": [
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\njunk\n<|im_start|>assistant\nunfin",
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>assistant\n  sp  <|endoftext|>", "abc",
        ('<|im_start|>assistant\nhey\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\nbad\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"),
        "<|im_start|>user Hi<|im_end|>", "<|im_start|>\nx<|im_end|>", "",
    ],
    "llama": [
        "<|begin_of_text|><|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\nunf",
        "<|header_start|>user<|header_end|>\n\n<|eot|><|header_start|>assistant<|header_end|>\n\nA<|eot|>", "abc",
        "<|header_start|>user<|header_end|>Hi<|eot|>",
    ],
    "deepseek": ["<bos>User: Hi\n\nAssistant: Yo!<eos>", "User: Hi\n\nAssistant:", "User: a<b>c", "abc", ""],
    "dialogpt": ["User: Hi\nAssistant: Yo!\nline", "abc", "  User:  Hi  ", "assistant: x", ""],
    "falcon": [""],
}  # fmt: skip


def texts() -> None:
    for name, kinds in {**TEXTS, "qwen": TEXTS["chatml_format"]}.items():
        for text in kinds:
            same(read, text, {"chat_template_name": name})
    chatml = "<|im_start|>user\nHi<|im_end|>\n"
    for name in ("Qwen", "meta/LLaMA", "gpt2"):
        same(read, chatml, {"tokenizer": named(name)})
    same(read, chatml, {"chat_template_name": "x"})
    for text in ([], 3, [chatml, chatml + chatml]):
        same(read, text, {})


def even(kind: Any, rows: int) -> Any:
    return kind.from_chats([[{"role": "user", "content": f"{row}{n}"} for n in range(2)] for row in range(rows)])


ITEMS: list[Callable[[Any], Any]] = [
    lambda kind: kind(role="a", content="b"), lambda kind: kind(role=["a"] * 2, content=["b", "c"], batch_size=2),
    lambda kind: kind.from_chats(SHORT), lambda kind: even(kind, 2),
]  # fmt: skip


def growth() -> None:
    for first, second, way, dim, inplace in itertools.product(
        ITEMS, ITEMS, ("append", "extend"), range(-3, 3), (True, False)
    ):
        same(grow, first, second, way, {"dim": dim, "inplace": inplace})
    for chats in ([], [[]], [{"role": "a", "content": "b", "c": 1}], [{"role": "a"}], [{"content": "b"}], [3], None):
        same(make, chats)


templates()
texts()
growth()
print(json.dumps({"compared": compared, "different": different}))
